//! The gRPC health check, in plain text.

use std::time::Duration;

use holdfast_proto::failure::{code_name, go_error};
use holdfast_proto::health::HealthCheckRequest;
use holdfast_proto::health::health_check_response::ServingStatus;
use holdfast_proto::health::health_client::HealthClient;
use hyper_util::rt::TokioIo;
use tonic::Code;
use tonic::transport::{Endpoint, Uri};

/// Checks the health of `service`; the error is the text of the failure.
pub async fn check(host: &str, port: u16, service: &str, timeout: Duration) -> Result<(), String> {
    let address = if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    };
    let start = tokio::time::Instant::now();
    let (target, shown) = (host.to_owned(), holdfast_core::time::shown(timeout));
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .and_then(|e| e.user_agent(holdfast_core::version::PROBE_AGENT))
        .map_err(|e| e.to_string())?;
    // Dialled separately, so that the error is that of the dial.
    let (report, mut dialled) = tokio::sync::oneshot::channel();
    let mut report = Some(report);
    let connector = tower::service_fn(move |_: Uri| {
        let (target, report) = (target.clone(), report.take());
        async move {
            let result = super::connect(&target, port).await;
            if let Some(report) = report {
                // After the deadline the receiver no longer exists.
                let _ = report.send(result.as_ref().err().cloned());
            }
            result.map(TokioIo::new).map_err(std::io::Error::other)
        }
    });
    let channel = match tokio::time::timeout(timeout, endpoint.connect_with_connector(connector))
        .await
    {
        Err(_) => {
            return Err(format!(
                "timeout: failed to connect service {address:?} within {shown}: context deadline exceeded"
            ));
        }
        Ok(Err(error)) => {
            let why = dialled
                .try_recv()
                .ok()
                .flatten()
                .unwrap_or_else(|| error.to_string());
            return Err(format!(
                "error: failed to connect service at {address:?}: {why}"
            ));
        }
        Ok(Ok(channel)) => channel,
    };
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    let left = timeout.saturating_sub(start.elapsed());
    match tokio::time::timeout(left, HealthClient::new(channel).check(request)).await {
        Err(_) => Err(format!(
            "timeout: health rpc did not complete within {shown}"
        )),
        Ok(Err(status)) if status.code() == Code::Unimplemented => Err(format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
            status.message()
        )),
        Ok(Err(status)) => Err(format!(
            "error: health rpc probe failed: {}",
            go_error(code_name(status.code()), status.message())
        )),
        Ok(Ok(answer)) => match answer.into_inner().status() {
            ServingStatus::Serving => Ok(()),
            other => Err(format!(
                "service unhealthy (responded with {:?})",
                other.as_str_name()
            )),
        },
    }
}
