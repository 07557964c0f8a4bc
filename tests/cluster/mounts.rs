//! Mounts of host directories and of parts of volumes: subPath, propagation, host paths.
#![allow(clippy::unwrap_used)]

use crate::support;

use support::{Cluster, condition, inside};

fn pod(name: &str, image: &str, volumes: &str, mounts: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  terminationGracePeriodSeconds: 1\n  volumes: {volumes}\n  containers: [{{name: c, image: '{image}', command: [busybox, sleep, '10000'], volumeMounts: {mounts}}}]\n---\n"
    )
}

fn ready(cluster: &Cluster, pod: &str) -> bool {
    condition(&cluster.pod(pod), "Ready") == "True"
}

#[test]
fn a_subpath_never_escapes_its_volume() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use holdfast_core::pod::cgroup::Driver;
    use holdfast_core::volume::resolved::{ResolvedVolume, Source};
    use holdfast_host::cgroups::Cgroups;
    use holdfast_host::linux::LinuxHost;
    use holdfast_host::{PodHost as _, SubPath};

    const SWAPS: u64 = 100_000;
    let (root, inside, outside) = (
        tempfile::tempdir().unwrap(),
        tempfile::tempdir().unwrap(),
        tempfile::tempdir().unwrap(),
    );
    let base = inside.path();
    std::fs::create_dir_all(outside.path().join("x/deep")).unwrap();
    std::fs::write(outside.path().join("x/secret"), "no").unwrap();
    std::fs::write(outside.path().join("x/deep/secret"), "no").unwrap();
    std::fs::create_dir_all(base.join("a/x/deep")).unwrap();
    std::os::unix::fs::symlink(outside.path(), base.join("link")).unwrap();
    let (swaps, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let cgroups = Cgroups::new("/", Driver::Cgroupfs);
    let host = LinuxHost::new(root.path(), root.path().join("logs"), cgroups, None, None);
    let resolved = ResolvedVolume {
        volume: "v".into(),
        name: "v".into(),
        source: Source::HostPath {
            path: base.display().to_string(),
            kind: String::new(),
        },
        read_only: false,
        block: false,
        options: vec![],
        applies_fs_group: false,
        labelled: false,
        group: None,
        access_mode: "inline",
    };
    let pod: k8s_openapi::api::core::v1::Pod =
        serde_json::from_value(serde_json::json!({"metadata": {"name": "p", "uid": "u"}})).unwrap();
    let (mut mounted, mut refused) = (0_u64, 0_u64);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Exchanges the directory and the link, and renames a directory below.
            let swap = |a: &str, b: &str, flags: nix::fcntl::RenameFlags| {
                nix::fcntl::renameat2(
                    nix::fcntl::AT_FDCWD,
                    &base.join(a),
                    nix::fcntl::AT_FDCWD,
                    &base.join(b),
                    flags,
                )
            };
            while !over.load(Ordering::Relaxed) {
                swap("a", "link", nix::fcntl::RenameFlags::RENAME_EXCHANGE).unwrap();
                // The directory may be behind the link at this moment, where the rename does not find it.
                if swap(
                    "a/x/deep",
                    "a/x/gone",
                    nix::fcntl::RenameFlags::RENAME_NOREPLACE,
                )
                .is_ok()
                {
                    let _ = swap(
                        "a/x/gone",
                        "a/x/deep",
                        nix::fcntl::RenameFlags::RENAME_NOREPLACE,
                    );
                }
                swaps.fetch_add(1, Ordering::Relaxed);
            }
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let mut turn = 0_u64;
        while swaps.load(Ordering::Relaxed) < SWAPS || mounted < 200 || refused < 200 {
            turn += 1;
            let path = match turn % 3 {
                0 => "a/x".to_owned(),
                1 => "a/x/deep".to_owned(),
                _ => format!("a/made-{turn}/below"),
            };
            let place = SubPath {
                container: "c".into(),
                index: 0,
                path: Some(path.clone()),
            };
            match runtime.block_on(host.mount_source(&pod, &resolved, &place)) {
                Ok(target) => {
                    mounted += 1;
                    assert!(!target.join("secret").exists(), "{path} escaped the volume");
                    nix::mount::umount2(&target, nix::mount::MntFlags::MNT_DETACH).unwrap();
                }
                Err(_) => refused += 1,
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    let names: Vec<String> = std::fs::read_dir(outside.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(names, ["x"], "nothing was created outside");
    eprintln!(
        "{} swaps, {mounted} mounts, {refused} refusals",
        swaps.load(Ordering::Relaxed)
    );
}

#[test]
fn mounts_follow_their_propagation_and_host_paths_are_checked() {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};

    let cluster = Cluster::start("propagation", 40);
    let image = support::busybox(&cluster);
    // A shared mount.
    let place = tempfile::tempdir().unwrap();
    let path = place.path().display().to_string();
    mount(
        Some(place.path()),
        place.path(),
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .unwrap();
    mount(
        None::<&str>,
        place.path(),
        None::<&str>,
        MsFlags::MS_SHARED,
        None::<&str>,
    )
    .unwrap();
    for dir in ["early", "late", "theirs"] {
        std::fs::create_dir(place.path().join(dir)).unwrap();
    }
    let host = format!("[{{name: v, hostPath: {{path: '{path}', type: Directory}}}}]");
    let user = |name: &str, propagation: &str| {
        let pod = pod(
            name,
            &image,
            &host,
            &format!("[{{name: v, mountPath: /v{propagation}}}]"),
        );
        if name == "both" {
            pod.replace(
                "containers: [{name: c,",
                "containers: [{name: c, securityContext: {privileged: true},",
            )
        } else {
            pod
        }
    };
    cluster.apply(&user("none", ""));
    cluster.apply(&user("in", ", mountPropagation: HostToContainer"));
    cluster.apply(&user("both", ", mountPropagation: Bidirectional"));
    for name in ["none", "in", "both"] {
        cluster.wait(&format!("{name} to run"), || ready(&cluster, name));
    }
    mount(
        Some("tmpfs"),
        &place.path().join("late"),
        Some("tmpfs"),
        MsFlags::empty(),
        None::<&str>,
    )
    .unwrap();
    std::fs::write(place.path().join("late/file"), "came later").unwrap();
    let inspect = |name: &str| {
        inside(
            &cluster,
            name,
            &[
                "busybox",
                "sh",
                "-c",
                "cat /v/late/file 2>/dev/null || echo nothing",
            ],
        )
    };
    assert_eq!(
        [inspect("none"), inspect("in"), inspect("both")],
        ["nothing", "came later", "came later"]
    );
    inside(
        &cluster,
        "both",
        &[
            "busybox",
            "sh",
            "-c",
            "busybox mount -t tmpfs tmpfs /v/theirs && echo out > /v/theirs/file",
        ],
    );
    assert_eq!(
        std::fs::read_to_string(place.path().join("theirs/file")).unwrap(),
        "out\n"
    );

    // Types of host paths: a path with another type is named in an event, and creatable types are created.
    let typed = |name: &str, below: &str, kind: &str| {
        pod(
            name,
            &image,
            &format!("[{{name: v, hostPath: {{path: '{path}/{below}', type: {kind}}}}}]"),
            "[{name: v, mountPath: /v}]",
        )
    };
    for (name, below, kind, complaint) in [
        ("file", "early", "File", "is not a file"),
        ("socket", "early", "Socket", "is not a socket file"),
        ("device", "early", "CharDevice", "is not a character device"),
        ("missing", "none", "Directory", "is not a directory"),
    ] {
        cluster.apply(&typed(name, below, kind));
        cluster.wait(complaint, || {
            cluster.events(name).contains(&format!(
                "hostPath type check failed: {path}/{below} {complaint}"
            ))
        });
    }
    // Without the tools of a filesystem its mount fails, and an event reports this.
    cluster.apply(&pod(
        "nfs",
        &image,
        "[{name: v, nfs: {server: 127.0.0.1, path: /none, readOnly: true}}]",
        "[{name: v, mountPath: /v}]",
    ));
    cluster.wait("an event with the error of mount", || {
        cluster
            .events("nfs")
            .contains("mount -t nfs 127.0.0.1:/none failed with ")
    });
    cluster.apply(&typed("made-dir", "made/deep", "DirectoryOrCreate"));
    cluster.apply(&typed("made-file", "made-file", "FileOrCreate"));
    for name in ["made-dir", "made-file"] {
        cluster.wait(name, || ready(&cluster, name));
    }
    assert!(place.path().join("made/deep").is_dir() && place.path().join("made-file").is_file());
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true"]);
    assert!(
        place.path().join("made/deep").is_dir(),
        "directories of the host remain"
    );
    for below in ["late", "theirs", ""] {
        umount2(&place.path().join(below), MntFlags::MNT_DETACH).unwrap();
    }
    cluster.assert_clean();
}
