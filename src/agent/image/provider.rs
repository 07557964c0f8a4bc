//! Credential provider plugins: programs that know registries' credentials (kubelet spec, 8.3).

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::Instant;

use crate::core::image::keyring::{self, Entry};
use crate::core::lock::lock;
use crate::core::time::duration;

/// In which versions plugins may be asked: the questions and answers are the same.
const VERSIONS: [&str; 3] = [
    "credentialprovider.kubelet.k8s.io/v1",
    "credentialprovider.kubelet.k8s.io/v1beta1",
    "credentialprovider.kubelet.k8s.io/v1alpha1",
];
/// How long a plugin may take.
const PLUGIN_TIMEOUT: Duration = Duration::from_secs(60);
/// The largest answer.
const LIMIT: u64 = 1 << 20;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Document {
    #[serde(rename = "apiVersion")]
    api_version: String,
    kind: String,
    providers: Vec<Definition>,
}

#[derive(Deserialize, Clone)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Definition {
    name: String,
    match_images: Vec<String>,
    default_cache_duration: Option<String>,
    #[serde(rename = "apiVersion")]
    api_version: String,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: Vec<Variable>,
    token_attributes: Option<Value>,
}

#[derive(Deserialize, Clone)]
struct Variable {
    name: String,
    value: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    #[serde(rename = "apiVersion")]
    api_version: String,
    cache_key_type: String,
    cache_duration: Option<String>,
    #[serde(default)]
    auth: BTreeMap<String, Login>,
}

#[derive(Deserialize)]
struct Login {
    username: String,
    password: String,
}

struct CachedCredentials {
    entries: Vec<Entry>,
    until: Instant,
}

/// One plugin.
struct Provider {
    definition: Definition,
    program: PathBuf,
    cached: Mutex<HashMap<String, CachedCredentials>>,
    /// One question at a time: whoever waits finds the answer cached.
    asking: tokio::sync::Mutex<()>,
}

/// All plugins, in the configuration's order.
#[derive(Default, Clone)]
pub struct Providers(Arc<Vec<Provider>>);

fn check(definition: &Definition, programs: &Path) -> anyhow::Result<PathBuf> {
    let name = &definition.name;
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', ' ']) {
        bail!(
            "providers[].name: {name:?} is invalid: use the name of a program, without '/' and spaces"
        );
    }
    if definition.match_images.is_empty() {
        bail!("providers[{name}].matchImages: Required value");
    }
    if !VERSIONS.contains(&definition.api_version.as_str()) {
        bail!(
            "providers[{name}].apiVersion: {:?} is not supported: use one of {}",
            definition.api_version,
            VERSIONS.join(", ")
        );
    }
    if definition.token_attributes.is_some() {
        bail!(
            "providers[{name}].tokenAttributes: plugins that want a service account's token are not served by this version: remove the field"
        );
    }
    if definition
        .default_cache_duration
        .as_ref()
        .is_some_and(|d| duration(d).is_none())
    {
        bail!(
            "providers[{name}].defaultCacheDuration: {:?} is invalid: use a duration such as 10m",
            definition.default_cache_duration
        );
    }
    let program = programs.join(name);
    if !program.is_file() {
        bail!(
            "providers[{name}]: {} is not a file: install the plugin, or name its directory with --image-credential-provider-bin-dir",
            program.display()
        );
    }
    Ok(program)
}

fn files(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries =
        std::fs::read_dir(path).with_context(|| format!("{} cannot be read", path.display()))?;
    let wanted = |p: &PathBuf| {
        p.extension()
            .is_some_and(|e| ["json", "yaml", "yml"].iter().any(|known| e == *known))
    };
    let mut files: Vec<PathBuf> = entries
        .filter_map(Result::ok)
        .map(|e| e.path())
        .filter(wanted)
        .collect();
    files.sort();
    Ok(files)
}

