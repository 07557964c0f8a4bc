//! The records of the Kubernetes DNS specification 1.1.0, and CoreDNS's answers where the specification leaves a choice
//! (`plugin/kubernetes/handler_test.go`), as a table.

use std::sync::Arc;

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::Record;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::message::encode;
use crate::query::tests::query;
use crate::query::{Edns, Transport};

fn slice(kind: &str, ports: &Value, endpoints: Value) -> Arc<EndpointSlice> {
    let value =
        json!({"addressType": kind, "metadata": {}, "ports": ports, "endpoints": endpoints});
    Arc::new(serde_json::from_value(value).unwrap())
}

fn set(records: &mut Records, name: &str, spec: Value, slices: &[Arc<EndpointSlice>]) {
    let service = serde_json::from_value(json!({"spec": spec})).unwrap();
    records.set_service("testns", name, Service::compile(&service, slices));
}

/// A namespace `testns` with services of each kind, and a namespace `bare` without services.
fn cluster() -> Records {
    let mut records = Records::new(Name::parse("cluster.local").unwrap());
    records.synced = true;
    records.addresses = vec!["10.96.0.10".parse().unwrap(), "fd00::a".parse().unwrap()];
    records.set_namespace("testns", true);
    records.set_namespace("bare", true);
    let http = json!([{"name": "http", "port": 80}]);
    let both = json!([{"name": "http", "port": 80}, {"name": "dns", "protocol": "UDP", "port": 53}, {"port": 9}]);
    set(
        &mut records,
        "svc1",
        json!({"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1"], "ports": http}),
        &[slice(
            "IPv4",
            &http,
            json!([{"addresses": ["172.0.0.1"]}, {"addresses": ["172.0.0.9"], "hostname": "named"}]),
        )],
    );
    set(
        &mut records,
        "dual",
        json!({"clusterIP": "10.0.0.3", "clusterIPs": ["10.0.0.3", "10::3"], "ports": http}),
        &[],
    );
    set(&mut records, "pending", json!({"ports": http}), &[]);
    set(
        &mut records,
        "hdls1",
        json!({"clusterIP": "None", "ports": both}),
        &[
            slice(
                "IPv4",
                &http,
                json!([
                    {"addresses": ["172.0.0.2"], "conditions": {"ready": true}},
                    {"addresses": ["172.0.0.3"]},
                    {"addresses": ["172.0.0.4"], "hostname": "dup-name"},
                    {"addresses": ["172.0.0.5"], "hostname": "Dup-Name"},
                    {"addresses": ["172.0.0.6"], "conditions": {"ready": false}},
                ]),
            ),
            slice(
                "IPv6",
                &http,
                json!([{"addresses": ["5678:abcd::1"]}, {"addresses": ["5678:abcd::2"]}]),
            ),
        ],
    );
    set(
        &mut records,
        "portless",
        json!({"clusterIP": "None"}),
        &[slice(
            "IPv4",
            &json!([]),
            json!([{"addresses": ["172.0.0.20"]}]),
        )],
    );
    set(
        &mut records,
        "unready",
        json!({"clusterIP": "None", "ports": http}),
        &[slice(
            "IPv4",
            &http,
            json!([{"addresses": ["172.0.0.7"], "conditions": {"ready": false}}]),
        )],
    );
    for (name, target) in [
        ("external", "ext.interwebs.test"),
        ("inner", "svc1.testns.svc.cluster.local"),
        ("broken", "absent.testns.svc.cluster.local"),
        ("circle", "circle.testns.svc.cluster.local"),
        ("ip", "192.0.2.1"),
    ] {
        set(
            &mut records,
            name,
            json!({"type": "ExternalName", "externalName": target}),
            &[],
        );
    }
    records
}

const NXDOMAIN: Expected = Expected {
    code: code::NXDOMAIN,
    answers: &[],
    additionals: &[],
    foreign: "",
};
const NODATA: Expected = Expected {
    code: code::NOERROR,
    answers: &[],
    additionals: &[],
    foreign: "",
};

struct Expected {
    code: u16,
    /// Lines without owner and TTL of 5 s if they begin with a space; the owner then is the question's name.
    answers: &'static [&'static str],
    additionals: &'static [&'static str],
    foreign: &'static str,
}

