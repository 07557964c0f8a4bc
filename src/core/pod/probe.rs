//! Probes and lifecycle hooks: resolved requests, timing, results, and the health that follows from them
//! (`pkg/kubelet/prober`). Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    Container, ContainerStatus, HTTPGetAction, HTTPHeader, LifecycleHandler, Pod, Probe,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::{Deserialize, Serialize};

use crate::meta;
use crate::serving::query;
use crate::time;
use crate::version::{HOOK_AGENT, PROBE_AGENT};

/// The prefix of the annotation that sets probe periods shorter than a second. The container's name follows. The value
/// has the form `readiness=100ms,liveness=500ms`. This is an extension of Holdfast and off by default.
pub const PERIOD: &str = "probe-period.holdfast.example/";
/// The shortest period that the annotation may set.
pub(crate) const MIN_PROBE_PERIOD: Duration = Duration::from_millis(50);
/// Maximum number of bytes kept of a probe's output.
pub const OUTPUT_LIMIT: usize = 10 << 10;

/// The kind of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Whether the container has started. The other probes wait for it.
    Startup,
    /// Whether the container may receive traffic.
    Readiness,
    /// Whether the container is healthy; if not, it is restarted.
    Liveness,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 3] = [Kind::Startup, Kind::Readiness, Kind::Liveness];

    /// The name in events.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Startup => "Startup",
            Kind::Readiness => "Readiness",
            Kind::Liveness => "Liveness",
        }
    }

    /// The container's probe of this kind.
    #[must_use]
    pub fn of(self, container: &Container) -> Option<&Probe> {
        match self {
            Kind::Startup => container.startup_probe.as_ref(),
            Kind::Readiness => container.readiness_probe.as_ref(),
            Kind::Liveness => container.liveness_probe.as_ref(),
        }
    }
}

/// Probe results of one container instance. `None` means that there is no result yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// The startup probe: it succeeded, or failed permanently.
    pub started: Option<bool>,
    /// The readiness probe.
    pub ready: Option<bool>,
    /// The liveness probe.
    pub alive: Option<bool>,
}

impl Health {
    /// The result of a kind of probe.
    pub fn of(&mut self, kind: Kind) -> &mut Option<bool> {
        match kind {
            Kind::Startup => &mut self.started,
            Kind::Readiness => &mut self.ready,
            Kind::Liveness => &mut self.alive,
        }
    }

    /// The health that a restarted agent adopts from the status in the API, so that readiness does not flap. The status
    /// counts only if it is about the same container id.
    #[must_use]
    pub fn adopted(id: &str, known: Option<&ContainerStatus>) -> Health {
        match known.filter(|s| {
            s.container_id
                .as_deref()
                .is_some_and(|known| known.ends_with(id))
        }) {
            Some(status) => Health {
                started: status.started.filter(|s| *s),
                ready: status.ready.then_some(true),
                alive: None,
            },
            None => Health::default(),
        }
    }
}

/// The health of a pod's containers, by container id.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probed(pub BTreeMap<String, Health>);

impl Probed {
    /// The health of one instance.
    #[must_use]
    pub fn health(&self, id: &str) -> Health {
        self.0.get(id).copied().unwrap_or_default()
    }

    /// Whether a running container has started.
    #[must_use]
    pub fn started(&self, container: &Container, id: &str) -> bool {
        container.startup_probe.is_none() || self.health(id).started == Some(true)
    }

    /// Whether a running container is ready.
    #[must_use]
    pub fn ready(&self, container: &Container, id: &str) -> bool {
        self.started(container, id)
            && (container.readiness_probe.is_none() || self.health(id).ready == Some(true))
    }

    /// The failed probe that requires a running container to be stopped.
    #[must_use]
    pub fn failed(&self, container: &Container, id: &str) -> Option<Kind> {
        let health = self.health(id);
        if container.liveness_probe.is_some() && health.alive == Some(false) {
            return Some(Kind::Liveness);
        }
        (container.startup_probe.is_some() && health.started == Some(false))
            .then_some(Kind::Startup)
    }
}

