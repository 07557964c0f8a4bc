//! The records of pulled images on disk, in the kubelet's layout (KEP-2535; `pkg/kubelet/images/pullmanager`).

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde_json::json;

use holdfast_core::digest;
use holdfast_core::image::pulled::{PullCredential, Record};
use holdfast_core::lock::lock;
use holdfast_host as host;
use holdfast_host::HostError;
use holdfast_sys::failure::doing;
use holdfast_sys::file;

/// The directories `pulling` and `pulled` below the agent's root directory.
#[derive(Debug, Clone)]
pub struct Records(Arc<Store>);

#[derive(Debug)]
struct Store {
    dir: PathBuf,
    /// Held while files are changed.
    write_lock: Mutex<()>,
    /// Pulls in progress, by image. Never held during disk access.
    pulls: Mutex<BTreeMap<String, usize>>,
}

/// A pull in progress. If it is dropped without a result, its intent file stays, as the outcome is unknown.
#[derive(Debug)]
pub struct Pull {
    store: Arc<Store>,
    image: String,
    ended: bool,
}

fn name(of: &str) -> String {
    format!("sha256-{}", digest::sha256(of.as_bytes()))
}

async fn blocking<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, HostError> {
    let done = host::blocking(move || Ok(work()?)).await;
    done.map_err(doing(what))
}

/// Reads a record file; `None` if it does not exist.
fn record_in(path: &Path) -> io::Result<Option<Record>> {
    match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => Ok(Some(serde_json::from_slice(&read?)?)),
    }
}

impl Store {
    fn intent(&self, image: &str) -> PathBuf {
        self.dir.join("pulling").join(name(image))
    }

    fn record(&self, reference: &str) -> PathBuf {
        self.dir.join("pulled").join(name(reference))
    }

    /// Removes one pull of the image. Returns whether it was the last.
    fn remove_pull(&self, image: &str) -> bool {
        let mut pulls = lock(&self.pulls);
        match pulls.get_mut(image) {
            Some(several) if *several > 1 => {
                *several -= 1;
                false
            }
            _ => {
                pulls.remove(image);
                true
            }
        }
    }
}

fn create_dir(dir: &Path) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(dir)
}

/// Replaces a file. Creates its directory again if it was removed while the agent runs (`writeFile` in
/// `pkg/kubelet/images/pullmanager/fs_pullrecords.go`): otherwise no image could be pulled until the next start.
fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    path.parent().map_or(Ok(()), create_dir)?;
    file::replace(path, content)
}

impl Records {
    /// Opens the records, and creates their directories below the root directory.
    pub fn open(root: &Path) -> io::Result<Records> {
        let dir = root.join("image_manager");
        for below in ["pulling", "pulled"] {
            create_dir(&dir.join(below))?;
        }
        Ok(Records(Arc::new(Store {
            dir,
            write_lock: Mutex::default(),
            pulls: Mutex::default(),
        })))
    }

    /// Returns the image's record, and whether there is an intent file: a pull that is in progress or has an unknown
    /// outcome. After an error it is unknown whether there is a record.
    pub async fn read(
        &self,
        image: &str,
        reference: &str,
    ) -> Result<(Option<Record>, bool), HostError> {
        let (record, intent) = (self.0.record(reference), self.0.intent(image));
        // The intent is read first: a pull that completes meanwhile writes its record before it removes the intent.
        let read = move || {
            let pulling = intent.try_exists()?;
            Ok((record_in(&record)?, pulling))
        };
        blocking("cannot read the image's pull record", read).await
    }

    /// Writes the intent file of a pull. Without it, an image pulled before a crash would count as preloaded.
    pub(crate) async fn record_intent(&self, image: &str) -> Result<Pull, HostError> {
        let (store, image) = (self.0.clone(), image.to_owned());
        let text = json!({"kind": "ImagePullIntent", "apiVersion": "kubelet.config.k8s.io/v1beta1", "image": image}).to_string();
        let write_record = move || {
            let _guard = lock(&store.write_lock);
            write(&store.intent(&image), text.as_bytes())?;
            *lock(&store.pulls).entry(image.clone()).or_default() += 1;
            Ok(Pull {
                store: store.clone(),
                image,
                ended: false,
            })
        };
        blocking("cannot record the start of the image pull", write_record).await
    }
}