const fn some(answers: &'static [&'static str]) -> Expected {
    Expected {
        code: code::NOERROR,
        answers,
        additionals: &[],
        foreign: "",
    }
}

const fn with(answers: &'static [&'static str], additionals: &'static [&'static str]) -> Expected {
    Expected {
        code: code::NOERROR,
        answers,
        additionals,
        foreign: "",
    }
}

/// Each row: a name below `testns.svc.cluster.local` or, with a final dot, a whole name; the type; the answer.
const TABLE: &[(&str, u16, Expected)] = &[
    // 2.2: the schema's version.
    (
        "dns-version.cluster.local.",
        kind::TXT,
        some(&["dns-version.cluster.local. 28800 IN TXT 1.1.0"]),
    ),
    ("dns-version.cluster.local.", kind::A, NODATA),
    // 2.3.1: A and AAAA of services.
    ("svc1", kind::A, some(&[" A 10.0.0.1"])),
    (
        "SVC1.TestNS.Svc.Cluster.LOCAL.",
        kind::A,
        some(&[" A 10.0.0.1"]),
    ),
    ("svc1", kind::AAAA, NODATA),
    ("dual", kind::A, some(&[" A 10.0.0.3"])),
    ("dual", kind::AAAA, some(&[" AAAA 10::3"])),
    ("pending", kind::A, NODATA),
    ("svc0", kind::A, NXDOMAIN),
    ("svc0", kind::AAAA, NXDOMAIN),
    ("svc1", kind::CNAME, NODATA),
    ("svc1", kind::TXT, NODATA),
    ("svc1", kind::SOA, NODATA),
    ("svc1", 65, NODATA),
    ("svc0.absent.svc.cluster.local.", kind::A, NXDOMAIN),
    // 2.3.2: SRV of services.
    (
        "_http._tcp.svc1",
        kind::SRV,
        with(
            &[" SRV 0 100 80 svc1.testns.svc.cluster.local."],
            &["svc1.testns.svc.cluster.local. 5 IN A 10.0.0.1"],
        ),
    ),
    (
        "_http._tcp.dual",
        kind::SRV,
        with(
            &[" SRV 0 50 80 dual.testns.svc.cluster.local."],
            &[
                "dual.testns.svc.cluster.local. 5 IN A 10.0.0.3",
                "dual.testns.svc.cluster.local. 5 IN AAAA 10::3",
            ],
        ),
    ),
    (
        "svc1",
        kind::SRV,
        with(
            &[" SRV 0 100 80 svc1.testns.svc.cluster.local."],
            &["svc1.testns.svc.cluster.local. 5 IN A 10.0.0.1"],
        ),
    ),
    ("_HTTP._TCP.svc1", kind::A, some(&[" A 10.0.0.1"])),
    ("_http._udp.svc1", kind::SRV, NXDOMAIN),
    ("_https._tcp.svc1", kind::SRV, NXDOMAIN),
    ("http.tcp.svc1", kind::SRV, NXDOMAIN),
    ("_._tcp.svc1", kind::SRV, NXDOMAIN),
    // A name between others exists (RFC 8020).
    ("_tcp.svc1", kind::SRV, NODATA),
    ("_udp.svc1", kind::SRV, NXDOMAIN),
    ("a._http._tcp.svc1", kind::SRV, NXDOMAIN),
    // 2.3.3: PTR of services.
    (
        "1.0.0.10.in-addr.arpa.",
        kind::PTR,
        some(&[" PTR svc1.testns.svc.cluster.local."]),
    ),
    (
        "3.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.1.0.0.ip6.arpa.",
        kind::PTR,
        some(&[" PTR dual.testns.svc.cluster.local."]),
    ),
    ("1.0.0.10.in-addr.arpa.", kind::A, NODATA),
    // 2.4.1: A and AAAA of headless services.
    (
        "hdls1",
        kind::A,
        some(&[
            " A 172.0.0.2",
            " A 172.0.0.3",
            " A 172.0.0.4",
            " A 172.0.0.5",
        ]),
    ),
    (
        "hdls1",
        kind::AAAA,
        some(&[" AAAA 5678:abcd::1", " AAAA 5678:abcd::2"]),
    ),
    (
        "dup-name.hdls1",
        kind::A,
        some(&[" A 172.0.0.4", " A 172.0.0.5"]),
    ),
    ("dup-name.hdls1", kind::AAAA, NODATA),
    ("172-0-0-2.hdls1", kind::A, some(&[" A 172.0.0.2"])),
    (
        "5678-abcd--1.hdls1",
        kind::AAAA,
        some(&[" AAAA 5678:abcd::1"]),
    ),
    // An endpoint with a hostname has no second name, and an endpoint that is not ready has none.
    ("172-0-0-4.hdls1", kind::A, NXDOMAIN),
    ("172-0-0-6.hdls1", kind::A, NXDOMAIN),
    ("bogus.hdls1", kind::A, NXDOMAIN),
    ("bogus.svc0", kind::A, NXDOMAIN),
    ("portless", kind::A, some(&[" A 172.0.0.20"])),
    ("172-0-0-20.portless", kind::A, some(&[" A 172.0.0.20"])),
    ("portless", kind::SRV, NODATA),
    ("unready", kind::A, NXDOMAIN),
    ("unready", kind::AAAA, NXDOMAIN),
    ("172-0-0-1.svc1", kind::A, some(&[" A 172.0.0.1"])),
    ("named.svc1", kind::A, some(&[" A 172.0.0.9"])),
    // 2.4.2: SRV of headless services, of endpoints.
    (
        "_http._tcp.hdls1",
        kind::SRV,
        with(
            &[
                " SRV 0 16 80 172-0-0-2.hdls1.testns.svc.cluster.local.",
                " SRV 0 16 80 172-0-0-3.hdls1.testns.svc.cluster.local.",
                " SRV 0 16 80 5678-abcd--1.hdls1.testns.svc.cluster.local.",
                " SRV 0 16 80 5678-abcd--2.hdls1.testns.svc.cluster.local.",
                " SRV 0 16 80 dup-name.hdls1.testns.svc.cluster.local.",
            ],
            &[
                "172-0-0-2.hdls1.testns.svc.cluster.local. 5 IN A 172.0.0.2",
                "172-0-0-3.hdls1.testns.svc.cluster.local. 5 IN A 172.0.0.3",
                "5678-abcd--1.hdls1.testns.svc.cluster.local. 5 IN AAAA 5678:abcd::1",
                "5678-abcd--2.hdls1.testns.svc.cluster.local. 5 IN AAAA 5678:abcd::2",
                "dup-name.hdls1.testns.svc.cluster.local. 5 IN A 172.0.0.4",
                "dup-name.hdls1.testns.svc.cluster.local. 5 IN A 172.0.0.5",
            ],
        ),
    ),
    (
        "172-0-0-3.hdls1",
        kind::SRV,
        with(
            &[" SRV 0 100 80 172-0-0-3.hdls1.testns.svc.cluster.local."],
            &["172-0-0-3.hdls1.testns.svc.cluster.local. 5 IN A 172.0.0.3"],
        ),
    ),
    ("_dns._udp.hdls1", kind::SRV, NXDOMAIN),
    ("_http._tcp.unready", kind::SRV, NXDOMAIN),
    ("_tcp.hdls1", kind::A, NODATA),
    ("_udp.hdls1", kind::A, NXDOMAIN),
    // 2.4.3: PTR of endpoints.
    (
        "2.0.0.172.in-addr.arpa.",
        kind::PTR,
        some(&[" PTR 172-0-0-2.hdls1.testns.svc.cluster.local."]),
    ),
    (
        "4.0.0.172.in-addr.arpa.",
        kind::PTR,
        some(&[" PTR dup-name.hdls1.testns.svc.cluster.local."]),
    ),
    (
        "9.0.0.172.in-addr.arpa.",
        kind::PTR,
        some(&[" PTR named.svc1.testns.svc.cluster.local."]),
    ),
    (
        "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.d.c.b.a.8.7.6.5.ip6.arpa.",
        kind::PTR,
        some(&[" PTR 5678-abcd--1.hdls1.testns.svc.cluster.local."]),
    ),
    // 2.5: external names.
    (
        "external",
        kind::CNAME,
        some(&[" CNAME ext.interwebs.test."]),
    ),
    (
        "external",
        kind::A,
        Expected {
            foreign: "ext.interwebs.test.",
            ..some(&[" CNAME ext.interwebs.test."])
        },
    ),
    (
        "external",
        kind::AAAA,
        Expected {
            foreign: "ext.interwebs.test.",
            ..some(&[" CNAME ext.interwebs.test."])
        },
    ),
    (
        "inner",
        kind::A,
        some(&[
            " CNAME svc1.testns.svc.cluster.local.",
            "svc1.testns.svc.cluster.local. 5 IN A 10.0.0.1",
        ]),
    ),
    (
        "inner",
        kind::AAAA,
        some(&[" CNAME svc1.testns.svc.cluster.local."]),
    ),
    (
        "broken",
        kind::A,
        Expected {
            code: code::NXDOMAIN,
            ..some(&[" CNAME absent.testns.svc.cluster.local."])
        },
    ),
    ("endpoint.external", kind::CNAME, NXDOMAIN),
    ("_http._tcp.external", kind::SRV, NXDOMAIN),
    ("ip", kind::A, NXDOMAIN),
    // 2.6: pods, in existing namespaces.
    (
        "10-240-0-1.testns.pod.cluster.local.",
        kind::A,
        some(&[" A 10.240.0.1"]),
    ),
    ("10-240-0-1.testns.pod.cluster.local.", kind::AAAA, NODATA),
    (
        "10-240-0-1.bare.pod.cluster.local.",
        kind::A,
        some(&[" A 10.240.0.1"]),
    ),
    (
        "fd00-1--7.testns.pod.cluster.local.",
        kind::AAAA,
        some(&[" AAAA fd00:1::7"]),
    ),
    ("10-240-0-1.absent.pod.cluster.local.", kind::A, NXDOMAIN),
    ("10-240-0-256.testns.pod.cluster.local.", kind::A, NXDOMAIN),
    ("web-0.testns.pod.cluster.local.", kind::A, NXDOMAIN),
    ("a.10-240-0-1.testns.pod.cluster.local.", kind::A, NXDOMAIN),
    // Names between others.
    ("svc.cluster.local.", kind::A, NODATA),
    ("pod.cluster.local.", kind::A, NODATA),
    ("testns.svc.cluster.local.", kind::A, NODATA),
    ("bare.svc.cluster.local.", kind::NS, NODATA),
    ("bare.pod.cluster.local.", kind::A, NODATA),
    ("absent.svc.cluster.local.", kind::A, NXDOMAIN),
    ("foo.cluster.local.", kind::NS, NXDOMAIN),
    // What search paths with ndots:5 ask first.
    ("www.example.com", kind::A, NXDOMAIN),
    ("www.example.com.svc.cluster.local.", kind::A, NXDOMAIN),
    ("www.example.com.cluster.local.", kind::A, NXDOMAIN),
    ("a.b.c.d.e.f.svc.cluster.local.", kind::A, NXDOMAIN),
    // The zone.
    ("cluster.local.", kind::A, NODATA),
    (
        "cluster.local.",
        kind::NS,
        with(
            &[" NS ns.dns.cluster.local."],
            &[
                "ns.dns.cluster.local. 5 IN A 10.96.0.10",
                "ns.dns.cluster.local. 5 IN AAAA fd00::a",
            ],
        ),
    ),
    ("ns.dns.cluster.local.", kind::A, some(&[" A 10.96.0.10"])),
    ("dns.cluster.local.", kind::A, NODATA),
];

