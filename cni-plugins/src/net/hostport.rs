//! Port forwarding from the host to containers, in the tables of the reference plugins
//! (`plugins/meta/portmap/portmap_nftables.go` of containernetworking/plugins).
//! Conditions are part of each container's rules, not of the shared chains.
//!
//! The base chains have names and priorities of their own: other programs' NAT rules at the usual priority come first, whichever
//! table was created first, as with the reference's rules in the tables of iptables, which are the last ones there. The kernel
//! translates each connection once, so a foreign rule for the same port wins.
//!
//! The reference identifies a container's rules only by its id, in a comment. Our rules have
//! the same comment, so that the reference's DEL finds them. They also contain the key of their
//! owner, so that DEL for one network does not remove a container's rules of another network.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::cni::{Owner, is_orphaned};
use holdfast_net::netlink::{Attributes, Message};
use holdfast_net::nft::element::Element;
use holdfast_net::nft::expression::{
    Field, address_is, for_this_host, has_bits, in_set, interface_is, octets, port_is, protocol_is,
    status,
};
use holdfast_net::nft::set::{Kind, Set};
use holdfast_net::nft::statement::{jump, masquerade, redirect};
use holdfast_net::nft::value::{Data, Type, Unfit, Value};
use holdfast_net::nft::{Family, Hook, Nft, OwnerMark, Rule, Table};

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
const BY_ADDRESS: &str = "hostip_hostports";
const MASQUERADING: &str = "masquerading";
const PREROUTING: &str = "late_prerouting";
const OUTPUT: &str = "late_output";
/// After destination NAT of iptables, kube-proxy and Docker (-100, `dstnat`) and of firewalld (-90), before filters (0).
const LATE: i32 = -50;

/// A forwarded port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forward {
    /// The number of the IP protocol.
    pub protocol: u8,
    /// The host's address; `None` means all addresses.
    pub host: Option<IpAddr>,
    /// The port on the host.
    pub port: u16,
    /// The port of the container.
    pub target: u16,
}

/// An additional condition of forwarding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// Source (or destination) is in the network (or not).
    Address(bool, IpNet, bool),
    /// Incoming (or outgoing) interface is this one (or not).
    Interface(bool, String, bool),
}

impl Condition {
    pub(super) fn expressions(&self) -> Vec<Attributes> {
        match self {
            Condition::Address(source, net, equal) => address_is(*source, *net, *equal),
            Condition::Interface(incoming, name, equal) => interface_is(*incoming, name, *equal),
        }
    }
}

/// The port forwarding of a container for one address family.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The address of the container, with the prefix length of its network.
    pub container: IpNet,
    /// The forwarded ports.
    pub forwards: Vec<Forward>,
    /// Conditions that apply to all forwarded ports.
    pub conditions: Vec<Condition>,
    /// Whether to masquerade forwarded packets that come from the container's own network, or from localhost. The container would
    /// otherwise answer a neighbour on its bridge directly, and the neighbour would not recognise the answer.
    pub hairpin: bool,
    /// With `hairpin`, whether to masquerade all forwarded packets.
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
    local.push(jump(PORTS));
    vec![
        table.create(),
        table.chain(PORTS),
        // The reference's DEL reads this chain.
        table.chain(BY_ADDRESS),
        table.hooked(PREROUTING, nat(0, LATE)),
        table.hooked(OUTPUT, nat(3, LATE)),
        table.append(PREROUTING, &local, OwnerMark::None),
        table.append(OUTPUT, &local, OwnerMark::None),
    ]
}

impl Plan {
    /// The sources whose packets are masqueraded on their way to the container.
    pub(super) fn masqueraded(&self) -> Vec<IpNet> {
        let v4 = self.is_v4();
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
        std::iter::once(self.container.trunc())
            .chain(localhost)
            .collect()
    }

    /// Whether the plan is for IPv4.
    #[must_use]
    pub fn is_v4(&self) -> bool {
        self.container.addr().is_ipv4()
    }

    /// Matches the connections that the rules of this plan have forwarded, and the messages that must precede such a rule.
    /// Connections that another program, such as a service proxy, leads to the container keep their source, and so do those that a
    /// neighbour opens to the container's own address. `number` differs between the rules of a transaction.
    fn is_forwarded(&self, number: u32) -> Result<(Vec<Message>, Vec<Attributes>), Unfit> {
        let table = table(self.is_v4());
        let set = Set::anonymous(number, &[Type::Protocol, Type::Port], Kind::Set);
        let ports: BTreeSet<(u8, u16)> =
            self.forwards.iter().map(|f| (f.protocol, f.port)).collect();
        let elements: Vec<Element> = ports
            .into_iter()
            .map(|(protocol, port)| {
                let key = vec![Value::Protocol(protocol), Value::Port(port)];
                Element::new(key, Data::None)
            })
            .collect();
        let mut before = vec![table.create_set(&set)?];
        before.extend(table.add_elements(&set, &elements)?);
        let mut list = has_bits(Field::ConnectionStatus, status::DNAT, true);
        let fields = [Field::Protocol, Field::OriginalDestinationPort];
        list.extend(in_set(&fields, &set, true));
        Ok((before, list))
    }

