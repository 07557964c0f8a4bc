//! The addresses and node ports that services have, as an index in memory.
//!
//! The stored services are the only record of allocations. Before each allocation the index reads the changes of services
//! since the last one from the store's history, so an allocation costs as much as what has changed, not as all services. A
//! restart, and a history that is too short, build the index again.
//!
//! A value that is chosen and not stored yet is reserved until the write ends. Two concurrent writes therefore never get
//! the same value, and they still share a sync of the store.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use ipnet::IpNet;
use serde_json::Value;

use super::{has_address, node_port};
use crate::api::object::{list, text};
use crate::ranges::Ranges;
use crate::store::{Change, Store};
use holdfast_core::lock::lock;

/// The prefix of the keys of services in the store.
const PREFIX: &str = "services/";
/// The node port range.
const FIRST_PORT: u16 = 30_000;
const LAST_PORT: u16 = 32_767;
/// The number of ports at the beginning of the range that are allocated last. They are for services that request a specific
/// port (KEP-3668).
const STATIC_PORTS: u16 = 86;
/// Maximum number of addresses of a range that are allocated automatically.
const MAX_ADDRESSES: u128 = 1 << 20;

/// A value that only one service can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Claim {
    Address(IpAddr),
    /// A node port, or a health check node port.
    Port(u16),
}

/// Why a requested value cannot be allocated. The texts are upstream's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("provided IP is already allocated")]
    AddressTaken,
    #[error("the provided IP ({0}) is not in the valid range. The range of valid IPs is {1}")]
    AddressOutside(IpAddr, Ranges),
    #[error("provided port is already allocated")]
    PortTaken,
    #[error(
        "provided port is not in the valid range. The range of valid ports is {FIRST_PORT}-{LAST_PORT}"
    )]
    PortOutside,
    #[error("range is full")]
    Full,
}

/// The claims of a service.
fn claims(service: &Value) -> Vec<Claim> {
    if !has_address(service) {
        return vec![];
    }
    let one = text(service, &["spec", "clusterIP"]);
    let all = list(service, &["spec", "clusterIPs"]).iter();
    let addresses = all.filter_map(Value::as_str).chain(one);
    let addresses = addresses.filter_map(|a| Some(Claim::Address(a.parse().ok()?)));
    let ports = list(service, &["spec", "ports"])
        .iter()
        .filter_map(node_port);
    let check = service["spec"]["healthCheckNodePort"].as_i64();
    let ports = ports.chain(check).filter_map(|port| {
        let port = u16::try_from(port).ok().filter(|port| *port != 0)?;
        Some(Claim::Port(port))
    });
    let mut claims: Vec<Claim> = addresses.chain(ports).collect();
    let mut seen = HashSet::new();
    claims.retain(|claim| seen.insert(*claim));
    claims
}

/// The index.
#[derive(Debug, Default)]
struct Index {
    /// The revision up to which the index has the changes of the store.
    revision: Option<u64>,
    /// The keys of the services with a claim. A store written by another version can have several.
    owners: HashMap<Claim, Vec<Arc<str>>>,
    /// The claims of each service.
    of: HashMap<Arc<str>, Vec<Claim>>,
    /// Claims of writes in progress.
    reserved: HashSet<Claim>,
    /// Where the search for the next free value begins, by range: a released value is used again as late as possible.
    next_address: HashMap<IpNet, u128>,
    next_port: u16,
}

impl Index {
    /// Reads the changes since the last call.
    fn follow(&mut self, store: &Store) {
        let changes = self
            .revision
            .map(|revision| store.changes(revision, PREFIX, usize::MAX));
        if let Some(Ok((events, complete))) = changes {
            for event in events {
                let exists = event.change == Change::Put;
                self.set(&event.key, exists.then_some(&event.record.value));
            }
            self.revision = Some(complete);
            return;
        }
        self.owners.clear();
        self.of.clear();
        let (services, revision) = store.list(PREFIX);
        for (key, record) in services {
            self.set(&key, Some(&record.value));
        }
        self.revision = Some(revision);
    }

