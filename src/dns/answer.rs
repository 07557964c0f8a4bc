//! Answers from the records of the cluster. The rules are those of the Kubernetes DNS specification 1.1.0 and, where it leaves a
//! choice, of CoreDNS's kubernetes plugin (`plugin/kubernetes/kubernetes.go`, `plugin/backend_lookup.go`).

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hickory_proto::rr::rdata::{A, AAAA, CNAME, HINFO, NS, PTR, SOA, SRV, TXT};
use hickory_proto::rr::{Name as RecordName, RData, Record};

use holdfast_core::network::Protocol;

use crate::query::Query;
use crate::records::{Group, Port, Records, Service, Target, protocol_of};
use crate::wire::{self, Name, code, kind};

/// TTL of the cluster's records and of their absence, in seconds: the default of CoreDNS's plugin.
const TTL: u32 = 5;
/// TTL of `dns-version`, in seconds, as in the specification's example.
const VERSION_TTL: u32 = 28800;
const VERSION: &str = "1.1.0";
/// TTL of the answer to ANY, in seconds (RFC 8482 section 4.2 suggests a long one).
const ANY_TTL: u32 = 3600;
/// Most CNAME records of one answer.
const MAX_ALIASES: usize = 8;
/// Shortest A record in bytes, with a compressed name.
const SHORTEST_RECORD: usize = 16;
/// Labels below the cluster's domain in the longest name: `_port._proto.service.namespace.svc`.
const MAX_LABELS: usize = 5;

/// An answer with its records.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    /// Response code.
    pub(crate) code: u16,
    pub(crate) answers: Vec<Record>,
    pub(crate) authorities: Vec<Record>,
    pub(crate) additionals: Vec<Record>,
    /// The target of the last CNAME if the target is outside of the cluster: the forwarder completes the answer.
    pub(crate) chase: Option<Name>,
}

/// Answers a query with the class IN; `None` if the name is not one of the cluster. `rotation` chooses the first of several addresses, so that clients that take the first are spread; the
/// response has at most `limit` bytes, so more records than fit are not created.
pub(crate) fn answer(
    records: &Records,
    query: &Query,
    rotation: usize,
    limit: usize,
) -> Option<Answer> {
    let lookup = Lookup {
        records,
        rotation,
        most: limit / SHORTEST_RECORD + 1,
    };
    let Some(prefix) = query.lower.below(&records.zone) else {
        return lookup.reverse(query);
    };
    if !records.synced {
        return Some(Answer {
            code: code::SERVFAIL,
            ..Answer::default()
        });
    }
    let mut answer = Answer::default();
    lookup.follow(query.name, prefix, query.kind, &mut answer);
    Some(answer)
}

/// The answer to ANY (RFC 8482 section 4.2), for any existing or unknown name.
pub(crate) fn answer_any(query: &Query) -> Answer {
    let data = HINFO::new("RFC8482".to_owned(), String::new());
    Answer {
        answers: vec![Record::from_rdata(
            record_name(&query.name),
            ANY_TTL,
            RData::HINFO(data),
        )],
        ..Answer::default()
    }
}

pub(crate) fn record_name(name: &Name) -> RecordName {
    labelled(name.labels())
}

fn labelled<'a>(labels: impl Iterator<Item = &'a [u8]>) -> RecordName {
    // Joined names of a service may be too long for DNS; then no client can ask for them either.
    let mut name = RecordName::from_labels(labels).unwrap_or_default();
    name.set_fqdn(true);
    name
}

/// What a name below the domain means.
enum Node<'a> {
    /// The name does not exist.
    Absent,
    /// The name exists and has no records of its own, as `svc.cluster.local`.
    Empty,
    Apex,
    Version,
    NameServer,
    Pod(IpAddr),
    Service(&'a Service, Part<'a>),
}

/// Which part of a service a name selects.
#[derive(Clone, Copy)]
enum Part<'a> {
    All,
    Port(&'a [u8], Protocol),
    /// One endpoint's host name.
    Endpoint(&'a [u8]),
}

struct Lookup<'a> {
    records: &'a Records,
    rotation: usize,
    /// Most records that are worth creating.
    most: usize,
}

