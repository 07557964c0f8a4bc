//! The SELinux labels that pods require for their volumes: metrics, and conflicts between labels (KEP-1710).

use k8s_openapi::api::core::v1::{Pod, Volume};

use super::Parts;
use holdfast_core::pod;
use holdfast_core::volume::csi;
use holdfast_core::volume::resolved::{Problem, ResolvedVolume, Source};
use holdfast_core::volume::selinux::{self, Admission};

/// Records the label of a pod's volume. Rejects conflicting labels of volumes that only one pod may use, as only these
/// are mounted with a label. Does nothing without SELinux.
pub(super) async fn admit(
    parts: &Parts,
    pod: &Pod,
    volume: &Volume,
    resolved: &ResolvedVolume,
) -> Result<(), Problem> {
    let Some(files) = parts.machine.selinux.as_deref() else {
        return Ok(());
    };
    let mode = resolved.access_mode;
    let label = match selinux::wanted(pod, &volume.name, files) {
        Ok(label) => label,
        Err(several) => {
            let is_error = mode == selinux::SINGLE_POD;
            parts.metrics.conflicting_labels(mode, is_error);
            return match is_error {
                true => Err(Problem::Claim(several.message)),
                false => Ok(()),
            };
        }
    };
    if !mounts_with_label(parts, resolved).await? {
        return Ok(());
    }
    // The format of these metrics, unlike others.
    let plugin = resolved.qualified_plugin().replacen(':', "/", 1);
    let (uid, mut name) = (pod::uid(pod), resolved.name.clone());
    if mode == selinux::INLINE {
        // Inline volumes belong to their pod: those of other pods with the same name are different volumes.
        name = format!("{uid}/{name}");
    }
    let labels = [plugin.as_str(), mode];
    let admission = parts
        .metrics
        .label_admitted(uid, &name, label.as_deref(), labels);
    match admission {
        Admission::Conflict(why) if mode == selinux::SINGLE_POD => Err(Problem::Claim(why)),
        Admission::Conflict(_) | Admission::New | Admission::Same => Ok(()),
    }
}

/// Whether volumes of this kind can be mounted with a label.
async fn mounts_with_label(parts: &Parts, resolved: &ResolvedVolume) -> Result<bool, Problem> {
    Ok(match &resolved.source {
        Source::Csi(served) => {
            let driver = parts.api.csi_driver(&served.driver).await;
            let driver = driver.map_err(|e| Problem::later(e.to_string()))?;
            csi::mounts_with_label(driver.as_ref())
        }
        Source::Disk { .. } => true,
        Source::EmptyDir(_)
        | Source::Files { .. }
        | Source::HostPath { .. }
        | Source::Image
        | Source::Local { .. }
        | Source::Nfs { .. } => false,
    })
}
