//! A lease: its contents, and when it must be renewed. This module does not read any clock.

use std::net::Ipv4Addr;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net};
use serde_json::{Map, Value, json};

use super::message::{Message, kind, option};
use crate::cni::{Address, Error, Json, Route, Success};

/// The duration of an infinite lease (RFC 2131, section 3.3).
const INFINITE: u32 = u32::MAX;

/// The contents of a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The address with the prefix length of its network.
    pub address: Ipv4Net,
    /// The routers in order of preference.
    pub routers: Vec<Ipv4Addr>,
    /// The routes as destination and router, in the order in which they are created.
    pub routes: Vec<(Ipv4Net, Ipv4Addr)>,
    /// The server that granted the lease.
    pub server: Ipv4Addr,
    /// The duration in seconds.
    pub seconds: u32,
    /// Ages in seconds from which the client renews at its own server (T1) and rebinds at any server (T2).
    pub renew: [u32; 2],
}

/// The action that a lease needs at a given age.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseAction {
    /// Wait for this time; `None` waits indefinitely.
    Wait(Option<Duration>),
    /// Renew at the lease's server; after a failure retry after this time.
    Renew(Duration),
    /// Renew at any server; after a failure retry after this time.
    Rebind(Duration),
    /// The lease is expired.
    Expired,
}

fn addresses(bytes: &[u8]) -> Vec<Ipv4Addr> {
    bytes
        .chunks_exact(4)
        .filter_map(|b| <[u8; 4]>::try_from(b).ok())
        .map(Ipv4Addr::from)
        .collect()
}

/// Parses option 121: for each route the prefix length, the significant bytes of the prefix, and the router (RFC 3442).
fn classless(mut bytes: &[u8]) -> Option<Vec<(Ipv4Net, Ipv4Addr)>> {
    let mut routes = vec![];
    while let [length, rest @ ..] = bytes {
        let significant = usize::from(length.div_ceil(8));
        let mut network = [0; 4];
        network
            .get_mut(..significant)?
            .copy_from_slice(rest.get(..significant)?);
        let router: [u8; 4] = rest.get(significant..significant + 4)?.try_into().ok()?;
        routes.push((
            Ipv4Net::new(network.into(), *length).ok()?.trunc(),
            router.into(),
        ));
        bytes = rest.get(significant + 4..)?;
    }
    Some(routes)
}

/// The classful network of an address.
fn classful(address: Ipv4Addr) -> Ipv4Net {
    let length = match address.octets()[0] {
        0..128 => 8,
        128..192 => 16,
        _ => 24,
    };
    Ipv4Net::new(address, length).unwrap_or_default().trunc()
}

impl Lease {
    /// Reads the lease from a server's DHCPACK.
    pub fn of(ack: &Message) -> Result<Lease, Error> {
        let number = |code: u8| {
            ack.get(code)
                .and_then(|v| <[u8; 4]>::try_from(v).ok())
                .map(u32::from_be_bytes)
        };
        let missing = |what: &str| Error::other(format!("the DHCP server's answer has no {what}"));
        if ack.kind() != kind::ACK {
            return Err(Error::other("the DHCP server rejected the request"));
        }
        let mask = number(option::SUBNET_MASK).ok_or_else(|| missing("subnet mask"))?;
        let length = u8::try_from(mask.leading_ones()).unwrap_or(32);
        let address = Ipv4Net::new(ack.yours, length)
            .map_err(|e| Error::doing("the address from the DHCP server is invalid", e))?;
        let routers = ack.get(option::ROUTERS).map(addresses).unwrap_or_default();
        let seconds = number(option::LEASE_TIME)
            .filter(|s| *s > 0)
            .ok_or_else(|| missing("lease time"))?;
        let default = routers.first().map(|r| (Ipv4Net::default(), *r));
        let routes = match ack.get(option::CLASSLESS_ROUTES) {
            Some(bytes) => classless(bytes).ok_or_else(|| {
                Error::other("the DHCP server's classless routes (option 121) are malformed")
            })?,
            None => {
                let pairs = addresses(ack.get(option::STATIC_ROUTES).unwrap_or_default());
                pairs
                    .chunks_exact(2)
                    .map(|p| (classful(p[0]), p[1]))
                    .chain(default)
                    .collect()
            }
        };
        let half = u64::from(seconds) / 2;
        let most = u64::from(seconds) * 7 / 8;
        let within = |code: u8, otherwise: u64| {
            number(code)
                .filter(|n| *n < seconds)
                .unwrap_or(u32::try_from(otherwise).unwrap_or(seconds))
        };
        let server = number(option::SERVER).ok_or_else(|| missing("server identifier"))?;
        let t1 = within(option::RENEWAL_TIME, half);
        let renew = [t1, within(option::REBINDING_TIME, most).max(t1)];
        Ok(Lease {
            address,
            routers,
            routes,
            server: server.into(),
            seconds,
            renew,
        })
    }

