//! The steps of a new user, with the real kubectl and a real containerd, from `up` to `down`.
#![allow(clippy::unwrap_used)]

use crate::support;

use serde_json::Value;
use support::{Cluster, http_get};

const DEMO: [&str; 2] = ["holdfast.local/demo:1", "holdfast.local/demo:2"];

fn running(pods: &[Value]) -> usize {
    let ready = |p: &&Value| {
        p["status"]["containerStatuses"][0]["ready"] == true
            && p["metadata"]["deletionTimestamp"].is_null()
    };
    pods.iter().filter(ready).count()
}

/// The response of a web server on a port of this machine.
fn page(port: u16) -> Option<String> {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok().map(|_| text)
}

/// A host port leads to its pod, and is closed after the pod is deleted.
fn host_ports_lead_to_pods(cluster: &Cluster, port: u16) {
    cluster.apply(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: exposed}}\nspec: {{containers: [{{name: c, image: '{}', ports: [{{hostPort: {port}, containerPort: 80}}]}}]}}\n",
        DEMO[0]
    ));
    cluster.wait("the port to reach the pod", || {
        page(port).is_some_and(|p| p.contains("Hello from exposed"))
    });
    cluster.kubectl(&["delete", "pod", "exposed"]);
    assert_eq!(page(port), None);
}

/// `holdfast trace` shows the way from the request to the agent's steps.
fn its_story_is_known(cluster: &Cluster) {
    let trace = cluster.holdfast(&["trace", "deployment", "web"]);
    for part in [
        "Deployment default/web\n",
        "kubernetes-admin (kubectl): create, revision",
        "ReplicaSet default/web-",
        "ScalingReplicaSet: Scaled up replica set",
        "default-scheduler: Scheduled: Successfully assigned",
        "agent: sandbox",
        "patch status",
    ] {
        assert!(trace.contains(part), "{part:?} is missing: {trace}");
    }
    assert!(!trace.contains("? "), "all is known: {trace}");
    assert_eq!(trace.matches("Pod default/web-").count(), 3, "{trace}");
}

#[test]
fn a_deployment_from_up_to_down() {
    let cluster = Cluster::start("main", 1);
    let printed = cluster.up();
    assert_eq!(
        printed.lines().count(),
        3,
        "a second up changes nothing and prints the same: {printed}"
    );
    assert!(
        printed.contains("kubectl create deployment web"),
        "{printed}"
    );

    cluster.kubectl(&[
        "create",
        "deployment",
        "web",
        &format!("--image={}", DEMO[0]),
        "--replicas=3",
    ]);
    cluster.kubectl(&["rollout", "status", "deployment/web", "--timeout=180s"]);
    let pods = cluster.pods();
    assert_eq!(running(&pods), 3);
    let mut ips: Vec<&str> = pods
        .iter()
        .map(|p| p["status"]["podIP"].as_str().unwrap())
        .collect();
    ips.sort_unstable();
    ips.dedup();
    assert_eq!(ips.len(), 3, "each pod has its own address");
    for ip in &ips {
        // The pod has no readiness probe: it is Running before it listens.
        cluster.wait("the node to reach the pod", || {
            http_get(&format!("{ip}:80"))
                .is_some_and(|page| page.contains("version 1 of the Holdfast demo"))
        });
    }
    let wide = cluster.kubectl(&["get", "pods", "-o", "wide"]);
    assert!(wide.contains("Running") && wide.contains(ips[0]), "{wide}");

    let name = pods[0]["metadata"]["name"].as_str().unwrap();
    cluster.wait("the events of the start", || {
        let described = cluster.kubectl(&["describe", "pod", name]);
        ["Scheduled", "Pulled", "Created", "Started"]
            .iter()
            .all(|reason| described.contains(reason))
    });

    its_story_is_known(&cluster);

    cluster.kubectl(&["scale", "deployment", "web", "--replicas=5"]);
    cluster.kubectl(&["rollout", "status", "deployment/web", "--timeout=180s"]);
    assert_eq!(running(&cluster.pods()), 5);

    cluster.kubectl(&[
        "set",
        "image",
        "deployment/web",
        &format!("demo={}", DEMO[1]),
    ]);
    cluster.kubectl(&["rollout", "status", "deployment/web", "--timeout=180s"]);
    cluster.wait("the old pods to be removed", || {
        cluster
            .pods()
            .iter()
            .all(|p| p["spec"]["containers"][0]["image"] == DEMO[1])
    });
    let ip = cluster.pods()[0]["status"]["podIP"]
        .as_str()
        .unwrap()
        .to_owned();
    cluster.wait("the second version's page", || {
        http_get(&format!("{ip}:80")).is_some_and(|page| page.contains("version 2"))
    });
    let history = cluster.kubectl(&["rollout", "history", "deployment/web"]);
    assert!(history.contains('2'), "{history}");

    cluster.kubectl(&["delete", "deployment", "web"]);
    cluster.wait("no pods", || cluster.pods().is_empty());
    cluster.assert_clean();

    // A cluster that is stopped while pods run leaves nothing either, and restarts them.
    cluster.kubectl(&[
        "create",
        "deployment",
        "web",
        &format!("--image={}", DEMO[0]),
        "--replicas=2",
    ]);
    cluster.kubectl(&["rollout", "status", "deployment/web", "--timeout=180s"]);
    let bridge = cluster.bridge();
    cluster.down();
    cluster.assert_clean();
    assert!(
        !std::path::Path::new("/sys/class/net").join(bridge).exists(),
        "the bridge was deleted"
    );
    cluster.up();
    cluster.wait("the pods to run again", || running(&cluster.pods()) == 2);
}

