//! Tests with plugins that are shell scripts, and with an API that issues tokens.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use tempfile::TempDir;

use super::*;
use crate::image::accounts::Accounts;
use holdfast_kubeapi::pods::{ApiFailure, Token, TokenFor};

/// An API with one service account, `bot`, that counts the tokens it issues.
#[derive(Default)]
struct Api {
    issued: AtomicUsize,
    annotations: BTreeMap<String, String>,
}

#[async_trait]
impl Accounts for Api {
    async fn account(&self, namespace: &str, name: &str) -> Result<ServiceAccount, ApiFailure> {
        if name != "bot" {
            return Err(ApiFailure::NotFound(name.to_owned()));
        }
        let account = json!({"metadata": {"namespace": namespace, "name": name, "uid": "sa-uid", "annotations": self.annotations}});
        Ok(serde_json::from_value(account).expect("an account"))
    }

    async fn token(&self, request: TokenFor<'_>) -> Result<Token, ApiFailure> {
        assert_eq!((request.audience, request.seconds), ("reg", 3600));
        assert_eq!(request.account_uid, Some("sa-uid"));
        let n = self.issued.fetch_add(1, Ordering::Relaxed);
        let pod = request.pod.metadata.uid.as_deref().unwrap_or_default();
        Ok(Token {
            text: format!("token-{pod}-{n}"),
            expires: at(3600),
        })
    }
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).expect("a time")
}

fn pod(uid: &str, account: &str) -> Pod {
    let pod = json!({"metadata": {"namespace": "n", "name": uid, "uid": uid}, "spec": {"serviceAccountName": account, "containers": []}});
    serde_json::from_value(pod).expect("a pod")
}

/// A directory with a plugin that records its requests, and has credentials for `reg.example`.
struct Plugin {
    dir: TempDir,
    version: &'static str,
}

impl Plugin {
    /// The plugin answers with the user `$1` and the password `$PASS`.
    /// `login` may change both; a shell variable has the request.
    fn new(version: &'static str, login: &str) -> Plugin {
        let plugin = Plugin {
            dir: tempfile::tempdir().expect("a directory"),
            version,
        };
        let script = format!(
            "#!/bin/sh\nread -r ASKED\necho \"$ASKED\" >> {}\necho \"$ASKED\" | grep -q '\"image\":\"reg.example/x\"' || exit 1\n{login}\necho '{{\"apiVersion\": \"{version}\", \"cacheKeyType\": \"Registry\", \"cacheDuration\": \"1m\", \"auth\": {{\"reg.example\": {{\"username\": \"'$1'\", \"password\": \"'$PASS'\"}}}}}}'\n",
            plugin.notes().display()
        );
        executed(&plugin.write("plugin", &script));
        let _ = std::fs::remove_file(plugin.notes());
        plugin
    }

    fn notes(&self) -> PathBuf {
        self.dir.path().join("asked")
    }

    /// The recorded requests.
    fn requests(&self) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(self.notes()).unwrap_or_default();
        let questions = text.lines().map(serde_json::from_str);
        questions.collect::<Result<_, _>>().expect("questions")
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).expect("write");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("mode");
        path
    }

    fn definition(&self, more: &str) -> String {
        format!(
            "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n- name: plugin\n  apiVersion: {}\n  matchImages: ['*.example']\n  args: [me]\n  env: [{{name: PASS, value: word}}]\n{more}",
            self.version
        )
    }

    fn load(&self, text: &str) -> anyhow::Result<Providers> {
        let config = self.write("config.yaml", text);
        Providers::load(&config, self.dir.path(), true)
    }
}

/// Waits until the program can be executed. Another test that forks at this moment inherits the descriptor open for
/// writing, and execution fails until that child calls exec.
fn executed(path: &Path) {
    let begun = std::time::Instant::now();
    let mut probe = std::process::Command::new(path);
    probe.stdin(std::process::Stdio::null());
    while probe.output().is_err() && begun.elapsed().as_secs() < 60 {}
}

fn entry(password: &str) -> Entry {
    Entry {
        pattern: "reg.example".into(),
        username: "me".into(),
        password: password.into(),
    }
}

#[tokio::test]
async fn credentials_of_plugins_are_cached() {
    let plugin = Plugin::new(VERSIONS[1], "");
    let providers = plugin.load(&plugin.definition("")).expect("loaded");
    let (api, pod) = (Api::default(), pod("p", "bot"));
    let caller = Caller {
        accounts: &api,
        pod: &pod,
        now: at(0),
    };
    let (first, second) = tokio::join!(
        providers.credentials("reg.example/x:1", caller),
        providers.credentials("reg.example/x:2", caller)
    );
    assert_eq!(first, [(entry("word"), None)]);
    assert_eq!(first, second);
    assert_eq!(plugin.requests().len(), 1, "the second answer is cached");
    assert_eq!(
        plugin.requests()[0],
        json!({"kind": "CredentialProviderRequest", "apiVersion": VERSIONS[1], "image": "reg.example/x"})
    );
    assert_eq!(providers.credentials("other.test/x", caller).await, []);
    assert_eq!(api.issued.load(Ordering::Relaxed), 0);
}

