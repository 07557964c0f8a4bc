//! The lifecycle of a pod on this node as a state machine: `Syncing → Terminating → Terminated → Finished`
//! (`pkg/kubelet/pod_workers.go`). Pure.
//!
//! The state never moves backwards, with one exception: if a finished pod is deleted, it returns to `Terminated` so
//! that its records are released. Inputs and states can be serialised. A recorded run is replayed by passing its inputs
//! to [`State::step`], and must result in the same states.

use serde::{Deserialize, Serialize};

/// Why a pod terminates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// The pod was deleted in the API.
    Deleted,
    /// The pod was removed from its source: a static pod's manifest was removed, or the runtime has a pod that no
    /// source has.
    Removed,
    /// The pod's containers have finished, or its phase was terminal already.
    Completed,
    /// Admission rejected the pod.
    Rejected,
    /// The pod was preempted by a critical pod.
    Preempted,
    /// The node evicted the pod: it exceeded a limit, or the node was short of a resource.
    Evicted,
    /// The pod was active for longer than `activeDeadlineSeconds`.
    DeadlineExceeded,
    /// The node is shutting down.
    NodeShutdown,
}

/// The state of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// The agent starts the pod and keeps it as specified.
    Syncing,
    /// The containers are being stopped.
    Terminating {
        /// The grace period in seconds. It never grows.
        grace: i64,
        /// The reason.
        cause: Cause,
    },
    /// All containers have stopped; the pod's resources are being released.
    Terminated {
        /// The reason.
        cause: Cause,
    },
    /// Nothing remains to be done unless the object changes.
    Finished {
        /// The reason.
        cause: Cause,
    },
}

/// The desired state according to the sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    /// The pod has a deletion timestamp in the API.
    pub deleted: bool,
    /// No source has the pod any more.
    pub removed: bool,
    /// The pod's phase in the API is terminal.
    pub terminal: bool,
    /// The grace period of the deletion or the spec, in seconds.
    pub grace: i64,
}

/// An input of the state machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Input {
    /// The sources were read for the first time, or have changed.
    Intent(Intent),
    /// The pod must terminate, as a sync has found.
    #[serde(rename = "Ended")]
    Terminate {
        /// The reason.
        cause: Cause,
        /// The grace period in seconds for containers that still run.
        grace: i64,
    },
    /// All containers have been observed as stopped.
    Stopped,
    /// All resources of the pod have been released.
    Released,
}

impl State {
    /// The state after `input`.
    #[must_use]
    pub fn step(self, input: Input) -> State {
        match (self, input) {
            (State::Syncing, Input::Intent(intent)) => match intent.cause() {
                Some(cause) => State::Terminating {
                    grace: intent.grace.max(1),
                    cause,
                },
                None => State::Syncing,
            },
            (State::Syncing, Input::Terminate { cause, grace }) => State::Terminating {
                grace: grace.max(1),
                cause,
            },
            // A stronger cause, such as preemption of a terminating pod, can only shorten the grace period.
            (State::Terminating { grace, cause }, Input::Terminate { grace: new, .. }) => {
                State::Terminating {
                    grace: grace.min(new.max(1)),
                    cause,
                }
            }
            // A deletion may shorten the remaining grace period, and replaces the cause.
            (State::Terminating { grace, cause }, Input::Intent(intent)) => State::Terminating {
                grace: if intent.deleted {
                    grace.min(intent.grace.max(1))
                } else {
                    grace
                },
                cause: cause.with(intent),
            },
            (State::Terminating { cause, .. }, Input::Stopped) => State::Terminated { cause },
            (State::Terminated { cause }, Input::Intent(intent)) => State::Terminated {
                cause: cause.with(intent),
            },
            (State::Terminated { cause }, Input::Released) => State::Finished { cause },
            // If a finished pod is deleted, its remaining records are released.
            (State::Finished { cause }, Input::Intent(intent)) if cause != cause.with(intent) => {
                State::Terminated {
                    cause: cause.with(intent),
                }
            }
            (state, _) => state,
        }
    }

