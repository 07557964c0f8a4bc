//! Tables of ranges, and the machine's own.

use super::*;

fn net(text: &str) -> IpNet {
    text.parse().expect("a range")
}

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| net(text)).collect()
}

fn wanted(service: &str, cluster: &str, pods: &str) -> Wanted {
    let set = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    Wanted {
        service: set(service),
        cluster: set(cluster),
        pods: set(pods).map(|text| text.parse().expect("a range")),
    }
}

fn taken(ranges: &[&str]) -> Vec<Taken> {
    let taken = |range: &&str| Taken {
        by: "in use".into(),
        range: net(range),
    };
    ranges.iter().map(taken).collect()
}

/// Service, cluster and pods of the result.
fn shown(ranges: &Ranges) -> [String; 3] {
    [
        Ranges::flag(&ranges.service),
        Ranges::flag(&ranges.cluster),
        ranges.pods.to_string(),
    ]
}

#[test]
fn a_new_cluster_gets_the_first_free_ranges() {
    let cases: [(&[&str], [&str; 3]); 5] = [
        (&[], ["10.96.0.0/16", "10.244.0.0/16", "10.244.0.0/24"]),
        (
            &["10.96.0.0/16", "10.244.0.0/16"],
            ["10.97.0.0/16", "10.245.0.0/16", "10.245.0.0/24"],
        ),
        (
            &["10.97.3.0/24", "10.244.9.1/32", "fd00::/8"],
            ["10.96.0.0/16", "10.245.0.0/16", "10.245.0.0/24"],
        ),
        (
            &["10.96.0.0/12", "10.0.0.0/16"],
            ["10.112.0.0/16", "10.244.0.0/16", "10.244.0.0/24"],
        ),
        (
            &["10.0.0.0/8"],
            ["172.29.0.0/16", "172.28.0.0/16", "172.28.0.0/24"],
        ),
    ];
    for (in_use, expected) in cases {
        let ranges = choose(&Wanted::default(), None, &taken(in_use)).expect("free ranges");
        assert_eq!(shown(&ranges), expected, "{in_use:?}");
    }
    let error = choose(
        &Wanted::default(),
        None,
        &taken(&["0.0.0.0/1", "128.0.0.0/1"]),
    );
    let error = error.expect_err("no range is free");
    assert!(error.contains("--service-cidr"), "{error}");
}

#[test]
fn wanted_ranges_are_used_if_they_are_free() {
    for (flags, expected) in [
        (
            wanted("10.7.0.0/16", "10.8.0.0/16", ""),
            ["10.7.0.0/16", "10.8.0.0/16", "10.8.0.0/24"],
        ),
        (
            wanted("10.7.0.0/16,fd00:7::/108", "fd00:8::/56,10.8.0.0/26", ""),
            [
                "10.7.0.0/16,fd00:7::/108",
                "fd00:8::/56,10.8.0.0/26",
                "10.8.0.0/26",
            ],
        ),
        (
            wanted("", "10.8.0.0/16", "10.8.3.0/24"),
            ["10.96.0.0/16", "10.8.0.0/16", "10.8.3.0/24"],
        ),
        // A part of a default range makes that one the cluster's; any other one is the cluster's range itself.
        (
            wanted("", "", "10.245.3.0/24"),
            ["10.96.0.0/16", "10.245.0.0/16", "10.245.3.0/24"],
        ),
        (
            wanted("", "", "10.199.3.0/24"),
            ["10.96.0.0/16", "10.199.3.0/24", "10.199.3.0/24"],
        ),
    ] {
        let ranges = choose(&flags, None, &taken(&["192.0.2.0/24"])).expect("free ranges");
        assert_eq!(shown(&ranges), expected, "{flags:?}");
    }
}

