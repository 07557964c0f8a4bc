//! The address ranges of a cluster: services, the pods of all nodes, and the pods of this node. They are chosen when the
//! cluster starts for the first time, so that they overlap nothing on this machine, and recorded: objects and pods have
//! addresses of them. A start of an earlier version has recorded none, and had 10.96.0.0/16 for services.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use holdfast_net::netlink::Socket;
use ipnet::{IpNet, Ipv4Net};
use serde::{Deserialize, Serialize};

use super::messages;

/// The flags that select ranges.
const SERVICE: &str = "--service-cidr";
const CLUSTER: &str = "--cluster-cidr";
const PODS: &str = "--pod-cidr";

/// Where clusters keep their data.
const DATA: &str = "/var/lib";
/// The file in a cluster's data directory with its ranges.
const RECORD: &str = "ranges.json";
/// Locked while a cluster chooses its ranges, so that two clusters cannot choose the same.
const LOCK: &str = "/run/holdfast-ranges.lock";
/// The range of services before ranges were recorded.
const EARLIER: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 96, 0, 0), 16);

/// Candidates for a range of services: the second bytes of 10.x.0.0/16, and ranges for machines in a network with a route to
/// 10.0.0.0/8.
const SERVICE_CANDIDATES: (std::ops::Range<u8>, Ipv4Net) = (
    96..128,
    Ipv4Net::new_assert(Ipv4Addr::new(172, 29, 0, 0), 16),
);
/// Candidates for a range of pods.
const CLUSTER_CANDIDATES: (std::ops::Range<u8>, Ipv4Net) = (
    244..255,
    Ipv4Net::new_assert(Ipv4Addr::new(172, 28, 0, 0), 16),
);

/// The prefix length of a node's part of a range of pods.
const NODE_PREFIX: u8 = 24;
/// Longer prefixes have no tenth address for DNS, or too few addresses for pods.
const MAX_PREFIX: u8 = 28;
/// Shorter prefixes are too large for a cluster; a route with one leads to whatever no other route does.
const MIN_PREFIX: u8 = 8;

/// What the user wants; `None` for a default.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// `--service-cidr`.
    pub service: Option<String>,
    /// `--cluster-cidr`.
    pub cluster: Option<String>,
    /// `--pod-cidr`.
    pub pods: Option<Ipv4Net>,
}

/// The ranges of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ranges {
    /// The ranges of services, the first one for the cluster's own services.
    pub(super) service: Vec<IpNet>,
    /// The ranges of the pods of all nodes.
    pub(super) cluster: Vec<IpNet>,
    /// The range of this node's pods.
    pub(super) pods: Ipv4Net,
}

impl Default for Ranges {
    fn default() -> Ranges {
        let pods = Ipv4Net::new_assert(Ipv4Addr::new(10, 244, 0, 0), 24);
        Ranges {
            service: vec![EARLIER.into()],
            cluster: vec![Ipv4Net::new_assert(Ipv4Addr::new(10, 244, 0, 0), 16).into()],
            pods,
        }
    }
}

impl Ranges {
    /// The address of DNS: the tenth of the first range of services, as kubeadm chooses it (`GetDNSIP`).
    pub(super) fn dns(&self) -> Option<IpAddr> {
        Some(match self.service.first()? {
            IpNet::V4(range) => {
                Ipv4Addr::from(u32::from(range.network()).saturating_add(10)).into()
            }
            IpNet::V6(range) => {
                Ipv6Addr::from(u128::from(range.network()).saturating_add(10)).into()
            }
        })
    }

    /// The value of a flag for these ranges.
    pub(super) fn flag(ranges: &[IpNet]) -> String {
        let texts: Vec<String> = ranges.iter().map(ToString::to_string).collect();
        texts.join(",")
    }
}

/// A range that is in use on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Taken {
    /// What uses the range, for an error message.
    by: String,
    range: IpNet,
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

/// The first user of a range that overlaps this one.
fn user_of<'a>(range: &IpNet, taken: &'a [Taken]) -> Option<&'a Taken> {
    taken.iter().find(|taken| overlap(&taken.range, range))
}

