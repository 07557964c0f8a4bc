//! The environment of a container when it starts, with a real containerd: users, files, names, classes,
//! and devices of a device plugin.
#![allow(clippy::unwrap_used)]

use crate::plugin;
use crate::pod_resources;
use crate::support;

use holdfast_proto::podresources as resources;
use plugin::{Behaviour, Plugin};
use serde_json::{Value, json};
use support::{Cluster, condition, pod};

fn wait_for_termination(cluster: &Cluster, pod: &str) -> Value {
    cluster.wait(&format!("{pod} to terminate"), || {
        matches!(
            cluster.pod(pod)["status"]["phase"].as_str(),
            Some("Succeeded" | "Failed")
        )
    });
    cluster.pod(pod)
}

fn message(pod: &Value) -> &str {
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
        .as_str()
        .unwrap_or_default()
}

#[test]
fn containers_get_what_their_pod_specifies() {
    let cluster = Cluster::start("inside", 22);
    let namespace = cluster.namespace();
    let image = support::busybox(&cluster);
    cluster.kubectl(&[
        "create",
        "configmap",
        "app",
        "--from-literal=app.conf=setting",
        "--from-literal=other=x",
    ]);
    // Each line of a script is a check; the first one that fails becomes the termination message.
    let pod = |name: &str, fields: &str, container: &str, checks: &[&str]| {
        let script: String = checks
            .iter()
            .map(|c| {
                format!(
                    "      {c} || {{ echo \"failed: {}\" > /dev/termination-log; exit 1; }}\n",
                    c.replace('"', "'").replace('$', "")
                )
            })
            .collect();
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  restartPolicy: Never\n  terminationGracePeriodSeconds: 1\n{fields}  containers:\n  - name: c\n    image: {image}\n    command: [busybox, sh, -c]\n{container}    args:\n    - |\n{script}---\n"
        )
    };
    let pods = [
        pod(
            "files",
            "  volumes: [{name: app, configMap: {name: app}}, {name: v, emptyDir: {}}]\n  initContainers:\n  - {name: i, image: IMAGE, command: [busybox, sh, -c, \"mkdir -p /v/fromfile; echo \\\"KEY='value of it'\\\" > /v/env\"], volumeMounts: [{name: v, mountPath: /v}]}\n",
            "    env:\n    - {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}\n    - {name: FROM_FILE, valueFrom: {fileKeyRef: {volumeName: v, path: env, key: KEY}}}\n    volumeMounts:\n    - {name: app, mountPath: /etc/app.conf, subPath: app.conf}\n    - {name: v, mountPath: /one, subPath: deep/er}\n    - {name: v, mountPath: /two, subPathExpr: $(POD)}\n    - {name: v, mountPath: /ro, readOnly: true, recursiveReadOnly: IfPossible}\n",
            &["test \"$(cat /etc/app.conf)\" = setting", "test -f /etc/app.conf", "touch /one/x", "test -f /ro/deep/er/x", "touch /two/y", "test -f /ro/files/y", "! touch /ro/z", "test \"$FROM_FILE\" = 'value of it'"],
        )
        .replace("IMAGE", &image),
        pod(
            "user",
            "  securityContext: {runAsUser: 1000, runAsGroup: 3000, fsGroup: 2000, supplementalGroups: [4000], seccompProfile: {type: RuntimeDefault}}\n  volumes: [{name: v, emptyDir: {}}]\n",
            "    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}\n    volumeMounts: [{name: v, mountPath: /v}]\n",
            &["test $(id -u) = 1000", "test $(id -g) = 3000", "id -G | grep -q 2000", "id -G | grep -q 4000", "touch /v/x", "test $(stat -c %g /v/x) = 2000", "! touch /x", "grep -q 'NoNewPrivs:.1' /proc/self/status", "grep -q 'CapEff:.0000000000000000' /proc/self/status", "grep -q 'Seccomp:.2' /proc/self/status"],
        ),
        pod("root", "  securityContext: {runAsNonRoot: true}\n", "", &["true"]),
        pod(
            "names",
            "  hostname: own\n  subdomain: sub\n  setHostnameAsFQDN: true\n  hostAliases: [{ip: 192.0.2.9, hostnames: [alias.example]}]\n  dnsPolicy: None\n  dnsConfig: {nameservers: [192.0.2.53], searches: [s.example], options: [{name: ndots, value: '2'}]}\n",
            "",
            &[&format!("test $(hostname) = own.sub.{namespace}.svc.cluster.local"), "grep -q '192.0.2.9.alias.example' /etc/hosts", &format!("grep -q 'own.sub.{namespace}.svc.cluster.local.own' /etc/hosts"), "grep -q 'nameserver 192.0.2.53' /etc/resolv.conf", "grep -q 'search s.example' /etc/resolv.conf", "grep -q ndots:2 /etc/resolv.conf"],
        ),
        pod("host", "  hostNetwork: true\n  hostPID: true\n", "", &["grep -q 'host network' /etc/hosts", "test -d /proc/1", "! grep -q ^busybox /proc/1/comm"]),
        pod("sysctl", "  securityContext: {sysctls: [{name: net.ipv4.ip_unprivileged_port_start, value: '7'}]}\n", "", &["test $(cat /proc/sys/net/ipv4/ip_unprivileged_port_start) = 7"]),
        pod("forbidden", "  securityContext: {sysctls: [{name: kernel.msgmax, value: '7'}]}\n", "", &["true"]),
        pod("armoured", "", "    securityContext: {appArmorProfile: {type: RuntimeDefault}}\n", &["true"]),
        pod("windows", "  os: {name: windows}\n", "", &["true"]),
        pod("classy", "  runtimeClassName: plain\n", "", &["true"]),
        pod(
            "whole",
            "  resources: {limits: {memory: 64Mi, cpu: 500m}}\n",
            "",
            &["cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null | grep -q 67108864"],
        ),
        pod("lost", "  runtimeClassName: gone\n", "", &["true"]),
        pod("userns", "  hostUsers: false\n", "", &["true"]),
    ];
    cluster.apply("apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: plain}\nhandler: runc\noverhead: {podFixed: {cpu: 10m}}\n---\napiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: gone}\nhandler: nosuch\n");
    cluster.apply(&pods.concat());
    for name in [
        "files", "user", "names", "host", "sysctl", "classy", "whole",
    ] {
        let ended = wait_for_termination(&cluster, name);
        assert_eq!(
            (ended["status"]["phase"].as_str(), message(&ended)),
            (Some("Succeeded"), ""),
            "{name}: {:#}",
            ended["status"]
        );
    }
    let whole = cluster.pod("whole");
    assert_eq!(
        (
            &whole["status"]["qosClass"],
            &whole["spec"]["resources"]["requests"]["memory"]
        ),
        (&"Guaranteed".into(), &"64Mi".into())
    );
    assert_eq!(
        whole["status"]["allocatedResources"]["cpu"], "500m",
        "{:#}",
        whole["status"]
    );
    assert_eq!(cluster.pod("classy")["spec"]["overhead"]["cpu"], "10m");
    for (name, reason, text) in [
        (
            "forbidden",
            "SysctlForbidden",
            "Pod was rejected: forbidden sysctl: \"kernel.msgmax\" not allowlisted",
        ),
        (
            "armoured",
            "AppArmor",
            "Pod was rejected: Cannot enforce AppArmor: AppArmor is not enabled on the host",
        ),
        (
            "windows",
            "PodOSNotSupported",
            "Pod was rejected: Failed to admit pod as the OS field doesn't match node OS",
        ),
    ] {
        let ended = wait_for_termination(&cluster, name);
        assert_eq!(
            (
                ended["status"]["reason"].as_str(),
                ended["status"]["message"].as_str()
            ),
            (Some(reason), Some(text)),
            "{name}"
        );
    }
    let waiting = |name: &str| {
        cluster.pod(name)["status"]["containerStatuses"][0]["state"]["waiting"].clone()
    };
    cluster.wait("root to be refused", || {
        let state = waiting("root");
        state["reason"] == "CreateContainerConfigError"
            && state["message"]
                .as_str()
                .unwrap_or_default()
                .starts_with("container has runAsNonRoot and image will run as root")
    });
    cluster.wait("an event that names the unknown handler", || {
        cluster.events("lost").contains("nosuch")
    });
    cluster.wait("user namespaces to be refused without support by the runtime", || {
        cluster.events("userns").contains("FailedCreatePodSandBox Failed to create pod sandbox: can't set `spec.hostUsers: false`")
    });
    let refused = std::process::Command::new("kubectl")
        .args([
            "--kubeconfig",
            cluster.data().join("kubeconfig").to_str().unwrap(),
            "run",
            "x",
            "--image=i",
            "--overrides",
            r#"{"spec": {"runtimeClassName": "none"}}"#,
        ])
        .output()
        .unwrap();
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("RuntimeClass \"none\" not found"),
        "{refused:?}"
    );
    cluster.delete_all_and_check();
}

