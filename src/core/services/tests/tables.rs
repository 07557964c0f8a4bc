//! Tables of services: which chains and entries each has, as kube-proxy would.

use super::*;

/// Endpoints on this node and on another one.
fn two_nodes() -> Vec<Arc<EndpointSlice>> {
    let endpoints = json!([
        endpoint("10.244.0.5", "here"),
        endpoint("10.244.1.5", "there")
    ]);
    vec![slice("web-1", endpoints)]
}

fn elsewhere() -> Vec<Arc<EndpointSlice>> {
    vec![slice("web-1", json!([endpoint("10.244.1.5", "there")]))]
}

/// The cells of the rows of a table, separated by `|`.
fn rows(table: &str) -> Vec<Vec<&str>> {
    let lines = table.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| line.split('|').map(str::trim).collect())
        .collect()
}

/// The parts of a cell, separated by `;`.
fn parts(cell: &str) -> Vec<String> {
    let parts = cell
        .split(';')
        .map(str::trim)
        .filter(|part| !part.is_empty());
    parts.map(str::to_owned).collect()
}

/// The fields of a spec, with `HTTP` for a port with a node port and `LOCAL` for the policy of external traffic.
fn spec(cell: &str) -> Json {
    let cell = cell
        .replace(
            "HTTP",
            r#""ports": [{"name": "http", "port": 80, "protocol": "TCP", "nodePort": 30080}]"#,
        )
        .replace("LOCAL", r#""externalTrafficPolicy": "Local""#);
    serde_json::from_str(&cell).unwrap()
}

fn named_slices(cell: &str) -> Vec<Arc<EndpointSlice>> {
    match cell {
        "both" => two_nodes(),
        "elsewhere" => elsewhere(),
        _ => vec![],
    }
}

/// A text without the name of the service.
fn shortened(text: &str) -> String {
    text.replace("/default/web/tcp/http", "")
}

/// What, the spec, the endpoints, and the expected entries.
const ENTRIES: &str = r#"
    a cluster address | {} | both | Services 10.96.0.20 tcp 80: goto service
    no endpoints | {} | none | NoEndpoints 10.96.0.20 tcp 80: reject
    internal Local | {"internalTrafficPolicy": "Local"} | both | Services 10.96.0.20 tcp 80: goto local
    internal Local, elsewhere | {"internalTrafficPolicy": "Local"} | elsewhere | NoEndpoints 10.96.0.20 tcp 80: drop
    external addresses | {"externalIPs": ["198.51.100.9", "10.96.0.20"]} | both | Services 10.96.0.20 tcp 80: goto service; Services 198.51.100.9 tcp 80: goto external
    a node port | {"type": "NodePort", HTTP} | both | Services 10.96.0.20 tcp 80: goto service; Services node tcp 30080: goto external
    a node port without endpoints | {"type": "NodePort", HTTP} | none | NoEndpoints 10.96.0.20 tcp 80: reject; NoEndpoints node tcp 30080: reject
    external Local, elsewhere | {"type": "NodePort", LOCAL, HTTP} | elsewhere | Services 10.96.0.20 tcp 80: goto service; Services node tcp 30080: goto external; NoEndpoints node tcp 30080: drop
    a load balancer | {"type": "LoadBalancer"} | both | Services 10.96.0.20 tcp 80: goto service; Services 203.0.113.7 tcp 80: goto external
    source ranges | {"type": "LoadBalancer", "loadBalancerSourceRanges": [" 10.0.0.0/8"]} | both | Services 10.96.0.20 tcp 80: goto service; Services 203.0.113.7 tcp 80: goto external; Firewall 203.0.113.7 tcp 80: goto firewall
    ranges do not concern other addresses | {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/8"], "externalIPs": ["198.51.100.9"], HTTP} | both | Services 10.96.0.20 tcp 80: goto service; Services 198.51.100.9 tcp 80: goto external; Services 203.0.113.7 tcp 80: goto external; Services node tcp 30080: goto external; Firewall 203.0.113.7 tcp 80: goto firewall
    a headless service | {"clusterIP": "None", "clusterIPs": ["None"]} | both |
    an external name | {"type": "ExternalName", "externalName": "example.com"} | both |
    no address yet | {"clusterIP": null, "clusterIPs": null} | both |
    the address of this process | {"clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10"]} | both |
"#;

#[test]
fn services_have_the_entries_of_their_types_and_policies() {
    // Only the first address of the balancer is translated on the node.
    let balancer = json!({"status": {"loadBalancer": {"ingress": [
        {"ip": "203.0.113.7", "ipMode": "VIP"}, {"ip": "203.0.113.8", "ipMode": "Proxy"}, {"hostname": "web.example"}
    ]}}});
    for row in rows(ENTRIES) {
        let [what, cell, slices, expected] = row[..] else {
            panic!("{row:?}");
        };
        let status = if cell.contains("LoadBalancer") {
            balancer.clone()
        } else {
            json!({})
        };
        let table = table_of(
            &service_with("web", spec(cell), status),
            &named_slices(slices),
        );
        let shown: Vec<String> = table.shown_entries().iter().map(|e| shortened(e)).collect();
        assert_eq!(shown, parts(expected), "{what}");
    }
}

#[test]
fn services_of_other_proxies_are_ignored() {
    for label in [
        "service.kubernetes.io/service-proxy-name",
        "service.kubernetes.io/headless",
    ] {
        let other = json!({"metadata": {"labels": {label: "other"}}});
        let table = table_of(&service_with("web", json!({}), other), &two_nodes());
        assert_eq!(table, Kernel::default(), "{label}");
    }
}

#[test]
fn slices_of_headless_services_are_ignored() {
    let service = service("web", json!({}));
    let mut slices = vec![
        slice("web-1", json!([endpoint("10.244.0.5", "here")])),
        slice("web-2", json!([endpoint("10.244.1.5", "there")])),
    ];
    let plain = slices.clone();
    for marked in 0..2 {
        let before = table_of(&service, &slices);
        let labels = [("service.kubernetes.io/headless".to_owned(), String::new())];
        Arc::make_mut(&mut slices[marked]).metadata.labels = Some(labels.into());
        let after = table_of(&service, &slices);
        assert_eq!(after, table_of(&service, &plain[marked + 1..]));
        assert_ne!(after, before, "the endpoints of slice {marked} are removed");
    }
}

/// What, the spec, the endpoints, and the expected rules of each chain.
const CHAINS: &str = r#"
    Cluster | {"type": "NodePort", HTTP} | both | external: masquerade, goto service; service: translate 10.244.0.5:8080 10.244.1.5:8080
    Local | {"type": "NodePort", LOCAL, HTTP} | both | external: cluster: goto service, masquerade this node, node: goto service, goto local; local: translate 10.244.0.5:8080; service: translate 10.244.0.5:8080 10.244.1.5:8080
    Local, elsewhere | {"type": "NodePort", LOCAL, HTTP} | elsewhere | external: cluster: goto service, masquerade this node, node: goto service; service: translate 10.244.1.5:8080
    internal Local | {"internalTrafficPolicy": "Local"} | both | local: translate 10.244.0.5:8080
    affinity | {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}} | elsewhere | endpoint__10.244.1.5/8080: remember the client for 60 s, to 10.244.1.5:8080; service: known: goto endpoint__10.244.1.5/8080, choose endpoint__10.244.1.5/8080
