//! `tap`: a device through which a program in the container, such as a virtual machine,
//! sends and receives frames (`plugins/main/tap/tap.go` of containernetworking/plugins).

use super::interface::{self, doing};
use super::sublink::{self, Addresses};
use crate::cni::{Error, Success, cni_args};
use crate::skel::{Call, Plugin};
use holdfast_net::link::{Change, parse_mac};
use holdfast_net::tap;

/// The plugin `tap`.
pub struct Tap;

struct Config<'a> {
    several_queues: bool,
    mtu: u32,
    mac: Option<[u8; 6]>,
    owner: Option<u32>,
    group: Option<u32>,
    label: &'a str,
    bridge: &'a str,
}

impl<'a> Config<'a> {
    fn parse(call: &Call<'a>) -> Result<Config<'a>, Error> {
        let c = call.config;
        let id = |key: &str| {
            c.get(key)
                .map(|_| c.number(key, 0, 0..=i64::from(i32::MAX)))
                .transpose()
                .map(|n| n.and_then(|n| u32::try_from(n).ok()))
        };
        let args = cni_args(&call.args, &["MAC"])?;
        let mac = [
            c.object("runtimeConfig")?.text("mac")?,
            args.get("MAC").map_or("", String::as_str),
            c.text("mac")?,
        ]
        .into_iter()
        .find(|t| !t.is_empty());
        let parse = |text| {
            parse_mac(text).ok_or_else(|| {
                Error::config(format!(
                    "invalid MAC address {text:?}: expected six hexadecimal bytes"
                ))
            })
        };
        Ok(Config {
            several_queues: c.flag("multiQueue")?,
            mtu: sublink::mtu(call, None)?,
            mac: mac.map(parse).transpose()?,
            owner: id("owner")?,
            group: id("group")?,
            label: c.text("selinuxContext")?,
            bridge: c.text("bridge")?,
        })
    }

    fn make(&self, call: &Call<'_>) -> Result<(), Error> {
        interface::inside(call, |socket| {
            let failed = || doing(format!("failed to create tap {:?}", call.ifname));
            let made = tap::with_socket_label(self.label, || {
                tap::add(&call.ifname, self.several_queues, self.owner, self.group)
            });
            made.map_err(failed())?;
            let mut finish = || -> Result<(), Error> {
                let link = socket.link(&call.ifname).map_err(failed())?;
                let link = link.ok_or_else(|| {
                    Error::other(format!("the interface {:?} disappeared", call.ifname))
                })?;
                let master = match self.bridge {
                    "" => None,
                    name => {
                        let bridge = socket
                            .link(name)
                            .map_err(failed())?
                            .filter(|l| l.kind == "bridge");
                        let bridge = bridge.ok_or_else(|| {
                            Error::config(format!(
                                "the bridge {name:?} does not exist in the container"
                            ))
                        })?;
                        Some(bridge.index)
                    }
                };
                let mtu = Some(self.mtu).filter(|m| *m > 0);
                socket
                    .change_link(
                        link.index,
                        Change {
                            mtu,
                            mac: self.mac,
                            master,
                            up: Some(true),
                            ..Change::default()
                        },
                    )
                    .map_err(failed())
            };
            let finished = finish();
            if finished.is_err() {
                let _ = holdfast_net::netlink::Socket::route()
                    .and_then(|mut s| s.delete_link(&call.ifname));
            }
            finished
        })
    }
}

impl Plugin for Tap {
    fn name(&self) -> &'static str {
        "tap"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let config = Config::parse(call)?;
        sublink::add(
            call,
            Addresses::of(call)?,
            || config.make(call),
            || sublink::delete_link(call),
        )
    }

    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        interface::remove(call, || Ok(None))
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        sublink::check(call, "tun", |_| Ok(()))
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        interface::collect_addresses(call, keep)
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        Config::parse(call)?;
        if std::path::Path::new("/dev/net/tun").exists() {
            return interface::call_ipam(call, "STATUS");
        }
        Err(Error::new(
            Error::UNAVAILABLE,
            "/dev/net/tun is missing: load the module tun",
        ))
    }
}
