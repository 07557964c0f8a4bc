//! The record of a worker: its last inputs and decisions. A recorded worker can be replayed elsewhere, and the
//! decisions compared. A bug report contains such a file. Pure.

use std::collections::VecDeque;
use std::fmt::Write as _;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::lifecycle::{Cause, State};
use super::worker::{Facts, Input, Key, Op, Outcome, Rules, Turn, Worker};

/// Maximum number of turns kept, and how many turns are dropped at once when there are more.
const TURNS: usize = 32;
const SEGMENT: usize = TURNS / 2;

/// The relevant results of a turn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// The pod's state after the turn.
    pub state: State,
    /// Operations that began.
    pub begin: Vec<Key>,
    /// Operations that were cancelled.
    pub cancel: Vec<Key>,
    /// The pod's phase after the turn.
    pub phase: Option<String>,
    /// What the pod waited for after the turn.
    pub waiting: Option<String>,
    /// When the worker requested to be woken.
    pub wake_at: Option<Timestamp>,
}

impl Decision {
    fn of(turn: &Turn, worker: &Worker) -> Decision {
        Decision {
            state: worker.state,
            begin: turn.begin.iter().map(Op::key).collect(),
            cancel: turn.cancel.clone(),
            phase: worker.status().phase.clone(),
            waiting: worker.waiting().map(ToOwned::to_owned),
            wake_at: turn.wake_at,
        }
    }
}

impl std::fmt::Display for Decision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.state)?;
        if let Some(phase) = &self.phase {
            write!(f, ", phase {phase}")?;
        }
        for (verb, keys) in [("begin", &self.begin), ("cancel", &self.cancel)] {
            for (number, key) in keys.iter().enumerate() {
                let verb = if number == 0 { verb } else { "and" };
                write!(f, "; {verb} {key:?}")?;
            }
        }
        if let Some(waiting) = &self.waiting {
            write!(f, "; pending: {waiting}")?;
        }
        if let Some(at) = self.wake_at {
            write!(f, "; wakes at {at}")?;
        }
        Ok(())
    }
}

/// A recorded turn: an input and the decision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// When the turn was taken.
    pub at: Timestamp,
    /// The failing step before the first container, according to the journal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocking_reason: Option<String>,
    /// The input.
    pub input: Input,
    /// The decision.
    pub decision: Decision,
}

impl std::fmt::Display for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}  ", self.at)?;
        match &self.input {
            Input::Done { key, outcome } => write!(f, "{key:?}: {}", brief(outcome))?,
            Input::Probed { id, kind, result } => {
                let verb = if *result { "succeeded" } else { "failed" };
                write!(f, "{kind:?} probe of {id} {verb}")?;
            }
            Input::Terminate(verdict) => {
                let what = match verdict.cause {
                    Cause::NodeShutdown => "stopped by the node's shutdown",
                    _ => "evicted",
                };
                write!(f, "{what}: {}", verdict.message)?;
            }
            Input::Network(network) => write!(f, "network: {network:?}")?,
            Input::RuntimeEvent(event) => write!(f, "event: {} {:?}", event.id, event.kind)?,
            other => f.write_str(other.name())?,
        }
        write!(f, " -> {}", self.decision)
    }
}

/// A short description of an outcome.
fn brief(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Observed { pod, .. } => {
            let containers = pod
                .containers
                .iter()
                .map(|c| format!("{} {:?}", c.name, c.state));
            let ready = |ready| if ready { "ready" } else { "not ready" };
            let sandboxes = pod
                .sandboxes
                .iter()
                .map(|s| format!("sandbox {}", ready(s.ready)));
            let all: Vec<String> = sandboxes.chain(containers).collect();
            match all.is_empty() {
                true => "no sandbox or container in the runtime".into(),
                false => all.join(", "),
            }
        }
        Outcome::Refused { reason, message }
        | Outcome::Deferred { reason, message }
        | Outcome::Waiting {
            reason, message, ..
        } => format!("{reason}: {message}"),
        Outcome::HookFailed { id, message } => {
            format!("{id}, its postStart hook failed: {message}")
        }
        Outcome::Outdated(why) => format!("outdated: {why}"),
        Outcome::Failed(fault) => format!("failed: {fault}"),
        Outcome::Admitted => "admitted".into(),
        Outcome::Granted => "granted".into(),
        Outcome::Sandbox { id, .. } | Outcome::Started { id, .. } => id.clone(),
        Outcome::Abandoned => "not started: the pod is terminating".into(),
        Outcome::Done => "done".into(),
        Outcome::RetryPart(at) => format!("done, due again at {at}"),
    }
}

/// The state of a worker at some time, and its turns since.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The configuration of the worker.
    pub rules: Rules,
    /// The addresses of the node when the record began.
    pub node_ips: Vec<String>,
    /// The worker before the first entry.
    pub base: Box<Worker>,
    /// The turns, oldest first.
    pub entries: VecDeque<Entry>,
    /// The worker after the first [`SEGMENT`] entries. It becomes the base when these entries are dropped, so that no
    /// turn is computed twice.
    #[serde(skip)]
    middle: Option<Box<Worker>>,
}

