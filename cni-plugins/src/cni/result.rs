//! Success results and their shapes in the protocol versions (CNI spec
//! 1.1, section 5; `pkg/types` of containernetworking/cni for conversion).

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Map, Value, json};

use super::{Error, Json, address, at_least, network};

/// A link that a plugin creates or uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interface {
    /// The name.
    pub name: String,
    /// The hardware address.
    pub mac: String,
    /// The path of its network namespace, empty for the host's.
    pub sandbox: String,
    /// Members that plugins pass on without interpreting them: mtu, socketPath, pciID.
    pub extra: Map<String, Value>,
}

/// An address of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// The address with the prefix length of its network.
    pub address: IpNet,
    /// The gateway.
    pub gateway: Option<IpAddr>,
    /// The index of its interface in [`Success::interfaces`].
    pub interface: Option<usize>,
}

/// A route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The destination.
    pub destination: IpNet,
    /// The next hop; `None` means the gateway of the address family.
    pub gateway: Option<IpAddr>,
    /// Members that plugins pass on without interpreting them: mtu, advmss, priority, table, scope.
    pub extra: Map<String, Value>,
}

/// Name resolution (`dns` in a configuration or result).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Dns {
    /// `nameservers`, `domain`, `search` and `options`, unchanged.
    pub fields: Map<String, Value>,
}

impl Dns {
    /// Reads a `dns` object; other keys are dropped.
    #[must_use]
    pub fn parse(config: Json<'_>) -> Dns {
        let keys = ["nameservers", "domain", "search", "options"];
        Dns {
            fields: keys
                .iter()
                .filter_map(|k| config.get(k).map(|v| ((*k).to_owned(), v.clone())))
                .collect(),
        }
    }
}

/// A success result.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Success {
    /// The links.
    pub interfaces: Vec<Interface>,
    /// The addresses.
    pub ips: Vec<Address>,
    /// The routes.
    pub routes: Vec<Route>,
    /// Name resolution.
    pub dns: Dns,
}

fn bad(what: &str, value: &Value) -> Error {
    Error::new(
        Error::DECODE,
        format!("invalid {what} in a result: {value}"),
    )
}

fn parse_route(value: &Value) -> Result<Route, Error> {
    let config = Json(value);
    let gateway = config.text("gw")?;
    let wrong = |key: &str, what: &str| {
        Error::new(
            Error::DECODE,
            format!("invalid route {value}: {key:?} must be {what}"),
        )
    };
    let keys = ["mtu", "advmss", "priority", "table", "scope"];
    Ok(Route {
        destination: network(config.text("dst")?).ok_or_else(|| wrong("dst", "a network"))?,
        gateway: if gateway.is_empty() {
            None
        } else {
            Some(address(gateway).ok_or_else(|| wrong("gw", "an address"))?)
        },
        extra: keys
            .iter()
            .filter_map(|k| config.get(k).map(|v| ((*k).to_owned(), v.clone())))
            .collect(),
    })
}

/// Parses a list of routes from a configuration.
pub fn parse_routes(list: &[Value]) -> Result<Vec<Route>, Error> {
    list.iter().map(parse_route).collect()
}

impl Success {
    /// Parses a result in the shape of `version`.
    pub fn parse(value: &Value, version: &str) -> Result<Success, Error> {
        let config = Json(value);
        let mut success = Success {
            dns: Dns::parse(config.object("dns")?),
            ..Success::default()
        };
        if !at_least(version, "0.3.0") {
            for key in ["ip4", "ip6"] {
                let family = config.object(key)?;
                if family.0.is_null() {
                    continue;
                }
                let gateway = family.text("gateway")?;
                success.ips.push(Address {
                    address: network(family.text("ip")?).ok_or_else(|| bad("address", family.0))?,
                    gateway: address(gateway),
                    interface: None,
                });
                success.routes.extend(parse_routes(family.list("routes")?)?);
            }
            return Ok(success);
        }
        for item in config.list("interfaces")? {
            let item = Json(item);
            success.interfaces.push(Interface {
                name: item.text("name")?.into(),
                mac: item.text("mac")?.into(),
                sandbox: item.text("sandbox")?.into(),
                extra: ["mtu", "socketPath", "pciID"]
                    .iter()
                    .filter_map(|k| item.get(k).map(|v| ((*k).to_owned(), v.clone())))
                    .collect(),
            });
        }
        for item in config.list("ips")? {
            let ip = Json(item);
            let gateway = ip.text("gateway")?;
            let interface = ip.number("interface", -1, 0..=1024)?;
            success.ips.push(Address {
                address: network(ip.text("address")?).ok_or_else(|| bad("address", item))?,
                gateway: if gateway.is_empty() {
                    None
                } else {
                    Some(address(gateway).ok_or_else(|| bad("gateway", item))?)
                },
                interface: usize::try_from(interface).ok(),
            });
        }
        success.routes = parse_routes(config.list("routes")?)?;
        Ok(success)
    }