fn found(records: &Records, name: &str, kind: u16) -> (Query, Answer) {
    let name = if name.ends_with('.') {
        name.to_owned()
    } else {
        format!("{name}.testns.svc.cluster.local")
    };
    let query = query(&name, kind);
    match answer(records, &query, 0, 65535) {
        Some(answer) => (query, answer),
        None => panic!("{name} is not of the cluster"),
    }
}

fn lines(records: &[Record]) -> Vec<String> {
    let mut lines: Vec<String> = records.iter().map(ToString::to_string).collect();
    lines.sort();
    lines
}

#[test]
fn the_specification_holds() {
    let records = cluster();
    for (name, kind, expected) in TABLE {
        let (query, answer) = found(&records, name, *kind);
        let case = format!("{} {kind}", query.name);
        assert_eq!(answer.code, expected.code, "{case}");
        let full = |line: &&str| match line.strip_prefix(' ') {
            Some(data) => format!("{} 5 IN {data}", query.name),
            None => (*line).to_owned(),
        };
        let mut answers: Vec<String> = expected.answers.iter().map(full).collect();
        answers.sort();
        assert_eq!(lines(&answer.answers), answers, "{case}");
        assert_eq!(lines(&answer.additionals), expected.additionals, "{case}");
        let chase = answer
            .chase
            .map(|name| name.to_string())
            .unwrap_or_default();
        assert_eq!(chase, expected.foreign, "{case}");
        // Without an answer to the last name, the SOA says how long that is known (RFC 2308).
        let is_complete = expected
            .answers
            .iter()
            .any(|line| !line.contains(" CNAME "))
            || *kind == kind::CNAME;
        let needs_soa =
            expected.foreign.is_empty() && (expected.answers.is_empty() || !is_complete);
        assert_eq!(answer.authorities.len(), usize::from(needs_soa), "{case}");
        // The encoded response has the same records, and the question's case.
        let message = Message::from_vec(&encode(&query, answer, 65535)).unwrap();
        assert_eq!(lines(&message.answers), answers, "{case}");
        assert_eq!(message.queries[0].name.to_ascii(), query.name.to_string());
        assert!(
            message.metadata.authoritative
                && message.metadata.recursion_available
                && !message.metadata.truncation
        );
    }
}

