//! The configuration: a KubeProxyConfiguration (`kubeproxy.config.k8s.io/v1alpha1`,
//! `staging/src/k8s.io/kube-proxy/config/v1alpha1/types.go`), and flags over it.
//!
//! As in kube-proxy, an unknown field does not prevent a start, but is named in a warning (`loadConfig` in
//! `cmd/kube-proxy/app/options.go`). A field that is set and has no effect here is named, too.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use serde_json::{Map, Value};

use holdfast_config::lenient;
use holdfast_core::time::duration;

/// The default of `healthzBindAddress`.
const HEALTHZ: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 10256);
/// The default of `metricsBindAddress`.
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10249);
/// The default of `masqueradeBit`.
const MASQUERADE_BIT: u32 = 14;
/// The interval between audits. A foreign flush of the rules is repaired after at most this time.
const AUDIT_INTERVAL: Duration = Duration::from_secs(20);
/// The lower limit of the interval between audits.
const MIN_AUDIT_INTERVAL: Duration = Duration::from_secs(1);
/// The upper limit of `minSyncPeriod`: changes that wait longer look like a failure.
const MAX_MIN_SYNC_PERIOD: Duration = Duration::from_secs(30);

/// Fields with an effect, as paths.
const READ: &[&str] = &[
    "apiVersion",
    "kind",
    "healthzBindAddress",
    "metricsBindAddress",
    "bindAddressHardFail",
    "clientConnection.kubeconfig",
    "clusterCIDR",
    "nodePortAddresses",
    "hostnameOverride",
    "iptables.masqueradeAll",
    "iptables.masqueradeBit",
    "iptables.syncPeriod",
    "iptables.minSyncPeriod",
    "oomScoreAdj",
];

/// Fields of the section `nftables` with an effect. They override those of `iptables` with the same names.
const READ_NFTABLES: &[&str] = &[
    "nftables.masqueradeAll",
    "nftables.masqueradeBit",
    "nftables.syncPeriod",
    "nftables.minSyncPeriod",
];

/// Fields of the format without an effect; `*` stands for any name, and what follows it.
const IGNORED: &[&str] = &[
    "mode",
    "featureGates.*",
    "bindAddress",
    "enableProfiling",
    "clientConnection.acceptContentTypes",
    "clientConnection.contentType",
    "clientConnection.qps",
    "clientConnection.burst",
    "iptables.localhostNodePorts",
    "ipvs.syncPeriod",
    "ipvs.minSyncPeriod",
    "ipvs.scheduler",
    "ipvs.excludeCIDRs",
    "ipvs.strictARP",
    "ipvs.tcpTimeout",
    "ipvs.tcpFinTimeout",
    "ipvs.udpTimeout",
    "portRange",
    "conntrack.maxPerCore",
    "conntrack.min",
    "conntrack.tcpEstablishedTimeout",
    "conntrack.tcpCloseWaitTimeout",
    "conntrack.tcpBeLiberal",
    "conntrack.udpTimeout",
    "conntrack.udpStreamTimeout",
    "configSyncPeriod",
    "winkernel.networkName",
    "winkernel.sourceVip",
    "winkernel.enableDSR",
    "winkernel.rootHnsEndpointName",
    "winkernel.forwardHealthCheckVip",
    "showHiddenMetricsForVersion",
    "detectLocalMode",
    "detectLocal.bridgeInterface",
    "detectLocal.interfaceNamePrefix",
    "logging.format",
    "logging.flushFrequency",
    "logging.verbosity",
    "logging.vmodule",
    "logging.options.*",
    "windowsRunAsService",
];

/// Values that select what happens here anyway, so that naming their fields would only distract.
const HARMLESS: &[(&str, &str)] = &[
    ("mode", "nftables"),
    ("bindAddress", "0.0.0.0"),
    ("bindAddress", "::"),
    ("detectLocalMode", "ClusterCIDR"),
    ("logging.format", "text"),
    ("configSyncPeriod", "15m0s"),
];

/// Why a configuration is not usable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("invalid --config {}: the file cannot be read: {why}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        why: String,
    },
    /// The file is not a KubeProxyConfiguration.
    #[error("invalid --config {}: {why}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The cause.
        why: String,
    },
    /// A field or a flag has an unusable value.
    #[error("invalid {field} {value:?}: {remedy}")]
    Value {
        /// The field's path, or the flag.
        field: &'static str,
        /// The value.
        value: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// There is no kubeconfig.
    #[error(
        "--kubeconfig is required: it names the apiserver whose services this node serves; set it, or clientConnection.kubeconfig in the file of --config"
    )]
    NoKubeconfig,
}

