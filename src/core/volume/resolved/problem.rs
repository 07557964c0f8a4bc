//! Problems with volumes, and the messages in the pod's events.

use crate::fault::{Class, Fault};
use crate::volume::permissions::{self, OwnershipChange};

/// Why a volume is not available to a pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// Its claim cannot be used.
    #[error("{0}")]
    Claim(String),
    /// Mounting failed.
    #[error("{0}")]
    SetUp(Fault),
    /// Mapping the block device failed.
    #[error("{0}")]
    Map(Fault),
    /// A call for the volume is still in progress. Nothing has failed, and the volume is retried when the call
    /// completes.
    #[error("{why}")]
    UnderWay {
        /// The kubelet's name of the waiting step.
        step: &'static str,
        /// The call in progress.
        why: String,
    },
    /// The change of file ownership to the pod's group is in progress.
    #[error("{}", .0.progress)]
    Permissions(OwnershipChange),
    /// The disk has another filesystem than requested.
    #[error("{0}")]
    Mismatch(String),
    /// The volume must be expanded before the pod can use it.
    #[error("{step} failed while expanding volume: {why}")]
    ExpansionFailed {
        /// The kubelet's name of the waiting step.
        step: &'static str,
        /// Why the expansion failed.
        why: String,
    },
    /// The volume is not attached.
    #[error("{step} failed: {why}")]
    Unattached {
        /// The kubelet's name of the waiting step.
        step: &'static str,
        /// Why the volume is not attached.
        why: String,
        /// Whether the driver's attachment limit is reached. Only set for drivers whose limit is refreshed periodically
        /// (`nodeAllocatableUpdatePeriodSeconds`).
        is_full: bool,
    },
    /// A step failed.
    #[error("{step} failed: {why}")]
    Step {
        /// The kubelet's name of the step, such as `MountVolume.MountDevice`.
        step: &'static str,
        /// Name of the persistent volume, if the caller does not know it.
        of: Option<String>,
        /// The error.
        why: String,
    },
}

impl From<Fault> for Problem {
    fn from(fault: Fault) -> Problem {
        Problem::SetUp(fault)
    }
}

impl Problem {
    /// The reason of the pod's event.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Problem::Map(_) => "FailedMapVolume",
            Problem::Permissions(_) => permissions::REASON,
            Problem::Step { step, .. } if step.ends_with(".NodeAffinity check") => "FailedMount",
            Problem::Step { step, .. }
            | Problem::Unattached { step, .. }
            | Problem::ExpansionFailed { step, .. }
            | Problem::UnderWay { step, .. }
                if step.starts_with("MapVolume.") =>
            {
                "FailedMapVolume"
            }
            Problem::Step { .. }
            | Problem::Unattached { .. }
            | Problem::ExpansionFailed { .. }
            | Problem::UnderWay { .. }
            | Problem::Claim(_)
            | Problem::SetUp(_)
            | Problem::Mismatch(_) => "FailedMount",
        }
    }

    /// A mount failure that is retried later.
    #[must_use]
    pub fn later(why: impl Into<String>) -> Problem {
        Problem::SetUp(Fault::later(why))
    }

    /// How the problem is retried.
    #[must_use]
    pub fn class(&self) -> Class {
        match self {
            Problem::SetUp(fault) | Problem::Map(fault) => fault.class,
            Problem::Claim(_) => Class::WaitForChange,
            Problem::UnderWay { .. }
            | Problem::Permissions(_)
            | Problem::Mismatch(_)
            | Problem::ExpansionFailed { .. }
            | Problem::Unattached { .. }
            | Problem::Step { .. } => Class::RetryLater,
        }
    }

    /// A mount call in progress.
    #[must_use]
    pub fn under_way(why: String) -> Problem {
        let step = "MountVolume.SetUp";
        Problem::UnderWay { step, why }
    }

    /// A failed expansion.
    #[must_use]
    pub fn expansion_failed(why: String) -> Problem {
        let step = "MountVolume.Setup";
        Problem::ExpansionFailed { step, why }
    }

    /// Whether an operation is still in progress, so that there is no result yet.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        matches!(self, Problem::UnderWay { .. } | Problem::Permissions(_))
    }

    /// The equivalent problem of a block device.
    #[must_use]
    pub fn of_device(self) -> Problem {
        let step = "MapVolume.SetUpDevice";
        match self {
            Problem::SetUp(fault) => Problem::Map(fault),
            Problem::UnderWay { why, .. } => Problem::UnderWay { step, why },
            Problem::ExpansionFailed { why, .. } => Problem::ExpansionFailed {
                step: "MapVolume.MarkVolumeAsMounted",
                why,
            },
            other => other,
        }
    }

    /// A failed step.
    #[must_use]
    pub fn step_failed(step: &'static str, why: impl Into<String>) -> Problem {
        Problem::Step {
            step,
            of: None,
            why: why.into(),
        }
    }

    /// Message of the pod's event. `volume` is the name in the pod spec for problems with the claim, otherwise the name
    /// of the persistent volume, if there is one.
    #[must_use]
    pub fn event_message(&self, volume: &str) -> String {
        match self {
            Problem::Claim(why) => {
                format!(
                    "Unable to attach or mount volumes: unmounted volumes=[{volume}], failed to process volumes=[{volume}]: {why}"
                )
            }
            Problem::SetUp(Fault { message: why, .. }) | Problem::Mismatch(why) => {
                format!("MountVolume.SetUp failed for volume {volume:?} : {why}")
            }
            Problem::Permissions(change) => format!("volume {volume:?}: {}", change.progress),
            Problem::Map(Fault { message: why, .. }) => {
                format!("MapVolume.SetUpDevice failed for volume {volume:?} : {why}")
            }
            Problem::Unattached { step, why, .. } | Problem::UnderWay { step, why } => {
                format!("{step} failed for volume {volume:?} : {why}")
            }
            Problem::ExpansionFailed { step, why } => {
                format!("{step} failed while expanding volume for volume {volume:?} : {why}")
            }
            Problem::Step { step, of, why } => {
                let volume = of.as_deref().unwrap_or(volume);
                format!("{step} failed for volume {volume:?} : {why}")
            }
        }
    }
}
