//! Environment, configuration, versions, errors.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use serde_json::{Value, json};

use super::world::{World, inside, ip};

#[test]
fn the_protocol_follows_the_specification() {
    let world = World::new();
    let good = world.config("1.0.0", json!({}));
    let with = |key: &str, value: Value| {
        let mut config = good.clone();
        config[key] = value;
        config
    };
    let missing = world.refused(
        "bridge",
        "ADD",
        &good,
        &[("CNI_CONTAINERID", ""), ("CNI_NETNS", "")],
    );
    assert_eq!(missing["code"], 4);
    assert!(
        missing["msg"]
            .as_str()
            .unwrap()
            .contains("[CNI_CONTAINERID,CNI_NETNS]"),
        "{missing}"
    );
    let long = "x".repeat(1 << 20);
    let cases: Vec<(&str, Value, Vec<(&str, &str)>, u64)> = vec![
        ("FROB", good.clone(), vec![], 4),
        ("ADD", good.clone(), vec![("CNI_CONTAINERID", "../x")], 4),
        ("ADD", good.clone(), vec![("CNI_IFNAME", "a/b")], 4),
        (
            "ADD",
            good.clone(),
            vec![("CNI_IFNAME", "sixteen-bytes-ok")],
            4,
        ),
        ("ADD", with("name", json!("../../etc")), vec![], 7),
        ("ADD", with("name", json!("")), vec![], 7),
        ("ADD", with("name", json!(long)), vec![], 7),
        ("ADD", with("cniVersion", json!("9.9.9")), vec![], 1),
        ("CHECK", with("cniVersion", json!("0.3.1")), vec![], 1),
        ("GC", good.clone(), vec![], 1),
        ("CHECK", good.clone(), vec![], 7),
        ("ADD", with("bridge", json!("br/0")), vec![], 7),
        ("ADD", with("mtu", json!("big")), vec![], 6),
        ("ADD", with("isGateway", json!(1)), vec![], 6),
        ("ADD", with("ipam", json!([1])), vec![], 6),
        ("ADD", with("ipam", json!({"type": "../bridge"})), vec![], 7),
        ("ADD", with("ipam", json!({"type": "nosuch"})), vec![], 999),
        ("ADD", with("promiscMode", json!(true)), vec![], 0),
        ("ADD", with("ipMasqBackend", json!("other")), vec![], 7),
        ("ADD", with("vlan", json!(4095)), vec![], 7),
        ("ADD", with("vlanTrunk", json!([{"minID": 5}])), vec![], 7),
        ("ADD", with("vlanTrunk", json!([{"maxID": 5}])), vec![], 7),
        (
            "ADD",
            with("vlanTrunk", json!([{"minID": -5, "maxID": 3}])),
            vec![],
            7,
        ),
        (
            "ADD",
            with("vlanTrunk", json!([{"minID": 9, "maxID": 3}])),
            vec![],
            7,
        ),
        ("ADD", with("vlanTrunk", json!([{"id": 5000}])), vec![], 7),
        ("ADD", with("vlanTrunk", json!([{}])), vec![], 7),
        ("ADD", json!("text"), vec![], 6),
        (
            "ADD",
            good.clone(),
            vec![("CNI_NETNS", "/proc/self/ns/net")],
            8,
        ),
        ("ADD", good.clone(), vec![("CNI_NETNS", "/etc/passwd")], 8),
    ];
    for (verb, config, env, code) in cases {
        if code == 0 {
            let hairpin = {
                let mut config = config.clone();
                config["hairpinMode"] = true.into();
                config
            };
            assert_eq!(world.refused("bridge", verb, &hairpin, &env)["code"], 7);
            continue;
        }
        let refusal = world.refused("bridge", verb, &config, &env);
        assert_eq!(refusal["code"], code, "{verb} {env:?}: {refusal}");
    }
    assert!(world.taken().is_empty());
    assert!(!Path::new("/etc/lock").exists());
    assert!(
        !ip(&["-n", &world.host, "link"]).contains("veth"),
        "refused calls change nothing"
    );
    let version = world.call("bridge", "VERSION", &json!(null), &[]);
    let version: Value = serde_json::from_slice(&version.stdout).unwrap();
    assert_eq!(version["supportedVersions"].as_array().unwrap().len(), 7);
}

