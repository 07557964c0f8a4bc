//! The usage of volumes, which the volume manager measures and the HTTP API serves.

/// The usage of a volume.
#[derive(Debug, Clone, Default)]
pub(crate) struct VolumeFigures {
    /// The volume's name in the pod.
    pub name: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The claim's name.
    pub claim: Option<String>,
    /// Bytes: used, capacity, available.
    pub bytes: (u64, u64, u64),
    /// Inodes: used, capacity, free.
    pub inodes: (u64, u64, u64),
    /// Whether the CSI driver reports the volume as abnormal.
    pub abnormal: Option<bool>,
}
