//! Provides the images of a container: present or pulled, otherwise with a waiting reason
//! (`pkg/kubelet/images/image_manager.go`).

mod accounts;
pub mod collect;
mod provider;
mod records;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use holdfast_proto::cri as pb;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, Secret};
use kube::ResourceExt as _;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use self::accounts::Caller;
use self::provider::Providers;
use self::records::Records;
use super::events::{Events, Kind};
use super::metrics::Metrics;
use holdfast_config::Config;
use holdfast_core::backoff::PullBackoff;
use holdfast_core::bucket::Bucket;
use holdfast_core::digest;
use holdfast_core::fault::{Class, Fault};
use holdfast_core::image::gc::Ledger as Ages;
use holdfast_core::image::keyring::{self, Entry};
use holdfast_core::image::pulled::{
    self, ByAccount, BySecret, PodCredentials, Policy, PullCredential,
};
use holdfast_core::image::{pull_failure, untagged, with_default_tag};
use holdfast_core::lock::lock;
use holdfast_core::node::features;
use holdfast_core::pod::{self, Role};
use holdfast_cri::{Credentials, Image, Runtime};
use holdfast_kubeapi::pods::PodApi;
use holdfast_sys::clock::Clock;

/// How long a failed pull is shown as such, before the container's reason becomes `ImagePullBackOff`.
const PULL_ERROR_SHOWN_FOR: Duration = Duration::from_secs(2);

/// Why a container waits: reason, message, and the time of the next attempt if it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// The reason, for example `ErrImagePull`.
    pub reason: String,
    /// The message.
    pub message: String,
    /// The time of the next attempt, if it is known.
    pub again: Option<Timestamp>,
    /// When to retry if the time is not known.
    pub class: Class,
}

impl Waiting {
    /// A container that waits because of a fault.
    #[must_use]
    pub fn new(reason: &str, fault: Fault) -> Waiting {
        Waiting {
            reason: reason.into(),
            message: fault.message,
            again: None,
            class: fault.class,
        }
    }
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.reason, self.message)
    }
}

/// The images of one container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pulled {
    /// The container's own image.
    pub own: Image,
    /// The image ids of its image volumes, by volume name.
    pub volumes: BTreeMap<String, String>,
}

/// Image pulls, shared by all pods.
pub struct Images {
    slots: Semaphore,
    parallel: usize,
    backoff: Mutex<PullBackoff>,
    quota: Mutex<Bucket>,
    providers: Providers,
    /// Files with the node's credentials, in Docker's formats.
    node_keys: Vec<PathBuf>,
    records: Option<Records>,
    policy: Policy,
    /// When images were first seen and last used. Locked during a garbage collection.
    ages: tokio::sync::Mutex<Ages>,
}

impl Images {
    /// Allows at most `parallel` pulls at once, with the pods' credentials only and without records.
    #[must_use]
    pub fn new(parallel: usize) -> Images {
        Images {
            slots: Semaphore::new(parallel.max(1)),
            parallel: parallel.max(1),
            backoff: Mutex::default(),
            quota: Mutex::new(Bucket::new(0.0, 0.0, Timestamp::UNIX_EPOCH)),
            providers: Providers::default(),
            node_keys: vec![],
            records: None,
            policy: Policy::default(),
            ages: tokio::sync::Mutex::default(),
        }
    }

    /// Creates the pulls of the configuration. Fails if the credential providers or the records cannot be read.
    pub fn configured(config: &Config) -> anyhow::Result<Images> {
        let (rate, burst) = config.pull_quota;
        let providers = match (&config.credential_providers, &config.credential_programs) {
            (Some(file), Some(programs)) => {
                let tokens = features::is_enabled(features::PLUGIN_TOKENS, &config.feature_gates);
                Providers::load(file, programs, tokens)?
            }
            _ => Providers::default(),
        };
        let home = std::env::var_os("HOME").map(PathBuf::from);
        let mut node_keys = vec![config.root_dir.join("config.json")];
        node_keys.extend(home.iter().map(|h| h.join(".docker/config.json")));
        node_keys.push("/.docker/config.json".into());
        node_keys.push(config.root_dir.join(".dockercfg"));
        node_keys.extend(home.iter().map(|h| h.join(".dockercfg")));
        Ok(Images {
            quota: Mutex::new(Bucket::new(rate, burst, Timestamp::UNIX_EPOCH)),
            providers,
            node_keys,
            records: Some(Records::open(&config.root_dir)?),
            policy: config.pull_verification.clone(),
            ..Images::new(config.parallel_pulls)
        })
    }

