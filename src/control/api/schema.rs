//! The protobuf layout of the served kinds (`schema.txt`). It is used to decode protobuf request bodies and to find
//! unknown or mistyped fields in JSON bodies.
//!
//! Typed clients since client-go 0.32 send protobuf and do not fall back to JSON, so a server
//! must accept it. Responses can always be JSON.

use std::collections::HashMap;
use std::sync::LazyLock;

use base64::Engine as _;
use serde_json::{Map, Value, json};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    One,
    List,
    Map,
}

#[derive(Debug)]
struct Field {
    number: u64,
    name: &'static str,
    kind: &'static str,
    shape: Shape,
    /// An explicit zero is kept, because the Go field is a pointer.
    pointer: bool,
    /// The message's fields are inlined in the enclosing JSON object.
    inline: bool,
}

static MESSAGES: LazyLock<HashMap<&'static str, Vec<Field>>> = LazyLock::new(|| {
    let mut messages: HashMap<&str, Vec<Field>> = HashMap::new();
    let mut current = "";
    for line in include_str!("schema.txt")
        .lines()
        .filter(|l| !l.starts_with('#'))
    {
        let Some(field) = line.strip_prefix("  ") else {
            current = line;
            messages.insert(current, Vec::new());
            continue;
        };
        let mut words = field.split(' ');
        let (Some(number), Some(name), Some(kind)) = (words.next(), words.next(), words.next())
        else {
            continue;
        };
        let (shape, kind) = match kind {
            k if k.starts_with("[]") => (Shape::List, &k[2..]),
            k if k.starts_with("{}") => (Shape::Map, &k[2..]),
            k => (Shape::One, k),
        };
        let (pointer, kind) = kind.strip_prefix('*').map_or((false, kind), |k| (true, k));
        let number = number
            .parse()
            .expect("the schema file is part of the program");
        let field = Field {
            number,
            name,
            kind,
            shape,
            pointer,
            inline: name == "^",
        };
        messages
            .get_mut(current)
            .expect("a message line comes first")
            .push(field);
    }
    messages
});

/// Why a body cannot be decoded.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum DecodeError {
    /// The body is truncated, or a length is wrong.
    #[error("the protobuf body is damaged near byte {0}")]
    Damaged(usize),
    /// No message is known for this kind.
    #[error("no kind {kind:?} is registered for version {version:?}")]
    UnknownKind {
        /// From the envelope.
        kind: String,
        /// From the envelope.
        version: String,
    },
    /// A list or object is nested too deeply.
    #[error("the protobuf body is nested too deeply")]
    TooDeep,
}

/// The message name of a kind: `apps/v1` and `Deployment` give `apps.v1.Deployment`.
fn message_name(version: &str, kind: &str) -> String {
    if kind == "DeleteOptions" {
        return "meta.v1.DeleteOptions".into();
    }
    let (group, version) = version.split_once('/').unwrap_or(("core", version));
    format!(
        "{}.{version}.{kind}",
        group.split('.').next().unwrap_or_default()
    )
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

enum Raw<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    Fixed(u64),
}

impl<'a> Reader<'a> {
    fn varint(&mut self) -> Result<u64, DecodeError> {
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            let byte = *self
                .bytes
                .get(self.at)
                .ok_or(DecodeError::Damaged(self.at))?;
            self.at += 1;
            value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(DecodeError::Damaged(self.at))
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        let end = self
            .at
            .checked_add(length)
            .filter(|e| *e <= self.bytes.len());
        let end = end.ok_or(DecodeError::Damaged(self.at))?;
        let slice = &self.bytes[self.at..end];
        self.at = end;
        Ok(slice)
    }

    /// The next field's number and content; `None` at the end.
    fn next(&mut self) -> Result<Option<(u64, Raw<'a>)>, DecodeError> {
        if self.at >= self.bytes.len() {
            return Ok(None);
        }
        let tag = self.varint()?;
        let raw = match tag & 7 {
            0 => Raw::Varint(self.varint()?),
            1 => Raw::Fixed(
                self.take(8)?
                    .iter()
                    .rev()
                    .fold(0, |v, b| v << 8 | u64::from(*b)),
            ),
            2 => {
                let length =
                    usize::try_from(self.varint()?).map_err(|_| DecodeError::Damaged(self.at))?;
                Raw::Bytes(self.take(length)?)
            }
            5 => Raw::Fixed(
                self.take(4)?
                    .iter()
                    .rev()
                    .fold(0, |v, b| v << 8 | u64::from(*b)),
            ),
            _ => return Err(DecodeError::Damaged(self.at)),
        };
        Ok(Some((tag >> 3, raw)))
    }
}

