//! Finds duplicate keys of JSON objects. A parsed `Value` no longer shows them.

use std::collections::BTreeSet;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Searches for a duplicate key in all objects at the key `name`.
/// `here` says whether the current value is such an object.
struct Seek<'a> {
    name: &'a str,
    here: bool,
}

impl<'de> DeserializeSeed<'de> for Seek<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// Visitor methods for values without keys.
macro_rules! nothing {
    ($($name:ident: $kind:ty),*) => {
        $(fn $name<E>(self, _: $kind) -> Result<Self::Value, E> {
            Ok(None)
        })*
    };
}

impl<'de> Visitor<'de> for Seek<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    nothing!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str);

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut seen, mut found) = (BTreeSet::new(), None);
        while let Some(key) = map.next_key::<String>()? {
            let below = map.next_value_seed(Seek {
                name: self.name,
                here: key.eq_ignore_ascii_case(self.name),
            })?;
            found = found.or(below);
            if self.here && !seen.insert(key.clone()) {
                found = found.or(Some(key));
            }
        }
        Ok(found)
    }
}

/// The first duplicate key in an object at the key `name`, at any depth of `input`.
pub fn duplicate(input: &[u8], name: &str) -> Option<String> {
    let mut deserializer = serde_json::Deserializer::from_slice(input);
    Seek { name, here: false }
        .deserialize(&mut deserializer)
        .ok()
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::duplicate;

    #[test]
    fn duplicate_keys_are_found_in_the_given_object() {
        let find = |text: &str| duplicate(text.as_bytes(), "sysctl");
        assert_eq!(
            find(r#"{"a": 1, "a": 2, "sysctl": {"x": "1", "y": [1, {}], "z": null, "w": -1.5}}"#),
            None
        );
        assert_eq!(
            find(r#"{"Sysctl": {"x": "1", "x": "2"}}"#).as_deref(),
            Some("x")
        );
        assert_eq!(
            find(r#"{"args": {"cni": {"sysctl": {"x": "1", "x": "2"}}}}"#).as_deref(),
            Some("x")
        );
        assert_eq!(find("{"), None);
    }
}
