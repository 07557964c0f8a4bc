//! Commands, copies, attachments and forwarded ports, with the real kubectl and a real containerd.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::time::{Duration, Instant};

use support::client::{Administrator, Running, kubectl, pod, with};
use support::{Cluster, condition};

#[test]
fn commands_run_in_containers_and_ports_are_forwarded() {
    let cluster = Cluster::start("exec", 45);
    let image = support::busybox(&cluster);
    let script = "echo ready; while read line; do echo got $line; done; sleep 10000";
    cluster.apply(&pod("shell", &image, script).replace("command:", "stdin: true, command:"));
    cluster.kubectl(&["run", "web", "--image=holdfast.local/demo:1"]);
    cluster.wait("the pods to be ready", || {
        ["shell", "web"]
            .iter()
            .all(|name| condition(&cluster.pod(name), "Ready") == "True")
            && is_listening(&cluster, "web")
    });
    let descriptors = || {
        std::fs::read_dir(format!("/proc/{}/fd", cluster.pid("agent")))
            .unwrap()
            .count()
    };

    // Stdout, stderr and the exit code are returned; stdin is transferred, with its end.
    let output = kubectl(
        &cluster,
        &[
            "exec",
            "shell",
            "--",
            "busybox",
            "sh",
            "-c",
            "echo out; echo err >&2; exit 7",
        ],
    )
    .output()
    .unwrap();
    assert_eq!(
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).as_ref()
        ),
        (Some(7), "out\n"),
        "{output:?}"
    );
    assert!(
        String::from_utf8_lossy(&output.stderr).starts_with("err\n"),
        "{output:?}"
    );
    let mut child = kubectl(
        &cluster,
        &["exec", "-i", "shell", "--", "busybox", "wc", "-c"],
    )
    .spawn()
    .unwrap();
    let payload = vec![b'x'; 3 << 20];
    child.stdin.take().unwrap().write_all(&payload).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        payload.len().to_string(),
        "{output:?}"
    );
    let output = kubectl(&cluster, &["exec", "shell", "-c", "other", "--", "true"])
        .output()
        .unwrap();
    assert!(
        String::from_utf8_lossy(&output.stderr)
            .contains("container other is not valid for pod shell"),
        "{output:?}"
    );

    // Copies files in both directions.
    let link = "exec shell -- busybox ln -s /bin/busybox /bin/tar".split(' ');
    cluster.kubectl(&link.collect::<Vec<&str>>());
    let dir = tempfile::tempdir().unwrap();
    let (here, back) = (dir.path().join("here"), dir.path().join("back"));
    std::fs::write(&here, &payload).unwrap();
    cluster.kubectl(&["cp", here.to_str().unwrap(), "shell:/there"]);
    cluster.kubectl(&["cp", "shell:/there", back.to_str().unwrap()]);
    assert_eq!(std::fs::read(&back).unwrap(), payload);
    input_arrives(&cluster);

    // Port forwarding.
    let mut forward = Running(
        kubectl(&cluster, &["port-forward", "web", ":80"])
            .spawn()
            .unwrap(),
    );
    let mut line = String::new();
    // Kept open, because kubectl prints a line for every connection.
    let mut reader = BufReader::new(forward.0.stdout.take().unwrap());
    reader.read_line(&mut line).unwrap();
    let port = line
        .split("127.0.0.1:")
        .nth(1)
        .and_then(|rest| rest.split(' ').next())
        .unwrap_or_else(|| panic!("{line}"))
        .to_owned();
    for _ in 0..20 {
        let text = forwarded(&port);
        assert!(text.contains("Hello from web"), "{text}");
    }
    slow_readers_and_resets(&cluster, &port);
    assert!(forward.0.try_wait().unwrap().is_none(), "the session ended");
    drop((forward, reader));

    // Attaching to a container's own streams.
    let mut attached = Running(
        kubectl(&cluster, &["attach", "-i", "shell"])
            .spawn()
            .unwrap(),
    );
    attached
        .0
        .stdin
        .as_mut()
        .unwrap()
        .write_all(b"hello\n")
        .unwrap();
    let mut reader = BufReader::new(attached.0.stdout.take().unwrap());
    let mut text = String::new();
    while !text.contains("got hello") {
        assert!(reader.read_line(&mut text).unwrap() > 0, "{text}");
    }
    drop(attached);

    a_container_looks_around(&cluster, &image);

    // Streams leave no descriptors open.
    cluster.wait("all streams to end", || descriptors() < 200);
    let before = descriptors();
    for _ in 0..20 {
        let mut exec = kubectl(&cluster, &["exec", "shell", "--", "true"]);
        assert!(exec.output().unwrap().status.success());
    }
    cluster.wait("the descriptors of the sessions to be closed", || {
        descriptors() <= before + 5
    });
    // kubectl used WebSockets with the newest protocol. It falls back to SPDY only if the server rejects them.
    let metrics = cluster.get_node_path("/metrics");
    for what in ["exec", "attach", "portforward"] {
        assert!(
            metrics.contains(&format!(
                "kubelet_websocket_streaming_requests_total{{subresource=\"{what}\"}}"
            )),
            "{what}"
        );
    }
    sessions_have_time_to_end_when_the_agent_stops(&cluster);
    ends_without_a_trace(&cluster);
}

