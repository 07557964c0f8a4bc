//! `firewall` with a real firewalld, on a separate message bus.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use super::world::World;

fn wait(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

struct Firewalld {
    world: World,
    children: Vec<Child>,
}

impl Firewalld {
    fn new() -> Firewalld {
        let mut firewalld = Firewalld {
            world: World::new(),
            children: vec![],
        };
        let bus = firewalld.address();
        let mut daemon = Command::new("dbus-daemon");
        daemon.args(["--session", "--nofork", "--address", &bus]);
        let configuration = firewalld.world.data.path().join("firewalld");
        std::fs::create_dir(&configuration).unwrap();
        std::fs::write(
            configuration.join("firewalld.conf"),
            "FirewallBackend=nftables\n",
        )
        .unwrap();
        let mut service = Command::new("ip");
        service
            .args([
                "netns",
                "exec",
                &firewalld.world.host,
                "firewalld",
                "--nofork",
                "--nopid",
                "--system-config",
            ])
            .arg(&configuration);
        service
            .arg("--log-file")
            .arg(firewalld.world.data.path().join("firewalld.log"))
            .env("DBUS_SYSTEM_BUS_ADDRESS", &bus);
        for command in [&mut daemon, &mut service] {
            firewalld.children.push(
                command
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .expect("firewalld is installed (make test installs it)"),
            );
            // firewalld needs the bus when it starts.
            let socket = firewalld.world.data.path().join("bus");
            wait("the bus listens", || {
                std::os::unix::net::UnixStream::connect(&socket).is_ok()
            });
        }
        wait("firewalld has started", || {
            firewalld.command(&["--state"]).trim() == "running"
        });
        firewalld
    }

    fn address(&self) -> String {
        format!("unix:path={}", self.world.data.path().join("bus").display())
    }

    fn command(&self, arguments: &[&str]) -> String {
        let output = Command::new("firewall-cmd")
            .args(arguments)
            .env("DBUS_SYSTEM_BUS_ADDRESS", self.address())
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Firewalld {
    fn drop(&mut self) {
        for child in self.children.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn a_running_firewalld_gets_the_containers_addresses() {
    let firewalld = Firewalld::new();
    let (world, bus) = (&firewalld.world, firewalld.address());
    let env = [("DBUS_SYSTEM_BUS_ADDRESS", bus.as_str())];
    let previous = json!({"interfaces": [{"name": "br0"}, {"name": "eth0", "sandbox": world.netns()}],
        "ips": [{"address": "10.198.1.2/24", "interface": 1}, {"address": "fd00:198:1::2/64", "interface": 1}]});
    // Used by default if it is running, and on request.
    for extra in [
        json!({}),
        json!({"backend": "firewalld", "firewalldZone": "internal"}),
    ] {
        let zone = if extra.get("backend").is_some() {
            "internal"
        } else {
            "trusted"
        };
        let sources = || firewalld.command(&[&format!("--zone={zone}"), "--list-sources"]);
        let config = World::chained("1.1.0", "firewall", &previous, extra);
        for _ in 0..2 {
            world.ok_with("firewall", "ADD", &config, &env);
            assert_eq!(
                sources().split_whitespace().collect::<Vec<_>>(),
                ["10.198.1.2/32", "fd00:198:1::2/128"]
            );
        }
        world.ok_with("firewall", "CHECK", &config, &env);
        world.ok_with("firewall", "STATUS", &config, &env);
        firewalld.command(&[&format!("--zone={zone}"), "--remove-source=10.198.1.2/32"]);
        assert!(
            world.refused("firewall", "CHECK", &config, &env)["msg"]
                .as_str()
                .unwrap()
                .contains("10.198.1.2")
        );
        for _ in 0..2 {
            world.ok_with("firewall", "DEL", &config, &env);
            assert_eq!(sources().trim(), "");
        }
    }
    assert!(
        !world.ruleset().contains("CNI-FORWARD"),
        "the iptables tables are unchanged"
    );
    // The zone does not exist, and no partial state remains.
    let config = World::chained(
        "1.1.0",
        "firewall",
        &previous,
        json!({"backend": "firewalld", "firewalldZone": "nosuch"}),
    );
    let error = world.refused("firewall", "ADD", &config, &env);
    assert!(
        error["msg"].as_str().unwrap().contains("INVALID_ZONE"),
        "{error}"
    );
    // Without firewalld.
    let none = [("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nonexistent")];
    let error = world.refused("firewall", "ADD", &config, &none);
    assert!(
        error["msg"]
            .as_str()
            .unwrap()
            .contains("systemctl start firewalld"),
        "{error}"
    );
    assert_eq!(
        world.refused("firewall", "STATUS", &config, &none)["code"],
        50
    );
}
