//! Static pods from a directory and from a URL (upstream's `pkg/kubelet/config`). A file that cannot be read or parsed
//! is reported and skipped; the other pods stay.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, Toleration};
use tokio::sync::watch;

use super::static_uids::{self, KeptUids};
use holdfast_config::Config;
use holdfast_core::backoff::Doubling;
use holdfast_core::pod;
use holdfast_core::pod::references;
use holdfast_core::pod::static_uid::Started;
use holdfast_cri::Runtime;
use holdfast_sys as sys;
use holdfast_sys::clock::Clock;

/// Size limit of a manifest, in bytes.
const FILE_LIMIT: u64 = 10 << 20;

/// The static pods of each source; `None` for a source that was not read yet.
#[derive(Default, Clone, PartialEq)]
pub struct Statics {
    files: Option<Vec<Arc<Pod>>>,
    url: Option<Vec<Arc<Pod>>>,
    appearances: BTreeMap<String, u64>,
    last_appearance: u64,
}

impl Statics {
    /// Static pods from files, with all sources read.
    #[must_use]
    pub fn of(pods: Vec<Arc<Pod>>) -> Statics {
        Statics {
            files: Some(pods),
            url: Some(vec![]),
            ..Statics::default()
        }
    }

    /// Replaces the appearance numbers.
    #[must_use]
    pub fn with_appearances(self, appearances: BTreeMap<String, u64>) -> Statics {
        Statics {
            appearances,
            ..self
        }
    }

    /// The appearance number of each pod, by uid. A new number means that the manifest was removed and written again.
    /// Slow readers need the number, as they may miss the listing in between.
    #[must_use]
    pub fn appearances(&self) -> &BTreeMap<String, u64> {
        &self.appearances
    }

    /// Assigns a new number to each pod that is new in its source, or whose manifest was removed and written again.
    fn count(&mut self, before: &[Arc<Pod>], now: &[Arc<Pod>], rewritten: &BTreeSet<String>) {
        let uids = |pods: &[Arc<Pod>]| -> BTreeSet<String> {
            pods.iter().map(|p| pod::uid(p).to_owned()).collect()
        };
        let (before, now) = (uids(before), uids(now));
        for uid in before.difference(&now) {
            self.appearances.remove(uid);
        }
        for uid in now {
            if rewritten.contains(&uid) || !before.contains(&uid) {
                self.last_appearance += 1;
                self.appearances.insert(uid, self.last_appearance);
            }
        }
    }

    /// All static pods; `None` until every source has been read.
    #[must_use]
    pub fn pods(&self) -> Option<Vec<Arc<Pod>>> {
        Some(
            self.files
                .iter()
                .flatten()
                .chain(self.url.as_ref()?)
                .cloned()
                .collect(),
        )
        .filter(|_| self.files.is_some())
    }
}

type Found = watch::Sender<Statics>;

/// What reading static pods uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub runtime: Arc<dyn Runtime>,
    pub clock: Clock,
}

/// Starts to watch the directory and to poll the URL.
pub(crate) fn start(parts: Parts) -> watch::Receiver<Statics> {
    let (found, statics) = watch::channel(Statics::default());
    let (parts, found) = (Arc::new(parts), Arc::new(found));
    tokio::spawn(follow_files(Arc::clone(&parts), Arc::clone(&found)));
    tokio::spawn(follow_url(parts, found));
    statics
}

fn notify(found: &Found, change: impl FnOnce(&mut Statics)) {
    found.send_if_modified(|statics| {
        let before = statics.clone();
        change(statics);
        *statics != before
    });
}

/// Annotates pods with the time they were first seen; pods in `before` keep theirs (upstream's `recordFirstSeenTime`).
fn with_first_seen(mut pods: Vec<Arc<Pod>>, before: &[Arc<Pod>], now: Timestamp) -> Vec<Arc<Pod>> {
    for pod in &mut pods {
        let known = before.iter().find(|b| pod::uid(b) == pod::uid(pod));
        let known = known.and_then(|known| pod::annotation(known, pod::SEEN));
        let first = known.map_or_else(|| pod::seen_at(now), str::to_owned);
        let metadata = &mut Arc::make_mut(pod).metadata;
        let annotations = metadata.annotations.get_or_insert_default();
        annotations.insert(pod::SEEN.into(), first);
    }
    pods
}