    /// The number of pulls in progress.
    #[must_use]
    pub(crate) fn pulls_in_progress(&self) -> usize {
        self.parallel.saturating_sub(self.slots.available_permits())
    }

    async fn node_entries(&self) -> Vec<Entry> {
        for path in &self.node_keys {
            if let Ok(text) = tokio::fs::read(path).await {
                return keyring::parse(&text);
            }
        }
        vec![]
    }
}

/// The credentials of the pod's pull secrets for an image, each with its secret.
fn secret_credentials(secrets: &[Arc<Secret>], image: &str) -> Vec<(Entry, BySecret)> {
    let by = |secret: &Secret, entry: &Entry| BySecret {
        uid: secret.uid().unwrap_or_default(),
        namespace: secret.namespace().unwrap_or_default(),
        name: secret.name_any(),
        credential_hash: hash(entry),
    };
    let of = |secret: &Arc<Secret>| -> Vec<(Entry, BySecret)> {
        keyring::matching(&keyring::of_secret(secret), image)
            .into_iter()
            .map(|entry| (entry.clone(), by(secret, &entry)))
            .collect()
    };
    secrets.iter().flat_map(of).collect()
}

fn hash(entry: &Entry) -> String {
    digest::sha256(format!("{}\u{0}{}", entry.username, entry.password).as_bytes())
}

/// What pulls use.
pub(crate) struct Parts {
    pub runtime: Arc<dyn Runtime>,
    pub api: Arc<dyn PodApi>,
    pub clock: Clock,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    pub images: Arc<Images>,
}

/// Provides the CRI message of a pod's sandbox.
#[async_trait]
pub(crate) trait SandboxMessage: Send + Sync {
    /// Returns the message as soon as its inputs are available.
    async fn sandbox_message(&self) -> Result<pb::PodSandboxConfig, Fault>;
}

/// The pod and the container for which an image is pulled.
#[derive(Clone, Copy)]
pub(crate) struct PullContext<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// The role of the container in the pod.
    pub role: Role,
    /// The pod's sandbox, which the pull request includes.
    pub sandbox: &'a dyn SandboxMessage,
    /// The pod's pull secrets.
    pub secrets: &'a [Arc<Secret>],
}

/// Ensures that all images of a container are present.
pub(crate) async fn ensure_all(
    parts: &Parts,
    pull_context: PullContext<'_>,
    container: &Container,
) -> Result<Pulled, Waiting> {
    let mut volumes = BTreeMap::new();
    for volume in pod::spec(pull_context.pod).volumes.iter().flatten() {
        let mounted = container
            .volume_mounts
            .iter()
            .flatten()
            .any(|m| m.name == volume.name);
        let Some(source) = volume.image.as_ref().filter(|_| mounted) else {
            continue;
        };
        // Image volumes follow the same rules as the container's own image.
        let wanted = Container {
            image: source.reference.clone(),
            image_pull_policy: source.pull_policy.clone(),
            ..container.clone()
        };
        let image = ensure(parts, pull_context, &wanted).await?;
        volumes.insert(volume.name.clone(), image.id);
    }
    Ok(Pulled {
        own: ensure(parts, pull_context, container).await?,
        volumes,
    })
}

/// The container in events about its image.
struct ImageEvents<'a> {
    parts: &'a Parts,
    pull_context: PullContext<'a>,
    /// The container's field path.
    path: String,
}

impl ImageEvents<'_> {
    fn emit_event(&self, kind: Kind, reason: &str, message: impl Into<String>) {
        let path = Some(self.path.clone());
        self.parts
            .events
            .pod(self.pull_context.pod, path, kind, reason, message);
    }

    /// Emits two events: why the container cannot start, and the reason of its waiting state.
    fn emit_failure(&self, event: (Kind, &str, String), waiting: &str) {
        let (kind, reason, message) = event;
        self.emit_event(kind, reason, message);
        self.emit_event(Kind::Warning, "Failed", format!("Error: {waiting}"));
    }
}

