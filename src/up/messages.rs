//! The texts that `holdfast up`, `up status`, `down` and `kubeconfig` print. Each is a pure function of facts, so that
//! snapshots show all of them. An error names the thing, its value, the cause and the remedy.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use nix::sys::signal::Signal;

/// Error: containerd is not installed.
pub(super) const NO_CONTAINERD: &str = "containerd is not installed (Debian: apt-get install containerd); or use a running one with --containerd-endpoint";
/// Error: runc is not installed.
pub(super) const NO_RUNC: &str = "runc is not installed (Debian: apt-get install runc)";
/// Error: ctr is not installed.
pub(super) const NO_CTR: &str =
    "ctr is not installed; it comes with containerd (Debian: apt-get install containerd)";
/// Why a node is not Ready: the API has no Node object.
pub(super) const NOT_REGISTERED: &str = "the agent has not registered it";
/// Why a node is not Ready: the Node object has the status of an earlier agent.
pub(super) const NOT_REPORTED: &str = "the agent has not reported its status yet";
/// Error of `down` if the kernel refuses.
pub(super) const NOT_REMOVED: &str = "the rules of services cannot be removed";
/// Error of `up status` if a component does not run.
pub(super) const NOT_ALL_RUN: &str = "some components do not run; start them with `holdfast up`";

/// Error: the user is not root.
pub(super) fn needs_root(command: &str) -> String {
    format!(
        "`holdfast {command}` needs root: it creates network interfaces, mounts and cgroups; run it with sudo"
    )
}

/// Error: an invalid name of a cluster.
pub(super) fn invalid_name(name: &str) -> String {
    format!("invalid --name {name:?}: use at most 20 lower-case letters, digits and '-'")
}

/// Error: an invalid address range of the pods.
pub(super) fn invalid_pod_cidr(range: ipnet::Ipv4Net) -> String {
    format!(
        "invalid --pod-cidr {range}: use a network address with a prefix of at most 28, such as 10.244.0.0/24"
    )
}

/// Error: an invalid address range. `remedy` is a command.
pub(super) fn invalid_range(flag: &str, value: &str, why: &str, remedy: &str) -> String {
    format!("invalid {flag} {value}: {why}; {remedy}")
}

/// Error: the cluster was started with another range before, and its objects have addresses of it.
pub(super) fn recorded_range(flag: &str, value: &str, is: &str) -> String {
    format!(
        "invalid {flag} {value}: the cluster's services have addresses of {is}; use {flag} {is}, or remove the cluster's data first (holdfast down --purge)"
    )
}

/// Error: no range is free.
pub(super) fn no_free_range(flag: &str) -> String {
    format!(
        "{flag} is required: every range that it has by default overlaps another cluster, or an address or a route of this machine"
    )
}

/// Error: the file with the cluster's ranges cannot be used.
pub(super) fn unreadable_record(file: &Path) -> String {
    format!(
        "{} cannot be read: it has the address ranges of a cluster; remove it if the cluster does not exist any more",
        file.display()
    )
}

/// Warning: the proxy does not run. `tail` has the last lines of its log.
pub(super) fn no_services(log: &Path, tail: &str) -> String {
    let text = format!(
        "warning: services and DNS do not work, because the proxy does not run; its log is {}",
        log.display()
    );
    with_tail(text, tail)
}

/// Error: an invalid port of the agent.
pub(super) fn invalid_agent_port(port: u16) -> String {
    format!("invalid --agent-port {port}: use a port from 1 to 65535 other than the API port")
}

/// Error: the default port of the agent does not exist.
pub(super) fn no_agent_port(api_port: u16) -> String {
    format!(
        "--agent-port is required: its default, the API port + 1000, is not a valid port ({api_port} + 1000)"
    )
}

/// Error: the running cluster has the value `is`.
pub(super) fn cannot_change(flag: &str, wanted: &str, cluster: &str, is: &str) -> String {
    format!(
        "invalid {flag} {wanted}: the running cluster {cluster} has {is}; use {flag} {is}, or stop the cluster first (holdfast down --name {cluster})"
    )
}

