//! The server with real sockets on the loopback device, and upstreams that lose, delay, forge and truncate replies.
#![allow(clippy::unwrap_used)]

mod clients;
mod cluster;
mod faults;
mod forwarding;
mod upstream;
