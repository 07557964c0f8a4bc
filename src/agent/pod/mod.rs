//! Pods: their sources, their workers, the operations of workers, and the published status.

pub(crate) mod asset;
pub mod dead_containers;
pub mod dispatch;
pub mod heartbeats;
pub mod hooks;
pub(crate) mod inbox;
pub mod journal;
pub mod mirror;
pub mod orphans;
pub mod probing;
pub mod relist;
pub mod sources;
pub mod starts;
pub mod static_uids;
pub mod status;
pub mod sync;
pub mod table;
pub mod worker;
