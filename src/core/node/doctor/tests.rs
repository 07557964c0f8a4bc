use super::evaluate::{CONTROLLERS, SLOW};
use super::*;

fn healthy() -> Facts {
    let runtime = RuntimeFacts {
        version: "containerd 2.1.0".into(),
        systemd_cgroups: Some(true),
        ..RuntimeFacts::default()
    };
    Facts {
        now: "2026-11-22T12:00:00Z".parse().expect("a time"),
        kernel: "6.1".into(),
        overlay: true,
        forwards: true,
        uplinks: vec![("eth0".into(), 1)],
        bridge_filters: Some(true),
        cgroup_v2: true,
        controllers: CONTROLLERS.map(Into::into).to_vec(),
        wants_systemd: true,
        runtime: Some(("unix:///run/containerd/containerd.sock".into(), Ok(runtime))),
        api: Some(Ok(ApiFacts {
            node_ready: Some(true),
            clock: Some(SignedDuration::from_secs(-2)),
            ..ApiFacts::default()
        })),
        ports: vec![Port {
            field: "port",
            address: ([0, 0, 0, 0], 10250).into(),
            holder: Some(Some(("kubelet".into(), 7))),
        }],
        certificates: vec![Certificate {
            purpose: "client",
            path: "/pki/c.pem".into(),
            lifetime: (
                "2026-01-01T00:00:00Z".parse().expect("a time"),
                "2027-01-01T00:00:00Z".parse().expect("a time"),
            ),
        }],
        disks: vec![Disk {
            purpose: "pods",
            path: "/var/lib/kubelet".into(),
            capacity: 1000,
            available: 400,
            inodes: 1000,
            inodes_free: 50,
        }],
        network: Some(NetworkFacts {
            conf_dir: "/etc/cni/net.d".into(),
            bin_dirs: vec!["/opt/cni/bin".into()],
            first: Some(PodNetwork {
                file: "/etc/cni/net.d/10-pods.conflist".into(),
                content: Ok(("pods".into(), vec![("bridge".into(), true)])),
            }),
        }),
        resolver: Some((
            "/etc/resolv.conf".into(),
            Ok(Resolver::parse(
                "nameserver 192.0.2.53\nsearch example.com\n",
            )),
        )),
        ..Facts::default()
    }
}

#[test]
fn a_healthy_node_has_no_finding() {
    let findings = diagnose(&healthy());
    assert_eq!(worst(&findings), Severity::Ok, "{}", text(&findings));
    insta::assert_snapshot!("healthy", text(&findings));
}

/// A change that breaks one thing on a healthy node.
type Break = Box<dyn FnOnce(&mut Facts)>;

fn change(break_it: impl FnOnce(&mut Facts) + 'static) -> Break {
    Box::new(break_it)
}

/// Breaks one thing at a time on a healthy node. Expects exactly one fault each time, with an effect and a remedy.
fn faults(breaks: Vec<(&str, Break)>) -> String {
    let mut shown = String::new();
    for (what, break_it) in breaks {
        let mut facts = healthy();
        break_it(&mut facts);
        let faults: Vec<Finding> = diagnose(&facts)
            .into_iter()
            .filter(|f| f.severity > Severity::Ok)
            .collect();
        let [fault] = &faults[..] else {
            panic!("{what}: {}", text(&faults));
        };
        assert!(fault.leads_to.is_some() && fault.remedy.is_some(), "{what}");
        shown.push_str(&format!("# {what}\n{}\n", text(&faults)));
    }
    shown
}

fn with_runtime(change: impl FnOnce(&mut RuntimeFacts) + 'static) -> Break {
    Box::new(|facts| {
        if let Some((_, Ok(runtime))) = &mut facts.runtime {
            change(runtime);
        }
    })
}

fn with_api(change: impl FnOnce(&mut ApiFacts) + 'static) -> Break {
    Box::new(|facts| {
        if let Some(Ok(api)) = &mut facts.api {
            change(api);
        }
    })
}

fn at(now: &'static str) -> Break {
    Box::new(move |facts| facts.now = now.parse().expect("a time"))
}

