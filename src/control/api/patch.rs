//! The patch formats: JSON patch (RFC 6902), merge patch (RFC 7386) and strategic merge
//! patch (`staging/src/k8s.io/apiserver/pkg/endpoints/handlers/patch.go`). Server-side
//! apply is rejected with 415: it is not implemented.

use json_patch::PatchOperation;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::object::{MAX_DEPTH, Size};
use strategic::merge_map;

mod strategic;

/// Maximum number of operations in a JSON patch.
const MAX_OPERATIONS: usize = 10_000;
/// Maximum number of bytes that the copies of a JSON patch may add, equal to the limit of a body. Upstream has such a
/// limit too (`JSONPatchMaxCopyBytes`).
const MAX_COPIED: usize = 3 << 20;
/// Maximum number of bytes that the operations of a JSON patch may add, copy and move in total.
const MAX_WALKED: usize = 16 << 20;
/// Maximum number of list elements that the operations may shift in total: an insertion
/// or removal shifts every element behind it.
const MAX_SHIFTED: usize = 8_000_000;

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
    /// Parses a content type.
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

/// Applies `patch` to a copy of `object`.
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
            let patch: json_patch::Patch = serde_json::from_value(patch.clone())
                .map_err(|e| ApiError::bad_request(format!("invalid JSON patch: {e}")))?;
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
                .ok_or_else(|| ApiError::internal("the stored value is not a JSON object"))?;
            merge_map(target, patch, "")?;
        }
    }
    Ok(result)
}

/// The accumulated cost of a JSON patch.
#[derive(Debug, Default)]
struct Cost {
    copied: usize,
    walked: usize,
    shifted: usize,
}

impl Cost {
    /// Adds the cost of an operation, before it is applied to `object`; fails if a limit is exceeded.
    fn add(&mut self, object: &Value, operation: &PatchOperation) -> Result<(), ApiError> {
        let (source, path) = match operation {
            PatchOperation::Add(add) => (Some(&add.value), Some(&add.path)),
            PatchOperation::Replace(replace) => (Some(&replace.value), Some(&replace.path)),
            PatchOperation::Copy(copy) => (object.pointer(copy.from.as_str()), Some(&copy.path)),
            PatchOperation::Move(from) => (object.pointer(from.from.as_str()), Some(&from.path)),
            PatchOperation::Remove(_) | PatchOperation::Test(_) => (None, None),
        };
        self.shifted += match operation {
            PatchOperation::Add(add) => elements_behind(object, add.path.as_str()),
            PatchOperation::Copy(copy) => elements_behind(object, copy.path.as_str()),
            PatchOperation::Move(from) => {
                elements_behind(object, from.from.as_str())
                    + elements_behind(object, from.path.as_str())
            }
            PatchOperation::Remove(remove) => elements_behind(object, remove.path.as_str()),
            PatchOperation::Replace(_) | PatchOperation::Test(_) => 0,
        };
        within("shifts", self.shifted, MAX_SHIFTED, "list elements")?;
        if let (Some(source), Some(path)) = (source, path) {
            let size = Size::of(source);
            self.walked += size.bytes;
            if matches!(operation, PatchOperation::Copy(_)) {
                self.copied += size.bytes;
            }
            within("copies", self.copied, MAX_COPIED, "bytes")?;
            within("handles", self.walked, MAX_WALKED, "bytes")?;
            let depth = size.depth + path.as_str().matches('/').count();
            within("nests", depth, MAX_DEPTH, "levels")?;
        }
        Ok(())
    }
}

/// The number of list elements at and behind the index in `path`; 0 if `path` does not name a list element.
fn elements_behind(object: &Value, path: &str) -> usize {
    let place = path.rsplit_once('/').and_then(|(list, index)| {
        let index: usize = index.parse().ok()?;
        Some(
            object
                .pointer(list)?
                .as_array()?
                .len()
                .saturating_sub(index),
        )
    });
    place.unwrap_or(0)
}

/// Rejects a JSON patch that exceeds a limit.
fn within(verb: &str, count: usize, limit: usize, unit: &str) -> Result<(), ApiError> {
    if count <= limit {
        return Ok(());
    }
    Err(ApiError::new(
        413,
        "RequestEntityTooLarge",
        format!("the JSON patch {verb} {count} {unit}, the limit is {limit}; send it in parts"),
    ))
}

/// Applies a JSON patch one operation at a time, so that its cost can be checked before each.
fn apply_operations(result: &mut Value, operations: &[PatchOperation]) -> Result<(), ApiError> {
    let mut cost = Cost::default();
    for operation in operations {
        cost.add(result, operation)?;
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

fn object_only(patch: &Value) -> Result<&Map<String, Value>, ApiError> {
    patch
        .as_object()
        .ok_or_else(|| ApiError::bad_request("the patch must be a JSON object"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_that_shift_long_lists_count_against_a_limit() {
        let object = json!({"list": vec![1; 200_000], "short": [1, 2, 3]});
        let patch = |count: usize, operation: &dyn Fn(usize) -> Value| {
            let operations: Vec<Value> = (0..count).map(operation).collect();
            apply(Format::Json, &object, &operations.into())
        };
        let add = |path: &'static str| move |_| json!({"op": "add", "path": path, "value": 0});
        let error = patch(9_999, &add("/list/0")).expect_err("refused");
        assert_eq!(error.code, 413);
        let (limit, words) = (MAX_SHIFTED.to_string(), "list elements");
        assert!(
            error.message.contains(&limit) && error.message.contains(words),
            "{}",
            error.message
        );
        let remove = |_| json!({"op": "remove", "path": "/list/0"});
        assert_eq!(patch(9_999, &remove).expect_err("refused").code, 413);
        let rotate = |_| json!({"op": "move", "from": "/list/0", "path": "/list/0"});
        assert_eq!(patch(9_999, &rotate).expect_err("refused").code, 413);
        // Operations that shift no elements are not counted.
        let appended = patch(9_999, &add("/list/-")).expect("applies");
        assert_eq!(appended["list"].as_array().map(Vec::len), Some(209_999));
        assert!(patch(2_000, &add("/short/0")).is_ok());
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
        /// All operations are applied or rejected as a client error; the result can always be parsed again.
        #[test]
        fn any_operations_are_applied_or_rejected(operations in vec(operation(), 0..60)) {
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

    /// Operations that double an object's size, or nest it deeper than the parser's limit.
    #[test]
    fn a_json_patch_may_grow_the_object_up_to_a_limit() {
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
    fn invalid_patches_are_rejected_with_upstreams_status_codes() {
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
