//! Suites that start clusters: each test has a cluster of its own, with its own ports, bridge and subnet
//! ([`support::Cluster`]), so tests run side by side. One binary instead of one per suite: cargo runs binaries one after the
//! other, and each would link the whole product once more.
#![allow(clippy::unwrap_used)]

#[path = "../support/dra.rs"]
mod dra;
#[path = "../support/driver.rs"]
mod driver;
#[path = "../support/logind.rs"]
mod logind;
#[path = "../support/machine.rs"]
mod machine;
#[path = "../support/plugin.rs"]
mod plugin;
#[path = "../support/pod_resources.rs"]
mod pod_resources;
#[path = "../support/proxy.rs"]
mod proxy;
#[path = "../support/mod.rs"]
mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

mod canary;
mod certificates;
mod containers;
mod credentials;
mod cri_faults;
mod csi;
mod csi_errors;
mod disks;
mod e2e;
mod faults;
mod figures;
mod images;
mod joining;
mod lifecycle;
mod logs;
mod machines;
mod mounts;
mod news;
mod node;
mod pressure;
mod reconstruction;
mod recovery;
mod resize;
mod secrets;
mod services;
mod streams;
mod supervision;
mod users;
mod volumes;

/// For a test that starts or ends hundreds of processes at once, or that depends on their number on this machine: only one
/// at a time.
fn many_processes() -> MutexGuard<'static, ()> {
    static PROCESSES: Mutex<()> = Mutex::new(());
    PROCESSES.lock().unwrap_or_else(PoisonError::into_inner)
}