/// Error: the CNI plugins are missing. `program` is this program.
pub(super) fn no_plugins(program: &Path) -> String {
    format!(
        "the CNI plugins (holdfast-cni) are not in the directory of {}; build them with `make build`, or install them in /usr/lib/holdfast",
        program.display()
    )
}

/// Error: a file of the user cannot be read. `flag` names it.
pub(super) fn unreadable(flag: &str, file: &Path) -> String {
    format!("invalid {flag} {}: the file cannot be read", file.display())
}

/// Error: the user's configuration of the agent cannot be parsed.
pub(super) fn invalid_agent_config(file: &Path, why: &str) -> String {
    format!(
        "invalid --agent-config {}: the file is not YAML or JSON: {why}",
        file.display()
    )
}

/// Error: the apiserver of the cluster to join does not answer.
pub(super) fn no_apiserver(kubeconfig: &Path, why: &str) -> String {
    format!(
        "invalid --join {}: its apiserver does not answer: {why}",
        kubeconfig.display()
    )
}

/// Error: a component of the cluster did not start. `tail` has the last lines of its log.
pub(super) fn not_started(component: &str, why: &str, log: &Path, tail: &str) -> String {
    let text = format!(
        "{component} did not start: {why}; its log is {}",
        log.display()
    );
    with_tail(text, tail)
}

/// Adds the last lines of a log, if there are any.
fn with_tail(text: String, tail: &str) -> String {
    match tail.trim_end() {
        "" => text,
        tail => format!("{text}\n{tail}"),
    }
}

/// Error: the runtime at an endpoint does not answer.
pub(super) fn no_runtime(endpoint: &str, why: &str) -> String {
    format!("the container runtime at {endpoint} does not answer: {why}")
}

/// What to do if the user's own runtime does not answer.
pub(super) const CHECK_ENDPOINT: &str =
    "start it, or set --containerd-endpoint to the socket of a running containerd";

/// Error: the runtime has `count` pods of another agent, among them `pod`, which is a namespace and a name.
pub(super) fn foreign_pods(endpoint: &str, count: usize, pod: (&str, &str)) -> String {
    let (namespace, name) = pod;
    format!(
        "invalid --containerd-endpoint {endpoint}: it already serves a kubelet, with {count} pods of another node agent, such as {namespace}/{name}; two agents on one runtime would stop each other's pods; remove the flag to start a private containerd, or use another containerd"
    )
}

/// Error: a bundled image cannot be imported.
pub(super) fn not_imported(image: &str, why: &str) -> String {
    format!("the image {image} cannot be imported: {why}")
}

/// Error: the node did not become Ready. `tail` has the last lines of the agent's log.
pub(super) fn not_ready(node: &str, why: &str, log: &Path, tail: &str) -> String {
    let log = log.display();
    let text = format!("the node {node} did not become Ready: {why}; the agent's log is {log}");
    with_tail(text, tail)
}

/// The end of a successful `up`. `control_plane` describes the control plane.
pub(super) fn running(node: &str, runtime: &str, control_plane: &str) -> String {
    format!("Holdfast is running: node {node} is Ready on {runtime}, {control_plane}")
}

/// Describes how to use the bundled control plane. `image` is the demo image.
pub(super) fn own_api(port: u16, kubeconfig: &Path, image: &str) -> String {
    let kubeconfig = kubeconfig.display();
    format!(
        "API at https://127.0.0.1:{port}.\nThe kubeconfig is {kubeconfig}; use it with: export KUBECONFIG={kubeconfig}\nTry next: kubectl create deployment web --image={image} --replicas=3"
    )
}

/// Describes the control plane of a cluster that the node has joined.
pub(super) fn joined(version: &str) -> String {
    format!("in a cluster of Kubernetes {version}.")
}

/// The end of a successful `down`. `was_running` is whether any component ran; `kept` is the directory with the
/// cluster's data, if it stays.
pub(super) fn stopped(was_running: bool, kept: Option<&Path>) -> String {
    let mut text = if was_running {
        "Holdfast has stopped; all its pods were removed.".to_owned()
    } else {
        "Holdfast was not running.".to_owned()
    };
    if let Some(dir) = kept {
        text.push_str(&format!(
            "\nIts data is kept in {}; `holdfast down --purge` removes it.",
            dir.display()
        ));
    }
    text
}

