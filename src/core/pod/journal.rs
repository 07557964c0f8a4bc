//! The journal of a pod: each step that the agent has taken, with its times, attempts, result and next try. Bounded.
//! Pure.

use std::collections::VecDeque;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::lifecycle::{Input, State};

/// Maximum number of steps kept.
const STEPS: usize = 64;
/// Maximum number of decisions kept.
const DECISIONS: usize = 32;

/// A kind of step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Admission by the node.
    Admission,
    /// Reading the pod's state from the runtime.
    Observe,
    /// Waiting until the runtime's network is ready.
    Network,
    /// Creating the pod's cgroup.
    Cgroup,
    /// Creating a static pod's mirror.
    Mirror,
    /// Creating the pod's directories.
    Directories,
    /// Setting up the volume that the subject names.
    Volume,
    /// Reading the objects that the pod references.
    Objects,
    /// Preparing the resource claims by their drivers.
    Claims,
    /// Creating the sandbox.
    Sandbox,
    /// Pulling the image of the container that the subject names.
    Image,
    /// Creating the container.
    Create,
    /// Starting the container.
    Start,
    /// The container's postStart hook.
    PostStart,
    /// Back-off before the container is restarted.
    BackOff,
    /// The container's startup probe.
    Startup,
    /// The container's readiness probe.
    Readiness,
    /// The container's liveness probe.
    Liveness,
    /// Resizing running containers.
    Resize,
    /// The container's preStop hook.
    PreStop,
    /// Stopping the container.
    Stop,
    /// Stopping the sandboxes.
    StopSandbox,
    /// Unpreparing the resource claims.
    #[serde(rename = "return-claims")]
    UnprepareClaims,
    /// Releasing volumes, cgroup and directories.
    Release,
    /// Removing the pod from the API.
    Finalise,
}

impl Step {
    /// The step's name in serialised form.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Step::Admission => "admission",
            Step::Observe => "observe",
            Step::Network => "network",
            Step::Cgroup => "cgroup",
            Step::Mirror => "mirror",
            Step::Directories => "directories",
            Step::Volume => "volume",
            Step::Objects => "objects",
            Step::Claims => "claims",
            Step::Sandbox => "sandbox",
            Step::Image => "image",
            Step::Create => "create",
            Step::Start => "start",
            Step::PostStart => "post-start",
            Step::BackOff => "back-off",
            Step::Startup => "startup",
            Step::Readiness => "readiness",
            Step::Liveness => "liveness",
            Step::Resize => "resize",
            Step::PreStop => "pre-stop",
            Step::Stop => "stop",
            Step::StopSandbox => "stop-sandbox",
            Step::UnprepareClaims => "return-claims",
            Step::Release => "release",
            Step::Finalise => "finalise",
        }
    }

    /// Whether the step can block the termination of a pod.
    fn is_termination_step(self) -> bool {
        matches!(
            self,
            Step::Observe
                | Step::PreStop
                | Step::Stop
                | Step::StopSandbox
                | Step::UnprepareClaims
                | Step::Release
                | Step::Finalise
        )
    }

    /// Whether the step is repeated as long as the pod lives.
    fn is_upkeep(self) -> bool {
        matches!(
            self,
            Step::Observe
                | Step::Cgroup
                | Step::Mirror
                | Step::Directories
                | Step::Volume
                | Step::Objects
        )
    }
}

/// The progress of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state", content = "error")]
pub enum Progress {
    /// In progress.
    Running,
    /// Succeeded.
    Done,
    /// Failed with this error.
    Failed(String),
    /// Abandoned before it finished, because another step became more urgent.
    Dropped,
}

/// One step of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The kind.
    pub step: Step,
    /// The container or volume that the step is about. Empty for steps of the whole pod.
    pub subject: String,
    /// When the first try began.
    pub since: Timestamp,
    /// When the last try began.
    pub tried: Timestamp,
    /// When the last try ended. `None` while it is running.
    pub ended: Option<Timestamp>,
    /// Number of tries.
    pub attempts: u32,
    /// The progress.
    #[serde(flatten)]
    pub progress: Progress,
    /// When the next try begins, if it is known.
    pub next: Option<Timestamp>,
}

/// An input to the pod's state machine, and the resulting state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// When the input arrived.
    pub at: Timestamp,
    /// The input.
    pub input: Input,
    /// The state after the input.
    pub state: State,
}

/// The journal of one pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journal {
    /// The steps, in the order in which they began.
    pub steps: VecDeque<Entry>,
    /// The decisions that changed the state.
    pub decisions: VecDeque<Decision>,
    /// What the pod waits for while no step is running or failing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<String>,
}

impl Journal {
    fn find(&mut self, step: Step, subject: &str) -> Option<&mut Entry> {
        self.steps
            .iter_mut()
            .rev()
            .find(|e| e.step == step && e.subject == subject)
    }

