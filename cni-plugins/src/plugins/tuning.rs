//! `tuning`: sets sysctls and properties of a container's interface
//! (`plugins/meta/tuning/tuning.go` of containernetworking/plugins). Chained.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::interface::{self, doing};
use crate::cni::{Error, Json, Success, cni_args, duplicate};
use crate::net::netns;
use crate::skel::{Call, Plugin};
use holdfast_net::link::{Change, Link, mac_text, parse_mac};
use holdfast_net::netlink::Socket;
use holdfast_net::sysctl;

/// The plugin `tuning`.
pub struct Tuning;

const ALLOWED: &str = "/etc/cni/tuning/allowlist.conf";

#[derive(Debug, Default)]
struct Config {
    /// Sysctls to set: the path below `/proc/sys` and the value.
    sysctls: BTreeMap<String, String>,
    mac: Option<[u8; 6]>,
    promiscuous: Option<bool>,
    mtu: Option<u32>,
    queue: Option<u32>,
    all_multicast: Option<bool>,
}

/// The path of a sysctl. The path must be below `net` and must not contain `..`.
fn path(key: &str, ifname: &str) -> Result<String, Error> {
    let path = sysctl::path(key).replacen("IFNAME", ifname, 1);
    let inside = path.strip_prefix("net/").is_some_and(|rest| {
        rest.split('/')
            .all(|part| !part.is_empty() && part != "." && part != "..")
    });
    if inside {
        Ok(path)
    } else {
        Err(Error::config(format!(
            "the sysctl {key:?} is not a network sysctl: use one below net."
        )))
    }
}

fn numbers(config: Json<'_>, key: &str, most: u32) -> Result<Option<u32>, Error> {
    Ok(config
        .get(key)
        .map(|_| config.number(key, 0, 0..=i64::from(most)))
        .transpose()?
        .and_then(|n| u32::try_from(n).ok()))
}

impl Config {
    fn parse(call: &Call<'_>) -> Result<Config, Error> {
        let (top, args) = (call.config, call.config.object("args")?.object("cni")?);
        if let Some(key) = duplicate(call.input, "sysctl") {
            return Err(Error::config(format!(
                "the sysctl {key:?} occurs twice in the configuration: remove one of them"
            )));
        }
        let mut config = Config::default();
        for source in [top, args] {
            let sysctls = source.object("sysctl")?;
            for (key, value) in sysctls.0.as_object().into_iter().flatten() {
                let Value::String(text) = value else {
                    return Err(Error::new(
                        Error::DECODE,
                        format!("the sysctl {key:?} is {value}, but must be a string"),
                    ));
                };
                config
                    .sysctls
                    .insert(path(key, &call.ifname)?, text.clone());
            }
            let flag = |key: &str| source.get(key).map(|_| source.flag(key)).transpose();
            config.promiscuous = flag("promisc")?.or(config.promiscuous);
            config.all_multicast = flag("allmulti")?.or(config.all_multicast);
            config.mtu = numbers(source, "mtu", 65535)?
                .filter(|m| *m > 0)
                .or(config.mtu);
            config.queue = numbers(source, "txQLen", u32::MAX)?.or(config.queue);
        }
        let given = cni_args(&call.args, &["MAC"])?;
        let sources = [
            top.text("mac")?,
            given.get("MAC").map_or("", String::as_str),
            top.object("runtimeConfig")?.text("mac")?,
            args.text("mac")?,
        ];
        if let Some(text) = sources.iter().rev().find(|text| !text.is_empty()) {
            config.mac = Some(parse_mac(text).ok_or_else(|| {
                Error::config(format!(
                    "invalid MAC address {text:?}: expected six hexadecimal bytes"
                ))
            })?);
        }
        // If the administrator has an allowlist, only the listed sysctls may be set.
        if let Ok(list) = std::fs::read_to_string(ALLOWED) {
            let mut allowed = vec![];
            for line in list
                .lines()
                .map(str::trim)
                .filter(|l| !l.is_empty() && !l.starts_with('#'))
            {
                allowed.push(regex_lite::Regex::new(line).map_err(doing(format!(
                    "{ALLOWED}: {line:?} is not a regular expression"
                )))?);
            }
            let dotted = |path: &str| path.replace('/', ".");
            if let Some(path) = config.sysctls.keys().find(|p| {
                !allowed
                    .iter()
                    .any(|a| a.is_match(p) || a.is_match(&dotted(p)))
            }) {
                return Err(Error::config(format!(
                    "the sysctl {:?} is not allowed: no line of {ALLOWED} matches it",
                    dotted(path)
                )));
            }
        }
        Ok(config)
    }

