//! The CRI v1 client over a unix socket.

use std::sync::Mutex;
use std::time::Duration;

use holdfast_proto::failure::{Failure, code_name};
use holdfast_proto::{cri as pb, socket};
use pb::image_service_client::ImageServiceClient;
use pb::runtime_service_client::RuntimeServiceClient;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::RuntimeError;
use super::RuntimeErrorKind;
use super::cache::{Detail, Remembered};
use super::events;
use super::measured::{Measured, Report};
use holdfast_core::pod::observed::ContainerState;

/// Maximum size of a message; the kubelet's value.
pub(super) const MESSAGE_LIMIT: usize = 16 << 20;
/// Timeout of connecting to the runtime.
const CONNECTION: Duration = Duration::from_secs(5);
/// A CRI client. Its connection is re-established automatically.
pub struct CriClient {
    pub(super) channel: Channel,
    pub(super) runtime: RuntimeServiceClient<Measured>,
    pub(super) images: ImageServiceClient<Measured>,
    /// The deadline of ordinary calls.
    pub(super) deadline: Duration,
    /// Cached details of containers, by id and state.
    pub(super) details: Mutex<Remembered<(String, ContainerState), Detail>>,
    pub(super) networks: Mutex<Remembered<String, (Vec<String>, bool)>>,
}

impl From<Status> for RuntimeError {
    fn from(status: Status) -> RuntimeError {
        // The failure has its own code: if the connection broke, the code of the status is `Unknown`.
        let failure = Failure::from(status);
        let kind = match failure.code {
            Code::NotFound => RuntimeErrorKind::NotFound,
            Code::Unavailable => RuntimeErrorKind::Unavailable,
            Code::DeadlineExceeded | Code::Cancelled => RuntimeErrorKind::Timeout,
            Code::Unimplemented => RuntimeErrorKind::Unimplemented,
            _ => RuntimeErrorKind::Failed,
        };
        RuntimeError {
            kind,
            code: Some(code_name(failure.code)),
            message: failure.message,
        }
    }
}

/// Converts the result of stopping or removing an object; success if the object does not exist.
pub(super) fn ignore_not_found<T>(result: Result<T, Status>) -> Result<(), RuntimeError> {
    match result {
        Err(status) if status.code() != Code::NotFound => Err(status.into()),
        _ => Ok(()),
    }
}

/// Creates a channel to an endpoint, which connects when it is used. `what` names the endpoint in errors.
fn channel(what: &str, endpoint: &str) -> Result<Channel, String> {
    if !endpoint.starts_with('/') && !endpoint.starts_with("unix://") {
        return Err(format!(
            "the {what} endpoint {endpoint:?} is not a unix socket; use for instance unix:///run/containerd/containerd.sock"
        ));
    }
    socket::channel(endpoint, CONNECTION)
        .map_err(|e| format!("the {what} endpoint {endpoint:?} cannot be used: {e}"))
}

impl CriClient {
    /// Creates a client for an endpoint such as `unix:///run/containerd/containerd.sock`. Nothing is sent yet. `report`
    /// receives every call that returns.
    pub fn new(
        endpoint: &str,
        deadline: Duration,
        report: Option<Report>,
    ) -> Result<CriClient, String> {
        let channel = channel("runtime", endpoint)?;
        let measured = Measured {
            channel: channel.clone(),
            report,
        };
        Ok(CriClient {
            runtime: RuntimeServiceClient::new(measured.clone())
                .max_decoding_message_size(MESSAGE_LIMIT),
            images: ImageServiceClient::new(measured).max_decoding_message_size(MESSAGE_LIMIT),
            channel,
            deadline,
            details: Mutex::default(),
            networks: Mutex::default(),
        })
    }

    /// Uses another endpoint for the image service (`imageServiceEndpoint`).
    pub fn with_images_at(
        self,
        endpoint: &str,
        report: Option<Report>,
    ) -> Result<CriClient, String> {
        let measured = Measured {
            channel: channel("image service", endpoint)?,
            report,
        };
        Ok(CriClient {
            images: ImageServiceClient::new(measured).max_decoding_message_size(MESSAGE_LIMIT),
            ..self
        })
    }

    pub(super) fn request<T>(&self, message: T) -> Request<T> {
        Self::within(self.deadline, message)
    }

    pub(super) fn within<T>(deadline: Duration, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(deadline);
        request
    }

    /// Builds a request to one of containerd's own services, about objects that were created over CRI.
    pub(super) fn to_containerd<T>(deadline: Duration, message: T) -> Request<T> {
        let mut request = Self::within(deadline, message);
        Self::name_namespace(&mut request);
        request
    }

    /// Sets the namespace of CRI's containers in a request to one of containerd's own services.
    pub(super) fn name_namespace<T>(request: &mut Request<T>) {
        request.metadata_mut().insert(
            "containerd-namespace",
            MetadataValue::from_static(events::NAMESPACE),
        );
    }

    /// Returns the runtime's name and version; fails if it does not speak CRI v1.
    pub async fn version(&self) -> Result<String, RuntimeError> {
        let answer = self
            .runtime
            .clone()
            .version(self.request(pb::VersionRequest {
                version: "0.1.0".into(),
            }))
            .await;
        let answer = answer.map_err(|status| {
            let mut error = RuntimeError::from(status);
            if error.kind == RuntimeErrorKind::Unimplemented {
                error.message = format!("the container runtime does not speak CRI v1 (runtime.v1.RuntimeService): upgrade it to containerd 1.6 or newer, and check that its CRI plugin is not disabled ({})", error.message);
            }
            error
        })?;
        let version = answer.into_inner();
        Ok(format!(
            "{}://{}",
            version.runtime_name, version.runtime_version
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_connection_counts_as_an_unavailable_runtime() {
        let broken = || std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        for (status, kind, code) in [
            (
                Status::from_error(Box::new(broken())),
                RuntimeErrorKind::Unavailable,
                "Unavailable",
            ),
            (
                Status::unknown("no such image"),
                RuntimeErrorKind::Failed,
                "Unknown",
            ),
            (
                Status::cancelled("stopped"),
                RuntimeErrorKind::Timeout,
                "Canceled",
            ),
        ] {
            let error = RuntimeError::from(status);
            assert_eq!((error.kind, error.code), (kind, Some(code)), "{error}");
        }
    }
}
