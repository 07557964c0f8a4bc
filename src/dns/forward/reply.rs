//! Replies of upstreams: whether they belong to the question, how long they may be kept (RFC 2308), and how a client gets them.
//! A reply stays the bytes that the upstream sent, so that records of unknown types pass unchanged.

use crate::query::Query;
use crate::wire::{self, CLASS_IN, Frame, HEADER, Name, code, flag, kind};

/// Bounds of the time that a reply is kept, in seconds. kubeadm's Corefile limits CoreDNS to 30 s, so that external changes
/// arrive soon; CoreDNS keeps each reply at least 5 s.
const LIFETIMES: std::ops::RangeInclusive<u32> = 5..=30;
/// Seconds that the failure of an upstream is kept, as in CoreDNS (RFC 2308 section 7.1 allows 300).
const FAILURE_LIFETIME: u32 = 5;

/// A question for upstreams.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    /// In lower case.
    pub(crate) name: Name,
    pub(crate) kind: u16,
    pub(crate) dnssec_ok: bool,
    pub(crate) checking_disabled: bool,
}

impl Question {
    pub(crate) fn of(query: &Query) -> Question {
        Question {
            name: query.lower,
            kind: query.kind,
            dnssec_ok: query.dnssec_ok(),
            checking_disabled: query.checking_disabled,
        }
    }

    /// The key of the cache: what changes a reply.
    pub(crate) fn key(&self) -> Box<[u8]> {
        let mut key = Vec::with_capacity(self.name.wire().len() + 3);
        key.extend_from_slice(self.name.wire());
        key.extend_from_slice(&self.kind.to_be_bytes());
        key.push(u8::from(self.dnssec_ok) << 1 | u8::from(self.checking_disabled));
        key.into()
    }
}

/// Why a packet is not a reply to a question.
#[derive(Debug, PartialEq)]
pub(crate) enum Unusable {
    /// Another id or question: a late reply, or a forged one. The reply may still arrive.
    Foreign,
    /// The reply did not fit into a datagram.
    Truncated,
    Malformed,
}

/// A reply without its OPT record.
#[derive(Debug, PartialEq)]
pub(crate) struct Reply {
    bytes: Box<[u8]>,
    /// Response code.
    pub(crate) code: u16,
    /// Seconds that the reply may be kept; `None` forbids it.
    pub(crate) lifetime: Option<u32>,
}

impl Reply {
    /// Reads a packet that arrived from the upstream's address.
    ///
    /// # Errors
    ///
    /// The packet is not the reply to `question` with this id, is truncated or malformed.
    pub(crate) fn read(packet: &[u8], id: u16, question: &Question) -> Result<Reply, Unusable> {
        let (Some(bits), Some(counts)) = (wire::u16_at(packet, 2), wire::counts(packet)) else {
            return Err(Unusable::Foreign);
        };
        if wire::u16_at(packet, 0) != Some(id)
            || bits & (flag::RESPONSE | flag::OPCODE) != flag::RESPONSE
        {
            return Err(Unusable::Foreign);
        }
        let code = bits & flag::CODE;
        // Servers that do not know EDNS may return an error as a bare header.
        if counts == [0; 4] && code != code::NOERROR && packet.len() == HEADER {
            return Ok(Reply {
                bytes: packet.into(),
                code,
                lifetime: None,
            });
        }
        let records = question_end(packet, question).filter(|_| counts[0] == 1);
        let records = records.ok_or(Unusable::Foreign)?;
        if bits & flag::TRUNCATED != 0 {
            return Err(Unusable::Truncated);
        }
        read_records(packet, records, counts).ok_or(Unusable::Malformed)
    }

