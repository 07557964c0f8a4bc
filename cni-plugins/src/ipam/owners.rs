//! An index of reservations by owner, which saves reading every reservation. Each owner has a
//! small file, next to the directories that the reference host-local reads. The file records
//! the boot and the network namespace of the owner, which show whether the owner still exists.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::cni::digest;

/// The size limit of a record in bytes; longer files are not records.
const LIMIT: u64 = 64 << 10;

/// The machine, its boot and the time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineState {
    /// The kernel's boot id.
    pub boot: String,
    /// The machine's id, empty if it has none.
    pub machine: String,
    /// Time since boot, including suspends. Unlike the wall clock it cannot be set.
    pub uptime: Duration,
}

impl MachineState {
    /// The current values of this machine.
    #[must_use]
    pub fn now() -> MachineState {
        let read = |path: &str| {
            std::fs::read_to_string(path)
                .map(|t| t.trim().to_owned())
                .unwrap_or_default()
        };
        MachineState {
            boot: read("/proc/sys/kernel/random/boot_id"),
            machine: read("/etc/machine-id"),
            uptime: uptime(&read("/proc/uptime")),
        }
    }
}

/// The whole seconds of `/proc/uptime` (proc(5)).
fn uptime(text: &str) -> Duration {
    let seconds = text.split('.').next().and_then(|s| s.parse().ok());
    Duration::from_secs(seconds.unwrap_or_default())
}

/// The identity of a network namespace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Namespace {
    /// The device number of nsfs; 0 in records of older versions.
    pub device: u64,
    /// The inode number; 0 for none. The kernel reuses the number of a removed namespace.
    pub inode: u64,
    /// When the inode was created, in nanoseconds. With the inode number it is unique within a boot. 0
    /// if the path does not pin the namespace, because the kernel then creates a new inode each time.
    pub born: i64,
}

impl Namespace {
    /// The namespace at a path.
    #[must_use]
    pub fn at(path: &Path) -> Namespace {
        let Ok(found) = std::fs::metadata(path) else {
            return Namespace::default();
        };
        // /proc/<pid>/ns/net is a symlink; a bind mount over a file is not.
        let is_pinned = std::fs::symlink_metadata(path).is_ok_and(|m| !m.is_symlink());
        let born = found.ctime().saturating_mul(1_000_000_000);
        Namespace {
            device: found.dev(),
            inode: found.ino(),
            born: match is_pinned {
                true => born.saturating_add(found.ctime_nsec()),
                false => 0,
            },
        }
    }

    /// Serialises for a record.
    #[must_use]
    pub fn json(self) -> Value {
        json!({"device": self.device, "inode": self.inode, "born": self.born})
    }

    /// Parses from a record. Older versions wrote only the inode number, as `number`.
    #[must_use]
    pub fn parse(value: &Value, number: &Value) -> Option<Namespace> {
        Some(Namespace {
            device: value["device"].as_u64().unwrap_or_default(),
            inode: value["inode"].as_u64().or(number.as_u64())?,
            born: value["born"].as_i64().unwrap_or_default(),
        })
    }

    /// Whether both can be the same namespace. Records of older versions lack the creation time.
    #[must_use]
    pub fn may_equal(self, other: Namespace) -> bool {
        self.has_number_of(other) && (self.born == other.born || self.born == 0 || other.born == 0)
    }

    /// Whether both have the same inode number, which the kernel may have reused.
    fn has_number_of(self, other: Namespace) -> bool {
        let same_device = self.device == other.device || self.device == 0 || other.device == 0;
        self.inode == other.inode && same_device
    }
}

/// The identity of a process, unique within a boot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Process {
    /// The process id; 0 for none.
    pub pid: u32,
    /// The start time in clock ticks since boot.
    pub started: u64,
}

impl Process {
    /// The identity of this process.
    #[must_use]
    pub fn own() -> Process {
        let pid = std::process::id();
        Process {
            pid,
            started: started("self").unwrap_or_default(),
        }
    }

    fn is_running(self) -> bool {
        self.pid != 0 && started(&self.pid.to_string()) == Some(self.started)
    }
}

/// The start time of a process: field 22 of `/proc/<pid>/stat`, counted
/// from the end of the name, which may contain any character (proc(5)).
fn started(pid: &str) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(19)?.parse().ok()
}

