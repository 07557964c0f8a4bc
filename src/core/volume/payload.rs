//! Content of a pod's volumes: the files of configMap, secret, downwardAPI and projected volumes
//! (`pkg/volume/projected`, `pkg/volume/util/atomic_writer.go`). Pure: objects and tokens are passed in.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    ConfigMap, DownwardAPIVolumeFile, KeyToPath, Pod, Secret, Volume, VolumeProjection,
};

use crate::fault::Fault;
use crate::pod::env::{self, FieldContext, Objects};

/// One projected file.
#[derive(Clone, PartialEq, Eq)]
pub struct File {
    /// The content.
    pub content: Vec<u8>,
    /// Permission bits.
    pub mode: u32,
    /// Uid of the owner; `None` means root.
    pub owner: Option<u32>,
}

impl File {
    /// A file owned by root.
    #[must_use]
    pub fn new(content: Vec<u8>, mode: u32) -> File {
        File {
            content,
            mode,
            owner: None,
        }
    }
}

impl std::fmt::Debug for File {
    /// Omits the content, which may be secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "File({} bytes, {:o})", self.content.len(), self.mode)
    }
}

/// Files by relative path.
pub type Files = BTreeMap<String, File>;

/// A private key and its certificate chain, both PEM. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    /// The private key (PKCS#8).
    pub key: String,
    /// The certificate chain, leaf first.
    pub chain: String,
}

/// Data fetched for the sources of one projected volume.
#[derive(Default)]
pub struct FetchedSources {
    /// Service account tokens by file path.
    pub tokens: BTreeMap<String, String>,
    /// Trust bundles by file path; `None` if an optional source selects none.
    pub bundles: BTreeMap<String, Option<String>>,
    /// Keys and certificates by index of their source in the volume.
    pub credentials: BTreeMap<usize, Credential>,
}

/// A token that a projected volume needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenSource {
    /// The audience; empty means the API server's.
    pub audience: String,
    /// The lifetime in seconds.
    pub seconds: i64,
    /// File path in the volume.
    pub path: String,
    /// The volume's name.
    pub volume: String,
}

/// The service account tokens that a volume needs.
#[must_use]
pub fn tokens(volume: &Volume) -> Vec<TokenSource> {
    let sources = volume
        .projected
        .iter()
        .flat_map(|p| p.sources.iter().flatten());
    sources
        .filter_map(|s| s.service_account_token.as_ref())
        .map(|t| TokenSource {
            audience: t.audience.clone().unwrap_or_default(),
            seconds: t.expiration_seconds.unwrap_or(3600),
            path: t.path.clone(),
            volume: volume.name.clone(),
        })
        .collect()
}

/// Names of the ConfigMaps and of the Secrets that a volume's files come from.
#[must_use]
pub fn references(volume: &Volume) -> (Vec<String>, Vec<String>) {
    let (mut maps, mut secrets) = (vec![], vec![]);
    maps.extend(volume.config_map.as_ref().map(|c| c.name.clone()));
    secrets.extend(volume.secret.as_ref().and_then(|s| s.secret_name.clone()));
    for source in volume
        .projected
        .iter()
        .flat_map(|p| p.sources.iter().flatten())
    {
        maps.extend(source.config_map.as_ref().map(|c| c.name.clone()));
        secrets.extend(source.secret.as_ref().map(|s| s.name.clone()));
    }
    (maps, secrets)
}

/// Checks that a path stays below the volume: relative and without `..`.
fn relative_path(path: &str) -> Result<String, Fault> {
    let bad = path.is_empty()
        || path.starts_with('/')
        || path
            .split('/')
            .any(|part| part.is_empty() || part == ".." || part == ".");
    if bad || path.starts_with("..") {
        Err(Fault::invalid(format!(
            "invalid path {path:?}: it must be relative and must not contain '..'"
        )))
    } else {
        Ok(path.to_owned())
    }
}

fn mode(own: Option<i32>, default: i32) -> u32 {
    u32::try_from(own.unwrap_or(default)).unwrap_or(0o644) & 0o7777
}

/// The files for the selected keys, or for all keys if none are selected. `missing` is the error message for a missing
/// key; the key is appended.
fn project(
    data: BTreeMap<String, Vec<u8>>,
    items: &[KeyToPath],
    default: i32,
    optional: bool,
    missing: &str,
) -> Result<Files, Fault> {
    let mut files = Files::new();
    if items.is_empty() {
        for (key, content) in data {
            files.insert(
                relative_path(&key)?,
                File::new(content, mode(None, default)),
            );
        }
        return Ok(files);
    }
    for item in items {
        match data.get(&item.key) {
            Some(content) => {
                files.insert(
                    relative_path(&item.path)?,
                    File::new(content.clone(), mode(item.mode, default)),
                );
            }
            None if optional => {}
            None => {
                return Err(Fault::missing(format!("{missing}: {}", item.key)));
            }
        }
    }
    Ok(files)
}

