//! The only module that calls the kernel and systemd: mounts, cgroups, directory handles, properties of the machine.

pub mod addresses;
pub mod atomic_dir;
pub mod beneath;
pub mod blocking_calls;
pub mod cgroup;
pub mod clock;
mod descent;
pub mod failure;
pub mod fifo;
pub mod file;
pub mod kmsg;
pub mod link;
pub mod logind;
pub mod loop_device;
pub mod machine;
pub mod memory;
pub mod memory_notice;
pub mod meter;
pub mod mount;
pub mod netns;
pub mod ownership;
pub mod ports;
pub mod process;
pub mod quota;
pub mod removal;
pub mod selinux;
pub mod service;
#[cfg(test)]
#[path = "../../tests/support/skip.rs"]
mod skip;
pub mod systemd;
pub mod topology;
pub mod unsent;
pub mod usage;
pub mod verbosity;
pub mod watch;
