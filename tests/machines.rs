//! What the kernel at hand may lack, in virtual machines.
#![allow(clippy::unwrap_used)]

#[path = "support/vm.rs"]
mod vm;

use std::path::Path;

use holdfast::core::behind::{self, Here};
use holdfast::core::cgroup::Driver;
use holdfast::host::PodHost as _;
use holdfast::host::linux::LinuxHost;
use holdfast::sys::{quota, usage};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

#[test]
fn filesystems_count_what_pods_write() {
    vm::run("quotas_inside", &["quota_tree", "quota_v2", "brd rd_nr=1 rd_size=65536"], &["/sbin/mkfs.ext4"]);
}

#[test]
#[ignore = "runs in a virtual machine"]
fn quotas_inside() {
    assert!(vm::is_inside(), "this makes filesystems: it runs in a virtual machine only");
    let made = std::process::Command::new("/sbin/mkfs.ext4").args(["-q", "-O", "quota,project", "/dev/ram0"]).status().unwrap();
    assert!(made.success());
    let root = Path::new("/run/node");
    std::fs::create_dir(root).unwrap();
    nix::mount::mount(Some("/dev/ram0"), root, Some("ext4"), nix::mount::MsFlags::empty(), Some("prjquota")).unwrap();
    let host = LinuxHost {
        root: root.into(),
        logs: root.join("logs"),
        cgroup_root: "/".into(),
        driver: Driver::Cgroupfs,
        pids: None,
        cpu_period: None,
        patient: holdfast::sys::patient::Patient::default(),
    };
    let pod = |uid: &str, host_users: bool| -> Pod {
        let volumes = json!([{"name": "v", "emptyDir": {}}, {"name": "w", "emptyDir": {}}]);
        serde_json::from_value(
            json!({"metadata": {"name": "p", "uid": uid}, "spec": {"hostUsers": host_users, "containers": [], "volumes": volumes}}),
        )
        .unwrap()
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let set_up = |pod: &Pod| {
        for volume in pod.spec.as_ref().unwrap().volumes.iter().flatten() {
            let behind = behind::behind(pod, volume, None, Here::default()).unwrap();
            runtime.block_on(host.set_up_volume(pod, &behind, None)).unwrap();
        }
    };
    let dir = |uid: &str, volume: &str| root.join(format!("pods/{uid}/volumes/kubernetes.io~empty-dir/{volume}"));
    let used = |pod: &Pod, volume: &str| runtime.block_on(host.volume_usage(pod, volume, u64::MAX)).unwrap();

    // Each volume is counted by itself, as walking it would, and again after it was set up once more.
    let (counted, walked) = (pod("counted", false), pod("walked", true));
    set_up(&counted);
    set_up(&walked);
    for uid in ["counted", "walked"] {
        std::fs::create_dir(dir(uid, "v").join("deep")).unwrap();
        std::fs::write(dir(uid, "v").join("deep/file"), vec![1; 3 << 20]).unwrap();
        std::fs::write(dir(uid, "w").join("file"), vec![1; 1 << 20]).unwrap();
    }
    nix::unistd::sync();
    set_up(&counted);
    for volume in ["v", "w"] {
        let known = quota::used(&dir("counted", volume)).unwrap().expect("the filesystem counts");
        assert_eq!(known, usage::of(&dir("counted", volume), u64::MAX).unwrap());
        assert_eq!((used(&counted, volume), used(&walked, volume)), (known, known));
        assert_eq!(quota::used(&dir("walked", volume)).unwrap(), None, "who is in that pod could tell the filesystem otherwise");
    }
    // What is removed is not counted any more, and its number is free for others.
    std::fs::remove_dir_all(dir("counted", "v")).unwrap();
    assert_eq!(used(&counted, "v"), usage::Usage::default());
    set_up(&counted);
    assert_eq!(quota::used(&dir("counted", "v")).unwrap().map(|u| u.inodes), Some(1));
    // Many volumes have many numbers.
    for n in 0..200 {
        set_up(&pod(&format!("many-{n}"), false));
    }
    assert!((0..200).all(|n| quota::used(&dir(&format!("many-{n}"), "w")).unwrap().map(|u| u.inodes) == Some(1)));
}
