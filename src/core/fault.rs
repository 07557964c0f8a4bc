//! Errors of operations for a pod, classified by when a retry makes sense.

use serde::{Deserialize, Serialize};

/// When to retry a failed operation, in ascending order of severity. Errors for which an immediate retry helps are
/// retried in the failing step itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Class {
    /// May succeed without any change: retry after a delay.
    #[default]
    RetryLater,
    /// A required object or the runtime is missing: retry when it changes, and after a delay.
    #[serde(rename = "WaitForNews")]
    WaitForChange,
    /// Cannot succeed with the present pod: retry when the pod changes, and after increasing delays.
    Final,
}

/// Why an operation for a pod failed: its spec cannot be satisfied, or the machine or the runtime failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// When to retry.
    pub class: Class,
    /// The error message.
    pub message: String,
}

impl Fault {
    /// A failure of the machine or the runtime; retry later.
    #[must_use]
    pub fn later(message: impl Into<String>) -> Fault {
        Fault::new(Class::RetryLater, message)
    }

    /// A referenced object, key or file does not exist.
    #[must_use]
    pub fn missing(message: impl Into<String>) -> Fault {
        Fault::new(Class::WaitForChange, message)
    }

    /// The spec is contradictory, or requires features that this node lacks.
    #[must_use]
    pub fn invalid(message: impl Into<String>) -> Fault {
        Fault::new(Class::Final, message)
    }

    fn new(class: Class, message: impl Into<String>) -> Fault {
        let message = message.into();
        Fault { class, message }
    }

    /// Prefixes the message.
    #[must_use]
    pub fn context(self, what: &str) -> Fault {
        let message = format!("{what}: {}", self.message);
        Fault { message, ..self }
    }
}
