//! Messages for the kernel: operations on a ruleset as sets, chains and maps of nftables.

use std::io;
use std::net::IpAddr;

use holdfast_core::network::Family as Version;
use holdfast_core::policies::{Chain, Direction, Members, Operation, Ports, Rule, Ruleset};
use holdfast_net::netlink::{Attributes, Message};
use holdfast_net::nft::element::{Element, single};
use holdfast_net::nft::expression::{Field, family_is, has_bits, in_set, state};
use holdfast_net::nft::set::{Kind, Set};
use holdfast_net::nft::statement::{verdict, verdict_of_map};
use holdfast_net::nft::value::{Data, IpVersion, Type, Unfit, Value};
use holdfast_net::nft::verdict::Verdict;
use holdfast_net::nft::{Family, Hook, Nft, OwnerMark, Table};

use super::{MOST_ELEMENTS, PolicyError};

/// The base chains, with the direction that they restrict, their hook (`NF_INET_…`) and their priority. An `accept` ends only one
/// of them, so a packet must pass all.
const BASE_CHAINS: [(&str, Direction, u32, i32); 3] = [
    ("egress", Direction::Egress, 2, -1),
    ("ingress", Direction::Ingress, 2, 0),
    ("egress-to-node", Direction::Egress, 1, 0),
];
/// The number of rules of each base chain.
const RULES_OF_BASE_CHAIN: usize = 6;
/// The set of the types of ICMPv6 messages that discover neighbours: router and neighbour solicitations and advertisements,
/// and redirects (RFC 4861).
const DISCOVERY: &str = "neighbour-discovery";
const ICMPV6: u8 = 58;
/// The longest comment of a rule, in bytes.
const LONGEST_COMMENT: usize = 127;

fn ip(version: Version) -> IpVersion {
    match version {
        Version::V4 => IpVersion::V4,
        Version::V6 => IpVersion::V6,
    }
}

/// The map from a pod's address to its chain.
fn pods(direction: Direction, version: Version) -> Set {
    let name = match (direction, version) {
        (Direction::Ingress, Version::V4) => "ingress-pods-4",
        (Direction::Ingress, Version::V6) => "ingress-pods-6",
        (Direction::Egress, Version::V4) => "egress-pods-4",
        (Direction::Egress, Version::V6) => "egress-pods-6",
    };
    Set::new(name, &[ip(version).address()], Kind::VerdictMap)
}

/// The set of pairs of source and destination that are the same restricted pod: a pod may always reach itself.
fn loops(version: Version) -> Set {
    let name = match version {
        Version::V4 => "loops-4",
        Version::V6 => "loops-6",
    };
    Set::new(
        name,
        &[ip(version).address(), ip(version).address()],
        Kind::Set,
    )
}

fn loop_of(address: IpAddr) -> Element {
    Element::new(
        vec![Value::Address(address), Value::Address(address)],
        Data::None,
    )
}

fn discovery() -> Set {
    Set::new(DISCOVERY, &[Type::Protocol, Type::Port], Kind::Set)
}

/// The type and code of an ICMP message are where other protocols have the source port.
fn discovery_messages() -> Vec<Element> {
    let message = |kind: u16| {
        Element::new(
            vec![Value::Protocol(ICMPV6), Value::Port(kind << 8)],
            Data::None,
        )
    };
    (133..=137).map(message).collect()
}

/// A set of the ruleset.
fn set(name: &str, members: &Members) -> Set {
    let mut set = match members {
        Members::Pods(version, _) | Members::Blocks(version, _) => {
            Set::new(name, &[ip(*version).address()], Kind::Set)
        }
        Members::Ports(_) => Set::new(name, &[Type::Protocol, Type::Port], Kind::Set),
    };
    set.has_intervals = !matches!(members, Members::Pods(..));
    set
}

fn element(address: IpAddr) -> Element {
    Element::new(vec![Value::Address(address)], Data::None)
}

fn elements(members: &Members) -> Vec<Element> {
    match members {
        Members::Pods(_, addresses) => addresses.iter().copied().map(element).collect(),
        Members::Blocks(_, ranges) => {
            let interval = |(first, last): &(IpAddr, IpAddr)| {
                Element::interval(
                    vec![Value::Address(*first)],
                    vec![Value::Address(*last)],
                    Data::None,
                )
            };
            ranges.iter().map(interval).collect()
        }
        Members::Ports(ports) => {
            let interval = |p: &Ports| {
                let key = |port| vec![Value::Protocol(p.protocol.number()), Value::Port(port)];
                Element::interval(key(p.first), key(p.last), Data::None)
            };
            ports.iter().map(interval).collect()
        }
    }
}

