//! Typed access to network configurations. Keys match regardless of case, like in Go's JSON
//! decoder: go-cni serialises structs without tags and thus sends `HostPort` for `hostPort`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Error;

/// A view of a JSON object with typed, case-insensitive access.
#[derive(Debug, Clone, Copy)]
pub struct Json<'a>(pub &'a Value);

impl<'a> Json<'a> {
    /// The value of a key. `null` counts as absent; if several spellings of the key exist, the last one wins.
    #[must_use]
    pub fn get(self, key: &str) -> Option<&'a Value> {
        let map = self.0.as_object()?;
        map.iter()
            .filter(|(k, _)| k.eq_ignore_ascii_case(key))
            .map(|(_, v)| v)
            .next_back()
            .filter(|v| !v.is_null())
    }

    /// The object at a key; empty if absent.
    pub fn object(self, key: &str) -> Result<Json<'a>, Error> {
        match self.get(key) {
            None => Ok(Json(&Value::Null)),
            Some(value) if value.is_object() => Ok(Json(value)),
            Some(other) => Err(wrong(key, other, "an object")),
        }
    }

    /// The string at a key; empty if absent.
    pub fn text(self, key: &str) -> Result<&'a str, Error> {
        match self.get(key) {
            None => Ok(""),
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(wrong(key, other, "a string")),
        }
    }

    /// The directory at a key, or `absent` if the key is missing. The path must be absolute: a
    /// relative path would depend on the working directory that the runtime gives the plugin.
    pub fn directory(self, key: &str, absent: &str) -> Result<PathBuf, Error> {
        let path = match self.text(key)? {
            "" => absent,
            path => path,
        };
        if !Path::new(path).is_absolute() {
            return Err(Error::config(format!(
                "invalid {key} {path:?}: use an absolute path such as {absent:?}"
            )));
        }
        Ok(path.into())
    }

    /// The boolean at a key; false if absent.
    pub fn flag(self, key: &str) -> Result<bool, Error> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(wrong(key, other, "a boolean")),
        }
    }

    /// The number at a key, or `absent` if the key is missing. A number out of bounds is an error.
    pub fn number(
        self,
        key: &str,
        absent: i64,
        bounds: std::ops::RangeInclusive<i64>,
    ) -> Result<i64, Error> {
        match self.get(key) {
            None => Ok(absent),
            Some(value) => value
                .as_i64()
                .filter(|n| bounds.contains(n))
                .ok_or_else(|| {
                    wrong(
                        key,
                        value,
                        &format!("an integer from {} to {}", bounds.start(), bounds.end()),
                    )
                }),
        }
    }

    /// The list at a key; empty if absent.
    pub fn list(self, key: &str) -> Result<&'a [Value], Error> {
        match self.get(key) {
            None => Ok(&[]),
            Some(Value::Array(list)) => Ok(list),
            Some(other) => Err(wrong(key, other, "a list")),
        }
    }

    /// The list of strings at a key; empty if absent.
    pub fn texts(self, key: &str) -> Result<Vec<String>, Error> {
        self.list(key)?
            .iter()
            .map(|v| {
                v.as_str()
                    .map(Into::into)
                    .ok_or_else(|| wrong(key, v, "a list of strings"))
            })
            .collect()
    }
}

fn wrong(key: &str, value: &Value, expected: &str) -> Error {
    let mut shown = value.to_string();
    if shown.len() > 60 {
        shown = format!("{}...", shown.chars().take(60).collect::<String>());
    }
    Error::new(
        Error::DECODE,
        format!("the field {key:?} is {shown}, but must be {expected}"),
    )
}

/// The key-value pairs of `CNI_ARGS`.
pub type Args = BTreeMap<String, String>;

/// Parses `CNI_ARGS`. Unknown keys are an error unless `IgnoreUnknown` is true.
pub fn cni_args(text: &str, known: &[&str]) -> Result<Args, Error> {
    let mut args = Args::new();
    if text.is_empty() {
        return Ok(args);
    }
    for pair in text.split(';') {
        let parts: Vec<&str> = pair.split('=').collect();
        let [key, value] = parts[..] else {
            return Err(Error::new(
                Error::ENVIRONMENT,
                format!("CNI_ARGS: invalid pair {pair:?}: expected KEY=VALUE"),
            ));
        };
        args.insert(key.into(), value.into());
    }
    let ignore = args
        .get("IgnoreUnknown")
        .is_some_and(|v| v == "1" || v.eq_ignore_ascii_case("true"));
    let unknown: Vec<String> = args
        .iter()
        .filter(|(k, _)| *k != "IgnoreUnknown" && !known.contains(&k.as_str()))
        .map(|(k, v)| format!("{k}={v}"))
        .collect();
    if !ignore && !unknown.is_empty() {
        return Err(Error::new(
            Error::ENVIRONMENT,
            format!("ARGS: unknown args {unknown:?}; set IgnoreUnknown=1 to ignore them"),
        ));
    }
    Ok(args)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_are_case_insensitive_and_types_are_checked() {
        let value = json!({"HostPort": 1, "isGateway": true, "mtu": "x", "name": null});
        let config = Json(&value);
        assert_eq!(config.number("hostport", 0, 0..=10), Ok(1));
        assert_eq!(config.flag("ISGATEWAY"), Ok(true));
        assert_eq!(config.text("name"), Ok(""));
        assert_eq!(
            config.number("mtu", 0, 0..=10).expect_err("a text").code,
            Error::DECODE
        );
        assert_eq!(
            config
                .number("HostPort", 0, 5..=10)
                .expect_err("too small")
                .code,
            Error::DECODE
        );
    }

    #[test]
    fn unknown_args_are_rejected_unless_ignore_unknown_is_set() {
        assert!(cni_args("", &[]).expect("empty").is_empty());
        assert!(cni_args("A=1", &[]).is_err());
        assert_eq!(
            cni_args("IgnoreUnknown=1;A=1;IP=2", &["IP"]).expect("ignored")["IP"],
            "2"
        );
        assert!(cni_args("IP=1;", &["IP"]).is_err());
        assert!(cni_args("IP=1=2", &["IP"]).is_err());
    }
}
