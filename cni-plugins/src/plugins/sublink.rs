//! Shared code of plugins that give a container a separate link, often on top of
//! a parent link: `macvlan`, `ipvlan`, `vlan`, `dummy`, `tap`, `host-device`.

use std::fs::File;

use super::interface::{self, doing};
use crate::cni::{Error, Interface, Success};
use crate::net::netns;
use crate::skel::Call;
use holdfast_net::link::{Link, LinkPlan};
use holdfast_net::netlink::Socket;
use holdfast_net::sysctl;

/// Runs `work` in the namespace of the parent link: in the container, or on the host.
/// On the host, `work` also gets the namespace in which to create the new link.
pub(super) fn in_parent_namespace<T>(
    call: &Call<'_>,
    in_container: bool,
    work: impl FnOnce(&mut Socket, Option<&File>) -> Result<T, Error>,
) -> Result<T, Error> {
    let namespace = netns::require(&call.netns)?;
    let socket = || Socket::route().map_err(doing("opening a netlink socket failed"));
    if in_container {
        netns::inside(&namespace, || work(&mut socket()?, None))
    } else {
        work(&mut socket()?, Some(&namespace))
    }
}

/// The parent link: the link of this name, or that of the default route if the name is empty.
pub(super) fn parent(socket: &mut Socket, name: &str) -> Result<Link, Error> {
    let failed = || doing("the master cannot be read");
    if !name.is_empty() {
        let found = socket.link(name).map_err(failed())?;
        return found.ok_or_else(|| {
            Error::config(format!(
                "the master {name:?} does not exist: set \"master\" to an interface that does"
            ))
        });
    }
    let index = socket.default_link().map_err(failed())?;
    let link = match index {
        Some(index) => socket.link_at(index).map_err(failed())?,
        None => None,
    };
    link.ok_or_else(|| {
        Error::config(
            "no \"master\" is set, and there is no default route whose interface is the default",
        )
    })
}

/// The configured MTU: at least 0, which means the kernel's default, and at most the parent's.
pub(super) fn mtu(call: &Call<'_>, parent: Option<&Link>) -> Result<u32, Error> {
    let most = parent.map_or(65535, |l| i64::from(l.mtu));
    let given = call.config.number("mtu", 0, i64::MIN..=i64::MAX)?;
    u32::try_from(given)
        .ok()
        .filter(|_| given <= most)
        .ok_or_else(|| {
            Error::config(format!(
                "invalid MTU {given}: it must be from 0 to {most}{}",
                parent.map_or_else(String::new, |l| format!(", that of {:?}", l.name))
            ))
        })
}

/// Creates a link in the state down.
pub(super) fn make(socket: &mut Socket, plan: &LinkPlan<'_>) -> Result<(), Error> {
    socket
        .add_link(plan)
        .map_err(|error| match error.raw_os_error() {
            Some(code) if code == nix::errno::Errno::EOPNOTSUPP as i32 => Error::other(format!(
                "the kernel has no {} links: load its module ({}), or use another plugin",
                plan.kind, plan.kind
            )),
            Some(code) if code == nix::errno::Errno::EEXIST as i32 => Error::other(format!(
                "the interface {:?} already exists in the container",
                plan.name
            )),
            _ => Error::doing(
                format!("failed to create {} {:?}", plan.kind, plan.name),
                error,
            ),
        })
}

/// STATUS: checks that the kernel supports the kind of link, and calls STATUS of the IPAM plugin.
pub(super) fn status(call: &Call<'_>, kind: &str) -> Result<(), Error> {
    super::has_links(kind)?;
    interface::call_ipam(call, "STATUS")
}

/// The source of the container's addresses.
pub(super) enum Addresses {
    /// The container gets no addresses.
    None,
    /// The network's IPAM plugin.
    Ipam,
    /// The previous plugin of the chain.
    Previous(Success),
}

impl Addresses {
    /// The IPAM plugin, if the network has one.
    pub(super) fn of(call: &Call<'_>) -> Result<Addresses, Error> {
        Ok(if interface::ipam(call)?.is_empty() {
            Addresses::None
        } else {
            Addresses::Ipam
        })
    }
}

/// ADD: `make` creates the link in the container, which then gets
/// its addresses. After an error, `undo` removes the link.
pub(super) fn add(
    call: &Call<'_>,
    addresses: Addresses,
    make: impl FnOnce() -> Result<(), Error>,
    undo: impl FnOnce(),
) -> Result<Success, Error> {
    let namespace = netns::require(&call.netns)?;
    make()?;
    let configure_link = |success| configure_link(call, &namespace, success);
    let result = match addresses {
        Addresses::None => configure_link(Success::default()),
        Addresses::Ipam => interface::ipam(call)
            .and_then(|ipam| interface::with_addresses(call, ipam, configure_link)),
        Addresses::Previous(success) => configure_link(Success {
            interfaces: vec![],
            ..success
        }),
    };
    if result.is_err() {
        undo();
    }
    result
}

fn configure_link(
    call: &Call<'_>,
    namespace: &File,
    mut success: Success,
) -> Result<Success, Error> {
    success.ips.iter_mut().for_each(|ip| ip.interface = Some(0));
    // Best effort: announces the address to neighbours.
    let notify = || sysctl::write(&format!("ipv6/conf/{}/ndisc_notify", call.ifname), "1");
    let mac = interface::inside(call, |socket| {
        let _ = notify();
        let link = socket
            .link(&call.ifname)
            .map_err(doing("the new interface cannot be read"))?;
        link.map(|l| l.mac).ok_or_else(|| {
            Error::other(format!(
                "the interface {:?} disappeared from the container",
                call.ifname
            ))
        })
    })?;
    interface::configure(namespace, &call.ifname, &success, false)?;
    success.interfaces = vec![Interface {
        name: call.ifname.clone(),
        mac,
        sandbox: call.netns.clone(),
        ..Interface::default()
    }];
    success.dns = interface::dns(call)?;
    Ok(success)
}

/// Removes the link from the container after an error.
pub(super) fn delete_link(call: &Call<'_>) {
    let _ = interface::inside(call, |socket| {
        socket
            .delete_link(&call.ifname)
            .map_err(doing("the interface cannot be removed"))
    });
}

/// CHECK: verifies addresses, routes, MAC and the kind of the link; `more` verifies further properties.
pub(super) fn check(
    call: &Call<'_>,
    kind: &str,
    more: impl FnOnce(&Link) -> Result<(), Error>,
) -> Result<(), Error> {
    interface::call_ipam(call, "CHECK")?;
    let expected = call.previous()?.unwrap_or_default();
    interface::check(call, &expected)?;
    let link = interface::inside(call, |socket| {
        socket
            .link(&call.ifname)
            .map_err(doing("the container's interface cannot be read"))
    })?;
    let link = link.filter(|l| l.kind == kind);
    more(&link.ok_or_else(|| {
        Error::other(format!(
            "the interface {:?} of the container is not a {kind}",
            call.ifname
        ))
    })?)
}

/// CHECK: an attribute of the link has this value.
pub(super) fn has(link: &Link, option: u16, wanted: u32, name: &str) -> Result<(), Error> {
    match link.option(option) {
        found if found == Some(wanted) => Ok(()),
        found => Err(Error::other(format!(
            "{name} of {:?} is {found:?}, not {wanted}",
            link.name
        ))),
    }
}
