//! Tests of whole configurations: precedence, and the errors for mistakes.

use super::document::Document;
use super::load::parse;
use super::resolve::resolve;
use super::*;
use holdfast_core::pod::memory_qos::MemoryQos;

fn load(text: &str, flags: &Overrides) -> Result<Config, String> {
    let text =
        format!("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{text}");
    resolve(Document::decode(parse(&text)?.fields)?, flags, "HOST").map_err(|e| e.to_string())
}

const NUMBERS: [&str; 6] = [
    "0",
    "1",
    "-1",
    "2147483647",
    "-2147483648",
    "9223372036854775807",
];
const DURATIONS: [&str; 6] = ["0s", "1ns", "-1s", "2562047h", "2562048h", "1e30h"];
const QUANTITIES: [&str; 5] = [
    "\"0\"",
    "1e30",
    "\"9223372036854775807\"",
    "1Ei",
    "\"0.0000001\"",
];
/// Fields that take a number, a duration or a quantity, with `V` in its place.
const FIELDS: &[(&str, &[&str])] = &[
    ("nodeLeaseDurationSeconds: V", &NUMBERS),
    ("nodeStatusMaxImages: V", &NUMBERS),
    ("maxPods: V", &NUMBERS),
    ("podsPerCore: V", &NUMBERS),
    ("oomScoreAdj: V", &NUMBERS),
    ("maxOpenFiles: V", &NUMBERS),
    ("podPidsLimit: V", &NUMBERS),
    ("registryPullQPS: V", &NUMBERS),
    ("registryBurst: V", &NUMBERS),
    ("containerLogMaxFiles: V", &NUMBERS),
    ("containerLogMaxWorkers: V", &NUMBERS),
    ("eventRecordQPS: V", &NUMBERS),
    ("eventBurst: V", &NUMBERS),
    ("kubeAPIQPS: V", &NUMBERS),
    ("kubeAPIBurst: V", &NUMBERS),
    ("imageGCHighThresholdPercent: V", &NUMBERS),
    ("imageGCLowThresholdPercent: V", &NUMBERS),
    ("evictionMaxPodGracePeriod: V", &NUMBERS),
    ("userNamespaces: {idsPerPod: V}", &NUMBERS),
    (
        "shutdownGracePeriodByPodPriority: [{priority: V, shutdownGracePeriodSeconds: V}]",
        &NUMBERS,
    ),
    ("httpCheckFrequency: V", &DURATIONS),
    ("syncFrequency: V", &DURATIONS),
    ("fileCheckFrequency: V", &DURATIONS),
    ("nodeStatusUpdateFrequency: V", &DURATIONS),
    ("nodeStatusReportFrequency: V", &DURATIONS),
    ("runtimeRequestTimeout: V", &DURATIONS),
    ("cpuCFSQuotaPeriod: V", &DURATIONS),
    ("cpuManagerReconcilePeriod: V", &DURATIONS),
    ("containerLogMonitorInterval: V", &DURATIONS),
    ("imageMinimumGCAge: V", &DURATIONS),
    ("imageMaximumGCAge: V", &DURATIONS),
    ("evictionPressureTransitionPeriod: V", &DURATIONS),
    (
        "evictionSoft: {memory.available: 1Gi}\nevictionSoftGracePeriod: {memory.available: V}",
        &DURATIONS,
    ),
    (
        "crashLoopBackOff: {maxContainerRestartPeriod: V}",
        &DURATIONS,
    ),
    ("shutdownGracePeriod: V", &DURATIONS),
    ("authentication: {webhook: {cacheTTL: V}}", &DURATIONS),
    ("containerLogMaxSize: V", &QUANTITIES),
    ("systemReserved: {cpu: V, memory: V}", &QUANTITIES),
    ("evictionHard: {memory.available: V}", &QUANTITIES),
];