/// When a probe runs, and how many consecutive results count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Time from the container's start to the first probe.
    pub delay: Duration,
    /// Time between two probes.
    pub period: Duration,
    /// Timeout of one probe.
    pub timeout: Duration,
    /// Number of consecutive successes for the result to change.
    pub successes: u32,
    /// Number of consecutive failures for the result to change.
    pub failures: u32,
}

impl Timing {
    /// The timing of a probe. The period in the pod's annotation takes precedence. If the annotation is invalid, the
    /// error message names it.
    pub fn of(pod: &Pod, container: &str, kind: Kind, probe: &Probe) -> (Timing, Option<String>) {
        let seconds = |value: Option<i32>, default: u64| {
            Duration::from_secs(value.and_then(|v| u64::try_from(v).ok()).unwrap_or(default))
        };
        let count = |value: Option<i32>, default: u32| {
            value
                .and_then(|v| u32::try_from(v).ok())
                .filter(|v| *v > 0)
                .unwrap_or(default)
        };
        let mut timing = Timing {
            delay: seconds(probe.initial_delay_seconds, 0),
            period: seconds(probe.period_seconds.filter(|p| *p > 0), 10),
            timeout: seconds(probe.timeout_seconds.filter(|t| *t > 0), 1),
            successes: count(probe.success_threshold, 1),
            failures: count(probe.failure_threshold, 3),
        };
        let problem = match configured_period(pod, container, kind, timing.period) {
            Ok(configured) => {
                timing.period = configured.unwrap_or(timing.period);
                None
            }
            Err(problem) => Some(problem),
        };
        (timing, problem)
    }
}

/// The period of a probe in the pod's annotation.
fn configured_period(
    pod: &Pod,
    container: &str,
    kind: Kind,
    most: Duration,
) -> Result<Option<Duration>, String> {
    let key = format!("{PERIOD}{container}");
    let Some(text) = meta::annotations(pod).get(&key) else {
        return Ok(None);
    };
    for part in text.split(',').map(str::trim) {
        let invalid = || {
            format!(
                "annotation {key}: {part:?} is invalid: use a value such as readiness=100ms, with startup, readiness or liveness, and a period from 50ms up to periodSeconds; periodSeconds applies"
            )
        };
        let (name, period) = part.split_once('=').ok_or_else(invalid)?;
        let known = Kind::ALL
            .into_iter()
            .find(|k| k.name().eq_ignore_ascii_case(name.trim()))
            .ok_or_else(invalid)?;
        let period = crate::time::duration(period.trim())
            .filter(|p| *p >= MIN_PROBE_PERIOD)
            .ok_or_else(invalid)?;
        if known == kind {
            return if period <= most {
                Ok(Some(period))
            } else {
                Err(invalid())
            };
        }
    }
    Ok(None)
}

/// Counts consecutive results.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counter {
    last: Option<bool>,
    run: u32,
}

impl Counter {
    /// Returns the result once the threshold of consecutive equal results is reached.
    pub fn step(&mut self, good: bool, timing: &Timing) -> Option<bool> {
        self.run = if self.last == Some(good) {
            self.run.saturating_add(1)
        } else {
            1
        };
        self.last = Some(good);
        (self.run
            >= if good {
                timing.successes
            } else {
                timing.failures
            })
        .then_some(good)
    }
}

/// The result of one probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Success.
    Success,
    /// Success, with a warning to report.
    Warning(String),
    /// Failure.
    Failure(String),
    /// The probe could not run. This result is ignored.
    Unknown(String),
}

/// A resolved HTTP request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Http {
    /// Whether the request uses TLS. The server's certificate is not verified.
    pub tls: bool,
    /// Host address or name.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Path and query.
    pub path: String,
    /// Headers, including `Host` if it is set.
    pub headers: Vec<(String, String)>,
}

impl Http {
    /// The URL, for error messages.
    #[must_use]
    pub fn url(&self) -> String {
        let host = if self.host.contains(':') {
            format!("[{}]", self.host)
        } else {
            self.host.clone()
        };
        format!(
            "{}://{host}:{}{}",
            if self.tls { "https" } else { "http" },
            self.port,
            self.path
        )
    }
}

/// A resolved probe action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Check {
    /// Run a command in the container.
    Exec(Vec<String>),
    /// Send an HTTP GET request.
    Http(Http),
    /// Open a TCP connection to this host and port.
    Tcp(String, u16),
    /// Call the gRPC health service: host, port, service name.
    Grpc(String, u16, String),
}

