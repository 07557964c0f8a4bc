//! `make bench-services`: the data plane of services in a network namespace of its own.
//!
//! Figures: the time to plan and commit 1,000 and 10,000 services with 10 endpoints each; the time from a changed endpoint among
//! 10,000 services to the end of the commit; the processor time of 1,000 changes a second that are committed together every 20 ms;
//! the memory of the services; an audit; and the time to open a connection, next to that of a single DNAT rule.
#![allow(clippy::unwrap_used)]

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_core::services::NodeFacts;
use holdfast_net::nft::expression::{Field, field_is, port_is, protocol_is};
use holdfast_net::nft::statement::redirect;
use holdfast_net::nft::value::IpVersion;
use holdfast_net::nft::{self, Hook, Nft, OwnerMark, Table};
use holdfast_proxy::services::{DataPlane, Settings};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::json;

const ENDPOINTS: usize = 10;
const TABLE: &str = "holdfast-bench";

/// An address in 10.0.0.0/8 below a second byte.
fn address(second: u8, number: usize) -> IpAddr {
    let number = u32::try_from(number).unwrap();
    let [_, high, middle, low] = number.to_be_bytes();
    [10, second + high, middle, low].into()
}

fn service(number: usize) -> Service {
    let address = address(96, number + 1);
    let object = json!({
        "metadata": {"namespace": "bench", "name": format!("service-{number}"), "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {
            "type": "ClusterIP", "clusterIP": address, "clusterIPs": [address],
            "ports": [{"name": "http", "port": 80, "protocol": "TCP"}],
        },
    });
    serde_json::from_value(object).unwrap()
}

/// The endpoints of a service on 100 nodes; `changed` is that of a replaced one.
fn slice(number: usize, changed: Option<usize>) -> Arc<EndpointSlice> {
    let endpoints: Vec<_> = (0..ENDPOINTS)
        .map(|at| {
            let host = match changed {
                Some(host) if at == 0 => 200_000 + host,
                _ => number * ENDPOINTS + at + 1,
            };
            json!({
                "addresses": [address(128, host)], "nodeName": format!("node-{}", host % 100), "zone": "a",
                "conditions": {"ready": true, "serving": true, "terminating": false},
                "targetRef": {"kind": "Pod", "namespace": "bench", "name": format!("service-{number}-{at}")},
            })
        })
        .collect();
    let object = json!({
        "metadata": {"namespace": "bench", "name": format!("service-{number}-abcde")}, "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}], "endpoints": endpoints,
    });
    Arc::new(serde_json::from_value(object).unwrap())
}

fn open() -> DataPlane {
    let mut plane = DataPlane::open(Settings::new(TABLE)).unwrap();
    plane.set_node(NodeFacts {
        name: "node-1".to_owned(),
        zone: Some("a".to_owned()),
        addresses: vec![[192, 0, 2, 1].into()],
    });
    plane
}

/// A line of `/proc/self/status`, in KiB.
fn memory(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// The processor time of this process.
fn processor_time() -> Duration {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF).unwrap();
    let micros = |time: nix::sys::time::TimeVal| {
        u64::try_from(time.tv_sec() * 1_000_000 + time.tv_usec()).unwrap()
    };
    Duration::from_micros(micros(usage.user_time()) + micros(usage.system_time()))
}

fn show(what: &str, value: &str) {
    println!("{what:<72} {value}");
}

fn milliseconds(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1000.0)
}

/// Sets up services, and returns the time to plan them and the time to commit them.
fn set_up(plane: &mut DataPlane, count: usize) -> (Duration, Duration) {
    let (mut planned, mut at) = (Duration::ZERO, 0);
    while at < count {
        // The objects are made and freed in parts, so that they are not part of the memory.
        let objects: Vec<_> = (at..count.min(at + 100))
            .map(|number| (number, service(number), [slice(number, None)]))
            .collect();
        let start = Instant::now();
        for (number, service, slices) in &objects {
            plane.set_service("bench", &format!("service-{number}"), Some(service), slices);
        }
        planned += start.elapsed();
        at += objects.len();
    }
    let start = Instant::now();
    plane.commit().unwrap();
    (planned, start.elapsed())
}

fn measure_set_up(count: usize) -> DataPlane {
    let before = memory("VmRSS");
    let mut plane = open();
    let (planned, committed) = set_up(&mut plane, count);
    let total = milliseconds(planned + committed);
    let parts = format!("{total} ({} planning)", milliseconds(planned));
    show(
        &format!("{count} services with {ENDPOINTS} endpoints: set up"),
        &parts,
    );
    let grown = memory("VmRSS").saturating_sub(before);
    show(
        &format!("{count} services: memory after the commit, and the peak of the process"),
        &format!("{} KiB, {} KiB", grown, memory("VmHWM")),
    );
    plane
}

/// Replaces, or removes, one endpoint of each of 200 services.
fn measure_changes(plane: &mut DataPlane, count: usize, is_removal: bool) {
    const CHANGES: usize = 200;
    let mut times = vec![];
    for change in 0..CHANGES {
        let number = change * (count / CHANGES);
        let mut changed = slice(number, Some(change));
        if is_removal {
            let endpoints = Arc::make_mut(&mut changed).endpoints.as_mut().unwrap();
            endpoints.remove(0);
        }
        let (service, slices) = (service(number), [changed]);
        let start = Instant::now();
        plane.set_service(
            "bench",
            &format!("service-{number}"),
            Some(&service),
            &slices,
        );
        plane.commit().unwrap();
        times.push(start.elapsed());
    }
    times.sort();
    let text = format!(
        "median {}, 99 % {}, worst {}",
        milliseconds(times[CHANGES / 2]),
        milliseconds(times[CHANGES * 99 / 100]),
        milliseconds(times[CHANGES - 1])
    );
    show(
        &format!(
            "one {} endpoint among {count} services: from change to commit",
            if is_removal { "removed" } else { "replaced" }
        ),
        &text,
    );
}

