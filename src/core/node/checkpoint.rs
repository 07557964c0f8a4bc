//! What the checkpoints of the kubelet's managers have in common (kubelet's `pkg/kubelet/checkpointmanager`). Pure.

/// A checkpoint's head: what it says of itself, and what it should say.
pub(super) struct Head<'a> {
    /// The configuration's field.
    pub field: &'a str,
    /// The policy that it was written under.
    pub policy: &'a str,
    /// Its checksum; 0 where it has none.
    pub checksum: u64,
    /// The checksum of its content.
    pub expected: u64,
}

impl Head<'_> {
    /// Whether it is whole, and was written under the `policy` of now.
    ///
    /// # Errors
    ///
    /// It is damaged, or was written under another policy.
    pub(super) fn check(&self, policy: &str) -> Result<(), String> {
        if self.checksum != 0 && self.checksum != self.expected {
            return Err(format!(
                "its checksum is {}, and it should be {}",
                self.checksum, self.expected
            ));
        }
        if self.policy != policy {
            return Err(format!(
                "it was written under {}: {}, and now it is {policy}",
                self.field, self.policy
            ));
        }
        Ok(())
    }
}
