//! The fields of KubeletConfiguration v1beta1, and what becomes of each: the documentation's table is made from this.

use serde_json::{Value, json};

use super::document::Document;
use super::effective;

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

/// Whether a field changes what the agent does. Found out by trying: a value of a shape that no field has is refused
/// where the field is read, and is left over where it is not.
fn is_honoured(name: &str) -> bool {
    match serde_json::from_value::<Document>(json!({name: {"": [0]}})) {
        Ok(document) => !document.rest.contains_key(name),
        Err(_) => true,
    }
}

/// The table of the documentation: each field, its default and what becomes of it.
#[must_use]
pub fn table() -> String {
    let defaults = effective::of(&Value::Object(serde_json::Map::new()));
    let mut text = String::from("| Field | Default | |\n|---|---|---|\n");
    for name in ALL {
        let default = defaults
            .get(name)
            .map(|v| format!("`{v}`"))
            .unwrap_or_default();
        let what = if is_honoured(name) {
            "honoured"
        } else {
            "read, not honoured: a warning at start says so"
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
    fn every_field_is_either_honoured_or_said_not_to_be() {
        for name in ALL {
            assert_ne!(is_honoured(name), NOT_HONOURED.contains(&name), "{name}");
        }
        for name in NOT_HONOURED {
            assert!(ALL.contains(name), "{name} is no field");
        }
        assert!(!ALL.contains(&"maxPodz") && table().contains("| `maxPods` | `110` | honoured |"));
    }
}
