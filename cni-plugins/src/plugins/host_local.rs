//! `host-local`: allocates addresses from ranges and keeps the reservations in a directory
//! of the host (`plugins/ipam/host-local/main.go` of containernetworking/plugins).

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde_json::{Map, Value};

use crate::cni::{self, Address, Dns, Error, Success, at_least, cni_args, parse_routes};
use crate::ipam::owners::{OwnerState, Record};
use crate::ipam::range::{self, RangeSet};
use crate::ipam::store::{Reservation, Store};
use crate::skel::{Call, Plugin};

/// The plugin `host-local`.
pub struct HostLocal;

struct Config {
    sets: Vec<RangeSet>,
    requested: Vec<IpAddr>,
    success: Success,
}

fn data_dir(call: &Call<'_>) -> Result<PathBuf, Error> {
    let ipam = call.config.object("ipam")?;
    ipam.directory("dataDir", "/var/lib/cni/networks")
}

fn parse(call: &Call<'_>) -> Result<Config, Error> {
    let ipam = call.config.object("ipam")?;
    if ipam.0.is_null() {
        return Err(Error::config("IPAM config missing 'ipam' key"));
    }
    let runtime = call.config.object("runtimeConfig")?;
    let sets = range::parse(ipam, runtime)?;
    if !at_least(call.version, "0.3.0") {
        for v4 in [true, false] {
            if sets
                .iter()
                .filter(|s| s.iter().any(|r| r.start.is_ipv4() == v4))
                .count()
                > 1
            {
                return Err(Error::config(format!(
                    "CNI version {} does not support more than 1 address per family",
                    call.version
                )));
            }
        }
    }
    let mut texts = runtime.texts("ips")?;
    texts.extend(call.config.object("args")?.object("cni")?.texts("ips")?);
    texts.extend(cni_args(&call.args, &["IP"])?.remove("IP"));
    let requested = texts
        .iter()
        .map(|t| {
            cni::address(t)
                .or_else(|| cni::network(t).map(|n| n.addr()))
                .ok_or_else(|| {
                    Error::config(format!(
                        "invalid requested IP {t:?}: expected an IP address"
                    ))
                })
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut success = Success {
        routes: parse_routes(ipam.list("routes")?)?,
        ..Success::default()
    };
    let resolv = ipam.text("resolvConf")?;
    if !resolv.is_empty() {
        let text = std::fs::read_to_string(resolv)
            .map_err(|e| Error::config(format!("resolvConf {resolv:?} cannot be read: {e}")))?;
        success.dns = resolv_conf(&text);
    }
    Ok(Config {
        sets,
        requested,
        success,
    })
}

fn resolv_conf(text: &str) -> Dns {
    let mut fields: Map<String, Value> = Map::new();
    for line in text
        .lines()
        .map(str::trim)
        .filter(|l| !l.starts_with(['#', ';']))
    {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [keyword, rest @ ..] = words.as_slice() else {
            continue;
        };
        let (key, all) = match (*keyword, rest) {
            (_, []) => continue,
            ("domain", [domain, ..]) => {
                fields.insert("domain".into(), (*domain).into());
                continue;
            }
            ("nameserver", [first, ..]) => ("nameservers", vec![*first]),
            ("search", rest) => ("search", rest.to_vec()),
            ("options", rest) => ("options", rest.to_vec()),
            _ => continue,
        };
        if let Some(list) = fields
            .entry(key)
            .or_insert_with(|| Value::Array(vec![]))
            .as_array_mut()
        {
            list.extend(all.into_iter().map(Value::from));
        }
    }
    Dns { fields }
}

/// The pod uid in `CNI_ARGS`, which CRI runtimes set; empty if missing.
fn pod_uid(args: &str) -> &str {
    let mut pairs = args.split(';');
    let found = pairs.find_map(|pair| pair.strip_prefix("K8S_POD_UID="));
    found.unwrap_or_default()
}

impl Plugin for HostLocal {
    fn name(&self) -> &'static str {
        "host-local"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let config = parse(call)?;
        let store = Store::open(&data_dir(call)?, call.network()?)?;
        let mut success = config.success;
        let mut requested = config.requested;
        if let Some(mine) = store.of(&call.container, &call.ifname) {
            // A leftover reservation: the container was recreated under the same id.
            if matches!(store.owner_state(&mine), OwnerState::Removed(_)) {
                store.release(&mine)?;
            } else if let Some(have) = mine
                .addresses
                .iter()
                .find(|a| config.sets.iter().flatten().any(|r| r.contains(**a)))
            {
                return Err(Error::other(format!(
                    "{have} has been allocated to {}, duplicate allocation is not allowed",
                    call.container
                )));
            }
        }
        let pod = pod_uid(&call.args);
        let mut reservation = store.begin(&call.container, &call.ifname, &call.netns, pod)?;
        for (i, set) in config.sets.iter().enumerate() {
            success
                .ips
                .push(allocate(&store, &mut reservation, set, i, &mut requested)?);
        }
        if !requested.is_empty() {
            let left: Vec<String> = requested.iter().map(ToString::to_string).collect();
            return Err(Error::other(format!(
                "failed to allocate all requested IPs: {}: no range contains them",
                left.join(",")
            )));
        }
        reservation.finish()?;
        Ok(success)
    }

    /// Needs only the network's name and the data directory, so that DEL also works with a changed configuration.
    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        let Some(store) = Store::open_existing(&data_dir(call)?, call.network()?)? else {
            return Ok(());
        };
        if let Some(mine) = store.of(&call.container, &call.ifname) {
            return store.release(&mine);
        }
        let known = call
            .previous()
            .ok()
            .flatten()
            .into_iter()
            .flat_map(|s| s.ips)
            .map(|ip| ip.address.addr());
        let mut addresses = BTreeSet::new();
        for address in known {
            if store.is_of(address, &call.container, &call.ifname)? {
                addresses.insert(address);
            }
        }
        store.release(&Record {
            container: call.container.clone(),
            ifname: call.ifname.clone(),
            addresses,
            ..Record::default()
        })
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        let store = Store::open_existing(&data_dir(call)?, call.network()?)?;
        let mine = store.and_then(|s| s.of(&call.container, &call.ifname));
        let mine = mine.ok_or_else(|| {
            Error::other(format!(
                "host-local: Failed to find address added by container {}",
                call.container
            ))
        })?;
        let expected = call.previous()?.unwrap_or_default().ips;
        match mine
            .addresses
            .iter()
            .find(|a| !expected.iter().any(|e| e.address.addr() == **a))
        {
            Some(missing) => Err(Error::other(format!(
                "host-local: container {} holds {missing}, which is not in prevResult",
                call.container
            ))),
            None => Ok(()),
        }
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        match Store::open_existing(&data_dir(call)?, call.network()?)? {
            Some(mut store) => {
                store.read_all()?;
                store.collect(keep)
            }
            None => Ok(()),
        }
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        let config = parse(call)?;
        let store = Store::open(&data_dir(call)?, call.network()?)?;
        let taken = store.taken()?;
        match config
            .sets
            .iter()
            .find(|set| range::candidates(set, None).all(|(a, _)| taken.contains(&a)))
        {
            // ADD can reclaim addresses of owners that no longer exist.
            Some(_)
                if store
                    .owners()?
                    .iter()
                    .any(|o| matches!(store.owner_state(o), OwnerState::Removed(_))) =>
            {
                Ok(())
            }
            Some(full) => Err(Error::new(
                Error::UNAVAILABLE,
                format!(
                    "no IP addresses available in range set: {}",
                    range::describe(full)
                ),
            )),
            None => Ok(()),
        }
    }
}

