//! Checks of single values; each error names the field, the value and the remedy.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use super::ConfigError;
use holdfast_core::time::duration;

/// Returns the error of an invalid value.
pub(super) fn invalid(field: &str, value: impl std::fmt::Debug, remedy: &str) -> ConfigError {
    ConfigError::Field {
        field: field.into(),
        value: format!("{value:?}").trim_matches('"').to_owned(),
        remedy: remedy.into(),
    }
}

/// Parses a duration. If it is unset, or zero as kubeadm writes for fields that it does not set, returns the default in
/// seconds.
pub(super) fn time(
    field: &str,
    text: Option<&String>,
    default: u64,
) -> Result<Duration, ConfigError> {
    match text {
        None => Ok(Duration::from_secs(default)),
        Some(text) => duration(text)
            .map(|d| {
                if d.is_zero() {
                    Duration::from_secs(default)
                } else {
                    d
                }
            })
            .ok_or_else(|| invalid(field, text, "use a duration such as 10s or 1m30s")),
    }
}

/// Checks that a URL begins with http or https.
pub(super) fn url(field: &str, text: Option<String>) -> Result<Option<String>, ConfigError> {
    match text {
        Some(text) if !text.starts_with("http://") && !text.starts_with("https://") => {
            Err(invalid(field, text, "use a URL with http or https"))
        }
        text => Ok(text),
    }
}

/// Checks that a number is not negative.
pub(super) fn at_least_zero(
    field: &str,
    value: Option<i32>,
    default: i32,
) -> Result<i32, ConfigError> {
    let value = value.unwrap_or(default);
    if value >= 0 {
        Ok(value)
    } else {
        Err(invalid(field, value, "use 0 or more"))
    }
}

/// Checks that a path is absolute.
pub(super) fn absolute(field: &str, path: PathBuf) -> Result<PathBuf, ConfigError> {
    if path.is_absolute() {
        Ok(path)
    } else {
        let text = path.display().to_string();
        Err(invalid(field, text, "use an absolute path"))
    }
}

/// The name of a field, its value, and its default.
pub(super) type Setting<'a> = (&'a str, Option<i32>, i32);

/// Returns the rate per second (0: any number) and the burst (1 or more).
pub(super) fn pace(rate: Setting<'_>, burst: Setting<'_>) -> Result<(f64, f64), ConfigError> {
    let rate = at_least_zero(rate.0, rate.1, rate.2)?;
    let burst = at_least_zero(burst.0, burst.1, burst.2)?;
    Ok((f64::from(rate), f64::from(burst).max(1.0)))
}

/// Whether a value is the zero value of its type, at every depth. kubeadm writes zero values for fields that it does
/// not set.
pub(super) fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(is_set) => !is_set,
        Value::Number(number) => number.as_i64() == Some(0),
        Value::String(text) => matches!(text.as_str(), "" | "0" | "0s"),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.values().all(is_unset),
    }
}
