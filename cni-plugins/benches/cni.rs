//! `make bench-cni`: compares these plugins with those of the distribution. Both are called as
//! a runtime calls them, alternately, in a network namespace of the benchmark. Times last from
//! the start of a process to its exit and are medians of thirty rounds; the ratio matters.
#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use holdfast_net::netlink::Socket;
use serde_json::{Value, json};

const ROUNDS: usize = 30;
const AT_ONCE: usize = 50;
const LEASES: usize = 10_000;

fn run(program: &str, arguments: &[&str], input: &str) {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A set of plugins with its own host namespace, which is deleted on drop.
struct Set {
    bin: PathBuf,
    host: String,
    data: tempfile::TempDir,
}

impl Set {
    fn new(bin: &Path, name: &str) -> Set {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let host = format!(
            "hfb-{name}{}-{}",
            COUNT.fetch_add(1, Ordering::Relaxed),
            std::process::id()
        );
        run("ip", &["netns", "add", &host], "");
        run("ip", &["-n", &host, "link", "set", "lo", "up"], "");
        Set {
            bin: bin.into(),
            host,
            data: tempfile::tempdir().unwrap(),
        }
    }

    /// Runs `work` in a thread in the host's namespace.
    fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        inside(&self.host, work)
    }

    /// Makes one call. Returns its duration and its output.
    fn call(&self, verb: &str, container: &str, netns: &str, config: &Value) -> (Duration, Value) {
        let text = config.to_string();
        let mut command = Command::new(self.bin.join(config["type"].as_str().unwrap()));
        command
            .env_clear()
            .env("PATH", std::env::var("PATH").unwrap())
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", container);
        command
            .env("CNI_NETNS", netns)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", &self.bin);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let begun = Instant::now();
        let mut child = command.spawn().unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(text.as_bytes())
            .unwrap();
        let output = child.wait_with_output().unwrap();
        let took = begun.elapsed();
        assert!(
            output.status.success(),
            "{} {verb}: {}",
            config["type"],
            String::from_utf8_lossy(&output.stdout)
        );
        (
            took,
            serde_json::from_slice(&output.stdout).unwrap_or_default(),
        )
    }

    fn add(&self, container: &str, netns: &str, chain: &[Value]) -> (Duration, Value) {
        let (mut all, mut result) = (Duration::ZERO, Value::Null);
        for config in chain {
            let mut config = config.clone();
            if !result.is_null() {
                config["prevResult"] = result;
            }
            let (took, answer) = self.call("ADD", container, netns, &config);
            all += took;
            result = answer;
        }
        (all, result)
    }

    fn del(&self, container: &str, netns: &str, chain: &[Value], result: &Value) -> Duration {
        let call = |config: &Value| {
            let mut config = config.clone();
            config["prevResult"] = result.clone();
            self.call("DEL", container, netns, &config).0
        };
        chain.iter().rev().map(call).sum()
    }

    fn chain(&self, plugins: &[&str], masquerade: bool) -> Vec<Value> {
        let config = |plugin: &&str| {
            let mut config = json!({"cniVersion": "1.0.0", "name": "bench", "type": plugin});
            let ipam = json!({"type": "host-local", "dataDir": self.data.path(), "subnet": "10.197.0.0/16", "routes": [{"dst": "0.0.0.0/0"}]});
            let more = match *plugin {
                "bridge" => {
                    json!({"bridge": "brb", "isGateway": true, "ipMasq": masquerade, "hairpinMode": true, "ipam": ipam})
                }
                "ptp" => json!({"ipMasq": masquerade, "ipam": ipam}),
                "host-local" => json!({"ipam": ipam}),
                "portmap" => {
                    json!({"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}})
                }
                "bandwidth" => {
                    json!({"ingressRate": 8_000_000, "ingressBurst": 800_000, "egressRate": 8_000_000, "egressBurst": 800_000})
                }
                "firewall" => json!({"backend": "iptables"}),
                _ => json!({}),
            };
            for (key, value) in more.as_object().unwrap() {
                config[key] = value.clone();
            }
            config
        };
        plugins.iter().map(config).collect()
    }

    /// The medians of ADD and DEL of a chain, in milliseconds.
    fn measure(&self, plugins: &[&str], masquerade: bool) -> [f64; 2] {
        let chain = self.chain(plugins, masquerade);
        let (mut adds, mut dels) = (vec![], vec![]);
        for round in 0..=ROUNDS {
            let name = format!("{}-{round}", self.host);
            run("ip", &["netns", "add", &name], "");
            let netns = format!("/run/netns/{name}");
            let (add, del) = self.inside(|| {
                let (add, result) = self.add(&name, &netns, &chain);
                (add, self.del(&name, &netns, &chain, &result))
            });
            run("ip", &["netns", "del", &name], "");
            // The first round creates the bridge and the tables.
            if round > 0 {
                adds.push(add);
                dels.push(del);
            }
        }
        [median(adds), median(dels)]
    }

    /// The time to delete just a veth pair like a container's, in milliseconds.
    fn removal(&self) -> f64 {
        let once = |round: usize| {
            let name = format!("{}-v{round}", self.host);
            run("ip", &["netns", "add", &name], "");
            run(
                "ip",
                &[
                    "-n", &self.host, "link", "add", "va", "type", "veth", "peer", "name", "eth0",
                    "netns", &name,
                ],
                "",
            );
            run(
                "ip",
                &[
                    "-n", &self.host, "link", "set", "va", "master", "floor", "up",
                ],
                "",
            );
            run(
                "ip",
                &["-n", &name, "addr", "add", "10.196.0.2/24", "dev", "eth0"],
                "",
            );
            run("ip", &["-n", &name, "link", "set", "eth0", "up"], "");
            let took = inside(&name, || {
                let begun = Instant::now();
                Socket::route().unwrap().delete_link("eth0").unwrap();
                begun.elapsed()
            });
            run("ip", &["netns", "del", &name], "");
            took
        };
        run(
            "ip",
            &["-n", &self.host, "link", "add", "floor", "type", "bridge"],
            "",
        );
        run("ip", &["-n", &self.host, "link", "set", "floor", "up"], "");
        median((0..ROUNDS).map(once).collect())
    }

    /// Runs fifty chains at once. Returns the 99th percentile,
    /// the number of failures and the number of duplicate rules.
    fn at_once(&self) -> (f64, usize, usize) {
        let chain = self.chain(&["bridge", "portmap"], true);
        let names: Vec<String> = (0..AT_ONCE).map(|i| format!("{}-{i}", self.host)).collect();
        for name in &names {
            run("ip", &["netns", "add", name], "");
        }
        let file = format!("/run/netns/{}", self.host);
        let results: Vec<Option<(Duration, Value)>> = std::thread::scope(|scope| {
            let threads: Vec<_> = names
                .iter()
                .enumerate()
                .map(|(i, name)| {
                    let (mut chain, file) = (chain.clone(), &file);
                    chain[1]["runtimeConfig"]["portMappings"][0]["hostPort"] = (9000 + i).into();
                    scope.spawn(move || {
                        nix::sched::setns(
                            std::fs::File::open(file).unwrap(),
                            nix::sched::CloneFlags::CLONE_NEWNET,
                        )
                        .unwrap();
                        std::panic::catch_unwind(|| {
                            self.add(name, &format!("/run/netns/{name}"), &chain)
                        })
                        .ok()
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let mut times: Vec<f64> = results
            .iter()
            .flatten()
            .map(|(took, _)| took.as_secs_f64() * 1000.0)
            .collect();
        times.sort_by(f64::total_cmp);
        let listed = Command::new("ip")
            .args(["netns", "exec", &self.host, "nft", "-s", "list", "ruleset"])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&listed.stdout).into_owned();
        let twice = twice(&text);
        for (name, result) in names.iter().zip(&results) {
            if let Some((_, result)) = result {
                self.inside(|| self.del(name, &format!("/run/netns/{name}"), &chain, result));
            }
            run("ip", &["netns", "del", name], "");
        }
        let last = times.len().saturating_sub(1).min(times.len() * 99 / 100);
        (
            times.get(last).copied().unwrap_or(f64::NAN),
            results.iter().filter(|r| r.is_none()).count(),
            twice,
        )
    }
}

/// Runs `work` in a thread in a namespace.
fn inside<T: Send>(namespace: &str, work: impl FnOnce() -> T + Send) -> T {
    let file = std::fs::File::open(format!("/run/netns/{namespace}")).unwrap();
    std::thread::scope(|scope| {
        let enter = move || {
            nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            work()
        };
        scope.spawn(enter).join().unwrap()
    })
}

/// The number of rules that occur more than once in their chain.
fn twice(ruleset: &str) -> usize {
    let mut seen = std::collections::HashSet::new();
    let (mut chain, mut found) = (String::new(), 0);
    for line in ruleset.lines() {
        if line.contains('{') && !line.contains("dport {") {
            chain = format!("{chain} {line}").chars().rev().take(200).collect();
        } else if line.starts_with("\t\t")
            && !line.trim_start().starts_with("type ")
            && !seen.insert(format!("{chain}{line}"))
        {
            found += 1;
        }
    }
    found
}

impl Drop for Set {
    fn drop(&mut self) {
        run("ip", &["netns", "del", &self.host], "");
    }
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1000.0
}

/// Adds foreign rules, as many as a busy kube-proxy creates.
fn fill(set: &Set) {
    let mut rules = String::from(
        "*nat\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n",
    );
    for i in 0..10_000 {
        writeln!(
            rules,
            "-A KUBE-SERVICES -d 10.96.{}.{}/32 -p tcp -m tcp --dport 80 -j ACCEPT",
            i / 250,
            i % 250 + 1
        )
        .unwrap();
    }
    rules.push_str("COMMIT\n");
    run(
        "ip",
        &["netns", "exec", &set.host, "iptables-restore"],
        &rules,
    );
}

fn main() {
    let ours = tempfile::tempdir().unwrap();
    let binary =
        std::env::var("HOLDFAST_CNI").unwrap_or_else(|_| env!("CARGO_BIN_EXE_holdfast-cni").into());
    run(&binary, &["install", ours.path().to_str().unwrap()], "");
    let theirs =
        PathBuf::from(std::env::var_os("CNI_REFERENCE").unwrap_or_else(|| "/usr/lib/cni".into()));
    assert!(
        theirs.join("bridge").is_file(),
        "the reference plugins are not in {} (make bench-cni installs them)",
        theirs.display()
    );
    let sets = || [Set::new(ours.path(), "o"), Set::new(&theirs, "r")];
    println!(
        "| chain | ADD: Holdfast (ms) | reference | ratio | DEL: Holdfast (ms) | reference | ratio |\n|---|---|---|---|---|---|---|"
    );
    let row = |name: &str, values: [[f64; 2]; 2]| {
        let [[add, del], [their_add, their_del]] = values;
        println!(
            "| {name} | {add:.1} | {their_add:.1} | **{:.2}** | {del:.1} | {their_del:.1} | **{:.2}** |",
            add / their_add,
            del / their_del
        );
    };
    for (name, plugins, masquerade) in [
        ("loopback", &["loopback"][..], false),
        ("bridge, host-local", &["bridge"], false),
        ("the same, masqueraded", &["bridge"], true),
        ("the same with a port", &["bridge", "portmap"], true),
        (
            "nerdctl's: with firewall and tuning",
            &["bridge", "portmap", "firewall", "tuning"],
            true,
        ),
        ("bridge, bandwidth", &["bridge", "bandwidth"], false),
        ("ptp, masqueraded", &["ptp"], true),
        ("host-local", &["host-local"], false),
    ] {
        row(
            name,
            sets()
                .each_ref()
                .map(|set| set.measure(plugins, masquerade)),
        );
    }
    let filled = sets();
    filled.iter().for_each(fill);
    row(
        "bridge, masqueraded, beside 10,000 NAT rules",
        filled.each_ref().map(|set| set.measure(&["bridge"], true)),
    );
    let leased = sets();
    for set in &leased {
        let dir = set.data.path().join("bench");
        std::fs::create_dir_all(&dir).unwrap();
        for i in 0..LEASES {
            std::fs::write(
                dir.join(format!("10.197.{}.{}", i / 250 + 1, i % 250 + 1)),
                format!("c{i}\r\neth0"),
            )
            .unwrap();
        }
        std::fs::write(dir.join("last_reserved_ip.0"), "10.197.40.250").unwrap();
    }
    row(
        "host-local beside 10,000 leases",
        leased
            .each_ref()
            .map(|set| set.measure(&["host-local"], false)),
    );
    drop(leased);
    let [own, their] = sets();
    println!(
        "\nRemoving nothing but the veth pair of a container on a bridge: {:.1} ms.",
        own.removal()
    );
    for (name, set) in [("Holdfast", &own), ("reference", &their)] {
        let (p99, failed, twice) = set.at_once();
        println!(
            "{AT_ONCE} chains at once (bridge, masqueraded, a port), {name}: p99 {p99:.0} ms, {failed} failed, {twice} rules twice."
        );
    }
}
