//! Container logs on this machine: read, followed and rotated.

pub mod logfile;
pub(in crate::host) mod rotate;
