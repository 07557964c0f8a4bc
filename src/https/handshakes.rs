//! Limits work that costs processor time and that any client can cause: TLS handshakes.
//!
//! Otherwise thousands of simultaneous handshakes would precede every request of authenticated clients in the runtime's
//! queue. Each step of a handshake takes a turn. There are fewer turns than processors, and none is taken while the
//! peer is awaited. Sources take turns one after the other, so a source that begins thousands of handshakes delays only
//! itself. Within a source the newest goes first, because the client of an old one has most likely given up.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use tokio::sync::oneshot;

/// The origin of a connection: an IPv4 address, or the network of an IPv6 address, because one host may own the whole
/// network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Source(IpAddr);

impl From<IpAddr> for Source {
    fn from(address: IpAddr) -> Source {
        Source(match address.to_canonical() {
            IpAddr::V6(ip) => IpAddr::V6((ip.to_bits() >> 64 << 64).into()),
            v4 => v4,
        })
    }
}

/// Limits the concurrent handshakes of one listener.
pub(super) struct HandshakeLimiter(Mutex<State>);

struct State {
    free: usize,
    /// The sources in the order in which they get a turn, each with its waiting tasks, the newest last.
    waiting: VecDeque<(Source, Vec<oneshot::Sender<Turn>>)>,
}

/// A turn, which is passed to the next task when it is dropped.
struct Turn(Option<Arc<HandshakeLimiter>>);

impl HandshakeLimiter {
    pub fn new(count: usize) -> Arc<HandshakeLimiter> {
        Arc::new(HandshakeLimiter(Mutex::new(State {
            free: count,
            waiting: VecDeque::new(),
        })))
    }

    /// Leaves processors for other work: there are turns for half of them, but at least one.
    pub(crate) fn for_this_machine() -> Arc<HandshakeLimiter> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self::new((processors / 2).max(1))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn take(self: &Arc<Self>, source: Source) -> Option<Turn> {
        let receiver = {
            let mut state = self.state();
            if state.free > 0 {
                state.free -= 1;
                return Some(Turn(Some(Arc::clone(self))));
            }
            let (sender, receiver) = oneshot::channel();
            match state.waiting.iter_mut().find(|(s, _)| *s == source) {
                Some((_, senders)) => {
                    // Tasks that have given up are removed from time to time, so that they do not pile up below the
                    // newest.
                    if senders.len() == senders.capacity() {
                        senders.retain(|s| !s.is_closed());
                    }
                    senders.push(sender);
                }
                None => state.waiting.push_back((source, vec![sender])),
            }
            receiver
        };
        receiver.await.ok()
    }

    /// Passes a turn to the newest task of the next source.
    fn pass(self: Arc<Self>) {
        let mut turn = Turn(Some(Arc::clone(&self)));
        loop {
            let next = {
                let mut state = self.state();
                let Some((source, mut senders)) = state.waiting.pop_front() else {
                    state.free += 1;
                    turn.0 = None;
                    return;
                };
                let next = senders.pop();
                if !senders.is_empty() {
                    state.waiting.push_back((source, senders));
                }
                next
            };
            let Some(next) = next else { continue };
            match next.send(turn) {
                Ok(()) => return,
                // The task has given up.
                Err(back) => turn = back,
            }
        }
    }

    /// Runs `work` in turns: each of its steps waits for a turn, and releases it whether or not the work is done.
    pub async fn run<F: Future>(self: &Arc<Self>, source: Source, work: F) -> F::Output {
        let mut work = pin!(work);
        loop {
            let turn = self.take(source).await;
            let step = std::future::poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await;
            drop(turn);
            if let Poll::Ready(output) = step {
                return output;
            }
            // The step has registered a waker for the time when the work can continue.
            let mut slept = false;
            std::future::poll_fn(|_| {
                if std::mem::replace(&mut slept, true) {
                    Poll::Ready(())
                } else {
                    Poll::Pending
                }
            })
            .await;
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(limiter) = self.0.take() {
            limiter.pass();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(last: u8) -> Source {
        IpAddr::from([10, 0, 0, last]).into()
    }

    #[tokio::test]
    async fn sources_alternate_and_the_newest_handshake_of_a_source_is_first() {
        let limiter = HandshakeLimiter::new(1);
        let held = limiter.take(source(9)).await;
        let order = Arc::new(Mutex::new(vec![]));
        let mut tasks = vec![];
        for (from, name) in [
            (1, "a1"),
            (1, "a2"),
            (1, "a3"),
            (1, "a4"),
            (2, "b1"),
            (3, "c1"),
        ] {
            let (limiter, order) = (Arc::clone(&limiter), Arc::clone(&order));
            tasks.push(tokio::spawn(async move {
                let turn = limiter.take(source(from)).await;
                order.lock().expect("not poisoned").push(name);
                drop(turn);
            }));
            tokio::task::yield_now().await;
        }
        // A task that gives up consumes no turn.
        tasks.remove(2).abort();
        tokio::task::yield_now().await;
        drop(held);
        for task in tasks {
            task.await.expect("not cancelled");
        }
        let order = order.lock().expect("not poisoned").clone();
        assert_eq!(order, ["a4", "b1", "c1", "a2", "a1"]);
        assert_eq!(limiter.state().free, 1, "no turn is lost");
    }

    #[tokio::test]
    async fn no_turn_is_held_while_the_peer_is_awaited() {
        let limiter = HandshakeLimiter::new(1);
        let (go, gone) = oneshot::channel::<()>();
        let slow = tokio::spawn({
            let limiter = Arc::clone(&limiter);
            async move { limiter.run(source(1), gone).await }
        });
        tokio::task::yield_now().await;
        assert_eq!(limiter.run(source(2), async { 7 }).await, 7);
        go.send(()).expect("it waits");
        slow.await.expect("ended").expect("sent");
        assert_eq!(limiter.state().free, 1);
    }

    #[test]
    fn an_ipv6_network_is_one_source() {
        let source = |text: &str| Source::from(text.parse::<IpAddr>().expect("an address"));
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:2"));
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
        assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
        assert_ne!(source("10.0.0.2"), source("10.0.0.1"));
    }
}