#[test]
fn the_soa_has_a_short_negative_ttl_and_a_serial_that_grows() {
    let mut records = cluster();
    let soa =
        |records: &Records| lines(&found(records, "cluster.local.", kind::SOA).1.answers).remove(0);
    let first = soa(&records);
    let start = "cluster.local. 5 IN SOA ns.dns.cluster.local. hostmaster.cluster.local. ";
    assert!(
        first.starts_with(start) && first.ends_with(" 7200 1800 86400 5"),
        "{first}"
    );
    records.set_service("testns", "svc1", None);
    assert_ne!(soa(&records), first);
}

#[test]
fn services_in_a_circle_end_with_an_error() {
    let records = cluster();
    let (_, answer) = found(&records, "circle", kind::A);
    assert_eq!(answer.code, code::SERVFAIL);
    assert!(answer.answers.len() <= MAX_ALIASES);
}

#[test]
fn names_outside_of_the_cluster_are_foreign() {
    let records = cluster();
    for name in [
        "example.com",
        "local",
        "xcluster.local",
        "cluster.local.example.com",
        ".",
        // Unknown addresses: an upstream may know a private network.
        "9.9.9.10.in-addr.arpa",
        "01.0.0.10.in-addr.arpa",
        "0.0.10.in-addr.arpa",
        "1.1.0.0.10.in-addr.arpa",
        "256.0.0.10.in-addr.arpa",
        "g.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.1.0.0.ip6.arpa",
    ] {
        let found = answer(&records, &query(name, kind::PTR), 0, 512);
        assert!(found.is_none(), "{name}");
    }
}