    /// Serialises the result in the shape of `version`.
    pub fn json(&self, version: &str) -> Result<Value, Error> {
        let route = |r: &Route| {
            let mut map = r.extra.clone();
            map.insert("dst".into(), r.destination.to_string().into());
            if let Some(gateway) = r.gateway {
                map.insert("gw".into(), gateway.to_string().into());
            }
            Value::Object(map)
        };
        let dns = Value::Object(self.dns.fields.clone());
        if !at_least(version, "0.3.0") {
            let mut value = json!({"cniVersion": version, "dns": dns});
            for (key, v4) in [("ip4", true), ("ip6", false)] {
                let Some(ip) = self.ips.iter().find(|i| i.address.addr().is_ipv4() == v4) else {
                    continue;
                };
                let routes: Vec<Value> = self
                    .routes
                    .iter()
                    .filter(|r| r.destination.addr().is_ipv4() == v4)
                    .map(|r| {
                        route(&Route {
                            extra: Map::new(),
                            ..r.clone()
                        })
                    })
                    .collect();
                value[key] = json!({"ip": ip.address.to_string()});
                if let Some(gateway) = ip.gateway {
                    value[key]["gateway"] = gateway.to_string().into();
                }
                if !routes.is_empty() {
                    value[key]["routes"] = routes.into();
                }
            }
            if self.ips.is_empty() {
                return Err(Error::other("cannot convert: no valid IP addresses"));
            }
            return Ok(value);
        }
        let modern = at_least(version, "1.0.0");
        let interfaces: Vec<Value> = self
            .interfaces
            .iter()
            .map(|i| {
                let mut value = if modern {
                    Value::Object(i.extra.clone())
                } else {
                    json!({})
                };
                value["name"] = i.name.as_str().into();
                for (key, text) in [("mac", &i.mac), ("sandbox", &i.sandbox)] {
                    if !text.is_empty() {
                        value[key] = text.as_str().into();
                    }
                }
                value
            })
            .collect();
        let ips: Vec<Value> = self
            .ips
            .iter()
            .map(|i| {
                let mut value = json!({"address": i.address.to_string()});
                if !modern {
                    value["version"] = if i.address.addr().is_ipv4() { "4" } else { "6" }.into();
                }
                if let Some(interface) = i.interface {
                    value["interface"] = interface.into();
                }
                if let Some(gateway) = i.gateway {
                    value["gateway"] = gateway.to_string().into();
                }
                value
            })
            .collect();
        let mut value = json!({"cniVersion": version});
        for (key, list) in [
            ("interfaces", interfaces),
            ("ips", ips),
            ("routes", self.routes.iter().map(route).collect()),
        ] {
            if !list.is_empty() {
                value[key] = list.into();
            }
        }
        if !modern || !self.dns.fields.is_empty() {
            value["dns"] = dns;
        }
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_every_version_round_trip() {
        let success = Success {
            interfaces: vec![Interface {
                name: "eth0".into(),
                mac: "aa:bb:cc:dd:ee:ff".into(),
                sandbox: "/ns".into(),
                extra: Map::new(),
            }],
            ips: vec![Address {
                address: "10.0.0.2/24".parse().expect("ip"),
                gateway: Some("10.0.0.1".parse().expect("ip")),
                interface: Some(0),
            }],
            routes: vec![Route {
                destination: "0.0.0.0/0".parse().expect("net"),
                gateway: None,
                extra: Map::new(),
            }],
            dns: Dns::default(),
        };
        for version in super::super::VERSIONS {
            let written = success.json(version).expect(version);
            let read = Success::parse(&written, version).expect(version);
            if at_least(version, "0.3.0") {
                assert_eq!(read, success, "{version}");
            } else {
                assert_eq!(
                    (read.ips[0].address, read.routes.len()),
                    (success.ips[0].address, 1),
                    "{version}"
                );
            }
        }
        let old = success.json("0.4.0").expect("0.4.0");
        assert_eq!(
            (old["ips"][0]["version"].as_str(), old["dns"].is_object()),
            (Some("4"), true)
        );
        let new = success.json("1.0.0").expect("1.0.0");
        assert!(new["ips"][0].get("version").is_none() && new.get("dns").is_none());
        assert!(Success::default().json("0.2.0").is_err());
    }
}
