//! Encodes answers of the cluster.

use hickory_proto::op::{Message, OpCode, Query as Question, ResponseCode};
use hickory_proto::rr::{DNSClass, RecordType};
use hickory_proto::serialize::binary::{BinEncodable as _, BinEncoder};

use crate::answer::{Answer, record_name};
use crate::query::Query;
use crate::wire::{self, code, flag};

/// Encodes the response to `query` in at most `limit` bytes, with the OPT record. If the records do not fit, the additional ones
/// are left out first, which needs no TC (RFC 2181 section 9); then the answers are cut and TC is set.
pub(crate) fn encode(query: &Query, answer: Answer, limit: usize) -> Vec<u8> {
    let mut message = Message::response(query.id, OpCode::Query);
    message.metadata.authoritative = answer.code != code::SERVFAIL;
    message.metadata.recursion_desired = query.recursion_desired;
    message.metadata.recursion_available = true;
    message.metadata.checking_disabled = query.checking_disabled;
    message.metadata.response_code = ResponseCode::from(0, (answer.code & 0xf) as u8);
    let mut question = Question::query(record_name(&query.name), RecordType::from(query.kind));
    question.set_query_class(DNSClass::from(query.class));
    message.add_query(question);
    message.answers = answer.answers;
    message.authorities = answer.authorities;
    message.additionals = answer.additionals;
    let room = u16::try_from(limit.saturating_sub(query.opt_length())).unwrap_or(u16::MAX);
    let mut encoded = emit(&message, room);
    if is_truncated(&encoded) && !message.additionals.is_empty() {
        message.additionals.clear();
        encoded = emit(&message, room);
    }
    match encoded {
        Some(mut response) => {
            query.push_opt(&mut response, answer.code);
            response
        }
        None => query.error(code::SERVFAIL),
    }
}

fn emit(message: &Message, room: u16) -> Option<Vec<u8>> {
    let mut buffer = Vec::with_capacity(512);
    let mut encoder = BinEncoder::new(&mut buffer);
    encoder.set_max_size(room);
    message.emit(&mut encoder).ok()?;
    // Removes the beginning of a record that did not fit.
    encoder.trim();
    Some(buffer)
}

fn is_truncated(encoded: &Option<Vec<u8>>) -> bool {
    let bits = encoded.as_deref().and_then(|bytes| wire::u16_at(bytes, 2));
    bits.is_some_and(|bits| bits & flag::TRUNCATED != 0)
}
