//! Finds and repairs inconsistent address reservations: `host-local audit`, also available as `holdfast ipam audit`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::owners::{Namespace, OwnerState, Record};
use super::results;
use super::store::Store;
use crate::cni::Error;
use crate::net::netns;
use holdfast_net::netlink::Socket;

/// The longest time from a reservation until the runtime lists the sandbox. The kubelet's deadline for
/// `RunPodSandbox` is twice `runtimeRequestTimeout`, 4 minutes by default; afterwards the runtime cleans up.
pub const DEFAULT_MIN_AGE: Duration = Duration::from_secs(300);

/// The scope of an audit.
#[derive(Debug, Clone)]
pub struct Request {
    /// The directory that contains a directory per network.
    pub data_dir: PathBuf,
    /// The network to audit; `None` audits all.
    pub network: Option<String>,
    /// The directory of the runtime's cached CNI results. They give
    /// the namespace of owners that the index does not contain.
    pub cache_dir: PathBuf,
    /// Whether to release leaked addresses.
    pub repair: bool,
    /// Addresses reserved less than this time ago are not released, because their ADD may still run.
    pub min_age: Duration,
}

impl Default for Request {
    fn default() -> Request {
        let default = |path: &str| PathBuf::from(path);
        Request {
            data_dir: default("/var/lib/cni/networks"),
            network: None,
            cache_dir: default(results::DEFAULT_DIR),
            repair: false,
            min_age: DEFAULT_MIN_AGE,
        }
    }
}

/// The state of an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Its owner exists and has the address on its interface.
    Used,
    /// No container can use the address any more; with the reason.
    Leaked(String),
    /// Not on an interface yet: the ADD may still run.
    Starting,
    /// Several containers have the address on an interface; with the others.
    Duplicate(String),
    /// Unknown whether the owner exists.
    Unknown,
}

/// The result of an audit for one address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The network's name.
    pub network: String,
    /// The reserved address.
    pub address: IpAddr,
    /// The container that holds the reservation.
    pub container: String,
    /// The interface in the container.
    pub ifname: String,
    /// The state of the address.
    pub state: State,
    /// Whether the audit has released it.
    pub repaired: bool,
}

/// The addresses of an interface in a namespace; `None` if the namespace cannot be entered.
fn addresses_in(path: &str, ifname: &str) -> Option<Vec<IpAddr>> {
    let namespace = netns::open(path).ok().flatten()?;
    netns::inside(&namespace, || {
        let failed = |e| Error::doing("the interface cannot be read", e);
        let mut socket = Socket::route().map_err(failed)?;
        let Some(link) = socket.link(ifname).map_err(failed)? else {
            return Ok(vec![]);
        };
        Ok(socket
            .addresses(link.index)
            .map_err(failed)?
            .into_iter()
            .map(|a| a.addr())
            .collect())
    })
    .ok()
}

/// The namespace path of an attachment in the runtime's result cache.
fn cached(dir: &Path, network: &str, record: &Record) -> Option<String> {
    let file = format!("{network}-{}-{}", record.container, record.ifname);
    let value = results::read(&dir.join(file)).ok()?;
    value["netns"].as_str().map(str::to_owned)
}

/// Determines the namespace of an owner and the state of each of its addresses.
fn classify(
    store: &Store,
    request: &Request,
    network: &str,
    record: &Record,
) -> (Option<String>, BTreeMap<IpAddr, State>) {
    let all = |state: State| {
        record
            .addresses
            .iter()
            .map(|a| (*a, state.clone()))
            .collect()
    };
    let is_starting = store.is_starting(record, request.min_age);
    let leaked = |why: String| match is_starting {
        true => State::Starting,
        false => State::Leaked(why),
    };
    let (netns, owner_state) = match store.owner_state(record) {
        OwnerState::Unknown => match cached(&request.cache_dir, network, record) {
            Some(path) if Namespace::at(Path::new(&path)) == Namespace::default() => (
                None,
                OwnerState::Removed("its network namespace no longer exists"),
            ),
            Some(path) => (Some(path), OwnerState::Exists),
            None => (None, OwnerState::Unknown),
        },
        owner_state => {
            let path = record.namespace_path();
            (
                path.and_then(|p| p.to_str().map(str::to_owned)),
                owner_state,
            )
        }
    };
    match owner_state {
        OwnerState::Removed(why) => (None, all(leaked(why.into()))),
        OwnerState::Unknown => (None, all(State::Unknown)),
        OwnerState::Exists => {
            let Some(present) = netns
                .as_deref()
                .and_then(|n| addresses_in(n, &record.ifname))
            else {
                return (netns, all(State::Used));
            };
            let state = |address: &IpAddr| {
                if present.contains(address) {
                    State::Used
                } else {
                    let ifname = &record.ifname;
                    leaked(format!("{ifname} of its container does not have it"))
                }
            };
            (
                netns,
                record.addresses.iter().map(|a| (*a, state(a))).collect(),
            )
        }
    }
}

