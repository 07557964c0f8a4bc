//! `loopback`: sets `lo` up in a container (`plugins/main/loopback/loopback.go` of containernetworking/plugins).

use crate::cni::{Address, Error, Interface, Success};
use crate::net::netns;
use crate::skel::{Call, Plugin};
use holdfast_net::netlink::Socket;

/// The plugin `loopback`.
pub struct Loopback;

impl Plugin for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let namespace = netns::require(&call.netns)?;
        let addresses = netns::inside(&namespace, || {
            let failed = |e| Error::doing("lo cannot be brought up", e);
            let mut socket = Socket::route().map_err(failed)?;
            let lo = socket
                .link("lo")
                .map_err(failed)?
                .ok_or_else(|| Error::other("the container has no lo"))?;
            socket.set_up(lo.index, true).map_err(failed)?;
            socket.addresses(lo.index).map_err(failed)
        })?;
        if let Some(foreign) = addresses.iter().find(|a| !a.addr().is_loopback()) {
            return Err(Error::other(format!(
                "loopback interface has a non-loopback address {foreign}"
            )));
        }
        if let Some(previous) = call.previous()? {
            return Ok(previous);
        }
        let lo = Interface {
            name: "lo".into(),
            mac: "00:00:00:00:00:00".into(),
            sandbox: call.netns.clone(),
            ..Interface::default()
        };
        let ips = addresses
            .into_iter()
            .map(|address| Address {
                address,
                gateway: None,
                interface: Some(0),
            })
            .collect();
        Ok(Success {
            interfaces: vec![lo],
            ips,
            ..Success::default()
        })
    }

    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        if call.netns.is_empty() {
            return Ok(());
        }
        let Some(namespace) = netns::open(&call.netns)? else {
            return Ok(());
        };
        netns::inside(&namespace, || {
            let failed = |e| Error::doing("lo cannot be brought down", e);
            let mut socket = Socket::route().map_err(failed)?;
            match socket.link("lo").map_err(failed)? {
                Some(lo) => socket.set_up(lo.index, false).map_err(failed),
                None => Ok(()),
            }
        })
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        let namespace = netns::require(&call.netns)?;
        let up = netns::inside(&namespace, || {
            let failed = |e| Error::doing("lo cannot be read", e);
            Ok(Socket::route()
                .map_err(failed)?
                .link("lo")
                .map_err(failed)?
                .is_some_and(|l| l.up))
        })?;
        if up {
            Ok(())
        } else {
            Err(Error::other("loopback interface is down"))
        }
    }
}
