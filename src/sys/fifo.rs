//! FIFOs of commands in containers: a private directory for each command, which a runtime's shim opens by path.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tokio::net::unix::pipe::{OpenOptions, Receiver, Sender};

use holdfast_core::backoff::Doubling;

/// Pauses between attempts to open a FIFO that has no reader yet.
const RETRIES: Doubling = Doubling::new(Duration::from_millis(1), Duration::from_millis(100));

/// FIFOs in a directory of their own. Both are removed when the value is dropped, and by [`leftovers`] after a crash.
#[derive(Debug)]
pub struct Fifos {
    dir: PathBuf,
}

impl Fifos {
    /// Creates FIFOs in a new directory `name` below `parent`. Only this process's user can reach them.
    pub fn create(parent: &Path, name: &str, fifos: &[&str]) -> io::Result<Fifos> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(parent)?;
        let dir = parent.join(name);
        DirBuilder::new().mode(0o700).create(&dir)?;
        let created = Fifos { dir };
        for fifo in fifos {
            mkfifo(&created.path(fifo), Mode::S_IRUSR | Mode::S_IWUSR)?;
        }
        Ok(created)
    }

    /// Path of a FIFO, which may not exist.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Opens a FIFO for reading, with or without a writer. While it has no writer, reads return end of file.
    pub fn reader(&self, name: &str) -> io::Result<Receiver> {
        OpenOptions::new().open_receiver(self.path(name))
    }

    /// Opens a FIFO for writing as soon as it has a reader. If the
    /// writer closes a FIFO without reader, its unread bytes are lost.
    pub async fn writer(&self, name: &str) -> io::Result<Sender> {
        let mut retries = RETRIES;
        loop {
            match OpenOptions::new().open_sender(self.path(name)) {
                Err(error) if error.raw_os_error() == Some(Errno::ENXIO as i32) => {
                    tokio::time::sleep(retries.pause()).await;
                }
                opened => return opened,
            }
        }
    }
}

impl Drop for Fifos {
    fn drop(&mut self) {
        match fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, directory = %self.dir.display(), "removing the FIFOs of a command failed");
            }
            _ => {}
        }
    }
}

/// Directories of FIFOs that an earlier process left below `parent`, with their names.
pub fn leftovers(parent: &Path) -> io::Result<Vec<(String, Fifos)>> {
    let entries = match fs::read_dir(parent) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        entries => entries?,
    };
    let mut found = vec![];
    for entry in entries {
        let entry = entry?;
        if let (Ok(name), true) = (entry.file_name().into_string(), entry.file_type()?.is_dir()) {
            found.push((name, Fifos { dir: entry.path() }));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn a_writer_waits_for_its_reader_and_fifos_are_removed() {
        let dir = tempfile::tempdir().expect("a result");
        let parent = dir.path().join("exec");
        assert_eq!(leftovers(&parent).expect("a result").len(), 0);
        let fifos = Fifos::create(&parent, "c.1", &["stdin"]).expect("a result");
        assert!(
            Fifos::create(&parent, "c.1", &[]).is_err(),
            "the name is already in use"
        );
        let mode = |path: &Path| fs::symlink_metadata(path).expect("a result").mode() & 0o777;
        assert_eq!(mode(&parent), 0o700);
        assert_eq!(mode(&fifos.path("")), 0o700);
        assert_eq!(mode(&fifos.path("stdin")), 0o600);
        let waiting = tokio::time::timeout(Duration::from_millis(20), fifos.writer("stdin"));
        assert!(waiting.await.is_err(), "no reader yet");
        let mut reader = fifos.reader("stdin").expect("a result");
        let mut writer = fifos.writer("stdin").await.expect("a result");
        writer.write_all(b"data").await.expect("a result");
        drop(writer);
        let mut data = vec![];
        reader.read_to_end(&mut data).await.expect("a result");
        assert_eq!(data, b"data");
        std::mem::forget(fifos);
        let left = leftovers(&parent).expect("a result");
        assert_eq!(left.first().map(|(name, _)| name.as_str()), Some("c.1"));
        drop(left);
        assert_eq!(fs::read_dir(&parent).expect("a result").count(), 0);
    }
}
