//! The images of a container, and step 9: pull secrets.

use std::sync::Arc;

use async_trait::async_trait;
use holdfast_proto::cri as pb;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt as _;

use super::prepare::node_config;
use super::{Asset, Job, Result};
use crate::{Kind, image};
use holdfast_core::fault::Fault;
use holdfast_core::pod;
use holdfast_core::pod::actions::Start;
use holdfast_core::pod::cri_config;
use holdfast_core::pod::journal::Step;
use holdfast_core::pod::worker::Outcome;

#[async_trait]
impl image::SandboxMessage for Job {
    /// Waits until the pod is prepared. As in the kubelet, images are pulled only for a prepared pod.
    async fn sandbox_message(&self) -> std::result::Result<pb::PodSandboxConfig, Fault> {
        let setup = match self.setup().await? {
            Some(setup) => setup,
            None => {
                let mut setup = self.tools.setup.subscribe();
                let made = setup.wait_for(Option::is_some).await;
                let made = made.map_err(|e| Fault::later(e.to_string()))?.clone();
                made.ok_or_else(|| Fault::later("the pod has no cgroup and directories yet"))?
            }
        };
        let node = node_config(&self.parts().settings, &self.pod, &setup);
        let newest = self.observed.sandboxes.first();
        let attempt = newest.map_or(0, |sandbox| sandbox.attempt);
        cri_config::sandbox(&self.pod, attempt, &node)
    }
}

impl Job {
    pub(super) async fn pull(&self, start: &Start) -> Result<(Outcome, Option<Asset>)> {
        let name = &start.container.name;
        let secrets = self.pull_secrets().await;
        let (parts, pod) = (self.parts(), &self.pod);
        let whose = image::PullContext {
            pod,
            role: start.role,
            sandbox: self,
            secrets: &secrets,
        };
        let ensure = image::ensure_all(&parts.images, whose, &start.container);
        let pulled = self
            .log()
            .step(Step::Image, name, ensure)
            .await
            .map_err(super::start::waiting)?;
        let asset = Asset::Pulled(name.clone(), Arc::new(pulled));
        Ok((Outcome::Done, Some(asset)))
    }

    /// Returns the existing pull secrets; missing ones are reported and left out.
    async fn pull_secrets(&self) -> Vec<Arc<Secret>> {
        let pod = &self.pod;
        let namespace = pod.namespace().unwrap_or_default();
        let (mut found, mut missing) = (vec![], vec![]);
        for reference in pod::spec(pod).image_pull_secrets.iter().flatten() {
            match self.parts().api.secret(&namespace, &reference.name).await {
                Ok(secret) => found.push(secret),
                Err(_) => missing.push(reference.name.clone()),
            }
        }
        if !missing.is_empty() {
            let message = format!(
                "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
                missing.join(", ")
            );
            self.emit_event(Kind::Warning, "FailedToRetrieveImagePullSecret", message);
        }
        found
    }
}