"#;

#[test]
fn chains_have_the_rules_of_their_policies() {
    for row in rows(CHAINS) {
        let [what, cell, slices, expected] = row[..] else {
            panic!("{row:?}");
        };
        let table = table_of(&service("web", spec(cell)), &named_slices(slices));
        let chains = table.shown_chains().into_iter();
        let shown: Vec<String> = chains
            .map(|(name, rules)| shortened(&format!("{name}: {}", rules.join(", "))))
            .collect();
        assert_eq!(shown, parts(expected), "{what}");
    }
}

/// Each row of the tables above after each other one.
#[test]
fn any_change_of_a_service_leads_to_its_new_rules() {
    let all: Vec<(Service, Vec<Arc<EndpointSlice>>)> = rows(ENTRIES)
        .into_iter()
        .chain(rows(CHAINS))
        .map(|row| (service("web", spec(row[1])), named_slices(row[2])))
        .collect();
    for (one, slices) in &all {
        for (other, later) in &all {
            let (mut planner, mut tables) = (planner(), Tables::new());
            planner.set_service("default", "web", Some(one), slices);
            apply(&mut planner, &mut tables);
            planner.set_service("default", "web", Some(other), later);
            apply(&mut planner, &mut tables);
            let expected = table_of(other, later);
            assert_eq!(tables[&Family::V4].shown(), expected.shown());
        }
    }
}