/// An ephemeral container of `kubectl debug` runs next to the others, and its log can be read.
fn a_container_looks_around(cluster: &Cluster, image: &str) {
    let shell = kubectl(
        cluster,
        &[
            "debug",
            "shell",
            &format!("--image={image}"),
            "--target=c",
            "--",
            "busybox",
            "echo",
            "looked",
        ],
    )
    .output()
    .unwrap();
    assert!(shell.status.success(), "{shell:?}");
    cluster.wait("the log of the ephemeral container", || {
        let pod = cluster.pod("shell");
        let name = pod["spec"]["ephemeralContainers"][0]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let output = kubectl(cluster, &["logs", "shell", "-c", &name])
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout) == "looked\n"
    });
}

/// The number of short inputs: `HOLDFAST_SHORT_INPUTS`, or enough to show a loss of 2 % with some certainty.
fn short_inputs() -> usize {
    let text = std::env::var("HOLDFAST_SHORT_INPUTS").ok();
    text.map_or(100, |text| text.parse().unwrap())
}

/// Input reaches commands whose output ends immediately. The runtime's own streaming server loses short
/// input to such commands (containerd 1.6: 2 to 25 %).
fn input_arrives(cluster: &Cluster) {
    let begun = Instant::now();
    let write = |file: &str, payload: &[u8], spdy: bool| {
        let script = format!("exec busybox cat > {file}");
        let arguments = ["exec", "-i", "shell", "--", "busybox", "sh", "-c", &script];
        let mut command = kubectl(cluster, &arguments);
        if spdy {
            command.env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", "false");
        }
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(payload).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{file}: {output:?}");
    };
    let (tries, threads) = (short_inputs(), 4);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for i in (thread..tries).step_by(threads) {
                    write(&format!("/short{i}"), b"data\n", i % 8 < threads);
                }
            });
        }
    });
    let count = "busybox cat /short* | busybox grep -c data";
    let exec = |rest: &[&str]| {
        let arguments = [&["exec", "shell", "--", "busybox"], rest].concat();
        kubectl(cluster, &arguments).output().unwrap()
    };
    let arrived = exec(&["sh", "-c", count]);
    let arrived = String::from_utf8_lossy(&arrived.stdout).trim().to_owned();
    assert_eq!(arrived, tries.to_string(), "short inputs that arrived");
    eprintln!("{tries} short inputs in {:?}", begun.elapsed());
    let large: Vec<u8> = (0..4_u32 << 20).flat_map(u32::to_le_bytes).collect();
    write("/large", &large, false);
    assert!(exec(&["cat", "/large"]).stdout == large, "the large input");

    // Sessions with input end in the same way as sessions without.
    let ids = |text: &[u8]| {
        let text = String::from_utf8_lossy(text).into_owned();
        let words = text
            .split('"')
            .map(|w| if w.len() == 64 { "id" } else { w });
        words.collect::<Vec<_>>().join("\"")
    };
    for command in [
        &["busybox", "sh", "-c", "echo no >&2; exit 3"][..],
        &["nothing"],
    ] {
        let run = |flags: &[&str]| {
            let arguments = [&["exec"], flags, &["shell", "--"], command].concat();
            let output = kubectl(cluster, &arguments).output().unwrap();
            (
                output.status.code(),
                ids(&output.stdout),
                ids(&output.stderr),
            )
        };
        assert_eq!(run(&["-i"]), run(&[]), "{command:?}");
    }
    // A terminal has the size of the client's.
    let inside = r#"until busybox stty size | busybox grep "33 77"; do busybox usleep 50000; done"#;
    let kubeconfig = cluster.data().join("kubeconfig");
    let terminal = format!(
        "stty rows 33 cols 77; kubectl --kubeconfig {} exec -it shell -- busybox sh -c '{inside}'",
        kubeconfig.display()
    );
    let output = std::process::Command::new("timeout")
        .args(["60", "script", "-qec", &terminal, "/dev/null"])
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("33 77"),
        "{output:?}"
    );
    // A client that disconnects ends the input, and nothing is left.
    let script = "busybox cat; echo ended > /ended";
    let arguments = ["exec", "-i", "shell", "--", "busybox", "sh", "-c", script];
    let mut left = Running(kubectl(cluster, &arguments).spawn().unwrap());
    left.0.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    let mut echo = [0];
    left.0
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut echo)
        .unwrap();
    drop(left);
    cluster.wait("the end of a command whose client has disconnected", || {
        exec(&["cat", "/ended"]).stdout == b"ended\n"
    });
    let fifos = cluster.data().join("agent/exec");
    cluster.wait("the FIFOs to be removed", || {
        std::fs::read_dir(&fifos).unwrap().count() == 0
    });
}