/// Report of `down`: pods that were not evicted.
pub(super) fn pods_stay(node: &str, pods: &[String]) -> String {
    format!(
        "These pods of node {node} have no controller or did not stop in time; they end when the Node is deleted: {}.",
        pods.join(", ")
    )
}

/// Report of `down`: the node was not drained.
pub(super) fn not_drained(node: &str, why: &str) -> String {
    format!(
        "The pods of node {node} were not evicted: {why}. They start elsewhere when the Node is deleted."
    )
}

/// Report of `down` without an administrator's kubeconfig.
pub(super) fn node_stays(node: &str) -> String {
    format!(
        "The Node {node} stays in the cluster, and `holdfast join` starts it again. To remove it, run `kubectl delete node {node}` as an administrator."
    )
}

/// Report of `down`: the Node was deleted.
pub(super) fn node_removed(node: &str) -> String {
    format!("The Node {node} was removed from the cluster.")
}

/// Report of `down`: the Node cannot be deleted.
pub(super) fn node_not_removed(node: &str, why: &str) -> String {
    format!(
        "The Node {node} was not removed: {why}. Run `kubectl delete node {node}` as an administrator."
    )
}

/// Error of `join`: a node that `down` cordoned stays cordoned.
pub(super) fn not_uncordoned(node: &str, why: &str) -> String {
    format!("the node {node} is still cordoned: {why}; run `kubectl uncordon {node}`")
}

/// Error: the cluster has no kubeconfig.
pub(super) fn no_kubeconfig(file: &Path) -> String {
    format!(
        "{} cannot be read; start the cluster with `holdfast up` first",
        file.display()
    )
}

/// Error: an unknown component.
pub(super) fn unknown_component(name: &str, known: &[&str]) -> String {
    format!("invalid --part {name:?}: use one of {}", known.join(", "))
}

/// A component, as `up status` shows it.
pub(super) struct Shown<'a> {
    /// The component's name.
    pub(super) name: &'a str,
    /// The process; `None` if the component does not run.
    pub(super) pid: Option<i32>,
    /// Whether a supervisor would restart the component.
    pub(super) is_supervised: bool,
    /// The number of restarts, the cause of the last one, and the seconds since then; `None` without restarts.
    pub(super) restarted: Option<(u32, &'a str, i64)>,
    /// The component's log.
    pub(super) log: &'a Path,
}

/// A line of `up status`.
pub(super) fn component(shown: &Shown<'_>) -> String {
    // containerd never has a supervisor.
    let mut text = match (shown.pid, shown.is_supervised) {
        (Some(pid), true) => format!("runs (pid {pid})"),
        (Some(pid), false) if shown.name == "containerd" => format!("runs (pid {pid})"),
        (Some(pid), false) => format!("runs (pid {pid}), without a supervisor"),
        (None, true) => "does not run; its supervisor is about to restart it".to_owned(),
        (None, false) => "does not run".to_owned(),
    };
    if let Some((times, why, ago)) = shown.restarted {
        let restarted = match times {
            1 => format!("restarted {ago} s ago"),
            _ => format!("restarted {times} times, last {ago} s ago"),
        };
        text.push_str(&format!(
            "; {restarted} because {why}; its log is {}",
            shown.log.display()
        ));
    }
    format!("{:<14} {text}", shown.name)
}

/// Why a component exited.
pub(super) fn exit_cause(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("it exited with code {code}"),
        (_, Some(signal)) => Signal::try_from(signal)
            .map_or(format!("it was killed by signal {signal}"), |s| {
                format!("it was killed by {s}")
            }),
        _ => "it exited".into(),
    }
}

/// The supervisor's line in a component's log.
pub(super) fn restart(component: &str, pause: Duration, why: &str) -> String {
    format!(
        "{component} is restarted in {} ms, because {why}",
        pause.as_millis()
    )
}

#[cfg(test)]
mod tests;