#[test]
fn critical_pods_preempt_and_ephemeral_containers_join_their_target() {
    let cluster = Cluster::start("critical", 23);
    let image = support::busybox(&cluster);
    let (node, cpus) = (cluster.node_name(), cpus(&cluster));
    let sleeper = |name: &str, cpu: u64, class: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{nodeName: {node}, terminationGracePeriodSeconds: 1, {class} containers: [{{name: c, image: '{image}', command: [busybox, sleep, '1000'], resources: {{requests: {{cpu: {cpu}m}}}}}}]}}\n---\n"
        )
    };
    let most = cpus * 1000 - 500;
    cluster.apply(&format!(
        "{}{}",
        sleeper("large", most, ""),
        sleeper("small", 100, "")
    ));
    let phase = |name: &str| {
        cluster.pod(name)["status"]["phase"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    cluster.wait("both pods to run", || {
        phase("large") == "Running" && phase("small") == "Running"
    });
    cluster.apply(&format!(
        "{}{}",
        sleeper("hopeless", most, ""),
        sleeper("critical", most, "priorityClassName: system-node-critical,")
    ));
    cluster.wait(
        "the critical pod to run, and the large one to have failed",
        || phase("critical") == "Running" && phase("large") == "Failed",
    );
    let large = cluster.pod("large");
    assert_eq!(
        (
            large["status"]["phase"].as_str(),
            large["status"]["reason"].as_str()
        ),
        (Some("Failed"), Some("Preempting")),
        "{:#}",
        large["status"]
    );
    let target = large["status"]["conditions"]
        .as_array()
        .unwrap()
        .iter()
        .find(|c| c["type"] == "DisruptionTarget")
        .unwrap();
    assert_eq!(
        (&target["status"], &target["reason"]),
        (&"True".into(), &"TerminationByKubelet".into())
    );
    assert_eq!(
        phase("small"),
        "Running",
        "pods that free no needed resources stay"
    );
    cluster.wait("an ordinary pod to be refused", || {
        cluster.pod("hopeless")["status"]["reason"] == "OutOfcpu"
    });

    // As `kubectl debug` does.
    let patch = format!(
        r#"{{"spec": {{"ephemeralContainers": [{{"name": "debug", "image": "{image}", "targetContainerName": "c", "command": ["busybox", "sh", "-c", "grep -q sleep /proc/1/cmdline && echo found > /dev/termination-log; sleep 0.1"], "terminationMessagePath": "/dev/termination-log"}}]}}}}"#
    );
    cluster.kubectl(&[
        "patch",
        "pod",
        "small",
        "--subresource=ephemeralcontainers",
        "--type=strategic",
        "-p",
        &patch,
    ]);
    let debug = || {
        cluster.pod("small")["status"]["ephemeralContainerStatuses"][0]["state"]["terminated"]
            .clone()
    };
    cluster.wait("the ephemeral container to succeed", || {
        debug()["exitCode"] == 0
    });
    assert_eq!(
        debug()["message"],
        "found\n",
        "the container shares the processes of its target"
    );
    assert_eq!(phase("small"), "Running");
    cluster.delete_all_and_check();
}

/// The extended resource of the device plugin.
const THING: &str = "example.com/thing";

/// The allocatable CPUs.
fn cpus(cluster: &Cluster) -> u64 {
    let cpus = &cluster.node()["status"]["allocatable"]["cpu"];
    cpus.as_str().unwrap().parse().unwrap()
}

/// Capacity and allocatable of a device plugin's resource.
fn things(cluster: &Cluster, resource: &str) -> (String, String) {
    let node = cluster.node();
    let text = |key: &str| {
        let amount = node["status"][key][resource].as_str();
        amount.unwrap_or("none").to_owned()
    };
    (text("capacity"), text("allocatable"))
}

fn wait_for_things(cluster: &Cluster, resource: &str, capacity: &str, allocatable: &str) {
    let what = format!("{capacity} of {resource}, {allocatable} of them allocatable");
    cluster.wait(&what, || {
        things(cluster, resource) == (capacity.into(), allocatable.into())
    });
}

/// Creates a pod with one container that requests things. If `on` names a node, the scheduler is not involved.
fn wants(cluster: &Cluster, name: &str, image: &str, amount: u32, on: Option<&str>) {
    let container = json!({"name": "c", "image": image, "command": ["busybox", "sleep", "10000"],
        "env": [{"name": "OWN", "value": "the container's"}], "resources": {"limits": {THING: amount.to_string()}}});
    let mut spec = json!({"containers": [container]});
    if let Some(node) = on {
        spec["nodeName"] = node.into();
    }
    pod(cluster, name, &spec);
}

/// From the podresources API: pod, resource and device, and the number of allocatable devices. `None`
/// while the agent does not answer.
fn list_assignments(cluster: &Cluster) -> Option<(Vec<String>, usize)> {
    let found = pod_resources::with_client(cluster, async |mut client| {
        let request = resources::ListPodResourcesRequest {};
        let listed = client.list(request).await.ok()?.into_inner();
        let mut rows = vec![];
        for pod in listed.pod_resources {
            for device in pod.containers.iter().flat_map(|c| &c.devices) {
                assert_eq!(device.topology.as_ref().unwrap().nodes[0].id, 0);
                let ids = device.device_ids.join(",");
                rows.push(format!("{} {} {ids}", pod.name, device.resource_name));
            }
            let request = resources::GetPodResourcesRequest {
                pod_name: pod.name.clone(),
                pod_namespace: pod.namespace,
            };
            // The pod may have been deleted since.
            let one = client.get(request).await.ok()?.into_inner();
            assert_eq!(one.pod_resources.unwrap().name, pod.name);
        }
        let unknown = client
            .get(resources::GetPodResourcesRequest::default())
            .await;
        assert!(unknown.unwrap_err().message().contains("not found"));
        let request = resources::AllocatableResourcesRequest {};
        let all = client.get_allocatable_resources(request).await.unwrap();
        rows.sort();
        Some((rows, all.into_inner().devices.len()))
    })?;
    // The first API version reports the same devices.
    (pod_resources::v1alpha1(cluster)? == found.0).then_some(found)
}

fn running(cluster: &Cluster, name: &str) {
    cluster.wait(&format!("{name} to run"), || {
        condition(&cluster.pod(name), "Ready") == "True"
    });
}

/// The message of a pod that was rejected because of its devices.
fn refusal(cluster: &Cluster, name: &str) -> String {
    cluster.wait(&format!("{name} to be refused"), || {
        cluster.pod(name)["status"]["phase"] == "Failed"
    });
    let status = cluster.pod(name)["status"].clone();
    assert_eq!(status["reason"], "UnexpectedAdmissionError", "{status}");
    status["message"].as_str().unwrap().to_owned()
}

/// A container exits while its plugin has not registered since the agent started. It is not started
/// without its devices.
fn a_container_waits_for_its_plugin(cluster: &Cluster) {
    let status = || cluster.pod("first")["status"]["containerStatuses"][0].clone();
    let id = status()["containerID"].as_str().unwrap().to_owned();
    let id = id.rsplit('/').next().unwrap();
    support::ctr(cluster, "k8s.io", &["tasks", "kill", "-s", "SIGKILL", id]);
    cluster.wait("the container to wait for its plugin", || {
        let waits = status()["state"]["waiting"]["message"].clone();
        let waits = waits.as_str().unwrap_or_default();
        waits.contains("has not registered since the agent started")
    });
}

/// Waits until the first pod's status shows the health of its device.
fn health_is_published(cluster: &Cluster, health: &str) {
    let device = json!([{"resourceID": "b", "health": health}]);
    let expected = json!([{"name": THING, "resources": device}]);
    cluster.wait(&format!("the pod's status to show {health}"), || {
        let status = cluster.pod("first")["status"].clone();
        status["containerStatuses"][0]["allocatedResourcesStatus"] == expected
    });
}

fn health_follows_the_plugin(cluster: &Cluster, plugin: &Plugin) {
    let runs = plugin.run(&cluster.data().join("agent/device-plugins"));
    wait_for_things(cluster, THING, "2", "2");
    plugin.set(&[("a", true), ("b", false)]);
    health_is_published(cluster, "Unhealthy");
    plugin.set(&[("a", false), ("b", true)]);
    health_is_published(cluster, "Healthy");
    wait_for_things(cluster, THING, "2", "1");
    drop(runs);
    wait_for_things(cluster, THING, "2", "0");
    health_is_published(cluster, "Unknown");
}

fn devices_outlive_plugin_and_agent(cluster: &Cluster, plugin: &Plugin, image: &str) {
    let sockets = cluster.data().join("agent/device-plugins");
    let id = || cluster.pod("first")["status"]["containerStatuses"][0]["containerID"].clone();
    let before = id();
    health_follows_the_plugin(cluster, plugin);
    let node = cluster.node_name();
    wants(cluster, "too-early", image, 1, Some(&node));
    assert_eq!(
        refusal(cluster, "too-early"),
        "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices example.com/thing, which is unexpected"
    );
    // The agent restarts, and the plugin is down afterwards.
    cluster.kill("agent");
    cluster.up();
    let known = |rows: &[&str]| list_assignments(cluster).is_some_and(|(found, _)| found == rows);
    cluster.wait("the first pod's device to be listed again", || {
        known(&["first example.com/thing b"])
    });
    wait_for_things(cluster, THING, "0", "0");
    assert_eq!(id(), before, "the first pod kept running");
    a_container_waits_for_its_plugin(cluster);
    plugin.set(&[("a", true), ("b", true)]);
    let runs = plugin.run(&sockets);
    wait_for_things(cluster, THING, "2", "2");
    cluster.wait("the first pod's container to be restarted", || {
        let status = cluster.pod("first")["status"]["containerStatuses"][0].clone();
        status["ready"] == true && status["restartCount"] == 1
    });
    health_is_published(cluster, "Healthy");
    let before = id();
    wants(cluster, "second", image, 1, None);
    running(cluster, "second");
    assert_eq!(
        support::inside(cluster, "second", &["busybox", "sh", "-c", "echo $THING"]),
        "a"
    );
    assert_eq!(id(), before, "the first pod kept running");
    // The plugin registers again on its own when only the agent was down.
    cluster.kill("agent");
    cluster.up();
    wait_for_things(cluster, THING, "2", "2");
    // The Node status may still be the previous agent's. These values come from the new agent.
    let both = ["first example.com/thing b", "second example.com/thing a"];
    let both = Some((both.map(str::to_owned).to_vec(), 2));
    cluster.wait("pods and devices to be listed again", || {
        list_assignments(cluster) == both
    });
    cluster.kubectl(&[
        "delete",
        "pod",
        "first",
        "second",
        "too-early",
        "--wait=true",
    ]);
    // Observed before the plugin runs again, so that a later status of the Node is a change.
    drop(runs);
    wait_for_things(cluster, THING, "2", "0");
}

fn a_hanging_or_refusing_plugin_blocks_only_its_pod(
    cluster: &Cluster,
    plugin: &Plugin,
    image: &str,
) {
    let _runs = plugin.run(&cluster.data().join("agent/device-plugins"));
    wait_for_things(cluster, THING, "2", "2");
    // The API removes a pod without a grace period before its containers have exited.
    cluster.wait("the devices of deleted pods to be free", || {
        list_assignments(cluster).is_some_and(|(rows, _)| rows.is_empty())
    });
    plugin.set_behaviour(Behaviour::Refuses("it is broken"));
    let node = cluster.node_name();
    wants(cluster, "unlucky", image, 2, Some(&node));
    let message = refusal(cluster, "unlucky");
    let expected = "device plugin of example.com/thing: Allocate failed: rpc error: code = Unknown desc = it is broken";
    assert!(message.contains(expected), "{message}");

    plugin.set_behaviour(Behaviour::Hangs);
    wants(cluster, "hung", image, 1, Some(&node));
    cluster.wait("a call of the plugin", || {
        plugin.calls().last().unwrap() == "allocate b"
    });
    pod(
        cluster,
        "plain",
        &json!({"containers": [{"name": "c", "image": image, "command": ["busybox", "sleep", "10000"]}]}),
    );
    running(cluster, "plain");
    assert_eq!(cluster.pod("hung")["status"]["phase"], "Pending");
    plugin.set_behaviour(Behaviour::Answers);
    running(cluster, "hung");
}

#[test]
fn devices_of_plugins_are_allocated_to_pods_and_survive_restarts() {
    let cluster = Cluster::start("devices", 58);
    let image = support::busybox(&cluster);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "of the node").unwrap();
    let plugin = Plugin::new(THING, file.path(), &["a", "b"]);
    let sockets = cluster.data().join("agent/device-plugins");
    let runs = plugin.run(&sockets);
    wait_for_things(&cluster, THING, "2", "2");
    wants(&cluster, "first", &image, 1, None);
    running(&cluster, "first");
    let script = "test -c /dev/thing && echo $THING $OWN $(busybox cat /thing)";
    assert_eq!(
        support::inside(&cluster, "first", &["busybox", "sh", "-c", script]),
        "b the container's of the node",
        "the plugin prefers the last device"
    );
    assert_eq!(plugin.calls(), ["allocate b", "start b"]);
    let listed = list_assignments(&cluster);
    let row = "first example.com/thing b".to_owned();
    assert_eq!(listed, Some((vec![row], 2)));

    // One pod waits for the scheduler; one that is bound directly is rejected.
    wants(&cluster, "waits", &image, 2, None);
    wants(&cluster, "refused", &image, 2, Some(&cluster.node_name()));
    assert_eq!(
        refusal(&cluster, "refused"),
        "Pod was rejected: Allocate failed due to requested number of devices unavailable for example.com/thing. Requested: 2, Available: 1, which is unexpected"
    );
    assert_eq!(cluster.pod("waits")["status"]["phase"], "Pending");
    cluster.kubectl(&["delete", "pod", "waits", "refused"]);
    drop(runs);
    devices_outlive_plugin_and_agent(&cluster, &plugin, &image);
    a_hanging_or_refusing_plugin_blocks_only_its_pod(&cluster, &plugin, &image);

    let other = Plugin::new("example.com/other", file.path(), &["x"]);
    other.set_behaviour(Behaviour::HidesOptions);
    let runs = other.run_in_registry(&cluster.data().join("agent/plugins_registry"));
    cluster.wait("a notification why the plugin is not registered", || {
        other.calls().first().is_some_and(|outcome| {
            outcome.contains("failed to get device plugin options")
                && outcome.contains("no options yet")
        })
    });
    other.set_behaviour(Behaviour::Answers);
    wait_for_things(&cluster, "example.com/other", "1", "1");
    cluster.wait("a notification that the plugin is registered", || {
        other.calls().last().is_some_and(|c| c == "outcome \"\"")
    });
    drop(runs);
    wait_for_things(&cluster, "example.com/other", "1", "0");
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true"]);
    cluster.wait("no leftovers of the pods", || {
        cluster.leftovers().is_empty()
    });
}

