//! The lifecycle of pods with a real containerd: probes, hooks, restarts, deadlines and termination.
#![allow(clippy::unwrap_used)]

use crate::logind;
use crate::support;

use std::path::Path;
use std::time::{Duration, Instant};

use holdfast_sys::logind::{Announcer as _, LogindError};
use serde_json::Value;
use support::{Cluster, condition};

fn status<'a>(pod: &'a Value, container: &str) -> &'a Value {
    ["containerStatuses", "initContainerStatuses"]
        .iter()
        .filter_map(|list| pod["status"][list].as_array())
        .flatten()
        .find(|s| s["name"] == container)
        .unwrap_or(&Value::Null)
}

fn manifest(name: &str, spec: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  terminationGracePeriodSeconds: 2\n{spec}\n---\n"
    )
}

#[test]
fn probes_hooks_restarts_and_ends_follow_the_pod_spec() {
    let cluster = Cluster::start("life", 20);
    let image = support::busybox(&cluster);
    let notes = tempfile::tempdir().unwrap();
    let note = |name: &str| std::fs::read_to_string(notes.path().join(name)).unwrap_or_default();
    let volume = format!(
        "  volumes: [{{name: notes, hostPath: {{path: '{}'}}}}]",
        notes.path().display()
    );
    let mount = "volumeMounts: [{name: notes, mountPath: /notes}]";
    let shell = |script: &str| format!("image: '{image}', command: [busybox, sh, -c, '{script}']");
    let wait_for_term = "trap \"exit 0\" TERM; while true; do sleep 0.1; done";
    let pods = [
        manifest(
            "ready",
            &format!(
                "  containers: [{{name: c, {}, {mount}, readinessProbe: {{periodSeconds: 1, httpGet: {{port: 8080, path: /ok}}}}}}]\n{volume}",
                shell(&format!(
                    "mkdir /www; (sleep 1; touch /www/ok; until test -e /notes/ill; do sleep 0.1; done; rm /www/ok) & httpd -p 8080 -h /www; {wait_for_term}"
                ))
            ),
        ),
        manifest(
            "live",
            &format!(
                "  containers: [{{name: c, {}, livenessProbe: {{periodSeconds: 1, timeoutSeconds: 20, failureThreshold: 2, exec: {{command: [cat, /tmp/alive]}}}}}}]",
                shell(&format!(
                    "mkdir -p /tmp; touch /tmp/alive; (sleep 2; rm /tmp/alive) & {wait_for_term}"
                ))
            ),
        ),
        manifest(
            "startup",
            &format!(
                "  containers: [{{name: c, {}, startupProbe: {{periodSeconds: 1, failureThreshold: 30, tcpSocket: {{port: 8080}}}}, readinessProbe: {{periodSeconds: 60, timeoutSeconds: 20, httpGet: {{port: 8080}}}}}}]",
                shell(&format!(
                    "mkdir /www; echo hi > /www/index.html; sleep 2; httpd -p 8080 -h /www; {wait_for_term}"
                ))
            ),
        ),
        manifest(
            "hooks",
            &format!(
                "  containers: [{{name: c, {}, {mount}, lifecycle: {{postStart: {{exec: {{command: [sh, -c, 'echo post > /notes/hooks']}}}}, preStop: {{exec: {{command: [sh, -c, 'echo pre >> /notes/hooks']}}}}}}}}]\n{volume}",
                shell(
                    "trap \"echo term >> /notes/hooks; exit 0\" TERM; touch /notes/listens; while true; do sleep 0.1; done"
                )
            ),
        )
        .replace("Seconds: 2", "Seconds: 60"),
        manifest(
            "badhook",
            &format!(
                "  containers: [{{name: c, {}, lifecycle: {{postStart: {{exec: {{command: ['false']}}}}}}}}]",
                shell(wait_for_term)
            ),
        ),
        manifest(
            "sidecar",
            &format!(
                "  initContainers: [{{name: side, restartPolicy: Always, {}, {mount}, startupProbe: {{periodSeconds: 1, failureThreshold: 60, exec: {{command: [cat, /notes/side-up]}}}}}}]\n  containers: [{{name: c, {}, {mount}}}]\n{volume}",
                shell(
                    "trap \"echo side >> /notes/order; exit 0\" TERM; sleep 2; touch /notes/side-up; while true; do sleep 0.1; done"
                ),
                shell(
                    "trap \"sleep 0.5; echo main >> /notes/order; exit 0\" TERM; (test -f /notes/side-up && echo after || echo before) > /notes/sidecar-start; while true; do sleep 0.1; done"
                )
            ),
        )
        .replace("Seconds: 2", "Seconds: 60"),
        manifest(
            "blip",
            &format!(
                "  containers: [{{name: c, {}, livenessProbe: {{periodSeconds: 1, timeoutSeconds: 20, failureThreshold: 3, exec: {{command: [sh, -c, 'n=$(cat /tmp/n || echo 0); echo $((n+1)) > /tmp/n; test $n -ne 1']}}}}}}]",
                shell(&format!("mkdir -p /tmp; {wait_for_term}"))
            ),
        ),
        manifest(
            "deadline",
            &format!(
                "  activeDeadlineSeconds: 2\n  containers: [{{name: c, {}}}]",
                shell(wait_for_term)
            ),
        ),
        manifest(
            "fallback",
            &format!(
                "  restartPolicy: Never\n  containers: [{{name: c, terminationMessagePolicy: FallbackToLogsOnError, {}}}]",
                shell("echo first; echo boom; exit 3")
            ),
        ),
        manifest(
            "rules",
            &format!(
                "  restartPolicy: Never\n  containers: [{{name: c, restartPolicy: Never, restartPolicyRules: [{{action: Restart, exitCodes: {{operator: In, values: [3]}}}}], {}, volumeMounts: [{{name: v, mountPath: /v}}]}}]\n  volumes: [{{name: v, emptyDir: {{}}}}]",
                shell("test -f /v/again && exit 0; touch /v/again; exit 3")
            ),
        ),
        manifest(
            "all",
            &format!(
                "  restartPolicy: Never\n  initContainers: [{{name: i, {}, volumeMounts: [{{name: v, mountPath: /v}}]}}]\n  containers: [{{name: a, restartPolicy: Never, restartPolicyRules: [{{action: RestartAllContainers, exitCodes: {{operator: In, values: [4]}}}}], {}, volumeMounts: [{{name: v, mountPath: /v}}]}}, {{name: b, {}, volumeMounts: [{{name: v, mountPath: /v}}]}}]\n  volumes: [{{name: v, emptyDir: {{}}}}]",
                shell("echo init >> /v/inits"),
                // The first container exits only after the second one has started, as only started containers restart.
                shell(
                    "test -f /v/again && wc -l < /v/inits > /dev/termination-log && exit 0; touch /v/again; until test -f /v/b; do sleep 0.1; done; sleep 2; exit 4"
                ),
                shell(&format!("touch /v/b; {wait_for_term}"))
            ),
        ),
        manifest(
            "stubborn",
            &format!(
                "  containers: [{{name: c, {}}}]",
                shell("trap \"\" TERM; while true; do sleep 0.1; done")
            ),
        )
        .replace("Seconds: 2", "Seconds: 60"),
    ];
    cluster.apply(&pods.concat());
    let pod = |name: &str| cluster.pod(name);

    cluster.wait("the HTTP probe to succeed", || {
        condition(&pod("ready"), "Ready") == "True"
    });
    std::fs::write(notes.path().join("ill"), "").unwrap();
    cluster.wait("the failing probe to make the pod unready", || {
        condition(&pod("ready"), "Ready") == "False"
    });
    assert!(
        pod("ready")["status"]["phase"] == "Running"
            && status(&pod("ready"), "c")["restartCount"] == 0
    );

    cluster.wait("a restart after the failed liveness probe", || {
        status(&pod("live"), "c")["restartCount"].as_i64() >= Some(1)
    });
    cluster.wait("the events of the restart", || {
        let events = cluster.events("live");
        events.contains("Warning Unhealthy Liveness probe failed: cat: can't open '/tmp/alive'")
            && events
                .contains("Normal Killing Container c failed liveness probe, will be restarted")
    });

    cluster.wait("readiness after the startup probe", || {
        condition(&pod("startup"), "Ready") == "True"
    });
    assert_eq!(status(&pod("startup"), "c")["started"], true);

    cluster.wait("the postStart hook to run", || {
        note("hooks") == "post\n" && notes.path().join("listens").exists()
    });
    cluster.wait("the pod with hooks to run", || {
        condition(&pod("hooks"), "Ready") == "True"
    });
    cluster.kubectl(&["delete", "pod", "hooks"]);
    assert_eq!(
        note("hooks"),
        "post\npre\nterm\n",
        "the hook runs before the signal"
    );

    cluster.wait("a failing postStart hook to stop its container", || {
        let events = cluster.events("badhook");
        events.contains("Warning FailedPostStartHook PostStartHook failed")
            && status(&pod("badhook"), "c")["restartCount"].as_i64() >= Some(1)
    });

    cluster.wait("the sidecar's pod to be ready", || {
        condition(&pod("sidecar"), "Ready") == "True"
    });
    // The runtime reports `running` a moment before the container's shell writes anything.
    cluster.wait("the container to write when it started", || {
        note("sidecar-start").ends_with('\n')
    });
    assert_eq!(note("sidecar-start"), "after\n");
    cluster.kubectl(&["delete", "pod", "sidecar"]);
    assert_eq!(note("order"), "main\nside\n", "sidecars are stopped last");

    cluster.wait("the deadline to be exceeded", || {
        pod("deadline")["status"]["reason"] == "DeadlineExceeded"
    });
    let ended = pod("deadline");
    assert_eq!(ended["status"]["phase"], "Failed");
    assert_eq!(
        ended["status"]["message"],
        "Pod was active on the node longer than the specified deadline"
    );

    cluster.wait("the pod with a log as message to fail", || {
        pod("fallback")["status"]["phase"] == "Failed"
    });
    assert_eq!(
        status(&pod("fallback"), "c")["state"]["terminated"]["message"],
        "first\nboom\n"
    );

    cluster.wait("the pod with one restart to succeed", || {
        pod("rules")["status"]["phase"] == "Succeeded"
    });
    assert_eq!(status(&pod("rules"), "c")["restartCount"], 1);

    // The exiting container may have exited before the next one is started again.
    cluster.wait("all containers to be restarted", || {
        let all = pod("all");
        status(&all, "a")["state"]["terminated"]["exitCode"] == 0
            && status(&all, "b")["restartCount"].as_i64() >= Some(1)
    });
    let all = pod("all");
    for name in ["a", "b", "i"] {
        let status = status(&all, name);
        assert_eq!(status["restartCount"], 1, "{name}: {all:#}");
        let last = &status["lastState"]["terminated"];
        assert_eq!(last["reason"], "RestartingAllContainers", "{name}: {all:#}");
    }
    assert_eq!(
        status(&all, "a")["state"]["terminated"]["message"],
        "2\n",
        "the init container ran again: {all:#}"
    );

    a_shorter_grace_takes_effect(&cluster, &image, notes.path());

    // The agent explains a running pod and a blocked one.
    cluster.apply(&format!(
        "{}{}",
        manifest("nosuch", "  containers: [{name: c, image: 'nosuch.invalid/x:1', imagePullPolicy: Never}]"),
        manifest("unmounted", &format!("  containers: [{{name: c, {}, volumeMounts: [{{name: v, mountPath: /v}}]}}]\n  volumes: [{{name: v, configMap: {{name: nosuch}}}}]", shell("true")))
    ));
    let explain = |pod: &str, output: &str| {
        let run = std::process::Command::new(support::holdfast())
            .args(["explain", "pod", pod, "--name", &cluster.name, "-o", output])
            .output()
            .unwrap();
        format!(
            "{}{}",
            String::from_utf8_lossy(&run.stdout),
            String::from_utf8_lossy(&run.stderr)
        )
    };
    // A single failure below the threshold is reset when the probe succeeds again.
    cluster.wait("an event about one failed probe", || {
        cluster
            .events("blip")
            .contains("Unhealthy Liveness probe failed")
    });
    cluster.wait("the probe to succeed again", || {
        explain("blip", "text").contains("as specified")
    });
    assert_eq!(status(&pod("blip"), "c")["restartCount"], 0);
    let running = explain("startup", "text");
    assert!(
        running.contains("as specified")
            && running.contains("startup probe c")
            && running.contains("sandbox"),
        "{running}"
    );
    cluster.wait("an explanation that names the missing image", || {
        explain("nosuch", "text")
            .contains("the image of container c cannot be pulled: ErrImageNeverPull")
    });
    cluster.wait("an explanation that names the missing volume", || {
        let (explanation, pod) = (explain("unmounted", "text"), pod("unmounted"));
        let message = status(&pod, "c")["state"]["waiting"]["message"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        explanation.contains("volume v cannot be set up: configmap \"nosuch\" not found")
            && explanation.contains("next try")
            && message == "volume v cannot be set up; the pod's events have the error"
    });
    // Between two retries: during one, another step may be the blocking one.
    cluster.wait("the blocking step as JSON", || {
        let json: Value = serde_json::from_str(&explain("unmounted", "json")).unwrap();
        json["blocking"]["step"] == "volume" && json["blocking"]["subject"] == "v"
    });
    assert!(explain("startup", "svg").starts_with("<svg "));
    assert!(explain("nobody", "text").contains("kubectl get pod -o wide"));

    cluster.delete_all_and_check();
}

/// Shortens the grace period while a pod that ignores SIGTERM is being stopped.
fn a_shorter_grace_takes_effect(cluster: &Cluster, image: &str, notes: &Path) {
    a_forced_deletion_takes_effect(cluster, image, notes);
    cluster.wait("the stubborn pod to run", || {
        condition(&cluster.pod("stubborn"), "Ready") == "True"
    });
    cluster.kubectl(&["delete", "pod", "stubborn", "--wait=false"]);
    std::thread::sleep(Duration::from_secs(1));
    let shortened = Instant::now();
    cluster.kubectl(&["delete", "pod", "stubborn", "--grace-period=1"]);
    assert!(shortened.elapsed() < Duration::from_secs(40));
}

/// Two pods with a long grace period that ignore SIGTERM and have a preStop hook that never returns.
/// One of them is deleted normally before.
fn a_forced_deletion_takes_effect(cluster: &Cluster, image: &str, notes: &Path) {
    let names = ["deaf", "deaf-deleted"];
    for name in names {
        let beats =
            format!("trap \"\" TERM; while true; do echo beat > /notes/{name}; sleep 0.1; done");
        let pod = manifest(
            name,
            &format!(
                "  containers: [{{name: c, image: '{image}', command: [busybox, sh, -c, '{beats}'], lifecycle: {{preStop: {{exec: {{command: [busybox, sleep, '1000']}}}}}}, volumeMounts: [{{name: notes, mountPath: /notes}}]}}]\n  volumes: [{{name: notes, hostPath: {{path: '{}'}}}}]",
                notes.display()
            ),
        );
        cluster.apply(&pod.replace("Seconds: 2", "Seconds: 500"));
    }
    let beats = |name: &str| {
        let modified = notes.join(name).metadata().and_then(|file| file.modified());
        modified.is_ok_and(|at| at.elapsed().unwrap_or_default() < Duration::from_secs(2))
    };
    cluster.wait("the deaf pods to run", || {
        names.iter().all(|name| beats(name))
    });
    cluster.kubectl(&["delete", "pod", "deaf-deleted", "--wait=false"]);
    std::thread::sleep(Duration::from_secs(1));
    let forced = Instant::now();
    for name in names {
        cluster.kubectl(&["delete", "pod", name, "--force", "--grace-period=0"]);
    }
    cluster.wait("the deaf pods to stop", || {
        !names.iter().any(|name| beats(name))
    });
    assert!(
        forced.elapsed() < Duration::from_secs(30),
        "{:?}",
        forced.elapsed()
    );
    let log = cluster.log("agent");
    let lines = log.matches("the pod was removed from its source; stopping its containers");
    assert_eq!(lines.count(), names.len(), "{log}");
}

/// Follows a log as `kubectl logs -f` must: the open file to its end, then the new one. The log has
/// 3,000 numbered lines.
fn nothing_is_lost_across_rotations(log: &Path) {
    use std::os::unix::fs::MetadataExt as _;
    let number = |file: &std::fs::File| file.metadata().unwrap().ino();
    let (mut files, mut text, start) = (
        Vec::<(std::fs::File, String)>::new(),
        String::new(),
        Instant::now(),
    );
    while !text.contains("line-2999\n") {
        use std::io::Read as _;
        // During a rotation the file does not exist for a moment.
        let now = std::fs::File::open(log).ok();
        let known = files.last().map(|(file, _)| number(file));
        files.extend(
            now.filter(|file| Some(number(file)) != known)
                .map(|file| (file, String::new())),
        );
        // Read all files: the runtime may still write to the old one for a moment after the new one exists.
        for (file, text) in &mut files {
            file.read_to_string(text).unwrap();
        }
        text = files.iter().map(|(_, text)| text.as_str()).collect();
        assert!(
            start.elapsed() < support::condition_timeout(),
            "following the log did not reach its end"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    let seen: Vec<usize> = text
        .lines()
        .filter_map(|l| l.rsplit_once("line-")?.1.parse().ok())
        .collect();
    // The first rotation may have happened before the first read.
    let first = seen[0];
    let expected: Vec<usize> = (first..3000).collect();
    assert!(
        first < 1500 && seen == expected,
        "lines are lost or duplicated across rotations: {} of {}, from {first}",
        seen.len(),
        expected.len()
    );
}

#[test]
fn logs_are_rotated_linked_and_removed_with_their_container() {
    let cluster = Cluster::start_configured(
        "rotated",
        21,
        "{containerLogMaxSize: 40Ki, containerLogMaxFiles: 3, containerLogMonitorInterval: 500ms}",
    );
    let image = support::busybox(&cluster);
    let shell = |script: &str| format!("image: '{image}', command: [busybox, sh, -c, '{script}']");
    let count = "i=0; while [ $i -lt 3000 ]; do echo line-$i; i=$((i+1)); [ $((i % 50)) = 0 ] && sleep 0.1; done; trap \"exit 0\" TERM; while true; do sleep 0.1; done";
    let crash = "test -f /v/4 && sleep 1000; n=$(ls /v | wc -l); touch /v/$((n+1)); exit 1";
    cluster.apply(&format!(
        "{}{}",
        manifest("chatty", &format!("  containers: [{{name: c, {}}}]", shell(count))),
        manifest(
            "crash",
            &format!(
                "  containers: [{{name: c, {}, volumeMounts: [{{name: v, mountPath: /v}}]}}]\n  volumes: [{{name: v, emptyDir: {{}}}}]",
                shell(crash)
            )
        )
    ));
    let uid = |pod: &str| {
        cluster.pod(pod)["metadata"]["uid"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let dir = |pod: &str| {
        cluster
            .data()
            .join("pods-logs")
            .join(format!("default_{pod}_{}", uid(pod)))
            .join("c")
    };
    let names = |pod: &str| -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(dir(pod))
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| e.file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let log = dir("chatty").join("0.log");
    cluster.wait("the log", || log.exists());
    nothing_is_lost_across_rotations(&log);
    cluster.wait(
        "a limited number of files, with older ones compressed",
        || {
            let names = names("chatty");
            names.len() <= 3 && names.iter().any(|n| n.ends_with(".gz"))
        },
    );
    let link = std::fs::read_dir(cluster.data().join("containers"))
        .unwrap()
        .flatten()
        .find(|e| {
            e.file_name()
                .to_str()
                .unwrap()
                .starts_with("chatty_default_c-")
        })
        .unwrap();
    assert_eq!(std::fs::read_link(link.path()).unwrap(), log);

    // For a container in a crash loop, the last two instances are kept.
    cluster.wait("two restarts", || {
        status(&cluster.pod("crash"), "c")["restartCount"].as_i64() >= Some(2)
    });
    cluster.wait("older instances to be removed with their logs", || {
        let count = status(&cluster.pod("crash"), "c")["restartCount"]
            .as_i64()
            .unwrap();
        let newest = [format!("{}.log", count - 1), format!("{count}.log")];
        names("crash").iter().all(|n| newest.contains(n))
    });
    cluster.delete_all_and_check();
}

#[test]
fn static_pods_of_a_url_run_while_it_lists_them() {
    use std::io::{Read as _, Write as _};
    use std::sync::{Arc, Mutex};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let answer = Arc::new(Mutex::new((
        200,
        "{\"apiVersion\": \"v1\", \"kind\": \"PodList\", \"items\": []}".to_owned(),
    )));
    let served = Arc::clone(&answer);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let length = stream.read(&mut request).unwrap_or(0);
            let (mut code, body) = served.lock().unwrap().clone();
            if !String::from_utf8_lossy(&request[..length])
                .to_lowercase()
                .contains("x-token: abc")
            {
                code = 403;
            }
            // The client may have closed the connection.
            let _ = write!(
                stream,
                "HTTP/1.1 {code} X\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
        }
    });
    let fields = format!(
        "{{staticPodURL: 'http://127.0.0.1:{port}/pods', staticPodURLHeader: {{X-Token: [abc]}}, httpCheckFrequency: 300ms}}"
    );
    let cluster = Cluster::start_configured("url", 26, &fields);
    let image = support::busybox(&cluster);
    let mirror = || {
        cluster.pods().into_iter().find(|p| {
            p["metadata"]["name"]
                .as_str()
                .unwrap()
                .starts_with("remote-")
        })
    };
    let pod = format!(
        "{{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {{\"name\": \"remote\"}}, \"spec\": {{\"terminationGracePeriodSeconds\": 1, \"containers\": [{{\"name\": \"c\", \"image\": \"{image}\", \"command\": [\"busybox\", \"sleep\", \"1000\"]}}]}}}}"
    );
    *answer.lock().unwrap() = (200, pod);
    cluster.wait("the pod's mirror to be ready", || {
        mirror().is_some_and(|p| condition(&p, "Ready") == "True")
    });
    assert_eq!(
        mirror().unwrap()["metadata"]["annotations"]["kubernetes.io/config.source"],
        "http"
    );
    answer.lock().unwrap().0 = 500;
    cluster.wait("the agent to log the error", || {
        cluster.log("agent").contains("responded with 500")
    });
    std::thread::sleep(Duration::from_secs(1));
    assert!(
        mirror().is_some_and(|p| condition(&p, "Ready") == "True"),
        "an error changes nothing"
    );
    *answer.lock().unwrap() = (
        200,
        "{\"apiVersion\": \"v1\", \"kind\": \"PodList\", \"items\": []}".to_owned(),
    );
    cluster.wait("the mirror to be removed", || mirror().is_none());
    cluster.wait("no leftovers", || cluster.leftovers().is_empty());
}

/// logind over a real bus: the agent raises the delay, receives announcements, and detects a restart of logind.
#[test]
fn logind_is_delayed_and_its_announcements_are_received() {
    let mut logind = logind::Logind::start(Duration::from_secs(5));
    let ours = holdfast_sys::logind::Logind::at(&logind.address(), &logind.configuration());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let _entered = runtime.enter();
    let within = |seconds| Duration::from_secs(seconds);
    let mut listening = runtime.block_on(async {
        // Five seconds are sufficient for the first call, but not for the second one.
        ours.listen(within(5)).await.unwrap();
        assert!(logind.signals().is_empty() && !logind.configuration().exists());
        ours.listen(within(30)).await.unwrap()
    });
    assert_eq!(logind.signals(), [("systemd-logind.service".into(), 1)]);
    let file = logind.configuration().join("99-kubelet.conf");
    let text = std::fs::read_to_string(file).unwrap();
    assert!(text.ends_with("[Login]\nInhibitDelayMaxSec=30\n"), "{text}");

    let inhibitor = runtime.block_on(listening.inhibit()).unwrap();
    assert_eq!(logind.inhibitors(), ["shutdown kubelet delay"]);
    for announced in [true, false, true] {
        logind.announce(announced);
        let notified = async { (listening.next().await, listening.is_shutting_down().await) };
        let notified = async { tokio::time::timeout(support::condition_timeout(), notified).await };
        let notified = runtime.block_on(notified);
        let (next, now) = notified.unwrap();
        assert_eq!((next, now.unwrap()), (Some(announced), announced));
    }
    let refused = runtime.block_on(listening.inhibit());
    assert!(matches!(refused, Err(LogindError::InProgress)));
    logind.restart();
    let notified =
        async { tokio::time::timeout(support::condition_timeout(), listening.next()).await };
    let notified = runtime.block_on(notified);
    assert_eq!(
        notified.unwrap(),
        None,
        "the subscription ends with the old logind"
    );
    assert_eq!(logind.inhibitors().len(), 1, "the inhibitor is always held");
    drop(inhibitor);
    // A child process that another test of this process is starting also holds the lock until its exec.
    let dropped = std::time::Instant::now();
    while !logind.inhibitors().is_empty() {
        assert!(
            dropped.elapsed() < support::condition_timeout(),
            "the inhibitor was not released"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A pod that takes a second to stop after SIGTERM. It is ready when it can handle the signal.
fn slow_to_end(image: &str, name: &str, grace: u32, more: &str) -> String {
    let script = "trap \"sleep 1; exit 3\" TERM; : > /listens; while :; do busybox sleep 0.1; done";
    let probe = "{periodSeconds: 1, timeoutSeconds: 20, exec: {command: [test, -e, /listens]}}";
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  terminationGracePeriodSeconds: {grace}\n  containers: [{{name: c, image: '{image}', command: [busybox, sh, -c, '{script}'], readinessProbe: {probe}}}]\n{more}\n---\n"
    )
}

/// When the agent releases its inhibitor lock, the API has the final state: which pods stopped, in
/// which order, and why.
fn has_published(cluster: &Cluster, node: &str, mirror: &str) {
    let finished = |name: &str| {
        let pod = cluster.pod(name);
        let own = status(&pod, "c")["state"]["terminated"].clone();
        assert_eq!(pod["status"]["phase"], "Failed", "{pod}");
        assert_eq!(pod["status"]["reason"], "Terminated", "{pod}");
        assert_eq!(condition(&pod, "DisruptionTarget"), "True", "{pod}");
        assert_eq!(own["exitCode"], 3, "the container had time to exit: {pod}");
        own["finishedAt"].as_str().unwrap().to_owned()
    };
    let ends = ["plain", mirror, "critical"].map(finished);
    assert!(ends[0] < ends[2] && ends[1] < ends[2], "{ends:?}");
    let why = cluster.holdfast(&["explain", "pod", "plain"]);
    assert!(
        why.contains("Terminated: the node is shutting down."),
        "{why}"
    );
    let metrics = cluster.kubectl(&[
        "get",
        "--raw",
        &format!("/api/v1/nodes/{node}/proxy/metrics"),
    ]);
    let value = |name: &str| {
        let line = metrics.lines().find(|l| l.starts_with(name)).expect(name);
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    let [start, end] = ["start", "end"]
        .map(|what| value(&format!("kubelet_graceful_shutdown_{what}_time_seconds")));
    assert!(start > 1.7e9 && end >= start, "{start} {end}");
}

/// A real agent and real containers. A shutdown waits until its pods have stopped in order and the API
/// has their status. A cancelled shutdown leaves a working node.
#[test]
fn a_shutdown_waits_for_pods() {
    let logind = logind::Logind::start(Duration::from_secs(60));
    let statics = tempfile::tempdir().unwrap();
    let fields = format!(
        "shutdownGracePeriod: 60s\nshutdownGracePeriodCriticalPods: 20s\nstaticPodPath: {}\n",
        statics.path().display()
    );
    let cluster = Cluster::start_on_bus("shutdown", 59, &fields, Some(logind.address()));
    cluster.wait("an inhibitor", || {
        logind.inhibitors() == ["shutdown kubelet delay"]
    });
    let image = support::busybox(&cluster);
    let pod = |name: &str, grace: u32, more: &str| slow_to_end(&image, name, grace, more);
    let manifest = pod("manifest", 5, "");
    std::fs::write(
        statics.path().join("manifest.yaml"),
        manifest.replace("---", ""),
    )
    .unwrap();
    cluster.apply(&pod("plain", 600, ""));
    cluster.apply(&pod(
        "critical",
        5,
        "  priorityClassName: system-node-critical",
    ));
    let node = cluster.kubectl(&["get", "nodes", "-o", "name"]);
    let node = node.trim().trim_start_matches("node/").to_owned();
    let mirror = format!("manifest-{node}");
    let ready = |name: &str| {
        let pods = cluster.pods();
        let found = pods.iter().find(|p| p["metadata"]["name"] == name);
        found.is_some_and(|p| condition(p, "Ready") == "True")
    };
    cluster.wait("the pods to be ready", || {
        ready("plain") && ready("critical") && ready(&mirror)
    });
    let ready_message = || {
        let path = "jsonpath={.status.conditions[?(@.type==\"Ready\")].message}";
        cluster.kubectl(&["get", "node", &node, "-o", path])
    };

    let begun = Instant::now();
    logind.announce(true);
    cluster.wait("the node to report the shutdown", || {
        ready_message() == "node is shutting down"
    });
    cluster.apply(&pod("late", 5, &format!("  nodeName: {node}")));
    let reason = |name: &str| cluster.pod(name)["status"]["reason"].clone();
    cluster.wait("the late pod to be refused", || {
        reason("late") == "NodeShutdown"
    });
    cluster.wait_quietly("the inhibitor to be released", || {
        logind.inhibitors().is_empty()
    });
    assert!(begun.elapsed() < Duration::from_secs(60));
    has_published(&cluster, &node, &mirror);

    logind.announce(false);
    cluster.wait("the node to be ready again", || {
        logind.inhibitors().len() == 1 && ready_message() == "kubelet is posting ready status"
    });
    cluster.apply(&pod("after", 1, ""));
    cluster.wait("pods to be ready again", || {
        ready("after") && ready(&mirror)
    });
    assert_eq!(reason("plain"), "Terminated");
    std::fs::remove_file(statics.path().join("manifest.yaml")).unwrap();
    cluster.kubectl(&["delete", "pod", "--all"]);
    cluster.wait("all pods to be removed", || cluster.pods().is_empty());
    // A mirror pod may be removed before the resources of its static pod.
    cluster.wait("no leftovers", || cluster.leftovers().is_empty());
}
