//! `vlan`: a VLAN of a link of the host (`plugins/main/vlan/vlan.go` of containernetworking/plugins).

use super::interface;
use super::sublink::{self, Addresses, in_parent_namespace, parent};
use crate::cni::{Error, Success};
use crate::skel::{Call, Plugin};
use holdfast_net::link::LinkPlan;
use holdfast_net::netlink::Attributes;

/// The plugin `vlan`.
pub struct Vlan;

const ID: u16 = 1;

struct Config<'a> {
    master: &'a str,
    id: u16,
}

impl<'a> Config<'a> {
    fn parse(call: &Call<'a>) -> Result<Config<'a>, Error> {
        let c = call.config;
        let id = c.number("vlanId", 0, i64::MIN..=i64::MAX)?;
        let id = u16::try_from(id).ok().filter(|id| *id <= 4094);
        let id = id.ok_or_else(|| {
            Error::config(format!(
                "invalid VLAN ID {} (must be between 0 and 4094)",
                c.number("vlanId", 0, i64::MIN..=i64::MAX).unwrap_or(-1)
            ))
        })?;
        let master = c.text("master")?;
        if master.is_empty() {
            return Err(Error::config(
                "\"master\" field is required. It specifies the host interface name to create the VLAN for",
            ));
        }
        Ok(Config { master, id })
    }
}

impl Plugin for Vlan {
    fn name(&self) -> &'static str {
        "vlan"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let config = Config::parse(call)?;
        let addresses = match Addresses::of(call)? {
            Addresses::None => return Err(Error::config("vlan needs addresses: set \"ipam\"")),
            other => other,
        };
        let make = || {
            in_parent_namespace(
                call,
                call.config.flag("linkInContainer")?,
                |socket, namespace| {
                    let parent = parent(socket, config.master)?;
                    let mtu = sublink::mtu(call, Some(&parent))?;
                    let data = Attributes::new().put(ID, &config.id.to_ne_bytes());
                    let plan = LinkPlan {
                        name: &call.ifname,
                        kind: "vlan",
                        data,
                        parent: Some(parent.index),
                        namespace,
                        mtu,
                        mac: None,
                    };
                    sublink::make(socket, &plan)
                },
            )
        };
        sublink::add(call, addresses, make, || sublink::delete_link(call))
    }

    /// Does not need the master, which may no longer exist.
    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        interface::remove(call, || Ok(None))
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        let config = Config::parse(call)?;
        let wanted =
            in_parent_namespace(call, call.config.flag("linkInContainer")?, |socket, _| {
                sublink::mtu(call, Some(&parent(socket, config.master)?))
            })?;
        sublink::check(call, "vlan", |link| {
            sublink::has(link, ID, config.id.into(), "the VLAN ID")?;
            if wanted != 0 && link.mtu != wanted {
                return Err(Error::other(format!(
                    "the MTU of {:?} is {}, not {wanted}",
                    link.name, link.mtu
                )));
            }
            Ok(())
        })
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        interface::collect_addresses(call, keep)
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        Config::parse(call)?;
        sublink::status(call, "vlan")
    }
}