impl Lookup<'_> {
    /// Adds the records of a name and of the names that its CNAMEs point to.
    fn follow(&self, owner: Name, prefix: &[u8], kind: u16, answer: &mut Answer) {
        let (mut owner, mut prefix) = (owner, prefix.to_vec());
        for _ in 0..MAX_ALIASES {
            let node = self.node(&prefix);
            let external = match &node {
                Node::Service(service, Part::All) => match &service.target {
                    Target::External(target) => Name::read(target),
                    _ => None,
                },
                _ => None,
            };
            let Some(target) = external else {
                return self.records_of(&owner, &prefix, node, kind, answer);
            };
            let data = RData::CNAME(CNAME(record_name(&target)));
            answer.answers.push(record(&owner, data));
            if kind == kind::CNAME {
                return;
            }
            match target.lowercase().below(&self.records.zone) {
                None => {
                    answer.chase = Some(target);
                    return;
                }
                Some(below) => prefix = below.to_vec(),
            }
            owner = target;
        }
        // Services that name each other in a circle.
        answer.code = code::SERVFAIL;
    }

    /// Finds the meaning of the labels before the domain, in lower case.
    fn node<'p>(&'p self, prefix: &'p [u8]) -> Node<'p> {
        let mut labels: [&[u8]; MAX_LABELS] = [&[]; MAX_LABELS];
        let mut starts = [0; MAX_LABELS];
        let (mut count, mut at) = (0, 0);
        for label in wire::labels(prefix) {
            if count == MAX_LABELS {
                return Node::Absent;
            }
            (labels[count], starts[count]) = (label, at);
            at += 1 + label.len();
            count += 1;
        }
        // The bytes of the namespace's label, and of the labels of service and namespace.
        let space = count.checked_sub(2).map(|n| starts[n]..starts[n + 1]);
        let has_space = space.is_some_and(|range| self.records.has_namespace(&prefix[range]));
        let service = count
            .checked_sub(3)
            .and_then(|n| self.records.service(&prefix[starts[n]..starts[n + 2]]));
        match &labels[..count] {
            [] => Node::Apex,
            [b"dns-version"] => Node::Version,
            [b"ns", b"dns"] => Node::NameServer,
            [b"dns" | b"svc" | b"pod"] => Node::Empty,
            [_, b"svc" | b"pod"] if has_space => Node::Empty,
            [host, _, b"pod"] if has_space => dashed_address(host).map_or(Node::Absent, Node::Pod),
            [.., b"svc"] => match (service, &labels[..count]) {
                (Some(service), [_, _, _]) => Node::Service(service, Part::All),
                (Some(service), [host, _, _, _]) => part_node(service, host),
                (Some(service), [port, protocol, _, _, _]) => port_node(service, port, protocol),
                _ => Node::Absent,
            },
            _ => Node::Absent,
        }
    }

    fn records_of(&self, owner: &Name, prefix: &[u8], node: Node<'_>, kind: u16, to: &mut Answer) {
        match (node, kind) {
            (Node::Absent, _) => to.code = code::NXDOMAIN,
            (Node::Apex, kind::SOA) => return to.answers.push(self.soa()),
            (Node::Apex, kind::NS) => {
                let server = self.below_domain("ns.dns");
                to.answers
                    .push(record(owner, RData::NS(NS(server.clone()))));
                let addresses = self.records.addresses.iter();
                to.additionals
                    .extend(addresses.map(|ip| addressed(&server, *ip)));
                return;
            }
            (Node::Version, kind::TXT) => {
                let data = RData::TXT(TXT::new(vec![VERSION.to_owned()]));
                let name = record_name(owner);
                return to.answers.push(Record::from_rdata(name, VERSION_TTL, data));
            }
            (Node::NameServer, _) => self.push_addresses(owner, &self.records.addresses, kind, to),
            (Node::Pod(address), _) => self.push_addresses(owner, &[address], kind, to),
            (Node::Service(service, part), kind::SRV) => {
                if self.push_srv(owner, prefix, service, part, to) {
                    to.code = code::NXDOMAIN;
                }
            }
            (Node::Service(service, part), kind) => match addresses(service, part) {
                Some(all) => self.push_addresses(owner, &all, kind, to),
                None => to.code = code::NXDOMAIN,
            },
            (Node::Empty | Node::Apex | Node::Version, _) => {}
        }
        if to
            .answers
            .last()
            .is_none_or(|last| matches!(last.data, RData::CNAME(_)))
        {
            to.authorities.push(self.soa());
        }
    }

    fn push_addresses(&self, owner: &Name, all: &[IpAddr], kind: u16, to: &mut Answer) {
        let wanted: Vec<IpAddr> = match kind {
            kind::A => all.iter().copied().filter(IpAddr::is_ipv4).collect(),
            kind::AAAA => all.iter().copied().filter(IpAddr::is_ipv6).collect(),
            _ => return,
        };
        let name = record_name(owner);
        let rotated = self.rotated(&wanted);
        to.answers.extend(rotated.map(|ip| addressed(&name, *ip)));
    }

    fn rotated<'v, T>(&self, all: &'v [T]) -> impl Iterator<Item = &'v T> {
        let first = self.rotation.checked_rem(all.len()).unwrap_or_default();
        all[first..].iter().chain(&all[..first]).take(self.most)
    }

    /// Adds SRV records and the addresses of their targets. Returns whether the name does not exist.
    fn push_srv(
        &self,
        owner: &Name,
        prefix: &[u8],
        service: &Service,
        part: Part<'_>,
        to: &mut Answer,
    ) -> bool {
        let own = labels_of_service(prefix, part);
        let domain = self.records.zone.labels();
        let base: Vec<&[u8]> = own.chain(domain).collect();
        let mut items: Vec<(Option<Host<'_>>, IpAddr, u16)> = Vec::new();
        let mut exists = false;
        match (&service.target, part) {
            (Target::Cluster(cluster), Part::All | Part::Port(..)) => {
                exists = has_selected(&service.ports, part);
                for port in service.ports.iter().filter(|p| is_selected(p, part)) {
                    items.extend(cluster.iter().map(|ip| (None, *ip, port.number)));
                }
            }
            _ => {
                for group in &service.groups {
                    let hosts: Vec<(Host<'_>, IpAddr)> = hosts(group, part).collect();
                    exists |= !hosts.is_empty() && has_selected(&group.ports, part);
                    for port in group.ports.iter().filter(|p| is_selected(p, part)) {
                        items.extend(hosts.iter().map(|(h, ip)| (Some(*h), *ip, port.number)));
                    }
                }
            }
        }
        if items.is_empty() {
            return !exists;
        }
        // Upstream's weight: 100 divided by the number of targets, before duplicates are removed.
        let weight = u16::try_from((100 / items.len()).max(1)).unwrap_or(1);
        let name = record_name(owner);
        let (mut seen, mut seen_addresses) = (HashSet::new(), HashSet::new());
        for (host, address, port) in self.rotated(&items) {
            let target = match host {
                None => labelled(base.iter().copied()),
                Some(host) => {
                    let label = host.label();
                    labelled(std::iter::once(label.as_bytes()).chain(base.iter().copied()))
                }
            };
            // Only endpoints with one hostname or with several ports repeat a target.
            if seen.insert((*host, *port)) {
                let data = RData::SRV(SRV::new(0, weight, *port, target.clone()));
                to.answers.push(Record::from_rdata(name.clone(), TTL, data));
            }
            if seen_addresses.insert((*host, *address)) {
                to.additionals.push(addressed(&target, *address));
            }
        }
        false
    }

    /// Answers a reverse name of an address in the cluster.
    fn reverse(&self, query: &Query) -> Option<Answer> {
        let address = reverse_address(&query.lower)?;
        let owners: Vec<(&[u8], &Service)> = self.records.owners(&address).collect();
        if owners.is_empty() {
            return None;
        }
        let mut answer = Answer::default();
        if query.kind != kind::PTR {
            let mut soa = self.soa();
            soa.name = record_name(&query.name);
            answer.authorities.push(soa);
            return Some(answer);
        }
        let domain: Vec<&[u8]> = [b"svc".as_slice()]
            .into_iter()
            .chain(self.records.zone.labels())
            .collect();
        let mut names = Vec::new();
        for (key, service) in &owners {
            let service_name = wire::labels(key).chain(domain.iter().copied());
            if matches!(&service.target, Target::Cluster(all) if all.contains(&address)) {
                // A cluster address belongs to one service (CoreDNS returns only the service then).
                names = vec![labelled(service_name)];
                break;
            }
            let all = service.groups.iter().flat_map(|g| hosts(g, Part::All));
            for (host, _) in all.filter(|(_, ip)| *ip == address) {
                let label = host.label();
                let own = std::iter::once(label.as_bytes());
                names.push(labelled(own.chain(service_name.clone())));
            }
        }
        names.sort();
        names.dedup();
        let records = names.into_iter().take(self.most);
        answer
            .answers
            .extend(records.map(|name| record(&query.name, RData::PTR(PTR(name)))));
        Some(answer)
    }

    fn below_domain(&self, prefix: &str) -> RecordName {
        let own = prefix.split('.').map(str::as_bytes);
        labelled(own.chain(self.records.zone.labels()))
    }

    fn soa(&self) -> Record {
        let server = self.below_domain("ns.dns");
        let mailbox = self.below_domain("hostmaster");
        let serial = self.records.serial;
        let data = SOA::new(server, mailbox, serial, 7200, 1800, 86400, TTL);
        record(&self.records.zone, RData::SOA(data))
    }
}

fn record(owner: &Name, data: RData) -> Record {
    Record::from_rdata(record_name(owner), TTL, data)
}

fn addressed(name: &RecordName, address: IpAddr) -> Record {
    let data = match address {
        IpAddr::V4(ip) => RData::A(A(ip)),
        IpAddr::V6(ip) => RData::AAAA(AAAA(ip)),
    };
    Record::from_rdata(name.clone(), TTL, data)
}

/// A label below a service: an endpoint, or the protocol part of SRV names, which exists without records (RFC 8020).
fn part_node<'a>(service: &'a Service, host: &'a [u8]) -> Node<'a> {
    if matches!(service.target, Target::External(_)) {
        return Node::Absent;
    }
    let Some(protocol) = protocol_of(host) else {
        return Node::Service(service, Part::Endpoint(host));
    };
    let has = |ports: &[Port]| {
        ports
            .iter()
            .any(|p| p.protocol == protocol && !p.name.is_empty())
    };
    let exists = match service.target {
        Target::Headless => service.groups.iter().any(|g| has(&g.ports)),
        _ => has(&service.ports),
    };
    if exists { Node::Empty } else { Node::Absent }
}

fn port_node<'a>(service: &'a Service, port: &'a [u8], protocol: &[u8]) -> Node<'a> {
    match (port.strip_prefix(b"_"), protocol_of(protocol)) {
        (Some(port), Some(protocol))
            if !matches!(service.target, Target::External(_)) && !port.is_empty() =>
        {
            Node::Service(service, Part::Port(port, protocol))
        }
        _ => Node::Absent,
    }
}

/// The labels of service, namespace and `svc` in a name that selects a part of a service.
fn labels_of_service<'a>(prefix: &'a [u8], part: Part<'_>) -> impl Iterator<Item = &'a [u8]> {
    let before = match part {
        Part::All => 0,
        Part::Endpoint(_) => 1,
        Part::Port(..) => 2,
    };
    wire::labels(prefix).skip(before)
}

fn is_selected(port: &Port, part: Part<'_>) -> bool {
    match part {
        Part::Port(name, protocol) => port.name.as_bytes() == name && port.protocol == protocol,
        Part::All | Part::Endpoint(_) => true,
    }
}

/// Whether ports select anything. Endpoints without ports have addresses, too.
fn has_selected(ports: &[Port], part: Part<'_>) -> bool {
    match part {
        Part::Port(..) => ports.iter().any(|p| is_selected(p, part)),
        Part::All | Part::Endpoint(_) => true,
    }
}

/// The host label of an endpoint.
#[derive(Clone, Copy, Eq, Hash, PartialEq)]
enum Host<'a> {
    Named(&'a str),
    /// The address with dashes, as in CoreDNS.
    Dashed(IpAddr),
}

impl Host<'_> {
    fn label(&self) -> String {
        match self {
            Host::Named(name) => (*name).to_owned(),
            Host::Dashed(ip) => ip.to_string().replace(['.', ':'], "-"),
        }
    }
}

