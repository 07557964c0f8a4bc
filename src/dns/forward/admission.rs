//! Limits of the queries that wait for upstreams, so that a client with many names does not delay the others.

use std::collections::HashMap;
use std::net::IpAddr;

/// Most queries that wait for upstreams.
const MAX_QUERIES: usize = 1024;
/// Most queries of one client.
const MAX_CLIENT_QUERIES: usize = 128;

/// Counts the waiting queries by client. A client is admitted below half of the free places: many flooding clients then share
/// the places equally, and some stay free for others (the dynamic threshold of shared switch buffers, Choudhury and Hahne 1998).
#[derive(Default)]
pub(crate) struct Admission {
    total: usize,
    clients: HashMap<IpAddr, usize>,
}

impl Admission {
    /// Takes a place; `release` must follow. Returns `false` if the client or the server has no place.
    pub(crate) fn admit(&mut self, client: IpAddr) -> bool {
        let free = MAX_QUERIES.saturating_sub(self.total);
        let own = self.clients.get(&client).copied().unwrap_or_default();
        if own >= MAX_CLIENT_QUERIES.min(free.div_ceil(2)) {
            return false;
        }
        self.total += 1;
        *self.clients.entry(client).or_default() += 1;
        true
    }

    pub(crate) fn release(&mut self, client: IpAddr) {
        let Some(own) = self.clients.get_mut(&client) else {
            return;
        };
        *own -= 1;
        self.total -= 1;
        if *own == 0 {
            self.clients.remove(&client);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(n: u32) -> IpAddr {
        IpAddr::V4(n.into())
    }

    #[test]
    fn a_client_has_a_limit() {
        let mut admission = Admission::default();
        let admitted = (0..1000).filter(|_| admission.admit(client(1))).count();
        assert_eq!(admitted, MAX_CLIENT_QUERIES);
        assert!(admission.admit(client(2)));
        admission.release(client(1));
        assert!(admission.admit(client(1)) && !admission.admit(client(1)));
    }

    #[test]
    fn many_flooding_clients_leave_places_for_others() {
        let mut admission = Admission::default();
        for _ in 0..200 {
            for n in 0..100 {
                admission.admit(client(n));
            }
        }
        assert!(admission.total < MAX_QUERIES);
        assert!(admission.admit(client(1000)));
        let shares: Vec<usize> = (0..100).map(|n| admission.clients[&client(n)]).collect();
        assert!(
            shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1,
            "{shares:?}"
        );
    }

    #[test]
    fn released_places_leave_nothing() {
        let mut admission = Admission::default();
        for n in 0..300 {
            assert!(admission.admit(client(n)));
        }
        for n in 0..300 {
            admission.release(client(n));
            admission.release(client(n));
        }
        assert!(admission.total == 0 && admission.clients.is_empty());
    }
}