    fn changes_link(&self) -> bool {
        self.mac.is_some()
            || self.promiscuous.is_some()
            || self.mtu.is_some()
            || self.queue.is_some()
            || self.all_multicast.is_some()
    }

    fn change(&self) -> Change<'static> {
        Change {
            mac: self.mac,
            mtu: self.mtu,
            queue: self.queue,
            promiscuous: self.promiscuous,
            all_multicast: self.all_multicast,
            ..Change::default()
        }
    }

    /// Describes a difference between the link and the configuration, if there is one.
    fn differs(&self, link: &Link) -> Option<String> {
        let mac = self
            .mac
            .map(|m| mac_text(&m))
            .filter(|m| *m != link.mac)
            .map(|m| format!("its MAC is {}, not {m}", link.mac));
        let flag = |name: &str, wanted: Option<bool>, has: bool| {
            wanted
                .filter(|w| *w != has)
                .map(|w| format!("{name} is {has}, not {w}"))
        };
        let number = |name: &str, wanted: Option<u32>, has: u32| {
            wanted
                .filter(|w| *w != has)
                .map(|w| format!("{name} is {has}, not {w}"))
        };
        mac.or_else(|| flag("promisc", self.promiscuous, link.promiscuous))
            .or_else(|| flag("allmulti", self.all_multicast, link.all_multicast))
            .or_else(|| number("mtu", self.mtu, link.mtu))
            .or_else(|| number("txQLen", self.queue, link.queue))
    }
}

/// The file with the original properties of the interface, in the reference's format.
fn backup(call: &Call<'_>) -> Result<PathBuf, Error> {
    let dir = call.config.directory("dataDir", "/run/cni/tuning")?;
    Ok(dir.join(format!("{}_{}.json", call.container, call.ifname)))
}

fn link(socket: &mut Socket, ifname: &str) -> Result<Link, Error> {
    let found = socket
        .link(ifname)
        .map_err(doing("the container's interface cannot be read"))?;
    found.ok_or_else(|| {
        Error::other(format!(
            "the interface {ifname:?} is missing in the container"
        ))
    })
}

fn keep(call: &Call<'_>, config: &Config, link: &Link) -> Result<(), Error> {
    use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
    let path = backup(call)?;
    let mut was = json!({});
    let mut put = |key: &str, value: Option<Value>| {
        was.as_object_mut()
            .and_then(|m| m.insert(key.into(), value?))
    };
    put("mac", config.mac.map(|_| link.mac.clone().into()));
    put(
        "promisc",
        config.promiscuous.map(|_| link.promiscuous.into()),
    );
    put("mtu", config.mtu.map(|_| link.mtu.into()));
    put(
        "allmulti",
        config.all_multicast.map(|_| link.all_multicast.into()),
    );
    put("txQLen", config.queue.map(|_| link.queue.into()));
    let failed = || {
        doing(format!(
            "saving the previous state of the interface in {} failed",
            path.display()
        ))
    };
    if let Some(dir) = path.parent() {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(failed())?;
    }
    let file = std::fs::OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(failed())?;
    serde_json::to_writer(file, &was).map_err(|e| failed()(e.into()))
}

