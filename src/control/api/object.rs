//! Reads and writes fields of objects as JSON values.

use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::resources::Resource;
use crate::store::Attrs;

/// Maximum nesting depth of an object, below serde_json's recursion limit of 128.
pub(crate) const MAX_DEPTH: usize = 100;
/// Maximum size of an object, in bytes of JSON. Bodies have the same limit, but repeated patches can grow an object.
pub(crate) const MAX_SIZE: usize = 3 << 20;

/// The size of a value.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Approximate number of bytes as JSON.
    pub bytes: usize,
    /// Nesting depth; values beyond [`MAX_DEPTH`] are not counted.
    pub depth: usize,
}

impl Size {
    /// Measures a value.
    #[must_use]
    pub fn of(value: &Value) -> Size {
        let mut size = Size::default();
        size.add(value, 1);
        size
    }

    fn add(&mut self, value: &Value, depth: usize) {
        self.depth = self.depth.max(depth);
        self.bytes += match value {
            Value::String(text) => text.len() + 3,
            Value::Array(_) | Value::Object(_) => 3,
            _ => 6,
        };
        if depth > MAX_DEPTH {
            return;
        }
        match value {
            Value::Array(items) => items.iter().for_each(|item| self.add(item, depth + 1)),
            Value::Object(map) => {
                for (key, item) in map {
                    self.bytes += key.len() + 3;
                    self.add(item, depth + 1);
                }
            }
            _ => {}
        }
    }

    /// Rejects an object that is too large or nested too deeply to be parsed again.
    pub fn check(object: &Value) -> Result<(), ApiError> {
        let size = Size::of(object);
        let refuse = |what: String| Err(ApiError::new(413, "RequestEntityTooLarge", what));
        if size.bytes > MAX_SIZE {
            return refuse(format!("Request entity too large: limit is {MAX_SIZE}"));
        }
        if size.depth > MAX_DEPTH {
            return refuse(format!("the object nests deeper than {MAX_DEPTH}"));
        }
        Ok(())
    }
}

/// The string at a path of keys.
#[must_use]
pub fn text<'a>(object: &'a Value, path: &[&str]) -> Option<&'a str> {
    at(object, path).and_then(Value::as_str)
}

/// The value at a path of keys; `null` counts as absent.
#[must_use]
pub fn at<'a>(object: &'a Value, path: &[&str]) -> Option<&'a Value> {
    path.iter()
        .try_fold(object, |value, key| value.get(key))
        .filter(|value| !value.is_null())
}

/// The list at a path, empty if absent.
#[must_use]
pub fn list<'a>(object: &'a Value, path: &[&str]) -> &'a [Value] {
    at(object, path)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// `object[key]` as a map, created if it is absent or not a map.
pub fn entry<'a>(object: &'a mut Value, key: &str) -> &'a mut Map<String, Value> {
    if !object.is_object() {
        *object = json!({});
    }
    let slot = &mut object[key];
    if !slot.is_object() {
        *slot = json!({});
    }
    slot.as_object_mut().expect("made an object just above")
}

/// Sets `object[key]`, or removes it if `value` is `None`. Values that are not objects stay unchanged.
pub fn put(object: &mut Value, key: &str, value: Option<&Value>) {
    match (value, object.as_object_mut()) {
        (Some(value), Some(map)) => drop(map.insert(key.into(), value.clone())),
        (None, Some(map)) => drop(map.remove(key)),
        (_, None) => {}
    }
}

/// `object.metadata`, created if absent.
pub fn meta(object: &mut Value) -> &mut Map<String, Value> {
    entry(object, "metadata")
}

/// `metadata.name`.
#[must_use]
pub fn name(object: &Value) -> &str {
    text(object, &["metadata", "name"]).unwrap_or_default()
}

/// `metadata.namespace`.
#[must_use]
pub fn namespace(object: &Value) -> Option<&str> {
    text(object, &["metadata", "namespace"]).filter(|n| !n.is_empty())
}

/// `metadata.uid`.
#[must_use]
pub fn uid(object: &Value) -> &str {
    text(object, &["metadata", "uid"]).unwrap_or_default()
}

