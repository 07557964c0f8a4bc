//! Getting the image of a container: present or pulled, with what waiting reason if not (kubelet spec, 8.1).

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod, Secret};
use kube::ResourceExt as _;
use serde_json::Value;
use tokio::sync::Semaphore;

use super::Context;
use super::events::Kind;
use crate::core::images::{registry, with_default_tag};
use crate::core::pod::{self, Role};
use crate::cri::{Credentials, Image};

const BACKOFF: (SignedDuration, SignedDuration) = (SignedDuration::from_secs(10), SignedDuration::from_secs(300));

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.reason, self.message)
    }
}

/// Why a container waits: reason, message, and when to try again if that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// The reason, for instance `ErrImagePull`.
    pub reason: String,
    /// The message.
    pub message: String,
    /// When trying again makes sense.
    pub again: Option<Timestamp>,
}

struct Failed {
    delay: SignedDuration,
    until: Timestamp,
    error: String,
}

/// The images of one container: its own, and those of the image volumes it mounts, by volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pulled {
    /// Its own.
    pub own: Image,
    /// The ids of its volumes' images.
    pub volumes: BTreeMap<String, String>,
}

/// Pulls, shared by all pods.
pub struct Images {
    slots: Semaphore,
    failed: Mutex<HashMap<(String, String), Failed>>,
}

impl Images {
    /// At most `parallel` pulls at once.
    #[must_use]
    pub fn new(parallel: usize) -> Images {
        Images { slots: Semaphore::new(parallel.max(1)), failed: Mutex::default() }
    }
}

/// Makes sure that all images that a container needs are there.
pub async fn ensure_all(context: &Context, pod: &Pod, role: Role, container: &Container, secrets: &[Arc<Secret>]) -> Result<Pulled, Waiting> {
    let mut volumes = BTreeMap::new();
    for volume in pod::spec(pod).volumes.iter().flatten() {
        let mounted = container.volume_mounts.iter().flatten().any(|m| m.name == volume.name);
        let Some(source) = volume.image.as_ref().filter(|_| mounted) else { continue };
        // It is had as the container's own image would be.
        let wanted = Container { image: source.reference.clone(), image_pull_policy: source.pull_policy.clone(), ..container.clone() };
        let image = ensure(context, pod, role, &wanted, secrets).await.inspect_err(|waiting| {
            context.events.pod(pod, Some(role.field_path(&container.name)), Kind::Warning, "Failed", format!("Error: {waiting}"));
        })?;
        volumes.insert(volume.name.clone(), image.id);
    }
    Ok(Pulled { own: ensure(context, pod, role, container, secrets).await?, volumes })
}

/// Makes sure that the container's image is there.
async fn ensure(context: &Context, pod: &Pod, role: Role, container: &Container, secrets: &[Arc<Secret>]) -> Result<Image, Waiting> {
    let waiting = |reason: &str, message: String| Waiting { reason: reason.into(), message, again: None };
    let spec_image = container.image.clone().unwrap_or_default();
    let path = Some(role.field_path(&container.name));
    let name = with_default_tag(&spec_image).map_err(|error| {
        context.events.pod(pod, path.clone(), Kind::Warning, "InspectFailed", error.clone());
        waiting("InvalidImageName", error)
    })?;
    let present = context.runtime.image(&name).await.map_err(|error| {
        let message = format!("Failed to inspect image {name:?}: {error}");
        context.events.pod(pod, path.clone(), Kind::Warning, "InspectFailed", message.clone());
        waiting("ImageInspectError", message)
    })?;
    match (container.image_pull_policy.as_deref().unwrap_or("IfNotPresent"), present) {
        ("IfNotPresent" | "Never", Some(image)) => {
            context.events.pod(
                pod,
                path,
                Kind::Normal,
                "Pulled",
                format!("Container image {spec_image:?} already present on machine and can be accessed by the pod"),
            );
            Ok(image)
        }
        ("Never", None) => {
            let message = format!("Container image {spec_image:?} is not present with pull policy of Never");
            context.events.pod(pod, path, Kind::Warning, "ErrImageNeverPull", message.clone());
            Err(waiting("ErrImageNeverPull", message))
        }
        _ => pull(context, pod, &spec_image, &name, path, secrets).await,
    }
}

