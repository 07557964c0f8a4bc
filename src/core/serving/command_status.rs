//! The status at the end of an exec session, as runtimes write it to the error stream (`v4.channel.k8s.io`).
//!
//! Format: `staging/src/k8s.io/cri-streaming/pkg/streaming/remotecommand/exec.go`. Message with the exit code:
//! containerd's `internal/cri/server/streaming.go`.

use serde::Serialize;

use crate::pod::container_hash::escape_as_go;

/// `metav1.Status`, with the field order of Go.
#[derive(Default, Serialize)]
struct Status {
    metadata: Metadata,
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Details>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<u16>,
}

#[derive(Default, Serialize)]
struct Metadata {}

#[derive(Serialize)]
struct Details {
    causes: [Cause; 1],
}

#[derive(Serialize)]
struct Cause {
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    message: String,
}

/// The status of a command that exited with a code, or that the runtime failed to run.
#[must_use]
pub fn command_status(command: &[String], ended: &Result<u32, String>) -> String {
    let failure = |message, reason, cause, code| Status {
        status: "Failure",
        message: Some(message),
        reason: Some(reason),
        details: Some(Details { causes: [cause] }),
        code,
        ..Status::default()
    };
    let status = match ended {
        Ok(0) => Status {
            status: "Success",
            ..Status::default()
        },
        Ok(code) => failure(
            format!(
                "command terminated with non-zero exit code: error executing command [{}], exit code {code}",
                command.join(" ")
            ),
            "NonZeroExitCode",
            Cause {
                reason: Some("ExitCode"),
                message: code.to_string(),
            },
            None,
        ),
        Err(why) => {
            let why =
                format!("error executing command in container: failed to exec in container: {why}");
            failure(
                format!("Internal error occurred: {why}"),
                "InternalError",
                Cause {
                    reason: None,
                    message: why,
                },
                Some(500),
            )
        }
    };
    // Maps of strings and numbers: serde_json cannot fail on them.
    escape_as_go(&serde_json::to_string(&status).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_statuses_have_the_runtimes_messages() {
        let command = ["sh".to_owned(), "-c".to_owned(), "exit 3 >&2".to_owned()];
        for (ended, expected) in [
            (Ok(0), r#"{"metadata":{},"status":"Success"}"#),
            (
                Ok(3),
                r#"{"metadata":{},"status":"Failure","message":"command terminated with non-zero exit code: error executing command [sh -c exit 3 \u003e\u00262], exit code 3","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"3"}]}}"#,
            ),
            (
                Err("why".to_owned()),
                r#"{"metadata":{},"status":"Failure","message":"Internal error occurred: error executing command in container: failed to exec in container: why","reason":"InternalError","details":{"causes":[{"message":"error executing command in container: failed to exec in container: why"}]},"code":500}"#,
            ),
        ] {
            assert_eq!(command_status(&command, &ended), expected);
        }
    }
}
