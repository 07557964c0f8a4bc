//! The addresses of a pod. Pure.

/// The sandbox's addresses in a pod's status: one of each family, that of the node's family first. An apiserver rejects
/// two addresses of one family (`ValidatePodStatusUpdate` in `pkg/apis/core/validation/validation.go`).
#[must_use]
pub fn pod_ips(of_sandbox: &[String], node_ips: &[String]) -> Vec<String> {
    let is_v6 = |ip: &String| ip.contains(':');
    let first = node_ips.first().is_some_and(is_v6);
    let of = |family| of_sandbox.iter().find(|ip| is_v6(ip) == family);
    of(first).into_iter().chain(of(!first)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_has_one_address_per_family_in_the_nodes_order() {
        let list =
            |ips: &str| -> Vec<String> { ips.split_whitespace().map(str::to_owned).collect() };
        for (seen, node, expected) in [
            ("10.0.0.2", "192.0.2.1", "10.0.0.2"),
            ("10.0.0.2 fd00::2", "192.0.2.1 fd01::1", "10.0.0.2 fd00::2"),
            ("10.0.0.2 fd00::2", "fd01::1 192.0.2.1", "fd00::2 10.0.0.2"),
            // The address of a second interface is left out: the apiserver would reject the whole status.
            ("10.0.0.2 10.1.0.2 fd00::2", "192.0.2.1", "10.0.0.2 fd00::2"),
            ("fd00::2", "192.0.2.1", "fd00::2"),
            ("", "192.0.2.1", ""),
            ("10.0.0.2", "", "10.0.0.2"),
        ] {
            assert_eq!(pod_ips(&list(seen), &list(node)), list(expected), "{seen}");
        }
    }
}