/// The first candidate that overlaps nothing.
fn first_free(
    (bytes, last): &(std::ops::Range<u8>, Ipv4Net),
    taken: &[Taken],
    own: &[IpNet],
) -> Option<IpNet> {
    let sixteen = |byte: u8| Ipv4Net::new_assert(Ipv4Addr::new(10, byte, 0, 0), 16);
    let candidates = bytes.clone().map(sixteen).chain([*last]).map(IpNet::V4);
    candidates
        .into_iter()
        .find(|range| user_of(range, taken).is_none() && !own.iter().any(|own| overlap(own, range)))
}

/// The remedy for a range in use.
fn remedy(free: Option<IpNet>) -> String {
    free.map_or("use a range that is free here".to_owned(), |free| {
        format!("use a free range, such as {free}")
    })
}

/// Parses one or two ranges.
fn parse(flag: &str, text: &str) -> Result<Vec<IpNet>, String> {
    let wrong = |why: &str| {
        let remedy = "use one network such as 10.96.0.0/16, or one of each address family separated by a comma";
        messages::invalid_range(flag, text, why, remedy)
    };
    let mut all: Vec<IpNet> = vec![];
    for one in text.split(',') {
        let range: IpNet = one
            .trim()
            .parse()
            .map_err(|_| wrong("it is not an address range"))?;
        if range.addr() != range.network() {
            return Err(wrong("its address has bits after the prefix"));
        }
        let longest = range.max_prefix_len() - (32 - MAX_PREFIX);
        if range.prefix_len() > longest || range.prefix_len() < MIN_PREFIX {
            return Err(wrong(&format!(
                "its prefix is not between {MIN_PREFIX} and {longest} bits"
            )));
        }
        all.push(range);
    }
    match all.as_slice() {
        [_] => Ok(all),
        [a, b] if a.addr().is_ipv4() != b.addr().is_ipv4() => Ok(all),
        _ => Err(wrong("it is not one range of each family")),
    }
}

/// The range of the pods of this node by default: the first of the cluster's.
fn first_part(cluster: &[IpNet]) -> Option<Ipv4Net> {
    let v4 = cluster.iter().find_map(|range| match range {
        IpNet::V4(range) => Some(*range),
        IpNet::V6(_) => None,
    })?;
    let prefix = v4.prefix_len().max(NODE_PREFIX);
    Ipv4Net::new(v4.network(), prefix).ok()
}

/// Chooses the ranges of a cluster. `recorded` are those with which it was started before.
fn choose(wanted: &Wanted, recorded: Option<&Ranges>, taken: &[Taken]) -> Result<Ranges, String> {
    let service = choose_service(wanted.service.as_deref(), recorded, taken)?;
    let (cluster, pods) = choose_pods(wanted, recorded, &service, taken)?;
    let both = cluster
        .iter()
        .find(|range| service.iter().any(|other| overlap(range, other)));
    if both.is_some() {
        let why = format!("it overlaps {SERVICE} {}", Ranges::flag(&service));
        let free = first_free(&CLUSTER_CANDIDATES, taken, &service);
        let value = Ranges::flag(&cluster);
        return Err(messages::invalid_range(
            CLUSTER,
            &value,
            &why,
            &remedy(free),
        ));
    }
    Ok(Ranges {
        service,
        cluster,
        pods,
    })
}

fn choose_service(
    wanted: Option<&str>,
    recorded: Option<&Ranges>,
    taken: &[Taken],
) -> Result<Vec<IpNet>, String> {
    let free = || first_free(&SERVICE_CANDIDATES, taken, &[]);
    match (wanted, recorded) {
        (Some(text), recorded) => {
            let ranges = parse(SERVICE, text)?;
            if let Some(recorded) = recorded {
                // Stored services have addresses of the recorded range.
                return match ranges == recorded.service {
                    true => Ok(ranges),
                    false => Err(messages::recorded_range(
                        SERVICE,
                        text,
                        &Ranges::flag(&recorded.service),
                    )),
                };
            }
            check_free(SERVICE, text, &ranges, taken, free())?;
            Ok(ranges)
        }
        (None, Some(recorded)) => Ok(recorded.service.clone()),
        (None, None) => match free() {
            Some(range) => Ok(vec![range]),
            None => Err(messages::no_free_range(SERVICE)),
        },
    }
}

