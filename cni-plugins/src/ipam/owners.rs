//! Who has which addresses, found without reading every reservation: one small file an owner, beside the directories that
//! the reference reads. With it stands of which boot and network namespace the owner is, which tells the dead from the living.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::cni::digest;

/// Longer files are nobody's.
const LIMIT: u64 = 64 << 10;

/// Where and when this is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Here {
    /// The kernel's boot id.
    pub boot: String,
    /// The machine's id, empty if it has none.
    pub machine: String,
    /// The time since the boot, suspends included: another time of day does not move it.
    pub uptime: Duration,
}

impl Here {
    /// Of this machine, now.
    #[must_use]
    pub fn now() -> Here {
        let read = |path: &str| {
            std::fs::read_to_string(path)
                .map(|t| t.trim().to_owned())
                .unwrap_or_default()
        };
        Here {
            boot: read("/proc/sys/kernel/random/boot_id"),
            machine: read("/etc/machine-id"),
            uptime: uptime(&read("/proc/uptime")),
        }
    }
}

/// Whole seconds of `/proc/uptime` (proc(5)).
fn uptime(text: &str) -> Duration {
    let seconds = text.split('.').next().and_then(|s| s.parse().ok());
    Duration::from_secs(seconds.unwrap_or_default())
}

/// A network namespace behind a path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Namespace {
    /// The number of the filesystem of namespaces; 0 in records of older versions.
    pub device: u64,
    /// Its number; 0 for none. The kernel gives the number of a removed namespace to a later one.
    pub inode: u64,
    /// When its file appeared, in nanoseconds: with the number, no two namespaces of a boot have the same. 0 if the path does not
    /// pin the namespace: then the kernel makes a new file each time.
    pub born: i64,
}

impl Namespace {
    /// The namespace at a path.
    #[must_use]
    pub fn at(path: &Path) -> Namespace {
        let Ok(found) = std::fs::metadata(path) else {
            return Namespace::default();
        };
        // /proc/<pid>/ns/net is a link; a mount over a file is not.
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

    /// For a record.
    #[must_use]
    pub fn json(self) -> Value {
        json!({"device": self.device, "inode": self.inode, "born": self.born})
    }

    /// From a record. Older versions wrote `number` alone.
    #[must_use]
    pub fn parse(value: &Value, number: &Value) -> Option<Namespace> {
        Some(Namespace {
            device: value["device"].as_u64().unwrap_or_default(),
            inode: value["inode"].as_u64().or(number.as_u64())?,
            born: value["born"].as_i64().unwrap_or_default(),
        })
    }

    /// Whether both may be the same. Records of older versions do not say when their namespace appeared.
    #[must_use]
    pub fn may_be(self, other: Namespace) -> bool {
        self.has_number_of(other) && (self.born == other.born || self.born == 0 || other.born == 0)
    }

    /// Whether the kernel has given both the same number, at the same time or one after the other.
    fn has_number_of(self, other: Namespace) -> bool {
        let same_device = self.device == other.device || self.device == 0 || other.device == 0;
        self.inode == other.inode && same_device
    }
}

/// A process, which no other is as long as the machine runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Process {
    /// Its id; 0 for none.
    pub pid: u32,
    /// When it started, in ticks since the boot.
    pub started: u64,
}

impl Process {
    /// This one.
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

/// When a process started: field 22 of its `stat`, counted behind the name, which may contain anything (proc(5)).
fn started(pid: &str) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(19)?.parse().ok()
}

/// An attachment that has addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Record {
    /// The container.
    pub container: String,
    /// Its interface; empty if the reservation is so old that it does not say.
    pub ifname: String,
    /// The path of its network namespace, empty if nobody has told.
    pub netns: String,
    /// Which namespace that was.
    pub namespace: Namespace,
    /// The uid of the Kubernetes pod, empty if the runtime named none in `CNI_ARGS`: the container is not a sandbox of CRI.
    pub pod: String,
    /// The plugin that is making the attachment, or was. If it was killed, the mark stays.
    pub adder: Process,
    /// Where and when it was made.
    pub here: Here,
    /// What it has.
    pub addresses: BTreeSet<IpAddr>,
}

/// Whether an owner can still use what it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// Its network namespace is there.
    Alive,
    /// It cannot; why.
    Gone(&'static str),
    /// Nothing is known that tells.
    Unknown,
}

/// A process in the network namespace of a number: the path of the namespace there.
#[must_use]
pub fn inhabitant(number: u64) -> Option<PathBuf> {
    let pids = std::fs::read_dir("/proc").ok()?.flatten();
    let mut namespaces = pids.map(|entry| entry.path().join("ns/net"));
    namespaces.find(|path| std::fs::metadata(path).is_ok_and(|m| m.ino() == number))
}

