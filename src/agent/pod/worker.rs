//! One pod's worker: observe, decide, act, again. It wakes when the wish changes, when the runtime hints,
//! or when a timer it asked for is due; never on a tick.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::relist::Seen;
use super::status::StatusWriter;
use super::sync::{self, Memory, Outcome};
use crate::agent::{Admission, Context, Kind};
use crate::core::pod;
use crate::core::pod::journal::{Progress, Step};
use crate::core::pod::lifecycle::{Cause, Input, State, Wish};
use crate::core::pod::resize;
use crate::core::pod::status;

/// How long to wait after an error, doubling up to the maximum.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));

/// What the sources want of a pod.
#[derive(Clone)]
pub struct Desired {
    /// The pod as it is to run.
    pub pod: Arc<Pod>,
    /// The object in the API that its status belongs to: the pod itself, or a static pod's mirror.
    pub object: Option<Arc<Pod>>,
    /// It is in no source any more.
    pub removed: bool,
}

impl Desired {
    /// Whether nothing but the reported status differs. Readiness gates read conditions of others, so
    /// with them every change counts.
    fn asks_the_same(&self, other: &Desired) -> bool {
        let (a, b) = (&self.pod, &other.pod);
        let gates = a.spec.as_ref().is_some_and(|s| s.readiness_gates.is_some());
        let object = |d: &Desired| {
            d.object.as_ref().map(|o| {
                (
                    o.metadata.uid.clone(),
                    o.metadata.deletion_timestamp.is_some(),
                )
            })
        };
        !gates
            && self.wish() == other.wish()
            && a.spec == b.spec
            && a.metadata.labels == b.metadata.labels
            && a.metadata.annotations == b.metadata.annotations
            && a.metadata.generation == b.metadata.generation
            && object(self) == object(other)
    }

    fn wish(&self) -> Wish {
        let is_static = pod::is_static(&self.pod);
        Wish {
            deleted: !is_static && self.pod.metadata.deletion_timestamp.is_some(),
            removed: self.removed,
            terminal: !is_static && pod::is_terminal(&self.pod),
            grace: pod::grace_seconds(&self.pod),
        }
    }
}

/// Whether the newest wish ends the pod: what a long step asks between its parts.
pub struct Stop<'a>(&'a watch::Receiver<Desired>, &'a Notify);

impl Stop<'_> {
    /// Whether nothing more should be started.
    #[must_use]
    pub fn wanted(&self) -> bool {
        State::Syncing
            .step(Input::Wish(self.0.borrow().wish()))
            .is_ending()
    }

    /// Drops a hint that came so far: what it hints at is about to be looked at anyway.
    pub fn forget_hint(&self) {
        let _ = futures::FutureExt::now_or_never(self.1.notified());
    }

    /// Waits for a hint, and takes it.
    pub async fn hinted(&self) {
        self.1.notified().await;
    }

    /// Waits until less grace is wished for than `grace` seconds.
    async fn when_shorter(&self, grace: i64) {
        let mut wishes = self.0.clone();
        let shorter = |d: &Desired| d.wish().deleted && d.wish().grace < grace;
        if wishes.wait_for(shorter).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until it is.
    pub async fn when_wanted(&self) {
        let mut wishes = self.0.clone();
        // The dispatcher drops the sender only when the process ends; then waiting on is right.
        if wishes
            .wait_for(|d| State::Syncing.step(Input::Wish(d.wish())).is_ending())
            .await
            .is_err()
        {
            std::future::pending::<()>().await;
        }
    }
}

