//! Checks that the checkpoints of all resource managers share (`pkg/kubelet/checkpointmanager`). Pure.

/// Checksum and policy of a checkpoint.
pub(super) struct Head<'a> {
    /// The configuration field that sets the policy.
    pub field: &'a str,
    /// The policy that was active when the checkpoint was written.
    pub policy: &'a str,
    /// The checksum in the file; 0 if there is none.
    pub checksum: u64,
    /// The checksum computed from the content.
    pub expected: u64,
}

impl Head<'_> {
    /// Checks that the checkpoint is intact and was written under the current `policy`.
    ///
    /// # Errors
    ///
    /// The checksum does not match, or the policy differs.
    pub(super) fn check(&self, policy: &str) -> Result<(), String> {
        if self.checksum != 0 && self.checksum != self.expected {
            return Err(format!(
                "its checksum is {} instead of {}",
                self.checksum, self.expected
            ));
        }
        if self.policy != policy {
            return Err(format!(
                "it was written with {}: {}, and the configuration has {policy}",
                self.field, self.policy
            ));
        }
        Ok(())
    }
}
