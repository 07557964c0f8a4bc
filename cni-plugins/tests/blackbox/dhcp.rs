//! `dhcp` with a real server (busybox) at the other end of a veth pair.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::firewall::reaches;
use super::world::{World, ip, plugins};

/// A host with a veth pair, a DHCP server at the other end, and the daemon.
struct Network {
    world: World,
    far: World,
    server: Option<Child>,
    daemon: Option<Child>,
}

fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl Network {
    /// Starts a network with this number of addresses and this lease time in seconds.
    fn new(addresses: u8, seconds: u32) -> Network {
        let (world, far) = (World::new(), World::new());
        ip(&[
            "-n",
            &world.host,
            "link",
            "add",
            "phys0",
            "type",
            "veth",
            "peer",
            "name",
            "wire",
            "netns",
            &far.host,
        ]);
        ip(&["-n", &world.host, "link", "set", "phys0", "up"]);
        ip(&["-n", &far.host, "link", "set", "wire", "up"]);
        ip(&[
            "-n",
            &far.host,
            "addr",
            "add",
            "10.198.8.1/24",
            "dev",
            "wire",
        ]);
        let mut network = Network {
            world,
            far,
            server: None,
            daemon: None,
        };
        let dir = network.far.data.path();
        let leases = dir.join("leases");
        std::fs::write(&leases, "").unwrap();
        let settings = format!(
            "start 10.198.8.10\nend 10.198.8.{}\ninterface wire\nmax_leases {addresses}\nlease_file {}\npidfile {}\nauto_time 1\nmin_lease 1\noption subnet 255.255.255.0\noption router 10.198.8.1\noption lease {seconds}\noption staticroutes 10.50.0.0/16 10.198.8.2, 0.0.0.0/0 10.198.8.1\n",
            9 + addresses,
            leases.display(),
            dir.join("pid").display()
        );
        std::fs::write(dir.join("udhcpd.conf"), settings).unwrap();
        network.serve();
        network.start();
        network
    }

    /// Starts the server and waits until it listens. The client would have to retransmit a message sent before.
    fn serve(&mut self) {
        let mut command = Command::new("ip");
        command
            .args([
                "netns",
                "exec",
                &self.far.host,
                "busybox",
                "udhcpd",
                "-f",
                "-S",
            ])
            .arg(self.far.data.path().join("udhcpd.conf"));
        let server = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let sockets = format!("/proc/{}/net/udp", server.id());
        self.server = Some(server);
        // Port 67, in the namespace that the process has entered by now.
        wait("the server listens", || {
            std::fs::read_to_string(&sockets).is_ok_and(|all| all.contains(":0043 "))
        });
    }

    fn socket(&self) -> PathBuf {
        self.world.data.path().join("dhcp.sock")
    }

    fn start(&mut self) {
        let mut command = Command::new(plugins().join("dhcp"));
        command
            .args(["daemon", "-timeout", "8s", "-socketpath"])
            .arg(self.socket());
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.world.data.path().join("log"))
            .unwrap();
        self.daemon = Some(
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(log)
                .spawn()
                .unwrap(),
        );
        wait("the daemon listens", || {
            std::os::unix::net::UnixStream::connect(self.socket()).is_ok()
        });
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.world.data.path().join("log")).unwrap()
    }

    fn config(&self, version: &str) -> Value {
        let ipam = json!({"type": "dhcp", "daemonSocketPath": self.socket(), "provide": [{"option": "host-name", "value": "pod"}, {"option": "12", "fromArg": "K8S_POD_NAME"}],
            "request": [{"option": "6"}], "priority": 5});
        json!({"cniVersion": version, "name": "net", "type": "macvlan", "master": "phys0", "ipam": ipam})
    }

    fn lease_count(&self) -> usize {
        std::fs::read_dir(self.socket().with_extension("leases"))
            .unwrap()
            .count()
    }

    fn has_address(&self) -> bool {
        ip(&["-n", &self.world.container, "addr", "show", "eth0"]).contains("10.198.8.10/24")
    }
}

