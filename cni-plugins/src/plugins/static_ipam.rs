//! `static`: returns the addresses of the configuration and stores nothing
//! (`plugins/ipam/static/main.go` of containernetworking/plugins).

use std::net::IpAddr;

use crate::cni::{self, Address, Dns, Error, Success, at_least, cni_args, parse_routes};
use crate::skel::{Call, Plugin};

/// The plugin `static`.
pub struct Static;

/// Parses an address in CIDR notation. `place` names the field for error messages.
fn cidr(text: &str, place: &str) -> Result<Address, Error> {
    let address = cni::network(text.trim()).ok_or_else(|| {
        Error::config(format!(
            "{place}: the address {text:?} is invalid: use CIDR notation, such as 192.0.2.5/24"
        ))
    })?;
    Ok(Address {
        address,
        gateway: None,
        interface: None,
    })
}

fn gateway(text: &str, place: &str) -> Result<IpAddr, Error> {
    cni::address(text.trim()).ok_or_else(|| {
        Error::config(format!(
            "{place}: the gateway {text:?} is invalid: use an IP address"
        ))
    })
}

/// The addresses from the source with the highest precedence: `runtimeConfig`,
/// then `args`, then the configuration together with `CNI_ARGS`.
fn addresses(call: &Call<'_>) -> Result<Vec<Address>, Error> {
    let of = |texts: Vec<String>, place: &str| {
        texts
            .iter()
            .map(|t| cidr(t, place))
            .collect::<Result<Vec<_>, _>>()
    };
    let requested = of(
        call.config.object("runtimeConfig")?.texts("ips")?,
        "runtimeConfig.ips",
    )?;
    let from_args = of(
        call.config.object("args")?.object("cni")?.texts("ips")?,
        "args.cni.ips",
    )?;
    let ipam = call.config.object("ipam")?;
    if ipam.0.is_null() && requested.is_empty() && from_args.is_empty() {
        return Err(Error::config("IPAM config missing 'ipam' key"));
    }
    let mut own = vec![];
    for item in ipam.list("addresses")? {
        let item = crate::cni::Json(item);
        let mut address = cidr(item.text("address")?, "ipam.addresses")?;
        let text = item.text("gateway")?;
        address.gateway = if text.is_empty() {
            None
        } else {
            Some(gateway(text, "ipam.addresses")?)
        };
        own.push(address);
    }
    let args = cni_args(&call.args, &["IP", "GATEWAY"])?;
    for text in args
        .get("IP")
        .into_iter()
        .flat_map(|t| t.split(','))
        .filter(|t| !t.is_empty())
    {
        own.push(cidr(text, "CNI_ARGS IP")?);
    }
    for text in args
        .get("GATEWAY")
        .into_iter()
        .flat_map(|t| t.split(','))
        .filter(|t| !t.is_empty())
    {
        let gateway = gateway(text, "CNI_ARGS GATEWAY")?;
        own.iter_mut()
            .filter(|a| a.address.contains(&gateway))
            .for_each(|a| a.gateway = Some(gateway));
    }
    let found = [requested, from_args, own]
        .into_iter()
        .find(|all| !all.is_empty())
        .unwrap_or_default();
    for v4 in [true, false] {
        if !at_least(call.version, "0.3.0")
            && found
                .iter()
                .filter(|a| a.address.addr().is_ipv4() == v4)
                .count()
                > 1
        {
            return Err(Error::config(format!(
                "CNI version {} does not support more than 1 address per family",
                call.version
            )));
        }
    }
    Ok(found)
}

impl Plugin for Static {
    fn name(&self) -> &'static str {
        "static"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let ipam = call.config.object("ipam")?;
        let (ips, routes) = (addresses(call)?, parse_routes(ipam.list("routes")?)?);
        Ok(Success {
            ips,
            routes,
            dns: Dns::parse(ipam.object("dns")?),
            ..Success::default()
        })
    }

    fn del(&self, _: &Call<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        let previous = call
            .previous()?
            .ok_or_else(|| Error::config("static: Required prevResult missing"))?;
        for ours in addresses(call)? {
            let theirs = previous.ips.iter().find(|ip| ip.address == ours.address);
            match theirs {
                None => {
                    return Err(Error::other(format!(
                        "static: Failed to find address {} in prevResult",
                        ours.address
                    )));
                }
                Some(theirs) if ours.gateway.is_some() && theirs.gateway != ours.gateway => {
                    return Err(Error::other(format!(
                        "static: the gateway of {} in prevResult is not the configured one",
                        ours.address
                    )));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        addresses(call).map(|_| ())
    }
}
