//! The pod ranges of nodes: which part of the cluster's range each node has
//! (`pkg/controller/nodeipam/ipam/range_allocator.go`, `cidrset/cidr_set.go`). Pure.
//!
//! A cluster range is divided into slots of one size, and a node gets one slot of each family. A range that a node already
//! has stays, whatever its size: it occupies all slots that it overlaps. The search for a free slot begins behind the last
//! assigned one, so the range of a deleted node is reused as late as possible: routes to it, and pods in it, may still exist.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// Maximum difference between the prefix of a node's range and that of the cluster (upstream's `clusterSubnetMaxDiff`): 65,536
/// nodes.
const MAX_DIFFERENCE: u8 = 16;

/// Default prefix lengths of the nodes' ranges (kube-controller-manager's `--node-cidr-mask-size-ipv4` and `-ipv6`).
pub const DEFAULT_PREFIXES: (u8, u8) = (24, 64);

/// Why the cluster's ranges cannot be divided.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// No range, or two of one family.
    #[error(
        "invalid cluster ranges {0:?}: {1} ranges of these families; use one range, or one IPv4 and one IPv6 range"
    )]
    Families(String, usize),
    /// The address has bits behind the prefix.
    #[error("invalid cluster range {0}: the address has bits set behind the prefix; use {1}")]
    NotCanonical(IpNet, IpNet),
    /// The prefix of a node's range is shorter than the cluster's, or too long.
    #[error(
        "invalid node prefix /{prefix} for the cluster range {cluster}: must be from /{least} to /{most}; change --node-cidr-mask-size or --cluster-cidr"
    )]
    Prefix {
        /// The cluster's range.
        cluster: IpNet,
        /// The prefix length of a node's range.
        prefix: u8,
        /// The shortest allowed prefix length.
        least: u8,
        /// The longest allowed prefix length.
        most: u8,
    },
}

/// No slot is free.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no free /{prefix} is left in the cluster range {cluster}: all {slots} are in use; delete Nodes that no longer exist, or restart the control plane with a larger --cluster-cidr or a longer --node-cidr-mask-size"
)]
pub struct Exhausted {
    /// The cluster's range.
    pub cluster: IpNet,
    /// The prefix length of a node's range.
    pub prefix: u8,
    /// The number of slots.
    pub slots: usize,
}

/// The slots of one family.
#[derive(Debug)]
struct Slots {
    cluster: IpNet,
    prefix: u8,
    /// The number of ranges that overlap each slot. A conflict, two nodes with one range, is kept as 2.
    users: Vec<u32>,
    /// The number of slots with users.
    used: usize,
    /// Where the next search begins.
    next: usize,
}

/// The address as a number; IPv4 has the lowest 32 bits.
fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(u32::from(v4)),
        IpAddr::V6(v6) => u128::from(v6),
    }
}

/// The prefix length of one address.
fn bits(range: &IpNet) -> u8 {
    range.max_prefix_len()
}

impl Slots {
    fn new(cluster: IpNet, prefix: u8) -> Result<Slots, RangeError> {
        if cluster.trunc() != cluster {
            return Err(RangeError::NotCanonical(cluster, cluster.trunc()));
        }
        let least = cluster.prefix_len();
        let most = least.saturating_add(MAX_DIFFERENCE).min(bits(&cluster));
        if prefix < least || prefix > most {
            return Err(RangeError::Prefix {
                cluster,
                prefix,
                least,
                most,
            });
        }
        let count = 1_usize.checked_shl(u32::from(prefix.saturating_sub(least)));
        Ok(Slots {
            cluster,
            prefix,
            users: vec![0; count.unwrap_or(1)],
            used: 0,
            next: 0,
        })
    }

    /// The bits of an address within a slot.
    fn shift(&self) -> u32 {
        u32::from(bits(&self.cluster).saturating_sub(self.prefix))
    }