/// Audits all addresses. If `repair` is set, releases the leaked ones. An address on the interfaces
/// of two containers is reported with both: only the runtime can decide which container must go.
pub fn audit(request: &Request) -> Result<Vec<Finding>, Error> {
    let networks: Vec<String> = match &request.network {
        Some(network) => vec![network.clone()],
        None => {
            let failed =
                |e| Error::doing(format!("{} cannot be read", request.data_dir.display()), e);
            let mut names: Vec<String> = std::fs::read_dir(&request.data_dir)
                .map_err(failed)?
                .flatten()
                .filter(|e| e.path().is_dir())
                .filter_map(|e| e.file_name().into_string().ok())
                .filter(|n| !n.starts_with('.'))
                .collect();
            names.sort();
            names
        }
    };
    let mut findings = vec![];
    for network in &networks {
        let Some(mut store) = Store::open_existing(&request.data_dir, network)? else {
            return Err(Error::config(format!(
                "no network {network:?} in {}",
                request.data_dir.display()
            )));
        };
        store.read_all()?;
        let mut on_interfaces: BTreeMap<IpAddr, Vec<String>> = BTreeMap::new();
        let mut owners = store.owners()?;
        owners.sort_by(|a, b| a.addresses.cmp(&b.addresses));
        for record in &owners {
            let (netns, states) = classify(&store, request, network, record);
            for address in netns
                .as_deref()
                .and_then(|n| addresses_in(n, &record.ifname))
                .into_iter()
                .flatten()
            {
                on_interfaces
                    .entry(address)
                    .or_default()
                    .push(record.container.clone());
            }
            for (address, state) in states {
                let repaired = request.repair && matches!(state, State::Leaked(_));
                if repaired {
                    let now = store.of(&record.container, &record.ifname);
                    now.map_or(Ok(()), |owner| store.release_one(&owner, address))?;
                }
                let (container, ifname) = (record.container.clone(), record.ifname.clone());
                findings.push(Finding {
                    network: network.clone(),
                    address,
                    container,
                    ifname,
                    state,
                    repaired,
                });
            }
        }
        for finding in findings
            .iter_mut()
            .filter(|f| f.network == *network && f.state == State::Used)
        {
            let others: Vec<&str> = on_interfaces
                .get(&finding.address)
                .into_iter()
                .flatten()
                .map(String::as_str)
                .filter(|c| *c != finding.container)
                .collect();
            if !others.is_empty() {
                finding.state = State::Duplicate(format!(
                    "also on an interface of {}: delete one of these pods",
                    others.join(", ")
                ));
            }
        }
    }
    Ok(findings)
}

/// Releases the addresses of sandboxes that the runtime no longer lists, in one network. Such addresses remain
/// when a sandbox fails and the runtime cannot call DEL. `sandboxes` are the ids that the runtime lists now.
///
/// Releases only addresses that this host-local has recorded for a Kubernetes pod. In
/// addition, the pod's namespace must be gone or lack the address, and `min_age` must have
/// passed. Reservations of podman, of the reference host-local and of starting pods thus stay.
pub fn repair(
    request: &Request,
    network: &str,
    sandboxes: &BTreeSet<String>,
) -> Result<Vec<Finding>, Error> {
    let Some(store) = Store::open_existing(&request.data_dir, network)? else {
        return Ok(vec![]);
    };
    let mut findings = vec![];
    for record in store.owners()? {
        let is_ours = !record.pod.is_empty() && !sandboxes.contains(&record.container);
        if !is_ours || store.is_starting(&record, request.min_age) {
            continue;
        }
        let (_, states) = classify(&store, request, network, &record);
        for (address, state) in states {
            if !matches!(state, State::Leaked(_)) {
                continue;
            }
            // Read the record again: releasing another of its addresses has changed it.
            if let Some(owner) = store.of(&record.container, &record.ifname) {
                store.release_one(&owner, address)?;
            }
            findings.push(Finding {
                network: network.to_owned(),
                address,
                container: record.container.clone(),
                ifname: record.ifname.clone(),
                state,
                repaired: true,
            });
        }
    }
    Ok(findings)
}