/// Decodes a `k8s\0` envelope into JSON with `apiVersion` and `kind`.
pub fn decode(body: &[u8]) -> Result<Value, DecodeError> {
    let envelope = body.strip_prefix(b"k8s\0").ok_or(DecodeError::Damaged(0))?;
    let (mut version, mut kind, mut object) = (String::new(), String::new(), &[][..]);
    let mut reader = Reader {
        bytes: envelope,
        at: 0,
    };
    while let Some((number, raw)) = reader.next()? {
        match (number, raw) {
            (1, Raw::Bytes(type_meta)) => {
                let mut inner = Reader {
                    bytes: type_meta,
                    at: 0,
                };
                while let Some((number, raw)) = inner.next()? {
                    match (number, raw) {
                        (1, Raw::Bytes(b)) => version = String::from_utf8_lossy(b).into_owned(),
                        (2, Raw::Bytes(b)) => kind = String::from_utf8_lossy(b).into_owned(),
                        _ => {}
                    }
                }
            }
            (2, Raw::Bytes(raw)) => object = raw,
            _ => {}
        }
    }
    let Some((name, _)) = MESSAGES.get_key_value(message_name(&version, &kind).as_str()) else {
        return Err(DecodeError::UnknownKind { kind, version });
    };
    let mut map = Map::new();
    message(name, object, &mut map, 0)?;
    map.insert("apiVersion".into(), version.into());
    map.insert("kind".into(), kind.into());
    Ok(Value::Object(map))
}

fn message(
    name: &str,
    bytes: &[u8],
    into: &mut Map<String, Value>,
    depth: usize,
) -> Result<(), DecodeError> {
    if depth > 64 {
        return Err(DecodeError::TooDeep);
    }
    let Some(fields) = MESSAGES.get(name) else {
        return Ok(());
    };
    let mut reader = Reader { bytes, at: 0 };
    while let Some((number, raw)) = reader.next()? {
        let Some(field) = fields.iter().find(|f| f.number == number) else {
            continue;
        };
        if field.inline {
            if let Raw::Bytes(inner) = raw {
                message(field.kind, inner, into, depth + 1)?;
            }
            continue;
        }
        match field.shape {
            Shape::One => {
                if let Some(value) = single(field, &raw, depth)? {
                    into.insert(field.name.into(), value);
                }
            }
            Shape::List => {
                let value = single(
                    &Field {
                        pointer: true,
                        shape: Shape::One,
                        ..*field
                    },
                    &raw,
                    depth,
                )?;
                let slot = into.entry(field.name).or_insert_with(|| json!([]));
                if let (Some(list), Some(value)) = (slot.as_array_mut(), value) {
                    list.push(value);
                }
            }
            Shape::Map => {
                let Raw::Bytes(entry) = raw else { continue };
                let (mut key, mut value) = (String::new(), None);
                let mut inner = Reader {
                    bytes: entry,
                    at: 0,
                };
                while let Some((number, raw)) = inner.next()? {
                    match (number, &raw) {
                        (1, Raw::Bytes(b)) => key = String::from_utf8_lossy(b).into_owned(),
                        (2, _) => {
                            value = single(
                                &Field {
                                    pointer: true,
                                    shape: Shape::One,
                                    ..*field
                                },
                                &raw,
                                depth,
                            )?
                        }
                        _ => {}
                    }
                }
                let value = value.unwrap_or_else(|| {
                    if is_scalar(field.kind) {
                        json!("")
                    } else {
                        json!({})
                    }
                });
                let slot = into.entry(field.name).or_insert_with(|| json!({}));
                if let Some(map) = slot.as_object_mut() {
                    map.insert(key, value);
                }
            }
        }
    }
    Ok(())
}

fn is_scalar(kind: &str) -> bool {
    matches!(kind, "string" | "bytes" | "resource.Quantity")
}

