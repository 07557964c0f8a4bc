//! `/metrics/cadvisor`: cAdvisor's names, labels and units, as a kubelet with default settings
//! exports them (`pkg/kubelet/server/server.go`).
//!
//! Contains the machine (`/`), all pods and QoS classes, the agent and the runtime, and every running pod, sandbox and
//! container. Metrics that a default kubelet disables are left out: single CPUs, TCP, huge pages, the scheduler.
//! Filesystems of pods (overlays, tmpfs volumes, CSI volumes) are left out of the machine's.

mod families;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hyper::Response;
use kube::ResourceExt as _;

use families::{COSTS, CPU, DISK, MEMORY, MICRO, NANO, PROCESSES, REQUESTS, ROOM, SPEC, Shown};

use super::figures::{self, Snapshot};
use super::{Refusal, Server};
use super::{broken, page};
use holdfast_core::node::topology::{Level, Topology};
use holdfast_core::serving::block_io::DiskCounters;
use holdfast_core::serving::cgroup_stats::{Depth, Usage};
use holdfast_core::serving::exposition::{Common, Labels, Page};
use holdfast_host::blocking;
use holdfast_https::Body;
use holdfast_sys::machine::Machine;
use holdfast_sys::meter::Processes;
use holdfast_sys::topology;

/// Writes families: the header once, and only if there is a sample.
struct Writer {
    page: Page,
    /// The time of the measurement, in milliseconds.
    at: i64,
}

impl Writer {
    /// Writes a family with the samples that `each` returns for every cgroup.
    fn family<'a>(
        &mut self,
        (name, kind, help): (&str, &str, &str),
        all: &'a [Shown<'a>],
        dated: bool,
        mut each: impl FnMut(&'a Shown<'a>, &mut dyn FnMut(Labels<'_>, f64)),
    ) {
        let at = dated.then_some(self.at);
        let (page, mut begun) = (&mut self.page, false);
        for shown in all {
            each(shown, &mut |own, value| {
                if !begun {
                    page.family(name, kind, help);
                    begun = true;
                }
                page.sample_of(name, &shown.labels, own, value, at);
            });
        }
    }
}

/// The cgroups of a measurement, with their labels.
fn shown<'a>(snapshot: &'a Snapshot, v2: bool, sandbox_image: &str) -> Vec<Shown<'a>> {
    let machine = &snapshot.machine;
    let booted = i64::try_from(machine.booted).unwrap_or(0);
    let of = |names: [&str; 6], usage: &'a Usage, processes: &'a Processes, began: i64| {
        let [container, id, image, name, namespace, pod] = names;
        let labels = [
            ("container", container),
            ("id", id),
            ("image", image),
            ("name", name),
            ("namespace", namespace),
            ("pod", pod),
        ];
        let memory = if v2 { 0 } else { usage.limit.unwrap_or(0) };
        Shown {
            labels: Common::new(&labels),
            usage,
            processes,
            began,
            swap_limit: usage.swap_limit.map_or(0, |swap| swap + memory),
            has_root: true,
            interfaces: &processes.interfaces,
            filesystems: &[],
        }
    };
    let none = &NO_PROCESSES;
    let names = ["", "/", "", "", "", ""];
    let mut all = vec![Shown {
        interfaces: &machine.interfaces,
        filesystems: &machine.filesystems,
        // The machine's swap is a limit of its own, not an addition to memory.
        swap_limit: machine.swap.0,
        ..of(names, &machine.usage, &machine.own, booted)
    }];
    // Each cgroup is written once, even if several parts of the summary share it; the machine is written already.
    let mut seen = BTreeSet::from(["/"]);
    let systems = snapshot.systems.iter();
    let systems = systems.filter(|s| seen.insert(s.cgroup.as_str()));
    all.extend(systems.map(|s| Shown {
        has_root: false,
        ..of(
            ["", &s.cgroup, "", "", "", ""],
            &s.usage,
            &s.processes,
            s.started.map_or(booted, |t| t.as_second()),
        )
    }));
    for p in &snapshot.pods {
        let (pod, namespace) = (p.pod.name_any(), p.pod.namespace().unwrap_or_default());
        let began = p.started.map_or(booted, |t| t.as_second());
        all.extend(p.cgroup.iter().map(|cgroup| Shown {
            has_root: false,
            ..of(
                ["", cgroup, "", "", &namespace, &pod],
                &p.usage,
                none,
                began,
            )
        }));
        let sandbox = &p.sandbox;
        let id = sandbox.id.as_str();
        all.extend(sandbox.cgroup.iter().map(|cgroup| {
            let names = ["", cgroup, sandbox_image, id, &namespace, &pod];
            of(names, &sandbox.usage, &sandbox.processes, began)
        }));
        all.extend(p.containers.iter().map(|c| {
            let names = [&c.name, &c.cgroup, &c.image, &c.id, &namespace, &pod];
            let began = c.started.map_or(booted, |t| t.as_second());
            of(names.map(String::as_str), &c.usage, &c.processes, began)
        }));
    }
    all
}