fn end(child: &mut Option<Child>) {
    if let Some(mut child) = child.take() {
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Some(pid) = std::fs::read_to_string(self.far.data.path().join("pid"))
            .ok()
            .and_then(|p| p.trim().parse().ok())
        {
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(pid),
                nix::sys::signal::Signal::SIGKILL,
            );
        }
        end(&mut self.server);
        end(&mut self.daemon);
    }
}

#[test]
fn leases_are_acquired_and_released() {
    let network = Network::new(1, 3600);
    let (world, env) = (
        &network.world,
        [("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAME=web")],
    );
    for version in ["0.1.0", "0.4.0", "1.1.0"] {
        let config = network.config(version);
        let result = world.ok_with("macvlan", "ADD", &config, &env);
        if version >= "0.3.0" {
            assert_eq!(
                (&result["ips"][0]["address"], &result["ips"][0]["gateway"]),
                (&json!("10.198.8.10/24"), &json!("10.198.8.1")),
                "{result}"
            );
            assert_eq!(
                (
                    &result["routes"][0]["dst"],
                    &result["routes"][0]["priority"]
                ),
                (&json!("10.50.0.0/16"), &json!(5))
            );
        }
        let routes = ip(&["-n", &world.container, "route"]);
        assert!(
            routes.contains("10.50.0.0/16 via 10.198.8.2")
                && routes.contains("default via 10.198.8.1"),
            "{routes}"
        );
        assert!(reaches(&world.container, "10.198.8.1"));
        let with = World::with_previous(&config, &result);
        if version >= "0.4.0" {
            world.ok("macvlan", "CHECK", &with);
        }
        for _ in 0..2 {
            world.ok("macvlan", "DEL", &config);
        }
        assert_eq!(network.lease_count(), 0, "{}", network.log());
        if version >= "0.4.0" {
            assert!(
                world.refused("dhcp", "CHECK", &with, &[])["msg"]
                    .as_str()
                    .unwrap()
                    .contains("no lease")
            );
        }
    }
    let mut gc = network.config("1.1.0");
    world.ok("macvlan", "STATUS", &gc);
    world.ok("macvlan", "ADD", &gc);
    // There is only one address: ADD for a second container fails after the timeout, not later.
    let other = World::new();
    let refusal = world.refused(
        "macvlan",
        "ADD",
        &gc,
        &[("CNI_CONTAINERID", "c2"), ("CNI_NETNS", &*other.netns())],
    );
    assert!(
        refusal["msg"]
            .as_str()
            .unwrap()
            .contains("no DHCP server answered within 8 s"),
        "{refusal}"
    );
    assert_eq!(refusal["code"], 11, "{refusal}");
    assert!(!ip(&["-n", &other.container, "link"]).contains("eth0"));
    gc["cni.dev/valid-attachments"] = json!([{"containerID": "c1", "ifname": "eth0"}]);
    world.ok("macvlan", "GC", &gc);
    assert_eq!(network.lease_count(), 1);
    gc["cni.dev/valid-attachments"] = json!([]);
    world.ok("macvlan", "GC", &gc);
    assert_eq!(network.lease_count(), 0);
    world.ok("macvlan", "DEL", &gc);
    // Errors name the invalid field.
    let mut config = network.config("1.1.0");
    config["ipam"]["request"] = json!([{"option": "colour"}]);
    assert!(
        world.refused("macvlan", "ADD", &config, &[])["msg"]
            .as_str()
            .unwrap()
            .contains("colour")
    );
    config["ipam"]["daemonSocketPath"] = "/nonexistent".into();
    // Only STATUS returns the code for an unavailable plugin; other verbs return "try again later".
    for (verb, code) in [("ADD", 11), ("DEL", 11), ("STATUS", 50)] {
        let refusal = world.refused("macvlan", verb, &config, &[]);
        assert_eq!(refusal["code"], code, "{verb}: {refusal}");
        let text = refusal["msg"].as_str().unwrap();
        assert!(text.contains("start it (dhcp daemon)"), "{verb}: {text}");
    }
}