impl Pull {
    /// Records a successful pull. `untagged` is the image's name in the pod, without tag and digest.
    pub(crate) async fn record_success(
        mut self,
        reference: &str,
        untagged: &str,
        by: PullCredential,
        now: jiff::Timestamp,
    ) -> Result<(), HostError> {
        let (reference, untagged) = (reference.to_owned(), untagged.to_owned());
        let write_record = move || {
            let store = self.store.clone();
            let _guard = lock(&store.write_lock);
            let path = store.record(&reference);
            let known = record_in(&path).unwrap_or_else(|error| {
                tracing::warn!(%error, image = self.image, "cannot read the image's pull record; replacing it");
                None
            });
            let mut record = known.unwrap_or_default();
            record.image_ref = reference;
            record.add_pull(&untagged, by, &now.to_string());
            write(&path, &serde_json::to_vec(&record)?)?;
            self.finish()
        };
        blocking("cannot write the image's pull record", write_record).await
    }

    /// Records a failed pull.
    pub async fn record_failure(mut self) {
        let image = self.image.clone();
        let end = move || {
            let store = self.store.clone();
            let _guard = lock(&store.write_lock);
            self.finish()
        };
        if let Err(error) = blocking("cannot remove the pull intent", end).await {
            tracing::warn!(%error, image, "the intent file of a failed image pull was not removed");
        }
    }

    /// The last pull of an image removes the intent file.
    fn finish(&mut self) -> io::Result<()> {
        self.ended = true;
        if self.store.remove_pull(&self.image) {
            remove(&self.store.intent(&self.image))
        } else {
            Ok(())
        }
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        if !self.ended {
            self.store.remove_pull(&self.image);
        }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_core::image::pulled::BySecret;

    const IMAGE: &str = "r/x:1";
    const ID: &str = "sha256:1";

    fn secret() -> BySecret {
        BySecret {
            uid: "u".into(),
            namespace: "n".into(),
            name: "s".into(),
            credential_hash: "h".into(),
        }
    }

    async fn done(pull: Pull, by: PullCredential) -> Result<(), HostError> {
        pull.record_success(ID, "r/x", by, jiff::Timestamp::UNIX_EPOCH)
            .await
    }

    #[tokio::test]
    async fn pull_records_survive_a_restart() {
        let dir = tempfile::tempdir().expect("a directory");
        let records = Records::open(dir.path()).expect("opened");
        assert_eq!(records.read(IMAGE, ID).await, Ok((None, false)));
        let pull = records.record_intent(IMAGE).await.expect("noted");
        assert_eq!(records.read(IMAGE, ID).await, Ok((None, true)));
        done(pull, PullCredential::Secret(secret()))
            .await
            .expect("noted");
        let (record, pulling) = Records::open(dir.path())
            .expect("opened")
            .read(IMAGE, ID)
            .await
            .expect("read");
        assert!(!pulling);
        assert_eq!(
            record.expect("a record").credential_mapping["r/x"].kubernetes_secrets,
            [secret()]
        );
    }

    #[tokio::test]
    async fn pulls_are_recorded_after_the_directory_was_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let records = Records::open(dir.path()).expect("opened");
        let remove = || std::fs::remove_dir_all(dir.path().join("image_manager"));
        remove().expect("removed");
        let pull = records.record_intent(IMAGE).await.expect("an intent");
        remove().expect("removed");
        done(pull, PullCredential::Secret(secret()))
            .await
            .expect("a record");
        let (record, pulling) = records.read(IMAGE, ID).await.expect("read");
        assert!(record.is_some() && !pulling);
    }

    #[tokio::test]
    async fn a_pull_intent_is_removed_with_the_last_of_several_pulls() {
        let dir = tempfile::tempdir().expect("a directory");
        let records = Records::open(dir.path()).expect("opened");
        let begin = async || records.record_intent(IMAGE).await.expect("noted");
        let pulling = async || records.read(IMAGE, ID).await.expect("read").1;
        let (first, second, third) = (begin().await, begin().await, begin().await);
        first.record_failure().await;
        assert!(pulling().await, "two pulls are in progress");
        drop(second);
        assert!(pulling().await, "one pull is in progress");
        third.record_failure().await;
        assert!(!pulling().await, "no pull is in progress");
        drop(begin().await);
        assert!(
            pulling().await,
            "the outcome of a cancelled pull is unknown"
        );
        begin().await.record_failure().await;
        assert!(!pulling().await);
    }

    #[tokio::test]
    async fn an_unreadable_pull_record_is_an_error_and_is_replaced_by_the_next_pull() {
        let dir = tempfile::tempdir().expect("a directory");
        let records = Records::open(dir.path()).expect("opened");
        std::fs::write(records.0.record(ID), "{").expect("written");
        assert!(records.read(IMAGE, ID).await.is_err());
        let pull = records.record_intent(IMAGE).await.expect("noted");
        done(pull, PullCredential::Anyone).await.expect("noted");
        let (record, pulling) = records.read(IMAGE, ID).await.expect("read");
        assert!(record.is_some() && !pulling);
    }
}