/// 1,000 changes within a second, committed every 20 ms.
fn measure_rate(plane: &mut DataPlane, count: usize) {
    const CHANGES: usize = 1000;
    const TOGETHER: usize = 20;
    let objects: Vec<_> = (0..CHANGES)
        .map(|change| {
            let number = change * 7 % count;
            (
                number,
                service(number),
                [slice(number, Some(1000 + change))],
            )
        })
        .collect();
    let before = processor_time();
    for objects in objects.chunks(TOGETHER) {
        for (number, service, slices) in objects {
            plane.set_service("bench", &format!("service-{number}"), Some(service), slices);
        }
        plane.commit().unwrap();
    }
    let used = processor_time().saturating_sub(before);
    show(
        "1,000 changed endpoints a second, committed every 20 ms: processor time",
        &format!("{:.1} % of a core", used.as_secs_f64() * 100.0),
    );
}

/// The median time to open a connection.
fn connections(to: SocketAddr) -> Duration {
    let mut times: Vec<Duration> = (0..3000)
        .map(|_| {
            let start = Instant::now();
            drop(TcpStream::connect(to).unwrap());
            start.elapsed()
        })
        .collect();
    times.sort();
    times[times.len() / 2]
}

/// Connections from this namespace through the service 1 and through a single rule, in turns.
fn measure_connections(plane: &mut DataPlane) {
    let number = 1;
    let endpoint = address(128, number * ENDPOINTS + 1);
    let server = SocketAddr::from((endpoint, 8080));
    let listener = TcpListener::bind(server).unwrap();
    std::thread::spawn(move || for _ in listener.incoming() {});
    let mut object = serde_json::to_value(&*slice(number, None)).unwrap();
    object["endpoints"].as_array_mut().unwrap().truncate(1);
    let slices = [Arc::new(serde_json::from_value(object).unwrap())];
    plane.set_service("bench", "service-1", Some(&service(number)), &slices);
    plane.commit().unwrap();
    let table = Table {
        family: nft::Family::V4,
        name: "single-rule",
    };
    let single: IpAddr = [10, 95, 0, 1].into();
    let hook = Hook {
        kind: "nat",
        hook: 3,
        priority: -101,
    };
    let mut rule = field_is(Field::Destination(IpVersion::V4), &[10, 95, 0, 1], true);
    rule.extend(protocol_is(6));
    rule.extend(port_is(80));
    rule.extend(redirect(endpoint, 8080));
    let messages = vec![
        table.create(),
        table.hooked("output", hook),
        table.append("output", &rule, OwnerMark::None),
    ];
    let (mut through_service, mut through_rule) = (vec![], vec![]);
    let mut nft = Nft::open().unwrap();
    for _ in 0..5 {
        through_service.push(connections((address(96, number + 1), 80).into()));
        nft.commit(messages.clone()).unwrap();
        through_rule.push(connections((single, 80).into()));
        nft.commit(table.destroy().to_vec()).unwrap();
    }
    through_service.sort();
    through_rule.sort();
    let (service, rule) = (through_service[2], through_rule[2]);
    let more = (service.as_secs_f64() / rule.as_secs_f64() - 1.0) * 100.0;
    show(
        "opening a connection through a service and through a single rule",
        &format!("{:?}, {:?} ({more:+.1} %)", service, rule),
    );
}

/// The memory after the process has returned what its allocator does not use, as `holdfast proxy` does every 30 s.
fn measure_memory() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    runtime.block_on(async {
        let wait = Duration::from_secs(31);
        let release = holdfast_sys::memory::release_free_memory(0);
        let _ = tokio::time::timeout(wait, release).await;
    });
    show(
        "10,000 services: memory of the process when it is idle",
        &format!("{} KiB", memory("VmRSS")),
    );
}

fn main() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: the benchmark needs root");
        return;
    }
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    for arguments in [
        &["link", "set", "lo", "up"][..],
        &["address", "add", "10.128.0.0/9", "dev", "lo"],
        &["route", "add", "default", "dev", "lo"],
    ] {
        let status = std::process::Command::new("ip").args(arguments).status();
        assert!(status.unwrap().success(), "ip {arguments:?}");
    }
    holdfast_sys::memory::limit_malloc();
    drop(measure_set_up(1000));
    DataPlane::remove(&Settings::new(TABLE)).unwrap();
    let mut plane = measure_set_up(10_000);
    measure_memory();
    measure_changes(&mut plane, 10_000, false);
    measure_changes(&mut plane, 10_000, true);
    measure_rate(&mut plane, 10_000);
    let start = Instant::now();
    plane.audit().unwrap();
    show(
        "10,000 services: an audit of an unchanged table",
        &milliseconds(start.elapsed()),
    );
    // Any transaction of another program makes the next audit read the whole table.
    let foreign = Table {
        family: nft::Family::V4,
        name: "foreign",
    };
    Nft::open().unwrap().commit(vec![foreign.create()]).unwrap();
    let start = Instant::now();
    let repaired = plane.audit().unwrap();
    assert_eq!(repaired.differences, [""; 0]);
    show(
        "10,000 services: an audit that reads the table",
        &milliseconds(start.elapsed()),
    );
    show(
        "peak memory of the process",
        &format!("{} KiB", memory("VmHWM")),
    );
    measure_connections(&mut plane);
    let start = Instant::now();
    DataPlane::remove(&Settings::new(TABLE)).unwrap();
    show("10,000 services: removal", &milliseconds(start.elapsed()));
}