/// Decodes one value. `None` for a zero that Go omits from JSON.
fn single(field: &Field, raw: &Raw<'_>, depth: usize) -> Result<Option<Value>, DecodeError> {
    let keep = |zero: bool, value: Value| (field.pointer || !zero).then_some(value);
    Ok(match (field.kind, raw) {
        ("string", Raw::Bytes(b)) => {
            keep(b.is_empty(), String::from_utf8_lossy(b).into_owned().into())
        }
        ("bytes", Raw::Bytes(b)) => keep(
            b.is_empty(),
            base64::engine::general_purpose::STANDARD.encode(b).into(),
        ),
        ("bool", Raw::Varint(v)) => keep(*v == 0, (*v != 0).into()),
        ("int32" | "int64", Raw::Varint(v)) => keep(*v == 0, v.cast_signed().into()),
        ("double", Raw::Fixed(v)) => keep(*v == 0, json!(f64::from_bits(*v))),
        ("meta.v1.Time" | "meta.v1.MicroTime", Raw::Bytes(b)) => {
            let (seconds, nanos) = (number_at(b, 1)?, number_at(b, 2)?);
            let time = jiff::Timestamp::new(
                seconds.unwrap_or(0),
                i32::try_from(nanos.unwrap_or(0)).unwrap_or(0),
            );
            match (seconds, time) {
                (Some(_), Ok(time)) if field.kind == "meta.v1.MicroTime" => {
                    Some(time.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string().into())
                }
                (Some(_), Ok(time)) => Some(super::object::stamp(time).into()),
                _ => None,
            }
        }
        ("resource.Quantity", Raw::Bytes(b)) => {
            Some(text_at(b, 1)?.unwrap_or_else(|| "0".into()).into())
        }
        ("intstr.IntOrString", Raw::Bytes(b)) => Some(if number_at(b, 1)?.unwrap_or(0) == 1 {
            text_at(b, 3)?.unwrap_or_default().into()
        } else {
            number_at(b, 2)?.unwrap_or(0).into()
        }),
        ("meta.v1.FieldsV1" | "runtime.RawExtension", Raw::Bytes(b)) => {
            text_at(b, 1)?.and_then(|text| serde_json::from_str(&text).ok())
        }
        (kind, Raw::Bytes(b)) if MESSAGES.contains_key(kind) => {
            let mut map = Map::new();
            message(kind, b, &mut map, depth + 1)?;
            // `ExtraValue` is a message on the wire and a plain list in JSON.
            Some(if kind.ends_with(".ExtraValue") {
                map.remove("items").unwrap_or(json!([]))
            } else {
                map.into()
            })
        }
        _ => None,
    })
}

fn number_at(bytes: &[u8], wanted: u64) -> Result<Option<i64>, DecodeError> {
    let mut reader = Reader { bytes, at: 0 };
    while let Some((number, raw)) = reader.next()? {
        if let (true, Raw::Varint(value)) = (number == wanted, raw) {
            return Ok(Some(value.cast_signed()));
        }
    }
    Ok(None)
}

fn text_at(bytes: &[u8], wanted: u64) -> Result<Option<String>, DecodeError> {
    let mut reader = Reader { bytes, at: 0 };
    while let Some((number, raw)) = reader.next()? {
        if let (true, Raw::Bytes(value)) = (number == wanted, raw) {
            return Ok(Some(String::from_utf8_lossy(value).into_owned()));
        }
    }
    Ok(None)
}

/// The result of [`check`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Paths of unknown fields.
    pub unknown: Vec<String>,
    /// The first mistyped field: path, actual type, expected type.
    pub mistyped: Option<(String, &'static str, &'static str)>,
}

/// Compares a JSON object with the layout of its kind.
#[must_use]
pub fn check(version: &str, kind: &str, object: &Value) -> Findings {
    let mut findings = Findings::default();
    if MESSAGES.contains_key(message_name(version, kind).as_str()) {
        check_message(&message_name(version, kind), object, "", &mut findings);
    }
    findings
}

fn lookup(name: &str, key: &str) -> Option<&'static Field> {
    let fields = MESSAGES.get(name)?;
    let direct = fields.iter().find(|f| f.name == key);
    direct.or_else(|| {
        fields
            .iter()
            .filter(|f| f.inline)
            .find_map(|f| lookup(f.kind, key))
    })
}

