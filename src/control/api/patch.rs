//! The patch formats: JSON patch (RFC 6902), merge patch (RFC 7386) and strategic merge patch
//! (control-plane spec, 3.6). Server-side apply is refused with 415 until it is done properly.

use json_patch::PatchOperation;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::object::{MAX_DEPTH, Size};

/// The most operations of one JSON patch.
const MAX_OPERATIONS: usize = 10_000;
/// How many bytes the copies of one JSON patch may add: as many as a body may have (control-plane spec, 3.6).
const MAX_COPIED: usize = 3 << 20;
/// How many bytes its operations may add, copy and move in all.
const MAX_WALKED: usize = 64 << 20;

/// The format of a patch body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `application/json-patch+json`.
    Json,
    /// `application/merge-patch+json`.
    Merge,
    /// `application/strategic-merge-patch+json`.
    Strategic,
}

impl Format {
    /// From a content type.
    pub fn of(content_type: &str) -> Result<Format, ApiError> {
        match content_type.split(';').next().unwrap_or_default().trim() {
            "application/json-patch+json" => Ok(Format::Json),
            "application/merge-patch+json" => Ok(Format::Merge),
            "application/strategic-merge-patch+json" => Ok(Format::Strategic),
            "application/apply-patch+yaml" => Err(ApiError::new(
                415,
                "UnsupportedMediaType",
                "server-side apply is not supported by this server; use client-side apply (kubectl apply without --server-side)",
            )),
            _ => Err(ApiError::new(
                415,
                "UnsupportedMediaType",
                "415: Unsupported Media Type",
            )),
        }
    }
}

/// Applies `patch` to `object`, which is left as it was if the patch is refused.
pub fn apply(format: Format, object: &Value, patch: &Value) -> Result<Value, ApiError> {
    let mut result = object.clone();
    match format {
        Format::Json => {
            let operations = patch.as_array().ok_or_else(|| {
                ApiError::bad_request("a JSON patch must be an array of operations")
            })?;
            if operations.len() > MAX_OPERATIONS {
                return Err(ApiError::new(
                    413,
                    "RequestEntityTooLarge",
                    format!(
                        "The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {}",
                        operations.len()
                    ),
                ));
            }
            let patch: json_patch::Patch = serde_json::from_value(patch.clone()).map_err(|e| {
                ApiError::bad_request(format!("the JSON patch cannot be read: {e}"))
            })?;
            apply_operations(&mut result, &patch)?;
        }
        Format::Merge => {
            object_only(patch)?;
            json_patch::merge(&mut result, patch);
        }
        Format::Strategic => {
            let patch = object_only(patch)?;
            let target = result
                .as_object_mut()
                .ok_or_else(|| ApiError::internal("the stored object is not an object"))?;
            merge_map(target, patch, "")?;
        }
    }
    Ok(result)
}

/// Applies a JSON patch operation by operation, so that what copies make of a small patch stays bounded.
fn apply_operations(result: &mut Value, operations: &[PatchOperation]) -> Result<(), ApiError> {
    let (mut copied, mut walked) = (0, 0);
    for operation in operations {
        let (source, path) = match operation {
            PatchOperation::Add(add) => (Some(&add.value), Some(&add.path)),
            PatchOperation::Replace(replace) => (Some(&replace.value), Some(&replace.path)),
            PatchOperation::Copy(copy) => (result.pointer(copy.from.as_str()), Some(&copy.path)),
            PatchOperation::Move(from) => (result.pointer(from.from.as_str()), Some(&from.path)),
            PatchOperation::Remove(_) | PatchOperation::Test(_) => (None, None),
        };
        if let (Some(source), Some(path)) = (source, path) {
            let size = Size::of(source);
            walked += size.bytes;
            if matches!(operation, PatchOperation::Copy(_)) {
                copied += size.bytes;
            }
            if copied > MAX_COPIED {
                return Err(too_large(format!("copies more than {MAX_COPIED} bytes")));
            }
            if walked > MAX_WALKED {
                return Err(too_large(format!("handles more than {MAX_WALKED} bytes")));
            }
            if size.depth + path.as_str().matches('/').count() > MAX_DEPTH {
                return Err(too_large(format!("nests deeper than {MAX_DEPTH} levels")));
            }
        }
        json_patch::patch(result, std::slice::from_ref(operation)).map_err(|e| ApiError {
            details: json!({}),
            ..ApiError::new(
                422,
                "Invalid",
                format!("the server rejected our request due to an error in our request: {e}"),
            )
        })?;
    }
    Ok(())
}

