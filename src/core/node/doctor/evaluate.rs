//! Evaluation of each fact.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::{
    ApiFacts, Certificate, Disk, Facts, Finding, NetworkFacts, Port, RuntimeFacts, Severity, fault,
    ok,
};
use crate::pod::dns::{self, Resolver};
use crate::time::shown;

/// Controllers that the limits of pods need.
pub(super) const CONTROLLERS: [&str; 4] = ["cpu", "cpuset", "memory", "pids"];
/// Clock difference above which tokens and certificates are sometimes invalid.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_secs(5);
/// Remaining validity below which a certificate should already have been renewed.
const EXPIRES_SOON: SignedDuration = SignedDuration::from_hours(7 * 24);
/// Response time above which all pod operations are slow.
pub(super) const SLOW: Duration = Duration::from_secs(1);
/// The kubelet's default eviction thresholds for available bytes and free inodes, in percent.
const MIN_AVAILABLE_PERCENT: (u64, u64) = (10, 5);
/// The kubelet's default threshold for available bytes on the image filesystem, in percent.
const MIN_AVAILABLE_PERCENT_FOR_IMAGES: u64 = 15;
/// Purpose of the image filesystem.
const IMAGES: &str = "images";

pub(super) fn configuration(facts: &Facts) -> Vec<Finding> {
    let refused = facts.refusals.iter().map(|why| Finding {
        leads_to: Some("the agent does not start".into()),
        severity: Severity::Error,
        ..ok("start", why.clone())
    });
    let unread = facts.configuration.iter().map(|what| {
        fault(
            Severity::Warning,
            "config",
            what.clone(),
            "this part of the configuration has no effect",
            "remove the field, or see docs/CONFIGURATION.md and docs/FEATURES.md for what is supported",
        )
    });
    let mut findings: Vec<Finding> = refused.chain(unread).collect();
    if findings.is_empty() {
        findings.push(ok("config", "valid, and every field takes effect"));
    }
    findings
}

pub(super) fn kernel(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![];
    if !facts.overlay {
        findings.push(fault(
            Severity::Error,
            "kernel",
            format!("Linux {} without overlayfs", facts.kernel),
            "containerd cannot create containers with its default snapshotter",
            "modprobe overlay; echo overlay > /etc/modules-load.d/overlay.conf",
        ));
    }
    if !facts.forwards {
        findings.push(fault(
            Severity::Error,
            "kernel",
            "net.ipv4.ip_forward is 0",
            "pods have no connections beyond their node, in either direction",
            "sysctl -w net.ipv4.ip_forward=1; echo net.ipv4.ip_forward=1 > /etc/sysctl.d/99-kubernetes.conf",
        ));
    }
    findings.extend(reverse_path(&facts.uplinks));
    if facts.bridge_filters == Some(false) {
        findings.push(fault(
            Severity::Warning,
            "kernel",
            "net.bridge.bridge-nf-call-iptables is 0",
            "a pod may fail to reach a service whose pod is on the same bridge, and network policies are not enforced there",
            "sysctl -w net.bridge.bridge-nf-call-iptables=1",
        ));
    }
    if findings.is_empty() {
        findings.push(ok("kernel", format!("Linux {}", facts.kernel)));
    }
    findings
}

/// A strict filter drops what arrives on another interface than the one that the answer would leave by. With one uplink
/// the two are always the same.
fn reverse_path(uplinks: &[(String, u8)]) -> Option<Finding> {
    let strict = uplinks.iter().find(|(_, filter)| *filter == 1);
    let (name, _) = strict.filter(|_| uplinks.len() > 1)?;
    Some(fault(
        Severity::Warning,
        "kernel",
        format!(
            "rp_filter of {name} is 1 (strict), and this machine has {} uplinks",
            uplinks.len()
        ),
        "packets of pods on other nodes are dropped if they arrive on another interface than the route back",
        format!(
            "sysctl -w net.ipv4.conf.{name}.rp_filter=2; the larger of net.ipv4.conf.all.rp_filter and this one counts"
        ),
    ))
}

pub(super) fn cgroups(facts: &Facts) -> Vec<Finding> {
    let version = if facts.cgroup_v2 { "v2" } else { "v1" };
    let is_missing = |name: &&str| !facts.controllers.iter().any(|c| c == name);
    let missing: Vec<&str> = CONTROLLERS.into_iter().filter(is_missing).collect();
    let mut findings = vec![];
    if !missing.is_empty() {
        findings.push(fault(
            Severity::Error,
            "cgroups",
            format!("cgroup {version} without {}", missing.join(", ")),
            "limits of pods are not enforced, or their cgroups cannot be created",
            "boot with cgroup_enable=cpuset,memory on the kernel's command line, and let systemd delegate the controllers",
        ));
    }
    let driver = |systemd| if systemd { "systemd" } else { "cgroupfs" };
    let result = facts
        .runtime
        .iter()
        .find_map(|(_, result)| result.as_ref().ok());
    match result.and_then(|runtime| runtime.systemd_cgroups) {
        Some(systemd) if systemd != facts.wants_systemd => findings.push(fault(
            Severity::Warning,
            "cgroups",
            format!(
                "cgroupDriver is {}, and the runtime uses {}",
                driver(facts.wants_systemd),
                driver(systemd)
            ),
            "the agent uses the runtime's driver; a kubelet that does not detect it would fail to start pods",
            format!("set cgroupDriver: {} in the KubeletConfiguration", driver(systemd)),
        )),
        Some(systemd) if findings.is_empty() => findings.push(ok(
            "cgroups",
            format!("cgroup {version} with the {} driver", driver(systemd)),
        )),
        None if findings.is_empty() => findings.push(ok("cgroups", format!("cgroup {version}"))),
        _ => {}
    }
    findings
}

