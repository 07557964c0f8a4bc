//! Pulling from real registries, with and without credentials.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;
use support::Cluster;

/// The password `secret` of the user `user`, as the registry stores it.
const HTPASSWD: &str = "user:$2b$04$Ix6ZGQBZApkDcv7z/5fA0.vqqvU8T.673W0lcbRS4zuY94hqF78Le\n";

/// A private docker-registry on a port of this machine.
pub(crate) struct Registry {
    process: Child,
    pub(crate) address: String,
    _dir: tempfile::TempDir,
}

impl Registry {
    /// On a free port. A child process that another test starts may hold the port for a moment; then
    /// another one is tried.
    fn start(closed: bool) -> Registry {
        Self::start_at("127.0.0.1", closed)
    }

    /// As [`Registry::start`], on an address of this machine.
    pub(crate) fn start_at(host: &str, closed: bool) -> Registry {
        (0..10)
            .find_map(|_| Self::try_start(host, closed))
            .expect("a docker-registry runs")
    }

    fn try_start(host: &str, closed: bool) -> Option<Registry> {
        let port = std::net::TcpListener::bind((host, 0))
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let mut config = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: '{}'}}}}\nhttp: {{addr: '{host}:{port}'}}\n",
            path("data")
        );
        if closed {
            std::fs::write(path("htpasswd"), HTPASSWD).unwrap();
            config += &format!(
                "auth: {{htpasswd: {{realm: test, path: '{}'}}}}\n",
                path("htpasswd")
            );
        }
        std::fs::write(path("config.yml"), config).unwrap();
        let process = Command::new("docker-registry")
            .args(["serve", &path("config.yml")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("docker-registry is installed (make test installs it)");
        let mut registry = Registry {
            process,
            address: format!("{host}:{port}"),
            _dir: dir,
        };
        let start = std::time::Instant::now();
        while std::net::TcpStream::connect(&registry.address).is_err() {
            if registry.process.try_wait().unwrap().is_some() {
                return None;
            }
            assert!(
                start.elapsed() < support::condition_timeout(),
                "the registry did not start"
            );
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        Some(registry)
    }

    /// Pushes an image of the cluster's containerd under names of this registry.
    pub(crate) fn push(&self, cluster: &Cluster, namespace: &str, image: &str, names: &[&str]) {
        for name in names {
            let target = format!("{}/{name}", self.address);
            for arguments in [
                vec!["images", "tag", image, &target],
                vec![
                    "images",
                    "push",
                    "--plain-http",
                    "--user",
                    "user:secret",
                    &target,
                ],
                vec!["images", "rm", "--sync", &target],
            ] {
                support::ctr(cluster, namespace, &arguments);
            }
        }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A proxy in front of a registry that holds back responses after the first MiB until `free` is set.
struct Throttle {
    address: String,
    free: Arc<AtomicBool>,
}

impl Throttle {
    fn before(registry: &Registry) -> Throttle {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (target, free) = (registry.address.clone(), Arc::new(AtomicBool::new(false)));
        let held = Arc::clone(&free);
        // The threads end with their connections, or with the test.
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (mut client, mut server, held) = (
                    client.unwrap(),
                    TcpStream::connect(&target).unwrap(),
                    Arc::clone(&held),
                );
                let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
                std::thread::spawn(move || {
                    let (mut buffer, mut passed) = ([0; 16 << 10], 0);
                    while let Ok(n) = server.read(&mut buffer)
                        && n > 0
                        && client.write_all(&buffer[..n]).is_ok()
                    {
                        passed += n;
                        while passed > 1 << 20 && !held.load(Ordering::Relaxed) {
                            std::thread::sleep(std::time::Duration::from_millis(20));
                        }
                    }
                    // The other side may have closed the connection first.
                    let _ = client.shutdown(std::net::Shutdown::Both);
                });
            }
        });
        Throttle { address, free }
    }
}

fn pod(name: &str, image: &str, more: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{restartPolicy: Never, {more} containers: [{{name: c, image: '{image}', imagePullPolicy: IfNotPresent, command: [busybox, 'true']}}]}}\n---\n"
    )
}

