//! Security contexts of containers: users, capabilities, profiles, masked paths
//! (`pkg/kubelet/kuberuntime/security_context.go`). Pure.

use std::collections::BTreeSet;

use crate::volume::selinux::effective;
use holdfast_proto::cri as pb;
use k8s_openapi::api::core::v1::{
    AppArmorProfile, Capabilities, Container, Pod, SELinuxOptions, SeccompProfile, SecurityContext,
};

use super::Node;
use super::Prepared;
use super::namespaces;
use super::privileged;
use crate::fault::Fault;
use crate::{meta, pod};

pub(super) const MASKED: &[&str] = &[
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READ_ONLY: &[&str] = &[
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

pub(super) fn groups_policy(policy: Option<&str>) -> i32 {
    let strict = policy == Some("Strict");
    (if strict {
        pb::SupplementalGroupsPolicy::Strict
    } else {
        pb::SupplementalGroupsPolicy::Merge
    }) as i32
}

pub(super) fn selinux(options: &SELinuxOptions) -> pb::SeLinuxOption {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    pb::SeLinuxOption {
        user: text(&options.user),
        role: text(&options.role),
        r#type: text(&options.type_),
        level: text(&options.level),
    }
}

/// The prefix of the deprecated AppArmor annotations. The container's name follows.
const OLD_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";

/// The AppArmor profile of a container (KEP-24; `pkg/security/apparmor`). Its own field comes first, then the
/// deprecated annotation, which static pods may have, then the pod's field. `None` leaves the choice to the runtime.
fn apparmor(pod: &Pod, container: &Container) -> Option<(String, Option<String>)> {
    let field =
        |profile: &AppArmorProfile| (profile.type_.clone(), profile.localhost_profile.clone());
    if let Some(own) = container
        .security_context
        .as_ref()
        .and_then(|s| s.app_armor_profile.as_ref())
    {
        return Some(field(own));
    }
    let old = meta::annotations(pod).get(&format!("{OLD_ANNOTATION}{}", container.name));
    old.and_then(|text| of_annotation(text)).or_else(|| {
        let of_pod = pod::spec(pod).security_context.as_ref()?;
        of_pod.app_armor_profile.as_ref().map(field)
    })
}

/// Parses the value of a deprecated annotation. `None` if it has none of the three valid forms.
fn of_annotation(text: &str) -> Option<(String, Option<String>)> {
    match text {
        "runtime/default" => Some(("RuntimeDefault".into(), None)),
        "unconfined" => Some(("Unconfined".into(), None)),
        other => {
            let name = other.strip_prefix("localhost/")?;
            Some(("Localhost".into(), Some(name.to_owned())))
        }
    }
}

/// Whether a pod requires AppArmor. Like the kubelet, this checks each field and annotation separately. A profile of
/// the pod counts even if every container overrides it.
fn needs_apparmor(pod: &Pod) -> bool {
    let confines =
        |profile: Option<&AppArmorProfile>| profile.is_some_and(|p| p.type_ != "Unconfined");
    let of_pod = pod::spec(pod).security_context.as_ref();
    let in_container = |c: &Container| {
        let context = c.security_context.as_ref();
        confines(context.and_then(|s| s.app_armor_profile.as_ref()))
    };
    let mut old = meta::annotations(pod)
        .iter()
        .filter(|(key, _)| key.starts_with(OLD_ANNOTATION));
    confines(of_pod.and_then(|s| s.app_armor_profile.as_ref()))
        || pod::containers(pod).iter().any(|(_, c)| in_container(c))
        || old.any(|(_, value)| value != "unconfined")
}

/// Why a node cannot apply a pod's AppArmor profiles, in the kubelet's words. `enabled` is whether the node's kernel
/// has AppArmor. Whether a localhost profile is loaded is checked by the runtime.
#[must_use]
pub(crate) fn apparmor_refusal(pod: &Pod, enabled: bool) -> Option<String> {
    if !needs_apparmor(pod) {
        return None;
    }
    if !enabled {
        return Some("AppArmor is not enabled on the host".into());
    }
    let empty = |c: &Container| {
        let (kind, name) = apparmor(pod, c)?;
        let is_empty = name.as_ref().is_none_or(|name| name.trim().is_empty());
        (kind == "Localhost" && is_empty).then(|| name.map_or("nil".into(), |n| format!("*{n}")))
    };
    let found = pod::containers(pod).iter().find_map(|(_, c)| empty(c))?;
    let profile = format!("&AppArmorProfile{{Type:Localhost,LocalhostProfile:{found},}}");
    Some(format!("invalid empty AppArmor profile name: {profile:?}"))
}

fn apparmor_message(
    profile: Option<(String, Option<String>)>,
) -> Result<(Option<pb::SecurityProfile>, String), Fault> {
    use pb::security_profile::ProfileType;
    let Some((kind, name)) = profile else {
        return Ok((None, String::new()));
    };
    Ok(match (kind.as_str(), name) {
        ("RuntimeDefault", _) => (
            Some(pb::SecurityProfile {
                profile_type: ProfileType::RuntimeDefault as i32,
                localhost_ref: String::new(),
            }),
            "runtime/default".into(),
        ),
        ("Unconfined", _) => (
            Some(pb::SecurityProfile {
                profile_type: ProfileType::Unconfined as i32,
                localhost_ref: String::new(),
            }),
            "unconfined".into(),
        ),
        ("Localhost", Some(name)) if !name.is_empty() => {
            let old = format!("localhost/{name}");
            (
                Some(pb::SecurityProfile {
                    profile_type: ProfileType::Localhost as i32,
                    localhost_ref: name,
                }),
                old,
            )
        }
        ("Localhost", _) => {
            return Err(Fault::invalid(
                "localhostProfile must be set if appArmorProfile type is Localhost",
            ));
        }
        (other, _) => {
            return Err(Fault::invalid(format!(
                "appArmorProfile type {other:?} is not supported: use RuntimeDefault, Localhost or Unconfined"
            )));
        }
    })
}

fn seccomp(profile: Option<&SeccompProfile>, node: &Node) -> Result<pb::SecurityProfile, Fault> {
    use pb::security_profile::ProfileType;
    let simple = |kind: ProfileType| pb::SecurityProfile {
        profile_type: kind as i32,
        localhost_ref: String::new(),
    };
    Ok(match profile {
        None if node.seccomp_default => simple(ProfileType::RuntimeDefault),
        None => simple(ProfileType::Unconfined),
        Some(profile) => match profile.type_.as_str() {
            "RuntimeDefault" => simple(ProfileType::RuntimeDefault),
            "Unconfined" => simple(ProfileType::Unconfined),
            // An empty name must not result in an unconfined container.
            "Localhost" => {
                match profile.localhost_profile.as_deref().filter(|p| {
                    !p.is_empty() && !p.starts_with('/') && !p.split('/').any(|s| s == "..")
                }) {
                    Some(path) => pb::SecurityProfile {
                        profile_type: ProfileType::Localhost as i32,
                        localhost_ref: format!("{}/{path}", node.seccomp_root),
                    },
                    None => {
                        return Err(Fault::invalid(
                            "localhostProfile must be set to a path below the seccomp directory if seccompProfile type is Localhost.",
                        ));
                    }
                }
            }
            other => {
                return Err(Fault::invalid(format!(
                    "seccompProfile type {other:?} is not supported: use RuntimeDefault, Localhost or Unconfined"
                )));
            }
        },
    })
}

/// Rejects root if `runAsNonRoot` is set (`verifyRunAsNonRoot` in
/// `pkg/kubelet/kuberuntime/security_context_others.go`).
fn check_non_root(
    pod: &Pod,
    container: &Container,
    user: Option<i64>,
    image: &(Option<i64>, String),
) -> Result<(), Fault> {
    let of_pod = pod
        .spec
        .as_ref()
        .and_then(|s| s.security_context.as_ref())
        .and_then(|s| s.run_as_non_root);
    let wanted = container
        .security_context
        .as_ref()
        .and_then(|s| s.run_as_non_root)
        .or(of_pod);
    if wanted != Some(true) {
        return Ok(());
    }
    let subject = format!(
        "(pod: \"{}\", container: {})",
        pod::described(pod),
        container.name
    );
    match (user, image) {
        (Some(0), _) => Err(Fault::invalid(format!(
            "container's runAsUser breaks non-root policy {subject}"
        ))),
        (Some(_), _) => Ok(()),
        (None, (None, name)) if !name.is_empty() => Err(Fault::later(format!(
            "container has runAsNonRoot and image has non-numeric user ({name}), cannot verify user is non-root {subject}"
        ))),
        (None, (None | Some(0), _)) => Err(Fault::later(format!(
            "container has runAsNonRoot and image will run as root {subject}"
        ))),
        (None, (Some(_), _)) => Ok(()),
    }
}

/// Builds the container's security context. The error is a `CreateContainerConfigError`.
#[allow(deprecated)] // Older runtimes read only the deprecated AppArmor field.
pub(super) fn security(
    pod: &Pod,
    container: &Container,
    prepared: &Prepared<'_>,
    node: &Node,
) -> Result<pb::LinuxContainerSecurityContext, Fault> {
    let image_user = &prepared.image_user;
    let spec = pod::spec(pod);
    let of_pod = spec.security_context.clone().unwrap_or_default();
    let own: SecurityContext = container.security_context.clone().unwrap_or_default();
    let user = own.run_as_user.or(of_pod.run_as_user);
    check_non_root(pod, container, user, image_user)?;
    let id = |value: Option<i64>| value.map(|value| pb::Int64Value { value });
    let named = user.is_none() && image_user.0.is_none() && !image_user.1.is_empty();
    let unmasked = own.proc_mount.as_deref() == Some("Unmasked");
    let paths = |list: &[&str]| -> Vec<String> {
        if unmasked {
            vec![]
        } else {
            list.iter().map(|p| (*p).to_owned()).collect()
        }
    };
    let mut masked = paths(MASKED);
    if !unmasked {
        masked.extend(node.masked.iter().cloned());
    }
    let mut namespaces = namespaces(spec, node);
    if let Some(target) = &prepared.target {
        namespaces.pid = pb::NamespaceMode::Target as i32;
        namespaces.target_id.clone_from(target);
    }
    let (apparmor, apparmor_profile) = apparmor_message(apparmor(pod, container))?;
    let capabilities = |c: Capabilities| pb::Capability {
        add_capabilities: c.add.unwrap_or_default(),
        drop_capabilities: c.drop.unwrap_or_default(),
        ..pb::Capability::default()
    };
    Ok(pb::LinuxContainerSecurityContext {
        capabilities: own.capabilities.clone().map(capabilities),
        privileged: privileged(container),
        namespace_options: Some(namespaces),
        run_as_user: if named {
            None
        } else {
            id(user.or(image_user.0).or(Some(0)))
        },
        run_as_group: id(own.run_as_group.or(of_pod.run_as_group)),
        run_as_username: if named {
            image_user.1.clone()
        } else {
            String::new()
        },
        readonly_rootfs: own.read_only_root_filesystem.unwrap_or(false),
        supplemental_groups: of_pod
            .supplemental_groups
            .iter()
            .flatten()
            .copied()
            .chain(of_pod.fs_group)
            .chain(extra_groups(pod, &prepared.groups))
            .collect(),
        no_new_privs: own.allow_privilege_escalation == Some(false),
        masked_paths: masked,
        supplemental_groups_policy: groups_policy(of_pod.supplemental_groups_policy.as_deref()),
        selinux_options: effective(
            own.se_linux_options.as_ref(),
            of_pod.se_linux_options.as_ref(),
        )
        .map(selinux),
        apparmor,
        apparmor_profile,
        readonly_paths: paths(READ_ONLY),
        seccomp: Some(seccomp(
            own.seccomp_profile
                .as_ref()
                .or(of_pod.seccomp_profile.as_ref()),
            node,
        )?),
        ..pb::LinuxContainerSecurityContext::default()
    })
}
/// The groups of the pod's persistent volumes that its supplementary groups lack.
fn extra_groups(pod: &Pod, of_volumes: &[i64]) -> BTreeSet<i64> {
    let context = pod::spec(pod).security_context.as_ref();
    let own = context.and_then(|c| c.supplemental_groups.as_ref());
    let is_new = |group: &&i64| !own.is_some_and(|own| own.contains(group));
    of_volumes.iter().filter(is_new).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The JSON field for a profile given as type and name.
    fn profile(text: &str) -> serde_json::Value {
        match text.split_once(' ') {
            _ if text.is_empty() => json!({}),
            None => json!({"appArmorProfile": {"type": text}}),
            Some((kind, name)) => {
                json!({"appArmorProfile": {"type": kind, "localhostProfile": name}})
            }
        }
    }

    #[test]
    fn apparmor_profiles_are_validated_as_by_the_kubelet() {
        let missing = "AppArmor is not enabled on the host";
        let empty = "invalid empty AppArmor profile name: \"&AppArmorProfile{Type:Localhost,LocalhostProfile:*,}\"";
        // The annotation, the pod's field, the container's field; the profile, and whether the pod requires AppArmor.
        for (annotation, of_pod, own, expected, needs) in [
            ("", "", "", "", false),
            ("", "RuntimeDefault", "", "RuntimeDefault", true),
            // The kubelet does not check whether any container still uses the pod's profile.
            ("", "RuntimeDefault", "Unconfined", "Unconfined", true),
            ("", "Unconfined", "", "Unconfined", false),
            ("", "Unconfined", "Localhost own", "Localhost own", true),
            ("", "", "Localhost ", "Localhost ", true),
            ("unconfined", "Unconfined", "", "Unconfined", false),
            ("runtime/default", "Unconfined", "", "RuntimeDefault", true),
            (
                "localhost/localhost/x",
                "",
                "",
                "Localhost localhost/x",
                true,
            ),
            ("localhost/", "", "", "Localhost ", true),
            ("runtime/default", "", "Unconfined", "Unconfined", true),
            // Not one of the three forms: it is ignored as a profile, but counts as present.
            ("own", "Unconfined", "", "Unconfined", true),
        ] {
            let mut pod = json!({"metadata": {"name": "p"}, "spec": {"securityContext": profile(of_pod),
                "containers": [{"name": "c", "securityContext": profile(own)}]}});
            if !annotation.is_empty() {
                pod["metadata"]["annotations"] = json!({format!("{OLD_ANNOTATION}c"): annotation});
            }
            let pod: Pod = serde_json::from_value(pod).expect("a pod");
            let what = format!("{annotation:?}, {of_pod:?}, {own:?}");
            let profile = apparmor(&pod, &pod::spec(&pod).containers[0]);
            let profile = profile.map_or(String::new(), |(kind, name)| match name {
                Some(name) => format!("{kind} {name}"),
                None => kind,
            });
            assert_eq!(profile, expected, "{what}");
            let without = apparmor_refusal(&pod, false);
            assert_eq!(without.as_deref(), needs.then_some(missing), "{what}");
            let with = apparmor_refusal(&pod, true);
            let refused = (expected == "Localhost ").then_some(empty);
            assert_eq!(with.as_deref(), refused, "{what}");
        }
    }
}
