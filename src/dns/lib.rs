//! The cluster's DNS server: the records of services and pods (Kubernetes DNS specification 1.1.0), and a caching forwarder for
//! all other names.
//!
//! [`Zone`] has the records; the owner of the watches writes them, and the server's tasks read them. [`serve`] answers queries
//! over UDP and TCP. Decisions are pure: `query` and `wire` read packets, `records` and `answer` compose answers of the cluster,
//! `forward::cache`, `forward::admission` and `forward::reply` take time as an argument. Sockets are in `server` and `forward`.
//!
//! hickory-proto encodes the answers of the cluster. Queries and the replies of upstreams are read by this crate (`wire`), so
//! that a reply stays the bytes that the upstream sent and an answer from the cache needs no allocation per record.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod answer;
mod forward;
mod message;
mod query;
mod random;
mod records;
mod resolv_conf;
mod server;
mod sockets;
mod wire;
mod zone;

pub use server::{ServeError, Settings, serve};
pub use zone::Zone;
