//! Address management: which addresses there are (`range`), who has them (`store`, with `owners` as its index), and what is wrong
//! with that (`audit`, which also asks what runtimes know of attachments, `results`).

pub mod audit;
pub mod owners;
pub mod range;
pub mod results;
pub mod store;