impl Providers {
    /// Reads the configuration, a file or a directory of files.
    pub fn load(config: &Path, programs: &Path) -> anyhow::Result<Providers> {
        let mut providers: Vec<Provider> = vec![];
        for file in files(config)? {
            let text = std::fs::read_to_string(&file).with_context(|| {
                format!(
                    "--image-credential-provider-config: {} cannot be read",
                    file.display()
                )
            })?;
            let document: Document = serde_saphyr::from_str(&text)
                .map_err(|e| anyhow::anyhow!("{}: {e}", file.display()))?;
            if document.kind != "CredentialProviderConfig"
                || !document.api_version.starts_with("kubelet.config.k8s.io/")
            {
                bail!(
                    "{}: expected apiVersion kubelet.config.k8s.io/v1 and kind CredentialProviderConfig, found {:?} and {:?}",
                    file.display(),
                    document.api_version,
                    document.kind
                );
            }
            for definition in document.providers {
                let program =
                    check(&definition, programs).with_context(|| file.display().to_string())?;
                if providers
                    .iter()
                    .any(|p| p.definition.name == definition.name)
                {
                    bail!(
                        "{}: the provider {:?} is defined twice",
                        file.display(),
                        definition.name
                    );
                }
                providers.push(Provider {
                    definition,
                    program,
                    cached: Mutex::default(),
                    asking: tokio::sync::Mutex::default(),
                });
            }
        }
        Ok(Providers(Arc::new(providers)))
    }

    /// What the plugins know for an image. One that fails is reported, the others are asked all the same.
    pub async fn credentials(&self, image: &str) -> Vec<Entry> {
        let repository = keyring::repository(image);
        let mut found = vec![];
        for provider in self.0.iter().filter(|p| {
            p.definition
                .match_images
                .iter()
                .any(|m| keyring::covers(m, &repository))
        }) {
            match provider.entries(&repository).await {
                Ok(entries) => found.extend(keyring::matching(&entries, image)),
                Err(error) => {
                    tracing::warn!(
                        error = format!("{error:#}"),
                        provider = provider.definition.name,
                        image,
                        "a credential provider failed"
                    )
                }
            }
        }
        found
    }
}

impl Provider {
    fn cached(&self, repository: &str) -> Option<Vec<Entry>> {
        let registry = repository.split('/').next().unwrap_or_default();
        let mut cached = lock(&self.cached);
        cached.retain(|_, k| k.until > Instant::now());
        ["", registry, repository]
            .iter()
            .find_map(|key| cached.get(*key))
            .map(|k| k.entries.clone())
    }

    async fn entries(&self, repository: &str) -> anyhow::Result<Vec<Entry>> {
        if let Some(cached) = self.cached(repository) {
            return Ok(cached);
        }
        let _asking = self.asking.lock().await;
        if let Some(cached) = self.cached(repository) {
            return Ok(cached);
        }
        let answer = tokio::time::timeout(PLUGIN_TIMEOUT, self.ask(repository))
            .await
            .map_err(|_| anyhow::anyhow!("no answer within a minute"))??;
        if answer.api_version != self.definition.api_version {
            bail!(
                "it answered in {:?}, asked in {:?}",
                answer.api_version,
                self.definition.api_version
            );
        }
        let entries: Vec<Entry> = answer
            .auth
            .into_iter()
            .map(|(pattern, login)| Entry {
                pattern,
                username: login.username,
                password: login.password,
            })
            .collect();
        let lasts = answer
            .cache_duration
            .as_ref()
            .or(self.definition.default_cache_duration.as_ref())
            .and_then(|d| duration(d))
            .unwrap_or_default();
        let key = match answer.cache_key_type.as_str() {
            "Image" => repository.to_owned(),
            "Registry" => repository.split('/').next().unwrap_or_default().to_owned(),
            "Global" => String::new(),
            other => bail!("cacheKeyType {other:?} is not known: use Image, Registry or Global"),
        };
        if !lasts.is_zero() {
            let cached = CachedCredentials {
                entries: entries.clone(),
                until: Instant::now() + lasts,
            };
            lock(&self.cached).insert(key, cached);
        }
        Ok(entries)
    }