/// Ensures that the container's image is present.
async fn ensure(
    parts: &Parts,
    pull_context: PullContext<'_>,
    container: &Container,
) -> Result<Image, Waiting> {
    let spec_image = container.image.clone().unwrap_or_default();
    let events = ImageEvents {
        parts,
        pull_context,
        path: pull_context.role.field_path(&container.name),
    };
    let name = with_default_tag(&spec_image).map_err(|error| {
        let reason = "InvalidImageName";
        events.emit_failure((Kind::Warning, "InspectFailed", error.clone()), reason);
        Waiting::new(reason, Fault::invalid(error))
    })?;
    let present = parts.runtime.image(&name).await.map_err(|error| {
        let fault = Fault::from(error).context(&format!("Failed to inspect image {name:?}"));
        let reason = "ImageInspectError";
        let event = (Kind::Warning, "InspectFailed", fault.to_string());
        events.emit_failure(event, reason);
        Waiting::new(reason, fault)
    })?;
    let policy = container
        .image_pull_policy
        .as_deref()
        .unwrap_or("IfNotPresent");
    // An image that the pod may not use is treated as missing.
    let usable = match present {
        Some(image) if policy != "Always" => {
            let allowed = may_use_present(parts, &name, &image, pull_context).await;
            allowed.then_some(image)
        }
        _ => None,
    };
    match (policy, usable) {
        ("IfNotPresent" | "Never", Some(image)) => {
            let message = format!(
                "Container image {spec_image:?} already present on machine and can be accessed by the pod"
            );
            events.emit_event(Kind::Normal, "Pulled", message);
            Ok(image)
        }
        ("Never", None) => {
            let reason = "ErrImageNeverPull";
            let message =
                format!("Container image {spec_image:?} is not present with pull policy of Never");
            events.emit_failure((Kind::Warning, reason, message.clone()), reason);
            Err(Waiting::new(reason, Fault::later(message)))
        }
        _ => pull(&events, &spec_image, &name).await,
    }
}

/// The credentials of plugins for an image and a pod, each with its service account if it is limited to one.
async fn plugin_credentials(
    parts: &Parts,
    name: &str,
    pod: &Pod,
) -> Vec<(Entry, Option<ByAccount>)> {
    let caller = Caller {
        accounts: &parts.api,
        pod,
        now: parts.clock.now(),
    };
    parts.images.providers.credentials(name, caller).await
}

/// Whether a pod may use an image that is present (KEP-2535).
async fn may_use_present(
    parts: &Parts,
    name: &str,
    image: &Image,
    pull_context: PullContext<'_>,
) -> bool {
    let images = &parts.images;
    // Without verification the disk is not read.
    let Some(records) = images
        .records
        .as_ref()
        .filter(|_| images.policy != Policy::NeverVerify)
    else {
        return true;
    };
    let (record, pulling) = match records.read(name, &image.id).await {
        Ok(found) => found,
        Err(error) => {
            // Fail closed: an unreadable record must not grant access to the image.
            tracing::warn!(%error, image = name, "cannot read the image's pull record; the pod must pull the image");
            return false;
        }
    };
    let secrets: Vec<BySecret> = secret_credentials(pull_context.secrets, name)
        .into_iter()
        .map(|(_, by)| by)
        .collect();
    let (untagged, record) = (untagged(name), record.as_ref());
    let may = |account: Option<&ByAccount>| {
        let own = PodCredentials {
            secrets: &secrets,
            account,
        };
        pulled::may_use(&images.policy, untagged, record, pulling, own)
    };
    if may(None) || !pulled::depends_on_account(untagged, record) {
        return may(None);
    }
    let known = plugin_credentials(parts, name, pull_context.pod).await;
    may(known.iter().find_map(|(_, account)| account.as_ref()))
}

