//! Emits events while a volume's files are still being changed to the pod's group (`pkg/volume/volume_linux.go`).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;

use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::events::{Events, Kind};
use holdfast_core::lock::lock;
use holdfast_core::volume::permissions::{self, OwnershipChange};
use holdfast_sys::ownership;

/// The volumes of a pod with such events, by the directory whose files are being changed.
#[derive(Default)]
pub(super) struct PermissionEvents(Mutex<BTreeMap<PathBuf, AbortOnDropHandle<()>>>);

impl PermissionEvents {
    /// Emits events about a volume until all of its files are changed. Does nothing if this is running already.
    pub(super) fn begin(&self, events: &Events, pod: &Pod, giving: &OwnershipChange) {
        let mut all = lock(&self.0);
        all.retain(|_, task| !task.is_finished());
        all.entry(giving.root.clone()).or_insert_with(|| {
            let task = emit_while_running(events.clone(), pod.clone(), giving.clone());
            AbortOnDropHandle::new(tokio::spawn(task))
        });
    }
}

async fn emit_while_running(events: Events, pod: Pod, giving: OwnershipChange) {
    let progress = || ownership::progress(&giving.root);
    let Some(begun) = progress().map(|progress| progress.begun) else {
        return;
    };
    let (now, elapsed) = (Instant::now(), begun.elapsed());
    for count in 0.. {
        let left = permissions::due(count).saturating_sub(elapsed);
        tokio::time::sleep_until(now + left).await;
        // A later change of the group has its own events.
        let Some(progress) = progress().filter(|progress| progress.begun == begun) else {
            return;
        };
        let message = permissions::message(&giving.display_path, count, progress.files());
        events.pod(&pod, None, Kind::Warning, permissions::REASON, message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn a_slow_ownership_change_emits_events_until_it_completes() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("file"), "").expect("a file");
        let root = dir.path().to_owned();
        let (go, held) = std::sync::mpsc::channel::<()>();
        let group = nix::unistd::getegid().as_raw();
        let given = std::thread::spawn({
            let root = root.clone();
            move || {
                let wait = || {
                    held.recv().ok();
                    false
                };
                ownership::set_group(&root, group, false, false, &wait)
            }
        });
        while ownership::progress(&root).is_none_or(|progress| progress.files() == 0) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (events, mut messages) = Events::recorded();
        let pod: Pod = serde_json::from_value(serde_json::json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": []}}))
            .expect("a pod");
        let giving = OwnershipChange {
            root: root.clone(),
            display_path: "u/volumes/x/v".into(),
            progress: String::new(),
        };
        let permission_events = PermissionEvents::default();
        let mut attempt = async |seconds: u64| {
            // As in every attempt to set up the volume.
            permission_events.begin(&events, &pod, &giving);
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            messages()
        };
        assert!(attempt(29).await.is_empty());
        let first = attempt(2).await;
        assert!(first.len() == 1 && first[0].contains("longer than expected"));
        assert!(attempt(58).await.is_empty());
        let second = attempt(2).await;
        assert_eq!(
            second,
            ["Setting volume ownership for u/volumes/x/v, processed 1 files."]
        );
        go.send(()).expect("it waits");
        assert!(given.join().expect("given").is_ok());
        // No further events, and the task has returned.
        assert!(attempt(600).await.is_empty());
        assert!(
            lock(&permission_events.0)
                .values()
                .all(|handle| handle.is_finished())
        );
    }
}