/// Output is read slowly, and at the same time the server resets connections to a forwarded port,
/// because it closes them with unread input. The port-forward session continues.
fn slow_readers_and_resets(cluster: &Cluster, port: &str) {
    std::thread::scope(|scope| {
        scope.spawn(|| output_arrives_at_a_slow_reader(cluster, true, 600_000, 600_000));
        scope.spawn(|| output_arrives_at_a_slow_reader(cluster, false, 2_000_000, 1_200_000));
        for _ in 0..5 {
            let mut stream = std::net::TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
            // The server reads 8 KiB at once. In one piece: the runtime may hold back the second of two, and
            // kubectl ends the session.
            let request = [b"GET / HTTP/1.0\r\n\r\n".as_slice(), &[b'x'; 10_000]].concat();
            // The connection may be reset during the write.
            let _ = stream.write_all(&request);
            let _ = stream.read_to_end(&mut vec![]);
        }
        let text = forwarded(port);
        assert!(text.contains("Hello from web"), "{text}");
    });
}

/// A client that reads slowly gets all output of a command that exited long before. The reads take
/// longer than kubectl's ping period. Regression: the pings met a closed connection.
fn output_arrives_at_a_slow_reader(
    cluster: &Cluster,
    websockets: bool,
    last: usize,
    bytes_per_second: usize,
) {
    let last_number = last.to_string();
    let arguments = ["exec", "shell", "--", "busybox", "seq", "1", &last_number];
    let mut command = kubectl(cluster, &arguments);
    command.env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", websockets.to_string());
    let mut child = Running(command.spawn().unwrap());
    let mut output = child.0.stdout.take().unwrap();
    let (mut piece, begun) = (vec![0; 64 << 10], Instant::now());
    let mut text: Vec<u8> = vec![];
    loop {
        let length = output.read(&mut piece).unwrap();
        text.extend(&piece[..length]);
        if length == 0 {
            break;
        }
        let due = Duration::from_millis((1000 * text.len() / bytes_per_second) as u64);
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
    }
    let mut errors = String::new();
    let stderr = child.0.stderr.as_mut().unwrap();
    stderr.read_to_string(&mut errors).unwrap();
    let expected: String = (1..=last).map(|n| format!("{n}\n")).collect();
    let whole = text == expected.as_bytes() && child.0.wait().unwrap().success();
    let (got, wanted) = (text.len(), expected.len());
    assert!(
        whole,
        "WebSockets {websockets}: {got} of {wanted} bytes: {errors}"
    );
}

