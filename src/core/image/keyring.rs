//! Registry credentials: which ones apply to an image (`pkg/credentialprovider/keyring.go`). Pure.

use base64::Engine as _;
use serde_json::Value;

use super::reference::Reference;

/// Credentials for the registries and repositories that match a pattern.
#[derive(Clone, PartialEq, Eq)]
pub struct Entry {
    /// Host, port and path without scheme, such as `*.registry.example:5000/team`.
    pub pattern: String,
    /// User name.
    pub username: String,
    /// Password.
    pub password: String,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Entry({}, redacted)", self.pattern)
    }
}

/// Prefix of repositories on Docker Hub.
const HUB: &str = "docker.io/";
/// The key of Docker Hub's credentials in docker configurations.
const HUB_KEY: &str = "index.docker.io";

/// Host, port and path of a key or image.
fn parts(text: &str) -> (&str, Option<&str>, &str) {
    let (authority, path) = text.split_once('/').unwrap_or((text, ""));
    // The colons of an IPv6 address are not a port separator.
    match authority
        .rsplit_once(':')
        .filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()) && !port.is_empty())
    {
        Some((host, port)) => (host, Some(port), path),
        None => (authority, None, path),
    }
}

/// Normalises a key of a docker configuration: removes the scheme, and the API version before the path. A trailing
/// slash of the path stays, so that `team/` does not match `team2`.
fn normalise_key(key: &str) -> String {
    let key = key
        .trim_start_matches("https://")
        .trim_start_matches("http://");
    let (host, path) = key.split_once('/').unwrap_or((key, ""));
    let path = match path {
        "v1" | "v2" => "",
        _ => path
            .strip_prefix("v1/")
            .or_else(|| path.strip_prefix("v2/"))
            .unwrap_or(path),
    };
    match path {
        "" => host.to_owned(),
        _ => format!("{host}/{path}"),
    }
}

/// User name and password of an `auth` field, with or without base64 padding.
fn decoded(auth: &str) -> Option<(String, String)> {
    let bytes = base64::engine::general_purpose::STANDARD_NO_PAD
        .decode(auth.trim().trim_end_matches('='))
        .ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let (username, password) = text.split_once(':')?;
    let password = password.trim_end_matches('\0');
    Some((username.to_owned(), password.to_owned()))
}

fn label_matches(pattern: &str, label: &str) -> bool {
    let (mut pattern, mut label) = (
        pattern.chars().peekable(),
        label.chars().collect::<Vec<_>>(),
    );
    // Patterns and labels are short, so plain recursion is sufficient.
    fn glob(pattern: &[char], label: &[char]) -> bool {
        match (pattern.first(), label.first()) {
            (None, None) => true,
            (Some('*'), _) => {
                glob(&pattern[1..], label) || (!label.is_empty() && glob(pattern, &label[1..]))
            }
            (Some('?'), Some(_)) => glob(&pattern[1..], &label[1..]),
            (Some(p), Some(l)) if p == l => glob(&pattern[1..], &label[1..]),
            _ => false,
        }
    }
    let pattern: Vec<char> = std::iter::from_fn(|| pattern.next()).take(64).collect();
    label.truncate(64);
    glob(&pattern, &label)
}

/// Whether a pattern covers an image: the same number of host labels, each matching; the same port; and a prefix of the
/// path.
#[must_use]
pub fn pattern_matches(pattern: &str, image: &str) -> bool {
    let (pattern_host, pattern_port, pattern_path) = parts(pattern);
    let (host, port, path) = parts(image);
    let (wanted, labels): (Vec<&str>, Vec<&str>) =
        (pattern_host.split('.').collect(), host.split('.').collect());
    wanted.len() == labels.len()
        && pattern_port == port
        && path.starts_with(pattern_path)
        && wanted
            .iter()
            .zip(&labels)
            .all(|(pattern, label)| label_matches(pattern, label))
}

/// The image with its registry, without tag and digest. Invalid names are returned unchanged.
#[must_use]
pub fn repository(image: &str) -> String {
    Reference::parse(image).map_or_else(
        |_| image.to_owned(),
        |r| format!("{}/{}", r.registry, r.repository),
    )
}

/// The entries that cover an image, most specific first, without duplicate credentials. For Docker Hub, docker's own
/// key applies if no other entry matches.
#[must_use]
pub fn matching(entries: &[Entry], image: &str) -> Vec<Entry> {
    let repository = repository(image);
    let mut found: Vec<Entry> = entries
        .iter()
        .filter(|e| pattern_matches(&e.pattern, &repository))
        .cloned()
        .collect();
    if found.is_empty() && repository.starts_with(HUB) {
        found.extend(entries.iter().filter(|e| e.pattern == HUB_KEY).cloned());
    }
    found.sort_by(|a, b| b.pattern.cmp(&a.pattern));
    let mut seen = std::collections::BTreeSet::new();
    found.retain(|e| seen.insert((e.username.clone(), e.password.clone())));
    found
}

fn entry(key: &str, value: &Value) -> Option<Entry> {
    let text = |name: &str| value[name].as_str().filter(|text| !text.is_empty());
    let (username, password) = match text("auth") {
        Some(auth) => decoded(auth)?,
        None => (text("username")?.to_owned(), text("password")?.to_owned()),
    };
    Some(Entry {
        pattern: normalise_key(key),
        username,
        password,
    })
}

