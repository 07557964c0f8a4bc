//! The ports of the agent's HTTP API, and the node's condition while one of them cannot be served.
//!
//! A kubelet that cannot listen exits, so its node becomes not ready. This agent keeps its pods running, and the node
//! is not ready either, as logs, exec and metrics are not available.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::Instant;

use super::files;
use crate::events::{Events, Kind};
use holdfast_config::Config;
use holdfast_https::{Protocol, Tls};
use holdfast_sys::ports;

/// How long a failure to serve is ignored: another agent may be about to exit.
const GRACE: Duration = Duration::from_secs(1);
/// Interval between attempts, within [`GRACE`] and after it.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// A server of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The TLS server, which the control plane uses.
    Main,
    /// `readOnlyPort`.
    ReadOnly,
    /// `healthzPort`. The node is ready without it, as with the kubelet.
    Healthz,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Part::Main => "the kubelet API",
            Part::ReadOnly => "the read-only kubelet API",
            Part::Healthz => "the health check",
        }
    }
}

/// The state of the agent's HTTP API.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ServingState {
    /// Whether the main server is served or has failed.
    main: bool,
    /// Why servers are not served.
    problems: BTreeMap<Part, String>,
}

/// Why servers of the agent's HTTP API are not served.
#[derive(Debug, Default)]
pub(crate) struct Unserved(watch::Sender<ServingState>);

impl Unserved {
    /// Why the node is not ready because of them, in the order of [`Part`].
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let known = self.0.borrow();
        let problems = known.problems.iter();
        let counted = problems.filter(|(part, _)| **part != Part::Healthz);
        counted.map(|(_, why)| why.clone()).collect()
    }

    /// Watches the state of the servers.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<ServingState> {
        self.0.subscribe()
    }

    /// Waits until the main server is served or has failed, or is not required yet.
    pub(crate) async fn wait_until_tried(&self) {
        let mut known = self.0.subscribe();
        // This object owns the sender, so the wait cannot fail.
        let _ = known.wait_for(|known| known.main).await;
    }

    /// Records that the main server is served, or is not required yet.
    pub(super) fn mark_tried(&self) {
        self.0
            .send_if_modified(|known| !std::mem::replace(&mut known.main, true));
    }

    /// Records why a server is not served. Returns whether this is a change.
    fn set(&self, part: Part, why: &str) -> bool {
        self.0.send_if_modified(|known| {
            known.main |= part == Part::Main;
            let before = known.problems.insert(part, why.to_owned());
            before.as_deref() != Some(why)
        })
    }

    /// Records that a server is served. Returns whether this is a change.
    fn clear(&self, part: Part) -> bool {
        self.0
            .send_if_modified(|known| known.problems.remove(&part).is_some())
    }
}

