//! What `holdfast doctor` makes of a machine: what is wrong, what that leads to, and the remedy. Pure.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use crate::core::pod::dns::Resolver;
pub use runtime::{Details, NetworkFacts, PodNetwork, UNHIDE, parse_network};

mod judge;
mod runtime;
#[cfg(test)]
mod tests;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Pods run, and something is not as it should be, or will not be soon.
    Warning,
    /// The agent does not start, or pods do not run.
    Error,
}

/// What was found out about one subject.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at, in one word.
    pub subject: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What was found.
    pub found: String,
    /// What that leads to; none where all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leads_to: Option<String>,
    /// What to do about it, a command where one does it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// What the runtime says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeFacts {
    /// Its name and version.
    pub version: String,
    /// Why it is not ready, if it is not.
    pub not_ready: Option<String>,
    /// Why its network is not ready, if it is not.
    pub network_not_ready: Option<String>,
    /// Whether it makes cgroups through systemd, if it says.
    pub systemd_cgroups: Option<bool>,
    /// Whether its default handler is configured to do so, if it tells its configuration.
    pub handler_systemd: Option<bool>,
    /// The image of sandboxes, and whether it is here, if it tells its configuration.
    pub sandbox_image: Option<(String, bool)>,
    /// How long its answer took.
    pub took: Duration,
}

/// What the apiserver says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ApiFacts {
    /// How long its answer took.
    pub took: Duration,
    /// Its clock against ours; positive where ours is behind. None where it does not tell the time.
    pub clock: Option<SignedDuration>,
    /// Whether the node's object is there, and whether it is ready.
    pub node_ready: Option<bool>,
    /// Whether the agent registers the node where the object is missing, and how long it waits for that while it runs.
    pub registers_after: Option<Duration>,
}

/// A port that the agent serves on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// The field of the configuration.
    pub field: &'static str,
    /// Where.
    pub address: SocketAddr,
    /// Who has it: the process's name and pid, as far as they can be found out. None where it is free.
    pub holder: Option<Option<(String, u32)>>,
}

/// A certificate of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// What it is for.
    pub purpose: &'static str,
    /// Its file.
    pub path: PathBuf,
    /// From when until when it is good.
    pub lifetime: (Timestamp, Timestamp),
}

/// A filesystem that the node needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// What lies there.
    pub purpose: &'static str,
    /// Where.
    pub path: PathBuf,
    /// All bytes.
    pub capacity: u64,
    /// Bytes that may still be written.
    pub available: u64,
    /// All inodes; 0 where the filesystem does not count them.
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
}

/// What was found out. An error is why something could not be asked.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// When.
    pub now: Timestamp,
    /// What makes the agent refuse this machine, as sentences with their remedies.
    pub refusals: Vec<String>,
    /// What of the configuration has no effect or would be refused by a strict reading, as sentences.
    pub configuration: Vec<String>,
    /// The kernel's release.
    pub kernel: String,
    /// Whether it has the filesystem on which containerd keeps containers.
    pub overlay: bool,
    /// Whether it forwards IPv4 packets.
    pub forwards: bool,
    /// Whether packets across a bridge pass iptables; none where the kernel cannot have them do so now.
    pub bridge_filters: Option<bool>,
    /// Whether cgroup v2 is the machine's hierarchy.
    pub cgroup_v2: bool,
    /// The controllers that are enabled.
    pub controllers: Vec<String>,
    /// Whether the configuration names the systemd driver; it counts where the runtime does not say.
    pub wants_systemd: bool,
    /// Where the runtime is, and what it says.
    pub runtime: Option<(String, Result<RuntimeFacts, String>)>,
    /// What is there for pods' networks, if the runtime tells where.
    pub network: Option<NetworkFacts>,
    /// Network namespaces of sandboxes that a later mount over their directory hides.
    pub hidden_namespaces: Vec<PathBuf>,
    /// What the apiserver says; none without a kubeconfig.
    pub api: Option<Result<ApiFacts, String>>,
    /// The ports that the agent serves on.
    pub ports: Vec<Port>,
    /// The node's certificates.
    pub certificates: Vec<Certificate>,
    /// Its filesystems.
    pub disks: Vec<Disk>,
    /// The resolver configuration that pods inherit, and its file.
    pub resolver: Option<(String, Result<Resolver, String>)>,
}

/// Judges what was found out; the findings come in the order in which a node comes up.
#[must_use]
pub fn diagnose(facts: &Facts) -> Vec<Finding> {
    let mut findings = judge::configuration(facts);
    findings.extend(judge::kernel(facts));
    findings.extend(judge::cgroups(facts));
    findings.extend(
        facts
            .runtime
            .iter()
            .flat_map(|(at, said)| judge::runtime(at, said, facts.network.as_ref())),
    );
    let said = facts
        .runtime
        .iter()
        .filter_map(|(_, said)| said.as_ref().ok());
    findings.extend(said.flat_map(|said| runtime::configured(said, facts.wants_systemd)));
    let is_told = findings.iter().any(|f| f.subject == "network");
    let network = facts.network.iter();
    findings.extend(network.flat_map(|network| runtime::network(network, is_told)));
    findings.extend(runtime::hidden(&facts.hidden_namespaces));
    findings.extend(facts.disks.iter().flat_map(judge::disk));
    let resolved = facts.resolver.iter();
    findings.extend(resolved.map(|(path, resolver)| judge::resolve(path, resolver)));
    findings.extend(facts.ports.iter().map(judge::port));
    let certificates = facts.certificates.iter();
    findings.extend(certificates.map(|held| judge::certificate(held, facts.now)));
    findings.extend(facts.api.iter().flat_map(judge::api));
    findings
}

/// What keeps the agent from starting or pods from running.
pub fn errors(findings: &[Finding]) -> impl Iterator<Item = &Finding> {
    findings.iter().filter(|f| f.severity == Severity::Error)
}

/// The finding about a configuration that cannot be used; the reason names the field and the remedy.
#[must_use]
pub fn unusable(why: String) -> Finding {
    Finding {
        subject: "config",
        severity: Severity::Error,
        found: why,
        leads_to: Some("the agent does not start".into()),
        remedy: Some("correct the flag or the field of the configuration that is named".into()),
    }
}

/// The findings for people: what is well in one line each, what is not with its effect and its remedy.
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

/// The worst of all.
#[must_use]
pub fn worst(findings: &[Finding]) -> Severity {
    let severities = findings.iter().map(|f| f.severity);
    severities.max().unwrap_or(Severity::Ok)
}