    async fn ask(&self, repository: &str) -> anyhow::Result<Answer> {
        let mut command = tokio::process::Command::new(&self.program);
        command
            .args(&self.definition.args)
            .envs(self.definition.env.iter().map(|v| (&v.name, &v.value)));
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        let mut child = command
            .spawn()
            .with_context(|| format!("{} cannot be run", self.program.display()))?;
        let request = json!({"kind": "CredentialProviderRequest", "apiVersion": self.definition.api_version, "image": repository}).to_string();
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (Some(mut stdin), Some(stdout)) = (stdin, stdout) else {
            bail!("the plugin has no stdin or stdout")
        };
        let mut text = Vec::new();
        let talk = async {
            // A plugin need not read what it is asked.
            let _ = stdin.write_all(request.as_bytes()).await;
            drop(stdin);
            stdout.take(LIMIT).read_to_end(&mut text).await
        };
        talk.await.context("the plugin's answer cannot be read")?;
        let status = child.wait().await?;
        if !status.success() {
            bail!("the plugin exited with {status}");
        }
        // The answer holds secrets: an error says where it is wrong, not what stands there.
        serde_json::from_slice(&text).map_err(|e| {
            anyhow::anyhow!(
                "the plugin's answer is not a CredentialProviderResponse (line {}, column {})",
                e.line(),
                e.column()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[tokio::test]
    async fn plugins_are_asked_once_and_mistakes_are_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).expect("write");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("mode");
            path
        };
        // While a program that another test starts has not been executed it holds the file open for writing, too: until then
        // nobody can execute it.
        let executed = |path: &Path| {
            let begun = std::time::Instant::now();
            let mut probe = std::process::Command::new(path);
            probe.stdin(std::process::Stdio::null());
            while probe.output().is_err() && begun.elapsed().as_secs() < 60 {}
        };
        let count = dir.path().join("count");
        let version = VERSIONS[1];
        let script = format!(
            "#!/bin/sh\necho asked >> {}\ngrep -q '\"image\":\"reg.example/x\"' || exit 1\necho '{{\"apiVersion\": \"{version}\", \"cacheKeyType\": \"Registry\", \"cacheDuration\": \"1m\", \"auth\": {{\"reg.example\": {{\"username\": \"'$1'\", \"password\": \"'$PASS'\"}}}}}}'\n",
            count.display()
        );
        executed(&write("plugin", &script));
        let _ = std::fs::remove_file(&count);
        let definition = |more: &str| {
            format!(
                "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n- name: plugin\n  apiVersion: {version}\n  matchImages: ['*.example']\n  args: [me]\n  env: [{{name: PASS, value: word}}]\n{more}"
            )
        };
        let config = write("config.yaml", &definition(""));
        let providers = Providers::load(&config, dir.path()).expect("loaded");
        let (first, second) = tokio::join!(
            providers.credentials("reg.example/x:1"),
            providers.credentials("reg.example/x:2")
        );
        assert_eq!(
            first,
            [Entry {
                pattern: "reg.example".into(),
                username: "me".into(),
                password: "word".into()
            }]
        );
        assert_eq!(first, second);
        assert_eq!(
            std::fs::read_to_string(&count)
                .expect("count")
                .lines()
                .count(),
            1,
            "the second question is answered from memory"
        );
        assert_eq!(providers.credentials("other.test/x").await, []);
        for (text, expected) in [
            (definition("  tokenAttributes: {}\n"), "tokenAttributes"),
            (definition("  extra: 1\n"), "extra"),
            (
                definition("").replace(version, "credentialprovider.kubelet.k8s.io/v2"),
                "credentialprovider.kubelet.k8s.io/v1, ",
            ),
            (
                definition("").replace("name: plugin", "name: ../plugin"),
                "../plugin",
            ),
            (
                definition("").replace("name: plugin", "name: nosuch"),
                "--image-credential-provider-bin-dir",
            ),
            (definition("").replace("['*.example']", "[]"), "matchImages"),
        ] {
            std::fs::write(&config, text).expect("write");
            let error = Providers::load(&config, dir.path())
                .err()
                .map(|e| format!("{e:#}"))
                .unwrap_or_default();
            assert!(
                error.contains(expected),
                "{error:?} does not name {expected:?}"
            );
        }
    }
}
