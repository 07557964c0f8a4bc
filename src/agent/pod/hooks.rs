//! Runs lifecycle hooks (upstream's `pkg/kubelet/lifecycle/handlers.go`).

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, LifecycleHandler, Pod};

use tracing::Instrument as _;

use crate::events::{Events, Kind};
use crate::metrics::Metrics;
use holdfast_core::pod::probe::{self, Hook, Http};
use holdfast_cri::{Exec, Runtime, RuntimeError, RuntimeErrorKind};
use holdfast_probes::{Dialer, HttpError};

/// Upper limit for a hook's HTTP request, so that no request leaks. The caller sets the actual deadline.
const HTTP_LIMIT: Duration = Duration::from_secs(3600);

/// What hooks use.
pub(crate) struct Parts {
    pub runtime: Arc<dyn Runtime>,
    /// Network access.
    pub dialer: Arc<dyn Dialer>,
    pub events: Events,
    pub metrics: Arc<Metrics>,
}

/// Runs a hook in the container `id`. `ip` is the pod's own address; pods on the host network have none. Returns the
/// error message if the hook fails. The caller limits the time.
pub async fn run(
    parts: &Parts,
    pod: &Pod,
    container: &Container,
    handler: &LifecycleHandler,
    id: &str,
    ip: Option<&str>,
) -> Result<(), String> {
    match probe::hook(handler, container, ip)? {
        Hook::Sleep(time) => {
            let guard = InterruptedSleep(parts);
            tokio::time::sleep(time).await;
            std::mem::forget(guard);
            Ok(())
        }
        Hook::Exec(command) => match exec(parts, id, &command).await {
            Ok(done) if done.code == 0 => Ok(()),
            Ok(done) => {
                // The output may be secret, so it is logged at trace level only.
                tracing::trace!(
                    output = probe::limit_output(&done.output),
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
        Hook::Http(request) => match parts.dialer.http(&request, HTTP_LIMIT).await {
            Err(HttpError::Plain) => {
                let message = format!(
                    "request to HTTPS lifecycle hook {} got HTTP response, retry with HTTP succeeded",
                    request.host
                );
                retry_plain_http(parts, &request).await?;
                parts.metrics.hook_in_plain_http();
                parts
                    .events
                    .pod(pod, None, Kind::Warning, "LifecycleHTTPFallback", message);
                Ok(())
            }
            // Any HTTP answer is a success.
            other => other.map(|_| ()).map_err(|e| e.to_string()),
        },
    }
}

/// Runs a command in a container. If the returned future is dropped, the call continues until the container exits.
/// containerd 2.1 may take long to stop a container while an ExecSync is pending whose client has cancelled.
async fn exec(parts: &Parts, id: &str, command: &[String]) -> Result<Exec, RuntimeError> {
    let (runtime, id, command) = (
        Arc::clone(&parts.runtime),
        id.to_owned(),
        command.to_owned(),
    );
    let call = async move { runtime.exec(&id, &command, None).await };
    let ended = tokio::spawn(call.in_current_span()).await;
    // The task is never aborted and a panic terminates the process, so this fails only during exit.
    ended.unwrap_or_else(|error| {
        Err(RuntimeError {
            kind: RuntimeErrorKind::Failed,
            code: None,
            message: error.to_string(),
        })
    })
}

/// Counts a `sleep` hook that is dropped before it completes.
struct InterruptedSleep<'a>(&'a Parts);

impl Drop for InterruptedSleep<'_> {
    fn drop(&mut self) {
        self.0.metrics.sleep_hook_interrupted();
    }
}

/// Repeats a request over plain HTTP, without the headers that only TLS may carry.
async fn retry_plain_http(parts: &Parts, request: &Http) -> Result<(), String> {
    let mut request = Http {
        tls: false,
        ..request.clone()
    };
    request
        .headers
        .retain(|(name, _)| !name.eq_ignore_ascii_case("authorization"));
    parts
        .dialer
        .http(&request, HTTP_LIMIT)
        .await
        .map(|_| ())
        .map_err(|e| e.to_string())
}