#[test]
fn mistakes_in_the_configuration_are_named() {
    let plugin = Plugin::new(VERSIONS[0], "");
    let tokens = |fields: &str| {
        plugin.definition(&format!(
            "  tokenAttributes: {{serviceAccountTokenAudience: reg, cacheType: Token, requireServiceAccount: true{fields}}}\n"
        ))
    };
    let older = |text: String| text.replace(VERSIONS[0], VERSIONS[1]);
    for (text, expected) in [
        (
            plugin.definition("  tokenAttributes: {}\n"),
            "providers[plugin].tokenAttributes.serviceAccountTokenAudience",
        ),
        (tokens(", audience: a"), "audience"),
        (
            older(tokens("")),
            "only apiVersion credentialprovider.kubelet.k8s.io/v1 supports tokens",
        ),
        (plugin.definition("  extra: 1\n"), "extra"),
        (
            plugin
                .definition("")
                .replace(VERSIONS[0], "credentialprovider.kubelet.k8s.io/v2"),
            "credentialprovider.kubelet.k8s.io/v1, ",
        ),
        (
            plugin
                .definition("")
                .replace("name: plugin", "name: ../plugin"),
            "../plugin",
        ),
        (
            plugin
                .definition("")
                .replace("name: plugin", "name: nosuch"),
            "--image-credential-provider-bin-dir",
        ),
        (
            plugin.definition("").replace("['*.example']", "[]"),
            "matchImages",
        ),
    ] {
        let error = plugin.load(&text).err();
        let error = error.map(|e| format!("{e:#}")).unwrap_or_default();
        assert!(
            error.contains(expected),
            "{error:?} does not name {expected:?}"
        );
    }
    let config = plugin.write("config.yaml", &tokens(""));
    let load = |are_on| Providers::load(&config, plugin.dir.path(), are_on);
    assert!(load(true).is_ok());
    let error = load(false).err().map(|e| format!("{e:#}"));
    assert!(error.is_some_and(|e| e.contains(PLUGIN_TOKENS)));
}

/// A plugin that requires tokens, and its answers for the given pods, in order.
struct QueryResult {
    plugin: Plugin,
    answers: Vec<Vec<(Entry, Option<ByAccount>)>>,
}

async fn query(login: &str, attributes: &str, api: &Api, pods: &[Pod]) -> QueryResult {
    let plugin = Plugin::new(VERSIONS[0], login);
    let attributes =
        format!("  tokenAttributes: {{serviceAccountTokenAudience: reg, {attributes}}}\n");
    let providers = plugin.load(&plugin.definition(&attributes));
    let providers = providers.expect("loaded");
    let mut answers = vec![];
    for pod in pods {
        let caller = Caller {
            accounts: api,
            pod,
            now: at(0),
        };
        answers.push(providers.credentials("reg.example/x", caller).await);
    }
    QueryResult { plugin, answers }
}

fn bot() -> Option<ByAccount> {
    Some(ByAccount {
        namespace: "n".into(),
        name: "bot".into(),
        uid: "sa-uid".into(),
    })
}

#[tokio::test]
async fn a_plugin_gets_a_token_and_annotations_and_its_answer_is_cached_by_account() {
    let api = Api {
        annotations: [("role", "r"), ("secret", "s")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into(),
        ..Api::default()
    };
    let attributes = "cacheType: ServiceAccount, requireServiceAccount: true, requiredServiceAccountAnnotationKeys: [role]";
    let pods = [pod("p", "bot"), pod("q", "bot"), pod("p", "bot")];
    let found = query("", attributes, &api, &pods).await;
    for answer in &found.answers {
        assert_eq!(*answer, [(entry("word"), bot())]);
    }
    let questions = found.plugin.requests();
    assert_eq!(
        questions,
        [
            json!({"kind": "CredentialProviderRequest", "apiVersion": VERSIONS[0], "image": "reg.example/x",
            "serviceAccountToken": "token-p-0", "serviceAccountAnnotations": {"role": "r"}})
        ],
        "the answer is valid for all pods of the account"
    );
    assert_eq!(
        api.issued.load(Ordering::Relaxed),
        2,
        "a token is reused while it is valid"
    );
}

#[tokio::test]
async fn with_cache_type_token_an_answer_is_cached_by_token() {
    let (api, attributes) = (
        Api::default(),
        "cacheType: Token, requireServiceAccount: true",
    );
    let pods = [pod("p", "bot"), pod("q", "bot"), pod("p", "bot")];
    // A plugin that returns the token as the password.
    let login =
        "PASS=$(echo \"$ASKED\" | sed 's/.*\"serviceAccountToken\":\"\\([^\"]*\\)\".*/\\1/')";
    let found = query(login, attributes, &api, &pods).await;
    let passwords: Vec<&str> = found
        .answers
        .iter()
        .flatten()
        .map(|(e, _)| e.password.as_str())
        .collect();
    assert_eq!(passwords, ["token-p-0", "token-q-1", "token-p-0"]);
    assert_eq!(found.plugin.requests().len(), 2);
    // A token that is bound to a pod must not be cached for other pods.
    let attributes = "cacheType: ServiceAccount, requireServiceAccount: true";
    let found = query(login, attributes, &api, &pods[..1]).await;
    assert_eq!(found.answers, [vec![]]);
}

#[tokio::test]
async fn a_plugin_is_skipped_without_its_required_account_or_annotation() {
    let api = Api::default();
    let none = [pod("p", "")];
    let required = "cacheType: Token, requireServiceAccount: true";
    let found = query("", required, &api, &none).await;
    assert_eq!(
        (found.answers, found.plugin.requests()),
        (vec![vec![]], vec![])
    );
    let optional = "cacheType: Token, requireServiceAccount: false";
    let found = query("", optional, &api, &none).await;
    assert_eq!(found.answers, [[(entry("word"), None)]]);
    assert_eq!(found.plugin.requests()[0].get("serviceAccountToken"), None);
    let annotated = format!("{required}, requiredServiceAccountAnnotationKeys: [role]");
    for account in ["bot", "nobody"] {
        let found = query("", &annotated, &api, &[pod("p", account)]).await;
        assert_eq!(
            (found.answers, found.plugin.requests()),
            (vec![vec![]], vec![]),
            "{account}"
        );
    }
    assert_eq!(api.issued.load(Ordering::Relaxed), 0);
}