#[test]
fn each_machine_fault_yields_one_finding_with_its_remedy() {
    let hidden = ["/run/netns/cni-1", "/run/netns/cni-2"];
    let stub = || Ok(Resolver::parse("nameserver 127.0.0.53"));
    let nginx = || Some(Some(("nginx".into(), 9)));
    let breaks = vec![
        (
            "a field without effect",
            change(|f| f.configuration.push("x".into())),
        ),
        ("no overlayfs", change(|f| f.overlay = false)),
        (
            "hidden network namespaces",
            change(move |f| f.hidden_namespaces = hidden.map(Into::into).into()),
        ),
        ("no forwarding", change(|f| f.forwards = false)),
        (
            "a strict reverse path filter with two uplinks",
            change(|f| f.uplinks = vec![("eth0".into(), 2), ("eth1".into(), 1)]),
        ),
        (
            "bridged packets bypass iptables",
            change(|f| f.bridge_filters = Some(false)),
        ),
        (
            "no memory controller",
            change(|f| f.controllers.retain(|c| c != "memory")),
        ),
        (
            "different cgroup drivers",
            change(|f| f.wants_systemd = false),
        ),
        ("a nearly full disk", change(|f| f.disks[0].available = 99)),
        (
            "a nearly full disk of images",
            change(|f| {
                f.disks[0] = Disk {
                    purpose: "images",
                    available: 149,
                    ..f.disks[0].clone()
                };
            }),
        ),
        ("few inodes", change(|f| f.disks[0].inodes_free = 49)),
        (
            "a name server on the loopback interface",
            change(move |f| f.resolver = Some(("/r".into(), stub()))),
        ),
        (
            "a port in use",
            change(move |f| f.ports[0].holder = nginx()),
        ),
    ];
    insta::assert_snapshot!("machine_faults", faults(breaks));
}

#[test]
fn each_fault_of_a_peer_yields_one_finding_with_its_remedy() {
    let gone = || Some(("unix:///x".into(), Err("refused".into())));
    let breaks = vec![
        ("no runtime", change(move |f| f.runtime = gone())),
        (
            "a runtime that is not ready",
            with_runtime(|r| r.not_ready = Some("y".into())),
        ),
        (
            "no network",
            with_runtime(|r| r.network_not_ready = Some("cni".into())),
        ),
        ("a slow runtime", with_runtime(|r| r.took = SLOW * 2)),
        ("a certificate of the future", at("2025-12-31T00:00:00Z")),
        (
            "a certificate that expires soon",
            at("2026-12-30T00:00:00Z"),
        ),
        ("an expired certificate", at("2027-01-01T00:00:00Z")),
        (
            "a clock that is behind",
            with_api(|a| a.clock = Some(SignedDuration::from_secs(61))),
        ),
        ("a slow apiserver", with_api(|a| a.took = SLOW * 2)),
        ("no Node", with_api(|a| a.node_ready = None)),
        (
            "a Node that is not ready",
            with_api(|a| a.node_ready = Some(false)),
        ),
        (
            "no apiserver",
            change(|f| f.api = Some(Err("refused".into()))),
        ),
    ];
    insta::assert_snapshot!("peer_faults", faults(breaks));
}

fn with_network(change: impl FnOnce(&mut NetworkFacts) + 'static) -> Break {
    Box::new(|facts| {
        if let Some(network) = &mut facts.network {
            change(network);
        }
    })
}

#[test]
fn each_runtime_configuration_fault_yields_one_finding_with_its_remedy() {
    let content = |network: &mut NetworkFacts, content| {
        network.first = Some(PodNetwork {
            file: "/cni/a.conf".into(),
            content,
        });
    };
    let some = || vec![("bridge".to_owned(), true), ("portmap".to_owned(), false)];
    // A missing network is reported once, with the runtime's own directories.
    let elsewhere = |f: &mut Facts| {
        with_runtime(|r| r.network_not_ready = Some("cni".into()))(f);
        with_network(|n| (n.first, n.conf_dir) = (None, "/srv/cni".into()))(f);
    };
    let breaks = vec![
        ("no CNI configuration", with_network(|n| n.first = None)),
        (
            "a CNI configuration that is not JSON",
            with_network(move |n| content(n, Err("expected value".into()))),
        ),
        (
            "a missing plugin",
            with_network(move |n| content(n, Ok(("pods".into(), some())))),
        ),
        ("no network in another directory", change(elsewhere)),
        (
            "a handler without systemd",
            with_runtime(|r| (r.systemd_cgroups, r.handler_systemd) = (None, Some(false))),
        ),
        (
            "a missing sandbox image",
            with_runtime(|r| r.sandbox_image = Some(("r/pause:1".into(), false))),
        ),
    ];
    insta::assert_snapshot!("runtime_configuration_faults", faults(breaks));
}