/// Whether a node's range is part of the cluster's ranges.
fn within(cluster: &[IpNet], pods: Ipv4Net) -> bool {
    let pods = IpNet::V4(pods);
    cluster.iter().any(|range| range.contains(&pods))
}

fn choose_pods(
    wanted: &Wanted,
    recorded: Option<&Ranges>,
    service: &[IpNet],
    taken: &[Taken],
) -> Result<(Vec<IpNet>, Ipv4Net), String> {
    let free = || first_free(&CLUSTER_CANDIDATES, taken, service);
    if let Some(pods) = wanted.pods
        && (pods.prefix_len() > MAX_PREFIX || pods.addr() != pods.network())
    {
        return Err(messages::invalid_pod_cidr(pods));
    }
    let cluster = match (&wanted.cluster, recorded, wanted.pods) {
        (Some(text), _, _) => {
            let ranges = parse(CLUSTER, text)?;
            if recorded.is_none_or(|recorded| recorded.cluster != ranges) {
                check_free(CLUSTER, text, &ranges, taken, free())?;
            }
            ranges
        }
        (None, Some(recorded), None) => recorded.cluster.clone(),
        (None, Some(recorded), Some(pods)) if within(&recorded.cluster, pods) => {
            recorded.cluster.clone()
        }
        (None, _, Some(pods)) => {
            check_free(PODS, &pods.to_string(), &[pods.into()], taken, free())?;
            vec![around(pods, taken, service)]
        }
        (None, None, None) => match free() {
            Some(range) => vec![range],
            None => return Err(messages::no_free_range(CLUSTER)),
        },
    };
    let part = recorded.map(|recorded| recorded.pods);
    let part = part.filter(|pods| within(&cluster, *pods));
    let part = part.or_else(|| first_part(&cluster));
    match wanted.pods.or(part) {
        Some(pods) if within(&cluster, pods) => Ok((cluster, pods)),
        Some(pods) => {
            let why = format!("it is not part of {CLUSTER} {}", Ranges::flag(&cluster));
            let part = first_part(&cluster).map(IpNet::V4);
            Err(messages::invalid_range(
                PODS,
                &pods.to_string(),
                &why,
                &remedy(part),
            ))
        }
        None => {
            let text = Ranges::flag(&cluster);
            let why = "it has no IPv4 range, which the pods' bridge needs";
            Err(messages::invalid_range(
                CLUSTER,
                &text,
                why,
                "add one, separated by a comma",
            ))
        }
    }
}

/// The cluster's range for a node's range that the user has chosen: the candidate around it if that is free, or else the
/// node's range alone.
fn around(pods: Ipv4Net, taken: &[Taken], service: &[IpNet]) -> IpNet {
    let pods = IpNet::V4(pods);
    let whole = pods.supernet_of(16).filter(|whole| {
        let [first, second, ..] = match whole.network() {
            IpAddr::V4(address) => address.octets(),
            IpAddr::V6(_) => return false,
        };
        let is_candidate = first == 10 && CLUSTER_CANDIDATES.0.contains(&second);
        is_candidate
            && user_of(whole, taken).is_none()
            && !service.iter().any(|own| overlap(own, whole))
    });
    whole.unwrap_or(pods)
}

/// The enclosing network with a prefix.
trait Supernet {
    fn supernet_of(&self, prefix: u8) -> Option<IpNet>;
}

impl Supernet for IpNet {
    fn supernet_of(&self, prefix: u8) -> Option<IpNet> {
        let network = IpNet::new(self.network(), prefix).ok()?.trunc();
        (prefix <= self.prefix_len()).then_some(network)
    }
}

fn check_free(
    flag: &str,
    text: &str,
    ranges: &[IpNet],
    taken: &[Taken],
    free: Option<IpNet>,
) -> Result<(), String> {
    let user = ranges.iter().find_map(|range| user_of(range, taken));
    match user {
        None => Ok(()),
        Some(Taken { by, range }) => {
            let why = format!("it overlaps {range}, which is {by}");
            Err(messages::invalid_range(flag, text, &why, &remedy(free)))
        }
    }
}

