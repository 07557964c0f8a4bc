//! The open connections of a listener, and which of them are closed to make room for new ones.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::Limits;
use super::handshakes::Source;

/// The part of a listener's connections that are closed at once to make room.
const CLOSED_FRACTION: usize = 64;
/// How often connections are checked again if none of them may be closed.
const RECHECK: Duration = Duration::from_millis(100);
/// How long a new connection may take for its first request before it counts as idle, and a request's body may take to
/// arrive before the connection counts as slow.
pub(super) const NEW_CONNECTION_GRACE: Duration = Duration::from_secs(1);

/// The connections of one listener.
#[derive(Default)]
pub(super) struct Connections {
    open: Mutex<BTreeMap<u64, Connection>>,
    closed: Notify,
}

/// An open connection.
pub(super) struct Connection {
    /// Shared by the requests in progress: there are some if it has more than one owner.
    busy: Arc<()>,
    /// Shared, in the same way, by the requests whose body has not arrived yet.
    receiving: Arc<()>,
    /// Whether an authenticated client has sent a request on it.
    authenticated: bool,
    /// When its last request began, or when it was opened.
    since: Instant,
    source: Source,
    task: AbortHandle,
}

impl Connection {
    pub(super) fn new(source: Source, task: AbortHandle) -> Connection {
        Connection {
            busy: Arc::default(),
            receiving: Arc::default(),
            authenticated: false,
            since: Instant::now(),
            source,
            task,
        }
    }

    /// The connection with the lowest value is closed first to make room; `None` if it must stay.
    fn priority(&self, limits: Limits) -> Option<u8> {
        let in_progress = Arc::strong_count(&self.busy) - 1;
        let new = self.since.elapsed() < NEW_CONNECTION_GRACE;
        if in_progress == 0 {
            // A new connection gets time for its first request. Between two requests of an authenticated client, the
            // next one may be in transit.
            Some(match limits.evict_unauthenticated {
                true if self.authenticated => 4,
                true if new => 3,
                _ => 0,
            })
        } else if Arc::strong_count(&self.receiving) > in_progress && !new {
            Some(1)
        } else {
            (limits.evict_unauthenticated && !self.authenticated).then_some(2)
        }
    }
}

impl Connections {
    pub(super) fn all(&self) -> MutexGuard<'_, BTreeMap<u64, Connection>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for one more connection. If there are too many, some with the lowest value are closed. So a client
    /// that merely keeps connections open does not exclude others.
    pub(super) async fn make_room(&self, limits: Limits) {
        loop {
            let closed = self.closed.notified();
            {
                let mut all = self.all();
                if all.len() < limits.connections || close_lowest_priority(&mut all, limits) {
                    return;
                }
            }
            // Time also makes a connection closable, and the end of its request does.
            let _ = tokio::time::timeout(RECHECK, closed).await;
        }
    }

    /// Begins a request, which lasts as long as the returned value.
    pub(super) fn begin(&self, id: u64) -> Option<Arc<()>> {
        let mut all = self.all();
        let connection = all.get_mut(&id)?;
        connection.since = Instant::now();
        Some(Arc::clone(&connection.busy))
    }

    fn end(&self, id: u64) {
        self.all().remove(&id);
        self.closed.notify_waiters();
    }
}

/// Closes connections with the lowest value, and of these the oldest; returns whether there were any. Several are closed
/// at once, because all connections are read: a burst of new ones would otherwise read thousands for each, and
/// every request in progress would wait for the lock.
fn close_lowest_priority(all: &mut BTreeMap<u64, Connection>, limits: Limits) -> bool {
    let mut held: BTreeMap<Source, usize> = BTreeMap::new();
    for connection in all.values() {
        *held.entry(connection.source).or_default() += 1;
    }
    let half = limits.connections / 2;
    let large_client = held.into_iter().find(|(_, count)| *count > half);
    let mut at_once = (limits.connections / CLOSED_FRACTION).max(1);
    if let Some((_, count)) = large_client {
        at_once = at_once.min(count - half);
    }
    let small_client = |c: &Connection| large_client.is_none_or(|(source, _)| source != c.source);
    let value = |c: &Connection| Some((small_client(c), c.priority(limits)?));
    let mut closable: Vec<_> = all
        .iter()
        .filter_map(|(id, c)| Some((value(c)?, c.since, *id)))
        .collect();
    let Some(least) = closable.iter().map(|(value, ..)| *value).min() else {
        return false;
    };
    closable.retain(|(value, ..)| *value == least);
    closable.sort_unstable();
    for (.., id) in closable.into_iter().take(at_once) {
        if let Some(connection) = all.remove(&id) {
            connection.task.abort();
        }
    }
    true
}

