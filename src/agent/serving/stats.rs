//! `/stats/summary` (`pkg/kubelet/server/stats/summary.go`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use hyper::{Response, StatusCode};
use jiff::Timestamp;
use kube::ResourceExt as _;
use serde_json::{Map, Value, json};

use super::Refusal;
use super::Server;
use super::figures::{self, DiskFigures, PodFigures};
use super::views;
use crate::volume::figures::VolumeFigures;
use holdfast_core::pod;
use holdfast_core::serving::cgroup_stats::{Depth, Usage};
use holdfast_core::serving::machine_stats::Interface;
use holdfast_core::serving::pressure::{Pressure, StallTime};
use holdfast_core::time::seconds;
use holdfast_cri::{ImageFilesystem, Layer};
use holdfast_host::blocking;
use holdfast_https::Body;
use holdfast_sys::machine::Room;

fn time(at: Timestamp) -> Value {
    serde_json::to_value(seconds(at)).unwrap_or_default()
}

/// Pressure in the format of the summary. Totals are in microseconds, as the kernel reports them. The format specifies
/// nanoseconds, but the kubelet sends microseconds.
fn psi(pressure: Option<Pressure>) -> Option<Value> {
    let of = |w: StallTime| json!({"total": w.total, "avg10": w.averages[0], "avg60": w.averages[1], "avg300": w.averages[2]});
    pressure.map(|p| json!({"full": of(p.full), "some": of(p.some)}))
}

fn cpu(at: Timestamp, usage: &Usage, rate: Option<u64>) -> Value {
    let mut cpu = json!({"time": time(at), "usageCoreNanoSeconds": usage.cpu});
    if let Some(rate) = rate {
        cpu["usageNanoCores"] = rate.into();
    }
    if let Some(psi) = psi(usage.pressure.cpu) {
        cpu["psi"] = psi;
    }
    cpu
}

fn memory(at: Timestamp, usage: &Usage) -> Value {
    let mut memory = json!({"time": time(at), "usageBytes": usage.memory, "workingSetBytes": usage.working_set, "rssBytes": usage.rss,
        "pageFaults": usage.faults.0, "majorPageFaults": usage.faults.1});
    if let Some(limit) = usage.limit {
        memory["availableBytes"] = limit.saturating_sub(usage.working_set).into();
    }
    if let Some(psi) = psi(usage.pressure.memory) {
        memory["psi"] = psi;
    }
    memory
}

fn swap(at: Timestamp, usage: &Usage) -> Value {
    let mut swap = json!({"time": time(at), "swapUsageBytes": usage.swap});
    if let Some(limit) = usage.swap_limit {
        swap["swapAvailableBytes"] = limit.saturating_sub(usage.swap).into();
    }
    swap
}

/// Usage of a cgroup. Disk pressure is left out of a summary with CPU and memory only.
fn of_cgroup(at: Timestamp, usage: &Usage, rate: Option<u64>, whole: bool) -> Map<String, Value> {
    let mut of = Map::from_iter([
        ("cpu".to_owned(), cpu(at, usage, rate)),
        ("memory".to_owned(), memory(at, usage)),
        ("swap".to_owned(), swap(at, usage)),
    ]);
    if let Some(psi) = psi(usage.pressure.io).filter(|_| whole) {
        of.insert("io".to_owned(), json!({"time": time(at), "psi": psi}));
    }
    of
}

fn network(at: Timestamp, interfaces: &[Interface]) -> Option<Value> {
    let of = |i: &Interface| json!({"name": i.name, "rxBytes": i.received[0], "rxErrors": i.received[2], "txBytes": i.sent[0], "txErrors": i.sent[2]});
    let default = interfaces
        .iter()
        .find(|i| i.name == "eth0")
        .or(interfaces.first())?;
    let mut network = of(default);
    network["time"] = time(at);
    network["interfaces"] = interfaces.iter().map(of).collect();
    Some(network)
}

fn room(at: Timestamp, room: &Room, used: Option<u64>) -> Value {
    json!({"time": time(at), "availableBytes": room.available, "capacityBytes": room.capacity,
        "usedBytes": used.unwrap_or_else(|| room.capacity.saturating_sub(room.free)),
        "inodesFree": room.inodes_free, "inodes": room.inodes, "inodesUsed": room.inodes.saturating_sub(room.inodes_free)})
}

/// Usage of a filesystem by images or by a container: its own bytes and inodes, and the filesystem's capacity. The
/// capacity is left out if the runtime's mount point does not exist here.
fn part(at: Timestamp, of: Option<&Room>, bytes: u64, inodes: Option<u64>) -> Value {
    let mut value = match of {
        Some(of) => room(at, of, Some(bytes)),
        None => json!({"time": time(at), "usedBytes": bytes}),
    };
    match inodes {
        Some(inodes) => value["inodesUsed"] = inodes.into(),
        None => {
            _ = value
                .as_object_mut()
                .map(|value| value.remove("inodesUsed"))
        }
    }
    value
}

