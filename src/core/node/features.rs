//! Feature gates of the kubelet, and whether this agent implements each feature. Pure.
//!
//! `gates.txt` lists name, stage, default and lock of each gate in upstream's `pkg/features/kube_features.go`. Unit
//! tests compare this table with the list; `tests/docs.rs` compares the list with upstream's files if they are
//! available.

use std::collections::BTreeMap;

/// Maturity of a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Locked to its default.
    Ga,
    /// On or off by default.
    Beta,
    /// Off by default.
    Alpha,
    /// The gate will be removed; the default stays until then.
    Deprecated,
}

impl Stage {
    /// The stage in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Stage::Ga => "",
            Stage::Beta => "BETA",
            Stage::Alpha => "ALPHA",
            Stage::Deprecated => "DEPRECATED",
        }
    }
}

/// A feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Feature {
    /// The gate's name.
    pub name: &'static str,
    /// Maturity of the feature.
    pub stage: Stage,
    /// Whether this agent has the feature by default. Only [configurable](is_configurable) gates can change that.
    pub implemented: bool,
}

const fn ga(name: &'static str, implemented: bool) -> Feature {
    Feature {
        name,
        stage: Stage::Ga,
        implemented,
    }
}

const fn beta(name: &'static str, implemented: bool) -> Feature {
    Feature {
        name,
        stage: Stage::Beta,
        implemented,
    }
}

const fn alpha(name: &'static str, implemented: bool) -> Feature {
    Feature {
        name,
        stage: Stage::Alpha,
        implemented,
    }
}

const fn deprecated(name: &'static str, implemented: bool) -> Feature {
    Feature {
        name,
        stage: Stage::Deprecated,
        implemented,
    }
}

/// Gate for beta options of the CPU manager. Configurable.
pub const CPU_BETA_OPTIONS: &str = "CPUManagerPolicyBetaOptions";

/// Gate for alpha options of the CPU manager. Configurable.
pub const CPU_ALPHA_OPTIONS: &str = "CPUManagerPolicyAlphaOptions";

/// Gate for `qosReserved`.
pub const QOS_RESERVED: &str = "QOSReserved";

/// Gate for `memoryThrottlingFactor` and `memoryReservationPolicy`.
pub const MEMORY_QOS: &str = "MemoryQoS";

/// Gate for `tokenAttributes` of credential provider plugins.
pub const PLUGIN_TOKENS: &str = "KubeletServiceAccountTokenForCredentialProviders";

