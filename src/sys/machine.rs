//! Facts about this machine.

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use futures::TryStreamExt as _;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::AddressAttribute;
use netlink_packet_route::route::RouteAttribute;

use crate::core::image::gc::Filesystem;
use crate::core::volume::selinux;

/// What a node reports about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// Logical processors.
    pub cpus: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of the filesystem with the root directory.
    pub storage: u64,
    /// `/etc/machine-id`.
    pub machine_id: String,
    /// The firmware's uuid.
    pub system_uuid: String,
    /// Changes with every boot.
    pub boot_id: String,
    /// `uname -r`.
    pub kernel: String,
    /// The distribution's name.
    pub os_image: String,
    /// The sizes of huge pages that the kernel knows, for instance `2MB`.
    pub hugepages: Vec<String>,
    /// The `thermal_throttle` directories of the processors.
    pub thermal: Vec<String>,
    /// Whether controllers are in the unified hierarchy.
    pub cgroup_v2: bool,
    /// Bytes of swap; none where the kernel does not account for what cgroups use of it.
    pub swap: Option<u64>,
    /// Whether the kernel enforces AppArmor profiles.
    pub apparmor: bool,
    /// The SELinux label of containers' files; none where SELinux is off.
    pub selinux: Option<String>,
}

/// The huge page sizes as cgroup files name them.
fn hugepages() -> Vec<String> {
    let entries = fs::read_dir("/sys/kernel/mm/hugepages")
        .into_iter()
        .flatten()
        .filter_map(Result::ok);
    let kilobytes = entries.filter_map(|e| {
        e.file_name()
            .to_str()?
            .strip_prefix("hugepages-")?
            .strip_suffix("kB")?
            .parse::<u64>()
            .ok()
    });
    let named = |kb: u64| match kb {
        kb if kb >= 1 << 20 => format!("{}GB", kb >> 20),
        kb if kb >= 1 << 10 => format!("{}MB", kb >> 10),
        kb => format!("{kb}KB"),
    };
    let mut sizes: Vec<String> = kilobytes.map(named).collect();
    sizes.sort();
    sizes
}

fn thermal() -> Vec<String> {
    let entries = fs::read_dir("/sys/devices/system/cpu")
        .into_iter()
        .flatten()
        .filter_map(Result::ok);
    let mut paths: Vec<String> = entries
        .map(|e| e.path().join("thermal_throttle"))
        .filter(|p| p.is_dir())
        .map(|p| p.display().to_string())
        .collect();
    paths.sort();
    paths
}

fn line(path: &str) -> String {
    fs::read_to_string(path)
        .map(|t| t.trim().to_owned())
        .unwrap_or_default()
}

/// What the loaded SELinux policy says of containers' files.
fn selinux_files() -> Option<String> {
    Path::new("/sys/fs/selinux/enforce").exists().then(|| {
        let config = line("/etc/selinux/config");
        let policy = config
            .lines()
            .find_map(|l| l.strip_prefix("SELINUXTYPE="))
            .unwrap_or("targeted")
            .trim();
        selinux::files(&line(&format!(
            "/etc/selinux/{policy}/contexts/lxc_contexts"
        )))
    })
}

impl Machine {
    /// Reads everything; what cannot be read is empty or zero.
    #[must_use]
    pub fn read(root: &Path) -> Machine {
        let meminfo = line("/proc/meminfo");
        let kilobytes = |key: &str| {
            meminfo
                .lines()
                .find_map(|l| l.strip_prefix(key))
                .and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok())
        };
        let total = kilobytes("MemTotal:");
        let release = line("/etc/os-release");
        let pretty = release
            .lines()
            .find_map(|l| l.strip_prefix("PRETTY_NAME="))
            .map(|n| n.trim_matches('"').to_owned());
        Machine {
            cpus: std::thread::available_parallelism()
                .map_or(1, |n| u32::try_from(n.get()).unwrap_or(1)),
            memory: total.unwrap_or(0) * 1024,
            storage: filesystem(root).map_or(0, |f| f.capacity),
            machine_id: line("/etc/machine-id"),
            system_uuid: line("/sys/class/dmi/id/product_uuid"),
            boot_id: line("/proc/sys/kernel/random/boot_id"),
            kernel: line("/proc/sys/kernel/osrelease"),
            os_image: pretty.unwrap_or_else(|| "Linux".into()),
            hugepages: hugepages(),
            thermal: thermal(),
            cgroup_v2: crate::sys::cgroup::is_v2(),
            swap: crate::sys::cgroup::accounts_swap()
                .then(|| kilobytes("SwapTotal:").unwrap_or(0) * 1024),
            apparmor: line("/sys/module/apparmor/parameters/enabled") == "Y",
            selinux: selinux_files(),
        }
    }
}

/// The room on the filesystem that a directory is on.
pub fn filesystem(dir: &Path) -> std::io::Result<Filesystem> {
    let Room {
        capacity,
        available,
        ..
    } = Room::of(dir)?;
    Ok(Filesystem {
        capacity,
        available,
    })
}

/// The room on a filesystem.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Room {
    /// All bytes.
    pub capacity: u64,
    /// Those that anybody may still write.
    pub available: u64,
    /// Those that root may.
    pub free: u64,
    /// All inodes.
    pub inodes: u64,
    /// Those that are free.
    pub inodes_free: u64,
}

impl Room {
    /// That of the filesystem that a directory is on.
    pub fn of(dir: &Path) -> std::io::Result<Room> {
        let stat = nix::sys::statvfs::statvfs(dir)?;
        let bytes = |blocks: u64| blocks * stat.fragment_size();
        Ok(Room {
            capacity: bytes(stat.blocks()),
            available: bytes(stat.blocks_available()),
            free: bytes(stat.blocks_free()),
            inodes: stat.files(),
            inodes_free: stat.files_free(),
        })
    }
}

/// The OS's host name.
#[must_use]
pub fn hostname() -> String {
    line("/proc/sys/kernel/hostname").to_lowercase()
}

/// The address of the interface with the default route, or of the first interface that has one.
pub async fn default_address() -> Option<IpAddr> {
    let (connection, handle, _) = rtnetlink::new_connection().ok()?;
    let task = tokio::spawn(connection);
    let found = find_address(&handle).await;
    task.abort();
    found
}

async fn find_address(handle: &rtnetlink::Handle) -> Option<IpAddr> {
    let query = rtnetlink::RouteMessageBuilder::<std::net::Ipv4Addr>::new().build();
    let routes: Vec<_> = handle
        .route()
        .get(query)
        .execute()
        .try_collect()
        .await
        .ok()?;
    let default = routes
        .iter()
        .filter(|r| r.header.destination_prefix_length == 0)
        .find_map(|r| {
            r.attributes.iter().find_map(|a| {
                if let RouteAttribute::Oif(index) = a {
                    Some(*index)
                } else {
                    None
                }
            })
        });
    let addresses: Vec<_> = handle.address().get().execute().try_collect().await.ok()?;
    let usable = addresses
        .iter()
        .filter(|m| m.header.family == AddressFamily::Inet)
        .filter_map(|m| {
            let address = m.attributes.iter().find_map(|a| {
                if let AddressAttribute::Address(ip) = a {
                    Some(*ip)
                } else {
                    None
                }
            })?;
            (!address.is_loopback()).then_some((m.header.index, address))
        });
    let usable: Vec<(u32, IpAddr)> = usable.collect();
    usable
        .iter()
        .find(|(index, _)| Some(*index) == default)
        .or(usable.first())
        .map(|(_, ip)| *ip)
}