    /// Replaces the claims of a service; `None` if it was deleted.
    fn set(&mut self, key: &Arc<str>, service: Option<&crate::store::Bytes>) {
        for claim in self.of.remove(key).unwrap_or_default() {
            if let Some(owners) = self.owners.get_mut(&claim) {
                owners.retain(|owner| owner != key);
                if owners.is_empty() {
                    self.owners.remove(&claim);
                }
            }
        }
        let service: Option<Value> = service.and_then(|bytes| serde_json::from_slice(bytes).ok());
        let claims = service.map(|service| claims(&service)).unwrap_or_default();
        for claim in &claims {
            self.owners.entry(*claim).or_default().push(Arc::clone(key));
        }
        if !claims.is_empty() {
            self.of.insert(Arc::clone(key), claims);
        }
    }

    fn is_free(&self, claim: Claim) -> bool {
        !self.owners.contains_key(&claim) && !self.reserved.contains(&claim)
    }

    fn next_address(&mut self, range: IpNet) -> Option<IpAddr> {
        let bits = u32::from(range.max_prefix_len() - range.prefix_len());
        let size = 1u128.checked_shl(bits).unwrap_or(u128::MAX);
        // The last address of an IPv4 range is its broadcast address.
        let size = if range.addr().is_ipv4() {
            size - 1
        } else {
            size
        };
        let size = size.min(MAX_ADDRESSES);
        // The beginning of the range is for services that request a specific address (KEP-3070).
        let first = if size <= 16 {
            1
        } else {
            (size / 16).clamp(16, 256)
        };
        let begin = self.next_address.get(&range).copied().unwrap_or(first);
        let begin = begin.clamp(first, size);
        let mut order = (begin..size).chain(first..begin).chain(1..first);
        let (offset, address) = order.find_map(|offset| {
            let address = at(range, offset);
            self.is_free(Claim::Address(address))
                .then_some((offset, address))
        })?;
        self.next_address.insert(range, offset + 1);
        Some(address)
    }

    fn next_port(&mut self) -> Option<u16> {
        let first = FIRST_PORT + STATIC_PORTS;
        let begin = self.next_port.clamp(first, LAST_PORT);
        let order = (begin..=LAST_PORT)
            .chain(first..begin)
            .chain(FIRST_PORT..first);
        let port = order
            .into_iter()
            .find(|port| self.is_free(Claim::Port(*port)))?;
        self.next_port = port + 1;
        Some(port)
    }
}

/// The address at an offset of a range.
fn at(range: IpNet, offset: u128) -> IpAddr {
    match range.network() {
        IpAddr::V4(first) => {
            let offset = u32::try_from(offset).unwrap_or(u32::MAX);
            std::net::Ipv4Addr::from_bits(first.to_bits().saturating_add(offset)).into()
        }
        IpAddr::V6(first) => {
            std::net::Ipv6Addr::from_bits(first.to_bits().saturating_add(offset)).into()
        }
    }
}

/// The allocations of one apiserver.
#[derive(Debug)]
pub(crate) struct Allocator {
    pub(super) ranges: Ranges,
    index: Arc<Mutex<Index>>,
}

/// The values that are chosen for one write. Dropping them releases those that were not stored.
#[derive(Debug)]
pub(crate) struct Reservation {
    ranges: Ranges,
    index: Arc<Mutex<Index>>,
    claims: HashSet<Claim>,
    /// The claims that the stored service has.
    own: HashSet<Claim>,
}

impl Allocator {
    #[must_use]
    pub(crate) fn new(ranges: Ranges) -> Allocator {
        Allocator {
            ranges,
            index: Arc::default(),
        }
    }

    /// Begins the allocation for a write. `old` is the stored service.
    pub(super) fn begin(&self, store: &Store, old: Option<&Value>) -> Reservation {
        lock(&self.index).follow(store);
        Reservation {
            ranges: self.ranges.clone(),
            index: Arc::clone(&self.index),
            claims: HashSet::new(),
            own: old.map(claims).unwrap_or_default().into_iter().collect(),
        }
    }
}

