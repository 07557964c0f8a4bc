//! Address management: which addresses there are (`range`), who has them (`store`), and delegation to
//! an IPAM plugin.

pub mod delegate;
pub mod range;
pub mod store;
