//! Disk I/O of cgroups, and the counters of disks. Pure.

/// I/O of a cgroup on one disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Disk {
    /// Major and minor number.
    pub device: (u32, u32),
    /// Bytes by operation, in the spelling of cgroup v1 (`Read`, `Write`, …).
    pub bytes: Vec<(&'static str, u64)>,
    /// Number of requests by operation.
    pub requests: Vec<(&'static str, u64)>,
    /// Microseconds in the kernel's I/O cost model: usage, wait, indebt, indelay; `None` if the disk has no cost model.
    pub cost: Option<[u64; 4]>,
}

/// Operations in the files of cgroup v1.
const KINDS: [&str; 6] = ["Read", "Write", "Sync", "Async", "Discard", "Total"];

fn numbers(device: &str) -> Option<(u32, u32)> {
    let (major, minor) = device.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn of(disks: &mut Vec<Disk>, device: (u32, u32)) -> Option<&mut Disk> {
    if let Some(at) = disks.iter().position(|d| d.device == device) {
        return disks.get_mut(at);
    }
    disks.push(Disk {
        device,
        ..Disk::default()
    });
    disks.last_mut()
}

/// Parses a line of a cgroup v1 file.
fn sample(line: &str) -> Option<((u32, u32), (&'static str, u64))> {
    let mut fields = line.split_whitespace();
    let device = numbers(fields.next()?)?;
    let kind = fields.next()?;
    let kind = KINDS.iter().find(|known| **known == kind)?;
    Some((device, (*kind, fields.next()?.parse().ok()?)))
}

/// Files of cgroup v1 with bytes and requests, in the order of runc's `cgroups/fs/blkio.go`: BFQ, CFQ (until Linux
/// 5.0), throttling including child cgroups, throttling without them. If BFQ schedules a disk, the other files have no
/// counts.
pub const V1: [(&str, &str); 4] = [
    (
        "blkio.bfq.io_service_bytes_recursive",
        "blkio.bfq.io_serviced_recursive",
    ),
    (
        "blkio.io_service_bytes_recursive",
        "blkio.io_serviced_recursive",
    ),
    (
        "blkio.throttle.io_service_bytes_recursive",
        "blkio.throttle.io_serviced_recursive",
    ),
    (
        "blkio.throttle.io_service_bytes",
        "blkio.throttle.io_serviced",
    ),
];

/// The disks of the first pair of [`V1`] that has any; `text` returns the content of a file, empty if it does not
/// exist.
#[must_use]
pub fn v1<'a>(text: impl Fn(&str) -> &'a str) -> Vec<Disk> {
    let mut pairs = V1
        .iter()
        .map(|(bytes, requests)| v1_pair(text(bytes), text(requests)));
    pairs.find(|disks| !disks.is_empty()).unwrap_or_default()
}

/// Parses a pair of cgroup v1 files with lines such as `8:0 Read 4096`.
fn v1_pair(bytes: &str, requests: &str) -> Vec<Disk> {
    let mut disks = vec![];
    for (device, sample) in bytes.lines().filter_map(sample) {
        if let Some(disk) = of(&mut disks, device) {
            disk.bytes.push(sample);
        }
    }
    for (device, sample) in requests.lines().filter_map(sample) {
        if let Some(disk) = of(&mut disks, device) {
            disk.requests.push(sample);
        }
    }
    disks
}

/// Parses `io.stat` of cgroup v2: `8:0 rbytes=4096 wbytes=0 rios=1 wios=0 dbytes=0 dios=0`. A line without pairs is a
/// disk that the cgroup never used.
#[must_use]
pub fn v2(text: &str) -> Vec<Disk> {
    let disk = |line: &str| {
        let (device, pairs) = line.split_once(' ')?;
        let pair = |key: &str| {
            pairs
                .split_whitespace()
                .filter_map(|p| p.split_once('='))
                .find_map(|(k, v)| (k == key).then(|| v.parse::<u64>().ok())?)
        };
        let both = |read: &str, written: &str| {
            let found = [("Read", pair(read)), ("Write", pair(written))];
            let found = found.into_iter();
            found.filter_map(|(kind, v)| Some((kind, v?))).collect()
        };
        let cost = || {
            Some([
                pair("cost.usage")?,
                pair("cost.wait")?,
                pair("cost.indebt")?,
                pair("cost.indelay")?,
            ])
        };
        Some(Disk {
            device: numbers(device)?,
            bytes: both("rbytes", "wbytes"),
            requests: both("rios", "wios"),
            cost: cost(),
        })
    };
    text.lines().filter_map(disk).collect()
}

/// A line of `/proc/diskstats`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiskCounters {
    /// Major and minor number of the disk or partition.
    pub device: (u32, u32),
    /// Name below `/dev`.
    pub name: String,
    /// Reads: completed, merged, sectors, milliseconds.
    pub reads: [u64; 4],
    /// Writes: completed, merged, sectors, milliseconds.
    pub writes: [u64; 4],
    /// Requests in progress.
    pub in_flight: u64,
    /// Milliseconds with requests in progress, and the same weighted by their number.
    pub busy: (u64, u64),
}

/// Parses `/proc/diskstats` without loop devices, RAM disks and optical drives.
#[must_use]
pub fn counters(text: &str) -> Vec<DiskCounters> {
    let line = |line: &str| {
        let mut fields = line.split_whitespace();
        let device = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let name = fields.next()?.to_owned();
        let numbers: Vec<u64> = fields.filter_map(|f| f.parse().ok()).collect();
        let four = |at: usize| numbers.get(at..)?.get(..4)?.try_into().ok();
        Some(DiskCounters {
            device,
            name,
            reads: four(0)?,
            writes: four(4)?,
            in_flight: *numbers.get(8)?,
            busy: (*numbers.get(9)?, *numbers.get(10)?),
        })
    };
    let left_out = |name: &str| ["loop", "ram", "sr"].iter().any(|p| name.starts_with(p));
    text.lines()
        .filter_map(line)
        .filter(|d| !left_out(&d.name))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_v1_files_that_list_a_disk_are_used() {
        for (at, (bytes, _)) in V1.into_iter().enumerate() {
            // As the kernel writes it if another scheduler counts.
            let text =
                |file: &str| match V1.iter().position(|pair| pair.0 == file || pair.1 == file) {
                    Some(pair) if pair < at => "Total 0\n",
                    Some(pair) if pair == at => "8:0 Read 1\n",
                    _ => "8:16 Read 2\n",
                };
            let disks = v1(text);
            assert_eq!(disks.len(), 1, "{bytes}");
            assert_eq!(disks[0].device, (8, 0), "{bytes}");
            assert_eq!((disks[0].bytes.len(), disks[0].requests.len()), (1, 1));
        }
    }

    #[test]
    fn both_cgroup_versions_report_reads_and_writes() {
        // Recorded on Linux 6.1 (v2) and 6.18 (v1), shortened.
        let bytes = "8:0 Read 69632\n8:0 Write 4096\n8:0 Sync 73728\n8:0 Async 0\n8:0 Discard 0\n8:0 Total 73728\nTotal 73728\n";
        let requests = "8:0 Read 17\n8:0 Write 1\n8:16 Read 3\nTotal 21\n";
        let old = v1_pair(bytes, requests);
        assert_eq!(
            old.iter().map(|d| d.device).collect::<Vec<_>>(),
            [(8, 0), (8, 16)]
        );
        assert_eq!(old[0].bytes.len(), 6);
        assert_eq!(old[0].requests, [("Read", 17), ("Write", 1)]);
        assert_eq!((&old[1].bytes, old[1].cost), (&vec![], None));
        let new = v2(
            "7:7 \n8:0 rbytes=69632 wbytes=4096 rios=17 wios=1 dbytes=0 dios=0\n253:1 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0 cost.vrate=100.00 cost.usage=5 cost.wait=6 cost.indebt=7 cost.indelay=8\n",
        );
        assert_eq!(new[0], {
            let device = (7, 7);
            Disk {
                device,
                ..Disk::default()
            }
        });
        assert_eq!(new[1].bytes, [("Read", 69632), ("Write", 4096)]);
        assert_eq!(new[1].requests, old[0].requests);
        assert_eq!((new[2].device, new[2].cost), ((253, 1), Some([5, 6, 7, 8])));
        for odd in ["", "Total 0\n", "8:0\n", "8:x Read 1\n"] {
            assert_eq!((v1(|_| odd), v2(odd)), (vec![], vec![]), "{odd}");
        }
    }

    #[test]
    fn disk_counters_are_parsed() {
        let text = "   7       0 loop0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n 254       1 vda1 10 11 12 13 20 21 22 23 1 31 32 0 0 0 0 0 0\n 8 0 sda 1 2\n";
        assert_eq!(
            counters(text),
            [DiskCounters {
                device: (254, 1),
                name: "vda1".into(),
                reads: [10, 11, 12, 13],
                writes: [20, 21, 22, 23],
                in_flight: 1,
                busy: (31, 32),
            }]
        );
    }
}
