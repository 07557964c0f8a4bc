//! `firewall`: lets a container's packets pass the host (CNI reference spec, chapter 9). Only in the tables of iptables can
//! be let pass what these would drop, so this writes there, as `iptables-nft` would.

use std::net::IpAddr;

use super::interface::doing;
use crate::cni::{Error, Success};
use crate::net::nft::iptables;
use crate::skel::{Call, Plugin};

/// The plugin.
pub struct Firewall;

/// What may come in from other bridges, and from this one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Policy {
    Open,
    SameBridge,
    Isolated,
}

struct Config<'a> {
    admin: &'a str,
    policy: Policy,
}

impl<'a> Config<'a> {
    fn parse(call: &Call<'a>) -> Result<Config<'a>, Error> {
        let c = call.config;
        match c.text("backend")? {
            "" | "iptables" | "nftables" => {}
            "firewalld" => {
                return Err(Error::new(
                    2,
                    "backend is \"firewalld\", which this plugin does not talk to: leave it out, and add the network's subnet to the zone \"trusted\" (firewall-cmd --permanent --zone=trusted --add-source=SUBNET)",
                ));
            }
            other => return Err(Error::config(format!("unknown backend {other:?}: expected \"iptables\" (which is honoured through nftables)"))),
        }
        let admin = c.text("iptablesAdminChainName")?;
        if admin.len() > 28 || admin.chars().any(|c| !c.is_ascii_alphanumeric() && !"-_".contains(c)) {
            return Err(Error::config(format!("iptablesAdminChainName {admin:?} is no name of a chain: letters, digits, - and _, at most 28")));
        }
        let policy = match c.text("ingressPolicy")? {
            "" | "open" => Policy::Open,
            "same-bridge" => Policy::SameBridge,
            "isolated" => Policy::Isolated,
            other => return Err(Error::config(format!("unknown ingressPolicy {other:?}: expected \"open\", \"same-bridge\" or \"isolated\""))),
        };
        Ok(Config { admin: if admin.is_empty() { "CNI-ADMIN" } else { admin }, policy })
    }

    /// The bridge that is kept apart, if one is.
    fn bridge<'b>(&self, previous: &'b Success) -> Result<Option<&'b str>, Error> {
        if self.policy == Policy::Open {
            return Ok(None);
        }
        let first = previous.interfaces.first().filter(|i| i.sandbox.is_empty() && crate::skel::check_ifname(&i.name).is_ok());
        first.map(|i| Some(i.name.as_str())).ok_or_else(|| {
            Error::config("ingressPolicy needs the bridge as the first interface of prevResult: put this plugin behind \"bridge\" in the list")
        })
    }
}

fn addresses(success: &Success) -> Vec<IpAddr> {
    success.ips.iter().map(|ip| ip.address.addr()).collect()
}

/// The old iptables is asked after this one: what it drops stays dropped.
fn refuse_legacy() -> Result<(), Error> {
    if iptables::is_legacy("filter") {
        return Err(Error::new(
            Error::UNAVAILABLE,
            "this host filters with the old iptables, which drops what nftables lets pass: change over (update-alternatives --set iptables /usr/sbin/iptables-nft, and the same for ip6tables), then reboot",
        ));
    }
    Ok(())
}

impl Plugin for Firewall {
    fn name(&self) -> &'static str {
        "firewall"
    }

    fn versions(&self) -> &'static [&'static str] {
        crate::cni::since("0.4.0")
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let config = Config::parse(call)?;
        let previous = call.chained("firewall")?;
        let addresses = addresses(&previous);
        if addresses.is_empty() {
            return Ok(previous);
        }
        refuse_legacy()?;
        let bridge = config.bridge(&previous)?;
        let added = iptables::allow(&addresses, config.admin, &call.owner()?);
        added.map_err(doing("the firewall cannot be opened in nftables"))?;
        if let Some(bridge) = bridge {
            let isolated = iptables::isolate(bridge, config.policy == Policy::Isolated, &addresses);
            if isolated.is_err() {
                // The first error is the one to report; the runtime calls DEL for whatever is left.
                let _ = iptables::disallow(&[], &call.owner()?);
            }
            isolated.map_err(doing(format!("the bridge {bridge:?} cannot be kept apart in nftables")))?;
        }
        Ok(previous)
    }

    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        let known = call.previous().ok().flatten().map(|p| addresses(&p)).unwrap_or_default();
        let removed = iptables::disallow(&known, &call.owner()?);
        removed.map_err(doing("the firewall's rules cannot be removed"))
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        let config = Config::parse(call)?;
        let previous = call.chained("firewall")?;
        let addresses = addresses(&previous);
        if !iptables::allows(&addresses).map_err(doing("the firewall cannot be read"))? {
            return Err(Error::other(format!("the firewall's rules for {addresses:?} are missing")));
        }
        match config.bridge(&previous)? {
            Some(bridge) => match iptables::is_isolated(bridge, config.policy == Policy::Isolated, &addresses) {
                Ok(true) => Ok(()),
                Ok(false) => Err(Error::other(format!("the rules that keep the bridge {bridge:?} apart are missing"))),
                Err(error) => Err(Error::doing("the firewall cannot be read", error)),
            },
            None => Ok(()),
        }
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        iptables::collect(call.network()?, keep).map_err(doing("the firewall's rules cannot be removed"))
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        Config::parse(call)?;
        refuse_legacy()?;
        super::has_nftables()
    }
}
