//! SELinux labels of volume mounts. A labelled mount avoids relabelling every file (KEP-1710). Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Pod, SELinuxOptions};

use crate::fault::Fault;
use crate::pod;

/// Whether an SELinux policy is loaded. `own` is the content of `/proc/self/attr/current`: before a policy is loaded,
/// every process has the kernel's initial label, and the runtime assigns no labels (`GetEnabled` in `go-selinux`).
#[must_use]
pub fn is_loaded(own: &str) -> bool {
    own.trim_end_matches(['\0', '\n']) != "kernel"
}

/// The label of container files in a policy's `lxc_contexts`, from the line `file = "…"`. Empty if the policy has none.
/// Then the runtime assigns no labels (`InitLabels` in `go-selinux`), so volumes must have none either.
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
    contexts.lines().find_map(value).unwrap_or_default()
}

/// A container's own options, or else the pod's; they are not merged (`DetermineEffectiveSecurityContext` in
/// `pkg/securitycontext/util.go`).
#[must_use]
pub fn effective<'a>(
    own: Option<&'a SELinuxOptions>,
    pod: Option<&'a SELinuxOptions>,
) -> Option<&'a SELinuxOptions> {
    own.or(pod)
}

/// Whether a part of a label is safe. Labels become mount options, so a part must not be able to add others.
fn is_plain(part: &str) -> bool {
    !part.is_empty()
        && part
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "_-.,:".contains(c))
}

/// The file label for processes with these options; `None` without a level, which the runtime then chooses.
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

/// The labels that a pod's containers request for a volume; `None` stands for options that leave the choice to the
/// runtime. Containers without options request nothing, and privileged containers count like others
/// (`GetPodVolumeNames` in `pkg/volume/util`). `files` is the policy's label of container files.
fn labels(pod: &Pod, volume: &str, files: &str) -> BTreeSet<Option<String>> {
    let of_pod = pod::spec(pod).security_context.as_ref();
    let containers = pod::containers(pod);
    let using = containers
        .iter()
        .filter(|(_, c)| c.volume_mounts.iter().flatten().any(|m| m.name == volume));
    using
        .filter_map(|(_, c)| {
            let own = c
                .security_context
                .as_ref()
                .and_then(|s| s.se_linux_options.as_ref());
            effective(own, of_pod.and_then(|s| s.se_linux_options.as_ref()))
        })
        .map(|options| label(options, files))
        .collect()
}

/// Whether the pod requires relabelling of every file.
fn is_recursive(pod: &Pod) -> bool {
    let of_pod = pod::spec(pod).security_context.as_ref();
    of_pod.and_then(|c| c.se_linux_change_policy.as_deref()) == Some("Recursive")
}

/// The label for mounting a volume, if its containers request one. Fails if they request different labels, or one of
/// them leaves the choice to the runtime.
pub fn wanted(pod: &Pod, volume: &str, files: &str) -> Result<Option<String>, Fault> {
    let labels = labels(pod, volume, files);
    if labels.len() > 1 {
        let all: Vec<&str> = labels
            .iter()
            .map(|l| l.as_deref().unwrap_or_default())
            .collect();
        return Err(Fault::invalid(format!(
            "multiple SELinux labels found: {}",
            all.join(",")
        )));
    }
    if is_recursive(pod) {
        return Ok(None);
    }
    Ok(labels.into_iter().next().flatten())
}

/// The label with which a volume is mounted. Only a volume that is exclusive to one pod has one, and only if all
/// containers that use it request the same label. `files` is the policy's label of container files.
#[must_use]
pub fn of_volume(pod: &Pod, volume: &str, modes: &[String], files: &str) -> Option<String> {
    if modes != ["ReadWriteOncePod"] {
        return None;
    }
    wanted(pod, volume, files).ok().flatten()
}

/// The access mode of a persistent volume in metrics: the widest one.
#[must_use]
pub fn access_mode(modes: &[String]) -> &'static str {
    let known = [
        ("ReadWriteMany", "RWX"),
        ("ReadOnlyMany", "ROX"),
        ("ReadWriteOnce", "RWO"),
        ("ReadWriteOncePod", SINGLE_POD),
    ];
    let mut known = known.into_iter();
    let found = known.find(|(mode, _)| modes.iter().any(|m| m == mode));
    found.map_or("", |(_, short)| short)
}

/// Metrics name of the access mode of volumes that are mounted with a label.
pub const SINGLE_POD: &str = "RWOP";
/// Metrics name of the access mode of volumes in the pod spec.
pub const INLINE: &str = "inline";

/// A volume in use by pods.
#[derive(Debug)]
struct Admitted {
    /// The label that the first pod requested; `None` if it requested none.
    label: Option<String>,
    pods: BTreeSet<String>,
}

/// Result of adding a pod to a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// No other pod uses the volume.
    New,
    /// Other pods use the volume with the same label, or this pod was added before.
    Same,
    /// Other pods use the volume with another label.
    Conflict(String),
}

/// The requested labels of all volumes that the pods of this node use.
#[derive(Debug, Default)]
pub struct Admissions(BTreeMap<String, Admitted>);