fn ends_without_a_trace(cluster: &Cluster) {
    cluster.delete_all_and_check();
}

fn sessions_have_time_to_end_when_the_agent_stops(cluster: &Cluster) {
    let begin = |script: &str| {
        let arguments = ["exec", "shell", "--", "busybox", "sh", "-c", script];
        let mut child = Running(kubectl(cluster, &arguments).spawn().unwrap());
        let mut line = String::new();
        let mut output = BufReader::new(child.0.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        assert_eq!(line, "begun\n");
        (child, output)
    };
    // The short one second, so that it still runs when the agent is stopped.
    let (mut long, _) = begin("echo begun; sleep 1000");
    let (mut short, mut output) = begin("echo begun; sleep 4; echo done");
    let pid = cluster.pid("agent");
    cluster.unsupervise("agent");
    let begun = Instant::now();
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(pid),
        nix::sys::signal::Signal::SIGTERM,
    )
    .unwrap();
    let another = || {
        let output = kubectl(cluster, &["exec", "shell", "--", "true"]).output();
        output.unwrap().status.success()
    };
    cluster.wait_quietly("new sessions to be refused", || !another());
    // On a busy machine this may have taken as long as the grace period of sessions.
    let goes_on = long.0.try_wait().unwrap().is_none();
    assert!(
        goes_on || begun.elapsed() > Duration::from_secs(9),
        "existing sessions continue meanwhile"
    );
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "done\n", "the short command ran to completion");
    assert!(short.0.wait().unwrap().success());
    assert!(
        !long.0.wait().unwrap().success(),
        "the long command was interrupted"
    );
    assert!(
        begun.elapsed() > Duration::from_secs(9),
        "the grace period of sessions was observed"
    );
    cluster.wait_for_exit(pid);
    cluster.up();
    // The status of the Node may be old.
    cluster.wait("new sessions to be accepted again", another);
}

/// Whether a pod's web server answers: a pod without a probe is ready before it listens.
fn is_listening(cluster: &Cluster, name: &str) -> bool {
    let ip = cluster.pod(name)["status"]["podIP"].clone();
    ip.as_str()
        .is_some_and(|ip| support::http_get(&format!("{ip}:80")).is_some())
}

/// The response behind a forwarded port, with a long timeout for busy machines.
fn forwarded(port: &str) -> String {
    let mut stream = std::net::TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// The resident memory of the agent, in MiB.
fn resident(cluster: &Cluster) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", cluster.pid("agent"))).unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        / 1024
}

