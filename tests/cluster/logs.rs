//! Containers' logs, the node's logs and the agent's own API, with the real kubectl and a real containerd.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use support::client::{Administrator, Running, kubectl, pod};
use support::disk::SmallDisk;
use support::{Cluster, condition};

/// The pod with an emptyDir at `/v`.
fn with_volume(pod: &str) -> String {
    pod.replace(
        "containers:",
        "volumes: [{name: v, emptyDir: {}}], containers:",
    )
    .replace(
        "command:",
        "volumeMounts: [{name: v, mountPath: /v}], command:",
    )
}

/// Checkpoints require space, and a runtime that supports them; this one reports that it does not.
fn checkpoints_are_refused(cluster: &Cluster, admin: &[&str], url: &str) {
    let post = |url: &str| {
        let mut curl = Command::new("curl");
        let curl = curl.args(["-sk", "-X", "POST", "-w", " %{http_code}"]);
        let output = curl.args(admin).arg(url).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(post(&url.replace("talker", "nobody")).ends_with(" 404"));
    assert!(post(&format!("{url}?timeout=soon")).ends_with(" 404"));
    let disk = SmallDisk::at(cluster.data().join("agent/checkpoints"), "size=1m");
    std::fs::write(disk.path().join("old.tar"), vec![0; 1_000_000]).unwrap();
    let answer = post(url);
    assert!(answer.ends_with(" 500"), "{answer}");
    assert!(answer.contains("remove old checkpoints"), "{answer}");
    std::fs::remove_file(disk.path().join("old.tar")).unwrap();
    let answer = post(url);
    assert!(answer.ends_with(" 500"), "{answer}");
    assert!(answer.contains("(rpc error: code = "), "{answer}");
}

#[test]
fn container_logs_are_readable_in_every_way() {
    let cluster = Cluster::start_configured(
        "logs",
        44,
        "containerLogMaxSize: 4Ki\ncontainerLogMonitorInterval: 3s\nenableSystemLogQuery: true\nlogging: {format: json}\ntlsMinVersion: VersionTLS13\n",
    );
    let image = support::busybox(&cluster);
    // The two streams are read independently: stderr is written only after stdout has been read.
    let script = "for i in 1 2 3 4 5; do echo line $i; done; until test -e /go; do sleep 0.2; done; echo wrong >&2; sleep 10000";
    let twice = "if test -e /tmp/there; then echo second; sleep 10000; fi; touch /tmp/there; echo first; exit 1";
    // A container's own files are lost with it, so the second instance detects a restart by a file in a volume.
    let again = with_volume(&pod("again", &image, &twice.replace("/tmp", "/v")));
    cluster.apply(&format!(
        "{}{}{}",
        pod("talker", &image, script),
        again,
        pod("absent", "registry.test/none:1", "true")
    ));
    cluster.wait("the pods to run", || {
        let again = cluster.pod("again");
        let twice = again["status"]["containerStatuses"][0]["restartCount"] == 1;
        condition(&cluster.pod("talker"), "Ready") == "True"
            && twice
            && condition(&again, "Ready") == "True"
    });
    let log = |arguments: &[&str]| {
        cluster
            .kubectl(&[&["logs", "talker"], arguments].concat())
            .trim_end()
            .to_owned()
    };
    cluster.wait("the first lines of the log", || log(&[]).contains("line 5"));
    support::inside(&cluster, "talker", &["busybox", "touch", "/go"]);
    cluster.wait("the last line of the log", || log(&[]).ends_with("wrong"));
    assert_eq!(log(&[]), "line 1\nline 2\nline 3\nline 4\nline 5\nwrong");
    assert_eq!(log(&["--tail=2"]), "line 5\nwrong");
    assert_eq!(log(&["--limit-bytes=10"]), "line 1\nlin");
    assert_eq!(log(&["--since=1h", "--tail=1"]), "wrong");
    let stamped = log(&["--timestamps", "--tail=1"]);
    assert!(
        stamped.ends_with("Z wrong")
            && stamped
                .split(' ')
                .next()
                .unwrap()
                .parse::<jiff::Timestamp>()
                .is_ok(),
        "{stamped}"
    );
    // The container is ready a moment before it writes anything.
    cluster.wait("the log of the second instance", || {
        cluster.kubectl(&["logs", "again"]) == "second\n"
    });
    assert_eq!(cluster.kubectl(&["logs", "again", "-p"]), "first\n");
    let refused = |arguments: &[&str]| {
        let output = kubectl(&cluster, arguments).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(
        refused(&["logs", "talker", "-p"])
            .contains("previous terminated container \"c\" in pod \"talker\" not found")
    );
    assert!(
        refused(&["logs", "talker", "-c", "d"]).contains("container d is not valid for pod talker")
    );
    cluster.wait("the pull to fail", || {
        let why = refused(&["logs", "absent"]);
        why.contains("is waiting to start: image can't be pulled")
            || why.contains("is waiting to start: trying and failing to pull image")
    });

    a_log_is_followed_across_rotations(&cluster, &image);

    // The node's own API: closed to anonymous users, open to authorised ones.
    let port = cluster.agent_port();
    let namespace = cluster.namespace();
    let address = cluster.node_address();
    let curl = |arguments: &[&str], path: &str| {
        let url = format!("https://{address}:{port}{path}");
        let output = Command::new("curl")
            .args(["-sk", "-o", "/dev/null", "-w", "%{http_code}"])
            .args(arguments)
            .arg(url)
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let account = cluster.kubectl(&["create", "token", "default"]);
    let bearer = format!("Authorization: Bearer {account}");
    for path in [
        "/pods",
        "/healthz",
        &format!("/containerLogs/{namespace}/talker/c"),
        "/nobody/thought/of/it",
        "/",
    ] {
        assert_eq!(
            (
                curl(&[], path).as_str(),
                curl(&["-H", &bearer], path).as_str()
            ),
            ("401", "403"),
            "{path}"
        );
        assert_eq!(
            curl(&["-H", "Authorization: Bearer wrong"], path),
            "401",
            "{path}"
        );
    }
    let (admin, _files) = Administrator::of(&cluster).for_curl();
    let admin: Vec<&str> = admin.iter().map(String::as_str).collect();
    for (path, code) in [
        ("/pods", "200"),
        ("/healthz", "200"),
        ("/configz", "200"),
        ("/runningpods/", "200"),
        ("/statusz", "200"),
        ("/nobody", "404"),
        ("/run/a/b/c", "405"),
    ] {
        assert_eq!(curl(&admin, path), code, "{path}");
    }
    let raw = |path: &str| cluster.get_node_path(path);
    let pods: serde_json::Value = serde_json::from_str(&raw("/pods")).unwrap();
    let talker = pods["items"]
        .as_array()
        .unwrap()
        .iter()
        .find(|p| p["metadata"]["name"] == "talker")
        .unwrap();
    assert_eq!(talker["status"]["phase"], "Running");
    assert!(raw("/configz").contains("\"containerLogMaxSize\":\"4Ki\""));
    assert!(
        raw("/runningpods/").contains("talker")
            && raw("/logs/").contains('\n')
            && raw("/statusz").contains("Holdfast")
    );
    assert_eq!(
        curl(&[&admin[..], &["--tls-max", "1.2"]].concat(), "/pods"),
        "000",
        "an older version of TLS is refused"
    );

    // Logs of a service are searched in the journal, then in its own file.
    let own = std::path::Path::new("/var/log/holdfast-t-logs.log");
    std::fs::write(own, "what it said\n").unwrap();
    assert_eq!(raw("/logs/?query=holdfast-t-logs"), "what it said\n");
    assert_eq!(raw("/logs/?query=/holdfast-t-logs.log"), "what it said\n");
    std::fs::remove_file(own).unwrap();
    let checkpoint = format!("/checkpoint/{namespace}/talker/c");
    for (path, code) in [
        ("/logs/?query=holdfast-t-logs", "404"),
        ("/logs/?query=a&boot=1", "422"),
        ("/logs/?query=/../etc/passwd", "404"),
        ("/logs/?query=a%3Bb", "422"),
        (&checkpoint, "405"),
        ("/debug/flags/v", "405"),
    ] {
        assert_eq!(curl(&admin, path), code, "{path}");
    }
    let url = format!("https://{address}:{port}{checkpoint}");
    checkpoints_are_refused(&cluster, &admin, &url);
    // From now on more is logged, one JSON object per line, with the pod if the entry concerns one.
    assert_eq!(
        curl(
            &[&admin[..], &["-X", "PUT", "-d", "many"]].concat(),
            "/debug/flags/v"
        ),
        "400"
    );
    assert_eq!(
        curl(
            &[&admin[..], &["-X", "PUT", "-d", "5"]].concat(),
            "/debug/flags/v"
        ),
        "200"
    );
    cluster.delete_all_and_check();
    cluster.wait("the log lines of the new verbosity", || {
        let log = cluster.log("agent");
        // The agent may be writing the last line.
        let (whole, _) = log.rsplit_once('\n').unwrap();
        let lines: Vec<serde_json::Value> = whole
            .lines()
            .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}")))
            .collect();
        lines
            .iter()
            .any(|l| l["msg"] == "the log's verbosity was changed" && l["v"] == 0)
            && lines
                .iter()
                .any(|l| l["pod"] == format!("talker_{namespace}") && l["v"] == 4)
    });
}

/// Every line arrives once and in order, and following ends with the container.
fn a_log_is_followed_across_rotations(cluster: &Cluster, image: &str) {
    // Lines that were rotated away before following begins are not shown, so the script waits for the follower.
    let bursts = "echo begun; until test -e /go; do sleep 0.2; done; i=0; while test $i -lt 3000; do i=$((i+1)); echo number $i; test $((i % 1000)) -eq 0 && sleep 4; done; echo over";
    cluster.apply(&pod("counter", image, bursts));
    cluster.wait("the pod to run", || {
        !cluster.pod("counter")["status"]["containerStatuses"][0]["state"]["running"].is_null()
    });
    let arguments = ["logs", "-f", "counter"];
    let mut follow = Running(kubectl(cluster, &arguments).spawn().unwrap());
    let (mut reader, mut text) = (
        BufReader::new(follow.0.stdout.take().unwrap()),
        String::new(),
    );
    reader.read_line(&mut text).unwrap();
    support::inside(cluster, "counter", &["busybox", "touch", "/go"]);
    reader.read_to_string(&mut text).unwrap();
    let over = jiff::Timestamp::now();
    let expected: String = ["begun\n".to_owned()]
        .into_iter()
        .chain((1..=3000).map(|n| format!("number {n}\n")))
        .chain(["over\n".to_owned()])
        .collect();
    let rotated = std::fs::read_dir(cluster.data().join("pods-logs"))
        .unwrap()
        .flatten()
        .find(|e| e.file_name().to_string_lossy().contains("_counter_"));
    let files = std::fs::read_dir(rotated.unwrap().path().join("c"))
        .unwrap()
        .count();
    assert!(files > 1, "the log was rotated meanwhile");
    assert!(
        text == expected,
        "{} lines, {} bytes of {}",
        text.lines().count(),
        text.len(),
        expected.len()
    );
    let mut ended = None;
    cluster.wait("the container's end in the status", || {
        let pod = cluster.pod("counter");
        let state = &pod["status"]["containerStatuses"][0]["state"];
        let at = state["terminated"]["finishedAt"].as_str();
        ended = at.map(|at| at.parse::<jiff::Timestamp>().unwrap());
        ended.is_some()
    });
    let late = over.as_second() - ended.unwrap().as_second();
    assert!(
        late < 25,
        "following ends with the container, not {late} s later"
    );
}

/// The number of lines in the files of a log, from the oldest file on; each line begins with its
/// number. An error if a line is missing, occurs twice, or cannot be read yet.
fn lines_in_order(dir: &Path) -> Result<u64, String> {
    let listed = std::fs::read_dir(dir).map_err(|e| e.to_string())?;
    let mut names: Vec<String> = listed
        .flatten()
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    // Names of rotated files are times; the current log comes last.
    names.sort_by_key(|name| (name == "0.log", name.clone()));
    // If the runtime is given a new file in the middle of a line, it splits the line: the first part has the tag P.
    let (mut next, mut continued) = (0, false);
    for name in &names {
        let file = std::fs::File::open(dir.join(name)).map_err(|e| format!("{name}: {e}"))?;
        let file: Box<dyn Read> = match name.ends_with(".gz") {
            true => Box::new(flate2::read::GzDecoder::new(file)),
            false => Box::new(file),
        };
        for line in BufReader::with_capacity(1 << 20, file).lines() {
            let line = line.map_err(|e| format!("{name}: {e}"))?;
            let partial = line.split(' ').nth(2) == Some("P");
            if std::mem::replace(&mut continued, partial) {
                continue;
            }
            let number = line.split(' ').nth(3).and_then(|n| n.parse::<u64>().ok());
            if number != Some(next) {
                return Err(format!("{name}: {number:?} instead of {next}"));
            }
            next += 1;
        }
    }
    Ok(next)
}

/// The writer does not wait, and its log is rotated while it writes.
#[test]
fn rotations_lose_no_line_of_a_fast_writer() {
    let cluster = Cluster::start_configured(
        "fastlog",
        67,
        "containerLogMaxSize: 1Mi\ncontainerLogMaxFiles: 1000\ncontainerLogMonitorInterval: 3s\n",
    );
    let image = support::busybox(&cluster);
    // The agent checks the size at least twice within eight seconds.
    let script = r#"busybox awk "BEGIN { end = systime() + 8; for (i = 0; systime() < end; i++) printf \"%d %01000d\\n\", i, 0; printf \"%d\", i > \"/v/lines\" }"; sleep 10000"#;
    // The runtime splits a line into entries of 16 KiB.
    let long = r#"echo begin; busybox yes x | busybox head -n 40000 | busybox tr -d "\n"; echo; echo end; sleep 10000"#;
    let writer = with_volume(&pod("writer", &image, script));
    cluster.apply(&(writer + &pod("long", &image, long)));
    let of_all = cluster.data().join("pods-logs");
    let mut lines = None;
    cluster.wait("all lines to be written", || {
        let uid = cluster.pod("writer")["metadata"]["uid"].clone();
        let volume = "volumes/kubernetes.io~empty-dir/v/lines";
        let noted = format!("agent/pods/{}/{volume}", uid.as_str().unwrap());
        let noted = std::fs::read_to_string(cluster.data().join(noted));
        lines = noted.ok().and_then(|count| count.parse::<u64>().ok());
        lines.is_some()
    });
    let of_pod = std::fs::read_dir(of_all)
        .unwrap()
        .flatten()
        .find(|e| e.file_name().to_string_lossy().contains("_writer_"));
    let dir = of_pod.unwrap().path().join("c");
    let mut found = Ok(0);
    // Files that are being compressed exist twice for a while.
    cluster.wait("every line in the files, once and in order", || {
        found = lines_in_order(&dir);
        eprintln!("{found:?} of {lines:?}");
        found.as_ref().ok() == lines.as_ref()
    });
    let files = std::fs::read_dir(&dir).unwrap().count();
    assert!(files > 2, "the log was rotated meanwhile: {files}");
    let log = |arguments: &[&str]| cluster.kubectl(&[&["logs", "long"], arguments].concat());
    cluster.wait("the long line in the log", || log(&[]).ends_with("end\n"));
    let line = "x".repeat(40_000) + "\n";
    assert_eq!(log(&["--tail=1"]), "end\n");
    assert!(log(&["--tail=2"]) == line.clone() + "end\n");
    assert!(log(&["--tail=2", "--limit-bytes=39999"]) == line[..39_999]);
    assert!(log(&["--tail=9"]) == format!("begin\n{line}end\n"));
    cluster.kubectl(&["delete", "pod", "writer", "long"]);
}

/// The number of lines of a thousand bytes in each repetition.
const LINES: u64 = 30_000;

/// Reads the writer's output to its end. Returns the number of repetitions, in each of which every line
/// came once and in order, and when the first one began. `each` is called at the start of each repetition.
fn every_line_in_order(reader: impl BufRead, each: impl Fn()) -> (u64, Option<Instant>) {
    let (mut times, mut next, mut since) = (0, LINES, None);
    for line in reader.lines().map(Result::unwrap) {
        if line == "begun" {
            continue;
        }
        if next == LINES {
            if line == "over" {
                return (times, since);
            }
            assert_eq!(line, format!("again {times}"));
            since.get_or_insert_with(Instant::now);
            each();
            (times, next) = (times + 1, 0);
            continue;
        }
        let number = line.get(..8).and_then(|n| n.parse::<u64>().ok());
        assert_eq!((number, line.len()), (Some(next), 999), "{times}");
        next += 1;
    }
    panic!("the log ended after line {next} of {times}");
}

/// A pod that prints these lines from a host directory ten times, then up to thirty times until the
/// file `enough` exists.
fn fast_writer(image: &str, dir: &Path) -> String {
    let script = "echo begun; until test -e /h/go; do sleep 0.2; done; i=0; while test $i -lt 10 || { test ! -e /h/enough && test $i -lt 30; }; do echo again $i; cat /h/lines; i=$((i+1)); done; echo over; sleep 10000";
    let host = format!(
        "volumes: [{{name: h, hostPath: {{path: '{}'}}}}], containers:",
        dir.display()
    );
    let mounts = "volumeMounts: [{name: h, mountPath: /h}], command:";
    let pod = pod("writer", image, script);
    pod.replace("containers:", &host)
        .replace("command:", mounts)
}

/// A container writes at least 300 MB as fast as the runtime accepts it, and a reader follows at the node's own
/// API. The reader must not lose a line, neither in a rotation nor in the next one while the reader is behind.
#[test]
fn a_fast_log_is_followed_without_a_gap() {
    let cluster = Cluster::start_configured(
        "ratelog",
        88,
        "containerLogMaxSize: 10Mi\ncontainerLogMaxFiles: 1000\ncontainerLogMonitorInterval: 3s\n",
    );
    let (image, shared) = (support::busybox(&cluster), tempfile::tempdir().unwrap());
    let lines = (0..LINES).map(|n| format!("{n:08}{}\n", "x".repeat(991)));
    std::fs::write(shared.path().join("lines"), lines.collect::<String>()).unwrap();
    cluster.apply(&fast_writer(&image, shared.path()));
    cluster.wait("the pod to be ready", || {
        condition(&cluster.pod("writer"), "Ready") == "True"
    });
    let of_pod = std::fs::read_dir(cluster.data().join("pods-logs"))
        .unwrap()
        .flatten()
        .find(|e| e.file_name().to_string_lossy().contains("_writer_"));
    let dir = of_pod.unwrap().path().join("c");
    let files = || std::fs::read_dir(&dir).unwrap().count();
    let (flags, _files) = Administrator::of(&cluster).for_curl();
    let follow = Command::new("curl")
        .arg("-skN")
        .args(flags)
        .arg(format!(
            "https://{}:{}/containerLogs/{}/writer/c?follow=true",
            cluster.node_address(),
            cluster.agent_port(),
            cluster.namespace()
        ))
        .stdout(std::process::Stdio::piped())
        .spawn();
    let mut follow = Running(follow.unwrap());
    let reader = BufReader::with_capacity(1 << 20, follow.0.stdout.take().unwrap());
    std::fs::write(shared.path().join("go"), "").unwrap();
    // The writer continues until two rotations are complete.
    let (times, since) = every_line_in_order(reader, || {
        if files() > 2 {
            std::fs::write(shared.path().join("enough"), "").unwrap();
        }
    });
    let took = since.unwrap().elapsed();
    eprintln!(
        "{} MB were followed at {:.0} MB/s, over {} files",
        times * LINES / 1000,
        (times * LINES) as f64 / 1000.0 / took.as_secs_f64(),
        files()
    );
    assert!(files() > 2, "the log was rotated meanwhile: {}", files());
    drop(follow);
    cluster.kubectl(&["delete", "pod", "writer"]);
}

/// The number of logs that the agent is sending now, from its metrics.
fn answered_now(cluster: &Cluster) -> Vec<String> {
    let of = "kubelet_http_inflight_requests{method=\"GET\",path=\"containerLogs\"";
    let page = cluster.get_node_path("/metrics");
    let lines = page.lines().filter(|line| line.starts_with(of));
    let values = lines.filter_map(|line| line.rsplit(' ').next());
    values.map(str::to_owned).collect()
}

/// Measured from the timestamps of the runtime: the delay is caused by the agent, the control plane and kubectl.
#[test]
fn a_followed_log_shows_new_lines_immediately() {
    let cluster = Cluster::start("follow", 94);
    let image = support::busybox(&cluster);
    cluster.apply(&pod(
        "clock",
        &image,
        "while true; do sleep 0.7; echo tick; done",
    ));
    cluster.wait("the pod to be ready", || {
        condition(&cluster.pod("clock"), "Ready") == "True"
    });
    let mut follow = Running(
        kubectl(&cluster, &["logs", "-f", "--timestamps", "clock"])
            .spawn()
            .unwrap(),
    );
    // The first ones were written before.
    let mut lines = BufReader::new(follow.0.stdout.take().unwrap())
        .lines()
        .skip(3);
    let mut measure = || {
        let mut late: Vec<i64> = lines
            .by_ref()
            .take(15)
            .map(|line| {
                let line = line.unwrap();
                let logged_at: jiff::Timestamp = line.split(' ').next().unwrap().parse().unwrap();
                i64::try_from(jiff::Timestamp::now().duration_since(logged_at).as_millis()).unwrap()
            })
            .collect();
        late.sort_unstable();
        assert_eq!(late.len(), 15, "15 lines arrive");
        late
    };
    // On an idle machine the delay is some milliseconds. A busy machine delays some of the lines, and
    // sometimes all of them for a while. A follower that polls every second would show ten lines of each
    // row of 15 more than 300 ms late.
    let mut rows: Vec<Vec<i64>> = vec![];
    while rows.len() < 6 && rows.last().is_none_or(|late| late[4] >= 100) {
        rows.push(measure());
        eprintln!(
            "milliseconds from the runtime to the reader: {:?}",
            rows.last()
        );
    }
    assert!(
        rows.iter().any(|late| late[4] < 100),
        "a third of the lines of a row within a tenth of a second: {rows:?} ms"
    );
    assert_eq!(
        answered_now(&cluster),
        ["1"],
        "one open request while following"
    );
    drop(follow);
    cluster.wait("the request to end", || answered_now(&cluster) == ["0"]);
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true"]);
}