/// Runs until the pod has ended and nothing of it is left.
pub async fn run(
    context: Arc<Context>,
    mut wishes: watch::Receiver<Desired>,
    hint: Arc<Notify>,
    seen: Seen,
) {
    let writer = StatusWriter::start(Arc::clone(&context.api), Arc::clone(&context.metrics));
    let first = wishes.borrow().clone();
    let log = context
        .journals
        .open(&first.pod, context.clock, &context.metrics);
    let mut memory = Memory::new(context.clock.now(), log, Arc::clone(&hint));
    let mut state = State::Syncing;
    let mut pause = RETRY.0;
    let uid = pod::uid(&first.pod).to_owned();
    let (mut admitted, mut turns) = (false, 0_u64);
    loop {
        let wished = wishes.borrow_and_update().clone();
        memory.adopt(wished.object.as_deref());
        let mut granted = memory.granted(&wished.pod);
        if admitted
            && state == State::Syncing
            && grant(&context, &wished.pod, &granted, &mut memory)
        {
            granted = Arc::clone(&wished.pod);
        }
        let desired = Desired {
            pod: granted,
            ..wished.clone()
        };
        state = decide(&memory, state, Input::Wish(desired.wish()));
        // Step 4, admission, stands before the first sync and is not repeated.
        if state == State::Syncing {
            match context.admit(&desired.pod, &hint) {
                Admission::Taken => {
                    if !std::mem::replace(&mut admitted, true) {
                        memory.log.begin(Step::Admission, "");
                        memory.log.end(Step::Admission, "", Progress::Done);
                    }
                }
                Admission::Refused(refusal) if !admitted => {
                    context.metrics.rejected(&refusal.reason);
                    memory.log.fail(Step::Admission, "", &refusal.message, None);
                    context.events.pod(
                        &desired.pod,
                        None,
                        Kind::Warning,
                        &refusal.reason,
                        refusal.message.clone(),
                    );
                    memory.status = status::rejected(
                        &memory.status,
                        &refusal.reason,
                        &refusal.message,
                        context.clock.now(),
                    );
                    state = decide(
                        &memory,
                        state,
                        Input::Ended {
                            cause: Cause::Rejected,
                            grace: 1,
                        },
                    );
                }
                Admission::Room if !admitted => {
                    let again = context.clock.now() + jiff::SignedDuration::from_millis(100);
                    memory.log.fail(
                        Step::Admission,
                        "",
                        "other pods are making room for this critical one",
                        Some(again),
                    );
                    if !sleep(
                        &mut wishes,
                        &hint,
                        &wished,
                        state,
                        Some(Instant::now() + Duration::from_millis(100)),
                        |_| {},
                    )
                    .await
                    {
                        return;
                    }
                    continue;
                }
                Admission::Room | Admission::Refused(_) => {}
            }
            if let Some(verdict) = context.verdict(&uid).filter(|_| state == State::Syncing) {
                context.events.pod(
                    &desired.pod,
                    None,
                    Kind::Warning,
                    verdict.reason,
                    verdict.message.clone(),
                );
                let grace = verdict
                    .grace
                    .unwrap_or_else(|| pod::grace_seconds(&desired.pod));
                memory.verdict = Some(verdict);
                state = decide(
                    &memory,
                    state,
                    Input::Ended {
                        cause: Cause::Preempted,
                        grace,
                    },
                );
            }
        }
        let begun = Instant::now();
        let stop = Stop(&wishes, &hint);
        let turn = step(
            &context,
            state,
            &desired,
            &mut memory,
            &writer,
            &stop,
            &seen,
        );
        let outcome = turn.instrument(span(&desired.pod, state)).await;
        let operation = match state {
            State::Syncing if turns == 0 => "create",
            State::Syncing => "sync",
            _ => "kill",
        };
        context.metrics.worked(operation, begun.elapsed());
        turns += 1;
        let wait = match outcome {
            Ok(Outcome::Next(input)) => {
                state = decide(&memory, state, input);
                pause = RETRY.0;
                continue;
            }
            Ok(Outcome::Gone) => {
                context.journals.gone(&uid);
                context.metrics.gone(&uid);
                return;
            }
            Ok(Outcome::Wait(until)) => {
                pause = RETRY.0;
                until
            }
            Err(error) => {
                tracing::warn!(%error, retry_in = ?pause, "the pod could not be synced");
                let until = Instant::now() + pause;
                memory.log.again(
                    context.clock.now() + jiff::SignedDuration::try_from(pause).unwrap_or_default(),
                );
                pause = (pause * 2).min(RETRY.1);
                Some(until)
            }
        };
        if !sleep(&mut wishes, &hint, &wished, state, wait, |object| {
            memory.report(object, &writer)
        })
        .await
        {
            return;
        }
    }
}

/// What a worker's turn is traced as.
fn span(pod: &Pod, state: State) -> tracing::Span {
    tracing::info_span!(
        target: "trace::pod",
        "syncPod",
        "k8s.pod.uid" = pod::uid(pod),
        "k8s.pod.name" = pod.metadata.name,
        "k8s.namespace.name" = pod.metadata.namespace,
        "k8s.pod.update_type" = if state == State::Syncing { "sync" } else { "kill" },
    )
}

/// Waits for something that concerns the pod. An object whose status alone has changed (mostly by our own
/// writing) is only noted by `report`. False when the process ends.
async fn sleep(
    wishes: &mut watch::Receiver<Desired>,
    hint: &Notify,
    before: &Desired,
    state: State,
    until: Option<Instant>,
    report: impl Fn(Option<Arc<Pod>>),
) -> bool {
    loop {
        tokio::select! {
            // In this order, so that a simulated run replays exactly.
            biased;
            // All arms are cancel-safe: the wish is read anew by the caller, a hint is only a nudge.
            changed = wishes.changed() => {
                if changed.is_err() {
                    return false;
                }
                if state != State::Syncing || !wishes.borrow().asks_the_same(before) {
                    wishes.mark_changed();
                    return true;
                }
                report(wishes.borrow_and_update().object.clone());
            }
            () = hint.notified() => return true,
            () = async { match until { Some(until) => tokio::time::sleep_until(until).await, None => std::future::pending().await } } => return true,
        }
    }
}