#[test]
fn idle_connections_and_slow_readers_block_no_other_client() {
    let cluster = Cluster::start("abuse", 48);
    let image = support::busybox(&cluster);
    cluster.apply(&pod("shell", &image, "sleep 10000"));
    cluster.wait("the pod to be ready", || {
        condition(&cluster.pod("shell"), "Ready") == "True"
    });
    let address = cluster.node_address();
    let port = cluster.agent_port();
    let answered = || {
        let begun = Instant::now();
        assert_eq!(cluster.get_node_path("/healthz"), "ok");
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "other clients are served: {:?}",
            begun.elapsed()
        );
    };
    answered();
    let before = resident(&cluster);
    // Some connections send nothing, some stop after the TLS handshake, some send half a request.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let silent: Vec<_> = (0..1000)
        .map(|_| std::net::TcpStream::connect((address.as_str(), port)).unwrap())
        .collect();
    answered();
    let admin = Administrator::of(&cluster);
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let tls = std::sync::Arc::new(
        holdfast_https::client(&admin.certificate, &admin.key, &admin.roots).unwrap(),
    );
    let shaken: Vec<_> = runtime.block_on(async {
        use tokio::io::AsyncWriteExt as _;
        let mut all = vec![];
        for n in 0..700 {
            let stream = tokio::net::TcpStream::connect((address.as_str(), port))
                .await
                .unwrap();
            let name = rustls::pki_types::ServerName::try_from(address.clone()).unwrap();
            let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::clone(&tls));
            let Ok(mut stream) = connector.connect(name, stream).await else {
                continue;
            };
            if n % 2 == 0 {
                let _ = stream.write_all(b"GET /pods HTTP/1.1\r\nX-Long: ").await;
                let _ = stream.write_all(&[b'x'; 8 << 10]).await;
            }
            all.push(stream);
        }
        all
    });
    assert!(shaken.len() > 600);
    answered();
    let held = resident(&cluster);
    drop((silent, shaken));
    // Commands whose output is not read.
    let mut unread: Vec<Running> = (0..20)
        .map(|_| {
            let mut child = kubectl(&cluster, &["exec", "shell", "--", "busybox", "yes"])
                .spawn()
                .unwrap();
            let mut first = [0; 2];
            child
                .stdout
                .as_mut()
                .unwrap()
                .read_exact(&mut first)
                .unwrap();
            Running(child)
        })
        .collect();
    std::thread::sleep(Duration::from_secs(2));
    answered();
    let streaming = resident(&cluster);
    unread.clear();
    // A debug build is larger from the start, so the growth counts, added to the 25 MiB of a release
    // build. Memory may also shrink: an idle agent releases memory, and the kernel reclaims file pages.
    assert!(
        held.max(streaming).saturating_sub(before) <= 50,
        "MiB before, with idle connections, with unread streams: {before}, {held}, {streaming}"
    );
    cluster.delete_all_and_check();
}

/// The number of open descriptors of the agent.
fn descriptors(cluster: &Cluster) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", cluster.pid("agent")))
        .unwrap()
        .count()
}

const STREAMS: usize = 10_000;
/// Waits for an expected response.
async fn answered(stream: &mut (impl tokio::io::AsyncRead + Unpin), line: &str, expected: &str) {
    use tokio::io::AsyncReadExt as _;
    let mut text = String::new();
    while !text.contains(expected) {
        let mut piece = [0; 1024];
        let read = tokio::time::timeout(Duration::from_secs(60), stream.read(&mut piece)).await;
        let length = read
            .unwrap_or_else(|_| panic!("{line}: no answer after {text:?}"))
            .unwrap();
        assert!(length > 0, "{line}: the connection ended after {text:?}");
        text += &String::from_utf8_lossy(&piece[..length]);
    }
}