/// The fields that name a set of the ruleset: only the key of a set stands in a rule.
fn named(name: &str, key: &[Type]) -> Set {
    Set::new(name, key, Kind::Set)
}

/// The expressions of a rule.
fn expressions(direction: Direction, rule: &Rule) -> Vec<Attributes> {
    match rule {
        Rule::Allow { peers, ports } => {
            let mut all = vec![];
            if let Some((version, set)) = peers {
                let peer = match direction {
                    Direction::Ingress => Field::Source(ip(*version)),
                    Direction::Egress => Field::Destination(ip(*version)),
                };
                all.extend(family_is(*version == Version::V4));
                all.extend(in_set(
                    &[peer],
                    &named(set, &[ip(*version).address()]),
                    true,
                ));
            }
            if let Some(set) = ports {
                let set = named(set, &[Type::Protocol, Type::Port]);
                all.extend(in_set(
                    &[Field::Protocol, Field::DestinationPort],
                    &set,
                    true,
                ));
            }
            all.push(verdict(&Verdict::Accept));
            all
        }
        Rule::Jump(chain) => vec![verdict(&Verdict::jump(chain))],
        Rule::Drop => vec![verdict(&Verdict::Drop)],
    }
}

fn restriction(direction: Direction, address: IpAddr, chain: &str) -> (Set, Element) {
    let map = pods(direction, Version::of(address));
    let target = Data::Verdict(Verdict::jump(chain));
    (map, Element::new(vec![Value::Address(address)], target))
}

/// The table.
pub(super) struct Filter {
    pub(super) table: Table,
}

impl Filter {
    pub(super) fn new(name: String) -> Filter {
        // Names of tables live as long as the process, which has one or two.
        Filter {
            table: Table {
                family: Family::Inet,
                name: Box::leak(name.into_boxed_str()),
            },
        }
    }

    pub(super) fn failed(&self, error: io::Error) -> PolicyError {
        PolicyError::Table {
            table: self.table.name.to_owned(),
            error,
        }
    }

    /// Replaces the table, with operations that start from an empty ruleset.
    pub(super) fn replace(&self, operations: &[Operation]) -> io::Result<Vec<Message>> {
        let mut messages: Vec<Message> = self.table.destroy().into();
        messages.push(self.table.create());
        for version in Version::ALL {
            for direction in Direction::BOTH {
                messages.push(
                    self.table
                        .create_set(&pods(direction, version))
                        .map_err(io::Error::from)?,
                );
            }
            messages.push(
                self.table
                    .create_set(&loops(version))
                    .map_err(io::Error::from)?,
            );
        }
        messages.push(
            self.table
                .create_set(&discovery())
                .map_err(io::Error::from)?,
        );
        messages.extend(
            self.table
                .add_elements(&discovery(), &discovery_messages())
                .map_err(io::Error::from)?,
        );
        for (chain, direction, hook, priority) in BASE_CHAINS {
            messages.push(self.table.hooked(
                chain,
                Hook {
                    kind: "filter",
                    hook,
                    priority,
                },
            ));
            messages.extend(self.base_rules(chain, direction));
        }
        messages.extend(self.change(operations)?);
        Ok(messages)
    }

    fn base_rules(&self, chain: &str, direction: Direction) -> [Message; RULES_OF_BASE_CHAIN] {
        let accept = |mut conditions: Vec<Attributes>| {
            conditions.push(verdict(&Verdict::Accept));
            self.table.append(chain, &conditions, OwnerMark::None)
        };
        let of_version = |version: Version, more: Vec<Attributes>| {
            [family_is(version == Version::V4), more].concat()
        };
        let is_loop = |version| {
            let pair = [Field::Source(ip(version)), Field::Destination(ip(version))];
            accept(of_version(version, in_set(&pair, &loops(version), true)))
        };
        let restrict = |version| {
            let pod = match direction {
                Direction::Ingress => Field::Destination(ip(version)),
                Direction::Egress => Field::Source(ip(version)),
            };
            let conditions = of_version(version, verdict_of_map(&[pod], &pods(direction, version)));
            self.table.append(chain, &conditions, OwnerMark::None)
        };
        [
            accept(has_bits(
                Field::ConnectionState,
                state::ESTABLISHED | state::RELATED,
                true,
            )),
            accept(in_set(
                &[Field::Protocol, Field::SourcePort],
                &discovery(),
                true,
            )),
            is_loop(Version::V4),
            is_loop(Version::V6),
            restrict(Version::V4),
            restrict(Version::V6),
        ]
    }

