//! `portmap`: forwards ports of the host to a container (`plugins/meta/portmap/main.go`
//! of containernetworking/plugins). Chained after a plugin that assigns addresses.

use std::cell::LazyCell;
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;

use super::interface::doing;
use crate::cni::{self, Error, Json, Owner, Success};
use crate::ipam::results;
use crate::net::hostport::{self, Condition, Forward, Plan};
use crate::net::{iptables, xtables};
use crate::skel::{Call, Plugin};
use holdfast_net::conntrack::{Conntrack, Flow};
use holdfast_net::netlink::Socket;
use holdfast_net::nft::Nft;
use holdfast_net::sysctl;

/// The plugin `portmap`.
pub struct Portmap;

const UDP: u8 = 17;

struct Config {
    forwards: Vec<Forward>,
    conditions: [Vec<Condition>; 2],
    backend: Option<Backend>,
    snat: bool,
    all: bool,
}

fn mapping(config: Json<'_>) -> Result<Forward, Error> {
    let port = |key: &str| {
        let number = config.number(key, 0, 0..=65535)?;
        match u16::try_from(number) {
            Ok(port) if port > 0 => Ok(port),
            _ => Err(Error::config(format!(
                "portMappings: {key:?} is {number}, but must be a port from 1 to 65535"
            ))),
        }
    };
    let protocol = match config.text("protocol")?.to_ascii_lowercase().as_str() {
        "tcp" => 6,
        "udp" => UDP,
        "sctp" => 132,
        other => {
            return Err(Error::config(format!(
                "portMappings: the protocol {other:?} is unknown: use tcp, udp or sctp"
            )));
        }
    };
    let host = match config.text("hostIP")? {
        "" => None,
        text => Some(cni::address(text).ok_or_else(|| {
            Error::config(format!(
                "portMappings: hostIP {text:?} is not an IP address"
            ))
        })?),
    };
    // An unspecified address means all addresses of its family.
    Ok(Forward {
        protocol,
        host,
        port: port("hostPort")?,
        target: port("containerPort")?,
    })
}

/// The program whose syntax an option has. The reference works with one of the two programs and rejects options of the other
/// (`ensureBackend`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backend {
    Iptables,
    Nftables,
}

impl Backend {
    fn name(self) -> &'static str {
        match self {
            Backend::Iptables => "iptables",
            Backend::Nftables => "nftables",
        }
    }

    /// The configured backend; `None` if the configuration names none.
    fn parse(config: Json<'_>) -> Result<Option<Backend>, Error> {
        match config.text("backend")? {
            "" => Ok(None),
            "iptables" => Ok(Some(Backend::Iptables)),
            "nftables" => Ok(Some(Backend::Nftables)),
            other => Err(Error::config(format!(
                "unknown backend {other:?}: expected \"nftables\" or \"iptables\""
            ))),
        }
    }

    /// The backend of a list of conditions; `None` for an empty list. Conditions of iptables begin with an option or with `!`.
    fn of(conditions: &[String]) -> Option<Backend> {
        let mut words = conditions.iter().flat_map(|text| text.split_whitespace());
        match words.next()?.chars().next()? {
            '-' | '!' => Some(Backend::Iptables),
            _ => Some(Backend::Nftables),
        }
    }
}

/// Checks that all options belong to the configured backend, or to one of the two if the configuration names none. Returns the
/// configured backend.
fn check_backend(config: Json<'_>) -> Result<Option<Backend>, Error> {
    let configured = Backend::parse(config)?;
    let mut options = vec![];
    if !config.text("externalSetMarkChain")?.is_empty() {
        options.push(("externalSetMarkChain", Backend::Iptables));
    }
    for key in ["conditionsV4", "conditionsV6"] {
        options.extend(Backend::of(&config.texts(key)?).map(|b| (key, b)));
    }
    let named = configured.map(|backend| ("backend", backend));
    let Some((by, backend)) = named.or(options.first().copied()) else {
        return Ok(None);
    };
    match options.iter().find(|(_, other)| *other != backend) {
        Some((key, other)) => Err(Error::config(format!(
            "{key:?} is for {}, but {by:?} is for {}: use options of one backend",
            other.name(),
            backend.name()
        ))),
        None => Ok(configured),
    }
}