    /// The first and the last slot that a range overlaps; `None` if it is outside of the cluster's range.
    fn overlapped(&self, range: &IpNet) -> Option<(usize, usize)> {
        if bits(range) != bits(&self.cluster) {
            return None;
        }
        if range.contains(&self.cluster) {
            return Some((0, self.users.len().saturating_sub(1)));
        }
        if !self.cluster.contains(range) {
            return None;
        }
        let begin = number(self.cluster.network());
        let slot = |address| {
            let offset = number(address).saturating_sub(begin);
            // A slot of 128 bits is the whole family, which has slot 0 only.
            usize::try_from(offset.checked_shr(self.shift()).unwrap_or(0)).ok()
        };
        slot(range.network()).zip(slot(range.broadcast()))
    }

    /// Adds or removes a user of each slot that the range overlaps.
    fn count(&mut self, range: &IpNet, is_added: bool) {
        let Some((first, last)) = self.overlapped(range) else {
            return;
        };
        for users in self.users.get_mut(first..=last).into_iter().flatten() {
            let before = *users;
            *users = match is_added {
                true => before.saturating_add(1),
                false => before.saturating_sub(1),
            };
            match (before, *users) {
                (0, 1) => self.used = self.used.saturating_add(1),
                (1, 0) => self.used = self.used.saturating_sub(1),
                _ => {}
            }
        }
    }

    /// The next free slot.
    fn free(&self) -> Option<usize> {
        if self.used >= self.users.len() {
            return None;
        }
        let (before, behind) = self.users.split_at_checked(self.next)?;
        let is_free = |users: &u32| *users == 0;
        let found = behind.iter().position(is_free);
        found
            .map(|at| at.saturating_add(self.next))
            .or_else(|| before.iter().position(is_free))
    }

    fn range(&self, slot: usize) -> Option<IpNet> {
        let offset = u128::try_from(slot).ok()?.checked_shl(self.shift())?;
        let address = number(self.cluster.network()).checked_add(offset)?;
        let address = match self.cluster {
            IpNet::V4(_) => IpAddr::V4(Ipv4Addr::from(u32::try_from(address).ok()?)),
            IpNet::V6(_) => IpAddr::V6(Ipv6Addr::from(address)),
        };
        IpNet::new(address, self.prefix).ok()
    }

    fn allocate(&mut self) -> Result<IpNet, Exhausted> {
        let slot = self.free();
        let range = slot.and_then(|slot| self.range(slot));
        let (Some(slot), Some(range)) = (slot, range) else {
            return Err(Exhausted {
                cluster: self.cluster,
                prefix: self.prefix,
                slots: self.users.len(),
            });
        };
        self.count(&range, true);
        self.next = slot.saturating_add(1);
        Ok(range)
    }
}

/// The pod ranges of all nodes.
#[derive(Debug)]
pub struct PodRanges {
    families: Vec<Slots>,
    /// Ranges that one node has, whether or not its Node exists. They are outside of the cluster's range if the administrator
    /// wants that.
    reserved: BTreeMap<String, Vec<IpNet>>,
    /// The ranges of each node: those in the API, and those that are being written.
    nodes: HashMap<String, Vec<IpNet>>,
    /// The nodes that wait for a free slot.
    waiting: BTreeSet<String>,
}

impl PodRanges {
    /// Divides the cluster's ranges, one or two of different families. `prefixes` are the lengths for IPv4 and IPv6 nodes.
    ///
    /// # Errors
    ///
    /// A range or a prefix length is invalid.
    pub fn new(cluster: &[IpNet], prefixes: (u8, u8)) -> Result<PodRanges, RangeError> {
        let v6 = cluster.iter().filter(|c| bits(c) == 128).count();
        if !matches!((cluster.len(), v6), (1, _) | (2, 1)) {
            let all: Vec<String> = cluster.iter().map(ToString::to_string).collect();
            return Err(RangeError::Families(all.join(","), cluster.len()));
        }
        let families = cluster.iter().map(|cluster| {
            let prefix = match cluster {
                IpNet::V4(_) => prefixes.0,
                IpNet::V6(_) => prefixes.1,
            };
            Slots::new(*cluster, prefix)
        });
        Ok(PodRanges {
            families: families.collect::<Result<_, _>>()?,
            reserved: BTreeMap::new(),
            nodes: HashMap::new(),
            waiting: BTreeSet::new(),
        })
    }

