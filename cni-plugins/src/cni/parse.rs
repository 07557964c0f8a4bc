//! Parses configurations like Go's JSON decoder does for structs: if a key occurs several times, in any case, the last one counts.
//! Objects at `sysctl` are maps for Go, so their keys differ by case, and the plugin `tuning` rejects duplicates there.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// The largest configuration, in bytes. A list of valid attachments has about 100 bytes for each, so this is enough for GC on
/// any node, and bounds the memory of a plugin.
pub const INPUT_LIMIT: u64 = 64 << 20;

/// Reads the value at `key`.
#[derive(Clone, Copy)]
struct Reader<'a> {
    key: &'a str,
    /// The first sysctl that occurs twice in an object.
    repeated: &'a RefCell<Option<String>>,
}

impl<'de> DeserializeSeed<'de> for Reader<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reader<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = vec![];
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let has_fields = !self.key.eq_ignore_ascii_case("sysctl");
        let mut map = Map::new();
        let mut spellings: BTreeMap<String, String> = BTreeMap::new();
        while let Some(key) = entries.next_key::<String>()? {
            let value = entries.next_value_seed(Reader { key: &key, ..self })?;
            if has_fields {
                let before = spellings.insert(key.to_ascii_lowercase(), key.clone());
                before.map(|spelling| map.remove(&spelling));
            } else if map.contains_key(&key) {
                self.repeated
                    .borrow_mut()
                    .get_or_insert_with(|| key.clone());
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

/// Parses JSON. The second result is the first sysctl that occurs twice in an object at a key `sysctl`.
///
/// # Errors
///
/// The input is not one JSON value, or nests more than 128 levels deep.
pub fn parse(input: &[u8]) -> serde_json::Result<(Value, Option<String>)> {
    let repeated = RefCell::new(None);
    let mut deserializer = serde_json::Deserializer::from_slice(input);
    let reader = Reader {
        key: "",
        repeated: &repeated,
    };
    let value = reader.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok((value, repeated.into_inner()))
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn the_last_of_several_keys_counts_in_any_case() {
        let read = |text: &str| parse(text.as_bytes()).expect("JSON").0;
        for (text, expected) in [
            (r#"{"mtu": 1, "mtu": 2}"#, json!({"mtu": 2})),
            (r#"{"mtu": 1, "MTU": 2}"#, json!({"MTU": 2})),
            (r#"{"MTU": 1, "mtu": 2, "Mtu": 3}"#, json!({"Mtu": 3})),
            (
                r#"{"a": [{"x": 1, "X": -2}, null, true, 1.5, "t"]}"#,
                json!({"a": [{"X": -2}, null, true, 1.5, "t"]}),
            ),
            (
                r#"{"sysctl": {"net.a": "1", "net.A": "2"}}"#,
                json!({"sysctl": {"net.a": "1", "net.A": "2"}}),
            ),
        ] {
            assert_eq!(read(text), expected, "{text}");
        }
        for wrong in ["", "{", "{} {}", "{\"a\": }", &"[".repeat(100_000)] {
            assert!(parse(wrong.as_bytes()).is_err(), "{wrong:.20}");
        }
    }

    #[test]
    fn repeated_sysctls_are_found() {
        let find = |text: &str| parse(text.as_bytes()).expect("JSON").1;
        let unlike = r#"{"a": 1, "a": 2, "sysctl": {"x": "1", "y": "1"}, "b": {"x": 1, "x": 2}}"#;
        assert_eq!(find(unlike), None);
        let top = r#"{"Sysctl": {"x": "1", "x": "2"}}"#;
        assert_eq!(find(top).as_deref(), Some("x"));
        let args = r#"{"args": {"cni": {"sysctl": {"x": "1", "x": "2"}}}}"#;
        assert_eq!(find(args).as_deref(), Some("x"));
    }

    proptest! {
        /// Without repeated keys, the value is that of `serde_json`.
        #[test]
        fn other_input_is_parsed_as_usual(text in r#"[\[\]{}":,a0-9.e\\-]{0,40}"#) {
            let usual: Option<Value> = serde_json::from_str(&text).ok();
            let own = parse(text.as_bytes()).ok().map(|(value, _)| value);
            prop_assert_eq!(own, usual);
        }
    }
}
