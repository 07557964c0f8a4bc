//! `dummy`: a link that has addresses but transmits no packets
//! (`plugins/main/dummy/dummy.go` of containernetworking/plugins).

use super::interface;
use super::sublink::{self, Addresses};
use crate::cni::{Error, Success};
use crate::skel::{Call, Plugin};
use holdfast_net::link::LinkPlan;

/// The plugin `dummy`.
pub struct Dummy;

impl Plugin for Dummy {
    fn name(&self) -> &'static str {
        "dummy"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let addresses = match Addresses::of(call)? {
            Addresses::None => {
                return Err(Error::config(
                    "dummy interface requires an IPAM: set \"ipam\"",
                ));
            }
            other => other,
        };
        let mtu = sublink::mtu(call, None)?;
        let plan = LinkPlan {
            name: &call.ifname,
            kind: "dummy",
            mtu,
            ..LinkPlan::default()
        };
        sublink::add(
            call,
            addresses,
            || interface::inside(call, |socket| sublink::make(socket, &plan)),
            || sublink::delete_link(call),
        )
    }

    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        interface::remove(call, || Ok(None))
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        sublink::check(call, "dummy", |_| Ok(()))
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        interface::collect_addresses(call, keep)
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        sublink::status(call, "dummy")
    }
}
