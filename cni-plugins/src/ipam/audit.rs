//! What is wrong with the addresses that have been given out, and mending it: `host-local audit`, which `holdfast ipam audit`
//! is too.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::owners::{Life, Namespace, Record};
use super::results;
use super::store::Store;
use crate::cni::Error;
use crate::net::netlink::Socket;
use crate::net::netns;

/// The longest time from a reservation to a sandbox that the runtime lists: the kubelet's deadline for `RunPodSandbox` is twice
/// `runtimeRequestTimeout`, 4 minutes by default, and the runtime cleans up after it.
pub const DEFAULT_PATIENCE: Duration = Duration::from_secs(300);

/// What an audit looks at, and whether it mends.
#[derive(Debug, Clone)]
pub struct Request {
    /// The directory of all networks.
    pub data_dir: PathBuf,
    /// One of them, or all.
    pub network: Option<String>,
    /// Where runtimes keep results, which say in which namespace an owner is that the index does not know.
    pub cache_dir: PathBuf,
    /// Release what is leaked.
    pub mend: bool,
    /// An address that was reserved less than this ago is not released: its ADD may still run.
    pub patience: Duration,
}

impl Default for Request {
    fn default() -> Request {
        let default = |path: &str| PathBuf::from(path);
        Request {
            data_dir: default("/var/lib/cni/networks"),
            network: None,
            cache_dir: default(results::DEFAULT_DIR),
            mend: false,
            patience: DEFAULT_PATIENCE,
        }
    }
}

/// What an address turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Its owner is there and has it.
    Used,
    /// Nobody can use it; why.
    Leaked(String),
    /// Not on an interface yet: its attachment may still be in the making.
    Starting,
    /// More than one container has it on its interface.
    Double(String),
    /// Nothing tells whether its owner is there.
    Unknown,
}

/// One address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The network.
    pub network: String,
    /// The address.
    pub address: IpAddr,
    /// The container that it was given to.
    pub container: String,
    /// The interface there.
    pub ifname: String,
    /// What it turned out to be.
    pub state: State,
    /// Whether it has been released.
    pub mended: bool,
}

/// The addresses of an interface in a namespace; `None` if it cannot be entered.
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

/// Where a runtime says that an attachment is.
fn cached(dir: &Path, network: &str, record: &Record) -> Option<String> {
    let file = format!("{network}-{}-{}", record.container, record.ifname);
    let value = results::read(&dir.join(file)).ok()?;
    value["netns"].as_str().map(str::to_owned)
}

/// What an owner's addresses are, each by itself.
fn judge(
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
    let is_starting = store.is_starting(record, request.patience);
    let leaked = |why: String| match is_starting {
        true => State::Starting,
        false => State::Leaked(why),
    };
    let (netns, life) = match store.life(record) {
        Life::Unknown => match cached(&request.cache_dir, network, record) {
            Some(path) if Namespace::at(Path::new(&path)) == Namespace::default() => {
                (None, Life::Gone("its network namespace is gone"))
            }
            Some(path) => (Some(path), Life::Alive),
            None => (None, Life::Unknown),
        },
        life => {
            let path = record.namespace_path();
            (path.and_then(|p| p.to_str().map(str::to_owned)), life)
        }
    };
    match life {
        Life::Gone(why) => (None, all(leaked(why.into()))),
        Life::Unknown => (None, all(State::Unknown)),
        Life::Alive => {
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
                    leaked(format!("{} of its container has not got it", record.ifname))
                }
            };
            (
                netns,
                record.addresses.iter().map(|a| (*a, state(a))).collect(),
            )
        }
    }
}

/// Looks at all addresses, and releases what is leaked if it shall. What two containers have on their interfaces at once is shown
/// with both: which of them has to go, only their runtime can say.
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
                "there is no network {network:?} in {}",
                request.data_dir.display()
            )));
        };
        store.read_all()?;
        let mut on_interfaces: BTreeMap<IpAddr, Vec<String>> = BTreeMap::new();
        let mut owners = store.owners()?;
        owners.sort_by(|a, b| a.addresses.cmp(&b.addresses));
        for record in &owners {
            let (netns, states) = judge(&store, request, network, record);
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
                let mended = request.mend && matches!(state, State::Leaked(_));
                if mended {
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
                    mended,
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
                finding.state = State::Double(format!(
                    "on an interface of {}, too: one of them must be made anew",
                    others.join(", ")
                ));
            }
        }
    }
    Ok(findings)
}

/// Releases the addresses of sandboxes that the runtime no longer has, in one network: what reservations of failed sandboxes
/// leave, where the runtime could not call DEL. `sandboxes` are the ids that the runtime lists now.
///
/// Only what this host-local has recorded for a pod of Kubernetes is released, once its namespace was removed or lacks the address,
/// and never before `patience` has passed. So reservations of podman, of the reference's host-local and of pods that are just
/// starting stay.
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
        if !is_ours || store.is_starting(&record, request.patience) {
            continue;
        }
        let (_, states) = judge(&store, request, network, &record);
        for (address, state) in states {
            if !matches!(state, State::Leaked(_)) {
                continue;
            }
            // What one of several addresses left changes the record.
            if let Some(owner) = store.of(&record.container, &record.ifname) {
                store.release_one(&owner, address)?;
            }
            findings.push(Finding {
                network: network.to_owned(),
                address,
                container: record.container.clone(),
                ifname: record.ifname.clone(),
                state,
                mended: true,
            });
        }
    }
    Ok(findings)
}

/// An audit's findings as a table, and whether all is well.
#[must_use]
pub fn table(findings: &[Finding]) -> (String, bool) {
    let mut rows =
        vec![["NETWORK", "ADDRESS", "CONTAINER", "INTERFACE", "STATE"].map(str::to_owned)];
    let mut well = true;
    for f in findings {
        let state = match (&f.state, f.mended) {
            (State::Used, _) => "used".to_owned(),
            (State::Unknown, _) => {
                "unknown: nothing tells whether its container is there".to_owned()
            }
            (State::Starting, _) => {
                "starting: its attachment may still be in the making".to_owned()
            }
            (State::Leaked(why), true) => format!("released: {why}"),
            (State::Leaked(why), false) => format!("leaked: {why}"),
            (State::Double(why), _) => format!("held twice: {why}"),
        };
        well &= f.mended || matches!(f.state, State::Used | State::Unknown | State::Starting);
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

/// `host-local audit`, with its arguments; what to print and whether all is well.
pub fn run(arguments: &[String]) -> Result<(String, bool), Error> {
    const USAGE: &str = "usage: host-local audit [--data-dir DIR] [--cache-dir DIR] [--network NAME] [--mend]

Shows the addresses that host-local has given out, which of them are leaked (nobody can use them any more) or held
twice, and with --mend releases the leaked ones. Exits with 1 if something is left to mend.
  --data-dir DIR    where host-local keeps its networks (/var/lib/cni/networks)
  --cache-dir DIR   where the runtime keeps results (/var/lib/cni/results)
  --older-than SECS release only what was reserved longer ago (300): younger ones may belong to a pod that is starting";
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
                request.patience = Duration::from_secs(seconds);
            }
            "--mend" => request.mend = true,
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
