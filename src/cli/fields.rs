//! The kubelet's flags for fields of KubeletConfiguration, which override the file (`AddKubeletConfigFlags` in
//! `cmd/kubelet/app/options/options.go`).

use std::ffi::OsString;

use serde_json::{Map, Value, json};

/// The syntax of a flag's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    Text,
    Bool,
    Number,
    /// Separated by commas.
    List,
    /// `key=value`, or `key<value`, separated by commas.
    Map,
    /// A map with truth values.
    Gates,
    /// `key=value:effect`, separated by commas.
    Taints,
    /// `node:type=quantity`, types separated by commas and nodes by semicolons; the flag may be given for each node.
    Memory,
    /// `key:value`, separated by commas; a key may have several values, and the flag may be given for each.
    Headers,
}

use Shape::{Bool, Gates, Headers, List, Map as Pairs, Memory, Number, Taints, Text};

/// The flags, with their fields and their syntax.
const FLAGS: [(&str, &str, Shape); 94] = [
    ("address", "address", Text),
    ("allowed-unsafe-sysctls", "allowedUnsafeSysctls", List),
    ("anonymous-auth", "authentication.anonymous.enabled", Bool),
    (
        "authentication-token-webhook",
        "authentication.webhook.enabled",
        Bool,
    ),
    (
        "authentication-token-webhook-cache-ttl",
        "authentication.webhook.cacheTTL",
        Text,
    ),
    ("authorization-mode", "authorization.mode", Text),
    (
        "authorization-webhook-cache-authorized-ttl",
        "authorization.webhook.cacheAuthorizedTTL",
        Text,
    ),
    (
        "authorization-webhook-cache-unauthorized-ttl",
        "authorization.webhook.cacheUnauthorizedTTL",
        Text,
    ),
    ("cgroup-driver", "cgroupDriver", Text),
    ("cgroups-per-qos", "cgroupsPerQOS", Bool),
    ("client-ca-file", "authentication.x509.clientCAFile", Text),
    ("container-log-max-files", "containerLogMaxFiles", Number),
    ("container-log-max-size", "containerLogMaxSize", Text),
    ("contention-profiling", "enableContentionProfiling", Bool),
    ("cpu-cfs-quota", "cpuCFSQuota", Bool),
    ("cpu-cfs-quota-period", "cpuCFSQuotaPeriod", Text),
    ("cpu-manager-policy", "cpuManagerPolicy", Text),
    (
        "cpu-manager-policy-options",
        "cpuManagerPolicyOptions",
        Pairs,
    ),
    (
        "cpu-manager-reconcile-period",
        "cpuManagerReconcilePeriod",
        Text,
    ),
    (
        "enable-controller-attach-detach",
        "enableControllerAttachDetach",
        Bool,
    ),
    ("enable-debugging-handlers", "enableDebuggingHandlers", Bool),
    ("enable-server", "enableServer", Bool),
    ("enforce-node-allocatable", "enforceNodeAllocatable", List),
    ("event-burst", "eventBurst", Number),
    ("event-qps", "eventRecordQPS", Number),
    ("eviction-hard", "evictionHard", Pairs),
    (
        "eviction-max-pod-grace-period",
        "evictionMaxPodGracePeriod",
        Number,
    ),
    ("eviction-minimum-reclaim", "evictionMinimumReclaim", Pairs),
    (
        "eviction-pressure-transition-period",
        "evictionPressureTransitionPeriod",
        Text,
    ),
    ("eviction-soft", "evictionSoft", Pairs),
    (
        "eviction-soft-grace-period",
        "evictionSoftGracePeriod",
        Pairs,
    ),
    ("fail-cgroupv1", "failCgroupV1", Bool),
    ("fail-swap-on", "failSwapOn", Bool),
    ("feature-gates", "featureGates", Gates),
    ("file-check-frequency", "fileCheckFrequency", Text),
    ("hairpin-mode", "hairpinMode", Text),
    ("healthz-bind-address", "healthzBindAddress", Text),
    ("healthz-port", "healthzPort", Number),
    ("http-check-frequency", "httpCheckFrequency", Text),
    (
        "image-gc-high-threshold",
        "imageGCHighThresholdPercent",
        Number,
    ),
    (
        "image-gc-low-threshold",
        "imageGCLowThresholdPercent",
        Number,
    ),
    ("image-service-endpoint", "imageServiceEndpoint", Text),
    ("kernel-memcg-notification", "kernelMemcgNotification", Bool),
    ("kube-api-burst", "kubeAPIBurst", Number),
    ("kube-api-content-type", "contentType", Text),
    ("kube-api-qps", "kubeAPIQPS", Number),
    ("kube-reserved", "kubeReserved", Pairs),
    ("kube-reserved-cgroup", "kubeReservedCgroup", Text),
    ("kubelet-cgroups", "kubeletCgroups", Text),
    (
        "local-storage-capacity-isolation",
        "localStorageCapacityIsolation",
        Bool,
    ),
    ("log-flush-frequency", "logging.flushFrequency", Text),
    ("logging-format", "logging.format", Text),
    ("make-iptables-util-chains", "makeIPTablesUtilChains", Bool),
    ("manifest-url", "staticPodURL", Text),
    ("manifest-url-header", "staticPodURLHeader", Headers),
    ("max-open-files", "maxOpenFiles", Number),
    ("memory-manager-policy", "memoryManagerPolicy", Text),
    ("minimum-image-ttl-duration", "imageMinimumGCAge", Text),
    ("node-status-max-images", "nodeStatusMaxImages", Number),
    (
        "node-status-update-frequency",
        "nodeStatusUpdateFrequency",
        Text,
    ),
    ("oom-score-adj", "oomScoreAdj", Number),
    ("pod-cidr", "podCIDR", Text),
    ("pod-max-pids", "podPidsLimit", Number),
    ("pods-per-core", "podsPerCore", Number),
    ("port", "port", Number),
    ("protect-kernel-defaults", "protectKernelDefaults", Bool),
    ("provider-id", "providerID", Text),
    ("qos-reserved", "qosReserved", Pairs),
    ("read-only-port", "readOnlyPort", Number),
    ("register-with-taints", "registerWithTaints", Taints),
    ("registry-burst", "registryBurst", Number),
    ("registry-qps", "registryPullQPS", Number),
    ("reserved-cpus", "reservedSystemCPUs", Text),
    ("reserved-memory", "reservedMemory", Memory),
    ("resolv-conf", "resolvConf", Text),
    ("rotate-certificates", "rotateCertificates", Bool),
    ("rotate-server-certificates", "serverTLSBootstrap", Bool),
    ("runtime-request-timeout", "runtimeRequestTimeout", Text),
    ("seccomp-default", "seccompDefault", Bool),
    ("serialize-image-pulls", "serializeImagePulls", Bool),
    (
        "streaming-connection-idle-timeout",
        "streamingConnectionIdleTimeout",
        Text,
    ),
    ("sync-frequency", "syncFrequency", Text),
    ("system-cgroups", "systemCgroups", Text),
    ("system-reserved", "systemReserved", Pairs),
    ("system-reserved-cgroup", "systemReservedCgroup", Text),
    ("tls-cert-file", "tlsCertFile", Text),
    ("tls-cipher-suites", "tlsCipherSuites", List),
    ("tls-min-version", "tlsMinVersion", Text),
    ("tls-private-key-file", "tlsPrivateKeyFile", Text),
    ("topology-manager-policy", "topologyManagerPolicy", Text),
    (
        "topology-manager-policy-options",
        "topologyManagerPolicyOptions",
        Pairs,
    ),
    ("topology-manager-scope", "topologyManagerScope", Text),
    ("volume-plugin-dir", "volumePluginDir", Text),
    ("volume-stats-agg-period", "volumeStatsAggPeriod", Text),
];