async fn pull(context: &Context, pod: &Pod, shown: &str, name: &str, path: Option<String>, secrets: &[Arc<Secret>]) -> Result<Image, Waiting> {
    let key = (pod.uid().unwrap_or_default(), name.to_owned());
    let held = {
        let failed = context.images.failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        failed.get(&key).filter(|f| f.until > context.clock.now()).map(|f| (f.until, f.error.clone()))
    };
    if let Some((until, error)) = held {
        context.events.pod(pod, path, Kind::Normal, "BackOff", format!("Back-off pulling image {shown:?}"));
        return Err(Waiting { reason: "ImagePullBackOff".into(), message: format!("Back-off pulling image {shown:?}: {error}"), again: Some(until) });
    }
    context.events.pod(pod, path.clone(), Kind::Normal, "Pulling", format!("Pulling image {shown:?}"));
    let asked = tokio::time::Instant::now();
    let result = attempt(context, name, secrets).await;
    match result {
        Ok((image, took)) => {
            context.images.failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner).remove(&key);
            let message = format!(
                "Successfully pulled image {shown:?} in {took:.3?} ({:.3?} including waiting). Image size: {} bytes.",
                asked.elapsed(),
                image.size
            );
            context.events.pod(pod, path, Kind::Normal, "Pulled", message);
            Ok(image)
        }
        Err(error) => {
            let now = context.clock.now();
            let until = {
                let mut failed = context.images.failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                failed.retain(|_, f| now.duration_since(f.until) < BACKOFF.1 * 2);
                let delay = failed.get(&key).map_or(BACKOFF.0, |f| (f.delay * 2).min(BACKOFF.1));
                failed.insert(key, Failed { delay, until: now + delay, error: error.clone() });
                now + delay
            };
            context.events.pod(pod, path.clone(), Kind::Warning, "Failed", format!("Failed to pull image {shown:?}: {error}"));
            context.events.pod(pod, path, Kind::Warning, "Failed", "Error: ErrImagePull");
            Err(Waiting { reason: "ErrImagePull".into(), message: error, again: Some(until) })
        }
    }
}

async fn attempt(context: &Context, name: &str, secrets: &[Arc<Secret>]) -> Result<(Image, std::time::Duration), String> {
    let _slot = context.images.slots.acquire().await.map_err(|e| e.to_string())?;
    let start = tokio::time::Instant::now();
    let host = registry(name);
    let mut candidates: Vec<Option<Credentials>> = secrets.iter().flat_map(|s| credentials(s, &host)).map(Some).collect();
    if candidates.is_empty() {
        candidates.push(None);
    }
    let mut errors = Vec::new();
    for credentials in candidates {
        match context.runtime.pull(name, credentials).await {
            Ok(_) => {
                let image = context.runtime.image(name).await.map_err(|e| e.to_string())?;
                let image = image.ok_or_else(|| format!("the image {name:?} was pulled but is not there"))?;
                return Ok((image, start.elapsed()));
            }
            Err(error) => errors.push(error.to_string()),
        }
    }
    Err(errors.join("; "))
}

/// The credentials that a pull secret holds for a registry host.
fn credentials(secret: &Secret, host: &str) -> Vec<Credentials> {
    let data = |key: &str| secret.data.as_ref().and_then(|d| d.get(key)).and_then(|b| serde_json::from_slice::<Value>(&b.0).ok());
    let auths = data(".dockerconfigjson").map(|v| v["auths"].clone()).or_else(|| data(".dockercfg"));
    let matches = |key: &str| {
        let bare = key.trim_start_matches("https://").trim_start_matches("http://");
        let registry = bare.split('/').next().unwrap_or_default();
        registry == host || (host == "docker.io" && registry.ends_with("docker.io"))
    };
    let entries = auths.as_ref().and_then(Value::as_object).into_iter().flatten().filter(|(key, _)| matches(key));
    entries
        .filter_map(|(_, entry)| {
            let text = |key: &str| entry[key].as_str().map(str::to_owned);
            if let (Some(username), Some(password)) = (text("username"), text("password")) {
                return Some(Credentials { username, password });
            }
            let decoded = base64::engine::general_purpose::STANDARD.decode(text("auth")?).ok()?;
            let decoded = String::from_utf8(decoded).ok()?;
            let (username, password) = decoded.split_once(':')?;
            Some(Credentials { username: username.into(), password: password.into() })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn pull_secrets_give_the_credentials_of_their_registry_only() {
        let encode = |text: String| base64::engine::general_purpose::STANDARD.encode(text);
        let config =
            json!({"auths": {"https://reg.example:5000/v2/": {"auth": encode("u:p:w".into())}, "other.example": {"username": "x", "password": "y"}}});
        let secret: Secret =
            serde_json::from_value(json!({"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": encode(config.to_string())}}))
                .expect("a secret");
        let found = credentials(&secret, "reg.example:5000");
        assert_eq!(found.iter().map(|c| (c.username.as_str(), c.password.as_str())).collect::<Vec<_>>(), [("u", "p:w")]);
        assert_eq!(format!("{found:?}"), "[Credentials(redacted)]");
        assert!(credentials(&secret, "docker.io").is_empty());
    }
}