/// Reads the recorded ranges of a cluster by its data directory.
pub(super) fn recorded(data: &Path) -> anyhow::Result<Option<Ranges>> {
    let file = data.join(RECORD);
    match fs::read(&file) {
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .with_context(|| messages::unreadable_record(&file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| messages::unreadable_record(&file)),
    }
}

/// The ranges of a cluster that an earlier version has started: `pods` is the range in its network's configuration.
fn of_earlier_version(data: &Path, pods: Option<Ipv4Net>) -> Option<Ranges> {
    let pods = pods.filter(|_| data.join("control").is_dir())?;
    Some(Ranges {
        service: vec![EARLIER.into()],
        cluster: vec![around(pods, &[], &[EARLIER.into()])],
        pods,
    })
}

/// The ranges of the other clusters of this machine.
fn other_clusters(all: &Path, own: &Path) -> anyhow::Result<Vec<Taken>> {
    let mut taken = vec![];
    for entry in fs::read_dir(all)?.flatten() {
        let dir: PathBuf = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_ours = name == "holdfast" || name.starts_with("holdfast-");
        if !is_ours || dir == own {
            continue;
        }
        let cluster = name.strip_prefix("holdfast-").unwrap_or(&name);
        let ranges = match recorded(&dir)? {
            Some(ranges) => [ranges.service, ranges.cluster].concat(),
            None if dir.join("control").is_dir() => vec![EARLIER.into()],
            None => continue,
        };
        let by = format!("a range of the cluster {cluster}");
        taken.extend(ranges.into_iter().map(|range| Taken {
            by: by.clone(),
            range,
        }));
    }
    Ok(taken)
}

/// The networks of this machine's addresses, and the destinations of its routes, except those of the cluster's own bridge.
fn machine(bridge: &str) -> io::Result<Vec<Taken>> {
    let mut socket = Socket::route()?;
    let links = socket.links()?;
    let mut taken = vec![];
    for link in links.iter().filter(|link| link.name != bridge) {
        for address in socket.addresses(link.index)? {
            taken.push(Taken {
                by: format!(
                    "the network of the address {} of {}",
                    address.addr(),
                    link.name
                ),
                range: address.trunc(),
            });
        }
    }
    for route in socket.routes()? {
        let link = links.iter().find(|link| link.index == route.link);
        let name = link.map_or("another link", |link| link.name.as_str());
        if route.destination.prefix_len() >= MIN_PREFIX && name != bridge {
            taken.push(Taken {
                by: format!("the destination of a route through {name}"),
                range: route.destination,
            });
        }
    }
    Ok(taken)
}

/// Chooses the ranges of a cluster and records them. `configured` is the range of pods in its network's configuration, and
/// `bridge` its bridge.
pub(super) fn settle(
    wanted: &Wanted,
    data: &Path,
    configured: Option<Ipv4Net>,
    bridge: &str,
) -> anyhow::Result<Ranges> {
    let lock = fs::File::create(LOCK).with_context(|| format!("{LOCK} cannot be created"))?;
    lock.lock()
        .with_context(|| format!("{LOCK} cannot be locked"))?;
    let known = recorded(data)?.or_else(|| of_earlier_version(data, configured));
    let mut taken = other_clusters(Path::new(DATA), data)?;
    taken.extend(
        machine(bridge).context("the addresses and routes of this machine cannot be read")?,
    );
    let ranges = choose(wanted, known.as_ref(), &taken).map_err(anyhow::Error::msg)?;
    record(data, &ranges)?;
    Ok(ranges)
}

/// Records the ranges of a cluster in its data directory.
pub(super) fn record(data: &Path, ranges: &Ranges) -> anyhow::Result<()> {
    let file = data.join(RECORD);
    let text = serde_json::to_vec(ranges)?;
    holdfast_sys::file::replace(&file, &text)
        .with_context(|| format!("{} cannot be written", file.display()))
}

#[cfg(test)]
#[path = "ranges_tests.rs"]
mod tests;
