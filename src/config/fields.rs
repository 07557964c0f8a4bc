//! The fields of KubeletConfiguration v1beta1, and how each is handled. The table in the documentation is generated
//! from this.

use serde_json::{Map, Value, json};

use super::document::{Document, WITHOUT_EFFECT};
use super::effective;
use super::values::is_unset;

/// All fields of the format (Kubernetes 1.36).
const ALL: [&str; 124] = [
    "address",
    "allowedUnsafeSysctls",
    "authentication",
    "authorization",
    "cgroupDriver",
    "cgroupRoot",
    "cgroupsPerQOS",
    "clusterDNS",
    "clusterDomain",
    "configMapAndSecretChangeDetectionStrategy",
    "containerLogMaxFiles",
    "containerLogMaxSize",
    "containerLogMaxWorkers",
    "containerLogMonitorInterval",
    "containerRuntimeEndpoint",
    "contentType",
    "cpuCFSQuota",
    "cpuCFSQuotaPeriod",
    "cpuManagerPolicy",
    "cpuManagerPolicyOptions",
    "cpuManagerReconcilePeriod",
    "crashLoopBackOff",
    "enableContentionProfiling",
    "enableControllerAttachDetach",
    "enableDebugFlagsHandler",
    "enableDebuggingHandlers",
    "enableProfilingHandler",
    "enableServer",
    "enableSystemLogHandler",
    "enableSystemLogQuery",
    "enforceNodeAllocatable",
    "eventBurst",
    "eventRecordQPS",
    "evictionHard",
    "evictionMaxPodGracePeriod",
    "evictionMinimumReclaim",
    "evictionPressureTransitionPeriod",
    "evictionSoft",
    "evictionSoftGracePeriod",
    "failCgroupV1",
    "failSwapOn",
    "featureGates",
    "fileCheckFrequency",
    "hairpinMode",
    "healthzBindAddress",
    "healthzPort",
    "httpCheckFrequency",
    "imageGCHighThresholdPercent",
    "imageGCLowThresholdPercent",
    "imageMaximumGCAge",
    "imageMinimumGCAge",
    "imagePullCredentialsVerificationPolicy",
    "imageServiceEndpoint",
    "iptablesDropBit",
    "iptablesMasqueradeBit",
    "kernelMemcgNotification",
    "kubeAPIBurst",
    "kubeAPIQPS",
    "kubeletCgroups",
    "kubeReserved",
    "kubeReservedCgroup",
    "localStorageCapacityIsolation",
    "logging",
    "makeIPTablesUtilChains",
    "maxOpenFiles",
    "maxParallelImagePulls",
    "maxPods",
    "memoryManagerPolicy",
    "memoryReservationPolicy",
    "memorySwap",
    "memoryThrottlingFactor",
    "mergeDefaultEvictionSettings",
    "nodeLeaseDurationSeconds",
    "nodeStatusMaxImages",
    "nodeStatusReportFrequency",
    "nodeStatusUpdateFrequency",
    "oomScoreAdj",
    "podCIDR",
    "podLogsDir",
    "podPidsLimit",
    "podsPerCore",
    "port",
    "preloadedImagesVerificationAllowlist",
    "protectKernelDefaults",
    "providerID",
    "qosReserved",
    "readOnlyPort",
    "registerNode",
    "registerWithTaints",
    "registryBurst",
    "registryPullQPS",
    "reservedMemory",
    "reservedSystemCPUs",
    "resolvConf",
    "rotateCertificates",
    "runtimeRequestTimeout",
    "seccompDefault",
    "serializeImagePulls",
    "serverTLSBootstrap",
    "showHiddenMetricsForVersion",
    "shutdownGracePeriod",
    "shutdownGracePeriodByPodPriority",
    "shutdownGracePeriodCriticalPods",
    "singleProcessOOMKill",
    "staticPodPath",
    "staticPodURL",
    "staticPodURLHeader",
    "streamingConnectionIdleTimeout",
    "syncFrequency",
    "systemCgroups",
    "systemReserved",
    "systemReservedCgroup",
    "tlsCertFile",
    "tlsCipherSuites",
    "tlsCurvePreferences",
    "tlsMinVersion",
    "tlsPrivateKeyFile",
    "topologyManagerPolicy",
    "topologyManagerPolicyOptions",
    "topologyManagerScope",
    "tracing",
    "userNamespaces",
    "volumePluginDir",
    "volumeStatsAggPeriod",
];