    /// The remaining time at this age.
    #[must_use]
    pub fn remaining(&self, age: Duration) -> Duration {
        if self.seconds == INFINITE {
            return Duration::MAX;
        }
        Duration::from_secs(self.seconds.into()).saturating_sub(age)
    }

    /// The action that is due at this age.
    #[must_use]
    pub fn action(&self, age: Duration) -> LeaseAction {
        if self.seconds == INFINITE {
            return LeaseAction::Wait(None);
        }
        let [t1, t2, end] =
            [self.renew[0], self.renew[1], self.seconds].map(|s| Duration::from_secs(s.into()));
        // Retry after half of the remaining time, but at least a minute (RFC 2131,
        // section 4.4.5). For short leases the minimum is a sixtieth of their duration.
        let again =
            |until: Duration| ((until - age) / 2).max((end / 60).min(Duration::from_secs(60)));
        match age {
            age if age < t1 => LeaseAction::Wait(Some(t1 - age)),
            age if age < t2 => LeaseAction::Renew(again(t2)),
            age if age < end => LeaseAction::Rebind(again(end)),
            _ => LeaseAction::Expired,
        }
    }

    /// Converts the lease to the result of an IPAM plugin.
    #[must_use]
    pub fn success(&self, priority: Option<i64>) -> Success {
        let gateway = self.routers.first().map(|r| (*r).into());
        let extra: Map<String, Value> = priority
            .into_iter()
            .map(|p| ("priority".to_owned(), p.into()))
            .collect();
        let route = |(net, router): &(Ipv4Net, Ipv4Addr)| {
            // The router 0.0.0.0 means that the destination is on the link (RFC 3442).
            let gateway = Some(*router)
                .filter(|r| !r.is_unspecified())
                .map(Into::into);
            Route {
                destination: IpNet::V4(*net),
                gateway,
                extra: extra.clone(),
            }
        };
        let ip = Address {
            address: IpNet::V4(self.address),
            gateway,
            interface: None,
        };
        Success {
            ips: vec![ip],
            routes: self.routes.iter().map(route).collect(),
            ..Success::default()
        }
    }

    /// Serialises the lease for the daemon's file.
    #[must_use]
    pub fn json(&self) -> Value {
        let routes: Vec<Value> = self
            .routes
            .iter()
            .map(|(net, router)| json!([net.to_string(), router]))
            .collect();
        json!({"address": self.address.to_string(), "routers": self.routers, "routes": routes, "server": self.server, "seconds": self.seconds, "renew": self.renew})
    }