impl Admissions {
    /// Adds a pod to a volume with the label that the pod requests. If `strict`, a pod with another label is not added.
    pub fn admit(
        &mut self,
        volume: &str,
        uid: &str,
        label: Option<&str>,
        strict: bool,
    ) -> Admission {
        let Some(known) = self.0.get_mut(volume) else {
            let admitted = Admitted {
                label: label.map(Into::into),
                pods: [uid.to_owned()].into(),
            };
            self.0.insert(volume.to_owned(), admitted);
            return Admission::New;
        };
        if known.pods.contains(uid) || known.label.as_deref() == label {
            known.pods.insert(uid.to_owned());
            return Admission::Same;
        }
        if !strict {
            known.pods.insert(uid.to_owned());
        }
        let (has, wants) = (known.label.as_deref(), label);
        Admission::Conflict(format!(
            "conflicting SELinux labels of volume {volume}: {:?} and {:?}",
            has.unwrap_or_default(),
            wants.unwrap_or_default()
        ))
    }

    /// Removes a pod from all volumes.
    pub fn forget(&mut self, uid: &str) {
        self.0.retain(|_, admitted| {
            admitted.pods.remove(uid);
            !admitted.pods.is_empty()
        });
    }
}

/// The mount option for a label.
#[must_use]
pub fn option(label: &str) -> String {
    format!("context=\"{label}\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// A policy's label of container files.
    const POLICY: &str = "system_u:object_r:container_file_t:s0";

    #[test]
    fn selinux_options_of_a_container_override_those_of_its_pod() {
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
    fn only_volumes_of_one_pod_with_one_known_label_are_mounted_with_it() {
        let of = |modes: Value, context: Value, containers: Value| {
            let pod = serde_json::from_value(
                json!({"spec": {"securityContext": context, "containers": containers}}),
            )
            .expect("a pod");
            of_volume(
                &pod,
                "v",
                &serde_json::from_value::<Vec<String>>(modes).expect("modes"),
                POLICY,
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
            "other pods may use it with another label"
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
            None,
            "a privileged container counts like others"
        );
        let one_asks = json!([mounting(json!({})), mounting(level("s0:c1,c2"))]);
        assert_eq!(
            of(alone(), json!({}), one_asks),
            expected,
            "a container without options requests no label"
        );
    }

    #[test]
    fn labels_require_a_loaded_selinux_policy() {
        let contexts = "process = \"a:b:c:s0\"\n# file = \"x\"\nfile = \"u:r:t:s0\"\n";
        assert_eq!(files(contexts), "u:r:t:s0");
        assert_eq!(files(""), "", "the runtime has no labels");
        let options = SELinuxOptions {
            level: Some("s0:c1".into()),
            ..SELinuxOptions::default()
        };
        assert_eq!(label(&options, &files("")), None);
        assert!(is_loaded("system_u:system_r:kubelet_t:s0\0"));
        assert!(is_loaded(""), "another security module is active");
        assert!(!is_loaded("kernel\0") && !is_loaded("kernel"));
    }

    #[test]
    fn several_labels_for_one_volume_are_reported() {
        let context = |l: &str| json!({"seLinuxOptions": {"level": l}});
        let mounts = json!([{"name": "v", "mountPath": "/v"}]);
        let own =
            json!({"name": "c", "volumeMounts": mounts, "securityContext": context("s0:c3,c4")});
        let pods = json!({"name": "d", "volumeMounts": mounts});
        let spec = json!({"securityContext": context("s0:c1,c2"), "containers": [own, pods]});
        let pod = serde_json::from_value(json!({"spec": spec})).expect("a pod");
        assert_eq!(
            wanted(&pod, "v", "u:r:t:s0"),
            Err(Fault::invalid(
                "multiple SELinux labels found: u:r:t:s0:c1,c2,u:r:t:s0:c3,c4"
            ))
        );
        // The runtime's choice counts as different from a named label.
        let own = json!({"name": "c", "volumeMounts": mounts, "securityContext": {"seLinuxOptions": {"type": "t"}}});
        let spec = json!({"securityContext": context("s0:c1,c2"), "containers": [own, pods]});
        let mixed = serde_json::from_value(json!({"spec": spec})).expect("a pod");
        assert!(wanted(&mixed, "v", "u:r:t:s0").is_err());
        assert_eq!(wanted(&pod, "other", "u:r:t:s0"), Ok(None));
    }

    #[test]
    fn access_modes_have_short_names_with_the_widest_first() {
        for (modes, expected) in [
            (vec!["ReadWriteOnce", "ReadWriteMany"], "RWX"),
            (vec!["ReadWriteOnce", "ReadOnlyMany"], "ROX"),
            (vec!["ReadWriteOnce"], "RWO"),
            (vec!["ReadWriteOncePod"], "RWOP"),
            (vec![], ""),
        ] {
            let modes: Vec<String> = modes.into_iter().map(Into::into).collect();
            assert_eq!(access_mode(&modes), expected);
        }
    }

    #[test]
    fn a_conflicting_label_of_a_pod_is_reported_once() {
        let mut known = Admissions::default();
        assert_eq!(known.admit("v", "a", Some("x"), false), Admission::New);
        assert_eq!(known.admit("v", "a", Some("x"), false), Admission::Same);
        assert_eq!(known.admit("v", "b", Some("x"), false), Admission::Same);
        let conflict =
            Admission::Conflict("conflicting SELinux labels of volume v: \"x\" and \"\"".into());
        assert_eq!(known.admit("v", "c", None, false), conflict);
        assert_eq!(known.admit("v", "c", None, false), Admission::Same);
        assert_eq!(known.admit("v", "d", None, true), conflict);
        assert_eq!(
            known.admit("v", "d", None, true),
            conflict,
            "it is still not admitted"
        );
        for uid in ["a", "b", "c"] {
            known.forget(uid);
        }
        assert_eq!(known.admit("v", "d", None, true), Admission::New);
    }
}
