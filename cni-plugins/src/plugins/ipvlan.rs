//! `ipvlan`: a link with its own IP addresses that shares the hardware address of
//! a parent link (`plugins/main/ipvlan/ipvlan.go` of containernetworking/plugins).
//! Can be chained after a plugin that creates the parent.

use super::interface;
use super::sublink::{self, Addresses, in_parent_namespace, parent};
use crate::cni::{Error, Success};
use crate::skel::{Call, Plugin};
use holdfast_net::link::LinkPlan;
use holdfast_net::netlink::Attributes;

/// The plugin `ipvlan`.
pub struct Ipvlan;

const MODE: u16 = 1;

fn mode(call: &Call<'_>) -> Result<u16, Error> {
    match call.config.text("mode")? {
        "" | "l2" => Ok(0),
        "l3" => Ok(1),
        "l3s" => Ok(2),
        other => Err(Error::config(format!(
            "unknown mode {other:?}: expected l2, l3 or l3s"
        ))),
    }
}

/// The configured master, or the only interface of the previous plugin.
fn master<'a>(call: &Call<'a>, previous: Option<&'a Success>) -> Result<&'a str, Error> {
    match (
        call.config.text("master")?,
        previous.map(|p| p.interfaces.as_slice()),
    ) {
        ("", Some([one])) => Ok(&one.name),
        ("", Some(_)) => Err(Error::config(
            "chained master failure. PrevResult lacks a single named interface: set \"master\"",
        )),
        (name, _) => Ok(name),
    }
}

impl Plugin for Ipvlan {
    fn name(&self) -> &'static str {
        "ipvlan"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let c = call.config;
        let previous = call.previous()?;
        let data = Attributes::new().put(MODE, &mode(call)?.to_ne_bytes());
        let addresses = match (Addresses::of(call)?, &previous) {
            (Addresses::None, Some(previous)) if !previous.ips.is_empty() => {
                Addresses::Previous(previous.clone())
            }
            (Addresses::None, _) => {
                return Err(Error::config(
                    "ipvlan needs addresses: set \"ipam\", or list it after a plugin that provides them",
                ));
            }
            (other, _) => other,
        };
        let make = || {
            in_parent_namespace(call, c.flag("linkInContainer")?, |socket, namespace| {
                let parent = parent(socket, master(call, previous.as_ref())?)?;
                let mtu = sublink::mtu(call, None)?;
                let plan = LinkPlan {
                    name: &call.ifname,
                    kind: "ipvlan",
                    data,
                    parent: Some(parent.index),
                    namespace,
                    mtu,
                    mac: None,
                };
                sublink::make(socket, &plan)
            })
        };
        sublink::add(call, addresses, make, || sublink::delete_link(call))
    }

    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        interface::remove(call, || Ok(None))
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        // In a chain, the master is the previous plugin's interface. At CHECK,
        // `prevResult` already is the result of this plugin, so the master is unknown.
        let name = call.config.text("master")?;
        if !name.is_empty() {
            in_parent_namespace(call, call.config.flag("linkInContainer")?, |socket, _| {
                parent(socket, name)
            })?;
        }
        let mode = mode(call)?;
        sublink::check(call, "ipvlan", |link| {
            sublink::has(link, MODE, mode.into(), "the mode")
        })
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        interface::collect_addresses(call, keep)
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        mode(call)?;
        sublink::status(call, "ipvlan")
    }
}
