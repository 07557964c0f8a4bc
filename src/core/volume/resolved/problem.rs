//! Why a volume cannot be had, and in which words pods are told.

use crate::core::fault::{Class, Fault};
use crate::core::volume::permissions::{self, Giving};

/// Why a volume cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// Its claim is in the way.
    #[error("{0}")]
    Claim(String),
    /// It cannot be set up.
    #[error("{0}")]
    SetUp(Fault),
    /// It cannot be had as a device.
    #[error("{0}")]
    Map(Fault),
    /// A call for it has not ended: nothing has failed yet, and it is tried again when that has ended.
    #[error("{why}")]
    UnderWay {
        /// The kubelet's name of the step that waits for it.
        step: &'static str,
        /// What has not ended.
        why: String,
    },
    /// Its files are still being given to the pod's group.
    #[error("{}", .0.progress)]
    Permissions(Giving),
    /// Its disk has another filesystem than it asks for.
    #[error("{0}")]
    Mismatch(String),
    /// It is to be larger than it is before the pod has it.
    #[error("{step} failed while expanding volume: {why}")]
    Growth {
        /// The kubelet's name of the step that waits for it.
        step: &'static str,
        /// Why it was not grown.
        why: String,
    },
    /// It is not attached yet.
    #[error("{step} failed: {why}")]
    Unattached {
        /// The kubelet's name of the step that waits for it.
        step: &'static str,
        /// Why.
        why: String,
        /// Its driver serves no more volumes on this node, and says how often it is to be asked for their number.
        is_full: bool,
    },
    /// One of several steps has failed.
    #[error("{step} failed: {why}")]
    Step {
        /// The kubelet's name of it, `MountVolume.MountDevice` for instance.
        step: &'static str,
        /// The name of the persistent volume, where it is not known otherwise.
        of: Option<String>,
        /// Why.
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
            | Problem::Growth { step, .. }
            | Problem::UnderWay { step, .. }
                if step.starts_with("MapVolume.") =>
            {
                "FailedMapVolume"
            }
            Problem::Step { .. }
            | Problem::Unattached { .. }
            | Problem::Growth { .. }
            | Problem::UnderWay { .. }
            | Problem::Claim(_)
            | Problem::SetUp(_)
            | Problem::Mismatch(_) => "FailedMount",
        }
    }

    /// It could not be set up this time.
    #[must_use]
    pub fn later(why: impl Into<String>) -> Problem {
        Problem::SetUp(Fault::later(why))
    }

    /// What it means for the next try.
    #[must_use]
    pub fn class(&self) -> Class {
        match self {
            Problem::SetUp(fault) | Problem::Map(fault) => fault.class,
            Problem::Claim(_) => Class::WaitForNews,
            Problem::UnderWay { .. }
            | Problem::Permissions(_)
            | Problem::Mismatch(_)
            | Problem::Growth { .. }
            | Problem::Unattached { .. }
            | Problem::Step { .. } => Class::RetryLater,
        }
    }

    /// A call for a volume that has not ended.
    #[must_use]
    pub fn under_way(why: String) -> Problem {
        let step = "MountVolume.SetUp";
        Problem::UnderWay { step, why }
    }

    /// A volume that was not grown.
    #[must_use]
    pub fn not_grown(why: String) -> Problem {
        let step = "MountVolume.Setup";
        Problem::Growth { step, why }
    }

    /// Whether something for the volume is still being done, so that there is no outcome yet.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        matches!(self, Problem::UnderWay { .. } | Problem::Permissions(_))
    }

    /// The same of a volume that is a device.
    #[must_use]
    pub fn of_device(self) -> Problem {
        let step = "MapVolume.SetUpDevice";
        match self {
            Problem::SetUp(fault) => Problem::Map(fault),
            Problem::UnderWay { why, .. } => Problem::UnderWay { step, why },
            Problem::Growth { why, .. } => Problem::Growth {
                step: "MapVolume.MarkVolumeAsMounted",
                why,
            },
            other => other,
        }
    }

    /// A step that has failed.
    #[must_use]
    pub fn at(step: &'static str, why: impl Into<String>) -> Problem {
        Problem::Step {
            step,
            of: None,
            why: why.into(),
        }
    }

    /// The message of the pod's event (kubelet spec, 9.1 and 9.4). `volume` is the pod's name for it where its claim is in the
    /// way, else the persistent volume's, if there is one.
    #[must_use]
    pub fn told(&self, volume: &str) -> String {
        match self {
            Problem::Claim(why) => {
                format!(
                    "Unable to attach or mount volumes: unmounted volumes=[{volume}], failed to process volumes=[{volume}]: {why}"
                )
            }
            Problem::SetUp(Fault { message: why, .. }) | Problem::Mismatch(why) => {
                format!("MountVolume.SetUp failed for volume {volume:?} : {why}")
            }
            Problem::Permissions(giving) => format!("volume {volume:?}: {}", giving.progress),
            Problem::Map(Fault { message: why, .. }) => {
                format!("MapVolume.SetUpDevice failed for volume {volume:?} : {why}")
            }
            Problem::Unattached { step, why, .. } | Problem::UnderWay { step, why } => {
                format!("{step} failed for volume {volume:?} : {why}")
            }
            Problem::Growth { step, why } => {
                format!("{step} failed while expanding volume for volume {volume:?} : {why}")
            }
            Problem::Step { step, of, why } => {
                let volume = of.as_deref().unwrap_or(volume);
                format!("{step} failed for volume {volume:?} : {why}")
            }
        }
    }
}
