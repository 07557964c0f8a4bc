//! `host-device`: moves a link of the host into a container and back
//! (`plugins/main/host-device/host-device.go` of containernetworking/plugins).

use std::fs::File;
use std::path::{Path, PathBuf};

use super::interface::{self, doing};
use super::sublink::{self, Addresses, in_parent_namespace};
use crate::cni::{Error, Interface, Success};
use crate::net::netns;
use crate::skel::{Call, Plugin};
use holdfast_net::link::{Change, Link, parse_mac};
use holdfast_net::netlink::Socket;

/// The plugin `host-device`.
pub struct HostDevice;

/// How the configuration identifies the device. If it contains several identifications, the first of these
/// variants applies, as in the reference (`getLink`). A device in `runtimeConfig` takes precedence over all.
enum Device<'a> {
    Name(&'a str),
    Mac(&'a str),
    Path(&'a str),
    Pci(&'a str),
    Auxiliary(&'a str),
}

const PCI: &str = "/sys/bus/pci/devices";
/// Devices that are part of a PCI device, such as subfunctions.
const AUXILIARY: &str = "/sys/bus/auxiliary/devices";
/// Drivers that give a device to a user-space program. The kernel has no link for such a device.
const USER_SPACE_DRIVERS: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];

/// The path of a device below a directory of sysfs. The id cannot lead out of the directory.
fn on_bus(bus: &str, id: &str) -> Result<PathBuf, Error> {
    let known = |c: char| c.is_ascii_alphanumeric() || ":._-".contains(c);
    if id.starts_with('.') || !id.chars().all(known) {
        return Err(Error::config(format!(
            "invalid device id {id:?}: use a device on the PCI or the auxiliary bus, such as 0000:00:1f.6 or mlx5_core.sf.4"
        )));
    }
    Ok(Path::new(bus).join(id))
}

impl<'a> Device<'a> {
    fn parse(call: &Call<'a>) -> Result<Device<'a>, Error> {
        let c = call.config;
        let injected = c.object("runtimeConfig")?.text("deviceID")?;
        if !injected.is_empty() {
            let is_auxiliary =
                !on_bus(PCI, injected)?.exists() && on_bus(AUXILIARY, injected)?.exists();
            return Ok(if is_auxiliary {
                Device::Auxiliary(injected)
            } else {
                Device::Pci(injected)
            });
        }
        let given = [
            c.text("device")?,
            c.text("hwaddr")?,
            c.text("kernelpath")?,
            c.text("pciBusID")?,
        ];
        // If a user-space program drives the device at the PCI address,
        // no link moves, even if another device is named (`loadConf`).
        let pci = Device::Pci(given[3]);
        if !given[3].is_empty() && pci.has_user_space_driver()? {
            return Ok(pci);
        }
        match given {
            ["", "", "", ""] => Err(Error::config(
                "specify either \"device\", \"hwaddr\", \"kernelpath\" or \"pciBusID\"",
            )),
            ["", "", "", pci] => Ok(Device::Pci(pci)),
            ["", "", path, _] => Ok(Device::Path(path)),
            ["", mac, ..] => Ok(Device::Mac(mac)),
            [name, ..] => Ok(Device::Name(name)),
        }
    }

    /// The name of the interface of a device in sysfs. For a virtio device it is one directory further down.
    fn interface_in(dir: &Path) -> Result<String, Error> {
        let names = |dir: &Path| {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            let mut names: Vec<String> = entries
                .filter_map(|e| e.file_name().into_string().ok())
                .collect();
            names.sort();
            names
        };
        let virtio = names(dir).into_iter().filter(|n| n.starts_with("virtio"));
        let first = std::iter::once(dir.to_owned())
            .chain(virtio.map(|n| dir.join(n)))
            .find_map(|d| names(&d.join("net")).into_iter().next());
        first.ok_or_else(|| {
            Error::config(format!(
                "no network interface below {}",
                dir.join("net").display()
            ))
        })
    }

    /// Whether a user-space driver has the device, for instance for a virtual machine or DPDK.
    fn has_user_space_driver(&self) -> Result<bool, Error> {
        let Device::Pci(id) = self else {
            return Ok(false);
        };
        let driver = std::fs::read_link(on_bus(PCI, id)?.join("driver"));
        Ok(driver.is_ok_and(|path| USER_SPACE_DRIVERS.iter().any(|d| path.ends_with(d))))
    }

    fn find(&self, socket: &mut Socket) -> Result<Link, Error> {
        let failed = || doing("the host's interfaces cannot be read");
        let named = |socket: &mut Socket, name: &str| {
            let found = socket.link(name).map_err(failed())?;
            found.ok_or_else(|| Error::config(format!("the host has no interface {name:?}")))
        };
        match self {
            Device::Name(name) => named(socket, name),
            Device::Mac(text) => {
                let mac = parse_mac(text).ok_or_else(|| {
                    Error::config(format!(
                        "invalid hwaddr {text:?}: expected six hexadecimal bytes"
                    ))
                })?;
                let text = holdfast_net::link::mac_text(&mac);
                let links = socket.links().map_err(failed())?;
                links.into_iter().find(|l| l.mac == text).ok_or_else(|| {
                    Error::config(format!("no interface of the host has the MAC {text}"))
                })
            }
            Device::Path(path) => {
                let real = std::fs::canonicalize(path)
                    .map_err(|e| Error::config(format!("kernelpath {path:?}: {e}")))?;
                if !real.starts_with("/sys/devices") {
                    return Err(Error::config(format!(
                        "kernelpath {path:?} must be a path below /sys/devices"
                    )));
                }
                named(socket, &Self::interface_in(&real)?)
            }
            Device::Pci(id) => named(socket, &Self::interface_in(&on_bus(PCI, id)?)?),
            Device::Auxiliary(id) => named(socket, &Self::interface_in(&on_bus(AUXILIARY, id)?)?),
        }
    }
}

/// Moves a link to another namespace and sets its name and alias there.
/// If the move fails, restores the link, since the host may need it.
fn move_link(
    socket: &mut Socket,
    link: &Link,
    to: &File,
    name: &str,
    alias: &str,
) -> Result<(), Error> {
    let failed = || doing(format!("the interface {:?} cannot be moved", link.name));
    let home = netns::own()?;
    let there = |name: &str| {
        netns::inside(to, || {
            Socket::route()
                .and_then(|mut s| s.link(name))
                .map_err(doing(
                    "the interfaces of the target namespace cannot be read",
                ))
        })
    };
    // Check first: the kernel would move the link and only then report that the name exists.
    if there(name)?.is_some() {
        return Err(Error::other(format!(
            "an interface {name:?} already exists in the target namespace of {:?}",
            link.name
        )));
    }
    // The alias stores the present name, so that DEL can restore it.
    socket
        .change_link(
            link.index,
            Change {
                up: Some(false),
                alias: Some(alias),
                ..Change::default()
            },
        )
        .map_err(failed())?;
    let moved = socket.change_link(
        link.index,
        Change {
            namespace: Some(to),
            name: Some(name),
            ..Change::default()
        },
    );
    if moved.is_err() {
        // Report only the first error.
        let _ = netns::inside(to, || {
            let mut socket = Socket::route().map_err(failed())?;
            let stray = socket
                .link(&link.name)
                .map_err(failed())?
                .filter(|l| l.mac == link.mac && l.alias == alias);
            stray.map_or(Ok(()), |l| {
                socket
                    .change_link(
                        l.index,
                        Change {
                            namespace: Some(&home),
                            ..Change::default()
                        },
                    )
                    .map_err(failed())
            })
        });
        if let Ok(Some(back)) = socket.link(&link.name) {
            let _ = socket.change_link(
                back.index,
                Change {
                    up: Some(link.up),
                    alias: Some(&link.alias),
                    ..Change::default()
                },
            );
        }
    }
    moved.map_err(failed())
}

/// Moves the container's interface back to the host and restores its name there.
fn return_link(call: &Call<'_>) -> Result<(), Error> {
    let Some(namespace) = (if call.netns.is_empty() {
        None
    } else {
        netns::open(&call.netns)?
    }) else {
        return Ok(());
    };
    let host = netns::own()?;
    netns::inside(&namespace, || {
        let mut socket =
            Socket::route().map_err(doing("opening a netlink socket in the container failed"))?;
        let Some(link) = socket
            .link(&call.ifname)
            .map_err(doing("the container's interface cannot be read"))?
        else {
            return Ok(());
        };
        let name = if link.alias.is_empty() {
            link.name.clone()
        } else {
            link.alias.clone()
        };
        move_link(&mut socket, &link, &host, &name, "")
    })
}

/// ADD for a device with a user-space driver: there is no link to move, only addresses for the program.
fn add_without_link(call: &Call<'_>) -> Result<Success, Error> {
    netns::require(&call.netns)?;
    let finish = |mut success: Success| {
        success.ips.iter_mut().for_each(|ip| ip.interface = Some(0));
        success.interfaces = vec![Interface {
            name: call.ifname.clone(),
            sandbox: call.netns.clone(),
            ..Interface::default()
        }];
        success.dns = interface::dns(call)?;
        Ok(success)
    };
    match interface::ipam(call)? {
        "" => finish(Success::default()),
        ipam => interface::with_addresses(call, ipam, finish),
    }
}

/// Whether the configured device has no link. On DEL the device may
/// no longer exist, or the configuration may no longer name it.
fn has_no_link(call: &Call<'_>) -> bool {
    Device::parse(call)
        .and_then(|d| d.has_user_space_driver())
        .unwrap_or(false)
}

impl Plugin for HostDevice {
    fn name(&self) -> &'static str {
        "host-device"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let device = Device::parse(call)?;
        if device.has_user_space_driver()? {
            return add_without_link(call);
        }
        let make = || {
            in_parent_namespace(call, false, |socket, namespace| {
                let link = device.find(socket)?;
                let namespace =
                    namespace.ok_or_else(|| Error::other("the container has no namespace"))?;
                move_link(socket, &link, namespace, &call.ifname, &link.name)
            })
        };
        // Report only the first error; the runtime calls DEL for leftovers.
        let undo = || drop(return_link(call));
        sublink::add(call, Addresses::of(call)?, make, undo)
    }

    /// Releases addresses even if the namespace was removed. The kernel has then moved the link back to the host.
    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        let link = || {
            if has_no_link(call) {
                Ok(())
            } else {
                return_link(call)
            }
        };
        interface::join_errors([interface::call_ipam(call, "DEL"), link()])
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        interface::call_ipam(call, "CHECK")?;
        if has_no_link(call) {
            return Ok(());
        }
        interface::check(call, &call.previous()?.unwrap_or_default())?;
        let up = interface::inside(call, |socket| {
            Ok(socket
                .link(&call.ifname)
                .map_err(doing("the interface cannot be read"))?
                .is_some_and(|l| l.up))
        })?;
        if up {
            Ok(())
        } else {
            Err(Error::other(format!(
                "the interface {:?} is down",
                call.ifname
            )))
        }
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        interface::collect_addresses(call, keep)
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        // If the runtime names a device per container, the device is not known yet.
        if !call.config.object("capabilities")?.flag("deviceID")? {
            Device::parse(call)?;
        }
        interface::call_ipam(call, "STATUS")
    }
}