/// Flags of the kubelet without effect here, which are accepted and reported. Many belong to cAdvisor, which is not
/// part of the agent.
const WITHOUT_EFFECT: [(&str, Shape); 32] = [
    ("application-metrics-count-limit", Number),
    ("boot-id-file", Text),
    ("container-hints", Text),
    ("containerd", Text),
    ("containerd-namespace", Text),
    ("enable-load-reader", Bool),
    ("event-storage-age-limit", Text),
    ("event-storage-event-limit", Text),
    ("exit-on-lock-contention", Bool),
    ("experimental-allocatable-ignore-eviction", Bool),
    ("experimental-mounter-path", Text),
    ("global-housekeeping-interval", Text),
    ("housekeeping-interval", Text),
    ("lock-file", Text),
    ("log-cadvisor-usage", Bool),
    ("log-json-info-buffer-size", Text),
    ("log-json-split-stream", Bool),
    ("log-text-info-buffer-size", Text),
    ("log-text-split-stream", Bool),
    ("machine-id-file", Text),
    ("max-housekeeping-interval", Text),
    ("pod-infra-container-image", Text),
    ("runonce", Bool),
    ("runtime-cgroups", Text),
    ("storage-driver-buffer-duration", Text),
    ("storage-driver-db", Text),
    ("storage-driver-host", Text),
    ("storage-driver-password", Text),
    ("storage-driver-secure", Bool),
    ("storage-driver-table", Text),
    ("storage-driver-user", Text),
    ("vmodule", Text),
];

