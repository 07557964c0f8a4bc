//! What is in the volumes of a pod: the files that configMaps, secrets and the pod itself project
//! (kubelet spec, 9.3 and 9.7). Pure: objects and tokens are passed in.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, DownwardAPIVolumeFile, KeyToPath, Pod, Secret, Volume};

use super::env::{self, Objects, Surroundings};

/// One projected file.
#[derive(Clone, PartialEq, Eq)]
pub struct File {
    /// Its content.
    pub content: Vec<u8>,
    /// Its mode.
    pub mode: u32,
}

impl std::fmt::Debug for File {
    /// Contents may be secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "File({} bytes, {:o})", self.content.len(), self.mode)
    }
}

/// Files by relative path.
pub type Files = BTreeMap<String, File>;

/// A token that a projected volume needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenWish {
    /// The audience; empty for the API's own.
    pub audience: String,
    /// The lifetime in seconds.
    pub seconds: i64,
    /// The file in the volume.
    pub path: String,
    /// The volume's name.
    pub volume: String,
}

/// The tokens a volume needs.
#[must_use]
pub fn tokens(volume: &Volume) -> Vec<TokenWish> {
    let sources = volume.projected.iter().flat_map(|p| p.sources.iter().flatten());
    sources
        .filter_map(|s| s.service_account_token.as_ref())
        .map(|t| TokenWish {
            audience: t.audience.clone().unwrap_or_default(),
            seconds: t.expiration_seconds.unwrap_or(3600),
            path: t.path.clone(),
            volume: volume.name.clone(),
        })
        .collect()
}

/// The names of objects that a volume's files come from, with whether each must exist: ConfigMaps, Secrets.
#[must_use]
pub fn references(volume: &Volume) -> (Vec<String>, Vec<String>) {
    let (mut maps, mut secrets) = (vec![], vec![]);
    maps.extend(volume.config_map.as_ref().map(|c| c.name.clone()));
    secrets.extend(volume.secret.as_ref().and_then(|s| s.secret_name.clone()));
    for source in volume.projected.iter().flat_map(|p| p.sources.iter().flatten()) {
        maps.extend(source.config_map.as_ref().map(|c| c.name.clone()));
        secrets.extend(source.secret.as_ref().map(|s| s.name.clone()));
    }
    (maps, secrets)
}

/// A path below the volume: relative, no `..`.
fn safe(path: &str) -> Result<String, String> {
    let bad = path.is_empty() || path.starts_with('/') || path.split('/').any(|part| part.is_empty() || part == ".." || part == ".");
    if bad || path.starts_with("..") {
        Err(format!("invalid path {path:?}: it must be relative and must not contain '..'"))
    } else {
        Ok(path.to_owned())
    }
}

fn mode(own: Option<i32>, default: i32) -> u32 {
    u32::try_from(own.unwrap_or(default)).unwrap_or(0o644) & 0o7777
}

fn project(data: BTreeMap<String, Vec<u8>>, items: &[KeyToPath], default: i32, optional: bool, whose: &str) -> Result<Files, String> {
    let mut files = Files::new();
    if items.is_empty() {
        for (key, content) in data {
            files.insert(safe(&key)?, File { content, mode: mode(None, default) });
        }
        return Ok(files);
    }
    for item in items {
        match data.get(&item.key) {
            Some(content) => {
                files.insert(safe(&item.path)?, File { content: content.clone(), mode: mode(item.mode, default) });
            }
            None if optional => {}
            None => return Err(format!("references non-existent {whose} key: {}", item.key)),
        }
    }
    Ok(files)
}

fn map_data(map: &ConfigMap) -> BTreeMap<String, Vec<u8>> {
    let text = map.data.iter().flatten().map(|(k, v)| (k.clone(), v.clone().into_bytes()));
    text.chain(map.binary_data.iter().flatten().map(|(k, v)| (k.clone(), v.0.clone()))).collect()
}

fn secret_data(secret: &Secret) -> BTreeMap<String, Vec<u8>> {
    secret.data.iter().flatten().map(|(k, v)| (k.clone(), v.0.clone())).collect()
}

fn config_map(name: &str, items: Option<&Vec<KeyToPath>>, default: i32, optional: bool, objects: &dyn Objects) -> Result<Files, String> {
    match objects.config_map(name) {
        Some(map) => project(map_data(&map), items.map_or(&[], Vec::as_slice), default, optional, "config"),
        None if optional => Ok(Files::new()),
        None => Err(format!("configmap {name:?} not found in namespace {:?}", objects.namespace())),
    }
}

fn secret(name: &str, items: Option<&Vec<KeyToPath>>, default: i32, optional: bool, objects: &dyn Objects) -> Result<Files, String> {
    match objects.secret(name) {
        Some(secret) => project(secret_data(&secret), items.map_or(&[], Vec::as_slice), default, optional, "secret"),
        None if optional => Ok(Files::new()),
        None => Err(format!("secret {name:?} not found in namespace {:?}", objects.namespace())),
    }
}

fn downward(items: &[DownwardAPIVolumeFile], default: i32, around: &Surroundings<'_>) -> Result<Files, String> {
    let mut files = Files::new();
    for item in items {
        let text = if let Some(reference) = &item.field_ref {
            env::field(&reference.field_path, around)?
        } else if let Some(reference) = &item.resource_field_ref {
            let containers = super::pod::containers(around.pod);
            let named = containers.iter().find(|(_, c)| Some(&c.name) == reference.container_name.as_ref());
            let (_, container) = named.ok_or_else(|| format!("resourceFieldRef names no container of the pod: {:?}", reference.container_name))?;
            env::resource(container, &reference.resource, reference.divisor.as_ref().map(|q| q.0.as_str()), around)?
        } else {
            return Err(format!("downward API file {:?} has no source", item.path));
        };
        files.insert(safe(&item.path)?, File { content: text.into_bytes(), mode: mode(item.mode, default) });
    }
    Ok(files)
}

