//! Replies of upstreams, as hickory-proto encodes them.

use hickory_proto::op::{Edns, Message, OpCode, Query as Asked, ResponseCode};
use hickory_proto::rr::rdata::{A, CNAME, SOA, TXT};
use hickory_proto::rr::{Name as RecordName, RData, Record, RecordType};
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::query::tests::query;

fn question(name: &str) -> Question {
    Question::of(&query(name, kind::A))
}

fn message(name: &str) -> Message {
    let mut message = Message::response(7, OpCode::Query);
    let name = RecordName::from_ascii(name.trim_end_matches('.').to_owned() + ".").unwrap();
    message.add_query(Asked::query(name, RecordType::A));
    message
}

fn address(message: &mut Message, ttl: u32) {
    let name = message.queries[0].name.clone();
    message.add_answer(Record::from_rdata(
        name,
        ttl,
        RData::A(A::new(192, 0, 2, 1)),
    ));
}

fn soa(message: &mut Message, ttl: u32, minimum: u32) {
    let name = RecordName::from_ascii("example.").unwrap();
    let data = SOA::new(name.clone(), name.clone(), 1, 2, 3, 4, minimum);
    message.add_authority(Record::from_rdata(name, ttl, RData::SOA(data)));
}

fn read(message: &Message) -> Result<Reply, Unusable> {
    let name = message.queries[0].name.to_ascii();
    Reply::read(&message.to_vec().unwrap(), 7, &question(&name))
}

/// A reply with an address.
pub(crate) fn positive(name: &str, ttl: u32) -> Reply {
    let mut message = message(name);
    address(&mut message, ttl);
    read(&message).unwrap()
}

/// A reply that the name does not exist.
pub(crate) fn negative(name: &str, ttl: u32) -> Reply {
    let mut message = message(name);
    message.metadata.response_code = ResponseCode::NXDomain;
    soa(&mut message, ttl, ttl);
    read(&message).unwrap()
}

#[test]
fn lifetimes_follow_the_records_within_bounds() {
    let lifetime = |change: &dyn Fn(&mut Message)| {
        let mut message = message("a.example");
        change(&mut message);
        let reply = read(&message).unwrap();
        (reply.lifetime, reply.is_positive())
    };
    let cases: [(&str, &dyn Fn(&mut Message), Option<u32>, bool); 9] = [
        (
            "the smallest TTL",
            &|m| {
                address(m, 20);
                address(m, 10)
            },
            Some(10),
            true,
        ),
        ("at most 30 s", &|m| address(m, 86400), Some(30), true),
        ("at least 5 s", &|m| address(m, 0), Some(5), true),
        (
            "a TTL with the highest bit",
            &|m| address(m, u32::MAX),
            Some(30),
            true,
        ),
        ("no data: MINIMUM", &|m| soa(m, 3600, 12), Some(12), false),
        (
            "no data: the SOA's TTL",
            &|m| soa(m, 11, 3600),
            Some(11),
            false,
        ),
        ("no data without SOA", &|_| (), None, false),
        (
            "SERVFAIL",
            &|m| m.metadata.response_code = ResponseCode::ServFail,
            Some(5),
            false,
        ),
        (
            "REFUSED",
            &|m| m.metadata.response_code = ResponseCode::Refused,
            None,
            false,
        ),
    ];
    for (case, change, expected, is_positive) in cases {
        assert_eq!(lifetime(change), (expected, is_positive), "{case}");
    }
}

