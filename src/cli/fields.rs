//! The kubelet's flags that stand for fields of KubeletConfiguration: they win over the file (kubelet spec, 16.3).

use std::ffi::OsString;

use serde_json::{Map, Value, json};

/// How a flag's value is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    Text,
    Bool,
    Number,
    /// Separated by commas.
    List,
    /// `key=value`, or `key<value`, separated by commas.
    Map,
    /// As a map, of truth values.
    Gates,
    /// `key=value:effect`, separated by commas.
    Taints,
    /// `node:type=quantity`, types separated by commas and nodes by semicolons; the flag may be given for each node.
    Memory,
}

use Shape::{Bool, Gates, List, Map as Pairs, Memory, Number, Taints, Text};

/// The flags, the fields they set, and how.
const FLAGS: [(&str, &str, Shape); 89] = [
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
    ("logging-format", "logging.format", Text),
    ("make-iptables-util-chains", "makeIPTablesUtilChains", Bool),
    ("manifest-url", "staticPodURL", Text),
    ("max-open-files", "maxOpenFiles", Number),
    ("memory-manager-policy", "memoryManagerPolicy", Text),
    ("minimum-image-ttl-duration", "imageMinimumGCAge", Text),
    ("node-status-max-images", "nodeStatusMaxImages", Number),
    (
        "node-status-update-frequency",
        "nodeStatusUpdateFrequency",
        Text,
    ),
    ("pod-cidr", "podCIDR", Text),
    ("pod-max-pids", "podPidsLimit", Number),
    ("pods-per-core", "podsPerCore", Number),
    ("port", "port", Number),
    ("protect-kernel-defaults", "protectKernelDefaults", Bool),
    ("provider-id", "providerID", Text),
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

/// Flags of kubelets that change nothing here: taken, and reported.
pub const WITHOUT_EFFECT: [&str; 5] = [
    "exit-on-lock-contention",
    "experimental-mounter-path",
    "lock-file",
    "pod-infra-container-image",
    "runtime-cgroups",
];

/// What the flags for fields say.
#[derive(Debug, Default, PartialEq)]
pub struct Given {
    /// The arguments that are left.
    pub rest: Vec<OsString>,
    /// The fields, as in a file.
    pub fields: Value,
    /// Flags that were given and change nothing.
    pub without_effect: Vec<String>,
}

/// What is reserved on NUMA nodes, as `reservedMemory` has it.
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
    let mut here = fields;
    for name in path.split('.') {
        if !here.is_object() {
            *here = json!({});
        }
        here = &mut here[name];
    }
    *here = value;
}

/// Takes the flags for fields out of the arguments; what is not one is left for others to read.
pub fn take(arguments: impl IntoIterator<Item = OsString>) -> Result<Given, String> {
    let mut given = Given {
        fields: Value::Null,
        ..Given::default()
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
        let ignored = WITHOUT_EFFECT.contains(&name);
        let known = FLAGS.iter().find(|(flag, ..)| *flag == name);
        if !ignored && known.is_none() {
            given.rest.push(argument);
            continue;
        }
        let is_bool =
            known.is_some_and(|(.., shape)| *shape == Bool) || name == "exit-on-lock-contention";
        let text = match inline {
            Some(text) => text,
            None if is_bool => "true".to_owned(),
            None => arguments
                .next()
                .and_then(|v| v.into_string().ok())
                .ok_or_else(|| format!("--{name} needs a value"))?,
        };
        match known {
            Some((flag, field, shape)) => {
                let mut value = value(flag, *shape, &text)?;
                let before = given.fields.get(field).and_then(Value::as_array);
                if let (Memory, Some(before), Some(more)) = (shape, before, value.as_array()) {
                    value = before.iter().chain(more).cloned().collect();
                }
                set(&mut given.fields, field, value);
            }
            None => given.without_effect.push(name.to_owned()),
        }
    }
    Ok(given)
}

/// Rows of the documentation: flag and field.
#[must_use]
pub fn table() -> String {
    let mut text = String::from("| Flag | Field |\n|---|---|\n");
    for (flag, field, _) in FLAGS {
        text.push_str(&format!("| `--{flag}` | `{field}` |\n"));
    }
    for flag in WITHOUT_EFFECT {
        text.push_str(&format!(
            "| `--{flag}` | taken, without effect: a warning at start says so |\n"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(arguments: &[&str]) -> Result<Given, String> {
        take(arguments.iter().map(|a| OsString::from(*a)))
    }

    #[test]
    fn flags_set_their_fields_and_leave_the_others() {
        let given = of(&[
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
            "-v",
            "2",
        ])
        .expect("fine");
        assert_eq!(given.rest, ["kubelet", "--config=/c", "-v", "2"]);
        assert_eq!(given.without_effect, ["pod-infra-container-image"]);
        assert_eq!(
            given.fields,
            json!({
                "authentication": {"anonymous": {"enabled": false}, "x509": {"clientCAFile": "/ca.crt"}}, "rotateCertificates": true, "readOnlyPort": 0,
                "kubeReserved": {"cpu": "100m", "memory": "1Gi"}, "evictionHard": {"memory.available": "5%"}, "featureGates": {"A": true},
                "reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi", "hugepages-2Mi": "4Mi"}}, {"numaNode": 1, "limits": {"memory": "2Gi"}}],
                "registerWithTaints": [{"key": "a", "value": "b", "effect": "NoSchedule"}, {"key": "c", "value": "", "effect": "NoExecute"}],
            })
        );
        assert_eq!(of(&["kubelet"]).expect("fine").fields, Value::Null);
    }

    #[test]
    fn mistakes_name_the_flag() {
        for (arguments, flag) in [
            (vec!["--port=x"], "--port"),
            (vec!["--anonymous-auth=maybe"], "--anonymous-auth"),
            (vec!["--address"], "--address"),
            (vec!["--reserved-memory=memory=1Gi"], "--reserved-memory"),
        ] {
            assert!(
                of(&arguments).is_err_and(|e| e.contains(flag)),
                "{arguments:?}"
            );
        }
    }
}
