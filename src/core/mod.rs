//! Decisions. No files, sockets, clock, environment, randomness or logging: time and seeds are
//! arguments, and the same input gives the same output.

pub mod images;
pub mod node_affinity;
pub mod qos;
pub mod quantity;
pub mod resources;
