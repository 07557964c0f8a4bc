//! Further machines for a cluster: network namespaces on a bridge, each with its own containerd, agent and service proxy.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

use crate::support::{Cluster, command_with_timeout, has_exited, holdfast};

fn ip(arguments: &str) {
    let output = Command::new("ip")
        .args(arguments.split_whitespace())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {arguments}: {errors}");
}

/// Both outputs of a program.
pub(crate) fn text(output: &Output) -> String {
    let of = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    of(&output.stdout) + &of(&output.stderr)
}

/// Whether leftovers are kept for an examination by hand.
fn keeps() -> bool {
    std::thread::panicking() && std::env::var_os("HOLDFAST_KEEP").is_some()
}

/// A bridge of this machine, which is the first machine of the network and the gateway of the others. Removed on drop.
pub(crate) struct Network {
    number: u16,
}

impl Network {
    /// The network of the cluster with this number.
    pub(crate) fn new(number: u16) -> Network {
        let network = Network { number };
        network.remove();
        let bridge = network.bridge();
        ip(&format!("link add {bridge} type bridge"));
        ip(&format!(
            "address add {}/24 dev {bridge}",
            network.address(1)
        ));
        ip(&format!("link set {bridge} up"));
        network
    }

    fn bridge(&self) -> String {
        format!("hf-m{}", self.number)
    }

    /// The address of a machine; this machine is 1.
    pub(crate) fn address(&self, host: u8) -> String {
        format!("198.18.{}.{host}", self.number)
    }

    fn remove(&self) {
        // An interrupted run leaves the bridge behind; usually there is none.
        let _ = Command::new("ip")
            .args(["link", "delete", &self.bridge()])
            .output();
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if !keeps() {
            self.remove();
        }
    }
}

/// A machine of a network. Its processes, data and namespace are removed on drop.
pub(crate) struct Machine {
    /// The name of its network namespace, and that of its files.
    pub(crate) name: String,
    /// The end of its cable on the bridge.
    link: String,
}

impl Machine {
    pub(crate) fn new(network: &Network, name: &str, host: u8) -> Machine {
        let machine = Machine {
            name: format!("t-{name}"),
            link: format!("hf-m{}-{host}", network.number),
        };
        // An interrupted run leaves its machine behind.
        machine.remove();
        let (name, link) = (&machine.name, &machine.link);
        ip(&format!("netns add {name}"));
        ip(&format!(
            "link add {link} type veth peer name eth0 netns {name}"
        ));
        ip(&format!("link set {link} master {} up", network.bridge()));
        ip(&format!(
            "-n {name} address add {}/24 dev eth0",
            network.address(host)
        ));
        ip(&format!("-n {name} link set eth0 up"));
        ip(&format!("-n {name} link set lo up"));
        ip(&format!(
            "-n {name} route add default via {}",
            network.address(1)
        ));
        machine
    }

    /// Puts a router between the machine and the network: the machine's address is in a network of its own then, 198.19.n.0/24.
    pub(crate) fn behind_router(self, network: &Network, host: u8) -> Machine {
        let (name, outside) = (&self.name, network.address(host));
        let router = self.router();
        let inside = |host: u8| format!("198.19.{}.{host}", network.number);
        ip(&format!("netns add {router}"));
        ip(&format!(
            "-n {name} link set eth0 netns {router} name outside"
        ));
        ip(&format!("-n {router} address add {outside}/24 dev outside"));
        ip(&format!("-n {router} link set outside up"));
        ip(&format!(
            "-n {router} route add default via {}",
            network.address(1)
        ));
        ip(&format!(
            "-n {router} link add inside type veth peer name eth0 netns {name}"
        ));
        ip(&format!(
            "-n {router} address add {}/24 dev inside",
            inside(1)
        ));
        ip(&format!("-n {router} link set inside up"));
        ip(&format!(
            "-n {name} address add {}/24 dev eth0",
            inside(host)
        ));
        ip(&format!("-n {name} link set eth0 up"));
        ip(&format!("-n {name} route add default via {}", inside(1)));
        ip(&format!("route add {}/24 via {outside}", inside(0)));
        let forward = ["busybox", "sysctl", "-w", "net.ipv4.ip_forward=1"];
        let forward = Command::new("nsenter")
            .arg(format!("--net=/run/netns/{router}"))
            .args(forward)
            .output()
            .unwrap();
        assert!(forward.status.success(), "{}", text(&forward));
        self
    }

