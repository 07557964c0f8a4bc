//! What `nft list ruleset` displays of the rules and sets that the crate writes.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use holdfast_net::netlink::Message;
use holdfast_net::nft::element::Element;
use holdfast_net::nft::expression::{
    Field, address_is, family_is, field_is, for_this_host, has_bits, in_set, interface_is, port_is,
    protocol_is, state, status,
};
use holdfast_net::nft::set::{Expiry, Kind, Set};
use holdfast_net::nft::statement::{
    Change, Mark, Reject, Target, change_set, masquerade, masquerade_fully_random, redirect,
    redirect_by_map, reject, verdict, verdict_of_map,
};
use holdfast_net::nft::value::{Data, IpVersion, Type, Value, network};
use holdfast_net::nft::verdict::Verdict;
use holdfast_net::nft::{Hook, Nft, OwnerMark};

use crate::TABLE;
use crate::namespace::{Namespace, needs_nft};

fn v4(last: u8) -> Value {
    Value::Address([10, 96, 0, last].into())
}

/// Commits messages and compares what `nft` displays.
fn expect(messages: Vec<Message>, expected: &str) {
    if needs_nft() {
        return;
    }
    let Some(namespace) = Namespace::new() else {
        return;
    };
    namespace.inside(|| Nft::open().unwrap().commit(messages).unwrap());
    let listed = namespace.nft(&["list", "ruleset"]);
    let plain = |text: &str| -> Vec<String> {
        let lines = text.lines().map(|line| line.trim().to_owned());
        lines.filter(|line| !line.is_empty()).collect()
    };
    assert_eq!(plain(&listed), plain(expected), "nft lists:\n{listed}");
}

/// Rules of a chain, and the sets that they use.
fn rules(
    sets: Vec<Message>,
    kind: &'static str,
    hook: u32,
    rules: &[Vec<holdfast_net::netlink::Attributes>],
) -> Vec<Message> {
    let place = Hook {
        kind,
        hook,
        priority: 0,
    };
    let mut messages = vec![TABLE.create()];
    messages.extend(sets);
    messages.push(TABLE.hooked("c", place));
    messages.extend(
        rules
            .iter()
            .map(|rule| TABLE.append("c", rule, OwnerMark::None)),
    );
    messages
}

const CONDITIONS: &str = r#"
        table inet holdfast-test {
            chain c {
                type filter hook prerouting priority filter; policy accept;
                meta nfproto ipv4 accept
                meta l4proto sctp accept
                tcp dport 80 accept
                iifname != "eth0" accept
                ip daddr 10.0.0.0/8 accept
                ip6 saddr fd00::1 accept
                fib daddr type local accept
                fib saddr type != local accept
                ct state established,related accept
                ct status dnat accept
                ct direction reply accept
                meta mark & 0x00004000 != 0x00000000 accept
                ct mark 0x00000007 accept
                ct original ip daddr 10.96.0.1 accept
                meta l4proto udp ct original proto-dst 53 accept
                sctp sport 99 accept
            }
        }"#;

#[test]
fn conditions() {
    let with = |mut condition: Vec<_>| {
        condition.push(verdict(&Verdict::Accept));
        condition
    };
    let v6: IpAddr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1).into();
    let list = [
        with(family_is(true)),
        with(protocol_is(132)),
        with([protocol_is(6), port_is(80)].concat()),
        with(interface_is(true, "eth0", false)),
        with(
            [
                family_is(true),
                address_is(false, "10.0.0.0/8".parse().unwrap(), true),
            ]
            .concat(),
        ),
        with([family_is(false), address_is(true, v6.into(), true)].concat()),
        with(for_this_host()),
        with(field_is(Field::SourceType, &2_u32.to_ne_bytes(), false)),
        with(has_bits(
            Field::ConnectionState,
            state::ESTABLISHED | state::RELATED,
            true,
        )),
        with(has_bits(Field::ConnectionStatus, status::DNAT, true)),
        with(field_is(Field::ConnectionDirection, &[1], true)),
        with(has_bits(Field::Mark, 0x4000, true)),
        with(field_is(Field::ConnectionMark, &7_u32.to_ne_bytes(), true)),
        with(field_is(
            Field::OriginalDestination(IpVersion::V4),
            &[10, 96, 0, 1],
            true,
        )),
        with(
            [
                protocol_is(17),
                field_is(Field::OriginalDestinationPort, &[0, 53], true),
            ]
            .concat(),
        ),
        with(
            [
                protocol_is(132),
                field_is(Field::SourcePort, &[0, 99], true),
            ]
            .concat(),
        ),
    ];
    expect(rules(vec![], "filter", 0, &list), CONDITIONS);
}

