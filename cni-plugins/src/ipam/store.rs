//! Who has which address: a directory compatible with the reference host-local, which may take over at
//! any time (CNI reference spec, 3.4).
//!
//! One file an address, named by it, holding container id and interface. A file appears complete or not
//! at all: it is written under another name, synced and linked into place. An empty file, as a crash of
//! the reference leaves it, counts as free.

use std::collections::HashSet;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use crate::cni::Error;

/// Records longer than this are nobody's.
const RECORD_LIMIT: u64 = 1024;

/// The locked directory of one network.
pub struct Store {
    dir: PathBuf,
    _lock: Flock<File>,
}

/// The text of a reservation.
fn record(container: &str, ifname: &str) -> String {
    format!("{container}\r\n{ifname}")
}

impl Store {
    /// Opens and locks the directory of `network`, and creates it.
    pub fn open(data_dir: &Path, network: &str) -> Result<Store, Error> {
        let dir = data_dir.join(network);
        let failed = |what: &str, e: &dyn std::fmt::Display| Error::other(format!("the address store {} cannot be {what}: {e}", dir.display()));
        DirBuilder::new().recursive(true).mode(0o755).create(&dir).map_err(|e| failed("created", &e))?;
        let file =
            OpenOptions::new().create(true).truncate(false).write(true).mode(0o750).open(dir.join("lock")).map_err(|e| failed("locked", &e))?;
        let lock = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| failed("locked", &e))?;
        Ok(Store { dir, _lock: lock })
    }

    /// As [`Store::open`], but `None` if the network has no directory.
    pub fn open_existing(data_dir: &Path, network: &str) -> Result<Option<Store>, Error> {
        if data_dir.join(network).is_dir() { Store::open(data_dir, network).map(Some) } else { Ok(None) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The names of all address files, read without opening them.
    fn addresses(&self) -> Result<HashSet<IpAddr>, Error> {
        let entries = std::fs::read_dir(&self.dir).map_err(|e| Error::doing("the address store cannot be read", e))?;
        let names = entries.filter_map(Result::ok);
        Ok(names.filter_map(|e| e.file_name().to_str().and_then(|n| n.parse().ok())).collect())
    }

    fn owner(&self, address: IpAddr) -> Option<String> {
        let mut text = String::new();
        File::open(self.path(&address.to_string())).ok()?.take(RECORD_LIMIT).read_to_string(&mut text).ok()?;
        Some(text.trim().to_owned())
    }

    /// The taken addresses. Files that say nothing are removed: nobody will ever release them.
    pub fn taken(&self) -> Result<HashSet<IpAddr>, Error> {
        let all = self.addresses()?;
        Ok(all
            .into_iter()
            .filter(|address| {
                let path = self.path(&address.to_string());
                let empty = std::fs::metadata(&path).is_ok_and(|m| m.len() == 0);
                // If removing fails the address only stays unavailable.
                !(empty && std::fs::remove_file(&path).is_ok())
            })
            .collect())
    }

    /// Reserves an address; false if somebody has it.
    pub fn reserve(&self, address: IpAddr, set: usize, container: &str, ifname: &str) -> Result<bool, Error> {
        let failed = |e: io::Error| Error::doing(format!("address {address} cannot be reserved in {}", self.dir.display()), e);
        let temporary = self.path(&format!("tmp.{}", std::process::id()));
        let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&temporary).map_err(failed)?;
        let written = file.write_all(record(container, ifname).as_bytes()).and_then(|()| file.sync_data());
        let linked = written.and_then(|()| std::fs::hard_link(&temporary, self.path(&address.to_string())));
        std::fs::remove_file(&temporary).map_err(failed)?;
        match linked {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
            Err(error) => return Err(failed(error)),
        }
        let mut last = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(self.path(&format!("last_reserved_ip.{set}")))
            .map_err(failed)?;
        last.write_all(address.to_string().as_bytes()).map_err(failed)?;
        Ok(true)
    }

    /// The address that a set gave out last.
    #[must_use]
    pub fn last(&self, set: usize) -> Option<IpAddr> {
        std::fs::read_to_string(self.path(&format!("last_reserved_ip.{set}"))).ok()?.trim().parse().ok()
    }

    /// Every address that a container's interface has; records of old, with the id alone, count if
    /// there is no other.
    pub fn of(&self, container: &str, ifname: &str) -> Result<Vec<IpAddr>, Error> {
        let all = self.addresses()?;
        let wanted = record(container, ifname);
        let (mut exact, mut legacy) = (Vec::new(), Vec::new());
        for address in all {
            match self.owner(address) {
                Some(owner) if owner == wanted => exact.push(address),
                Some(owner) if owner == container => legacy.push(address),
                _ => {}
            }
        }
        Ok(if exact.is_empty() { legacy } else { exact })
    }

    /// Whether `address` belongs to a container's interface.
    #[must_use]
    pub fn is_of(&self, address: IpAddr, container: &str, ifname: &str) -> bool {
        self.owner(address).is_some_and(|owner| owner == record(container, ifname) || owner == container)
    }

    /// Releases addresses.
    pub fn release(&self, addresses: &[IpAddr]) -> Result<(), Error> {
        for address in addresses {
            match std::fs::remove_file(self.path(&address.to_string())) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::doing(format!("address {address} cannot be released"), error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Releases what belongs to none of `keep`.
    pub fn collect(&self, keep: &[(String, String)]) -> Result<(), Error> {
        let all = self.addresses()?;
        let wanted: HashSet<String> = keep.iter().flat_map(|(id, ifname)| [record(id, ifname), id.clone()]).collect();
        let doomed: Vec<IpAddr> = all.into_iter().filter(|a| self.owner(*a).is_none_or(|owner| !wanted.contains(&owner))).collect();
        self.release(&doomed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_are_exclusive_readable_by_the_reference_and_released_by_owner() {
        let dir = tempfile::tempdir().expect("a directory");
        let store = Store::open(dir.path(), "net").expect("open");
        let a: IpAddr = "10.0.0.2".parse().expect("ip");
        let b: IpAddr = "fd00::5".parse().expect("ip");
        assert!(store.reserve(a, 0, "c1", "eth0").expect("reserve"));
        assert!(!store.reserve(a, 0, "c2", "eth0").expect("taken"));
        assert!(store.reserve(b, 1, "c1", "eth0").expect("reserve"));
        assert_eq!(std::fs::read(dir.path().join("net/10.0.0.2")).expect("a file"), b"c1\r\neth0");
        assert_eq!(std::fs::read(dir.path().join("net/last_reserved_ip.0")).expect("a file"), b"10.0.0.2");
        assert_eq!(store.last(1), Some(b));
        std::fs::write(dir.path().join("net/10.0.0.9"), " c9 \n").expect("an old record");
        std::fs::write(dir.path().join("net/10.0.0.8"), "").expect("what a crash leaves");
        assert_eq!(store.taken().expect("taken").len(), 3);
        assert!(!dir.path().join("net/10.0.0.8").exists());
        assert_eq!(store.of("c9", "eth0").expect("legacy"), ["10.0.0.9".parse::<IpAddr>().expect("ip")]);
        assert_eq!(store.of("c1", "eth1").expect("none"), Vec::<IpAddr>::new());
        store.collect(&[("c1".into(), "eth0".into())]).expect("collect");
        assert_eq!(store.taken().expect("taken"), HashSet::from([a, b]));
        store.release(&store.of("c1", "eth0").expect("mine")).expect("release");
        store.release(&[a]).expect("again is fine");
        assert!(store.taken().expect("taken").is_empty());
    }
}
