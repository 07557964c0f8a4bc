//! host-local when plugins, containers or the machine crash.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};

use holdfast_cni::ipam::audit::{Finding, Request, audit, repair};

use super::world::{World, comes_true, plugins};

/// The parts of a machine that host-local reads, in a separate mount namespace.
struct Machine {
    dir: tempfile::TempDir,
    boot: u32,
}

const CAPACITY: usize = 13;

impl Machine {
    fn new() -> Machine {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
        mount(
            None::<&str>,
            "/",
            None::<&str>,
            MsFlags::MS_REC | MsFlags::MS_PRIVATE,
            None::<&str>,
        )
        .unwrap();
        let machine = Machine {
            dir: tempfile::tempdir().unwrap(),
            boot: 0,
        };
        std::fs::create_dir(machine.dir.path().join("netns")).unwrap();
        std::fs::write(machine.dir.path().join("boot"), "boot 0").unwrap();
        mount(
            Some(&machine.dir.path().join("boot")),
            "/proc/sys/kernel/random/boot_id",
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )
        .unwrap();
        machine
    }

    fn reboot(&mut self) {
        self.boot += 1;
        std::fs::write(self.dir.path().join("boot"), format!("boot {}", self.boot)).unwrap();
        for entry in std::fs::read_dir(self.dir.path().join("netns")).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("networks")
    }

    /// A file instead of a container's namespace: host-local never opens it.
    fn netns(&self, container: &str) -> PathBuf {
        self.dir.path().join("netns").join(container)
    }

    fn start(&self, verb: &str, container: &str, more: Value) -> Child {
        let mut config = json!({"cniVersion": "1.1.0", "name": "net", "type": "host-local",
            "ipam": {"type": "host-local", "dataDir": self.data(), "subnet": "10.9.9.0/28"}});
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        let mut command = Command::new(plugins().join("host-local"));
        command
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", container)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", plugins());
        command.env("CNI_NETNS", self.netns(container));
        if container.starts_with("pod") {
            command.env("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_UID=u");
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(config.to_string().as_bytes())
            .unwrap();
        child
    }

    fn call(&self, verb: &str, container: &str, more: Value) -> Output {
        self.start(verb, container, more)
            .wait_with_output()
            .unwrap()
    }

    /// Kills the plugin while it runs.
    fn cut_off(&self, verb: &str, container: &str, after: Duration) {
        let mut child = self.start(verb, container, json!({}));
        std::thread::sleep(after);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn audit(&self, arguments: &[&str]) -> (bool, String) {
        let output = Command::new(plugins().join("host-local"))
            .arg("audit")
            .arg("--data-dir")
            .arg(self.data())
            .args(["--older-than", "0"])
            .args(arguments)
            .output()
            .unwrap();
        (
            output.status.success(),
            String::from_utf8(output.stdout).unwrap(),
        )
    }
}

fn addresses(dir: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|e| e.file_name().into_string().unwrap())
        .filter(|n| n.parse::<std::net::IpAddr>().is_ok())
        .collect()
}

/// A random number generator with a fixed seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

fn in_a_thread_of_its_own(work: impl FnOnce() + Send) {
    std::thread::scope(|scope| scope.spawn(work).join()).unwrap();
}