const STATEMENTS: &str = r"
        table inet holdfast-test {
            chain c {
                type filter hook input priority filter; policy accept;
                meta mark set 0x00000009
                meta mark set meta mark | 0x00004000
                meta mark set meta mark & 0xffffbfff
                ct mark set meta mark
                meta mark set ct mark & 0x0000ff00
                ct mark set 0x00000003
                meta l4proto tcp reject with tcp reset
                reject
                reject with icmpx host-unreachable
                reject with icmpx admin-prohibited
                reject with icmp admin-prohibited
                drop
            }
        }";

#[test]
fn statements() {
    let list = [
        Mark::Packet.set(9),
        Mark::Packet.change(0x4000, 0x4000),
        Mark::Packet.change(0x4000, 0),
        Mark::Connection.copy(Mark::Packet, u32::MAX),
        Mark::Packet.copy(Mark::Connection, 0xff00),
        Mark::Connection.set(3),
        [protocol_is(6), vec![reject(Reject::TcpReset)]].concat(),
        vec![reject(Reject::PortUnreachable)],
        vec![reject(Reject::HostUnreachable)],
        vec![reject(Reject::Prohibited)],
        [family_is(true), vec![reject(Reject::Code(13))]].concat(),
        vec![verdict(&Verdict::Drop)],
    ];
    expect(rules(vec![], "filter", 1, &list), STATEMENTS);
}

const TRANSLATION: &str = r"
        table inet holdfast-test {
            map endpoints {
                type 0 : ipv4_addr . inet_service
                elements = { 0 : 10.96.0.1 . 8080, 1 : 10.96.0.2 . 8081 }
            }
            map endpoints6 {
                type 0 : ipv6_addr . inet_service
                elements = { 0 : fd00::1 . 80 }
            }
            chain c {
                type nat hook prerouting priority filter; policy accept;
                meta l4proto tcp dnat ip to numgen random mod 2 map @endpoints
                meta l4proto tcp dnat ip to numgen inc mod 2 map { 0 : 10.96.0.1 . 8080, 1 : 10.96.0.2 . 8081 }
                meta l4proto udp dnat ip6 to numgen random mod 2 map @endpoints6
                meta l4proto udp dnat ip6 to [fd00::2]:53
            }
        }";

#[test]
fn translation_to_random_endpoints() {
    let targets = Kind::Map(vec![Type::Ipv4Address, Type::Port]);
    let endpoints = Set::new("endpoints", &[Type::Number], targets.clone());
    let one = Set::anonymous(1, &[Type::Number], targets);
    let v6 = Kind::Map(vec![Type::Ipv6Address, Type::Port]);
    let sixes = Set::new("endpoints6", &[Type::Number], v6);
    let entry = |number, address, port| {
        let target = vec![address, Value::Port(port)];
        Element::new(vec![Value::Number(number)], Data::Values(target))
    };
    let six = Value::Address("fd00::1".parse().unwrap());
    let fours = [entry(0, v4(1), 8080), entry(1, v4(2), 8081)];
    let mut sets = vec![];
    for (set, elements) in [
        (&endpoints, &fours[..]),
        (&one, &fours),
        (&sixes, &[entry(0, six, 80)]),
    ] {
        sets.push(TABLE.create_set(set).unwrap());
        sets.extend(TABLE.add_elements(set, elements).unwrap());
    }
    let random = Field::Random {
        modulus: 2,
        offset: 0,
    };
    let counter = Field::Counter {
        modulus: 2,
        offset: 0,
    };
    let four = Target::AddressAndPort(IpVersion::V4);
    let list = [
        [protocol_is(6), redirect_by_map(&[random], &endpoints, four)].concat(),
        [protocol_is(6), redirect_by_map(&[counter], &one, four)].concat(),
        [
            protocol_is(17),
            redirect_by_map(&[random], &sixes, Target::AddressAndPort(IpVersion::V6)),
        ]
        .concat(),
        [protocol_is(17), redirect("fd00::2".parse().unwrap(), 53)].concat(),
    ];
    expect(rules(sets, "nat", 0, &list), TRANSLATION);
}

const SETS: &str = r#"
        table inet holdfast-test {
            map services {
                type ipv4_addr . inet_proto . inet_service : verdict
                comment "services"
                elements = { 10.96.0.1 . tcp . 80 : goto service-a,
                             10.96.0.2 . tcp . 443 : goto service-a }
            }
            set allowed {
                type ipv4_addr . inet_service
                flags interval
                elements = { 10.96.0.0/24 . 80-90 }
            }
            set networks {
                type ipv4_addr
                flags interval
                elements = { 10.96.0.0/24, 10.97.0.1 }
            }
            chain service-a {
            }
            chain c {
                type filter hook prerouting priority filter; policy accept;
                ip daddr . meta l4proto . th dport vmap @services
                ip saddr . th dport != @allowed drop
                ip saddr != @networks return
            }
        }"#;

