//! Network namespaces for a test, in which plugins are called as a runtime does.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A directory with links from the plugins' names to the binary.
pub fn plugins() -> PathBuf {
    if let Some(dir) = std::env::var_os("CNI_BIN") {
        return dir.into();
    }
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_holdfast-cni"));
    let dir = binary.with_file_name("cni-links");
    std::fs::create_dir_all(&dir).unwrap();
    for name in holdfast_cni::plugins::names() {
        let link = dir.join(name);
        // In a copied target directory, links lead to the original build.
        if std::fs::read_link(&link).is_ok_and(|to| to == binary) {
            continue;
        }
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let new = dir.join(format!(".{name}-{}-{number}", std::process::id()));
        std::os::unix::fs::symlink(&binary, &new).unwrap();
        std::fs::rename(&new, &link).unwrap();
    }
    dir
}

pub fn ip(arguments: &[&str]) -> String {
    let output = Command::new("ip")
        .args(arguments)
        .output()
        .expect("iproute2 is installed (make test installs it)");
    assert!(
        output.status.success(),
        "ip {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Whether a condition becomes true within 30 s. The kernel begins to use a link shortly after it was set up.
pub fn comes_true(done: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !done() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    true
}

/// The output of `show` when the link is up, or after the timeout.
pub fn once_up(show: impl Fn() -> String) -> String {
    comes_true(|| show().contains("state UP"));
    show()
}

/// Two namespaces: a "host" in which plugins run, and a "container". Both are deleted on drop.
pub struct World {
    pub host: String,
    pub container: String,
    pub data: tempfile::TempDir,
    /// The working directory of plugins. Its depth ensures that `../..` stays inside.
    here: tempfile::TempDir,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

impl World {
    pub fn new() -> World {
        assert!(
            Command::new("ip").arg("-V").output().is_ok(),
            "iproute2 is needed"
        );
        let id = format!(
            "{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let world = World {
            host: format!("hfh-{id}"),
            container: format!("hfc-{id}"),
            data: tempfile::tempdir().unwrap(),
            here: tempfile::tempdir().unwrap(),
        };
        std::fs::create_dir_all(world.place()).unwrap();
        for name in [&world.host, &world.container] {
            ip(&["netns", "add", name]);
        }
        ip(&["-n", &world.host, "link", "set", "lo", "up"]);
        world
    }

    fn place(&self) -> PathBuf {
        self.here.path().join("a/b")
    }

    pub fn netns(&self) -> String {
        format!("/run/netns/{}", self.container)
    }

    pub fn config(&self, version: &str, extra: Value) -> Value {
        let mut config = json!({"cniVersion": version, "name": "net", "type": "bridge", "bridge": "br0", "isDefaultGateway": true,
            "ipam": {"type": "host-local", "dataDir": self.data.path(), "subnet": "10.198.1.0/24"}});
        for (key, value) in extra.as_object().unwrap() {
            config[key] = value.clone();
        }
        config
    }

    pub fn call(&self, plugin: &str, verb: &str, config: &Value, env: &[(&str, &str)]) -> Output {
        self.call_with(plugin, verb, &config.to_string(), env)
    }

    pub fn call_with(&self, plugin: &str, verb: &str, input: &str, env: &[(&str, &str)]) -> Output {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.host])
            .arg(plugins().join(plugin))
            .current_dir(self.place());
        command
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", "c1")
            .env("CNI_NETNS", self.netns())
            .env("CNI_IFNAME", "eth0");
        command.env("CNI_PATH", plugins()).envs(env.iter().copied());
        for (key, value) in env.iter().filter(|(_, v)| v.is_empty()) {
            let _ = value;
            command.env_remove(key);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        child.wait_with_output().unwrap()
    }

    pub fn ok(&self, plugin: &str, verb: &str, config: &Value) -> Value {
        self.ok_with(plugin, verb, config, &[])
    }

    pub fn refused(&self, plugin: &str, verb: &str, config: &Value, env: &[(&str, &str)]) -> Value {
        let output = self.call(plugin, verb, config, env);
        assert!(
            !output.status.success(),
            "{plugin} {verb} succeeded: {}",
            String::from_utf8_lossy(&output.stdout)
        );
        serde_json::from_slice(&output.stdout).expect("one JSON document")
    }

    pub fn with_previous(config: &Value, result: &Value) -> Value {
        let mut config = config.clone();
        config["prevResult"] = result.clone();
        config
    }

    pub fn taken(&self) -> Vec<String> {
        let dir = std::fs::read_dir(self.data.path().join("net"));
        dir.into_iter()
            .flatten()
            .flatten()
            .map(|e| e.file_name().into_string().unwrap())
            .filter(|n| n.parse::<std::net::IpAddr>().is_ok())
            .collect()
    }

    pub fn ruleset(&self) -> String {
        let output = Command::new("ip")
            .args(["netns", "exec", &self.host, "nft", "list", "ruleset"])
            .output()
            .expect("nftables is installed (make test installs it)");
        String::from_utf8(output.stdout).unwrap()
    }
}

/// Runs `work` in a separate thread in a namespace.
pub fn inside<T: Send>(namespace: &str, work: impl FnOnce() -> T + Send) -> T {
    let file = std::fs::File::open(format!("/run/netns/{namespace}")).unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            work()
        });
        thread.join().unwrap()
    })
}

impl World {
    /// Runs a program in the host's namespace and returns its output.
    pub fn on_host(&self, program: &[&str]) -> String {
        ip(&[&["netns", "exec", &self.host], program].concat())
    }

    /// Like [`World::ok`], with additional environment variables.
    pub fn ok_with(&self, plugin: &str, verb: &str, config: &Value, env: &[(&str, &str)]) -> Value {
        let output = self.call(plugin, verb, config, env);
        assert!(
            output.status.success(),
            "{plugin} {verb}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }

    /// The configuration of a plugin that is chained after a result.
    pub fn chained(version: &str, plugin: &str, previous: &Value, extra: Value) -> Value {
        let mut config =
            json!({"cniVersion": version, "name": "net", "type": plugin, "prevResult": previous});
        for (key, value) in extra.as_object().unwrap() {
            config[key] = value.clone();
        }
        config
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for name in [&self.host, &self.container] {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

/// All protocol versions.
pub const VERSIONS: [&str; 7] = [
    "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0",
];

/// The versions that a plugin reports to support.
pub fn versions(plugin: &str) -> Vec<&'static str> {
    let output = Command::new(plugins().join(plugin))
        .env("CNI_COMMAND", "VERSION")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let reply: Value = serde_json::from_slice(&output.stdout).unwrap();
    let spoken: Vec<&str> = reply["supportedVersions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_str().unwrap())
        .collect();
    VERSIONS
        .into_iter()
        .filter(|v| spoken.contains(v))
        .collect()
}