/// The endpoints of a group that a part selects, without regard to ports.
fn hosts<'a>(group: &'a Group, part: Part<'_>) -> impl Iterator<Item = (Host<'a>, IpAddr)> {
    let (label, dashed) = match part {
        Part::Endpoint(label) => (Some(label.to_vec()), dashed_address(label)),
        _ => (None, None),
    };
    let is_all = label.is_none();
    let v4 = group.v4.iter().map(|ip| IpAddr::V4(*ip));
    let v6 = group.v6.iter().map(|ip| IpAddr::V6(*ip));
    let unnamed = v4.chain(v6).filter(move |ip| is_all || dashed == Some(*ip));
    let named = group.named.iter();
    let named =
        named.filter(move |(name, _)| label.as_deref().is_none_or(|l| l == name.as_bytes()));
    unnamed
        .map(|ip| (Host::Dashed(ip), ip))
        .chain(named.map(|(name, ip)| (Host::Named(name), *ip)))
}

/// The addresses of a part of a service; `None` if the name does not exist.
fn addresses(service: &Service, part: Part<'_>) -> Option<Vec<IpAddr>> {
    match (&service.target, part) {
        (Target::External(_), _) => None,
        (Target::Cluster(all), Part::All) => Some(all.to_vec()),
        (Target::Cluster(all), Part::Port(..)) => {
            has_selected(&service.ports, part).then(|| all.to_vec())
        }
        (Target::Cluster(_), Part::Endpoint(_)) | (Target::Headless, _) => {
            let groups = service.groups.iter();
            let groups = groups.filter(|g| has_selected(&g.ports, part));
            let mut all: Vec<IpAddr> = groups
                .flat_map(|g| hosts(g, part))
                .map(|(_, ip)| ip)
                .collect();
            // Endpoints may be in several groups.
            all.sort_unstable();
            all.dedup();
            (!all.is_empty()).then_some(all)
        }
    }
}