/// The fields within fields.
const NESTED: &[(&str, &[&str])] = &[
    ("authentication", &["x509", "webhook", "anonymous"]),
    ("authentication.x509", &["clientCAFile"]),
    ("authentication.webhook", &["enabled", "cacheTTL"]),
    ("authentication.anonymous", &["enabled"]),
    ("authorization", &["mode", "webhook"]),
    (
        "authorization.webhook",
        &["cacheAuthorizedTTL", "cacheUnauthorizedTTL"],
    ),
    ("crashLoopBackOff", &["maxContainerRestartPeriod"]),
    (
        "logging",
        &[
            "format",
            "flushFrequency",
            "verbosity",
            "vmodule",
            "options",
        ],
    ),
    ("memorySwap", &["swapBehavior"]),
    ("tracing", &["endpoint", "samplingRatePerMillion"]),
    ("userNamespaces", &["idsPerPod"]),
];

/// Removes fields that are not part of the format; returns their paths.
pub(super) fn remove_unknown(document: &mut Value) -> Vec<String> {
    let mut removed = vec![];
    let mut take = |object: &mut Map<String, Value>, within: &str, known: &[&str]| {
        let is_known = |name: &String| known.contains(&name.as_str());
        let unknown: Vec<String> = object.keys().filter(|n| !is_known(n)).cloned().collect();
        for name in unknown {
            object.remove(&name);
            removed.push(format!("{within}{name}"));
        }
    };
    if let Some(object) = document.as_object_mut() {
        let own: Vec<&str> = ALL.iter().copied().chain(["apiVersion", "kind"]).collect();
        take(object, "", &own);
    }
    for (path, known) in NESTED {
        let pointer = format!("/{}", path.replace('.', "/"));
        let found = document.pointer_mut(&pointer);
        if let Some(object) = found.and_then(Value::as_object_mut) {
            take(object, &format!("{path}."), known);
        }
    }
    removed
}

/// Whether a value equals the default.
pub(super) fn is_default(name: &str, value: &Value) -> bool {
    let is_empty = is_unset(value) && !value.is_boolean();
    let shown = effective::of(&Value::Object(Map::new()));
    is_empty || shown.get(name) == Some(value) || (*value == false && shown.get(name).is_none())
}

/// Whether a field changes the agent's behaviour. A trial decides: the value has a shape that no field has. Decoding
/// fails if the field is read; otherwise the field is left over.
fn is_honoured(name: &str) -> bool {
    match serde_json::from_value::<Document>(json!({name: {"": [0]}})) {
        Ok(document) => !document.rest.contains_key(name),
        Err(_) => true,
    }
}

/// Returns the table for the documentation: each field, its default and how it is handled.
#[must_use]
pub fn table() -> String {
    let defaults = effective::of(&Value::Object(serde_json::Map::new()));
    let mut text = String::from("| Field | Default | |\n|---|---|---|\n");
    for name in ALL {
        let default = defaults
            .get(name)
            .map(|v| format!("`{v}`"))
            .unwrap_or_default();
        let without = WITHOUT_EFFECT.iter().find(|(field, _)| *field == name);
        let what = match without {
            _ if is_honoured(name) => "honoured".to_owned(),
            Some((_, why)) => format!("without effect: {why}"),
            None => {
                "not honoured; the agent logs a warning at start if it is not the default".into()
            }
        };
        text.push_str(&format!("| `{name}` | {default} | {what} |\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::document::NOT_HONOURED;
    use super::*;

    #[test]
    fn every_field_is_either_honoured_or_documented_as_ignored() {
        for name in ALL {
            let said = usize::from(NOT_HONOURED.contains(&name))
                + WITHOUT_EFFECT
                    .iter()
                    .filter(|(field, _)| *field == name)
                    .count();
            assert_eq!(said, usize::from(!is_honoured(name)), "{name}");
        }
        for name in NOT_HONOURED
            .iter()
            .chain(WITHOUT_EFFECT.iter().map(|(name, _)| name))
        {
            assert!(
                ALL.contains(name),
                "{name} is not a field of KubeletConfiguration"
            );
        }
        for (name, value, expected) in [
            ("cpuManagerPolicy", json!("none"), true),
            ("cpuManagerPolicy", json!("static"), false),
            ("makeIPTablesUtilChains", json!(false), false),
            ("shutdownGracePeriod", json!("0s"), true),
            ("kernelMemcgNotification", json!(false), true),
            ("evictionHard", json!({"memory.available": "5%"}), false),
        ] {
            assert_eq!(is_default(name, &value), expected, "{name}: {value}");
        }
        assert!(!ALL.contains(&"maxPodz") && table().contains("| `maxPods` | `110` | honoured |"));
    }
}