fn port(port: &IntOrString, container: &Container) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => Some(*number),
        IntOrString::String(name) => {
            let named = container
                .ports
                .iter()
                .flatten()
                .find(|p| p.name.as_deref() == Some(name))
                .map(|p| p.container_port);
            named.or_else(|| name.parse().ok())
        }
    };
    let valid = number
        .and_then(|n| u16::try_from(n).ok())
        .filter(|n| *n > 0);
    valid.ok_or_else(|| match port {
        IntOrString::Int(number) => format!("invalid port number: {number}"),
        IntOrString::String(name) => format!(
            "couldn't find port: {name:?} in container {:?}",
            container.name
        ),
    })
}

/// Converts an `httpGet` action to a request. `agent` is the value of `User-Agent`.
fn http(get: &HTTPGetAction, container: &Container, ip: &str, agent: &str) -> Result<Http, String> {
    let mut headers: Vec<(String, String)> = vec![];
    let custom: &[HTTPHeader] = get.http_headers.as_deref().unwrap_or_default();
    for (name, default) in [("User-Agent", agent), ("Accept", "*/*")] {
        if !custom.iter().any(|h| h.name.eq_ignore_ascii_case(name)) {
            headers.push((name.to_owned(), default.to_owned()));
        }
    }
    // An empty value of these two headers removes the header.
    let left_out = |h: &HTTPHeader| {
        h.value.is_empty()
            && ["user-agent", "accept"].contains(&h.name.to_ascii_lowercase().as_str())
    };
    headers.extend(
        custom
            .iter()
            .filter(|h| !left_out(h))
            .map(|h| (h.name.clone(), h.value.clone())),
    );
    let path = get.path.clone().unwrap_or_default();
    Ok(Http {
        tls: get.scheme.as_deref() == Some("HTTPS"),
        host: get
            .host
            .clone()
            .filter(|h| !h.is_empty())
            .unwrap_or_else(|| ip.to_owned()),
        port: port(&get.port, container)?,
        path: query::encode_url(&format!("/{}", path.strip_prefix('/').unwrap_or(&path))),
        headers,
    })
}

/// Resolves a probe's action. An error counts as an unknown result.
pub fn check(probe: &Probe, container: &Container, ip: &str) -> Result<Check, String> {
    if let Some(exec) = &probe.exec {
        // Only variables with a literal value are known here.
        let lookup = |name: &str| {
            container
                .env
                .iter()
                .flatten()
                .find(|e| e.name == name && e.value_from.is_none())
                .and_then(|e| e.value.clone())
        };
        return Ok(Check::Exec(
            exec.command
                .iter()
                .flatten()
                .map(|word| super::env::expand(word, lookup))
                .collect(),
        ));
    }
    if let Some(get) = &probe.http_get {
        return http(get, container, ip, PROBE_AGENT).map(Check::Http);
    }
    if let Some(tcp) = &probe.tcp_socket {
        return Ok(Check::Tcp(
            tcp.host
                .clone()
                .filter(|h| !h.is_empty())
                .unwrap_or_else(|| ip.to_owned()),
            port(&tcp.port, container)?,
        ));
    }
    if let Some(grpc) = &probe.grpc {
        return Ok(Check::Grpc(
            ip.to_owned(),
            port(&IntOrString::Int(grpc.port), container)?,
            grpc.service.clone().unwrap_or_default(),
        ));
    }
    Err("missing probe handler: set one of exec, httpGet, tcpSocket and grpc".into())
}

/// A resolved lifecycle hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hook {
    /// Run a command in the container.
    Exec(Vec<String>),
    /// Send an HTTP GET request. Any response is a success.
    Http(Http),
    /// Sleep for this long.
    Sleep(Duration),
}

