//! Secret values never appear in a log, event, status or core file, even with the most verbose log.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::path::Path;

use base64::Engine as _;
use support::{Cluster, condition};

const CANARY: &str = "canary-7c1e50b2";

fn stands_in(path: &Path, needles: &[String]) -> bool {
    let bytes = std::fs::read(path).unwrap_or_default();
    needles
        .iter()
        .any(|n| bytes.windows(n.len()).any(|w| w == n.as_bytes()))
}

#[test]
fn a_secret_is_in_no_log_event_or_core_file() {
    let cluster = Cluster::start_verbose("secrets", 39);
    let image = support::busybox(&cluster);
    cluster.kubectl(&[
        "create",
        "secret",
        "generic",
        "keys",
        &format!("--from-literal=pin={CANARY}"),
    ]);
    let login = "{\"auths\": {\"registry.test\": {\"username\": \"u\", \"password\": \"CANARY\"}}}"
        .replace("CANARY", CANARY);
    cluster.kubectl(&[
        "create",
        "secret",
        "generic",
        "pull",
        "--type=kubernetes.io/dockerconfigjson",
        &format!("--from-literal=.dockerconfigjson={login}"),
    ]);
    // The secret is used in every way, and some uses fail.
    let pod = |name: &str, container: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, imagePullSecrets: [{{name: pull}}], volumes: [{{name: k, secret: {{secretName: keys}}}}, {{name: p, projected: {{sources: [{{secret: {{name: keys}}}}]}}}}], containers: [{{name: c, image: '{image}', command: [busybox, sleep, '1000'], env: [{{name: PIN, valueFrom: {{secretKeyRef: {{name: keys, key: pin}}}}}}], volumeMounts: [{{name: k, mountPath: /k}}, {{name: p, mountPath: /p}}]{container}}}]}}\n---\n"
        )
    };
    let probe =
        ", readinessProbe: {periodSeconds: 1, exec: {command: [busybox, test, -f, /k/pin]}}";
    let dead = ", livenessProbe: {periodSeconds: 1, failureThreshold: 1, exec: {command: [busybox, test, -f, /nothing]}}, lifecycle: {postStart: {exec: {command: [busybox, 'true']}}}";
    cluster.apply(&format!(
        "{}{}{}",
        pod("well", probe),
        pod("dying", dead),
        pod("absent", "").replace(&image, "registry.test/none:1")
    ));
    cluster.wait("the pod to be ready", || {
        condition(&cluster.pod("well"), "Ready") == "True"
    });
    cluster.kubectl(&[
        "patch",
        "secret",
        "keys",
        "--patch",
        r#"{"stringData": {"more": "x"}}"#,
    ]);
    cluster.wait("a restart", || {
        cluster.pod("dying")["status"]["containerStatuses"][0]["restartCount"].as_i64() > Some(0)
    });
    cluster.wait("a failed pull", || {
        cluster.events("absent").contains("Failed to pull image")
    });
    let explained = cluster.holdfast(&["explain", "pod", "well", "-o", "json"]);
    let recorded = cluster.holdfast(&["agent", "record", "pod", "well"]);
    assert!(explained.contains("well") && recorded.contains("entries"));

    // The base64 encoding within a longer text depends on its offset, and the first and last characters on
    // the adjacent text.
    let encoded = |shift: usize| {
        let text = base64::engine::general_purpose::STANDARD
            .encode(format!("{}{CANARY}xxx", "x".repeat(shift)));
        text[4..text.len() - 8].to_owned()
    };
    let needles = [CANARY.to_owned(), encoded(0), encoded(1), encoded(2)];
    let log = cluster.data().join("logs/agent.log");
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(
        text.contains("TRACE") && text.len() > 100_000,
        "the agent logs at the highest verbosity: {} bytes",
        text.len()
    );
    for entry in std::fs::read_dir(cluster.data().join("logs")).unwrap() {
        let path = entry.unwrap().path();
        assert!(!stands_in(&path, &needles), "{}", path.display());
    }
    // The store must contain the secret, which shows that the search works.
    let store = std::fs::read_dir(cluster.data().join("control"))
        .unwrap()
        .any(|e| stands_in(&e.unwrap().path(), &needles));
    assert!(store, "the store contains the secret");
    for text in [
        cluster.kubectl(&["get", "events", "-A", "-o", "yaml"]),
        cluster.kubectl(&["get", "pods", "-A", "-o", "yaml"]),
        explained,
        recorded,
    ] {
        assert!(!needles.iter().any(|n| text.contains(n)), "{text}");
    }
    // A core file would contain everything, so core files are disabled.
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", cluster.pid("agent"))).unwrap();
    let core = limits
        .lines()
        .find(|l| l.starts_with("Max core file size"))
        .unwrap();
    assert_eq!(
        core.split_whitespace().skip(4).take(2).collect::<Vec<_>>(),
        ["0", "0"],
        "{core}"
    );
    cluster.delete_all_and_check();
}