    /// Whether the upstream knows: the name has records, has none of this type, or does not exist.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self.code, code::NOERROR | code::NXDOMAIN)
    }

    /// Whether the reply has records that answer the question.
    pub(crate) fn is_positive(&self) -> bool {
        self.code == code::NOERROR && wire::u16_at(&self.bytes, 6) != Some(0)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The response to a query with this question. All records get `ttl` seconds, as in CoreDNS; `None` keeps their own.
    pub(crate) fn respond(&self, query: &Query, ttl: Option<u32>, limit: usize) -> Vec<u8> {
        let question = HEADER + query.name.wire().len() + 4;
        if self.bytes.len() < question {
            return query.error(self.code);
        }
        let mut response = Vec::with_capacity(self.bytes.len() + query.opt_length());
        response.extend_from_slice(&self.bytes);
        // Names that are compressed against the question get the client's case.
        response[HEADER..question - 4].copy_from_slice(query.name.wire());
        wire::set_u16(&mut response, 0, query.id);
        let mut bits = query.response_bits(self.code);
        if query.dnssec_ok() {
            bits |= wire::u16_at(&self.bytes, 2).unwrap_or_default() & flag::AUTHENTIC_DATA;
        }
        let room = limit.saturating_sub(query.opt_length());
        if response.len() > room {
            bits |= flag::TRUNCATED;
            self.cut(&mut response, question, room);
        }
        wire::set_u16(&mut response, 2, bits);
        if let Some(ttl) = ttl {
            let mut at = question;
            while let Some(frame) = wire::frame(&response, at) {
                response[frame.ttl_at..frame.ttl_at + 4].copy_from_slice(&ttl.to_be_bytes());
                at = frame.data.end;
            }
        }
        query.push_opt(&mut response, self.code);
        response
    }

    /// Keeps the answers that fit: old resolvers without TCP use these.
    fn cut(&self, response: &mut Vec<u8>, question: usize, room: usize) {
        let answers = wire::u16_at(&self.bytes, 6).unwrap_or_default();
        let (mut at, mut kept) = (question, 0);
        while kept < answers {
            match wire::frame(response, at) {
                Some(frame) if frame.data.end <= room => (at, kept) = (frame.data.end, kept + 1),
                _ => break,
            }
        }
        response.truncate(at);
        for (at, count) in [(6, kept), (8, 0), (10, 0)] {
            wire::set_u16(response, at, count);
        }
    }
}

/// The end of the question section if it is the expected one.
fn question_end(packet: &[u8], question: &Question) -> Option<usize> {
    let name = Name::read(packet.get(HEADER..)?)?;
    let at = HEADER + name.wire().len();
    let is_same = name.lowercase().wire() == question.name.wire()
        && wire::u16_at(packet, at)? == question.kind
        && wire::u16_at(packet, at + 2)? == CLASS_IN;
    is_same.then_some(at + 4)
}

fn read_records(packet: &[u8], records: usize, counts: [u16; 4]) -> Option<Reply> {
    let [_, answers, authorities, additionals] = counts;
    let mut at = records;
    let mut lifetime = None;
    let mut shorten = |ttl: u32| lifetime = Some(lifetime.map_or(ttl, |l: u32| l.min(ttl)));
    for _ in 0..answers {
        let frame = wire::frame(packet, at)?;
        at = frame.data.end;
        shorten(frame.ttl);
    }
    for _ in 0..authorities {
        let frame = wire::frame(packet, at)?;
        at = frame.data.end;
        // RFC 2308 section 5: the smaller of the SOA's TTL and its last field, MINIMUM.
        if frame.kind == kind::SOA {
            let minimum = wire::u32_at(packet, frame.data.end.checked_sub(4)?)?;
            shorten(frame.ttl.min(minimum));
        }
    }
    let (mut end, mut kept, mut extended) = (at, 0, 0);
    let mut opt: Option<Frame> = None;
    for _ in 0..additionals {
        let frame = wire::frame(packet, at)?;
        at = frame.data.end;
        match (frame.kind, &opt) {
            (kind::OPT, None) if frame.is_root => {
                extended = u16::from(frame.ttl.to_be_bytes()[0]);
                opt = Some(frame);
            }
            (kind::OPT, _) => return None,
            // Names after the OPT record could point to names after it, and the OPT record is removed.
            (_, Some(_)) => {}
            (_, None) => (end, kept) = (at, kept + 1),
        }
    }
    let mut bytes: Box<[u8]> = packet.get(..end)?.into();
    wire::set_u16(&mut bytes, 10, kept);
    let code = extended << 4 | (wire::u16_at(packet, 2)? & flag::CODE);
    let lifetime = match code {
        code::NOERROR | code::NXDOMAIN => {
            lifetime.map(|l| l.clamp(*LIFETIMES.start(), *LIFETIMES.end()))
        }
        code::SERVFAIL => Some(FAILURE_LIFETIME),
        _ => None,
    };
    // A TTL with the highest bit is zero (RFC 2181 section 8); the clamp bounds it, too.
    Some(Reply {
        bytes,
        code,
        lifetime,
    })
}

#[cfg(test)]
#[path = "reply_tests.rs"]
pub(crate) mod tests;