/// Every number, duration and quantity of the configuration at its limits is accepted or refused, alone and with
/// others. Arithmetic with accepted times does not overflow.
#[test]
fn no_accepted_number_makes_the_agent_panic() {
    let mut accepted = String::new();
    for (field, values) in FIELDS {
        for value in values.iter().rev() {
            let text = format!("{}\n", field.replace('V', value));
            let together = format!("{accepted}{text}");
            if load(&text, &Overrides::default()).is_ok()
                && !accepted.contains(field.split(':').next().unwrap_or_default())
                && load(&together, &Overrides::default()).is_ok()
            {
                accepted = together;
            }
        }
    }
    let config = load(&accepted, &Overrides::default()).expect("each field was accepted");
    let times = [
        config.sync_frequency,
        config.node_status_update,
        config.node_status_report,
        config.runtime_timeout,
        config.max_backoff,
        config.eviction.transition,
        config.shutdown.total(),
    ];
    for time in times {
        let _ = (std::time::Instant::now() + time, time * 4);
        let span =
            jiff::SignedDuration::try_from(time).expect("within the range of SignedDuration");
        let _ = holdfast_core::time::later(jiff::Timestamp::MAX, span);
    }
}

/// Fields with invalid values, and the words that the error contains.
const MISTAKES: &[(&str, &str)] = &[
    ("reservedSystemCPUs: some\n", "reservedSystemCPUs"),
    ("oomScoreAdj: 2000\n", "oomScoreAdj"),
    ("maxPods: -1\n", "maxPods"),
    ("featureGates: {NodeSwap: false}\n", "featureGates.NodeSwap"),
    ("maxPods: many\n", "many"),
    ("eventRecordQPS: -1\n", "eventRecordQPS"),
    ("kubeAPIQPS: -1\n", "kubeAPIQPS"),
    ("kubeAPIBurst: -1\n", "kubeAPIBurst"),
    (
        "imagePullCredentialsVerificationPolicy: Sometimes\n",
        "AlwaysVerify",
    ),
    ("staticPodURL: ftp://x\n", "staticPodURL"),
    ("cpuCFSQuotaPeriod: 2s\n", "cpuCFSQuotaPeriod"),
    (
        "userNamespaces: {idsPerPod: 70000}\n",
        "userNamespaces.idsPerPod: \"70000\" is invalid: use a multiple of 65536",
    ),
    (
        "userNamespaces: {idsPerPod: 0}\n",
        "userNamespaces.idsPerPod",
    ),
    (
        "allowedUnsafeSysctls: [vm.swappiness]\n",
        "allowedUnsafeSysctls",
    ),
    ("containerLogMaxSize: big\n", "containerLogMaxSize"),
    ("containerLogMaxSize: \"0\"\n", "containerLogMaxSize"),
    ("containerLogMaxFiles: 1\n", "containerLogMaxFiles"),
    ("containerLogMaxWorkers: 0\n", "containerLogMaxWorkers"),
    ("syncFrequency: soon\n", "syncFrequency: \"soon\""),
    ("cgroupDriver: other\n", "use cgroupfs or systemd"),
    ("podLogsDir: relative\n", "podLogsDir"),
    (
        "crashLoopBackOff: {maxContainerRestartPeriod: 10m}\n",
        "between 1s and 300s",
    ),
    ("systemReserved: {memory: lots}\n", "systemReserved.memory"),
    (
        "evictionHard: {memory.available: lots}\n",
        "evictionHard.memory.available: \"lots\"",
    ),
    ("evictionHard: {memory.free: 1Gi}\n", "no such signal"),
    (
        "evictionSoft: {nodefs.available: 20%}\n",
        "evictionSoftGracePeriod.nodefs.available",
    ),
    (
        "evictionMinimumReclaim: {nodefs.available: -1Gi}\n",
        "evictionMinimumReclaim.nodefs.available",
    ),
    (
        "enforceNodeAllocatable: [pods, none]\n",
        "enforceNodeAllocatable",
    ),
    (
        "enforceNodeAllocatable: [cpus]\n",
        "use pods, system-reserved",
    ),
];