pub(super) fn runtime(
    endpoint: &str,
    result: &Result<RuntimeFacts, String>,
    network: Option<&NetworkFacts>,
) -> Vec<Finding> {
    let facts = match result {
        Ok(facts) => facts,
        Err(why) => {
            return vec![fault(
                Severity::Error,
                "runtime",
                format!("{endpoint} does not answer: {why}"),
                "no pod starts, and the node is NotReady",
                "systemctl start containerd; or name its socket with --container-runtime-endpoint",
            )];
        }
    };
    let mut findings = vec![];
    if let Some(why) = &facts.not_ready {
        findings.push(fault(
            Severity::Error,
            "runtime",
            format!("{} is not ready: {why}", facts.version),
            "no pod starts, and the node is NotReady",
            "find the cause with journalctl -u containerd",
        ));
    }
    let no_network = facts.network_not_ready.as_ref();
    findings.extend(no_network.map(|why| super::runtime::not_ready(why, network)));
    if facts.took > SLOW {
        findings.push(fault(
            Severity::Warning,
            "runtime",
            format!(
                "{} took {:.1} s to answer",
                facts.version,
                facts.took.as_secs_f64()
            ),
            "pods start and stop slowly",
            "find the busy disk or CPU: iostat -x 1, top",
        ));
    }
    if findings.is_empty() {
        let took = facts.took.as_millis();
        findings.push(ok(
            "runtime",
            format!(
                "{} at {endpoint}, network ready, answered in {took} ms",
                facts.version
            ),
        ));
    }
    findings
}

fn percent(part: u64, whole: u64) -> u64 {
    // For values near `u64::MAX`, dividing first is accurate enough.
    let (part, whole) = match part.checked_mul(100) {
        Some(part) => (part, whole),
        None => (part, whole / 100),
    };
    part.checked_div(whole).unwrap_or(part)
}

pub(super) fn disk(disk: &Disk) -> Vec<Finding> {
    let Disk {
        purpose,
        path,
        capacity,
        available,
        inodes,
        inodes_free,
    } = disk;
    let path = path.display();
    let (room, free) = (
        percent(*available, *capacity),
        percent(*inodes_free, *inodes),
    );
    let mut findings = vec![];
    let leads_to = "below the eviction thresholds, images are removed and pods are evicted";
    let least = match *purpose {
        IMAGES => MIN_AVAILABLE_PERCENT_FOR_IMAGES,
        _ => MIN_AVAILABLE_PERCENT.0,
    };
    if room < least {
        findings.push(fault(
            Severity::Warning,
            "disk",
            format!("{room} % of {path} ({purpose}) is available"),
            leads_to,
            format!(
                "remove what is not needed (du -xh --max-depth=2 {path}), or enlarge the filesystem"
            ),
        ));
    }
    if *inodes > 0 && free < MIN_AVAILABLE_PERCENT.1 {
        findings.push(fault(
            Severity::Warning,
            "disk",
            format!("{free} % of the inodes of {path} ({purpose}) are free"),
            leads_to,
            format!("remove small files that are not needed (du -x --inodes --max-depth=2 {path})"),
        ));
    }
    if findings.is_empty() {
        findings.push(ok(
            "disk",
            format!("{room} % of {path} ({purpose}) is available"),
        ));
    }
    findings
}

pub(super) fn resolve(path: &str, resolver: &Result<Resolver, String>) -> Finding {
    let resolver = match resolver {
        Ok(resolver) => resolver,
        Err(why) => {
            return fault(
                Severity::Error,
                "dns",
                why.clone(),
                "pods, including the cluster's DNS server, inherit no name resolution from the node",
                "set resolvConf to the path of a readable resolv.conf",
            );
        }
    };
    let is_loopback = |server: &&String| {
        let address = server.parse::<std::net::IpAddr>();
        address.is_ok_and(|a| a.is_loopback())
    };
    if let Some(server) = resolver.servers.iter().find(is_loopback) {
        return fault(
            Severity::Warning,
            "dns",
            format!("{path} names {server}, a loopback address, which in a pod is the pod itself"),
            "pods with dnsPolicy Default resolve no names, and CoreDNS queries itself until it exits",
            "set resolvConf: /run/systemd/resolve/resolv.conf, or the file that lists the real servers",
        );
    }
    match dns::check_host(resolver) {
        Some(what) => fault(
            Severity::Warning,
            "dns",
            what,
            "some names resolve on the node and not in pods",
            format!("shorten the search line of {path}"),
        ),
        None => ok(
            "dns",
            format!("{path} names {}", resolver.servers.join(", ")),
        ),
    }
}

