//! Ports of the host that lead to containers, in the tables of the reference (CNI reference spec, 7.3). Conditions stand
//! in the rules of the container that they are for, not in the chains that all share.
//!
//! The reference marks a container's rules with nothing but its id, in a comment. Ours have that comment, so that its DEL
//! finds them, and the key of their owner besides: two networks of a container do not take each other's.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use ipnet::IpNet;

use super::expression::{
    Verdict, address_is, for_this_host, interface_is, masquerade, octets, port_is, protocol_is,
    redirect, verdict,
};
use super::{Family, Hook, Mark, Nft, Rule, Table};
use crate::cni::{Owner, is_left_over};
use crate::net::netlink::{Attributes, Message};

const TABLES: [Table; 2] = [
    Table {
        family: Family::V4,
        name: "cni_hostport",
    },
    Table {
        family: Family::V6,
        name: "cni_hostport",
    },
];
const PORTS: &str = "hostports";
const ALL: &str = "hostports_all";
const BY_ADDRESS: &str = "hostip_hostports";
const MASQUERADING: &str = "masquerading";
const PREROUTING: &str = "prerouting";

/// A port of the host and where it leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forward {
    /// The number of the protocol.
    pub protocol: u8,
    /// The address of the host that it is for; all if there is none.
    pub host: Option<IpAddr>,
    /// The port there.
    pub port: u16,
    /// The container's.
    pub target: u16,
}

/// What must hold besides for a port to be forwarded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// Source (or destination) is in the network (or not).
    Address(bool, IpNet, bool),
    /// It came in by (or goes out by) the interface (or not).
    Interface(bool, String, bool),
}

impl Condition {
    fn expressions(&self) -> Vec<Attributes> {
        match self {
            Condition::Address(source, net, equal) => address_is(*source, *net, *equal),
            Condition::Interface(incoming, name, equal) => interface_is(*incoming, name, *equal),
        }
    }
}

/// What a container wants of one family.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Its address.
    pub container: IpAddr,
    /// Its ports.
    pub forwards: Vec<Forward>,
    /// For all of them.
    pub conditions: Vec<Condition>,
    /// What comes from the container itself, and from this host by localhost, gets an address of the host's.
    pub hairpin: bool,
    /// Whatever is forwarded does.
    pub all: bool,
}

fn table(v4: bool) -> Table {
    TABLES[usize::from(!v4)]
}

fn nat(hook: u32, priority: i32) -> Hook {
    Hook {
        kind: "nat",
        hook,
        priority,
    }
}

fn masquerading(table: Table) -> Message {
    table.hooked(MASQUERADING, nat(4, 100))
}

fn scaffold(table: Table) -> Vec<Message> {
    let mut local = for_this_host();
    local.push(verdict(Verdict::Jump(ALL)));
    vec![
        table.create(),
        table.chain(PORTS),
        table.chain(BY_ADDRESS),
        table.chain(ALL),
        table.hooked(PREROUTING, nat(0, -100)),
        table.hooked("output", nat(3, -100)),
        masquerading(table),
        table.append(ALL, &[verdict(Verdict::Jump(BY_ADDRESS))], Mark::None),
        table.append(ALL, &[verdict(Verdict::Jump(PORTS))], Mark::None),
        table.append(PREROUTING, &local, Mark::None),
        table.append("output", &local, Mark::None),
    ]
}

impl Plan {
    /// The sources that are masqueraded on their way to the container.
    fn masqueraded(&self) -> Vec<IpNet> {
        let v4 = self.container.is_ipv4();
        if !self.hairpin {
            return vec![];
        }
        if self.all {
            let any: IpAddr = if v4 {
                [0u8; 4].into()
            } else {
                [0u8; 16].into()
            };
            return IpNet::new(any, 0).into_iter().collect();
        }
        let localhost = v4.then(|| IpNet::from(IpAddr::from([127, 0, 0, 1])));
        std::iter::once(IpNet::from(self.container))
            .chain(localhost)
            .collect()
    }

    /// How many rules it needs.
    #[must_use]
    pub fn size(&self) -> usize {
        self.forwards.len() + self.masqueraded().len()
    }