/// The address of a label like `10-244-0-5` or `fd00--1`.
fn dashed_address(label: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(label).ok()?;
    let dashes = text.bytes().filter(|b| *b == b'-').count();
    if dashes == 3 && !text.contains("--") {
        return text.replace('-', ".").parse().ok().map(IpAddr::V4);
    }
    text.replace('-', ":").parse().ok().map(IpAddr::V6)
}

/// The address of a reverse name in lower case.
fn reverse_address(name: &Name) -> Option<IpAddr> {
    let labels: Vec<&[u8]> = name.labels().collect();
    match labels.as_slice() {
        [bytes @ .., b"in-addr", b"arpa"] if bytes.len() == 4 => {
            let mut octets = [0; 4];
            for (octet, label) in octets.iter_mut().zip(bytes.iter().rev()) {
                // `01` is another name than `1`.
                let text = std::str::from_utf8(label).ok()?;
                *octet = text.parse().ok().filter(|n: &u8| n.to_string() == text)?;
            }
            Some(IpAddr::V4(Ipv4Addr::from(octets)))
        }
        [nibbles @ .., b"ip6", b"arpa"] if nibbles.len() == 32 => {
            let mut value = 0_u128;
            for label in nibbles.iter().rev() {
                let [digit] = label else { return None };
                value = value << 4 | u128::from(char::from(*digit).to_digit(16)?);
            }
            Some(IpAddr::V6(Ipv6Addr::from(value)))
        }
        _ => None,
    }
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