impl Reservation {
    fn reserve(&mut self, index: &mut Index, claim: Claim) {
        index.reserved.insert(claim);
        self.claims.insert(claim);
    }

    /// Whether the service has this value already.
    fn has(&self, claim: Claim) -> bool {
        self.own.contains(&claim) || self.claims.contains(&claim)
    }

    /// Reserves a requested address.
    pub(super) fn address(&mut self, address: IpAddr) -> Result<(), Refusal> {
        let claim = Claim::Address(address);
        if self.has(claim) {
            return Ok(());
        }
        if !self.ranges.contains(address) {
            return Err(Refusal::AddressOutside(address, self.ranges.clone()));
        }
        let index = Arc::clone(&self.index);
        let mut index = lock(&index);
        if !index.is_free(claim) {
            return Err(Refusal::AddressTaken);
        }
        self.reserve(&mut index, claim);
        Ok(())
    }

    /// Reserves a free address of the family.
    pub(super) fn next_address(&mut self, is_ipv4: bool) -> Result<IpAddr, Refusal> {
        let range = self.ranges.iter().find(|r| r.addr().is_ipv4() == is_ipv4);
        let index = Arc::clone(&self.index);
        let mut index = lock(&index);
        let address = range.and_then(|range| index.next_address(range));
        let address = address.ok_or(Refusal::Full)?;
        self.reserve(&mut index, Claim::Address(address));
        Ok(address)
    }

    /// Reserves a requested node port.
    pub(super) fn port(&mut self, number: i64) -> Result<(), Refusal> {
        let port = u16::try_from(number).map_err(|_| Refusal::PortOutside)?;
        let claim = Claim::Port(port);
        if self.has(claim) {
            return Ok(());
        }
        if !(FIRST_PORT..=LAST_PORT).contains(&port) {
            return Err(Refusal::PortOutside);
        }
        let index = Arc::clone(&self.index);
        let mut index = lock(&index);
        if !index.is_free(claim) {
            return Err(Refusal::PortTaken);
        }
        self.reserve(&mut index, claim);
        Ok(())
    }

    /// Reserves a free node port.
    pub(super) fn next_port(&mut self) -> Result<i64, Refusal> {
        let index = Arc::clone(&self.index);
        let mut index = lock(&index);
        let port = index.next_port().ok_or(Refusal::Full)?;
        self.reserve(&mut index, Claim::Port(port));
        Ok(port.into())
    }
}