pub(super) fn port(port: &Port) -> Finding {
    let Port {
        field,
        address,
        holder,
    } = port;
    match holder {
        None => ok("port", format!("{address} ({field}) is free")),
        Some(Some((name, pid))) if matches!(name.as_str(), "kubelet" | "holdfast") => ok(
            "port",
            format!("{address} ({field}) is served by {name} (pid {pid})"),
        ),
        Some(other) => {
            let holder_name = match other {
                Some((name, pid)) => format!("{name} (pid {pid})"),
                None => "another process".into(),
            };
            fault(
                Severity::Error,
                "port",
                format!("{address} ({field}) is in use by {holder_name}"),
                "the agent cannot serve there: no logs, no exec, no metrics",
                format!("stop that process, or set another port with {field}"),
            )
        }
    }
}

pub(super) fn certificate(certificate: &Certificate, now: Timestamp) -> Finding {
    let Certificate {
        purpose,
        path,
        lifetime: (begins, ends),
    } = certificate;
    let found = |what: String| format!("the {purpose} certificate {} {what}", path.display());
    if now < *begins {
        return fault(
            Severity::Error,
            "certificate",
            found(format!("is not valid before {begins}")),
            "every peer rejects it: the machine's clock is behind, or the certificate is wrong",
            "timedatectl set-ntp true",
        );
    }
    if *ends <= now {
        return fault(
            Severity::Error,
            "certificate",
            found(format!("expired at {ends}")),
            "connections between the apiserver and the node fail",
            "kubeadm certs renew, or join the node again; with rotateCertificates a running agent renews it automatically",
        );
    }
    let remaining = ends.duration_since(now);
    let days = remaining.as_hours() / 24;
    if remaining < EXPIRES_SOON {
        return fault(
            Severity::Warning,
            "certificate",
            found(format!("expires in {days} days, at {ends}")),
            "after that, connections between the apiserver and the node fail",
            "set rotateCertificates: true, and check that its requests are approved: kubectl get csr",
        );
    }
    ok("certificate", found(format!("is valid for {days} days")))
}

/// The Node object does not exist.
fn missing(registers_after: Option<Duration>) -> Finding {
    match registers_after {
        Some(after) => ok(
            "node",
            format!(
                "the Node object does not exist: the agent registers it when it starts, or after it has been missing for {}",
                shown(after)
            ),
        ),
        None => fault(
            Severity::Warning,
            "node",
            "the Node object does not exist, and registerNode is false",
            "the scheduler assigns no pods to this node, and the control plane removes the running ones",
            "create the Node object, or set registerNode to true",
        ),
    }
}

pub(super) fn api(result: &Result<ApiFacts, String>) -> Vec<Finding> {
    let facts = match result {
        Ok(facts) => facts,
        Err(why) => {
            return vec![fault(
                Severity::Error,
                "apiserver",
                format!("no answer: {why}"),
                "the node gets no pods, and its Ready condition becomes Unknown after 40 s",
                "check the server's address in the kubeconfig and the network path: curl -k https://SERVER/livez",
            )];
        }
    };
    let mut findings = vec![];
    if let Some(clock) = facts.clock.filter(|c| c.abs() > MAX_CLOCK_SKEW) {
        let (by, seconds) = (
            if clock.is_positive() {
                "behind"
            } else {
                "ahead"
            },
            clock.abs().as_secs(),
        );
        findings.push(fault(
            Severity::Error,
            "clock",
            format!("this machine's clock is {seconds} s {by} the apiserver's"),
            "leases, tokens and certificates count as expired or not yet valid",
            "timedatectl set-ntp true",
        ));
    }
    if facts.took > SLOW {
        findings.push(fault(
            Severity::Warning,
            "apiserver",
            format!("took {:.1} s to answer", facts.took.as_secs_f64()),
            "pods start late, and statuses are old",
            "check the network path and the apiserver's load",
        ));
    }
    match facts.node_ready {
        Some(false) => findings.push(fault(
            Severity::Warning,
            "node",
            "the Node object exists and is not Ready",
            "no pods are scheduled to this node",
            "find the cause in the Ready condition: kubectl describe node",
        )),
        Some(true) => findings.push(ok("node", "Ready")),
        None => findings.push(missing(facts.registers_after)),
    }
    if findings.iter().all(|f| f.subject == "node") {
        let took = facts.took.as_millis();
        findings.insert(0, ok("apiserver", format!("answered in {took} ms")));
    }
    findings
}