#[test]
fn flags_override_the_file_and_errors_name_the_field() {
    let flags = Overrides::default();
    let config = load(
        "maxPods: 5\nsyncFrequency: 1m30s\nclusterDNS: [10.96.0.10]\nsystemReserved: {cpu: 100m}\nkubeReserved: {cpu: 200m}\nhairpinMode: none\nvolumePluginDir: /plugins\nshutdownGracePeriod: 0s\n",
        &flags,
    )
    .expect("a valid configuration");
    assert_eq!(
        (
            config.max_pods,
            config.sync_frequency.as_secs(),
            config.node_name.as_str(),
            config.reserved["cpu"].milli()
        ),
        (5, 90, "host", 300)
    );
    assert_eq!(
        config.not_honoured,
        ["volumePluginDir"],
        "a default needs no warning"
    );
    let zeros =
        load("imageMinimumGCAge: 0s\nsyncFrequency: 0s\n", &flags).expect("a valid configuration");
    assert_eq!(
        (
            zeros.image_rules.minimum_age.as_secs(),
            zeros.sync_frequency.as_secs()
        ),
        (120, 60),
        "zero selects the default"
    );
    let over = load(
        "maxPods: 5\n",
        &Overrides {
            max_pods: Some(7),
            hostname: Some(" N1 ".into()),
            ..Overrides::default()
        },
    )
    .expect("a valid configuration");
    assert_eq!((over.max_pods, over.node_name.as_str()), (7, "n1"));
    for (text, expected) in MISTAKES {
        let error = load(text, &flags).expect_err(text);
        assert!(error.contains(expected), "{error}");
    }
    assert!(parse("kind: Pod\n").is_err());
}

#[test]
fn the_agent_and_the_system_get_the_configured_cgroups() {
    let load = |text: &str| load(text, &Overrides::default());
    for (text, agent, system) in [
        ("", None, None),
        ("kubeletCgroups: ''\nsystemCgroups: ''\n", None, None),
        (
            "kubeletCgroups: podruntime/kubelet\n",
            Some("/podruntime/kubelet"),
            None,
        ),
        ("kubeletCgroups: /\n", Some("/"), None),
        (
            "cgroupRoot: /\nsystemCgroups: /system//x/\n",
            None,
            Some("/system/x"),
        ),
    ] {
        let config = load(text).expect(text);
        let expected = OwnCgroups {
            agent: agent.map(Into::into),
            system: system.map(Into::into),
        };
        assert_eq!(config.own_cgroups, expected, "{text}");
        assert_eq!(config.not_honoured, Vec::<String>::new(), "{text}");
    }
    for (text, expected) in [
        ("systemCgroups: /system\n", "set cgroupRoot"),
        ("cgroupRoot: /\nsystemCgroups: /\n", "below the root"),
        ("kubeletCgroups: /a/../b\n", "without '..'"),
    ] {
        let error = load(text).expect_err(text);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn pods_without_cgroups_per_qos_have_no_common_limit() {
    let load = |text: &str| load(text, &Overrides::default());
    let flat = |text: &str| load(text).map(|c| (c.enforcement.flat, c.not_honoured));
    for (text, expected) in [
        ("", false),
        ("cgroupsPerQOS: true\n", false),
        ("cgroupsPerQOS: false\nenforceNodeAllocatable: []\n", true),
        (
            "cgroupsPerQOS: false\nenforceNodeAllocatable: [none]\n",
            true,
        ),
    ] {
        assert_eq!(flat(text), Ok((expected, vec![])), "{text}");
    }
    for text in [
        "cgroupsPerQOS: false\n",
        "cgroupsPerQOS: false\nenforceNodeAllocatable: [kube-reserved]\nkubeReservedCgroup: /k\nkubeReserved: {cpu: 100m}\n",
    ] {
        let error = load(text).expect_err(text);
        assert!(error.contains("set enforceNodeAllocatable: []"), "{error}");
    }
}

#[test]
fn drop_ins_override_the_file_and_flags_override_both() {
    let dir = tempfile::tempdir().expect("a directory");
    let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        std::fs::write(&path, format!("{head}{text}")).expect("written");
        path
    };
    let file = write(
        "config.yaml",
        "maxPods: 1\nsyncFrequency: 10s\nclusterDNS: [192.0.2.1, 192.0.2.2]\nclusterDomain: a\n",
    );
    write("d/20.conf", "maxPods: 3\nclusterDNS: [192.0.2.3]\n");
    write("d/10.conf", "maxPods: 2\nsyncFrequency: 20s\n");
    write("d/30.yaml", "maxPods: 9\n");
    let (drop_ins, flags) = (
        dir.path().join("d"),
        serde_json::json!({"syncFrequency": "30s"}),
    );
    let config = load_all(
        Some(&file),
        Some(&drop_ins),
        &flags,
        &Overrides::default(),
        "h",
    )
    .expect("a valid configuration");
    assert_eq!(
        (
            config.max_pods,
            config.sync_frequency.as_secs(),
            config.cluster_domain.as_str()
        ),
        (3, 30, "a")
    );
    assert_eq!(config.cluster_dns, ["192.0.2.3"], "lists are replaced");
    std::fs::write(drop_ins.join("40.conf"), "maxPods: 4").expect("written");
    assert!(
        load_all(
            Some(&file),
            Some(&drop_ins),
            &flags,
            &Overrides::default(),
            "h"
        )
        .is_err_and(|e| e.to_string().contains("40.conf"))
    );
}

#[test]
fn unknown_and_repeated_fields_are_ignored_and_reported() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("config.yaml");
    let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
    let text = "maxPods: 5\nmaxPods: 6\nmaxPodz: 7\nauthentication: {x508: {}, webhook: {enabled: false}}\n";
    std::fs::write(&path, format!("{head}{text}")).expect("written");
    let config = load_all(Some(&path), None, &Value::Null, &Overrides::default(), "h")
        .expect("read leniently");
    assert_eq!((config.max_pods, config.serving.tokens), (6, false));
    let unread = config.unread.join("\n");
    for field in [
        "maxPods",
        "maxPodz: KubeletConfiguration v1beta1 has no such field",
        "authentication.x508",
    ] {
        assert!(unread.contains(field), "{field}: {unread}");
    }
}

