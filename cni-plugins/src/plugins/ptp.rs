//! `ptp`: connects a container to the host with a veth pair over which all its
//! traffic is routed (`plugins/main/ptp/ptp.go` of containernetworking/plugins).

use std::fs::File;
use std::net::IpAddr;

use ipnet::IpNet;

use super::delegate;
use super::interface::{self, doing};
use super::pair::{self, PairConfig};
use crate::cni::{Address, Dns, Error, Interface, Success};
use crate::net::netns;
use crate::skel::{Call, Plugin};
use holdfast_net::netlink::Socket;
use holdfast_net::route::Route;
use holdfast_net::sysctl;

/// The plugin `ptp`.
pub struct Ptp;

struct Config<'a> {
    masquerade: bool,
    mtu: u32,
    ipam: &'a str,
    dns: Option<Dns>,
}

impl<'a> Config<'a> {
    fn parse(call: &Call<'a>) -> Result<Config<'a>, Error> {
        let c = call.config;
        let dns = Dns::parse(c.object("dns")?);
        Ok(Config {
            masquerade: pair::masquerades(c)?,
            mtu: u32::try_from(c.number("mtu", 0, 0..=65535)?).unwrap_or(0),
            ipam: c.object("ipam")?.text("type")?,
            dns: (!dns.fields.is_empty()).then_some(dns),
        })
    }
}

/// The network that contains only this address.
fn host_prefix(address: IpAddr) -> Result<IpNet, Error> {
    IpNet::new(address, if address.is_ipv4() { 32 } else { 128 }).map_err(doing("invalid address"))
}

fn gateway(ip: &Address) -> Result<IpAddr, Error> {
    ip.gateway.ok_or_else(|| {
        Error::config(format!(
            "the address {} has no gateway, which ptp needs: set one in \"ipam\"",
            ip.address
        ))
    })
}

/// Configures the container: even its own network is reached through the gateway.
fn inside(namespace: &File, ifname: &str, success: &Success) -> Result<(), Error> {
    netns::inside(namespace, || {
        let (mut socket, index) = interface::prepare(ifname, success, false)?;
        for ip in &success.ips {
            socket
                .add_lone_address(index, ip.address)
                .map_err(doing(format!(
                    "failed to add IP addr {} to {ifname:?}",
                    ip.address
                )))?;
        }
        socket
            .set_up(index, true)
            .map_err(doing(format!("failed to set {ifname:?} UP")))?;
        for ip in &success.ips {
            let gateway = gateway(ip)?;
            for (destination, over) in [
                (host_prefix(gateway)?, None),
                (ip.address.trunc(), Some(gateway)),
            ] {
                // With several addresses, traffic to each network uses the source address in that network.
                let added = socket.add_route(&Route {
                    source: Some(ip.address.addr()),
                    ..Route::new(index, destination, over)
                });
                added.map_err(doing(format!(
                    "failed to add route {destination} via {over:?} dev {ifname}"
                )))?;
            }
        }
        interface::add_routes(&mut socket, index, ifname, success)
    })
}

/// Configures the host: adds the gateway's address to the host end, and a route to the container.
fn outside(socket: &mut Socket, host: &str, success: &Success) -> Result<(), Error> {
    let _ = sysctl::write(&format!("ipv6/conf/{host}/accept_ra"), "0");
    let link = socket
        .link(host)
        .map_err(doing("the host interface cannot be read"))?;
    let link = link.ok_or_else(|| Error::other(format!("the interface {host:?} disappeared")))?;
    for ip in &success.ips {
        let address = host_prefix(gateway(ip)?)?;
        match socket.add_address(link.index, address) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(Error::doing(
                    format!("failed to add {address} to {host:?}"),
                    error,
                ));
            }
            _ => {}
        }
        let container = host_prefix(ip.address.addr())?;
        socket
            .add_route(&Route::new(link.index, container, None))
            .map_err(doing(format!(
                "failed to add route to {container} dev {host}"
            )))?;
        pair::forward(address.addr())?;
    }
    Ok(())
}

fn attach(
    socket: &mut Socket,
    config: &Config<'_>,
    call: &Call<'_>,
    namespace: &File,
    interfaces: [Interface; 2],
) -> Result<Success, Error> {
    interface::with_addresses(call, config.ipam, |mut success| {
        success.ips.iter_mut().for_each(|ip| ip.interface = Some(1));
        success.interfaces = interfaces.to_vec();
        inside(namespace, &call.ifname, &success)?;
        outside(socket, &success.interfaces[0].name, &success)?;
        if config.masquerade {
            pair::masquerade(call, &success)?;
        }
        if let Some(dns) = &config.dns {
            success.dns = dns.clone();
        }
        Ok(success)
    })
}

impl Plugin for Ptp {
    fn name(&self) -> &'static str {
        "ptp"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let config = Config::parse(call)?;
        let namespace = netns::require(&call.netns)?;
        let mut socket = Socket::route().map_err(doing("opening a netlink socket failed"))?;
        let interfaces = pair::add(
            &mut socket,
            call,
            &namespace,
            PairConfig {
                mac: None,
                mtu: config.mtu,
                master: None,
            },
        )?;
        let host = interfaces[0].name.clone();
        let result = attach(&mut socket, &config, call, &namespace, interfaces);
        if result.is_err() {
            // Report only the first error; the runtime calls DEL for leftovers.
            let _ = socket.delete_link(&host);
        }
        result
    }

    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        pair::remove(call)
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        let config = Config::parse(call)?;
        delegate::forward(call, config.ipam, "CHECK")?;
        let expected = call.previous()?.unwrap_or_default();
        interface::check(call, &expected)?;
        let host = expected
            .interfaces
            .iter()
            .find(|i| i.sandbox.is_empty())
            .map(|i| i.name.clone())
            .unwrap_or_default();
        let mut socket = Socket::route().map_err(doing("opening a netlink socket failed"))?;
        if socket
            .link(&host)
            .map_err(doing("the host interface cannot be read"))?
            .is_none_or(|l| l.kind != "veth")
        {
            return Err(Error::other(format!(
                "the host's interface {host:?} is missing"
            )));
        }
        let routes = socket
            .routes()
            .map_err(doing("the host's routes cannot be read"))?;
        for ip in &expected.ips {
            let container = host_prefix(ip.address.addr())?;
            if !routes.iter().any(|r| r.destination == container) {
                return Err(Error::other(format!(
                    "the host's route to {container} is missing"
                )));
            }
        }
        if config.masquerade {
            pair::check_masquerade(call, &expected)
        } else {
            Ok(())
        }
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        let config = Config::parse(call)?;
        interface::join_errors([
            pair::collect_links(call, keep),
            pair::collect_masquerade(call, keep),
            delegate::collect(call, config.ipam, keep),
        ])
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        delegate::status(call, Config::parse(call)?.ipam)
    }
}