#[test]
fn a_range_in_use_is_refused_with_its_user_and_a_free_one() {
    let in_use = taken(&["10.96.0.0/16", "10.244.7.0/24", "192.0.2.0/24"]);
    for (flags, parts) in [
        (
            wanted("10.96.0.0/12", "", ""),
            [
                "--service-cidr 10.96.0.0/12",
                "10.96.0.0/16, which is in use",
                "10.97.0.0/16",
            ],
        ),
        (
            wanted("", "10.244.0.0/16", ""),
            [
                "--cluster-cidr 10.244.0.0/16",
                "10.244.7.0/24, which is in use",
                "10.245.0.0/16",
            ],
        ),
        (
            wanted("", "", "192.0.2.0/25"),
            [
                "--pod-cidr 192.0.2.0/25",
                "192.0.2.0/24, which is in use",
                "10.245.0.0/16",
            ],
        ),
        (
            wanted("10.7.0.0/16", "10.7.1.0/24", ""),
            [
                "--cluster-cidr 10.7.1.0/24",
                "--service-cidr 10.7.0.0/16",
                "10.245.0.0/16",
            ],
        ),
        (
            wanted("", "10.8.0.0/16", "10.9.0.0/24"),
            [
                "--pod-cidr 10.9.0.0/24",
                "--cluster-cidr 10.8.0.0/16",
                "10.8.0.0/24",
            ],
        ),
    ] {
        let error = choose(&flags, None, &in_use).expect_err("refused");
        for part in parts {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}

#[test]
fn invalid_ranges_are_refused() {
    for text in [
        "",
        "10.96.0.0",
        "10.96.0.1/16",
        "10.96.0.0/29",
        "0.0.0.0/0",
        "10.0.0.0/16,10.1.0.0/16",
        "10.0.0.0/16,fd00::/108,fd01::/108",
        "fd00::/125",
        ",",
        "x",
    ] {
        for flags in [wanted_text(text, true), wanted_text(text, false)] {
            let error = choose(&flags, None, &[]).expect_err(text);
            assert!(error.starts_with("invalid --"), "{text}: {error}");
        }
    }
    let no_ipv4 = choose(&wanted("", "fd00::/56", ""), None, &[]).expect_err("refused");
    assert!(no_ipv4.contains("IPv4"), "{no_ipv4}");
    for pods in ["10.0.0.0/29", "10.0.0.1/24"] {
        assert!(choose(&wanted("", "", pods), None, &[]).is_err(), "{pods}");
    }
}

fn wanted_text(text: &str, is_service: bool) -> Wanted {
    let text = Some(text.to_owned());
    if is_service {
        Wanted {
            service: text,
            ..Wanted::default()
        }
    } else {
        Wanted {
            cluster: text,
            ..Wanted::default()
        }
    }
}

#[test]
fn a_cluster_keeps_its_ranges() {
    let recorded = Ranges {
        service: nets(&["10.98.0.0/16"]),
        cluster: nets(&["10.250.0.0/16"]),
        pods: "10.250.3.0/24".parse().expect("a range"),
    };
    // A route that appeared later changes nothing.
    let in_use = taken(&["10.98.0.0/16", "10.250.0.0/16"]);
    for flags in [
        Wanted::default(),
        wanted("10.98.0.0/16", "10.250.0.0/16", "10.250.3.0/24"),
    ] {
        let ranges = choose(&flags, Some(&recorded), &in_use).expect("kept");
        assert_eq!(ranges, recorded);
    }
    let error = choose(&wanted("10.99.0.0/16", "", ""), Some(&recorded), &[]);
    let error = error.expect_err("stored services have addresses");
    assert!(
        error.contains("10.98.0.0/16") && error.contains("--purge"),
        "{error}"
    );
    let ranges = choose(&wanted("", "", "10.250.4.0/24"), Some(&recorded), &in_use);
    let ranges = ranges.expect("another part");
    assert_eq!(ranges.pods.to_string(), "10.250.4.0/24");
    let ranges = choose(&wanted("", "10.8.0.0/16", ""), Some(&recorded), &in_use);
    assert_eq!(
        shown(&ranges.expect("another range"))[1..],
        ["10.8.0.0/16", "10.8.0.0/24"]
    );
}

#[test]
fn records_of_all_clusters_are_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    for name in ["holdfast", "holdfast-two/control", "holdfast-new", "other"] {
        fs::create_dir_all(at(name)).expect("created");
    }
    let ranges = Ranges {
        service: nets(&["10.98.0.0/16"]),
        ..Ranges::default()
    };
    let text = serde_json::to_vec(&ranges).expect("JSON");
    for name in ["holdfast", "other"] {
        fs::write(at(name).join(RECORD), &text).expect("written");
    }
    assert_eq!(recorded(&at("holdfast")).expect("read"), Some(ranges));
    assert_eq!(recorded(&at("holdfast-new")).expect("read"), None);
    let mut others = other_clusters(dir.path(), &at("holdfast-new")).expect("read");
    others.sort_by_key(|taken| taken.range);
    let found: Vec<String> = others
        .iter()
        .map(|t| format!("{} {}", t.range, t.by))
        .collect();
    assert_eq!(
        found,
        [
            "10.96.0.0/16 a range of the cluster two",
            "10.98.0.0/16 a range of the cluster holdfast",
            "10.244.0.0/16 a range of the cluster holdfast",
        ]
    );
    let earlier = of_earlier_version(
        &at("holdfast-two"),
        Some("10.244.0.0/24".parse().expect("a range")),
    );
    assert_eq!(earlier, Some(Ranges::default()));
    fs::write(at("holdfast").join(RECORD), "{").expect("written");
    assert!(recorded(&at("holdfast")).is_err());
}

#[test]
fn the_addresses_of_this_machine_are_in_use() {
    let all = machine("no-such-bridge").expect("readable");
    assert!(user_of(&net("127.0.0.1/32"), &all).is_some(), "{all:?}");
    assert!(
        all.iter().all(|taken| taken.range.prefix_len() > 0),
        "{all:?}"
    );
}

#[test]
fn dns_has_the_tenth_address_of_the_first_range() {
    for (service, expected) in [
        (["10.97.0.0/16", "fd00::/108"], "10.97.0.10"),
        (["fd00::/108", "10.97.0.0/16"], "fd00::a"),
    ] {
        let ranges = Ranges {
            service: nets(&service),
            ..Ranges::default()
        };
        assert_eq!(ranges.dns(), expected.parse().ok());
    }
}