#[test]
fn jobs_run_to_completion() {
    let cluster = Cluster::start("jobs", 98);
    let image = support::busybox(&cluster);
    let flag = format!("--image={image}");
    cluster.kubectl(&["create", "job", "hello", &flag, "--", "echo", "hi"]);
    let wait = |name: &str, condition: &str| {
        let (job, condition) = (
            format!("job/{name}"),
            format!("--for=condition={condition}"),
        );
        cluster.kubectl(&["wait", &condition, &job, "--timeout=120s"]);
    };
    wait("hello", "complete");
    let table = cluster.kubectl(&["get", "jobs"]);
    let row: Vec<&str> = table.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(row[..3], ["hello", "Complete", "1/1"], "{table}");
    assert!(table.starts_with("NAME"), "{table}");
    assert_eq!(cluster.kubectl(&["logs", "job/hello"]), "hi\n");
    let described = cluster.kubectl(&["describe", "job", "hello"]);
    assert!(
        described.contains("1 Succeeded") && described.contains("Completed"),
        "{described}"
    );

    // Each pod of an indexed job knows its index; one that fails ends the job.
    let script = "test $JOB_COMPLETION_INDEX -ne 1 || exit 3";
    cluster.apply(&format!(
        "apiVersion: batch/v1\nkind: Job\nmetadata: {{name: some}}\nspec: {{completions: 3, parallelism: 3, completionMode: Indexed, backoffLimit: 0, \
         template: {{spec: {{restartPolicy: Never, containers: [{{name: c, image: '{image}', command: [sh, -c, '{script}']}}]}}}}}}\n"
    ));
    wait("some", "failed");
    let job: Value =
        serde_json::from_str(&cluster.kubectl(&["get", "job", "some", "-o", "json"])).unwrap();
    // Pods that still run at that time are stopped and count as failed.
    let failed = job["status"]["failed"].as_u64();
    assert!(failed.is_some_and(|n| (1..=3).contains(&n)), "{job}");
    assert!(
        !job["status"]["completedIndexes"].to_string().contains('1'),
        "{job}"
    );

    // A job is created manually from a CronJob and deleted with it.
    let schedule = "--schedule=0 0 31 1 *";
    cluster.kubectl(&[
        "create", "cronjob", "rare", schedule, &flag, "--", "echo", "hi",
    ]);
    cluster.kubectl(&["create", "job", "now", "--from=cronjob/rare"]);
    wait("now", "complete");
    let table = cluster.kubectl(&["get", "cronjobs"]);
    assert!(table.contains("0 0 31 1 *   <none>     False"), "{table}");
    cluster.kubectl(&["delete", "cronjob", "rare"]);
    cluster.wait("the job to be deleted", || {
        !cluster.kubectl(&["get", "jobs"]).contains("now")
    });

    cluster.kubectl(&["delete", "job", "hello", "some"]);
    cluster.wait("no pods", || cluster.pods().is_empty());
    // Objects of finished pods are removed immediately; the node cleans up just afterwards.
    cluster.wait("no leftovers", || cluster.leftovers().is_empty());
    cluster.assert_clean();
}

