//! Names outside of the cluster: a cache in front of the node's name servers.
//!
//! Identical questions share one query ([`Forwarder::resolve`]). A query is repeated, at the next upstream if there is one, while
//! the first reply still may arrive. The number of waiting queries is limited, in total and by client. All work ends
//! before a client's usual timeout of 5 s.

mod admission;
pub(crate) mod cache;
mod exchange;
pub(crate) mod reply;
pub(crate) mod upstreams;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep_until, timeout};
use tracing::debug;

use admission::Admission;
use cache::{Bounds, Cache, Hit, STALE_TTL};
use reply::{Question, Reply};
use upstreams::{Upstream, Upstreams};

use crate::random::Random;
use crate::wire::{Name, kind};

/// When a query is repeated, counted from the first one. Upstreams are mostly near: a reply that takes longer was lost.
const REPEATS: [Duration; 3] = [
    Duration::from_millis(500),
    Duration::from_millis(1500),
    Duration::from_millis(3000),
];
/// The time for all attempts. Resolvers of clients wait 5 s by default (resolv.conf(5)).
const DEADLINE: Duration = Duration::from_millis(4500);
/// How much longer a client waits for a query that reaches its deadline.
const MARGIN: Duration = Duration::from_millis(200);
/// How long a client waits before it gets an expired reply (RFC 8767 section 5).
const STALE_DEADLINE: Duration = Duration::from_millis(1800);
/// Most distinct questions at the upstreams. Admission allows fewer clients, but a refresh continues after its client got an
/// expired reply.
const MAX_FLIGHTS: usize = 2048;
/// Bounds of replies with records: 10,000 as CoreDNS, and memory.
const POSITIVE: Bounds = Bounds {
    entries: 10_000,
    bytes: 3 << 20,
};
/// Bounds of all other replies.
const NEGATIVE: Bounds = Bounds {
    entries: 4000,
    bytes: 1 << 20,
};

/// A reply for a client, with the TTL of its records.
pub(crate) type Answered = (Arc<Reply>, Option<u32>);

/// Result of a flight; `None` while it lasts.
type Outcome = Option<Result<Arc<Reply>, Failed>>;

/// No upstream gave a reply.
#[derive(Clone, Copy, Debug)]
struct Failed;

/// The forwarder. Shared by all tasks of the server.
pub(crate) struct Forwarder {
    cache: Mutex<Cache>,
    flights: Mutex<HashMap<Box<[u8]>, watch::Receiver<Outcome>>>,
    admission: Mutex<Admission>,
    upstreams: Upstreams,
    random: Random,
}

/// A place among the waiting queries.
pub(crate) struct Permit {
    forwarder: Arc<Forwarder>,
    client: IpAddr,
}

impl Drop for Permit {
    fn drop(&mut self) {
        lock(&self.forwarder.admission).release(self.client);
    }
}

/// The entry of a question in `flights`. Removed also if the task panics.
struct Flight {
    forwarder: Arc<Forwarder>,
    key: Box<[u8]>,
}

