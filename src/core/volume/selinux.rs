//! The SELinux label that a volume is mounted with, so that nobody has to relabel it file by file (KEP-1710; kubelet
//! spec, 9.7). Pure.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Pod, SELinuxOptions};

use crate::core::pod;

/// The label that containers' files have where a policy does not say otherwise.
const FILES: &str = "system_u:object_r:container_file_t:s0";

/// What a policy says of containers' files: the line `file = "…"` of its `lxc_contexts`.
#[must_use]
pub fn files(contexts: &str) -> String {
    let value = |line: &str| {
        Some(
            line.trim()
                .strip_prefix("file")?
                .trim_start()
                .strip_prefix('=')?
                .trim()
                .trim_matches('"')
                .to_owned(),
        )
    };
    contexts
        .lines()
        .find_map(value)
        .unwrap_or_else(|| FILES.into())
}

/// A container's options, else its pod's: they are not mixed (`securitycontext.DetermineEffectiveSecurityContext`).
#[must_use]
pub fn effective<'a>(
    own: Option<&'a SELinuxOptions>,
    pod: Option<&'a SELinuxOptions>,
) -> Option<&'a SELinuxOptions> {
    own.or(pod)
}

/// Whether a part of a label is one: it becomes a part of a mount's options, and may add none.
fn is_plain(part: &str) -> bool {
    !part.is_empty()
        && part
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "_-.,:".contains(c))
}

/// The label of what processes with these options may use. None without a level, which the runtime then chooses itself.
fn label(options: &SELinuxOptions, files: &str) -> Option<String> {
    let mut parts = files.splitn(4, ':');
    let (user, role, kind) = (parts.next()?, parts.next()?, parts.next()?);
    let level = options.level.as_deref().filter(|level| is_plain(level))?;
    let user = options
        .user
        .as_deref()
        .filter(|u| !u.is_empty())
        .unwrap_or(user);
    is_plain(user).then(|| format!("{user}:{role}:{kind}:{level}"))
}

/// The label that a volume is mounted with: if one pod alone may use it, and all its containers that do have the same
/// one. `files` is the policy's label of containers' files.
#[must_use]
pub fn of_volume(pod: &Pod, volume: &str, modes: &[String], files: &str) -> Option<String> {
    let spec = pod::spec(pod);
    let of_pod = spec.security_context.as_ref();
    if modes != ["ReadWriteOncePod"]
        || of_pod.and_then(|c| c.se_linux_change_policy.as_deref()) == Some("Recursive")
    {
        return None;
    }
    let containers = pod::containers(pod);
    let using = containers
        .iter()
        .filter(|(_, c)| c.volume_mounts.iter().flatten().any(|m| m.name == volume));
    let confined =
        using.filter(|(_, c)| c.security_context.as_ref().and_then(|s| s.privileged) != Some(true));
    let labels: BTreeSet<Option<String>> = confined
        .map(|(_, c)| {
            let own = c
                .security_context
                .as_ref()
                .and_then(|s| s.se_linux_options.as_ref());
            effective(own, of_pod.and_then(|s| s.se_linux_options.as_ref()))
                .and_then(|options| label(options, files))
        })
        .collect();
    if labels.len() == 1 {
        labels.into_iter().next().flatten()
    } else {
        None
    }
}

/// The option of a mount that says so.
#[must_use]
pub fn option(label: &str) -> String {
    format!("context=\"{label}\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_containers_options_take_the_place_of_its_pods() {
        let options = |level: Option<&str>, kind: Option<&str>| SELinuxOptions {
            level: level.map(Into::into),
            type_: kind.map(Into::into),
            ..SELinuxOptions::default()
        };
        let (own, pod) = (options(None, Some("t")), options(Some("s0"), None));
        assert_eq!(effective(Some(&own), Some(&pod)), Some(&own), "whole");
        assert_eq!(effective(None, Some(&pod)), Some(&pod));
    }

    #[test]
    fn only_what_one_pod_uses_with_one_known_label_is_mounted_with_it() {
        let of = |modes: Value, context: Value, containers: Value| {
            let pod = serde_json::from_value(
                json!({"spec": {"securityContext": context, "containers": containers}}),
            )
            .expect("a pod");
            of_volume(
                &pod,
                "v",
                &serde_json::from_value::<Vec<String>>(modes).expect("modes"),
                &files(""),
            )
        };
        let alone = || json!(["ReadWriteOncePod"]);
        let level = |l: &str| json!({"seLinuxOptions": {"level": l}});
        let mounting = |context: Value| json!({"name": "c", "securityContext": context, "volumeMounts": [{"name": "v", "mountPath": "/v"}]});
        let one = json!([mounting(json!({}))]);
        let expected = Some("system_u:object_r:container_file_t:s0:c1,c2".to_owned());
        assert_eq!(of(alone(), level("s0:c1,c2"), one.clone()), expected);
        assert_eq!(
            of(json!(["ReadWriteOnce"]), level("s0:c1,c2"), one.clone()),
            None,
            "others may use it with another label"
        );
        assert_eq!(
            of(alone(), json!({}), one.clone()),
            None,
            "the runtime chooses"
        );
        let recursive =
            json!({"seLinuxOptions": {"level": "s0:c1,c2"}, "seLinuxChangePolicy": "Recursive"});
        assert_eq!(of(alone(), recursive, one.clone()), None);
        assert_eq!(
            of(alone(), level("s0\",suid,x=\""), one),
            None,
            "a label adds no option"
        );
        let two = json!([mounting(json!({})), mounting(level("s0:c3,c4"))]);
        assert_eq!(of(alone(), level("s0:c1,c2"), two), None, "two labels");
        let privileged = json!([
            mounting(json!({})),
            mounting(json!({"privileged": true, "seLinuxOptions": {"level": "s0:c3,c4"}}))
        ]);
        assert_eq!(
            of(alone(), level("s0:c1,c2"), privileged),
            expected,
            "a privileged container may use anything"
        );
        assert_eq!(
            files("process = \"a:b:c:s0\"\nfile = \"u:r:t:s0\"\n"),
            "u:r:t:s0"
        );
    }
}