/// The record of an attachment and its addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Record {
    /// The container's id.
    pub container: String,
    /// Its interface; empty for old reservations, which do not contain it.
    pub ifname: String,
    /// The path of its network namespace; empty if unknown.
    pub netns: String,
    /// The identity of the namespace.
    pub namespace: Namespace,
    /// The uid of the Kubernetes pod; empty if `CNI_ARGS` contained none, so the container is not a CRI sandbox.
    pub pod: String,
    /// The plugin process that runs or ran the ADD. If the process is killed, the field stays set.
    pub add_process: Process,
    /// The machine and time of the ADD.
    pub origin: MachineState,
    /// The reserved addresses.
    pub addresses: BTreeSet<IpAddr>,
}

/// Whether an owner can still use its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnerState {
    /// Its network namespace exists.
    Exists,
    /// The owner no longer exists; with the reason.
    Removed(&'static str),
    /// The record does not allow a decision.
    Unknown,
}

/// The path of a network namespace with this inode number, through a process in it.
#[must_use]
pub fn namespace_through_process(number: u64) -> Option<PathBuf> {
    let pids = std::fs::read_dir("/proc").ok()?.flatten();
    let mut namespaces = pids.map(|entry| entry.path().join("ns/net"));
    namespaces.find(|path| std::fs::metadata(path).is_ok_and(|m| m.ino() == number))
}

/// The inode numbers of all network namespaces that contain a process.
#[must_use]
pub fn namespaces_with_processes() -> BTreeSet<u64> {
    let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter(|e| {
        e.file_name()
            .as_encoded_bytes()
            .first()
            .is_some_and(u8::is_ascii_digit)
    })
    .filter_map(|e| std::fs::metadata(e.path().join("ns/net")).ok())
    .map(|m| m.ino())
    .collect()
}

impl Record {
    /// A record for an ADD that has just started.
    #[must_use]
    pub fn new(container: &str, ifname: &str, netns: &str, origin: &MachineState) -> Record {
        let addresses = BTreeSet::new();
        Record {
            container: container.into(),
            ifname: ifname.into(),
            netns: netns.into(),
            namespace: Namespace::at(Path::new(netns)),
            pod: String::new(),
            add_process: Process::default(),
            origin: origin.clone(),
            addresses,
        }
    }

    /// Whether the owner still exists. A process may remain in a
    /// namespace whose path was removed; `has_process` checks for one.
    #[must_use]
    pub fn owner_state(
        &self,
        now: &MachineState,
        has_process: impl FnOnce(u64) -> bool,
    ) -> OwnerState {
        if self.origin.boot.is_empty() || self.origin.machine != now.machine {
            return OwnerState::Unknown;
        }
        if self.origin.boot != now.boot {
            return OwnerState::Removed("the machine has rebooted since");
        }
        let (path, own) = (Path::new(&self.netns), self.namespace);
        if self.netns.is_empty() || own.inode == 0 {
            return OwnerState::Unknown;
        }
        if Namespace::at(path).may_equal(own) {
            return OwnerState::Exists;
        }
        match has_process(own.inode) && !self.is_number_reused() {
            true => OwnerState::Exists,
            false => OwnerState::Removed("its network namespace no longer exists"),
        }
    }

    /// The path of its namespace: the recorded path if it leads
    /// to that namespace, else the path through a process in it.
    #[must_use]
    pub fn namespace_path(&self) -> Option<PathBuf> {
        let pinned = PathBuf::from(&self.netns);
        if Namespace::at(&pinned).may_equal(self.namespace) {
            return Some(pinned);
        }
        namespace_through_process(self.namespace.inode)
    }

    /// Whether the kernel has reused the inode number for a namespace that is pinned in the same directory.
    fn is_number_reused(&self) -> bool {
        let Some(dir) = Path::new(&self.netns).parent() else {
            return false;
        };
        let pinned = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut pinned = pinned.map(|entry| Namespace::at(&entry.path()));
        pinned.any(|other| other.has_number_of(self.namespace) && !other.may_equal(self.namespace))
    }

    /// Whether the ADD that reserved the addresses may still run: its plugin process is running, or `min_age` has not
    /// passed yet. An ADD of an earlier boot does not run, nor does one of unknown age whose plugin is not recorded.
    #[must_use]
    pub fn is_starting(&self, now: &MachineState, min_age: Duration) -> bool {
        let same_boot = !self.origin.boot.is_empty()
            && self.origin.boot == now.boot
            && self.origin.machine == now.machine;
        let age = now.uptime.saturating_sub(self.origin.uptime);
        same_boot && (self.add_process.is_running() || age < min_age)
    }

    fn name(container: &str, ifname: &str) -> String {
        digest(&format!("{container}\r\n{ifname}"), 32)
    }