/// Resolves a lifecycle hook (`pkg/kubelet/lifecycle/handlers.go`).
pub fn hook(
    handler: &LifecycleHandler,
    container: &Container,
    ip: Option<&str>,
) -> Result<Hook, String> {
    if let Some(exec) = &handler.exec {
        return Ok(Hook::Exec(exec.command.clone().unwrap_or_default()));
    }
    if let Some(get) = &handler.http_get {
        let named = get.host.as_ref().is_some_and(|h| !h.is_empty());
        let ip = ip
            .or(named.then_some(""))
            .ok_or("failed to find networking container")?;
        return http(get, container, ip, HOOK_AGENT).map(Hook::Http);
    }
    if let Some(sleep) = &handler.sleep {
        return Ok(Hook::Sleep(time::span(sleep.seconds)));
    }
    Err("invalid handler: set one of exec, httpGet and sleep".into())
}

/// The response to an HTTP request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// The status code.
    pub status: u16,
    /// The beginning of the body.
    pub body: String,
}

/// The probe result for an HTTP response or its error.
#[must_use]
pub fn of_http(request: &Http, reply: Result<Reply, String>) -> Answer {
    match reply {
        Err(error) => Answer::Failure(format!("Get {:?}: {error}", request.url())),
        Ok(reply) if (200..300).contains(&reply.status) => Answer::Success,
        // The redirect leads to another host, which probes do not follow, or has no valid target.
        Ok(reply) if (300..400).contains(&reply.status) => Answer::Warning(format!(
            "Probe terminated redirects, Response body: {}",
            reply.body
        )),
        Ok(reply) => Answer::Failure(format!(
            "HTTP probe failed with statuscode: {}",
            reply.status
        )),
    }
}