impl Drop for Flight {
    fn drop(&mut self) {
        lock(&self.forwarder.flights).remove(&self.key);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // None of the locked values is left half changed by a panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Forwarder {
    pub(crate) fn new(upstreams: Upstreams) -> Forwarder {
        Forwarder {
            cache: Mutex::new(Cache::new(POSITIVE, NEGATIVE)),
            flights: Mutex::default(),
            admission: Mutex::default(),
            upstreams,
            random: Random::new(),
        }
    }

    /// A reply that needs no waiting.
    pub(crate) fn cached(&self, question: &Question) -> Option<Answered> {
        self.look_up(&question.key()).ok()
    }

    /// A reply to send now, or an expired reply to send if the upstreams do not reply in time.
    fn look_up(&self, key: &[u8]) -> Result<Answered, Option<Arc<Reply>>> {
        match lock(&self.cache).get(key, Instant::now()) {
            Hit::Fresh(reply, seconds) => Ok((reply, Some(seconds))),
            Hit::Stale { reply, refresh } if reply.is_final() => {
                if refresh {
                    Err(Some(reply))
                } else {
                    Ok((reply, Some(STALE_TTL)))
                }
            }
            Hit::Stale { .. } | Hit::Miss => Err(None),
        }
    }

    /// Takes a place for a query that has to wait. `None` if the client or the server has too many.
    pub(crate) fn admit(self: &Arc<Self>, client: IpAddr) -> Option<Permit> {
        lock(&self.admission).admit(client).then(|| Permit {
            forwarder: self.clone(),
            client,
        })
    }

    /// Whether a query is this server's own probe, which an upstream has sent back.
    pub(crate) fn note_probe(&self, name: &Name) -> bool {
        self.upstreams.note_probe(name, Instant::now())
    }

    /// Answers from the cache or the upstreams. `None` if no upstream replies.
    pub(crate) async fn resolve(self: &Arc<Self>, question: Question) -> Option<Answered> {
        let key = question.key();
        let stale = match self.look_up(&key) {
            Ok(answered) => return Some(answered),
            Err(stale) => stale,
        };
        let wait = if stale.is_some() {
            STALE_DEADLINE
        } else {
            DEADLINE + MARGIN
        };
        let outcome = match self.join(key, question) {
            Some(mut flight) => {
                let ended = timeout(wait, flight.wait_for(Option::is_some)).await;
                ended
                    .ok()
                    .and_then(Result::ok)
                    .and_then(|outcome| outcome.clone())
            }
            None => None,
        };
        match (outcome, stale) {
            (Some(Ok(reply)), stale) if reply.is_final() || stale.is_none() => {
                let ttl = reply.lifetime;
                Some((reply, ttl))
            }
            (_, Some(stale)) => Some((stale, Some(STALE_TTL))),
            (_, None) => None,
        }
    }

    /// Joins the query for the same question, or starts one. If an upstream forwards to this server, its query joins the one that
    /// caused it, so a loop cannot grow.
    fn join(
        self: &Arc<Self>,
        key: Box<[u8]>,
        question: Question,
    ) -> Option<watch::Receiver<Outcome>> {
        let mut flights = lock(&self.flights);
        if let Some(flight) = flights.get(&key) {
            return Some(flight.clone());
        }
        if flights.len() >= MAX_FLIGHTS {
            return None;
        }
        let (sender, receiver) = watch::channel(None);
        flights.insert(key.clone(), receiver.clone());
        let flight = Flight {
            forwarder: self.clone(),
            key,
        };
        tokio::spawn(async move {
            let outcome = flight.forwarder.fetch(question).await;
            flight.forwarder.store(&flight.key, &outcome);
            // The flight is removed after its reply is in the cache, so that no other query is sent in between.
            drop(flight);
            sender.send_replace(Some(outcome));
        });
        Some(receiver)
    }

    fn store(&self, key: &[u8], outcome: &Result<Arc<Reply>, Failed>) {
        let now = Instant::now();
        let mut cache = lock(&self.cache);
        match outcome {
            Ok(reply) if reply.is_final() => cache.insert(key, reply.clone(), now),
            Ok(reply) => {
                if !cache.defer(key, now) {
                    cache.insert(key, reply.clone(), now);
                }
            }
            Err(Failed) => {
                cache.defer(key, now);
            }
        }
    }

    /// Queries the upstreams. The first final reply wins; else the last error that an upstream sent.
    async fn fetch(self: &Arc<Self>, question: Question) -> Result<Arc<Reply>, Failed> {
        let start = Instant::now();
        let order = self.upstreams.of(&question.name, start);
        let mut attempts = Attempts::new(self.clone(), order, question);
        let mut last = Err(Failed);
        let mut repeats = REPEATS.iter();
        let mut repeat_at = start;
        let deadline = start + DEADLINE;
        loop {
            // An error that an upstream sent is not repeated; an upstream without a reply is queried again.
            let is_refused = attempts.running.is_empty() && last.is_ok();
            if attempts.order.is_empty() || is_refused {
                return last;
            }
            tokio::select! {
                biased;
                Some(ended) = attempts.running.join_next() => {
                    let Ok((upstream, result)) = ended else { continue };
                    match result {
                        Ok(reply) if reply.is_final() => {
                            upstream.set_failed(None);
                            return Ok(Arc::new(reply));
                        }
                        Ok(reply) => {
                            upstream.set_failed(Some(Instant::now()));
                            last = Ok(Arc::new(reply));
                        }
                        Err(e) => {
                            debug!(upstream = %upstream.address, name = %question.name, "DNS upstream failed: {e}");
                            upstream.set_failed(Some(Instant::now()));
                        }
                    }
                    attempts.start_untried();
                }
                () = sleep_until(repeat_at.into()) => {
                    if let Some(slow) = attempts.last_upstream() {
                        slow.set_failed(Some(Instant::now()));
                    }
                    if Instant::now() >= deadline {
                        return last;
                    }
                    attempts.start_next();
                    repeat_at = repeats.next().map_or(deadline, |after| start + *after);
                }
            }
        }
    }

    /// Checks once whether an upstream forwards to this server. The reply does not matter.
    fn probe(self: &Arc<Self>, upstream: Arc<Upstream>) {
        let forwarder = self.clone();
        tokio::spawn(async move {
            let question = Question {
                name: upstream.probe,
                kind: kind::HINFO,
                dnssec_ok: false,
                checking_disabled: false,
            };
            let probe = exchange::exchange(upstream.address, &question, &forwarder.random);
            let _ended = timeout(DEADLINE, probe).await;
        });
    }
}

/// The attempts of one question. Dropping them cancels the outstanding ones.
struct Attempts {
    forwarder: Arc<Forwarder>,
    order: Vec<Arc<Upstream>>,
    question: Question,
    started: usize,
    running: JoinSet<(Arc<Upstream>, io::Result<Reply>)>,
}

impl Attempts {
    fn new(forwarder: Arc<Forwarder>, order: Vec<Arc<Upstream>>, question: Question) -> Attempts {
        Attempts {
            forwarder,
            order,
            question,
            started: 0,
            running: JoinSet::new(),
        }
    }

    fn last_upstream(&self) -> Option<&Arc<Upstream>> {
        let last = self.started.checked_sub(1)?;
        self.order.get(last.checked_rem(self.order.len())?)
    }

    /// Starts an attempt at an upstream that had none.
    fn start_untried(&mut self) {
        if self.started < self.order.len() {
            self.start_next();
        }
    }

    fn start_next(&mut self) {
        let next = self.started.checked_rem(self.order.len());
        let Some(upstream) = next.and_then(|n| self.order.get(n)).cloned() else {
            return;
        };
        self.started += 1;
        if upstream.take_probe() {
            self.forwarder.probe(upstream.clone());
        }
        let (forwarder, question) = (self.forwarder.clone(), self.question);
        self.running.spawn(async move {
            let reply = exchange::exchange(upstream.address, &question, &forwarder.random).await;
            (upstream, reply)
        });
    }
}

/// Whether an upstream's address is one that queries can be sent to.
pub(crate) fn is_usable_address(address: &SocketAddr) -> bool {
    address.port() != 0 && !address.ip().is_unspecified() && !address.ip().is_multicast()
}
