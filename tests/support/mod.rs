//! A private cluster for a test, with its own name, directories, ports, bridge and subnet. It is removed when dropped,
//! even if the test fails. With `HOLDFAST_REAL_APISERVER` it is a node and a namespace of a real control plane.

#![allow(dead_code, clippy::unwrap_used)]

pub mod client;
pub mod disk;
pub mod images;
mod reader;
pub mod real;
pub mod served;
pub mod skip;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

#[allow(unused_imports, reason = "not every test binary imports images")]
pub use images::{busybox, busybox_alone, busybox_in, ctr};
use real::ControlPlane;
use serde_json::{Value, json};

/// The timeout for a condition to become true, which only emulated machines set.
const TIMEOUT: &str = "HOLDFAST_TEST_TIMEOUT";

/// The timeout for a condition to become true: longer in an emulated machine.
pub fn condition_timeout() -> Duration {
    Duration::from_secs(std::env::var(TIMEOUT).map_or(60, |seconds| seconds.parse().unwrap()))
}

/// Whether a condition holds. If not, it may be evaluated again at once: this has waited for 50 ms, or for four times as long as
/// the evaluation took. In an emulated machine a read takes so long that tests would take the processor from what they
/// wait for.
fn holds(condition: &mut impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    if condition() {
        return true;
    }
    let pause = (4 * begun.elapsed()).clamp(Duration::from_millis(50), Duration::from_secs(3));
    std::thread::sleep(pause);
    false
}

/// A command that is stopped after twice this timeout. A command that hangs thus fails in the test that
/// runs it, which shows the logs.
pub fn command_with_timeout(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("timeout");
    let seconds = (2 * condition_timeout()).as_secs().to_string();
    command.args(["--verbose", "--kill-after=5"]).arg(seconds);
    command.arg(program);
    command
}

/// The numbers of this binary's clusters, each with its name.
static CLUSTERS: Mutex<BTreeMap<u16, String>> = Mutex::new(BTreeMap::new());