async fn pull(events: &ImageEvents<'_>, shown: &str, name: &str) -> Result<Image, Waiting> {
    let parts = events.parts;
    let key = (
        events.pull_context.pod.uid().unwrap_or_default(),
        name.to_owned(),
    );
    let backoff = || lock(&parts.images.backoff);
    let held = backoff().remaining(&key, parts.clock.now());
    if let Some((until, error)) = held {
        let (reason, message) = (
            "ImagePullBackOff",
            format!("Back-off pulling image {shown:?}"),
        );
        events.emit_failure((Kind::Normal, "BackOff", message.clone()), reason);
        return Err(Waiting {
            reason: reason.into(),
            message: format!("{message}: {error}"),
            again: Some(until),
            class: Class::RetryLater,
        });
    }
    events.emit_event(Kind::Normal, "Pulling", format!("Pulling image {shown:?}"));
    let begun = Instant::now();
    match attempt(parts, name, events.pull_context).await {
        Ok((image, took)) => {
            backoff().succeeded(&key);
            parts.metrics.pulled(image.size, took);
            let message = format!(
                "Successfully pulled image {shown:?} in {took:.3?} ({:.3?} including waiting). Image size: {} bytes.",
                begun.elapsed(),
                image.size
            );
            events.emit_event(Kind::Normal, "Pulled", message);
            Ok(image)
        }
        Err(error) => {
            let (reason, message) = pull_failure(shown, &error);
            let shown_later = format!("{reason}: {message}");
            let until = backoff().failed(key, &shown_later, parts.clock.now());
            let error_message = format!("Failed to pull image {shown:?}: {error}");
            events.emit_failure((Kind::Warning, "Failed", error_message), reason);
            Err(Waiting {
                reason: reason.into(),
                message,
                again: Some(until.min(parts.clock.now() + PULL_ERROR_SHOWN_FOR)),
                class: Class::RetryLater,
            })
        }
    }
}

/// All credentials for the image, in the order in which they are tried.
async fn credentials_to_try(
    parts: &Parts,
    name: &str,
    pull_context: PullContext<'_>,
) -> Vec<(Option<Credentials>, PullCredential)> {
    let images = &parts.images;
    let login = |entry: Entry| {
        Some(Credentials {
            username: entry.username,
            password: entry.password,
        })
    };
    let mut all: Vec<(Option<Credentials>, PullCredential)> =
        secret_credentials(pull_context.secrets, name)
            .into_iter()
            .map(|(entry, by)| (login(entry), PullCredential::Secret(by)))
            .collect();
    all.extend(
        keyring::matching(&images.node_entries().await, name)
            .into_iter()
            .map(|entry| (login(entry), PullCredential::Anyone)),
    );
    let plugin_credentials = plugin_credentials(parts, name, pull_context.pod)
        .await
        .into_iter();
    all.extend(plugin_credentials.map(|(entry, account)| {
        let by = account.map_or(PullCredential::Anyone, PullCredential::Account);
        (login(entry), by)
    }));
    if all.is_empty() {
        all.push((None, PullCredential::Anyone));
    }
    all
}

async fn attempt(
    parts: &Parts,
    name: &str,
    pull_context: PullContext<'_>,
) -> Result<(Image, std::time::Duration), String> {
    let images = &parts.images;
    let sandbox = pull_context.sandbox.sandbox_message().await;
    let sandbox = sandbox.map_err(|fault| fault.message)?;
    let _slot = images.slots.acquire().await.map_err(|e| e.to_string())?;
    let quota = lock(&images.quota).take(parts.clock.now());
    if quota.is_err() {
        return Err("pull QPS exceeded".into());
    }
    let start = Instant::now();
    let record = match &images.records {
        Some(records) => Some(records.record_intent(name).await.map_err(|e| e.message)?),
        None => None,
    };
    let mut errors: Vec<String> = Vec::new();
    for (credentials, by) in credentials_to_try(parts, name, pull_context).await {
        let pulled = parts.runtime.pull(name, credentials, &sandbox);
        if let Err(error) = pulled.await {
            errors.push(error.without_unknown());
            continue;
        }
        let image = parts.runtime.image(name).await.map_err(|e| e.to_string())?;
        let image = image
            .ok_or_else(|| format!("the runtime pulled the image {name:?} but does not list it"))?;
        if let Some(pull) = record {
            let now = parts.clock.now();
            let done = pull
                .record_success(&image.id, untagged(name), by, now)
                .await;
            done.map_err(|e| e.message)?;
        }
        return Ok((image, start.elapsed()));
    }
    if let Some(pull) = record {
        pull.record_failure().await;
    }
    errors.dedup();
    Err(errors.join("; "))
}
