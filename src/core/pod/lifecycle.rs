//! The life of a pod on this node as a state machine: `Syncing → Terminating → Terminated → Finished`,
//! never backwards (upstream's `pod_workers.go`). Pure.
//!
//! Inputs and states are values that can be stored: a recorded run is replayed by feeding its inputs to
//! [`State::step`] again, and must show the same states.

use serde::{Deserialize, Serialize};

/// Why a pod ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// It was deleted in the API.
    Deleted,
    /// It left its source: a static pod's manifest, or the runtime has a pod that nobody wants.
    Removed,
    /// Its containers have finished, or its phase was final already.
    Completed,
    /// It was refused by admission.
    Rejected,
    /// It made room for a critical pod.
    Preempted,
    /// The node evicted it: it used more of a resource than it may.
    Evicted,
    /// It was active for longer than `activeDeadlineSeconds`.
    DeadlineExceeded,
    /// The machine is being shut down.
    NodeShutdown,
}

/// Where a pod stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// Being brought to, and kept at, what its spec says.
    Syncing,
    /// Its containers are being stopped.
    Terminating {
        /// Seconds the containers get; it only ever shrinks.
        grace: i64,
        /// Why.
        cause: Cause,
    },
    /// No container runs any more; what it held is being released.
    Terminated {
        /// Why.
        cause: Cause,
    },
    /// Nothing is left to do while the object stays as it is.
    Finished {
        /// Why.
        cause: Cause,
    },
}

/// What the sources want.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    /// The pod is marked as deleted in the API.
    pub deleted: bool,
    /// The pod is in no source any more.
    pub removed: bool,
    /// The API has a final phase for it.
    pub terminal: bool,
    /// The grace period that its spec or deletion gives, in seconds.
    pub grace: i64,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Input {
    /// The sources changed, or are looked at first.
    Intent(Intent),
    /// A sync found that the pod has come to its end; what still runs gets this many seconds.
    Ended {
        /// Why.
        cause: Cause,
        /// Seconds.
        grace: i64,
    },
    /// All containers have been seen stopped.
    Stopped,
    /// Everything has been released.
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
            (State::Syncing, Input::Ended { cause, grace }) => State::Terminating {
                grace: grace.max(1),
                cause,
            },
            // A stronger end (preemption of a pod that ends anyway) can only shorten.
            (State::Terminating { grace, cause }, Input::Ended { grace: new, .. }) => {
                State::Terminating {
                    grace: grace.min(new.max(1)),
                    cause,
                }
            }
            // A deletion may shorten the time that is left, and is the stronger reason.
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
            // A finished pod that is deleted now has its last records released.
            (State::Finished { cause }, Input::Intent(intent)) if cause != cause.with(intent) => {
                State::Terminated {
                    cause: cause.with(intent),
                }
            }
            (state, _) => state,
        }
    }

    /// Whether all containers have stopped for good.
    #[must_use]
    pub fn has_stopped(self) -> bool {
        matches!(self, State::Terminated { .. } | State::Finished { .. })
    }

    /// Whether no container may be started any more.
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

    /// Whether dead containers, logs and directories go too. Those of an evicted pod do at once: what the node is short of
    /// may be in them.
    #[must_use]
    pub fn removes_content(self) -> bool {
        matches!(self, Cause::Deleted | Cause::Removed | Cause::Evicted)
    }
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
            (-5i64..100).prop_map(|grace| Input::Ended {
                cause: Cause::Completed,
                grace
            }),
            Just(Input::Ended {
                cause: Cause::Rejected,
                grace: 1
            }),
            Just(Input::Stopped),
            Just(Input::Released),
        ]
    }

    proptest! {
        #[test]
        fn the_order_never_goes_back_and_grace_never_grows(inputs in proptest::collection::vec(input(), 0..40)) {
            let mut state = State::Syncing;
            for input in inputs {
                let next = state.step(input);
                // From Finished only the release of a deleted pod's last records is repeated.
                prop_assert!(rank(next) >= rank(state) || (rank(state) == 3 && rank(next) == 2));
                prop_assert!(!state.is_ending() || next.is_ending(), "nothing starts after the end began");
                if let (State::Terminating { grace: before, .. }, State::Terminating { grace: after, .. }) = (state, next) {
                    prop_assert!(after <= before && after >= 1);
                }
                state = next;
            }
            // With observations coming in, every ending pod finishes.
            if state.is_ending() {
                let done = state.step(Input::Stopped).step(Input::Released);
                prop_assert_eq!(rank(done), 3);
            }
        }
    }

    #[test]
    fn a_deleted_pod_shortens_and_wins() {
        let intent = |deleted, grace| Intent {
            deleted,
            removed: false,
            terminal: false,
            grace,
        };
        let state = State::Syncing.step(Input::Ended {
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