pub struct Cluster {
    pub name: String,
    pub number: u16,
    /// The control plane that stores its objects.
    pub control: ControlPlane,
    /// A directory with a containerd to use instead of the installed one.
    pub runtime: Option<PathBuf>,
    /// A KubeletConfiguration for the agent.
    pub config: Option<tempfile::NamedTempFile>,
    /// The range of all nodes' pods and that of this node's pods, for a cluster with several nodes.
    pub ranges: Option<[&'static str; 2]>,
    /// Further flags of `holdfast up`.
    pub flags: Vec<String>,
    /// Log everything.
    pub verbose: bool,
    /// The address of the system message bus, if it is not this machine's.
    pub bus: Option<String>,
    reader: reader::Reader,
}

pub fn holdfast() -> PathBuf {
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_holdfast"));
    let plugins = binary.with_file_name("holdfast-cni");
    assert!(
        plugins.is_file(),
        "{} is missing: run the tests with --workspace (make test)",
        plugins.display()
    );
    binary
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// The output of a command, which must have succeeded.
fn succeeded(what: &str, output: Output) -> String {
    assert!(output.status.success(), "{what} failed: {}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

impl Cluster {
    /// Starts a cluster; `number` (1 to 99) determines its ports and addresses.
    pub fn start(name: &str, number: u16) -> Cluster {
        Self::new(name, number).started()
    }

    /// As [`Cluster::start`], with the containerd in `runtime`.
    pub fn start_with(name: &str, number: u16, runtime: Option<PathBuf>) -> Cluster {
        let mut cluster = Self::new(name, number);
        cluster.runtime = runtime;
        cluster.started()
    }

    /// As [`Cluster::start`], with fields of a KubeletConfiguration.
    pub fn start_configured(name: &str, number: u16, fields: &str) -> Cluster {
        Self::new(name, number).configured(fields).started()
    }

    /// As [`Cluster::start_configured`], with the containerd in `runtime`.
    pub fn start_configured_with(
        name: &str,
        number: u16,
        fields: &str,
        runtime: PathBuf,
    ) -> Cluster {
        let mut cluster = Self::new(name, number).configured(fields);
        cluster.runtime = Some(runtime);
        cluster.started()
    }

    /// With fields of a KubeletConfiguration.
    pub fn configured(mut self, fields: &str) -> Cluster {
        let config = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(config.path(), fields).unwrap();
        self.config = Some(config);
        self
    }

    /// As [`Cluster::start_configured`], with another message bus in place of the system's.
    pub fn start_on_bus(name: &str, number: u16, fields: &str, bus: Option<String>) -> Cluster {
        let mut cluster = Self::new(name, number).configured(fields);
        cluster.bus = bus;
        cluster.started()
    }

    /// As [`Cluster::start`], with the most verbose log.
    pub fn start_verbose(name: &str, number: u16) -> Cluster {
        let mut cluster = Self::new(name, number);
        cluster.verbose = true;
        cluster.started()
    }

    /// A cluster that is not started yet. Panics if another cluster of this binary has the name or the number, as tests run
    /// side by side.
    pub fn new(name: &str, number: u16) -> Cluster {
        let mut taken = CLUSTERS.lock().unwrap_or_else(PoisonError::into_inner);
        let other = taken
            .iter()
            .find(|(n, other)| (**n == number) != (*other == name));
        assert!(
            other.is_none(),
            "cluster {name} with number {number} collides with {other:?}: choose another name or number"
        );
        taken.insert(number, name.to_owned());
        Cluster {
            name: format!("t-{name}"),
            number,
            control: ControlPlane::wanted(),
            runtime: None,
            config: None,
            ranges: None,
            flags: vec![],
            verbose: false,
            bus: None,
            reader: reader::Reader::default(),
        }
    }

    /// Starts this cluster.
    pub fn started(self) -> Cluster {
        assert!(
            nix::unistd::geteuid().is_root(),
            "this test makes containers: run it as root"
        );
        self.clear();
        self.up();
        self
    }

    /// An interrupted run leaves its cluster behind.
    pub fn clear(&self) {
        if self.data().exists() {
            succeeded("down", self.purged());
        }
        if let ControlPlane::Real(admin) = &self.control {
            real::remove(self, admin).unwrap();
        }
    }

    pub fn up(&self) -> String {
        let mut command = command_with_timeout(holdfast());
        if self.verbose {
            command.env("HOLDFAST_LOG", "trace");
        }
        if let Some(bus) = &self.bus {
            command.env("DBUS_SYSTEM_BUS_ADDRESS", bus);
        }
        if let Some(runtime) = &self.runtime {
            command.env(
                "PATH",
                format!("{}:{}", runtime.display(), std::env::var("PATH").unwrap()),
            );
        }
        command.arg("up");
        if let Some(config) = &self.config {
            command.arg("--agent-config").arg(config.path());
        }
        if let ControlPlane::Real(admin) = &self.control {
            real::prepare(self, admin);
            let kubeconfig = self.data().join(real::NODE);
            command.arg("--join").arg(kubeconfig);
            command.args(["--node-name", &self.name]);
        }
        let output = command
            .args([
                "--name",
                &self.name,
                "--api-port",
                &(16_400 + self.number).to_string(),
            ])
            .args(match self.ranges {
                Some([cluster, node]) => vec![
                    format!("--cluster-cidr={cluster}"),
                    format!("--pod-cidr={node}"),
                ],
                None => vec![format!("--pod-cidr=10.199.{}.0/24", self.number)],
            })
            .args(&self.flags)
            .output();
        succeeded("up", output.unwrap())
    }

    pub fn down(&self) -> String {
        let output = command_with_timeout(holdfast())
            .args(["down", "--name", &self.name])
            .output();
        succeeded("down", output.unwrap())
    }

    fn purged(&self) -> Output {
        command_with_timeout(holdfast())
            .args(["down", "--name", &self.name, "--purge"])
            .output()
            .unwrap()
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The namespace of objects that name none.
    pub fn namespace(&self) -> &str {
        match self.control {
            ControlPlane::Bundled => "default",
            ControlPlane::Real(_) => &self.name,
        }
    }

    pub fn data(&self) -> PathBuf {
        PathBuf::from(format!("/var/lib/holdfast-{}", self.name))
    }

    pub fn run_dir(&self) -> PathBuf {
        PathBuf::from(format!("/run/holdfast-{}", self.name))
    }

    pub fn pid(&self, part: &str) -> i32 {
        let text = std::fs::read_to_string(self.run_dir().join(format!("{part}.pid"))).unwrap();
        text.split(' ').next().unwrap().parse().unwrap()
    }

    /// Kills the supervisor of a component. If the component is killed afterwards, it stays down until
    /// [`Cluster::up`].
    pub fn unsupervise(&self, part: &str) {
        let state = std::fs::read(self.run_dir().join(format!("{part}.state"))).unwrap();
        let state: Value = serde_json::from_slice(&state).unwrap();
        let pid = i32::try_from(state["supervisor"][0].as_i64().unwrap()).unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGKILL).unwrap();
    }

    /// Kills a component and its supervisor: it stays down until [`Cluster::up`].
    pub fn kill(&self, part: &str) {
        self.unsupervise(part);
        let pid = self.pid(part);
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGKILL).unwrap();
        self.wait_for_exit(pid);
    }

    /// Waits until a signalled process has exited: [`Cluster::up`] does not start a component that still seems to run.
    pub fn wait_for_exit(&self, pid: i32) {
        self.wait_quietly(&format!("process {pid} to exit"), || has_exited(pid));
    }

    pub fn log(&self, part: &str) -> String {
        std::fs::read_to_string(self.data().join("logs").join(format!("{part}.log")))
            .unwrap_or_default()
    }

    fn kubectl_command(&self, arguments: &[&str]) -> Output {
        command_with_timeout("kubectl")
            .arg("--kubeconfig")
            .arg(self.data().join("kubeconfig"))
            .args(arguments)
            .output()
            .expect("kubectl is installed (make test installs it)")
    }

    /// Runs kubectl, which must succeed.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        let output = self.kubectl_command(arguments);
        assert!(
            output.status.success(),
            "kubectl {arguments:?} failed: {}\nagent's log:\n{}",
            text(&output),
            self.log("agent")
        );
        String::from_utf8(output.stdout).unwrap()
    }

    /// A sample of the agent's metrics, by its name and labels.
    pub fn metric(&self, sample: &str) -> Option<f64> {
        let page = self.get_node_path("/metrics");
        let mut values = page.lines().filter_map(|line| line.strip_prefix(sample));
        values.find_map(|value| value.strip_prefix(' ')?.trim().parse().ok())
    }

    /// Runs a command of `holdfast` against this cluster's agent; it must succeed.
    pub fn holdfast(&self, arguments: &[&str]) -> String {
        let output = command_with_timeout(holdfast())
            .args(arguments)
            .args(["--name", &self.name])
            .output();
        succeeded(&format!("holdfast {arguments:?}"), output.unwrap())
    }

    pub fn apply(&self, manifest: &str) {
        use std::io::Write as _;
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().write_all(manifest.as_bytes()).unwrap();
        self.kubectl(&["apply", "-f", file.path().to_str().unwrap()]);
    }

    pub fn pods(&self) -> Vec<Value> {
        let list = self.object("/api/v1/namespaces/{namespace}/pods");
        list["items"].as_array().unwrap().clone()
    }

    /// Deletes the pods with a terminal phase and waits until their leftovers are removed: the API removes
    /// such a pod at once, the node cleans up afterwards.
    pub fn delete_finished(&self) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut pods = self.pods();
        pods.retain(|p| ["Succeeded", "Failed"].contains(&&*text(&p["status"]["phase"])));
        let names = pods.iter().map(|p| text(&p["metadata"]["name"]));
        let names: Vec<String> = names.collect();
        if names.is_empty() {
            return;
        }
        let delete = ["delete", "pod"].into_iter();
        let delete: Vec<&str> = delete.chain(names.iter().map(String::as_str)).collect();
        self.kubectl(&delete);
        // Links of logs contain the name, everything else the UID.
        let mut marks: Vec<String> = names.iter().map(|n| format!("log link {n}_")).collect();
        marks.extend(pods.iter().map(|p| text(&p["metadata"]["uid"])));
        self.wait("no leftovers of finished pods", || {
            let left = self.leftovers();
            !left
                .iter()
                .any(|l| marks.iter().any(|mark| l.contains(mark)))
        });
    }

    /// Deletes all pods, and checks that nothing is left of them.
    #[track_caller]
    pub fn delete_all_and_check(&self) {
        self.delete_finished();
        self.kubectl(&["delete", "pod", "--all", "--wait=true"]);
        self.assert_clean();
    }

    pub fn pod(&self, name: &str) -> Value {
        self.object(&format!("/api/v1/namespaces/{{namespace}}/pods/{name}"))
    }

    /// The object or the list at a path of the API, in which `{namespace}` stands for the cluster's namespace.
    #[track_caller]
    pub fn object(&self, path: &str) -> Value {
        serde_json::from_str(&self.read(path)).unwrap()
    }

    /// The API's answer to a GET of a path.
    #[track_caller]
    fn read(&self, path: &str) -> String {
        let answer = self.reader.get(&self.data().join("kubeconfig"), path);
        answer.unwrap_or_else(|why| panic!("GET {path}: {why}"))
    }

    /// The cluster's Node.
    pub fn node(&self) -> Value {
        match self.control {
            // The cluster has only one.
            ControlPlane::Bundled => self.object("/api/v1/nodes")["items"][0].clone(),
            ControlPlane::Real(_) => self.object(&format!("/api/v1/nodes/{}", self.name)),
        }
    }

    /// Status and message of the Node's Ready condition.
    pub fn ready(&self) -> (String, String) {
        let node = self.node();
        let conditions = node["status"]["conditions"].as_array().unwrap();
        let ready = conditions.iter().find(|c| c["type"] == "Ready").unwrap();
        let text = |key: &str| ready[key].as_str().unwrap().to_owned();
        (text("status"), text("message"))
    }

    /// The name of the cluster's Node.
    pub fn node_name(&self) -> String {
        match self.control {
            ControlPlane::Bundled => {
                let name = &self.node()["metadata"]["name"];
                name.as_str().expect("the cluster has a Node").to_owned()
            }
            ControlPlane::Real(_) => self.name.clone(),
        }
    }

    /// The first address of the cluster's Node.
    pub fn node_address(&self) -> String {
        let address = &self.node()["status"]["addresses"][0]["address"];
        address.as_str().unwrap().to_owned()
    }

    /// The port of the agent's own API.
    pub fn agent_port(&self) -> u16 {
        16_400 + self.number + 1000
    }

    /// The agent's response to a GET of a path, through the apiserver.
    pub fn get_node_path(&self, path: &str) -> String {
        let path = format!("/api/v1/nodes/{}/proxy{path}", self.node_name());
        self.read(&path)
    }

    /// The events about a pod: type, reason and message, a line each.
    pub fn events(&self, pod: &str) -> String {
        let of = format!("fieldSelector=involvedObject.name%3D{pod}");
        let list = self.object(&format!("/api/v1/namespaces/{{namespace}}/events?{of}"));
        let text =
            |event: &Value, field: &str| event[field].as_str().unwrap_or_default().to_owned();
        let line =
            |e: &Value| [text(e, "type"), text(e, "reason"), text(e, "message")].join(" ") + "\n";
        list["items"].as_array().unwrap().iter().map(line).collect()
    }

    /// Waits until a condition holds; on timeout fails with the state of the cluster.
    pub fn wait(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let deadline = Instant::now() + condition_timeout();
        while !holds(&mut condition) {
            assert!(
                Instant::now() < deadline,
                "not in time: {what}\npods:\n{}\nagent's log:\n{}\n{}",
                self.kubectl(&["get", "pods", "-A", "-o", "wide"]),
                self.log("agent"),
                self.explain_unready_pods()
            );
        }
    }

    /// The agent's explanations, and the events, of pods that are not ready or are being deleted.
    fn explain_unready_pods(&self) -> String {
        let mut pods = self.pods();
        pods.retain(|pod| {
            pod["metadata"]["deletionTimestamp"].is_string() || condition(pod, "Ready") != "True"
        });
        let explained = pods.iter().map(|pod| {
            let name = pod["metadata"]["name"].as_str().unwrap();
            let output = command_with_timeout(holdfast())
                .args(["explain", "pod", name, "--name", &self.name])
                .output();
            let explanation = output.map_or_else(|error| error.to_string(), |output| text(&output));
            format!("{name}:\n{explanation}\n{}\n", self.events(name))
        });
        explained.collect()
    }

    /// As [`Cluster::wait`], for times without a working API.
    pub fn wait_quietly(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let deadline = Instant::now() + condition_timeout();
        while !holds(&mut condition) {
            assert!(Instant::now() < deadline, "not in time: {what}");
        }
    }

    /// Leftovers of pods on this machine; empty when all is clean.
    pub fn leftovers(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut list = |what: &str, dir: PathBuf, ours: &dyn Fn(&str) -> bool| {
            for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                let name = entry.file_name().into_string().unwrap();
                if ours(&name) {
                    found.push(format!("{what} {name}"));
                }
            }
        };
        let all = |_: &str| true;
        list("pod directory", self.data().join("agent/pods"), &all);
        list("pod log", self.data().join("pods-logs"), &all);
        list("log link", self.data().join("containers"), &all);
        list(
            "address",
            self.data().join("cni/networks").join(&self.name),
            &|n| n.parse::<std::net::IpAddr>().is_ok(),
        );
        list(
            "sandbox state",
            self.run_dir()
                .join("containerd/io.containerd.runtime.v2.task/k8s.io"),
            &all,
        );
        for line in std::fs::read_to_string("/proc/self/mountinfo")
            .unwrap()
            .lines()
        {
            let point = std::path::Path::new(line.split(' ').nth(4).unwrap_or_default());
            // The agent makes its own root directory a shared mount if the machine's mounts are not shared.
            if point == self.data().join("agent") {
                continue;
            }
            // Compare whole path components: the name of another cluster may begin with this one's.
            if point.starts_with(self.data()) || point.starts_with(self.run_dir()) {
                found.push(format!("mount {}", point.display()));
            }
        }
        for controller in std::fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
            find_pods(
                &controller.path().join(format!("holdfast-{}", self.name)),
                &mut found,
            );
        }
        for process in std::fs::read_dir("/proc").unwrap().flatten() {
            let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            if line.contains("containerd-shim")
                && line.contains(&format!("/run/holdfast-{}/", self.name))
            {
                found.push(format!("shim {line}"));
            }
        }
        let ports = Command::new("ip")
            .args(["-o", "link", "show", "type", "veth"])
            .output()
            .expect("iproute2 is installed (make test installs it)");
        let bridge = self.bridge();
        found.extend(
            String::from_utf8_lossy(&ports.stdout)
                .lines()
                .filter(|l| l.contains(&format!("master {bridge} ")))
                .map(|l| format!("link {l}")),
        );
        found
    }

    /// Checks that nothing is left of pods whose objects were removed. The agent cleans up before it removes
    /// the object. Leftovers that containerd and the kernel remove on their own (shims, links, mounts of
    /// sandboxes) may exist a moment longer. For pods with a terminal phase, see [`Cluster::delete_finished`].
    #[track_caller]
    pub fn assert_clean(&self) {
        let run = format!("mount {}", self.run_dir().display());
        let ends_by_itself = |left: &String| {
            let kinds = ["shim ", "sandbox state ", "link ", &run];
            kinds.iter().any(|kind| left.starts_with(kind))
        };
        let deadline = Instant::now() + condition_timeout();
        loop {
            let left = self.leftovers();
            if left.is_empty() {
                return;
            }
            assert!(
                left.iter().all(ends_by_itself) && Instant::now() < deadline,
                "leftovers: {left:#?}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// As [`Cluster::leftovers`], without leftovers of containerd that containerd no longer knows. If the agent's
    /// death cancels a call, or a shim is killed, version 1.6 can leak a shim, its directory and its mount.
    pub fn leftovers_known(&self) -> Vec<String> {
        let known = ctr(self, "k8s.io", &["containers", "ls", "-q"]);
        let state = format!("mount {}", self.run_dir().join("containerd").display());
        let is_containerds = |l: &String| {
            l.starts_with("shim ") || l.starts_with("sandbox state ") || l.starts_with(&state)
        };
        self.leftovers()
            .into_iter()
            .filter(|l| !is_containerds(l) || known.lines().any(|id| l.contains(id)))
            .collect()
    }

    pub fn bridge(&self) -> String {
        let config = std::fs::read_to_string(self.data().join("cni/net.d/10-holdfast.conflist"))
            .unwrap_or_default();
        let config: Value = serde_json::from_str(&config).unwrap_or_default();
        config["plugins"][0]["bridge"]
            .as_str()
            .unwrap_or("none")
            .to_owned()
    }
}

/// Whether a process has exited. Its first thread becomes a zombie before the last one closes the process's sockets.
pub fn has_exited(pid: i32) -> bool {
    let zombie =
        std::fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |s| s.contains(") Z "));
    zombie && std::fs::read_dir(format!("/proc/{pid}/task")).map_or(true, |t| t.count() <= 1)
}

/// The cgroups of pods below a directory.
pub fn find_pods(dir: &std::path::Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            let name = entry.file_name().into_string().unwrap();
            if name.starts_with("pod") || name.contains("-pod") {
                found.push(format!("cgroup {}", entry.path().display()));
            }
            find_pods(&entry.path(), found);
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() && std::env::var_os("HOLDFAST_KEEP").is_some() {
            return;
        }
        let output = self.purged();
        let removed = match &self.control {
            ControlPlane::Bundled => Ok(()),
            ControlPlane::Real(admin) => real::remove(self, admin),
        };
        if !std::thread::panicking() {
            assert!(
                output.status.success(),
                "down --purge failed: {}",
                text(&output)
            );
            removed.unwrap();
            assert!(!self.data().exists() && !self.run_dir().exists());
        }
    }
}

