//! Reports the outcome of each request to an apiserver.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use hyper::{Request, Response};
use tokio::time::Instant;
use tower::Service;

/// Receives a request's method, host, status code (`None` without an answer) and duration.
pub type Report = Arc<dyn Fn(&str, &str, Option<u16>, Duration) + Send + Sync>;

/// A service that reports its requests.
#[derive(Clone)]
pub(super) struct Measured<S> {
    pub(super) inner: S,
    pub(super) report: Option<Report>,
}

impl<S, B, C> Service<Request<B>> for Measured<S>
where
    S: Service<Request<B>, Response = Response<C>>,
    C: 'static,
    S::Future: Send + 'static,
    S::Response: 'static,
    S::Error: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let report = self.report.clone().map(|report| {
            (
                report,
                request.method().clone(),
                request.uri().authority().map(ToString::to_string),
                Instant::now(),
            )
        });
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            if let Some((report, method, host, begun)) = report {
                report(
                    method.as_str(),
                    host.as_deref().unwrap_or_default(),
                    answer.as_ref().ok().map(|a| a.status().as_u16()),
                    begun.elapsed(),
                );
            }
            answer
        })
    }
}
