//! Whole configurations: what wins over what, and which mistakes are named.

use super::document::{Document, parse};
use super::resolve::resolve;
use super::*;

fn load(text: &str, flags: &Overrides) -> Result<Config, String> {
    let text =
        format!("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{text}");
    resolve(Document::decode(parse(&text)?.fields)?, flags, "HOST").map_err(|e| e.to_string())
}

#[test]
fn files_are_read_flags_win_and_mistakes_are_named() {
    let flags = Overrides::default();
    let config = load(
        "maxPods: 5\nsyncFrequency: 1m30s\nclusterDNS: [10.96.0.10]\nsystemReserved: {cpu: 100m}\nkubeReserved: {cpu: 200m}\nhairpinMode: none\ncpuManagerPolicy: static\nshutdownGracePeriod: 0s\n",
        &flags,
    )
    .expect("fine");
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
        ["cpuManagerPolicy"],
        "a default needs no warning"
    );
    let zeros = load("imageMinimumGCAge: 0s\nsyncFrequency: 0s\n", &flags).expect("fine");
    assert_eq!(
        (
            zeros.image_rules.minimum_age.as_secs(),
            zeros.sync_frequency.as_secs()
        ),
        (120, 60),
        "zeros are left to us"
    );
    let over = load(
        "maxPods: 5\n",
        &Overrides {
            max_pods: Some(7),
            hostname: Some(" N1 ".into()),
            ..Overrides::default()
        },
    )
    .expect("fine");
    assert_eq!((over.max_pods, over.node_name.as_str()), (7, "n1"));
    let cases = [
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
            "allowedUnsafeSysctls: [vm.swappiness]\n",
            "allowedUnsafeSysctls",
        ),
        ("containerLogMaxSize: big\n", "containerLogMaxSize"),
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
    ];
    for (text, expected) in cases {
        let error = load(text, &flags).expect_err(text);
        assert!(error.contains(expected), "{error}");
    }
    assert!(parse("kind: Pod\n").is_err());
}

#[test]
fn drop_ins_win_over_the_file_and_flags_over_both() {
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
    .expect("fine");
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
fn what_a_strict_reading_would_refuse_is_left_out_and_told() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("config.yaml");
    let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
    let text = "maxPods: 5\nmaxPods: 6\nmaxPodz: 7\nauthentication: {x508: {}, webhook: {enabled: false}}\n";
    std::fs::write(&path, format!("{head}{text}")).expect("written");
    let config = load_all(Some(&path), None, &Value::Null, &Overrides::default(), "h")
        .expect("read leniently");
    assert_eq!((config.max_pods, config.serving.tokens), (6, false));
    let told = config.unread.join("\n");
    for field in [
        "maxPods",
        "maxPodz: there is no such field",
        "authentication.x508",
    ] {
        assert!(told.contains(field), "{field}: {told}");
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
    let error = load("", &flags).expect_err("no way to say it");
    assert!(
        error.contains("--offline-start") && error.contains("after=5m"),
        "{error}"
    );
    let config = load("", &with("::", "external")).expect("fine");
    assert_eq!(config.offline_start.pods_after(), None, "safe by default");
    assert_eq!(
        (config.node_ips, config.prefers_ipv6, config.external_cloud),
        (vec![], true, true)
    );
}

#[test]
fn an_unchanged_status_is_reported_as_often_as_it_is_computed_where_only_that_is_set() {
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
