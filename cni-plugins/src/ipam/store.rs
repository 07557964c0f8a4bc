//! The address reservations of a network, in a directory that is compatible with the reference host-local, which
//! may take over at any time (`plugins/ipam/host-local/backend/disk/backend.go` of containernetworking/plugins).
//!
//! Each reserved address has a file of that name, which contains the container id and the
//! interface. Files appear atomically: the store writes them under another name and links
//! them into place. Nothing is synced, since reservations matter only until the next reboot.
//! An empty file, which a power loss or a crash of the reference can leave, counts as free.
//!
//! `Owners` is the index. It is complete until another program changes the directory, which the
//! directory's stamp (its modification time) shows. With a complete index, no reservation is read;
//! otherwise all are read once. Kernels before 6.13 give changes within a few milliseconds the same stamp.
//! Rare operations therefore always read everything, and a release also checks the reservation itself.

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};

use super::owners::{MachineState, OwnerState, Owners, Process, Record, namespaces_with_processes};
use crate::cni::Error;

/// The size limit of a reservation in bytes; longer files are not reservations.
const RECORD_LIMIT: u64 = 1024;

/// The locked directory of one network.
pub struct Store {
    dir: PathBuf,
    owners: Owners,
    machine_state: MachineState,
    namespaces_with_processes: OnceCell<BTreeSet<u64>>,
    /// The records found by reading all reservations, if that was necessary.
    found: RefCell<Option<BTreeMap<Key, Record>>>,
    /// Whether updating the index failed. The next process then reads everything again.
    outdated: bool,
    _lock: Flock<File>,
}

/// A container and its interface.
type Key = (String, String);

/// The contents of a reservation file.
fn record(container: &str, ifname: &str) -> String {
    format!("{container}\r\n{ifname}")
}

impl Store {
    /// Opens and locks the directory of `network`; creates it if it is missing.
    pub fn open(data_dir: &Path, network: &str) -> Result<Store, Error> {
        Store::open_at(data_dir, network, MachineState::now())
    }

