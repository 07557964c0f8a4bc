//! `holdfast token`: creates, lists and deletes bootstrap tokens, as `kubeadm token` does. Both programs see each other's tokens.

use std::io::Read as _;
use std::path::Path;

use anyhow::Context as _;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::config::Kubeconfig;

use holdfast_core::node::join::{
    AuthorityHash, SECRET_PREFIX, SECRET_TYPE, StoredToken, TOKEN_NAMESPACE, Token,
};
use holdfast_core::time;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::client::{authority, code, connect};
use holdfast_kubeapi::failure::chain;

/// The administrator's client.
async fn secrets(kubeconfig: &Path) -> anyhow::Result<Api<Secret>> {
    let client: Client = connect(kubeconfig).await?;
    Ok(Api::namespaced(client, TOKEN_NAMESPACE))
}

/// A request that the API did not carry out.
fn failed(what: &str, error: &kube::Error) -> anyhow::Error {
    let remedy = match code(error) {
        Some(401 | 403) => "use an administrator's kubeconfig with --kubeconfig",
        Some(_) => "see the cause",
        None => "check that the control plane runs (`holdfast up status`)",
    };
    anyhow::anyhow!("{what} failed: {}; {remedy}", chain(error))
}

/// A random token.
fn random() -> anyhow::Result<Token> {
    let mut file = std::fs::File::open("/dev/urandom").context("/dev/urandom cannot be opened")?;
    loop {
        // Some bytes are skipped; 64 are nearly always enough.
        let mut bytes = [0; 64];
        file.read_exact(&mut bytes)
            .context("/dev/urandom cannot be read")?;
        if let Some(token) = Token::from_random(&bytes) {
            return Ok(token);
        }
    }
}

/// When a token that is created now expires; `None` if it never does.
fn expiration(ttl: &str, now: Timestamp) -> anyhow::Result<Option<Timestamp>> {
    let ttl = time::duration(ttl).with_context(|| {
        format!("invalid --ttl {ttl:?}: not a duration; use, for example, 24h or 30m, or 0 for a token that never expires")
    })?;
    let span = SignedDuration::try_from(ttl).unwrap_or(SignedDuration::MAX);
    Ok((!ttl.is_zero()).then(|| time::later(now, span)))
}

/// Creates a token, and returns it.
///
/// # Errors
///
/// A value is invalid, or the API has not created the Secret.
pub async fn create(
    kubeconfig: &Path,
    token: Option<Token>,
    ttl: &str,
    description: &str,
) -> anyhow::Result<Token> {
    let expires = expiration(ttl, Timestamp::now())?;
    let token = match token {
        Some(token) => token,
        None => random()?,
    };
    let stored = StoredToken::for_nodes(token.clone(), expires, description);
    let secret = serde_json::from_value(stored.secret())?;
    let api = secrets(kubeconfig).await?;
    match api.create(&PostParams::default(), &secret).await {
        Ok(_) => Ok(token),
        Err(error) if code(&error) == Some(409) => anyhow::bail!(
            "a bootstrap token with the id {:?} exists; delete it with `holdfast token delete {}`, or create one with another id",
            token.id,
            token.id
        ),
        Err(error) => Err(failed("creating the bootstrap token", &error)),
    }
}

/// The command with which a machine joins the cluster of a kubeconfig. `server` replaces the kubeconfig's server, which may be a
/// loopback address.
///
/// # Errors
///
/// The kubeconfig cannot be read, or names no authority.
pub async fn join_command(
    kubeconfig: &Path,
    server: &str,
    token: &Token,
) -> anyhow::Result<String> {
    let pem = authority(kubeconfig).await?;
    let hashes = AuthorityHash::of_certificates(&pem);
    anyhow::ensure!(
        !hashes.is_empty(),
        "the kubeconfig {} has no certificate authority; use the file of `holdfast kubeconfig`",
        kubeconfig.display()
    );
    let hashes = hashes.iter();
    let hashes: Vec<String> = hashes
        .map(|hash| format!("--discovery-token-ca-cert-hash {hash}"))
        .collect();
    let server = server.strip_prefix("https://").unwrap_or(server);
    let token = token.text();
    Ok(format!(
        "holdfast join {server} --token {token} {}",
        hashes.join(" ")
    ))
}

/// The server of a kubeconfig's current context.
///
/// # Errors
///
/// The file cannot be read, or has no server.
pub fn server_of(kubeconfig: &Path) -> anyhow::Result<String> {
    let unusable = || format!("the kubeconfig {} cannot be used", kubeconfig.display());
    let file = Kubeconfig::read_from(kubeconfig).with_context(unusable)?;
    let current = file.current_context.as_deref().unwrap_or_default();
    let context = file.contexts.iter().find(|c| c.name == current);
    let cluster = context.and_then(|c| c.context.as_ref()).map(|c| &c.cluster);
    let cluster = file.clusters.iter().find(|c| Some(&c.name) == cluster);
    let server = cluster.and_then(|c| c.cluster.as_ref()?.server.clone());
    server.with_context(unusable)
}

/// The time left of a token, for the table.
fn shown_ttl(expires: Option<Timestamp>, now: Timestamp) -> String {
    let Some(at) = expires else {
        return "<forever>".to_owned();
    };
    let left = at.duration_since(now).as_secs();
    match left {
        ..=0 => "<expired>".to_owned(),
        1..=119 => format!("{left}s"),
        120..=7199 => format!("{}m", left / 60),
        7200..=172_799 => format!("{}h", left / 3600),
        _ => format!("{}d", left / 86_400),
    }
}

