//! Who has which addresses, found without reading every reservation: one small file an owner, beside the directories that
//! the reference reads. With it stands of which boot and network namespace the owner is, which tells the dead from the living.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

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
        }
    }
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
    pub inode: u64,
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

/// The network namespace at a path, by its number; 0 for none.
#[must_use]
pub fn inode(path: &str) -> u64 {
    std::fs::metadata(path).map_or(0, |m| m.ino())
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
            inode: inode(netns),
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
        match (self.netns.as_str(), self.inode) {
            ("", _) | (_, 0) => Life::Unknown,
            (path, number) if inode(path) == number || is_inhabited(number) => Life::Alive,
            _ => Life::Gone("its network namespace is gone"),
        }
    }

    fn name(container: &str, ifname: &str) -> String {
        digest(&format!("{container}\r\n{ifname}"), 32)
    }

    fn parse(text: &str) -> Option<Record> {
        let value: Value = serde_json::from_str(text).ok()?;
        let text = |key: &str| value[key].as_str().map(str::to_owned);
        let addresses = value["addresses"]
            .as_array()?
            .iter()
            .filter_map(|a| a.as_str()?.parse().ok())
            .collect();
        Some(Record {
            container: text("container")?,
            ifname: text("ifname")?,
            netns: text("netns")?,
            inode: value["inode"].as_u64()?,
            here: Here {
                boot: text("boot")?,
                machine: text("machine")?,
            },
            addresses,
        })
    }

    fn text(&self) -> String {
        json!({"container": self.container, "ifname": self.ifname, "netns": self.netns, "inode": self.inode, "boot": self.here.boot,
            "machine": self.here.machine, "addresses": self.addresses})
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
            boot: "b1".into(),
            machine: "other".into(),
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
                inode: 7,
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
}