/// The cluster IP of the API. Each cluster of a machine has its own range of services.
fn address_of_api(cluster: &Cluster) -> String {
    let service = cluster.object("/api/v1/namespaces/default/services/kubernetes");
    service["spec"]["clusterIP"].as_str().unwrap().to_owned()
}

#[test]
fn pods_reach_each_other_and_get_their_volumes_and_settings() {
    let cluster = Cluster::start("pods", 2);
    let settings = "create configmap settings --from-literal=color=blue";
    let keys = "create secret generic keys --from-literal=pin=1234";
    for command in [settings, keys] {
        cluster.kubectl(&command.split(' ').collect::<Vec<_>>());
    }
    let busybox = support::busybox(&cluster);
    let api = address_of_api(&cluster);
    cluster.apply(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: server, labels: {{app: server}}}}
spec:
  containers: [{{name: web, image: "{}"}}]
---
apiVersion: v1
kind: Pod
metadata: {{name: worker, labels: {{app: w}}}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  initContainers:
  - {{name: first, image: "{busybox}", command: [sh, -c, "echo prepared > /work/state"], volumeMounts: [{{name: work, mountPath: /work}}]}}
  containers:
  - name: main
    image: "{busybox}"
    command: [sh, -c]
    args:
    - |
      set -e
      test "$(cat /work/state)" = prepared
      test "$(cat /settings/color)" = blue
      test "$(cat /keys/pin)" = 1234
      test "$COLOR-$PIN" = blue-1234
      test "$POD" = worker
      test "$(cat /podinfo/labels)" = 'app="w"'
      test -s /var/run/secrets/kubernetes.io/serviceaccount/token
      test "$(cat /var/run/secrets/kubernetes.io/serviceaccount/namespace)" = default
      grep -q BEGIN /var/run/secrets/kubernetes.io/serviceaccount/ca.crt
      test "$KUBERNETES_SERVICE_HOST" = {api}
      grep -q worker /etc/hosts
      echo checked > /dev/termination-log
    env:
    - {{name: COLOR, valueFrom: {{configMapKeyRef: {{name: settings, key: color}}}}}}
    - {{name: PIN, valueFrom: {{secretKeyRef: {{name: keys, key: pin}}}}}}
    - {{name: POD, valueFrom: {{fieldRef: {{fieldPath: metadata.name}}}}}}
    resources: {{requests: {{cpu: 100m, memory: 16Mi}}, limits: {{memory: 64Mi}}}}
    volumeMounts:
    - {{name: work, mountPath: /work}}
    - {{name: settings, mountPath: /settings}}
    - {{name: keys, mountPath: /keys}}
    - {{name: podinfo, mountPath: /podinfo}}
  volumes:
  - {{name: work, emptyDir: {{}}}}
  - {{name: settings, configMap: {{name: settings}}}}
  - {{name: keys, secret: {{secretName: keys}}}}
  - {{name: podinfo, downwardAPI: {{items: [{{path: labels, fieldRef: {{fieldPath: metadata.labels}}}}]}}}}
"#,
        DEMO[0]
    ));
    cluster.wait("the worker to terminate", || {
        matches!(
            cluster.pod("worker")["status"]["phase"].as_str(),
            Some("Succeeded" | "Failed")
        )
    });
    let worker = cluster.pod("worker");
    let terminated = &worker["status"]["containerStatuses"][0]["state"]["terminated"];
    assert_eq!(
        (
            worker["status"]["phase"].as_str(),
            terminated["message"].as_str()
        ),
        (Some("Succeeded"), Some("checked\n")),
        "{worker:#}"
    );
    assert_eq!(worker["status"]["qosClass"], "Burstable");
    cluster.wait("the server to run", || {
        cluster.pod("server")["status"]["phase"] == "Running"
    });
    let ip = cluster.pod("server")["status"]["podIP"].clone();
    let ip = ip.as_str().unwrap();
    let address = format!("{ip}:80");
    cluster.wait("the server to listen", || http_get(&address).is_some());
    cluster.apply(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: client}}\nspec:\n  restartPolicy: Never\n  containers: [{{name: c, image: '{busybox}', command: [wget, -q, -O, /dev/termination-log, 'http://{ip}/']}}]\n"
    ));
    cluster.wait("the client to terminate", || {
        matches!(
            cluster.pod("client")["status"]["phase"].as_str(),
            Some("Succeeded" | "Failed")
        )
    });
    let client = cluster.pod("client");
    assert!(
        client["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
            .as_str()
            .is_some_and(|m| m.contains("Hello from server")),
        "{client:#}"
    );

    host_ports_lead_to_pods(&cluster, 18_002);
    // A crash loop backs off, shows this in its status, and is counted; a bad reference is named in the status.
    cluster.apply(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: crash}}\nspec: {{containers: [{{name: c, image: '{busybox}', command: ['false']}}]}}\n---\napiVersion: v1\nkind: Pod\nmetadata: {{name: lost}}\nspec: {{containers: [{{name: c, image: '{busybox}', env: [{{name: X, valueFrom: {{configMapKeyRef: {{name: nosuch, key: k}}}}}}]}}]}}\n"
    ));
    let waiting = |name: &str| {
        cluster.pod(name)["status"]["containerStatuses"][0]["state"]["waiting"].clone()
    };
    cluster.wait("the crash loop", || {
        waiting("crash")["reason"] == "CrashLoopBackOff"
    });
    assert!(
        cluster.pod("crash")["status"]["containerStatuses"][0]["restartCount"].as_i64() >= Some(1)
    );
    cluster.wait("a status about the missing reference", || {
        waiting("lost")["message"] == "configmap \"nosuch\" not found"
    });
    cluster.delete_all_and_check();
    assert!(cluster.pods().is_empty());
}

