//! `bandwidth`: limits the rates at which a container receives and sends (`plugins/meta/bandwidth/main.go`
//! of containernetworking/plugins). Chained after a plugin that creates a veth pair.

use super::interface::{self, doing};
use crate::cni::{Error, Interface, Json, Success, digest, is_orphaned};
use crate::skel::{Call, Plugin};
use holdfast_net::link::{Change, Link, LinkPlan};
use holdfast_net::netlink::Socket;
use holdfast_net::traffic::Bucket;

/// The plugin `bandwidth`.
pub struct Bandwidth;

/// The burst that containerd and go-cni send if none is configured.
const NO_BURST: u64 = u32::MAX as u64;

/// A rate in bits per second, and a burst in bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limit {
    rate: u64,
    burst: u64,
}

impl Limit {
    fn parse(config: Json<'_>, direction: &str) -> Result<Option<Limit>, Error> {
        let number = |what: &str| -> Result<(String, u64), Error> {
            let key = format!("{direction}{what}");
            let value = config.number(&key, 0, 0..=i64::MAX)?;
            Ok((key, u64::try_from(value).unwrap_or(0)))
        };
        let ((rate_key, rate), (burst_key, burst)) = (number("Rate")?, number("Burst")?);
        match (rate, burst) {
            (0, 0) => Ok(None),
            (0, _) => Err(Error::config(format!(
                "{burst_key:?} is {burst}, but {rate_key:?} is not set: set both"
            ))),
            (_, 0) => Err(Error::config(format!(
                "{rate_key:?} is {rate}, but {burst_key:?} is not set: set both"
            ))),
            (_, burst) if burst / 8 >= NO_BURST => Err(Error::config(format!(
                "{burst_key:?} is {burst}, but must be less than {} bits (4 GiB)",
                NO_BURST * 8
            ))),
            (rate, _) if rate < 8 => Err(Error::config(format!(
                "{rate_key:?} is {rate}, but must be at least 8 bits a second"
            ))),
            _ => Ok(Some(Limit { rate, burst })),
        }
    }

    /// The token bucket that the reference's ADD creates. The reference treats [`NO_BURST`] like any other burst.
    fn of_reference(self) -> Bucket {
        let burst = u32::try_from(self.burst / 8).unwrap_or(u32::MAX);
        Bucket {
            rate: self.rate / 8,
            burst,
        }
    }

    /// The token bucket for the kernel. [`NO_BURST`] becomes a tenth of a second at the rate, but at least ten packets.
    fn bucket(self, mtu: u32) -> Bucket {
        let rate = self.rate / 8;
        let least = u64::from(mtu) * 10;
        let burst = if self.burst == NO_BURST {
            (rate / 10).max(least)
        } else {
            self.burst / 8
        };
        Bucket {
            rate,
            burst: u32::try_from(burst).unwrap_or(u32::MAX).max(1),
        }
    }
}

/// The limits for receiving and sending. Limits in the configuration take precedence over those in `runtimeConfig`.
fn parse(call: &Call<'_>) -> Result<[Option<Limit>; 2], Error> {
    let both = |config: Json<'_>| {
        Ok::<_, Error>([
            Limit::parse(config, "ingress")?,
            Limit::parse(config, "egress")?,
        ])
    };
    let own = both(call.config)?;
    if own.iter().any(Option::is_some) {
        Ok(own)
    } else {
        both(call.config.object("runtimeConfig")?.object("bandwidth")?)
    }
}

fn ifb(call: &Call<'_>) -> Result<String, Error> {
    Ok(format!(
        "bwp{}",
        digest(&format!("{}{}", call.network()?, call.container), 12)
    ))
}

/// The host end of the container's veth pair.
fn host_end(call: &Call<'_>, socket: &mut Socket, previous: &Success) -> Result<Link, Error> {
    let failed = || doing("the container's interface cannot be read");
    let index = interface::inside(call, |inside| {
        Ok(inside
            .link(&call.ifname)
            .map_err(failed())?
            .and_then(|l| l.parent))
    })?;
    let peer = match index {
        Some(index) => socket.link_at(index).map_err(failed())?,
        None => None,
    };
    let peer = peer.filter(|l| l.kind == "veth").ok_or_else(|| {
        Error::other(format!("the interface {:?} of the container has no peer on the host: only veth pairs can be limited", call.ifname))
    })?;
    if !previous
        .interfaces
        .iter()
        .any(|i| i.sandbox.is_empty() && i.name == peer.name)
    {
        return Err(Error::other(format!(
            "the host's interface {:?} is not in prevResult",
            peer.name
        )));
    }
    Ok(peer)
}

/// Creates the ifb link for packets that the container sends. Its alias contains the owner, for GC.
fn add_ifb(call: &Call<'_>, socket: &mut Socket, host: &Link) -> Result<Link, Error> {
    let name = ifb(call)?;
    let failed = || {
        doing(format!(
            "creating the interface {name:?} failed; the kernel needs ifb"
        ))
    };
    match socket.add_link(&LinkPlan {
        name: &name,
        kind: "ifb",
        mtu: host.mtu,
        ..LinkPlan::default()
    }) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(failed()(error));
        }
        _ => {}
    }
    let link = socket
        .link(&name)
        .map_err(failed())?
        .ok_or_else(|| Error::other(format!("the interface {name:?} disappeared")))?;
    let owner = call.owner()?;
    let change = Change {
        up: Some(true),
        queue: Some(0),
        alias: Some(&owner.comment),
        ..Change::default()
    };
    socket.change_link(link.index, change).map_err(failed())?;
    Ok(link)
}

