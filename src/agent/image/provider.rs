//! Credential provider plugins: programs that return credentials for
//! registries (KEP-2133; `pkg/credentialprovider/plugin`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::Instant;

use super::accounts::{Caller, Granted, Tokens};
use holdfast_core::image::keyring::{self, Entry};
use holdfast_core::image::pulled::ByAccount;
use holdfast_core::image::tokens::{Attributes, Grant, Key, Rules};
use holdfast_core::lock::lock;
use holdfast_core::node::features::PLUGIN_TOKENS;
use holdfast_core::time::duration;

/// The supported API versions of plugins; requests and answers are the same in all of them.
const VERSIONS: [&str; 3] = [
    "credentialprovider.kubelet.k8s.io/v1",
    "credentialprovider.kubelet.k8s.io/v1beta1",
    "credentialprovider.kubelet.k8s.io/v1alpha1",
];
/// Timeout of a plugin.
const PLUGIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Size limit of an answer, in bytes.
const MAX_ANSWER_SIZE: u64 = 1 << 20;

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
    token_attributes: Option<Attributes>,
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

/// The key of a cached answer: the repository, the registry or everything, and the
/// service account or token that it is valid for.
type CacheKey = (String, Option<Key>);

/// One plugin.
struct Provider {
    definition: Definition,
    program: PathBuf,
    /// How tokens are passed to the plugin; `None` if it needs none.
    rules: Option<Rules>,
    cached: Mutex<BTreeMap<CacheKey, CachedCredentials>>,
    /// Serialises calls so that concurrent callers reuse the cached answer.
    call_lock: tokio::sync::Mutex<()>,
}

/// All plugins, in the order of the configuration.
#[derive(Default, Clone)]
pub struct Providers {
    all: Arc<Vec<Provider>>,
    tokens: Arc<Tokens>,
}

