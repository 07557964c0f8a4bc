//! Shared code of plugins that give a container an interface: addresses, routes, CHECK and
//! DEL (`pkg/ipam/ipam_linux.go` and `pkg/ip/utils_linux.go` of containernetworking/plugins).

use std::fs::File;

use serde_json::Value;

use super::delegate;
use crate::cni::{Dns, Error, Success};
use crate::net::netns;
use crate::skel::Call;
use holdfast_net::netlink::Socket;
use holdfast_net::nft::Nft;
use holdfast_net::route::Route;
use holdfast_net::sysctl;

pub(super) fn doing<E: std::fmt::Display>(what: impl std::fmt::Display) -> impl FnOnce(E) -> Error {
    move |error| Error::doing(what, error)
}

/// Prepares the container's interface for its addresses. Must run inside the container's namespace.
pub(super) fn prepare(ifname: &str, success: &Success, dad: bool) -> Result<(Socket, u32), Error> {
    let mut socket =
        Socket::route().map_err(doing("opening a netlink socket in the container failed"))?;
    let link = socket
        .link(ifname)
        .map_err(doing("the container's interface cannot be read"))?;
    let link = link.ok_or_else(|| {
        Error::other(format!(
            "the interface {ifname:?} disappeared from the container"
        ))
    })?;
    // Best effort, as in the reference: gratuitous ARP announces the address to neighbours.
    let _ = sysctl::write(&format!("ipv4/conf/{ifname}/arp_notify"), "1");
    if success.ips.iter().any(|i| i.address.addr().is_ipv6()) {
        for name in ["lo", ifname] {
            let _ = sysctl::ensure(&format!("ipv6/conf/{name}/disable_ipv6"), "0");
        }
        let _ = sysctl::write(
            &format!("ipv6/conf/{ifname}/accept_dad"),
            if dad { "1" } else { "0" },
        );
        sysctl::write(&format!("ipv6/conf/{ifname}/keep_addr_on_down"), "1")
            .map_err(doing("keep_addr_on_down cannot be set"))?;
    }
    Ok((socket, link.index))
}

/// Configures addresses, sets the link up and adds routes, inside the container's namespace.
pub(super) fn configure(
    namespace: &File,
    ifname: &str,
    success: &Success,
    dad: bool,
) -> Result<(), Error> {
    netns::inside(namespace, || {
        let (mut socket, index) = prepare(ifname, success, dad)?;
        for ip in &success.ips {
            socket
                .add_address(index, ip.address)
                .map_err(doing(format!(
                    "failed to add IP addr {} to {ifname:?}",
                    ip.address
                )))?;
        }
        socket
            .set_up(index, true)
            .map_err(doing(format!("failed to set {ifname:?} UP")))?;
        add_routes(&mut socket, index, ifname, success)
    })
}

/// Adds the routes of the result. A route without a gateway uses the gateway of its address family.
pub(super) fn add_routes(
    socket: &mut Socket,
    index: u32,
    ifname: &str,
    success: &Success,
) -> Result<(), Error> {
    for route in &success.routes {
        let v4 = route.destination.addr().is_ipv4();
        let number = |key: &str| {
            route
                .extra
                .get(key)
                .and_then(Value::as_u64)
                .and_then(|n| u32::try_from(n).ok())
        };
        // A route with link scope gets no gateway.
        let on_link = number("scope") == Some(253);
        let inferred = || {
            success
                .ips
                .iter()
                .find(|i| i.address.addr().is_ipv4() == v4)
                .and_then(|i| i.gateway)
        };
        let gateway = route
            .gateway
            .or_else(|| if on_link { None } else { inferred() });
        let mut wanted = Route::new(index, route.destination, gateway);
        wanted.priority = number("priority");
        wanted.table = number("table").unwrap_or(wanted.table);
        wanted.scope = number("scope").and_then(|s| u8::try_from(s).ok());
        wanted.mtu = number("mtu").filter(|m| *m > 0);
        wanted.advmss = number("advmss").filter(|m| *m > 0);
        socket.add_route(&wanted).map_err(doing(format!(
            "failed to add route {} via {gateway:?} dev {ifname}",
            route.destination
        )))?;
    }
    Ok(())
}