/// Parses a condition in the syntax of iptables or nft. Returns
/// the condition and the number of words that it consists of.
fn condition(words: &[&str], backend: Backend) -> Option<(Condition, usize)> {
    let net = |text: &str| cni::network(text).or_else(|| cni::address(text).map(IpNet::from));
    let name = |text: &str| {
        Some(text.trim_matches('"').to_owned()).filter(|n| !n.is_empty() && n.len() < 16)
    };
    let iptables = |option: &str, value: &str, equal: bool| match option {
        "-s" | "--source" | "--src" => Some(Condition::Address(true, net(value)?, equal)),
        "-d" | "--destination" | "--dst" => Some(Condition::Address(false, net(value)?, equal)),
        "-i" | "--in-interface" => Some(Condition::Interface(true, name(value)?, equal)),
        "-o" | "--out-interface" => Some(Condition::Interface(false, name(value)?, equal)),
        _ => None,
    };
    if backend == Backend::Iptables {
        let (negated, rest) = match words {
            ["!", rest @ ..] => (true, rest),
            rest => (false, rest),
        };
        let [option, value, ..] = rest else {
            return None;
        };
        let length = 2 + usize::from(negated);
        return Some((iptables(option, value, !negated)?, length));
    }
    match words {
        ["ip" | "ip6", end @ ("saddr" | "daddr"), "!=", value, ..] => {
            Some((Condition::Address(*end == "saddr", net(value)?, false), 4))
        }
        ["ip" | "ip6", end @ ("saddr" | "daddr"), value, ..] => {
            Some((Condition::Address(*end == "saddr", net(value)?, true), 3))
        }
        [end @ ("iifname" | "oifname"), "!=", value, ..] => Some((
            Condition::Interface(*end == "iifname", name(value)?, false),
            3,
        )),
        [end @ ("iifname" | "oifname"), value, ..] => Some((
            Condition::Interface(*end == "iifname", name(value)?, true),
            2,
        )),
        _ => None,
    }
}

fn conditions(config: Json<'_>, key: &str, v4: bool) -> Result<Vec<Condition>, Error> {
    let texts = config.texts(key)?;
    let Some(backend) = Backend::of(&texts) else {
        return Ok(vec![]);
    };
    let all: Vec<&str> = texts.iter().flat_map(|t| t.split_whitespace()).collect();
    let mut words = all.as_slice();
    let mut found = vec![];
    while !words.is_empty() {
        let (condition, length) = condition(words, backend).ok_or_else(|| {
            Error::config(format!(
                "{key}: {words:?} is not supported: use conditions on addresses (\"-s\", \"-d\", \"ip saddr\", \"ip daddr\") and interfaces (\"-i\", \"-o\", \"iifname\", \"oifname\"), negated with \"!\" or \"!=\", all in the syntax of iptables or all in that of nft"
            ))
        })?;
        if matches!(&condition, Condition::Address(_, net, _) if net.addr().is_ipv4() != v4) {
            return Err(Error::config(format!(
                "{key}: {words:?} has an address of the other family"
            )));
        }
        found.push(condition);
        words = words.get(length..).unwrap_or_default();
    }
    Ok(found)
}

impl Config {
    fn parse(call: &Call<'_>) -> Result<Config, Error> {
        let c = call.config;
        let backend = check_backend(c)?;
        // The iptables backend of the reference needs packet marks.
        // This implementation does not, and only validates these keys.
        if c.get("markMasqBit").is_some() && !c.text("externalSetMarkChain")?.is_empty() {
            return Err(Error::config(
                "Cannot specify externalSetMarkChain and markMasqBit",
            ));
        }
        c.number("markMasqBit", 13, 0..=31)?;
        let conditions = [
            conditions(c, "conditionsV4", true)?,
            conditions(c, "conditionsV6", false)?,
        ];
        let forwards = c
            .object("runtimeConfig")?
            .list("portMappings")?
            .iter()
            .map(|m| mapping(Json(m)))
            .collect::<Result<_, _>>()?;
        let snat = c.get("snat").is_none() || c.flag("snat")?;
        Ok(Config {
            forwards,
            conditions,
            backend,
            snat,
            all: c.flag("masqAll")?,
        })
    }