/// The network namespaces that some process is in.
#[must_use]
pub fn inhabited() -> BTreeSet<u64> {
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
    /// Of an attachment that is being made.
    #[must_use]
    pub fn new(container: &str, ifname: &str, netns: &str, here: &Here) -> Record {
        let addresses = BTreeSet::new();
        Record {
            container: container.into(),
            ifname: ifname.into(),
            netns: netns.into(),
            namespace: Namespace::at(Path::new(netns)),
            pod: String::new(),
            adder: Process::default(),
            here: here.clone(),
            addresses,
        }
    }

    /// Whether it is still alive. A process may live on in a namespace that has lost its name: `is_inhabited` says so.
    #[must_use]
    pub fn life(&self, now: &Here, is_inhabited: impl FnOnce(u64) -> bool) -> Life {
        if self.here.boot.is_empty() || self.here.machine != now.machine {
            return Life::Unknown;
        }
        if self.here.boot != now.boot {
            return Life::Gone("the machine has been rebooted since");
        }
        let (path, own) = (Path::new(&self.netns), self.namespace);
        if self.netns.is_empty() || own.inode == 0 {
            return Life::Unknown;
        }
        if Namespace::at(path).may_be(own) {
            return Life::Alive;
        }
        match is_inhabited(own.inode) && !self.is_number_reused() {
            true => Life::Alive,
            false => Life::Gone("its network namespace is gone"),
        }
    }

    /// The path of its namespace, where one of the number is: where it was pinned, else that of a process in it.
    #[must_use]
    pub fn namespace_path(&self) -> Option<PathBuf> {
        let pinned = PathBuf::from(&self.netns);
        if Namespace::at(&pinned).may_be(self.namespace) {
            return Some(pinned);
        }
        inhabitant(self.namespace.inode)
    }

    /// Whether another namespace has the number by now: one that is pinned next to where this one was.
    fn is_number_reused(&self) -> bool {
        let Some(dir) = Path::new(&self.netns).parent() else {
            return false;
        };
        let pinned = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut pinned = pinned.map(|entry| Namespace::at(&entry.path()));
        pinned.any(|other| other.has_number_of(self.namespace) && !other.may_be(self.namespace))
    }

    /// Whether the ADD that reserved the addresses may still run: its plugin does, or the runtime has not had `patience` for the
    /// rest of the sandbox. An ADD of an earlier boot does not run, nor one of unknown age that left no mark.
    #[must_use]
    pub fn is_starting(&self, now: &Here, patience: Duration) -> bool {
        let same_boot = !self.here.boot.is_empty()
            && self.here.boot == now.boot
            && self.here.machine == now.machine;
        let age = now.uptime.saturating_sub(self.here.uptime);
        same_boot && (self.adder.is_running() || age < patience)
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
            adder: Process {
                pid: number("adder").unwrap_or_default(),
                started: value["adderStarted"].as_u64().unwrap_or_default(),
            },
            here: Here {
                boot: text("boot")?,
                machine: text("machine")?,
                uptime: Duration::from_secs(value["uptime"].as_u64().unwrap_or_default()),
            },
            addresses,
        })
    }

    fn text(&self) -> String {
        json!({"container": self.container, "ifname": self.ifname, "netns": self.netns, "inode": self.namespace.inode,
            "namespace": self.namespace.json(), "boot": self.here.boot, "machine": self.here.machine, "uptime": self.here.uptime.as_secs(),
            "pod": self.pod, "adder": self.adder.pid, "adderStarted": self.adder.started, "addresses": self.addresses})
        .to_string()
    }
}

/// The owners of one network's addresses. Whoever holds the network's lock may use it.
#[derive(Debug)]
pub struct Owners {
    dir: PathBuf,
}

/// The file that says up to which change of the reservations this is complete.
const SEEN: &str = "seen";

impl Owners {
    /// Of `network`, below the directory of all networks; its name is one that no network can have.
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

    /// A new file appears whole or not at all.
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

    /// Whether nothing but this has changed the reservations since it was last complete: a stamp of their directory.
    #[must_use]
    pub fn has_seen(&self, stamp: &str) -> bool {
        Self::read(&self.dir.join(SEEN)).is_some_and(|seen| seen == stamp)
    }

    /// It is complete.
    pub fn set_seen(&self, stamp: &str) -> io::Result<()> {
        std::fs::write(self.dir.join(SEEN), stamp)
    }

    /// The owner, if it has anything.
    #[must_use]
    pub fn get(&self, container: &str, ifname: &str) -> Option<Record> {
        Self::read(&self.dir.join(Record::name(container, ifname))).and_then(|t| Record::parse(&t))
    }

    /// Writes an owner down; one without addresses has begun to get some.
    pub fn put(&self, record: &Record) -> io::Result<()> {
        self.write(
            &Record::name(&record.container, &record.ifname),
            &record.text(),
        )
    }