#[test]
fn the_firewall_allows_the_ranges_and_this_node() {
    let balancer = json!({"status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.7"}]}}});
    let cases = [
        (
            json!(["10.0.0.0/8"]),
            "allow 10.0.0.0/8, drop other clients",
        ),
        (
            json!(["192.168.0.0/24", "10.1.2.3/8"]),
            "allow 192.168.0.0/24, allow 10.0.0.0/8, allow 203.0.113.7/32, drop other clients",
        ),
        // A family without ranges is open, unless a range was invalid.
        (json!(["fd00::/8"]), "no chain"),
        (json!(["ten/8"]), "drop other clients"),
        (json!([]), "no chain"),
    ];
    for (ranges, expected) in cases {
        let spec = json!({"type": "LoadBalancer", "loadBalancerSourceRanges": ranges});
        let table = table_of(&service_with("web", spec, balancer.clone()), &two_nodes());
        let rules = table.shown_chains().remove("firewall/default/web/tcp/http");
        let shown = rules.map_or("no chain".to_owned(), |rules| rules.join(", "));
        assert_eq!(shown, expected, "{ranges}");
    }
}

/// An endpoint from `LAST NODE STATE ZONES NODES`: the last byte of the address, the node, `ready`, `terminating` (and serving) or
/// `gone`, and hints, separated by commas, or `-`.
fn hinted(text: &str) -> Json {
    let fields: Vec<&str> = text.split(' ').collect();
    let [last, node, state, zones, nodes] = fields[..] else {
        panic!("{text}");
    };
    let named = |names: &str| -> Vec<Json> {
        let names = names.split(',').filter(|name| *name != "-");
        names.map(|name| json!({"name": name})).collect()
    };
    json!({
        "addresses": [format!("10.244.0.{last}")], "nodeName": node,
        "conditions": {"ready": state == "ready", "serving": state != "gone", "terminating": state != "ready"},
        "hints": {"forZones": named(zones), "forNodes": named(nodes)},
    })
}

/// What, the policy, the endpoints, and the last bytes of those that the policies Cluster and Local use, as in
/// `TestCategorizeEndpoints` of `pkg/proxy/topology_test.go`. This node is `here`, in the zone `a`.
const TOPOLOGY: &str = "
    zone hints | Cluster | 1 x ready a -; 2 x ready b - | 1 |
    a missing zone hint | Cluster | 1 x ready a -; 2 x ready - - | 1;2 |
    no hint for our zone | Cluster | 1 x ready b -; 2 x ready c - | 1;2 |
    hints of unready endpoints do not count | Cluster | 1 x ready a -; 2 x gone - - | 1 |
    several zones | Cluster | 1 x ready b,a -; 2 x ready b - | 1 |
    node hints | Cluster | 1 here ready a here; 2 x ready a x | 1 |
    node hints without ours | Cluster | 1 y ready a y; 2 x ready b x | 1 |
    a missing node hint | Cluster | 1 here ready a here; 2 x ready a -; 3 x ready b - | 1;2 |
    ready before terminating | Cluster | 1 x ready - -; 2 x terminating - - | 1 |
    terminating as the last resort | Cluster | 1 x gone - -; 2 x terminating b - | 2 |
    none | Cluster | 1 x gone - - | |
    Local ignores hints | Local | 1 here ready b -; 2 x ready a - | 2 | 1
    Local prefers ready | Local | 1 here ready - -; 2 here terminating - - | 1 | 1
    Local, terminating | Local | 1 here terminating - -; 2 x ready - - | 2 | 1
    Local, elsewhere | Local | 2 x ready - - | 2 |