/// Deleting a mirror pod does not affect its static pod; removing the manifest does.
fn the_mirror_is_not_the_pod(cluster: &Cluster, mirror: &Value) {
    let name = mirror["metadata"]["name"].as_str().unwrap();
    let id = |p: &Value| p["status"]["containerStatuses"][0]["containerID"].clone();
    cluster.kubectl(&["delete", "pod", name, "--force", "--grace-period=0"]);
    cluster.wait("a new mirror of the same pod", || {
        cluster.pods().iter().any(|p| {
            p["metadata"]["name"] == *name
                && p["metadata"]["uid"] != mirror["metadata"]["uid"]
                && id(p) == id(mirror)
        })
    });
    std::fs::remove_file(cluster.data().join("agent/manifests/static.yaml")).unwrap();
    cluster.wait("no static pod", || {
        !cluster
            .pods()
            .iter()
            .any(|p| p["metadata"]["name"] == *name)
    });
}

#[test]
fn a_restarted_agent_finds_its_pods_and_disturbs_none() {
    let cluster = Cluster::start("restart", 3);
    std::fs::write(
        cluster.data().join("agent/manifests/static.yaml"),
        format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: static}}\nspec: {{terminationGracePeriodSeconds: 1, containers: [{{name: c, image: '{}'}}]}}\n", DEMO[0]),
    )
    .unwrap();
    let broken = cluster.data().join("agent/manifests/broken.yaml");
    std::fs::write(broken, "kind: Pod\nspec: [").unwrap();
    cluster.kubectl(&[
        "create",
        "deployment",
        "web",
        &format!("--image={}", DEMO[0]),
        "--replicas=3",
    ]);
    cluster.kubectl(&["rollout", "status", "deployment/web", "--timeout=180s"]);
    cluster.wait("all four pods to run", || running(&cluster.pods()) == 4);
    cluster.wait("the agent to report the invalid manifest", || {
        cluster.log("agent").contains("broken.yaml")
    });
    let mirror = cluster
        .pods()
        .into_iter()
        .find(|p| {
            p["metadata"]["name"]
                .as_str()
                .unwrap()
                .starts_with("static-")
        })
        .unwrap();
    assert_eq!(mirror["metadata"]["ownerReferences"][0]["kind"], "Node");

    let state = || -> Vec<String> {
        let one = |p: &Value| {
            format!(
                "{} {} {}",
                p["metadata"]["name"],
                p["status"]["containerStatuses"][0]["containerID"],
                p["status"]["conditions"]
            )
        };
        cluster.pods().iter().map(one).collect()
    };
    let version = || {
        cluster
            .pods()
            .iter()
            .map(|p| {
                p["metadata"]["resourceVersion"]
                    .as_str()
                    .unwrap()
                    .to_owned()
            })
            .collect::<Vec<_>>()
    };
    // Several status writes may follow the start of the pods.
    let mut written = version();
    cluster.wait("the statuses to be stable", || {
        std::thread::sleep(std::time::Duration::from_secs(3));
        let now = version();
        let last = std::mem::replace(&mut written, now);
        written == last
    });
    let before = state();
    let kill = |part: &str| {
        let pid = cluster.pid(part);
        let target = nix::unistd::Pid::from_raw(pid);
        nix::sys::signal::kill(target, nix::sys::signal::Signal::SIGKILL).unwrap();
        cluster.wait_for_exit(pid);
    };
    kill("agent");
    cluster.up();
    // When its lease is renewed and a new pod starts, the agent has observed every pod.
    cluster.kubectl(&["scale", "deployment", "web", "--replicas=4"]);
    cluster.kubectl(&["rollout", "status", "deployment/web", "--timeout=180s"]);
    for line in before {
        assert!(
            state().contains(&line),
            "changed by the restart: {line}\n{:#?}",
            state()
        );
    }
    for old in written {
        assert!(
            version().contains(&old),
            "a status was written without a change"
        );
    }

    // The control plane is killed too: no acknowledged write is lost, and the agent continues.
    kill("control-plane");
    cluster.up();
    assert_eq!(running(&cluster.pods()), 5);
    values_of_another_cluster_are_refused(&cluster);
    cluster.kubectl(&["scale", "deployment", "web", "--replicas=2"]);
    cluster.wait("two pods and the static pod", || cluster.pods().len() == 3);

    the_mirror_is_not_the_pod(&cluster, &mirror);
    cluster.kubectl(&["delete", "deployment", "web"]);
    cluster.wait("no pods", || cluster.pods().is_empty());
    // A mirror pod may be removed before the resources of its static pod.
    cluster.wait("no leftovers", || cluster.leftovers().is_empty());
}

