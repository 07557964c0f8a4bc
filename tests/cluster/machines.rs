//! Three machines in one cluster: pods, services, names and policies across them, the loss of a machine, and the whole way of a
//! deployment from a registry to a request.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use crate::images::Registry;
use crate::machine::{Machine, Network, join_words};
use crate::services::{get_in_pod, output_in_pod};
use crate::support::{self, Cluster, condition, images};

/// The joined nodes.
const JOINED: [&str; 2] = ["second", "third"];
const CLIENT: &str = "test.local/client:1";

/// A cluster and two joined machines, the last one behind a router. The fields are dropped in this order: machines leave before their network.
struct Machines {
    joined: [Machine; 2],
    cluster: Cluster,
    network: Network,
}

impl Machines {
    /// Agents send heartbeats every two seconds, so that the loss of a machine is noticed soon.
    fn start(name: &str, number: u16, ranges: [&'static str; 2]) -> Machines {
        let fields = "nodeLeaseDurationSeconds: 8\n";
        let mut cluster = Cluster::new(name, number).configured(fields);
        cluster.ranges = Some(ranges);
        cluster.flags = vec!["--node-monitor-grace-period=20s".to_owned()];
        let cluster = cluster.started();
        let network = Network::new(number);
        let [second, third] =
            [2, 3].map(|host| Machine::new(&network, &format!("{name}-{host}"), host));
        let joined = [second, third.behind_router(&network, 3)];
        let words = join_words(&cluster);
        let config = cluster
            .config
            .as_ref()
            .unwrap()
            .path()
            .display()
            .to_string();
        std::thread::scope(|scope| {
            for (machine, node) in joined.iter().zip(JOINED) {
                let (words, config) = (&words, &config);
                scope.spawn(move || machine.join(words, node, &["--agent-config", config]));
            }
        });
        Machines {
            joined,
            cluster,
            network,
        }
    }

    /// The names of the nodes; the first is the control plane's.
    fn nodes(&self) -> [String; 3] {
        let all = self.cluster.object("/api/v1/nodes");
        let all = all["items"].as_array().unwrap().iter();
        let mut names = all.map(|n| n["metadata"]["name"].as_str().unwrap().to_owned());
        let first = names.find(|n| !JOINED.contains(&n.as_str())).unwrap();
        [first, JOINED[0].to_owned(), JOINED[1].to_owned()]
    }

    /// Creates a pod `client-0` to `client-2` on each node, with a label of its number.
    fn create_clients(&self) -> [String; 3] {
        images::busybox_alone_at(&self.cluster.run_dir(), CLIENT);
        for machine in &self.joined {
            images::busybox_alone_at(&machine.run_dir(), CLIENT);
        }
        let mut names = [0, 1, 2].map(|n| format!("client-{n}"));
        for (number, node) in self.nodes().iter().enumerate() {
            let name = format!("client-{number}");
            let container =
                json!({"name": "c", "image": CLIENT, "command": ["busybox", "sleep", "10000"]});
            let pod = json!({"apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": name, "labels": {"client": number.to_string()}},
                "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [container]}});
            self.cluster.apply(&pod.to_string());
            names[number] = name;
        }
        self.wait_ready("", 3);
        names
    }

    /// The pods with a label, or all of them for an empty selector, that are ready.
    fn ready(&self, selector: &str) -> Vec<Value> {
        let path = format!("/api/v1/namespaces/default/pods?labelSelector={selector}");
        let all = self.cluster.object(&path);
        let mut all = all["items"].as_array().unwrap().clone();
        all.retain(|pod| {
            condition(pod, "Ready") == "True" && pod["metadata"]["deletionTimestamp"].is_null()
        });
        all
    }

    fn wait_ready(&self, selector: &str, count: usize) {
        let what = format!("{count} ready pods of {selector:?}");
        self.cluster
            .wait(&what, || self.ready(selector).len() == count);
    }

    /// Waits until a page comes from an address or a name, in a pod.
    #[track_caller]
    fn wait_page(&self, client: &str, host: &str) {
        let what = format!("a page of {host} in {client}");
        self.cluster.wait(&what, || self.has_page(client, host));
    }

    fn has_page(&self, client: &str, host: &str) -> bool {
        get_in_pod(&self.cluster, client, &format!("http://{host}/")).is_some()
    }
}

fn texts(pods: &[Value], pointer: &str) -> BTreeSet<String> {
    let values = pods.iter().map(|pod| pod.pointer(pointer).unwrap());
    values.map(|v| v.as_str().unwrap().to_owned()).collect()
}

/// A deployment of three pods, which leave a lost node after a second, and its service.
fn expose_web(machines: &Machines) -> String {
    let tolerate = |key: &str| json!({"key": format!("node.kubernetes.io/{key}"), "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1});
    let labels = json!({"app": "web"});
    let spec = json!({"terminationGracePeriodSeconds": 1, "tolerations": [tolerate("unreachable"), tolerate("not-ready")],
        "containers": [{"name": "c", "image": "holdfast.local/demo:1"}]});
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
        "spec": {"replicas": 3, "selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}}});
    let cluster = &machines.cluster;
    cluster.apply(&deployment.to_string());
    cluster.kubectl(&["expose", "deployment", "web", "--port=80"]);
    machines.wait_ready("app=web", 3);
    let service = cluster.object("/api/v1/namespaces/default/services/web");
    service["spec"]["clusterIP"].as_str().unwrap().to_owned()
}

#[test]
fn three_machines_are_one_cluster() {
    if support::skip::needs_bundled("bootstrap tokens of `holdfast token`") {
        return;
    }
    let machines = Machines::start("three", 69, ["10.181.0.0/16", "10.181.81.0/24"]);
    let clients = machines.create_clients();
    let cluster_ip = expose_web(&machines);
    let pods = machines.ready("app=web");
    let nodes = texts(&pods, "/spec/nodeName");
    assert_eq!(nodes, machines.nodes().into(), "a pod on each node");
    let addresses = texts(&pods, "/status/podIP");
    for client in &clients {
        for host in &addresses {
            machines.wait_page(client, host);
        }
        machines.wait_page(client, &cluster_ip);
        machines.wait_page(client, "web");
        machines.wait_page(client, "web.default.svc.cluster.local");
    }
    a_policy_holds_across_nodes(&machines, &clients, &addresses);
    a_lost_machine_loses_its_endpoints(&machines, &clients, &cluster_ip);
}

/// Only the first client may reach the pods, wherever they are.
fn a_policy_holds_across_nodes(
    machines: &Machines,
    [friend, others @ ..]: &[String; 3],
    addresses: &BTreeSet<String>,
) {
    let policy = json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "friend"},
        "spec": {"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"client": "0"}}}]}]}});
    machines.cluster.apply(&policy.to_string());
    for other in others {
        for host in addresses {
            let what = format!("the policy keeps {other} from {host}");
            machines
                .cluster
                .wait(&what, || !machines.has_page(other, host));
        }
    }
    for host in addresses {
        machines.wait_page(friend, host);
    }
    machines
        .cluster
        .kubectl(&["delete", "networkpolicy", "friend"]);
    for other in others {
        for host in addresses {
            machines.wait_page(other, host);
        }
    }
}

/// The endpoints in a service's slices.
fn all_endpoints(cluster: &Cluster, service: &str) -> Vec<Value> {
    let path = format!(
        "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kubernetes.io/service-name={service}"
    );
    let slices = cluster.object(&path);
    let slices = slices["items"].as_array().unwrap().iter();
    let all = slices.flat_map(|s| s["endpoints"].as_array().cloned().unwrap_or_default());
    all.collect()
}

/// The nodes of a service's ready endpoints.
fn ready_endpoints(cluster: &Cluster, service: &str) -> Vec<String> {
    let all = all_endpoints(cluster, service).into_iter();
    let ready = all.filter(|e| e["conditions"]["ready"] == true);
    ready
        .map(|e| e["nodeName"].as_str().unwrap().to_owned())
        .collect()
}

/// A deleted pod on a lost node stays until its agent confirms the end, and its endpoint with it: not ready, and not serving, because
/// the node controller has set the pod to not ready. Both are removed with the Node, and the Endpoints object drops the address before.
fn the_endpoints_of_a_lost_node_are_removed(cluster: &Cluster, lost: &str) {
    let of_lost = || {
        let mut all = all_endpoints(cluster, "web");
        all.retain(|e| e["nodeName"] == lost);
        all
    };
    let expected = json!({"ready": false, "serving": false, "terminating": true});
    cluster.wait("a terminating endpoint that does not serve", || {
        let left = of_lost();
        left.len() == 1 && left[0]["conditions"] == expected
    });
    let object = cluster.object("/api/v1/namespaces/default/endpoints/web");
    let subsets = object["subsets"].as_array().unwrap();
    let addresses = |field: &str| {
        let all = subsets
            .iter()
            .flat_map(|s| s[field].as_array().cloned().unwrap_or_default());
        all.map(|a| a["nodeName"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let (ready, unready) = (addresses("addresses"), addresses("notReadyAddresses"));
    assert!(ready.len() == 3 && unready.is_empty(), "{object}");
    assert!(!ready.contains(&lost.to_owned()), "{object}");
    cluster.kubectl(&["delete", "node", lost]);
    cluster.wait("no endpoint of the deleted node", || of_lost().is_empty());
    cluster.wait("no pod of the deleted node", || {
        cluster.pods().iter().all(|p| p["spec"]["nodeName"] != lost)
    });
}

/// The last machine is cut off: its endpoints are not ready, and its pods run elsewhere.
fn a_lost_machine_loses_its_endpoints(machines: &Machines, clients: &[String; 3], service: &str) {
    let (cluster, lost) = (&machines.cluster, JOINED[1]);
    assert!(ready_endpoints(cluster, "web").contains(&lost.to_owned()));
    machines.joined[1].cut_power();
    cluster.wait("the lost node is not ready", || {
        let node = cluster.object(&format!("/api/v1/nodes/{lost}"));
        let conditions = node["status"]["conditions"].as_array().unwrap();
        conditions
            .iter()
            .any(|c| c["type"] == "Ready" && c["status"] == "Unknown")
    });
    cluster.wait("three endpoints on the other nodes", || {
        let nodes = ready_endpoints(cluster, "web");
        nodes.len() == 3 && !nodes.iter().any(|node| node == lost)
    });
    let nodes = texts(&machines.ready("app=web"), "/spec/nodeName");
    assert!(!nodes.contains(lost), "{nodes:?}");
    the_endpoints_of_a_lost_node_are_removed(cluster, lost);
    // No request is sent to the lost endpoints: each of several gets a page.
    for client in &clients[..2] {
        machines.wait_page(client, service);
        for request in 0..6 {
            assert!(machines.has_page(client, service), "{client} {request}");
        }
        machines.wait_page(client, "web");
    }
}

/// Lets the containerd of a cluster or machine pull images of docker.io from another registry.
fn mirror_docker_hub(data: &Path, registry: &Registry) {
    let dir = data.join("certs.d/docker.io");
    std::fs::create_dir_all(&dir).unwrap();
    let url = format!("http://{}", registry.address);
    let text = format!(
        "server = \"{url}\"\n\n[host.\"{url}\"]\n  capabilities = [\"pull\", \"resolve\"]\n"
    );
    std::fs::write(dir.join("hosts.toml"), text).unwrap();
}

#[test]
fn a_deployment_from_a_registry_answers_by_name_and_is_traced() {
    if support::skip::needs_bundled("bootstrap tokens of `holdfast token`") {
        return;
    }
    let machines = Machines::start("seeds", 82, ["10.182.0.0/16", "10.182.82.0/24"]);
    let cluster = &machines.cluster;
    let registry = Registry::start_at(&machines.network.address(1), false);
    let demo = ["library/nginx:latest"];
    registry.push(cluster, "k8s.io", "holdfast.local/demo:1", &demo);
    mirror_docker_hub(&cluster.data(), &registry);
    for machine in &machines.joined {
        mirror_docker_hub(&machine.data(), &registry);
    }
    let clients = machines.create_clients();
    let create = [
        "create",
        "deployment",
        "nginx",
        "--image=nginx",
        "--replicas=3",
    ];
    cluster.kubectl(&create);
    cluster.kubectl(&["expose", "deployment", "nginx", "--port=80"]);
    machines.wait_ready("app=nginx", 3);
    let pods = machines.ready("app=nginx");
    let nodes = texts(&pods, "/spec/nodeName");
    assert_eq!(nodes, machines.nodes().into(), "a pod on each node");
    for client in &clients {
        machines.wait_page(client, "nginx");
        let answer = output_in_pod(cluster, client, &["busybox", "nslookup", "nginx"]);
        assert!(
            answer.contains("nginx.default.svc.cluster.local"),
            "{answer}"
        );
    }
    its_way_is_shown(cluster, &pods);
}

/// `holdfast trace` shows the request, the controllers, the scheduler, and the steps of each node's agent.
fn its_way_is_shown(cluster: &Cluster, pods: &[Value]) {
    let mut trace = String::new();
    // An agent on another node answers when it has its serving certificate.
    cluster.wait("a trace without gaps", || {
        trace = cluster.holdfast(&["trace", "deployment", "nginx"]);
        !trace.contains("? ")
    });
    println!("{trace}");
    for part in [
        "Deployment default/nginx\n",
        "kubernetes-admin (kubectl): create, revision",
        "ReplicaSet default/nginx-",
        "ScalingReplicaSet: Scaled up replica set",
    ] {
        assert!(trace.contains(part), "{part:?} is missing: {trace}");
    }
    let chapters: Vec<&str> = trace.split("\n\n").collect();
    for pod in pods {
        let (name, node) = (&pod["metadata"]["name"], &pod["spec"]["nodeName"]);
        let (name, node) = (name.as_str().unwrap(), node.as_str().unwrap());
        let chapter = chapters
            .iter()
            .find(|c| c.contains(&format!("Pod default/{name}\n")));
        let chapter = chapter.unwrap_or_else(|| panic!("{name} is missing: {trace}"));
        let bound = format!("Successfully assigned default/{name} to {node}");
        let binding = "system:kube-scheduler (holdfast): create binding";
        for part in [
            &*bound,
            binding,
            "agent: sandbox",
            "agent: image",
            "agent: start",
        ] {
            assert!(chapter.contains(part), "{part:?} is missing: {chapter}");
        }
    }
}
