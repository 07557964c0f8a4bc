//! Whose something on the host is, in names that the reference plugins use too (CNI reference spec, 2.3).

/// The first hexadecimal digits of a text's SHA-512, of which the reference makes names (CNI reference spec, 2.3).
#[must_use]
pub fn digest(text: &str, digits: usize) -> String {
    use sha2::Digest as _;
    let digest = sha2::Sha512::digest(text.as_bytes());
    let hex: String = digest.iter().map(|b| format!("{b:02x}")).collect();
    hex.chars().take(digits).collect()
}

/// Whose a rule is: a network's attachment of a container's interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// What stands at the rule: its part before the comma is the key of the owner, the part before the dash that of the network.
    pub comment: String,
}

impl Owner {
    /// As the reference names it (CNI reference spec, 2.3).
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

    /// The part of the comment that names the owner: two digests.
    #[must_use]
    pub fn key(&self) -> &str {
        self.comment.split(',').next().unwrap_or_default()
    }

    /// Whether a rule with this mark is its.
    #[must_use]
    pub fn has(&self, mark: &str) -> bool {
        mark.starts_with(self.key())
    }
}

/// Whether a mark is of an owner in `network` that is none of `keep`, a list of containers and interfaces.
#[must_use]
pub fn is_left_over(mark: &str, network: &str, keep: &[(String, String)]) -> bool {
    mark.starts_with(&format!("{}-", digest(network, 16)))
        && !keep
            .iter()
            .any(|(id, ifname)| Owner::new(network, id, ifname).has(mark))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_know_what_is_theirs_and_so_do_networks() {
        let owner = Owner::new("net", "c1", "eth0");
        assert!(
            owner.has(&owner.comment)
                && !owner.has(&Owner::new("net", "c2", "eth0").comment)
                && !owner.has("")
        );
        let keep = [("c1".to_owned(), "eth0".to_owned())];
        assert!(!is_left_over(&owner.comment, "net", &keep));
        assert!(is_left_over(
            &Owner::new("net", "c1", "eth1").comment,
            "net",
            &keep
        ));
        assert!(
            !is_left_over(&Owner::new("other", "c1", "eth1").comment, "net", &keep),
            "another network's"
        );
        assert!(!is_left_over("c1", "net", &[]), "somebody else's comment");
    }
}
