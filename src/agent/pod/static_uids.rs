//! The uids of static pods, from the runtime and from the file in which they
//! persist across restarts (`core::pod::static_uid`).

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use jiff::Timestamp;

use holdfast_core::lock::lock;
use holdfast_core::pod::full_name_of;
use holdfast_core::pod::observed::ObservedPod;
use holdfast_core::pod::static_uid::{Started, Uids, is_static};
use holdfast_cri::{ListedPod, Runtime, RuntimeError};
use holdfast_sys::file;

/// Size limit of the file, in bytes.
const MAX_FILE_SIZE: u64 = 1 << 20;

/// Returns the static pods of the runtime, including those that another agent started.
pub async fn started(runtime: &dyn Runtime) -> Result<Vec<Started>, RuntimeError> {
    let mut observed = vec![];
    for pod in runtime.list().await? {
        if is_static(&pod.uid) {
            let found = runtime.observe(&pod.uid).await?;
            observed.push((pod, found));
        }
    }
    Ok(of_observed(&observed))
}

/// Like [`started`], for pods that were already observed.
#[must_use]
pub(crate) fn of_observed(observed: &[(ListedPod, ObservedPod)]) -> Vec<Started> {
    let statics = observed.iter().filter(|(pod, _)| is_static(&pod.uid));
    let started = statics.filter_map(|(pod, observed)| {
        Some(Started {
            full_name: full_name_of(&pod.namespace, &pod.name),
            uid: pod.uid.clone(),
            since: observed.sandboxes.iter().map(|s| s.created_at).min()?,
            ready: observed.sandboxes.iter().any(|s| s.ready),
        })
    });
    started.collect()
}

/// The uids, and the file that stores them.
pub(crate) struct KeptUids {
    path: PathBuf,
    uids: Mutex<Uids>,
}

impl KeptUids {
    /// Combines the runtime's pods with the file below the root directory. Blocking.
    #[must_use]
    pub fn load(root_dir: &Path, started: Vec<Started>) -> KeptUids {
        let path = root_dir.join("static_pod_uids");
        KeptUids {
            uids: Mutex::new(Uids::new(started, read(&path))),
            path,
        }
    }

    /// Returns the uid for a manifest.
    pub fn of(&self, full_name: &str, digest: &str, changed: Option<Timestamp>) -> String {
        let mut uids = lock(&self.uids);
        uids.of(full_name, digest, changed)
    }

    /// Writes the uids to the file if they changed. Blocking.
    pub fn save(&self) {
        let kept = {
            let uids = lock(&self.uids);
            uids.kept().clone()
        };
        if kept == read(&self.path) {
            return;
        }
        let written = serde_json::to_vec(&kept)
            .map_err(Into::into)
            .and_then(|text| file::replace(&self.path, &text));
        if let Err(error) = written {
            tracing::warn!(%error, path = %self.path.display(), "writing the uids of static pods failed: if a manifest is touched, its pod restarts at the next start of the agent");
        }
    }
}

/// Reads the file; an unreadable file counts as empty.
fn read(path: &Path) -> BTreeMap<String, String> {
    let text = file::read_text(path, MAX_FILE_SIZE).ok();
    text.and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or_default()
}

/// The last change of a file, including its name and owner. For a symbolic link, the later change of link and target.
pub fn changed(path: &Path) -> Option<Timestamp> {
    let of = |metadata: fs::Metadata| {
        let nanoseconds = i32::try_from(metadata.ctime_nsec()).ok()?;
        Timestamp::new(metadata.ctime(), nanoseconds).ok()
    };
    let (file, link) = (fs::metadata(path).ok()?, fs::symlink_metadata(path).ok()?);
    Some(of(file)?.max(of(link)?))
}