/// A connection's entry among the others; every request has it among its extensions.
#[derive(Clone)]
pub struct ConnectionSlot {
    pub(super) connections: Arc<Connections>,
    pub(super) id: u64,
}

impl ConnectionSlot {
    /// Marks the connection as authenticated: it is not closed to make room while it is busy.
    pub fn mark_authenticated(&self) {
        if let Some(connection) = self.connections.all().get_mut(&self.id) {
            connection.authenticated = true;
        }
    }

    /// Closes the connection, even during a request.
    pub(super) fn close(&self) {
        if let Some(connection) = self.connections.all().get(&self.id) {
            connection.task.abort();
        }
    }

    /// Marks a request's body as awaited while the returned value lives.
    pub(super) fn receive(&self) -> Option<Arc<()>> {
        let all = self.connections.all();
        Some(Arc::clone(&all.get(&self.id)?.receiving))
    }
}

/// Removes the connection's entry, however the connection ends.
pub(super) struct OnEnd {
    pub(super) connections: Arc<Connections>,
    pub(super) id: u64,
}

impl Drop for OnEnd {
    fn drop(&mut self) {
        self.connections.end(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        connections: 256,
        evict_unauthenticated: true,
        idle: None,
    };

    fn connection(source: u8, is_authenticated: bool) -> Connection {
        let source = Source::from(std::net::IpAddr::from([127, 0, 0, source]));
        let task = tokio::spawn(std::future::pending::<()>());
        Connection {
            authenticated: is_authenticated,
            ..Connection::new(source, task.abort_handle())
        }
    }

    /// Numbers 0 to 99 are idle connections of unauthenticated clients, 100 to 254 those of authenticated clients.
    #[tokio::test(start_paused = true)]
    async fn several_idle_connections_are_closed_at_once() {
        let mut all = BTreeMap::new();
        for id in 0..255_u64 {
            let source = u8::try_from(id % 200).expect("a byte");
            all.insert(id, connection(source, id >= 100));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        tokio::time::sleep(NEW_CONNECTION_GRACE).await;
        for round in 1..=25_u64 {
            assert!(close_lowest_priority(&mut all, LIMITS));
            assert_eq!(
                all.keys().next(),
                Some(&(round * 4)),
                "the oldest idle connections are closed first"
            );
        }
        // Then authenticated clients that are between two requests, but none that is busy or sends a new request.
        let busy: Vec<_> = all.values().map(|c| Arc::clone(&c.busy)).collect();
        assert!(!close_lowest_priority(&mut all, LIMITS));
        let sending: Vec<_> = all.values().map(|c| Arc::clone(&c.receiving)).collect();
        for connection in all.values_mut() {
            connection.since = Instant::now();
        }
        assert!(!close_lowest_priority(&mut all, LIMITS));
        drop((busy, sending));
        assert!(close_lowest_priority(&mut all, LIMITS));
        assert_eq!(all.len(), 151);
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_loses_only_its_connections_above_half_of_the_maximum() {
        let mut all = BTreeMap::new();
        for id in 0..256_u64 {
            all.insert(id, connection(u8::from(id >= 126), false));
        }
        tokio::time::sleep(NEW_CONNECTION_GRACE).await;
        for left in [[126, 128], [122, 128]] {
            assert!(close_lowest_priority(&mut all, LIMITS));
            let of = |source: u8| {
                let source = Source::from(std::net::IpAddr::from([127, 0, 0, source]));
                all.values().filter(|c| c.source == source).count()
            };
            assert_eq!([of(0), of(1)], left);
        }
    }
}