/// The status of a pod's condition; empty if there is none.
pub fn condition(pod: &Value, kind: &str) -> String {
    let found = pod["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|c| c["type"] == kind);
    found.map_or(String::new(), |c| c["status"].as_str().unwrap().to_owned())
}

/// GETs a page over plain HTTP and returns the body.
pub fn http_get(address: &str) -> Option<String> {
    use std::io::{Read as _, Write as _};
    let target: std::net::SocketAddr = address.parse().ok()?;
    let mut stream = std::net::TcpStream::connect_timeout(&target, Duration::from_secs(2)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
}

/// Runs a command in the first container of a pod and returns its output.
pub fn inside(cluster: &Cluster, pod: &str, command: &[&str]) -> String {
    use holdfast_cri::{CriClient, Runtime as _};
    let id = cluster.pod(pod)["status"]["containerStatuses"][0]["containerID"]
        .as_str()
        .unwrap()
        .rsplit('/')
        .next()
        .unwrap()
        .to_owned();
    let command: Vec<String> = command.iter().map(|c| (*c).to_owned()).collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let client = CriClient::new(
            cluster.run_dir().join("containerd.sock").to_str().unwrap(),
            Duration::from_secs(60),
            None,
        )
        .unwrap();
        client
            .exec(&id, &command, None)
            .await
            .unwrap()
            .output
            .trim()
            .to_owned()
    })
}

/// Creates a pod that stops immediately when it is deleted. Unless `spec` has containers, it has one of
/// the bundled image.
pub fn pod(cluster: &Cluster, name: &str, spec: &Value) {
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "holdfast.local/demo:1"}]}});
    json_patch::merge(&mut pod["spec"], spec);
    cluster.apply(&pod.to_string());
}
