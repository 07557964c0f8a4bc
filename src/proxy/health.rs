//! Whether this proxy and its node are healthy, as kube-proxy decides (`pkg/proxy/healthcheck/proxy_health.go`): the proxy
//! while no change waits too long for its transaction, and the node unless it is about to be deleted. Pure.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};

/// A change that waits longer than this is late: twice the default of `syncPeriod`.
const MAX_DELAY: Duration = Duration::from_secs(60);
/// The taint of the cluster autoscaler on a node that it is about to delete.
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

/// Whether a load balancer may send traffic to the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Eligibility {
    /// The node may receive traffic. This is so while the Node is unknown, too.
    Eligible,
    /// The node is being deleted.
    Leaving,
}

/// Decides by the Node object.
pub(crate) fn eligibility(node: Option<&Node>) -> Eligibility {
    let leaves = node.is_some_and(|node| {
        let spec = node.spec.as_ref();
        let mut taints = spec.into_iter().flat_map(|s| s.taints.iter().flatten());
        node.metadata.deletion_timestamp.is_some() || taints.any(|t| t.key == TO_BE_DELETED)
    });
    if leaves {
        Eligibility::Leaving
    } else {
        Eligibility::Eligible
    }
}

/// The facts for an answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Health {
    /// When the last transaction was committed; `None` before the first one.
    pub(crate) last_updated: Option<Timestamp>,
    /// How long the oldest change has been waiting; `None` if all changes are committed.
    pub(crate) waiting: Option<Duration>,
    /// Whether a load balancer may send traffic to the node.
    pub(crate) eligibility: Eligibility,
}

impl Health {
    /// Whether the rules are current. A proxy that is starting is healthy.
    pub(crate) fn is_current(&self) -> bool {
        self.last_updated.is_none() || self.waiting.is_none_or(|waiting| waiting < MAX_DELAY)
    }

    /// The answer of `/healthz`: status and body.
    pub(crate) fn healthz(&self, now: Timestamp) -> (u16, Value) {
        let is_eligible = self.eligibility == Eligibility::Eligible;
        let (code, mut body) = self.answer(self.is_current() && is_eligible, now);
        body["nodeEligible"] = is_eligible.into();
        (code, body)
    }

    /// The answer of `/livez`, which does not depend on the node.
    pub(crate) fn livez(&self, now: Timestamp) -> (u16, Value) {
        self.answer(self.is_current(), now)
    }

    /// A healthy proxy reports the current time as its last update, as kube-proxy does for clients of older versions.
    fn answer(&self, is_healthy: bool, now: Timestamp) -> (u16, Value) {
        let updated = self.last_updated.filter(|_| !is_healthy);
        let updated = updated.map(shown).unwrap_or_else(|| {
            if is_healthy {
                shown(now)
            } else {
                // The zero time of Go.
                "0001-01-01 00:00:00 +0000 UTC".to_owned()
            }
        });
        let code = if is_healthy { 200 } else { 503 };
        (
            code,
            json!({"lastUpdated": updated, "currentTime": shown(now)}),
        )
    }
}

/// A time as Go's `Time.String` writes it.
fn shown(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d %H:%M:%S%.f +0000 UTC").to_string()
}

/// The answer of a Service's health check port (`pkg/proxy/healthcheck/service_health.go`): status and body.
pub(crate) fn service_health(
    (namespace, name): (&str, &str),
    local_endpoints: usize,
    is_current: bool,
) -> (u16, Value) {
    let code = if local_endpoints > 0 && is_current {
        200
    } else {
        503
    };
    let body = json!({
        "service": {"namespace": namespace, "name": name},
        "localEndpoints": local_endpoints, "serviceProxyHealthy": is_current,
    });
    (code, body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(fields: Value) -> Node {
        serde_json::from_value(fields).expect("a node")
    }

    #[test]
    fn a_node_that_is_being_deleted_gets_no_traffic() {
        let tainted = |key: &str| json!({"metadata": {}, "spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}});
        let deleted = json!({"metadata": {"deletionTimestamp": "2026-11-29T17:00:00Z"}});
        for (fields, expected) in [
            (json!({"metadata": {}}), Eligibility::Eligible),
            (tainted("other"), Eligibility::Eligible),
            (tainted(TO_BE_DELETED), Eligibility::Leaving),
            (deleted, Eligibility::Leaving),
        ] {
            assert_eq!(
                eligibility(Some(&node(fields.clone()))),
                expected,
                "{fields}"
            );
        }
        assert_eq!(eligibility(None), Eligibility::Eligible);
    }

    #[test]
    fn answers_depend_on_late_changes_and_on_the_node() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        let second = Duration::from_secs(1);
        use Eligibility::{Eligible, Leaving};
        for (updated, waiting, eligibility, healthz, livez) in [
            (None, None, Eligible, 200, 200),
            // Starting: the first lists may take any time.
            (None, Some(MAX_DELAY * 2), Eligible, 200, 200),
            (None, None, Leaving, 503, 200),
            (Some(5), None, Eligible, 200, 200),
            (Some(5), Some(MAX_DELAY - second), Eligible, 200, 200),
            (Some(5), Some(MAX_DELAY), Eligible, 503, 503),
            (Some(5), None, Leaving, 503, 200),
        ] {
            let health = Health {
                last_updated: updated.map(at),
                waiting,
                eligibility,
            };
            let (code, body) = health.healthz(at(100));
            assert_eq!(code, healthz, "{health:?}");
            assert_eq!(body["nodeEligible"], eligibility == Eligible);
            assert_eq!(health.livez(at(100)).0, livez, "{health:?}");
            let updated = body["lastUpdated"].as_str().expect("a text");
            assert_eq!(updated == body["currentTime"], code == 200, "{health:?}");
        }
        assert_eq!(shown(at(0)), "1970-01-01 00:00:00 +0000 UTC");
    }

    #[test]
    fn a_service_is_healthy_with_endpoints_on_this_node() {
        for (endpoints, is_current, expected) in [
            (0, true, 503),
            (1, true, 200),
            (3, false, 503),
            (0, false, 503),
        ] {
            let (code, body) = service_health(("default", "web"), endpoints, is_current);
            assert_eq!(code, expected);
            let expected = json!({"service": {"namespace": "default", "name": "web"},
                "localEndpoints": endpoints, "serviceProxyHealthy": is_current});
            assert_eq!(body, expected);
        }
    }
}