/// The table of `token list`. Secrets are shown in full only on request.
fn table(tokens: &[StoredToken], now: Timestamp, show_secrets: bool) -> String {
    let mut rows = vec![
        [
            "TOKEN",
            "TTL",
            "EXPIRES",
            "USAGES",
            "DESCRIPTION",
            "EXTRA GROUPS",
        ]
        .map(str::to_owned),
    ];
    rows.extend(tokens.iter().map(|t| {
        let usages = [(t.authenticates, "authentication"), (t.signs, "signing")];
        let usages = usages.iter().filter(|(is_set, _)| *is_set);
        let usages: Vec<&str> = usages.map(|(_, usage)| *usage).collect();
        let or_none = |text: &str| match text {
            "" => "<none>".to_owned(),
            text => text.to_owned(),
        };
        [
            match show_secrets {
                true => t.token.text(),
                false => format!("{}.<hidden>", t.token.id),
            },
            shown_ttl(t.expires, now),
            t.expires.map_or("<never>".to_owned(), |at| at.to_string()),
            or_none(&usages.join(",")),
            or_none(&t.description),
            or_none(&t.groups),
        ]
    }));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..6).map(|column| width(column).unwrap_or(0)).collect();
    let lines = rows.iter().map(|row| {
        let cells = row.iter().zip(&widths);
        let line: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        format!("{}\n", line.join("   ").trim_end())
    });
    lines.collect()
}

/// The table of all tokens.
///
/// # Errors
///
/// The API has not listed the Secrets.
pub async fn list(kubeconfig: &Path, show_secrets: bool) -> anyhow::Result<String> {
    let api = secrets(kubeconfig).await?;
    let params = ListParams::default().fields(&format!("type={SECRET_TYPE}"));
    let listed = api.list(&params).await;
    let listed = listed.map_err(|e| failed("listing the bootstrap tokens", &e))?;
    let mut tokens: Vec<StoredToken> = listed.items.iter().filter_map(StoredToken::read).collect();
    tokens.sort_by(|a, b| a.token.id.cmp(&b.token.id));
    Ok(table(&tokens, Timestamp::now(), show_secrets))
}

/// Deletes a token. `token` is its id, or the whole token.
///
/// # Errors
///
/// There is no such token, or the API has not deleted it.
pub async fn delete(kubeconfig: &Path, token: &str) -> anyhow::Result<String> {
    let id = token.split('.').next().unwrap_or_default();
    anyhow::ensure!(
        Token::of(id, "0000000000000000").is_some(),
        "invalid token {:?}: not the six characters of an id; `holdfast token list` shows the ids",
        id.chars().take(6).collect::<String>()
    );
    let api = secrets(kubeconfig).await?;
    let name = format!("{SECRET_PREFIX}{id}");
    match api.delete(&name, &DeleteParams::default()).await {
        Ok(_) => Ok(id.to_owned()),
        Err(error) if code(&error) == Some(404) => {
            anyhow::bail!("there is no bootstrap token {id:?}; `holdfast token list` shows the ids")
        }
        Err(error) => Err(failed("deleting the bootstrap token", &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ttl_of_zero_is_forever_and_others_are_durations() {
        let now = Timestamp::from_second(1000).expect("a time");
        let at = |text: &str| {
            let at = expiration(text, now).map_err(|e| e.to_string());
            at.map(|at| at.map(Timestamp::as_second))
        };
        assert_eq!(at("0"), Ok(None));
        assert_eq!(at("0s"), Ok(None));
        assert_eq!(at("24h"), Ok(Some(1000 + 86_400)));
        assert_eq!(at("1m30s"), Ok(Some(1090)));
        for bad in ["", "1", "-1h", "x", "1y"] {
            let error = at(bad).expect_err(bad);
            assert!(error.contains(&format!("invalid --ttl {bad:?}")), "{error}");
        }
    }

    #[test]
    fn tokens_are_listed_without_their_secrets() {
        let now = Timestamp::from_second(0).expect("a time");
        let stored = |id: &str, expires: Option<i64>, description: &str| {
            let token = Token::of(id, "0123456789abcdef").expect("a token");
            let expires = expires.map(|s| Timestamp::from_second(s).expect("a time"));
            StoredToken::for_nodes(token, expires, description)
        };
        let mut tokens = vec![
            stored("aaaaaa", None, ""),
            stored("bbbbbb", Some(90), "for node b"),
            stored("cccccc", Some(0), ""),
        ];
        tokens[2].authenticates = false;
        let shown = table(&tokens, now, false);
        assert!(!shown.contains("0123456789abcdef"));
        let lines: Vec<Vec<&str>> = shown
            .lines()
            .map(|l| l.split_whitespace().collect())
            .collect();
        assert_eq!(lines.len(), 4);
        assert_eq!(
            lines[1][..5],
            [
                "aaaaaa.<hidden>",
                "<forever>",
                "<never>",
                "authentication,signing",
                "<none>"
            ]
        );
        assert_eq!(
            lines[2][..3],
            ["bbbbbb.<hidden>", "90s", "1970-01-01T00:01:30Z"]
        );
        assert_eq!(
            lines[3][..4],
            [
                "cccccc.<hidden>",
                "<expired>",
                "1970-01-01T00:00:00Z",
                "signing"
            ]
        );
        assert!(table(&tokens, now, true).contains("bbbbbb.0123456789abcdef"));
        for (left, expected) in [
            (1, "1s"),
            (119, "119s"),
            (120, "2m"),
            (7200, "2h"),
            (172_800, "2d"),
        ] {
            let at = Timestamp::from_second(left).expect("a time");
            assert_eq!(shown_ttl(Some(at), now), expected);
        }
    }
}
