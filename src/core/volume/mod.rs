//! Volumes: what a volume of a pod resolves to, where it lies, what its files contain.

pub mod attachment;
pub mod certificates;
pub mod claims;
pub mod counting;
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
