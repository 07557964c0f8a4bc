//! Decides how a packet is answered: at once, from the records or the cache, or after a query to an upstream.

use std::net::IpAddr;
use std::sync::Arc;

use hickory_proto::op::Message;
use tracing::debug;

use crate::answer::{self, Answer};
use crate::forward::reply::Question;
use crate::forward::{Forwarder, Permit};
use crate::message::encode;
use crate::query::{Query, Rejected, Transport};
use crate::wire::{Name, code, kind};
use crate::zone::Zone;

/// Query types from 128 to 255 ask for no records (RFC 6895 section 3.1): zone transfers, signatures of messages, ANY.
const META_KINDS: std::ops::RangeInclusive<u16> = 128..=255;

/// Answers packets of all transports.
pub(crate) struct Responder {
    zone: Zone,
    forwarder: Arc<Forwarder>,
}

/// What to do with a packet.
pub(crate) enum Step {
    /// No response.
    Drop,
    /// Send this message.
    Send(Vec<u8>),
    /// Call [`Responder::finish`] in a task.
    Wait(Box<Waiting>),
}

/// A query that waits for an upstream.
pub(crate) struct Waiting {
    query: Query,
    transport: Transport,
    permit: Permit,
    work: Work,
}

enum Work {
    Forward,
    /// Complete an answer whose last CNAME points out of the cluster.
    Chase(Box<(Answer, Name)>),
}

impl Responder {
    pub(crate) fn new(zone: Zone, forwarder: Arc<Forwarder>) -> Responder {
        Responder { zone, forwarder }
    }

    /// Answers a packet, or says what is missing.
    pub(crate) fn respond(&self, packet: &[u8], client: IpAddr, transport: Transport) -> Step {
        let query = match Query::read(packet) {
            Ok(query) => query,
            Err(Rejected::Drop) => return Step::Drop,
            Err(Rejected::Answer(response)) => return Step::Send(response),
        };
        let limit = query.limit(transport);
        if !query.is_internet() || META_KINDS.contains(&query.kind) || query.kind == kind::OPT {
            // RFC 8482: a short answer, because many records would amplify an attack.
            let is_any = query.is_internet() && query.kind == kind::ANY;
            return Step::Send(match is_any {
                true => encode(&query, answer::answer_any(&query), limit),
                false => query.error(code::REFUSED),
            });
        }
        if query.kind == kind::HINFO && self.forwarder.note_probe(&query.lower) {
            return Step::Send(query.error(code::REFUSED));
        }
        // The client's id is a fair number for the rotation of addresses.
        let found = answer::answer(&self.zone.read(), &query, usize::from(query.id), limit);
        let work = match found {
            Some(mut answer) => match answer.chase.take() {
                None => return Step::Send(encode(&query, answer, limit)),
                Some(target) => Work::Chase(Box::new((answer, target))),
            },
            None => {
                if let Some((reply, ttl)) = self.forwarder.cached(&Question::of(&query)) {
                    return Step::Send(reply.respond(&query, ttl, limit));
                }
                if !query.recursion_desired {
                    return Step::Send(query.error(code::REFUSED));
                }
                Work::Forward
            }
        };
        match self.forwarder.admit(client) {
            Some(permit) => Step::Wait(Box::new(Waiting {
                query,
                transport,
                permit,
                work,
            })),
            None => {
                debug!(%client, name = %query.lower, "too many DNS queries of this client wait for upstreams");
                Step::Send(query.error(code::SERVFAIL))
            }
        }
    }

    /// Queries the upstreams and returns the response.
    pub(crate) async fn finish(&self, waiting: Box<Waiting>) -> Vec<u8> {
        let Waiting {
            query,
            transport,
            permit,
            work,
        } = *waiting;
        let limit = query.limit(transport);
        let response = match work {
            Work::Forward => match self.forwarder.resolve(Question::of(&query)).await {
                Some((reply, ttl)) => reply.respond(&query, ttl, limit),
                None => query.error(code::SERVFAIL),
            },
            Work::Chase(work) => {
                let (mut answer, target) = *work;
                self.chase(&query, &mut answer, target).await;
                encode(&query, answer, limit)
            }
        };
        drop(permit);
        response
    }

    /// Adds the records of an external name. The response code is the one of the last name (RFC 6604).
    async fn chase(&self, query: &Query, answer: &mut Answer, target: Name) {
        let question = Question {
            name: target.lowercase(),
            ..Question::of(query)
        };
        let resolved = self.forwarder.resolve(question).await;
        let message =
            resolved.map(|(reply, ttl)| (Message::from_vec(reply.bytes()), ttl, reply.code));
        let Some((Ok(message), ttl, response_code)) = message else {
            answer.code = code::SERVFAIL;
            return;
        };
        answer.code = response_code;
        for mut record in message.answers {
            record.ttl = ttl.unwrap_or(record.ttl);
            answer.answers.push(record);
        }
    }
}
