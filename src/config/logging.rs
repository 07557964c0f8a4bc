//! How the agent logs and traces.

use serde::Deserialize;
use serde_json::Value;

use super::{ConfigError, invalid};

/// The fields as they stand in a file.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Section {
    format: Option<String>,
    verbosity: Option<u32>,
    #[serde(flatten)]
    rest: std::collections::BTreeMap<String, Value>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Fields {
    logging: Section,
}

/// How the agent logs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Logging {
    /// As JSON, line by line.
    pub json: bool,
    /// As the kubelet counts: 0 to 2 for information, 4 for debugging, more for tracing.
    pub verbosity: u8,
}

/// Resolves the fields; the flag wins where it was given. Also says which are not honoured.
pub(super) fn resolve(fields: &Fields, verbosity: u8) -> Result<(Logging, Vec<String>), ConfigError> {
    let section = &fields.logging;
    let json = match section.format.as_deref() {
        None | Some("" | "text") => false,
        Some("json") => true,
        Some(other) => return Err(invalid("logging.format", other, "use text or json")),
    };
    let own = u8::try_from(section.verbosity.unwrap_or(0)).unwrap_or(u8::MAX);
    let mut ignored = vec![];
    for (key, value) in &section.rest {
        match key.as_str() {
            // Lines are written as they come, and whole.
            "flushFrequency" => {}
            "options" | "vmodule" => ignored.push(format!("logging.{key}")),
            _ => return Err(invalid(&format!("logging.{key}"), value, "there is no such field; use format or verbosity")),
        }
    }
    Ok((Logging { json, verbosity: if verbosity > 0 { verbosity } else { own } }, ignored))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_and_the_flag_wins() {
        let of = |text: &str, flag: u8| resolve(&serde_saphyr::from_str(text).expect("YAML"), flag).map_err(|e| e.to_string());
        assert_eq!(of("{}", 0), Ok((Logging::default(), vec![])));
        let own = "logging: {format: json, verbosity: 4, flushFrequency: 5s, vmodule: [{filePattern: a, verbosity: 9}]}";
        assert_eq!(of(own, 0), Ok((Logging { json: true, verbosity: 4 }, vec!["logging.vmodule".to_owned()])));
        assert_eq!(of(own, 6).map(|(l, _)| l.verbosity), Ok(6));
        assert!(of("logging: {format: xml}", 0).is_err_and(|e| e.contains("logging.format")));
        assert!(of("logging: {formt: json}", 0).is_err_and(|e| e.contains("logging.formt")));
    }
}
