//! Container logs on this machine: reading, following, rotating.

pub mod logfile;
pub(crate) mod rotate;