    /// Like [`Store::open`], for another machine or time (tests).
    pub fn open_at(
        data_dir: &Path,
        network: &str,
        machine_state: MachineState,
    ) -> Result<Store, Error> {
        let dir = data_dir.join(network);
        let failed = |what: &str, e: &dyn std::fmt::Display| {
            Error::other(format!(
                "the address store {} cannot be {what}: {e}",
                dir.display()
            ))
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&dir)
            .map_err(|e| failed("created", &e))?;
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o750)
            .open(dir.join("lock"))
            .map_err(|e| failed("locked", &e))?;
        let lock =
            Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| failed("locked", &e))?;
        let owners = Owners::open(data_dir, network).map_err(|e| failed("indexed", &e))?;
        let mut store = Store {
            dir,
            owners,
            machine_state,
            namespaces_with_processes: OnceCell::new(),
            found: RefCell::default(),
            outdated: false,
            _lock: lock,
        };
        if !store.owners.is_complete_for(&store.stamp()) {
            store.reconcile()?;
        }
        Ok(store)
    }

    /// Like [`Store::open`], but returns `None` if the network has no directory.
    pub fn open_existing(data_dir: &Path, network: &str) -> Result<Option<Store>, Error> {
        if data_dir.join(network).is_dir() {
            Store::open(data_dir, network).map(Some)
        } else {
            Ok(None)
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The state of the reservation directory: boot, machine and modification time.
    fn stamp(&self) -> String {
        let changed = std::fs::metadata(&self.dir).map_or((0, 0), |m| (m.mtime(), m.mtime_nsec()));
        format!(
            "{} {} {}.{}",
            self.machine_state.boot, self.machine_state.machine, changed.0, changed.1
        )
    }

    fn failed(&self) -> impl Fn(io::Error) -> Error + use<> {
        let dir = self.dir.display().to_string();
        move |e| Error::doing(format!("the address store {dir} cannot be used"), e)
    }

    /// Reads all reservations, even if the index is complete.
    pub fn read_all(&mut self) -> Result<(), Error> {
        self.reconcile()
    }

    /// Rebuilds the index from the reservations and removes those of earlier boots. A full
    /// disk prevents writing the index, but must not prevent the release of addresses.
    fn reconcile(&mut self) -> Result<(), Error> {
        let failed = self.failed();
        self.owners.remove_partial_files().map_err(&failed)?;
        let mut known: BTreeMap<Key, Record> = BTreeMap::new();
        let mut listed: BTreeMap<IpAddr, Key> = BTreeMap::new();
        for mut record in self.owners.all().map_err(&failed)? {
            let key = (record.container.clone(), record.ifname.clone());
            listed.extend(
                std::mem::take(&mut record.addresses)
                    .into_iter()
                    .map(|a| (a, key.clone())),
            );
            known.insert(key, record);
        }
        let mut changed: BTreeMap<Key, bool> = BTreeMap::new();
        for address in self.addresses()? {
            let text = match self.text(address) {
                Ok(Some(text)) => text,
                Ok(None) => {
                    // An empty reservation has no owner that could release it.
                    // If removing it fails, the address only stays unavailable.
                    let _ = std::fs::remove_file(self.path(&address.to_string()));
                    continue;
                }
                Err(_) => {
                    // The address stays reserved, for its owner in the index if there is one.
                    if let Some(owner) = listed.remove(&address).and_then(|k| known.get_mut(&k)) {
                        owner.addresses.insert(address);
                    }
                    continue;
                }
            };
            let (container, ifname) = text.split_once("\r\n").unwrap_or((&text, ""));
            let key = (container.to_owned(), ifname.to_owned());
            let record = known
                .entry(key.clone())
                .or_insert_with(|| Record::new(container, ifname, "", &MachineState::default()));
            record.addresses.insert(address);
            *changed.entry(key.clone()).or_default() |=
                listed.remove(&address).is_none_or(|owner| owner != key);
        }
        for key in listed.into_values() {
            changed.insert(key, true);
        }
        let dead = |record: &Record| {
            record.origin.boot != self.machine_state.boot
                && matches!(self.owner_state(record), OwnerState::Removed(_))
        };
        let ended: Vec<Key> = known
            .iter()
            .filter(|(_, r)| r.addresses.is_empty() || dead(r))
            .map(|(key, _)| key.clone())
            .collect();
        for key in ended {
            if let Some(record) = known.remove(&key) {
                self.release(&record)?;
            }
        }
        let outdated = known
            .iter()
            .filter(|(key, _)| changed.get(*key).copied().unwrap_or(false))
            .any(|(_, r)| self.owners.put(r).is_err());
        (self.outdated, self.found) = (outdated, RefCell::new(Some(known)));
        Ok(())
    }

    /// The reserved addresses, from the file names alone.
    fn addresses(&self) -> Result<HashSet<IpAddr>, Error> {
        let entries = std::fs::read_dir(&self.dir)
            .map_err(|e| Error::doing("the address store cannot be read", e))?;
        let names = entries.filter_map(Result::ok);
        Ok(names
            .filter_map(|e| e.file_name().to_str().and_then(|n| n.parse().ok()))
            .collect())
    }

    /// The contents of a reservation; `None` if it is missing or empty.
    /// After an error the owner is unknown and the address stays reserved.
    fn text(&self, address: IpAddr) -> io::Result<Option<String>> {
        let file = match File::open(self.path(&address.to_string())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = vec![];
        file.take(RECORD_LIMIT).read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes).trim().to_owned();
        Ok(Some(text).filter(|t| !t.is_empty()))
    }

    /// The reserved addresses.
    pub fn taken(&self) -> Result<HashSet<IpAddr>, Error> {
        self.addresses()
    }

    /// Begins to reserve addresses for an attachment. Writes the owner's record first, so that after any crash the
    /// owner of each address and the process of the ADD are known. `pod` is the uid of a Kubernetes pod, or empty.
    pub fn begin(
        &self,
        container: &str,
        ifname: &str,
        netns: &str,
        pod: &str,
    ) -> Result<Reservation<'_>, Error> {
        let failed = |e: io::Error| {
            Error::doing(
                format!("an address cannot be reserved in {}", self.dir.display()),
                e,
            )
        };
        let before = self.get(container, ifname);
        let mut owner = Record {
            pod: pod.into(),
            add_process: Process::own(),
            ..Record::new(container, ifname, netns, &self.machine_state)
        };
        owner
            .addresses
            .extend(before.iter().flat_map(|b| &b.addresses));
        self.owners.put(&owner).map_err(failed)?;
        let scratch = self.owners.scratch();
        // A leftover scratch file may be a hard link to a reservation, so it must not be written to.
        match std::fs::remove_file(&scratch) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let mut file = OpenOptions::new()
            .create_new(true)
            .write(true)
            .mode(0o600)
            .open(&scratch)
            .map_err(failed)?;
        file.write_all(record(container, ifname).as_bytes())
            .map_err(failed)?;
        Ok(Reservation {
            store: self,
            owner,
            before,
            scratch,
            taken: vec![],
            finished: false,
        })
    }

    /// The last address that was allocated from a set.
    #[must_use]
    pub fn last(&self, set: usize) -> Option<IpAddr> {
        std::fs::read_to_string(self.path(&format!("last_reserved_ip.{set}")))
            .ok()?
            .trim()
            .parse()
            .ok()
    }

    fn get(&self, container: &str, ifname: &str) -> Option<Record> {
        match &*self.found.borrow() {
            Some(found) => found
                .get(&(container.to_owned(), ifname.to_owned()))
                .cloned(),
            None => self.owners.get(container, ifname),
        }
    }

    /// The record of a container's interface. Falls back to an old record that has the container id only.
    #[must_use]
    pub fn of(&self, container: &str, ifname: &str) -> Option<Record> {
        let of = |ifname: &str| {
            self.get(container, ifname)
                .filter(|r| !r.addresses.is_empty())
        };
        of(ifname).or_else(|| of(""))
    }

    /// Whether an owner can still use its addresses.
    #[must_use]
    pub fn owner_state(&self, record: &Record) -> OwnerState {
        record.owner_state(&self.machine_state, |number| {
            self.namespaces_with_processes
                .get_or_init(namespaces_with_processes)
                .contains(&number)
        })
    }

    /// Whether the ADD of an owner may still run (see [`Record::is_starting`]).
    #[must_use]
    pub fn is_starting(&self, record: &Record, min_age: Duration) -> bool {
        record.is_starting(&self.machine_state, min_age)
    }

    /// Whether `address` is reserved for a container's interface.
    pub fn is_of(&self, address: IpAddr, container: &str, ifname: &str) -> Result<bool, Error> {
        let text = self.text(address).map_err(|e| {
            let path = self.path(&address.to_string());
            Error::doing(
                format!(
                    "the owner of address {address} cannot be read from {}",
                    path.display()
                ),
                e,
            )
        })?;
        Ok(text.is_some_and(|owner| owner == record(container, ifname) || owner == container))
    }

    /// The records of all owners.
    pub fn owners(&self) -> Result<Vec<Record>, Error> {
        match &*self.found.borrow() {
            Some(found) => Ok(found.values().cloned().collect()),
            None => self.owners.all().map_err(self.failed()),
        }
    }

    /// Releases all addresses of an owner, except those that have another owner now. The index
    /// can be outdated in this way if a process was killed after it had released an address.
    pub fn release(&self, owner: &Record) -> Result<(), Error> {
        for address in &owner.addresses {
            if !self.is_of(*address, &owner.container, &owner.ifname)? {
                continue;
            }
            match std::fs::remove_file(self.path(&address.to_string())) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::doing(
                        format!("address {address} cannot be released"),
                        error,
                    ));
                }
                _ => {}
            }
        }
        if let Some(found) = &mut *self.found.borrow_mut() {
            found.remove(&(owner.container.clone(), owner.ifname.clone()));
        }
        self.owners.remove(owner).map_err(self.failed())
    }

    /// Releases one address of an owner.
    pub fn release_one(&self, owner: &Record, address: IpAddr) -> Result<(), Error> {
        let rest = Record {
            addresses: owner
                .addresses
                .iter()
                .copied()
                .filter(|a| *a != address)
                .collect(),
            ..owner.clone()
        };
        self.release(&Record {
            addresses: [address].into(),
            ..owner.clone()
        })?;
        if rest.addresses.is_empty() {
            Ok(())
        } else {
            self.owners.put(&rest).map_err(self.failed())
        }
    }

    /// Releases the addresses of all owners that are not in `keep`.
    pub fn collect(&self, keep: &[(String, String)]) -> Result<(), Error> {
        let wanted = |r: &Record| {
            keep.iter().any(|(id, ifname)| {
                *id == r.container && (*ifname == r.ifname || r.ifname.is_empty())
            })
        };
        for owner in self.owners()?.iter().filter(|r| !wanted(r)) {
            self.release(owner)?;
        }
        Ok(())
    }

    /// Releases the addresses of owners that no longer exist. Returns the number of addresses.
    pub fn reclaim(&self) -> Result<usize, Error> {
        let mut found = 0;
        for owner in self
            .owners()?
            .iter()
            .filter(|r| matches!(self.owner_state(r), OwnerState::Removed(_)))
        {
            found += owner.addresses.len();
            self.release(owner)?;
        }
        Ok(found)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // If this fails, the next process reads everything again.
        if !self.outdated {
            let _ = self.owners.mark_complete(&self.stamp());
        }
    }
}