";

#[test]
fn endpoints_are_chosen_by_hints_nodes_and_conditions() {
    for row in rows(TOPOLOGY) {
        let [what, policy, endpoints, cluster, local] = row[..] else {
            panic!("{row:?}");
        };
        let fields = match policy {
            "Local" => {
                spec(r#"{"type": "NodePort", "internalTrafficPolicy": "Local", LOCAL, HTTP}"#)
            }
            _ => json!({}),
        };
        let endpoints = parts(endpoints).iter().map(|e| hinted(e)).collect();
        let table = table_of(
            &service("web", fields),
            &[slice("web-1", Json::Array(endpoints))],
        );
        let chains = table.shown_chains();
        let targets = |kind: &str| -> Vec<String> {
            let rules = chains.get(&format!("{kind}/default/web/tcp/http"));
            let rule = rules.map_or("", |rules| rules[0].as_str());
            let targets = rule.split(' ').skip(1);
            let last = |target: &str| target.split(['.', ':']).nth(3).unwrap().to_owned();
            targets.map(last).collect()
        };
        assert_eq!(targets("service"), parts(cluster), "{what}");
        assert_eq!(targets("local"), parts(local), "{what}");
    }
}

/// The spec, the endpoints, the number of entries that remain, and the first reason.
const INVALID: &str = r#"
    {"ports": [{"name": "a", "port": 80}, {"name": "b", "port": 80}]} | [] | 1 | port 80 named "b" is skipped: the number is a duplicate
    {"ports": [{"name": "a", "port": 80}, {"name": "a", "port": 81}]} | [] | 1 | port 81 is skipped: another port has the name "a" and the same protocol
    {"ports": [{"name": "a", "port": 70000}, {"name": "b", "port": -1}]} | [] | 0 | port 70000 is skipped: not a number from 1 to 65535
    {"ports": [{"name": "a", "port": 80, "protocol": "ICMP"}]} | [] | 0 | port 80 is skipped: the protocol "ICMP" is not TCP, UDP or SCTP
    {"ports": [{"name": "a", "port": 80, "nodePort": 99999}]} | [] | 1 | node port 99999 is skipped: a duplicate, or not a number from 1 to 65535
    {"externalIPs": ["one", "127.0.0.1"]} | [] | 1 | externalIP "one" is skipped: not an IP address
    {"externalIPs": ["127.0.0.1"]} | [] | 1 | externalIP "127.0.0.1" is skipped: it must not be a loopback, link-local, multicast or unspecified address
    {} | [{"addresses": ["10.244.0.300"]}] | 1 | endpoint "10.244.0.300" is skipped: not an IPv4 address
    {} | [{"addresses": ["127.0.0.1"]}] | 1 | endpoint "127.0.0.1" is skipped: it must not be a loopback, link-local, multicast or unspecified address
    {} | [{"addresses": []}, {"addresses": ["fd00::1"]}] | 1 | endpoint "fd00::1" is skipped: not an IPv4 address
"#;

#[test]
fn invalid_values_are_skipped_with_a_reason() {
    let skipped = |spec: Json, endpoints: Json| {
        let mut planner = planner();
        let service = service("web", spec);
        planner.set_service(
            "default",
            "web",
            Some(&service),
            &[slice("web-1", endpoints)],
        );
        let reason = planner.problems("default", "web").unwrap().texts[0].clone();
        let mut tables = Tables::new();
        apply(&mut planner, &mut tables);
        (tables[&Family::V4].entries.len(), reason)
    };
    for row in rows(INVALID) {
        let [cell, endpoints, entries, reason] = row[..] else {
            panic!("{row:?}");
        };
        let found = skipped(spec(cell), serde_json::from_str(endpoints).unwrap());
        assert_eq!(found, (entries.parse().unwrap(), reason.to_owned()));
    }
    let many: Vec<Json> = (1..=3000)
        .map(|port| json!({"name": format!("p{port}"), "port": port}))
        .collect();
    let (entries, reason) = skipped(json!({"ports": many}), json!([]));
    let expected = "the last 2000 of 3000 ports are skipped: a service can have 1000 ports";
    assert_eq!((entries, reason.as_str()), (1000, expected));
}

#[test]
fn reasons_are_bounded() {
    let endpoints: Vec<Json> = (0..1000)
        .map(|n| json!({"addresses": [format!("host-{n}")]}))
        .collect();
    let mut planner = planner();
    let service = service("web", json!({}));
    planner.set_service(
        "default",
        "web",
        Some(&service),
        &[slice("web-1", Json::Array(endpoints))],
    );
    let problems = planner.problems("default", "web").unwrap();
    assert_eq!((problems.texts.len(), problems.more), (10, 990));
    let emptiest = Service::default();
    planner.set_service(
        "default",
        "web",
        Some(&emptiest),
        &[Arc::new(EndpointSlice::default())],
    );
    assert_eq!(planner.problems("default", "web"), None);
}

#[test]
fn the_largest_services_are_limited() {
    let many = |prefix: u8, count: usize| -> Vec<Json> {
        let address = |n: usize| format!("10.{prefix}.{}.{}", n / 250, n % 250 + 1);
        (0..count).map(|n| endpoint(&address(n), "there")).collect()
    };
    let numbers = 1..=300_u16;
    let ports: Vec<Json> = numbers
        .clone()
        .map(|n| json!({"name": format!("p{n}"), "port": n}))
        .collect();
    let slice_ports = numbers.map(|n| json!({"name": format!("p{n}"), "port": 8000 + n}));
    let slice_ports = Json::Array(slice_ports.collect());
    let slices = [slice_with(
        "web-1",
        slice_ports,
        Json::Array(many(100, 1000)),
    )];
    let (mut planner, mut tables) = (planner(), Tables::new());
    let large = service("web", json!({"ports": ports}));
    planner.set_service("default", "web", Some(&large), &slices);
    apply(&mut planner, &mut tables);
    assert_eq!(tables[&Family::V4].targets.len(), 200_000);
    let problems = planner.problems("default", "web").unwrap();
    assert_eq!(
        problems.texts[0],
        "port 201 is skipped: the ports of a service can have 200000 endpoints together"
    );
    let slices = [
        slice("web-1", Json::Array(many(100, 1000))),
        slice("web-2", Json::Array(many(101, 1))),
    ];
    let sticky = service("web", json!({"sessionAffinity": "ClientIP"}));
    planner.set_service("default", "web", Some(&sticky), &slices);
    apply(&mut planner, &mut tables);
    assert_eq!(tables[&Family::V4].affinities.len(), 0);
    let problems = planner.problems("default", "web").unwrap();
    assert!(problems.texts[0].contains("has no session affinity"));
    planner.set_service("default", "web", Some(&sticky), &slices[..1]);
    apply(&mut planner, &mut tables);
    assert_eq!(tables[&Family::V4].affinities.len(), 1000);
}

#[test]
fn names_that_look_equal_have_their_own_chains() {
    let long = "n".repeat(500);
    let names = ["a b", "a_b", "a|b", long.as_str(), &format!("{long}1")];
    let ports = |first: i32| -> Json {
        let numbered = names.iter().zip(first..);
        Json::Array(
            numbered
                .map(|(name, port)| json!({"name": name, "port": port}))
                .collect(),
        )
    };
    let slices = [slice_with(
        "web-1",
        ports(8080),
        json!([endpoint("10.244.0.5", "here")]),
    )];
    let (mut planner, mut tables) = (planner(), Tables::new());
    for spec in [
        json!({"ports": ports(80)}),
        json!({"ports": ports(81)}),
        json!({"ports": ports(80), "sessionAffinity": "ClientIP"}),
    ] {
        planner.set_service("default", "web", Some(&service("web", spec)), &slices);
        apply(&mut planner, &mut tables);
        assert_eq!(tables[&Family::V4].entries.len(), names.len());
        let goals: std::collections::BTreeSet<_> = tables[&Family::V4].entries.values().collect();
        assert_eq!(goals.len(), names.len());
    }
}

#[test]
fn a_pod_that_is_its_own_endpoint_is_known_on_its_node() {
    let endpoints = json!([endpoint("10.244.0.5", "here"), endpoint("10.244.1.5", "there"), {"addresses": ["192.0.2.1"]}]);
    let table = table_of(&service("web", json!({})), &[slice("web-1", endpoints)]);
    let hairpin = table
        .addresses
        .iter()
        .filter(|(set, _)| *set == AddressSet::Hairpin);
    let hairpin: Vec<String> = hairpin.map(|(_, address)| address.to_string()).collect();
    assert_eq!(hairpin, ["10.244.0.5", "192.0.2.1"]);
}

#[test]
fn both_families_have_their_own_endpoints() {
    let spec = json!({"clusterIPs": ["10.96.0.20", "fd96::20"]});
    let mut planner = planner();
    let slices = [
        slice("web-1", json!([endpoint("10.244.0.5", "here")])),
        slice("web-2", json!([endpoint("fd44::5", "here")])),
    ];
    planner.set_service("default", "web", Some(&service("web", spec)), &slices);
    let mut tables = Tables::new();
    apply(&mut planner, &mut tables);
    let entries = |family| tables[&family].shown_entries();
    assert_eq!(
        entries(Family::V4),
        ["Services 10.96.0.20 tcp 80: goto service/default/web/tcp/http"]
    );
    assert_eq!(
        entries(Family::V6),
        ["Services fd96::20 tcp 80: goto service/default/web/tcp/http"]
    );
    let chains = tables[&Family::V6].shown_chains();
    assert_eq!(
        chains["service/default/web/tcp/http"],
        ["translate [fd44::5]:8080"]
    );
}

#[test]
fn the_older_service_keeps_a_contested_address() {
    let at = |name: &str, created: &str, address: &str| {
        let other = json!({"metadata": {"creationTimestamp": created}});
        let spec =
            json!({"clusterIP": address, "clusterIPs": [address], "externalIPs": ["198.51.100.9"]});
        service_with(name, spec, other)
    };
    let old = at("old", "2026-01-01T00:00:00Z", "10.96.0.21");
    let new = at("new", "2026-02-01T00:00:00Z", "10.96.0.22");
    let owner = |tables: &Tables| -> Vec<String> {
        let entries = tables[&Family::V4].shown_entries().into_iter();
        entries
            .filter(|e| e.contains("198.51.100.9"))
            .map(|e| e.split('/').nth(2).unwrap().to_owned())
            .collect()
    };
    for order in [
        [("old", &old), ("new", &new)],
        [("new", &new), ("old", &old)],
    ] {
        let (mut planner, mut tables) = (planner(), Tables::new());
        for (name, service) in order {
            planner.set_service("default", name, Some(service), &two_nodes());
            apply(&mut planner, &mut tables);
        }
        assert_eq!(owner(&tables), ["old"]);
        let problems = planner.problems("default", "new").unwrap();
        assert_eq!(
            problems.texts,
            ["198.51.100.9:80/tcp is skipped: an older service has the same address and port"]
        );
        planner.set_service("default", "old", None, &[]);
        apply(&mut planner, &mut tables);
        assert_eq!(owner(&tables), ["new"]);
        assert_eq!(planner.problems("default", "new"), None);
    }
}

#[test]
fn one_changed_endpoint_is_a_few_operations() {
    let endpoints = |last: u8| -> Vec<Arc<EndpointSlice>> {
        let others = (1..=99).map(|n| endpoint(&format!("10.244.0.{n}"), "here"));
        let all = others.chain([endpoint(&format!("10.244.1.{last}"), "there")]);
        vec![slice("web-1", Json::Array(all.collect()))]
    };
    let (mut planner, mut tables) = (planner(), Tables::new());
    let web = service("web", json!({}));
    planner.set_service("default", "web", Some(&web), &endpoints(1));
    apply(&mut planner, &mut tables);
    // An endpoint is replaced: its element only.
    planner.set_service("default", "web", Some(&web), &endpoints(2));
    assert_eq!(apply(&mut planner, &mut tables).operations.len(), 2);
    // The first endpoint is removed: the last one takes its place, and the rule has one less.
    let fewer: Vec<Json> = (2..=99)
        .map(|n| endpoint(&format!("10.244.0.{n}"), "here"))
        .collect();
    planner.set_service(
        "default",
        "web",
        Some(&web),
        &[slice("web-1", Json::Array(fewer))],
    );
    let changes = apply(&mut planner, &mut tables);
    let about_targets = changes.operations.iter().filter(|(_, o)| {
        matches!(
            o,
            Operation::AddTarget { .. } | Operation::DeleteTarget { .. }
        )
    });
    assert_eq!(about_targets.count(), 3 + 1, "{changes:?}");
    // Nothing changes.
    planner.set_service("default", "web", Some(&web.clone()), &[]);
    apply(&mut planner, &mut tables);
    planner.set_service("default", "web", Some(&web), &[]);
    assert_eq!(take_changes(&mut planner), Changes::default());
}

#[test]
fn health_checks_count_ready_endpoints_on_this_node() {
    let cases = [
        (
            json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 32000}),
            Some((32000, 1)),
        ),
        (
            json!({"type": "LoadBalancer", "externalTrafficPolicy": "Cluster", "healthCheckNodePort": 32000}),
            None,
        ),
        (
            json!({"type": "NodePort", "externalTrafficPolicy": "Local", "healthCheckNodePort": 32000}),
            None,
        ),
    ];
    for (spec, expected) in cases {
        let mut planner = planner();
        let slices = [slice(
            "web-1",
            json!([
                endpoint("10.244.0.5", "here"),
                endpoint("10.244.1.5", "there"),
                hinted("6 here terminating - -"),
            ]),
        )];
        planner.set_service(
            "default",
            "web",
            Some(&service("web", spec.clone())),
            &slices,
        );
        let checks = planner.health_checks();
        let found = checks
            .first()
            .map(|check| (check.port, check.local_endpoints));
        assert_eq!(found, expected, "{spec}");
    }
}