    /// Adds the rules of a plan, in the tables of iptables if wanted and if the kernel has their matches.
    fn forward(&self, plan: &Plan, call: &Call<'_>, owner: &Owner) -> std::io::Result<()> {
        if xtables::is_wanted(self.backend.map_or("", Backend::name))? {
            let network = call.network().map_err(std::io::Error::other)?;
            let added = xtables::forward(plan, network, &call.container);
            if !added.as_ref().is_err_and(xtables::is_unsupported) {
                return added;
            }
        }
        hostport::add(plan, owner, &call.container)
    }

    /// The rules to create for the container's addresses.
    fn plans(&self, call: &Call<'_>, success: &Success) -> Vec<Plan> {
        let mut plans = vec![];
        for (v4, conditions) in [true, false].into_iter().zip(&self.conditions) {
            let of_container = |index: Option<usize>| {
                index.is_none_or(|n| {
                    success
                        .interfaces
                        .get(n)
                        .is_some_and(|i| i.name == call.ifname && !i.sandbox.is_empty())
                })
            };
            let Some(ip) = success
                .ips
                .iter()
                .find(|ip| ip.address.addr().is_ipv4() == v4 && of_container(ip.interface))
            else {
                continue;
            };
            let fits = |f: &&Forward| f.host.is_none_or(|h| h.is_ipv4() == v4);
            let any = |f: &Forward| Forward {
                host: f.host.filter(|h| !h.is_unspecified()),
                ..*f
            };
            let forwards: Vec<Forward> = self.forwards.iter().filter(fits).map(any).collect();
            if !forwards.is_empty() {
                plans.push(Plan {
                    container: ip.address,
                    forwards,
                    conditions: conditions.clone(),
                    hairpin: self.snat,
                    all: self.all,
                });
            }
        }
        plans
    }

    fn udp_ports(&self) -> Vec<u16> {
        self.forwards
            .iter()
            .filter(|f| f.protocol == UDP)
            .map(|f| f.port)
            .collect()
    }
}

/// Deletes the UDP flows to one of `ports` of this host, and those whose replies come from one of `containers`, so
/// that known flows follow the new rules. A failure is only logged.
fn forget(ports: &[u16], containers: &[IpAddr]) {
    const UDP: u8 = 17;
    if ports.is_empty() {
        return;
    }
    let is_stale = |flow: &Flow| {
        let answered = flow.reply.source.is_some_and(|a| containers.contains(&a));
        flow.original.protocol == UDP
            && (answered || ports.contains(&flow.original.destination_port))
    };
    for v4 in [true, false] {
        let deleted = Conntrack::open().and_then(|mut table| table.delete(v4, is_stale));
        if let Err(error) = deleted {
            eprintln!(
                "portmap: deleting conntrack entries failed, so existing UDP flows may keep their old destination: {error}"
            );
        }
    }
}

/// Allows routing from localhost to the container's interface on the host, if a route to the container exists.
fn route_localnet(container: IpAddr) -> Result<(), Error> {
    let failed = "the container's interface on the host cannot be found";
    let mut socket = Socket::route().map_err(doing(failed))?;
    let Some(index) = socket.link_to(container).map_err(doing(failed))? else {
        return Ok(());
    };
    let Some(link) = socket.link_at(index).map_err(doing(failed))? else {
        return Ok(());
    };
    sysctl::ensure(&format!("ipv4/conf/{}/route_localnet", link.name), "1").map_err(doing(format!(
        "route_localnet cannot be set for {:?}",
        link.name
    )))
}

/// Whether the container of a rule of the reference no longer exists. The rule contains the container's
/// id but not its network. The id must therefore be in no network of `attached`, the attachments known to
/// the runtime. If `keep` is not a subset of `attached`, the list is incomplete and the answer is false.
fn is_removed(
    id: &str,
    network: &str,
    keep: &[(String, String)],
    attached: &[results::Attachment],
) -> bool {
    let known = |id: &str, ifname: Option<&str>| {
        let is_it = |a: &&results::Attachment| {
            a.container == id && ifname.is_none_or(|name| a.network == network && a.ifname == name)
        };
        attached.iter().any(|a| is_it(&a))
    };
    !attached.is_empty()
        && !keep.iter().any(|(kept, _)| kept == id)
        && keep.iter().all(|(kept, name)| known(kept, Some(name)))
        && !known(id, None)
}

