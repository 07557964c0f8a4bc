//! The only callers of the kernel and of systemd: mounts, cgroups, directories below a handle, facts about the machine.

pub mod addresses;
pub mod atomic_dir;
pub mod beneath;
pub mod cgroup;
pub mod clock;
mod descent;
pub mod failure;
pub mod file;
pub mod kmsg;
pub mod link;
pub mod logind;
pub mod machine;
pub mod memory;
pub mod memory_notice;
pub mod meter;
pub mod mount;
pub mod ownership;
pub mod patient;
pub mod ports;
pub mod process;
pub mod quota;
pub mod removal;
pub mod service;
pub mod systemd;
pub mod topology;
pub mod usage;
pub mod watch;
