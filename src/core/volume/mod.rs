//! Volumes: how a pod's volume is resolved, where it is located, and the content of its files.

pub mod attachment;
pub mod certificates;
pub mod claims;
pub mod csi;
pub mod disks;
pub mod expansion;
pub mod local_storage;
pub mod migrated;
pub mod nested;
pub mod payload;
pub mod permissions;
pub mod resize;
pub mod resolved;
pub mod selinux;
pub mod usage_schedule;
