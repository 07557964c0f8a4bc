//! Keeps which endpoint each client uses while a table is replaced, so that clients stay with their endpoints when the process
//! restarts.

use std::collections::BTreeMap;
use std::io;

use holdfast_core::network::Family;
use holdfast_net::nft::element::Element;
use holdfast_net::nft::{Nft, Table};

use super::layout::Layout;

/// The maximum number of clients that are kept. A set has at most 65,535.
const MAX_CLIENTS: usize = 200_000;
/// The beginning of the names of sets of clients.
const PREFIX: &str = "affinity-";

/// The clients of each target, by the name of its set without the number of the port: another process numbers ports in another
/// order.
#[derive(Default)]
pub(super) struct Clients(BTreeMap<String, Vec<Element>>);

/// The name of a set without the number of the port, `default/web/tcp/http__10.244.0.5/8080`.
fn unnumbered(set: &str) -> Option<&str> {
    set.strip_prefix(PREFIX)?
        .split_once('/')
        .map(|(_, rest)| rest)
}

impl Clients {
    /// Reads the clients of a table.
    ///
    /// # Errors
    ///
    /// The table cannot be read, or has sets of another program.
    pub(super) fn read(nft: &mut Nft, table: Table, family: Family) -> io::Result<Clients> {
        let mut clients = Clients::default();
        let mut count = 0_usize;
        for set in nft.sets(table)? {
            let Some(name) = unnumbered(&set.name) else {
                continue;
            };
            if set != Layout::affinity(family, &set.name) {
                continue;
            }
            let elements = nft.elements(table, &set, MAX_CLIENTS)?;
            count = count.saturating_add(elements.len());
            if count > MAX_CLIENTS {
                break;
            }
            // The remaining time; a client that connects again gets the whole one.
            let remaining = elements.into_iter().filter_map(|element| {
                Some(Element {
                    timeout: Some(element.expires?),
                    expires: None,
                    ..element
                })
            });
            clients.0.insert(name.to_owned(), remaining.collect());
        }
        Ok(clients)
    }

    /// The clients of the target for which a set is created; empty if there are none.
    pub(super) fn take(&mut self, set: &str) -> Vec<Element> {
        let known = unnumbered(set).and_then(|name| self.0.remove(name));
        known.unwrap_or_default()
    }
}