/// Without the message, the server would keep the only address for an hour.
#[test]
fn del_releases_the_lease_on_the_server() {
    let network = Network::new(1, 3600);
    let (world, config) = (&network.world, network.config("1.1.0"));
    for container in ["c1", "c2", "c3"] {
        let env = [("CNI_CONTAINERID", container)];
        let result = world.ok_with("macvlan", "ADD", &config, &env);
        let address = &result["ips"][0]["address"];
        assert_eq!(address, "10.198.8.10/24", "{container}: {}", network.log());
        // As after some minutes without packets to the server, which at first does not answer for its hardware address.
        ip(&["-n", &world.container, "neigh", "flush", "dev", "eth0"]);
        let resolves = |on: &str| ip(&["-n", &network.far.host, "link", "set", "wire", "arp", on]);
        resolves("off");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                resolves("on");
            });
            world.ok_with("macvlan", "DEL", &config, &env);
        });
        assert!(!network.log().contains("failed"), "{}", network.log());
    }
}

#[test]
fn leases_are_renewed_outlive_the_daemon_and_expire_without_their_server() {
    // Long enough for a busy machine to renew the lease in time.
    let mut network = Network::new(1, 8);
    let config = network.config("1.1.0");
    network.world.ok("macvlan", "ADD", &config);
    let dir = network.socket().with_extension("leases");
    let since = || {
        let file = std::fs::read_dir(&dir).unwrap().next()?.unwrap().path();
        serde_json::from_str::<Value>(&std::fs::read_to_string(file).ok()?).ok()?["since"].as_u64()
    };
    let first = since();
    wait("the lease is renewed", || since() > first);
    // After SIGKILL, the next daemon resumes.
    end(&mut network.daemon);
    network.start();
    let now = since();
    wait("the next daemon renews the lease, too", || since() > now);
    assert!(network.has_address());
    // The server was stopped: the address is removed when the lease expires.
    let pid = std::fs::read_to_string(network.far.data.path().join("pid")).unwrap();
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(pid.trim().parse().unwrap()),
        nix::sys::signal::Signal::SIGKILL,
    )
    .unwrap();
    end(&mut network.server);
    wait("the interface goes down", || {
        ip(&["-n", &network.world.container, "link", "show", "eth0"]).contains("state DOWN")
    });
    wait("the daemon logs the end and holds no lease", || {
        let log = network.log();
        log.contains("has expired")
            && log.contains("renewing the lease")
            && network.lease_count() == 0
    });
    network.world.ok("macvlan", "DEL", &config);
}

#[test]
fn the_daemon_accepts_a_socket_opened_by_systemd() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dhcp.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" daemon -socketpath \"$1\" 3<&0",
        ])
        .arg(plugins().join("dhcp"))
        .arg(&path);
    let mut daemon = Some(
        command
            .stdin(std::os::fd::OwnedFd::from(listener))
            .stdout(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let config = json!({"cniVersion": "1.1.0", "name": "net", "type": "dhcp", "ipam": {"type": "dhcp", "daemonSocketPath": path}});
    World::new().ok("dhcp", "STATUS", &config);
    end(&mut daemon);
}

#[test]
fn the_lease_of_a_deleted_container_is_dropped() {
    let network = Network::new(1, 8);
    network.world.ok("macvlan", "ADD", &network.config("1.1.0"));
    ip(&["netns", "del", &network.world.container]);
    wait("the lease is dropped", || network.lease_count() == 0);
    wait("the daemon logs why", || {
        network.log().contains("no longer exists")
    });
    ip(&["netns", "add", &network.world.container]);
}