/// The capacity of the filesystems of pods and images.
struct Rooms<'a> {
    root: &'a Room,
    /// The filesystems that the runtime reports, by directory.
    of_runtime: BTreeMap<PathBuf, Room>,
}

impl Rooms<'_> {
    fn images(&self, at: Timestamp, images: &ImageFilesystem) -> Value {
        let room = self.of_runtime.get(&images.mountpoint);
        part(at, room, images.bytes, images.inodes)
    }

    /// A container's writable layer, which may be on another filesystem than the pod's directory.
    fn layer(&self, at: Timestamp, layer: &Layer) -> Value {
        let inodes = Some(layer.inodes).filter(|inodes| *inodes > 0);
        part(
            at,
            self.of_runtime.get(&layer.mountpoint),
            layer.bytes,
            inodes,
        )
    }
}

/// Reads the capacity of the filesystem of each directory.
async fn rooms(dirs: BTreeSet<PathBuf>) -> BTreeMap<PathBuf, Room> {
    let read = move || {
        let room = |dir: PathBuf| Some((dir.clone(), Room::of(&dir).ok()?));
        Ok(dirs.into_iter().filter_map(room).collect())
    };
    blocking(read).await.unwrap_or_default()
}

fn volume(at: Timestamp, root: &Room, namespace: &str, volume: &VolumeFigures) -> Value {
    let (used, all, free) = volume.bytes;
    let (inodes_used, inodes, inodes_free) = volume.inodes;
    // A directory without its own limit can use the node's filesystem.
    let (all, free, inodes, inodes_free) = if all == 0 {
        (root.capacity, root.available, root.inodes, root.inodes_free)
    } else {
        (all, free, inodes, inodes_free)
    };
    let mut value = json!({"time": time(at), "name": volume.name, "usedBytes": used, "capacityBytes": all, "availableBytes": free,
        "inodesUsed": inodes_used, "inodes": inodes, "inodesFree": inodes_free});
    if let Some(claim) = &volume.claim {
        value["pvcRef"] = json!({"name": claim, "namespace": namespace});
    }
    if let Some(abnormal) = volume.abnormal {
        value["volumeHealthStats"] = json!({"abnormal": abnormal});
    }
    value
}

fn of_pod(
    at: Timestamp,
    figures: &PodFigures,
    rooms: &Rooms<'_>,
    disk: Option<&DiskFigures>,
    whole: bool,
) -> Value {
    let (pod, root) = (&figures.pod, rooms.root);
    let namespace = pod.namespace().unwrap_or_default();
    let containers = figures.containers.iter().map(|c| {
        let mut value = Value::Object(of_cgroup(at, &c.usage, c.rate, whole));
        value["name"] = c.name.as_str().into();
        value["startTime"] = c.started.map(time).unwrap_or_default();
        if let (Some(disk), true) = (disk, whole) {
            let layer = disk.layers.get(&c.name).cloned().unwrap_or_default();
            value["rootfs"] = rooms.layer(at, &layer);
            value["logs"] = room(at, root, disk.logs.get(&c.name).copied());
        }
        value
    });
    let mut value = Value::Object(of_cgroup(at, &figures.usage, figures.rate, whole));
    value["podRef"] = json!({"name": pod.name_any(), "namespace": namespace, "uid": pod::uid(pod)});
    value["startTime"] = figures.started.map(time).unwrap_or_default();
    value["containers"] = containers.collect();
    if !whole {
        return value;
    }
    let processes = figures.containers.iter().map(|c| c.usage.processes);
    value["process_stats"] = json!({"process_count": processes.sum::<u64>()});
    if let Some(network) = network(at, &figures.sandbox.processes.interfaces) {
        value["network"] = network;
    }
    if let Some(disk) = disk {
        value["volume"] = disk
            .volumes
            .iter()
            .map(|v| volume(at, root, &namespace, v))
            .collect();
        value["ephemeral-storage"] = room(at, root, Some(disk.ephemeral));
    }
    value
}

