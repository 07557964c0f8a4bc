//! State of volume expansions on a node: which are pending, and when to retry
//! (`pkg/volume/util/operationexecutor/node_expander.go`, `pkg/kubelet/volumemanager/cache`). Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::resize::Grown;
use crate::backoff::Doubling;

/// Back-off between attempts for a volume (`pkg/util/goroutinemap/exponentialbackoff`).
const BACKOFF: Doubling = Doubling::new(Duration::from_millis(500), Duration::from_secs(122));
/// Maximum number of volumes whose failed expansion is remembered.
const MAX_FAILED: usize = 4096;

/// Outcome of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptOutcome {
    /// The filesystem has the requested size.
    Done,
    /// Unknown: the expansion may still be in progress, or was not started.
    Unknown,
    /// Nothing was changed, and nothing is in progress.
    Failed,
    /// Failed, because the driver does not expand volumes in use.
    InUse,
}

/// When to expand a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextAttempt {
    /// Now.
    Now,
    /// Not before this time, because an attempt has failed.
    At(Timestamp),
    /// Not at all: the size is reached, or the driver does not expand the volume while it is in use here.
    Never,
}

/// A volume in use on the node.
#[derive(Debug)]
struct Known {
    /// Size of the filesystem on this node, in bytes.
    has: i64,
    /// Whether the driver requires that the volume leaves the node first.
    in_use: bool,
    pauses: Doubling,
    not_before: Option<Timestamp>,
}

/// Volumes with pending expansions, by unique volume name.
#[derive(Debug, Default)]
pub struct Expansions {
    volumes: BTreeMap<String, Known>,
    /// Volumes with a failed attempt, including those that have left the node since.
    failed: BTreeSet<String>,
}

impl Expansions {
    /// When to expand a volume. If the claim already has the new size, an expansion is due only if this node had less.
    pub fn due(&mut self, volume: &str, grown: &Grown, now: Timestamp) -> NextAttempt {
        let known = self.volumes.entry(volume.to_owned()).or_insert(Known {
            has: grown.claim_bytes,
            in_use: false,
            pauses: BACKOFF,
            not_before: None,
        });
        let is_known = grown.claim_has_size && grown.bytes <= known.has;
        match known.not_before {
            _ if is_known || known.in_use => NextAttempt::Never,
            Some(at) if at > now => NextAttempt::At(at),
            _ => NextAttempt::Now,
        }
    }

    /// Whether an attempt for this volume has failed before.
    #[must_use]
    pub fn has_failed(&self, volume: &str) -> bool {
        self.failed.contains(volume)
    }

    /// Records an attempt; returns when to retry.
    pub fn record_attempt(
        &mut self,
        volume: &str,
        grown: &Grown,
        outcome: AttemptOutcome,
        now: Timestamp,
    ) -> Option<Timestamp> {
        // The volume may have left the node meanwhile.
        let known = self.volumes.get_mut(volume)?;
        if outcome == AttemptOutcome::Done {
            (known.has, known.not_before) = (grown.bytes, None);
            known.pauses.reset();
            self.failed.remove(volume);
            return None;
        }
        let pause = SignedDuration::try_from(known.pauses.pause()).unwrap_or(SignedDuration::MAX);
        known.not_before = now.checked_add(pause).ok();
        known.in_use = outcome == AttemptOutcome::InUse;
        if outcome != AttemptOutcome::Unknown && self.failed.len() < MAX_FAILED {
            self.failed.insert(volume.to_owned());
        }
        known.not_before.filter(|_| !known.in_use)
    }

    /// Removes a volume that no pod of the node uses any more; it may be expandable now.
    pub fn remove(&mut self, volume: &str) {
        self.volumes.remove(volume);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grown(bytes: i64, claim_has_size: bool) -> Grown {
        Grown {
            namespace: "n".into(),
            claim: "c".into(),
            uid: None,
            claim_bytes: if claim_has_size { bytes } else { 1 },
            bytes,
            text: bytes.to_string(),
            records_state: false,
            claim_has_size,
            is_superseded: false,
        }
    }

    fn at(milliseconds: i64) -> Timestamp {
        Timestamp::from_millisecond(milliseconds).expect("a time")
    }

    #[test]
    fn failed_expansions_are_retried_with_doubling_pauses() {
        let mut known = Expansions::default();
        let two = grown(2, false);
        let mut now = 0;
        for pause in [500, 1000, 2000] {
            assert_eq!(known.due("v", &two, at(now)), NextAttempt::Now, "{now}");
            let retry = known.record_attempt("v", &two, AttemptOutcome::Unknown, at(now));
            now += pause;
            assert_eq!(retry, Some(at(now)));
            assert_eq!(known.due("v", &two, at(now - 1)), NextAttempt::At(at(now)));
        }
        assert!(!known.has_failed("v"), "the call may have succeeded");
        for _ in 0..20 {
            known.record_attempt("v", &two, AttemptOutcome::Failed, at(now));
        }
        assert!(known.has_failed("v"));
        let most = at(now + 122_000);
        assert_eq!(
            known.due("v", &two, at(now + 121_999)),
            NextAttempt::At(most)
        );
        assert_eq!(
            known.due("v", &two, most),
            NextAttempt::Now,
            "the pause has a maximum"
        );
        assert_eq!(
            known.record_attempt("v", &two, AttemptOutcome::Done, at(now)),
            None
        );
        assert!(!known.has_failed("v"));
        // The claim was not updated.
        assert_eq!(known.due("v", &two, at(now)), NextAttempt::Now);
    }

    #[test]
    fn an_offline_expansion_waits_until_the_volume_leaves_the_node() {
        let mut known = Expansions::default();
        let two = grown(2, false);
        assert_eq!(known.due("v", &two, at(0)), NextAttempt::Now);
        assert_eq!(
            known.record_attempt("v", &two, AttemptOutcome::InUse, at(0)),
            None
        );
        for later in [two.clone(), grown(3, false)] {
            assert_eq!(known.due("v", &later, at(1 << 40)), NextAttempt::Never);
        }
        assert_eq!(
            known.due("w", &two, at(0)),
            NextAttempt::Now,
            "another volume"
        );
        known.remove("v");
        assert_eq!(known.due("v", &two, at(0)), NextAttempt::Now);
        assert!(known.has_failed("v"), "the failure is remembered");
    }

    #[test]
    fn a_volume_expanded_on_another_node_is_expanded_here_if_already_mounted() {
        let mut known = Expansions::default();
        let (two, three) = (grown(2, true), grown(3, true));
        assert_eq!(
            known.due("v", &two, at(0)),
            NextAttempt::Never,
            "it already had this size when mounted"
        );
        assert_eq!(known.due("v", &three, at(0)), NextAttempt::Now);
        known.record_attempt("v", &three, AttemptOutcome::Done, at(0));
        assert_eq!(known.due("v", &three, at(0)), NextAttempt::Never);
    }
}