#[test]
fn no_address_is_leaked_or_allocated_twice() {
    in_a_thread_of_its_own(|| {
        let mut machine = Machine::new();
        let mut dice = Dice(42);
        let mut live: BTreeMap<String, String> = BTreeMap::new();
        let mut killed = 0;
        for round in 0..2000 {
            let pick = |dice: &mut Dice, live: &BTreeMap<String, String>| {
                let place = usize::try_from(dice.roll(live.len().max(1) as u64)).unwrap();
                live.keys().nth(place).cloned()
            };
            match dice.roll(100) {
                0..50 if live.len() < CAPACITY => {
                    let container = format!("c{round}");
                    std::fs::write(machine.netns(&container), "").unwrap();
                    if dice.roll(10) < 4 {
                        killed += 1;
                        machine.cut_off("ADD", &container, Duration::from_micros(dice.roll(2500)));
                        // The runtime gives up: it calls DEL in half of the cases, and removes the container in all.
                        if dice.roll(2) == 0 {
                            assert!(machine.call("DEL", &container, json!({})).status.success());
                        }
                        std::fs::remove_file(machine.netns(&container)).unwrap();
                        continue;
                    }
                    let output = machine.call("ADD", &container, json!({}));
                    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
                    assert!(
                        output.status.success(),
                        "round {round}, {} of {CAPACITY} live: {result}",
                        live.len()
                    );
                    let address = result["ips"][0]["address"].as_str().unwrap().to_owned();
                    assert!(
                        !live.values().any(|a| *a == address),
                        "round {round}: {address} was allocated twice"
                    );
                    live.insert(container, address);
                }
                0..75 => {
                    let Some(container) = pick(&mut dice, &live) else {
                        continue;
                    };
                    if dice.roll(10) == 0 {
                        killed += 1;
                        machine.cut_off("DEL", &container, Duration::from_micros(dice.roll(2500)));
                    }
                    assert!(machine.call("DEL", &container, json!({})).status.success());
                    std::fs::remove_file(machine.netns(&container)).unwrap();
                    live.remove(&container);
                }
                75..90 => {
                    // A container is removed without DEL.
                    let Some(container) = pick(&mut dice, &live) else {
                        continue;
                    };
                    std::fs::remove_file(machine.netns(&container)).unwrap();
                    live.remove(&container);
                }
                90..95 => {
                    let keep: Vec<Value> = live
                        .keys()
                        .map(|c| json!({"containerID": c, "ifname": "eth0"}))
                        .collect();
                    assert!(
                        machine
                            .call("GC", "", json!({"cni.dev/valid-attachments": keep}))
                            .status
                            .success()
                    );
                    assert_eq!(
                        addresses(&machine.data().join("net")).len(),
                        live.len(),
                        "round {round}: GC keeps the addresses of live containers only"
                    );
                }
                95..98 => {
                    machine.reboot();
                    live.clear();
                }
                _ => {
                    let (_, table) = machine.audit(&["--mend"]);
                    assert_eq!(
                        addresses(&machine.data().join("net")).len(),
                        live.len(),
                        "round {round}: {table}"
                    );
                }
            }
            // Every container still has its addresses.
            let held = addresses(&machine.data().join("net"));
            let missing = live
                .iter()
                .find(|(_, a)| !held.contains(a.trim_end_matches("/28")));
            assert_eq!(missing, None, "round {round}");
        }
        assert!(killed > 200, "{killed} were killed");
        let names: Vec<String> = live.keys().cloned().collect();
        for container in names {
            assert!(machine.call("DEL", &container, json!({})).status.success());
        }
        machine.audit(&["--mend"]);
        assert!(addresses(&machine.data().join("net")).is_empty());
    });
}

#[test]
fn an_audit_reports_and_repairs_inconsistencies() {
    in_a_thread_of_its_own(|| {
        let machine = Machine::new();
        let dir = machine.data().join("net");
        for container in ["alive", "gone"] {
            std::fs::write(machine.netns(container), "").unwrap();
            assert!(machine.call("ADD", container, json!({})).status.success());
        }
        std::fs::remove_file(machine.netns("gone")).unwrap();
        // Reservations of the reference: for a container in the runtime's result cache, and for an unknown one.
        std::fs::write(dir.join("10.9.9.7"), "theirs\r\neth0").unwrap();
        std::fs::write(dir.join("10.9.9.8"), "nobodys\r\neth0").unwrap();
        let cache = machine.dir.path().join("results");
        std::fs::create_dir(&cache).unwrap();
        std::fs::write(
            cache.join("net-theirs-eth0"),
            json!({"kind": "cniCacheV1", "netns": "/nonexistent"}).to_string(),
        )
        .unwrap();
        let cache = cache.to_str().unwrap();
        let (well, table) = machine.audit(&["--cache-dir", cache]);
        let row = |address: &str| {
            table
                .lines()
                .find(|l| l.contains(address))
                .unwrap_or_default()
                .to_owned()
        };
        assert!(!well, "{table}");
        assert!(
            row("10.9.9.2").contains("used")
                && row("10.9.9.3").contains("leaked: its network namespace no longer exists"),
            "{table}"
        );
        assert!(
            row("10.9.9.7").contains("leaked") && row("10.9.9.8").contains("unknown"),
            "{table}"
        );
        let (well, table) = machine.audit(&["--cache-dir", cache, "--network=net", "--mend"]);
        assert!(well && table.matches("released").count() == 2, "{table}");
        assert_eq!(
            addresses(&dir),
            ["10.9.9.2", "10.9.9.8"].map(str::to_owned).into()
        );
        let (well, table) = machine.audit(&["--cache-dir", cache]);
        assert!(well && !table.contains("leaked"), "{table}");
        for wrong in [&["--network", "nosuch"][..], &["--frob"], &["--network"]] {
            assert!(!machine.audit(wrong).0, "{wrong:?}");
        }
    });
}

