//! `host-local`: addresses from ranges, kept in a directory of this host (CNI reference spec, chapter 3).

use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde_json::{Map, Value};

use crate::cni::{Address, Dns, Error, Success, at_least, cni_args, parse_routes};
use crate::ipam::range::{self, RangeSet};
use crate::ipam::store::Store;
use crate::skel::{Call, Plugin};

/// The plugin.
pub struct HostLocal;

struct Config {
    sets: Vec<RangeSet>,
    requested: Vec<IpAddr>,
    success: Success,
}

fn data_dir(call: &Call<'_>) -> Result<PathBuf, Error> {
    let dir = call.config.object("ipam")?.text("dataDir")?;
    Ok(PathBuf::from(if dir.is_empty() { "/var/lib/cni/networks" } else { dir }))
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
            if sets.iter().filter(|s| s.iter().any(|r| r.start.is_ipv4() == v4)).count() > 1 {
                return Err(Error::config(format!("CNI version {} does not support more than 1 address per family", call.version)));
            }
        }
    }
    let mut texts = runtime.texts("ips")?;
    texts.extend(call.config.object("args")?.object("cni")?.texts("ips")?);
    texts.extend(cni_args(&call.args, &["IP"])?.remove("IP"));
    let requested = texts
        .iter()
        .map(|t| {
            t.parse::<IpAddr>()
                .or_else(|_| t.parse::<IpNet>().map(|n| n.addr()))
                .map_err(|_| Error::config(format!("invalid requested IP {t:?}: expected an address")))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut success = Success { routes: parse_routes(ipam.list("routes")?)?, ..Success::default() };
    let resolv = ipam.text("resolvConf")?;
    if !resolv.is_empty() {
        let text = std::fs::read_to_string(resolv).map_err(|e| Error::config(format!("resolvConf {resolv:?} cannot be read: {e}")))?;
        success.dns = resolv_conf(&text);
    }
    Ok(Config { sets, requested, success })
}

fn resolv_conf(text: &str) -> Dns {
    let mut fields: Map<String, Value> = Map::new();
    for line in text.lines().map(str::trim).filter(|l| !l.starts_with(['#', ';'])) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [keyword, rest @ ..] = words.as_slice() else { continue };
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
        if let Some(list) = fields.entry(key).or_insert_with(|| Value::Array(vec![])).as_array_mut() {
            list.extend(all.into_iter().map(Value::from));
        }
    }
    Dns { fields }
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
        let mut given: Vec<IpAddr> = Vec::new();
        let result = (|| {
            let taken = store.taken()?;
            let mine = store.of(&call.container, &call.ifname)?;
            for (i, set) in config.sets.iter().enumerate() {
                let address = allocate(&store, set, i, &mut requested, &taken, &mine, call)?;
                given.push(address.address.addr());
                success.ips.push(address);
            }
            if requested.is_empty() {
                return Ok(());
            }
            let left: Vec<String> = requested.iter().map(ToString::to_string).collect();
            Err(Error::other(format!("failed to allocate all requested IPs: {}: they are in none of the ranges", left.join(","))))
        })();
        if let Err(error) = result {
            store.release(&given)?;
            return Err(error);
        }
        Ok(success)
    }

    /// Needs only the network's name and the directory, so that a changed configuration holds nothing up.
    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        let Some(store) = Store::open_existing(&data_dir(call)?, call.network()?)? else { return Ok(()) };
        // The addresses of the result are tried first; only when they are not there is every file read.
        let known: Vec<IpAddr> = call.previous().ok().flatten().into_iter().flat_map(|s| s.ips).map(|i| i.address.addr()).collect();
        let owned: Vec<IpAddr> = known.into_iter().filter(|a| store.is_of(*a, &call.container, &call.ifname)).collect();
        store.release(&if owned.is_empty() { store.of(&call.container, &call.ifname)? } else { owned })
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        let store = Store::open_existing(&data_dir(call)?, call.network()?)?;
        let mine = store.map_or(Ok(vec![]), |s| s.of(&call.container, &call.ifname))?;
        if mine.is_empty() {
            return Err(Error::other(format!("host-local: Failed to find address added by container {}", call.container)));
        }
        let expected = call.previous()?.unwrap_or_default().ips;
        match mine.iter().find(|a| !expected.iter().any(|e| e.address.addr() == **a)) {
            Some(missing) => Err(Error::other(format!("host-local: container {} holds {missing}, which is not in prevResult", call.container))),
            None => Ok(()),
        }
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        match Store::open_existing(&data_dir(call)?, call.network()?)? {
            Some(store) => store.collect(keep),
            None => Ok(()),
        }
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        let config = parse(call)?;
        let store = Store::open(&data_dir(call)?, call.network()?)?;
        let taken = store.taken()?;
        match config.sets.iter().find(|set| range::candidates(set, None).all(|(a, _)| taken.contains(&a))) {
            Some(full) => Err(Error::new(Error::UNAVAILABLE, format!("no IP addresses available in range set: {}", range::describe(full)))),
            None => Ok(()),
        }
    }
}

fn allocate(
    store: &Store,
    set: &RangeSet,
    index: usize,
    requested: &mut Vec<IpAddr>,
    taken: &std::collections::HashSet<IpAddr>,
    mine: &[IpAddr],
    call: &Call<'_>,
) -> Result<Address, Error> {
    let reply = |address: IpAddr, range: &range::Range| -> Result<Address, Error> {
        let net = IpNet::new(address, range.subnet.prefix_len()).map_err(|e| Error::doing("an address does not fit its subnet", e))?;
        Ok(Address { address: net, gateway: Some(range.gateway), interface: None })
    };
    let wanted = requested.iter().position(|a| set.iter().any(|r| r.contains(*a)));
    if let Some(place) = wanted {
        let address = requested.remove(place);
        let range = set.iter().find(|r| r.contains(address)).ok_or_else(|| Error::other("a requested address left its range"))?;
        if address == range.gateway {
            return Err(Error::other(format!("requested IP {address} is gateway's IP")));
        }
        if !store.reserve(address, index, &call.container, &call.ifname)? {
            return Err(Error::other(format!("requested IP address {address} is not available in range set {}", range::describe(set))));
        }
        return reply(address, range);
    }
    if let Some(have) = mine.iter().find(|a| set.iter().any(|r| r.contains(**a))) {
        return Err(Error::other(format!("{have} has been allocated to {}, duplicate allocation is not allowed", call.container)));
    }
    for (address, range) in range::candidates(set, store.last(index)) {
        if !taken.contains(&address) && store.reserve(address, index, &call.container, &call.ifname)? {
            return reply(address, range);
        }
    }
    Err(Error::other(format!("no IP addresses available in range set: {}", range::describe(set))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolv_conf_is_read_as_resolvers_do() {
        let dns = resolv_conf("# c\nnameserver 1.1.1.1\nnameserver 8.8.8.8\ndomain a\ndomain b\nsearch x y\noptions ndots:5\nnonsense\n;c\n");
        assert_eq!(
            Value::Object(dns.fields),
            serde_json::json!({"nameservers": ["1.1.1.1", "8.8.8.8"], "domain": "b", "search": ["x", "y"], "options": ["ndots:5"]})
        );
        assert!(crate::cni::Json(&Value::Null).texts("x").expect("absent").is_empty());
    }
}