/// Loads the uids of static pods. Retries until the runtime answers, as no static pod can start without it.
async fn uids(parts: &Parts) -> KeptUids {
    let mut pauses = Doubling::new(Duration::from_millis(200), Duration::from_secs(5));
    loop {
        match static_uids::started(&*parts.runtime).await {
            Ok(started) => {
                let root = parts.config.root_dir.clone();
                let load = move || KeptUids::load(&root, started);
                match tokio::task::spawn_blocking(load).await {
                    Ok(uids) => return uids,
                    Err(error) => {
                        tracing::error!(%error, "loading the uids of static pods failed; retrying")
                    }
                }
            }
            Err(error) => {
                tracing::warn!(%error, "cannot list the runtime's pods; static pods wait for the runtime");
            }
        }
        tokio::time::sleep(pauses.pause()).await;
    }
}

async fn follow_files(parts: Arc<Parts>, found: Arc<Found>) {
    let Some(dir) = parts.config.static_pod_path.clone() else {
        notify(&found, |statics| statics.files = Some(vec![]));
        // The file source is empty for good; the sender must not be dropped.
        return std::future::pending::<()>().await;
    };
    let uids = Arc::new(uids(&parts).await);
    let mut reported = Vec::new();
    let mut changes = sys::watch::Changes::with_removals(&dir);
    let mut files = BTreeMap::new();
    let mut removed = BTreeSet::new();
    loop {
        removed.append(&mut changes.take_removed());
        if !changes.is_live(&dir) {
            changes = sys::watch::Changes::with_removals(&dir);
        }
        let (path, node) = (dir.clone(), parts.config.node_name.clone());
        let known = Arc::clone(&uids);
        let listed = tokio::task::spawn_blocking(move || {
            let listed = read_dir(&path, &node, &known);
            known.save();
            listed
        });
        let listed = listed.await.unwrap_or_else(|e| Err(e.to_string()));
        let errors = match listed {
            Ok(Listed {
                pods,
                files: listed,
                errors,
            }) => {
                let rewritten = rewritten(&std::mem::take(&mut removed), &files, &listed);
                files = listed;
                for error in errors.iter().filter(|e| !reported.contains(*e)) {
                    tracing::error!(%error, "skipping a static pod manifest");
                }
                let now = parts.clock.now();
                notify(&found, |statics| {
                    let before = statics.files.take().unwrap_or_default();
                    let pods = with_first_seen(pods, &before, now);
                    statics.count(&before, &pods, &rewritten);
                    statics.files = Some(pods);
                });
                errors
            }
            // An unreadable directory does not mean that its pods were removed.
            Err(error) => {
                if !reported.contains(&error) {
                    tracing::error!(
                        error,
                        "cannot read the static pods; keeping the earlier ones"
                    );
                }
                vec![error]
            }
        };
        reported = errors;
        changes.next(parts.config.file_check).await;
    }
}

/// Returns the uids of pods whose file was removed and written again between two listings. The kubelet handles each
/// event of the directory, so its pod stops and starts again (`produceWatchEvent` in
/// `pkg/kubelet/config/file_linux.go`).
fn rewritten(removed: &BTreeSet<OsString>, before: &Files, now: &Files) -> BTreeSet<String> {
    let rewritten = removed.iter().filter_map(|name| {
        let uid = before.get(name)?;
        (now.get(name) == Some(uid)).then(|| uid.clone())
    });
    rewritten.collect()
}