    /// Parses the daemon's file.
    #[must_use]
    pub fn parse(value: &Value) -> Option<Lease> {
        let config = Json(value);
        let ip = |v: &Value| v.as_str()?.parse::<Ipv4Addr>().ok();
        let number = |v: &Value| u32::try_from(v.as_u64()?).ok();
        let routes = value["routes"]
            .as_array()?
            .iter()
            .map(|r| Some((r[0].as_str()?.parse().ok()?, ip(&r[1])?)));
        Some(Lease {
            address: config.text("address").ok()?.parse().ok()?,
            routers: value["routers"].as_array()?.iter().filter_map(ip).collect(),
            routes: routes.collect::<Option<_>>()?,
            server: ip(&value["server"])?,
            seconds: number(&value["seconds"])?,
            renew: [number(&value["renew"][0])?, number(&value["renew"][1])?],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ack() -> Message {
        let mut message = Message::new(kind::ACK, 1, [2; 6]);
        message.yours = [10, 0, 0, 9].into();
        message
            .with(option::SUBNET_MASK, &[255, 255, 255, 0])
            .with(option::ROUTERS, &[10, 0, 0, 1, 10, 0, 0, 2])
            .with(option::LEASE_TIME, &3600u32.to_be_bytes())
            .with(option::SERVER, &[10, 0, 0, 1])
    }

    #[test]
    fn a_lease_contains_the_options_of_the_reply() {
        let lease = Lease::of(&ack().with(option::STATIC_ROUTES, &[192, 168, 7, 0, 10, 0, 0, 3]))
            .expect("a lease");
        assert_eq!(
            (lease.address.to_string(), lease.routers.len(), lease.renew),
            ("10.0.0.9/24".into(), 2, [1800, 3150])
        );
        let shown: Vec<String> = lease
            .routes
            .iter()
            .map(|(n, r)| format!("{n} {r}"))
            .collect();
        assert_eq!(shown, ["192.168.7.0/24 10.0.0.3", "0.0.0.0/0 10.0.0.1"]);
        assert_eq!(Lease::parse(&lease.json()), Some(lease));
        // Classless routes replace routers and static routes (RFC 3442).
        let routes = [
            0, 10, 0, 0, 5, 20, 172, 16, 16, 10, 0, 0, 6, 32, 1, 2, 3, 4, 0, 0, 0, 0,
        ];
        let lease = Lease::of(&ack().with(option::CLASSLESS_ROUTES, &routes)).expect("a lease");
        let shown: Vec<String> = lease
            .routes
            .iter()
            .map(|(n, r)| format!("{n} {r}"))
            .collect();
        assert_eq!(
            shown,
            [
                "0.0.0.0/0 10.0.0.5",
                "172.16.16.0/20 10.0.0.6",
                "1.2.3.4/32 0.0.0.0"
            ]
        );
        assert_eq!(lease.success(Some(7)).routes[2].gateway, None);
        for broken in [
            &[33, 1, 2, 3, 4, 5, 6, 7, 8][..],
            &[24, 1, 2],
            &[8, 1, 2, 3],
        ] {
            assert!(
                Lease::of(&ack().with(option::CLASSLESS_ROUTES, broken)).is_err(),
                "{broken:?}"
            );
        }
        let refused = Message {
            options: vec![(option::MESSAGE_TYPE, vec![kind::NAK])],
            ..ack()
        };
        assert!(Lease::of(&refused).is_err());
        assert!(Lease::of(&Message::new(kind::ACK, 1, [2; 6])).is_err());
    }

    #[test]
    fn leases_are_renewed_in_time() {
        let lease = Lease::of(&ack()).expect("a lease");
        let at = |seconds: u64| lease.action(Duration::from_secs(seconds));
        let remaining = |seconds: u64| lease.remaining(Duration::from_secs(seconds)).as_secs();
        assert_eq!(
            [remaining(0), remaining(3500), remaining(4000)],
            [3600, 100, 0]
        );
        assert_eq!(at(0), LeaseAction::Wait(Some(Duration::from_secs(1800))));
        assert_eq!(at(1800), LeaseAction::Renew(Duration::from_secs(675)));
        assert_eq!(at(3140), LeaseAction::Renew(Duration::from_secs(60)));
        assert_eq!(at(3150), LeaseAction::Rebind(Duration::from_secs(225)));
        assert_eq!(at(3600), LeaseAction::Expired);
        assert_eq!(
            Lease {
                seconds: u32::MAX,
                ..lease
            }
            .action(Duration::from_secs(1 << 40)),
            LeaseAction::Wait(None)
        );
    }
}