/// A request that opens a stream: the first line without the protocol, additional headers, and what the answer contains.
type StreamRequest = (String, String, &'static str);

/// The headers of a request for a WebSocket, except for the subprotocol.
const SOCKET: &str = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

/// A request for a stream of each kind.
fn stream_requests(namespace: &str) -> Vec<StreamRequest> {
    let upgrade = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n";
    vec![
        (
            format!("POST /exec/{namespace}/shell/c?command=true&output=1"),
            format!("{upgrade}X-Stream-Protocol-Version: v4.channel.k8s.io\r\n"),
            " 101 ",
        ),
        (
            format!("POST /portForward/{namespace}/shell"),
            format!("{upgrade}X-Stream-Protocol-Version: portforward.k8s.io\r\n"),
            " 101 ",
        ),
        (
            format!("GET /containerLogs/{namespace}/shell/c?follow=true"),
            String::new(),
            "hello",
        ),
        (
            format!("GET /portForward/{namespace}/shell"),
            format!("{SOCKET}Sec-WebSocket-Protocol: SPDY/3.1+portforward.k8s.io\r\n"),
            " 101 ",
        ),
    ]
}

#[test]
fn thousands_of_streams_leave_nothing_behind() {
    use tokio::io::AsyncWriteExt as _;

    let _alone = crate::many_processes();
    let cluster = Cluster::start("thousands", 50);
    let image = support::busybox(&cluster);
    cluster.apply(&pod("shell", &image, "echo hello; sleep 10000"));
    cluster.wait("the pod to be ready", || {
        condition(&cluster.pod("shell"), "Ready") == "True"
    });
    let address = cluster.node_address();
    let port = cluster.agent_port();
    let admin = Administrator::of(&cluster);
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let tls = std::sync::Arc::new(
        holdfast_https::client(&admin.certificate, &admin.key, &admin.roots).unwrap(),
    );
    let namespace = cluster.namespace();
    let kinds = stream_requests(namespace);
    // This one really runs its command.
    let command = (
        format!("GET /exec/{namespace}/shell/c?command=busybox&command=true&output=1"),
        format!("{SOCKET}Sec-WebSocket-Protocol: v5.channel.k8s.io\r\n"),
        " 101 ",
    );
    let one = |n: usize| {
        let (tls, address) = (std::sync::Arc::clone(&tls), address.clone());
        let (line, headers, expected) = if n % 40 == 39 {
            command.clone()
        } else {
            kinds[n % kinds.len()].clone()
        };
        async move {
            let stream = tokio::net::TcpStream::connect((address.as_str(), port))
                .await
                .unwrap();
            let name = rustls::pki_types::ServerName::try_from(address).unwrap();
            let mut stream = tokio_rustls::TlsConnector::from(tls)
                .connect(name, stream)
                .await
                .unwrap();
            let request =
                format!("{line} HTTP/1.1\r\nHost: node\r\nContent-Length: 0\r\n{headers}\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            // Flush sends the data that TLS has accepted and the socket has not.
            stream.flush().await.unwrap();
            answered(&mut stream, &line, expected).await;
            // Closed without a goodbye, as clients do.
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let many = |from: usize, to: usize| {
        use futures::StreamExt as _;
        runtime.block_on(
            futures::stream::iter(from..to)
                .map(one)
                .for_each_concurrent(24, |stream| stream),
        );
    };
    many(0, 300);
    cluster.wait("the first to be closed", || descriptors(&cluster) < 60);
    let before = (descriptors(&cluster), resident(&cluster));
    many(0, STREAMS);
    cluster.wait("all descriptors to be closed", || {
        descriptors(&cluster) <= before.0 + 5
    });
    let after = resident(&cluster);
    assert!(
        after <= before.1 + 15,
        "MiB before and after {STREAMS} streams: {}, {after}",
        before.1
    );
    assert_eq!(
        cluster.kubectl(&["exec", "shell", "--", "busybox", "echo", "still here"]),
        "still here\n"
    );
    cluster.delete_all_and_check();
}

#[test]
fn newer_kubectls_run_commands_and_forward_ports() {
    let programs = support::skip::fetched("HOLDFAST_KUBECTLS", "usr/bin/kubectl");
    if programs.is_empty() {
        return;
    }
    let cluster = Cluster::start("kubectls", 51);
    let image = support::busybox(&cluster);
    let script = "echo ready; while read line; do echo got $line; done; sleep 10000";
    cluster.apply(&pod("shell", &image, script).replace("command:", "stdin: true, command:"));
    cluster.kubectl(&["run", "web", "--image=holdfast.local/demo:1"]);
    cluster.wait("the pods to be ready", || {
        ["shell", "web"]
            .iter()
            .all(|name| condition(&cluster.pod(name), "Ready") == "True")
            && is_listening(&cluster, "web")
    });
    let link = "exec shell -- busybox ln -s /bin/busybox /bin/tar".split(' ');
    cluster.kubectl(&link.collect::<Vec<&str>>());
    for program in programs.iter().filter(|p| p.exists()) {
        let run = |arguments: &[&str]| {
            let output = with(program, &cluster, arguments).output().unwrap();
            (
                output.status.code(),
                String::from_utf8_lossy(&output.stdout).into_owned(),
                String::from_utf8_lossy(&output.stderr).into_owned(),
            )
        };
        let version = run(&["version"]).1;
        let (code, out, errors) = run(&[
            "exec",
            "shell",
            "--",
            "busybox",
            "sh",
            "-c",
            "echo out; echo err >&2; exit 7",
        ]);
        assert_eq!(
            (code, out.as_str()),
            (Some(7), "out\n"),
            "{version}: {errors}"
        );
        assert!(errors.starts_with("err\n"), "{version}: {errors}");
        cluster.wait(&format!("the log by kubectl {version}"), || {
            run(&["logs", "shell"]).1.contains("ready")
        });
        let payload = vec![b'x'; 1 << 20];
        let mut child = with(
            program,
            &cluster,
            &["exec", "-i", "shell", "--", "busybox", "wc", "-c"],
        )
        .spawn()
        .unwrap();
        child.stdin.take().unwrap().write_all(&payload).unwrap();
        assert_eq!(
            String::from_utf8_lossy(&child.wait_with_output().unwrap().stdout).trim(),
            payload.len().to_string(),
            "{version}"
        );
        let dir = tempfile::tempdir().unwrap();
        let (here, back) = (dir.path().join("here"), dir.path().join("back"));
        std::fs::write(&here, &payload).unwrap();
        run(&["cp", here.to_str().unwrap(), "shell:/there"]);
        run(&["cp", "shell:/there", back.to_str().unwrap()]);
        assert_eq!(std::fs::read(&back).unwrap(), payload, "{version}");
        let mut attached = with(program, &cluster, &["attach", "-i", "shell"])
            .spawn()
            .unwrap();
        attached
            .stdin
            .as_mut()
            .unwrap()
            .write_all(b"hello\n")
            .unwrap();
        let mut reader = BufReader::new(attached.stdout.take().unwrap());
        let attached = Running(attached);
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "got hello", "{version}");
        drop((attached, reader));
        let mut forward = Running(
            with(program, &cluster, &["port-forward", "web", ":80"])
                .spawn()
                .unwrap(),
        );
        let (mut line, mut reader) = (
            String::new(),
            BufReader::new(forward.0.stdout.take().unwrap()),
        );
        reader.read_line(&mut line).unwrap();
        let port = line
            .split("127.0.0.1:")
            .nth(1)
            .and_then(|rest| rest.split(' ').next())
            .unwrap_or_else(|| panic!("{version}: {line}"));
        let answer = forwarded(port);
        assert!(answer.contains("Hello from web"), "{version}: {answer}");
        drop((forward, reader));
        assert!(
            run(&["auth", "whoami"]).1.contains("system:authenticated"),
            "{version}"
        );
        let (code, _, errors) = run(&[
            "create",
            "deployment",
            "twice",
            "--image=holdfast.local/demo:1",
            "--replicas=2",
        ]);
        assert_eq!(code, Some(0), "{version}: {errors}");
        let (code, _, errors) = run(&["rollout", "status", "deployment/twice", "--timeout=180s"]);
        assert_eq!(code, Some(0), "{version}: {errors}");
        // Events are written a while later.
        cluster.wait(&format!("the events by kubectl {version}"), || {
            run(&["describe", "pod", "web"]).1.contains("Started")
        });
        run(&["delete", "deployment", "twice"]);
    }
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true"]);
}