#[test]
fn addresses_and_clouds_are_checked() {
    let with = |ip: &str, cloud: &str| Overrides {
        node_ip: Some(ip.into()),
        cloud_provider: Some(cloud.into()),
        ..Overrides::default()
    };
    for (ip, cloud, expected) in [
        ("169.254.1.1", "", "link-local"),
        ("192.0.2.1,192.0.2.2", "", "different families"),
        ("here", "", "--node-ip"),
        ("", "aws", "--cloud-provider"),
    ] {
        let error = load("", &with(ip, cloud)).expect_err(ip);
        assert!(error.contains(expected), "{error}");
    }
    let flags = Overrides {
        offline_start: Some("5m".into()),
        ..Overrides::default()
    };
    let error = load("", &flags).expect_err("an invalid value");
    assert!(
        error.contains("--offline-start") && error.contains("after=5m"),
        "{error}"
    );
    let config = load("", &with("::", "external")).expect("a valid configuration");
    assert_eq!(config.offline_start.pods_after(), None, "safe by default");
    assert!(config.has_node_ip, "the flag selects a family");
    assert_eq!(
        (config.node_ips, config.prefers_ipv6, config.external_cloud),
        (vec![], true, true)
    );
    assert!(
        !load("", &with("", "external"))
            .expect("a valid configuration")
            .has_node_ip
    );
}

#[test]
fn thresholds_replace_the_defaults_or_are_merged_with_them() {
    let signals = |text: &str| {
        let config = load(text, &Overrides::default()).expect(text);
        let thresholds = config.eviction.thresholds.iter();
        let all: Vec<String> = thresholds
            .map(|t| format!("{} {}", t.signal.name(), t.grace.as_secs()))
            .collect();
        (all.join(", "), config.not_honoured)
    };
    let defaults = "memory.available 0, allocatableMemory.available 0, nodefs.available 0, nodefs.inodesFree 0, imagefs.available 0, imagefs.inodesFree 0";
    for (text, expected, unused) in [
        ("", defaults, 0),
        ("evictionHard: {}\n", "", 0),
        (
            "enforceNodeAllocatable: [none]\nevictionHard: {memory.available: 1Gi}\n",
            "memory.available 0",
            0,
        ),
        (
            "evictionHard: {nodefs.available: 0%}\nevictionSoft: {pid.available: 10%}\nevictionSoftGracePeriod: {pid.available: 1m}\n",
            "pid.available 60",
            0,
        ),
        (
            "evictionHard: {nodefs.available: 0%}\nmergeDefaultEvictionSettings: true\n",
            "memory.available 0, allocatableMemory.available 0, nodefs.inodesFree 0, imagefs.available 0, imagefs.inodesFree 0",
            0,
        ),
        (
            "evictionHard: {containerfs.available: 5%}\nqosReserved: {memory: 50%}\n",
            "",
            2,
        ),
    ] {
        let (found, not_honoured) = signals(text);
        assert_eq!(found, expected, "{text}");
        assert_eq!(not_honoured.len(), unused, "{text}: {not_honoured:?}");
    }
    let zeros = load(
        "evictionPressureTransitionPeriod: 0s\n",
        &Overrides::default(),
    )
    .expect("a valid configuration");
    assert_eq!(zeros.eviction.transition.as_secs(), 300);
}