/// Formats findings as a table, and reports whether no problem remains.
#[must_use]
pub fn table(findings: &[Finding]) -> (String, bool) {
    let mut rows =
        vec![["NETWORK", "ADDRESS", "CONTAINER", "INTERFACE", "STATE"].map(str::to_owned)];
    let mut well = true;
    for f in findings {
        let state = match (&f.state, f.repaired) {
            (State::Used, _) => "used".to_owned(),
            (State::Unknown, _) => {
                "unknown: no record shows whether its container still exists".to_owned()
            }
            (State::Starting, _) => "starting: its ADD may still be running".to_owned(),
            (State::Leaked(why), true) => format!("released: {why}"),
            (State::Leaked(why), false) => format!("leaked: {why}"),
            (State::Duplicate(why), _) => format!("allocated twice: {why}"),
        };
        well &= f.repaired || matches!(f.state, State::Used | State::Unknown | State::Starting);
        rows.push([
            f.network.clone(),
            f.address.to_string(),
            f.container.chars().take(20).collect(),
            f.ifname.clone(),
            state,
        ]);
    }
    let mut widths = [0; 5];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.len());
        }
    }
    let line = |row: &[String; 5]| {
        let cells: Vec<String> = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        cells.join("  ").trim_end().to_owned()
    };
    (rows.iter().map(line).collect::<Vec<_>>().join("\n"), well)
}

/// The help of `host-local audit`.
const USAGE: &str = "usage: host-local audit [--data-dir DIR] [--cache-dir DIR] [--network NAME] [--older-than SECONDS] [--mend]

Lists the addresses that host-local has allocated, and which of them are leaked (no container uses them) or allocated
twice. Exits with 1 if any leaked or doubly allocated addresses remain.
  --data-dir DIR        the directory in which host-local keeps its networks (/var/lib/cni/networks)
  --cache-dir DIR       the directory of the runtime's CNI results, which name the network namespaces of containers with
                        addresses from another host-local (/var/lib/cni/results)
  --network NAME        only this network
  --older-than SECONDS  release only addresses that were reserved longer ago than this (300): a younger reservation may
                        belong to a starting pod
  --mend                release leaked addresses";

/// Runs `host-local audit`. Returns the output, and whether no problem remains.
pub fn run(arguments: &[String]) -> Result<(String, bool), Error> {
    let mut request = Request::default();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let (key, inline) = argument
            .split_once('=')
            .map_or((argument.as_str(), None), |(k, v)| (k, Some(v.to_owned())));
        let mut value = || {
            inline
                .clone()
                .or_else(|| rest.next().cloned())
                .ok_or_else(|| Error::config(format!("{key} needs a value\n{USAGE}")))
        };
        match key {
            "--data-dir" => request.data_dir = value()?.into(),
            "--cache-dir" => request.cache_dir = value()?.into(),
            "--network" => request.network = Some(value()?),
            "--older-than" => {
                let text = value()?;
                let seconds = text.parse().map_err(|_| {
                    Error::config(format!("invalid --older-than {text:?}: use whole seconds"))
                })?;
                request.min_age = Duration::from_secs(seconds);
            }
            "--mend" => request.repair = true,
            "--help" | "-h" => return Ok((USAGE.to_owned(), true)),
            other => {
                return Err(Error::config(format!(
                    "unknown argument {other:?}\n{USAGE}"
                )));
            }
        }
    }
    audit(&request).map(|findings| table(&findings))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(network: &str, address: &str, state: State) -> Finding {
        Finding {
            network: network.into(),
            address: address.parse().expect("an address"),
            container: "4f1d2c3b5a6978877665544332211000aabbccdd".into(),
            ifname: "eth0".into(),
            state,
            repaired: false,
        }
    }

    /// One address in each state.
    fn findings() -> Vec<Finding> {
        let leaked = || State::Leaked("its network namespace no longer exists".into());
        let twice = "also on an interface of 8899aabbccdd: delete one of these pods";
        let mut all = vec![
            finding("holdfast", "10.244.0.2", State::Used),
            finding("holdfast", "10.244.0.3", State::Starting),
            finding("holdfast", "10.244.0.4", State::Unknown),
            finding("holdfast", "10.244.0.5", leaked()),
            finding("holdfast", "10.244.0.6", leaked()),
            finding("two", "fd00::12", State::Duplicate(twice.into())),
        ];
        all[4].repaired = true;
        all[1].container = "podman".into();
        all
    }

    #[test]
    fn a_table_has_a_row_for_each_address() {
        let (text, well) = table(&findings());
        assert!(!well, "a leaked address remains");
        insta::assert_snapshot!("table", text);
        let repaired = [&findings()[..3], &findings()[4..5]].concat();
        assert!(table(&repaired).1, "the leaked address was released");
        let (text, well) = table(&[]);
        assert!(well);
        insta::assert_snapshot!("empty_table", text);
    }

    #[test]
    fn invalid_arguments_are_rejected_with_the_usage() {
        let run = |argument: &str| match run(&[argument.to_owned()]) {
            Ok((text, _)) => text,
            Err(error) => format!("error: {error}"),
        };
        insta::assert_snapshot!("help", run("--help"));
        let texts = ["--mends", "--network", "--older-than=soon"].map(run);
        let first = |text: &String| text.lines().next().map(str::to_owned);
        let lines: Vec<String> = texts.iter().filter_map(first).collect();
        insta::assert_snapshot!("invalid_arguments", lines.join("\n"));
    }
}
