//! Network namespaces of a test, which are deleted on drop.

use std::fs::File;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use holdfast_net::netns;

use crate::skip;

static COUNT: AtomicU32 = AtomicU32::new(0);

/// Runs a program of iproute2 or nftables and returns its output.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

pub fn ip(arguments: &[&str]) -> String {
    run("ip", arguments)
}

pub struct Namespace {
    pub name: String,
    file: File,
}

impl Namespace {
    /// A new namespace with a loopback link; `None` without root, which the test then reports.
    pub fn new() -> Option<Namespace> {
        if skip::needs_root() {
            return None;
        }
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("hfn-{}-{number}", std::process::id());
        ip(&["netns", "add", &name]);
        let file = File::open(format!("/run/netns/{name}")).unwrap();
        let namespace = Namespace { name, file };
        namespace.ip(&["link", "set", "lo", "up"]);
        Some(namespace)
    }

    /// Runs `work` in the namespace. Sockets that it opens stay there.
    pub fn inside<T>(&self, work: impl FnOnce() -> T) -> T {
        netns::inside(&self.file, work).unwrap()
    }

    /// Runs `ip` in the namespace.
    pub fn ip(&self, arguments: &[&str]) -> String {
        let mut all = vec!["-n", self.name.as_str()];
        all.extend(arguments);
        ip(&all)
    }

    /// Runs `nft` in the namespace.
    pub fn nft(&self, arguments: &[&str]) -> String {
        self.inside(|| run("nft", arguments))
    }

    /// Connects the namespace to another one: a veth pair, each end with an address (`10.9.1.1/24`) and a name.
    pub fn connect(
        &self,
        (own, address): (&str, &str),
        other: &Namespace,
        (peer, peer_address): (&str, &str),
    ) {
        self.ip(&[
            "link",
            "add",
            own,
            "type",
            "veth",
            "peer",
            "name",
            peer,
            "netns",
            &other.name,
        ]);
        for (namespace, link, address) in [(self, own, address), (other, peer, peer_address)] {
            let nodad: &[&str] = if address.contains(':') {
                &["nodad"]
            } else {
                &[]
            };
            namespace.ip(&[&["address", "add", address, "dev", link], nodad].concat());
            namespace.ip(&["link", "set", link, "up"]);
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip")
            .args(["netns", "delete", &self.name])
            .status();
    }
}

/// Whether a test of what `nft` displays must be skipped because nft is not installed; reports why.
pub fn needs_nft() -> bool {
    let is_missing = Command::new("nft").arg("--version").output().is_err();
    if is_missing {
        skip::skipped("nft is not installed");
    }
    is_missing
}
