//! Pods: where they come from, their workers, what the workers carry out, and what is reported.

pub mod dead_containers;
pub mod dispatch;
pub mod hooks;
pub mod inbox;
pub mod journal;
pub mod mirror;
pub mod orphans;
pub mod probing;
pub mod pulse;
pub mod relist;
pub mod sources;
pub mod starts;
pub mod static_uids;
pub mod status;
pub mod sync;
pub mod worker;
