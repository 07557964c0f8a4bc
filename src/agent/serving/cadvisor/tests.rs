//! The page of a node with many pods, from synthetic measurements.

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

use super::super::figures::{ContainerFigures, PodFigures, SandboxFigures, SystemFigures};
use super::*;
use holdfast_core::serving::block_io;
use holdfast_core::serving::cgroup_stats::{self, Texts};
use holdfast_core::serving::machine_stats::Interface;
use holdfast_sys::machine::Room;
use holdfast_sys::meter::{Filesystem, Whole};

/// The cgroup v2 files of a container.
fn usage() -> Usage {
    let pressure = "some avg10=0.00 avg60=0.00 avg300=0.00 total=3\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n";
    let texts = [
        ("cpu.stat", "usage_usec 5\nuser_usec 3\nsystem_usec 2\n"),
        ("cpu.max", "10000 100000\n"),
        ("memory.max", "1000\n"),
        ("cgroup.procs", "1\n2\n"),
        (
            "io.stat",
            "8:0 rbytes=1 wbytes=2 rios=3 wios=4 cost.usage=1 cost.wait=1 cost.indebt=1 cost.indelay=1\n",
        ),
        ("cpu.pressure", pressure),
        ("memory.pressure", pressure),
        ("io.pressure", pressure),
    ];
    let texts = texts.map(|(name, text)| (name, text.to_owned()));
    cgroup_stats::v2(&Texts::from(texts))
}

fn processes() -> Processes {
    Processes {
        interfaces: vec![Interface {
            name: "eth0".into(),
            ..Interface::default()
        }],
        descriptors: Some((9, 2)),
        open_files: Some(1024),
    }
}

fn pod(n: usize) -> PodFigures {
    let object = serde_json::json!({"metadata": {"name": format!("web-7c5ddbdf54-{n:05}"), "namespace": "shop", "uid": format!("u{n}")}});
    let object: Pod = serde_json::from_value(object).unwrap();
    let cgroup = format!("/kubepods.slice/kubepods-burstable.slice/pod0b7c3f0e_{n:05}.slice");
    let below = |id: &str| format!("{cgroup}/cri-containerd-{id}.scope");
    let (sandbox, container) = (format!("{n:064x}"), format!("{:064x}", n + 1000));
    PodFigures {
        pod: Arc::new(object),
        usage: usage(),
        rate: None,
        started: None,
        sandbox: SandboxFigures {
            cgroup: Some(below(&sandbox)),
            id: sandbox,
            usage: usage(),
            processes: processes(),
        },
        containers: vec![ContainerFigures {
            name: "web".into(),
            image: "registry.example/shop/web:1.2.3".into(),
            cgroup: below(&container),
            id: container,
            usage: usage(),
            processes: Processes {
                interfaces: vec![],
                ..processes()
            },
            rate: None,
            started: None,
        }],
        cgroup: Some(cgroup),
    }
}

fn snapshot(pods: usize) -> Snapshot {
    let disks = "8 0 sda 1 2 3 4 5 6 7 8 9 10 11\n8 1 sda1 1 2 3 4 5 6 7 8 9 10 11\n";
    let filesystem = |device: &str| Filesystem {
        device: device.into(),
        room: Room::default(),
    };
    let systems = ["pods", "", "kubelet"].map(|name| SystemFigures {
        name,
        cgroup: format!("/cgroup-{name}"),
        usage: usage(),
        rate: None,
        started: None,
        processes: processes(),
    });
    Snapshot {
        at: Timestamp::UNIX_EPOCH,
        depth: Depth::All,
        machine: Whole {
            usage: usage(),
            disks: block_io::counters(disks),
            filesystems: vec![
                filesystem("/dev/sda"),
                filesystem("/dev/sda1"),
                filesystem("/run"),
            ],
            own: processes(),
            interfaces: processes().interfaces,
            ..Whole::default()
        },
        rate: None,
        root: Room::default(),
        pods: (0..pods).map(pod).collect(),
        systems: systems.to_vec(),
    }
}

/// The samples of a page without their values.
fn series(page: &str) -> Vec<&str> {
    let samples = page.lines().filter(|l| !l.starts_with('#'));
    samples
        .map(|l| l.rsplit_once('}').map_or(l, |(series, _)| series))
        .collect()
}

