//! Address management: which addresses there are (`range`), who has them (`store`, with `owners` as its index), what is wrong
//! with that (`audit`), and delegation to an IPAM plugin.

pub mod audit;
pub mod delegate;
pub mod owners;
pub mod range;
pub mod store;