    /// Begins a step. If the step has failed or is running, its entry continues and keeps `since`.
    pub fn begin(&mut self, step: Step, subject: &str, now: Timestamp) {
        if let Some(entry) = self
            .find(step, subject)
            .filter(|e| matches!(e.progress, Progress::Failed(_) | Progress::Running))
        {
            entry.attempts = entry.attempts.saturating_add(1);
            (entry.tried, entry.ended, entry.next) = (now, None, None);
            // The last error stays readable until the new try has finished.
            return;
        }
        if self.steps.len() >= STEPS {
            let finished = self
                .steps
                .iter()
                .position(|e| matches!(e.progress, Progress::Done | Progress::Dropped))
                .unwrap_or(0);
            self.steps.remove(finished);
        }
        let subject = subject.to_owned();
        self.steps.push_back(Entry {
            step,
            subject,
            since: now,
            tried: now,
            ended: None,
            attempts: 1,
            progress: Progress::Running,
            next: None,
        });
    }

    /// Records the result of a step and returns the duration of its last try. A step that was never begun is ignored.
    pub fn end(
        &mut self,
        step: Step,
        subject: &str,
        progress: Progress,
        now: Timestamp,
    ) -> Option<SignedDuration> {
        let at = self
            .steps
            .iter()
            .rposition(|e| e.step == step && e.subject == subject)?;
        let entry = &mut self.steps[at];
        let took = now.duration_since(entry.tried);
        (entry.ended, entry.next) = (Some(now), None);
        entry.progress = progress;
        let is_repeated =
            step.is_upkeep() && entry.attempts == 1 && entry.progress == Progress::Done;
        // The repeated success of upkeep is dropped: the first one shows the duration of the start.
        if is_repeated
            && self
                .steps
                .iter()
                .take(at)
                .any(|e| e.step == step && e.subject == subject && e.progress == Progress::Done)
        {
            self.steps.remove(at);
        }
        Some(took)
    }

    /// The total duration of all finished steps of a kind, including failed tries and the back-off between them.
    #[must_use]
    pub fn total_duration(&self, step: Step) -> SignedDuration {
        let ended = self
            .steps
            .iter()
            .filter(|e| e.step == step)
            .filter_map(|e| Some(e.ended?.duration_since(e.since)));
        ended.sum()
    }

    /// Sets the next try of all failed steps that have none.
    pub fn set_next_of_failed(&mut self, next: Timestamp) {
        for entry in self
            .steps
            .iter_mut()
            .filter(|e| matches!(e.progress, Progress::Failed(_)))
        {
            entry.next = Some(entry.next.unwrap_or(next));
        }
    }

    /// Sets the next try of one step.
    pub fn set_next(&mut self, step: Step, subject: &str, next: Timestamp) {
        if let Some(entry) = self.find(step, subject) {
            entry.next = Some(next);
        }
    }

    /// Closes a failed or running step that is no longer relevant for the pod.
    pub fn close(&mut self, step: Step, subject: &str, now: Timestamp) {
        if let Some(entry) = self
            .find(step, subject)
            .filter(|e| matches!(e.progress, Progress::Failed(_) | Progress::Running))
        {
            entry.progress = Progress::Dropped;
            entry.ended.get_or_insert(now);
            entry.next = None;
        }
    }

    /// Records that a failed step has recovered without a new try. If `whole` is false, the step is running again, as
    /// it is not good enough yet.
    pub fn recover(&mut self, step: Step, subject: &str, whole: bool, now: Timestamp) {
        if let Some(entry) = self
            .find(step, subject)
            .filter(|e| matches!(e.progress, Progress::Failed(_)))
        {
            entry.progress = if whole {
                Progress::Done
            } else {
                Progress::Running
            };
            (entry.ended, entry.next) = (whole.then_some(now), None);
        }
    }

    /// Records a decision. An input that does not change the state is not kept: a replay without it gives the same
    /// result.
    pub fn record_decision(&mut self, at: Timestamp, before: State, input: Input, state: State) {
        if before == state {
            return;
        }
        if self.decisions.len() >= DECISIONS {
            self.decisions.pop_front();
        }
        self.decisions.push_back(Decision { at, input, state });
    }

