//! Errors as the protocol has them (CNI spec, "Error").

use serde_json::{Value, json};

/// A refusal: its code says what kind, its message what and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// See the constants.
    pub code: u32,
    /// One line.
    pub message: String,
    /// More, or empty.
    pub details: String,
}

impl Error {
    /// The config's version is not spoken.
    pub const VERSION: u32 = 1;
    /// The environment is incomplete or wrong.
    pub const ENVIRONMENT: u32 = 4;
    /// Input or output failed.
    pub const IO: u32 = 5;
    /// The input is not JSON of the right shape.
    pub const DECODE: u32 = 6;
    /// The network configuration is wrong.
    pub const CONFIG: u32 = 7;
    /// The network namespace is missing or the plugin's own.
    pub const NAMESPACE: u32 = 8;
    /// Something that the plugin needs is not there yet.
    pub const TRY_AGAIN: u32 = 11;
    /// ADD cannot be served. Only STATUS says so; to other verbs it is [`Error::TRY_AGAIN`].
    pub const UNAVAILABLE: u32 = 50;
    /// Anything else.
    pub const OTHER: u32 = 999;

    /// With a code.
    pub fn new(code: u32, message: impl Into<String>) -> Error {
        Error {
            code,
            message: message.into(),
            details: String::new(),
        }
    }

    /// A wrong configuration.
    pub fn config(message: impl Into<String>) -> Error {
        Error::new(Error::CONFIG, message)
    }

    /// Anything else.
    pub fn other(message: impl Into<String>) -> Error {
        Error::new(Error::OTHER, message)
    }

    /// What was being done when `error` came.
    pub fn doing(what: impl std::fmt::Display, error: impl std::fmt::Display) -> Error {
        Error::other(format!("{what}: {error}"))
    }

    /// As the answer to a verb: the protocol has the code of what is unavailable for STATUS only.
    #[must_use]
    pub fn of(self, verb: &str) -> Error {
        let code = match self.code {
            Error::UNAVAILABLE if verb != "STATUS" => Error::TRY_AGAIN,
            code => code,
        };
        Error { code, ..self }
    }

    /// As it is printed.
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

/// What somebody wrote may be part of a message, however long it is; a runtime's log has to bear it.
fn shortened(text: &str) -> String {
    const MOST: usize = 1000;
    match text.char_indices().nth(MOST) {
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
    fn only_status_says_that_add_cannot_be_served() {
        let code = |code, verb| Error::new(code, "").of(verb).code;
        assert_eq!(code(Error::UNAVAILABLE, "STATUS"), 50);
        for verb in ["ADD", "DEL", "CHECK", "GC"] {
            assert_eq!(code(Error::UNAVAILABLE, verb), 11, "{verb}");
            assert_eq!(code(Error::CONFIG, verb), Error::CONFIG, "{verb}");
        }
    }
}
