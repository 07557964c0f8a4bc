//! Decisions without side effects: no files, sockets, clock, environment, randomness or logging. Time and seeds are
//! arguments, so the same input gives the same output.
//!
//! There is a directory for each domain, named as in `agent` and `host`: `pod`, `volume`, `image`, `node`, `serving`, `services`,
//! `policies`.
//! Modules for several domains are next to these directories.
//!
//! Arithmetic must not overflow: operators would panic or wrap, and numbers in pods are unbounded.
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
pub mod network;
pub mod node;
pub mod pod;
pub mod policies;
pub mod quantity;
pub mod repeated;
pub mod schedule;
pub mod selector;
pub mod services;
pub mod serving;
pub mod time;
pub mod trace;
pub mod trail;
pub mod varying;
pub mod version;
pub mod volume;