/// All gates of the kubelet.
pub const FEATURES: &[Feature] = &[
    ga("CPUManagerPolicyOptions", true),
    ga("CSIServiceAccountTokenSecrets", true),
    ga("DynamicResourceAllocation", true),
    ga("ExecProbeTimeout", true),
    ga("ImageMaximumGCAge", true),
    ga("ImageVolume", true),
    ga("InPlacePodVerticalScaling", true),
    ga("KubeletCgroupDriverFromCRI", true),
    ga("KubeletFineGrainedAuthz", true),
    ga("KubeletPSI", true),
    ga("KubeletPodResourcesDynamicResources", true),
    ga("KubeletPodResourcesGet", true),
    ga("KubeletTracing", true),
    ga("MutableCSINodeAllocatableCount", true),
    ga("NodeLogQuery", true),
    ga("NodeSwap", true),
    ga("PodLifecycleSleepAction", true),
    ga("PodLifecycleSleepActionAllowZero", true),
    ga("PodObservedGenerationTracking", true),
    ga("ProcMountType", true),
    ga("RecoverVolumeExpansionFailure", true),
    ga("RecursiveReadOnlyMounts", true),
    ga("SELinuxChangePolicy", true),
    ga("SELinuxMountReadWriteOncePod", true),
    ga("SidecarContainers", true),
    ga("SupplementalGroupsPolicy", true),
    ga("SystemdWatchdog", true),
    ga("TopologyManagerPolicyOptions", true),
    ga("UserNamespacesSupport", true),
    beta(CPU_BETA_OPTIONS, true),
    beta("ClusterTrustBundle", true),
    beta("ClusterTrustBundleProjection", true),
    beta("ComponentFlagz", true),
    beta("ComponentStatusz", true),
    beta("ContainerCheckpoint", true),
    beta("ContainerRestartRules", true),
    beta("DRAConsumableCapacity", true),
    beta("DRAExtendedResource", true),
    beta("EnvFiles", true),
    beta("ExtendWebSocketsToKubelet", true),
    beta("GracefulNodeShutdown", true),
    beta("GracefulNodeShutdownBasedOnPodPriority", true),
    beta("HostnameOverride", true),
    beta("InPlacePodLevelResourcesVerticalScaling", true),
    beta("InPlacePodVerticalScalingInitContainers", true),
    beta("KubeletCrashLoopBackOffMax", true),
    beta("KubeletEnsureSecretPulledImages", true),
    beta("KubeletSeparateDiskGC", false),
    beta(PLUGIN_TOKENS, true),
    beta("LocalStorageCapacityIsolationFSQuotaMonitoring", true),
    beta("NodeDeclaredFeatures", true),
    beta("PLEGOnDemandRelist", true),
    beta("PodCertificateRequest", true),
    beta("PodLevelResources", true),
    beta("PodReadyToStartContainersCondition", true),
    beta("PreventStaticPodAPIReferences", true),
    beta("ReloadKubeletClientCAFile", true),
    beta("ReloadKubeletServerCertificateFile", true),
    beta("ResourceHealthStatus", true),
    beta("ResourceHealthStatusMessage", true),
    beta("RestartAllContainersOnContainerExits", true),
    beta("RotateKubeletServerCertificate", true),
    beta("SELinuxMount", false),
    beta("TopologyManagerPolicyBetaOptions", true),
    alpha(CPU_ALPHA_OPTIONS, false),
    alpha("CRIListStreaming", false),
    alpha("CSIVolumeHealth", false),
    alpha("ContainerStopSignals", true),
    alpha("CustomCPUCFSQuotaPeriod", true),
    alpha("DRAWorkloadResourceClaims", false),
    alpha("EventedPLEG", true),
    alpha("ImageVolumeWithDigest", false),
    alpha("InPlacePodVerticalScalingExclusiveCPUs", false),
    alpha("InPlacePodVerticalScalingExclusiveMemory", false),
    alpha("KubeletInUserNamespace", false),
    alpha(MEMORY_QOS, false),
    alpha("PodAndContainerStatsFromCRI", false),
    alpha("PodLevelResourceManagers", false),
    alpha("PodLogsQuerySplitStreams", false),
    alpha("PodsAPI", false),
    alpha(QOS_RESERVED, false),
    alpha("ReduceDefaultCrashLoopBackOffDecay", false),
    alpha("RuntimeClassInImageCriApi", false),
    alpha("TaintTolerationComparisonOperators", false),
    alpha("TopologyManagerPolicyAlphaOptions", false),
    alpha("UserNamespacesHostNetworkSupport", false),
    deprecated("AllowDNSOnlyNodeCSR", false),
    deprecated("ChangeContainerStatusOnKubeletRestart", false),
    deprecated("DisableCPUQuotaWithExclusiveCPUs", true),
    deprecated("DisableNodeKubeProxyVersion", true),
    deprecated("GitRepoVolumeDriver", false),
    deprecated("KubeletPodResourcesListUseActivePods", true),
    deprecated("KubeletRegistrationGetOnExistsOnly", false),
];

/// Whether the gate can change this agent's behaviour: gates for CPU manager options, `qosReserved`, memory QoS, and
/// tokens of credential provider plugins.
fn is_configurable(name: &str) -> bool {
    matches!(
        name,
        CPU_BETA_OPTIONS | CPU_ALPHA_OPTIONS | QOS_RESERVED | MEMORY_QOS | PLUGIN_TOKENS
    )
}

/// Whether the feature is on with these gates. Unknown features are off.
#[must_use]
pub fn is_enabled(name: &str, gates: &BTreeMap<String, bool>) -> bool {
    let feature = FEATURES.iter().find(|f| f.name == name);
    feature.is_some_and(|feature| feature.is_enabled(gates))
}

impl Feature {
    /// Whether the feature is on with these gates.
    #[must_use]
    pub fn is_enabled(&self, gates: &BTreeMap<String, bool>) -> bool {
        let set = gates.get(self.name).filter(|_| is_configurable(self.name));
        set.copied().unwrap_or(self.implemented)
    }
}

/// Problem with the setting of a gate: a remedy, or a message for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingProblem {
    /// The setting is invalid.
    Refused(String),
    /// The setting has no effect.
    Ignored(String),
}

