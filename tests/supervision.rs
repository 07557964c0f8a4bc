//! Control plane and agent are started again when they end, and `up status` says so.
#![allow(clippy::unwrap_used)]

mod support;

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use support::Cluster;

/// A supervisor that a test has started; it and its part end with the test.
struct Supervisor(Child, std::path::PathBuf);

impl Supervisor {
    fn part(&self) -> Option<i32> {
        let text = std::fs::read_to_string(self.1.join("agent.pid")).ok()?;
        text.split(' ').next()?.parse().ok()
    }

    fn state(&self) -> Option<Value> {
        serde_json::from_slice(&std::fs::read(self.1.join("agent.state")).ok()?).ok()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        if let Some(part) = self.part() {
            let _ = kill(Pid::from_raw(part), Signal::SIGKILL);
        }
    }
}

fn wait(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < deadline, "{what} did not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_part_that_ends_is_started_again() {
    let dir = tempfile::tempdir().unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_holdfast"))
        .args(["supervise", "--part", "agent", "--run"])
        .arg(dir.path())
        .arg("--logs")
        .arg(dir.path())
        .args(["--", "sleep", "1000"])
        .spawn()
        .unwrap();
    let supervisor = Supervisor(child, dir.path().into());
    wait("the part", || supervisor.part().is_some());
    let first = supervisor.part().unwrap();
    kill(Pid::from_raw(first), Signal::SIGKILL).unwrap();
    wait("another", || supervisor.part().is_some_and(|p| p != first));
    let state = supervisor.state().unwrap();
    assert_eq!(state["restarts"], 1);
    assert_eq!(state["last_end"][0], "SIGKILL ended it");
}

#[test]
fn a_control_plane_that_dies_comes_back() {
    let cluster = Cluster::start("supervised", 71);
    let before = cluster.pid("control-plane");
    kill(Pid::from_raw(before), Signal::SIGKILL).unwrap();
    cluster.wait("another control plane", || {
        std::fs::read_to_string(cluster.run_dir().join("control-plane.pid"))
            .is_ok_and(|t| !t.is_empty() && !t.starts_with(&format!("{before} ")))
    });
    let status = || {
        let output = Command::new(support::holdfast())
            .args(["up", "status", "--name", &cluster.name])
            .output()
            .unwrap();
        (
            output.status.success(),
            String::from_utf8(output.stdout).unwrap(),
        )
    };
    cluster.wait("the API", || {
        status().1.contains("started again 1 times")
            && cluster
                .log("control-plane")
                .contains("the control plane serves")
    });
    std::thread::sleep(Duration::from_secs(1));
    cluster.kubectl(&["get", "nodes"]);
    let (runs, text) = status();
    assert!(runs && text.contains("SIGKILL ended it"), "{text}");

    // `up` leaves what runs alone, and gives a part that has lost its supervisor another one.
    let agent = cluster.pid("agent");
    cluster.up();
    assert_eq!(cluster.pid("agent"), agent);
    cluster.unsupervise("agent");
    cluster.wait("the loss to be told", || {
        status().1.contains("without a supervisor")
    });
    cluster.up();
    let (runs, text) = status();
    assert!(runs && !text.contains("without a supervisor"), "{text}");
}