impl Plugin for Portmap {
    fn name(&self) -> &'static str {
        "portmap"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let previous = call.chained("portmap")?;
        let config = Config::parse(call)?;
        let (network, owner) = (call.network()?, call.owner()?);
        for plan in config.plans(call, &previous) {
            if plan.hairpin && plan.is_v4() {
                route_localnet(plan.container.addr())?;
            }
            let added = config.forward(&plan, call, &owner);
            if added.is_err() {
                // Report only the first error; the runtime calls DEL for leftovers.
                let _ = Nft::clean_up(|nft| {
                    hostport::remove(nft, &owner, None)?;
                    iptables::remove_hostports(nft, network, &call.container)
                });
            }
            added.map_err(doing("forwarding ports failed"))?;
        }
        forget(&config.udp_ports(), &[]);
        Ok(previous)
    }

    /// Needs neither mappings nor addresses, because the rules record their owner.
    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        let (network, owner) = (call.network()?, call.owner()?);
        let removed = Nft::clean_up(|nft| {
            hostport::remove(nft, &owner, Some(&call.container))?;
            iptables::remove_hostports(nft, network, &call.container)
        });
        // An invalid configuration is no error here.
        let ports = Config::parse(call)
            .map(|c| c.udp_ports())
            .unwrap_or_default();
        let addresses: Vec<IpAddr> = call
            .previous()
            .ok()
            .flatten()
            .into_iter()
            .flat_map(|s| s.ips)
            .map(|ip| ip.address.addr())
            .collect();
        forget(&ports, &addresses);
        removed
            .map(drop)
            .map_err(doing("removing the rules for forwarded ports failed"))
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        let config = Config::parse(call)?;
        let (network, owner) = (call.network()?, call.owner()?);
        let failed = || doing("reading the rules for forwarded ports failed");
        for plan in config.plans(call, &call.chained("portmap")?) {
            let v4 = plan.is_v4();
            let found = hostport::count(&plan, &owner, &call.container).map_err(failed())?;
            if found < plan.size()
                && !iptables::forwards(v4, plan.size_in_iptables(), network, &call.container)
                    .map_err(failed())?
            {
                return Err(Error::other(format!(
                    "only {found} of {} rules that forward ports to {} exist{}",
                    plan.size(),
                    plan.container.addr(),
                    iptables::legacy_hint()
                )));
            }
        }
        Ok(())
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        let network = call.network()?;
        let attached = LazyCell::new(|| results::attached(Path::new(results::DEFAULT_DIR)));
        let is_gone = |id: &str| is_removed(id, network, keep, &attached);
        Nft::clean_up(|nft| {
            iptables::collect_hostports(nft, network, keep)?;
            hostport::collect(nft, network, keep, is_gone)
        })
        .map(drop)
        .map_err(doing("removing the rules for forwarded ports failed"))
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        Config::parse(call)?;
        super::has_nftables()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn options_belong_to_one_backend() {
        let check = |config: serde_json::Value| check_backend(Json(&config));
        let [v4, v6] = [
            json!(["ip saddr 192.0.2.0/24"]),
            json!(["!", "-s", "fd00::/8"]),
        ];
        for fine in [
            json!({}),
            json!({"backend": "nftables", "conditionsV4": v4, "conditionsV6": []}),
            json!({"backend": "iptables", "conditionsV6": v6, "externalSetMarkChain": "X"}),
            json!({"conditionsV4": v4}),
            json!({"conditionsV4": ["", " "], "conditionsV6": v6, "externalSetMarkChain": "X"}),
        ] {
            assert!(check(fine.clone()).is_ok(), "{fine}");
        }
        for (wrong, named) in [
            (
                json!({"backend": "nftables", "conditionsV6": v6}),
                "conditionsV6",
            ),
            (
                json!({"backend": "iptables", "conditionsV4": v4}),
                "conditionsV4",
            ),
            (
                json!({"backend": "nftables", "externalSetMarkChain": "X"}),
                "externalSetMarkChain",
            ),
            (
                json!({"conditionsV4": v4, "conditionsV6": v6}),
                "conditionsV6",
            ),
            (
                json!({"conditionsV4": ["", " -s"], "backend": "nftables"}),
                "conditionsV4",
            ),
            (json!({"backend": "ipvs"}), "ipvs"),
        ] {
            let error = check(wrong.clone()).expect_err("options of two backends");
            assert!(error.message.contains(named), "{wrong}: {error}");
            assert_eq!(error.code, Error::CONFIG);
        }
    }

    #[test]
    fn conditions_are_parsed_in_the_syntax_of_iptables_and_nft() {
        let read = |words: serde_json::Value, v4| conditions(Json(&json!({"c": words})), "c", v4);
        let net = |text: &str| text.parse::<IpNet>().expect("a network");
        assert_eq!(
            read(json!(["!", "-s", "192.0.2.0/24", "-i", "eth0"]), true),
            Ok(vec![
                Condition::Address(true, net("192.0.2.0/24"), false),
                Condition::Interface(true, "eth0".into(), true)
            ])
        );
        assert_eq!(
            read(json!(["ip6 daddr != fd00::/8"]), false),
            Ok(vec![Condition::Address(false, net("fd00::/8"), false)])
        );
        assert_eq!(
            read(json!(["iifname", "\"eth0\""]), true),
            Ok(vec![Condition::Interface(true, "eth0".into(), true)])
        );
        for wrong in [
            json!(["-p", "tcp"]),
            json!(["-s"]),
            json!(["ip", "saddr", "x"]),
            json!(["-s", "fd00::1"]),
            json!(["!"]),
            json!(["-s", "192.0.2.1", "ip daddr 192.0.2.2"]),
            json!(["ip daddr 192.0.2.2", "-s", "192.0.2.1"]),
            json!(["", "-p tcp"]),
        ] {
            assert!(read(wrong.clone(), true).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_container_is_deleted_if_no_result_of_the_runtime_lists_it() {
        let attached = |list: &[(&str, &str)]| -> Vec<results::Attachment> {
            let one = |(network, container): &(&str, &str)| results::Attachment {
                network: (*network).into(),
                container: (*container).into(),
                ifname: "eth0".into(),
            };
            list.iter().map(one).collect()
        };
        let keep = [("kept".to_owned(), "eth0".to_owned())];
        let all = attached(&[("net", "kept"), ("other", "elsewhere")]);
        for (id, keep, attached, expected) in [
            ("gone", &keep[..], &all, true),
            ("kept", &keep, &all, false),
            ("elsewhere", &keep, &all, false),
            ("gone", &[], &all, true),
            // The results belong to another runtime, or there are none.
            ("gone", &keep, &attached(&[("other", "kept")]), false),
            ("gone", &[], &attached(&[]), false),
        ] {
            assert_eq!(is_removed(id, "net", keep, attached), expected, "{id}");
        }
    }

    #[test]
    fn port_mappings_are_validated() {
        let read = |m: serde_json::Value| mapping(Json(&m));
        assert_eq!(
            read(
                json!({"HostPort": 8080, "ContainerPort": 80, "Protocol": "TCP", "HostIP": "127.0.0.1"})
            ),
            Ok(Forward {
                protocol: 6,
                host: Some([127, 0, 0, 1].into()),
                port: 8080,
                target: 80
            })
        );
        for wrong in [
            json!({"hostPort": 0, "containerPort": 80, "protocol": "tcp"}),
            json!({"hostPort": 1, "containerPort": 70000, "protocol": "tcp"}),
            json!({"hostPort": 1, "containerPort": 1, "protocol": "icmp"}),
            json!({"hostPort": 1, "containerPort": 1, "protocol": "udp", "hostIP": "here"}),
        ] {
            assert!(read(wrong.clone()).is_err(), "{wrong}");
        }
    }
}