#[test]
fn large_configurations_and_repeated_keys_are_accepted() {
    let world = World::new();
    let config = world.config("1.0.0", json!({"mtu": 1400}));
    // Large in a part that no plugin reads, and in a part that every plugin reads.
    for key in ["args", "dns"] {
        let mut large = config.clone();
        large[key] = json!({"search": ["x".repeat(5 << 20)]});
        let result = world.ok("bridge", "ADD", &large);
        world.ok("bridge", "CHECK", &World::with_previous(&large, &result));
        world.ok("bridge", "DEL", &large);
    }
    let mtu = || {
        let shown = ip(&["-n", &world.container, "-j", "link", "show", "eth0"]);
        serde_json::from_str::<Value>(&shown).unwrap()[0]["mtu"].clone()
    };
    // The last value counts, whatever its case and its place in the alphabet.
    for (more, expected) in [
        (r#""mtu": 1300"#, 1300),
        (r#""MTU": 1310"#, 1310),
        (r#""MTU": 1310, "mtu": 1320"#, 1320),
        (r#""mTu": "x", "Mtu": 1330"#, 1330),
    ] {
        let text = config.to_string();
        let input = format!("{}, {more}}}", text.strip_suffix('}').unwrap());
        let output = world.call_with("bridge", "ADD", &input, &[]);
        assert!(output.status.success(), "{more}: {output:?}");
        assert_eq!(mtu(), expected, "{more}");
        world.ok("bridge", "DEL", &config);
    }
}

/// A collector that sends each request to `seen`, and answers unless it is `stuck`.
fn collect(namespace: &str, at: &str, stuck: bool) -> Receiver<String> {
    let listener = inside(namespace, || TcpListener::bind(at).unwrap());
    let (seen, requests) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut open = vec![];
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let (mut text, mut buffer) = (String::new(), [0; 4096]);
            while !text.ends_with("]}]}") {
                let read = stream.read(&mut buffer).unwrap();
                assert!(read > 0, "{text}");
                text += std::str::from_utf8(&buffer[..read]).unwrap();
            }
            if !stuck {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}");
            }
            open.push(stream);
            let _ = seen.send(text);
        }
    });
    requests
}

#[test]
fn calls_within_a_sampled_trace_are_exported() {
    let world = World::new();
    let config = world.config("1.0.0", json!({}));
    let requests = collect(&world.host, "127.0.0.1:4318", false);
    let (trace, parent) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
    let [sampled, unsampled] = ["01", "00"].map(|flags| format!("00-{trace}-{parent}-{flags}"));
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318");
    let env = [("TRACEPARENT", &*sampled), endpoint];
    let mut failing = config.clone();
    failing["mtu"] = "x".into();
    for (verb, config, code) in [
        ("ADD", &config, 1),
        ("DEL", &config, 1),
        ("ADD", &failing, 2),
    ] {
        let output = world.call("bridge", verb, config, &env);
        assert_eq!(output.status.success(), code == 1, "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        let request = requests.recv_timeout(Duration::from_secs(30)).unwrap();
        let (head, body) = request.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}", body.len())));
        let body: Value = serde_json::from_str(body).unwrap();
        let span = &body["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
        assert_eq!(span["name"], format!("CNI {verb} bridge"), "{span}");
        assert_eq!(
            (&span["traceId"], &span["parentSpanId"]),
            (&json!(trace), &json!(parent))
        );
        assert_eq!(span["spanId"].as_str().unwrap().len(), 16);
        assert_eq!(span["status"]["code"], code, "{span}");
        let time = |key: &str| span[key].as_str().unwrap().parse::<u64>().unwrap();
        let took = time("endTimeUnixNano") - time("startTimeUnixNano");
        assert!(took > 10_000 && took < 60_000_000_000, "{took} ns");
    }
    // Neither a trace that is not sampled nor a missing or unknown collector costs a connection.
    for env in [
        vec![("TRACEPARENT", &*unsampled), endpoint],
        vec![endpoint],
        vec![("TRACEPARENT", &*sampled)],
        vec![
            ("TRACEPARENT", &*sampled),
            endpoint,
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ],
    ] {
        world.ok_with("bridge", "DEL", &config, &env);
    }
    assert!(requests.try_recv().is_err());
    // A collector that does not answer, or does not listen, delays a call but does not make it fail.
    let stuck = collect(&world.host, "127.0.0.1:4319", true);
    for port in ["4319", "4320"] {
        let endpoint = format!("http://127.0.0.1:{port}");
        let env = [
            ("TRACEPARENT", &*sampled),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
        ];
        let output = world.call("bridge", "DEL", &config, &env);
        assert!(output.status.success(), "{output:?}");
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            log.contains("exporting the span") && log.contains(port),
            "{log}"
        );
    }
    assert_eq!(stuck.iter().take(1).count(), 1);
}