/// Gets at least one address from an IPAM plugin and passes the result to `then`. If
/// `then` fails or there is no address, calls IPAM DEL. If IPAM ADD itself fails,
/// does not: addresses that the attachment already has belong to an earlier call.
pub(super) fn with_addresses(
    call: &Call<'_>,
    ipam: &str,
    then: impl FnOnce(Success) -> Result<Success, Error>,
) -> Result<Success, Error> {
    let given = delegate::add(call, ipam)?;
    let result = if given.ips.is_empty() {
        Err(Error::other("IPAM plugin returned missing IP config"))
    } else {
        then(given)
    };
    if result.is_err() {
        // Report only the first error; the runtime calls DEL for leftovers.
        let _ = delegate::forward(call, ipam, "DEL");
    }
    result
}

/// The `dns` object of the network configuration.
pub(super) fn dns(call: &Call<'_>) -> Result<Dns, Error> {
    call.config.object("dns").map(Dns::parse)
}

/// The name of the IPAM plugin; empty if the network has none.
pub(super) fn ipam<'a>(call: &Call<'a>) -> Result<&'a str, Error> {
    call.config.object("ipam")?.text("type")
}

/// Calls the network's IPAM plugin with a verb, if there is one.
pub(super) fn call_ipam(call: &Call<'_>, verb: &str) -> Result<(), Error> {
    match ipam(call)? {
        "" => Ok(()),
        kind if verb == "STATUS" => delegate::status(call, kind),
        kind => delegate::forward(call, kind, verb),
    }
}

/// Calls GC of the IPAM plugin.
pub(super) fn collect_addresses(call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
    match ipam(call)? {
        "" => Ok(()),
        kind => delegate::collect(call, kind, keep),
    }
}

/// Joins all errors into one message; the first error determines the code.
pub(super) fn join_errors(
    results: impl IntoIterator<Item = Result<(), Error>>,
) -> Result<(), Error> {
    let mut errors: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
    match errors.len() {
        0 => Ok(()),
        _ => Err(Error {
            message: errors
                .iter()
                .map(|e| e.message.as_str())
                .collect::<Vec<_>>()
                .join("; "),
            ..errors.swap_remove(0)
        }),
    }
}

/// DEL: removes rules (through `rules`) and the interface, and releases the
/// addresses. Performs all steps even if one fails or the namespace no longer exists.
pub(super) fn remove(
    call: &Call<'_>,
    rules: impl FnOnce() -> Result<Option<Nft>, Error>,
) -> Result<(), Error> {
    remove_with(call, rules, || Ok(()))
}

/// Like [`remove`]; `elsewhere` removes the interface if the call has no namespace.
pub(super) fn remove_with(
    call: &Call<'_>,
    rules: impl FnOnce() -> Result<Option<Nft>, Error>,
    elsewhere: impl FnOnce() -> Result<(), Error>,
) -> Result<(), Error> {
    // host-local and static must release an address only after its interface was removed.
    // Other IPAM plugins come first: dhcp sends its release message over the interface.
    let at_last = ["host-local", "static"].contains(&ipam(call).unwrap_or_default());
    let early = if at_last {
        Ok(())
    } else {
        call_ipam(call, "DEL")
    };
    // Closing the nftables connection waits until the kernel has freed the rules, and deleting
    // the link waits likewise. Keeping the connection open until the end combines the two waits.
    let (rules, _open) = match rules() {
        Ok(open) => (Ok(()), open),
        Err(error) => (Err(error), None),
    };
    let link = || match if call.netns.is_empty() {
        None
    } else {
        netns::open(&call.netns)?
    } {
        Some(namespace) => netns::inside(&namespace, || {
            Socket::route()
                .and_then(|mut s| s.delete_link(&call.ifname))
                .map_err(doing("the interface cannot be removed"))
        }),
        None => elsewhere(),
    };
    let link = link();
    join_errors([
        early,
        rules,
        link,
        if at_last {
            call_ipam(call, "DEL")
        } else {
            Ok(())
        },
    ])
}

/// Runs `work` inside the container's namespace.
pub(super) fn inside<T>(
    call: &Call<'_>,
    work: impl FnOnce(&mut Socket) -> Result<T, Error>,
) -> Result<T, Error> {
    let namespace = netns::require(&call.netns)?;
    netns::inside(&namespace, || {
        work(
            &mut Socket::route()
                .map_err(doing("opening a netlink socket in the container failed"))?,
        )
    })
}

