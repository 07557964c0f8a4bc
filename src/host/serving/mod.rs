//! Container logs on this machine: reading, following, rotating.

pub mod logfile;
pub(in crate::host) mod rotate;
