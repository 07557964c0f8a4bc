//! The API's manners: what is asked in which way, and what the answer is. In process, without TLS; the
//! end-to-end tests have kubectl in front.
#![allow(clippy::unwrap_used)]

mod access;
mod cronjobs;
mod deletion;
mod disk;
mod escalation;
mod fuzz;
mod hostile;
mod jobs;
mod reads;
mod refusals;
mod server;
mod updates;
mod writes;