fn too_large(what: String) -> ApiError {
    ApiError::new(
        413,
        "RequestEntityTooLarge",
        format!("the JSON patch {what}; send it in parts"),
    )
}

fn object_only(patch: &Value) -> Result<&Map<String, Value>, ApiError> {
    patch
        .as_object()
        .ok_or_else(|| ApiError::bad_request("the patch must be a JSON object"))
}

/// How a list is merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ListRule {
    /// The patch's list replaces the old one.
    Atomic,
    /// Objects matched by this key.
    Key(&'static str),
    /// Primitives, united.
    Set,
}

/// The rule of a list, by its name and the field around it (control-plane spec, the complete table).
fn list_rule(parent: &str, field: &str) -> ListRule {
    match (parent, field) {
        (_, "ownerReferences") => ListRule::Key("uid"),
        (_, "finalizers") if parent == "metadata" => ListRule::Set,
        (_, "podCIDRs") => ListRule::Set,
        (
            _,
            "containers"
            | "initContainers"
            | "ephemeralContainers"
            | "volumes"
            | "schedulingGates"
            | "resourceClaims",
        ) => ListRule::Key("name"),
        ("spec", "imagePullSecrets") => ListRule::Key("name"),
        (_, "env") => ListRule::Key("name"),
        ("containers" | "initContainers" | "ephemeralContainers", "ports") => {
            ListRule::Key("containerPort")
        }
        ("spec", "ports") => ListRule::Key("port"),
        (_, "volumeMounts") => ListRule::Key("mountPath"),
        (_, "volumeDevices") => ListRule::Key("devicePath"),
        (_, "hostAliases" | "podIPs" | "hostIPs") => ListRule::Key("ip"),
        (_, "topologySpreadConstraints") => ListRule::Key("topologyKey"),
        ("status", "conditions" | "addresses") => ListRule::Key("type"),
        (_, "secrets") => ListRule::Key("name"),
        (_, "resourceClaimStatuses" | "allocatedResourcesStatus") => ListRule::Key("name"),
        _ => ListRule::Atomic,
    }
}

fn unknown_directive(directive: &Value, map: &Map<String, Value>) -> ApiError {
    let text = directive.as_str().unwrap_or_default();
    ApiError::new(
        500,
        "",
        format!(
            "unknown patch type: {text} in map: {}",
            Value::Object(map.clone())
        ),
    )
}

fn merge_map(
    target: &mut Map<String, Value>,
    patch: &Map<String, Value>,
    parent: &str,
) -> Result<(), ApiError> {
    match patch.get("$patch") {
        None => {}
        Some(Value::String(d)) if d == "merge" => {}
        Some(Value::String(d)) if d == "replace" => {
            *target = patch
                .iter()
                .filter(|(k, _)| *k != "$patch")
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect();
            return Ok(());
        }
        Some(Value::String(d)) if d == "delete" => {
            target.clear();
            return Ok(());
        }
        Some(other) => return Err(unknown_directive(other, patch)),
    }
    if let Some(keep) = patch.get("$retainKeys").and_then(Value::as_array) {
        target.retain(|key, _| keep.iter().any(|k| k == key));
    }
    for (key, value) in patch {
        if let Some(field) = key.strip_prefix("$deleteFromPrimitiveList/") {
            let gone = value.as_array().map_or(&[][..], Vec::as_slice);
            if let Some(list) = target.get_mut(field).and_then(Value::as_array_mut) {
                list.retain(|item| !gone.contains(item));
            }
            continue;
        }
        if key.starts_with('$') {
            continue;
        }
        match value {
            Value::Null => {
                target.remove(key);
            }
            Value::Object(map) => {
                let slot = target.entry(key.clone()).or_insert_with(|| json!({}));
                if !slot.is_object() {
                    *slot = json!({});
                }
                if let Some(inner) = slot.as_object_mut() {
                    merge_map(inner, map, key)?;
                }
            }
            Value::Array(items) => {
                let order = patch
                    .get(&format!("$setElementOrder/{key}"))
                    .and_then(Value::as_array);
                let old = target
                    .get(key)
                    .and_then(Value::as_array)
                    .cloned()
                    .unwrap_or_default();
                let merged = merge_list(old, items, parent, key, order)?;
                target.insert(key.clone(), merged.into());
            }
            other => {
                target.insert(key.clone(), other.clone());
            }
        }
    }
    // An order without a list moves what is there.
    for (key, value) in patch {
        if let (Some(field), Some(order)) =
            (key.strip_prefix("$setElementOrder/"), value.as_array())
            && !patch.contains_key(field)
            && let Some(list) = target.get_mut(field).and_then(Value::as_array_mut)
        {
            let old = std::mem::take(list);
            *list = in_order(&old, old.clone(), vec![], order, list_rule(parent, field));
        }
    }
    Ok(())
}

