//! Errors of the protocol (CNI spec 1.1, section 5, "Error").

use serde_json::{Value, json};

/// An error result. The code gives the kind; the message gives the problem and its remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// A code of the CNI spec, see the constants.
    pub code: u32,
    /// A single line.
    pub message: String,
    /// Additional information; may be empty.
    pub details: String,
}

impl Error {
    /// The plugin does not support the `cniVersion` of the configuration.
    pub const VERSION: u32 = 1;
    /// Environment variables are missing or invalid.
    pub const ENVIRONMENT: u32 = 4;
    /// Reading the input or writing the output failed.
    pub const IO: u32 = 5;
    /// The input is not JSON, or not of the expected shape.
    pub const DECODE: u32 = 6;
    /// The network configuration is invalid.
    pub const CONFIG: u32 = 7;
    /// The network namespace is missing, or is the namespace of the plugin itself.
    pub const NAMESPACE: u32 = 8;
    /// A transient failure; the runtime should retry.
    pub const TRY_AGAIN: u32 = 11;
    /// The plugin cannot serve ADD. The CNI spec defines this code
    /// for STATUS only; other verbs return [`Error::TRY_AGAIN`].
    pub const UNAVAILABLE: u32 = 50;
    /// Any other error.
    pub const OTHER: u32 = 999;

    /// An error without details.
    pub fn new(code: u32, message: impl Into<String>) -> Error {
        Error {
            code,
            message: message.into(),
            details: String::new(),
        }
    }

    /// An error with code [`Error::CONFIG`].
    pub fn config(message: impl Into<String>) -> Error {
        Error::new(Error::CONFIG, message)
    }

    /// An error with code [`Error::OTHER`].
    pub fn other(message: impl Into<String>) -> Error {
        Error::new(Error::OTHER, message)
    }

    /// Wraps `error`; `what` describes the operation that failed.
    pub fn doing(what: impl std::fmt::Display, error: impl std::fmt::Display) -> Error {
        Error::other(format!("{what}: {error}"))
    }

    /// Converts the error for a verb: [`Error::UNAVAILABLE`] exists for STATUS only.
    #[must_use]
    pub fn of(self, verb: &str) -> Error {
        let code = match self.code {
            Error::UNAVAILABLE if verb != "STATUS" => Error::TRY_AGAIN,
            code => code,
        };
        Error { code, ..self }
    }

    /// The JSON object that the plugin prints.
    #[must_use]
    pub fn json(&self, version: &str) -> Value {
        let mut value =
            json!({"cniVersion": version, "code": self.code, "msg": shortened(&self.message)});
        if !self.details.is_empty() {
            value["details"] = shortened(&self.details).into();
        }
        value
    }
}

/// Truncates text: messages can quote input of any length, and the runtime logs them.
fn shortened(text: &str) -> String {
    const MAX_CHARS: usize = 1000;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_status_returns_the_codes_for_unavailable_plugins() {
        let code = |code, verb| Error::new(code, "").of(verb).code;
        assert_eq!(code(Error::UNAVAILABLE, "STATUS"), 50);
        for verb in ["ADD", "DEL", "CHECK", "GC"] {
            assert_eq!(code(Error::UNAVAILABLE, verb), 11, "{verb}");
            assert_eq!(code(Error::CONFIG, verb), Error::CONFIG, "{verb}");
        }
    }
}
