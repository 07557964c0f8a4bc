//! A file whose content must survive this process. Callers save it before they act on
//! a change; saving writes only changed content.

use std::io;
use std::path::{Path, PathBuf};

use tokio::sync::{Mutex, watch};

use holdfast_host::{HostError, blocking};
use holdfast_sys::file;

/// Size limit of a checkpoint, in bytes.
const MAX_CHECKPOINT_SIZE: u64 = 64 << 20;

/// A checkpoint file and the version of its content.
pub(super) struct Checkpoint {
    path: PathBuf,
    /// Incremented with every change of the content.
    version: watch::Sender<u64>,
    /// The version in the file.
    saved: Mutex<u64>,
}

impl Checkpoint {
    /// Creates a checkpoint whose content equals the file until [`Checkpoint::changed`] is called.
    pub(super) fn new(path: PathBuf) -> Checkpoint {
        Checkpoint {
            path,
            version: watch::Sender::new(0),
            saved: Mutex::new(0),
        }
    }

    /// The file's path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file; `None` if it does not exist. Blocking.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or is too large.
    pub(super) fn read(&self) -> io::Result<Option<String>> {
        file::read_text_if_there(&self.path, MAX_CHECKPOINT_SIZE)
    }

    /// Records a change of the content.
    pub(super) fn changed(&self) {
        self.version.send_modify(|version| *version += 1);
    }

    /// Notified of every change.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Writes the content, built by `text`, if the file is not up to date.
    ///
    /// # Errors
    ///
    /// If the file cannot be written; the next call retries.
    pub(super) async fn save(&self, text: impl FnOnce() -> String) -> Result<(), HostError> {
        let mut saved = self.saved.lock().await;
        let version = *self.version.borrow();
        if *saved == version {
            return Ok(());
        }
        let (path, text) = (self.path.clone(), text());
        blocking(move || Ok(file::replace(&path, text.as_bytes())?)).await?;
        *saved = version;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_unchanged_checkpoint_is_not_written() {
        let dir = tempfile::tempdir().expect("a directory");
        let checkpoint = Checkpoint::new(dir.path().join("below/checkpoint"));
        let read = || checkpoint.read().expect("read");
        assert_eq!(read(), None);
        let save = |text: &'static str| checkpoint.save(move || text.into());
        assert_eq!(save("nothing has changed").await, Ok(()));
        checkpoint.changed();
        assert!(save("there is no directory").await.is_err());
        std::fs::create_dir(dir.path().join("below")).expect("a directory");
        assert_eq!(save("first").await, Ok(()));
        assert_eq!(save("the same").await, Ok(()));
        assert_eq!(read().as_deref(), Some("first"));
        checkpoint.changed();
        assert_eq!(save("second").await, Ok(()));
        assert_eq!(read().as_deref(), Some("second"));
    }
}
