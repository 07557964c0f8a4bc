//! The behaviour of the API: requests and their responses. In process, without TLS; the end-to-end tests use kubectl.
#![allow(clippy::unwrap_used)]

mod access;
mod cronjobs;
mod deletion;
mod disk;
mod escalation;
mod fuzz;
mod hostile;
mod ingress;
mod jobs;
mod join;
mod reads;
mod refusals;
mod server;
mod services;
mod statuses;
mod tables;
mod updates;
mod workloads;
mod writes;
