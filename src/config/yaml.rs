//! YAML of configuration files as upstream's components read it.

use serde_json::Value;

/// Decodes a file. As in Go's lenient decoding, the last of repeated fields counts; the second value then names the first
/// repetition.
///
/// # Errors
///
/// The text is not YAML.
pub fn lenient(text: &str) -> Result<(Value, Option<String>), String> {
    let strict = match serde_saphyr::from_str(text) {
        Ok(fields) => return Ok((fields, None)),
        Err(strict) => strict.to_string(),
    };
    let options = serde_saphyr::options! {
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins,
    };
    match serde_saphyr::from_str_with_options(text, options) {
        Ok(fields) => Ok((fields, Some(strict))),
        Err(_) => Err(strict),
    }
}