#[test]
fn replies_to_other_questions_are_foreign() {
    let packet = |change: &dyn Fn(&mut Message)| {
        let mut message = message("a.example");
        address(&mut message, 30);
        change(&mut message);
        message.to_vec().unwrap()
    };
    let read = |bytes: &[u8]| Reply::read(bytes, 7, &question("A.example")).err();
    assert_eq!(read(&packet(&|_| ())), None);
    assert_eq!(
        read(&packet(&|m| m.metadata.id = 8)),
        Some(Unusable::Foreign)
    );
    assert_eq!(
        read(&packet(
            &|m| m.queries[0].name = RecordName::from_ascii("b.example.").unwrap()
        )),
        Some(Unusable::Foreign)
    );
    assert_eq!(
        read(&packet(&|m| m.queries[0].query_type = RecordType::AAAA)),
        Some(Unusable::Foreign)
    );
    assert_eq!(
        read(&packet(&|m| m.queries.clear())),
        Some(Unusable::Foreign)
    );
    assert_eq!(
        read(&packet(
            &|m| m.metadata.message_type = hickory_proto::op::MessageType::Query
        )),
        Some(Unusable::Foreign)
    );
    assert_eq!(
        read(&packet(&|m| m.metadata.truncation = true)),
        Some(Unusable::Truncated)
    );
    assert_eq!(read(&[]), Some(Unusable::Foreign));
    let whole = packet(&|_| ());
    assert_eq!(read(&whole[..whole.len() - 1]), Some(Unusable::Malformed));
    // An old server's bare error.
    let bare = [0, 7, 0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    let reply = Reply::read(&bare, 7, &question("a.example")).unwrap();
    assert_eq!((reply.code, reply.lifetime), (code::FORMERR, None));
    let response =
        Message::from_vec(&reply.respond(&query("a.example", kind::A), None, 512)).unwrap();
    assert_eq!(response.queries.len(), 1);
}

#[test]
fn a_response_has_the_clients_id_case_ttl_and_edns() {
    let mut message = message("www.example");
    let name = message.queries[0].name.clone();
    let target = RecordName::from_ascii("web.example.").unwrap();
    message.add_answer(Record::from_rdata(
        name,
        300,
        RData::CNAME(CNAME(target.clone())),
    ));
    message.add_answer(Record::from_rdata(
        target,
        400,
        RData::A(A::new(192, 0, 2, 1)),
    ));
    message.metadata.authentic_data = true;
    let mut edns = Edns::new();
    edns.set_max_payload(4096);
    message.set_edns(edns);
    let reply = read(&message).unwrap();
    let mut query = query("WWW.Example", kind::A);
    query.id = 99;
    let plain = Message::from_vec(&reply.respond(&query, Some(17), 512)).unwrap();
    assert_eq!(plain.metadata.id, 99);
    assert!(
        plain.edns.is_none()
            && !plain.metadata.authentic_data
            && plain.metadata.recursion_available
    );
    assert_eq!(plain.queries[0].name.to_ascii(), "WWW.Example.");
    assert_eq!(plain.answers[0].name.to_ascii(), "WWW.Example.");
    let lines: Vec<String> = plain.answers.iter().map(ToString::to_string).collect();
    // The target's name is compressed against the question.
    assert_eq!(
        lines,
        [
            "WWW.Example. 17 IN CNAME web.Example.",
            "web.Example. 17 IN A 192.0.2.1"
        ]
    );
    query.edns = Some(crate::query::Edns {
        payload: 1232,
        version: 0,
        dnssec_ok: true,
    });
    let signed = Message::from_vec(&reply.respond(&query, None, 1232)).unwrap();
    assert!(signed.edns.unwrap().flags().dnssec_ok && signed.metadata.authentic_data);
    assert_eq!(signed.answers[0].ttl, 300);
}

#[test]
fn long_replies_are_cut_at_a_record() {
    let mut message = message("a.example");
    for n in 0..40_u8 {
        let name = message.queries[0].name.clone();
        let data = RData::TXT(TXT::new(vec![format!("{n:032}")]));
        message.add_answer(Record::from_rdata(name, 30, data));
    }
    soa(&mut message, 30, 30);
    let reply = read(&message).unwrap();
    let whole =
        Message::from_vec(&reply.respond(&query("a.example", kind::A), Some(1), 65535)).unwrap();
    assert_eq!(
        (
            whole.answers.len(),
            whole.authorities.len(),
            whole.metadata.truncation
        ),
        (40, 1, false)
    );
    let mut query = query("a.example", kind::A);
    query.edns = Some(crate::query::Edns {
        payload: 512,
        version: 0,
        dnssec_ok: false,
    });
    let response = reply.respond(&query, Some(1), 512);
    assert!(response.len() <= 512);
    let cut = Message::from_vec(&response).unwrap();
    assert!(cut.metadata.truncation && cut.edns.is_some() && cut.authorities.is_empty());
    assert!(
        (5..15).contains(&cut.answers.len()),
        "{}",
        cut.answers.len()
    );
}

proptest! {
    #[test]
    fn any_reply_is_read_and_sent_within_its_bounds(bytes in vec(any::<u8>(), 0..300), limit in 512_usize..1300) {
        let mut packet = message("a.example").to_vec().unwrap();
        packet.extend(&bytes);
        for at in [7, 9, 11] {
            packet[at] = bytes.get(at).map_or(0, |b| b % 4);
        }
        if let Ok(reply) = Reply::read(&packet, 7, &question("a.example")) {
            let query = query("a.example", kind::A);
            let response = reply.respond(&query, Some(1), limit);
            prop_assert!(response.len() <= limit.max(packet.len()));
            prop_assert!(wire::counts(&response).is_some());
        }
    }

    /// Changed bytes of a valid reply with a compressed name, an SOA and an OPT record.
    #[test]
    fn any_changed_reply_is_read_without_a_panic(changes in vec((0_usize..200, any::<u8>()), 0..4), limit in 512_usize..600) {
        let mut message = message("a.example");
        address(&mut message, 30);
        soa(&mut message, 30, 30);
        message.set_edns(Edns::new());
        let mut packet = message.to_vec().unwrap();
        for (at, byte) in changes {
            let length = packet.len();
            packet[at % length] = byte;
        }
        if let Ok(reply) = Reply::read(&packet, 7, &question("a.example")) {
            let response = reply.respond(&query("a.example", kind::A), Some(1), limit);
            prop_assert!(response.len() <= limit);
        }
    }
}