/// Retries with back-off until it succeeds. A failure after [`GRACE`] is recorded and reported once.
async fn retry_until_served<T, A: Future<Output = Result<T, String>>>(
    unserved: &Unserved,
    part: Part,
    log: impl Fn(&str),
    mut attempt: impl FnMut() -> A,
) -> T {
    let began = Instant::now();
    loop {
        let pause = match attempt().await {
            Ok(served) => {
                if unserved.clear(part) {
                    tracing::info!("{} is served now", part.name());
                }
                return served;
            }
            Err(_) if began.elapsed() < GRACE => PAUSES.0,
            Err(why) => {
                if unserved.set(part, &why) {
                    log(&why);
                }
                PAUSES.1
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// What opening the servers uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub events: Events,
    pub node_ips: watch::Sender<Vec<String>>,
    pub unserved: Arc<Unserved>,
}

fn log(parts: &Parts, part: Part, why: &str) {
    tracing::error!("{why}; retrying");
    if part != Part::Healthz {
        let node = &parts.config.node_name;
        let events = &parts.events;
        events.node(node, Kind::Warning, "KubeletSetupFailed", why);
    }
}

/// Listens on a port. The error names the process that uses the port, if it can be determined.
async fn bind(part: Part, address: SocketAddr) -> Result<TcpListener, String> {
    let error = match TcpListener::bind(address).await {
        Ok(listener) => return Ok(listener),
        Err(error) => error,
    };
    let why = format!("{} cannot be served on {address}: {error}", part.name());
    if error.kind() != std::io::ErrorKind::AddrInUse {
        return Err(why);
    }
    let holder = tokio::task::spawn_blocking(move || ports::holder(address));
    Err(match holder.await {
        Ok(Some(Some((name, pid)))) => format!("{why}; {name} (pid {pid}) listens there"),
        _ => why,
    })
}

/// Listens on a port, and retries until it succeeds. Other tasks of the agent continue meanwhile.
pub(super) async fn bind_with_retries(
    parts: &Parts,
    part: Part,
    address: SocketAddr,
) -> TcpListener {
    let unserved = &parts.unserved;
    let report = |why: &str| log(parts, part, why);
    let listener = retry_until_served(unserved, part, report, || bind(part, address)).await;
    if part == Part::Main {
        unserved.mark_tried();
    }
    listener
}

/// Waits for the TLS files. A node whose serving certificate is not approved yet is ready, as with the kubelet: the
/// approver may run in a pod of this node.
pub(super) async fn tls(parts: &Parts, protocol: &Protocol) -> Arc<Tls> {
    let mut is_reported = false;
    while files::is_awaited(&parts.config) {
        parts.unserved.mark_tried();
        if !std::mem::replace(&mut is_reported, true) {
            tracing::warn!(
                "the agent's HTTP API has no serving certificate yet: the agent requests it when the node has an address, and the CertificateSigningRequest must be approved"
            );
        }
        tokio::time::sleep(PAUSES.1).await;
    }
    let part = Part::Main;
    let attempt = || {
        let tls = files::of(&parts.config, &parts.node_ips.borrow()).and_then(|files| {
            let tls = Tls::follow(files, protocol.clone());
            tls.map(Arc::new).map_err(|e| e.to_string())
        });
        let refused = |e| format!("{} cannot be served: {e}", part.name());
        std::future::ready(tls.map_err(refused))
    };
    retry_until_served(&parts.unserved, part, |why| log(parts, part, why), attempt).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[tokio::test(start_paused = true)]
    async fn a_port_in_use_is_reported_once_and_cleared_later() {
        let unserved = Unserved::default();
        let (began, reports) = (Instant::now(), RefCell::new(vec![]));
        // The port is in use for twelve seconds.
        let attempt = || {
            let is_free = began.elapsed() >= Duration::from_secs(12);
            std::future::ready(if is_free { Ok(()) } else { Err("taken".into()) })
        };
        let report = |why: &str| reports.borrow_mut().push((began.elapsed(), why.to_owned()));
        let checks = async {
            let mut seen = vec![];
            for millis in [900_u64, 1500, 11_000] {
                let at = began + Duration::from_millis(millis);
                tokio::time::sleep_until(at).await;
                seen.push(unserved.problems());
            }
            seen
        };
        let ((), seen) = tokio::join!(
            retry_until_served(&unserved, Part::Main, report, attempt),
            checks
        );
        assert_eq!(seen, [vec![], vec!["taken"], vec!["taken"]]);
        unserved.wait_until_tried().await;
        let reports = reports.into_inner();
        assert_eq!(reports.len(), 1, "{reports:?}");
        assert!(
            reports[0].0 >= GRACE && reports[0].0 < GRACE * 2,
            "{reports:?}"
        );
        assert_eq!(unserved.problems(), Vec::<String>::new());
    }

    #[tokio::test(start_paused = true)]
    async fn a_port_that_is_free_within_a_second_is_not_reported() {
        let unserved = Unserved::default();
        let began = Instant::now();
        let attempt = || {
            let is_free = began.elapsed() >= Duration::from_millis(900);
            std::future::ready(if is_free { Ok(()) } else { Err("taken".into()) })
        };
        let report = |why: &str| panic!("{why}");
        retry_until_served(&unserved, Part::Main, report, attempt).await;
        assert!(began.elapsed() < GRACE);
        assert!(!unserved.changes().has_changed().unwrap_or(true));
    }

    #[tokio::test]
    async fn the_process_that_uses_the_port_is_named() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = taken.local_addr().expect("an address");
        let why = bind(Part::Main, address)
            .await
            .expect_err("the port is in use");
        let begins = format!("the kubelet API cannot be served on {address}: Address already in");
        assert!(
            why.starts_with(&begins) && why.ends_with("listens there"),
            "{why}"
        );
        drop(taken);
    }

    #[test]
    fn a_node_is_ready_without_its_health_check() {
        let unserved = Unserved::default();
        unserved.set(Part::Healthz, "taken");
        assert_eq!(unserved.problems(), Vec::<String>::new());
        assert!(!unserved.0.borrow().main, "the main part has no problem");
        unserved.set(Part::ReadOnly, "this one too");
        unserved.set(Part::Main, "this one");
        assert_eq!(unserved.problems(), ["this one", "this one too"]);
    }
}