fn map_data(map: &ConfigMap) -> BTreeMap<String, Vec<u8>> {
    let text = map
        .data
        .iter()
        .flatten()
        .map(|(k, v)| (k.clone(), v.clone().into_bytes()));
    text.chain(
        map.binary_data
            .iter()
            .flatten()
            .map(|(k, v)| (k.clone(), v.0.clone())),
    )
    .collect()
}

fn secret_data(secret: &Secret) -> BTreeMap<String, Vec<u8>> {
    secret
        .data
        .iter()
        .flatten()
        .map(|(k, v)| (k.clone(), v.0.clone()))
        .collect()
}

fn config_map(
    name: &str,
    items: Option<&Vec<KeyToPath>>,
    default: i32,
    optional: bool,
    objects: &dyn Objects,
) -> Result<Files, Fault> {
    match objects.config_map(name) {
        Some(map) => project(
            map_data(&map),
            items.map_or(&[], Vec::as_slice),
            default,
            optional,
            "configmap references non-existent config key",
        ),
        None if optional => Ok(Files::new()),
        None => Err(Fault::missing(format!(
            "configmap {name:?} not found in namespace {:?}",
            objects.namespace()
        ))),
    }
}

fn secret(
    name: &str,
    items: Option<&Vec<KeyToPath>>,
    default: i32,
    optional: bool,
    objects: &dyn Objects,
) -> Result<Files, Fault> {
    match objects.secret(name) {
        Some(secret) => project(
            secret_data(&secret),
            items.map_or(&[], Vec::as_slice),
            default,
            optional,
            "references non-existent secret key",
        ),
        None if optional => Ok(Files::new()),
        None => Err(Fault::missing(format!(
            "secret {name:?} not found in namespace {:?}",
            objects.namespace()
        ))),
    }
}

fn downward(
    items: &[DownwardAPIVolumeFile],
    default: i32,
    around: &FieldContext<'_>,
) -> Result<Files, Fault> {
    let mut files = Files::new();
    for item in items {
        let text = if let Some(reference) = &item.field_ref {
            env::field(&reference.field_path, around)?
        } else if let Some(reference) = &item.resource_field_ref {
            let containers = crate::pod::containers(around.pod);
            let named = containers
                .iter()
                .find(|(_, c)| Some(&c.name) == reference.container_name.as_ref());
            let (_, container) = named.ok_or_else(|| {
                Fault::invalid(format!(
                    "resourceFieldRef names a container that the pod does not have: {:?}",
                    reference.container_name
                ))
            })?;
            env::resource(
                container,
                &reference.resource,
                reference.divisor.as_ref().map(|q| q.0.as_str()),
                around,
            )?
        } else {
            return Err(Fault::invalid(format!(
                "downward API file {:?} has no source",
                item.path
            )));
        };
        files.insert(
            relative_path(&item.path)?,
            File::new(text.into_bytes(), mode(item.mode, default)),
        );
    }
    Ok(files)
}

/// The files of a volume; `None` if the volume's type has no projected files.
pub fn files(
    volume: &Volume,
    around: &FieldContext<'_>,
    objects: &dyn Objects,
    given: &FetchedSources,
) -> Option<Result<Files, Fault>> {
    if let Some(source) = &volume.config_map {
        return Some(config_map(
            &source.name,
            source.items.as_ref(),
            source.default_mode.unwrap_or(0o644),
            source.optional == Some(true),
            objects,
        ));
    }
    if let Some(source) = &volume.secret {
        let name = source.secret_name.clone().unwrap_or_default();
        return Some(secret(
            &name,
            source.items.as_ref(),
            source.default_mode.unwrap_or(0o644),
            source.optional == Some(true),
            objects,
        ));
    }
    if let Some(source) = &volume.downward_api {
        return Some(downward(
            source.items.as_deref().unwrap_or_default(),
            source.default_mode.unwrap_or(0o644),
            around,
        ));
    }
    let projected = volume.projected.as_ref()?;
    let default = projected.default_mode.unwrap_or(0o644);
    let mut all = Files::new();
    for (index, source) in projected.sources.iter().flatten().enumerate() {
        match projection(index, source, default, around, objects, given) {
            Ok(files) => all.extend(files),
            Err(error) => return Some(Err(error)),
        }
    }
    Some(Ok(all))
}