/// At most [`OUTPUT_LIMIT`] bytes of a text, cut at a character boundary.
#[must_use]
pub fn limit_output(text: &str) -> String {
    let mut end = text.len().min(OUTPUT_LIMIT);
    while !text.is_char_boundary(end) {
        end = end.saturating_sub(1);
    }
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn from<T: serde::de::DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).expect("valid")
    }

    #[test]
    fn consecutive_probe_results_reach_the_threshold() {
        let timing = Timing {
            delay: Duration::ZERO,
            period: Duration::ZERO,
            timeout: Duration::ZERO,
            successes: 2,
            failures: 3,
        };
        let mut counter = Counter::default();
        let answers = [false, false, true, false, false, false, false, true, true];
        let results: Vec<Option<bool>> = answers
            .iter()
            .map(|good| counter.step(*good, &timing))
            .collect();
        assert_eq!(
            results,
            [
                None,
                None,
                None,
                None,
                None,
                Some(false),
                Some(false),
                None,
                Some(true)
            ]
        );
    }

    #[test]
    fn short_probe_periods_are_parsed_and_errors_name_the_part() {
        let pod = |value: &str| {
            from::<Pod>(json!({"metadata": {"annotations": {format!("{PERIOD}c"): value}}}))
        };
        let probe: Probe = from(json!({"periodSeconds": 1}));
        let of = |value: &str, kind| Timing::of(&pod(value), "c", kind, &probe);
        assert_eq!(
            of("readiness=100ms, liveness=500ms", Kind::Liveness)
                .0
                .period,
            Duration::from_millis(500)
        );
        assert_eq!(
            of("readiness=100ms", Kind::Liveness),
            (
                Timing::of(&Pod::default(), "c", Kind::Liveness, &probe).0,
                None
            )
        );
        for wrong in [
            "readiness",
            "readiness=1ms",
            "readiness=2s",
            "ready=100ms",
            "readiness=soon",
        ] {
            let (timing, problem) = of(wrong, Kind::Readiness);
            assert_eq!(timing.period, Duration::from_secs(1), "{wrong}");
            assert!(
                problem.is_some_and(|p| p.contains(PERIOD) && p.contains("50ms")),
                "{wrong}"
            );
        }
    }

    #[test]
    fn probe_handlers_are_resolved_or_rejected_with_an_error() {
        let container: Container = from(
            json!({"name": "c", "ports": [{"name": "web", "containerPort": 8080}], "env": [{"name": "A", "value": "1"}]}),
        );
        let resolved = |probe: Value| check(&from(probe), &container, "10.0.0.2");
        assert_eq!(
            resolved(json!({"exec": {"command": ["x", "$(A)", "$(B)"]}})),
            Ok(Check::Exec(vec!["x".into(), "1".into(), "$(B)".into()]))
        );
        let Ok(Check::Http(get)) = resolved(
            json!({"httpGet": {"port": "web", "path": "o k?x=1", "httpHeaders": [{"name": "accept", "value": ""}, {"name": "X", "value": "y"}]}}),
        ) else {
            panic!("http")
        };
        assert_eq!(get.url(), "http://10.0.0.2:8080/o%20k?x=1");
        assert_eq!(
            get.headers,
            [
                ("User-Agent".to_owned(), "kube-probe/1.36".to_owned()),
                ("X".to_owned(), "y".to_owned())
            ]
        );
        assert_eq!(
            resolved(json!({"tcpSocket": {"port": 1, "host": "h"}})),
            Ok(Check::Tcp("h".into(), 1))
        );
        assert_eq!(
            resolved(json!({"grpc": {"port": 5}})),
            Ok(Check::Grpc("10.0.0.2".into(), 5, String::new()))
        );
        for (probe, expected) in [
            (json!({"tcpSocket": {"port": "db"}}), "db"),
            (json!({"tcpSocket": {"port": 70000}}), "70000"),
            (json!({}), "exec, httpGet"),
        ] {
            assert!(
                resolved(probe).is_err_and(|e| e.contains(expected)),
                "{expected}"
            );
        }
        let hooked = |handler: Value, ip| hook(&from(handler), &container, ip);
        assert_eq!(
            hooked(json!({"sleep": {"seconds": 3}}), None),
            Ok(Hook::Sleep(Duration::from_secs(3)))
        );
        assert_eq!(
            hooked(json!({"httpGet": {"port": 80}}), None),
            Err("failed to find networking container".into())
        );
        assert!(
            hooked(json!({"tcpSocket": {"port": 80}}), Some("x"))
                .is_err_and(|e| e.contains("invalid handler"))
        );
    }

    #[test]
    fn probe_results_decide_started_ready_and_failed() {
        let container: Container = from(
            json!({"name": "c", "startupProbe": {}, "readinessProbe": {}, "livenessProbe": {}}),
        );
        let with = |health: Health| Probed([("id".to_owned(), health)].into());
        let none = Probed::default();
        assert_eq!(
            (
                none.started(&container, "id"),
                none.ready(&container, "id"),
                none.failed(&container, "id")
            ),
            (false, false, None)
        );
        let up = with(Health {
            started: Some(true),
            ready: Some(true),
            alive: None,
        });
        assert!(
            up.started(&container, "id")
                && up.ready(&container, "id")
                && up.failed(&container, "id").is_none()
        );
        assert_eq!(
            with(Health {
                alive: Some(false),
                ..Health::default()
            })
            .failed(&container, "id"),
            Some(Kind::Liveness)
        );
        assert_eq!(
            with(Health {
                started: Some(false),
                ..Health::default()
            })
            .failed(&container, "id"),
            Some(Kind::Startup)
        );
        assert!(
            none.ready(&Container::default(), "id"),
            "a running container without probes is ready"
        );
        let known: ContainerStatus = from(
            json!({"name": "c", "image": "i", "imageID": "", "restartCount": 0, "containerID": "containerd://id", "ready": true, "started": true}),
        );
        assert_eq!(
            Health::adopted("id", Some(&known)),
            Health {
                started: Some(true),
                ready: Some(true),
                alive: None
            }
        );
        assert_eq!(Health::adopted("other", Some(&known)), Health::default());
    }

    #[test]
    fn http_responses_succeed_or_fail_as_upstream() {
        let request = Http {
            tls: false,
            host: "::1".into(),
            port: 80,
            path: "/".into(),
            headers: vec![],
        };
        let reply = |status| {
            Ok(Reply {
                status,
                body: "b".into(),
            })
        };
        assert_eq!(of_http(&request, reply(204)), Answer::Success);
        for status in [300, 302, 304] {
            assert_eq!(
                of_http(&request, reply(status)),
                Answer::Warning("Probe terminated redirects, Response body: b".into())
            );
        }
        assert_eq!(
            of_http(&request, reply(500)),
            Answer::Failure("HTTP probe failed with statuscode: 500".into())
        );
        assert_eq!(
            of_http(&request, Err("refused".into())),
            Answer::Failure("Get \"http://[::1]:80/\": refused".into())
        );
    }
}