/// Checks that the container's interface matches the result.
pub(super) fn check(call: &Call<'_>, expected: &Success) -> Result<(), Error> {
    let namespace = netns::require(&call.netns)?;
    netns::inside(&namespace, || {
        let failed = "the container's interface cannot be read";
        let mut socket = Socket::route().map_err(doing(failed))?;
        let link = socket
            .link(&call.ifname)
            .map_err(doing(failed))?
            .ok_or_else(|| {
                Error::other(format!(
                    "the interface {:?} is missing in the container",
                    call.ifname
                ))
            })?;
        let known = expected
            .interfaces
            .iter()
            .find(|i| i.name == call.ifname && !i.sandbox.is_empty());
        if let Some(known) =
            known.filter(|k| !k.mac.is_empty() && !k.mac.eq_ignore_ascii_case(&link.mac))
        {
            return Err(Error::other(format!(
                "the interface {:?} has MAC {}, not {}",
                call.ifname, link.mac, known.mac
            )));
        }
        let addresses = socket.addresses(link.index).map_err(doing(failed))?;
        if let Some(missing) = expected.ips.iter().find(|i| {
            i.interface.is_none_or(|n| {
                expected
                    .interfaces
                    .get(n)
                    .is_some_and(|i| i.name == call.ifname)
            }) && !addresses.contains(&i.address)
        }) {
            return Err(Error::other(format!(
                "the address {} is missing on {:?}",
                missing.address, call.ifname
            )));
        }
        check_routes(&mut socket, expected)
    })
}

/// Checks that the routes of the result exist. Must run inside the container's namespace.
fn check_routes(socket: &mut Socket, expected: &Success) -> Result<(), Error> {
    let routes = socket
        .routes()
        .map_err(doing("the container's routes cannot be read"))?;
    match expected
        .routes
        .iter()
        .find(|r| !routes.iter().any(|d| matches_route(d, r)))
    {
        Some(missing) => Err(Error::other(format!(
            "the route to {}{} is missing",
            missing.destination,
            missing
                .gateway
                .map_or_else(String::new, |g| format!(" via {g}"))
        ))),
        None => Ok(()),
    }
}

/// Whether a route of the kernel matches one of the result. As in the reference, the
/// gateway of a default route is not compared. The parser shows no gateway and link
/// for a multipath route or a route without a link, so those match by destination.
fn matches_route(found: &Route, expected: &crate::cni::Route) -> bool {
    let several = found.gateway.is_none() && found.link == 0;
    found.destination == expected.destination.trunc()
        && (several
            || expected.destination.prefix_len() == 0
            || expected
                .gateway
                .is_none_or(|gateway| found.gateway == Some(gateway)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_exists_if_it_uses_the_requested_gateway() {
        let of = |destination: &str, gateway: Option<&str>| crate::cni::Route {
            destination: destination.parse().expect("a network"),
            gateway: gateway.map(|g| g.parse().expect("an address")),
            extra: serde_json::Map::new(),
        };
        let kernel = |link, destination: &str, gateway: Option<&str>| {
            let wanted = of(destination, gateway);
            Route::new(link, wanted.destination, wanted.gateway)
        };
        let over = |gateway| kernel(2, "10.9.0.0/16", Some(gateway));
        let requested = of("10.9.0.0/16", Some("10.1.1.8"));
        assert!(matches_route(&over("10.1.1.8"), &requested));
        assert!(!matches_route(&over("10.1.1.9"), &requested));
        assert!(!matches_route(&kernel(2, "10.9.0.0/16", None), &requested));
        assert!(!matches_route(
            &kernel(2, "10.9.0.0/17", Some("10.1.1.8")),
            &requested
        ));
        // The result does not contain an inferred gateway, and the kernel clears host bits.
        assert!(matches_route(&over("10.1.1.9"), &of("10.9.1.2/16", None)));
        // A changed default route is assumed to be intentional.
        let default = of("0.0.0.0/0", Some("10.1.1.1"));
        assert!(matches_route(
            &kernel(2, "0.0.0.0/0", Some("10.1.1.9")),
            &default
        ));
        // A multipath route.
        assert!(matches_route(&kernel(0, "10.9.0.0/16", None), &requested));
    }
}
