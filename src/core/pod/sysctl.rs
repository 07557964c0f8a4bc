//! The sysctls that pods may set (`pkg/kubelet/sysctl/allowlist.go`). Pure.

use k8s_openapi::api::core::v1::Pod;

use crate::pod;

/// Safe sysctls, which have no effect outside of the pod, and the minimum kernel version.
const SAFE: &[(&str, (u32, u32))] = &[
    ("kernel.shm_rmid_forced", (0, 0)),
    ("net.ipv4.ip_local_port_range", (0, 0)),
    ("net.ipv4.tcp_syncookies", (0, 0)),
    ("net.ipv4.ping_group_range", (0, 0)),
    ("net.ipv4.ip_unprivileged_port_start", (0, 0)),
    ("net.ipv4.ip_local_reserved_ports", (3, 16)),
    ("net.ipv4.tcp_keepalive_time", (4, 5)),
    ("net.ipv4.tcp_fin_timeout", (4, 5)),
    ("net.ipv4.tcp_keepalive_intvl", (4, 5)),
    ("net.ipv4.tcp_keepalive_probes", (4, 5)),
    ("net.ipv4.tcp_rmem", (4, 15)),
    ("net.ipv4.tcp_wmem", (4, 15)),
];

fn of_ipc(name: &str) -> bool {
    name.starts_with("kernel.shm")
        || name.starts_with("kernel.msg")
        || name == "kernel.sem"
        || name.starts_with("fs.mqueue.")
}

fn of_network(name: &str) -> bool {
    name.starts_with("net.")
}

/// Whether a sysctl is namespaced. For a pattern that ends with `*`, whether all matching sysctls are.
#[must_use]
pub fn is_namespaced(pattern: &str) -> bool {
    let name = pattern.replace('/', ".");
    of_ipc(name.trim_end_matches('*')) || of_network(&name)
}

fn version(release: &str) -> (u32, u32) {
    let mut parts = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|p| p.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

/// Why a pod's sysctls are rejected. `None` if they are allowed. `allowed` is the configured list of unsafe sysctls,
/// `kernel` the kernel's release.
#[must_use]
pub fn refusal(pod: &Pod, allowed: &[String], kernel: &str) -> Option<String> {
    let spec = pod::spec(pod);
    let wanted = spec
        .security_context
        .as_ref()
        .and_then(|s| s.sysctls.as_ref())?;
    for sysctl in wanted {
        let name = sysctl.name.replace('/', ".");
        let safe = SAFE
            .iter()
            .any(|(known, since)| *known == name && version(kernel) >= *since);
        let listed = allowed.iter().map(|p| p.replace('/', ".")).any(|p| {
            p.strip_suffix('*')
                .map_or(p == name, |prefix| name.starts_with(prefix))
        });
        if !safe && !listed {
            return Some(format!(
                "forbidden sysctl: {:?} not allowlisted",
                sysctl.name
            ));
        }
        if of_network(&name) && spec.host_network == Some(true) {
            return Some(format!(
                "forbidden sysctl: {:?} not allowed with host net enabled",
                sysctl.name
            ));
        }
        if of_ipc(&name) && spec.host_ipc == Some(true) {
            return Some(format!(
                "forbidden sysctl: {:?} not allowed with host ipc enabled",
                sysctl.name
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_safe_and_listed_sysctls_are_allowed() {
        let refused = |name: &str, extra: (&str, bool), allowed: &[&str], kernel: &str| {
            let mut spec = json!({"containers": [], "securityContext": {"sysctls": [{"name": name, "value": "1"}]}});
            spec[extra.0] = extra.1.into();
            let pod: Pod = serde_json::from_value(json!({"spec": spec})).expect("a pod");
            let allowed: Vec<String> = allowed.iter().map(|a| (*a).into()).collect();
            refusal(&pod, &allowed, kernel)
        };
        let none = ("hostPID", false);
        for (name, extra, allowed, kernel, expected) in [
            (
                "net.ipv4.tcp_syncookies",
                none,
                &[][..],
                "6.1.0-1-amd64",
                None,
            ),
            ("net/ipv4/tcp_syncookies", none, &[], "6.1", None),
            (
                "net.ipv4.tcp_rmem",
                none,
                &[],
                "4.14.3",
                Some("not allowlisted"),
            ),
            (
                "kernel.msgmax",
                none,
                &[],
                "6.1",
                Some("forbidden sysctl: \"kernel.msgmax\" not allowlisted"),
            ),
            ("kernel.msgmax", none, &["kernel.msg*"], "6.1", None),
            (
                "kernel.msgmax",
                ("hostIPC", true),
                &["kernel.msg*"],
                "6.1",
                Some("host ipc"),
            ),
            (
                "net.ipv4.tcp_syncookies",
                ("hostNetwork", true),
                &[],
                "6.1",
                Some("host net"),
            ),
        ] {
            let found = refused(name, extra, allowed, kernel);
            assert_eq!(found.is_some(), expected.is_some(), "{name}: {found:?}");
            assert!(
                expected.is_none_or(|e| found.as_deref().is_some_and(|f| f.contains(e))),
                "{found:?}"
            );
        }
        assert_eq!(refusal(&Pod::default(), &[], "6"), None);
        assert!(
            is_namespaced("kernel.shm*")
                && is_namespaced("net.*")
                && !is_namespaced("vm.swappiness")
                && !is_namespaced("kernel.*")
        );
    }
}