/// Without cgroups of pods, the summary's usage of all pods is that of the machine.
#[test]
fn without_pod_cgroups_containers_are_shown_and_the_machine_once() {
    let mut snapshot = snapshot(1);
    snapshot.systems[0].cgroup = "/".into();
    // For example, agent and system processes in the same cgroup.
    let agent = snapshot.systems[2].clone();
    snapshot.systems.push(SystemFigures {
        name: "misc",
        ..agent
    });
    snapshot.pods[0].cgroup = None;
    snapshot.pods[0].sandbox.cgroup = None;
    let page = containers(&snapshot, true, "pause:3").into_string();
    let all = series(&page);
    assert_eq!(all.len(), all.iter().collect::<BTreeSet<_>>().len());
    let of = |part: &str| all.iter().filter(|s| s.contains(part)).count();
    let name = "container_cpu_usage_seconds_total";
    assert_eq!(
        of(&format!("{name}{{container=\"\"")),
        3,
        "machine, class, agent"
    );
    assert_eq!(of(&format!("{name}{{container=\"web\"")), 1);
}

#[test]
fn series_are_unique_and_families_are_contiguous() {
    let page = containers(&snapshot(3), true, "pause:3").into_string();
    let all = series(&page);
    let once: BTreeSet<&str> = all.iter().copied().collect();
    assert_eq!(all.len(), once.len());
    let heads: Vec<&str> = page.lines().filter(|l| l.starts_with("# TYPE")).collect();
    assert_eq!(heads.len(), heads.iter().collect::<BTreeSet<_>>().len());
    let mut family = "";
    for line in page.lines() {
        if let Some(head) = line.strip_prefix("# TYPE ") {
            family = head.split(' ').next().unwrap();
        } else if !line.starts_with('#') {
            assert_eq!(line.split(['{', ' ']).next(), Some(family));
        }
    }
}

#[test]
fn samples_equal_those_of_a_kubelet() {
    let page = containers(&snapshot(1), true, "pause:3").into_string();
    let cgroup = "/kubepods.slice/kubepods-burstable.slice/pod0b7c3f0e_00000.slice";
    let (sandbox, id) = (format!("{:064x}", 0), format!("{:064x}", 1000));
    let of = |container: &str, id: &str, image: &str, name: &str| {
        format!(
            r#"container="{container}",id="{cgroup}{id}",image="{image}",name="{name}",namespace="shop",pod="web-7c5ddbdf54-00000""#
        )
    };
    let place = |id: &str| format!("/cri-containerd-{id}.scope");
    let own = of("web", &place(&id), "registry.example/shop/web:1.2.3", &id);
    let of_sandbox = of("", &place(&sandbox), "pause:3", &sandbox);
    for line in [
        format!("container_processes{{{own}}} 2 0"),
        format!("container_spec_cpu_quota{{{own}}} 10000"),
        format!("container_spec_memory_limit_bytes{{{own}}} 1000"),
        format!("container_sockets{{{own}}} 2 0"),
        format!("container_pressure_io_waiting_seconds_total{{{own}}} 0.000003 0"),
        format!(
            "container_cpu_usage_seconds_total{{{}}} 0.000005 0",
            own.replace(",id=", r#",cpu="total",id="#)
        ),
        format!(
            "container_ulimits_soft{{{own},ulimit=\"max_open_files\"}} 1024 0"
        ),
        format!(
            "container_memory_failures_total{{{},scope=\"container\"}} 0 0",
            own.replace(",id=", r#",failure_type="pgfault",id="#)
        ),
        format!(
            "container_fs_writes_bytes_total{{{}}} 2 0",
            own.replace(",id=", r#",device="/dev/sda",id="#)
        ),
        format!(
            "container_network_receive_bytes_total{{{}}} 0 0",
            of_sandbox.replace(",name=", r#",interface="eth0",name="#)
        ),
        r#"container_fs_io_current{container="",device="/dev/sda1",id="/",image="",name="",namespace="",pod=""} 9 0"#.to_owned(),
        r#"container_fs_io_time_seconds_total{container="",device="/run",id="/",image="",name="",namespace="",pod=""} 0 0"#.to_owned(),
    ] {
        assert!(page.lines().any(|l| l == line), "{line}\n{page}");
    }
    // Series that must not exist: the network of a container, and limits of a pod's processes.
    assert!(!page.contains(&format!("interface=\"eth0\",name=\"{id}\"")));
    assert!(!page.contains(&format!("container_ulimits_soft{{{}", of("", "", "", ""))));
}

/// Prints the cost of writing the page with `--nocapture`. Tests that the page grows linearly with the pods.
#[test]
fn the_page_grows_linearly_with_the_pods() {
    let length = |pods: usize| {
        let snapshot = snapshot(pods);
        let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
        let before = clock.now().unwrap();
        let text = containers(&snapshot, true, "pause:3").into_string();
        let cost = std::time::Duration::from(clock.now().unwrap() - before);
        let samples = series(&text).len();
        println!(
            "{pods} pods: {samples} samples, {} bytes, {cost:?}",
            text.len()
        );
        samples
    };
    let (none, one, many) = (length(0), length(1), length(110));
    assert_eq!(many - none, 110 * (one - none));
}
