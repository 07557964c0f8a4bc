//! Queries of clients: the content of a packet, and responses without records.

use crate::wire::{self, CLASS_IN, HEADER, Name, code, flag, kind};

/// UDP payload that a client can receive without EDNS (RFC 1035 section 4.2.1).
const MIN_PAYLOAD: usize = 512;
/// Largest UDP response and advertised payload: longer ones would be fragmented on common networks (RFC 9715).
pub(crate) const MAX_PAYLOAD: usize = 1232;
/// Bytes of an OPT record without options.
const OPT: usize = 11;
/// The DO bit in the TTL of an OPT record (RFC 3225).
const DNSSEC_OK: u32 = 0x8000;

/// What a client advertises in its OPT record (RFC 6891).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Edns {
    /// UDP payload in bytes.
    pub(crate) payload: u16,
    pub(crate) version: u8,
    pub(crate) dnssec_ok: bool,
}

/// How the client is connected, which limits the response.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Transport {
    Udp,
    Tcp,
}

/// A query with one question.
#[derive(Clone, Debug)]
pub(crate) struct Query {
    pub(crate) id: u16,
    pub(crate) recursion_desired: bool,
    pub(crate) checking_disabled: bool,
    /// The name with the client's case, which the response repeats.
    pub(crate) name: Name,
    pub(crate) lower: Name,
    pub(crate) kind: u16,
    pub(crate) class: u16,
    pub(crate) edns: Option<Edns>,
}

/// Why a packet is not answered with records.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Rejected {
    /// No response: the packet is too short or is itself a response, and answering could start a loop between two servers.
    Drop,
    /// The response is this message.
    Answer(Vec<u8>),
}

impl Query {
    /// Reads a packet.
    ///
    /// # Errors
    ///
    /// The packet is dropped or has an error as its response: another opcode (NOTIMP), a malformed message or several questions
    /// (FORMERR, RFC 9619), an EDNS version that is not 0 (BADVERS).
    pub(crate) fn read(packet: &[u8]) -> Result<Query, Rejected> {
        let (Some(id), Some(bits), Some(counts)) = (
            wire::u16_at(packet, 0),
            wire::u16_at(packet, 2),
            wire::counts(packet),
        ) else {
            return Err(Rejected::Drop);
        };
        if bits & flag::RESPONSE != 0 {
            return Err(Rejected::Drop);
        }
        let error = |code| Rejected::Answer(error_without_question(id, bits, code));
        if bits & flag::OPCODE != 0 {
            return Err(error(code::NOTIMP));
        }
        let query = Query::read_sections(packet, id, bits, counts).ok_or(error(code::FORMERR))?;
        match query.edns {
            Some(edns) if edns.version != 0 => Err(Rejected::Answer(query.error(code::BADVERS))),
            _ => Ok(query),
        }
    }

    fn read_sections(packet: &[u8], id: u16, bits: u16, counts: [u16; 4]) -> Option<Query> {
        let [1, 0, authorities, additionals] = counts else {
            return None;
        };
        let name = Name::read(&packet[HEADER..])?;
        let mut at = HEADER + name.wire().len();
        let mut query = Query {
            id,
            recursion_desired: bits & flag::RECURSION_DESIRED != 0,
            checking_disabled: bits & flag::CHECKING_DISABLED != 0,
            name,
            lower: name.lowercase(),
            kind: wire::u16_at(packet, at)?,
            class: wire::u16_at(packet, at + 2)?,
            edns: None,
        };
        at += 4;
        for n in 0..u32::from(authorities) + u32::from(additionals) {
            let frame = wire::frame(packet, at)?;
            at = frame.data.end;
            if frame.kind != kind::OPT {
                continue;
            }
            // RFC 6891 section 6.1.1: one OPT at most, in the additional section, with the root as its name.
            if query.edns.is_some() || n < u32::from(authorities) || !frame.is_root {
                return None;
            }
            query.edns = Some(Edns {
                payload: frame.class,
                version: frame.ttl.to_be_bytes()[1],
                dnssec_ok: frame.ttl & DNSSEC_OK != 0,
            });
        }
        Some(query)
    }

    /// Whether the class is that of all records of this server.
    pub(crate) fn is_internet(&self) -> bool {
        self.class == CLASS_IN
    }

    pub(crate) fn dnssec_ok(&self) -> bool {
        self.edns.is_some_and(|edns| edns.dnssec_ok)
    }