fn check_message(name: &str, object: &Value, path: &str, findings: &mut Findings) {
    let Some(map) = object.as_object() else {
        return;
    };
    for (key, value) in map {
        if path.is_empty() && (key == "apiVersion" || key == "kind") {
            continue;
        }
        let here = if path.is_empty() {
            key.clone()
        } else {
            format!("{path}.{key}")
        };
        let Some(field) = lookup(name, key) else {
            findings.unknown.push(here);
            continue;
        };
        match (field.shape, value) {
            (_, Value::Null) => {}
            (Shape::One, value) => check_value(field.kind, value, &here, findings),
            (Shape::List, Value::Array(items)) => {
                for (i, item) in items.iter().enumerate() {
                    let here = format!("{here}[{i}]");
                    match item {
                        Value::Null => wrong(findings, here, item, "element"),
                        item => check_value(field.kind, item, &here, findings),
                    }
                }
            }
            (Shape::List, value) => wrong(findings, here, value, "array"),
            (Shape::Map, Value::Object(map)) => {
                for (key, item) in map {
                    check_value(field.kind, item, &format!("{here}.{key}"), findings);
                }
            }
            (Shape::Map, value) => wrong(findings, here, value, "object"),
        }
    }
}

fn check_value(kind: &str, value: &Value, path: &str, findings: &mut Findings) {
    let expected = match kind {
        _ if value.is_null() => return,
        "string" | "bytes" | "meta.v1.Time" | "meta.v1.MicroTime" if !value.is_string() => "string",
        "bytes" if !is_base64(value) => "base64 string",
        "meta.v1.Time" | "meta.v1.MicroTime" if !is_time(value) => "RFC 3339 time",
        "bool" if !value.is_boolean() => "bool",
        "int32" if !is_int32(value) => "int32",
        "int64" if !value.is_i64() => "int64",
        "double" if !value.is_number() => "float64",
        "resource.Quantity" if !value.is_string() && !value.is_number() => "string or number",
        "intstr.IntOrString" if !value.is_string() && !is_int32(value) => "string or int32",
        "meta.v1.FieldsV1" | "runtime.RawExtension" => return,
        kind if MESSAGES.contains_key(kind) && !kind.ends_with(".ExtraValue") => {
            if value.is_object() {
                check_message(kind, value, path, findings);
                return;
            }
            "object"
        }
        _ => return,
    };
    wrong(findings, path.to_owned(), value, expected);
}

fn is_int32(value: &Value) -> bool {
    value.as_i64().is_some_and(|v| i32::try_from(v).is_ok())
}

fn is_time(value: &Value) -> bool {
    value
        .as_str()
        .is_some_and(|t| t.parse::<jiff::Timestamp>().is_ok())
}

fn is_base64(value: &Value) -> bool {
    let decode = |text: &str| base64::engine::general_purpose::STANDARD.decode(unfolded(text));
    value.as_str().is_some_and(|text| decode(text).is_ok())
}

/// Base64 without line breaks, which Go's decoder skips.
fn unfolded(text: &str) -> String {
    text.replace(['\r', '\n'], "")
}

/// Normalises an object that [`check`] has accepted so that every client can decode it. Null fields are removed, null
/// values in maps and lists become zero values, and base64 loses its line breaks.
pub(crate) fn normalize(version: &str, kind: &str, object: &mut Value) {
    if let Some((name, _)) = MESSAGES.get_key_value(message_name(version, kind).as_str()) {
        normalize_message(name, object);
    }
}

fn normalize_message(name: &str, object: &mut Value) {
    let Some(map) = object.as_object_mut() else {
        return;
    };
    map.retain(|key, value| !value.is_null() || lookup(name, key).is_none());
    for (key, value) in map {
        let Some(field) = lookup(name, key) else {
            continue;
        };
        match (field.shape, value) {
            (Shape::List, Value::Array(items)) => {
                items
                    .iter_mut()
                    .for_each(|i| normalize_value(field.kind, i));
            }
            (Shape::Map, Value::Object(entries)) => {
                entries
                    .values_mut()
                    .for_each(|v| normalize_value(field.kind, v));
            }
            (_, value) => normalize_value(field.kind, value),
        }
    }
}

fn normalize_value(kind: &str, value: &mut Value) {
    match kind {
        "meta.v1.FieldsV1" | "runtime.RawExtension" => {}
        "string" | "bytes" if value.is_null() => *value = json!(""),
        "resource.Quantity" if value.is_null() => *value = json!("0"),
        "bytes" => {
            if let Some(text) = value.as_str().filter(|t| t.contains(['\r', '\n'])) {
                *value = unfolded(text).into();
            }
        }
        kind if MESSAGES.contains_key(kind) && !kind.ends_with(".ExtraValue") => {
            if value.is_null() {
                *value = json!({});
            }
            normalize_message(kind, value);
        }
        _ => {}
    }
}

fn wrong(findings: &mut Findings, path: String, value: &Value, expected: &'static str) {
    let is = match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    findings.mistyped.get_or_insert((path, is, expected));
}

#[cfg(test)]
mod tests;
