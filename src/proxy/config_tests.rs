//! Tables of configurations.

use super::*;

fn load(text: &str, overrides: &Overrides) -> Result<Config, ConfigError> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("config.conf");
    std::fs::write(&path, text).expect("written");
    Config::load(Some(&path), overrides, "Node-A")
}

/// The flags' defaults.
fn flags() -> Overrides {
    Overrides {
        kubeconfig: Some("/kc".into()),
        table: "holdfast".into(),
        cluster_domain: "cluster.local".into(),
        ..Overrides::default()
    }
}

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

fn with(fields: &str) -> Result<Config, ConfigError> {
    load(&format!("{HEAD}{fields}"), &flags())
}

/// What kubeadm 1.36 writes into the ConfigMap kube-system/kube-proxy.
const KUBEADM: &str = r#"
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection: {acceptContentTypes: "", burst: 0, contentType: "", kubeconfig: /var/lib/kube-proxy/kubeconfig.conf, qps: 0}
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack: {maxPerCore: null, min: null, tcpBeLiberal: null, tcpCloseWaitTimeout: null, tcpEstablishedTimeout: null, udpStreamTimeout: 0s, udpTimeout: 0s}
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables: {localhostNodePorts: null, masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
ipvs: {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false, syncPeriod: 0s, tcpFinTimeout: 0s, tcpTimeout: 0s, udpTimeout: 0s}
logging: {flushFrequency: 0, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}}, verbosity: 0}
metricsBindAddress: ""
mode: ""
nftables: {masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel: {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "", sourceVip: ""}
"#;

#[test]
fn kubeadms_configuration_needs_no_warning() {
    let overrides = Overrides {
        kubeconfig: None,
        ..flags()
    };
    let config = load(&format!("{HEAD}{KUBEADM}"), &overrides).expect("usable");
    assert_eq!(config.unknown, Vec::<String>::new());
    // The buffer sizes of logs are no zeros, but texts.
    let ignored: Vec<&str> = config.ignored.iter().map(String::as_str).collect();
    assert!(
        ignored
            .iter()
            .all(|field| field.starts_with("logging.options.")),
        "{ignored:?}"
    );
    let file = Path::new("/var/lib/kube-proxy/kubeconfig.conf");
    assert_eq!(config.kubeconfig, file);
    assert_eq!(config.node_name, "node-a");
    assert_eq!(
        config.cluster_cidrs,
        ["10.244.0.0/16".parse().expect("a range")]
    );
    assert_eq!(config.healthz, Some(HEALTHZ));
    assert_eq!(config.metrics, Some(METRICS));
    assert_eq!(config.masquerade_bit, 14);
    assert_eq!(config.audit_interval, AUDIT_INTERVAL);
    assert_eq!(config.min_sync_period, Duration::ZERO);
}

#[test]
fn fields_without_effect_and_unknown_fields_are_named() {
    let config = with(
        "mode: ipvs\nipvs: {scheduler: lc, strictARP: true, typo: 1}\nconntrack: {maxPerCore: 0, min: 5}\n\
         featureGates: {A: true}\nportRnage: 1-2\nbindAddress: 0.0.0.0\niptables: {localhostNodePorts: true}\n",
    );
    let config = config.expect("usable");
    assert_eq!(config.unknown, ["ipvs.typo", "portRnage"]);
    let mut ignored = config.ignored;
    ignored.sort();
    assert_eq!(
        ignored,
        [
            "conntrack.min",
            "featureGates.A",
            "iptables.localhostNodePorts",
            "ipvs.scheduler",
            "ipvs.strictARP",
            "mode"
        ]
    );
    let repeated = with("mode: nftables\nmode: nftables\n").expect("usable");
    assert_eq!(repeated.unknown.len(), 1, "{:?}", repeated.unknown);
    assert!(repeated.ignored.is_empty());
}

#[test]
fn fields_have_their_effect() {
    let config = with(
        "healthzBindAddress: 127.0.0.1:5\nmetricsBindAddress: '::1'\nbindAddressHardFail: true\nhostnameOverride: Other\n\
         nodePortAddresses: [192.0.2.0/24, '2001:db8::/64']\noomScoreAdj: -998\nclusterCIDR: '10.1.0.0/16,fd00::/48'\n\
         iptables: {masqueradeAll: true, masqueradeBit: 3, syncPeriod: 5s, minSyncPeriod: 2s}\nnftables: {masqueradeBit: 0, minSyncPeriod: 24h}\n",
    );
    let config = config.expect("usable");
    assert_eq!(config.healthz, Some(([127, 0, 0, 1], 5).into()));
    let metrics = config.metrics.map(|a| a.to_string());
    assert_eq!(metrics.as_deref(), Some("[::1]:10249"));
    assert!(config.bind_hard_fail && config.masquerade_all);
    assert_eq!(config.node_name, "other");
    assert_eq!(config.node_port_addresses.len(), 2);
    assert_eq!(config.oom_score_adj, Some(-998));
    assert_eq!(config.cluster_cidrs.len(), 2);
    // The section nftables overrides the section iptables.
    assert_eq!(config.masquerade_bit, 0);
    assert_eq!(config.min_sync_period, MAX_MIN_SYNC_PERIOD);
    assert_eq!(config.audit_interval, Duration::from_secs(5));
    assert!(config.ignored.is_empty() && config.unknown.is_empty());
    let primary = with("nodePortAddresses: [primary]\n").expect("usable");
    assert!(primary.node_port_addresses.is_empty());
}

#[test]
fn flags_override_fields() {
    let overrides = Overrides {
        hostname: Some("flag".into()),
        table: "holdfast-two".into(),
        dns: Some("10.96.0.10, fd00::a,10.96.0.10".into()),
        cluster_domain: "Example.Org.".into(),
        cluster_cidr: Some("10.2.0.0/16".into()),
        service_cidr: Some("10.96.0.0/16,fd00::/112".into()),
        bridge: Some("hf0".into()),
        healthz: Some(String::new()),
        metrics: Some("127.0.0.1:7".into()),
        ..flags()
    };
    let text = format!(
        "{HEAD}hostnameOverride: file\nclusterCIDR: 10.1.0.0/16\nhealthzBindAddress: 0.0.0.0:1\n"
    );
    let config = load(&text, &overrides).expect("usable");
    assert_eq!(config.node_name, "flag");
    assert_eq!(config.table, "holdfast-two");
    assert_eq!(config.dns.len(), 2, "{:?}", config.dns);
    assert_eq!(config.cluster_domain, "example.org");
    assert_eq!(
        config.cluster_cidrs,
        ["10.2.0.0/16".parse().expect("a range")]
    );
    assert_eq!(config.service_cidrs.len(), 2);
    assert_eq!(config.healthz, None);
    assert_eq!(config.metrics, Some(([127, 0, 0, 1], 7).into()));
    let alone = Config::load(None, &overrides, "h").expect("usable");
    assert_eq!(alone.kubeconfig, Path::new("/kc"));
}

#[test]
fn unusable_values_are_refused_with_field_value_and_remedy() {
    for (fields, field) in [
        ("masqueradeBit", "iptables: {masqueradeBit: 32}"),
        ("masqueradeBit", "nftables: {masqueradeBit: -1}"),
        ("nftables.masqueradeAll", "nftables: {masqueradeAll: 1}"),
        ("nftables.syncPeriod", "nftables: {syncPeriod: soon}"),
        ("oomScoreAdj", "oomScoreAdj: 1001"),
        ("clusterCIDR", "clusterCIDR: 10.0.0.0"),
        ("clusterCIDR", "clusterCIDR: 10.0.0.0/16,10.1.0.0/16"),
        (
            "nodePortAddresses",
            "nodePortAddresses: [primary, 10.0.0.0/8]",
        ),
        ("nodePortAddresses", "nodePortAddresses: 10.0.0.0/8"),
        ("healthzBindAddress", "healthzBindAddress: localhost:1"),
        ("hostnameOverride", "hostnameOverride: [a]"),
    ]
    .map(|(field, fields)| (fields, field))
    {
        let error = with(fields).expect_err(fields).to_string();
        assert!(
            error.starts_with(&format!("invalid {field} ")),
            "{fields}: {error}"
        );
        assert!(error.contains(": use "), "{fields}: {error}");
    }
    let error = |change: fn(&mut Overrides)| {
        let mut overrides = flags();
        change(&mut overrides);
        Config::load(None, &overrides, "h")
            .expect_err("refused")
            .to_string()
    };
    let table = error(|o| o.table = "kube-proxy".into());
    assert!(table.contains("--table"), "{table}");
    for text in ["", "a b", "-a", &"a".repeat(65)] {
        assert!(self::table(text).is_err(), "{text}");
    }
    let dns = error(|o| o.dns = Some("10.96.0.10,0.0.0.0".into()));
    assert!(dns.contains("--dns"), "{dns}");
    for domain in [".", "", "a..b", "-a.b", &"a.".repeat(70)] {
        assert!(self::domain(domain).is_err(), "{domain}");
    }
    let none = error(|o| o.kubeconfig = None);
    assert!(none.contains("--kubeconfig is required"), "{none}");
    for text in ["", "[]", "kind: KubeProxyConfiguration\n", "{", "a: b: c"] {
        let error = load(text, &flags()).expect_err(text).to_string();
        assert!(error.starts_with("invalid --config "), "{text}: {error}");
    }
}