#[test]
fn images_are_available_only_to_pods_with_credentials() {
    let (open, closed) = (Registry::start(false), Registry::start(true));
    let cluster = Cluster::start("images", 27);
    let image = support::busybox(&cluster);
    open.push(&cluster, "k8s.io", &image, &["free:1"]);
    closed.push(&cluster, "k8s.io", &image, &["team/one:1", "team/two:1"]);
    cluster.kubectl(&[
        "create",
        "secret",
        "docker-registry",
        "pull",
        &format!("--docker-server=http://{}", closed.address),
        "--docker-username=user",
        "--docker-password=secret",
    ]);
    cluster.kubectl(&[
        "create",
        "secret",
        "docker-registry",
        "wrong",
        &format!("--docker-server={}/team", closed.address),
        "--docker-username=user",
        "--docker-password=wrong",
    ]);
    let secrets = "imagePullSecrets: [{name: wrong}, {name: pull}, {name: nosuch}],";
    cluster.apply(&format!(
        "{}{}{}{}",
        pod("free", &format!("{}/free:1", open.address), ""),
        pod("member", &format!("{}/team/one:1", closed.address), secrets),
        pod("stranger", &format!("{}/team/two:1", closed.address), ""),
        pod("nowhere", "127.0.0.1:1/x:1", ""),
    ));
    let phase = |name: &str| {
        cluster.pod(name)["status"]["phase"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let waiting = |name: &str| {
        cluster.pod(name)["status"]["containerStatuses"][0]["state"]["waiting"].clone()
    };
    cluster.wait("pods with access to their images to succeed", || {
        phase("free") == "Succeeded" && phase("member") == "Succeeded"
    });
    cluster.wait("the events of these pods", || {
        let events = cluster.events("member");
        events.contains("Normal Pulled Successfully pulled image")
            && events.contains("Warning FailedToRetrieveImagePullSecret Unable to retrieve some image pull secrets (nosuch)")
    });
    for name in ["stranger", "nowhere"] {
        cluster.wait("other pods to wait with a reason", || {
            let state: Value = waiting(name);
            ["ErrImagePull", "ImagePullBackOff"]
                .contains(&state["reason"].as_str().unwrap_or_default())
                && !state["message"].as_str().unwrap_or_default().is_empty()
        });
    }
    // The image is now present; a pod without credentials for it still must not use it.
    let closed_image = format!("{}/team/one:1", closed.address);
    cluster.apply(&format!(
        "{}{}{}{}",
        pod("thief", &closed_image, ""),
        pod("curious", &closed_image, "").replace("IfNotPresent", "Never"),
        pod("colleague", &closed_image, secrets),
        pod("again", &format!("{}/free:1", open.address), ""),
    ));
    cluster.wait("pods with access to use the present image", || {
        phase("colleague") == "Succeeded" && phase("again") == "Succeeded"
    });
    cluster.wait("an event about the present image", || {
        cluster
            .events("colleague")
            .contains("already present on machine")
    });
    cluster.wait("pods without access to wait", || {
        ["ErrImagePull", "ImagePullBackOff"]
            .contains(&waiting("thief")["reason"].as_str().unwrap_or_default())
    });
    cluster.wait("a message that does not reveal the image", || {
        let message = waiting("curious")["message"].to_string();
        message.contains("is not present with pull policy of Never")
    });
    // Between two retries.
    cluster.wait("an explanation of the failed pull", || {
        cluster
            .holdfast(&["explain", "pod", "thief"])
            .contains("the image of container c cannot be pulled")
    });
    // The progress of a long pull is shown. Its layers were never in the pods' namespace.
    let slow = support::busybox_in(&cluster, "elsewhere", "test.local/slow:1", b"slow");
    open.push(&cluster, "elsewhere", &slow, &["slow:1"]);
    support::ctr(&cluster, "elsewhere", &["images", "rm", "--sync", &slow]);
    let throttle = Throttle::before(&open);
    cluster.apply(&pod("slow", &format!("{}/slow:1", throttle.address), ""));
    let explain = || {
        let output = Command::new(support::holdfast())
            .args(["explain", "pod", "slow", "--name", &cluster.name])
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    cluster.wait("the pull's progress", || {
        let explanation = explain();
        explanation.contains("the image of container c is being pulled (")
            && explanation.contains("MiB of 1 part in progress")
    });
    throttle.free.store(true, Ordering::Relaxed);
    cluster.wait("the slow pod to succeed", || phase("slow") == "Succeeded");
    cluster.delete_all_and_check();
}

/// The output of `holdfast gc` for a cluster.
fn gc(cluster: &Cluster, flags: &[&str]) -> String {
    let output = Command::new(support::holdfast())
        .args(["gc", "--name", cluster.name()])
        .args(flags)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{printed}");
    String::from_utf8(output.stdout).unwrap()
}

fn gc_announces_removals(cluster: &Cluster, used: &str, images: &dyn Fn() -> String) {
    let finished = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: finished}}\nspec: {{restartPolicy: Never, containers: [{{name: c, image: '{used}', command: [busybox, 'true']}}]}}\n"
    );
    cluster.apply(&finished);
    cluster.wait("the other pod to finish", || {
        cluster.pod("finished")["status"]["phase"] == "Succeeded"
    });
    let second = support::busybox_in(cluster, "k8s.io", "test.local/second:1", b"second");
    // The image is kept for a second after it was first seen.
    assert!(gc(cluster, &["--dry-run"]).contains("younger than its minimum age"));
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let listing = gc(cluster, &["--dry-run"]);
    let line = |name: &str| {
        let line = listing.lines().find(|l| l.contains(name));
        line.unwrap_or_else(|| panic!("no {name} in\n{listing}"))
            .trim()
    };
    assert!(line(&second).starts_with("goes "), "{listing}");
    let of_used = line(used);
    assert!(of_used.starts_with("stays "), "{listing}");
    assert!(of_used.contains("pod default/user"), "{listing}");
    assert!(line("pause").contains("pinned"), "{listing}");
    assert!(
        line("finished c #0").contains("the pod's status and logs"),
        "{listing}"
    );
    assert!(images().contains(&second), "a dry run removes nothing");
    let report: Value = serde_json::from_str(&gc(cluster, &["-o", "json"])).unwrap();
    let all = report["images"].as_array().unwrap();
    // `up` may have imported its own images again, which are unused as well.
    let is_bundled = |i: &&Value| {
        let name = i["names"][0].as_str().unwrap_or_default();
        name.starts_with("holdfast.local/")
    };
    let going: Vec<&Value> = all
        .iter()
        .filter(|i| i["fate"]["goes"] == "Space" && !is_bundled(i))
        .collect();
    assert_eq!(going.len(), 1, "{report}");
    assert_eq!(going[0]["names"][0], second.as_str());
    assert!(!images().contains(&second), "the unused image was removed");
}

