//! `vrf`: moves a container's interface into a separate routing domain
//! (`plugins/meta/vrf/main.go` of containernetworking/plugins). Chained.

use super::interface::{self, doing};
use crate::cni::{Error, Success};
use crate::net::netns;
use crate::skel::{Call, Plugin};
use holdfast_net::link::{Change, Link, LinkPlan};
use holdfast_net::netlink::{Attributes, Socket};
use holdfast_net::route::Route;

/// The plugin `vrf`.
pub struct Vrf;

const TABLE: u16 = 1;
const MAIN: u32 = 254;
const KERNEL: u8 = 2;

struct Config<'a> {
    name: &'a str,
    table: Option<u32>,
}

impl<'a> Config<'a> {
    fn parse(call: &Call<'a>) -> Result<Config<'a>, Error> {
        let c = call.config;
        let name = c.text("vrfname")?;
        crate::skel::check_ifname(name).map_err(|e| {
            Error::config(format!(
                "configuration is expected to have a valid vrf name in \"vrfname\": {}",
                e.message
            ))
        })?;
        let table = c
            .get("table")
            .map(|_| c.number("table", 0, 1..=i64::from(u32::MAX)))
            .transpose()?;
        Ok(Config {
            name,
            table: table.and_then(|t| u32::try_from(t).ok()),
        })
    }
}

fn find(socket: &mut Socket, name: &str) -> Result<Option<Link>, Error> {
    match socket.link(name).map_err(doing("the vrf cannot be read"))? {
        Some(link) if link.kind != "vrf" => {
            Err(Error::other(format!("the interface {name:?} is not a vrf")))
        }
        found => Ok(found),
    }
}

fn ensure(socket: &mut Socket, config: &Config<'_>) -> Result<(Link, u32), Error> {
    if find(socket, config.name)?.is_none() {
        let links = socket
            .links()
            .map_err(doing("the container's interfaces cannot be read"))?;
        let routes = socket
            .routes()
            .map_err(doing("the container's routes cannot be read"))?;
        let taken = |t: u32| {
            links
                .iter()
                .any(|l| l.kind == "vrf" && l.option(TABLE) == Some(t))
                || routes.iter().any(|r| r.table == t)
        };
        let table = config
            .table
            .or_else(|| (1..u32::MAX).find(|t| !taken(*t)))
            .unwrap_or(1);
        let plan = LinkPlan {
            name: config.name,
            kind: "vrf",
            data: Attributes::new().number(TABLE, table),
            ..LinkPlan::default()
        };
        super::sublink::make(socket, &plan)?;
    }
    let link = find(socket, config.name)?
        .ok_or_else(|| Error::other(format!("the vrf {:?} disappeared", config.name)))?;
    let table = link
        .option(TABLE)
        .ok_or_else(|| Error::other(format!("the vrf {:?} has no table", config.name)))?;
    if config.table.is_some_and(|t| t != table) {
        return Err(Error::other(format!(
            "the vrf {:?} already exists with the different routing table id {table}",
            config.name
        )));
    }
    socket.set_up(link.index, true).map_err(doing(format!(
        "the vrf {:?} cannot be brought up",
        config.name
    )))?;
    Ok((link, table))
}

/// Adds the interface to the vrf, and restores the addresses and routes that the kernel removes in doing so.
fn join(call: &Call<'_>, socket: &mut Socket, vrf: &Link, table: u32) -> Result<(), Error> {
    let failed = || doing("the container's interface cannot be read");
    let link = socket.link(&call.ifname).map_err(failed())?;
    let link = link.ok_or_else(|| {
        Error::other(format!(
            "the interface {:?} is missing in the container",
            call.ifname
        ))
    })?;
    if let Some(other) = link.master.filter(|m| *m != vrf.index) {
        return Err(Error::other(format!(
            "the interface {:?} already has a master (index {other})",
            call.ifname
        )));
    }
    let addresses = socket.addresses(link.index).map_err(failed())?;
    let mut routes: Vec<Route> = socket
        .routes()
        .map_err(failed())?
        .into_iter()
        .filter(|r| r.link == link.index && r.table == MAIN && r.maker != KERNEL)
        .collect();
    routes.sort_by_key(|r| r.gateway.is_some());
    let moved = socket.change_link(
        link.index,
        Change {
            master: Some(vrf.index),
            ..Change::default()
        },
    );
    moved.map_err(doing(format!(
        "adding the interface {:?} to the vrf {:?} failed",
        call.ifname, vrf.name
    )))?;
    for address in addresses {
        match socket.add_address(link.index, address) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(Error::doing(
                    format!("the address {address} was lost in the move to the vrf"),
                    error,
                ));
            }
            _ => {}
        }
    }
    for route in routes {
        let moved = Route { table, ..route };
        socket.add_route(&moved).map_err(doing(format!(
            "the route to {} was lost in the move to the vrf",
            route.destination
        )))?;
    }
    Ok(())
}

impl Plugin for Vrf {
    fn name(&self) -> &'static str {
        "vrf"
    }

    fn versions(&self) -> &'static [&'static str] {
        crate::cni::since("0.3.1")
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let previous = call.chained("vrf")?;
        let config = Config::parse(call)?;
        interface::inside(call, |socket| {
            let (vrf, table) = ensure(socket, &config)?;
            join(call, socket, &vrf, table)
        })?;
        Ok(previous)
    }

    /// Removes the interface from the vrf, and the vrf if no interface remains in it.
    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        // An invalid configuration is no error here: the DEL of the plugin that releases the addresses must still run.
        let Ok(config) = Config::parse(call) else {
            return Ok(());
        };
        let Some(namespace) = (if call.netns.is_empty() {
            None
        } else {
            netns::open(&call.netns)?
        }) else {
            return Ok(());
        };
        netns::inside(&namespace, || {
            let failed = || doing("the container's interfaces cannot be read");
            let mut socket = Socket::route().map_err(failed())?;
            let Some(vrf) = find(&mut socket, config.name)? else {
                return Ok(());
            };
            let members: Vec<Link> = socket
                .links()
                .map_err(failed())?
                .into_iter()
                .filter(|l| l.master == Some(vrf.index))
                .collect();
            if members.iter().all(|l| l.name == call.ifname) {
                return socket.delete_link(config.name).map_err(doing(format!(
                    "the vrf {:?} cannot be removed",
                    config.name
                )));
            }
            match members.iter().find(|l| l.name == call.ifname) {
                Some(link) => socket
                    .change_link(
                        link.index,
                        Change {
                            master: Some(0),
                            ..Change::default()
                        },
                    )
                    .map_err(doing(format!(
                        "removing the interface {:?} from the vrf {:?} failed",
                        call.ifname, config.name
                    ))),
                None => Ok(()),
            }
        })
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        call.chained("vrf")?;
        let config = Config::parse(call)?;
        interface::inside(call, |socket| {
            let vrf = find(socket, config.name)?
                .ok_or_else(|| Error::other(format!("the vrf {:?} is missing", config.name)))?;
            let link = socket
                .link(&call.ifname)
                .map_err(doing("the container's interface cannot be read"))?;
            if link.and_then(|l| l.master) == Some(vrf.index) {
                return Ok(());
            }
            Err(Error::other(format!(
                "the interface {:?} is not in the vrf {:?}",
                call.ifname, config.name
            )))
        })
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        Config::parse(call)?;
        super::has_links("vrf")
    }
}
