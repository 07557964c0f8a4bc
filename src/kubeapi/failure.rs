//! Classes of failed requests to the apiserver, by which callers decide. The texts are for people. Only this file
//! searches a text, because nothing else in the apiserver's answer separates two kinds of conflict.

use std::time::Duration;

use kube::core::Status;
use kube::core::response::StatusDetails;
use kube::runtime::watcher;

/// Why a request failed. The text is the apiserver's message, or the transport's error with its causes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApiFailure {
    /// The object does not exist (404).
    #[error("{0}")]
    NotFound(String),
    /// The name is in use (409, AlreadyExists).
    #[error("{0}")]
    AlreadyExists(String),
    /// The name belongs to an object with another uid than the request demands, so the intended object was deleted. The
    /// status is 409 for preconditions, and 422 on `metadata.uid` for patches.
    #[error("{0}")]
    Replaced(String),
    /// The object has changed since it was read (409): read it again, then retry.
    #[error("{0}")]
    Conflict(String),
    /// The apiserver does not accept our credentials (401).
    #[error("{0}")]
    Unauthorized(String),
    /// The request is not authorised (403). Expected for a moment after a pod is bound, and after its deletion: a node
    /// may read only the objects to which its pods refer.
    #[error("{0}")]
    Forbidden(String),
    /// The apiserver will never accept this request (400, 413, 415, 422).
    #[error("{0}")]
    Invalid(String),
    /// The requested resource version has been compacted (410): list again.
    #[error("{0}")]
    Expired(String),
    /// The apiserver limits the rate of requests (429). It also refuses an eviction that a disruption budget forbids in
    /// this way.
    #[error("{message}")]
    TooManyRequests {
        /// The apiserver's message.
        message: String,
        /// How long to wait before the next request, if the apiserver gives a time.
        retry_after: Option<Duration>,
    },
    /// No answer in time (408, 504, or our own deadline). The request may have been carried out.
    #[error("{0}")]
    Timeout(String),
    /// The apiserver was not reached, or cannot answer now (500, 502, 503, the transport).
    #[error("{0}")]
    Unavailable(String),
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

impl ApiFailure {
    /// Whether the intended object does not exist any more, so that a retry has no purpose.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, ApiFailure::NotFound(_) | ApiFailure::Replaced(_))
    }

    /// Whether the apiserver has decided the request. If not, the object's state is unknown, and the request may even
    /// have been carried out.
    #[must_use]
    pub fn is_answer(&self) -> bool {
        !matches!(
            self,
            ApiFailure::Unauthorized(_)
                | ApiFailure::TooManyRequests { .. }
                | ApiFailure::Timeout(_)
                | ApiFailure::Unavailable(_)
                | ApiFailure::Other(_)
        )
    }

    /// How long to wait before the next request, if the apiserver gives a time.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            ApiFailure::TooManyRequests { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

/// Failures that our own side of the connection finds.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ClientFailure {
    /// The deadline has passed.
    #[error("{request} was not answered within {}s", after.as_secs())]
    Deadline {
        /// Method and path.
        request: String,
        /// The deadline.
        after: Duration,
    },
    /// The apiserver refused without a Status, as its flow control does before a request is handled.
    #[error("the apiserver is throttling requests: {message}")]
    Busy {
        /// The apiserver's message.
        message: String,
        /// How long to wait before the next request, if the apiserver gives a time.
        retry_after: Option<Duration>,
    },
}

impl From<&ClientFailure> for ApiFailure {
    fn from(error: &ClientFailure) -> ApiFailure {
        match error {
            ClientFailure::Deadline { .. } => ApiFailure::Timeout(error.to_string()),
            ClientFailure::Busy { retry_after, .. } => ApiFailure::TooManyRequests {
                message: error.to_string(),
                retry_after: *retry_after,
            },
        }
    }
}

impl From<Status> for ApiFailure {
    fn from(status: Status) -> ApiFailure {
        let text = status.message.clone();
        let details = status.details.as_ref();
        match status.code {
            401 => ApiFailure::Unauthorized(text),
            403 => ApiFailure::Forbidden(text),
            404 => ApiFailure::NotFound(text),
            409 if status.reason == "AlreadyExists" => ApiFailure::AlreadyExists(text),
            409 if is_about_uid(&text) => ApiFailure::Replaced(text),
            409 => ApiFailure::Conflict(text),
            410 => ApiFailure::Expired(text),
            422 if details.is_some_and(has_immutable_uid) => ApiFailure::Replaced(text),
            400 | 413 | 415 | 422 => ApiFailure::Invalid(text),
            429 => ApiFailure::TooManyRequests {
                message: text,
                retry_after: details
                    .map(|d| Duration::from_secs(d.retry_after_seconds.into()))
                    .filter(|wait| !wait.is_zero()),
            },
            408 | 504 => ApiFailure::Timeout(text),
            500 | 502 | 503 => ApiFailure::Unavailable(text),
            _ => ApiFailure::Other(text),
        }
    }
}

/// Whether a conflict is about the uid that the request demanded. The apiserver's Status has no field for this
/// (`storage.Preconditions.Check`); the message of a version conflict has the words "the object has been modified".
fn is_about_uid(message: &str) -> bool {
    message.contains("UID in precondition")
}

