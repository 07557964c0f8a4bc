//! Traffic within the bridge of this node's pods. A frame from one port to another passes the rules of nftables' ip tables
//! only if the bridge's own `nf_call_iptables` or the sysctl for all bridges is set (`net/bridge/br_netfilter_hooks.c` of
//! Linux). The proxy sets the former, so that other bridges of the machine stay unchanged.

use std::io;
use std::path::Path;

/// The bridge's switches, one for each family.
const SWITCHES: [&str; 2] = ["nf_call_iptables", "nf_call_ip6tables"];

/// Lets traffic within a bridge pass the rules. Returns false if the bridge does not exist yet.
///
/// # Errors
///
/// A switch cannot be written.
pub(crate) fn pass_through_rules(links: &Path, bridge: &str) -> io::Result<bool> {
    let dir = links.join(bridge).join("bridge");
    if !dir.exists() {
        return Ok(false);
    }
    for switch in SWITCHES {
        let path = dir.join(switch);
        // A kernel without IPv6 has no such file.
        let is = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            is => is?,
        };
        if is.trim() != "1" {
            std::fs::write(&path, "1")?;
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families_are_switched_on_once_the_bridge_exists() {
        let links = tempfile::tempdir().expect("a directory");
        let pass = || pass_through_rules(links.path(), "hf0").expect("written");
        assert!(!pass(), "the bridge does not exist yet");
        let dir = links.path().join("hf0/bridge");
        std::fs::create_dir_all(&dir).expect("created");
        assert!(pass(), "a bridge without switches is no error");
        for switch in SWITCHES {
            std::fs::write(dir.join(switch), "0\n").expect("written");
        }
        assert!(pass());
        for switch in SWITCHES {
            let is = std::fs::read_to_string(dir.join(switch));
            assert_eq!(is.expect("read"), "1", "{switch}");
        }
    }
}