#[test]
fn status_returns_50_if_the_ipam_plugin_is_missing() {
    let world = World::new();
    let of = |plugin: &str, ipam: &str| {
        json!({"cniVersion": "1.1.0", "name": "net", "type": plugin, "master": "lo", "vlanId": 5, "device": "lo",
            "ipam": {"type": ipam, "subnet": "10.198.1.0/24", "dataDir": world.data.path()}})
    };
    for plugin in ["bridge", "ptp", "macvlan", "tap", "host-device"] {
        world.ok(plugin, "STATUS", &of(plugin, "host-local"));
        let refusal = world.refused(plugin, "STATUS", &of(plugin, "nosuch"), &[]);
        assert_eq!(refusal["code"], 50, "{plugin}: {refusal}");
        assert!(refusal["msg"].as_str().unwrap().contains("nosuch"));
        // A directory without plugins, and a file that is no program.
        let path = world.data.path().to_str().unwrap();
        let elsewhere = [("CNI_PATH", path)];
        let refusal = world.refused(plugin, "STATUS", &of(plugin, "host-local"), &elsewhere);
        assert_eq!(refusal["code"], 50, "{plugin}: {refusal}");
        std::fs::write(world.data.path().join("text"), "no program").unwrap();
        let refusal = world.refused(plugin, "STATUS", &of(plugin, "text"), &elsewhere);
        assert_eq!(refusal["code"], 50, "{plugin}: {refusal}");
    }
}

#[test]
fn every_verb_names_its_missing_parameters() {
    let world = World::new();
    let all = ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"];
    let without: Vec<(&str, &str)> = all.iter().map(|name| (*name, "")).collect();
    for (verb, version, needed) in [
        ("ADD", "0.1.0", &all[..]),
        ("CHECK", "0.4.0", &all),
        (
            "DEL",
            "0.1.0",
            &["CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"],
        ),
        ("GC", "1.1.0", &["CNI_PATH"]),
        ("STATUS", "1.1.0", &["CNI_PATH"]),
    ] {
        let refusal = world.refused("bridge", verb, &world.config(version, json!({})), &without);
        assert_eq!(refusal["code"], 4);
        let message = refusal["msg"].as_str().unwrap();
        for name in all {
            assert_eq!(
                message.contains(name),
                needed.contains(&name),
                "{verb}: {message}"
            );
        }
    }
    // A configuration without a version means the oldest. For an unknown version, the error lists the supported ones.
    let mut config = world.config("1.0.0", json!({}));
    config.as_object_mut().unwrap().remove("cniVersion");
    assert_eq!(world.ok("bridge", "ADD", &config)["cniVersion"], "0.1.0");
    world.ok("bridge", "DEL", &config);
    config["cniVersion"] = "0.3.2".into();
    let refusal = world.refused("bridge", "ADD", &config, &[]);
    assert!(
        refusal["code"] == 1 && refusal["details"].as_str().unwrap().contains("0.3.2"),
        "{refusal}"
    );
    // Without a verb, the plugin prints its name and versions.
    let about = world.call("bridge", "", &config, &[("CNI_COMMAND", "")]);
    assert!(
        about.status.success()
            && String::from_utf8_lossy(&about.stderr)
                .contains("CNI protocol versions supported: 0.1.0"),
        "{about:?}"
    );
    // Keys match regardless of case.
    let loud = json!({"CNIVersion": "1.0.0", "NAME": "net", "TYPE": "bridge", "Bridge": "br0", "ISDEFAULTGATEWAY": true, "IPAM": config["ipam"]});
    let result = world.ok("bridge", "ADD", &loud);
    assert_eq!(result["routes"][0]["dst"], "0.0.0.0/0", "{result}");
    world.ok("bridge", "DEL", &loud);
}
