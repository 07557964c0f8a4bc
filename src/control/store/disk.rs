//! The store's file: a redb database with the newest version of every key, and the changes of the retained history.
//!
//! A change is stored as the version that it replaced. Applied backwards from the newest versions, the changes yield
//! all versions in between. Clients can therefore resume their watches after a restart without listing again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hyper::body::Bytes;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction};

use super::{Change, Event, Record, State};

/// A version: its revision as 8 big-endian bytes, then the value.
type Version = &'static [u8];
/// Key to newest version.
const CURRENT: TableDefinition<&str, Version> = TableDefinition::new("current");
/// Revision of a change to its key, the version that it replaced, and for a deletion the last version.
const CHANGES: TableDefinition<u64, (&str, Option<Version>, Option<Version>)> =
    TableDefinition::new("changes");
/// Kind to the revision up to which its changes were dropped.
const COMPACTED: TableDefinition<&str, u64> = TableDefinition::new("compacted");
/// [`REVISION`] and [`SINCE`].
const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
/// The newest revision.
const REVISION: &str = "revision";
/// The revision after which changes are kept.
const SINCE: &str = "since";

/// Why the store's file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "the store file {file} cannot be opened ({source}); if it is in use, stop the other control plane, if it is damaged, move it away"
)]
pub struct DiskError {
    file: String,
    source: redb::Error,
}

#[derive(Default)]
pub(super) struct Loaded {
    pub revision: u64,
    pub entries: Vec<(String, u64, Bytes)>,
    /// Changes up to this revision are not stored.
    pub since: u64,
    /// For each kind: changes up to this revision were dropped.
    pub compacted: BTreeMap<String, u64>,
    /// Oldest first.
    pub changes: Vec<Replaced>,
}

/// A stored change.
pub(super) struct Replaced {
    pub revision: u64,
    pub key: String,
    pub previous: Option<(u64, Bytes)>,
    /// The last content, if the change is a deletion.
    pub last: Option<Bytes>,
}

pub(super) struct Disk {
    file: PathBuf,
    /// `None` after a failed write: redb rejects further writes until the file is reopened.
    database: Option<Database>,
}

impl Disk {
    pub fn open(file: &Path) -> Result<(Disk, Loaded), DiskError> {
        Self::try_open(file).map_err(|source| DiskError {
            file: file.display().to_string(),
            source,
        })
    }

    fn try_open(file: &Path) -> Result<(Disk, Loaded), redb::Error> {
        let database = database(file)?;
        let setup = database.begin_write()?;
        prepare(&setup)?;
        setup.commit()?;
        let loaded = load(&database)?;
        let disk = Disk {
            file: file.into(),
            database: Some(database),
        };
        Ok((disk, loaded))
    }

    /// Writes `events` durably and deletes the changes `dropped`, in one transaction.
    /// `known` is the state that is visible to readers.
    pub fn commit(
        &mut self,
        events: &[Event],
        dropped: &[(String, u64)],
        known: &State,
    ) -> Result<(), redb::Error> {
        let database = match self.database.take() {
            Some(database) => database,
            None => self.reopen(known)?,
        };
        // Kept only after success; otherwise the next commit reopens the file.
        put(&database, events, dropped)?;
        self.database = Some(database);
        Ok(())
    }

    /// Reopens the file after a failed write. If the file contains the write nevertheless, the write is reverted:
    /// otherwise its revisions would be assigned twice.
    fn reopen(&self, known: &State) -> Result<Database, redb::Error> {
        let database = database(&self.file)?;
        let revision = database
            .begin_read()?
            .open_table(META)?
            .get(REVISION)?
            .map_or(0, |r| r.value());
        if revision != known.revision {
            let write = database.begin_write()?;
            write.delete_table(CURRENT)?;
            {
                let mut current = write.open_table(CURRENT)?;
                for (key, record) in &known.map {
                    current.insert(&**key, stored(record).as_slice())?;
                }
                write.open_table(META)?.insert(REVISION, known.revision)?;
                write
                    .open_table(CHANGES)?
                    .retain_in(known.revision + 1.., |_, _| false)?;
            }
            write.commit()?;
        }
        tracing::info!(
            revision = known.revision,
            "the store recovered; writes succeed again"
        );
        Ok(database)
    }
}