#[test]
fn before_the_caches_are_filled_absence_is_not_claimed() {
    let mut records = cluster();
    records.synced = false;
    for name in ["svc1", "svc0", "cluster.local."] {
        let (query, answer) = found(&records, name, kind::A);
        let message = Message::from_vec(&encode(&query, answer, 512)).unwrap();
        assert_eq!(
            message.metadata.response_code,
            ResponseCode::ServFail,
            "{name}"
        );
        assert!(!message.metadata.authoritative);
    }
}

#[test]
fn any_gets_one_short_record() {
    let query = query("svc1.testns.svc.cluster.local", kind::ANY);
    let message = Message::from_vec(&encode(&query, answer_any(&query), 512)).unwrap();
    assert_eq!(message.answers.len(), 1);
    assert_eq!(u16::from(message.answers[0].record_type()), kind::HINFO);
}

/// A headless service with many endpoints.
fn large(count: u32) -> Records {
    let mut records = cluster();
    let endpoints: Vec<Value> = (0..count)
        .map(|n| json!({"addresses": [Ipv4Addr::from(0x0a00_0000 + n).to_string()]}))
        .collect();
    let ports = json!([{"name": "http", "port": 80}, {"name": "metrics", "port": 81}]);
    let slices: Vec<_> = endpoints
        .chunks(100)
        .map(|c| slice("IPv4", &ports, json!(c)))
        .collect();
    set(&mut records, "large", json!({"clusterIP": "None"}), &slices);
    records
}