static NO_PROCESSES: Processes = Processes {
    interfaces: vec![],
    descriptors: None,
    open_files: None,
};

/// Metrics with additional labels, except those of disks and interfaces.
fn labelled(out: &mut Writer, all: &[Shown<'_>]) {
    out.family(
        (
            "container_cpu_usage_seconds_total",
            "counter",
            "Cumulative cpu time consumed in seconds.",
        ),
        all,
        true,
        |s, sample| {
            if s.usage.cpu > 0 {
                sample(&[("cpu", "total")], s.usage.cpu as f64 / NANO);
            }
        },
    );
    out.family(
        (
            "container_memory_failures_total",
            "counter",
            "Cumulative count of memory allocation failures.",
        ),
        all,
        true,
        |s, sample| {
            for scope in ["container", "hierarchy"] {
                for (kind, value) in [
                    ("pgfault", s.usage.faults.0),
                    ("pgmajfault", s.usage.faults.1),
                ] {
                    sample(&[("failure_type", kind), ("scope", scope)], value as f64);
                }
            }
        },
    );
    out.family(
        (
            "container_ulimits_soft",
            "gauge",
            "Soft ulimit values for the container root process. Unlimited if -1, except priority and nice",
        ),
        all,
        true,
        |s, sample| {
            if let Some(most) = s.processes.open_files.filter(|_| s.has_root) {
                sample(&[("ulimit", "max_open_files")], most as f64);
            }
        },
    );
}

/// Network traffic of interfaces.
fn network(out: &mut Writer, all: &[Shown<'_>]) {
    for (direction, done, sent) in [
        ("receive", "received", false),
        ("transmit", "transmitted", true),
    ] {
        let doing = if sent { "transmitting" } else { "receiving" };
        let helps = [
            format!("Cumulative count of bytes {done}"),
            format!("Cumulative count of packets {done}"),
            format!("Cumulative count of errors encountered while {doing}"),
            format!("Cumulative count of packets dropped while {doing}"),
        ];
        let whats = ["bytes", "packets", "errors", "packets_dropped"];
        for (i, (what, help)) in whats.into_iter().zip(&helps).enumerate() {
            let name = format!("container_network_{direction}_{what}_total");
            out.family((&name, "counter", help), all, true, |s, sample| {
                for interface in s.interfaces {
                    let counters = if sent {
                        &interface.sent
                    } else {
                        &interface.received
                    };
                    let labels = [("interface", interface.name.as_str())];
                    sample(&labels, counters[i] as f64);
                }
            });
        }
    }
}

/// The machine's disks and partitions, by number and by name.
struct Disks<'a> {
    names: BTreeMap<(u32, u32), String>,
    counters: BTreeMap<&'a str, &'a DiskCounters>,
}

impl<'a> Disks<'a> {
    fn new(all: &'a [DiskCounters]) -> Disks<'a> {
        let names = all.iter().map(|d| (d.device, format!("/dev/{}", d.name)));
        Disks {
            names: names.collect(),
            counters: all.iter().map(|d| (d.name.as_str(), d)).collect(),
        }
    }

    fn name(&self, device: (u32, u32)) -> &str {
        self.names.get(&device).map_or("", String::as_str)
    }

    /// The kernel's counters of a filesystem's device; `None` without a device.
    fn below(&self, device: &str) -> Option<&'a DiskCounters> {
        self.counters.get(device.strip_prefix("/dev/")?).copied()
    }
}

/// Disk requests of cgroups.
fn requests(out: &mut Writer, all: &[Shown<'_>], disks: &Disks<'_>) {
    for (name, help, kind, of_disk) in REQUESTS {
        out.family((name, "counter", help), all, true, |s, sample| {
            let mut reported = vec![];
            for disk in &s.usage.disks {
                let counted = if of_disk.is_none() {
                    &disk.bytes
                } else {
                    &disk.requests
                };
                if !counted.is_empty() {
                    let value = counted.iter().find(|(of, _)| *of == kind);
                    let device = disks.name(disk.device);
                    sample(&[("device", device)], value.map_or(0.0, |v| v.1 as f64));
                    reported.push(device);
                }
            }
            // A filesystem directly on a disk would have the same labels as the disk above.
            let rest = s
                .filesystems
                .iter()
                .filter(|f| !reported.contains(&f.device.as_str()));
            for f in rest {
                if let Some(get) = of_disk {
                    let value = disks.below(&f.device).map_or(0.0, get);
                    sample(&[("device", &f.device)], value);
                }
            }
        });
    }
}

/// Disk traffic, and usage of filesystems.
fn disks(out: &mut Writer, all: &[Shown<'_>], disks: &Disks<'_>) {
    for (name, help, get) in ROOM {
        out.family((name, "gauge", help), all, true, |s, sample| {
            for f in s.filesystems {
                sample(&[("device", &f.device)], get(f) as f64);
            }
        });
    }
    for (name, kind, help, get) in DISK {
        out.family((name, kind, help), all, true, |s, sample| {
            for f in s.filesystems {
                let value = disks.below(&f.device).map_or(0.0, get);
                sample(&[("device", &f.device)], value);
            }
        });
    }
    requests(out, all, disks);
    for (i, (name, help)) in COSTS.into_iter().enumerate() {
        out.family((name, "counter", help), all, true, |s, sample| {
            for disk in &s.usage.disks {
                if let Some(cost) = disk.cost {
                    let device = disks.name(disk.device);
                    sample(&[("device", device)], cost[i] as f64 / MICRO);
                }
            }
        });
    }
    out.family(
        (
            "container_blkio_device_usage_total",
            "counter",
            "Blkio Device bytes usage",
        ),
        all,
        true,
        |s, sample| {
            for disk in &s.usage.disks {
                let device = disks.name(disk.device);
                let (major, minor) = (disk.device.0.to_string(), disk.device.1.to_string());
                for (operation, value) in &disk.bytes {
                    let labels = [
                        ("device", device),
                        ("major", &major),
                        ("minor", &minor),
                        ("operation", operation),
                    ];
                    sample(&labels, *value as f64);
                }
            }
        },
    );
}

/// Metrics of the machine itself.
fn machine(out: &mut Page, machine: &Machine, topology: &Topology, swap: u64) {
    let labels = [
        ("boot_id", machine.boot_id.as_str()),
        ("machine_id", &machine.machine_id),
        ("system_uuid", &machine.system_uuid),
    ];
    let groups = |level: Level| topology.cpus.groups(level).len() as f64;
    for (name, help, value) in [
        (
            "machine_cpu_physical_cores",
            "Number of physical CPU cores.",
            groups(Level::Core),
        ),
        (
            "machine_cpu_cores",
            "Number of logical CPU cores.",
            f64::from(machine.cpus),
        ),
        (
            "machine_cpu_sockets",
            "Number of CPU sockets.",
            groups(Level::Socket),
        ),
        // Exist on mainframes only.
        ("machine_cpu_books", "Number of CPU books.", 0.0),
        ("machine_cpu_drawers", "Number of CPU drawers.", 0.0),
        (
            "machine_memory_bytes",
            "Amount of memory installed on the machine.",
            machine.memory as f64,
        ),
        (
            "machine_swap_bytes",
            "Amount of swap memory available on the machine.",
            swap as f64,
        ),
        (
            "machine_nvm_avg_power_budget_watts",
            "NVM power budget.",
            0.0,
        ),
    ] {
        out.single(name, "gauge", help, &labels, value);
    }
    // As in a default kubelet, which is built without Intel's library, these values are zero.
    let name = "machine_nvm_capacity";
    let help = "NVM capacity value labeled by NVM mode (memory mode or app direct mode).";
    out.family(name, "gauge", help);
    for mode in ["app_direct_mode", "memory_mode"] {
        let [boot, id, uuid] = labels;
        out.sample(name, &[boot, id, ("mode", mode), uuid], 0.0, None);
    }
    out.single(
        "machine_scrape_error",
        "gauge",
        "1 if there was an error while getting machine metrics, 0 otherwise.",
        &[],
        0.0,
    );
    version(out, machine);
}

/// Versions.
fn version(out: &mut Page, machine: &Machine) {
    let version = [
        ("cadvisorRevision", ""),
        ("cadvisorVersion", ""),
        ("dockerVersion", ""),
        ("kernelVersion", machine.kernel.as_str()),
        ("osVersion", &machine.os_image),
    ];
    out.single(
        "cadvisor_version_info",
        "gauge",
        "A metric with a constant '1' value labeled by kernel version, OS version, docker version, cadvisor version & cadvisor revision.",
        &version,
        1.0,
    );
}

/// Writes the metrics of all cgroups.
fn containers(snapshot: &Snapshot, v2: bool, sandbox_image: &str) -> Page {
    let all = shown(snapshot, v2, sandbox_image);
    let mut out = Writer {
        page: Page::default(),
        at: snapshot.at.as_millisecond(),
    };
    let seen = snapshot.at.as_second() as f64;
    let name = (
        "container_last_seen",
        "gauge",
        "Last time a container was seen by the exporter",
    );
    out.family(name, &all, true, |_, sample| sample(&[], seen));
    for (families, dated) in [
        (&SPEC[..], false),
        (&CPU[..], true),
        (&MEMORY[..], true),
        (&PROCESSES[..], true),
    ] {
        for &(name, kind, help, get) in families {
            out.family((name, kind, help), &all, dated, |s, sample| {
                if let Some(value) = get(s) {
                    sample(&[], value);
                }
            });
        }
    }
    labelled(&mut out, &all);
    disks(&mut out, &all, &Disks::new(&snapshot.machine.disks));
    network(&mut out, &all);
    out.page.single(
        "container_scrape_error",
        "gauge",
        "1 if there was an error while getting container metrics, 0 otherwise",
        &[],
        0.0,
    );
    out.page
}

/// `GET /metrics/cadvisor`.
pub async fn cadvisor(server: &Arc<Server>) -> Result<Response<Body>, Refusal> {
    let snapshot = figures::snapshot(server, Depth::All)
        .await
        .map_err(broken)?;
    let image = match tokio::time::timeout(figures::RUNTIME_TIMEOUT, server.image_settings()).await
    {
        Ok(Ok((_, image))) => image.clone(),
        Ok(Err(error)) => {
            tracing::debug!(%error, "cannot read the sandbox image from the runtime");
            String::new()
        }
        Err(_) => String::new(),
    };
    let read = || async {
        let system = std::path::Path::new(topology::SYSTEM);
        let read = blocking(move || Ok(topology::read(system)));
        read.await.unwrap_or_default()
    };
    let layout = server.figures.topology.get_or_init(read).await;
    let (about, swap) = (&server.parts.machine, snapshot.machine.swap.0);
    let mut out = containers(&snapshot, about.cgroup_v2, &image);
    machine(&mut out, about, layout, swap);
    Ok(page(out))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
