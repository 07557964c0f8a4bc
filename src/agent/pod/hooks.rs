//! Running lifecycle hooks (upstream's `lifecycle/handlers.go`).

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, LifecycleHandler, Pod};

use tracing::Instrument as _;

use crate::agent::{Context, Kind};
use crate::core::pod::probe::{self, Hook, Http};
use crate::cri::{Exec, RuntimeError, RuntimeErrorKind};
use crate::probes::HttpError;

/// A hook's HTTP request is bounded by the caller; this is only so that none is left for ever.
const HTTP_LIMIT: Duration = Duration::from_secs(3600);

/// Runs a hook in the container `id`; `ip` is the pod's own address, which pods on the host's network lack.
/// The error is what went wrong. The caller bounds the time.
pub async fn run(
    context: &Context,
    pod: &Pod,
    container: &Container,
    handler: &LifecycleHandler,
    id: &str,
    ip: Option<&str>,
) -> Result<(), String> {
    match probe::hook(handler, container, ip)? {
        Hook::Sleep(time) => {
            let cut = Cut(context);
            tokio::time::sleep(time).await;
            std::mem::forget(cut);
            Ok(())
        }
        Hook::Exec(command) => match exec(context, id, &command).await {
            Ok(done) if done.code == 0 => Ok(()),
            Ok(done) => {
                // What it printed may be secret: it is in the log at the highest verbosity only.
                tracing::trace!(
                    output = probe::limited(&done.output),
                    "a lifecycle hook failed"
                );
                Err(format!(
                    "command {:?} exited with {}",
                    command.first().map(String::as_str).unwrap_or_default(),
                    done.code
                ))
            }
            Err(error) => Err(error.to_string()),
        },
        Hook::Http(request) => match context.dialer.http(&request, HTTP_LIMIT).await {
            Err(HttpError::Plain) => {
                let message = format!(
                    "the HTTPS hook of {} was answered in plain HTTP, and repeated so",
                    request.host
                );
                plain(context, &request).await?;
                context.metrics.hook_in_plain_http();
                context
                    .events
                    .pod(pod, None, Kind::Warning, "LifecycleHTTPFallback", message);
                Ok(())
            }
            // Any answer will do.
            other => other.map(|_| ()).map_err(|e| e.to_string()),
        },
    }
}

/// Runs a command in a container. The call goes on where this is dropped, and ends with the container: containerd 2.1 may take
/// long to stop a container while an ExecSync that its client has cut off is still there.
async fn exec(context: &Context, id: &str, command: &[String]) -> Result<Exec, RuntimeError> {
    let (runtime, id, command) = (
        Arc::clone(&context.runtime),
        id.to_owned(),
        command.to_owned(),
    );
    let call = async move { runtime.exec(&id, &command, None).await };
    let ended = tokio::spawn(call.in_current_span()).await;
    // It is not aborted, and a panic ends the process: it fails only when the process ends.
    ended.unwrap_or_else(|error| {
        Err(RuntimeError {
            kind: RuntimeErrorKind::Failed,
            code: None,
            message: error.to_string(),
        })
    })
}

/// Counts a sleep that does not come to its end.
struct Cut<'a>(&'a Context);

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        self.0.metrics.sleep_cut();
    }
}

/// The same request in plain HTTP, without what only TLS should carry.
async fn plain(context: &Context, request: &Http) -> Result<(), String> {
    let mut request = Http {
        tls: false,
        ..request.clone()
    };
    request
        .headers
        .retain(|(name, _)| !name.eq_ignore_ascii_case("authorization"));
    context
        .dialer
        .http(&request, HTTP_LIMIT)
        .await
        .map(|_| ())
        .map_err(|e| e.to_string())
}