#[test]
fn flows_of_removed_endpoints_are_stale() {
    let udp = json!([{"name": "dns", "port": 53, "protocol": "UDP", "nodePort": 30053}]);
    let dns = service("web", json!({"type": "NodePort", "ports": udp}));
    let with = |endpoints: Json| {
        vec![slice_with(
            "web-1",
            json!([{"name": "dns", "port": 5353, "protocol": "UDP"}]),
            endpoints,
        )]
    };
    let both = with(json!([
        endpoint("10.244.0.5", "here"),
        endpoint("10.244.0.7", "there")
    ]));
    let terminating = with(json!([
        endpoint("10.244.0.5", "here"),
        hinted("7 there terminating - -")
    ]));
    let one = with(json!([endpoint("10.244.0.5", "here")]));
    let (mut planner, mut tables) = (planner(), Tables::new());
    let mut flows = |service: Option<&Service>, slices: &[Arc<EndpointSlice>]| {
        planner.set_service("default", "web", service, slices);
        let changes = apply(&mut planner, &mut tables);
        changes
            .flows
            .iter()
            .map(|f| (f.destination.port, f.keep.len()))
            .collect::<Vec<_>>()
    };
    assert_eq!(flows(Some(&dns), &[]), [(53, 0), (30053, 0)]);
    // The first endpoint: packets before it were not translated.
    assert_eq!(flows(Some(&dns), &both), [(53, 2), (30053, 2)]);
    // A terminating endpoint serves its clients to the end.
    assert_eq!(flows(Some(&dns), &terminating), []);
    assert_eq!(flows(Some(&dns), &one), [(53, 1), (30053, 1)]);
    assert_eq!(flows(Some(&dns), &both), []);
    assert_eq!(flows(None, &[]), [(53, 0), (30053, 0)]);
}