#[test]
fn long_answers_are_truncated_rotated_and_complete_over_tcp() {
    let records = large(1000);
    for (kind, transport, edns) in [
        (kind::A, Transport::Udp, false),
        (kind::A, Transport::Udp, true),
        (kind::SRV, Transport::Udp, true),
        (kind::A, Transport::Tcp, true),
        (kind::SRV, Transport::Tcp, false),
    ] {
        let mut query = query("large.testns.svc.cluster.local", kind);
        query.edns = edns.then_some(Edns {
            payload: 4096,
            version: 0,
            dnssec_ok: false,
        });
        let limit = query.limit(transport);
        let Some(found) = answer(&records, &query, 7, limit) else {
            panic!()
        };
        let response = encode(&query, found, limit);
        assert!(response.len() <= limit, "{kind} {transport:?}");
        let message = Message::from_vec(&response).unwrap();
        assert_eq!(message.edns.is_some(), edns);
        let is_whole = transport == Transport::Tcp && kind == kind::A;
        assert_eq!(
            message.metadata.truncation, !is_whole,
            "{kind} {transport:?}"
        );
        assert!(message.answers.len() > 10);
        if kind == kind::A {
            assert!(message.answers[0].to_string().ends_with(" A 10.0.0.7"));
            assert_eq!(message.answers.len() == 1000, is_whole);
        }
    }
}

#[test]
fn names_of_any_bytes_and_of_the_greatest_length_are_answered() {
    let zone = Name::parse("cluster.local").unwrap();
    let longest: String = [63, 63, 63, 47].map(|n| "x".repeat(n) + ".").concat();
    for prefix in [
        Name::parse(&longest).unwrap().wire().to_vec(),
        b"\x04\x00.\\\xff\x03svc\x00".to_vec(),
    ] {
        let wire = [&prefix[..prefix.len() - 1], zone.wire()].concat();
        let name = Name::read(&wire).unwrap();
        let mut query = query("x", kind::A);
        (query.name, query.lower) = (name, name.lowercase());
        let found = answer(&CLUSTER, &query, 0, 512).unwrap();
        let message = Message::from_vec(&encode(&query, found, 512)).unwrap();
        assert_eq!(message.metadata.response_code, ResponseCode::NXDomain);
        assert!(message.queries[0].name.iter().eq(name.labels()), "{name}");
    }
}

/// Created once for all cases.
static CLUSTER: std::sync::LazyLock<Records> = std::sync::LazyLock::new(cluster);

proptest! {
    /// Whatever the name and type: one well-formed response within the limit that repeats the question.
    #[test]
    fn any_question_has_a_well_formed_answer(
        labels in proptest::collection::vec(
            prop_oneof![
                Just("_http"), Just("_tcp"), Just("_udp"), Just("svc1"), Just("hdls1"), Just("external"), Just("inner"),
                Just("circle"), Just("testns"), Just("bare"), Just("svc"), Just("pod"), Just("dns"), Just("ns"),
                Just("10-0-0-1"), Just("--"), Just("dup-name"), Just("172-0-0-2"), Just("x")
            ], 0..7),
        kind in prop_oneof![Just(1_u16), Just(2), Just(5), Just(6), Just(12), Just(16), Just(28), Just(33), any::<u16>()],
        rotation in any::<usize>(),
        limit in 512_usize..2000,
    ) {
        let records = &*CLUSTER;
        let query = query(&format!("{}cluster.local", labels.iter().map(|l| format!("{l}.")).collect::<String>()), kind);
        let Some(found) = answer(records, &query, rotation, limit) else { return Ok(()) };
        let response = encode(&query, found, limit);
        prop_assert!(response.len() <= limit);
        let message = Message::from_vec(&response).unwrap();
        prop_assert!(message.queries[0].name.iter().eq(query.name.labels()));
    }
}
