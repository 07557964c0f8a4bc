//! Responses of `/healthz` and its checks (`pkg/kubelet/server/server.go`,
//! `staging/src/k8s.io/apiserver/pkg/server/healthz`). Pure.

use std::time::Duration;

use super::query;

/// Names of the checks, in the order of output.
const CHECKS: [&str; 3] = ["ping", "log", SYNC_LOOP];
/// The check of the dispatcher, which corresponds to the kubelet's sync loop.
const SYNC_LOOP: &str = "syncloop";
/// Minimum age of the dispatcher's last iteration above which it counts as hanging.
const MIN_HANG_AGE: Duration = Duration::from_secs(300);

/// Health of the agent.
#[derive(Debug, Clone, Copy)]
pub struct Health {
    /// Time since the dispatcher started its last iteration.
    pub since_last_iteration: Duration,
    /// `syncFrequency`.
    pub sync_frequency: Duration,
}

impl Health {
    /// Why a check fails; `None` if it passes.
    fn failure(self, check: &str) -> Option<&'static str> {
        let hangs = check == SYNC_LOOP
            && self.since_last_iteration > MIN_HANG_AGE.max(self.sync_frequency.saturating_mul(2));
        hangs.then_some("sync Loop took longer than expected")
    }

    /// Status code and body of the response. `check` is the check in the path, or empty for all.
    #[must_use]
    pub fn answer(self, check: &str, query: &str) -> (u16, String) {
        if !check.is_empty() {
            return match self.failure(check) {
                None => (200, "ok".into()),
                Some(why) => (500, format!("internal server error: {why}\n")),
            };
        }
        let pairs = query::pairs(query);
        let named = |key: &'static str| pairs.iter().filter(move |(k, _)| k == key);
        let excluded: Vec<&str> = named("exclude").map(|(_, name)| name.as_str()).collect();
        let (mut lines, mut failed) = (String::new(), false);
        for check in CHECKS {
            let line = match self.failure(check) {
                _ if excluded.contains(&check) => format!("[+]{check} excluded: ok\n"),
                None => format!("[+]{check} ok\n"),
                Some(_) => {
                    failed = true;
                    format!("[-]{check} failed: reason withheld\n")
                }
            };
            lines.push_str(&line);
        }
        match (failed, named("verbose").next()) {
            (true, _) => (500, format!("{lines}healthz check failed\n")),
            (false, Some(_)) => (200, format!("{lines}healthz check passed\n")),
            (false, None) => (200, "ok".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hanging_dispatcher_fails_the_health_check() {
        let of = |last: u64, sync_frequency: u64| Health {
            since_last_iteration: Duration::from_secs(last),
            sync_frequency: Duration::from_secs(sync_frequency),
        };
        let failed =
            "[+]ping ok\n[+]log ok\n[-]syncloop failed: reason withheld\nhealthz check failed\n";
        let verbose = "[+]ping ok\n[+]log ok\n[+]syncloop ok\nhealthz check passed\n";
        let excluded = "[+]ping ok\n[+]log ok\n[+]syncloop excluded: ok\nhealthz check passed\n";
        let alone = "internal server error: sync Loop took longer than expected\n";
        for (health, check, query, code, text) in [
            (of(300, 60), "", "", 200, "ok"),
            (of(300, 60), "syncloop", "", 200, "ok"),
            (of(300, 60), "", "verbose", 200, verbose),
            (of(301, 60), "", "", 500, failed),
            (of(301, 60), "syncloop", "", 500, alone),
            (of(301, 60), "ping", "", 200, "ok"),
            (of(301, 60), "", "exclude=syncloop", 200, "ok"),
            (of(301, 60), "", "exclude=syncloop&verbose", 200, excluded),
            (of(301, 151), "", "", 200, "ok"),
            (of(303, 151), "", "", 500, failed),
        ] {
            let response = health.answer(check, query);
            assert_eq!(
                response,
                (code, text.to_owned()),
                "{health:?} {check} {query}"
            );
        }
    }
}