    /// Largest response in bytes, with its OPT record.
    pub(crate) fn limit(&self, transport: Transport) -> usize {
        match transport {
            Transport::Tcp => usize::from(u16::MAX),
            Transport::Udp => {
                let payload = self
                    .edns
                    .map_or(MIN_PAYLOAD, |edns| usize::from(edns.payload));
                payload.clamp(MIN_PAYLOAD, MAX_PAYLOAD)
            }
        }
    }

    /// Bytes of the OPT record that the response needs.
    pub(crate) fn opt_length(&self) -> usize {
        if self.edns.is_some() { OPT } else { 0 }
    }

    /// Adds the OPT record of a response if the query has one. `response_code` is the whole code, of which the header has the
    /// lower four bits.
    pub(crate) fn push_opt(&self, response: &mut Vec<u8>, response_code: u16) {
        let Some(edns) = self.edns else { return };
        response.push(0);
        response.extend_from_slice(&kind::OPT.to_be_bytes());
        response.extend_from_slice(&(MAX_PAYLOAD as u16).to_be_bytes());
        let flags = if edns.dnssec_ok { DNSSEC_OK } else { 0 };
        let ttl = u32::from(response_code >> 4) << 24 | flags;
        response.extend_from_slice(&ttl.to_be_bytes());
        response.extend_from_slice(&[0, 0]);
        let additionals = wire::u16_at(response, 10).unwrap_or_default();
        wire::set_u16(response, 10, additionals.saturating_add(1));
    }

    /// The header's bits of a response, without AA, TC and AD.
    pub(crate) fn response_bits(&self, response_code: u16) -> u16 {
        let mut bits = flag::RESPONSE | flag::RECURSION_AVAILABLE | (response_code & flag::CODE);
        if self.recursion_desired {
            bits |= flag::RECURSION_DESIRED;
        }
        if self.checking_disabled {
            bits |= flag::CHECKING_DISABLED;
        }
        bits
    }

    /// A response with the question and no records.
    pub(crate) fn error(&self, response_code: u16) -> Vec<u8> {
        let mut response = Vec::with_capacity(HEADER + self.name.wire().len() + 4 + OPT);
        response.extend_from_slice(&self.id.to_be_bytes());
        response.extend_from_slice(&self.response_bits(response_code).to_be_bytes());
        response.extend_from_slice(&[0, 1, 0, 0, 0, 0, 0, 0]);
        self.push_question(&mut response);
        self.push_opt(&mut response, response_code);
        response
    }

    /// Adds the question with the client's case.
    pub(crate) fn push_question(&self, message: &mut Vec<u8>) {
        message.extend_from_slice(self.name.wire());
        message.extend_from_slice(&self.kind.to_be_bytes());
        message.extend_from_slice(&self.class.to_be_bytes());
    }
}

/// A query for an upstream, with recursion and the largest payload. Without `edns`, for servers that do not know it.
pub(crate) fn for_upstream(
    id: u16,
    name: &Name,
    kind: u16,
    checking_disabled: bool,
    edns: Option<bool>,
) -> Vec<u8> {
    let query = Query {
        id,
        recursion_desired: true,
        checking_disabled,
        name: *name,
        lower: *name,
        kind,
        class: CLASS_IN,
        edns: edns.map(|dnssec_ok| Edns {
            payload: MAX_PAYLOAD as u16,
            version: 0,
            dnssec_ok,
        }),
    };
    let mut message = query.error(code::NOERROR);
    let bits = query.response_bits(0) & !(flag::RESPONSE | flag::RECURSION_AVAILABLE);
    wire::set_u16(&mut message, 2, bits);
    message
}

