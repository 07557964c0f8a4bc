//! Fields about the agent's HTTP API: its addresses, its authentication and its authorisation.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use super::ConfigError;
use super::values::invalid;
use super::values::time;

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Anonymous {
    enabled: Option<bool>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct TokenWebhook {
    enabled: Option<bool>,
    #[serde(rename = "cacheTTL")]
    cache_ttl: Option<String>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct X509 {
    #[serde(rename = "clientCAFile")]
    client_ca_file: Option<String>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Authentication {
    anonymous: Anonymous,
    webhook: TokenWebhook,
    x509: X509,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct AccessWebhook {
    #[serde(rename = "cacheAuthorizedTTL")]
    authorized: Option<String>,
    #[serde(rename = "cacheUnauthorizedTTL")]
    unauthorized: Option<String>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Authorization {
    mode: Option<String>,
    webhook: AccessWebhook,
}

/// The fields as written in a file.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Fields {
    enable_server: Option<bool>,
    address: Option<String>,
    port: Option<i32>,
    read_only_port: Option<i32>,
    #[serde(rename = "serverTLSBootstrap")]
    server_tls_bootstrap: Option<bool>,
    tls_cert_file: Option<String>,
    tls_private_key_file: Option<String>,
    authentication: Authentication,
    authorization: Authorization,
    enable_debugging_handlers: Option<bool>,
    enable_system_log_handler: Option<bool>,
    healthz_port: Option<i32>,
    healthz_bind_address: Option<String>,
    tls_cipher_suites: Option<Vec<String>>,
    tls_curve_preferences: Option<Vec<i64>>,
    tls_min_version: Option<String>,
    enable_debug_flags_handler: Option<bool>,
    enable_system_log_query: Option<bool>,
}

/// The agent's HTTP API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Serving {
    /// Whether the API is served at all.
    pub enabled: bool,
    /// The main address.
    pub main: SocketAddr,
    /// The address for plain text without authentication; `None` for none.
    pub read_only: Option<SocketAddr>,
    /// The address that serves only `/healthz`, in plain text.
    pub healthz: Option<SocketAddr>,
    /// Whether the serving certificate is requested from the apiserver.
    pub asks_for_certificate: bool,
    /// Certificate and key; `None` for a self-signed one.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// The CAs that authenticate clients.
    pub client_ca: Option<PathBuf>,
    /// Whether clients without credentials are authenticated as anonymous.
    pub anonymous: bool,
    /// Whether tokens are sent to the apiserver for review.
    pub tokens: bool,
    /// How long the result of a token review is cached.
    pub token_ttl: Duration,
    /// Whether the apiserver authorises requests. Otherwise every authenticated client is authorised.
    pub reviews: bool,
    /// How long permissions and refusals are cached.
    pub review_ttl: (Duration, Duration),
    /// Whether commands, attachments, forwarded ports and logs are served.
    pub debugging: bool,
    /// Whether the node's log files are served.
    pub system_logs: bool,
    /// Whether the logs of the node's services can be queried.
    pub log_query: bool,
    /// Whether clients may change the verbosity.
    pub debug_flags: bool,
    /// The TLS settings.
    pub tls: Tls,
}

/// TLS versions and algorithms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// Whether only TLS 1.3 is accepted.
    pub only_tls13: bool,
    /// The cipher suites of TLS 1.2, by name; empty for all secure ones.
    pub cipher_suites: Vec<String>,
    /// The key exchange groups, by their numbers in IANA's registry; empty for all secure ones.
    pub key_exchanges: Vec<u16>,
}

fn port(field: &str, value: Option<i32>, default: u16) -> Result<u16, ConfigError> {
    let value = value.unwrap_or(i32::from(default));
    u16::try_from(value).map_err(|_| {
        invalid(
            field,
            value,
            "use a port between 0 and 65535; 0 disables it",
        )
    })
}

fn address(field: &str, text: Option<&String>, default: &str) -> Result<IpAddr, ConfigError> {
    let text = text.map_or(default, String::as_str);
    text.parse()
        .map_err(|_| invalid(field, text, "use an IP address"))
}

/// The supported cipher suites of TLS 1.2.
const SUITES: [&str; 6] = [
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
];

/// Splits the requested cipher suites into supported and unsupported ones. Those of TLS 1.3 cannot be selected.
fn cipher_suites(requested: &[String]) -> Result<(Vec<String>, Vec<String>), ConfigError> {
    let full = |name: &String| {
        if name.ends_with("_CHACHA20_POLY1305") {
            format!("{name}_SHA256")
        } else {
            name.clone()
        }
    };
    let (supported, unsupported): (Vec<String>, Vec<String>) = requested
        .iter()
        .map(full)
        .partition(|name| SUITES.contains(&name.as_str()));
    if let Some(name) = unsupported.iter().find(|name| !name.starts_with("TLS_")) {
        return Err(invalid(
            "tlsCipherSuites",
            name,
            &format!("use some of {}", SUITES.join(", ")),
        ));
    }
    if supported.is_empty() && !unsupported.is_empty() {
        return Err(invalid(
            "tlsCipherSuites",
            unsupported.join(", "),
            &format!(
                "none of them is supported: use some of {}",
                SUITES.join(", ")
            ),
        ));
    }
    Ok((
        supported,
        unsupported
            .into_iter()
            .map(|name| format!("tlsCipherSuites: {name}"))
            .collect(),
    ))
}

/// The supported key exchange groups, by their numbers in IANA's registry of TLS supported groups.
const GROUPS: [(u16, &str); 5] = [
    (23, "P-256"),
    (24, "P-384"),
    (29, "X25519"),
    (4587, "P-256 with ML-KEM-768"),
    (4588, "X25519 with ML-KEM-768"),
];

/// Splits the requested key exchange groups into supported and unsupported ones.
fn key_exchanges(requested: &[i64]) -> Result<(Vec<u16>, Vec<String>), ConfigError> {
    const FIELD: &str = "tlsCurvePreferences";
    let known = GROUPS.map(|(number, name)| format!("{number} ({name})"));
    let remedy = format!("use some of {}", known.join(", "));
    let (mut supported, mut unsupported) = (vec![], vec![]);
    for (place, number) in requested.iter().enumerate() {
        let valid = u16::try_from(*number).ok().filter(|n| *n > 0);
        let Some(valid) = valid else {
            return Err(invalid(FIELD, number, &remedy));
        };
        if requested[..place].contains(number) {
            return Err(invalid(FIELD, number, "list each group once"));
        }
        match GROUPS.iter().any(|(known, _)| *known == valid) {
            true => supported.push(valid),
            false => unsupported.push(format!("{FIELD}: {number}")),
        }
    }
    if supported.is_empty() && !unsupported.is_empty() {
        let all: Vec<String> = requested.iter().map(ToString::to_string).collect();
        let remedy = format!("none of them is supported: {remedy}");
        return Err(invalid(FIELD, all.join(", "), &remedy));
    }
    Ok((supported, unsupported))
}

/// Returns the TLS settings, and the requested values that are not supported.
fn tls(fields: &Fields) -> Result<(Tls, Vec<String>), ConfigError> {
    let (cipher_suites, mut unsupported) =
        cipher_suites(fields.tls_cipher_suites.as_deref().unwrap_or_default())?;
    let (key_exchanges, unknown) =
        key_exchanges(fields.tls_curve_preferences.as_deref().unwrap_or_default())?;
    unsupported.extend(unknown);
    let only_tls13 = match fields.tls_min_version.as_deref() {
        // Versions before 1.2 are never accepted.
        None | Some("" | "VersionTLS10" | "VersionTLS11" | "VersionTLS12") => false,
        Some("VersionTLS13") => true,
        Some(other) => {
            return Err(invalid(
                "tlsMinVersion",
                other,
                "use VersionTLS12 or VersionTLS13",
            ));
        }
    };
    let tls = Tls {
        only_tls13,
        cipher_suites,
        key_exchanges,
    };
    Ok((tls, unsupported))
}

/// Resolves the fields; also returns the values that are not honoured. Without a file, the kubelet's older and less
/// secure defaults apply (`applyLegacyDefaults` in `cmd/kubelet/app/options/options.go`).
pub(super) fn resolve(
    fields: &Fields,
    from_file: bool,
) -> Result<(Serving, Vec<String>), ConfigError> {
    let (tls, unsupported) = tls(fields)?;
    let host = address("address", fields.address.as_ref(), "0.0.0.0")?;
    let main = port("port", fields.port, 10250)?;
    if main == 0 {
        return Err(invalid(
            "port",
            main,
            "use a port between 1 and 65535, or enableServer: false",
        ));
    }
    let read_only = port(
        "readOnlyPort",
        fields.read_only_port,
        if from_file { 0 } else { 10255 },
    )?;
    let healthz_host = address(
        "healthzBindAddress",
        fields.healthz_bind_address.as_ref(),
        "127.0.0.1",
    )?;
    let healthz = port("healthzPort", fields.healthz_port, 10248)?;
    let named = |text: &Option<String>| text.clone().filter(|t| !t.is_empty()).map(PathBuf::from);
    let certificate = match (
        named(&fields.tls_cert_file),
        named(&fields.tls_private_key_file),
    ) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        (Some(one), None) => {
            return Err(invalid(
                "tlsPrivateKeyFile",
                "",
                &format!("also set it: it is the private key of {}", one.display()),
            ));
        }
        (None, Some(one)) => {
            return Err(invalid(
                "tlsCertFile",
                "",
                &format!("also set it: {} is its private key", one.display()),
            ));
        }
    };
    let reviews = match fields.authorization.mode.as_deref() {
        None | Some("") => from_file,
        Some("Webhook") => true,
        Some("AlwaysAllow") => false,
        Some(other) => {
            return Err(invalid(
                "authorization.mode",
                other,
                "use Webhook or AlwaysAllow",
            ));
        }
    };
    let (authentication, webhook) = (&fields.authentication, &fields.authorization.webhook);
    let serving = Serving {
        enabled: fields.enable_server.unwrap_or(true),
        main: (host, main).into(),
        read_only: (read_only != 0).then_some((host, read_only).into()),
        healthz: (healthz != 0).then_some((healthz_host, healthz).into()),
        asks_for_certificate: fields.server_tls_bootstrap.unwrap_or(false) && certificate.is_none(),
        certificate,
        client_ca: named(&authentication.x509.client_ca_file),
        anonymous: authentication.anonymous.enabled.unwrap_or(!from_file),
        tokens: authentication.webhook.enabled.unwrap_or(from_file),
        token_ttl: time(
            "authentication.webhook.cacheTTL",
            authentication.webhook.cache_ttl.as_ref(),
            120,
        )?,
        reviews,
        review_ttl: (
            time(
                "authorization.webhook.cacheAuthorizedTTL",
                webhook.authorized.as_ref(),
                300,
            )?,
            time(
                "authorization.webhook.cacheUnauthorizedTTL",
                webhook.unauthorized.as_ref(),
                30,
            )?,
        ),
        debugging: fields.enable_debugging_handlers.unwrap_or(true),
        system_logs: fields.enable_system_log_handler.unwrap_or(true),
        log_query: fields.enable_system_log_query.unwrap_or(false),
        debug_flags: fields.enable_debug_flags_handler.unwrap_or(true),
        tls,
    };
    Ok((serving, unsupported))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, from_file: bool) -> Result<Serving, String> {
        let fields: Fields = serde_saphyr::from_str(text).map_err(|e| e.to_string())?;
        resolve(&fields, from_file)
            .map(|(serving, _)| serving)
            .map_err(|e| e.to_string())
    }

    #[test]
    fn defaults_are_stricter_with_a_file_than_without() {
        let closed = of("{}", true).expect("a valid configuration");
        assert_eq!(
            (
                closed.read_only,
                closed.anonymous,
                closed.tokens,
                closed.reviews
            ),
            (None, false, true, true)
        );
        assert_eq!(
            (closed.main, closed.healthz),
            (
                ([0, 0, 0, 0], 10250).into(),
                Some(([127, 0, 0, 1], 10248).into())
            )
        );
        let open = of("{}", false).expect("a valid configuration");
        assert_eq!(
            (
                open.read_only.map(|a| a.port()),
                open.anonymous,
                open.tokens,
                open.reviews
            ),
            (Some(10255), true, false, false)
        );
        let own = of("port: 1234\nhealthzPort: 0\nauthorization: {mode: AlwaysAllow, webhook: {cacheAuthorizedTTL: 1s}}\nauthentication: {x509: {clientCAFile: /ca}}", true)
            .expect("a valid configuration");
        assert_eq!(
            (
                own.main.port(),
                own.healthz,
                own.reviews,
                own.review_ttl.0.as_secs()
            ),
            (1234, None, false, 1)
        );
        assert_eq!(own.client_ca, Some("/ca".into()));
        let suites = "tlsMinVersion: VersionTLS13\ntlsCipherSuites: [TLS_RSA_WITH_AES_128_CBC_SHA, TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305]";
        let (own, unsupported) = resolve(&serde_saphyr::from_str(suites).expect("YAML"), true)
            .expect("a valid configuration");
        assert!(own.tls.only_tls13);
        assert_eq!(
            own.tls.cipher_suites,
            ["TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256"]
        );
        assert_eq!(
            unsupported,
            ["tlsCipherSuites: TLS_RSA_WITH_AES_128_CBC_SHA"]
        );
        let groups = "tlsCurvePreferences: [4588, 25, 23]";
        let (own, unsupported) = resolve(&serde_saphyr::from_str(groups).expect("YAML"), true)
            .expect("a valid configuration");
        assert_eq!(own.tls.key_exchanges, [4588, 23]);
        assert_eq!(unsupported, ["tlsCurvePreferences: 25"]);
    }

    #[test]
    fn errors_name_the_invalid_field() {
        for (text, field) in [
            ("port: 0", "port"),
            ("port: 70000", "port"),
            ("address: here", "address"),
            ("tlsMinVersion: SSL3", "tlsMinVersion"),
            ("tlsCipherSuites: [AES]", "tlsCipherSuites"),
            (
                "tlsCipherSuites: [TLS_RSA_WITH_AES_128_CBC_SHA]",
                "tlsCipherSuites",
            ),
            ("tlsCurvePreferences: [0]", "tlsCurvePreferences"),
            ("tlsCurvePreferences: [65536]", "tlsCurvePreferences"),
            ("tlsCurvePreferences: [23, 23]", "list each group once"),
            ("tlsCurvePreferences: [25]", "none of them is supported"),
            ("tlsCertFile: /c", "tlsPrivateKeyFile"),
            ("authorization: {mode: RBAC}", "authorization.mode"),
            (
                "authentication: {webhook: {cacheTTL: soon}}",
                "authentication.webhook.cacheTTL",
            ),
            ("authentication: {x508: {}}", "x508"),
        ] {
            assert!(of(text, true).is_err_and(|e| e.contains(field)), "{text}");
        }
    }
}
