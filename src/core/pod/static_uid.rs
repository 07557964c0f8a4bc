//! The uid of a static pod. Pure.
//!
//! The API assigns no uid to static pods, so each agent derives one from the manifest. The kubelet hashes its internal
//! Go structures (`applyDefaults` in `pkg/kubelet/config/common.go`). Its uids therefore change between minor versions,
//! and other programs cannot compute them. A pod whose uid changes is restarted. To avoid that, a running pod keeps its
//! uid while its manifest is unchanged, whichever agent started it.

use std::collections::BTreeMap;

use jiff::Timestamp;

/// A pod that the runtime has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// The pod's [`full_name`](super::full_name).
    pub full_name: String,
    /// The pod's uid.
    pub uid: String,
    /// When the oldest of the pod's known sandboxes was created.
    pub since: Timestamp,
    /// Whether one of the pod's sandboxes is ready.
    pub ready: bool,
}

/// Whether a uid belongs to a static pod. Uids of the apiserver contain dashes.
#[must_use]
pub fn is_static(uid: &str) -> bool {
    uid.len() == 32 && uid.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Assigns uids to manifests. The key is a digest of a manifest's content and location.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Uids {
    started: Vec<Started>,
    kept: BTreeMap<String, String>,
}

impl Uids {
    /// Starts with the pods that the runtime has at the agent's start, and the uids that earlier agents kept. Kept uids
    /// that no pod of the runtime has are dropped.
    #[must_use]
    pub fn new(mut started: Vec<Started>, kept: BTreeMap<String, String>) -> Uids {
        started.retain(|pod| is_static(&pod.uid));
        // Pods that are ready precede others, and newer pods precede older ones.
        started.sort_by_key(|pod| std::cmp::Reverse((pod.ready, pod.since)));
        let runs = |uid: &String| started.iter().any(|pod| pod.uid == *uid);
        let kept = kept.into_iter().filter(|(_, uid)| runs(uid)).collect();
        Uids { started, kept }
    }

    /// The uid of a manifest's pod. If the pod was started after the last change of its manifest, the pod keeps its
    /// uid. Otherwise the uid is the digest. `changed` is the modification time of the manifest's file, if it is known.
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

    /// The uids to keep for the next start of an agent, by digest.
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
    fn a_running_static_pod_keeps_its_uid_until_its_manifest_changes() {
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
    fn a_uid_survives_a_touched_or_reverted_manifest() {
        let pods = vec![started("p-n_default", KUBELETS, 100, true)];
        let mut uids = Uids::new(pods.clone(), BTreeMap::new());
        assert_eq!(uids.of("p-n_default", OURS, Some(at(1))), KUBELETS);
        // The file is touched, then changed, then changed back.
        assert_eq!(uids.of("p-n_default", OURS, Some(at(500))), KUBELETS);
        assert_eq!(uids.of("p-n_default", OTHER, Some(at(501))), OTHER);
        assert_eq!(uids.of("p-n_default", OURS, Some(at(502))), KUBELETS);
        // The next agent keeps the uid while the pod runs.
        let mut next = Uids::new(pods, uids.kept().clone());
        assert_eq!(next.of("p-n_default", OURS, Some(at(502))), KUBELETS);
        let mut later = Uids::new(vec![], uids.kept().clone());
        assert_eq!(later.of("p-n_default", OURS, Some(at(502))), OURS);
        assert!(later.kept().is_empty());
    }
}