#[test]
fn a_full_disk_leaks_no_address_and_releases_all() {
    in_a_thread_of_its_own(|| {
        let machine = Machine::new();
        std::fs::create_dir(machine.data()).unwrap();
        mount(
            Some("tmpfs"),
            &machine.data(),
            Some("tmpfs"),
            MsFlags::empty(),
            Some("size=256k"),
        )
        .unwrap();
        for container in ["c1", "c2"] {
            std::fs::write(machine.netns(container), "").unwrap();
            assert!(machine.call("ADD", container, json!({})).status.success());
        }
        let dir = machine.data().join("net");
        std::fs::write(dir.join("10.9.9.7"), "theirs\r\neth0").unwrap();
        let mut filler = std::fs::File::create(machine.data().join("filler")).unwrap();
        while filler.write_all(&[0; 4096]).is_ok() {}
        std::fs::write(machine.netns("c3"), "").unwrap();
        let refused = machine.call("ADD", "c3", json!({}));
        assert!(
            String::from_utf8_lossy(&refused.stdout).contains("No space left"),
            "{refused:?}"
        );
        assert_eq!(
            addresses(&dir),
            ["10.9.9.2", "10.9.9.3", "10.9.9.7"]
                .map(str::to_owned)
                .into()
        );
        // The index does not contain the reference's reservation and cannot be updated.
        for container in ["theirs", "c1"] {
            assert!(
                machine.call("DEL", container, json!({})).status.success(),
                "{container}"
            );
        }
        assert_eq!(addresses(&dir), ["10.9.9.3"].map(str::to_owned).into());
        assert!(
            machine
                .call("GC", "", json!({"cni.dev/valid-attachments": []}))
                .status
                .success()
        );
        assert!(addresses(&dir).is_empty());
        drop(filler);
        std::fs::remove_file(machine.data().join("filler")).unwrap();
        assert!(machine.call("ADD", "c3", json!({})).status.success());
        let none = None::<&str>;
        let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        // A program that another test has just forked keeps files open until its execve.
        assert!(comes_true(|| mount(
            none,
            &machine.data(),
            none,
            read_only,
            none
        )
        .is_ok()));
        let refused = machine.call("ADD", "c4", json!({}));
        assert!(
            String::from_utf8_lossy(&refused.stdout).contains("Read-only"),
            "{refused:?}"
        );
        nix::mount::umount2(&machine.data(), nix::mount::MntFlags::MNT_DETACH).unwrap();
    });
}

#[test]
fn a_full_pool_reuses_addresses_of_deleted_containers() {
    in_a_thread_of_its_own(|| {
        let machine = Machine::new();
        for i in 0..CAPACITY {
            let container = format!("c{i}");
            std::fs::write(machine.netns(&container), "").unwrap();
            assert!(machine.call("ADD", &container, json!({})).status.success());
        }
        std::fs::write(machine.netns("last"), "").unwrap();
        let full = machine.call("ADD", "last", json!({}));
        assert!(
            String::from_utf8_lossy(&full.stdout).contains("no IP addresses available"),
            "{full:?}"
        );
        let status = machine.call("STATUS", "", json!({}));
        assert!(
            String::from_utf8_lossy(&status.stdout).contains("\"code\":50"),
            "{status:?}"
        );
        std::fs::remove_file(machine.netns("c5")).unwrap();
        assert!(machine.call("STATUS", "", json!({})).status.success());
        let taken = machine.call("ADD", "last", json!({}));
        assert!(
            String::from_utf8_lossy(&taken.stdout).contains("10.9.9.7/28"),
            "{taken:?}"
        );
        // The error for a requested address that is taken names its owner.
        std::fs::write(machine.netns("requests"), "").unwrap();
        let request = machine.call(
            "ADD",
            "requests",
            json!({"runtimeConfig": {"ips": ["10.9.9.4"]}}),
        );
        assert!(
            String::from_utf8_lossy(&request.stdout).contains("eth0 of container c2 has it"),
            "{request:?}"
        );
    });
}

/// The containers whose addresses a repair has released.
fn released(findings: &[Finding]) -> Vec<&str> {
    let repaired = findings.iter().filter(|f| f.repaired);
    repaired.map(|f| f.container.as_str()).collect()
}

