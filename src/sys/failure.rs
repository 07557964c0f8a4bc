//! Errors of operations on this machine: a kind by which callers decide, and a message for users.

use std::fmt::Display;
use std::io;

use nix::errno::Errno;

use holdfast_core::fault::Fault;
use holdfast_core::volume::resolved::Problem;

/// What an error means for the caller. Each kind leads to a different reaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostErrorKind {
    /// A call for the same object is still pending, for this pod or another. Retry when that call completes.
    UnderWay,
    /// A required file, device or program is missing.
    NotFound,
    /// The operation was attempted and failed; a later attempt may succeed.
    Failed,
}

/// An error of an operation on this machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct HostError {
    /// The kind of error.
    pub kind: HostErrorKind,
    /// A message for users.
    pub message: String,
}

impl HostError {
    /// An error of kind [`HostErrorKind::Failed`].
    #[must_use]
    pub fn failed(message: impl Into<String>) -> HostError {
        HostError {
            kind: HostErrorKind::Failed,
            message: message.into(),
        }
    }

    /// An error of kind [`HostErrorKind::UnderWay`].
    #[must_use]
    pub fn under_way(message: impl Into<String>) -> HostError {
        HostError {
            kind: HostErrorKind::UnderWay,
            message: message.into(),
        }
    }

    /// Replaces the message and keeps the kind.
    #[must_use]
    pub fn as_text(self, text: impl FnOnce(String) -> String) -> HostError {
        HostError {
            kind: self.kind,
            message: text(self.message),
        }
    }

    /// Whether to retry when a pending call completes.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        self.kind == HostErrorKind::UnderWay
    }
}

impl From<HostError> for Problem {
    fn from(error: HostError) -> Problem {
        match error.is_under_way() {
            true => Problem::under_way(error.message),
            false => Problem::later(error.message),
        }
    }
}

/// A host error does not say when a retry may succeed.
impl From<HostError> for Fault {
    fn from(error: HostError) -> Fault {
        Fault::later(error.message)
    }
}

/// A message alone means kind `Failed`.
impl From<String> for HostError {
    fn from(message: String) -> HostError {
        HostError::failed(message)
    }
}

impl From<&str> for HostError {
    fn from(message: &str) -> HostError {
        HostError::failed(message)
    }
}

impl From<io::Error> for HostError {
    fn from(error: io::Error) -> HostError {
        HostError {
            kind: match error.kind() {
                io::ErrorKind::NotFound => HostErrorKind::NotFound,
                _ => HostErrorKind::Failed,
            },
            message: error.to_string(),
        }
    }
}

impl From<Errno> for HostError {
    fn from(error: Errno) -> HostError {
        HostError {
            message: error.to_string(),
            ..HostError::from(io::Error::from(error))
        }
    }
}

impl From<serde_json::Error> for HostError {
    fn from(error: serde_json::Error) -> HostError {
        HostError::failed(error.to_string())
    }
}

/// Prefixes the message with the operation that failed; keeps the kind.
pub fn doing<E: Into<HostError>>(what: impl Display) -> impl FnOnce(E) -> HostError {
    move |error| error.into().as_text(|cause| format!("{what}: {cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_with_a_description_keeps_its_class() {
        for (errno, kind) in [
            (Errno::ENOENT, HostErrorKind::NotFound),
            (Errno::EBUSY, HostErrorKind::Failed),
            // The missing thread or file belongs to this process; no call for the same object is pending.
            (Errno::EAGAIN, HostErrorKind::Failed),
            (Errno::ENOSPC, HostErrorKind::Failed),
        ] {
            for error in [
                HostError::from(errno),
                HostError::from(io::Error::from(errno)),
            ] {
                let cause = error.message.clone();
                let described = doing("/v cannot be read")(error);
                assert_eq!(described.kind, kind, "{errno}");
                assert_eq!(described.to_string(), format!("/v cannot be read: {cause}"));
            }
        }
        let waits = doing("v")(HostError::under_way("mkfs has been running for 10s"));
        assert!(waits.is_under_way());
        assert_eq!(waits.to_string(), "v: mkfs has been running for 10s");
    }
}
