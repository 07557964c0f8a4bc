//! Decisions. No files, sockets, clock, environment, randomness or logging: time and seeds are
//! arguments, and the same input gives the same output.
//!
//! What a pod's life looks like is in `lifecycle`; what to do next in `actions`; what to report in
//! `status`; how pods become runtime messages in `config`, `env` and `dns`.

pub mod actions;
pub mod admit;
pub mod backoff;
pub mod behind;
pub mod bucket;
pub mod certificates;
pub mod cgroup;
pub mod claims;
pub mod config;
pub mod correlate;
pub mod csi;
pub mod digest;
pub mod disks;
pub mod dns;
pub mod env;
mod env_file;
pub mod explain;
pub mod exposition;
pub mod features;
pub mod image_gc;
pub mod images;
pub mod journal;
pub mod keyring;
pub mod lifecycle;
pub mod local_storage;
pub mod log_query;
pub mod logs;
pub mod meter;
pub mod node_affinity;
pub mod observed;
pub mod pod;
pub mod preempt;
pub mod probe;
pub mod pulled;
pub mod qos;
pub mod quantity;
pub mod query;
pub mod references;
pub mod resize;
pub mod resources;
pub mod selinux;
pub mod serving;
pub mod signing;
pub mod status;
pub mod sysctl;
pub mod taints;
pub mod time;
pub mod users;
pub mod volumes;