#[test]
fn verdict_maps_and_intervals() {
    let key = [Type::Ipv4Address, Type::Protocol, Type::Port];
    let service = Set {
        comment: "services".to_owned(),
        ..Set::new("services", &key, Kind::VerdictMap)
    };
    let intervals = |name, key: &[Type]| Set {
        has_intervals: true,
        ..Set::new(name, key, Kind::Set)
    };
    let allowed = intervals("allowed", &[Type::Ipv4Address, Type::Port]);
    let networks = intervals("networks", &[Type::Ipv4Address]);
    let to = |last, port, chain: &str| {
        let key = vec![v4(last), Value::Protocol(6), Value::Port(port)];
        Element::new(key, Data::Verdict(Verdict::goto(chain)))
    };
    let (first, last) = network("10.96.0.0/24".parse().unwrap());
    let from = vec![first.clone(), Value::Port(80)];
    let range = Element::interval(from, vec![last.clone(), Value::Port(90)], Data::None);
    let net = Element::interval(vec![first], vec![last], Data::None);
    let host = Element::new(vec![Value::Address([10, 97, 0, 1].into())], Data::None);
    let mut sets = vec![TABLE.chain("service-a")];
    for (set, elements) in [
        (
            &service,
            vec![to(1, 80, "service-a"), to(2, 443, "service-a")],
        ),
        (&allowed, vec![range]),
        (&networks, vec![net, host]),
    ] {
        sets.push(TABLE.create_set(set).unwrap());
        sets.extend(TABLE.add_elements(set, &elements).unwrap());
    }
    let (source, port) = (Field::Source(IpVersion::V4), Field::DestinationPort);
    let key = [Field::Destination(IpVersion::V4), Field::Protocol, port];
    let drop = vec![verdict(&Verdict::Drop)];
    let back = vec![verdict(&Verdict::Return)];
    let list = [
        [family_is(true), verdict_of_map(&key, &service)].concat(),
        [
            family_is(true),
            in_set(&[source, port], &allowed, false),
            drop,
        ]
        .concat(),
        [family_is(true), in_set(&[source], &networks, false), back].concat(),
    ];
    expect(rules(sets, "filter", 0, &list), SETS);
}

const DYNAMIC_SETS: &str = r"
        table inet holdfast-test {
            set affinity {
                type ipv4_addr
                size 65535
                flags dynamic,timeout
                timeout 3h
            }
            map clients {
                type ipv4_addr : ipv4_addr . inet_service
                size 1000
                flags dynamic,timeout
            }
            chain service-a {
            }
            chain c {
                type filter hook prerouting priority filter; policy accept;
                ip saddr @affinity goto service-a
                update @affinity { ip saddr }
                add @clients { ip saddr timeout 1m : 10.96.0.9 . 80 }
                delete @affinity { ip saddr }
            }
        }";

#[test]
fn sets_that_rules_change() {
    let dynamic = |name, kind, expiry, size| Set {
        expiry,
        is_dynamic: true,
        size: Some(size),
        ..Set::new(name, &[Type::Ipv4Address], kind)
    };
    let hours = Expiry::After(Duration::from_secs(10800));
    let affinity = dynamic("affinity", Kind::Set, hours, 65535);
    let target = Kind::Map(vec![Type::Ipv4Address, Type::Port]);
    let clients = dynamic("clients", target, Expiry::PerElement, 1000);
    let mut sets = vec![TABLE.chain("service-a")];
    for set in [&affinity, &clients] {
        sets.push(TABLE.create_set(set).unwrap());
    }
    let source = [Field::Source(IpVersion::V4)];
    let target = [v4(9), Value::Port(80)];
    let minute = Some(Duration::from_secs(60));
    let change = |change, set, data, timeout| {
        let changed = change_set(change, set, &source, data, timeout).unwrap();
        [family_is(true), changed].concat()
    };
    let goto = vec![verdict(&Verdict::goto("service-a"))];
    let list = [
        [family_is(true), in_set(&source, &affinity, true), goto].concat(),
        change(Change::Update, &affinity, &[], None),
        change(Change::Add, &clients, &target, minute),
        change(Change::Delete, &affinity, &[], None),
    ];
    expect(rules(sets, "filter", 0, &list), DYNAMIC_SETS);
}

const MASQUERADING: &str = r"
        table inet holdfast-test {
            chain c {
                type nat hook postrouting priority filter; policy accept;
                masquerade
                masquerade fully-random
            }
        }";

#[test]
fn masquerading() {
    let list = [vec![masquerade()], vec![masquerade_fully_random()]];
    expect(rules(vec![], "nat", 4, &list), MASQUERADING);
}