/// Whether the object has a deletion timestamp.
#[must_use]
pub(crate) fn is_deleting(object: &Value) -> bool {
    at(object, &["metadata", "deletionTimestamp"]).is_some()
}

/// The current time in the API's format, in whole seconds.
#[must_use]
pub fn now() -> String {
    stamp(jiff::Timestamp::now())
}

/// A time plus a number of seconds, which may be negative. Results out of range saturate: the seconds come from
/// clients, and jiff's operators panic on overflow.
#[must_use]
pub fn later(time: jiff::Timestamp, seconds: i64) -> jiff::Timestamp {
    let end = if seconds < 0 {
        jiff::Timestamp::MIN
    } else {
        jiff::Timestamp::MAX
    };
    time.checked_add(jiff::SignedDuration::from_secs(seconds))
        .unwrap_or(end)
}

/// A time in the API's format, in whole seconds.
#[must_use]
pub fn stamp(time: jiff::Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// A random version-4 UUID.
#[must_use]
pub(crate) fn new_uid() -> String {
    let mut b = [0u8; 16];
    random(&mut b);
    b[6] = (b[6] & 0x0f) | 0x40;
    b[8] = (b[8] & 0x3f) | 0x80;
    let h: String = b.iter().map(|x| format!("{x:02x}")).collect();
    format!(
        "{}-{}-{}-{}-{}",
        &h[..8],
        &h[8..12],
        &h[12..16],
        &h[16..20],
        &h[20..]
    )
}

/// Five random characters for a generated name, from upstream's alphabet without vowels.
#[must_use]
pub(crate) fn name_suffix() -> String {
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut bytes = [0u8; 5];
    random(&mut bytes);
    bytes
        .iter()
        .map(|b| char::from(LETTERS[usize::from(*b) % LETTERS.len()]))
        .collect()
}

/// A random number below `limit`, which is not 0.
pub(super) fn random_below(limit: usize) -> usize {
    let mut bytes = [0u8; size_of::<usize>()];
    random(&mut bytes);
    usize::from_ne_bytes(bytes) % limit
}

fn random(bytes: &mut [u8]) {
    aws_lc_rs::rand::fill(bytes).expect("the system's random source works");
}

/// Labels and selectable fields of an object.
#[must_use]
pub fn attrs(resource: &Resource, object: &Value) -> Attrs {
    let mut attrs = Attrs {
        fields: Vec::with_capacity(resource.fields.len() + 2),
        ..Attrs::default()
    };
    if let Some(labels) = at(object, &["metadata", "labels"]).and_then(Value::as_object) {
        for (key, value) in labels {
            attrs
                .labels
                .insert(key.clone(), value.as_str().unwrap_or_default().to_owned());
        }
    }
    attrs.fields.push(("metadata.name", name(object).into()));
    if resource.namespaced {
        let namespace = namespace(object).unwrap_or_default();
        attrs.fields.push(("metadata.namespace", namespace.into()));
    }
    for field in resource.fields {
        let path: Vec<&str> = match *field {
            "source" => vec!["source", "component"],
            "status.successful" => vec!["status", "succeeded"],
            other => other.split('.').collect(),
        };
        let value = match at(object, &path) {
            Some(Value::String(s)) => s.clone(),
            Some(Value::Bool(b)) => b.to_string(),
            Some(Value::Number(n)) => n.to_string(),
            _ if *field == "status.successful" => "0".into(),
            _ if *field == "spec.unschedulable" || *field == "spec.hostNetwork" => "false".into(),
            _ => String::new(),
        };
        attrs.fields.push((field, value));
    }
    attrs
}

/// The attributes of a stored object; the key's first segment names the kind.
#[must_use]
pub fn index(key: &str, bytes: &[u8]) -> Attrs {
    let plural = key.split('/').next().unwrap_or_default();
    let resource = super::resources::RESOURCES
        .iter()
        .find(|r| r.plural == plural);
    match (resource, serde_json::from_slice(bytes)) {
        (Some(resource), Ok(object)) => attrs(resource, &object),
        _ => Attrs::default(),
    }
}

/// Sets a field that is absent, null or empty.
pub(super) fn set_default(object: &mut Value, key: &str, value: Value) {
    if object.get(key).is_none_or(|v| v.is_null() || *v == "") {
        object[key] = value;
    }
}
