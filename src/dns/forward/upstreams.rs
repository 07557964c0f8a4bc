//! Which upstreams a name has: the stub domain's, else those of the node's resolv.conf, which is read again when it changes.
//! An upstream that failed moves behind the others. An upstream that sends queries back to this server is not used.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::{error, info, warn};

use crate::random::Random;
use crate::resolv_conf;
use crate::wire::Name;

/// Shortest time between two checks whether resolv.conf has changed. Only queries cause checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How long an upstream that failed is behind the others.
const FAILURE_PAUSE: Duration = Duration::from_secs(10);
/// How long an upstream that forwards to this server is not used. Then a probe checks the upstream again.
const LOOP_PAUSE: Duration = Duration::from_secs(60);
/// Most bytes of resolv.conf that are read.
const MAX_FILE: u64 = 64 * 1024;

/// A server that answers names outside of the cluster.
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    /// A random name. If a query for this name arrives here, the upstream forwards to this server (CoreDNS's loop plugin).
    pub(crate) probe: Name,
    is_probed: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    failed: Option<Instant>,
    looped: Option<Instant>,
}

impl Upstream {
    fn new(address: SocketAddr, random: &Random) -> Arc<Upstream> {
        let label = format!("{:016x}.{:016x}", random.next(), random.next());
        Arc::new(Upstream {
            address,
            probe: Name::parse(&label).expect("two labels of 16 digits are a name"),
            is_probed: AtomicBool::new(false),
            state: Mutex::default(),
        })
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_failed(&self, at: Option<Instant>) {
        self.state().failed = at;
    }

    /// Whether the caller has to send the probe.
    pub(crate) fn take_probe(&self) -> bool {
        !self.is_probed.swap(true, Ordering::Relaxed)
    }

    fn has_failed(&self, now: Instant) -> bool {
        let failed = self.state().failed;
        failed.is_some_and(|at| now.saturating_duration_since(at) < FAILURE_PAUSE)
    }

    fn is_usable(&self, now: Instant) -> bool {
        let mut state = self.state();
        match state.looped {
            Some(at) if now.saturating_duration_since(at) < LOOP_PAUSE => false,
            Some(_) => {
                state.looped = None;
                self.is_probed.store(false, Ordering::Relaxed);
                true
            }
            None => true,
        }
    }
}

type Pool = Vec<Arc<Upstream>>;

/// What identifies a version of a file.
type Stamp = (u64, i64, i64, u64);

struct ResolvConf {
    pool: Pool,
    checked: Option<Instant>,
    stamp: Option<Stamp>,
    /// Whether the current error was logged.
    is_reported: bool,
}

/// All upstreams.
pub(crate) struct Upstreams {
    /// Own addresses: queries must not be forwarded to this server itself.
    own: Vec<SocketAddr>,
    /// The longest names first.
    stubs: Vec<(Name, Pool)>,
    resolv_conf: PathBuf,
    default: Mutex<ResolvConf>,
    random: Random,
}

impl Upstreams {
    /// The stub domain `.` replaces resolv.conf. Names that are not domain names are refused by `serve`.
    pub(crate) fn new(
        resolv_conf: PathBuf,
        stub_domains: &BTreeMap<String, Vec<SocketAddr>>,
        own: Vec<SocketAddr>,
    ) -> Upstreams {
        let random = Random::new();
        let mut stubs: Vec<(Name, Pool)> = Vec::new();
        for (domain, servers) in stub_domains {
            let Some(name) = Name::parse(domain) else {
                continue;
            };
            let servers = servers.iter().filter(|s| !own.contains(s));
            let pool = servers.map(|s| Upstream::new(*s, &random)).collect();
            stubs.push((name.lowercase(), pool));
        }
        stubs.sort_by_key(|(name, _)| std::cmp::Reverse(name.wire().len()));
        let default = Mutex::new(ResolvConf {
            pool: Pool::new(),
            checked: None,
            stamp: None,
            is_reported: false,
        });
        Upstreams {
            own,
            stubs,
            resolv_conf,
            default,
            random,
        }
    }

    /// The upstreams of a name in the order in which they should be queried.
    pub(crate) fn of(&self, name: &Name, now: Instant) -> Pool {
        let stub = self
            .stubs
            .iter()
            .find(|(zone, _)| name.below(zone).is_some());
        let pool = match stub {
            Some((_, pool)) => pool.clone(),
            None => self.default_pool(now),
        };
        let usable = pool.into_iter().filter(|u| u.is_usable(now));
        let (failed, mut order): (Pool, Pool) = usable.partition(|u| u.has_failed(now));
        order.extend(failed);
        order
    }

