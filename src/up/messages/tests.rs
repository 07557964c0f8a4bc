//! Snapshots of the texts, with fixed facts.

use super::*;

/// The texts, with a dash before each.
fn listed(texts: &[String]) -> String {
    let items: Vec<String> = texts.iter().map(|text| format!("- {text}")).collect();
    items.join("\n")
}

const LOG: &str = "/var/lib/holdfast/logs/agent.log";
const TAIL: &str = "  | starting the agent\n  | holdfast: port 10250 is in use\n";

#[test]
fn refused_flags() {
    let range = "10.0.0.1/24".parse().expect("a range");
    let texts = [
        needs_root("up"),
        invalid_name("Not Valid"),
        invalid_pod_cidr(range),
        invalid_agent_port(6443),
        no_agent_port(65_000),
        cannot_change("--api-port", "6444", "holdfast", "6443"),
        cannot_change("--pod-cidr", "10.1.0.0/24", "two", "10.244.0.0/24"),
        unreadable("--agent-config", Path::new("/etc/agent.yaml")),
        invalid_agent_config(Path::new("/etc/agent.yaml"), "line 1: unexpected ':'"),
        unreadable("--join", Path::new("/etc/kubernetes/kubelet.conf")),
        no_apiserver(
            Path::new("/etc/kubernetes/kubelet.conf"),
            "connection refused",
        ),
        foreign_pods(
            "unix:///run/containerd/containerd.sock",
            2,
            ("default", "web-1"),
        ),
        invalid_range(
            "--service-cidr",
            "10.96.0.0/12",
            "it overlaps 10.96.0.0/16, which is a range of the cluster two",
            "use a free range, such as 10.97.0.0/16",
        ),
        recorded_range("--service-cidr", "10.97.0.0/16", "10.96.0.0/16"),
        no_free_range("--cluster-cidr"),
        unreadable_record(Path::new("/var/lib/holdfast/ranges.json")),
        unknown_component(
            "scheduler",
            &["containerd", "control-plane", "proxy", "agent"],
        ),
    ];
    insta::assert_snapshot!("refused_flags", listed(&texts));
}

#[test]
fn a_joined_node_leaves() {
    let texts = [
        pods_stay("b", &["default/alone".into(), "x/slow".into()]),
        not_drained("b", "connection refused"),
        node_stays("b"),
        node_removed("b"),
        node_not_removed("b", "forbidden"),
        not_uncordoned("b", "connection refused"),
    ];
    insta::assert_snapshot!("a_joined_node_leaves", listed(&texts));
}

#[test]
fn missing_programs() {
    let texts = [
        NO_CONTAINERD.to_owned(),
        NO_RUNC.to_owned(),
        NO_CTR.to_owned(),
        no_plugins(Path::new("/usr/local/bin/holdfast")),
        no_kubeconfig(Path::new("/var/lib/holdfast/kubeconfig")),
    ];
    insta::assert_snapshot!("missing_programs", listed(&texts));
}

#[test]
fn failed_starts() {
    let no_answer = no_runtime("unix:///run/holdfast/containerd.sock", "connection refused");
    let log = Path::new("/var/lib/holdfast/logs/containerd.log");
    let control = Path::new("/var/lib/holdfast/logs/control-plane.log");
    let texts = [
        not_started("containerd", &no_answer, log, TAIL),
        format!("{no_answer}; {CHECK_ENDPOINT}"),
        not_imported("holdfast.local/pause:1", "no space left on device"),
        not_started("the control plane", "connection refused", control, TAIL),
        not_ready("n1", NOT_REGISTERED, Path::new(LOG), TAIL),
        not_ready("n1", NOT_REPORTED, Path::new(LOG), ""),
        no_services(Path::new("/var/lib/holdfast/logs/proxy.log"), TAIL),
    ];
    insta::assert_snapshot!("failed_starts", listed(&texts));
}

#[test]
fn success() {
    let kubeconfig = Path::new("/var/lib/holdfast/kubeconfig");
    let own = own_api(6443, kubeconfig, "holdfast.local/demo:1");
    let data = Path::new("/var/lib/holdfast");
    let texts = [
        running("n1", "containerd 2.1.4", &own),
        running("n1", "containerd 2.1.4", &joined("v1.36.0")),
        stopped(true, Some(data)),
        stopped(true, None),
        stopped(false, Some(data)),
        stopped(false, None),
    ];
    insta::assert_snapshot!("success", listed(&texts));
}

#[test]
fn components() {
    let line = |name, pid, is_supervised, restarted| {
        let log = Path::new(LOG);
        component(&Shown {
            name,
            pid,
            is_supervised,
            restarted,
            log,
        })
    };
    let status = ExitStatus::from_raw;
    let (failed, killed) = (exit_cause(status(1 << 8)), exit_cause(status(9)));
    let lines = [
        line("containerd", Some(10), false, None),
        line("containerd", None, false, None),
        line("control-plane", Some(11), true, None),
        line("control-plane", Some(11), false, None),
        line("agent", Some(12), true, Some((3, &failed, 75))),
        line("agent", None, true, Some((1, &killed, 0))),
        restart("agent", Duration::from_millis(500), &failed),
        restart("agent", Duration::from_secs(30), &exit_cause(status(64))),
        NOT_ALL_RUN.to_owned(),
    ];
    insta::assert_snapshot!("components", lines.join("\n"));
}