    /// The step that blocks the pod: the failed step with the latest try, else the latest running step. Observing the
    /// runtime counts only if nothing else is running. While a pod terminates, failures of its start do not count.
    #[must_use]
    pub fn blocking(&self) -> Option<&Entry> {
        let ending = self.decisions.back().is_some_and(|d| d.state.is_ending());
        let steps = || {
            self.steps
                .iter()
                .filter(|e| !ending || e.step.is_termination_step())
        };
        let failed = steps()
            .filter(|e| matches!(e.progress, Progress::Failed(_)))
            .max_by_key(|e| e.tried);
        failed.or_else(|| {
            steps()
                .filter(|e| e.progress == Progress::Running)
                .max_by_key(|e| (e.step != Step::Observe, e.tried))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::lifecycle::{Cause, Intent};
    use proptest::prelude::*;

    fn at(s: i64) -> Timestamp {
        Timestamp::from_second(s).expect("a time")
    }

    /// Simulation seed 925: while the runtime was being queried, the journal did not name a volume that hung.
    #[test]
    fn an_observation_is_the_blocking_step_only_if_nothing_else_is_in_progress() {
        let mut journal = Journal::default();
        journal.begin(Step::Observe, "", at(1));
        let blocks = |journal: &Journal| journal.blocking().map(|e| e.step);
        assert_eq!(blocks(&journal), Some(Step::Observe));
        journal.begin(Step::Volume, "far", at(2));
        journal.end(Step::Observe, "", Progress::Done, at(3));
        journal.begin(Step::Observe, "", at(4));
        assert_eq!(blocks(&journal), Some(Step::Volume));
    }

    #[test]
    fn a_failed_step_stays_open_and_the_newest_failure_is_the_blocking_one() {
        let mut journal = Journal::default();
        journal.begin(Step::Sandbox, "", at(1));
        journal.end(
            Step::Sandbox,
            "",
            Progress::Failed("no network".into()),
            at(2),
        );
        journal.set_next_of_failed(at(5));
        assert_eq!(
            journal.blocking().map(|e| (e.since, e.next)),
            Some((at(1), Some(at(5))))
        );
        journal.begin(Step::Sandbox, "", at(5));
        let entry = journal
            .blocking()
            .expect("it still blocks during the retry");
        assert_eq!(
            (entry.since, entry.attempts, &entry.progress),
            (at(1), 2, &Progress::Failed("no network".into()))
        );
        journal.end(Step::Sandbox, "", Progress::Done, at(6));
        journal.begin(Step::Image, "web", at(6));
        assert_eq!(
            journal.blocking().map(|e| (e.step, &e.progress)),
            Some((Step::Image, &Progress::Running))
        );
        journal.close(Step::Image, "web", at(7));
        assert_eq!(journal.blocking(), None);
        for n in 0..200 {
            journal.begin(Step::Start, &n.to_string(), at(n));
            journal.end(Step::Start, &n.to_string(), Progress::Done, at(n));
        }
        assert!(journal.steps.len() <= STEPS);
    }

    #[test]
    fn failures_of_the_start_do_not_block_termination() {
        let mut journal = Journal::default();
        let failed = |why: &str| Progress::Failed(why.into());
        journal.begin(Step::Start, "web", at(1));
        journal.end(Step::Start, "web", failed("no such file"), at(2));
        let ended = Input::Terminate {
            cause: Cause::Completed,
            grace: 1,
        };
        journal.record_decision(at(3), State::Syncing, ended, State::Syncing.step(ended));
        assert_eq!(journal.blocking(), None);
        journal.begin(Step::Release, "", at(4));
        journal.end(Step::Release, "", failed("busy"), at(5));
        assert_eq!(journal.blocking().map(|e| e.step), Some(Step::Release));
    }

    #[test]
    fn a_recovered_failure_no_longer_blocks() {
        let mut journal = Journal::default();
        journal.recover(Step::Readiness, "web", true, at(1));
        assert!(journal.steps.is_empty(), "only a failed step can recover");
        journal.begin(Step::Readiness, "web", at(1));
        journal.end(
            Step::Readiness,
            "web",
            Progress::Failed("404".into()),
            at(2),
        );
        journal.recover(Step::Readiness, "web", false, at(3));
        assert_eq!(
            journal.blocking().map(|e| &e.progress),
            Some(&Progress::Running)
        );
        journal.end(
            Step::Readiness,
            "web",
            Progress::Failed("404".into()),
            at(4),
        );
        journal.recover(Step::Readiness, "web", true, at(5));
        assert_eq!(
            (journal.blocking(), journal.steps[0].ended),
            (None, Some(at(5)))
        );
    }

    proptest! {
        #[test]
        fn a_stored_run_replays_to_the_same_states(intents in proptest::collection::vec((any::<bool>(), any::<bool>(), 1i64..60), 1..20)) {
            let (mut journal, mut state) = (Journal::default(), State::Syncing);
            for (n, (deleted, stopped, grace)) in intents.into_iter().enumerate() {
                let input = if stopped { Input::Stopped } else { Input::Intent(Intent { deleted, removed: false, terminal: false, grace }) };
                let next = state.step(input);
                journal.record_decision(at(i64::try_from(n).expect("small")), state, input, next);
                state = next;
            }
            let stored = serde_json::to_string(&journal).expect("JSON");
            let read: Journal = serde_json::from_str(&stored).expect("the stored journal");
            let mut replayed = State::Syncing;
            for decision in &read.decisions {
                replayed = replayed.step(decision.input);
                prop_assert_eq!(replayed, decision.state);
            }
            prop_assert_eq!(replayed, state);
        }
    }

    #[test]
    fn a_replay_reports_a_wrong_decision() {
        let decision = Decision {
            at: at(0),
            input: Input::Stopped,
            state: State::Finished {
                cause: Cause::Deleted,
            },
        };
        assert_ne!(State::Syncing.step(decision.input), decision.state);
    }
}