/// As soon as the API shows that a pod needs no resources, the scheduler sends the next one. The node
/// must have capacity for it.
#[test]
fn a_full_node_admits_the_next_pod_immediately() {
    let cluster = Cluster::start("room", 76);
    let image = support::busybox(&cluster);
    let cpus = cpus(&cluster);
    let name_of_node = cluster.node_name();
    let big = |name: &str, script: &str| {
        let request = json!({"requests": {"cpu": format!("{}m", cpus * 1000 - 100)}});
        let container = json!({"name": "c", "image": image, "command": ["busybox", "sh", "-c", script], "resources": request});
        // Bound directly: the scheduler's view of free capacity does not matter.
        let spec =
            json!({"nodeName": name_of_node, "restartPolicy": "Never", "containers": [container]});
        pod(&cluster, name, &spec);
    };
    let phase = |name: &str| cluster.pod(name)["status"]["phase"].clone();
    let stays = "trap '' TERM; while :; do busybox sleep 1; done";
    big("first", stays);
    cluster.wait("the first pod to run", || phase("first") == "Running");
    // A force-deleted pod is removed from the API before its container has exited.
    cluster.kubectl(&["delete", "pod", "first", "--grace-period=0", "--force"]);
    big("second", "busybox sleep 2");
    cluster.wait("the second pod to terminate", || {
        let phase = phase("second");
        assert_ne!(phase, "Failed", "{}", cluster.pod("second")["status"]);
        phase == "Succeeded"
    });
    big("third", stays);
    cluster.wait("the third pod to run", || {
        let phase = phase("third");
        assert_ne!(phase, "Failed", "{}", cluster.pod("third")["status"]);
        phase == "Running"
    });
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true", "--grace-period=1"]);
    cluster.wait_quietly("no leftovers", || cluster.leftovers().is_empty());
}