/// Values of flags, which override the file's. `None` means that the flag was not given.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    /// `--kubeconfig`.
    pub kubeconfig: Option<PathBuf>,
    /// `--node-kubeconfig`: the kubeconfig of this node's agent.
    pub node_kubeconfig: Option<PathBuf>,
    /// `--hostname-override`.
    pub hostname: Option<String>,
    /// `--table`: the name of the nftables tables.
    pub table: String,
    /// `--dns`: the addresses of the DNS server, separated by commas.
    pub dns: Option<String>,
    /// `--cluster-domain`.
    pub cluster_domain: String,
    /// `--cluster-cidr`: one or two ranges of pods, separated by a comma.
    pub cluster_cidr: Option<String>,
    /// `--service-cidr`: one or two ranges of cluster IPs, separated by a comma.
    pub service_cidr: Option<String>,
    /// `--bridge`: the bridge of this node's pods.
    pub bridge: Option<String>,
    /// `--policy`: whether network policies are enforced.
    pub policy: bool,
    /// `--routes`: whether routes to the pods of other nodes are kept.
    pub routes: bool,
    /// `--healthz-bind-address`; empty for no server.
    pub healthz: Option<String>,
    /// `--metrics-bind-address`; empty for no server.
    pub metrics: Option<String>,
}

/// The resolved configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The kubeconfig of the apiserver.
    pub(crate) kubeconfig: PathBuf,
    /// The kubeconfig of this node's agent, for the renewal of the certificate in `kubeconfig`; `None` for no renewal.
    pub(crate) node_kubeconfig: Option<PathBuf>,
    /// The name of this node.
    pub(crate) node_name: String,
    /// The name of the nftables tables.
    pub(crate) table: String,
    /// The addresses at which this process answers DNS queries; empty without DNS.
    pub(crate) dns: Vec<IpAddr>,
    /// The cluster's domain.
    pub(crate) cluster_domain: String,
    /// The bridge of this node's pods, whose traffic must pass the rules.
    pub(crate) bridge: Option<String>,
    /// Whether network policies are enforced.
    pub(crate) policy: bool,
    /// Whether routes to the pods of other nodes are kept.
    pub(crate) routes: bool,
    /// The address of `/healthz` and `/livez`; `None` for no server.
    pub(crate) healthz: Option<SocketAddr>,
    /// The address of `/metrics`; `None` for no server.
    pub(crate) metrics: Option<SocketAddr>,
    /// Whether the process exits if one of these addresses cannot be bound.
    pub(crate) bind_hard_fail: bool,
    /// The ranges of the cluster's pods.
    pub(crate) cluster_cidrs: Vec<IpNet>,
    /// The ranges of the cluster's services; connections to unused addresses in them are dropped.
    pub(crate) service_cidrs: Vec<IpNet>,
    /// The ranges of the node's addresses with node ports; empty for the addresses in the Node's status, which is the default
    /// of kube-proxy's nftables mode, too.
    pub(crate) node_port_addresses: Vec<IpNet>,
    /// Whether all connections to cluster IPs are masqueraded.
    pub(crate) masquerade_all: bool,
    /// The bit of the packet mark for masquerading.
    pub(crate) masquerade_bit: u32,
    /// The minimum time between two transactions.
    pub(crate) min_sync_period: Duration,
    /// The time between two audits.
    pub(crate) audit_interval: Duration,
    /// The process's `oom_score_adj`; `None` leaves it unchanged.
    pub(crate) oom_score_adj: Option<i32>,
    /// Fields that the format does not have, and repeated fields.
    pub(crate) unknown: Vec<String>,
    /// Fields that are set and have no effect.
    pub(crate) ignored: Vec<String>,
}

impl Config {
    /// Reads the file, if one is given, and applies the flags. `hostname` is the machine's own name.
    ///
    /// # Errors
    ///
    /// The file or a value is not usable, or there is no kubeconfig.
    pub fn load(
        file: Option<&Path>,
        overrides: &Overrides,
        hostname: &str,
    ) -> Result<Config, ConfigError> {
        let document = match file {
            None => Document::default(),
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|e| ConfigError::Read {
                    path: path.into(),
                    why: e.to_string(),
                })?;
                Document::parse(&text).map_err(|why| ConfigError::Parse {
                    path: path.into(),
                    why,
                })?
            }
        };
        document.resolve(overrides, hostname)
    }

    /// The nftables tables and the DNS addresses alone, for `--cleanup`, which needs no apiserver.
    ///
    /// # Errors
    ///
    /// A value is not usable.
    pub fn for_cleanup(overrides: &Overrides) -> Result<Config, ConfigError> {
        let overrides = Overrides {
            kubeconfig: Some(PathBuf::new()),
            ..overrides.clone()
        };
        Document::default().resolve(&overrides, "")
    }
}