/// Checks the setting of a gate; `None` if the agent behaves as configured.
#[must_use]
pub fn check_setting(name: &str, enabled: bool) -> Option<SettingProblem> {
    // These two gates set others, which have no effect here.
    if matches!(name, "AllAlpha" | "AllBeta") {
        return Some(SettingProblem::Ignored(format!(
            "featureGates.{name}: it has no effect here"
        )));
    }
    if is_configurable(name) {
        return None;
    }
    match FEATURES.iter().find(|f| f.name == name) {
        None => Some(SettingProblem::Ignored(format!(
            "featureGates.{name}: unknown gate"
        ))),
        Some(Feature {
            stage: Stage::Ga, ..
        }) if !enabled => Some(SettingProblem::Refused(
            "remove it: the feature is locked to true".into(),
        )),
        Some(feature) if feature.implemented != enabled => {
            let behaviour = if feature.implemented {
                "always behaves as if it were true"
            } else {
                "does not implement it"
            };
            Some(SettingProblem::Ignored(format!(
                "featureGates.{name}: the agent {behaviour}"
            )))
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_without_effect_are_reported_and_impossible_settings_rejected() {
        assert_eq!(check_setting("NodeSwap", true), None);
        assert!(matches!(
            check_setting("NodeSwap", false),
            Some(SettingProblem::Refused(_))
        ));
        assert_eq!(check_setting("MemoryQoS", false), None);
        for (name, enabled) in [
            ("PodsAPI", true),
            ("EnvFiles", false),
            ("NoSuchGate", true),
            ("AllAlpha", true),
        ] {
            assert!(
                matches!(check_setting(name, enabled), Some(SettingProblem::Ignored(why)) if why.contains(name)),
                "{name}"
            );
        }
    }

    #[test]
    fn implemented_features_are_enabled_unless_their_gate_disables_them() {
        let gates = |set: &[(&str, bool)]| -> BTreeMap<String, bool> {
            set.iter()
                .map(|(name, on)| ((*name).to_owned(), *on))
                .collect()
        };
        let is_enabled = |name: &str, set: &[(&str, bool)]| is_enabled(name, &gates(set));
        for name in [
            "DynamicResourceAllocation",
            "DRAExtendedResource",
            "KubeletPSI",
            "KubeletPodResourcesGet",
            "KubeletPodResourcesDynamicResources",
            "MutableCSINodeAllocatableCount",
        ] {
            assert!(is_enabled(name, &[]), "{name}");
            assert_eq!(check_setting(name, true), None, "{name}");
        }
        for (name, default) in [
            (MEMORY_QOS, false),
            (QOS_RESERVED, false),
            (CPU_ALPHA_OPTIONS, false),
            (CPU_BETA_OPTIONS, true),
            (PLUGIN_TOKENS, true),
        ] {
            assert_eq!(is_enabled(name, &[]), default, "{name}");
            for on in [true, false] {
                assert_eq!(is_enabled(name, &[(name, on)]), on, "{name}");
            }
        }
        assert!(
            !is_enabled("PodsAPI", &[("PodsAPI", true)]),
            "it is not implemented"
        );
        assert!(
            is_enabled("EnvFiles", &[("EnvFiles", false)]),
            "no gate disables it"
        );
    }

    /// Name, stage, default, and whether the default is locked.
    fn facts() -> Vec<(&'static str, Stage, bool, bool)> {
        let lines = include_str!("gates.txt").lines();
        let fact = |line: &'static str| {
            let [name, stage, default, locked] = line.split(' ').collect::<Vec<_>>()[..] else {
                panic!("not four words: {line}");
            };
            let stage = match stage {
                "GA" => Stage::Ga,
                "Beta" => Stage::Beta,
                "Alpha" => Stage::Alpha,
                "Deprecated" => Stage::Deprecated,
                other => panic!("unknown stage {other} of {name}"),
            };
            (name, stage, default == "true", locked == "locked")
        };
        lines.filter(|l| !l.starts_with('#')).map(fact).collect()
    }

    #[test]
    fn the_gate_table_matches_upstream() {
        let upstream: Vec<_> = facts().iter().map(|f| (f.0, f.1)).collect();
        let ours: Vec<_> = FEATURES.iter().map(|f| (f.name, f.stage)).collect();
        for gate in &ours {
            assert!(upstream.contains(gate), "not upstream's: {gate:?}");
        }
        for gate in &upstream {
            assert!(ours.contains(gate), "missing: {gate:?}");
        }
        assert_eq!(ours.len(), upstream.len(), "a gate is listed twice");
    }

    #[test]
    fn only_locked_gates_are_rejected_and_missing_features_are_documented() {
        let documented = include_str!("../../../docs/FEATURES.md");
        for (name, stage, default, locked) in facts() {
            if stage == Stage::Ga {
                assert!(locked && default, "{name}: its other value is rejected");
            }
            if default && !is_enabled(name, &BTreeMap::new()) {
                let named = documented.contains(&format!("`{name}`"));
                assert!(named, "docs/FEATURES.md does not name {name}");
            }
        }
        for feature in FEATURES.iter().filter(|f| is_configurable(f.name)) {
            let named = documented.contains(&format!("`{}`", feature.name));
            assert!(named, "docs/FEATURES.md does not name {}", feature.name);
        }
    }
}