    fn parse(text: &str) -> Option<Record> {
        let value: Value = serde_json::from_str(text).ok()?;
        let text = |key: &str| value[key].as_str().map(str::to_owned);
        let number = |key: &str| u32::try_from(value[key].as_u64()?).ok();
        let addresses = value["addresses"]
            .as_array()?
            .iter()
            .filter_map(|a| a.as_str()?.parse().ok())
            .collect();
        Some(Record {
            container: text("container")?,
            ifname: text("ifname")?,
            netns: text("netns")?,
            namespace: Namespace::parse(&value["namespace"], &value["inode"])?,
            pod: text("pod").unwrap_or_default(),
            add_process: Process {
                pid: number("adder").unwrap_or_default(),
                started: value["adderStarted"].as_u64().unwrap_or_default(),
            },
            origin: MachineState {
                boot: text("boot")?,
                machine: text("machine")?,
                uptime: Duration::from_secs(value["uptime"].as_u64().unwrap_or_default()),
            },
            addresses,
        })
    }

    fn text(&self) -> String {
        json!({"container": self.container, "ifname": self.ifname, "netns": self.netns, "inode": self.namespace.inode,
            "namespace": self.namespace.json(), "boot": self.origin.boot, "machine": self.origin.machine, "uptime": self.origin.uptime.as_secs(),
            "pod": self.pod, "adder": self.add_process.pid, "adderStarted": self.add_process.started, "addresses": self.addresses})
        .to_string()
    }
}

/// The owners of one network's addresses. The caller must hold the network's lock.
#[derive(Debug)]
pub struct Owners {
    dir: PathBuf,
}

/// The file with the stamp of the reservation directory for which the index is complete.
const STAMP_FILE: &str = "seen";

impl Owners {
    /// Opens the index of `network` below the common data directory. Network
    /// names cannot begin with a dot, so `.owners` conflicts with none.
    pub fn open(data_dir: &Path, network: &str) -> io::Result<Owners> {
        let dir = data_dir.join(".owners").join(network);
        DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        Ok(Owners { dir })
    }

    fn read(path: &Path) -> Option<String> {
        let mut text = String::new();
        File::open(path)
            .ok()?
            .take(LIMIT)
            .read_to_string(&mut text)
            .ok()?;
        Some(text)
    }

    /// Writes a file atomically.
    fn write(&self, name: &str, text: &str) -> io::Result<()> {
        let temporary = self.dir.join(format!("{name}.new"));
        let mut file = File::options()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(text.as_bytes())?;
        std::fs::rename(temporary, self.dir.join(name))
    }

    /// Whether the index is complete for this stamp of the reservation directory.
    #[must_use]
    pub fn is_complete_for(&self, stamp: &str) -> bool {
        Self::read(&self.dir.join(STAMP_FILE)).is_some_and(|seen| seen == stamp)
    }

    /// Records that the index is complete for this stamp.
    pub fn mark_complete(&self, stamp: &str) -> io::Result<()> {
        std::fs::write(self.dir.join(STAMP_FILE), stamp)
    }

    /// The record of an owner, if it has one.
    #[must_use]
    pub fn get(&self, container: &str, ifname: &str) -> Option<Record> {
        Self::read(&self.dir.join(Record::name(container, ifname))).and_then(|t| Record::parse(&t))
    }

    /// Stores a record. A record without addresses belongs to an ADD that has reserved none yet.
    pub fn put(&self, record: &Record) -> io::Result<()> {
        self.write(
            &Record::name(&record.container, &record.ifname),
            &record.text(),
        )
    }

    /// Removes the record of an owner.
    pub fn remove(&self, record: &Record) -> io::Result<()> {
        match std::fs::remove_file(
            self.dir
                .join(Record::name(&record.container, &record.ifname)),
        ) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// All valid records.
    pub fn all(&self) -> io::Result<Vec<Record>> {
        let paths = std::fs::read_dir(&self.dir)?
            .map(|entry| entry.map(|e| e.path()))
            .collect::<io::Result<Vec<_>>>()?;
        Ok(paths
            .iter()
            .filter_map(|path| Self::read(path).and_then(|t| Record::parse(&t)))
            .collect())
    }

    /// Removes partial files of a killed process. The lock guarantees that no other process is writing.
    pub fn remove_partial_files(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path.file_name().is_some_and(|n| n != STAMP_FILE)
                && Self::read(&path).and_then(|t| Record::parse(&t)).is_none()
            {
                std::fs::remove_file(&path)?;
            }
        }
        Ok(())
    }

