//! Black-box tests of the plugins. The tests execute them as a runtime does, in separate network namespaces,
//! and check the wire format and the kernel's state. `CNI_BIN` selects another directory of plugins.
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