/// The entries of a docker `config.json`, or of the older format without `auths`.
#[must_use]
pub fn parse(bytes: &[u8]) -> Vec<Entry> {
    let Ok(value) = serde_json::from_slice::<Value>(bytes) else {
        return vec![];
    };
    let auths = value.get("auths").unwrap_or(&value);
    auths
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(key, value)| entry(key, value))
        .collect()
}

/// The entries of a pull secret in either format.
#[must_use]
pub fn of_secret(secret: &k8s_openapi::api::core::v1::Secret) -> Vec<Entry> {
    let data = |key: &str| {
        secret
            .data
            .as_ref()
            .and_then(|d| d.get(key))
            .map(|b| parse(&b.0))
    };
    data(".dockerconfigjson")
        .or_else(|| data(".dockercfg"))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn patterns_cover_hosts_ports_and_paths() {
        for (pattern, image, expected) in [
            ("reg.example", "reg.example/a/b:1", true),
            ("reg.example:5000", "reg.example/a", false),
            ("reg.example:5000", "reg.example:5000/a", true),
            ("*.example", "reg.example/a", true),
            ("*.example", "a.reg.example/a", false),
            ("r?g-*.example", "reg-eu.example/a", true),
            (
                "reg.example/team",
                "reg.example/team/x@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
                true,
            ),
            ("reg.example/team", "reg.example/other/x", false),
            ("index.docker.io", "busybox", true),
            ("index.docker.io", "docker.io/library/busybox:1", true),
            ("index.docker.io", "index.docker.io/team/x", true),
            ("index.docker.io", "reg.example/team/x", false),
            ("docker.io", "busybox", true),
            ("docker.io/library", "busybox:1", true),
            ("docker.io/team", "team/x", true),
            ("docker.io/team", "index.docker.io/team/x:1", true),
            ("docker.io/team", "busybox", false),
        ] {
            let entries = [Entry {
                pattern: pattern.into(),
                username: "u".into(),
                password: "p".into(),
            }];
            assert_eq!(
                !matching(&entries, image).is_empty(),
                expected,
                "{pattern} and {image} ({})",
                repository(image)
            );
        }
    }

    #[test]
    fn registry_keys_are_normalised() {
        for (key, expected) in [
            ("reg.example", "reg.example"),
            ("https://reg.example:5000/", "reg.example:5000"),
            ("https://index.docker.io/v1/", "index.docker.io"),
            ("http://reg.example/v2", "reg.example"),
            ("https://reg.example/v2/team", "reg.example/team"),
            ("reg.example/team/", "reg.example/team/"),
            ("reg.example/v2team", "reg.example/v2team"),
        ] {
            assert_eq!(normalise_key(key), expected, "{key}");
        }
        assert!(pattern_matches(
            &normalise_key("reg.example/team/"),
            "reg.example/team/x"
        ));
        assert!(!pattern_matches(
            &normalise_key("reg.example/team/"),
            "reg.example/team2/x"
        ));
    }

    #[test]
    fn the_auth_field_takes_precedence_over_user_name_and_password() {
        let some = |name: &str, word: &str| Some((name.to_owned(), word.to_owned()));
        for (value, expected) in [
            // echo -n u:p | base64
            (json!({"auth": "dTpw"}), some("u", "p")),
            // echo -n u:pw | base64
            (json!({"auth": "dTpwdw=="}), some("u", "pw")),
            (json!({"auth": "dTpwdw"}), some("u", "pw")),
            (
                json!({"auth": "dTpw", "username": "other", "password": "o"}),
                some("u", "p"),
            ),
            (
                json!({"auth": "", "username": "other", "password": "o"}),
                some("other", "o"),
            ),
            (
                json!({"auth": "!", "username": "other", "password": "o"}),
                None,
            ),
            (json!({"username": "other"}), None),
            (json!({}), None),
        ] {
            let found = entry("reg.example", &value).map(|e| (e.username, e.password));
            assert_eq!(found, expected, "{value}");
        }
    }

    #[test]
    fn both_config_formats_are_parsed_and_the_most_specific_credentials_come_first() {
        let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        let config = json!({"auths": {
            "https://reg.example:5000/v2/": {"auth": encode("u:p:w")},
            "reg.example:5000/team": {"username": "team", "password": "t"},
            "https://index.docker.io/v1/": {"auth": encode("hub:h")},
            "docker.io/team": {"auth": encode("of:team")},
            "broken": {"auth": "!"},
        }});
        let entries = parse(config.to_string().as_bytes());
        let found = |image: &str| {
            matching(&entries, image)
                .into_iter()
                .map(|e| (e.username, e.password))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            found("reg.example:5000/team/x:1"),
            [
                ("team".to_owned(), "t".to_owned()),
                ("u".to_owned(), "p:w".to_owned())
            ]
        );
        assert_eq!(found("busybox"), [("hub".to_owned(), "h".to_owned())]);
        assert_eq!(
            found("team/x"),
            [("of".to_owned(), "team".to_owned())],
            "the key of Docker Hub is the fallback"
        );
        assert_eq!(found("other.example/x"), []);
        assert_eq!(
            parse(config["auths"].to_string().as_bytes()).len(),
            4,
            "the older format has no auths"
        );
        assert_eq!(
            format!("{:?}", entries[0]).contains('p'),
            entries[0].pattern.contains('p'),
            "passwords are not shown"
        );
        let secret = json!({"data": {".dockercfg": encode(&config["auths"].to_string())}});
        assert_eq!(
            of_secret(&serde_json::from_value(secret).expect("a secret")).len(),
            4
        );
        assert_eq!(parse(b"not json"), []);
    }
}
