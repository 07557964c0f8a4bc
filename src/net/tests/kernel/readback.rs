//! Random sets and elements are written, and the kernel returns the same ones.

use std::time::Duration;

use holdfast_net::nft::Nft;
use holdfast_net::nft::element::Element;
use holdfast_net::nft::set::{Expiry, Kind, Set};
use holdfast_net::nft::value::{Data, Type, Value};
use holdfast_net::nft::verdict::Verdict;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::TABLE;
use crate::namespace::Namespace;

fn value(kind: Type) -> BoxedStrategy<Value> {
    match kind {
        Type::Number => any::<u32>().prop_map(Value::Number).boxed(),
        Type::Mark => any::<u32>().prop_map(Value::Mark).boxed(),
        Type::Ipv4Address => any::<[u8; 4]>()
            .prop_map(|a| Value::Address(a.into()))
            .boxed(),
        Type::Ipv6Address => any::<[u8; 16]>()
            .prop_map(|a| Value::Address(a.into()))
            .boxed(),
        Type::Protocol => any::<u8>().prop_map(Value::Protocol).boxed(),
        Type::Port => any::<u16>().prop_map(Value::Port).boxed(),
        Type::Interface => "[a-z0-9]{1,15}".prop_map(Value::Interface).boxed(),
    }
}

fn values(types: &[Type]) -> Vec<BoxedStrategy<Value>> {
    types.iter().map(|kind| value(*kind)).collect()
}

fn types(of: &'static [Type]) -> impl Strategy<Value = Vec<Type>> {
    vec(proptest::sample::select(of), 1..=3)
}

const ORDERED: &[Type] = &[
    Type::Ipv4Address,
    Type::Ipv6Address,
    Type::Protocol,
    Type::Port,
];
const ALL: &[Type] = &[
    Type::Number,
    Type::Mark,
    Type::Ipv4Address,
    Type::Ipv6Address,
    Type::Protocol,
    Type::Port,
    Type::Interface,
];

fn sets() -> impl Strategy<Value = Set> {
    let kind = prop_oneof![
        Just(Kind::Set),
        Just(Kind::VerdictMap),
        types(ALL).prop_map(Kind::Map)
    ];
    let key = any::<bool>().prop_flat_map(|intervals| {
        let key = if intervals {
            types(ORDERED).boxed()
        } else {
            types(ALL).boxed()
        };
        (Just(intervals), key)
    });
    let expiry = prop_oneof![
        Just(Expiry::Never),
        Just(Expiry::PerElement),
        Just(Expiry::After(Duration::from_secs(3600)))
    ];
    (key, kind, expiry, "[a-z ]{0,20}").prop_map(|((has_intervals, key), kind, expiry, comment)| {
        Set {
            has_intervals,
            expiry,
            comment,
            ..Set::new("random", &key, kind)
        }
    })
}

fn data(kind: &Kind) -> BoxedStrategy<Data> {
    match kind {
        Kind::Set => Just(Data::None).boxed(),
        Kind::VerdictMap => prop_oneof![
            Just(Data::Verdict(Verdict::Drop)),
            Just(Data::Verdict(Verdict::Accept)),
            Just(Data::Verdict(Verdict::Return)),
            Just(Data::Verdict(Verdict::jump("chain"))),
            Just(Data::Verdict(Verdict::goto("chain")))
        ]
        .boxed(),
        Kind::Map(types) => values(types).prop_map(Data::Values).boxed(),
    }
}

