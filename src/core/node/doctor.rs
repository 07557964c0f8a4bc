//! Diagnosis of a machine for `holdfast doctor`: each fault with its effect and remedy. Pure.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use crate::pod::dns::Resolver;
pub(crate) use runtime::UNHIDE;
pub use runtime::{Details, NetworkFacts, PodNetwork, parse_network};

mod evaluate;
mod runtime;

fn ok(subject: &'static str, found: impl Into<String>) -> Finding {
    Finding {
        subject,
        severity: Severity::Ok,
        found: found.into(),
        leads_to: None,
        remedy: None,
    }
}

fn fault(
    severity: Severity,
    subject: &'static str,
    found: impl Into<String>,
    leads_to: impl Into<String>,
    remedy: impl Into<String>,
) -> Finding {
    Finding {
        subject,
        severity,
        found: found.into(),
        leads_to: Some(leads_to.into()),
        remedy: Some(remedy.into()),
    }
}

#[cfg(test)]
mod tests;

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// No fault.
    Ok,
    /// Pods run, but something is wrong or soon will be.
    Warning,
    /// The agent cannot start, or pods cannot run.
    Error,
}

/// Result of the checks of one subject.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The subject in one word.
    pub subject: &'static str,
    /// Severity of the fault.
    pub severity: Severity,
    /// The observed state.
    pub found: String,
    /// Effect of the fault; `None` if there is no fault.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leads_to: Option<String>,
    /// The remedy, as a command if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// Facts from the container runtime.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeFacts {
    /// Name and version of the runtime.
    pub version: String,
    /// Why the runtime is not ready; `None` if it is.
    pub not_ready: Option<String>,
    /// Why the network is not ready; `None` if it is.
    pub network_not_ready: Option<String>,
    /// Whether the runtime uses the systemd cgroup driver; `None` if it does not report that.
    pub systemd_cgroups: Option<bool>,
    /// Whether the default handler is configured for systemd; `None` if the runtime does not report its configuration.
    pub handler_systemd: Option<bool>,
    /// Sandbox image, and whether it is present; `None` if the runtime does not report its configuration.
    pub sandbox_image: Option<(String, bool)>,
    /// Response time.
    pub took: Duration,
}

/// Facts from the apiserver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ApiFacts {
    /// Response time.
    pub took: Duration,
    /// Apiserver time minus local time; positive if the local clock is behind. `None` if the response has no date.
    pub clock: Option<SignedDuration>,
    /// Whether the node is ready; `None` if the Node object does not exist.
    pub node_ready: Option<bool>,
    /// How long a running agent waits before it registers a missing Node; `None` if `registerNode` is false.
    pub registers_after: Option<Duration>,
}

/// A port that the agent serves on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// The configuration field.
    pub field: &'static str,
    /// The listening address.
    pub address: SocketAddr,
    /// `None` if the port is free; otherwise the process that uses it, with name and pid if known.
    pub holder: Option<Option<(String, u32)>>,
}

/// A certificate of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// The certificate's purpose.
    pub purpose: &'static str,
    /// Path of the certificate.
    pub path: PathBuf,
    /// Start and end of its validity.
    pub lifetime: (Timestamp, Timestamp),
}

/// A filesystem that the node needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// What the filesystem stores.
    pub purpose: &'static str,
    /// A path on the filesystem.
    pub path: PathBuf,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Available bytes.
    pub available: u64,
    /// Number of inodes; 0 if the filesystem does not count them.
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
}