/// `up` with a port or an address range that the running cluster does not have names the cluster's, and changes nothing.
fn values_of_another_cluster_are_refused(cluster: &Cluster) {
    let files = [
        "kubeconfig",
        "agent/kubeconfig",
        "cni/net.d/10-holdfast.conflist",
    ];
    let read = || files.map(|file| std::fs::read_to_string(cluster.data().join(file)).unwrap());
    let (before, port) = (read(), (16_400 + cluster.number).to_string());
    for (arguments, expected) in [
        (
            vec!["--api-port", "16497"],
            format!("use --api-port {port}, or"),
        ),
        (
            vec!["--api-port", &port, "--pod-cidr", "10.198.0.0/24"],
            "use --pod-cidr 10.".to_owned(),
        ),
        (
            vec!["--api-port", &port, "--service-cidr", "10.198.0.0/24"],
            "use --service-cidr ".to_owned(),
        ),
    ] {
        let mut up = std::process::Command::new(support::holdfast());
        up.args(["up", "--name", &cluster.name]).args(&arguments);
        let output = up.output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && printed.contains(&expected),
            "{printed}"
        );
    }
    assert_eq!(read(), before);
}

#[test]
fn the_node_reports_a_dead_runtime_and_recovers_with_it() {
    let cluster = Cluster::start("runtime", 4);
    cluster.kubectl(&[
        "create",
        "deployment",
        "web",
        &format!("--image={}", DEMO[0]),
        "--replicas=2",
    ]);
    cluster.kubectl(&["rollout", "status", "deployment/web", "--timeout=180s"]);
    let ready = || {
        let nodes: Value =
            serde_json::from_str(&cluster.kubectl(&["get", "nodes", "-o", "json"])).unwrap();
        let conditions = nodes["items"][0]["status"]["conditions"]
            .as_array()
            .unwrap()
            .clone();
        conditions
            .into_iter()
            .find(|c| c["type"] == "Ready")
            .unwrap()
    };
    let ids = || {
        cluster
            .pods()
            .iter()
            .map(|p| {
                p["status"]["containerStatuses"][0]["containerID"]
                    .as_str()
                    .unwrap()
                    .to_owned()
            })
            .collect::<Vec<_>>()
    };
    let before = ids();
    let pid = cluster.pid("containerd");
    let target = nix::unistd::Pid::from_raw(pid);
    nix::sys::signal::kill(target, nix::sys::signal::Signal::SIGKILL).unwrap();
    // containerd has no supervisor and stays down.
    cluster.wait_for_exit(pid);
    let mut ready_condition = Value::Null;
    cluster.wait("the node not to be ready", || {
        ready_condition = ready();
        ready_condition["status"] == "False"
    });
    assert!(
        ready_condition["message"]
            .as_str()
            .unwrap()
            .contains("container runtime is down"),
        "{ready_condition}"
    );
    cluster.up();
    cluster.wait("the node to be ready", || ready()["status"] == "True");
    assert_eq!(ids(), before, "containers keep running without the daemon");
    cluster.wait("both pods to be ready", || running(&cluster.pods()) == 2);
    assert_eq!(ids(), before, "containers are not restarted");
    cluster.kubectl(&["delete", "deployment", "web"]);
    cluster.wait("no pods", || cluster.pods().is_empty());
}

