//! What a container finds when it starts, against a real containerd: users, files, names, classes.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::Cluster;

fn end(cluster: &Cluster, pod: &str) -> Value {
    cluster.wait(&format!("{pod} has ended"), || {
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
fn containers_find_what_their_pods_promise() {
    let cluster = Cluster::start("inside", 22);
    let image = support::busybox(&cluster);
    cluster.kubectl(&[
        "create",
        "configmap",
        "app",
        "--from-literal=app.conf=setting",
        "--from-literal=other=x",
    ]);
    // Each line of a script is a check; the first that fails names itself.
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
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default}}\nspec:\n  restartPolicy: Never\n  terminationGracePeriodSeconds: 1\n{fields}  containers:\n  - name: c\n    image: {image}\n    command: [busybox, sh, -c]\n{container}    args:\n    - |\n{script}---\n"
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
            &["test $(hostname) = own.sub.default.svc.cluster.local", "grep -q '192.0.2.9.alias.example' /etc/hosts", "grep -q 'own.sub.default.svc.cluster.local.own' /etc/hosts", "grep -q 'nameserver 192.0.2.53' /etc/resolv.conf", "grep -q 'search s.example' /etc/resolv.conf", "grep -q ndots:2 /etc/resolv.conf"],
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
        let ended = end(&cluster, name);
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
        let ended = end(&cluster, name);
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
    cluster.wait("root is refused", || {
        let state = waiting("root");
        state["reason"] == "CreateContainerConfigError"
            && state["message"]
                .as_str()
                .unwrap_or_default()
                .starts_with("container has runAsNonRoot and image will run as root")
    });
    cluster.wait("a handler that the runtime lacks is named", || {
        cluster.events("lost").contains("nosuch")
    });
    cluster.wait("user namespaces are refused where the runtime lacks them", || {
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
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true"]);
    assert_eq!(cluster.leftovers(), Vec::<String>::new());
}

#[test]
fn critical_pods_make_room_and_ephemeral_containers_look_around() {
    let cluster = Cluster::start("critical", 23);
    let image = support::busybox(&cluster);
    let node: Value =
        serde_json::from_str(&cluster.kubectl(&["get", "nodes", "-o", "json"])).unwrap();
    let (node, cpus) = (
        &node["items"][0]["metadata"]["name"],
        node["items"][0]["status"]["allocatable"]["cpu"]
            .as_str()
            .unwrap()
            .parse::<u64>()
            .unwrap(),
    );
    let sleeper = |name: &str, cpu: u64, class: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default}}\nspec: {{nodeName: {node}, terminationGracePeriodSeconds: 1, {class} containers: [{{name: c, image: '{image}', command: [busybox, sleep, '1000'], resources: {{requests: {{cpu: {cpu}m}}}}}}]}}\n---\n"
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
    cluster.wait("both run", || {
        phase("large") == "Running" && phase("small") == "Running"
    });
    cluster.apply(&format!(
        "{}{}",
        sleeper("hopeless", most, ""),
        sleeper("critical", most, "priorityClassName: system-node-critical,")
    ));
    cluster.wait("the critical pod runs", || phase("critical") == "Running");
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
    assert_eq!(phase("small"), "Running", "what need not go stays");
    cluster.wait("an ordinary pod is refused", || {
        cluster.pod("hopeless")["status"]["reason"] == "OutOfcpu"
    });

    // As `kubectl debug` does it.
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
    cluster.wait("the ephemeral container has looked", || {
        debug()["exitCode"] == 0
    });
    assert_eq!(
        debug()["message"],
        "found\n",
        "it shares the processes of its target"
    );
    assert_eq!(phase("small"), "Running");
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true"]);
    assert_eq!(cluster.leftovers(), Vec::<String>::new());
}

#[test]
fn pods_are_resized_in_place_and_wait_for_room() {
    let cluster = Cluster::start("resize", 28);
    let image = support::busybox(&cluster);
    let node: Value =
        serde_json::from_str(&cluster.kubectl(&["get", "nodes", "-o", "json"])).unwrap();
    let cpus: u64 = node["items"][0]["status"]["allocatable"]["cpu"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    let pod = |name: &str, cpu: &str, policy: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, containers: [{{name: c, image: '{image}', command: [busybox, sleep, '1000'], resizePolicy: [{{resourceName: memory, restartPolicy: {policy}}}], resources: {{requests: {{cpu: {cpu}, memory: 32Mi}}, limits: {{cpu: '{cpus}', memory: 64Mi}}}}}}]}}\n---\n"
        )
    };
    cluster.apply(&format!(
        "{}{}{}",
        pod("live", "100m", "NotRequired"),
        pod("anew", "100m", "RestartContainer"),
        pod("big", &format!("{}m", cpus * 1000 - 700), "NotRequired")
    ));
    let ready = |name: &str| cluster.pod(name)["status"]["containerStatuses"][0]["ready"] == true;
    cluster.wait("all run", || ready("live") && ready("anew") && ready("big"));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let resize = |name: &str, resources: Value| {
        let patch =
            serde_json::json!({"spec": {"containers": [{"name": "c", "resources": resources}]}});
        runtime.block_on(async {
            let client = holdfast::kubeapi::client::connect(&cluster.data().join("kubeconfig"))
                .await
                .unwrap();
            let api: kube::Api<k8s_openapi::api::core::v1::Pod> =
                kube::Api::default_namespaced(client);
            api.patch_subresource(
                "resize",
                name,
                &kube::api::PatchParams::default(),
                &kube::api::Patch::Strategic(&patch),
            )
            .await
            .map(|_| ())
            .map_err(|e| e.to_string())
        })
    };
    let status = |name: &str| cluster.pod(name)["status"]["containerStatuses"][0].clone();
    let inside = |name: &str, file: &str| {
        support::inside(&cluster, name, &["cat", &format!("/sys/fs/cgroup/{file}")])
    };
    let before = status("live")["containerID"].clone();
    let larger = serde_json::json!({"requests": {"cpu": "200m", "memory": "48Mi"}, "limits": {"memory": "128Mi"}});
    for name in ["live", "anew"] {
        resize(name, larger.clone()).unwrap();
        cluster.wait("it has its new size", || {
            status(name)["resources"]["limits"]["memory"] == "128Mi" && ready(name)
        });
        assert_eq!(status(name)["allocatedResources"]["cpu"], "200m");
    }
    assert_eq!(
        (
            &status("live")["containerID"],
            &status("live")["restartCount"]
        ),
        (&before, &0.into()),
        "cpu and memory changed while it ran"
    );
    assert_eq!(
        status("anew")["restartCount"],
        1,
        "its policy wants a restart"
    );
    if !holdfast::sys::cgroup::is_v2() {
        assert_eq!(
            inside("live", "memory/memory.limit_in_bytes"),
            (128 << 20).to_string()
        );
        assert_eq!(inside("live", "cpu/cpu.shares"), "204");
    }
    let said = |name: &str| cluster.events(name);
    cluster.wait("the events", || {
        said("live").contains("ResizeStarted Pod resize started: {")
            && said("live").contains("ResizeCompleted Pod resize completed: {")
    });

    // What does not fit waits, says so, and is granted when there is room.
    resize("live", serde_json::json!({"requests": {"cpu": "700m"}})).unwrap();
    let pending = || {
        cluster.pod("live")["status"]["conditions"]
            .as_array()
            .unwrap()
            .iter()
            .find(|c| c["type"] == "PodResizePending")
            .cloned()
    };
    cluster.wait("it waits", || {
        pending().is_some_and(|c| {
            c["reason"] == "Deferred"
                && c["message"]
                    .as_str()
                    .unwrap()
                    .contains("Node didn't have enough resource: cpu")
        })
    });
    assert_eq!(status("live")["allocatedResources"]["cpu"], "200m");
    cluster.kubectl(&["delete", "pod", "big"]);
    cluster.wait("it is granted", || {
        status("live")["resources"]["requests"]["cpu"] == "700m" && pending().is_none()
    });
    assert_eq!(status("live")["containerID"], before);
    let refused =
        resize("live", serde_json::json!({"requests": {"cpu": null, "memory": null}, "limits": {"cpu": null, "memory": null}})).unwrap_err();
    assert!(
        refused.contains("may not change the pod's QoS class"),
        "{refused}"
    );
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true"]);
    assert_eq!(cluster.leftovers(), Vec::<String>::new());
}