fn merge_list(
    old: Vec<Value>,
    patch: &[Value],
    parent: &str,
    field: &str,
    order: Option<&Vec<Value>>,
) -> Result<Vec<Value>, ApiError> {
    let directive =
        |item: &Value, what: &str| item.get("$patch").and_then(Value::as_str) == Some(what);
    let plain = || {
        patch
            .iter()
            .filter(|i| i.get("$patch").is_none())
            .cloned()
            .collect::<Vec<_>>()
    };
    if patch.iter().any(|item| directive(item, "replace")) {
        return Ok(plain());
    }
    let rule = list_rule(parent, field);
    match rule {
        ListRule::Atomic => Ok(patch.to_vec()),
        ListRule::Set => {
            let order = order.map_or(patch, Vec::as_slice);
            Ok(in_order(&old, old.clone(), patch.to_vec(), order, rule))
        }
        ListRule::Key(key) => {
            let mut kept = old.clone();
            let mut added = Vec::new();
            let mut patched = Vec::new();
            for item in patch {
                let map = item.as_object().ok_or_else(|| {
                    ApiError::bad_request(format!(
                        "{field}: every element of the patch must be an object"
                    ))
                })?;
                let id = map.get(key).ok_or_else(|| {
                    ApiError::new(
                        500,
                        "",
                        format!("map: {item} does not contain declared merge key: {key}"),
                    )
                })?;
                if directive(item, "delete") {
                    kept.retain(|have| have.get(key) != Some(id));
                    continue;
                }
                patched.push(item.clone());
                let place = kept.iter().position(|have| have.get(key) == Some(id));
                if let Some(target) = place.and_then(|p| kept[p].as_object_mut()) {
                    merge_map(target, map, field)?;
                } else {
                    let mut fresh = Map::new();
                    merge_map(&mut fresh, map, field)?;
                    added.push(Value::Object(fresh));
                }
            }
            let order = order.map_or(&patched[..], Vec::as_slice);
            Ok(in_order(&old, kept, added, order, rule))
        }
    }
}

