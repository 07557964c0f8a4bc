//! Address management: which addresses there are (`range`), who has them (`store`, with `owners` as its index), and what is wrong
//! with that (`audit`).

pub mod audit;
pub mod owners;
pub mod range;
pub mod store;
