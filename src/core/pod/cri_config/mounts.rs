//! The part of volume mounts that does not depend on the machine (`makeMounts` in `pkg/kubelet/kubelet_pods.go`). Pure.

use holdfast_proto::cri as pb;
use k8s_openapi::api::core::v1::{Container, VolumeMount};

use super::{Node, privileged};
use crate::fault::Fault;
use crate::pod::env;
use crate::pod::quoted::quoted;

/// Whether a mount is recursively read-only (KEP-3857; `resolveRecursiveReadOnly` in `pkg/kubelet/kubelet_pods.go`). A
/// mount that is writable or has propagation is an error in both modes. Missing support of the runtime is an error only
/// if the mode is `Enabled`.
pub fn recursive_read_only(mount: &VolumeMount, is_supported: bool) -> Result<bool, Fault> {
    let Some(mode) = mount
        .recursive_read_only
        .as_deref()
        .filter(|mode| *mode != "Disabled")
    else {
        return Ok(false);
    };
    let volume = quoted(&mount.name);
    let refused = |why: &str| {
        Err(Fault::invalid(format!(
            "volume {volume} requested recursive read-only mode, but it is {why}"
        )))
    };
    if mount.read_only != Some(true) {
        return refused("not read-only");
    }
    if let Some(other) = mount.mount_propagation.as_deref().filter(|p| *p != "None") {
        return refused(&format!(
            "not compatible with propagation {}",
            quoted(other)
        ));
    }
    match mode {
        "IfPossible" => Ok(is_supported),
        "Enabled" if is_supported => Ok(true),
        "Enabled" => refused("not supported by the runtime"),
        other => Err(Fault::invalid(format!(
            "unknown recursive read-only mode {}",
            quoted(other)
        ))),
    }
}

/// The propagation of mounts between a container and the machine (`translateMountPropagation` in
/// `pkg/kubelet/kubelet_pods.go`).
fn propagation(mount: &VolumeMount) -> Result<pb::MountPropagation, Fault> {
    match mount.mount_propagation.as_deref() {
        None | Some("None") => Ok(pb::MountPropagation::PropagationPrivate),
        Some("HostToContainer") => Ok(pb::MountPropagation::PropagationHostToContainer),
        Some("Bidirectional") => Ok(pb::MountPropagation::PropagationBidirectional),
        Some(other) => Err(Fault::invalid(format!(
            "invalid MountPropagation mode: {}",
            quoted(other)
        ))),
    }
}

/// The path in the volume to mount. `None` means the whole volume. The error is a `CreateContainerConfigError` with the
/// kubelet's message. Expanded paths must be checked here, as API validation does not know them.
pub fn sub_path(mount: &VolumeMount, env: &[(String, Vec<u8>)]) -> Result<Option<String>, Fault> {
    let path = match mount.sub_path_expr.as_deref().filter(|e| !e.is_empty()) {
        Some(expression) => env::expand_all(expression, |name| env::text_of(env, name))?,
        None => mount.sub_path.clone().unwrap_or_default(),
    };
    if path.starts_with('/') {
        return Err(Fault::invalid(format!(
            "error SubPath `{path}` must not be an absolute path"
        )));
    }
    if path.split('/').any(|part| part == "..") {
        return Err(Fault::invalid(format!(
            "unable to provision SubPath `{path}`: must not contain '..'"
        )));
    }
    Ok(Some(path).filter(|path| !path.is_empty()))
}

/// The absolute path of a mount in the container. The API also accepts relative paths.
fn absolute(path: &str) -> String {
    match path.starts_with('/') {
        true => path.to_owned(),
        false => format!("/{path}"),
    }
}

