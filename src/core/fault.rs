//! Why something could not be done for a pod, by what the next try waits for.

use serde::{Deserialize, Serialize};

/// What a failure means for the next try, the sooner one before the later. What may be tried again at once is tried by the step
/// that has failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Class {
    /// It may succeed by itself: it is tried again after a pause.
    #[default]
    RetryLater,
    /// Something that it needs is missing, an object or the runtime: it is tried again as soon as there is news of that, and after a
    /// pause.
    WaitForNews,
    /// It cannot succeed as long as the pod is as it is: it is tried again when that changes, and after pauses that grow.
    Final,
}

/// Why something could not be done for a pod: what its spec asks for cannot be had, or the machine or the runtime did not do it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// What it means for the next try.
    pub class: Class,
    /// A sentence for people.
    pub message: String,
}

impl Fault {
    /// The machine or the runtime did not do it this time.
    #[must_use]
    pub fn later(message: impl Into<String>) -> Fault {
        Fault::new(Class::RetryLater, message)
    }

    /// An object, a key or a file that it refers to is not there.
    #[must_use]
    pub fn missing(message: impl Into<String>) -> Fault {
        Fault::new(Class::WaitForNews, message)
    }

    /// It contradicts itself, or asks for what this node does not have.
    #[must_use]
    pub fn invalid(message: impl Into<String>) -> Fault {
        Fault::new(Class::Final, message)
    }

    fn new(class: Class, message: impl Into<String>) -> Fault {
        let message = message.into();
        Fault { class, message }
    }

    /// The same with words before its own.
    #[must_use]
    pub fn within(self, what: &str) -> Fault {
        let message = format!("{what}: {}", self.message);
        Fault { message, ..self }
    }
}