/// The arguments after the flags for fields were taken out.
#[derive(Debug, Default, PartialEq)]
pub struct ParsedFlags {
    /// The remaining arguments.
    pub rest: Vec<OsString>,
    /// The values of the fields, as in a file.
    pub fields: Value,
    /// Flags without effect that were given.
    pub without_effect: Vec<String>,
}

/// Parses reserved memory of NUMA nodes to the form of `reservedMemory`.
fn reservations(text: &str) -> Option<Vec<Value>> {
    let limit = |item: &str| {
        let (resource, quantity) = item.split_once('=')?;
        Some((resource.trim().to_owned(), Value::from(quantity.trim())))
    };
    let reservation = |text: &str| {
        let (node, limits) = text.split_once(':')?;
        let node: u32 = node.trim().parse().ok()?;
        let limits: Option<Map<String, Value>> = limits.split(',').map(limit).collect();
        Some(json!({"numaNode": node, "limits": limits?}))
    };
    text.split(';').map(reservation).collect()
}

/// Parses headers to the form of `staticPodURLHeader`.
fn headers<'a>(items: impl Iterator<Item = &'a str>) -> Option<Value> {
    let mut all = Map::new();
    for item in items {
        let (key, value) = item.split_once(':')?;
        let values = all.entry(key.trim()).or_insert_with(|| json!([]));
        values.as_array_mut()?.push(value.trim().into());
    }
    Some(all.into())
}

/// Adds the value of a repeated flag to the previous value.
fn added(before: Option<&Value>, more: Value) -> Value {
    match (before, more) {
        (Some(Value::Array(before)), Value::Array(more)) => {
            before.iter().cloned().chain(more).collect()
        }
        (Some(Value::Object(before)), Value::Object(more)) => {
            let mut all = before.clone();
            for (key, value) in more {
                let value = added(before.get(&key), value);
                all.insert(key, value);
            }
            all.into()
        }
        (_, more) => more,
    }
}