/// The plugin's rules for tokens. `are_on` is the feature gate.
fn token_rules(definition: &Definition, are_on: bool) -> anyhow::Result<Option<Rules>> {
    let Some(attributes) = &definition.token_attributes else {
        return Ok(None);
    };
    let path = format!("providers[{}].tokenAttributes", definition.name);
    if !are_on {
        bail!(
            "{path}: the feature gate is disabled; remove the attributes, or featureGates.{PLUGIN_TOKENS}: false"
        );
    }
    if definition.api_version != VERSIONS[0] {
        bail!("{path}: only apiVersion {} supports tokens", VERSIONS[0]);
    }
    let rules = attributes.check();
    let rules = rules.map_err(|(field, remedy)| anyhow::anyhow!("{path}.{field}: {remedy}"))?;
    Ok(Some(rules))
}

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
    /// Reads the configuration from a file or a directory of files. `tokens` is
    /// whether plugins may get service account tokens.
    pub fn load(config: &Path, programs: &Path, tokens: bool) -> anyhow::Result<Providers> {
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
                let named = || file.display().to_string();
                let program = check(&definition, programs).with_context(named)?;
                let rules = token_rules(&definition, tokens).with_context(named)?;
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
                    rules,
                    cached: Mutex::default(),
                    call_lock: tokio::sync::Mutex::default(),
                });
            }
        }
        Ok(Providers {
            all: Arc::new(providers),
            tokens: Arc::default(),
        })
    }

    /// Returns the plugins' credentials for an image, each with the service account that it is valid for, or `None` if
    /// it is valid for all pods. A plugin that fails is logged and skipped.
    pub async fn credentials(
        &self,
        image: &str,
        caller: Caller<'_>,
    ) -> Vec<(Entry, Option<ByAccount>)> {
        let repository = keyring::repository(image);
        let mut found = vec![];
        for provider in self.all.iter().filter(|p| {
            p.definition
                .match_images
                .iter()
                .any(|m| keyring::pattern_matches(m, &repository))
        }) {
            match provider
                .credentials_for_pod(&repository, caller, &self.tokens)
                .await
            {
                Ok((entries, account)) => {
                    let entries = keyring::matching(&entries, image).into_iter();
                    found.extend(entries.map(|entry| (entry, account.clone())));
                }
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
    /// The plugin's credentials for a repository and a pod, and the service account that they are valid for.
    async fn credentials_for_pod(
        &self,
        repository: &str,
        caller: Caller<'_>,
        tokens: &Tokens,
    ) -> anyhow::Result<(Vec<Entry>, Option<ByAccount>)> {
        let grant = match &self.rules {
            None => None,
            Some(rules) => {
                let granted = tokens.grant(rules, caller).await;
                match granted.map_err(anyhow::Error::msg)? {
                    Granted::Skipped => return Ok((vec![], None)),
                    Granted::WithoutToken => None,
                    Granted::Account(grant) => Some(grant),
                }
            }
        };
        let entries = self.entries(repository, grant.as_ref()).await?;
        Ok((entries, grant.map(|grant| grant.account)))
    }

    fn cached(&self, repository: &str, whose: Option<&Key>) -> Option<Vec<Entry>> {
        let registry = repository.split('/').next().unwrap_or_default();
        let mut cached = lock(&self.cached);
        cached.retain(|_, k| k.until > Instant::now());
        ["", registry, repository]
            .iter()
            .find_map(|of| cached.get(&((*of).to_owned(), whose.cloned())))
            .map(|k| k.entries.clone())
    }

    async fn entries(&self, repository: &str, grant: Option<&Grant>) -> anyhow::Result<Vec<Entry>> {
        let whose = self.rules.as_ref().zip(grant);
        let whose = whose.map(|(rules, grant)| rules.key(grant));
        if let Some(cached) = self.cached(repository, whose.as_ref()) {
            return Ok(cached);
        }
        let _guard = self.call_lock.lock().await;
        if let Some(cached) = self.cached(repository, whose.as_ref()) {
            return Ok(cached);
        }
        let answer = tokio::time::timeout(PLUGIN_TIMEOUT, self.call_plugin(repository, grant))
            .await
            .map_err(|_| anyhow::anyhow!("no answer within a minute"))??;
        if answer.api_version != self.definition.api_version {
            bail!(
                "the answer has apiVersion {:?}, the request {:?}",
                answer.api_version,
                self.definition.api_version
            );
        }
        self.reject_returned_token(&answer, grant)?;
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
            other => bail!("unknown cacheKeyType {other:?}: use Image, Registry or Global"),
        };
        if !lasts.is_zero() {
            let cached = CachedCredentials {
                entries: entries.clone(),
                until: Instant::now() + lasts,
            };
            lock(&self.cached).insert((key, whose), cached);
        }
        Ok(entries)
    }

    /// Rejects an answer that contains the token: the token is bound to one
    /// pod, so the answer must not be cached for others.
    fn reject_returned_token(&self, answer: &Answer, grant: Option<&Grant>) -> anyhow::Result<()> {
        let by_token = self.rules.as_ref().is_some_and(|rules| rules.by_token);
        let Some(grant) = grant.filter(|_| !by_token) else {
            return Ok(());
        };
        if answer.auth.values().any(|l| l.password == grant.token) {
            bail!(
                "the plugin returned the service account token, which is valid for one pod only: set tokenAttributes.cacheType: Token"
            );
        }
        Ok(())
    }

    async fn call_plugin(&self, repository: &str, grant: Option<&Grant>) -> anyhow::Result<Answer> {
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
            .with_context(|| format!("cannot run {}", self.program.display()))?;
        let mut request = json!({"kind": "CredentialProviderRequest", "apiVersion": self.definition.api_version, "image": repository});
        if let Some(grant) = grant {
            request["serviceAccountToken"] = grant.token.as_str().into();
            if !grant.annotations.is_empty() {
                request["serviceAccountAnnotations"] = json!(grant.annotations);
            }
        }
        let request = request.to_string();
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (Some(mut stdin), Some(stdout)) = (stdin, stdout) else {
            bail!("the plugin has no stdin or stdout")
        };
        let mut text = Vec::new();
        let talk = async {
            // A plugin may ignore its standard input.
            let _ = stdin.write_all(request.as_bytes()).await;
            drop(stdin);
            stdout.take(MAX_ANSWER_SIZE).read_to_end(&mut text).await
        };
        talk.await.context("cannot read the plugin's answer")?;
        let status = child.wait().await?;
        if !status.success() {
            bail!("the plugin exited with {status}");
        }
        // The answer contains secrets: report the position of an error, not the content.
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
mod tests;
