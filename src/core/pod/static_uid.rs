//! Which uid a static pod has. Pure.
//!
//! The API gives static pods no uid; each agent makes one of the manifest. The kubelet hashes its internal Go structures
//! (`applyDefaults` in `pkg/kubelet/config/common.go`), so its uids change from one minor version to the next, and no other
//! program comes to the same. A pod whose uid changes is started over. So a pod that runs keeps the uid that it runs under,
//! whichever agent started it, for as long as its manifest stays as it was then.

use std::collections::BTreeMap;

use jiff::Timestamp;

/// A pod that the runtime has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// Its name and namespace, as [`full_name`](super::full_name) has them.
    pub full_name: String,
    /// Its uid.
    pub uid: String,
    /// When its first sandbox that is still known was created.
    pub since: Timestamp,
    /// Whether a sandbox of it is ready.
    pub ready: bool,
}

/// Whether a uid is a static pod's: the apiserver's have dashes.
#[must_use]
pub fn is_static(uid: &str) -> bool {
    uid.len() == 32 && uid.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Uids of manifests, by a digest of what a manifest says and where it lies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Uids {
    started: Vec<Started>,
    kept: BTreeMap<String, String>,
}

impl Uids {
    /// Of what the runtime has at an agent's start, and of what was kept before it. Uids under which nothing runs any more
    /// are forgotten.
    #[must_use]
    pub fn new(mut started: Vec<Started>, kept: BTreeMap<String, String>) -> Uids {
        started.retain(|pod| is_static(&pod.uid));
        // What runs counts before what has ended, the newest first.
        started.sort_by_key(|pod| std::cmp::Reverse((pod.ready, pod.since)));
        let runs = |uid: &String| started.iter().any(|pod| pod.uid == *uid);
        let kept = kept.into_iter().filter(|(_, uid)| runs(uid)).collect();
        Uids { started, kept }
    }

    /// The uid of a manifest's pod: the one that it runs under, if the manifest has not been touched since; else the digest.
    /// `changed` is when the manifest's file was changed last, if that is known.
    pub fn of(&mut self, full_name: &str, digest: &str, changed: Option<Timestamp>) -> String {
        if let Some(uid) = self.kept.get(digest) {
            return uid.clone();
        }
        let runs = self.started.iter().find(|pod| pod.full_name == full_name);
        let same = runs.filter(|pod| changed.is_some_and(|changed| changed < pod.since));
        match same {
            Some(pod) if pod.uid != digest => {
                self.kept.insert(digest.to_owned(), pod.uid.clone());
                pod.uid.clone()
            }
            _ => digest.to_owned(),
        }
    }

    /// What is to be known at the next start: uids by digests.
    #[must_use]
    pub fn kept(&self) -> &BTreeMap<String, String> {
        &self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KUBELETS: &str = "0123456789abcdef0123456789abcdef";
    const OURS: &str = "ffffffffffffffffffffffffffffffff";
    const OTHER: &str = "00000000000000000000000000000000";

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    fn started(name: &str, uid: &str, since: i64, ready: bool) -> Started {
        Started {
            full_name: name.into(),
            uid: uid.into(),
            since: at(since),
            ready,
        }
    }

    #[test]
    fn a_pod_that_runs_keeps_its_uid_until_its_manifest_is_changed() {
        let of = |pods: &[Started], changed: Option<i64>| {
            Uids::new(pods.to_vec(), BTreeMap::new()).of("p-n_default", OURS, changed.map(at))
        };
        let kubelets = started("p-n_default", KUBELETS, 100, true);
        let api = started(
            "p-n_default",
            "3c5f9d3e-7c1c-4d0e-8f43-0d0b8a1f2c11",
            100,
            true,
        );
        let old = started("p-n_default", OTHER, 200, false);
        for (pods, changed, expected) in [
            (vec![kubelets.clone()], Some(99), KUBELETS),
            (vec![kubelets.clone()], Some(100), OURS),
            (vec![kubelets.clone()], Some(101), OURS),
            (vec![kubelets.clone()], None, OURS),
            (vec![api], Some(1), OURS),
            (
                vec![started("q-n_default", KUBELETS, 100, true)],
                Some(1),
                OURS,
            ),
            (vec![old.clone(), kubelets], Some(1), KUBELETS),
            (vec![old], Some(1), OTHER),
            (vec![], Some(1), OURS),
        ] {
            assert_eq!(of(&pods, changed), expected, "{pods:?} {changed:?}");
        }
    }

    #[test]
    fn a_uid_stays_with_the_words_of_its_manifest() {
        let pods = vec![started("p-n_default", KUBELETS, 100, true)];
        let mut uids = Uids::new(pods.clone(), BTreeMap::new());
        assert_eq!(uids.of("p-n_default", OURS, Some(at(1))), KUBELETS);
        // The file is touched, then changed, then as it was.
        assert_eq!(uids.of("p-n_default", OURS, Some(at(500))), KUBELETS);
        assert_eq!(uids.of("p-n_default", OTHER, Some(at(501))), OTHER);
        assert_eq!(uids.of("p-n_default", OURS, Some(at(502))), KUBELETS);
        // The next agent knows it too, while the pod runs.
        let mut next = Uids::new(pods, uids.kept().clone());
        assert_eq!(next.of("p-n_default", OURS, Some(at(502))), KUBELETS);
        let mut later = Uids::new(vec![], uids.kept().clone());
        assert_eq!(later.of("p-n_default", OURS, Some(at(502))), OURS);
        assert!(later.kept().is_empty());
    }
}
