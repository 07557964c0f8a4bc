//! Mount points that a pod needs inside one of its volumes for other volumes (`pkg/volume/util/nested_volumes.go`).
//! Pure.
//!
//! Read-only volumes must contain these directories, because the runtime cannot create them.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use k8s_openapi::api::core::v1::{Pod, VolumeMount};

use crate::pod;

/// Paths within a volume where containers mount other volumes. Paths within another such path are omitted, because they
/// belong to the other volume.
#[must_use]
pub fn mount_points_within(pod: &Pod, volume: &str) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for (_, container) in pod::containers(pod) {
        let mounts: Vec<&VolumeMount> = container.volume_mounts.iter().flatten().collect();
        // The path of a `subPathExpr` mount is not known here, because it contains variables.
        let is_own = |m: &&&VolumeMount| m.name == volume && m.sub_path_expr.is_none();
        for own in mounts.iter().filter(is_own) {
            let part = Path::new(own.sub_path.as_deref().unwrap_or_default());
            let mut inside: Vec<&Path> = mounts
                .iter()
                .filter_map(|m| Path::new(&m.mount_path).strip_prefix(&own.mount_path).ok())
                .filter(|path| is_below(path))
                .collect();
            // Sorting puts outer paths first.
            inside.sort();
            let mut outermost: Vec<&Path> = vec![];
            for path in inside {
                if !outermost.iter().any(|outer| path.starts_with(outer)) {
                    outermost.push(path);
                }
            }
            let clean = |path: &Path| path.components().collect::<PathBuf>();
            found.extend(outermost.into_iter().map(|path| part.join(clean(path))));
        }
    }
    found
}

fn is_below(path: &Path) -> bool {
    let mut parts = path.components().peekable();
    parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn only_mounts_directly_within_a_volume_need_a_mount_point_there() {
        let of = |mounts: Value| {
            let spec = json!({"containers": [{"name": "c", "volumeMounts": mounts}]});
            let pod: Pod = serde_json::from_value(json!({"spec": spec})).expect("a pod");
            let found = mount_points_within(&pod, "v").into_iter();
            found
                .map(|path| path.display().to_string())
                .collect::<Vec<_>>()
        };
        let at = |name: &str, path: &str| json!({"name": name, "mountPath": path});
        let own = at("v", "/dir/");
        for (others, expected) in [
            (vec![], vec![]),
            (vec!["/dir2", "/other", "/"], vec![]),
            (vec!["/dir/nested"], vec!["nested"]),
            (vec!["/dir//a/./b/"], vec!["a/b"]),
            (
                vec![
                    "/dir/nested2",
                    "/dir/nested/double",
                    "/dir/nested-vol",
                    "/dir/nested",
                ],
                vec!["nested", "nested-vol", "nested2"],
            ),
            (vec!["/dir/../etc", "/dir/a/../../etc"], vec![]),
        ] {
            let others = others.into_iter().map(|path| at("w", path));
            let mounts: Vec<Value> = others.chain([own.clone()]).collect();
            assert_eq!(of(json!(mounts)), expected, "{mounts:?}");
        }
        let part = json!({"name": "v", "mountPath": "/dir", "subPath": "x/y"});
        assert_eq!(of(json!([part, at("w", "/dir/a")])), ["x/y/a"]);
        let named = json!({"name": "v", "mountPath": "/dir", "subPathExpr": "$(A)"});
        assert!(of(json!([named, at("w", "/dir/a")])).is_empty());
    }
}