/// Describes the owner of an address for an error message.
fn holder(store: &Store, address: IpAddr) -> String {
    let owner = store
        .owners()
        .ok()
        .and_then(|all| all.into_iter().find(|o| o.addresses.contains(&address)));
    owner.map_or_else(String::new, |o| {
        format!("{} of container {} has it", o.ifname, o.container)
    })
}

fn allocate(
    store: &Store,
    reservation: &mut Reservation<'_>,
    set: &RangeSet,
    index: usize,
    requested: &mut Vec<IpAddr>,
) -> Result<Address, Error> {
    let reply = |address: IpAddr, range: &range::Range| -> Result<Address, Error> {
        let net = IpNet::new(address, range.subnet.prefix_len())
            .map_err(|e| Error::doing("an address does not fit its subnet", e))?;
        Ok(Address {
            address: net,
            gateway: Some(range.gateway),
            interface: None,
        })
    };
    let wanted = requested
        .iter()
        .position(|a| set.iter().any(|r| r.contains(*a)));
    if let Some(place) = wanted {
        let address = requested.remove(place);
        let range = set
            .iter()
            .find(|r| r.contains(address))
            .ok_or_else(|| Error::other("no range contains a requested address"))?;
        if address == range.gateway {
            return Err(Error::other(format!(
                "requested IP {address} is gateway's IP"
            )));
        }
        if reservation.take(address, index)?
            || store.reclaim()? > 0 && reservation.take(address, index)?
        {
            return reply(address, range);
        }
        let text = format!(
            "requested IP address {address} is not available in range set {}",
            range::describe(set)
        );
        return Err(Error {
            details: holder(store, address),
            ..Error::other(text)
        });
    }
    // Usually the next address is free. If many are taken, listing the directory is faster than trying each.
    const ATTEMPTS: usize = 16;
    for (address, range) in range::candidates(set, store.last(index)).take(ATTEMPTS) {
        if reservation.take(address, index)? {
            return reply(address, range);
        }
    }
    for again in [true, false] {
        let taken = store.taken()?;
        for (address, range) in range::candidates(set, store.last(index)) {
            if !taken.contains(&address) && reservation.take(address, index)? {
                return reply(address, range);
            }
        }
        if !again || store.reclaim()? == 0 {
            break;
        }
    }
    Err(Error::other(format!(
        "no IP addresses available in range set: {}",
        range::describe(set)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolv_conf_is_parsed_as_by_resolvers() {
        let dns = resolv_conf(
            "# c\nnameserver 1.1.1.1\nnameserver 8.8.8.8\ndomain a\ndomain b\nsearch x y\noptions ndots:5\nnonsense\n;c\n",
        );
        assert_eq!(
            Value::Object(dns.fields),
            serde_json::json!({"nameservers": ["1.1.1.1", "8.8.8.8"], "domain": "b", "search": ["x", "y"], "options": ["ndots:5"]})
        );
        assert!(
            crate::cni::Json(&Value::Null)
                .texts("x")
                .expect("absent")
                .is_empty()
        );
    }
}
