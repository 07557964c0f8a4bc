//! Selects the container exits to log: each exit at most once, and only some exits of a container that exits often.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

use super::observed::{ContainerState, ObservedPod};
use crate::time;

/// Minimum interval between two logged exits of a container.
const MIN_LOG_INTERVAL: SignedDuration = SignedDuration::from_secs(10);

/// An exit to log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    /// The container's name.
    pub container: String,
    /// The exit code of its process.
    pub code: i32,
    /// The runtime's reason, for example `OOMKilled`.
    pub reason: String,
    /// The number of earlier instances.
    pub restarts: u32,
    /// The number of exits of this container that were not logged since the last logged one.
    pub omitted: u32,
}

/// The known exits of one pod.
#[derive(Debug, Default)]
pub struct Exits {
    /// Ids of exited containers that the runtime still has.
    known: BTreeSet<String>,
    /// The time of a container's last logged exit and the number of exits omitted since, by name.
    logged: BTreeMap<String, (Timestamp, u32)>,
}

impl Exits {
    /// The exits to log now. Exits before `since` are skipped, as an earlier agent has logged them.
    pub fn exits_to_log(
        &mut self,
        observed: &ObservedPod,
        since: Timestamp,
        now: Timestamp,
    ) -> Vec<Exit> {
        let mut exits = vec![];
        let exited = |state: ContainerState| state == ContainerState::Exited;
        self.known
            .retain(|id| observed.containers.iter().any(|c| c.id == *id));
        // The containers are sorted newest first; exits are logged in the order in which they happened.
        for container in observed.containers.iter().rev() {
            if !exited(container.state) || !self.known.insert(container.id.clone()) {
                continue;
            }
            if container.finished_at.is_some_and(|at| at < since) {
                continue;
            }
            let before = self.logged.get_mut(&container.name);
            let omitted = match before {
                Some((at, omitted)) if now < time::later(*at, MIN_LOG_INTERVAL) => {
                    *omitted = omitted.saturating_add(1);
                    continue;
                }
                Some((_, omitted)) => *omitted,
                None => 0,
            };
            self.logged.insert(container.name.clone(), (now, 0));
            exits.push(Exit {
                container: container.name.clone(),
                code: container.exit_code,
                reason: container.reason.clone(),
                restarts: container.attempt,
                omitted,
            });
        }
        exits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::observed::Container;

    fn instance(id: &str, attempt: u32, exited: Option<i64>) -> Container {
        let at = |second: i64| Timestamp::from_second(second).expect("a time");
        Container {
            id: id.into(),
            name: "c".into(),
            sandbox: "s".into(),
            attempt,
            state: match exited {
                Some(_) => ContainerState::Exited,
                None => ContainerState::Running,
            },
            created_at: at(0),
            started_at: Some(at(0)),
            finished_at: exited.map(at),
            exit_code: 3,
            reason: "Error".into(),
            message: String::new(),
            image: String::new(),
            image_ref: String::new(),
            hash: None,
            user: None,
            stop_signal: None,
            message_file: None,
        }
    }

    #[test]
    fn each_exit_is_logged_once_and_a_crash_loop_at_a_bounded_rate() {
        let at = |second: i64| Timestamp::from_second(second).expect("a time");
        let mut exits = Exits::default();
        let mut follow = |containers: Vec<Container>, now: i64| {
            let observed = ObservedPod {
                containers,
                ..ObservedPod::default()
            };
            let all = exits.exits_to_log(&observed, at(100), at(now));
            let shown = |exit: Exit| (exit.restarts, exit.code, exit.omitted);
            all.into_iter().map(shown).collect::<Vec<_>>()
        };
        // Newest first, as in every observed pod.
        let old = || instance("a", 0, Some(99));
        assert_eq!(
            follow(vec![instance("b", 1, None), old()], 100),
            [],
            "exited before this agent started"
        );
        assert_eq!(
            follow(vec![instance("b", 1, Some(101)), old()], 101),
            [(1, 3, 0)]
        );
        assert_eq!(follow(vec![instance("b", 1, Some(101))], 102), [], "once");
        for attempt in 2..9 {
            let id = format!("c{attempt}");
            let now = 101 + i64::from(attempt);
            assert_eq!(
                follow(vec![instance(&id, attempt, Some(now))], now),
                [],
                "{attempt}"
            );
        }
        assert_eq!(follow(vec![instance("d", 9, Some(111))], 111), [(9, 3, 7)]);
    }
}
