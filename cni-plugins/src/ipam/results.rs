//! Reads libcni's result cache, which has a file for each attachment
//! (`libcni/api.go` of containernetworking/cni, `cachedInfo`).

use std::io::{self, Read as _};
use std::path::Path;

use serde_json::Value;

/// The default directory of the cache.
pub const DEFAULT_DIR: &str = "/var/lib/cni/results";
/// The largest file that is read, in bytes.
const LARGEST: u64 = 1 << 20;

/// An attachment of a container to a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// The network's name.
    pub network: String,
    /// The container's id.
    pub container: String,
    /// Its interface.
    pub ifname: String,
}

/// Parses a file of the cache. Fails if it is not complete JSON.
pub(super) fn read(path: &Path) -> io::Result<Value> {
    let mut text = String::new();
    let file = std::fs::File::open(path)?;
    file.take(LARGEST).read_to_string(&mut text)?;
    Ok(serde_json::from_str(&text)?)
}

/// The attachments of all networks in a cache directory. Empty if the directory or
/// any of its files cannot be read: unknown attachments must not count as removed.
#[must_use]
pub fn attached(dir: &Path) -> Vec<Attachment> {
    let one = |entry: io::Result<std::fs::DirEntry>| -> io::Result<Attachment> {
        let value = read(&entry?.path())?;
        let text = |key: &str| {
            let found = value[key].as_str().filter(|text| !text.is_empty());
            found.map(str::to_owned).ok_or(io::ErrorKind::InvalidData)
        };
        Ok(Attachment {
            network: text("networkName")?,
            container: text("containerId")?,
            ifname: text("ifName")?,
        })
    };
    let all = std::fs::read_dir(dir).and_then(|entries| entries.map(one).collect());
    all.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_undecodable_result_makes_the_list_empty() {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| {
            std::fs::write(dir.path().join(name), text).expect("written");
        };
        assert_eq!(attached(&dir.path().join("nosuch")), []);
        write(
            "net-c1-eth0",
            r#"{"kind": "cniCacheV1", "containerId": "c1", "ifName": "eth0", "networkName": "net"}"#,
        );
        let one = Attachment {
            network: "net".into(),
            container: "c1".into(),
            ifname: "eth0".into(),
        };
        assert_eq!(attached(dir.path()), [one]);
        write("net-c2-eth0", "{}");
        assert_eq!(attached(dir.path()), []);
    }
}