fn value(flag: &str, shape: Shape, text: &str) -> Result<Value, String> {
    let wrong = |what: &str| format!("--{flag}: {text:?} is invalid: use {what}");
    let items = || {
        text.split(',')
            .map(str::trim)
            .filter(|item| !item.is_empty())
    };
    let pair = |item: &str| {
        item.split_once(['=', '<'])
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
    };
    match shape {
        Text => Ok(text.into()),
        Bool => text
            .parse::<bool>()
            .map(Value::from)
            .map_err(|_| wrong("true or false")),
        Number => text
            .parse::<i64>()
            .map(Value::from)
            .map_err(|_| wrong("a whole number")),
        List => Ok(items().collect::<Vec<_>>().into()),
        Pairs => {
            let pairs: Option<Map<String, Value>> = items()
                .map(|item| pair(item).map(|(k, v)| (k, v.into())))
                .collect();
            pairs
                .map(Value::Object)
                .ok_or_else(|| wrong("key=value pairs separated by commas"))
        }
        Gates => {
            let gate = |item: &str| {
                pair(item)
                    .and_then(|(key, value)| Some((key, Value::from(value.parse::<bool>().ok()?))))
            };
            let gates: Option<Map<String, Value>> = items().map(gate).collect();
            gates
                .map(Value::Object)
                .ok_or_else(|| wrong("Gate=true or Gate=false, separated by commas"))
        }
        Memory => reservations(text)
            .map(Value::from)
            .ok_or_else(|| wrong("node:type=quantity, types separated by commas")),
        Headers => headers(items()).ok_or_else(|| wrong("name:value pairs separated by commas")),
        Taints => {
            let taint = |item: &str| {
                let (rest, effect) = item.rsplit_once(':')?;
                let (key, value) = rest.split_once('=').unwrap_or((rest, ""));
                Some(json!({"key": key, "value": value, "effect": effect}))
            };
            let taints: Option<Vec<Value>> = items().map(taint).collect();
            taints
                .map(Value::from)
                .ok_or_else(|| wrong("key=value:Effect, separated by commas"))
        }
    }
}

fn set(fields: &mut Value, path: &str, value: Value) {
    let mut target = fields;
    for name in path.split('.') {
        if !target.is_object() {
            *target = json!({});
        }
        target = &mut target[name];
    }
    *target = value;
}

/// Returns the field that a flag sets, if any, and the flag's syntax; `None` for flags that clap parses.
fn known(name: &str) -> Option<(Option<&'static str>, Shape)> {
    let of_field = FLAGS.iter().find(|(flag, ..)| *flag == name);
    let of_field = of_field.map(|(_, field, shape)| (Some(*field), *shape));
    let without = WITHOUT_EFFECT.iter().find(|(flag, _)| *flag == name);
    of_field.or(without.map(|(_, shape)| (None, *shape)))
}

/// Takes the flags for fields out of the arguments; clap parses the others.
pub fn take(arguments: impl IntoIterator<Item = OsString>) -> Result<ParsedFlags, String> {
    let mut parsed = ParsedFlags {
        fields: Value::Null,
        ..ParsedFlags::default()
    };
    let mut arguments = arguments.into_iter().peekable();
    while let Some(argument) = arguments.next() {
        let text = argument
            .to_str()
            .and_then(|a| a.strip_prefix("--"))
            .map(str::to_owned);
        let (name, inline) = match &text {
            Some(text) => text
                .split_once('=')
                .map_or((text.as_str(), None), |(name, value)| {
                    (name, Some(value.to_owned()))
                }),
            None => ("", None),
        };
        // Old files spell the flags of libraries with underscores.
        let name = name.replace('_', "-");
        let Some((field, shape)) = known(&name) else {
            parsed.rest.push(argument);
            continue;
        };
        let text = match inline {
            Some(text) => text,
            None if shape == Bool => "true".to_owned(),
            None => arguments
                .next()
                .and_then(|v| v.into_string().ok())
                .ok_or_else(|| format!("--{name} needs a value"))?,
        };
        let mut value = value(&name, shape, &text)?;
        match field {
            Some(field) => {
                if matches!(shape, Memory | Headers) {
                    value = added(parsed.fields.get(field), value);
                }
                set(&mut parsed.fields, field, value);
            }
            None if name == "runonce" && value == true => {
                return Err("--runonce: true is invalid: the kubelet no longer has this mode; remove the flag".into());
            }
            None => parsed.without_effect.push(name),
        }
    }
    Ok(parsed)
}

