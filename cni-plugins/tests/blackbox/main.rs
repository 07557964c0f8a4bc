//! The plugins as black boxes: executed as a runtime does, in network namespaces of the test's own, the
//! result checked on the wire format and in the kernel. `CNI_BIN` points the suite at another directory.
#![allow(clippy::unwrap_used)]

mod addresses;
mod chained;
mod dhcp;
mod firewall;
mod firewalld;
mod hostile;
mod interop;
mod leaks;
mod links;
mod pairs;
mod portmap;
mod protocol;
#[path = "../../../tests/support/skip.rs"]
mod skip;
#[path = "../../../tests/support/vm.rs"]
#[allow(dead_code)]
mod vm;
mod world;
