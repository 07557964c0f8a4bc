//! The store's file: one redb database that holds the newest version of every key.
//!
//! History is not kept on disk: after a restart the compaction point is the newest revision, and a
//! client that asks for older changes is told to list again, as it must be able to anyway.

use std::path::Path;

use hyper::body::Bytes;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use super::Change;
use super::Event;

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
    database: Database,
}

impl Disk {
    pub fn open(file: &Path) -> Result<(Disk, Loaded), DiskError> {
        Self::try_open(file).map_err(|source| DiskError {
            file: file.display().to_string(),
            source,
        })
    }

    fn try_open(file: &Path) -> Result<(Disk, Loaded), redb::Error> {
        let database = Database::builder().set_cache_size(8 << 20).create(file)?;
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
        Ok((Disk { database }, loaded))
    }

    /// Makes all of `events` durable, or none.
    pub fn commit(&mut self, events: &[Event]) -> Result<(), redb::Error> {
        // One sync a commit. Opening after kill -9 scans the file instead; it holds one small cluster.
        let write = self.database.begin_write()?;
        {
            let mut current = write.open_table(CURRENT)?;
            let mut meta = write.open_table(META)?;
            for event in events {
                match event.change {
                    Change::Put => {
                        let mut stored = Vec::with_capacity(8 + event.record.value.len());
                        stored.extend_from_slice(&event.revision.to_be_bytes());
                        stored.extend_from_slice(&event.record.value);
                        current.insert(&*event.key, stored.as_slice())?;
                    }
                    Change::Delete => {
                        current.remove(&*event.key)?;
                    }
                }
                meta.insert("revision", event.revision)?;
            }
        }
        write.commit()?;
        Ok(())
    }
}