/// Returns the rows for the documentation: flag and field.
#[must_use]
pub fn table() -> String {
    let mut text = String::from("| Flag | Field |\n|---|---|\n");
    for (flag, field, _) in FLAGS {
        text.push_str(&format!("| `--{flag}` | `{field}` |\n"));
    }
    for (flag, _) in WITHOUT_EFFECT {
        text.push_str(&format!(
            "| `--{flag}` | accepted without effect; the agent logs a warning at start |\n"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The flags of kubelet 1.36, without `v`, `help` and `version`.
    const OF_THE_KUBELET: &str = "
        address allowed-unsafe-sysctls anonymous-auth application-metrics-count-limit
        authentication-token-webhook authentication-token-webhook-cache-ttl authorization-mode
        authorization-webhook-cache-authorized-ttl authorization-webhook-cache-unauthorized-ttl boot-id-file
        bootstrap-kubeconfig cert-dir cgroup-driver cgroup-root cgroups-per-qos client-ca-file
        cloud-provider cluster-dns cluster-domain config config-dir container-hints container-log-max-files
        container-log-max-size container-runtime-endpoint containerd containerd-namespace
        contention-profiling cpu-cfs-quota cpu-cfs-quota-period cpu-manager-policy
        cpu-manager-policy-options cpu-manager-reconcile-period enable-controller-attach-detach
        enable-debugging-handlers enable-load-reader enable-server enforce-node-allocatable event-burst
        event-qps event-storage-age-limit event-storage-event-limit eviction-hard
        eviction-max-pod-grace-period eviction-minimum-reclaim eviction-pressure-transition-period
        eviction-soft eviction-soft-grace-period exit-on-lock-contention
        experimental-allocatable-ignore-eviction experimental-mounter-path fail-cgroupv1 fail-swap-on
        feature-gates file-check-frequency global-housekeeping-interval hairpin-mode healthz-bind-address
        healthz-port hostname-override housekeeping-interval http-check-frequency
        image-credential-provider-bin-dir image-credential-provider-config image-gc-high-threshold
        image-gc-low-threshold image-service-endpoint kernel-memcg-notification kube-api-burst
        kube-api-content-type kube-api-qps kube-reserved kube-reserved-cgroup kubeconfig kubelet-cgroups
        local-storage-capacity-isolation lock-file log-cadvisor-usage log-flush-frequency
        log-json-info-buffer-size log-json-split-stream log-text-info-buffer-size log-text-split-stream
        logging-format machine-id-file make-iptables-util-chains manifest-url manifest-url-header
        max-housekeeping-interval max-open-files max-pods maximum-dead-containers
        maximum-dead-containers-per-container memory-manager-policy minimum-container-ttl-duration
        minimum-image-ttl-duration node-ip node-labels node-status-max-images node-status-update-frequency
        oom-score-adj pod-cidr pod-manifest-path pod-max-pids pods-per-core port protect-kernel-defaults
        provider-id qos-reserved read-only-port register-node register-with-taints registry-burst
        registry-qps reserved-cpus reserved-memory resolv-conf root-dir rotate-certificates
        rotate-server-certificates runonce runtime-cgroups runtime-request-timeout seccomp-default
        serialize-image-pulls storage-driver-buffer-duration storage-driver-db storage-driver-host
        storage-driver-password storage-driver-secure storage-driver-table storage-driver-user
        streaming-connection-idle-timeout sync-frequency system-cgroups system-reserved
        system-reserved-cgroup tls-cert-file tls-cipher-suites tls-min-version tls-private-key-file
        topology-manager-policy topology-manager-policy-options topology-manager-scope vmodule
        volume-plugin-dir volume-stats-agg-period
    ";

    /// A valid value of a flag with this syntax.
    fn example(shape: Shape) -> &'static str {
        match shape {
            Bool | Text => "false",
            Number => "1",
            List | Pairs => "a=b",
            Gates => "A=true",
            Headers => "a:b",
            Memory => "0:memory=1Gi",
            Taints => "a=b:NoSchedule",
        }
    }

    #[test]
    fn every_flag_of_the_kubelet_is_accepted() {
        use clap::CommandFactory as _;
        let command = crate::cli::KubeletCli::command();
        let own: Vec<&str> = command
            .get_arguments()
            .filter_map(|a| a.get_long())
            .collect();
        for flag in OF_THE_KUBELET.split_whitespace() {
            let Some((field, shape)) = known(flag) else {
                assert!(
                    own.contains(&flag),
                    "--{flag} is unknown, so the agent would not start"
                );
                continue;
            };
            assert!(!own.contains(&flag), "--{flag} is parsed twice");
            let parsed = of(&[&format!("--{flag}={}", example(shape))]).expect(flag);
            assert!(parsed.rest.is_empty(), "--{flag}");
            assert_eq!(
                parsed.without_effect.is_empty(),
                field.is_some(),
                "--{flag}"
            );
        }
    }

    fn of(arguments: &[&str]) -> Result<ParsedFlags, String> {
        take(arguments.iter().map(|a| OsString::from(*a)))
    }

    #[test]
    fn flags_set_their_fields_and_keep_the_others() {
        let parsed = of(&[
            "kubelet",
            "--config=/c",
            "--anonymous-auth=false",
            "--client-ca-file",
            "/ca.crt",
            "--rotate-certificates",
            "--read-only-port=0",
            "--kube-reserved=cpu=100m,memory=1Gi",
            "--eviction-hard=memory.available<5%",
            "--register-with-taints=a=b:NoSchedule,c:NoExecute",
            "--feature-gates=A=true",
            "--reserved-memory=0:memory=1Gi,hugepages-2Mi=4Mi",
            "--reserved-memory",
            "1:memory=2Gi",
            "--pod-infra-container-image=pause:3",
            "--housekeeping_interval=1s",
            "--manifest-url-header=a:b, c:d",
            "--manifest-url-header",
            "a:e",
            "--runonce=false",
            "-v",
            "2",
        ])
        .expect("valid flags");
        assert_eq!(parsed.rest, ["kubelet", "--config=/c", "-v", "2"]);
        let without_effect = [
            "pod-infra-container-image",
            "housekeeping-interval",
            "runonce",
        ];
        assert_eq!(parsed.without_effect, without_effect);
        assert_eq!(
            parsed.fields,
            json!({
                "authentication": {"anonymous": {"enabled": false}, "x509": {"clientCAFile": "/ca.crt"}}, "rotateCertificates": true, "readOnlyPort": 0,
                "kubeReserved": {"cpu": "100m", "memory": "1Gi"}, "evictionHard": {"memory.available": "5%"}, "featureGates": {"A": true},
                "reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi", "hugepages-2Mi": "4Mi"}}, {"numaNode": 1, "limits": {"memory": "2Gi"}}],
                "staticPodURLHeader": {"a": ["b", "e"], "c": ["d"]},
                "registerWithTaints": [{"key": "a", "value": "b", "effect": "NoSchedule"}, {"key": "c", "value": "", "effect": "NoExecute"}],
            })
        );
        assert_eq!(of(&["kubelet"]).expect("valid flags").fields, Value::Null);
    }

    #[test]
    fn errors_name_the_invalid_flag() {
        for (arguments, flag) in [
            (vec!["--port=x"], "--port"),
            (vec!["--anonymous-auth=maybe"], "--anonymous-auth"),
            (vec!["--address"], "--address"),
            (vec!["--runonce"], "--runonce"),
            (vec!["--manifest-url-header=a"], "--manifest-url-header"),
            (vec!["--housekeeping-interval"], "--housekeeping-interval"),
            (vec!["--reserved-memory=memory=1Gi"], "--reserved-memory"),
        ] {
            assert!(
                of(&arguments).is_err_and(|e| e.contains(flag)),
                "{arguments:?}"
            );
        }
    }
}