/// Addresses that are being reserved for an attachment. Dropping an unfinished reservation releases them.
pub struct Reservation<'a> {
    store: &'a Store,
    owner: Record,
    before: Option<Record>,
    scratch: PathBuf,
    taken: Vec<(usize, IpAddr)>,
    finished: bool,
}

impl Reservation<'_> {
    /// Reserves an address for a set; false if it is already reserved.
    pub fn take(&mut self, address: IpAddr, set: usize) -> Result<bool, Error> {
        match std::fs::hard_link(&self.scratch, self.store.path(&address.to_string())) {
            Ok(()) => {
                self.owner.addresses.insert(address);
                self.taken.push((set, address));
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(Error::doing(
                format!(
                    "address {address} cannot be reserved in {}",
                    self.store.dir.display()
                ),
                error,
            )),
        }
    }

    /// Completes the reservation of all addresses taken.
    pub fn finish(mut self) -> Result<(), Error> {
        let failed = self.store.failed();
        self.store.owners.put(&self.owner).map_err(&failed)?;
        for (set, address) in &self.taken {
            let path = self.store.path(&format!("last_reserved_ip.{set}"));
            let mut last = OpenOptions::new()
                .create(true)
                .truncate(true)
                .write(true)
                .mode(0o600)
                .open(path)
                .map_err(&failed)?;
            last.write_all(address.to_string().as_bytes())
                .map_err(&failed)?;
        }
        self.finished = true;
        Ok(())
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        // The owner's record is on disk, so the next call cleans up after a failure here.
        let _ = std::fs::remove_file(&self.scratch);
        if !self.finished {
            let addresses = self.taken.iter().map(|(_, address)| *address).collect();
            let _ = self.store.release(&Record {
                addresses,
                ..self.owner.clone()
            });
            let _ = self
                .before
                .as_ref()
                .map(|before| self.store.owners.put(before));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn reserve(store: &Store, container: &str, addresses: &[&str]) -> bool {
        let mut reservation = store.begin(container, "eth0", "", "").expect("begin");
        let all = addresses
            .iter()
            .enumerate()
            .all(|(set, a)| reservation.take(ip(a), set).expect("take"));
        if all {
            reservation.finish().expect("finish");
        }
        all
    }

    #[test]
    fn reservations_are_exclusive_readable_by_the_reference_and_released_by_owner() {
        let dir = tempfile::tempdir().expect("a directory");
        let store = Store::open(dir.path(), "net").expect("open");
        assert!(reserve(&store, "c1", &["10.0.0.2", "fd00::5"]));
        assert!(
            !reserve(&store, "c2", &["10.0.0.3", "fd00::5"]),
            "the second address is reserved"
        );
        assert_eq!(
            store.taken().expect("taken"),
            HashSet::from([ip("10.0.0.2"), ip("fd00::5")]),
            "the first address was released"
        );
        assert_eq!(
            std::fs::read(dir.path().join("net/10.0.0.2")).expect("a file"),
            b"c1\r\neth0"
        );
        assert_eq!(
            std::fs::read(dir.path().join("net/last_reserved_ip.0")).expect("a file"),
            b"10.0.0.2"
        );
        assert_eq!(store.last(1), Some(ip("fd00::5")));
        drop(store);
        // Other implementations write there too, and do not clean up.
        std::fs::write(dir.path().join("net/10.0.0.9"), " c9 \n").expect("an old record");
        std::fs::write(dir.path().join("net/10.0.0.8"), "").expect("a file left by a crash");
        let store = Store::open(dir.path(), "net").expect("open");
        assert_eq!(store.taken().expect("taken").len(), 3);
        assert!(!dir.path().join("net/10.0.0.8").exists());
        assert_eq!(
            store.of("c9", "eth0").expect("legacy").addresses,
            [ip("10.0.0.9")].into()
        );
        assert_eq!(store.of("c1", "eth1"), None);
        store
            .collect(&[("c1".into(), "eth0".into())])
            .expect("collect");
        assert_eq!(
            store.taken().expect("taken"),
            HashSet::from([ip("10.0.0.2"), ip("fd00::5")])
        );
        let mine = store.of("c1", "eth0").expect("mine");
        store.release(&mine).expect("release");
        store.release(&mine).expect("release is idempotent");
        assert!(store.taken().expect("taken").is_empty());
    }

    #[test]
    fn an_address_reserved_by_another_owner_is_not_released() {
        let dir = tempfile::tempdir().expect("a directory");
        let open = || Store::open(dir.path(), "net").expect("open");
        assert!(reserve(&open(), "c1", &["10.0.0.2"]));
        let store = open();
        let old = store.of("c1", "eth0").expect("an owner");
        // A process was killed after it had released the address, and another owner has reserved it.
        std::fs::remove_file(dir.path().join("net/10.0.0.2")).expect("released");
        assert!(reserve(&store, "c2", &["10.0.0.2"]));
        store.release(&old).expect("release");
        assert_eq!(
            store.taken().expect("taken"),
            HashSet::from([ip("10.0.0.2")])
        );
        drop(store);
        let store = open();
        assert_eq!(
            (
                store.of("c1", "eth0"),
                store.of("c2", "eth0").map(|o| o.addresses)
            ),
            (None, Some([ip("10.0.0.2")].into()))
        );
    }

    #[test]
    fn an_unreadable_reservation_is_not_released() {
        let dir = tempfile::tempdir().expect("a directory");
        let open = || Store::open(dir.path(), "net").expect("open");
        assert!(reserve(&open(), "c1", &["10.0.0.2", "fd00::5"]));
        let file = dir.path().join("net/10.0.0.2");
        std::fs::remove_file(&file).expect("removed");
        // Opening the file fails with ELOOP.
        std::os::unix::fs::symlink("10.0.0.2", &file).expect("a symlink");
        let mut store = open();
        store.read_all().expect("read");
        assert!(store.taken().expect("taken").contains(&ip("10.0.0.2")));
        let mine = store.of("c1", "eth0").expect("still the owner");
        assert_eq!(mine.addresses, [ip("10.0.0.2"), ip("fd00::5")].into());
        let error = store.release(&mine).expect_err("unknown owner");
        assert!(error.to_string().contains("net/10.0.0.2"), "{error}");
        assert!(store.of("c1", "eth0").is_some(), "a later DEL retries");
        std::fs::remove_file(&file).expect("removed");
        std::fs::write(&file, [0xff, 0xfe]).expect("no text");
        store.read_all().expect("read");
        assert!(file.exists(), "a file that is not UTF-8 stays reserved");
    }

    #[test]
    fn read_all_finds_changes_that_the_time_stamp_missed() {
        let dir = tempfile::tempdir().expect("a directory");
        let store = Store::open(dir.path(), "net").expect("open");
        std::fs::write(dir.path().join("net/10.0.0.9"), "theirs\r\neth0").expect("the reference's");
        // As if both changes had happened at the same time.
        drop(store);
        let mut store = Store::open(dir.path(), "net").expect("open");
        assert_eq!(store.of("theirs", "eth0"), None);
        assert!(
            store
                .is_of(ip("10.0.0.9"), "theirs", "eth0")
                .expect("readable")
        );
        store.read_all().expect("read");
        assert!(store.of("theirs", "eth0").is_some());
    }

    #[test]
    fn a_reboot_releases_only_addresses_of_this_machine_from_before_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |boot: &str, machine: &str| {
            Store::open_at(
                dir.path(),
                "net",
                MachineState {
                    boot: boot.into(),
                    machine: machine.into(),
                    ..MachineState::now()
                },
            )
            .expect("open")
        };
        assert!(reserve(&at("b1", "m"), "c1", &["10.0.0.2"]));
        assert!(reserve(&at("b1", "other"), "c2", &["10.0.0.3"]));
        std::fs::write(dir.path().join("net/10.0.0.4"), "c3\r\neth0").expect("the reference's");
        let store = at("b2", "m");
        assert_eq!(
            store.taken().expect("taken"),
            HashSet::from([ip("10.0.0.3"), ip("10.0.0.4")]),
            "addresses of another machine and of unknown origin stay"
        );
        assert_eq!(store.of("c1", "eth0"), None);
    }

    #[test]
    fn an_unfinished_reservation_can_be_released() {
        let dir = tempfile::tempdir().expect("a directory");
        let store = Store::open(dir.path(), "net").expect("open");
        let mut reservation = store
            .begin("c1", "eth0", "/nonexistent", "")
            .expect("begin");
        assert!(reservation.take(ip("10.0.0.2"), 0).expect("take"));
        std::mem::forget(reservation);
        // The process was killed: the reservation is unfinished, and the kernel has released the lock.
        drop(store);
        std::fs::write(dir.path().join(".owners/net/seen"), "something else").expect("never seen");
        let store = Store::open(dir.path(), "net").expect("open");
        assert_eq!(
            store.of("c1", "eth0").expect("known").addresses,
            [ip("10.0.0.2")].into()
        );
    }
}