/// Joins what was in a list and what is added to it. Elements named in `order` (`$setElementOrder`, or else the patch's own
/// list) come in that order; each of the others stays before those that it stood before in `old`, and otherwise comes last.
/// (apimachinery `strategicpatch`: the directive first, then the order of the patch, then the stored one.)
fn in_order(
    old: &[Value],
    kept: Vec<Value>,
    added: Vec<Value>,
    order: &[Value],
    rule: ListRule,
) -> Vec<Value> {
    let same = |a: &Value, b: &Value| match rule {
        ListRule::Key(key) => a.get(key) == b.get(key),
        _ => a == b,
    };
    let place = |list: &[Value], item: &Value| list.iter().position(|have| same(have, item));
    let mut all = kept;
    for item in added {
        if place(&all, &item).is_none() {
            all.push(item);
        }
    }
    let (mut named, others): (Vec<Value>, Vec<Value>) = all
        .into_iter()
        .partition(|item| place(order, item).is_some());
    named.sort_by_key(|item| place(order, item));
    let mut others = others.into_iter().peekable();
    let mut result = Vec::new();
    for item in named {
        let stood = place(old, &item);
        while let Some(other) = others.next_if(|other| {
            let before = place(old, other).zip(stood);
            before.is_some_and(|(other, item)| other < item)
        }) {
            result.push(other);
        }
        result.push(item);
    }
    result.extend(others);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strategic(object: Value, patch: Value) -> Value {
        apply(Format::Strategic, &object, &patch).expect("applies")
    }

    #[test]
    fn strategic_merge_follows_the_merge_keys() {
        let pod = json!({"spec": {"containers": [
            {"name": "a", "image": "x", "args": ["1"], "env": [{"name": "E", "value": "1"}]},
            {"name": "b", "image": "y"}]}});
        let cases = [
            (
                "merge by name",
                json!({"spec": {"containers": [{"name": "a", "image": "z"}]}}),
                "/spec/containers/0/image",
                json!("z"),
            ),
            (
                "others stay",
                json!({"spec": {"containers": [{"name": "a", "image": "z"}]}}),
                "/spec/containers/1/image",
                json!("y"),
            ),
            (
                "atomic list",
                json!({"spec": {"containers": [{"name": "a", "args": ["2"]}]}}),
                "/spec/containers/0/args",
                json!(["2"]),
            ),
            (
                "nested key",
                json!({"spec": {"containers": [{"name": "a", "env": [{"name": "E", "value": "2"}]}]}}),
                "/spec/containers/0/env",
                json!([{"name": "E", "value": "2"}]),
            ),
            (
                "new ones first",
                json!({"spec": {"containers": [{"name": "c"}]}}),
                "/spec/containers/0/name",
                json!("c"),
            ),
            (
                "given order",
                json!({"spec": {"$setElementOrder/containers": [{"name": "a"}, {"name": "b"}, {"name": "c"}], "containers": [{"name": "c"}]}}),
                "/spec/containers/2/name",
                json!("c"),
            ),
            (
                "delete",
                json!({"spec": {"containers": [{"name": "a", "$patch": "delete"}]}}),
                "/spec/containers",
                json!([{"name": "b", "image": "y"}]),
            ),
            (
                "replace",
                json!({"spec": {"containers": [{"$patch": "replace"}, {"name": "n"}]}}),
                "/spec/containers",
                json!([{"name": "n"}]),
            ),
        ];
        for (what, patch, path, expected) in cases {
            assert_eq!(
                strategic(pod.clone(), patch).pointer(path),
                Some(&expected),
                "{what}"
            );
        }
    }

    #[test]
    fn strategic_merge_of_maps_and_sets() {
        assert_eq!(
            strategic(json!({"a": {"x": 1, "y": 2}}), json!({"a": {"x": null}})),
            json!({"a": {"y": 2}})
        );
        assert_eq!(
            strategic(
                json!({"spec": {"strategy": {"type": "R", "rollingUpdate": {}}}}),
                json!({"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}})
            ),
            json!({"spec": {"strategy": {"type": "Recreate"}}})
        );
        assert_eq!(
            strategic(
                json!({"metadata": {"finalizers": ["a", "b"]}}),
                json!({"metadata": {"finalizers": ["c"], "$deleteFromPrimitiveList/finalizers": ["a"]}})
            ),
            json!({"metadata": {"finalizers": ["c", "b"]}})
        );
        let addresses = json!({"status": {"addresses": [{"type": "Hostname", "address": "old"}]}});
        let patch = json!({"status": {"addresses": [{"type": "InternalIP", "address": "1"}, {"$patch": "replace"}]}});
        assert_eq!(
            strategic(addresses, patch),
            json!({"status": {"addresses": [{"type": "InternalIP", "address": "1"}]}})
        );
    }

    use proptest::collection::vec;
    use proptest::prelude::*;

    fn operation() -> impl Strategy<Value = Value> {
        let path = || {
            proptest::sample::select(vec![
                "", "/a", "/b", "/l", "/l/0", "/l/-", "/a/a", "/b/a/b", "/~0", "/l/01", "x",
            ])
        };
        let value = proptest::sample::select(vec![
            json!(null),
            json!(1),
            json!("text"),
            json!([]),
            json!({"a": {"b": [1]}}),
        ]);
        let kind = proptest::sample::select(vec![
            "add", "remove", "replace", "move", "copy", "test", "other",
        ]);
        (kind, path(), path(), value).prop_map(
            |(op, from, path, value)| json!({"op": op, "from": from, "path": path, "value": value}),
        )
    }

    proptest! {
        /// Any operations are applied or refused as the client's fault; an object stays within what can be read again.
        #[test]
        fn any_operations_are_applied_or_refused(operations in vec(operation(), 0..60)) {
            let object = json!({"a": {"a": 1}, "b": {}, "l": [1, 2]});
            match apply(Format::Json, &object, &operations.into()) {
                Ok(patched) => {
                    let size = Size::of(&patched);
                    prop_assert!(size.depth <= MAX_DEPTH && size.bytes <= MAX_COPIED + MAX_WALKED);
                }
                Err(error) => prop_assert!((400..500).contains(&error.code), "{}", error.message),
            }
        }
    }

    /// What doubles with every operation, and what nests deeper than anybody could read it again.
    #[test]
    fn json_patches_grow_within_bounds() {
        let code = |patch: Value| {
            let object = json!({"a": "x".repeat(1000), "list": [], "b": {}, "c": {}});
            apply(Format::Json, &object, &patch)
                .map_err(|e| e.code)
                .map(|v| v.to_string().len())
        };
        let copies = |count: usize| {
            let doubling =
                (0..count).map(|_| json!({"op": "copy", "from": "/list", "path": "/list/-"}));
            let first = json!({"op": "copy", "from": "/a", "path": "/list/-"});
            Value::from(std::iter::once(first).chain(doubling).collect::<Vec<_>>())
        };
        assert!(code(copies(3)).is_ok());
        assert_eq!(code(copies(30)), Err(413));
        let nested = |count: usize| {
            let pair = |i: usize| {
                let (from, to) = if i.is_multiple_of(2) {
                    ("/b", "/c")
                } else {
                    ("/c", "/b")
                };
                [
                    json!({"op": "add", "path": to, "value": {}}),
                    json!({"op": "move", "from": from, "path": format!("{to}/x")}),
                ]
            };
            Value::from((0..count).flat_map(pair).collect::<Vec<_>>())
        };
        assert!(code(nested(50)).is_ok());
        assert_eq!(code(nested(3000)), Err(413));
    }

    #[test]
    fn an_order_puts_its_elements_where_it_says() {
        let object = json!({"spec": {"containers": [{"name": "a"}, {"name": "server"}, {"name": "b"}, {"name": "c"}]}});
        let names = |patch: Value| {
            let merged = strategic(object.clone(), patch);
            let names: Vec<String> = merged["spec"]["containers"]
                .as_array()
                .expect("a list")
                .iter()
                .map(|c| c["name"].as_str().unwrap_or_default().to_owned())
                .collect();
            names.join(" ")
        };
        let order = |names: &[&str]| -> Value {
            names
                .iter()
                .map(|n| json!({"name": n}))
                .collect::<Vec<_>>()
                .into()
        };
        // What the order does not name stays before what it stood before.
        assert_eq!(
            names(json!({"spec": {"$setElementOrder/containers": order(&["c", "b", "a"])}})),
            "server c b a"
        );
        // Without the directive the patch's own order counts.
        assert_eq!(
            names(json!({"spec": {"containers": [{"name": "b"}, {"name": "new"}, {"name": "a"}]}})),
            "server b new a c"
        );
        assert_eq!(
            names(
                json!({"spec": {"$setElementOrder/containers": order(&["a", "new", "b", "c"]), "containers": [{"name": "new"}]}})
            ),
            "a new server b c"
        );
    }

    #[test]
    fn bad_patches_are_refused_with_the_right_code() {
        let object = json!({"spec": {"containers": [{"name": "a"}]}});
        let code = |format, patch: Value| apply(format, &object, &patch).expect_err("refused").code;
        assert_eq!(
            code(
                Format::Strategic,
                json!({"spec": {"containers": [{"image": "x"}]}})
            ),
            500
        );
        assert_eq!(
            code(Format::Strategic, json!({"spec": {"$patch": "bogus"}})),
            500
        );
        assert_eq!(code(Format::Strategic, json!([1])), 400);
        assert_eq!(code(Format::Json, json!({})), 400);
        assert_eq!(
            code(
                Format::Json,
                json!([{"op": "test", "path": "/spec", "value": 1}])
            ),
            422
        );
    }
}