fn database(file: &Path) -> Result<Database, redb::Error> {
    Ok(Database::builder().set_cache_size(8 << 20).create(file)?)
}

fn stored(record: &Record) -> Vec<u8> {
    let mut stored = Vec::with_capacity(8 + record.value.len());
    stored.extend_from_slice(&record.revision.to_be_bytes());
    stored.extend_from_slice(&record.value);
    stored
}

/// Creates the tables. Changes that do not lead to the newest revision are dropped,
/// because an older release has written to the file.
fn prepare(write: &WriteTransaction) -> Result<(), redb::Error> {
    write.open_table(CURRENT)?;
    let mut meta = write.open_table(META)?;
    let revision = meta.get(REVISION)?.map_or(0, |r| r.value());
    let since = meta.get(SINCE)?.map(|r| r.value());
    let newest = write.open_table(CHANGES)?.last()?.map(|(r, _)| r.value());
    write.open_table(COMPACTED)?;
    if since.is_none() || newest.or(since) != Some(revision) {
        write.open_table(CHANGES)?.retain(|_, _| false)?;
        write.open_table(COMPACTED)?.retain(|_, _| false)?;
        meta.insert(SINCE, revision)?;
    }
    Ok(())
}

fn load(database: &Database) -> Result<Loaded, redb::Error> {
    let read = database.begin_read()?;
    let mut loaded = Loaded::default();
    let meta = read.open_table(META)?;
    loaded.revision = meta.get(REVISION)?.map_or(0, |r| r.value());
    loaded.since = meta.get(SINCE)?.map_or(loaded.revision, |r| r.value());
    for entry in read.open_table(CURRENT)?.iter()? {
        let (key, stored) = entry?;
        if let Some((revision, value)) = version(stored.value()) {
            let key = key.value().to_owned();
            loaded.entries.push((key, revision, value));
        }
    }
    for entry in read.open_table(COMPACTED)?.iter()? {
        let (kind, revision) = entry?;
        let kind = kind.value().to_owned();
        loaded.compacted.insert(kind, revision.value());
    }
    for entry in read.open_table(CHANGES)?.iter()? {
        let (revision, change) = entry?;
        let (key, previous, last) = change.value();
        loaded.changes.push(Replaced {
            revision: revision.value(),
            key: key.to_owned(),
            previous: previous.and_then(version),
            last: last.and_then(version).map(|(_, value)| value),
        });
    }
    Ok(loaded)
}

fn version(stored: &[u8]) -> Option<(u64, Bytes)> {
    let (revision, value) = stored.split_first_chunk::<8>()?;
    Some((u64::from_be_bytes(*revision), Bytes::copy_from_slice(value)))
}

fn put(
    database: &Database,
    events: &[Event],
    dropped: &[(String, u64)],
) -> Result<(), redb::Error> {
    // One sync per commit. After a crash, redb scans the file on opening, which is fast for a small cluster.
    let write = database.begin_write()?;
    {
        let mut current = write.open_table(CURRENT)?;
        let mut changes = write.open_table(CHANGES)?;
        let mut compacted = write.open_table(COMPACTED)?;
        let mut meta = write.open_table(META)?;
        for event in events {
            let new = stored(&event.record);
            let previous = event.previous.as_ref().map(stored);
            let last = match event.change {
                Change::Put => {
                    current.insert(&*event.key, new.as_slice())?;
                    None
                }
                Change::Delete => {
                    current.remove(&*event.key)?;
                    Some(new.as_slice())
                }
            };
            changes.insert(event.revision, (&*event.key, previous.as_deref(), last))?;
            meta.insert(REVISION, event.revision)?;
        }
        for (kind, revision) in dropped {
            changes.remove(revision)?;
            compacted.insert(kind.as_str(), revision)?;
        }
    }
    write.commit()?;
    Ok(())
}