fn error_without_question(id: u16, bits: u16, response_code: u16) -> Vec<u8> {
    let kept = bits & (flag::OPCODE | flag::RECURSION_DESIRED);
    let mut response = Vec::with_capacity(HEADER);
    response.extend_from_slice(&id.to_be_bytes());
    response.extend_from_slice(&(flag::RESPONSE | kept | response_code).to_be_bytes());
    response.extend_from_slice(&[0; 8]);
    response
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use hickory_proto::op::{Edns as HickoryEdns, Message};
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// A query as a client sends it.
    pub(crate) fn query(name: &str, kind: u16) -> Query {
        let name = Name::parse(name).unwrap();
        Query::read(&for_upstream(7, &name, kind, false, None)).unwrap()
    }

    fn packet(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let name = Name::parse("Web.Default.svc").unwrap();
        let mut packet = for_upstream(7, &name, kind::A, false, Some(true));
        change(&mut packet);
        packet
    }

    #[test]
    fn packets_are_read_dropped_or_answered_with_an_error() {
        let read = Query::read(&packet(|_| ())).unwrap();
        assert_eq!(read.name.to_string(), "Web.Default.svc.");
        assert_eq!(read.lower.to_string(), "web.default.svc.");
        assert_eq!((read.id, read.kind, read.class), (7, kind::A, CLASS_IN));
        assert!(read.dnssec_ok() && read.recursion_desired);
        assert_eq!(read.limit(Transport::Udp), MAX_PAYLOAD);
        let second_opt = |p: &mut Vec<u8>| {
            let opt = p[p.len() - OPT..].to_vec();
            p.extend(opt);
            p[11] = 2;
        };
        let cases: [(&str, Vec<u8>, Option<u16>); 9] = [
            ("short", packet(|p| p.truncate(11)), None),
            ("a response", packet(|p| p[2] |= 0x80), None),
            ("an update", packet(|p| p[2] |= 5 << 3), Some(code::NOTIMP)),
            ("no question", packet(|p| p[5] = 0), Some(code::FORMERR)),
            ("two questions", packet(|p| p[5] = 2), Some(code::FORMERR)),
            ("cut", packet(|p| p.truncate(20)), Some(code::FORMERR)),
            (
                "a pointer to itself",
                packet(|p| p[12..14].copy_from_slice(&[0xc0, 12])),
                Some(code::FORMERR),
            ),
            ("two OPT records", packet(second_opt), Some(code::FORMERR)),
            (
                "EDNS version 1",
                packet(|p| {
                    let at = p.len() - 5;
                    p[at] = 1;
                }),
                Some(code::BADVERS),
            ),
        ];
        for (case, bytes, expected) in cases {
            let found = match Query::read(&bytes) {
                Err(Rejected::Drop) => None,
                Err(Rejected::Answer(response)) => {
                    let message = Message::from_vec(&response).unwrap();
                    assert_eq!(message.metadata.id, 7, "{case}");
                    Some(u16::from(message.metadata.response_code))
                }
                Ok(query) => panic!("{case}: {query:?}"),
            };
            assert_eq!(found, expected, "{case}");
        }
    }

    #[test]
    fn the_response_limit_follows_the_client() {
        let limit = |payload: Option<u16>, transport| {
            let mut query = query("a", kind::A);
            query.edns = payload.map(|payload| Edns {
                payload,
                version: 0,
                dnssec_ok: false,
            });
            query.limit(transport)
        };
        assert_eq!(limit(None, Transport::Udp), 512);
        assert_eq!(limit(Some(0), Transport::Udp), 512);
        assert_eq!(limit(Some(1000), Transport::Udp), 1000);
        assert_eq!(limit(Some(65535), Transport::Udp), MAX_PAYLOAD);
        assert_eq!(limit(None, Transport::Tcp), 65535);
    }

    proptest! {
        #[test]
        fn any_packet_is_read_without_a_panic(bytes in vec(any::<u8>(), 0..300)) {
            if let Err(Rejected::Answer(response)) = Query::read(&bytes) {
                prop_assert!(Message::from_vec(&response).is_ok());
            }
        }

        #[test]
        fn any_changed_packet_is_read_without_a_panic(changes in vec((0_usize..60, any::<u8>()), 0..4), cut in 0_usize..80) {
            let bytes = packet(|p| {
                p.truncate(cut.max(12));
                for (at, byte) in changes {
                    if let Some(old) = p.get_mut(at) { *old = byte; }
                }
            });
            match Query::read(&bytes) {
                // hickory-proto reads the same question.
                Ok(query) => {
                    let message = Message::from_vec(&bytes);
                    if let Ok(message) = message {
                        prop_assert_eq!(message.queries.len(), 1);
                        prop_assert_eq!(u16::from(message.queries[0].query_type), query.kind);
                        prop_assert_eq!(message.edns.as_ref().map(HickoryEdns::version), query.edns.map(|e| e.version));
                    }
                }
                Err(Rejected::Answer(response)) => prop_assert!(Message::from_vec(&response).is_ok()),
                Err(Rejected::Drop) => {}
            }
        }
    }
}