/// Grants a pod that runs the sizes its spec wishes for now, or says why not (kubelet spec, 11.1). True
/// if they are granted.
fn grant(context: &Context, wished: &Pod, granted: &Arc<Pod>, memory: &mut Memory) -> bool {
    if std::ptr::eq(wished, Arc::as_ptr(granted)) {
        memory.grant(wished, None);
        return true;
    }
    let refusal = context.may_grow(wished).err();
    let deferred = refusal
        .as_ref()
        .map(|r| ("Deferred".to_owned(), r.message.clone()));
    let may_grow = refusal.is_none();
    if !memory.grant(wished, deferred) {
        return may_grow;
    }
    let described = resize::described(wished, None);
    match refusal {
        None => context.events.pod(
            wished,
            None,
            Kind::Normal,
            "ResizeStarted",
            format!("Pod resize started: {described}"),
        ),
        Some(refusal) => {
            context.events.pod(
                wished,
                None,
                Kind::Warning,
                "ResizeDeferred",
                format!("Pod resize {}: {described}", refusal.reason),
            );
        }
    }
    may_grow
}

/// One decision, noted in the pod's journal.
fn decide(memory: &Memory, state: State, input: Input) -> State {
    let next = state.step(input);
    memory.log.decided(state, input, next);
    next
}

async fn step(
    context: &Arc<Context>,
    state: State,
    desired: &Desired,
    memory: &mut Memory,
    writer: &StatusWriter,
    stop: &Stop<'_>,
    seen: &Seen,
) -> Result<Outcome, String> {
    let uid = pod::uid(&desired.pod);
    match state {
        State::Syncing => {
            let outcome = sync::sync_pod(context, desired, memory, writer, stop).await;
            seen.set(uid, memory.fingerprint);
            outcome
        }
        State::Terminating { grace, cause } => {
            tokio::select! {
                // In this order, so that a simulated run replays exactly.
                biased;
                ended = sync::terminate(context, desired, memory, writer, grace, cause) => ended?,
                () = overdue(context, &desired.pod, grace, cause) => {}
                // Stopping is begun anew with what is left; the runtime takes the shorter time.
                () = stop.when_shorter(grace) => return Ok(Outcome::Wait(Some(Instant::now()))),
            }
            seen.set(uid, memory.fingerprint);
            Ok(Outcome::Next(Input::Stopped))
        }
        State::Terminated { cause } => {
            sync::release(context, desired, memory, cause).await?;
            seen.set(uid, memory.fingerprint);
            if cause.removes_content() {
                memory
                    .log
                    .step(
                        Step::Finalise,
                        "",
                        finalise(context, desired, writer, cause),
                    )
                    .await?;
            }
            context.release(uid);
            Ok(Outcome::Next(Input::Released))
        }
        State::Finished { cause } if cause.removes_content() => Ok(Outcome::Gone),
        State::Finished { .. } => Ok(Outcome::Wait(None)),
    }
}

/// Somebody waits for the room of a pod that is preempted: that it takes too long is told once for each try
/// (kubelet spec, 2.2). Never ends.
async fn overdue(context: &Context, pod: &Pod, grace: i64, cause: Cause) {
    if cause == Cause::Preempted {
        let patience =
            Duration::from_millis(u64::try_from(grace).unwrap_or(0).saturating_mul(1500))
                .max(Duration::from_secs(10));
        tokio::time::sleep(patience).await;
        let message = "Container runtime did not kill the pod within specified grace period.";
        context
            .events
            .pod(pod, None, Kind::Warning, "ExceededGracePeriod", message);
    }
    std::future::pending().await
}

/// Lets the API have the object back, once everything has been released (kubelet spec, 3.9).
async fn finalise(
    context: &Context,
    desired: &Desired,
    writer: &StatusWriter,
    cause: Cause,
) -> Result<(), String> {
    let Some(object) = &desired.object else {
        return Ok(());
    };
    if cause == Cause::Removed && !pod::is_mirror(object) {
        return Ok(());
    }
    writer.flush().await;
    match context
        .api
        .delete(
            &object.namespace().unwrap_or_default(),
            &object.name_any(),
            pod::uid(object),
        )
        .await
    {
        Ok(()) => Ok(()),
        // Another object under the name is not ours to delete.
        Err(error) if error.is_gone() => Ok(()),
        Err(error) => Err(format!("the pod cannot be deleted from the API: {error}")),
    }
}
