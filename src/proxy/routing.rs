//! The task that keeps the routes to the pods of other nodes.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Node;
use kube::runtime::watcher;
use tokio::sync::watch;

use holdfast_core::node::routes::Peer;
use holdfast_kubeapi::{Api, Cache};

use crate::config::Config;
use crate::routes::{Applied, Routes};
use crate::timetable::{Step, Timetable};

/// The time between two readings of all nodes: heartbeats change Nodes all the time.
const PAUSE: Duration = Duration::from_millis(200);

/// The routes in the kernel.
trait Keep {
    /// Changes the routes that differ from those to `peers`.
    fn apply(&mut self, peers: &[Peer]) -> std::io::Result<Applied>;
}

/// The kernel's routes, as this node needs them.
struct Kernel<'a> {
    routes: Routes,
    config: &'a Config,
}

impl Keep for Kernel<'_> {
    fn apply(&mut self, peers: &[Peer]) -> std::io::Result<Applied> {
        let config = self.config;
        self.routes
            .apply(&config.node_name, peers, &config.cluster_cidrs)
    }
}

/// Keeps the routes. Returns only with an error.
pub(crate) async fn run(client: &kube::Client, config: &Config) -> Result<(), String> {
    let nodes = Cache::<Node>::start(Api::all(client.clone()), watcher::Config::default());
    let routes = Routes::open(&config.table).map_err(|e| format!("routes cannot be read: {e}"))?;
    let mut kernel = Kernel { routes, config };
    let changes = nodes.changes();
    nodes.synced().await;
    let peers = || nodes.list().iter().map(|node| Peer::of(node)).collect();
    keep(&mut kernel, peers, changes, config.audit_interval).await;
    Err("the watch of nodes ended".to_owned())
}

/// The time, by tokio's clock.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Applies the routes to the current peers after changes and at fixed times, until no more changes can arrive.
async fn keep(
    routes: &mut dyn Keep,
    peers: impl Fn() -> Vec<Peer>,
    mut changes: watch::Receiver<u64>,
    audit_interval: Duration,
) {
    let mut times = Timetable::new(now(), audit_interval);
    let (mut applied, mut reported): (Option<Vec<Peer>>, _) = (None, Applied::default());
    let mut has_changes = true;
    loop {
        let step = times.step(now(), has_changes);
        if let Step::Wait(until) = step {
            tokio::select! {
                changed = changes.changed() => match changed {
                    Ok(()) => has_changes = true,
                    Err(_) => return,
                },
                () = tokio::time::sleep_until(until.into()) => {}
            }
            continue;
        }
        changes.mark_unchanged();
        has_changes = false;
        let current = peers();
        let is_audit = step == Step::Audit;
        if !is_audit && applied.as_ref() == Some(&current) {
            times.written(now(), PAUSE);
            continue;
        }
        // A few netlink calls, each of microseconds.
        match routes.apply(&current) {
            Ok(result) => {
                log(result, is_audit, &mut reported);
                applied = Some(current);
                times.written(now(), PAUSE);
                times.audited(now());
            }
            Err(error) => {
                tracing::warn!(%error, "changing the routes to other nodes failed; retrying");
                applied = None;
                times.write_failed(now());
            }
        }
    }
}

/// Logs what was changed, and what is missing if it is not that of the last time.
fn log(result: Applied, is_audit: bool, reported: &mut Applied) {
    let Applied {
        changed, routes, ..
    } = result;
    if changed > 0 {
        tracing::info!(
            changed,
            routes,
            is_audit,
            "changed the routes to other nodes"
        );
    }
    if result.unrouted != reported.unrouted {
        for node in &result.unrouted {
            tracing::warn!(%node, "a node's pods cannot be reached");
        }
    }
    if let Some(error) = &result.no_tunnel
        && result.no_tunnel != reported.no_tunnel
    {
        tracing::warn!(%error, "nodes that are behind a router cannot reach this node's pods");
    }
    *reported = result;
}

/// Deletes the routes of this cluster.
pub(crate) fn remove(config: &Config) -> Result<(), String> {
    let removed = Routes::open(&config.table).and_then(|mut routes| routes.remove());
    removed
        .map(drop)
        .map_err(|e| format!("the routes to other nodes cannot be removed: {e}"))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use holdfast_core::lock::lock;

    use super::*;

    /// When routes were applied, and to how many peers; whether they fail.
    #[derive(Default)]
    struct Fake {
        done: Vec<(Instant, usize)>,
        fails: bool,
    }

    impl Keep for Arc<Mutex<Fake>> {
        fn apply(&mut self, peers: &[Peer]) -> std::io::Result<Applied> {
            let mut fake = lock(self);
            fake.done.push((now(), peers.len()));
            match fake.fails {
                true => Err(std::io::Error::other("the kernel refuses")),
                false => Ok(Applied::default()),
            }
        }
    }

    fn peer(number: u64) -> Peer {
        Peer {
            name: format!("n{number}"),
            ranges: vec![],
            addresses: vec![],
        }
    }

    /// Runs for `time` with a change every 10 ms. The number of peers grows with each change if `grows`.
    async fn run(fake: &Arc<Mutex<Fake>>, grows: bool, time: Duration) -> Instant {
        let (sender, changes) = watch::channel(0);
        let seen = changes.clone();
        let count = move || if grows { *seen.borrow() } else { 1 };
        let peers = move || (0..count()).map(peer).collect();
        let begun = now();
        let change = async {
            while now() - begun < time {
                tokio::time::sleep(Duration::from_millis(10)).await;
                sender.send_modify(|version| *version += 1);
            }
            drop(sender);
        };
        let mut keep_routes = Arc::clone(fake);
        let interval = Duration::from_secs(1);
        tokio::join!(keep(&mut keep_routes, peers, changes, interval), change);
        begun
    }

    #[tokio::test(start_paused = true)]
    async fn audits_happen_while_nodes_change_without_effect() {
        let fake = Arc::<Mutex<Fake>>::default();
        let begun = run(&fake, false, Duration::from_millis(3500)).await;
        let done = lock(&fake).done.clone();
        let seconds: Vec<_> = done.iter().map(|(at, _)| (*at - begun).as_secs()).collect();
        assert_eq!(seconds, [0, 1, 2, 3], "the first write and three audits");
    }

    #[tokio::test(start_paused = true)]
    async fn changed_ranges_are_applied_at_intervals() {
        let fake = Arc::<Mutex<Fake>>::default();
        run(&fake, true, Duration::from_secs(2)).await;
        let done = lock(&fake).done.clone();
        assert!((8..=11).contains(&done.len()), "{done:?}");
        let last = done.last().expect("applied").1;
        assert!(last >= 180, "{last} of 200 peers");
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_change_is_repeated_with_a_back_off() {
        for grows in [false, true] {
            let fake = Arc::new(Mutex::new(Fake {
                fails: true,
                ..Fake::default()
            }));
            let begun = run(&fake, grows, Duration::from_secs(5)).await;
            let done = lock(&fake).done.clone();
            let at: Vec<_> = done
                .iter()
                .map(|(at, _)| (*at - begun).as_millis() / 100)
                .collect();
            assert_eq!(at, [0, 1, 3, 7, 15, 31], "tenths of seconds");
        }
    }
}
