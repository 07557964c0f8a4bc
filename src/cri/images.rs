//! The image service of the CRI client, and containerd's progress of pulls.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_proto::content::ListStatusesRequest;
use holdfast_proto::content::content_client::ContentClient;
use holdfast_proto::cri as pb;
use tonic::Request;

use super::client::{CriClient, ignore_not_found};
use super::{Credentials, Image, ImageFilesystem, ImageInventory, RuntimeError};
use holdfast_core::pod::explain::Fetching;

impl CriClient {
    /// Returns the runtime's own configuration: JSON documents by name, which differ between runtimes.
    pub async fn configuration(&self) -> Result<BTreeMap<String, String>, RuntimeError> {
        let request = Self::within(Duration::from_secs(10), pb::StatusRequest { verbose: true });
        let answer = self.runtime.clone().status(request).await?;
        Ok(answer.into_inner().info.into_iter().collect())
    }

    /// Returns the image of sandboxes, which older versions of containerd name in their configuration; newer ones pin
    /// it.
    async fn sandbox_image(&self) -> Result<Option<String>, RuntimeError> {
        let info = self.configuration().await?;
        let config: Option<serde_json::Value> = info
            .get("config")
            .and_then(|text| serde_json::from_str(text).ok());
        Ok(config.and_then(|c| c["sandboxImage"].as_str().map(Into::into)))
    }

    /// Returns the image with this name, if the runtime has it.
    pub(super) async fn image_status(&self, name: &str) -> Result<Option<Image>, RuntimeError> {
        let image = pb::ImageSpec {
            image: name.into(),
            ..pb::ImageSpec::default()
        };
        let answer = self
            .images
            .clone()
            .image_status(self.request(pb::ImageStatusRequest {
                image: Some(image),
                verbose: false,
            }))
            .await?;
        Ok(answer.into_inner().image.map(image_of))
    }

    /// Lists all images.
    pub(super) async fn list_images(&self) -> Result<Vec<Image>, RuntimeError> {
        let answer = self
            .images
            .clone()
            .list_images(self.request(pb::ListImagesRequest::default()))
            .await?;
        Ok(answer
            .into_inner()
            .images
            .into_iter()
            .map(image_of)
            .collect())
    }

    /// Returns the filesystem with the images: the first one if the runtime has several.
    pub(super) async fn image_filesystem_info(&self) -> Result<ImageFilesystem, RuntimeError> {
        let filesystems = self
            .images
            .clone()
            .image_fs_info(self.request(pb::ImageFsInfoRequest {}))
            .await?
            .into_inner()
            .image_filesystems;
        let first = filesystems.into_iter().find(|f| f.fs_id.is_some());
        let first = first.unwrap_or_default();
        Ok(ImageFilesystem {
            mountpoint: first.fs_id.unwrap_or_default().mountpoint.into(),
            bytes: first.used_bytes.unwrap_or_default().value,
            inodes: first.inodes_used.map(|count| count.value),
        })
    }

    /// Lists all images, and which of them are in use.
    pub(super) async fn list_image_inventory(&self) -> Result<ImageInventory, RuntimeError> {
        let mountpoint = self.image_filesystem_info().await?.mountpoint;
        let sandbox = self.sandbox_image().await?;
        let mut images = self.list_images().await?;
        // Listed after the images, as in `pkg/kubelet/images/image_gc_manager.go`: a listed image that a new container uses
        // meanwhile counts as used.
        let containers = self.containers(None).await?;
        let names = |c: pb::Container| {
            [
                c.image_ref,
                c.image_id,
                c.image.map(|i| i.image).unwrap_or_default(),
            ]
        };
        let in_use = containers
            .into_iter()
            .flat_map(names)
            .filter(|name| !name.is_empty())
            .collect();
        for image in &mut images {
            image.pinned |= sandbox
                .as_ref()
                .is_some_and(|name| image.names.contains(name));
        }
        Ok(ImageInventory {
            images,
            in_use,
            mountpoint,
        })
    }

    /// Removes an image with all its names.
    pub(super) async fn delete_image(&self, id: &str) -> Result<(), RuntimeError> {
        let image = pb::ImageSpec {
            image: id.into(),
            ..pb::ImageSpec::default()
        };
        ignore_not_found(
            self.images
                .clone()
                .remove_image(self.request(pb::RemoveImageRequest { image: Some(image) }))
                .await,
        )
    }

    /// Returns the progress of the current pulls.
    pub(super) async fn fetch_progress(&self) -> Result<Fetching, RuntimeError> {
        let request = Self::to_containerd(Duration::from_secs(2), ListStatusesRequest::default());
        let statuses = ContentClient::new(self.channel.clone())
            .list_statuses(request)
            .await?
            .into_inner()
            .statuses;
        let sum = |of: fn(&holdfast_proto::content::Status) -> i64| {
            statuses
                .iter()
                .map(|s| u64::try_from(of(s)).unwrap_or(0))
                .sum()
        };
        Ok(Fetching {
            parts: statuses.len(),
            bytes: sum(|s| s.offset),
            of_bytes: sum(|s| s.total),
            pulls: 0,
        })
    }

    /// Pulls an image.
    pub(super) async fn pull_image(
        &self,
        request: pb::PullImageRequest,
    ) -> Result<String, RuntimeError> {
        // No deadline, because a pull may take long; the worker can drop the call.
        let mut images = self.images.clone();
        let answer = images.pull_image(Request::new(request)).await?;
        Ok(answer.into_inner().image_ref)
    }
}

/// Builds the request to pull an image for a pod. Runtimes derive settings of the pull from the pod. containerd takes
/// the snapshotter from an annotation. CRI-O takes the signature policy from the namespace, and charges the pull to the
/// pod's cgroup.
pub(super) fn pull_request(
    name: &str,
    credentials: Option<Credentials>,
    sandbox: &pb::PodSandboxConfig,
) -> pb::PullImageRequest {
    let image = pb::ImageSpec {
        image: name.into(),
        annotations: sandbox.annotations.clone(),
        ..pb::ImageSpec::default()
    };
    let auth = credentials.map(|c| pb::AuthConfig {
        username: c.username,
        password: c.password,
        ..pb::AuthConfig::default()
    });
    pb::PullImageRequest {
        image: Some(image),
        auth,
        sandbox_config: Some(sandbox.clone()),
    }
}

fn image_of(image: pb::Image) -> Image {
    Image {
        id: image.id,
        // Digests before tags, as in a Node's `status.images`.
        names: image
            .repo_digests
            .into_iter()
            .chain(image.repo_tags)
            .collect(),
        size: image.size,
        uid: image.uid.map(|u| u.value),
        username: image.username,
        pinned: image.pinned,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pull_request_contains_the_sandbox_config() {
        let sandbox = pb::PodSandboxConfig {
            metadata: Some(pb::PodSandboxMetadata {
                namespace: "n".into(),
                ..pb::PodSandboxMetadata::default()
            }),
            annotations: [("a".to_owned(), "b".to_owned())].into(),
            ..pb::PodSandboxConfig::default()
        };
        let request = pull_request("r/x:1", None, &sandbox);
        let image = request.image.expect("an image");
        assert_eq!(
            (image.image.as_str(), &image.annotations),
            ("r/x:1", &sandbox.annotations)
        );
        assert_eq!(
            (request.auth, request.sandbox_config),
            (None, Some(sandbox))
        );
    }
}
