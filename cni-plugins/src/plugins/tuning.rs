//! `tuning`: sets sysctls and properties of a container's interface
//! (`plugins/meta/tuning/tuning.go` of containernetworking/plugins). Chained.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::interface::{self, doing};
use crate::cni::{Error, Json, Success, cni_args};
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
    /// The keys of the sysctls as configured, before `IFNAME` is replaced.
    keys: Vec<String>,
    mac: Option<[u8; 6]>,
    promiscuous: Option<bool>,
    mtu: Option<u32>,
    queue: Option<u32>,
    all_multicast: Option<bool>,
}

/// Checks that a line of the allowlist matches each key. A line is a regular expression, which need not match the whole key. As in
/// the reference, it is applied to the key as configured, which may contain `IFNAME` (`validateSysctlConf`). A line about the
/// interface's own name or with the other separator matches, too. Lines after the one that matches are not compiled.
fn allow(list: &str, keys: &[String], ifname: &str) -> Result<(), Error> {
    let lines = || {
        let trimmed = list.lines().map(str::trim);
        trimmed.filter(|line| !line.is_empty() && !line.starts_with('#'))
    };
    for key in keys {
        let path = path(key, ifname)?;
        let spellings = [key, &key.replace('/', "."), &path, &path.replace('/', ".")];
        let mut is_allowed = false;
        for line in lines() {
            let expression = regex_lite::Regex::new(line).map_err(doing(format!(
                "{ALLOWED}: {line:?} is not a regular expression"
            )))?;
            is_allowed = spellings.iter().any(|s| expression.is_match(s));
            if is_allowed {
                break;
            }
        }
        if !is_allowed {
            return Err(Error::config(format!(
                "the sysctl {key:?} is not allowed: no line of {ALLOWED} matches it"
            )));
        }
    }
    Ok(())
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
        if let Some(key) = &call.repeated_sysctl {
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
                // STATUS is not about an interface.
                let ifname = match call.ifname.as_str() {
                    "" => "IFNAME",
                    name => name,
                };
                config.sysctls.insert(path(key, ifname)?, text.clone());
                config.keys.push(key.clone());
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
        Ok(config)
    }

    /// ADD and STATUS: if the administrator has an allowlist, only the listed sysctls may be set.
    fn check_allowlist(&self, ifname: &str) -> Result<(), Error> {
        match std::fs::read(ALLOWED) {
            Ok(list) => allow(&String::from_utf8_lossy(&list), &self.keys, ifname),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(Error::doing(
                format!("the allowlist of sysctls {ALLOWED} cannot be read"),
                error,
            )),
        }
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

/// Sets the MTU of the host end of a pair. A packet that is larger than the MTU of the receiving end is dropped without a message,
/// so both ends need the same MTU. `peer` is the index of the host end, which counts only if a plugin of the chain has listed the
/// link: the other end may be in a third namespace, where the index means another link.
fn set_host_mtu(previous: &Success, peer: u32, mtu: u32) -> Result<(), Error> {
    let failed = || doing("the MTU of the host's end of the pair cannot be set");
    let mut socket = Socket::route().map_err(failed())?;
    let is_listed = |link: &Link| {
        link.kind == "veth"
            && previous
                .interfaces
                .iter()
                .any(|i| i.sandbox.is_empty() && i.name == link.name)
    };
    match socket.link_at(peer).map_err(failed())? {
        Some(link) if is_listed(&link) && link.mtu != mtu => {
            let change = Change {
                mtu: Some(mtu),
                ..Change::default()
            };
            socket.change_link(link.index, change).map_err(failed())
        }
        _ => Ok(()),
    }
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
        config.check_allowlist(&call.ifname)?;
        let peer = interface::inside(call, |socket| {
            for (path, value) in &config.sysctls {
                sysctl::set(path, value).map_err(doing(format!(
                    "the sysctl {path:?} cannot be set to {value:?}"
                )))?;
            }
            if !config.changes_link() {
                return Ok(None);
            }
            let link = link(socket, &call.ifname)?;
            keep(call, &config, &link)?;
            socket
                .change_link(link.index, config.change())
                .map_err(doing(format!(
                    "the interface {:?} cannot be changed",
                    call.ifname
                )))?;
            Ok(link.parent.filter(|_| link.kind == "veth"))
        })?;
        if let (Some(mtu), Some(peer)) = (config.mtu, peer) {
            set_host_mtu(&success, peer, mtu)?;
        }
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
            let peer = netns::inside(&namespace, || {
                let failed = || doing("the container's interface cannot be restored");
                let mut socket = Socket::route().map_err(failed())?;
                let Some(link) = socket.link(&call.ifname).map_err(failed())? else {
                    return Ok(None);
                };
                socket
                    .change_link(link.index, config.change())
                    .map_err(failed())?;
                Ok(link.parent.filter(|_| link.kind == "veth"))
            })?;
            // Both ends of a pair have the same MTU before ADD, or else the pair would lose packets.
            if let (Some(mtu), Some(peer), Ok(Some(previous))) = (config.mtu, peer, call.previous())
            {
                set_host_mtu(&previous, peer, mtu)?;
            }
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
        Config::parse(call)?.check_allowlist("IFNAME")
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

    #[test]
    fn the_allowlist_has_expressions_for_keys_as_configured() {
        let is_allowed = |list: &str, key: &str| allow(list, &[key.to_owned()], "eth0");
        // The example of the reference's documentation.
        let documented = "^net\\.ipv4\\.conf\\.IFNAME\\.[a-z_]*$\n";
        let arp = "net.ipv4.conf.IFNAME.arp_filter";
        for (list, key) in [
            (documented, arp),
            ("  conf  \n", arp),
            ("# comment\n\n^net", arp),
            ("x\r\n^net.ipv4\r\n", arp),
            ("^net\\.ipv4\\.conf\\.eth0\\.", arp),
            (
                "^net\\.ipv4\\.conf\\.eth0\\.",
                "net/ipv4/conf/eth0/arp_filter",
            ),
            (
                "^net/ipv4/conf/eth0/arp_filter$",
                "net.ipv4.conf.eth0.arp_filter",
            ),
            ("arp_filter\n(", arp),
        ] {
            assert_eq!(is_allowed(list, key), Ok(()), "{list:?} {key}");
        }
        for (list, key) in [
            ("", arp),
            ("\n#.*\n", arp),
            (documented, "net.ipv4.conf.all.arp_filter"),
            (documented, "net.ipv6.conf.IFNAME.accept_ra"),
            ("(\narp_filter", arp),
            ("arp_filter", "kernel.arp_filter"),
        ] {
            assert!(is_allowed(list, key).is_err(), "{list:?} {key}");
        }
        assert_eq!(allow("", &[], "eth0"), Ok(()));
    }
}