    /// Whether all containers have stopped permanently.
    #[must_use]
    pub fn has_stopped(self) -> bool {
        matches!(self, State::Terminated { .. } | State::Finished { .. })
    }

    /// Whether containers must not be started any more.
    #[must_use]
    pub fn is_ending(self) -> bool {
        !matches!(self, State::Syncing)
    }
}

impl Intent {
    fn cause(self) -> Option<Cause> {
        match self {
            Intent { deleted: true, .. } => Some(Cause::Deleted),
            Intent { removed: true, .. } => Some(Cause::Removed),
            Intent { terminal: true, .. } => Some(Cause::Completed),
            _ => None,
        }
    }
}

impl Cause {
    fn with(self, intent: Intent) -> Cause {
        match intent {
            Intent { removed: true, .. } => Cause::Removed,
            Intent { deleted: true, .. } => Cause::Deleted,
            _ => self,
        }
    }

    /// Whether dead containers, logs and directories are removed too. Those of an evicted pod are removed at once, as
    /// they may hold the resource that the node lacks.
    #[must_use]
    pub(crate) fn removes_content(self) -> bool {
        matches!(self, Cause::Deleted | Cause::Removed | Cause::Evicted)
    }
}

/// Why this node terminates a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// The cause for the pod's lifecycle.
    pub cause: Cause,
    /// The reason in the status, for example `Evicted`.
    pub reason: String,
    /// The message in the status and in the event.
    pub message: String,
    /// The message of the `DisruptionTarget` condition. `None` if the pod gets no such condition.
    pub disruption: Option<String>,
    /// The grace period of the containers in seconds. `None` means that of the pod.
    pub grace: Option<i64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rank(state: State) -> u8 {
        match state {
            State::Syncing => 0,
            State::Terminating { .. } => 1,
            State::Terminated { .. } => 2,
            State::Finished { .. } => 3,
        }
    }

    fn input() -> impl Strategy<Value = Input> {
        prop_oneof![
            (any::<bool>(), any::<bool>(), any::<bool>(), -5i64..100).prop_map(
                |(deleted, removed, terminal, grace)| Input::Intent(Intent {
                    deleted,
                    removed,
                    terminal,
                    grace
                })
            ),
            (-5i64..100).prop_map(|grace| Input::Terminate {
                cause: Cause::Completed,
                grace
            }),
            Just(Input::Terminate {
                cause: Cause::Rejected,
                grace: 1
            }),
            Just(Input::Stopped),
            Just(Input::Released),
        ]
    }

    proptest! {
        #[test]
        fn the_lifecycle_never_goes_back_and_grace_periods_never_grow(inputs in proptest::collection::vec(input(), 0..40)) {
            let mut state = State::Syncing;
            for input in inputs {
                let next = state.step(input);
                // The only way back from Finished is to Terminated, to release the records of a deleted pod.
                prop_assert!(rank(next) >= rank(state) || (rank(state) == 3 && rank(next) == 2));
                prop_assert!(!state.is_ending() || next.is_ending(), "no start after termination has begun");
                if let (State::Terminating { grace: before, .. }, State::Terminating { grace: after, .. }) = (state, next) {
                    prop_assert!(after <= before && after >= 1);
                }
                state = next;
            }
            // Given observations, every terminating pod finishes.
            if state.is_ending() {
                let done = state.step(Input::Stopped).step(Input::Released);
                prop_assert_eq!(rank(done), 3);
            }
        }
    }

    #[test]
    fn deletion_shortens_the_grace_period_and_overrides_other_causes() {
        let intent = |deleted, grace| Intent {
            deleted,
            removed: false,
            terminal: false,
            grace,
        };
        let state = State::Syncing.step(Input::Terminate {
            cause: Cause::Completed,
            grace: 7,
        });
        assert_eq!(
            state,
            State::Terminating {
                grace: 7,
                cause: Cause::Completed
            }
        );
        let state = State::Syncing
            .step(Input::Intent(intent(true, 30)))
            .step(Input::Intent(intent(true, 5)))
            .step(Input::Intent(intent(true, 60)));
        assert_eq!(
            state,
            State::Terminating {
                grace: 5,
                cause: Cause::Deleted
            }
        );
    }
}