/// The files of a volume; `None` if it is not of a projecting kind. `tokens` holds what was issued, by path.
pub fn files(volume: &Volume, around: &Surroundings<'_>, objects: &dyn Objects, tokens: &BTreeMap<String, String>) -> Option<Result<Files, String>> {
    if let Some(source) = &volume.config_map {
        return Some(config_map(&source.name, source.items.as_ref(), source.default_mode.unwrap_or(0o644), source.optional == Some(true), objects));
    }
    if let Some(source) = &volume.secret {
        let name = source.secret_name.clone().unwrap_or_default();
        return Some(secret(&name, source.items.as_ref(), source.default_mode.unwrap_or(0o644), source.optional == Some(true), objects));
    }
    if let Some(source) = &volume.downward_api {
        return Some(downward(source.items.as_deref().unwrap_or_default(), source.default_mode.unwrap_or(0o644), around));
    }
    let projected = volume.projected.as_ref()?;
    let default = projected.default_mode.unwrap_or(0o644);
    let mut all = Files::new();
    for source in projected.sources.iter().flatten() {
        let files = if let Some(map) = &source.config_map {
            config_map(&map.name, map.items.as_ref(), default, map.optional == Some(true), objects)
        } else if let Some(s) = &source.secret {
            secret(&s.name, s.items.as_ref(), default, s.optional == Some(true), objects)
        } else if let Some(api) = &source.downward_api {
            downward(api.items.as_deref().unwrap_or_default(), default, around)
        } else if let Some(token) = &source.service_account_token {
            match tokens.get(&token.path) {
                Some(text) => safe(&token.path)
                    .map(|path| Files::from([(path, File { content: text.clone().into_bytes(), mode: token_mode(around.pod, default) })])),
                None => Err("the service account token has not been issued".into()),
            }
        } else {
            Err("the projected volume has a source that is not supported: use configMap, secret, downwardAPI or serviceAccountToken".into())
        };
        match files {
            Ok(files) => all.extend(files),
            Err(error) => return Some(Err(error)),
        }
    }
    Some(Ok(all))
}

/// With an `fsGroup` the group may read a token that is otherwise its owner's.
fn token_mode(pod: &Pod, default: i32) -> u32 {
    let group = pod.spec.as_ref().and_then(|s| s.security_context.as_ref()).and_then(|s| s.fs_group);
    if group.is_some() { mode(None, default) | 0o040 } else { mode(None, default) }
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
            (name == "cm").then(|| Arc::new(serde_json::from_value(json!({"data": {"a": "1", "b": "2"}})).expect("a map")))
        }
        fn secret(&self, name: &str) -> Option<Arc<Secret>> {
            (name == "s").then(|| Arc::new(serde_json::from_value(json!({"data": {"p": "cXE="}})).expect("a secret")))
        }
    }

    fn made(volume: Value) -> Result<Vec<(String, String, u32)>, String> {
        let mut volume = volume;
        volume["name"] = "v".into();
        let volume: Volume = serde_json::from_value(volume).expect("a volume");
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n", "labels": {"k": "v\"x"}}, "spec": {"containers": []}}))
                .expect("a pod");
        let around = Surroundings { pod: &pod, pod_ips: &[], node_ips: &[], allocatable: &Default::default() };
        let tokens = BTreeMap::from([("token".to_owned(), "TOKEN".to_owned())]);
        let files = files(&volume, &around, &Fixed, &tokens).expect("projecting")?;
        Ok(files.into_iter().map(|(path, f)| (path, String::from_utf8(f.content).expect("text"), f.mode)).collect())
    }

    #[test]
    fn projections_choose_paths_and_modes() {
        let file = |path: &str, text: &str, mode: u32| (path.to_owned(), text.to_owned(), mode);
        assert_eq!(made(json!({"configMap": {"name": "cm", "defaultMode": 256}})), Ok(vec![file("a", "1", 0o400), file("b", "2", 0o400)]));
        assert_eq!(
            made(json!({"configMap": {"name": "cm", "items": [{"key": "b", "path": "x/y", "mode": 384}]}})),
            Ok(vec![file("x/y", "2", 0o600)])
        );
        assert_eq!(made(json!({"secret": {"secretName": "none", "optional": true}})), Ok(vec![]));
        assert_eq!(made(json!({"secret": {"secretName": "none"}})), Err("secret \"none\" not found in namespace \"n\"".into()));
        assert_eq!(
            made(json!({"configMap": {"name": "cm", "items": [{"key": "z", "path": "z"}]}})),
            Err("references non-existent config key: z".into())
        );
        assert_eq!(
            made(json!({"downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}})),
            Ok(vec![file("l", "k=\"v\\\"x\"", 0o644)])
        );
        let projected = json!({"projected": {"sources": [
            {"serviceAccountToken": {"path": "token"}}, {"configMap": {"name": "cm", "items": [{"key": "a", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}}]}});
        assert_eq!(made(projected), Ok(vec![file("ca.crt", "1", 0o644), file("namespace", "n", 0o644), file("token", "TOKEN", 0o644)]));
    }

    #[test]
    fn paths_that_leave_the_volume_are_refused() {
        for path in ["../x", "/x", "a/../b", "..data", "", "a//b", "."] {
            assert!(made(json!({"configMap": {"name": "cm", "items": [{"key": "a", "path": path}]}})).is_err(), "{path:?}");
        }
    }
}
