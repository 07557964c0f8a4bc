//! The store's file: one redb database that holds the newest version of every key.
//!
//! History is not kept on disk: after a restart the compaction point is the newest revision, and a
//! client that asks for older changes is told to list again, as it must be able to anyway.

use std::path::{Path, PathBuf};

use hyper::body::Bytes;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use super::{Change, Event, Record, State};

/// Key to (revision as 8 big-endian bytes, then the value).
const CURRENT: TableDefinition<&str, &[u8]> = TableDefinition::new("current");
/// `revision` to the newest revision.
const META: TableDefinition<&str, u64> = TableDefinition::new("meta");

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
}

pub(super) struct Disk {
    file: PathBuf,
    /// None after a write that failed: redb refuses every other one until the file is opened anew.
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
        setup.open_table(CURRENT)?;
        setup.open_table(META)?;
        setup.commit()?;
        let read = database.begin_read()?;
        let mut loaded = Loaded::default();
        if let Some(revision) = read.open_table(META)?.get("revision")? {
            loaded.revision = revision.value();
        }
        for entry in read.open_table(CURRENT)?.iter()? {
            let (key, stored) = entry?;
            let stored = stored.value();
            let Some((revision, value)) = stored.split_first_chunk::<8>() else {
                continue;
            };
            loaded.entries.push((
                key.value().to_owned(),
                u64::from_be_bytes(*revision),
                Bytes::copy_from_slice(value),
            ));
        }
        drop(read);
        let disk = Disk {
            file: file.into(),
            database: Some(database),
        };
        Ok((disk, loaded))
    }

    /// Makes all of `events` durable, or none. `known` is what has been shown so far.
    pub fn commit(&mut self, events: &[Event], known: &State) -> Result<(), redb::Error> {
        let database = match self.database.take() {
            Some(database) => database,
            None => self.reopen(known)?,
        };
        // Given back only if it can go on.
        put(&database, events)?;
        self.database = Some(database);
        Ok(())
    }

    /// Opens the file after a write that failed. What was told to have failed may be in it all the same; it is taken back,
    /// or its revisions would be given out twice.
    fn reopen(&self, known: &State) -> Result<Database, redb::Error> {
        let database = database(&self.file)?;
        let revision = database
            .begin_read()?
            .open_table(META)?
            .get("revision")?
            .map_or(0, |r| r.value());
        if revision != known.revision {
            let write = database.begin_write()?;
            write.delete_table(CURRENT)?;
            {
                let mut current = write.open_table(CURRENT)?;
                for (key, record) in &known.map {
                    current.insert(&**key, stored(record).as_slice())?;
                }
                write.open_table(META)?.insert("revision", known.revision)?;
            }
            write.commit()?;
        }
        tracing::info!(revision = known.revision, "the store writes again");
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

fn put(database: &Database, events: &[Event]) -> Result<(), redb::Error> {
    // One sync a commit. Opening after kill -9 scans the file instead; it holds one small cluster.
    let write = database.begin_write()?;
    {
        let mut current = write.open_table(CURRENT)?;
        let mut meta = write.open_table(META)?;
        for event in events {
            match event.change {
                Change::Put => current.insert(&*event.key, stored(&event.record).as_slice())?,
                Change::Delete => current.remove(&*event.key)?,
            };
            meta.insert("revision", event.revision)?;
        }
    }
    write.commit()?;
    Ok(())
}