    /// Reserves these ranges for one node: no other node gets them.
    pub fn reserve(&mut self, node: &str, ranges: &[IpNet]) {
        self.count(ranges, true);
        let before = self.reserved.insert(node.to_owned(), ranges.to_vec());
        self.count(&before.unwrap_or_default(), false);
    }

    fn count(&mut self, ranges: &[IpNet], is_added: bool) {
        for range in ranges {
            for family in &mut self.families {
                family.count(range, is_added);
            }
        }
    }

    /// Records the ranges that a Node has in the API. An empty list changes nothing: an assigned range may not be visible yet.
    pub fn observe(&mut self, node: &str, ranges: &[IpNet]) {
        if ranges.is_empty() {
            return;
        }
        self.waiting.remove(node);
        if self.nodes.get(node).is_some_and(|known| known == ranges) {
            return;
        }
        self.count(ranges, true);
        let before = self.nodes.insert(node.to_owned(), ranges.to_vec());
        self.count(&before.unwrap_or_default(), false);
    }

    /// The ranges for a Node without any: those of an earlier call, the reserved ones, or free slots. The caller writes them to
    /// the Node.
    ///
    /// # Errors
    ///
    /// No slot of a family is free. [`PodRanges::remove`] returns the node when one becomes free.
    pub fn assign(&mut self, node: &str) -> Result<Vec<IpNet>, Exhausted> {
        if let Some(known) = self.nodes.get(node) {
            return Ok(known.clone());
        }
        if let Some(reserved) = self.reserved.get(node).cloned() {
            self.observe(node, &reserved);
            return Ok(reserved);
        }
        let mut ranges = vec![];
        for at in 0..self.families.len() {
            let Some(family) = self.families.get_mut(at) else {
                continue;
            };
            match family.allocate() {
                Ok(range) => ranges.push(range),
                Err(exhausted) => {
                    self.count(&ranges, false);
                    self.waiting.insert(node.to_owned());
                    return Err(exhausted);
                }
            }
        }
        self.waiting.remove(node);
        self.nodes.insert(node.to_owned(), ranges.clone());
        Ok(ranges)
    }