    /// Forgets an owner.
    pub fn remove(&self, record: &Record) -> io::Result<()> {
        match std::fs::remove_file(
            self.dir
                .join(Record::name(&record.container, &record.ifname)),
        ) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// All owners.
    pub fn all(&self) -> io::Result<Vec<Record>> {
        let paths = std::fs::read_dir(&self.dir)?
            .map(|entry| entry.map(|e| e.path()))
            .collect::<io::Result<Vec<_>>>()?;
        Ok(paths
            .iter()
            .filter_map(|path| Self::read(path).and_then(|t| Record::parse(&t)))
            .collect())
    }

    /// Removes what somebody who was killed has left half written. Nobody else may be writing.
    pub fn tidy(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path.file_name().is_some_and(|n| n != SEEN)
                && Self::read(&path).and_then(|t| Record::parse(&t)).is_none()
            {
                std::fs::remove_file(&path)?;
            }
        }
        Ok(())
    }

    /// Where a reservation is written before it is linked to its place.
    #[must_use]
    pub fn scratch(&self) -> PathBuf {
        self.dir.join("reservation.new")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dead_are_told_from_the_living() {
        let now = Here {
            boot: "b2".into(),
            machine: "m".into(),
            uptime: Duration::from_secs(1000),
        };
        let own = "/proc/self/ns/net";
        let record = Record::new("c", "eth0", own, &now);
        assert_eq!(record.life(&now, |n| inhabited().contains(&n)), Life::Alive);
        let before = Here {
            boot: "b1".into(),
            ..now.clone()
        };
        assert!(matches!(
            Record::new("c", "eth0", own, &before).life(&now, |n| inhabited().contains(&n)),
            Life::Gone(_)
        ));
        let elsewhere = Here {
            machine: "other".into(),
            ..before.clone()
        };
        assert_eq!(
            Record::new("c", "eth0", own, &elsewhere).life(&now, |n| inhabited().contains(&n)),
            Life::Unknown,
            "a shared directory"
        );
        assert_eq!(
            Record {
                netns: "/nonexistent".into(),
                ..record.clone()
            }
            .life(&now, |n| inhabited().contains(&n)),
            Life::Alive,
            "processes are still in it"
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
            .life(&now, |n| inhabited().contains(&n)),
            Life::Gone(_)
        ));
        assert_eq!(
            Record {
                here: Here::default(),
                ..record.clone()
            }
            .life(&now, |n| inhabited().contains(&n)),
            Life::Unknown
        );
        assert_eq!(Record::parse(&record.text()), Some(record));
        assert_eq!(Record::parse("c\r\neth0"), None);
    }

    #[test]
    fn a_reused_number_does_not_keep_the_dead_alive() {
        let dir = tempfile::tempdir().expect("a directory");
        let now = Here::now();
        let (own, other) = (dir.path().join("cni-1"), dir.path().join("cni-2"));
        std::fs::write(&own, "").expect("written");
        let record = Record::new("c", "eth0", own.to_str().expect("text"), &now);
        assert!(
            record.namespace.born != 0 && Namespace::at(Path::new("/proc/self/ns/net")).born == 0
        );
        assert_eq!(record.life(&now, |_| false), Life::Alive);
        // The kernel gave the number to a namespace that is pinned under another name.
        let later = Namespace {
            born: record.namespace.born - 1,
            ..record.namespace
        };
        std::fs::rename(&own, &other).expect("renamed");
        let reused = Record {
            namespace: later,
            ..record.clone()
        };
        assert!(matches!(reused.life(&now, |_| true), Life::Gone(_)));
        // Under the same name.
        std::fs::rename(&other, &own).expect("renamed");
        assert!(matches!(reused.life(&now, |_| true), Life::Gone(_)));
        let old = Record {
            namespace: Namespace {
                born: 0,
                ..record.namespace
            },
            ..record
        };
        assert_eq!(
            old.life(&now, |_| false),
            Life::Alive,
            "an older version's record"
        );
    }

    #[test]
    fn what_may_be_starting_is_known_by_its_age_and_its_plugin() {
        let patience = Duration::from_secs(300);
        let at = |boot: &str, seconds: u64| Here {
            boot: boot.into(),
            machine: "m".into(),
            uptime: Duration::from_secs(seconds),
        };
        let record = |here: Here, adder: Process| Record {
            here,
            adder,
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
                "its number is another process's",
                record(at("b", 0), another),
                false,
            ),
            ("of another boot", record(at("a", 999), own), false),
            ("of unknown origin", record(Here::default(), none), false),
        ] {
            assert_eq!(
                record.is_starting(&at("b", 1000), patience),
                expected,
                "{case}"
            );
            assert_eq!(Record::parse(&record.text()), Some(record), "{case}");
        }
        assert_eq!(uptime("350735.47 234388.90"), Duration::from_secs(350_735));
        assert_eq!(uptime("nan 1"), Duration::ZERO);
    }
}
