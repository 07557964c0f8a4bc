//! Reports the outcome and the duration of each call to the runtime.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::transport::{Channel, Error};
use tower::Service;
use tracing::Instrument as _;

/// Receives a call's operation as the kubelet names it, whether the call was refused, and its duration.
pub type Report = Arc<dyn Fn(&'static str, bool, Duration) + Send + Sync>;

/// The operations of `pkg/kubelet/kuberuntime/instrumented_services.go`; other calls are not counted.
const OPERATIONS: [(&str, &str); 28] = [
    ("Version", "version"),
    ("Status", "status"),
    ("CreateContainer", "create_container"),
    ("StartContainer", "start_container"),
    ("StopContainer", "stop_container"),
    ("RemoveContainer", "remove_container"),
    ("ListContainers", "list_containers"),
    ("ContainerStatus", "container_status"),
    ("UpdateContainerResources", "update_container"),
    ("ReopenContainerLog", "reopen_container_log"),
    ("ExecSync", "exec_sync"),
    ("Exec", "exec"),
    ("Attach", "attach"),
    ("RunPodSandbox", "run_podsandbox"),
    ("StopPodSandbox", "stop_podsandbox"),
    ("RemovePodSandbox", "remove_podsandbox"),
    ("PodSandboxStatus", "podsandbox_status"),
    ("ListPodSandbox", "list_podsandbox"),
    ("ListContainerStats", "list_container_stats"),
    ("ContainerStats", "container_stats"),
    ("PortForward", "port_forward"),
    ("UpdatePodSandboxResources", "update_podsandbox_resources"),
    ("ListImages", "list_images"),
    ("ImageStatus", "image_status"),
    ("PullImage", "pull_image"),
    ("RemoveImage", "remove_image"),
    ("ImageFsInfo", "image_fs_info"),
    ("RuntimeConfig", "runtime_config"),
];

fn operation(path: &str) -> Option<&'static str> {
    let name = path.rsplit('/').next().unwrap_or_default();
    OPERATIONS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, operation)| *operation)
}

/// A channel that reports its calls.
#[derive(Clone)]
pub(super) struct Measured {
    pub(super) channel: Channel,
    pub(super) report: Option<Report>,
}

impl Service<Request<Body>> for Measured {
    type Response = Response<Body>;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Service::poll_ready(&mut self.channel, cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let report = self.report.clone().zip(operation(request.uri().path()));
        let span = tracing::info_span!(target: "trace::cri", "rpc", otel.name = request.uri().path().trim_start_matches('/'), otel.kind = "client");
        let answer = Service::call(&mut self.channel, request).instrument(span);
        Box::pin(async move {
            let begun = Instant::now();
            let answer = answer.await;
            if let Some((report, operation)) = report {
                // A refusal has no body: its status is in the headers.
                let refused = answer.as_ref().map_or(true, |a| {
                    a.headers().get("grpc-status").is_some_and(|s| s != "0")
                });
                report(operation, refused, begun.elapsed());
            }
            answer
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_named_like_the_kubelets() {
        assert_eq!(
            operation("/runtime.v1.RuntimeService/RunPodSandbox"),
            Some("run_podsandbox")
        );
        assert_eq!(
            operation("/runtime.v1.ImageService/PullImage"),
            Some("pull_image")
        );
        assert_eq!(
            operation("/containerd.services.content.v1.Content/ListStatuses"),
            None
        );
    }
}