/// A parsed file.
#[derive(Debug, Default)]
struct Document {
    fields: Map<String, Value>,
    unknown: Vec<String>,
}

impl Document {
    fn parse(text: &str) -> Result<Document, String> {
        let (fields, repeated) = lenient(text)?;
        let mut unknown: Vec<String> = repeated.into_iter().collect();
        let of = |key: &str| fields[key].as_str().unwrap_or_default();
        let (version, kind) = (of("apiVersion"), of("kind"));
        if version != "kubeproxy.config.k8s.io/v1alpha1" || kind != "KubeProxyConfiguration" {
            return Err(format!(
                "expected apiVersion kubeproxy.config.k8s.io/v1alpha1 and kind KubeProxyConfiguration, found {version:?} and {kind:?}"
            ));
        }
        let Value::Object(fields) = fields else {
            return Err("the file is not an object".into());
        };
        for path in leaves(&fields) {
            if !is_read(&path) && !is_ignored(&path) {
                unknown.push(path);
            }
        }
        Ok(Document { fields, unknown })
    }

    /// The value at a path, unless it is unset: null, empty, zero or false.
    fn get(&self, path: &str) -> Option<&Value> {
        let mut names = path.split('.');
        let first = self.fields.get(names.next()?);
        let found = names.fold(first, |value, name| value?.get(name));
        found.filter(|value| is_set(value))
    }

    fn text(&self, path: &'static str) -> Result<Option<&str>, ConfigError> {
        let text = |value: &Value| match value {
            Value::String(_) => Ok(()),
            other => Err(invalid(path, &other.to_string(), "use a text")),
        };
        self.get(path).map(text).transpose()?;
        Ok(self.get(path).and_then(Value::as_str))
    }

    fn flag(&self, path: &'static str) -> Result<bool, ConfigError> {
        match self.get(path) {
            None => Ok(false),
            Some(Value::Bool(value)) => Ok(*value),
            Some(other) => Err(invalid(path, &other.to_string(), "use true or false")),
        }
    }