    /// The name of the router's network namespace.
    fn router(&self) -> String {
        format!("{}-r", self.name)
    }

    /// A program on this machine. Only the network is another one: `ip netns exec` would hide the cgroups.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = command_with_timeout("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.name));
        command.arg(program);
        command
    }

    /// Runs `holdfast` on this machine.
    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.command(holdfast()).args(arguments).output().unwrap()
    }

    /// Joins a cluster with the words of `holdfast token create --print-join`.
    pub(crate) fn join(&self, words: &[String], node: &str, more: &[&str]) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let own = ["--name", &self.name, "--node-name", node];
        let output = self.run(&[&words[..], &own, more].concat());
        assert!(output.status.success(), "{}", text(&output));
    }

    pub(crate) fn data(&self) -> PathBuf {
        PathBuf::from(format!("/var/lib/holdfast-{}", self.name))
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        PathBuf::from(format!("/run/holdfast-{}", self.name))
    }

    /// Takes the machine off the network.
    pub(crate) fn unplug(&self) {
        ip(&format!("link set {} down", self.link));
    }

    /// Ends the machine as a power cut does: its cable is down, and no component and no supervisor runs any more.
    pub(crate) fn cut_power(&self) {
        self.unplug();
        for part in ["proxy", "agent", "containerd"] {
            let state = std::fs::read(self.run_dir().join(format!("{part}.state")));
            let state: Value =
                serde_json::from_slice(&state.unwrap_or_default()).unwrap_or_default();
            if let Some(supervisor) = state["supervisor"][0].as_i64() {
                kill(i32::try_from(supervisor).unwrap());
            }
            let own = std::fs::read_to_string(self.run_dir().join(format!("{part}.pid"))).unwrap();
            kill(own.split(' ').next().unwrap().parse().unwrap());
        }
    }

    fn remove(&self) {
        if std::path::Path::new("/run/netns").join(&self.name).exists() {
            let output = self.run(&["down", "--purge", "--name", &self.name]);
            for namespace in [&self.name, &self.router()] {
                let _ = Command::new("ip")
                    .args(["netns", "delete", namespace])
                    .output();
            }
            // A connection without a peer keeps the namespace for minutes, and the cable with it.
            let _ = Command::new("ip")
                .args(["link", "delete", &self.link])
                .output();
            if !std::thread::panicking() {
                assert!(output.status.success(), "{}", text(&output));
            }
        }
    }
}

fn kill(pid: i32) {
    let target = nix::unistd::Pid::from_raw(pid);
    nix::sys::signal::kill(target, nix::sys::signal::SIGKILL).unwrap();
    let deadline = std::time::Instant::now() + crate::support::condition_timeout();
    while !has_exited(pid) {
        assert!(std::time::Instant::now() < deadline, "{pid} does not exit");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if !keeps() {
            self.remove();
        }
    }
}

/// The words after `holdfast` of the command with which machines join a cluster, with a new token.
pub(crate) fn join_words(cluster: &Cluster) -> Vec<String> {
    let server = format!("{}:{}", cluster.node_address(), 16_400 + cluster.number);
    let create = ["token", "create", "--print-join", "--server", &server];
    let command = cluster.holdfast(&[&create[..], &["--ttl", "1h"]].concat());
    command
        .split_whitespace()
        .skip(1)
        .map(str::to_owned)
        .collect()
}