    /// Releases the ranges of a deleted node. Returns the nodes that wait for a free slot, in the order of their names.
    pub fn remove(&mut self, node: &str) -> Vec<String> {
        self.waiting.remove(node);
        match self.nodes.remove(node) {
            Some(ranges) => {
                self.count(&ranges, false);
                self.waiting.iter().cloned().collect()
            }
            None => vec![],
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().expect("a range")
    }

    fn nets(text: &str) -> Vec<IpNet> {
        text.split(',').filter(|t| !t.is_empty()).map(net).collect()
    }

    #[test]
    fn cluster_ranges_are_checked() {
        for (cluster, prefixes, error) in [
            ("10.244.0.0/16", (24, 64), None),
            ("10.244.0.0/16", (16, 64), None),
            ("10.244.0.0/16", (32, 64), None),
            ("0.0.0.0/0", (16, 64), None),
            ("10.244.0.0/16,fd00::/48", (24, 64), None),
            ("fd00::/64", (24, 80), None),
            ("::/0", (24, 16), None),
            ("10.244.0.0/16", (15, 64), Some("must be from /16 to /32")),
            ("10.0.0.0/8", (25, 64), Some("must be from /8 to /24")),
            ("10.244.0.0/28", (24, 64), Some("must be from /28 to /32")),
            ("fd00::/32", (24, 64), Some("must be from /32 to /48")),
            ("10.244.1.0/16", (24, 64), Some("use 10.244.0.0/16")),
            ("", (24, 64), Some("0 ranges")),
            ("10.1.0.0/16,10.2.0.0/16", (24, 64), Some("2 ranges")),
            (
                "10.1.0.0/16,fd00::/48,fd01::/48",
                (24, 64),
                Some("3 ranges"),
            ),
        ] {
            let result = PodRanges::new(&nets(cluster), prefixes);
            match (result, error) {
                (Ok(_), None) => {}
                (Err(is), Some(expected)) => {
                    assert!(is.to_string().contains(expected), "{cluster}: {is}");
                }
                (result, _) => panic!("{cluster} {prefixes:?}: {result:?}"),
            }
        }
    }

    /// Scenarios: the cluster's range and the prefix of nodes, then steps. `+n R` assigns R, `-n` removes and names the nodes that
    /// wait, `n=R` observes R, and `n!R` reserves it. `full` means that no range is free.
    const SCENARIOS: &str = "
# The first node gets the first range; a released range is reused last.
10.0.0.0/22 24: +a 10.0.0.0/24, +a 10.0.0.0/24, +b 10.0.1.0/24, -a, -a, +c 10.0.2.0/24, +d 10.0.3.0/24, +e 10.0.0.0/24, +f full, +g full, -c f;g, +f 10.0.2.0/24, +g full, -g, -f
# Ranges in the API stay, whatever their size; another cluster's ranges occupy nothing.
10.0.0.0/22 24: a=10.0.0.0/23, b=10.0.2.128/25, c=10.9.0.0/24, d=, +d 10.0.3.0/24, +c 10.9.0.0/24, +e full, -c e, +e full, a=10.0.0.0/24, +e 10.0.1.0/24
# Two nodes with one range: the range is free only after both.
10.0.0.0/24 24: a=10.0.0.0/24, b=10.0.0.0/24, +c full, -a c, +c full, -b c, +c 10.0.0.0/24
10.0.0.0/24 24: a=10.0.0.0/8, +b full
# Reserved ranges are for their node only, before and after it exists.
10.0.0.0/22 24: own!10.0.0.0/24, +a 10.0.1.0/24, +own 10.0.0.0/24, -own, +b 10.0.2.0/24, +c 10.0.3.0/24, +d full, own!10.99.0.0/16, +d 10.0.0.0/24, +own 10.99.0.0/16
255.255.255.254/31 32: +a 255.255.255.254/32, +b 255.255.255.255/32, +c full
";

    fn shown(ranges: &[IpNet]) -> String {
        let all: Vec<String> = ranges.iter().map(IpNet::to_string).collect();
        all.join(";")
    }

    #[test]
    fn nodes_keep_their_ranges_and_get_free_ones() {
        let mut count = 0;
        for line in SCENARIOS.lines().filter(|l| l.contains(": ")) {
            let Some((head, steps)) = line.split_once(": ").filter(|_| !line.starts_with('#'))
            else {
                continue;
            };
            let (cluster, prefix) = head.split_once(' ').expect("a range and a prefix");
            let prefix = prefix.parse().expect("a prefix");
            let mut all = PodRanges::new(&nets(cluster), (prefix, prefix)).expect("ranges");
            for step in steps.split(", ") {
                let (action, expected) = step.split_once(' ').unwrap_or((step, ""));
                let is = if let Some(node) = action.strip_prefix('+') {
                    let assigned = all.assign(node);
                    assigned.map_or_else(|_| "full".to_owned(), |ranges| shown(&ranges))
                } else if let Some(node) = action.strip_prefix('-') {
                    all.remove(node).join(";")
                } else if let Some((node, ranges)) = action.split_once('=') {
                    all.observe(node, &nets(ranges));
                    String::new()
                } else {
                    let (node, ranges) = action.split_once('!').expect("a step");
                    all.reserve(node, &nets(ranges));
                    String::new()
                };
                assert_eq!(is, expected, "{step} in {line}");
                count += 1;
            }
        }
        assert_eq!(count, 48);
    }

    #[test]
    fn both_families_are_assigned_or_none() {
        let cluster = nets("10.0.0.0/23,fd00::/63");
        let mut all = PodRanges::new(&cluster, DEFAULT_PREFIXES).expect("ranges");
        all.observe("x", &nets("fd00::/64"));
        assert_eq!(all.assign("a"), Ok(nets("10.0.0.0/24,fd00:0:0:1::/64")));
        let error = all.assign("b").expect_err("IPv6 is exhausted");
        assert_eq!((error.cluster, error.slots), (net("fd00::/63"), 2));
        assert_eq!(all.remove("x"), ["b"]);
        // The failed assignment has released its IPv4 range.
        assert_eq!(all.assign("b"), Ok(nets("10.0.1.0/24,fd00::/64")));
    }

    #[test]
    fn five_thousand_nodes_are_assigned_without_a_search_per_node() {
        let cluster = nets("10.0.0.0/8");
        let mut all = PodRanges::new(&cluster, DEFAULT_PREFIXES).expect("ranges");
        let nodes: Vec<String> = (0..5000).map(|n| format!("node-{n}")).collect();
        // A search begins behind the last assigned slot: each search reads one slot, although all slots before it are used.
        for (n, node) in nodes.iter().enumerate() {
            let family = &all.families[0];
            assert_eq!((family.next, family.users[family.next]), (n, 0));
            all.assign(node).expect("a free range");
        }
        assert_eq!(all.families[0].used, 5000);
        for node in &nodes {
            all.remove(node);
        }
        assert_eq!(all.families[0].used, 0);
        assert!(all.families[0].users.iter().all(|users| *users == 0));
    }

    proptest! {
        /// Whatever happens in whatever order: assigned ranges are in the cluster's range, have the node's prefix, and overlap no
        /// other node's range; and a request fails only if no slot is free.
        #[test]
        fn assigned_ranges_never_overlap(
            steps in proptest::collection::vec((0..4_u8, 0..12_usize, 0..8_u8, 20..28_u8), 0..80),
        ) {
            let cluster = net("10.0.0.0/21");
            let mut all = PodRanges::new(&[cluster], (24, 64)).expect("ranges");
            let mut model: BTreeMap<usize, (IpNet, bool)> = BTreeMap::new();
            for (action, node, slot, prefix) in steps {
                let name = format!("n{node}");
                match action {
                    0 => { all.remove(&name); model.remove(&node); }
                    1 => {
                        let foreign = IpNet::new(IpAddr::from([10, 0, slot, 0]), prefix).expect("a range").trunc();
                        all.observe(&name, &[foreign]);
                        model.insert(node, (foreign, false));
                    }
                    _ => {
                        let others = |range: &IpNet| model.iter().any(|(other, (used, _))| {
                            *other != node && (used.contains(range) || range.contains(used))
                        });
                        match all.assign(&name) {
                            Ok(ranges) => {
                                prop_assert_eq!(ranges.len(), 1);
                                let new = !model.contains_key(&node);
                                if new {
                                    prop_assert!(cluster.contains(&ranges[0]) && ranges[0].prefix_len() == 24);
                                    prop_assert!(!others(&ranges[0]), "{} is in use", ranges[0]);
                                    model.insert(node, (ranges[0], true));
                                } else {
                                    prop_assert_eq!(ranges[0], model[&node].0);
                                }
                            }
                            Err(_) => for slot in 0..8 {
                                let slot = net(&format!("10.0.{slot}.0/24"));
                                prop_assert!(others(&slot), "{} is free", slot);
                            },
                        }
                    }
                }
                let used = all.families[0].users.iter().filter(|users| **users > 0).count();
                prop_assert_eq!(used, all.families[0].used);
            }
        }
    }
}
