//! Transactions: large ones, rejected ones, and those that conflict with others.

use std::cell::Cell;
use std::io;
use std::time::Instant;

use holdfast_net::netlink::BatchError;
use holdfast_net::nft::element::Element;
use holdfast_net::nft::set::{Kind, Set};
use holdfast_net::nft::statement::verdict;
use holdfast_net::nft::value::{Data, Type, Value};
use holdfast_net::nft::verdict::Verdict;
use holdfast_net::nft::{Nft, OwnerMark};

use crate::TABLE;
use crate::namespace::Namespace;

/// A service's key and its chain.
fn service(number: u32) -> Element {
    let [_, high, middle, low] = number.to_be_bytes();
    let key = vec![
        Value::Address([10, high, middle, low].into()),
        Value::Protocol(6),
        Value::Port(80),
    ];
    Element::new(key, Data::Verdict(Verdict::goto("service")))
}

fn services() -> Set {
    let key = [Type::Ipv4Address, Type::Protocol, Type::Port];
    Set::new("services", &key, Kind::VerdictMap)
}

#[test]
fn a_hundred_thousand_elements_are_one_transaction() {
    const COUNT: u32 = 100_000;
    let Some(namespace) = Namespace::new() else {
        return;
    };
    namespace.inside(|| {
        let set = services();
        let elements: Vec<Element> = (0..COUNT).map(service).collect();
        let mut nft = Nft::open().unwrap();
        let mut messages = vec![TABLE.create(), TABLE.chain("service")];
        messages.push(TABLE.create_set(&set).unwrap());
        let begun = Instant::now();
        messages.extend(TABLE.add_elements(&set, &elements).unwrap());
        let (count, encoded) = (messages.len(), begun.elapsed());
        nft.commit(messages).unwrap();
        let committed = begun.elapsed() - encoded;
        let begun = Instant::now();
        let mut read = nft.elements(TABLE, &set, 100_000).unwrap();
        println!(
            "{COUNT} elements in {count} messages: {encoded:?} to encode, {committed:?} to commit, {:?} to read",
            begun.elapsed()
        );
        read.sort_by(|one, other| one.key.cmp(&other.key));
        assert!(read == elements);
        let error = nft.elements(TABLE, &set, 99_999).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        // One change needs no listing.
        let begun = Instant::now();
        let change = TABLE.delete_elements(&set, &elements[..1]).unwrap();
        nft.commit(change).unwrap();
        println!("one element of them deleted in {:?}", begun.elapsed());
    });
}

#[test]
fn many_rules_are_one_transaction() {
    let Some(namespace) = Namespace::new() else {
        return;
    };
    namespace.inside(|| {
        let mut nft = Nft::open().unwrap();
        let mut messages = vec![TABLE.create(), TABLE.chain("c")];
        let accept = [verdict(&Verdict::Accept)];
        messages.extend((0..20_000).map(|_| TABLE.append("c", &accept, OwnerMark::None)));
        nft.commit(messages).unwrap();
        assert_eq!(nft.rules(TABLE, "c").unwrap().len(), 20_000);
    });
}

#[test]
fn a_rejection_names_the_message_and_changes_nothing() {
    let Some(namespace) = Namespace::new() else {
        return;
    };
    namespace.inside(|| {
        let mut nft = Nft::open().unwrap();
        let set = services();
        let accept = [verdict(&Verdict::Accept)];
        let fill = || TABLE.add_elements(&set, &[service(1)]).unwrap().remove(0);
        let messages = vec![
            TABLE.create(),
            TABLE.create_set(&set).unwrap(),
            TABLE.append("missing", &accept, OwnerMark::None),
            fill(),
        ];
        let BatchError::Rejected(rejection) = nft.commit(messages).unwrap_err() else {
            panic!("the chain is missing");
        };
        assert_eq!(rejection.index, Some(2));
        assert_eq!(
            io::Error::from_raw_os_error(rejection.errno).kind(),
            io::ErrorKind::NotFound
        );
        assert_eq!(nft.sets(TABLE).unwrap(), []);
        // Every one of many messages is rejected: the errors exceed the receive buffer, and the first one counts.
        let mut messages = vec![TABLE.create()];
        messages.extend((0..30_000).map(|_| TABLE.append("missing", &accept, OwnerMark::None)));
        let BatchError::Rejected(rejection) = nft.commit(messages).unwrap_err() else {
            panic!("the chain is missing");
        };
        assert_eq!(rejection.index, Some(1));
        // No answer of the rejected transactions is left for the next one.
        let messages = vec![
            TABLE.create(),
            TABLE.chain("service"),
            TABLE.create_set(&set).unwrap(),
            fill(),
        ];
        nft.commit(messages).unwrap();
        assert_eq!(nft.elements(TABLE, &set, 1).unwrap(), [service(1)]);
    });
}

#[test]
fn a_message_that_is_too_long_is_not_sent() {
    let Some(namespace) = Namespace::new() else {
        return;
    };
    namespace.inside(|| {
        let mut nft = Nft::open().unwrap();
        let long = vec![verdict(&Verdict::Accept); 2_000];
        let messages = vec![
            TABLE.create(),
            TABLE.chain("c"),
            TABLE.append("c", &long, OwnerMark::None),
        ];
        let error = nft.commit(messages).unwrap_err();
        assert!(matches!(error, BatchError::Unsent(_)), "{error}");
        assert!(!nft.has(TABLE, "c").unwrap());
    });
}

#[test]
fn a_plan_is_repeated_after_another_change() {
    let Some(namespace) = Namespace::new() else {
        return;
    };
    namespace.inside(|| {
        let mut nft = Nft::open().unwrap();
        let attempts = Cell::new(0);
        nft.commit_if_unchanged(|_| {
            attempts.set(attempts.get() + 1);
            if attempts.get() == 1 {
                Nft::open()?.commit(vec![TABLE.create(), TABLE.chain("foreign")])?;
            }
            Ok(vec![TABLE.create(), TABLE.chain("own")])
        })
        .unwrap();
        assert_eq!(attempts.get(), 2);
        assert!(nft.has(TABLE, "own").unwrap() && nft.has(TABLE, "foreign").unwrap());
    });
}