#[test]
fn a_repair_releases_only_addresses_of_failed_sandboxes() {
    in_a_thread_of_its_own(|| {
        let machine = Machine::new();
        let request = |min_age: u64| Request {
            data_dir: machine.data(),
            min_age: Duration::from_secs(min_age),
            ..Request::default()
        };
        let all = ["pod-failed", "pod-listed", "pod-alive", "podman", "other"];
        for container in all {
            std::fs::write(machine.netns(container), "").unwrap();
            assert!(machine.call("ADD", container, json!({})).status.success());
        }
        // The runtime could not call DEL, because a plugin of the chain or the configuration is missing.
        for container in ["pod-failed", "pod-listed", "other"] {
            std::fs::remove_file(machine.netns(container)).unwrap();
        }
        let theirs = machine.data().join("net/10.9.9.12");
        std::fs::write(&theirs, "pod-theirs\r\neth0").unwrap();
        let listed = BTreeSet::from(["pod-listed".to_owned(), "podman".to_owned()]);
        let repaired = |min_age: u64| repair(&request(min_age), "net", &listed).unwrap();
        assert_eq!(
            released(&repaired(300)),
            [""; 0],
            "the container's ADD may still run"
        );
        assert_eq!(released(&repaired(0)), ["pod-failed"]);
        assert_eq!(released(&repaired(0)), [""; 0]);
        let left = addresses(&machine.data().join("net"));
        assert_eq!(left.len(), 5, "{left:?}");
        std::fs::remove_file(machine.netns("pod-alive")).unwrap();
        let audited = audit(&Request {
            repair: true,
            ..request(300)
        });
        assert_eq!(
            released(&audited.unwrap()),
            [""; 0],
            "an audit follows the same rule"
        );
        let nowhere = repair(&request(0), "nosuch", &listed).unwrap();
        assert_eq!(released(&nowhere), [""; 0]);
    });
}

/// Starts and stops pods sequentially. No other pod has a pod's address while it runs.
fn pods_come_and_go(world: &World, config: &Value, name: &str, live: &Mutex<BTreeSet<String>>) {
    let dir = Path::new(config["ipam"]["dataDir"].as_str().unwrap()).join("net");
    for i in 0..PODS_OF_A_WORLD {
        let container = format!("{name}-{i}");
        let env = [
            ("CNI_CONTAINERID", container.as_str()),
            ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_UID=u"),
        ];
        let result = world.ok_with("bridge", "ADD", config, &env);
        let address = result["ips"][0]["address"].as_str().unwrap();
        let address = address.split('/').next().unwrap().to_owned();
        assert!(
            live.lock().unwrap().insert(address.clone()),
            "{address} was allocated twice"
        );
        let owner = std::fs::read_to_string(dir.join(&address)).unwrap_or_default();
        assert_eq!(owner, format!("{container}\r\neth0"), "{address} was lost");
        live.lock().unwrap().remove(&address);
        world.ok_with("bridge", "DEL", config, &env);
    }
}

/// All worlds together start and stop 200 pods.
const PODS_OF_A_WORLD: usize = 50;

#[test]
fn a_repair_releases_no_address_of_starting_and_stopping_pods() {
    let worlds = [(); 4].map(|()| World::new());
    let config = worlds[0].config("1.1.0", json!({}));
    let (live, done) = (Mutex::new(BTreeSet::new()), AtomicBool::new(false));
    let request = Request {
        data_dir: worlds[0].data.path().to_owned(),
        repair: true,
        ..Request::default()
    };
    std::thread::scope(|scope| {
        let repairs = scope.spawn(|| {
            let mut rounds = 0;
            while !done.load(Ordering::Relaxed) {
                // As if the runtime listed no sandbox.
                let repaired = repair(&request, "net", &BTreeSet::new()).unwrap();
                let audited = audit(&request).unwrap();
                assert_eq!(released(&repaired), [""; 0]);
                assert_eq!(released(&audited), [""; 0]);
                rounds += 1;
            }
            rounds
        });
        let pods = worlds.iter().enumerate().map(|(i, world)| {
            let (config, live) = (&config, &live);
            scope.spawn(move || pods_come_and_go(world, config, &format!("w{i}"), live))
        });
        let ended: Vec<_> = pods
            .collect::<Vec<_>>()
            .into_iter()
            .map(|t| t.join())
            .collect();
        done.store(true, Ordering::Relaxed);
        assert!(ended.iter().all(Result::is_ok));
        assert!(repairs.join().unwrap() > 10);
    });
    assert_eq!(worlds[0].taken(), [""; 0]);
}