/// The same lifecycle of pods with the containerds that `make test-all` has unpacked. Versions 1.7 and 2.x
/// have events; the installed one may not.
#[test]
fn newer_runtimes_report_ends_by_events() {
    let containerds = support::skip::fetched("HOLDFAST_RUNTIMES", "usr/bin/containerd");
    for (i, containerd) in containerds.iter().enumerate() {
        let bin = containerd.parent().unwrap().to_owned();
        let cluster =
            Cluster::start_with(&format!("rt{i}"), 10 + u16::try_from(i).unwrap(), Some(bin));
        let version = cluster.kubectl(&[
            "get",
            "nodes",
            "-o",
            "jsonpath={.items[0].status.nodeInfo.containerRuntimeVersion}",
        ]);
        eprintln!("testing with {version}");
        assert!(!version.contains("://1.6."), "{version}");
        let busybox = support::busybox(&cluster);
        cluster.kubectl(&[
            "create",
            "deployment",
            "web",
            &format!("--image={}", DEMO[0]),
            "--replicas=3",
        ]);
        cluster.kubectl(&["rollout", "status", "deployment/web", "--timeout=180s"]);
        cluster.apply(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: job}}\nspec: {{restartPolicy: Never, containers: [{{name: c, image: '{busybox}', command: [sleep, '2']}}]}}\n"
        ));
        cluster.wait("the job to finish", || {
            cluster.pod("job")["status"]["phase"] == "Succeeded"
        });
        assert!(
            !cluster.log("agent").contains("pods every second"),
            "this runtime reports events"
        );
        let job = cluster.pod("job");
        let time = |v: &Value| v.as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
        let finished =
            time(&job["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"]);
        let seen = job["status"]["conditions"]
            .as_array()
            .unwrap()
            .iter()
            .find(|c| c["type"] == "Ready")
            .unwrap();
        assert!(
            time(&seen["lastTransitionTime"]).as_second() - finished.as_second() <= 15,
            "the end was reported by an event, not found by the audit: {job:#}"
        );
        if version.contains("://2.") {
            // Image volumes require 2.1.
            cluster.apply(&format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: imaged}}\nspec: {{restartPolicy: Never, containers: [{{name: c, image: '{busybox}', command: [busybox, sh, -c, 'test -x /img/bin/busybox && ! touch /img/x'], volumeMounts: [{{name: i, mountPath: /img}}]}}], volumes: [{{name: i, image: {{reference: '{busybox}', pullPolicy: Never}}}}]}}\n"
            ));
            cluster.wait("the image to be mounted", || {
                cluster.pod("imaged")["status"]["phase"] == "Succeeded"
            });
        }
        host_ports_lead_to_pods(&cluster, 18_010 + u16::try_from(i).unwrap());
        cluster.delete_finished();
        cluster.kubectl(&["delete", "deployment", "web"]);
        cluster.wait("no pods", || cluster.pods().is_empty());
        cluster.assert_clean();
    }
}