impl Plugin for Bandwidth {
    fn name(&self) -> &'static str {
        "bandwidth"
    }

    fn versions(&self) -> &'static [&'static str] {
        crate::cni::since("0.3.0")
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let [receives, sends] = parse(call)?;
        let mut success = call.chained("bandwidth")?;
        if receives.is_none() && sends.is_none() {
            return Ok(success);
        }
        let mut socket = Socket::route().map_err(doing("opening a netlink socket failed"))?;
        let host = host_end(call, &mut socket, &success)?;
        if let Some(limit) = receives {
            let added = socket.add_bucket(host.index, limit.bucket(host.mtu));
            added.map_err(doing(format!(
                "{:?} cannot be limited; the kernel needs sch_tbf",
                host.name
            )))?;
        }
        if let Some(limit) = sends {
            let ifb = add_ifb(call, &mut socket, &host)?;
            let result = socket
                .add_bucket(ifb.index, limit.bucket(host.mtu))
                .and_then(|()| socket.redirect(host.index, ifb.index));
            if let Err(error) = result {
                // Report only the first error.
                let _ = socket.delete_link(&ifb.name);
                return Err(Error::doing(
                    "limiting the egress traffic of the container failed; the kernel needs sch_tbf, cls_u32 and act_mirred",
                    error,
                ));
            }
            success.interfaces.push(Interface {
                name: ifb.name,
                mac: ifb.mac,
                ..Interface::default()
            });
        }
        Ok(success)
    }

    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        let mut socket = Socket::route().map_err(doing("opening a netlink socket failed"))?;
        socket
            .delete_link(&ifb(call)?)
            .map_err(doing("the ifb cannot be removed"))
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        let [receives, sends] = parse(call)?;
        let previous = call.chained("bandwidth")?;
        if receives.is_none() && sends.is_none() {
            return Ok(());
        }
        let mut socket = Socket::route().map_err(doing("opening a netlink socket failed"))?;
        let host = host_end(call, &mut socket, &previous)?;
        let ifb = ifb(call)?;
        for (limit, name) in [(receives, &host.name), (sends, &ifb)] {
            let Some(limit) = limit else { continue };
            let failed = || doing(format!("{name:?} cannot be read"));
            let link = socket
                .link(name)
                .map_err(failed())?
                .ok_or_else(|| Error::other(format!("the interface {name:?} is missing")))?;
            let bucket = limit.bucket(host.mtu);
            let found = socket.bucket(link.index).map_err(failed())?;
            let accepted = [bucket, limit.of_reference()].map(|b| Some((b.rate, b.limit())));
            if !accepted.contains(&found) {
                return Err(Error::other(format!(
                    "{name:?} is limited to {found:?} (bytes a second, bytes), not to {:?}",
                    (bucket.rate, bucket.limit())
                )));
            }
        }
        Ok(())
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        let mut socket = Socket::route().map_err(doing("opening a netlink socket failed"))?;
        let links = socket
            .links()
            .map_err(doing("the host's interfaces cannot be read"))?;
        let network = call.network()?;
        let left = links
            .iter()
            .filter(|l| l.kind == "ifb" && is_orphaned(&l.alias, network, keep));
        interface::join_errors(left.map(|l| {
            socket
                .delete_link(&l.name)
                .map_err(doing(format!("the ifb {:?} cannot be removed", l.name)))
        }))
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        parse(call)?;
        super::has_links("ifb")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_limit_needs_rate_and_burst_and_the_burst_is_bounded() {
        let parse = |config: serde_json::Value| Limit::parse(Json(&config), "ingress");
        assert_eq!(parse(json!({})), Ok(None));
        assert_eq!(
            parse(json!({"IngressRate": 8000, "ingressBurst": 80})),
            Ok(Some(Limit {
                rate: 8000,
                burst: 80
            }))
        );
        for wrong in [
            json!({"ingressRate": 8000}),
            json!({"ingressBurst": 8000}),
            json!({"ingressRate": -1, "ingressBurst": 1}),
            json!({"ingressRate": 8000, "ingressBurst": (u64::from(u32::MAX)) * 8}),
            json!({"ingressRate": 1, "ingressBurst": 8}),
        ] {
            assert!(parse(wrong.clone()).is_err(), "{wrong}");
        }
        assert_eq!(
            Limit {
                rate: 8_000_000,
                burst: 80_000
            }
            .bucket(1500),
            Bucket {
                rate: 1_000_000,
                burst: 10_000
            }
        );
        assert_eq!(
            Limit {
                rate: 8_000_000,
                burst: NO_BURST
            }
            .bucket(1500)
            .burst,
            100_000,
            "a tenth of a second, not 500 MB"
        );
        assert_eq!(
            Limit {
                rate: 8000,
                burst: NO_BURST
            }
            .bucket(1500)
            .burst,
            15_000,
            "ten packets"
        );
    }
}