/// `GET /stats/summary`.
pub async fn summary(server: &Arc<Server>, query: &str) -> Result<Response<Body>, Refusal> {
    let whole = !holdfast_core::serving::query::pairs(query)
        .iter()
        .any(|(key, value)| {
            key == "only_cpu_and_memory" && holdfast_core::serving::query::is_true(value)
        });
    let snapshot = figures::snapshot(server, Depth::Summary)
        .await
        .map_err(|e| Refusal(StatusCode::INTERNAL_SERVER_ERROR, e.message))?;
    let disks = if whole {
        figures::disks(server, &snapshot.pods).await
    } else {
        Default::default()
    };
    let (at, machine, root) = (snapshot.at, &snapshot.machine, &snapshot.root);
    let booted = i64::try_from(machine.booted).unwrap_or(0);
    let booted = Timestamp::from_second(booted).unwrap_or(server.parts.started);
    let systems = snapshot.systems.iter().filter(|s| !s.name.is_empty());
    let systems = systems.map(|s| {
        let mut value = Value::Object(of_cgroup(at, &s.usage, s.rate, whole));
        value["name"] = s.name.into();
        value["startTime"] = time(s.started.unwrap_or(booted));
        value
    });
    let mut node = of_cgroup(at, &machine.usage, snapshot.rate, whole);
    node.extend([
        (
            "nodeName".to_owned(),
            server.parts.config.node_name.clone().into(),
        ),
        ("systemContainers".to_owned(), systems.collect()),
        ("startTime".to_owned(), time(booted)),
    ]);
    node["memory"]["availableBytes"] = machine.available.into();
    let mut rooms = Rooms {
        root,
        of_runtime: BTreeMap::new(),
    };
    if whole {
        node.insert("fs".into(), room(at, root, None));
        node.insert("rlimit".into(), json!({"time": time(at), "maxpid": machine.processes.0, "curproc": machine.processes.1}));
        node.extend(network(at, &machine.interfaces).map(|n| ("network".to_owned(), n)));
        let images = server.image_filesystem().await;
        let layers = disks.values().flat_map(|disk| disk.layers.values());
        let dirs = layers.map(|layer| &layer.mountpoint);
        let dirs = dirs.chain([&images.mountpoint]).cloned();
        rooms.of_runtime = self::rooms(dirs.collect()).await;
        let images = rooms.images(at, &images);
        node.insert(
            "runtime".into(),
            json!({"imageFs": images, "containerFs": images}),
        );
    }
    let pods: Vec<Value> = snapshot
        .pods
        .iter()
        .map(|p| of_pod(at, p, &rooms, disks.get(pod::uid(&p.pod)), whole))
        .collect();
    Ok(views::as_json(&json!({"node": node, "pods": pods})))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_images_have_the_capacity_of_their_filesystem() {
        let (own, images) = (
            Room {
                capacity: 100,
                available: 60,
                free: 70,
                inodes: 10,
                inodes_free: 4,
            },
            Room {
                capacity: 5000,
                available: 3000,
                free: 3500,
                inodes: 500,
                inodes_free: 300,
            },
        );
        let rooms = Rooms {
            root: &own,
            of_runtime: BTreeMap::from([("/images".into(), images)]),
        };
        let at = Timestamp::UNIX_EPOCH;
        let layer = |mountpoint: &str, inodes| Layer {
            bytes: 7,
            inodes,
            mountpoint: mountpoint.into(),
        };
        let here = json!({"time": time(at), "usedBytes": 7, "inodesUsed": 3,
            "availableBytes": 3000, "capacityBytes": 5000, "inodes": 500, "inodesFree": 300});
        assert_eq!(rooms.layer(at, &layer("/images", 3)), here);
        let uncounted = rooms.layer(at, &layer("/images", 0));
        assert_eq!(uncounted.get("inodesUsed"), None, "{uncounted}");
        // If the runtime reports no filesystem, the capacity of another one must not be used.
        let nowhere = json!({"time": time(at), "usedBytes": 7});
        assert_eq!(rooms.layer(at, &layer("", 0)), nowhere);
        let of = ImageFilesystem {
            mountpoint: "/images".into(),
            bytes: 40,
            inodes: Some(9),
        };
        let shown = rooms.images(at, &of);
        assert_eq!(
            (&shown["usedBytes"], &shown["inodesUsed"]),
            (&json!(40), &json!(9))
        );
        assert_eq!(shown["capacityBytes"], 5000);
    }

    #[test]
    fn a_directory_has_the_capacity_and_the_inodes_of_its_filesystem() {
        let root = Room {
            capacity: 100,
            available: 60,
            free: 70,
            inodes: 10,
            inodes_free: 4,
        };
        let at = Timestamp::UNIX_EPOCH;
        for (bytes, inodes, expected) in [
            ((7, 0, 0), (3, 0, 0), [7, 100, 60, 3, 10, 4]),
            // A driver need not report inodes.
            ((7, 50, 43), (0, 0, 0), [7, 50, 43, 0, 0, 0]),
            ((7, 50, 43), (3, 9, 6), [7, 50, 43, 3, 9, 6]),
        ] {
            let figures = VolumeFigures {
                name: "v".into(),
                namespace: "n".into(),
                claim: None,
                bytes,
                inodes,
                abnormal: None,
            };
            let shown = volume(at, &root, "n", &figures);
            let keys = "usedBytes capacityBytes availableBytes inodesUsed inodes inodesFree";
            let shown: Vec<_> = keys.split(' ').map(|key| shown[key].as_u64()).collect();
            assert_eq!(shown, expected.map(Some));
        }
    }
}
