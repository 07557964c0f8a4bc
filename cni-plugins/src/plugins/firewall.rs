//! `firewall`: lets the host forward a container's packets (`plugins/meta/firewall/firewall.go`
//! of containernetworking/plugins). Only rules in the tables of iptables can accept packets
//! that these tables would drop. The plugin therefore writes its rules there, in the format of
//! `iptables-nft`. If firewalld is running, the plugin uses firewalld instead.

use std::net::IpAddr;

use super::interface::{self, doing, join_errors};
use crate::cni::{Error, Success};
use crate::net::firewalld::Firewalld;
use crate::net::iptables;
use crate::skel::{Call, Plugin};

/// The plugin `firewall`.
pub struct Firewall;

/// The `ingressPolicy`: which containers on bridges may send to the container.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Policy {
    Open,
    SameBridge,
    Isolated,
}

/// The firewall that the plugin configures.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Backend {
    Tables,
    Firewalld,
    /// firewalld if it is running, else the tables.
    Either,
}

struct Config<'a> {
    backend: Backend,
    zone: &'a str,
    admin: &'a str,
    policy: Policy,
}

impl<'a> Config<'a> {
    fn parse(call: &Call<'a>) -> Result<Config<'a>, Error> {
        let c = call.config;
        let backend = match c.text("backend")? {
            "" => Backend::Either,
            "iptables" | "nftables" => Backend::Tables,
            "firewalld" => Backend::Firewalld,
            other => {
                return Err(Error::config(format!(
                    "unknown backend {other:?}: expected \"firewalld\", or \"iptables\" (which is honoured through nftables)"
                )));
            }
        };
        let zone = c.text("firewalldZone")?;
        let admin = c.text("iptablesAdminChainName")?;
        if admin.len() > 28
            || admin
                .chars()
                .any(|c| !c.is_ascii_alphanumeric() && !"-_".contains(c))
        {
            return Err(Error::config(format!(
                "invalid iptablesAdminChainName {admin:?}: use at most 28 letters, digits, - and _"
            )));
        }
        let policy = match c.text("ingressPolicy")? {
            "" | "open" => Policy::Open,
            "same-bridge" => Policy::SameBridge,
            "isolated" => Policy::Isolated,
            other => {
                return Err(Error::config(format!(
                    "unknown ingressPolicy {other:?}: expected \"open\", \"same-bridge\" or \"isolated\""
                )));
            }
        };
        let or = |text: &'a str, otherwise: &'a str| if text.is_empty() { otherwise } else { text };
        Ok(Config {
            backend,
            zone: or(zone, "trusted"),
            admin: or(admin, "CNI-ADMIN"),
            policy,
        })
    }

    /// A connection to firewalld, if it is to be used.
    fn firewalld(&self) -> Result<Option<Firewalld>, Error> {
        if self.backend == Backend::Tables {
            return Ok(None);
        }
        match Firewalld::connect() {
            Ok(None) if self.backend == Backend::Firewalld => Err(Error::new(
                Error::UNAVAILABLE,
                "backend is \"firewalld\", but firewalld does not run: start it (systemctl start firewalld), or remove the backend",
            )),
            Ok(found) => Ok(found),
            // If the configuration names no backend, an unreachable bus means that firewalld is not running.
            Err(_) if self.backend == Backend::Either => Ok(None),
            Err(error) => Err(Error::doing("connecting to firewalld failed", error)),
        }
    }

    /// Allows traffic of the addresses.
    fn open(&self, call: &Call<'_>, addresses: &[IpAddr]) -> Result<(), Error> {
        let Some(mut firewalld) = self.firewalld()? else {
            reject_legacy_iptables()?;
            return iptables::allow(addresses, self.admin, &call.owner()?)
                .map_err(doing("adding the rules of the firewall to nftables failed"));
        };
        for (done, address) in addresses.iter().enumerate() {
            if let Err(error) = firewalld.add(self.zone, *address) {
                // Report only the first error; the runtime calls DEL for leftovers.
                addresses
                    .iter()
                    .take(done)
                    .for_each(|a| drop(firewalld.remove(self.zone, *a)));
                return Err(Error::doing(
                    format!(
                        "firewalld did not add {address} to its zone {:?}",
                        self.zone
                    ),
                    error,
                ));
            }
        }
        Ok(())
    }

    /// Whether traffic of the addresses is allowed.
    fn is_open(&self, addresses: &[IpAddr]) -> Result<bool, Error> {
        let Some(mut firewalld) = self.firewalld()? else {
            return iptables::allows(addresses).map_err(doing("the firewall cannot be read"));
        };
        for address in addresses {
            if !firewalld
                .has(self.zone, *address)
                .map_err(doing("querying firewalld failed"))?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The bridge to isolate, if the policy requires it.
    fn bridge<'b>(&self, previous: &'b Success) -> Result<Option<&'b str>, Error> {
        if self.policy == Policy::Open {
            return Ok(None);
        }
        let first = previous
            .interfaces
            .first()
            .filter(|i| i.sandbox.is_empty() && crate::skel::check_ifname(&i.name).is_ok());
        first.map(|i| Some(i.name.as_str())).ok_or_else(|| {
            Error::config("ingressPolicy needs the bridge as the first interface of prevResult: list this plugin after \"bridge\"")
        })
    }
}

fn addresses(success: &Success) -> Vec<IpAddr> {
    success.ips.iter().map(|ip| ip.address.addr()).collect()
}

/// The addresses of the container's interface, which still exists when a runtime calls DEL of a chain in reverse order. Empty if
/// the namespace or the interface does not exist.
fn assigned_addresses(call: &Call<'_>) -> Vec<IpAddr> {
    let found = interface::inside(call, |socket| {
        let failed = || doing("the container's addresses cannot be read");
        Ok(match socket.link(&call.ifname).map_err(failed())? {
            Some(link) => socket.addresses(link.index).map_err(failed())?,
            None => vec![],
        })
    });
    found.unwrap_or_default().iter().map(|a| a.addr()).collect()
}

/// Legacy iptables filters packets in addition to nftables, and drops them even if nftables accepts them.
fn reject_legacy_iptables() -> Result<(), Error> {
    if iptables::is_legacy("filter") {
        return Err(Error::new(
            Error::UNAVAILABLE,
            "this host filters with legacy iptables, which drops packets that nftables accepts: switch to nftables (update-alternatives --set iptables /usr/sbin/iptables-nft, and the same for ip6tables), then reboot",
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
        let bridge = config.bridge(&previous)?;
        config.open(call, &addresses)?;
        if let Some(bridge) = bridge {
            let isolated = iptables::isolate(bridge, config.policy == Policy::Isolated, &addresses);
            if isolated.is_err() {
                // Report only the first error; the runtime calls DEL for leftovers.
                let _ = iptables::disallow(&[], &call.owner()?);
            }
            isolated.map_err(doing(format!(
                "isolating the bridge {bridge:?} in nftables failed"
            )))?;
        }
        Ok(previous)
    }

    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        let previous = call.previous().ok().flatten();
        // The reference's rules have no owner, so that DEL needs the addresses.
        let known = match previous.map(|p| addresses(&p)) {
            Some(known) if !known.is_empty() => known,
            _ => assigned_addresses(call),
        };
        // Clean up both backends: firewalld may have been started or stopped since ADD.
        let tables = iptables::disallow(&known, &call.owner()?)
            .map_err(doing("the firewall's rules cannot be removed"));
        // An invalid configuration is no error here: the DEL of the plugin that releases the addresses must still run.
        let Ok(config) = Config::parse(call) else {
            return tables;
        };
        let zone = match config.firewalld() {
            Ok(Some(mut firewalld)) => {
                let removed = known
                    .iter()
                    .try_for_each(|address| firewalld.remove(config.zone, *address));
                removed.map_err(doing(format!(
                    "removing addresses from firewalld's zone {:?} failed",
                    config.zone
                )))
            }
            // Without firewalld its zones do not exist either.
            _ => Ok(()),
        };
        join_errors([tables, zone])
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        let config = Config::parse(call)?;
        let previous = call.chained("firewall")?;
        let addresses = addresses(&previous);
        if !config.is_open(&addresses)? {
            return Err(Error::other(format!(
                "the firewall's rules for {addresses:?} are missing"
            )));
        }
        match config.bridge(&previous)? {
            Some(bridge) => {
                match iptables::is_isolated(bridge, config.policy == Policy::Isolated, &addresses) {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(Error::other(format!(
                        "the rules that isolate the bridge {bridge:?} are missing"
                    ))),
                    Err(error) => Err(Error::doing("the firewall cannot be read", error)),
                }
            }
            None => Ok(()),
        }
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        iptables::collect(call.network()?, keep)
            .map_err(doing("the firewall's rules cannot be removed"))
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        if Config::parse(call)?.firewalld()?.is_some() {
            return Ok(());
        }
        reject_legacy_iptables()?;
        super::has_nftables()
    }
}