/// Builds the part of a mount that does not depend on the machine. The error is a `CreateContainerConfigError`.
pub fn volume_mount(
    mount: &VolumeMount,
    container: &Container,
    node: &Node,
) -> Result<pb::Mount, Fault> {
    let propagation = propagation(mount)?;
    if propagation == pb::MountPropagation::PropagationBidirectional && !privileged(container) {
        // An apiserver rejects this; a static pod has not been validated.
        return Err(Fault::invalid(
            "Bidirectional mount propagation is available only to privileged containers",
        ));
    }
    let propagation = propagation as i32;
    let recursive_read_only = recursive_read_only(mount, node.recursive_read_only)
        .map_err(|why| why.context("failed to resolve recursive read-only mode"))?;
    Ok(pb::Mount {
        container_path: absolute(&mount.mount_path),
        readonly: mount.read_only == Some(true),
        recursive_read_only,
        propagation,
        ..pb::Mount::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::sync::Arc;

    fn container(is_privileged: bool) -> Container {
        let context = json!({"privileged": is_privileged});
        serde_json::from_value(json!({"name": "c", "securityContext": context}))
            .expect("a container")
    }

    fn made(mut mount: Value, is_supported: bool) -> Result<(bool, i32), Fault> {
        mount["name"] = json!("v");
        mount["mountPath"] = json!("/v");
        let mount: VolumeMount = serde_json::from_value(mount).expect("a mount");
        let node = Node {
            recursive_read_only: is_supported,
            ..Node::new(Arc::default())
        };
        volume_mount(&mount, &container(true), &node)
            .map(|made| (made.recursive_read_only, made.propagation))
    }

    #[test]
    fn impossible_recursive_read_only_mounts_are_rejected_also_with_if_possible() {
        let refused = "failed to resolve recursive read-only mode: volume \"v\" requested recursive read-only mode, but it is ";
        for mode in ["IfPossible", "Enabled"] {
            for (more, why) in [
                (json!({}), "not read-only"),
                (json!({"readOnly": false}), "not read-only"),
                (
                    json!({"readOnly": true, "mountPropagation": "HostToContainer"}),
                    "not compatible with propagation \"HostToContainer\"",
                ),
                (
                    json!({"readOnly": true, "mountPropagation": "Bidirectional"}),
                    "not compatible with propagation \"Bidirectional\"",
                ),
            ] {
                let mut mount = more.clone();
                mount["recursiveReadOnly"] = json!(mode);
                assert_eq!(
                    made(mount, true),
                    Err(Fault::invalid(format!("{refused}{why}"))),
                    "{more}"
                );
            }
        }
        let of = |mode: &str, propagation: Value, is_supported| {
            let mount = json!({"readOnly": true, "recursiveReadOnly": mode, "mountPropagation": propagation});
            made(mount, is_supported).map(|(recursive, _)| recursive)
        };
        for propagation in [json!(null), json!("None")] {
            assert_eq!(of("IfPossible", propagation.clone(), true), Ok(true));
            assert_eq!(of("IfPossible", propagation.clone(), false), Ok(false));
            assert_eq!(of("Enabled", propagation.clone(), true), Ok(true));
            assert_eq!(of("Disabled", propagation.clone(), true), Ok(false));
            assert_eq!(
                of("Enabled", propagation, false),
                Err(Fault::invalid(format!(
                    "{refused}not supported by the runtime"
                )))
            );
        }
        assert_eq!(of("Disabled", json!("Bidirectional"), true), Ok(false));
        assert_eq!(
            of("Perhaps", json!(null), true),
            Err(Fault::invalid(
                "failed to resolve recursive read-only mode: unknown recursive read-only mode \"Perhaps\""
            ))
        );
    }

    #[test]
    fn an_unknown_mount_propagation_is_rejected() {
        let of = |mode: Value| made(json!({"mountPropagation": mode}), true).map(|(_, p)| p);
        assert_eq!(of(json!(null)), Ok(0));
        assert_eq!(of(json!("None")), Ok(0));
        assert_eq!(of(json!("HostToContainer")), Ok(1));
        assert_eq!(of(json!("Bidirectional")), Ok(2));
        let mount = json!({"name": "v", "mountPath": "/v", "mountPropagation": "Bidirectional"});
        let mount: VolumeMount = serde_json::from_value(mount).expect("a mount");
        let plain = volume_mount(&mount, &container(false), &Node::new(Arc::default()));
        assert!(plain.is_err_and(|e| e.message.contains("only to privileged containers")));
        for unknown in ["", "Private", "hosttocontainer"] {
            assert_eq!(
                of(json!(unknown)),
                Err(Fault::invalid(format!(
                    "invalid MountPropagation mode: {unknown:?}"
                )))
            );
        }
    }

    #[test]
    fn a_volume_is_mounted_at_an_absolute_path() {
        for (requested, at) in [("/data", "/data"), ("data/x", "/data/x")] {
            let mount = json!({"name": "v", "mountPath": requested});
            let mount: VolumeMount = serde_json::from_value(mount).expect("a mount");
            let made = volume_mount(&mount, &container(false), &Node::new(Arc::default()));
            let made = made.expect("made");
            assert_eq!(made.container_path, at);
        }
    }

    #[test]
    fn a_sub_path_stays_within_its_volume_whatever_it_expands_to() {
        let of = |expression: &str, plain: &str| {
            let mount = json!({"name": "v", "mountPath": "/v", "subPathExpr": expression, "subPath": plain});
            let env = [
                ("POD", "p"),
                ("UP", "../x"),
                ("ROOT", "/etc"),
                ("EMPTY", ""),
            ]
            .map(|(name, value)| (name.to_owned(), value.as_bytes().to_vec()));
            sub_path(&serde_json::from_value(mount).expect("a mount"), &env)
        };
        let some = |path: &str| Ok(Some(path.to_owned()));
        assert_eq!(of("", ""), Ok(None));
        assert_eq!(of("", "a/..b"), some("a/..b"));
        assert_eq!(of("logs/$(POD)", "other"), some("logs/p"));
        assert_eq!(of("$$(POD)/$(", ""), some("$(POD)/$("));
        for (expression, plain, refused) in [
            (
                "",
                "/etc",
                "error SubPath `/etc` must not be an absolute path",
            ),
            (
                "$(ROOT)/x",
                "",
                "error SubPath `/etc/x` must not be an absolute path",
            ),
            (
                "",
                "a/..",
                "unable to provision SubPath `a/..`: must not contain '..'",
            ),
            (
                "$(POD)/$(UP)",
                "",
                "unable to provision SubPath `p/../x`: must not contain '..'",
            ),
            ("$(EMPTY)", "", "missing value for EMPTY"),
            (
                "$(Z)/$(POD)/$(A)/$(Z)$(EMPTY)",
                "",
                "missing value for A, EMPTY, Z",
            ),
        ] {
            let fault = of(expression, plain).expect_err("a rejection");
            assert_eq!(fault.message, refused);
        }
    }
}
