//! Foreign changes, restarts and removal.

use std::time::Duration;

use holdfast_core::network::Family;
use holdfast_net::netlink::Message;
use holdfast_net::nft::element::Element;
use holdfast_net::nft::set::{Kind, Set};
use holdfast_net::nft::statement::{counter, goto};
use holdfast_net::nft::value::{Data, Type, Value};
use holdfast_net::nft::{self, Nft, OwnerMark, Table};
use holdfast_proxy::services::{DataPlane, OpenError, Settings};
use serde_json::json;

use crate::world::{World, ask, call, connect, settings};

fn table(name: &'static str) -> Table {
    Table {
        family: nft::Family::V4,
        name,
    }
}

fn own() -> Table {
    table("holdfast-test")
}

fn change(world: &World, messages: Vec<Message>) {
    world
        .node
        .inside(|| Nft::open().unwrap().commit(messages).unwrap());
}

/// Another program's table with a chain.
fn add_foreign(world: &World) -> Table {
    let foreign = table("foreign");
    change(world, vec![foreign.create(), foreign.chain("chain")]);
    foreign
}

fn has(world: &World, table: Table) -> bool {
    world
        .node
        .inside(|| Nft::open().unwrap().has_table(table).unwrap())
}

/// Changes of another program, and a word of the difference that the audit describes.
fn foreign_changes() -> [(&'static str, Vec<Message>, &'static str); 7] {
    let target = vec![Type::Ipv4Address, Type::Port];
    let endpoints = Set::new("endpoints-1", &[Type::Mark, Type::Mark], Kind::Map(target));
    // The first port has the pools 2 and 3.
    let key = vec![Value::Mark(2), Value::Mark(0)];
    let deleted = own().delete_elements(&endpoints, &[Element::new(key, Data::None)]);
    let hairpin = Set::new(
        "hairpin",
        &[Type::Ipv4Address, Type::Ipv4Address],
        Kind::Set,
    );
    let key = vec![Value::Address([10, 0, 0, 1].into()); 2];
    let added = own().add_elements(&hairpin, &[Element::new(key, Data::None)]);
    let ports = own().create_set(&Set::new("ports", &[Type::Port], Kind::Set));
    let rule = own().append("services", &[goto("mark")], OwnerMark::None);
    [
        ("a flush", own().destroy().to_vec(), "deleted"),
        ("a deleted element", deleted.unwrap(), "endpoints-1"),
        ("another element", added.unwrap(), "hairpin"),
        ("another rule", vec![rule], "other rules"),
        (
            "deleted rules",
            vec![own().flush("services")],
            "other rules",
        ),
        ("another chain", vec![own().chain("more")], "not planned"),
        ("another set", vec![ports.unwrap()], "not planned"),
    ]
}

#[test]
fn foreign_changes_are_repaired() {
    let Some(mut world) = World::new(Family::V4) else {
        return;
    };
    world.set_up(json!({}), &[2, 3]);
    let foreign = add_foreign(&world);
    assert_eq!(world.audit(), [""; 0]);
    let to = world.to("service", 20, 80);
    for (what, messages, expected) in foreign_changes() {
        change(&world, messages);
        let differences = world.audit();
        assert!(
            differences.iter().any(|d| d.contains(expected)),
            "{what}: {differences:?}"
        );
        assert!(call(&world.client, to).is_ok(), "{what}");
        assert_eq!(world.audit(), [""; 0], "{what}");
    }
    assert!(has(&world, foreign));
}

#[test]
fn a_commit_repairs_what_it_cannot_change() {
    let Some(mut world) = World::new(Family::V4) else {
        return;
    };
    world.set_up(json!({}), &[2, 3]);
    change(&world, own().destroy().to_vec());
    let committed = world.set_up(json!({}), &[3]);
    assert!(committed.is_full);
    let to = world.to("service", 20, 80);
    assert_eq!(call(&world.client, to).unwrap().endpoint, 3);
    assert_eq!(world.audit(), [""; 0]);
}

