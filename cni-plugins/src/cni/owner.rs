//! Names that identify the owner of rules and links on the host. The reference plugins use
//! the same names, so that either implementation can delete what the other has created.

/// The first hexadecimal digits of a text's SHA-512 (as `MustFormatHashWithPrefix`
/// in `pkg/utils/utils.go` of containernetworking/plugins).
#[must_use]
pub fn digest(text: &str, digits: usize) -> String {
    use sha2::Digest as _;
    let digest = sha2::Sha512::digest(text.as_bytes());
    let hex: String = digest.iter().map(|b| format!("{b:02x}")).collect();
    hex.chars().take(digits).collect()
}

/// The owner of a rule: an attachment, that is, a container's interface in a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// The comment of the rule. The part before the comma is the key of the
    /// owner. The part of the key before the dash is the digest of the network.
    pub comment: String,
}

impl Owner {
    /// Builds the comment as `pkg/ip/ipmasq_nftables_linux.go` of containernetworking/plugins does.
    #[must_use]
    pub fn new(network: &str, container: &str, ifname: &str) -> Owner {
        let key = format!(
            "{}-{}",
            digest(network, 16),
            digest(&format!("{ifname}:{container}"), 16)
        );
        let text = format!("{key}, net: {network}, if: {ifname}, id: {container}").replace('"', "");
        Owner {
            comment: text.chars().take(127).collect(),
        }
    }

    /// The part of the comment that identifies the owner: two digests.
    #[must_use]
    pub fn key(&self) -> &str {
        self.comment.split(',').next().unwrap_or_default()
    }

    /// Whether the rule with this comment belongs to this owner.
    #[must_use]
    pub fn has(&self, mark: &str) -> bool {
        mark.starts_with(self.key())
    }
}

/// Whether a comment belongs to an owner in `network` that is not in `keep`, a list of containers and interfaces.
#[must_use]
pub fn is_orphaned(mark: &str, network: &str, keep: &[(String, String)]) -> bool {
    mark.starts_with(&format!("{}-", digest(network, 16)))
        && !keep
            .iter()
            .any(|(id, ifname)| Owner::new(network, id, ifname).has(mark))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_match_only_their_owner_and_network() {
        let owner = Owner::new("net", "c1", "eth0");
        assert!(
            owner.has(&owner.comment)
                && !owner.has(&Owner::new("net", "c2", "eth0").comment)
                && !owner.has("")
        );
        let keep = [("c1".to_owned(), "eth0".to_owned())];
        assert!(!is_orphaned(&owner.comment, "net", &keep));
        assert!(is_orphaned(
            &Owner::new("net", "c1", "eth1").comment,
            "net",
            &keep
        ));
        assert!(
            !is_orphaned(&Owner::new("other", "c1", "eth1").comment, "net", &keep),
            "another network's"
        );
        assert!(!is_orphaned("c1", "net", &[]), "another program's comment");
    }
}
