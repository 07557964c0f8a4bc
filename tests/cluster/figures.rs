//! Metrics, the stats summary, traces and `agent --check` of a real node.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use support::client::pod;
use support::{Cluster, condition};

#[derive(Clone, Default)]
struct Collector(
    std::sync::Arc<std::sync::Mutex<Vec<opentelemetry_proto::tonic::trace::v1::Span>>>,
);

#[tonic::async_trait]
impl opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::TraceService
    for Collector
{
    async fn export(
        &self,
        request: tonic::Request<
            opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest,
        >,
    ) -> Result<
        tonic::Response<
            opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse,
        >,
        tonic::Status,
    > {
        let spans = request
            .into_inner()
            .resource_spans
            .into_iter()
            .flat_map(|r| r.scope_spans)
            .flat_map(|s| s.spans);
        self.0.lock().unwrap().extend(spans);
        Ok(tonic::Response::new(Default::default()))
    }
}

impl Collector {
    /// The collector listens while the runtime exists.
    fn listen() -> (Collector, u16, tokio::runtime::Runtime) {
        use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::TraceServiceServer;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime
            .block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))
            .unwrap();
        let (collector, port) = (Collector::default(), listener.local_addr().unwrap().port());
        let served = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(collector.clone()));
        runtime.spawn(
            served.serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener)),
        );
        (collector, port, runtime)
    }

    /// Whether a span with this name has a parent with the name `within`.
    fn has(&self, name: &str, within: &str) -> bool {
        let all = self.0.lock().unwrap();
        let parent = |span: &opentelemetry_proto::tonic::trace::v1::Span| {
            all.iter()
                .find(|p| p.span_id == span.parent_span_id && p.trace_id == span.trace_id)
                .map_or(String::new(), |p| p.name.clone())
        };
        all.iter()
            .any(|span| span.name == name && parent(span) == within)
    }
}

/// The value of the first sample whose line begins with `begin`.
fn value(text: &str, begin: &str) -> f64 {
    let line = text
        .lines()
        .find(|l| l.starts_with(begin))
        .unwrap_or_else(|| panic!("no {begin} in\n{text}"));
    let rest = line
        .rsplit_once('}')
        .map_or_else(|| line.split_once(' ').unwrap().1, |(_, rest)| rest.trim());
    rest.split(' ').next().unwrap().parse().unwrap()
}

/// The kubelet's HTTP paths on the only node of a cluster.
struct Node<'a> {
    cluster: &'a Cluster,
}

impl Node<'_> {
    fn of(cluster: &Cluster) -> Node<'_> {
        Node { cluster }
    }

    fn raw(&self, path: &str) -> String {
        self.cluster.get_node_path(path)
    }
}

