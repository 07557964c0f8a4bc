//! `macvlan`: a link with its own hardware address on a parent link
//! (`plugins/main/macvlan/macvlan.go` of containernetworking/plugins).

use super::interface;
use super::sublink::{self, Addresses, in_parent_namespace, parent};
use crate::cni::{Error, Success, cni_args};
use crate::skel::{Call, Plugin};
use holdfast_net::link::{LinkPlan, parse_mac};
use holdfast_net::netlink::Attributes;

/// The plugin `macvlan`.
pub struct Macvlan;

const MODE: u16 = 1;
const QUEUE: u16 = 7;

fn mode(call: &Call<'_>) -> Result<u32, Error> {
    match call.config.text("mode")? {
        "" | "bridge" => Ok(4),
        "private" => Ok(1),
        "vepa" => Ok(2),
        "passthru" => Ok(8),
        other => Err(Error::config(format!(
            "unknown mode {other:?}: expected bridge, private, vepa or passthru"
        ))),
    }
}

fn mac(call: &Call<'_>) -> Result<Option<[u8; 6]>, Error> {
    let args = cni_args(&call.args, &["MAC"])?;
    let sources = [
        call.config.text("mac")?,
        args.get("MAC").map_or("", String::as_str),
        call.config.object("runtimeConfig")?.text("mac")?,
    ];
    let Some(text) = sources.iter().rev().find(|text| !text.is_empty()) else {
        return Ok(None);
    };
    parse_mac(text).map(Some).ok_or_else(|| {
        Error::config(format!(
            "invalid MAC address {text:?}: expected six hexadecimal bytes"
        ))
    })
}

impl Plugin for Macvlan {
    fn name(&self) -> &'static str {
        "macvlan"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let c = call.config;
        let (mode, mac, queue) = (
            mode(call)?,
            mac(call)?,
            c.number("bcqueuelen", 0, 0..=i64::from(u32::MAX))?,
        );
        let mut data = Attributes::new().number(MODE, mode);
        if let Some(queue) = u32::try_from(queue).ok().filter(|q| *q > 0) {
            data = data.number(QUEUE, queue);
        }
        let make = || {
            in_parent_namespace(call, c.flag("linkInContainer")?, |socket, namespace| {
                let parent = parent(socket, c.text("master")?)?;
                let mtu = sublink::mtu(call, Some(&parent))?;
                sublink::make(
                    socket,
                    &LinkPlan {
                        name: &call.ifname,
                        kind: "macvlan",
                        data,
                        parent: Some(parent.index),
                        namespace,
                        mtu,
                        mac,
                    },
                )
            })
        };
        sublink::add(call, Addresses::of(call)?, make, || {
            sublink::delete_link(call)
        })
    }

    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        interface::remove(call, || Ok(None))
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        in_parent_namespace(call, call.config.flag("linkInContainer")?, |socket, _| {
            parent(socket, call.config.text("master")?)
        })?;
        let mode = mode(call)?;
        sublink::check(call, "macvlan", |link| {
            sublink::has(link, MODE, mode, "the mode")
        })
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        interface::collect_addresses(call, keep)
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        mode(call)?;
        sublink::status(call, "macvlan")
    }
}