fn has_immutable_uid(details: &StatusDetails) -> bool {
    details.causes.iter().any(|c| c.field == "metadata.uid")
}

impl From<kube::Error> for ApiFailure {
    fn from(error: kube::Error) -> ApiFailure {
        if let Some(client_failure) = client_failure(&error) {
            return client_failure.into();
        }
        match error {
            kube::Error::Api(status) => (*status).into(),
            kube::Error::Service(_)
            | kube::Error::HyperError(_)
            | kube::Error::ReadEvents(_)
            | kube::Error::Auth(_) => ApiFailure::Unavailable(chain(&error)),
            _ => ApiFailure::Other(chain(&error)),
        }
    }
}

/// Finds an [`ClientFailure`] among the causes of an error.
fn client_failure<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a ClientFailure> {
    let mut cause = Some(error);
    while let Some(this) = cause {
        // The error inside an io::Error is not one of its sources.
        let inner = this
            .downcast_ref::<std::io::Error>()
            .and_then(std::io::Error::get_ref);
        let found = this
            .downcast_ref()
            .or_else(|| inner.and_then(|e| client_failure(e)));
        if found.is_some() {
            return found;
        }
        cause = this.source();
    }
    None
}

/// Classifies the error that ended a watch or prevented its start.
#[must_use]
pub(crate) fn watch_failure(error: watcher::Error) -> ApiFailure {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => error.into(),
        watcher::Error::WatchError(status) => (*status).into(),
        watcher::Error::NoResourceVersion => ApiFailure::Other(error.to_string()),
    }
}

/// Formats an error with its causes in one line.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn failure(status: serde_json::Value) -> ApiFailure {
        let status: Status = serde_json::from_value(status).expect("a Status");
        kube::Error::Api(Box::new(status)).into()
    }

    #[test]
    fn each_status_code_has_its_class() {
        let uid = "Operation cannot be fulfilled on pods \"p\": Precondition failed: UID in precondition: 1, UID in object meta: 2";
        let version = "Operation cannot be fulfilled on pods \"p\": the object has been modified; please apply your changes to the latest version and try again";
        type Check = fn(&ApiFailure) -> bool;
        let cases: Vec<(serde_json::Value, Check)> = vec![
            (json!({"code": 404, "reason": "NotFound"}), |f| {
                matches!(f, ApiFailure::NotFound(_)) && f.is_gone() && f.is_answer()
            }),
            (json!({"code": 409, "reason": "AlreadyExists"}), |f| {
                matches!(f, ApiFailure::AlreadyExists(_)) && !f.is_gone()
            }),
            (
                json!({"code": 409, "reason": "Conflict", "message": uid}),
                |f| matches!(f, ApiFailure::Replaced(_)) && f.is_gone(),
            ),
            (
                json!({"code": 409, "reason": "Conflict", "message": version}),
                |f| matches!(f, ApiFailure::Conflict(_)) && !f.is_gone(),
            ),
            (
                json!({"code": 422, "reason": "Invalid", "details": {"causes": [{"reason": "FieldValueInvalid", "field": "metadata.uid", "message": "field is immutable"}]}}),
                ApiFailure::is_gone,
            ),
            (
                json!({"code": 422, "reason": "Invalid", "details": {"causes": [{"field": "status.hostIPs"}]}}),
                |f| matches!(f, ApiFailure::Invalid(_)),
            ),
            (json!({"code": 403, "reason": "Forbidden"}), |f| {
                matches!(f, ApiFailure::Forbidden(_)) && f.is_answer()
            }),
            (json!({"code": 401}), |f| {
                matches!(f, ApiFailure::Unauthorized(_)) && !f.is_answer()
            }),
            (json!({"code": 410, "reason": "Expired"}), |f| {
                matches!(f, ApiFailure::Expired(_))
            }),
            (
                json!({"code": 429, "details": {"retryAfterSeconds": 3}}),
                |f| f.retry_after() == Some(Duration::from_secs(3)),
            ),
            (json!({"code": 429}), |f| f.retry_after().is_none()),
            (json!({"code": 504, "reason": "Timeout"}), |f| {
                matches!(f, ApiFailure::Timeout(_)) && !f.is_answer()
            }),
            (json!({"code": 503}), |f| {
                matches!(f, ApiFailure::Unavailable(_)) && !f.is_answer()
            }),
        ];
        for (status, holds) in cases {
            let failure = failure(status.clone());
            assert!(holds(&failure), "{status}: {failure:?}");
        }
    }

    #[test]
    fn client_side_timeouts_have_a_class() {
        let given_up = ClientFailure::Deadline {
            request: "GET /api".into(),
            after: Duration::from_secs(20),
        };
        let failure: ApiFailure = kube::Error::Service(Box::new(given_up)).into();
        assert_eq!(
            failure,
            ApiFailure::Timeout("GET /api was not answered within 20s".into())
        );
        let busy = ClientFailure::Busy {
            message: "later".into(),
            retry_after: Some(Duration::from_secs(1)),
        };
        // kube wraps the error of a body in other errors.
        let wrapped = kube::Error::ReadEvents(std::io::Error::other(busy));
        assert_eq!(
            ApiFailure::from(wrapped).retry_after(),
            Some(Duration::from_secs(1))
        );
    }
}