impl Plugin for Tuning {
    fn name(&self) -> &'static str {
        "tuning"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let mut success = call.chained("tuning")?;
        let config = Config::parse(call)?;
        interface::inside(call, |socket| {
            for (path, value) in &config.sysctls {
                sysctl::set(path, value).map_err(doing(format!(
                    "the sysctl {path:?} cannot be set to {value:?}"
                )))?;
            }
            if !config.changes_link() {
                return Ok(());
            }
            let link = link(socket, &call.ifname)?;
            keep(call, &config, &link)?;
            socket
                .change_link(link.index, config.change())
                .map_err(doing(format!(
                    "the interface {:?} cannot be changed",
                    call.ifname
                )))
        })?;
        if let Some(mac) = config.mac {
            success
                .interfaces
                .iter_mut()
                .filter(|i| i.name == call.ifname)
                .for_each(|i| i.mac = mac_text(&mac));
        }
        Ok(success)
    }

    /// Restores the original properties of the interface. Deletes
    /// the file with them even if the interface no longer exists.
    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        let path = backup(call)?;
        let Ok(text) = std::fs::read_to_string(&path) else {
            return Ok(());
        };
        let was: Value = serde_json::from_str(&text).unwrap_or_default();
        let config = Config {
            mac: was["mac"].as_str().and_then(parse_mac),
            promiscuous: was["promisc"].as_bool(),
            mtu: was["mtu"]
                .as_u64()
                .and_then(|m| u32::try_from(m).ok())
                .filter(|m| *m > 0),
            queue: was["txQLen"].as_u64().and_then(|q| u32::try_from(q).ok()),
            all_multicast: was["allmulti"].as_bool(),
            ..Config::default()
        };
        if !call.netns.is_empty()
            && let Some(namespace) = netns::open(&call.netns)?
        {
            netns::inside(&namespace, || {
                let failed = || doing("the container's interface cannot be restored");
                let mut socket = Socket::route().map_err(failed())?;
                match socket.link(&call.ifname).map_err(failed())? {
                    Some(link) => socket
                        .change_link(link.index, config.change())
                        .map_err(failed()),
                    None => Ok(()),
                }
            })?;
        }
        std::fs::remove_file(&path).map_err(doing(format!("{} cannot be removed", path.display())))
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        call.chained("tuning")?;
        let config = Config::parse(call)?;
        interface::inside(call, |socket| {
            for (path, value) in &config.sysctls {
                let now = sysctl::get(path)
                    .map_err(doing(format!("the sysctl {path:?} cannot be read")))?;
                if now.split_whitespace().ne(value.split_whitespace()) {
                    return Err(Error::other(format!(
                        "the sysctl {path:?} is {now:?}, not {value:?}"
                    )));
                }
            }
            match config
                .changes_link()
                .then(|| link(socket, &call.ifname))
                .transpose()?
                .and_then(|l| config.differs(&l))
            {
                Some(difference) => Err(Error::other(format!(
                    "the interface {:?}: {difference}",
                    call.ifname
                ))),
                None => Ok(()),
            }
        })
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        Config::parse(call).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sysctls_must_be_below_net_with_either_separator() {
        assert_eq!(
            path("net.ipv4.conf.IFNAME.arp_filter", "eth0").as_deref(),
            Ok("net/ipv4/conf/eth0/arp_filter")
        );
        assert_eq!(
            path("net/ipv4/conf/IFNAME/arp_filter", "eth0.5").as_deref(),
            Ok("net/ipv4/conf/eth0.5/arp_filter")
        );
        assert_eq!(
            path("net.ipv4.conf.eth0/5.arp_filter", "x").as_deref(),
            Ok("net/ipv4/conf/eth0.5/arp_filter")
        );
        for wrong in [
            "kernel.hostname",
            "net/../kernel/hostname",
            "net",
            "net.",
            "/net/ipv4/x",
            "net//x",
            "net/./x",
            "",
        ] {
            assert!(path(wrong, "eth0").is_err(), "{wrong}");
        }
    }
}
