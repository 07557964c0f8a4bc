//! Address management: `range` defines the available addresses, `store` keeps the reservations, with `owners` as its
//! index. `audit` finds inconsistent reservations, for which `results` reads the attachments that runtimes have cached.

pub mod audit;
pub mod owners;
pub mod range;
pub mod results;
pub mod store;