/// The files of one source of a projected volume.
fn projection(
    index: usize,
    source: &VolumeProjection,
    default: i32,
    around: &FieldContext<'_>,
    objects: &dyn Objects,
    given: &FetchedSources,
) -> Result<Files, Fault> {
    if let Some(map) = &source.config_map {
        return config_map(
            &map.name,
            map.items.as_ref(),
            default,
            map.optional == Some(true),
            objects,
        );
    }
    if let Some(s) = &source.secret {
        return secret(
            &s.name,
            s.items.as_ref(),
            default,
            s.optional == Some(true),
            objects,
        );
    }
    if let Some(api) = &source.downward_api {
        return downward(api.items.as_deref().unwrap_or_default(), default, around);
    }
    if let Some(token) = &source.service_account_token {
        let text = given
            .tokens
            .get(&token.path)
            .ok_or_else(|| Fault::later("the service account token has not been issued"))?;
        return Ok(Files::from([(
            relative_path(&token.path)?,
            credential_file(around.pod, text.clone(), default),
        )]));
    }
    if let Some(bundle) = &source.cluster_trust_bundle {
        let text = given
            .bundles
            .get(&bundle.path)
            .ok_or_else(|| Fault::later("the trust bundle has not been fetched"))?;
        let text = text.clone().unwrap_or_default();
        return Ok(Files::from([(
            relative_path(&bundle.path)?,
            credential_file(around.pod, text, default),
        )]));
    }
    if let Some(certificate) = &source.pod_certificate {
        let credential = given
            .credentials
            .get(&index)
            .ok_or_else(|| Fault::later("the certificate has not been issued"))?;
        let mut files = Files::new();
        for (path, content) in [
            (
                &certificate.credential_bundle_path,
                format!("{}{}", credential.key, credential.chain),
            ),
            (&certificate.key_path, credential.key.clone()),
            (
                &certificate.certificate_chain_path,
                credential.chain.clone(),
            ),
        ] {
            if let Some(path) = path.as_deref().filter(|p| !p.is_empty()) {
                files.insert(
                    relative_path(path)?,
                    credential_file(around.pod, content, default),
                );
            }
        }
        return Ok(files);
    }
    let known =
        "configMap, secret, downwardAPI, serviceAccountToken, clusterTrustBundle or podCertificate";
    Err(Fault::invalid(format!(
        "the projected volume has an unknown source: use {known}"
    )))
}