    /// The messages of operations.
    pub(super) fn change(&self, operations: &[Operation]) -> io::Result<Vec<Message>> {
        let mut messages = vec![];
        for operation in operations {
            self.operation(operation, &mut messages)
                .map_err(io::Error::from)?;
        }
        Ok(messages)
    }

    fn operation(&self, operation: &Operation, messages: &mut Vec<Message>) -> Result<(), Unfit> {
        let table = self.table;
        match operation {
            Operation::CreateSet(name, members) => {
                let set = set(name, members);
                messages.push(table.create_set(&set)?);
                messages.extend(table.add_elements(&set, &elements(members))?);
            }
            Operation::ChangeSet {
                name,
                now,
                removed,
                added,
            } => {
                let set = set(name, now);
                let of = |addresses: &std::collections::BTreeSet<IpAddr>| -> Vec<Element> {
                    addresses.iter().copied().map(element).collect()
                };
                messages.extend(table.delete_elements(&set, &of(removed))?);
                messages.extend(table.add_elements(&set, &of(added))?);
            }
            Operation::CreateChain(name) => messages.push(table.chain(name)),
            Operation::SetRules(name, chain) => {
                messages.push(table.flush(name));
                messages.extend(self.rules(name, chain));
            }
            Operation::Restrict(direction, address, chain) => {
                let (map, element) = restriction(*direction, *address, chain);
                messages.extend(table.add_elements(&map, &[element])?);
                // A pod that is restricted in both directions is added twice, which is no error.
                messages.extend(
                    table.add_elements(&loops(Version::of(*address)), &[loop_of(*address)])?,
                );
            }
            // The pair of the pod itself may stay: it allows nothing that a policy could forbid.
            Operation::Release(direction, address, chain) => {
                let (map, element) = restriction(*direction, *address, chain);
                messages.extend(table.delete_elements(&map, &[element])?);
            }
            Operation::EmptyChain(name) => messages.push(table.flush(name)),
            Operation::DeleteChain(name) => messages.extend(table.remove(name)),
            Operation::DeleteSet(name) => messages.push(table.delete_set(name)),
        }
        Ok(())
    }

    fn rules(&self, name: &str, chain: &Chain) -> Vec<Message> {
        // Names of objects are ASCII.
        let comment = chain
            .policy
            .get(..chain.policy.len().min(LONGEST_COMMENT))
            .unwrap_or_default();
        let mark = match comment {
            "" => OwnerMark::None,
            comment => OwnerMark::Comment(comment),
        };
        let append = |rule| {
            self.table
                .append(name, &expressions(chain.direction, rule), mark)
        };
        chain.rules.iter().map(append).collect()
    }

    /// Whether the kernel's table has exactly these sets, members, chains and numbers of rules.
    pub(super) fn is_in(&self, nft: &mut Nft, ruleset: &Ruleset) -> io::Result<bool> {
        for (chain, ..) in BASE_CHAINS {
            if nft.rules(self.table, chain)?.len() != RULES_OF_BASE_CHAIN {
                return Ok(false);
            }
        }
        for (name, chain) in &ruleset.chains {
            if nft.rules(self.table, name)?.len() != chain.rules.len() {
                return Ok(false);
            }
        }
        for (name, members) in &ruleset.sets {
            if !self.has_elements(nft, &set(name, members), elements(members))? {
                return Ok(false);
            }
        }
        for direction in Direction::BOTH {
            for version in Version::ALL {
                let of_map = ruleset.pods.iter().filter(|((d, address), _)| {
                    *d == direction && Version::of(*address) == version
                });
                let wanted = of_map
                    .map(|((d, address), chain)| restriction(*d, *address, chain).1)
                    .collect();
                if !self.has_elements(nft, &pods(direction, version), wanted)? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn has_elements(&self, nft: &mut Nft, set: &Set, wanted: Vec<Element>) -> io::Result<bool> {
        if nft.set(self.table, &set.name)?.is_none() {
            return Ok(false);
        }
        let sorted = |elements: Vec<Element>| {
            let mut elements: Vec<Element> = elements.into_iter().map(single).collect();
            elements.sort_by(|a, b| a.key.cmp(&b.key));
            elements
        };
        let found = match nft.elements(self.table, set, MOST_ELEMENTS) {
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => return Ok(false),
            found => found?,
        };
        Ok(sorted(found) == sorted(wanted))
    }
}
