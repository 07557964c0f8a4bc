//! The records of pulled images on disk (kubelet spec, 8.4), in the kubelet's layout.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::core::digest;
use crate::core::image::pulled::{By, Record};
use crate::sys::file;

/// The directories `pulling` and `pulled` below the agent's.
#[derive(Debug, Clone)]
pub struct Records(PathBuf);

fn name(of: &str) -> String {
    format!("sha256-{}", digest::sha256(of.as_bytes()))
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    tokio::task::spawn_blocking(work).await.ok()
}

impl Records {
    /// Below the agent's root directory.
    pub fn open(root: &Path) -> std::io::Result<Records> {
        let dir = root.join("image_manager");
        for below in ["pulling", "pulled"] {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(dir.join(below))?;
        }
        Ok(Records(dir))
    }

    fn intent(&self, image: &str) -> PathBuf {
        self.0.join("pulling").join(name(image))
    }

    fn record(&self, reference: &str) -> PathBuf {
        self.0.join("pulled").join(name(reference))
    }

    /// The record of an image, and whether a pull of it was begun and its end not noted.
    pub async fn read(&self, image: &str, reference: &str) -> (Option<Record>, bool) {
        let (record, intent) = (self.record(reference), self.intent(image));
        let read = move || {
            (
                std::fs::read(record)
                    .ok()
                    .and_then(|text| serde_json::from_slice(&text).ok()),
                intent.exists(),
            )
        };
        blocking(read).await.unwrap_or_default()
    }

    /// A pull is begun. Without this note an image that a crash left behind would count as preloaded.
    pub async fn begin(&self, image: &str) -> Result<(), String> {
        let path = self.intent(image);
        let text = json!({"kind": "ImagePullIntent", "apiVersion": "kubelet.config.k8s.io/v1beta1", "image": image}).to_string();
        let written = blocking(move || file::replace(&path, text.as_bytes())).await;
        written
            .ok_or("the note ended unexpectedly")?
            .map_err(|e| format!("that the image is pulled cannot be noted: {e}"))
    }

    /// A pull has succeeded.
    pub async fn done(
        &self,
        image: &str,
        reference: &str,
        repository: &str,
        by: By,
        now: jiff::Timestamp,
    ) -> Result<(), String> {
        let (path, intent) = (self.record(reference), self.intent(image));
        let (reference, repository) = (reference.to_owned(), repository.to_owned());
        let note = move || {
            let mut record: Record = std::fs::read(&path)
                .ok()
                .and_then(|text| serde_json::from_slice(&text).ok())
                .unwrap_or_default();
            record.image_ref = reference;
            record.note(&repository, by, &now.to_string());
            file::replace(&path, &serde_json::to_vec(&record)?)?;
            remove(&intent)
        };
        blocking(note)
            .await
            .ok_or("the note ended unexpectedly")?
            .map_err(|e: std::io::Error| format!("who pulled the image cannot be noted: {e}"))
    }

    /// A pull has failed.
    pub async fn failed(&self, image: &str) {
        let intent = self.intent(image);
        if let Some(Err(error)) = blocking(move || remove(&intent)).await {
            tracing::warn!(%error, image, "the note of a pull that failed stays");
        }
    }
}

fn remove(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::image::pulled::BySecret;

    #[tokio::test]
    async fn what_was_pulled_and_by_whom_is_found_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let records = Records::open(dir.path()).expect("opened");
        assert_eq!(records.read("r/x:1", "sha256:1").await, (None, false));
        records.begin("r/x:1").await.expect("noted");
        assert_eq!(records.read("r/x:1", "sha256:1").await, (None, true));
        let secret = BySecret {
            uid: "u".into(),
            namespace: "n".into(),
            name: "s".into(),
            credential_hash: "h".into(),
        };
        records
            .done(
                "r/x:1",
                "sha256:1",
                "r/x",
                By::Secret(secret.clone()),
                jiff::Timestamp::UNIX_EPOCH,
            )
            .await
            .expect("noted");
        let (record, pulling) = Records::open(dir.path())
            .expect("opened")
            .read("r/x:1", "sha256:1")
            .await;
        assert!(!pulling);
        assert_eq!(
            record.expect("a record").credential_mapping["r/x"].kubernetes_secrets,
            [secret]
        );
        records.begin("r/y").await.expect("noted");
        records.failed("r/y").await;
        assert_eq!(records.read("r/y", "sha256:2").await, (None, false));
    }
}