async fn follow_url(parts: Arc<Parts>, found: Arc<Found>) {
    let Some(url) = parts.config.static_pod_url.clone() else {
        notify(&found, |statics| statics.url = Some(vec![]));
        return std::future::pending::<()>().await;
    };
    let mut reported = String::new();
    loop {
        let fetched =
            holdfast_kubeapi::client::fetch(&url, &parts.config.static_pod_url_header, FILE_LIMIT)
                .await;
        match fetched.and_then(|text| parse_url(&text, &url, &parts.config.node_name)) {
            Ok(pods) => {
                reported.clear();
                let now = parts.clock.now();
                notify(&found, |statics| {
                    let before = statics.url.take().unwrap_or_default();
                    let pods = with_first_seen(pods, &before, now);
                    statics.count(&before, &pods, &BTreeSet::new());
                    statics.url = Some(pods);
                });
            }
            // The pods of the last valid answer stay.
            Err(error) if error != reported => {
                tracing::error!(%error, url, "cannot read the static pods of the URL; retrying");
                reported = error;
            }
            Err(_) => {}
        }
        tokio::time::sleep(parts.config.http_check).await;
    }
}

/// Reads the directory once, for the given pods of the runtime. A file that the agent would skip is an error.
pub(crate) fn read_once(
    config: &holdfast_config::Config,
    started: Vec<Started>,
) -> Result<Vec<Pod>, String> {
    let Some(dir) = &config.static_pod_path else {
        return Ok(vec![]);
    };
    let uids = KeptUids::load(&config.root_dir, started);
    let Listed { pods, errors, .. } = read_dir(dir, &config.node_name, &uids)?;
    if errors.is_empty() {
        Ok(pods.iter().map(|p| Pod::clone(p)).collect())
    } else {
        Err(errors.join("; "))
    }
}

/// Parses the URL's answer: a pod or a list of pods.
fn parse_url(text: &str, url: &str, node: &str) -> Result<Vec<Arc<Pod>>, String> {
    if text.trim().is_empty() {
        return Ok(vec![]);
    }
    let value = decode(text)?;
    let origin = Origin {
        source: "http",
        identity: format!("url:{url}"),
        uid: &|_, digest| digest.to_owned(),
    };
    let items: Vec<serde_json::Value> = match value["kind"].as_str() {
        Some("PodList" | "List") => {
            let items = value["items"].as_array().cloned().unwrap_or_default();
            // Items of a list may omit `kind` and `apiVersion`.
            items
                .into_iter()
                .map(|mut item| {
                    item["kind"] = "Pod".into();
                    item["apiVersion"] = "v1".into();
                    item
                })
                .collect()
        }
        _ => vec![value],
    };
    let mut pods: Vec<Arc<Pod>> = vec![];
    for item in items {
        let pod = apply_defaults(item.clone(), &item.to_string(), &origin, node)?;
        if pods
            .iter()
            .any(|p| pod::full_name(p) == pod::full_name(&pod))
        {
            return Err(format!("the pod {} is defined twice", pod::full_name(&pod)));
        }
        pods.push(Arc::new(pod));
    }
    Ok(pods)
}

/// The source of a static pod.
struct Origin<'a> {
    /// The value of its `kubernetes.io/config.source` annotation.
    source: &'static str,
    /// Distinguishes equal manifests of different sources: part of the pod's hash.
    identity: String,
    /// Returns the uid of a pod, from its full name and the digest of its manifest and identity.
    uid: &'a dyn Fn(&str, &str) -> String,
}

/// Pod uids by file name.
type Files = BTreeMap<OsString, String>;

/// The contents of a directory.
#[derive(Debug, Default, PartialEq)]
struct Listed {
    pods: Vec<Arc<Pod>>,
    files: Files,
    /// Errors of the skipped files.
    errors: Vec<String>,
}