/// A set with elements: single keys, or intervals that do not overlap in their first field.
fn filled() -> impl Strategy<Value = (Set, Vec<Element>)> {
    let filled = |set: Set| {
        let key = values(&set.key);
        let elements = vec((key.clone(), key, data(&set.kind), any::<bool>()), 0..30);
        (Just(set), elements)
    };
    sets().prop_flat_map(filled).prop_map(|(set, raw)| {
        let mut elements: Vec<Element> = vec![];
        for (mut key, mut last, data, has_timeout) in raw {
            for (first, last) in key.iter_mut().zip(&mut last) {
                if *first > *last {
                    std::mem::swap(first, last);
                }
            }
            let last = Some(last).filter(|last| set.has_intervals && *last != key);
            let end = |e: &Element| e.last.as_ref().unwrap_or(&e.key)[0].clone();
            let mut element = Element {
                last,
                ..Element::new(key, data)
            };
            if has_timeout && set.expiry != Expiry::Never {
                element.timeout = Some(Duration::from_secs(600));
            }
            let is_free = |other: &Element| match set.has_intervals {
                true => other.key[0] > end(&element) || end(other) < element.key[0],
                false => other.key != element.key,
            };
            if elements.iter().all(is_free) {
                elements.push(element);
            }
        }
        (set, elements)
    })
}

/// Elements in the order of their keys, without what the kernel adds.
fn normal(mut elements: Vec<Element>, set: &Set) -> Vec<Element> {
    elements.sort_by(|one, other| one.key.cmp(&other.key));
    for element in &mut elements {
        element.expires = None;
        // The kernel reports the timeout of the set for elements without an own one, or leaves it out.
        if let (Expiry::After(time), None) = (set.expiry, element.timeout) {
            element.timeout = Some(time);
        }
    }
    elements
}

#[test]
fn sets_and_elements_are_read_back() {
    let Some(namespace) = Namespace::new() else {
        return;
    };
    namespace.inside(|| {
        let config = Config::default();
        let mut runner = TestRunner::new(config);
        runner
            .run(&filled(), |(set, elements)| {
                let mut nft = Nft::open().unwrap();
                let mut messages = TABLE.destroy().to_vec();
                messages.extend([TABLE.create(), TABLE.chain("chain")]);
                messages.push(TABLE.create_set(&set).unwrap());
                messages.extend(TABLE.add_elements(&set, &elements).unwrap());
                nft.commit(messages)
                    .map_err(|e| TestCaseError::fail(e.to_string()))?;
                prop_assert_eq!(nft.set(TABLE, "random").unwrap(), Some(set.clone()));
                prop_assert_eq!(nft.sets(TABLE).unwrap(), vec![set.clone()]);
                let read = nft.elements(TABLE, &set, 100).unwrap();
                prop_assert_eq!(normal(read, &set), normal(elements.clone(), &set));
                // Half of them are deleted, then all.
                let (deleted, kept) = elements.split_at(elements.len() / 2);
                nft.commit(TABLE.delete_elements(&set, deleted).unwrap())
                    .map_err(|e| TestCaseError::fail(e.to_string()))?;
                let read = nft.elements(TABLE, &set, 100).unwrap();
                prop_assert_eq!(normal(read, &set), normal(kept.to_vec(), &set));
                nft.commit(vec![TABLE.flush_set("random")]).unwrap();
                prop_assert_eq!(nft.elements(TABLE, &set, 100).unwrap(), vec![]);
                nft.commit(vec![TABLE.delete_set("random")]).unwrap();
                prop_assert_eq!(nft.set(TABLE, "random").unwrap(), None);
                Ok(())
            })
            .unwrap();
    });
}

#[test]
fn what_does_not_exist_is_empty() {
    let Some(namespace) = Namespace::new() else {
        return;
    };
    namespace.inside(|| {
        let mut nft = Nft::open().unwrap();
        let set = Set::new("missing", &[Type::Port], Kind::Set);
        assert_eq!(nft.sets(TABLE).unwrap(), []);
        assert_eq!(nft.set(TABLE, "missing").unwrap(), None);
        assert_eq!(nft.elements(TABLE, &set, 1).unwrap(), []);
    });
}

#[test]
fn a_foreign_set_is_reported() {
    if crate::namespace::needs_nft() {
        return;
    }
    let Some(namespace) = Namespace::new() else {
        return;
    };
    namespace.nft(&["add", "table", "inet", TABLE.name]);
    namespace.nft(&[
        "add",
        "set",
        "inet",
        TABLE.name,
        "macs",
        "{ type ether_addr; }",
    ]);
    namespace.inside(|| {
        let error = Nft::open().unwrap().sets(TABLE).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the set \"macs\" has a type, which Holdfast never creates"
        );
    });
}
