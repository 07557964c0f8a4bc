//! What `/healthz` and the checks below it answer (kubelet spec, chapter 13; apiserver's `healthz`). Pure.

use std::time::Duration;

use super::query;

/// The names of the checks, in the order in which they are shown.
const CHECKS: [&str; 3] = ["ping", "log", SYNC_LOOP];
/// The check of the loop that hands on what happens to pods.
const SYNC_LOOP: &str = "syncloop";
/// The least that the loop's last turn may be in the past before it is taken to hang.
const PATIENCE: Duration = Duration::from_secs(300);

/// How the agent is.
#[derive(Debug, Clone, Copy)]
pub struct Health {
    /// How long ago the dispatcher began its last turn.
    pub last_turn: Duration,
    /// `syncFrequency`.
    pub resync: Duration,
}

impl Health {
    /// Why a check fails, if it does.
    fn failure(self, check: &str) -> Option<&'static str> {
        let hangs =
            check == SYNC_LOOP && self.last_turn > PATIENCE.max(self.resync.saturating_mul(2));
        hangs.then_some("sync Loop took longer than expected")
    }

    /// The code and the text of an answer; `check` is the one that the path names, or empty.
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
    fn a_dispatcher_that_hangs_is_told() {
        let of = |last: u64, resync: u64| Health {
            last_turn: Duration::from_secs(last),
            resync: Duration::from_secs(resync),
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
            let told = health.answer(check, query);
            assert_eq!(told, (code, text.to_owned()), "{health:?} {check} {query}");
        }
    }
}
