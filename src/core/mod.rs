//! Decisions. No files, sockets, clock, environment, randomness or logging: time and seeds are
//! arguments, and the same input gives the same output.
//!
//! One directory for each domain, with the same names as in `agent` and `host`: `pod`, `volume`,
//! `image`, `node`, `serving`. What several domains use stands beside them.
//!
//! No arithmetic that can overflow: an operator panics or wraps, and numbers from pods have no bounds.
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

pub mod backoff;
pub mod bucket;
pub mod correlate;
pub mod cpuset;
pub mod digest;
pub mod fault;
pub mod image;
pub mod indexes;
pub mod json;
pub mod lock;
pub mod meta;
pub mod node;
pub mod pod;
pub mod quantity;
pub mod repeated;
pub mod schedule;
pub mod selector;
pub mod serving;
pub mod time;
pub mod varying;
pub mod version;
pub mod volume;