/// A turn whose replayed decision differs from the recorded one.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// Index of the entry, from 0.
    pub index: usize,
    /// The recorded entry.
    pub recorded: Entry,
    /// The replayed decision.
    pub decided: Decision,
}

impl Record {
    /// Begins a record with the current state of the worker.
    #[must_use]
    pub fn new(rules: Rules, node_ips: Vec<String>, worker: &Worker) -> Record {
        Record {
            rules,
            node_ips,
            base: Box::new(worker.clone()),
            entries: VecDeque::new(),
            middle: None,
        }
    }

    fn facts(&self, entry: &Entry) -> Facts {
        Facts {
            now: entry.at,
            node_ips: self.node_ips.clone(),
            blocking_reason: entry.blocking_reason.clone(),
            rules: self.rules.clone(),
        }
    }

    /// Adds a turn. `worker` is the worker after the turn. If there are too many turns, the older half is dropped. A
    /// turn that decided nothing is left out. Most of those are echoes of the pod's own status, and each would store a
    /// copy of the pod.
    pub fn add(&mut self, facts: &Facts, input: Input, turn: &Turn, worker: &Worker) {
        if turn.unchanged && turn.publish.is_none() {
            return;
        }
        if self.entries.len() >= TURNS
            && let Some(middle) = self.middle.take()
        {
            self.base = middle;
            self.entries.drain(..SEGMENT.min(self.entries.len()));
        }
        self.entries.push_back(Entry {
            at: facts.now,
            blocking_reason: facts.blocking_reason.clone(),
            input,
            decision: Decision::of(turn, worker),
        });
        if self.entries.len() == SEGMENT {
            self.middle = Some(Box::new(worker.clone()));
        }
    }

    /// Computes the worker after the last entry.
    #[must_use]
    pub fn latest(&self) -> Worker {
        let mut worker = (*self.base).clone();
        for entry in &self.entries {
            worker.turn(&self.facts(entry), entry.input.clone());
        }
        worker
    }

    /// Replays all turns and returns the decisions that differ.
    #[must_use]
    pub fn replay(&self) -> Vec<Difference> {
        let mut worker = (*self.base).clone();
        let mut differences = vec![];
        for (index, entry) in self.entries.iter().enumerate() {
            let turn = worker.turn(&self.facts(entry), entry.input.clone());
            let decided = Decision::of(&turn, &worker);
            if decided != entry.decision {
                differences.push(Difference {
                    index,
                    recorded: entry.clone(),
                    decided,
                });
            }
        }
        differences
    }
}

/// The format of the files of `holdfast agent record`. A change of the inputs or of the worker's state that an older file
/// does not have increases it.
pub const FORMAT: u32 = 2;

/// A record with its origin: the file format of `holdfast agent record`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The format of the file: [`FORMAT`].
    pub format: u32,
    /// The version of the agent that wrote the report.
    pub version: String,
    /// The name of the agent's node.
    pub node: String,
    /// The namespace of the recorded pod.
    pub namespace: String,
    /// The name of the recorded pod.
    pub name: String,
    /// When the report was written.
    pub at: Timestamp,
    /// The worker's last turns.
    pub record: Record,
}

/// The part of a file that all formats have.
#[derive(Deserialize)]
struct Header {
    #[serde(default)]
    format: u32,
    #[serde(default)]
    version: String,
}

impl Report {
    /// Reads the file of a report.
    ///
    /// # Errors
    ///
    /// A sentence that says why this program cannot replay the file.
    pub fn read(bytes: &[u8]) -> Result<Report, String> {
        let header: Header = crate::json::read(bytes).map_err(|e| format!("not a record: {e}"))?;
        if header.format != FORMAT {
            return Err(format!(
                "a record of format {}, written by Holdfast {}; this program replays format {FORMAT}",
                header.format, header.version
            ));
        }
        crate::json::read(bytes).map_err(|e| format!("a damaged record: {e}"))
    }

    /// Replays all turns. Returns a text for users, in which turns with a different decision are marked, and the number
    /// of such turns.
    #[must_use]
    pub fn replayed(&self) -> (String, usize) {
        let Report {
            format: _,
            version,
            node,
            namespace,
            name,
            at,
            record,
        } = self;
        let differences = record.replay();
        let turns = record.entries.len();
        let mut text = format!(
            "Pod {namespace}/{name} on node {node}: {turns} turns until {at}, recorded by Holdfast {version}.\n"
        );
        for (index, entry) in record.entries.iter().enumerate() {
            // Writing to a String cannot fail.
            let _ = match differences.iter().find(|d| d.index == index) {
                None => writeln!(text, "  {entry}"),
                Some(other) => writeln!(
                    text,
                    "! {entry}\n!   this program decides: {}",
                    other.decided
                ),
            };
        }
        let _ = match differences.len() {
            0 => writeln!(text, "This program decides the same in every turn."),
            n => writeln!(
                text,
                "This program decides differently in {n} of {turns} turns."
            ),
        };
        (text, differences.len())
    }
}