    /// Notes a query that arrived. Returns whether the query was this server's probe.
    pub(crate) fn note_probe(&self, name: &Name, now: Instant) -> bool {
        let default = self.lock().pool.clone();
        let stubs = self.stubs.iter().flat_map(|(_, pool)| pool);
        let mut all = stubs.chain(&default);
        let Some(upstream) = all.find(|u| u.probe.wire() == name.wire()) else {
            return false;
        };
        error!(
            upstream = %upstream.address,
            "DNS forwarding loop: the upstream sends queries back to this server; use other name servers in {}",
            self.resolv_conf.display()
        );
        upstream.state().looped = Some(now);
        true
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, ResolvConf> {
        self.default.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn default_pool(&self, now: Instant) -> Pool {
        let mut default = self.lock();
        let is_due = default
            .checked
            .is_none_or(|at| now.saturating_duration_since(at) >= CHECK_INTERVAL);
        if is_due {
            default.checked = Some(now);
            self.reload(&mut default);
        }
        default.pool.clone()
    }

    /// Reads resolv.conf if the file has changed. While the file cannot be read, the known servers stay.
    fn reload(&self, default: &mut ResolvConf) {
        let stamp = stamp(&self.resolv_conf);
        if stamp.is_some() && stamp == default.stamp {
            return;
        }
        let text = match read(&self.resolv_conf) {
            Ok(text) => text,
            Err(e) => {
                // A changed file has another stamp; the same one may appear again.
                default.stamp = None;
                if !std::mem::replace(&mut default.is_reported, true) {
                    warn!(file = %self.resolv_conf.display(), "name servers cannot be read: {e}");
                }
                return;
            }
        };
        default.stamp = stamp;
        default.is_reported = false;
        let mut servers =
            resolv_conf::name_servers(&text, |zone| nix::net::if_::if_nametoindex(zone).ok());
        servers.retain(|server| !self.own.contains(server));
        if default
            .pool
            .iter()
            .map(|u| u.address)
            .eq(servers.iter().copied())
        {
            return;
        }
        info!(file = %self.resolv_conf.display(), ?servers, "name servers changed");
        if servers.is_empty() {
            warn!(
                file = %self.resolv_conf.display(),
                "no name server: names outside of the cluster cannot be resolved; add a nameserver line"
            );
        }
        let pool = servers.into_iter().map(|server| {
            let known = default.pool.iter().find(|u| u.address == server);
            known.map_or_else(|| Upstream::new(server, &self.random), Arc::clone)
        });
        default.pool = pool.collect();
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.len()))
}

fn read(path: &Path) -> std::io::Result<String> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    std::fs::File::open(path)?
        .take(MAX_FILE)
        .read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(upstreams: &Upstreams, name: &str, now: Instant) -> Vec<String> {
        let pool = upstreams.of(&Name::parse(name).unwrap(), now);
        pool.iter().map(|u| u.address.ip().to_string()).collect()
    }

    #[test]
    fn the_longest_stub_domain_wins_and_the_file_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("resolv.conf");
        let server = |text: &str| vec![format!("{text}:53").parse().unwrap()];
        let stubs = [
            ("corp.example".to_owned(), server("192.0.2.1")),
            ("Deep.corp.example.".to_owned(), server("192.0.2.2")),
        ];
        let own = server("10.96.0.10");
        let upstreams = Upstreams::new(file.clone(), &stubs.into(), own);
        let start = Instant::now();
        let second = |n| start + Duration::from_secs(n);
        assert!(addresses(&upstreams, "example.org", start).is_empty());
        std::fs::write(
            &file,
            "nameserver 10.96.0.10\nnameserver 192.0.2.3\nnameserver 192.0.2.4\n",
        )
        .unwrap();
        // Before the interval has passed, the file is not read.
        assert!(addresses(&upstreams, "example.org", start).is_empty());
        assert_eq!(
            addresses(&upstreams, "example.org", second(1)),
            ["192.0.2.3", "192.0.2.4"]
        );
        assert_eq!(
            addresses(&upstreams, "a.corp.example", second(1)),
            ["192.0.2.1"]
        );
        assert_eq!(
            addresses(&upstreams, "a.deep.corp.example", second(1)),
            ["192.0.2.2"]
        );
        assert_eq!(
            addresses(&upstreams, "xcorp.example", second(1)),
            ["192.0.2.3", "192.0.2.4"]
        );
        std::fs::remove_file(&file).unwrap();
        assert_eq!(
            addresses(&upstreams, "example.org", second(3)),
            ["192.0.2.3", "192.0.2.4"]
        );
        std::fs::write(&file, "nameserver 192.0.2.5\n").unwrap();
        assert_eq!(
            addresses(&upstreams, "example.org", second(5)),
            ["192.0.2.5"]
        );
        std::fs::write(&file, "").unwrap();
        assert!(addresses(&upstreams, "example.org", second(7)).is_empty());
    }

    #[test]
    fn failed_upstreams_are_last_and_loops_are_excluded() {
        let stubs = [(
            ".".to_owned(),
            ["192.0.2.1:53", "192.0.2.2:53"]
                .map(|s| s.parse().unwrap())
                .to_vec(),
        )];
        let upstreams = Upstreams::new(PathBuf::from("/nonexistent"), &stubs.into(), Vec::new());
        let start = Instant::now();
        let second = |n| start + Duration::from_secs(n);
        let pool = upstreams.of(&Name::parse("a").unwrap(), start);
        pool[0].set_failed(Some(start));
        assert_eq!(
            addresses(&upstreams, "a", second(9)),
            ["192.0.2.2", "192.0.2.1"]
        );
        assert_eq!(
            addresses(&upstreams, "a", second(10)),
            ["192.0.2.1", "192.0.2.2"]
        );
        assert!(pool[1].take_probe() && !pool[1].take_probe());
        assert!(!upstreams.note_probe(&Name::parse("other.name").unwrap(), start));
        assert!(upstreams.note_probe(&pool[1].probe, start));
        assert_eq!(addresses(&upstreams, "a", second(59)), ["192.0.2.1"]);
        assert!(!pool[1].take_probe());
        assert_eq!(addresses(&upstreams, "a", second(60)).len(), 2);
        assert!(pool[1].take_probe());
    }
}