    /// How many rules the reference makes of it in the tables of iptables, where it makes none twice: those that lead to the
    /// container, and those that mark what is to be masqueraded.
    #[must_use]
    pub fn size_in_iptables(&self) -> (usize, usize) {
        let ports = |f: &Forward| (f.protocol, f.host, f.port);
        let leading: BTreeSet<_> = self.forwards.iter().map(|f| (ports(f), f.target)).collect();
        let marking: BTreeSet<_> = self.forwards.iter().map(ports).collect();
        (leading.len(), marking.len() * self.masqueraded().len())
    }

    fn rules(&self, owner: &Owner, container: &str) -> Vec<Message> {
        let table = table(self.container.is_ipv4());
        let mark = Mark::Both {
            comment: container,
            key: owner.key(),
        };
        let mut rules = vec![];
        for forward in &self.forwards {
            let mut list: Vec<Attributes> = self
                .conditions
                .iter()
                .flat_map(Condition::expressions)
                .collect();
            list.extend(
                forward
                    .host
                    .map(|h| address_is(false, IpNet::from(h), true))
                    .unwrap_or_default(),
            );
            list.extend(protocol_is(forward.protocol));
            list.extend(port_is(forward.port));
            list.extend(redirect(self.container, forward.target));
            rules.push(table.append(PORTS, &list, mark));
        }
        for source in self.masqueraded() {
            let mut list = if source.prefix_len() == 0 {
                vec![]
            } else {
                address_is(true, source, true)
            };
            list.extend(address_is(false, IpNet::from(self.container), true));
            list.push(masquerade());
            rules.push(table.append(MASQUERADING, &list, mark));
        }
        rules
    }
}

/// Forwards. `container` is the id of the owner's container.
pub fn add(plan: &Plan, owner: &Owner, container: &str) -> io::Result<()> {
    let table = table(plan.container.is_ipv4());
    let rules = plan.rules(owner, container);
    match Nft::open()?.add(table, PREROUTING, || scaffold(table), &rules) {
        // The reference makes this chain only for the first container that has something to be masqueraded.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Nft::open()?.add(table, MASQUERADING, || vec![masquerading(table)], &rules)
        }
        other => other,
    }
}

/// Those with rules of containers; only the reference's earlier versions have any by address.
fn chains() -> Vec<(Table, &'static str)> {
    TABLES
        .iter()
        .flat_map(|t| [(*t, PORTS), (*t, BY_ADDRESS), (*t, MASQUERADING)])
        .collect()
}

/// How many rules of a plan there are: the owner's, and those that the reference marked with nothing but the container's id. As its
/// rules of all networks of a container are marked alike, only those about the plan's address count.
pub fn count(plan: &Plan, owner: &Owner, container: &str) -> io::Result<usize> {
    let address = octets(plan.container);
    // nft compares two addresses that lie side by side as one value.
    let is_about = |rule: &Rule| {
        rule.loads.contains(&address) || rule.values.iter().any(|v| v.ends_with(&address))
    };
    let mut nft = Nft::open()?;
    let mut found = 0;
    for chain in [PORTS, MASQUERADING] {
        found += nft
            .rules(table(plan.container.is_ipv4()), chain)?
            .iter()
            .filter(|r| {
                owner.has(&r.mark) || (id_by_reference(r) == Some(container) && is_about(r))
            })
            .count();
    }
    Ok(found)
}

/// The container's id, where the reference has marked a rule with it. What older versions of ours have marked has commas.
fn id_by_reference(rule: &Rule) -> Option<&str> {
    let is_id = rule.mark == rule.comment && !rule.mark.is_empty() && !rule.mark.contains(',');
    is_id.then_some(rule.mark.as_str())
}

/// Stops forwarding for the owner, and what the reference has marked with the id of `container`.
pub fn remove(nft: &mut Nft, owner: &Owner, container: Option<&str>) -> io::Result<()> {
    nft.delete(&chains(), |rule| {
        owner.has(&rule.mark) || (container.is_some() && id_by_reference(rule) == container)
    })
}

/// Stops forwarding for attachments that are not in `keep`, and what the reference has marked with an id that `is_gone`.
pub fn collect(
    nft: &mut Nft,
    network: &str,
    keep: &[(String, String)],
    is_gone: impl Fn(&str) -> bool,
) -> io::Result<()> {
    nft.delete(&chains(), |rule| {
        is_left_over(&rule.mark, network, keep) || id_by_reference(rule).is_some_and(&is_gone)
    })
}