    /// A number, which may be zero.
    fn number(&self, path: &'static str) -> Result<Option<i64>, ConfigError> {
        let mut names = path.split('.');
        let first = self.fields.get(names.next().unwrap_or_default());
        match names.fold(first, |value, name| value?.get(name)) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let wrong = || invalid(path, &value.to_string(), "use a whole number");
                value.as_i64().map(Some).ok_or_else(wrong)
            }
        }
    }

    fn period(&self, path: &'static str) -> Result<Option<Duration>, ConfigError> {
        let Some(text) = self.text(path)? else {
            return Ok(None);
        };
        let wrong = || invalid(path, text, "use a duration such as 30s or 1m30s");
        duration(text).map(Some).ok_or_else(wrong)
    }

    /// The value in the section `nftables`, or else the one in `iptables`.
    fn either<T>(
        &self,
        paths: [&'static str; 2],
        read: impl Fn(&Self, &'static str) -> Result<Option<T>, ConfigError>,
    ) -> Result<Option<T>, ConfigError> {
        let [nftables, iptables] = paths;
        match read(self, nftables)? {
            Some(value) => Ok(Some(value)),
            None => read(self, iptables),
        }
    }

    /// Fields that are set and have no effect.
    fn ignored(&self) -> Vec<String> {
        let mut found = leaves(&self.fields);
        found.retain(|path| {
            let value = self.get(path);
            let is_harmless = |(name, text): &(&str, &str)| {
                path == name && value.and_then(Value::as_str) == Some(*text)
            };
            is_ignored(path) && value.is_some() && !HARMLESS.iter().any(is_harmless)
        });
        found
    }

    fn resolve(self, overrides: &Overrides, hostname: &str) -> Result<Config, ConfigError> {
        let kubeconfig = self.text("clientConnection.kubeconfig")?.map(PathBuf::from);
        let kubeconfig = overrides.kubeconfig.clone().or(kubeconfig);
        let name = match (&overrides.hostname, self.text("hostnameOverride")?) {
            (Some(name), _) => name,
            (None, Some(name)) => name,
            (None, None) => hostname,
        };
        let ports = self.node_ports()?;
        let masquerade_all =
            self.flag("nftables.masqueradeAll")? || self.flag("iptables.masqueradeAll")?;
        let bit = self.either(
            ["nftables.masqueradeBit", "iptables.masqueradeBit"],
            Self::number,
        )?;
        let bit = bit.map_or(Ok(MASQUERADE_BIT), |bit| {
            let fits = u32::try_from(bit).ok().filter(|bit| *bit <= 31);
            let wrong = || invalid("masqueradeBit", &bit.to_string(), "use 0 to 31");
            fits.ok_or_else(wrong)
        })?;
        let min = self.either(
            ["nftables.minSyncPeriod", "iptables.minSyncPeriod"],
            Self::period,
        )?;
        let audit = self.either(["nftables.syncPeriod", "iptables.syncPeriod"], Self::period)?;
        let audit = audit.unwrap_or(AUDIT_INTERVAL);
        let oom = self.number("oomScoreAdj")?.map(|score| {
            let fits = i32::try_from(score)
                .ok()
                .filter(|s| (-1000..=1000).contains(s));
            let wrong = || invalid("oomScoreAdj", &score.to_string(), "use -1000 to 1000");
            fits.ok_or_else(wrong)
        });
        let cidr = match &overrides.cluster_cidr {
            Some(text) => networks("--cluster-cidr", text)?,
            None => networks("clusterCIDR", self.text("clusterCIDR")?.unwrap_or_default())?,
        };
        Ok(Config {
            kubeconfig: kubeconfig.ok_or(ConfigError::NoKubeconfig)?,
            node_kubeconfig: overrides.node_kubeconfig.clone(),
            // The Node's name is in lower case (`nodeutil.GetHostname`).
            node_name: name.trim().to_ascii_lowercase(),
            table: table(&overrides.table)?,
            dns: addresses(overrides.dns.as_deref().unwrap_or_default())?,
            cluster_domain: domain(&overrides.cluster_domain)?,
            bridge: overrides.bridge.clone().filter(|name| !name.is_empty()),
            policy: overrides.policy,
            routes: overrides.routes,
            healthz: self.endpoint(
                ("--healthz-bind-address", overrides.healthz.as_deref()),
                ("healthzBindAddress", HEALTHZ),
            )?,
            metrics: self.endpoint(
                ("--metrics-bind-address", overrides.metrics.as_deref()),
                ("metricsBindAddress", METRICS),
            )?,
            bind_hard_fail: self.flag("bindAddressHardFail")?,
            cluster_cidrs: cidr,
            service_cidrs: networks(
                "--service-cidr",
                overrides.service_cidr.as_deref().unwrap_or_default(),
            )?,
            node_port_addresses: ports,
            masquerade_all,
            masquerade_bit: bit,
            min_sync_period: min.unwrap_or_default().min(MAX_MIN_SYNC_PERIOD),
            audit_interval: audit.clamp(MIN_AUDIT_INTERVAL, AUDIT_INTERVAL),
            oom_score_adj: oom.transpose()?,
            ignored: self.ignored(),
            unknown: self.unknown,
        })
    }

    /// The address of a server: the flag's, or else the field's, or else the default. An empty flag means no server. A
    /// missing port is the default's (`addressFromDeprecatedFlags` in `cmd/kube-proxy/app/options.go`).
    fn endpoint(
        &self,
        flag: (&'static str, Option<&str>),
        field: (&'static str, SocketAddr),
    ) -> Result<Option<SocketAddr>, ConfigError> {
        let (name, text) = match (flag.1, self.text(field.0)?) {
            (Some(""), _) => return Ok(None),
            (Some(text), _) => (flag.0, text),
            (None, Some(text)) => (field.0, text),
            (None, None) => return Ok(Some(field.1)),
        };
        let address: Option<SocketAddr> = text.parse().ok();
        let bare = || text.trim_matches(['[', ']']).parse::<IpAddr>().ok();
        let address = address.or_else(|| Some(SocketAddr::new(bare()?, field.1.port())));
        let wrong = || {
            invalid(
                name,
                text,
                "use an IP address with a port, such as 0.0.0.0:10256",
            )
        };
        address.map(Some).ok_or_else(wrong)
    }

    /// `nodePortAddresses`: ranges, or only `primary`.
    fn node_ports(&self) -> Result<Vec<IpNet>, ConfigError> {
        const FIELD: &str = "nodePortAddresses";
        let list = match self.get(FIELD) {
            None => return Ok(vec![]),
            Some(Value::Array(list)) => list,
            Some(other) => return Err(invalid(FIELD, &other.to_string(), "use a list")),
        };
        let texts: Vec<&str> = list.iter().filter_map(Value::as_str).collect();
        if texts == ["primary"] {
            return Ok(vec![]);
        }
        let mut all = vec![];
        for text in texts {
            let network = text.parse().map_err(|_| {
                let remedy = "use address ranges such as 192.0.2.0/24, or only \"primary\"";
                invalid(FIELD, text, remedy)
            })?;
            all.push(network);
        }
        Ok(all)
    }
}

fn invalid(field: &'static str, value: &str, remedy: &'static str) -> ConfigError {
    ConfigError::Value {
        field,
        value: value.to_owned(),
        remedy,
    }
}

/// Whether a value differs from the one that Go's encoder writes for an unset field.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Bool(true) => true,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty() && text != "0s",
        Value::Array(list) => !list.is_empty(),
        Value::Object(fields) => fields.values().any(is_set),
    }
}

/// The paths of all values that are not objects, and of empty objects.
fn leaves(fields: &Map<String, Value>) -> Vec<String> {
    fn walk(prefix: &str, fields: &Map<String, Value>, depth: usize, into: &mut Vec<String>) {
        for (name, value) in fields {
            let path = format!("{prefix}{name}");
            match value {
                // No field of the format is deeper.
                Value::Object(below) if !below.is_empty() && depth < 6 => {
                    walk(&format!("{path}."), below, depth + 1, into);
                }
                _ => into.push(path),
            }
        }
    }
    let mut all = vec![];
    walk("", fields, 0, &mut all);
    all
}

/// Whether a pattern describes a path, or a section that is empty or null.
fn matches(pattern: &str, path: &str) -> bool {
    let below = |name: &str| {
        name.strip_prefix(path)
            .is_some_and(|rest| rest.starts_with('.'))
    };
    match pattern.strip_suffix('*') {
        Some(prefix) => path.starts_with(prefix) || format!("{path}.") == prefix,
        None => pattern == path || below(pattern),
    }
}

fn is_read(path: &str) -> bool {
    READ.iter()
        .chain(READ_NFTABLES)
        .any(|pattern| matches(pattern, path))
}

fn is_ignored(path: &str) -> bool {
    IGNORED.iter().any(|pattern| matches(pattern, path))
}

/// Parses ranges that are separated by commas.
fn networks(field: &'static str, text: &str) -> Result<Vec<IpNet>, ConfigError> {
    let texts = text.split(',').map(str::trim).filter(|t| !t.is_empty());
    let mut all: Vec<IpNet> = vec![];
    for one in texts {
        let network = one.parse().map_err(|_| {
            let remedy = "use one or two address ranges such as 10.244.0.0/16,fd00:10:244::/56";
            invalid(field, text, remedy)
        })?;
        all.push(network);
    }
    let families = all.iter().map(|network| network.addr().is_ipv4());
    match families.collect::<Vec<bool>>().as_slice() {
        [] | [_] => Ok(all),
        [a, b] if a != b => Ok(all),
        _ => Err(invalid(
            field,
            text,
            "use at most one range of each address family",
        )),
    }
}

/// Parses the addresses of the DNS server.
fn addresses(text: &str) -> Result<Vec<IpAddr>, ConfigError> {
    let texts = text.split(',').map(str::trim).filter(|t| !t.is_empty());
    let mut all: Vec<IpAddr> = vec![];
    for one in texts {
        let usable = |a: &IpAddr| !a.is_unspecified() && !a.is_multicast();
        let address = one.parse().ok().filter(usable).ok_or_else(|| {
            let remedy = "use IP addresses of the service range, such as 10.96.0.10";
            invalid("--dns", text, remedy)
        })?;
        if !all.contains(&address) {
            all.push(address);
        }
    }
    Ok(all)
}

/// The longest name that the kernel accepts for a table is longer; chains and sets have the same limit.
const MAX_TABLE_NAME: usize = 64;

fn table(name: &str) -> Result<String, ConfigError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let fine = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(is_plain)
        && name.len() <= MAX_TABLE_NAME
        && name != "kube-proxy";
    if fine {
        Ok(name.to_owned())
    } else {
        let remedy = "use at most 64 letters, digits, '-' and '_', beginning with a letter; kube-proxy is the table of kube-proxy";
        Err(invalid("--table", name, remedy))
    }
}

fn domain(name: &str) -> Result<String, ConfigError> {
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    let label = |label: &str| {
        let inner = |c: char| c.is_ascii_alphanumeric() || c == '-';
        (1..=63).contains(&label.len())
            && label.chars().all(inner)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    // A name of a service needs space in front of the domain (RFC 1035: 253 characters).
    if name.len() <= 128 && name.split('.').all(label) {
        Ok(name)
    } else {
        let remedy = "use a DNS name of at most 128 characters, such as cluster.local";
        Err(invalid("--cluster-domain", &name, remedy))
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