#[test]
fn a_restart_keeps_connections_and_replaces_the_table() {
    let Some(mut world) = World::new(Family::V4) else {
        return;
    };
    world.set_up(json!({}), &[2]);
    let to = world.to("service", 20, 80);
    let mut stream = connect(&world.client, to, Duration::from_secs(10)).unwrap();
    assert_eq!(ask(&mut stream).unwrap().endpoint, 2);
    // The process is killed: rules stay, and the next process replaces them with its first commit.
    world.open(settings());
    assert_eq!(call(&world.client, to).unwrap().endpoint, 2);
    let committed = world.set_up(json!({}), &[3]);
    assert!(committed.is_full);
    assert_eq!(ask(&mut stream).unwrap().endpoint, 2);
    assert_eq!(call(&world.client, to).unwrap().endpoint, 3);
    assert_eq!(world.audit(), [""; 0]);
}

#[test]
fn other_services_and_chains_come_and_go() {
    let Some(mut world) = World::new(Family::V4) else {
        return;
    };
    world.set_up(json!({}), &[2]);
    for round in 0..3 {
        // The chains of a service without endpoints are deleted a second later, unless they are needed again.
        world.set_up(json!({}), &[]);
        assert_eq!(world.audit(), [""; 0], "round {round}");
        if round == 1 {
            std::thread::sleep(Duration::from_millis(1100));
            assert_eq!(world.audit(), [""; 0]);
            let chains = world
                .node
                .inside(|| Nft::open().unwrap().chains(own()).unwrap());
            assert!(!chains.iter().any(|chain| chain.name.contains('/')));
        }
        world.set_up(json!({}), &[2]);
        let to = world.to("service", 20, 80);
        assert!(call(&world.client, to).is_ok(), "round {round}");
    }
    assert_eq!(world.audit(), [""; 0]);
}

#[test]
fn the_table_of_kube_proxy_and_invalid_settings_prevent_the_start() {
    let Some(mut world) = World::new(Family::V4) else {
        return;
    };
    world.plane = None;
    let open = |world: &World, settings: Settings| {
        world.node.inside(|| DataPlane::open(settings).map(drop))
    };
    let long = "x".repeat(300);
    for name in ["", "kube-proxy", "a b", "1", long.as_str()] {
        let refused = open(&world, Settings::new(name));
        let is_invalid = matches!(
            refused,
            Err(OpenError::Invalid {
                field: "--table",
                ..
            })
        );
        assert!(is_invalid, "{name:?}");
    }
    let bit = Settings {
        masquerade_bit: 32,
        ..settings()
    };
    assert!(open(&world, bit).is_err());
    // An empty chain is no rule of iptables mode.
    let iptables = table("nat");
    change(
        &world,
        vec![iptables.create(), iptables.chain("KUBE-SERVICES")],
    );
    open(&world, settings()).unwrap();
    let rule = iptables.append("KUBE-SERVICES", &[counter()], OwnerMark::None);
    let modes = [
        (rule, "KUBE-SERVICES", iptables),
        (
            table("kube-proxy").create(),
            "\"kube-proxy\"",
            table("kube-proxy"),
        ),
    ];
    for (message, expected, table) in modes {
        change(&world, vec![message]);
        let error = open(&world, settings()).unwrap_err();
        assert!(matches!(error, OpenError::KubeProxy { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains(expected) && text.contains("kube-proxy --cleanup"),
            "{text}"
        );
        change(&world, table.destroy().to_vec());
    }
}

#[test]
fn removal_leaves_other_tables() {
    let Some(mut world) = World::new(Family::V4) else {
        return;
    };
    world.set_up(json!({}), &[2]);
    let foreign = add_foreign(&world);
    assert!(has(&world, own()));
    for _ in 0..2 {
        let removed = world.node.inside(|| DataPlane::remove(&settings()));
        removed.unwrap();
        assert!(!has(&world, own()));
    }
    assert!(has(&world, foreign));
}