/// The regular files of a directory that are not hidden, sorted; empty if there is no directory. If the path is a file,
/// returns this file, as in the kubelet.
fn manifests(dir: &Path) -> Result<Vec<PathBuf>, String> {
    if dir.is_file() {
        return Ok(vec![dir.to_owned()]);
    }
    let failed = |e: std::io::Error| format!("the directory {}: {e}", dir.display());
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
        Err(error) => return Err(failed(error)),
    };
    let mut paths = vec![];
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let is_hidden = path
            .file_name()
            .is_some_and(|n| n.as_encoded_bytes().starts_with(b"."));
        if path.is_file() && !is_hidden {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// Reads all pods of a directory, and the errors of skipped files. Fails if the directory or one of its files cannot be
/// read: then the directory's pods are unknown.
fn read_dir(dir: &Path, node: &str, uids: &KeptUids) -> Result<Listed, String> {
    let Listed {
        mut pods,
        mut files,
        mut errors,
    } = Listed::default();
    for path in manifests(dir)? {
        let text = match sys::file::read_text(&path, FILE_LIMIT) {
            Ok(text) => text,
            // Removed since the listing.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                errors.push(format!("{}: {error}", path.display()));
                continue;
            }
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        match parse(&text, &path, node, uids) {
            Ok(pod)
                if pods
                    .iter()
                    .any(|p| pod::full_name(p) == pod::full_name(&pod)) =>
            {
                errors.push(format!(
                    "{}: another file already defines the pod {}",
                    path.display(),
                    pod::full_name(&pod)
                ))
            }
            Ok(pod) => {
                if let Some(name) = path.file_name() {
                    files.insert(name.to_owned(), pod::uid(&pod).to_owned());
                }
                pods.push(Arc::new(pod));
            }
            Err(error) => errors.push(format!("{}: {error}", path.display())),
        }
    }
    Ok(Listed {
        pods,
        files,
        errors,
    })
}

/// Parses one manifest and completes it as a static pod.
fn parse(text: &str, path: &Path, node: &str, uids: &KeptUids) -> Result<Pod, String> {
    let origin = Origin {
        source: "file",
        identity: format!("host:{node}file:{}", path.display()),
        uid: &|full_name, digest| uids.of(full_name, digest, static_uids::changed(path)),
    };
    apply_defaults(decode(text)?, text, &origin, node)
}

fn decode(text: &str) -> Result<serde_json::Value, String> {
    let options = serde_saphyr::options! { legacy_octal_numbers: true };
    let documents = serde_saphyr::from_multiple_with_options::<serde_json::Value>(text, options)
        .map_err(|e| format!("not YAML or JSON: {e}"))?;
    // As in the kubelet, the first document counts; a trailing `---` starts no document.
    documents
        .into_iter()
        .next()
        .ok_or("the manifest is empty".into())
}

/// Sets the defaults that the apiserver would set on a container.
fn complete_container(container: &mut Container, list: &str) -> Result<(), String> {
    if container.name.is_empty() {
        return Err(format!("spec.{list}[].name: Required value"));
    }
    let image = container.image.as_deref().unwrap_or_default();
    if image.is_empty() {
        let name = &container.name;
        return Err(format!("spec.{list}[{name}].image: Required value"));
    }
    let policy = if holdfast_core::image::tag_is_latest(image) {
        "Always"
    } else {
        "IfNotPresent"
    };
    container
        .image_pull_policy
        .get_or_insert_with(|| policy.into());
    container
        .termination_message_path
        .get_or_insert_with(|| "/dev/termination-log".into());
    container
        .termination_message_policy
        .get_or_insert_with(|| "File".into());
    let Some(resources) = &mut container.resources else {
        return Ok(());
    };
    // A limit without a request is also the request.
    for (name, limit) in resources.limits.iter().flatten() {
        let requests = resources.requests.get_or_insert_default();
        requests
            .entry(name.clone())
            .or_insert_with(|| limit.clone());
    }
    Ok(())
}

/// Completes a manifest as a static pod: defaults, uid, annotations and node name.
fn apply_defaults(
    value: serde_json::Value,
    text: &str,
    origin: &Origin<'_>,
    node: &str,
) -> Result<Pod, String> {
    if value["kind"] != "Pod" || value["apiVersion"] != "v1" {
        return Err(format!(
            "expected apiVersion v1 and kind Pod, found {} and {}",
            value["apiVersion"], value["kind"]
        ));
    }
    let mut pod: Pod = serde_json::from_value(value).map_err(|e| format!("not a Pod: {e}"))?;
    let name = pod
        .metadata
        .name
        .clone()
        .filter(|n| !n.is_empty())
        .ok_or("metadata.name: Required value")?;
    if let Some(kind) = references::kind_of_object(&pod)? {
        return Err(format!("static pods may not reference {kind}"));
    }
    let spec = pod
        .spec
        .as_mut()
        .filter(|s| !s.containers.is_empty())
        .ok_or("spec.containers: Required value")?;
    for container in spec.init_containers.iter_mut().flatten() {
        complete_container(container, "initContainers")?;
    }
    for container in &mut spec.containers {
        complete_container(container, "containers")?;
    }
    spec.node_name = Some(node.into());
    spec.restart_policy.get_or_insert_with(|| "Always".into());
    spec.dns_policy.get_or_insert_with(|| "ClusterFirst".into());
    spec.enable_service_links.get_or_insert(true);
    spec.termination_grace_period_seconds.get_or_insert(30);
    if origin.source == "file" {
        let everything = Toleration {
            operator: Some("Exists".into()),
            effect: Some("NoExecute".into()),
            ..Toleration::default()
        };
        spec.tolerations.get_or_insert_default().push(everything);
    }
    let metadata = &mut pod.metadata;
    let name = metadata.name.insert(format!("{name}-{node}"));
    let namespace = metadata.namespace.get_or_insert_with(|| "default".into());
    let full_name = pod::full_name_of(namespace, name);
    // A change of the manifest, its path or the node's name results in another pod.
    let digest = || digest(&format!("{text}{}", origin.identity));
    let uid = metadata
        .uid
        .take()
        .filter(|u| !u.is_empty())
        .unwrap_or_else(|| (origin.uid)(&full_name, &digest()));
    metadata.uid = Some(uid.clone());
    let annotations = metadata.annotations.get_or_insert_default();
    annotations.insert(pod::SOURCE.into(), origin.source.into());
    annotations.insert(pod::HASH.into(), uid);
    Ok(pod)
}

/// 128-bit FNV-1a as 32 hexadecimal digits.
fn digest(text: &str) -> String {
    format!("{:032x}", holdfast_core::digest::fnv128(text.bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::ResourceExt as _;

    #[test]
    fn an_unreadable_directory_does_not_mean_that_there_are_no_pods() {
        let dir = tempfile::tempdir().expect("a directory");
        let uids = KeptUids::load(dir.path(), vec![]);
        // A path component that is a file: the kernel's error differs from the one for a missing directory.
        let file = dir.path().join("file");
        let manifest = "---\napiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: c, image: i}]}\n---\n";
        std::fs::write(&file, manifest).expect("written");
        assert!(read_dir(&file.join("manifests"), "n", &uids).is_err());
        let listed = read_dir(&file, "n", &uids).expect("a path to one file");
        assert_eq!(listed.pods.len(), 1);
        let none = read_dir(&dir.path().join("none"), "n", &uids);
        assert_eq!(none, Ok(Listed::default()));
    }

    #[test]
    fn a_manifest_that_is_removed_and_rewritten_is_a_new_appearance() {
        let pods = |uids: &[&str]| {
            let pod = |uid: &&str| {
                let mut pod = Pod::default();
                pod.metadata.uid = Some((*uid).into());
                Arc::new(pod)
            };
            uids.iter().map(pod).collect::<Vec<_>>()
        };
        let files = |entries: &[(&str, &str)]| -> Files {
            let owned = entries.iter().map(|(n, u)| (n.into(), (*u).to_owned()));
            owned.collect()
        };
        let removed = ["a", "c", "d"].map(OsString::from).into();
        let before = files(&[("a", "1"), ("b", "2"), ("c", "3")]);
        let now = files(&[("a", "1"), ("b", "2"), ("c", "4"), ("d", "5")]);
        let again = rewritten(&removed, &before, &now);
        assert_eq!(
            again,
            ["1".to_owned()].into(),
            "the same pod in the same file"
        );

        let mut statics = Statics::default();
        let mut known = pods(&[]);
        let mut list = |uids: &[&str], rewritten: &[&str]| {
            let now = pods(uids);
            let rewritten = rewritten.iter().map(|uid| (*uid).to_owned()).collect();
            statics.count(&known, &now, &rewritten);
            known = now;
            statics.appearances().clone()
        };
        let first = list(&["1", "2"], &[]);
        assert_eq!(list(&["1", "2"], &[]), first);
        let second = list(&["1", "2"], &["1"]);
        assert!(second["1"] != first["1"] && second["2"] == first["2"]);
        assert_eq!(list(&["1"], &[]).len(), 1, "a removed pod uses no memory");
        assert!(list(&["1", "2"], &[])["2"] != first["2"]);
    }

    #[test]
    fn a_pod_keeps_its_first_seen_time() {
        let read = |image: &str| {
            let text = format!(
                "{{apiVersion: v1, kind: Pod, metadata: {{name: a}}, spec: {{containers: [{{name: c, image: {image}}}]}}}}"
            );
            parse_url(&text, "http://x/", "n1").expect("one")
        };
        let at = |second: i64| Timestamp::from_second(second).expect("a time");
        let time = |pods: &[Arc<Pod>]| pods[0].annotations()[pod::SEEN].clone();
        let first = with_first_seen(read("i"), &[], at(1));
        assert_eq!(time(&first), "1970-01-01T00:00:01.000000000Z");
        assert_eq!(with_first_seen(read("i"), &first, at(2)), first);
        // A changed manifest is another pod.
        let other = with_first_seen(read("j"), &first, at(3));
        assert_eq!(time(&other), "1970-01-01T00:00:03.000000000Z");
    }

    #[test]
    fn a_url_gives_one_pod_or_a_list_and_an_invalid_list_is_an_error() {
        let one = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}"#;
        let read = |text: &str| parse_url(text, "http://x/", "n1");
        let pods = read(one).expect("one");
        assert_eq!(
            (
                pods[0].name_any().as_str(),
                pods[0].annotations()[pod::SOURCE].as_str()
            ),
            ("a-n1", "http")
        );
        assert!(
            pods[0]
                .spec
                .as_ref()
                .is_some_and(|s| s.tolerations.is_none())
        );
        let list = format!(
            r#"{{"apiVersion": "v1", "kind": "PodList", "items": [{one}, {}]}}"#,
            one.replace("\"a\"", "\"b\"")
        );
        assert_eq!(read(&list).expect("two").len(), 2);
        assert_eq!(read(" \n").expect("none"), vec![]);
        let twice =
            format!(r#"{{"apiVersion": "v1", "kind": "PodList", "items": [{one}, {one}]}}"#);
        for (text, expected) in [
            (twice.as_str(), "twice"),
            ("{", "not YAML"),
            ("kind: Node", "expected apiVersion v1"),
        ] {
            assert!(read(text).is_err_and(|e| e.contains(expected)), "{text}");
        }
        assert_eq!(
            Statics {
                files: Some(vec![]),
                ..Statics::default()
            }
            .pods(),
            None,
            "pods are known only when all sources are read"
        );
    }

    #[test]
    fn containers_have_the_defaults_of_the_api() {
        let manifest = |init: &str| {
            format!(
                "{{apiVersion: v1, kind: Pod, metadata: {{name: p}}, spec: {{initContainers: [{{name: i{init}}}], containers: [{{name: c, image: 'x:1', resources: {{limits: {{cpu: '1', memory: 1Gi}}, requests: {{cpu: 500m}}}}}}]}}}}"
            )
        };
        let read = |text: &str| parse_url(text, "http://x/", "n1");
        let pods = read(&manifest(", image: x")).expect("a pod");
        let spec = pod::spec(&pods[0]);
        let init = &spec.init_containers.as_deref().expect("init containers")[0];
        assert_eq!(
            (
                init.image_pull_policy.as_deref(),
                init.termination_message_path.as_deref(),
                init.termination_message_policy.as_deref()
            ),
            (Some("Always"), Some("/dev/termination-log"), Some("File"))
        );
        let requests = holdfast_core::pod::resources::of_container(
            &spec.containers[0],
            holdfast_core::pod::resources::Side::Requests,
        );
        let request = |name: &str| requests[name].milli();
        assert_eq!(
            (request("cpu"), request("memory")),
            (500, 1_073_741_824_000)
        );
        let error = read(&manifest("")).expect_err("no image");
        assert!(
            error.contains("spec.initContainers[i].image: Required value"),
            "{error}"
        );
    }

    #[test]
    fn valid_manifests_are_kept_and_invalid_ones_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let write =
            |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("write");
        write(
            "a.yaml",
            "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  containers: [{name: c, image: 'i:1'}]\n  volumes: [{name: v, emptyDir: {}}]\n",
        );
        write(
            "b.yaml",
            "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {containers: [{name: c, image: x}]}\n",
        );
        write("c.yaml", "{{{{");
        write(
            "d.json",
            "{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {\"name\": \"s\"}, \"spec\": {\"containers\": [{\"name\": \"c\", \"image\": \"i\"}], \"volumes\": [{\"name\": \"v\", \"secret\": {\"secretName\": \"x\"}}]}}",
        );
        write("e.yaml", "apiVersion: v1\nkind: Deployment\n");
        write(".hidden", "x");
        let elsewhere = tempfile::tempdir().expect("a directory");
        let load = |started| KeptUids::load(elsewhere.path(), started);
        let uids = load(vec![]);
        let read_dir = |dir: &Path, node: &str| {
            let listed = read_dir(dir, node, &uids).expect("readable");
            (listed.pods, listed.errors)
        };
        let (pods, errors) = read_dir(dir.path(), "n1");
        assert_eq!(pods.len(), 1);
        assert_eq!(
            (
                pods[0].name_any().as_str(),
                pod::uid(&pods[0]).len(),
                pod::is_static(&pods[0])
            ),
            ("web-n1", 32, true)
        );
        let text = errors.join("\n");
        for expected in [
            "b.yaml: another file",
            "c.yaml: not YAML",
            "d.json: static pods may not reference secrets",
            "e.yaml: expected apiVersion v1 and kind Pod",
        ] {
            assert!(text.contains(expected), "{expected} is not in {text}");
        }
        assert_eq!(read_dir(Path::new("/nonexistent"), "n"), (vec![], vec![]));
        let again = read_dir(dir.path(), "n1").0;
        assert_eq!(
            pod::uid(&again[0]),
            pod::uid(&pods[0]),
            "the same manifest is the same pod"
        );
        assert_ne!(
            pod::uid(&read_dir(dir.path(), "n2").0[0]),
            pod::uid(&pods[0])
        );

        // A pod that another agent started from this file keeps its uid, even after the file was touched.
        let kubelets = "0123456789abcdef0123456789abcdef";
        let started = vec![Started {
            full_name: "web-n1_default".into(),
            uid: kubelets.into(),
            since: jiff::Timestamp::now() + jiff::SignedDuration::from_secs(5),
            ready: true,
        }];
        for _ in 0..2 {
            let uids = load(started.clone());
            let listed = super::read_dir(dir.path(), "n1", &uids).expect("readable");
            let pods = listed.pods;
            assert_eq!(pod::uid(&pods[0]), kubelets);
            assert_eq!(pods[0].annotations()[pod::HASH], kubelets);
            assert_eq!(
                listed.files["a.yaml".as_ref() as &std::ffi::OsStr],
                kubelets
            );
            uids.save();
        }
    }
}
