//! Why something on this machine could not be done: a class that callers decide by, and a text for people.

use std::fmt::Display;
use std::io;

use nix::errno::Errno;

use crate::core::fault::Fault;

/// What a failure means for the caller. There is a kind for each thing that a caller does differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostErrorKind {
    /// A call about the same thing has not ended, for this pod or for another: nothing has failed yet. It is worth a try as
    /// soon as that has ended.
    UnderWay,
    /// Something that has to be there is not: a file, a device, a program.
    NotFound,
    /// It was done and had no success; it may have some later.
    Failed,
}

/// Why something could not be done on this machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct HostError {
    /// What kind of failure.
    pub kind: HostErrorKind,
    /// A sentence for people.
    pub message: String,
}

impl HostError {
    /// It had no success.
    #[must_use]
    pub fn failed(message: impl Into<String>) -> HostError {
        HostError {
            kind: HostErrorKind::Failed,
            message: message.into(),
        }
    }

    /// It was not done: a call about the same thing has not ended.
    #[must_use]
    pub fn under_way(message: impl Into<String>) -> HostError {
        HostError {
            kind: HostErrorKind::UnderWay,
            message: message.into(),
        }
    }

    /// The same failure in other words.
    #[must_use]
    pub fn as_text(self, text: impl FnOnce(String) -> String) -> HostError {
        HostError {
            kind: self.kind,
            message: text(self.message),
        }
    }

    /// Whether it is tried again as soon as a call that is under way has ended.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        self.kind == HostErrorKind::UnderWay
    }
}

/// Nothing says when it may succeed.
impl From<HostError> for Fault {
    fn from(error: HostError) -> Fault {
        Fault::later(error.message)
    }
}

/// A sentence alone is a failure; whoever knows more says so.
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

/// Says before the cause what could not be done; the kind stays.
pub fn doing<E: Into<HostError>>(what: impl Display) -> impl FnOnce(E) -> HostError {
    move |error| error.into().as_text(|cause| format!("{what}: {cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_keeps_its_class_in_other_words() {
        for (errno, kind) in [
            (Errno::ENOENT, HostErrorKind::NotFound),
            (Errno::EBUSY, HostErrorKind::Failed),
            // The thread or the file that is missing is ours, and no call about the same thing.
            (Errno::EAGAIN, HostErrorKind::Failed),
            (Errno::ENOSPC, HostErrorKind::Failed),
        ] {
            for error in [
                HostError::from(errno),
                HostError::from(io::Error::from(errno)),
            ] {
                let cause = error.message.clone();
                let told = doing("/v cannot be read")(error);
                assert_eq!(told.kind, kind, "{errno}");
                assert_eq!(told.to_string(), format!("/v cannot be read: {cause}"));
            }
        }
        let waits = doing("v")(HostError::under_way("mkfs has been running for 10s"));
        assert!(waits.is_under_way());
        assert_eq!(waits.to_string(), "v: mkfs has been running for 10s");
    }
}