/// A file with a credential or a trust bundle. If the pod has an `fsGroup`, the group can read the file; otherwise, if
/// all containers run as the same user, only that user can (`pkg/volume/projected/projected.go`).
fn credential_file(pod: &Pod, text: String, default: i32) -> File {
    let owner = crate::pod::common_user(pod);
    let mode = match (crate::pod::ownership(pod).group, owner) {
        (Some(_), _) => 0o640,
        (None, Some(_)) => 0o600,
        (None, None) => mode(None, default),
    };
    File {
        content: text.into_bytes(),
        mode,
        owner,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::sync::Arc;

    struct Fixed;

    impl Objects for Fixed {
        fn namespace(&self) -> &str {
            "n"
        }
        fn config_map(&self, name: &str) -> Option<Arc<ConfigMap>> {
            (name == "cm").then(|| {
                Arc::new(
                    serde_json::from_value(json!({"data": {"a": "1", "b": "2"}})).expect("a map"),
                )
            })
        }
        fn secret(&self, name: &str) -> Option<Arc<Secret>> {
            (name == "s").then(|| {
                Arc::new(serde_json::from_value(json!({"data": {"p": "cXE="}})).expect("a secret"))
            })
        }
    }

    fn made(volume: Value) -> Result<Vec<(String, String, u32)>, Fault> {
        let mut volume = volume;
        volume["name"] = "v".into();
        let volume: Volume = serde_json::from_value(volume).expect("a volume");
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n", "labels": {"k": "v\"x"}}, "spec": {"containers": []}}))
                .expect("a pod");
        let around = FieldContext {
            pod: &pod,
            pod_ips: &[],
            node_ips: &[],
            allocatable: &Default::default(),
        };
        let given = FetchedSources {
            tokens: BTreeMap::from([("token".to_owned(), "TOKEN".to_owned())]),
            bundles: BTreeMap::from([
                ("roots".to_owned(), Some("ROOTS".to_owned())),
                ("none".to_owned(), None),
            ]),
            credentials: BTreeMap::from([(
                2,
                Credential {
                    key: "KEY".into(),
                    chain: "CHAIN".into(),
                },
            )]),
        };
        let files = files(&volume, &around, &Fixed, &given).expect("projecting")?;
        Ok(files
            .into_iter()
            .map(|(path, f)| (path, String::from_utf8(f.content).expect("text"), f.mode))
            .collect())
    }

    #[test]
    fn projections_select_paths_and_modes() {
        let file = |path: &str, text: &str, mode: u32| (path.to_owned(), text.to_owned(), mode);
        assert_eq!(
            made(json!({"configMap": {"name": "cm", "defaultMode": 256}})),
            Ok(vec![file("a", "1", 0o400), file("b", "2", 0o400)])
        );
        assert_eq!(
            made(
                json!({"configMap": {"name": "cm", "items": [{"key": "b", "path": "x/y", "mode": 384}]}})
            ),
            Ok(vec![file("x/y", "2", 0o600)])
        );
        assert_eq!(
            made(json!({"secret": {"secretName": "none", "optional": true}})),
            Ok(vec![])
        );
        assert_eq!(
            made(json!({"secret": {"secretName": "none"}})),
            Err(Fault::missing(
                "secret \"none\" not found in namespace \"n\""
            ))
        );
        assert_eq!(
            made(json!({"configMap": {"name": "cm", "items": [{"key": "z", "path": "z"}]}})),
            Err(Fault::missing(
                "configmap references non-existent config key: z"
            ))
        );
        assert_eq!(
            made(
                json!({"downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}})
            ),
            Ok(vec![file("l", "k=\"v\\\"x\"", 0o644)])
        );
        let projected = json!({"projected": {"sources": [
            {"serviceAccountToken": {"path": "token"}}, {"configMap": {"name": "cm", "items": [{"key": "a", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}}]}});
        assert_eq!(
            made(projected),
            Ok(vec![
                file("ca.crt", "1", 0o644),
                file("namespace", "n", 0o644),
                file("token", "TOKEN", 0o644)
            ])
        );
    }

    #[test]
    fn roots_and_certificates_are_projected() {
        let file = |path: &str, text: &str| (path.to_owned(), text.to_owned(), 0o644);
        let bundles = json!({"projected": {"sources": [
            {"clusterTrustBundle": {"name": "b", "path": "roots"}}, {"clusterTrustBundle": {"name": "c", "path": "none", "optional": true}},
            {"podCertificate": {"signerName": "a.b/c", "keyType": "ED25519", "credentialBundlePath": "both", "keyPath": "key"}}]}});
        assert_eq!(
            made(bundles),
            Ok(vec![
                file("both", "KEYCHAIN"),
                file("key", "KEY"),
                file("none", ""),
                file("roots", "ROOTS")
            ])
        );
        let missing = json!({"projected": {"sources": [{"podCertificate": {"signerName": "a.b/c", "keyType": "ED25519", "keyPath": "key"}}]}});
        assert!(made(missing).is_err_and(|e| e.message.contains("not been issued")));
    }

    #[test]
    fn token_permissions_follow_the_pods_user_and_group() {
        let of = |spec: Value| {
            let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec}))
                .expect("a pod");
            let file = credential_file(&pod, "t".into(), 0o644);
            (file.mode, file.owner)
        };
        let container = |user: Value| json!({"name": "c", "securityContext": {"runAsUser": user}});
        assert_eq!(
            of(json!({"containers": [container(Value::Null)]})),
            (0o644, None)
        );
        assert_eq!(
            of(json!({"containers": [container(json!(7)), container(json!(7))]})),
            (0o600, Some(7))
        );
        assert_eq!(
            of(json!({"containers": [container(json!(7)), container(json!(8))]})),
            (0o644, None)
        );
        let pods =
            json!({"securityContext": {"runAsUser": 9}, "containers": [container(Value::Null)]});
        assert_eq!(of(pods), (0o600, Some(9)));
        assert_eq!(
            of(
                json!({"securityContext": {"fsGroup": 3, "runAsUser": 9}, "containers": [container(Value::Null)]})
            ),
            (0o640, Some(9))
        );
    }

    #[test]
    fn trust_bundles_have_the_permissions_of_tokens() {
        let source = serde_json::from_value(json!({"clusterTrustBundle": {"path": "roots"}}))
            .expect("a source");
        let given = FetchedSources {
            bundles: BTreeMap::from([("roots".to_owned(), Some("ROOTS".to_owned()))]),
            ..FetchedSources::default()
        };
        for (security, expected) in [
            (json!({}), (0o644, None)),
            (json!({"runAsUser": 7}), (0o600, Some(7))),
            (json!({"fsGroup": 5}), (0o640, None)),
        ] {
            let spec = json!({"securityContext": security, "containers": [{"name": "c"}]});
            let pod: Pod = serde_json::from_value(json!({"spec": spec})).expect("a pod");
            let around = FieldContext {
                pod: &pod,
                pod_ips: &[],
                node_ips: &[],
                allocatable: &Default::default(),
            };
            let files = projection(0, &source, 0o644, &around, &Fixed, &given).expect("files");
            let file = &files["roots"];
            assert_eq!((file.mode, file.owner), expected, "{security}");
        }
    }

    #[test]
    fn paths_that_leave_the_volume_are_rejected() {
        for path in ["../x", "/x", "a/../b", "..data", "", "a//b", "."] {
            assert!(
                made(json!({"configMap": {"name": "cm", "items": [{"key": "a", "path": path}]}}))
                    .is_err(),
                "{path:?}"
            );
        }
    }
}