    /// The temporary path of a reservation, from which it is linked into place.
    #[must_use]
    pub fn scratch(&self) -> PathBuf {
        self.dir.join("reservation.new")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_of_another_boot_or_a_deleted_namespace_are_dead() {
        let now = MachineState {
            boot: "b2".into(),
            machine: "m".into(),
            uptime: Duration::from_secs(1000),
        };
        let has_processes = |n: u64| namespaces_with_processes().contains(&n);
        let own = "/proc/self/ns/net";
        let record = Record::new("c", "eth0", own, &now);
        assert_eq!(record.owner_state(&now, has_processes), OwnerState::Exists);
        let before = MachineState {
            boot: "b1".into(),
            ..now.clone()
        };
        assert!(matches!(
            Record::new("c", "eth0", own, &before).owner_state(&now, has_processes),
            OwnerState::Removed(_)
        ));
        let elsewhere = MachineState {
            machine: "other".into(),
            ..before.clone()
        };
        assert_eq!(
            Record::new("c", "eth0", own, &elsewhere).owner_state(&now, has_processes),
            OwnerState::Unknown,
            "a shared directory"
        );
        assert_eq!(
            Record {
                netns: "/nonexistent".into(),
                ..record.clone()
            }
            .owner_state(&now, has_processes),
            OwnerState::Exists,
            "the namespace still has processes"
        );
        assert!(matches!(
            Record {
                netns: "/nonexistent".into(),
                namespace: Namespace {
                    inode: 7,
                    ..Namespace::default()
                },
                ..record.clone()
            }
            .owner_state(&now, has_processes),
            OwnerState::Removed(_)
        ));
        assert_eq!(
            Record {
                origin: MachineState::default(),
                ..record.clone()
            }
            .owner_state(&now, has_processes),
            OwnerState::Unknown
        );
        assert_eq!(Record::parse(&record.text()), Some(record));
        assert_eq!(Record::parse("c\r\neth0"), None);
    }

    #[test]
    fn a_reused_namespace_number_does_not_keep_an_owner_alive() {
        let dir = tempfile::tempdir().expect("a directory");
        let now = MachineState::now();
        let (own, other) = (dir.path().join("cni-1"), dir.path().join("cni-2"));
        std::fs::write(&own, "").expect("written");
        let record = Record::new("c", "eth0", own.to_str().expect("text"), &now);
        assert!(
            record.namespace.born != 0 && Namespace::at(Path::new("/proc/self/ns/net")).born == 0
        );
        assert_eq!(record.owner_state(&now, |_| false), OwnerState::Exists);
        // The kernel has reused the number for a namespace that is pinned under another name.
        let later = Namespace {
            born: record.namespace.born - 1,
            ..record.namespace
        };
        std::fs::rename(&own, &other).expect("renamed");
        let reused = Record {
            namespace: later,
            ..record.clone()
        };
        assert!(matches!(
            reused.owner_state(&now, |_| true),
            OwnerState::Removed(_)
        ));
        // The same, with the same name.
        std::fs::rename(&other, &own).expect("renamed");
        assert!(matches!(
            reused.owner_state(&now, |_| true),
            OwnerState::Removed(_)
        ));
        let old = Record {
            namespace: Namespace {
                born: 0,
                ..record.namespace
            },
            ..record
        };
        assert_eq!(
            old.owner_state(&now, |_| false),
            OwnerState::Exists,
            "an older version's record"
        );
    }

    #[test]
    fn an_owner_may_be_starting_if_it_is_young_or_its_plugin_runs() {
        let min_age = Duration::from_secs(300);
        let at = |boot: &str, seconds: u64| MachineState {
            boot: boot.into(),
            machine: "m".into(),
            uptime: Duration::from_secs(seconds),
        };
        let record = |origin: MachineState, add_process: Process| Record {
            origin,
            add_process,
            ..Record::default()
        };
        let (none, own) = (Process::default(), Process::own());
        let another = Process {
            started: own.started + 1,
            ..own
        };
        for (case, record, expected) in [
            ("young", record(at("b", 701), none), true),
            ("old", record(at("b", 700), none), false),
            ("old and running", record(at("b", 0), own), true),
            (
                "another process reuses its pid",
                record(at("b", 0), another),
                false,
            ),
            ("of another boot", record(at("a", 999), own), false),
            (
                "of unknown origin",
                record(MachineState::default(), none),
                false,
            ),
        ] {
            assert_eq!(
                record.is_starting(&at("b", 1000), min_age),
                expected,
                "{case}"
            );
            assert_eq!(Record::parse(&record.text()), Some(record), "{case}");
        }
        assert_eq!(uptime("350735.47 234388.90"), Duration::from_secs(350_735));
        assert_eq!(uptime("nan 1"), Duration::ZERO);
    }
}
