//! Drivers of dynamic resource allocation: the calls to them (DRAPlugin v1, and v1beta1 of older drivers), and their
//! reports of device health (DRAResourceHealth v1alpha1, KEP-4680).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_proto::failure::{Failure, code_name};
use holdfast_proto::{dra as pb, dra_health, dra_v1beta1 as beta};
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use super::{PluginError, channel, within};
use holdfast_core::node::claims::ClaimId;
use holdfast_core::node::claims::checkpoint::Device;
use holdfast_core::node::claims::health::DeviceReport;
use holdfast_core::pod::status::devices::Health;

/// Timeout of a call; the kubelet's value.
const CALL: Duration = Duration::from_secs(45);

/// The supported services, as drivers name them when they register. The driver's order decides which one is used.
pub const SERVICES: [&str; 2] = ["v1.DRAPlugin", "v1beta1.DRAPlugin"];

/// A driver's answers, by claim uid.
pub type Answers<T> = BTreeMap<String, Result<T, String>>;

/// Receives each call to a driver: the path of the method, gRPC's name of the code, and the duration.
pub type Report = Arc<dyn Fn(&'static str, &str, Duration) + Send + Sync>;

#[derive(Clone)]
enum Client {
    V1(pb::dra_plugin_client::DraPluginClient<Channel>),
    V1beta1(beta::dra_plugin_client::DraPluginClient<Channel>),
}

/// A driver. Clones share the connection.
#[derive(Clone)]
pub struct Driver {
    client: Client,
    channel: Channel,
    report: Report,
}

/// The stream of a driver's reports of device health.
pub struct HealthStream(Streaming<dra_health::NodeWatchResourcesResponse>);

/// Why the health of a driver's devices is not reported.
#[derive(Debug, thiserror::Error)]
pub enum HealthError {
    /// The driver does not report health.
    #[error("the driver does not report its devices' health")]
    Unsupported,
    /// The call failed, or the stream broke off.
    #[error("{0}")]
    Failed(Failure),
}

impl From<Status> for HealthError {
    fn from(status: Status) -> HealthError {
        match status.code() {
            Code::Unimplemented => HealthError::Unsupported,
            _ => HealthError::Failed(status.into()),
        }
    }
}

fn health_of(device: dra_health::DeviceHealth) -> DeviceReport {
    let health = match device.health() {
        dra_health::HealthStatus::Healthy => Health::Healthy,
        dra_health::HealthStatus::Unhealthy => Health::Unhealthy,
        dra_health::HealthStatus::Unknown => Health::Unknown,
    };
    let named = device.device.unwrap_or_default();
    DeviceReport {
        pool: named.pool_name,
        device: named.device_name,
        health,
        message: device.message,
        seconds: device.health_check_timeout_seconds,
    }
}

impl HealthStream {
    /// Returns the driver's next report; `None` at the end of the stream.
    ///
    /// # Errors
    ///
    /// Fails if the driver does not report health, or if the stream has broken off.
    pub async fn next(&mut self) -> Result<Option<Vec<DeviceReport>>, HealthError> {
        let message = self.0.message().await?;
        Ok(message.map(|m| m.devices.into_iter().map(health_of).collect()))
    }
}

/// Converts an answer about one claim: any error text is a failure.
fn outcome<T>(error: String, done: T) -> Result<T, String> {
    match error.is_empty() {
        true => Ok(done),
        false => Err(error),
    }
}

fn list(items: Vec<String>) -> Option<Vec<String>> {
    Some(items).filter(|items| !items.is_empty())
}

macro_rules! version {
    ($module:ident, $prepared:ident, $claims:ident, $share:expr) => {
        fn $claims(claims: &[ClaimId]) -> Vec<$module::Claim> {
            let claim = |claim: &ClaimId| $module::Claim {
                namespace: claim.namespace.clone(),
                uid: claim.uid.clone(),
                name: claim.name.clone(),
            };
            claims.iter().map(claim).collect()
        }

        fn $prepared(answer: $module::NodePrepareResourcesResponse) -> Answers<Vec<Device>> {
            let share: fn(&$module::Device) -> Option<String> = $share;
            let device = |device: $module::Device| Device {
                share_id: share(&device),
                pool_name: device.pool_name,
                device_name: device.device_name,
                request_names: list(device.request_names),
                cdi_device_ids: list(device.cdi_device_ids),
            };
            let claim = |(uid, claim): (String, $module::NodePrepareResourceResponse)| {
                let devices = claim.devices.into_iter().map(device).collect();
                (uid, outcome(claim.error, devices))
            };
            answer.claims.into_iter().map(claim).collect()
        }
    };
}

version!(pb, prepared, claims, |device| device.share_id.clone());
version!(beta, prepared_beta, claims_beta, |_| None);

impl Driver {
    /// Creates a driver for a socket; `services` are those that the driver has announced. Nothing is sent yet. `report`
    /// receives every call that returns.
    pub fn new(socket: &Path, services: &[String], report: Report) -> Result<Driver, String> {
        let mut known = services.iter();
        let Some(service) = known.find(|s| SERVICES.contains(&s.as_str())) else {
            return Err(format!(
                "the driver serves {services:?}, but none of the supported {SERVICES:?}"
            ));
        };
        let channel = channel(socket).map_err(|e| e.to_string())?;
        let own = channel.clone();
        let client = match service.as_str() == SERVICES[0] {
            true => Client::V1(pb::dra_plugin_client::DraPluginClient::new(own)),
            false => Client::V1beta1(beta::dra_plugin_client::DraPluginClient::new(own)),
        };
        Ok(Driver {
            client,
            channel,
            report,
        })
    }

    /// Watches the health of the driver's devices while the driver runs. The call is made whether or not the driver has
    /// announced this service, because drivers need not announce it.
    ///
    /// # Errors
    ///
    /// Fails if the driver does not report health, or if the call fails.
    pub async fn health(&self) -> Result<HealthStream, HealthError> {
        let channel = self.channel.clone();
        let mut client =
            dra_health::dra_resource_health_client::DraResourceHealthClient::new(channel);
        let request = dra_health::NodeWatchResourcesRequest {};
        let stream = client.node_watch_resources(request).await?;
        Ok(HealthStream(stream.into_inner()))
    }

    fn report_call<T>(
        &self,
        paths: [&'static str; 2],
        begun: Instant,
        answer: Result<T, Failure>,
    ) -> Result<T, PluginError> {
        let path = match self.client {
            Client::V1(_) => paths[0],
            Client::V1beta1(_) => paths[1],
        };
        let code = answer.as_ref().err().map_or(Code::Ok, |e| e.code);
        (self.report)(path, code_name(code), begun.elapsed());
        answer.map_err(PluginError::from)
    }

    /// Prepares claims. Idempotent.
    pub async fn prepare(
        &self,
        requested: &[ClaimId],
    ) -> Result<Answers<Vec<Device>>, PluginError> {
        let begun = Instant::now();
        let answer = match self.client.clone() {
            Client::V1(mut client) => {
                let message = pb::NodePrepareResourcesRequest {
                    claims: claims(requested),
                };
                within(CALL, message, async |m| {
                    client.node_prepare_resources(m).await
                })
                .await
                .map(prepared)
            }
            Client::V1beta1(mut client) => {
                let message = beta::NodePrepareResourcesRequest {
                    claims: claims_beta(requested),
                };
                within(CALL, message, async |m| {
                    client.node_prepare_resources(m).await
                })
                .await
                .map(prepared_beta)
            }
        };
        let paths = [
            "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
            "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources",
        ];
        self.report_call(paths, begun, answer)
    }

    /// Unprepares claims. Idempotent.
    pub async fn unprepare(&self, requested: &[ClaimId]) -> Result<Answers<()>, PluginError> {
        let begun = Instant::now();
        let answer: Result<Answers<()>, Failure> = match self.client.clone() {
            Client::V1(mut client) => {
                let message = pb::NodeUnprepareResourcesRequest {
                    claims: claims(requested),
                };
                let answer = within(CALL, message, async |m| {
                    client.node_unprepare_resources(m).await
                });
                let claims = answer.await.map(|answer| answer.claims.into_iter());
                claims.map(|c| c.map(|(uid, c)| (uid, outcome(c.error, ()))).collect())
            }
            Client::V1beta1(mut client) => {
                let message = beta::NodeUnprepareResourcesRequest {
                    claims: claims_beta(requested),
                };
                let answer = within(CALL, message, async |m| {
                    client.node_unprepare_resources(m).await
                });
                let claims = answer.await.map(|answer| answer.claims.into_iter());
                claims.map(|c| c.map(|(uid, c)| (uid, outcome(c.error, ()))).collect())
            }
        };
        let paths = [
            "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources",
            "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources",
        ];
        self.report_call(paths, begun, answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_supported_service_in_the_drivers_order_is_used() {
        let report: Report = Arc::new(|_, _, _| {});
        let new = |services: &[&str]| {
            let services: Vec<String> = services.iter().map(|s| (*s).to_owned()).collect();
            Driver::new(Path::new("/run/x.sock"), &services, Arc::clone(&report))
        };
        let is_v1 = |services: &[&str]| {
            let driver = new(services).expect("a driver");
            matches!(driver.client, Client::V1(_))
        };
        assert!(is_v1(&["v1.DRAPlugin", "v1beta1.DRAPlugin"]));
        assert!(!is_v1(&["v1alpha3", "v1beta1.DRAPlugin", "v1.DRAPlugin"]));
        let refused = new(&["v1alpha4.Node"]).err().expect("a refusal");
        assert!(refused.contains("v1alpha4.Node"), "{refused}");
    }
}