#[test]
fn the_report_frequency_defaults_to_the_update_frequency_if_only_that_is_set() {
    for (text, seconds) in [
        ("", 300),
        ("nodeStatusUpdateFrequency: 20s\n", 20),
        (
            "nodeStatusUpdateFrequency: 20s\nnodeStatusReportFrequency: 1m\n",
            60,
        ),
    ] {
        let config = load(text, &Overrides::default()).expect(text);
        assert_eq!(config.node_status_report.as_secs(), seconds, "{text}");
    }
}

#[test]
fn a_negative_size_disables_log_rotation() {
    for (size, expected) in [("-1", u64::MAX), ("-1Mi", u64::MAX), ("4Ki", 4096)] {
        let config = load(
            &format!("containerLogMaxSize: {size:?}\n"),
            &Overrides::default(),
        );
        assert_eq!(config.map(|c| c.logs.max_size), Ok(expected), "{size}");
    }
}

#[test]
fn the_managers_settings_are_resolved() {
    use holdfast_core::node::hints::{Policy, Scope};
    let flags = Overrides::default();
    let head = "reservedSystemCPUs: 0-1\ncpuManagerPolicy: static\n";
    let with = |text: &str| load(&format!("{head}{text}"), &flags);
    let config = with("cpuManagerPolicyOptions: {full-pcpus-only: 'true', distribute-cpus-across-numa: '1'}\ncpuManagerReconcilePeriod: 5s\ntopologyManagerPolicy: restricted\ntopologyManagerScope: pod\ntopologyManagerPolicyOptions: {prefer-closest-numa-nodes: 'true', max-allowable-numa-nodes: '16'}\n").expect("a valid configuration");
    let cpus = config.managers.cpus.expect("static");
    assert!(cpus.options.full_cores && cpus.options.across_nodes && !cpus.options.by_socket);
    assert_eq!(cpus.reserved.map(|set| set.len()), Some(2));
    let alignment = config.managers.alignment.expect("restricted");
    assert_eq!(
        (alignment.policy, alignment.scope),
        (Policy::Restricted, Scope::Pod)
    );
    assert!(alignment.closest && alignment.max_nodes == 16);
    assert_eq!(config.managers.reconcile.as_secs(), 5);
    assert!(
        !load("", &flags)
            .expect("a valid configuration")
            .managers
            .pins_containers()
    );
    let memory = with(
        "memoryManagerPolicy: Static\nreservedMemory: [{numaNode: 1, limits: {memory: 1Mi}}]\n",
    );
    let memory = memory
        .expect("a valid configuration")
        .managers
        .memory
        .expect("static");
    assert_eq!(memory.reserved[&1]["memory"], 1 << 20);
}