#[test]
fn metrics_are_those_that_dashboards_query() {
    let (collector, collects, _runtime) = Collector::listen();
    let tracing =
        format!("tracing: {{endpoint: '127.0.0.1:{collects}', samplingRatePerMillion: 1000000}}\n");
    let cluster = Cluster::start_configured("figures", 46, &tracing);
    let image = support::busybox(&cluster);
    let script = "busybox dd if=/dev/zero of=/v/file bs=1M count=5 2>/dev/null; i=0; while test $i -lt 300000; do i=$((i+1)); done; echo > /v/done; sleep 10000";
    let busy = pod("busy", &image, script)
        .replace("containers:", "volumes: [{name: v, emptyDir: {}}], containers:")
        .replace("command:", "resources: {limits: {memory: 64Mi, cpu: '1'}}, readinessProbe: {periodSeconds: 1, timeoutSeconds: 30, exec: {command: [busybox, test, -e, /v/done]}}, volumeMounts: [{name: v, mountPath: /v}], command:");
    cluster.apply(&busy);
    cluster.wait("the pod to be ready", || {
        condition(&cluster.pod("busy"), "Ready") == "True"
    });
    let node = Node::of(&cluster);
    resource_metrics(&node);
    cadvisor_metrics(&node);
    names_are_those_of_the_list(&node);
    summary(&node);
    traces(&cluster, &collector);
    check_says_what_a_start_would_do(&cluster);
    a_record_is_written_and_replayed(&cluster);
    the_doctor_names_what_is_wrong(&cluster);
    own_metrics(&node);
    a_short_pod_costs_few_requests(&node, &image);
    assert!(
        node.raw("/metrics/probes")
            .lines()
            .any(|l| l.starts_with("prober_probe_total")
                && l.contains(r#"result="successful""#)
                && l.contains(r#"pod="busy""#))
    );
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true"]);
    cluster.wait("the pod's metrics to be removed", || {
        !node.raw("/metrics/probes").contains("busy")
            && !node.raw("/metrics/resource").contains("busy")
    });
    cluster.assert_clean();
}

/// `/metrics/resource`, which metrics-server reads.
fn resource_metrics(node: &Node) {
    let namespace = node.cluster.namespace();
    let labels = format!(r#"{{container="c",namespace="{namespace}",pod="busy"}}"#);
    let cpu = format!("container_cpu_usage_seconds_total{labels}");
    let start = format!("container_start_time_seconds{labels}");
    let mut resource = String::new();
    // The container appears once the agent has seen its own status update through the watch.
    node.cluster.wait("the CPU time to be counted", || {
        resource = node.raw("/metrics/resource");
        let has = |name: &str| resource.lines().any(|l| l.starts_with(name));
        has(&start) && has(&cpu) && value(&resource, &cpu) > 0.05
    });
    let memory = value(
        &resource,
        &format!("container_memory_working_set_bytes{labels}"),
    );
    assert!(
        memory > 10_000.0 && memory < f64::from(64 << 20),
        "{memory}"
    );
    let began = value(&resource, &start);
    assert!(
        (jiff::Timestamp::now().as_second() as f64 - began).abs() < 600.0,
        "{began}"
    );
    assert!(
        value(&resource, "node_memory_working_set_bytes") > memory
            && value(&resource, "resource_scrape_error") == 0.0
    );
    assert!(
        value(
            &resource,
            &format!(r#"pod_cpu_usage_seconds_total{{namespace="{namespace}",pod="busy"}}"#)
        ) >= 0.05
    );
}

/// `/metrics/cadvisor`.
fn cadvisor_metrics(node: &Node) {
    let adviser = node.raw("/metrics/cadvisor");
    let of_container = |name: &str| {
        let own = |l: &&str| {
            l.starts_with(&format!("{name}{{"))
                && l.contains(r#"container="c""#)
                && l.contains(r#"pod="busy""#)
        };
        let line = adviser.lines().find(own);
        line.unwrap_or_else(|| panic!("no {name} of the container in\n{adviser}"))
    };
    let value = |name: &str| {
        let line = of_container(name);
        let (_, rest) = line.rsplit_once('}').unwrap();
        let value = rest.split_whitespace().next().unwrap();
        value.parse::<f64>().unwrap()
    };
    for (name, least) in [
        ("container_memory_working_set_bytes", 1.0),
        ("container_cpu_cfs_periods_total", 0.0),
        ("container_spec_cpu_quota", 100_000.0),
        ("container_spec_cpu_shares", 2.0),
        ("container_processes", 1.0),
        ("container_threads", 1.0),
        ("container_file_descriptors", 1.0),
        ("container_sockets", 0.0),
        ("container_ulimits_soft", 1.0),
        ("container_start_time_seconds", 1e9),
    ] {
        assert!(value(name) >= least, "{}", of_container(name));
    }
    let limit = of_container("container_spec_memory_limit_bytes");
    assert!(limit.ends_with(&format!("}} {}", 64 << 20)), "{limit}");
    let received = "container_network_receive_bytes_total{";
    let mut of_pod = adviser.lines().filter(|l| l.starts_with(received));
    assert!(of_pod.any(|l| {
        l.contains(r#"interface="eth0""#)
            && l.contains(r#"pod="busy""#)
            && l.contains(r#"container="""#)
            && !l.contains(r#"image="""#)
    }));
    for id in ["/", "/kubepods/besteffort", "/kubepods/burstable"] {
        let end = format!(r#"{id}",image="",name="",namespace="",pod="""#);
        let mut memory = adviser
            .lines()
            .filter(|l| l.starts_with("container_memory_usage_bytes"));
        assert!(memory.any(|l| l.contains(&end)), "{id}");
    }
}

/// The names and the labels of the series of a page.
fn series(page: &str) -> BTreeSet<String> {
    let name = |line: &str| {
        let (name, rest) = line.split_once(['{', ' ']).unwrap();
        if line.as_bytes()[name.len()] == b' ' {
            return name.to_owned();
        }
        let (labels, _) = rest.rsplit_once('}').unwrap();
        let mut labels: Vec<&str> = labels
            .split("\",")
            .map(|pair| pair.split_once('=').unwrap().0)
            .collect();
        labels.sort_unstable();
        format!("{name}{{{}}}", labels.join(","))
    };
    let samples = page.lines().filter(|l| !l.starts_with('#'));
    samples.map(name).collect()
}

/// Compares the served series with the list in `metrics.txt`.
fn names_are_those_of_the_list(node: &Node) {
    let (mut path, mut listed) = ("", BTreeMap::<&str, (BTreeSet<_>, BTreeSet<_>)>::new());
    for line in include_str!("metrics.txt").lines() {
        match line.split_at_checked(1) {
            Some(("/", _)) => path = line,
            Some(("?", name)) => _ = listed.entry(path).or_default().1.insert(name.trim()),
            None | Some(("#", _)) => {}
            Some(_) => _ = listed.entry(path).or_default().0.insert(line),
        }
    }
    assert!(listed.len() > 3);
    for (path, (always, sometimes)) in listed {
        let page = node.raw(path);
        let served = series(&page);
        let served: BTreeSet<&str> = served.iter().map(String::as_str).collect();
        let lost: Vec<_> = always.difference(&served).collect();
        assert!(lost.is_empty(), "{path} lacks {lost:#?}");
        let known: BTreeSet<&str> = always.union(&sometimes).copied().collect();
        let new: Vec<_> = served.difference(&known).collect();
        assert!(
            new.is_empty() || path == "/metrics",
            "{path} has series that the list lacks: {new:#?}"
        );
    }
}

/// `/stats/summary`, complete and CPU and memory only.
fn summary(node: &Node) {
    let mut summary = serde_json::Value::Null;
    let mut own = serde_json::Value::Null;
    // Disk usage that takes long to measure appears in a later response.
    node.cluster.wait("the disk usage to be measured", || {
        summary = serde_json::from_str(&node.raw("/stats/summary")).unwrap();
        let pods = summary["pods"].as_array().unwrap();
        let busy = pods.iter().find(|p| p["podRef"]["name"] == "busy");
        own = busy.unwrap().clone();
        own["volume"].is_array()
    });
    assert_eq!(own["containers"][0]["name"], "c");
    assert!(
        own["containers"][0]["memory"]["availableBytes"].as_u64() < Some(64 << 20)
            && own["cpu"]["usageCoreNanoSeconds"].as_u64() > Some(50_000_000)
    );
    assert!(
        own["network"]["rxBytes"].is_u64()
            && own["process_stats"]["process_count"].as_u64() > Some(0),
        "{own}"
    );
    let volume = own["volume"]
        .as_array()
        .unwrap()
        .iter()
        .find(|v| v["name"] == "v")
        .unwrap();
    assert!(volume["usedBytes"].as_u64() >= Some(5 << 20), "{volume}");
    assert!(own["ephemeral-storage"]["usedBytes"].as_u64() >= Some(5 << 20));
    // Some kernels have the file but cannot read it.
    let pressed = std::fs::read_to_string("/proc/pressure/io").is_ok();
    let node_pressure = &summary["node"]["io"]["psi"]["some"]["total"];
    assert_eq!(node_pressure.is_u64(), pressed, "{}", summary["node"]);
    assert!(own["swap"]["swapUsageBytes"].is_u64() && own["containers"][0]["swap"].is_object());
    let systems = summary["node"]["systemContainers"].as_array().unwrap();
    let pods = systems.iter().find(|s| s["name"] == "pods").unwrap();
    assert!(pods["cpu"]["usageCoreNanoSeconds"].as_u64() > Some(0) && pods["swap"].is_object());
    for key in ["cpu", "memory", "fs", "runtime", "rlimit", "swap"] {
        assert!(
            summary["node"][key].is_object(),
            "{key}: {}",
            summary["node"]
        );
    }
    let short: serde_json::Value =
        serde_json::from_str(&node.raw("/stats/summary?only_cpu_and_memory=true")).unwrap();
    assert!(short["node"]["fs"].is_null() && short["pods"][0]["cpu"].is_object());
    assert!(short["node"]["io"].is_null() && short["node"]["swap"].is_object());
}

/// The spans of a pod's start, down to the calls to the runtime.
fn traces(cluster: &Cluster, collector: &Collector) {
    for (name, within) in [
        ("syncPod", ""),
        ("sandbox", "syncPod"),
        ("runtime.v1.RuntimeService/RunPodSandbox", "sandbox"),
        ("runtime.v1.RuntimeService/CreateContainer", "create"),
        ("volume", "syncPod"),
        ("GET /stats", ""),
    ] {
        cluster.wait(&format!("a span {name} within {within:?}"), || {
            collector.has(name, within)
        });
    }
    let of_pod = |span: &opentelemetry_proto::tonic::trace::v1::Span| {
        span.attributes
            .iter()
            .any(|a| a.key == "k8s.pod.name" && format!("{a:?}").contains("busy"))
    };
    assert!(
        collector
            .0
            .lock()
            .unwrap()
            .iter()
            .any(|span| span.name == "syncPod" && of_pod(span))
    );
}

/// `agent --check` next to the running agent.
fn check_says_what_a_start_would_do(cluster: &Cluster) {
    let root = cluster.data().join("agent");
    let at = |name: &str| root.join(name).display().to_string();
    let (file, login, dir) = (
        at("config.json"),
        at("kubeconfig"),
        root.display().to_string(),
    );
    let flags = [
        "agent",
        "--check",
        "--config",
        &file,
        "--kubeconfig",
        &login,
        "--root-dir",
        &dir,
        "--hostname-override",
        &cluster.node_name(),
        "--fail-swap-on=false",
        "--volume-plugin-dir=/elsewhere",
    ];
    let checked = Command::new(support::holdfast())
        .args(flags)
        .output()
        .unwrap();
    let report = String::from_utf8(checked.stdout).unwrap();
    assert!(
        checked.status.success()
            && report.contains(&format!(
                "1 pods would keep running: busy_{}",
                cluster.namespace()
            )),
        "{report}"
    );
    assert!(
        report.contains("0 pods would be started")
            && report.contains("0 pods would be stopped")
            && report.contains("volumePluginDir"),
        "{report}"
    );
    let wrong = Command::new(support::holdfast())
        .args(flags)
        .arg("--port=0")
        .output()
        .unwrap();
    assert!(
        !wrong.status.success()
            && String::from_utf8_lossy(&wrong.stderr).contains("port: \"0\" is invalid"),
        "{wrong:?}"
    );
}

/// `doctor` on a working node, and with flags for a node that would not work.
fn the_doctor_names_what_is_wrong(cluster: &Cluster) {
    let severities = |printed: &str| -> Vec<(String, String)> {
        let findings: Vec<serde_json::Value> = serde_json::from_str(printed).unwrap();
        let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
        let pairs = findings
            .iter()
            .map(|f| (text(&f["subject"]), text(&f["severity"])));
        pairs.collect()
    };
    let node = cluster.node_name();
    // The doctor warns of slow responses, which can occur on a busy machine.
    cluster.wait("the doctor to find no problem", || {
        let printed = cluster.holdfast(&["doctor", "-o", "json", "--hostname-override", &node]);
        println!("{printed}");
        let found = severities(&printed);
        ["kernel", "cgroups", "runtime", "apiserver", "node", "port"]
            .iter()
            .all(|subject| found.contains(&((*subject).to_owned(), "ok".to_owned())))
    });
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = format!("--healthz-port={}", taken.local_addr().unwrap().port());
    let run = Command::new(support::holdfast())
        .args(["doctor", "-o", "json", "--name", cluster.name(), &port])
        .arg("--container-runtime-endpoint=unix:///nonexistent/runtime.sock")
        .output()
        .unwrap();
    let printed = String::from_utf8(run.stdout).unwrap();
    assert_eq!(run.status.code(), Some(1), "{printed}");
    let found = severities(&printed);
    for subject in ["runtime", "port"] {
        let error = (subject.to_owned(), "error".to_owned());
        assert!(found.contains(&error), "{subject}: {found:?}");
    }
    assert!(
        printed.contains("unix:///nonexistent/runtime.sock")
            && printed.contains("--container-runtime-endpoint"),
        "{printed}"
    );
    let invalid = Command::new(support::holdfast())
        .args(["doctor", "-o", "json", "--name", cluster.name(), "--port=0"])
        .output()
        .unwrap();
    let printed = String::from_utf8(invalid.stdout).unwrap();
    assert_eq!(invalid.status.code(), Some(1), "{printed}");
    assert_eq!(
        severities(&printed),
        [("config".to_owned(), "error".to_owned())]
    );
    assert!(printed.contains("port: \\\"0\\\" is invalid"), "{printed}");
}

/// `agent record pod` and `replay`, with an unchanged record and with one that another version might have written.
fn a_record_is_written_and_replayed(cluster: &Cluster) {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (file, changed) = (at("record.json"), at("changed.json"));
    let pod = ["pod", "busy", "--namespace", cluster.namespace()];
    let record = [&["agent", "record"], &pod[..], &["--output", &file]].concat();
    cluster.holdfast(&record);
    let replay = |file: &str| {
        let run = Command::new(support::holdfast())
            .args(["replay", file])
            .output()
            .unwrap();
        let printed = [run.stdout, run.stderr].concat();
        (run.status.code(), String::from_utf8(printed).unwrap())
    };
    let (code, printed) = replay(&file);
    assert_eq!(code, Some(0), "{printed}");
    assert!(
        printed.contains(&format!("Pod {}/busy on node", cluster.namespace()))
            && printed.contains("decides the same in every turn"),
        "{printed}"
    );
    let mut report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let entry = &mut report["record"]["entries"][0];
    entry["decision"]["waiting"] = "for Godot".into();
    std::fs::write(&changed, report.to_string()).unwrap();
    let (code, printed) = replay(&changed);
    assert_eq!(code, Some(1), "{printed}");
    assert!(
        printed.contains("for Godot") && printed.contains("differently in 1 of"),
        "{printed}"
    );
    // Files of versions before the format number have none.
    report.as_object_mut().unwrap().remove("format");
    for (text, why) in [
        ("nonsense".to_owned(), "not a record"),
        (report.to_string(), "a record of format 0"),
    ] {
        std::fs::write(&changed, text).unwrap();
        let (code, printed) = replay(&changed);
        assert!(code == Some(1) && printed.contains(why), "{printed}");
    }
}

/// A pod that runs, exits and is deleted costs at most four status patches (the goal is three), none of
/// them without a change. Each second that the runtime takes on a busy machine allows one more.
fn a_short_pod_costs_few_requests(node: &Node, image: &str) {
    let patches = || {
        let count = "kubelet_pod_status_sync_duration_seconds_count";
        value(&node.raw("/metrics"), count)
    };
    let cluster = node.cluster;
    let (before, begun) = (patches(), std::time::Instant::now());
    let short =
        pod("short", image, "true").replace("containers:", "restartPolicy: Never, containers:");
    cluster.apply(&short);
    let phase = || cluster.pod("short")["status"]["phase"].clone();
    cluster.wait("the pod to succeed", || phase() == "Succeeded");
    let most = 4.0_f64.max(3.0 + begun.elapsed().as_secs_f64().floor());
    // A change of the object outside its status must not cause a status write.
    for n in 0..5 {
        cluster.kubectl(&["annotate", "pod", "short", &format!("n{n}=x")]);
    }
    cluster.kubectl(&["delete", "pod", "short", "--wait=true"]);
    let cost = patches() - before;
    assert!(
        (1.0..=most).contains(&cost),
        "{cost} patches of the pod's status, at most {most} allowed"
    );
}

/// Series that are served from the start.
fn facts(agent: &str) {
    for (begin, least) in [
        (
            r#"kubernetes_feature_enabled{name="DynamicResourceAllocation",stage=""}"#,
            1.0,
        ),
        (
            r#"kubelet_running_containers{container_state="exited"}"#,
            0.0,
        ),
        (r#"kubelet_restarted_pods_total{static="true"}"#, 0.0),
        ("kubelet_orphaned_runtime_pods_total", 0.0),
    ] {
        assert!(value(agent, begin) >= least, "{begin}");
    }
}

/// `/metrics` of the agent itself.
fn own_metrics(node: &Node) {
    let (agent, namespace) = (node.raw("/metrics"), node.cluster.namespace());
    facts(&agent);
    assert!(value(&agent, "process_resident_memory_bytes") > f64::from(1 << 20));
    assert!(
        value(
            &agent,
            r#"kubelet_runtime_operations_total{operation_type="run_podsandbox"}"#
        ) >= 1.0
    );
    assert!(
        value(&agent, "kubelet_pod_start_duration_seconds_count") >= 1.0
            && value(&agent, "kubelet_running_pods") >= 1.0
    );
    assert!(
        value(
            &agent,
            r#"kubelet_http_requests_total{method="GET",path="stats""#
        ) >= 1.0
    );
    for (begin, least) in [
        // Debian's containerd is older than 2.0.
        (r#"kubelet_cri_losing_support{version="1.37.0"}"#, 1.0),
        ("kubelet_pod_start_sli_duration_seconds_count", 1.0),
        ("kubelet_pod_start_total_duration_seconds_count", 1.0),
        (
            r#"kubelet_pod_worker_duration_seconds_count{operation_type="create"}"#,
            1.0,
        ),
        ("kubelet_pod_status_sync_duration_seconds_count", 1.0),
        (
            r#"kubelet_run_podsandbox_duration_seconds_count{runtime_handler=""}"#,
            1.0,
        ),
        (
            r#"kubelet_started_containers_total{container_type="container"}"#,
            1.0,
        ),
        ("kubelet_started_pods_total", 1.0),
        ("kubelet_containers_per_pod_count_count", 1.0),
        ("kubelet_pod_worker_start_duration_seconds_count", 1.0),
        ("kubelet_pleg_last_seen_seconds", 1.7e9),
        (
            "kubelet_cgroup_manager_duration_seconds_count{operation_type=\"create\"}",
            1.0,
        ),
        (
            r#"storage_operation_duration_seconds_count{migrated="false",operation_name="volume_mount",status="success",volume_plugin="kubernetes.io/empty-dir"}"#,
            1.0,
        ),
        (
            r#"kubelet_http_requests_duration_seconds_count{method="GET",path="stats""#,
            1.0,
        ),
        (
            r#"rest_client_requests_total{code="200",method="PATCH""#,
            1.0,
        ),
        (
            r#"holdfast_step_duration_seconds_count{step="sandbox",result="done"}"#,
            1.0,
        ),
        (
            r#"kubernetes_feature_enabled{name="NodeSwap",stage=""}"#,
            1.0,
        ),
        (
            r#"kubernetes_feature_enabled{name="MemoryQoS",stage="ALPHA"}"#,
            0.0,
        ),
        ("kubelet_mirror_pods", 0.0),
    ] {
        assert!(value(&agent, begin) >= least, "{begin}");
    }
    // This agent has registered the node, and the summary has measured its pods' disks.
    for (begin, least) in [
        (
            r#"kubelet_http_inflight_requests{method="GET",path="metrics""#,
            1.0,
        ),
        ("kubelet_node_startup_pre_kubelet_duration_seconds", 1.0),
        ("kubelet_node_startup_registration_duration_seconds", 1e-6),
        ("kubelet_node_startup_duration_seconds", 1.0),
        ("kubelet_first_network_pod_start_sli_duration_seconds", 1e-3),
        (
            r#"kubelet_working_pods{config="desired",lifecycle="sync",static=""}"#,
            1.0,
        ),
        (
            &format!(
                r#"kubelet_container_log_filesystem_used_bytes{{container="c",namespace="{namespace}",pod="busy""#
            ),
            1.0,
        ),
        ("kubelet_pod_in_progress_resizes", 0.0),
    ] {
        assert!(value(&agent, begin) >= least, "{begin}");
    }
    assert!(agent.contains("rest_client_request_duration_seconds_bucket{host="));
}