#[test]
fn partial_runtime_status_details_are_parsed() {
    let of = |parts: &[(&str, serde_json::Value)]| {
        let parts = parts
            .iter()
            .map(|(name, part)| ((*name).to_owned(), part.to_string()));
        Details::of(&parts.collect())
    };
    let runc = |options: serde_json::Value| {
        let handler =
            serde_json::json!({"runtimeType": "io.containerd.runc.v2", "options": options});
        serde_json::json!({"defaultRuntimeName": "own", "runtimes": {"own": handler}})
    };
    let cni = serde_json::json!({"binDir": "/old/bin", "confDir": "/old/net.d"});
    let config = serde_json::json!({"containerd": runc(serde_json::json!({"SystemdCgroup": true})), "cni": cni, "sandboxImage": "r/pause:3"});
    let expected = Details {
        systemd: Some(true),
        sandbox_image: Some("r/pause:3".into()),
        conf_dir: Some("/old/net.d".into()),
        bin_dirs: vec!["/old/bin".into()],
    };
    assert_eq!(of(&[("config", config.clone())]), expected);
    // The loaded CNI configuration takes precedence.
    let loaded = serde_json::json!({"PluginDirs": ["/a", "/b"], "PluginConfDir": "/c"});
    let both = of(&[("config", config), ("cniconfig", loaded)]);
    assert_eq!(both.bin_dirs, ["/a", "/b"].map(std::path::PathBuf::from));
    assert_eq!(both.conf_dir, Some("/c".into()));
    let unsaid = serde_json::json!({"containerd": runc(serde_json::Value::Null)});
    assert_eq!(of(&[("config", unsaid)]).systemd, Some(false));
    assert_eq!(
        of(&[("golang", serde_json::json!("go1.25"))]),
        Details::default()
    );
}

#[test]
fn a_networks_plugins_come_from_its_conflist_or_its_conf() {
    for (text, expected) in [
        (
            r#"{"name": "n", "plugins": [{"type": "a"}, {"type": "b"}]}"#,
            Ok(("n", vec!["a", "b"])),
        ),
        (r#"{"name": "n", "type": "a"}"#, Ok(("n", vec!["a"]))),
        (r#"{"name": "n", "plugins": []}"#, Err("no plugins")),
        (r#"{"type": "a"}"#, Err("no name")),
        (
            r#"{"name": "n", "plugins": [{"type": ""}]}"#,
            Err("a plugin without a type"),
        ),
        ("{", Err("EOF")),
    ] {
        match (parse_network(text), expected) {
            (Ok((name, kinds)), Ok(expected)) => {
                assert_eq!(
                    (name.as_str(), kinds),
                    (
                        expected.0,
                        expected
                            .1
                            .iter()
                            .map(|k| (*k).to_owned())
                            .collect::<Vec<String>>()
                    )
                );
            }
            (Err(why), Err(expected)) => assert!(why.contains(expected), "{why}"),
            (got, _) => panic!("{text}: {got:?}"),
        }
    }
}

#[test]
fn a_fault_that_prevents_the_start_is_an_error_with_its_effect() {
    let mut facts = healthy();
    facts.refusals = vec!["this machine swaps (/swap): run swapoff -a".into()];
    let findings = diagnose(&facts);
    assert_eq!(worst(&findings), Severity::Error);
    insta::assert_snapshot!("start_fault", text(&findings));
}

#[test]
fn an_invalid_configuration_is_an_error_with_its_remedy() {
    let why = "invalid --node-ip \"10.0.0.300\": not an IP address; use an address of this machine";
    insta::assert_snapshot!("unusable_configuration", text(&[unusable(why.into())]));
}