impl Drop for Reservation {
    // A stored value is in the store's history before the write returns, so `Index::follow` sees it before the next
    // allocation.
    fn drop(&mut self) {
        let mut index = lock(&self.index);
        for claim in &self.claims {
            index.reserved.remove(claim);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::store::{Attrs, Bytes, Expect, Write};

    fn service(address: &str, port: u16) -> Value {
        json!({"spec": {"type": "NodePort", "clusterIP": address, "clusterIPs": [address], "ports": [{"nodePort": port}]}})
    }

    async fn write(store: &Store, name: &str, expect: Expect, service: Option<Value>) -> u64 {
        let change = service.as_ref().map_or(Change::Delete, |_| Change::Put);
        let value = service.unwrap_or_default().to_string();
        let write = Write {
            key: format!("services/n/{name}"),
            expect,
            requires: None,
            change,
            render: Box::new(move |_| Bytes::from(value)),
            attrs: Arc::new(Attrs::default()),
        };
        store.write(write).await.expect("a write").revision
    }

    fn allocator(ranges: &str) -> Allocator {
        Allocator::new(ranges.parse().expect("ranges"))
    }

    #[tokio::test]
    async fn stored_values_are_taken_and_deleted_ones_are_free() {
        let (store, allocator) = (Store::in_memory(), allocator("10.96.0.0/16"));
        let address: IpAddr = "10.96.0.9".parse().expect("an address");
        let try_both = |old: Option<&Value>| {
            let mut reservation = allocator.begin(&store, old);
            (reservation.address(address), reservation.port(30_001))
        };
        assert_eq!(try_both(None), (Ok(()), Ok(())));
        assert_eq!(try_both(None), (Ok(()), Ok(())), "dropped without a write");
        let own = service("10.96.0.9", 30_001);
        let revision = write(&store, "a", Expect::Absent, Some(own.clone())).await;
        let taken = (Err(Refusal::AddressTaken), Err(Refusal::PortTaken));
        assert_eq!(try_both(None), taken);
        assert_eq!(try_both(Some(&own)), (Ok(()), Ok(())), "its own values");
        let changed = Some(service("10.96.0.9", 30_002));
        let revision = write(&store, "a", Expect::Revision(revision), changed).await;
        assert_eq!(try_both(None), (Err(Refusal::AddressTaken), Ok(())));
        write(&store, "a", Expect::Revision(revision), None).await;
        assert_eq!(try_both(None), (Ok(()), Ok(())));
    }

    #[tokio::test]
    async fn an_index_of_old_services_equals_one_of_changes() {
        let store = Store::in_memory();
        let follows = allocator("10.96.0.0/24");
        drop(follows.begin(&store, None));
        for i in 1..100u16 {
            let service = service(&format!("10.96.0.{i}"), 30_000 + i);
            write(&store, &format!("s{i}"), Expect::Absent, Some(service)).await;
        }
        let builds = allocator("10.96.0.0/24");
        drop((follows.begin(&store, None), builds.begin(&store, None)));
        let (a, b) = (lock(&follows.index), lock(&builds.index));
        assert_eq!((a.owners.len(), &a.owners, &a.of), (198, &b.owners, &b.of));
    }

    #[tokio::test]
    async fn concurrent_writes_get_different_values() {
        let (store, allocator) = (Store::in_memory(), allocator("10.96.0.0/24,fd00::/120"));
        let mut all: Vec<Reservation> = vec![];
        let mut seen = HashSet::new();
        // 254 addresses of the IPv4 range, and 255 of the other one.
        for i in 0..255 {
            let mut one = allocator.begin(&store, None);
            match one.next_address(true) {
                Ok(address) => assert!(seen.insert(address), "{address} twice"),
                Err(error) => assert_eq!((i, error), (254, Refusal::Full)),
            }
            assert!(seen.insert(one.next_address(false).expect("an address")));
            all.push(one);
        }
        let mut one = allocator.begin(&store, None);
        assert_eq!(one.next_address(false), Err(Refusal::Full));
        all.pop();
        assert!(one.next_address(false).is_ok(), "a released address");
        let outside = "10.97.0.1".parse().expect("an address");
        let error = one.address(outside).expect_err("an error").to_string();
        assert_eq!(
            error,
            "the provided IP (10.97.0.1) is not in the valid range. The range of valid IPs is 10.96.0.0/24,fd00::/120"
        );
    }

    #[tokio::test]
    async fn values_are_allocated_from_the_upper_part_of_the_range_first() {
        let (store, allocator) = (Store::in_memory(), allocator("10.96.0.0/20"));
        let mut one = allocator.begin(&store, None);
        let first = one.next_address(true).expect("an address").to_string();
        assert_eq!(
            (first.as_str(), one.next_port()),
            ("10.96.0.255", Ok(30_086))
        );
        drop(one);
        // A released value is not used again soon: connections to the old service may remain.
        let mut two = allocator.begin(&store, None);
        let next = two.next_address(true).expect("an address").to_string();
        assert_eq!((next.as_str(), two.next_port()), ("10.96.1.0", Ok(30_087)));
        for number in [0, 80, 29_999, 32_768, 70_000, -1] {
            assert_eq!(two.port(number), Err(Refusal::PortOutside), "{number}");
        }
        let mut count = 1;
        while two.next_port().is_ok() {
            count += 1;
        }
        assert_eq!(count, 2768);
    }
}
