//! Failed calls in the format of gRPC's Go library. The kubelet's events, logs and metrics show it, and users' scripts
//! search for it.

use std::error::Error;
use std::fmt;

use tonic::{Code, Status, TimeoutExpired};

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// `DeadlineExceeded` if our own deadline has passed, `Unavailable` if the connection broke.
    pub code: Code,
    /// The server's message, or the description of the connection's failure.
    pub message: String,
}

impl Failure {
    /// Returns the failure of a call whose own deadline has passed.
    #[must_use]
    pub fn timed_out() -> Failure {
        Failure {
            code: Code::DeadlineExceeded,
            message: "context deadline exceeded".into(),
        }
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Failure {
        if is_caused_by_time(status.source()) {
            return Failure::timed_out();
        }
        // A status that a server has sent has no source.
        let code = match (status.code(), status.source()) {
            (Code::Unknown | Code::Internal, Some(_)) => Code::Unavailable,
            (code, _) => code,
        };
        Failure {
            code,
            message: status.message().to_owned(),
        }
    }
}

fn is_caused_by_time(cause: Option<&(dyn Error + 'static)>) -> bool {
    cause.is_some_and(|cause| cause.is::<TimeoutExpired>() || is_caused_by_time(cause.source()))
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&go_error(code_name(self.code), &self.message))
    }
}

/// Formats a failure as Go's gRPC library does, because users search for that text. `code` is a name of [`code_name`].
#[must_use]
pub fn go_error(code: &str, message: &str) -> String {
    format!("rpc error: code = {code} desc = {message}")
}

/// Returns the name of a code in Go's gRPC library.
#[must_use]
pub fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_formatted_as_in_go() {
        let text = |status: Status| Failure::from(status).to_string();
        assert_eq!(
            text(Status::cancelled("stopped")),
            "rpc error: code = Canceled desc = stopped"
        );
        assert_eq!(
            text(Status::internal("the disk was removed")),
            "rpc error: code = Internal desc = the disk was removed"
        );
        assert_eq!(
            text(Status::from_error(Box::new(TimeoutExpired(())))),
            "rpc error: code = DeadlineExceeded desc = context deadline exceeded"
        );
        let broken = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert_eq!(
            Failure::from(Status::from_error(Box::new(broken))).code,
            Code::Unavailable
        );
    }
}