#[test]
fn conflicting_settings_of_the_managers_are_rejected() {
    let flags = Overrides::default();
    let head = "reservedSystemCPUs: 0-1\ncpuManagerPolicy: static\n";
    let with = |text: &str| load(&format!("{head}{text}"), &flags);
    assert!(with("featureGates: {CPUManagerPolicyAlphaOptions: true}\ncpuManagerPolicyOptions: {align-by-socket: 'true'}\n").is_ok());
    for (text, expected) in [
        ("cpuManagerPolicyOptions: {other: 'true'}\n", "other"),
        (
            "cpuManagerPolicyOptions: {full-pcpus-only: 'maybe'}\n",
            "full-pcpus-only",
        ),
        (
            "cpuManagerPolicyOptions: {align-by-socket: 'true'}\n",
            "CPUManagerPolicyAlphaOptions",
        ),
        (
            "featureGates: {CPUManagerPolicyBetaOptions: false}\ncpuManagerPolicyOptions: {distribute-cpus-across-numa: 'true'}\n",
            "CPUManagerPolicyBetaOptions",
        ),
        (
            "cpuManagerPolicyOptions: {prefer-align-cpus-by-uncorecache: 'true', distribute-cpus-across-numa: 'true'}\n",
            "conflicts with",
        ),
        ("topologyManagerPolicy: best\n", "topologyManagerPolicy"),
        ("topologyManagerScope: node\n", "topologyManagerScope"),
        (
            "topologyManagerPolicy: restricted\ntopologyManagerPolicyOptions: {max-allowable-numa-nodes: '4'}\n",
            "8 or more",
        ),
        (
            "topologyManagerPolicy: restricted\ntopologyManagerPolicyOptions: {other: '4'}\n",
            "other",
        ),
    ] {
        let error = with(text).expect_err(text);
        assert!(error.contains(expected), "{error}");
    }
    for (text, expected) in [
        ("cpuManagerPolicy: static\n", "reservedSystemCPUs"),
        ("cpuManagerPolicy: dynamic\n", "dynamic"),
        (
            "cpuManagerPolicyOptions: {full-pcpus-only: 'true'}\n",
            "cpuManagerPolicy: static",
        ),
        (
            "systemReserved: {cpu: '0'}\ncpuManagerPolicy: static\n",
            "more than 0",
        ),
    ] {
        let error = load(text, &flags).expect_err(text);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn invalid_reserved_memory_is_rejected() {
    for (text, expected) in [
        ("memoryManagerPolicy: Some\n", "memoryManagerPolicy"),
        (
            "reservedMemory: [{limits: {cpu: '1'}}]\n",
            "reservedMemory[0].limits.cpu",
        ),
        (
            "reservedMemory: [{limits: {memory: 1Mi}}, {limits: {memory: 1Mi}}]\n",
            "reservedMemory[1].limits.memory",
        ),
        (
            "reservedMemory: [{limits: {hugepages-2Mi: '0'}}]\n",
            "more than 0",
        ),
    ] {
        let error = load(text, &Overrides::default()).expect_err(text);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn reservations_are_enforced_as_configured() {
    let flags = Overrides::default();
    let rules = |text: &str| load(text, &flags).expect(text).enforcement;
    assert!(rules("").limits_pods && !rules("enforceNodeAllocatable: [none]\n").limits_pods);
    let all = rules(
        "enforceNodeAllocatable: [pods, system-reserved, kube-reserved-compressible]\nsystemReserved: {cpu: 500m, memory: 1Gi}\nsystemReservedCgroup: /system.slice\nkubeReserved: {cpu: 100m}\nkubeReservedCgroup: /kube\nfeatureGates: {QOSReserved: true}\nqosReserved: {memory: 50%}\n",
    );
    let system = all.system.as_ref().expect("system-reserved");
    assert_eq!(
        (system.cgroup.as_str(), system.compressible_only),
        ("/system.slice", false)
    );
    assert_eq!(system.amounts["memory"].to_string(), "1Gi");
    let kube = all.kube.as_ref().expect("kube-reserved-compressible");
    assert!(kube.compressible_only && kube.amounts.len() == 1);
    assert_eq!((all.limits_pods, all.qos_memory), (true, Some(50)));
    for (text, expected) in [
        ("enforceNodeAllocatable: [pods, pods]\n", "list pods once"),
        (
            "enforceNodeAllocatable: [kube-reserved]\nkubeReserved: {cpu: 100m}\n",
            "kubeReservedCgroup",
        ),
        (
            "enforceNodeAllocatable: [system-reserved]\nsystemReservedCgroup: /system.slice\n",
            "reserves nothing",
        ),
        (
            "enforceNodeAllocatable: [system-reserved, system-reserved-compressible]\nsystemReservedCgroup: /system.slice\n",
            "not both",
        ),
        (
            "reservedSystemCPUs: '0'\nsystemReservedCgroup: /system.slice\n",
            "systemReservedCgroup",
        ),
        ("qosReserved: {memory: 101%}\n", "qosReserved.memory"),
        ("qosReserved: {cpu: 10%}\n", "only memory"),
        ("memoryThrottlingFactor: 0\n", "memoryThrottlingFactor"),
        (
            "memoryReservationPolicy: TieredReservation\n",
            "featureGates.MemoryQoS",
        ),
        ("memoryReservationPolicy: All\n", "TieredReservation"),
    ] {
        let error = load(text, &flags).expect_err(text);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn memory_is_protected_if_the_feature_gate_is_enabled() {
    let flags = Overrides::default();
    let memory = |text: &str| load(text, &flags).expect(text).enforcement.memory;
    assert_eq!(memory("memoryThrottlingFactor: 0.5\n"), None);
    let open = |fields: &str| memory(&format!("featureGates: {{MemoryQoS: true}}\n{fields}"));
    let (throttling, reserves) = (0.9, false);
    assert_eq!(
        open(""),
        Some(MemoryQos {
            throttling,
            reserves
        })
    );
    let (throttling, reserves) = (0.5, true);
    assert_eq!(
        open("memoryThrottlingFactor: 0.5\nmemoryReservationPolicy: TieredReservation\n"),
        Some(MemoryQos {
            throttling,
            reserves
        })
    );
}

#[test]
fn shutdown_grace_periods_equal_the_kubelets_and_default_to_zero() {
    for (fields, seconds) in [
        ("", 0),
        (
            "shutdownGracePeriod: 0s\nshutdownGracePeriodCriticalPods: 0s\nshutdownGracePeriodByPodPriority: []\n",
            0,
        ),
        (
            "shutdownGracePeriod: 1m30s\nshutdownGracePeriodCriticalPods: 10s\n",
            90,
        ),
        (
            "shutdownGracePeriodByPodPriority: [{priority: 100, shutdownGracePeriodSeconds: 20}, {priority: -5, shutdownGracePeriodSeconds: 7}]\n",
            27,
        ),
    ] {
        let config = load(fields, &Overrides::default()).expect(fields);
        assert_eq!(config.shutdown.total().as_secs(), seconds, "{fields}");
        assert_eq!(config.shutdown.is_empty(), seconds == 0, "{fields}");
        assert_eq!(config.not_honoured, Vec::<String>::new(), "{fields}");
    }
}

#[test]
fn conflicting_shutdown_settings_are_rejected() {
    for (text, expected) in [
        ("shutdownGracePeriod: soon\n", "shutdownGracePeriod"),
        ("shutdownGracePeriod: 100ms\n", "use 0s, or 1s or more"),
        (
            "shutdownGracePeriodCriticalPods: 10s\n",
            "it is a part of shutdownGracePeriod",
        ),
        (
            "shutdownGracePeriod: 10s\nshutdownGracePeriodByPodPriority: [{priority: 0, shutdownGracePeriodSeconds: 5}]\n",
            "use it without shutdownGracePeriod",
        ),
        (
            "shutdownGracePeriod: 10s\nfeatureGates: {GracefulNodeShutdown: false}\n",
            "remove featureGates.GracefulNodeShutdown",
        ),
        (
            "shutdownGracePeriodByPodPriority: [{priority: 0, shutdownGracePeriodSeconds: 5}]\nfeatureGates: {GracefulNodeShutdownBasedOnPodPriority: false}\n",
            "remove featureGates.GracefulNodeShutdownBasedOnPodPriority",
        ),
    ] {
        let error = load(text, &Overrides::default()).expect_err(text);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn cgroup_v1_is_rejected_only_with_fail_cgroup_v1_and_configz_shows_it() {
    for (text, refuses) in [("", false), ("failCgroupV1: true", true)] {
        let config = load(text, &Overrides::default()).expect("a configuration");
        assert_eq!(config.refuses_cgroup_v1, refuses, "{text:?}");
        assert_eq!(config.effective["failCgroupV1"], refuses, "{text:?}");
    }
}

#[test]
fn the_device_plugin_directory_does_not_depend_on_the_root_directory() {
    let dir = |overrides: &Overrides| {
        load("", overrides)
            .expect("a valid configuration")
            .device_plugin_dir
    };
    let elsewhere = Overrides {
        root_dir: Some("/data/kubelet".into()),
        ..Overrides::default()
    };
    assert_eq!(
        dir(&elsewhere),
        std::path::Path::new("/var/lib/kubelet/device-plugins")
    );
    let own = Overrides {
        device_plugin_dir: Some("/data/plugins".into()),
        ..elsewhere
    };
    assert_eq!(dir(&own), std::path::Path::new("/data/plugins"));
}