#[test]
fn errors_name_the_cause_and_the_remedy() {
    let run = |arguments: &[&str]| {
        let output = std::process::Command::new(support::holdfast())
            .args(arguments)
            .output()
            .unwrap();
        assert!(!output.status.success(), "{arguments:?} succeeded");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let taken = std::net::TcpListener::bind("0.0.0.0:16499").unwrap();
    let cases: &[(&[&str], &[&str])] = &[
        (&["up", "--name", "Not Valid"], &["--name", "lower-case"]),
        (
            &["up", "--name", "t-x", "--pod-cidr", "10.0.0.1/24"],
            &["--pod-cidr", "10.0.0.1/24"],
        ),
        (
            &[
                "up",
                "--name",
                "t-x",
                "--containerd-endpoint",
                "unix:///nonexistent.sock",
            ],
            &["/nonexistent.sock", "does not answer"],
        ),
        (
            &["up", "--name", "t-port", "--api-port", "16499"],
            &["16499", "--api-port"],
        ),
        (
            &["up", "--name", "t-port", "--api-port", "65000"],
            &["--agent-port", "65000 + 1000"],
        ),
        (
            &[
                "up",
                "--name",
                "t-port",
                "--api-port",
                "16498",
                "--agent-port",
                "16498",
            ],
            &["--agent-port", "16498", "other than the API port"],
        ),
        (
            &["agent", "--config", "/nonexistent.yaml"],
            &["/nonexistent.yaml", "cannot be read"],
        ),
        (
            &[
                "agent",
                "--kubeconfig",
                "/nonexistent",
                "--root-dir",
                "/tmp/holdfast-test-root",
                "--device-plugin-dir",
                "/tmp/holdfast-test-root/device-plugins",
            ],
            &["/nonexistent", "--kubeconfig"],
        ),
        (&["agent", "--node-ip", "here"], &["--node-ip", "here"]),
        (&["kubeconfig", "--name", "nosuch"], &["holdfast up"]),
    ];
    for (arguments, expected) in cases {
        let printed = run(arguments);
        for text in *expected {
            assert!(
                printed.contains(text),
                "{arguments:?} says {printed:?}, which lacks {text:?}"
            );
        }
    }
    drop(taken);
    for name in ["t-x", "t-port"] {
        let output = std::process::Command::new(support::holdfast())
            .args(["down", "--name", name, "--purge"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    }
}
