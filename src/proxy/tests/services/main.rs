//! The data plane of services against the kernel, in network namespaces: traffic through a node to endpoints on a bridge, repairs
//! after foreign changes, and restarts.
#![allow(clippy::unwrap_used)]

#[path = "../../../net/tests/kernel/namespace.rs"]
#[allow(dead_code)]
mod namespace;
mod repair;
mod scale;
#[path = "../../../../tests/support/skip.rs"]
mod skip;
mod traffic;
mod world;