/// Facts about the machine. An error explains why a fact is not available.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// When the facts were collected.
    pub now: Timestamp,
    /// Reasons why the agent cannot start on this machine, as sentences with remedies.
    pub refusals: Vec<String>,
    /// Parts of the configuration that have no effect, or that strict parsing would reject, as sentences.
    pub configuration: Vec<String>,
    /// The kernel's release.
    pub kernel: String,
    /// Whether the kernel supports overlayfs, which containerd uses by default.
    pub overlay: bool,
    /// Whether the kernel forwards IPv4 packets.
    pub forwards: bool,
    /// Interfaces with an IPv4 default route, with their reverse path filter: 0 off, 1 strict, 2 loose (RFC 3704).
    pub uplinks: Vec<(String, u8)>,
    /// Whether bridged packets pass iptables; `None` if the kernel module is not loaded.
    pub bridge_filters: Option<bool>,
    /// Whether the machine uses cgroup v2.
    pub cgroup_v2: bool,
    /// The enabled cgroup controllers.
    pub controllers: Vec<String>,
    /// Whether `cgroupDriver` is systemd; used if the runtime does not report its driver.
    pub wants_systemd: bool,
    /// The runtime's endpoint and facts.
    pub runtime: Option<(String, Result<RuntimeFacts, String>)>,
    /// CNI configuration, if the runtime reports its directories.
    pub network: Option<NetworkFacts>,
    /// Network namespaces of sandboxes that are hidden by a later mount over their directory.
    pub hidden_namespaces: Vec<PathBuf>,
    /// Facts from the apiserver; `None` without a kubeconfig.
    pub api: Option<Result<ApiFacts, String>>,
    /// The ports that the agent serves on.
    pub ports: Vec<Port>,
    /// The node's certificates.
    pub certificates: Vec<Certificate>,
    /// The node's filesystems.
    pub disks: Vec<Disk>,
    /// The resolver configuration that pods inherit, with its path.
    pub resolver: Option<(String, Result<Resolver, String>)>,
}

/// Evaluates the facts. Findings are in the order in which a node starts up.
#[must_use]
pub fn diagnose(facts: &Facts) -> Vec<Finding> {
    let mut findings = evaluate::configuration(facts);
    findings.extend(evaluate::kernel(facts));
    findings.extend(evaluate::cgroups(facts));
    findings.extend(
        facts
            .runtime
            .iter()
            .flat_map(|(at, result)| evaluate::runtime(at, result, facts.network.as_ref())),
    );
    let result = facts
        .runtime
        .iter()
        .filter_map(|(_, result)| result.as_ref().ok());
    findings.extend(result.flat_map(|result| runtime::configured(result, facts.wants_systemd)));
    let already_reported = findings.iter().any(|f| f.subject == "network");
    let network = facts.network.iter();
    findings.extend(network.flat_map(|network| runtime::network(network, already_reported)));
    findings.extend(runtime::hidden(&facts.hidden_namespaces));
    findings.extend(facts.disks.iter().flat_map(evaluate::disk));
    let resolved = facts.resolver.iter();
    findings.extend(resolved.map(|(path, resolver)| evaluate::resolve(path, resolver)));
    findings.extend(facts.ports.iter().map(evaluate::port));
    let certificates = facts.certificates.iter();
    findings.extend(certificates.map(|certificate| evaluate::certificate(certificate, facts.now)));
    findings.extend(facts.api.iter().flat_map(evaluate::api));
    findings
}

/// Findings that prevent the agent from starting or pods from running.
pub fn errors(findings: &[Finding]) -> impl Iterator<Item = &Finding> {
    findings.iter().filter(|f| f.severity == Severity::Error)
}

/// The finding for an invalid configuration; `why` names the field and the remedy.
#[must_use]
pub fn unusable(why: String) -> Finding {
    Finding {
        subject: "config",
        severity: Severity::Error,
        found: why,
        leads_to: Some("the agent does not start".into()),
        remedy: Some("correct the flag or configuration field that the error names".into()),
    }
}

/// The findings as text: one line for each healthy subject, and effect and remedy for each fault.
#[must_use]
pub fn text(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let severity = match finding.severity {
            Severity::Ok => "ok",
            Severity::Warning => "warning",
            Severity::Error => "ERROR",
        };
        text.push_str(&format!(
            "{severity:<8}{:<13}{}\n",
            finding.subject, finding.found
        ));
        for (label, line) in [("leads to", &finding.leads_to), ("remedy", &finding.remedy)] {
            if let Some(line) = line {
                text.push_str(&format!("{:21}{label}: {line}\n", ""));
            }
        }
    }
    text
}

/// The highest severity.
#[must_use]
pub fn worst(findings: &[Finding]) -> Severity {
    let severities = findings.iter().map(|f| f.severity);
    severities.max().unwrap_or(Severity::Ok)
}