/// For an invalid image name the status and two events have the kubelet's messages.
fn an_invalid_name_is_reported(cluster: &Cluster) {
    cluster.apply(&pod("misnamed", "Busybox", ""));
    let why = "Failed to apply default image tag \"Busybox\": couldn't parse image name \"Busybox\": invalid reference format: repository name (library/Busybox) must be lowercase";
    cluster.wait("the container to wait", || {
        let pod = cluster.pod("misnamed");
        let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"];
        waiting["reason"] == "InvalidImageName" && waiting["message"] == why
    });
    cluster.wait("the events", || {
        let events = cluster.events("misnamed");
        events.contains(&format!("Warning InspectFailed {why}"))
            && events.contains("Warning Failed Error: InvalidImageName")
    });
    cluster.kubectl(&["delete", "pod", "misnamed"]);
}

#[test]
fn unused_images_are_garbage_collected() {
    let crowded =
        "imageGCHighThresholdPercent: 1\nimageGCLowThresholdPercent: 0\nimageMinimumGCAge: 1s\n";
    let cluster = Cluster::start_configured("image-gc", 29, crowded);
    let image = support::busybox(&cluster);
    cluster.apply(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: user}}\nspec: {{terminationGracePeriodSeconds: 1, containers: [{{name: c, image: '{image}', command: [busybox, sleep, '1000']}}]}}\n"
    ));
    cluster.wait("the pod", || {
        support::condition(&cluster.pod("user"), "Ready") == "True"
    });
    an_invalid_name_is_reported(&cluster);
    let unused = support::busybox_in(&cluster, "k8s.io", "test.local/unused:1", b"unused");
    // The first check after a start is immediate; the next ones are minutes apart.
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(cluster.pid("agent")),
        nix::sys::signal::Signal::SIGKILL,
    )
    .unwrap();
    cluster.up();
    let images = || support::ctr(&cluster, "k8s.io", &["images", "ls", "-q"]);
    cluster.wait("the unused image to be removed", || {
        !images().contains(&unused)
    });
    let left = images();
    assert!(left.contains(&image) && left.contains("pause"), "{left}");
    cluster.wait("an event that too little was freed", || {
        cluster
            .kubectl(&[
                "get",
                "events",
                "--field-selector",
                "reason=FreeDiskSpaceFailed",
            ])
            .contains("Insufficient free disk space")
    });
    gc_announces_removals(&cluster, &image, &images);
    let pod = cluster.pod("user");
    assert_eq!(
        pod["status"]["containerStatuses"][0]["restartCount"], 0,
        "{pod}"
    );
    cluster.delete_all_and_check();
}
