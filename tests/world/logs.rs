//! Container logs that grow over time.

use super::*;

pub struct GrowingLog {
    per_second: u64,
    since: Instant,
    /// How often the log was rotated, and its maximum size in bytes.
    moves: usize,
    largest: u64,
    /// Compressing a rotated file takes hours.
    is_slow: bool,
}

impl GrowingLog {
    fn size(&self) -> u64 {
        self.since.elapsed().as_secs() * self.per_second
    }
}

impl World {
    /// Makes a container's log grow by a number of bytes per second. If `is_slow`, compressing its rotated
    /// files takes hours.
    pub fn grow_log(&self, container: &str, per_second: u64, is_slow: bool) {
        let log = GrowingLog {
            per_second,
            since: Instant::now(),
            moves: 0,
            largest: 0,
            is_slow,
        };
        self.state().logs.insert(container.into(), log);
    }

    /// How often a log was rotated, and its maximum size in bytes.
    pub fn rotations(&self, container: &str) -> (usize, u64) {
        let state = self.state();
        let log = &state.logs[container];
        (log.moves, log.largest.max(log.size()))
    }

    pub(super) fn writers_of_logs(&self) -> Vec<RunningContainer> {
        let state = self.state();
        let of = |name: &String| RunningContainer {
            id: format!("id-of-{name}"),
            namespace: "default".into(),
            pod: "writer".into(),
            uid: "u".into(),
            name: name.clone(),
            attempt: 0,
            sandbox: "s".into(),
        };
        state.logs.keys().map(of).collect()
    }

    pub(super) fn size_of_log(&self, container: &str) -> Option<u64> {
        let state = self.state();
        Some(state.logs.get(container).map_or(0, GrowingLog::size))
    }

    pub(super) fn log_was_moved(&self, container: &str) {
        let mut state = self.state();
        if let Some(log) = state.logs.get_mut(container) {
            log.largest = log.largest.max(log.size());
            log.moves += 1;
            log.since = Instant::now();
        }
    }

    pub(super) async fn compress_files_of(&self, container: &str) {
        let is_slow = self.state().logs.get(container).is_some_and(|l| l.is_slow);
        if is_slow {
            self.sleep(Duration::from_secs(7200)).await;
        }
    }
}