    /// The number of rules that the plan needs.
    #[must_use]
    pub fn size(&self) -> usize {
        self.forwards.len() + self.masqueraded().len()
    }

    /// The numbers of rules that the reference creates for this plan in the tables of iptables, without duplicates.
    /// The first counts rules with the container as target, the second those that mark packets for masquerading.
    #[must_use]
    pub fn size_in_iptables(&self) -> (usize, usize) {
        let ports = |f: &Forward| (f.protocol, f.host, f.port);
        let leading: BTreeSet<_> = self.forwards.iter().map(|f| (ports(f), f.target)).collect();
        let marking: BTreeSet<_> = self.forwards.iter().map(ports).collect();
        (leading.len(), marking.len() * self.masqueraded().len())
    }

    fn rules(&self, owner: &Owner, container: &str) -> Result<Vec<Message>, Unfit> {
        let table = table(self.is_v4());
        let target = self.container.addr();
        let mark = OwnerMark::Both {
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
            list.extend(redirect(target, forward.target));
            rules.push(table.append(PORTS, &list, mark));
        }
        for (number, source) in (1..).zip(self.masqueraded()) {
            let mut list = if source.prefix_len() == 0 {
                vec![]
            } else {
                address_is(true, source, true)
            };
            list.extend(address_is(false, IpNet::from(target), true));
            let (before, is_forwarded) = self.is_forwarded(number)?;
            rules.extend(before);
            list.extend(is_forwarded);
            list.push(masquerade());
            rules.push(table.append(MASQUERADING, &list, mark));
        }
        Ok(rules)
    }
}

/// Adds the rules of a plan. `container` is the id of the owner's container.
pub fn add(plan: &Plan, owner: &Owner, container: &str) -> io::Result<()> {
    let table = table(plan.is_v4());
    let rules = plan.rules(owner, container)?;
    let mut nft = Nft::open()?;
    // The reference creates its chain for masquerading, but not our base chains.
    let missing = |nft: &mut Nft| -> io::Result<Vec<Message>> {
        let mut missing = vec![];
        if !nft.has(table, PREROUTING)? {
            missing = scaffold(table);
        }
        if !nft.has(table, MASQUERADING)? {
            missing.push(masquerading(table));
        }
        Ok(missing)
    };
    if missing(&mut nft)?.is_empty() {
        return Ok(nft.commit(rules)?);
    }
    nft.commit_if_unchanged(|nft| {
        let mut messages = missing(nft)?;
        messages.extend_from_slice(&rules);
        Ok(messages)
    })
}

/// The chains that contain rules of containers. Only earlier versions of the reference use `hostip_hostports`.
fn chains() -> Vec<(Table, &'static str)> {
    TABLES
        .iter()
        .flat_map(|t| [(*t, PORTS), (*t, BY_ADDRESS), (*t, MASQUERADING)])
        .collect()
}

/// The number of rules of a plan that exist: the owner's, and those that the reference
/// has marked with the container's id alone. The reference marks the rules of all
/// networks of a container alike, so only its rules about the plan's address count.
pub fn count(plan: &Plan, owner: &Owner, container: &str) -> io::Result<usize> {
    let address = octets(plan.container.addr());
    // nft compares two adjacent addresses as a single value.
    let is_about = |rule: &Rule| {
        rule.loads.contains(&address) || rule.values.iter().any(|v| v.ends_with(&address))
    };
    let mut nft = Nft::open()?;
    let mut found = 0;
    for chain in [PORTS, MASQUERADING] {
        found += nft
            .rules(table(plan.is_v4()), chain)?
            .iter()
            .filter(|r| {
                owner.has(&r.mark) || (id_by_reference(r) == Some(container) && is_about(r))
            })
            .count();
    }
    Ok(found)
}

/// The container's id, if the reference has created the rule. Older versions of ours wrote comments with commas.
fn id_by_reference(rule: &Rule) -> Option<&str> {
    let is_id = rule.mark == rule.comment && !rule.mark.is_empty() && !rule.mark.contains(',');
    is_id.then_some(rule.mark.as_str())
}

/// Removes the rules of the owner, and those that the reference has marked with the id of `container`.
pub fn remove(nft: &mut Nft, owner: &Owner, container: Option<&str>) -> io::Result<()> {
    nft.delete(&chains(), |rule| {
        owner.has(&rule.mark) || (container.is_some() && id_by_reference(rule) == container)
    })
}

/// Removes the rules of attachments that are not in `keep`, and those
/// that the reference has marked with an id for which `is_gone` is true.
pub fn collect(
    nft: &mut Nft,
    network: &str,
    keep: &[(String, String)],
    is_gone: impl Fn(&str) -> bool,
) -> io::Result<()> {
    nft.delete(&chains(), |rule| {
        is_orphaned(&rule.mark, network, keep) || id_by_reference(rule).is_some_and(&is_gone)
    })
}
