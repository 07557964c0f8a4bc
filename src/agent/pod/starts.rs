//! Limits how many sandboxes the runtime creates at the same time, and reports when no start is in progress.
//!
//! Creating a sandbox keeps a processor busy: a network plugin, a shim and two runs of the runtime's binary.
//! If 50 sandboxes are created together, they compete for processors and for the runtime's locks: none is
//! ready soon, and all together take a fifth longer than a few at a time. So sandboxes are created a few at a
//! time, in the order of their requests. Work that can be postponed waits for an idle period between starts,
//! as it would compete as well.

use std::pin::pin;
use std::time::Duration;

use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

/// Sandboxes created at the same time, for each processor.
const SLOTS_PER_CPU: u32 = 3;

/// How long a sandbox keeps its slot, and how long a start counts as in progress. A longer start does not wait for a
/// processor but for a network plugin, a server or a hook, and must not delay others.
const SLOT_TIME: Duration = Duration::from_secs(1);

/// Maximum delay of postponed work.
const MAX_POSTPONE: Duration = Duration::from_secs(5);

/// The starts of a node.
#[derive(Debug)]
pub struct Starts {
    slots: Semaphore,
    in_progress: watch::Sender<usize>,
}

/// Waits for idle periods between the starts of a node.
#[derive(Debug, Clone)]
pub struct IdleGate(watch::Receiver<usize>);

impl IdleGate {
    /// Waits until no start is in progress, but at most [`MAX_POSTPONE`] after `since`. Cancel-safe.
    pub async fn wait(&mut self, since: Instant) {
        let idle = self.0.wait_for(|count| *count == 0);
        // An error means that the node's starts were dropped, so nothing is in progress.
        let _ = tokio::time::timeout_at(since + MAX_POSTPONE, idle).await;
    }
}

/// Counts as a start in progress until dropped.
struct StartGuard<'a>(&'a watch::Sender<usize>);

impl<'a> StartGuard<'a> {
    fn new(others: &'a watch::Sender<usize>) -> StartGuard<'a> {
        others.send_modify(|count| *count += 1);
        StartGuard(others)
    }
}

impl Drop for StartGuard<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// Runs `work`, and drops `held` when the work is done or has taken [`SLOT_TIME`].
async fn run_with_slot<F: Future>(held: impl Sized, work: F) -> F::Output {
    let mut work = pin!(work);
    match tokio::time::timeout(SLOT_TIME, &mut work).await {
        Ok(done) => done,
        Err(_) => {
            drop(held);
            work.await
        }
    }
}

impl Starts {
    /// Creates slots for this number of processors.
    #[must_use]
    pub fn for_processors(count: u32) -> Starts {
        let slots = count.max(1).saturating_mul(SLOTS_PER_CPU);
        Starts {
            slots: Semaphore::new(slots as usize),
            in_progress: watch::Sender::default(),
        }
    }

    /// Creates a sandbox as soon as a slot is free.
    pub async fn sandbox<F: Future>(&self, make: F) -> F::Output {
        // A sandbox that waits for a slot counts too: other starts are in progress.
        let start = StartGuard::new(&self.in_progress);
        // The semaphore is never closed; without a slot the creation would only be slower.
        let slot = self.slots.acquire().await.ok();
        run_with_slot((start, slot), make).await
    }

    /// Starts a container.
    pub async fn container<F: Future>(&self, start: F) -> F::Output {
        run_with_slot(StartGuard::new(&self.in_progress), start).await
    }

    /// Returns a gate that opens when no start is in progress or waiting for a slot.
    #[must_use]
    pub fn idle_gate(&self) -> IdleGate {
        IdleGate(self.in_progress.subscribe())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::future::join_all;
    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn few_sandboxes_are_created_at_a_time_in_order() {
        let starts = Starts::for_processors(2);
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let begun = Instant::now();
        let make = |i: u64| {
            let (now, most) = (&now, &most);
            starts.sandbox(async move {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                sleep(Duration::from_millis(500)).await;
                now.fetch_sub(1, Ordering::SeqCst);
                (i, begun.elapsed().as_millis() / 500)
            })
        };
        let made = join_all((0..14).map(make)).await;
        assert_eq!(most.load(Ordering::SeqCst), 6);
        for (i, round) in made {
            assert_eq!(u128::from(i / 6) + 1, round, "sandbox {i}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_hanging_creation_blocks_others_only_briefly() {
        let starts = Arc::new(Starts::for_processors(1));
        for _ in 0..3 {
            let starts = Arc::clone(&starts);
            tokio::spawn(async move { starts.sandbox(std::future::pending::<()>()).await });
        }
        tokio::task::yield_now().await;
        let begun = Instant::now();
        starts.sandbox(std::future::ready(())).await;
        assert_eq!(begun.elapsed().as_millis() / 10, 100);
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_creation_releases_its_slot() {
        let starts = Starts::for_processors(1);
        for _ in 0..3 {
            let hangs = starts.sandbox(std::future::pending::<()>());
            let cancelled = tokio::time::timeout(Duration::from_millis(10), hangs).await;
            assert!(cancelled.is_err());
        }
        let begun = Instant::now();
        starts.sandbox(std::future::ready(())).await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_for_an_idle_period_is_limited() {
        let starts = Starts::for_processors(1);
        let mut idle_gate = starts.idle_gate();
        let begun = Instant::now();
        let mut waited = async || {
            idle_gate.wait(begun).await;
            begun.elapsed().as_millis() / 100
        };
        assert_eq!(waited().await, 0);
        let work = starts.container(sleep(Duration::from_millis(300)));
        assert_eq!(tokio::join!(work, waited()).1, 3);
        let work = async {
            loop {
                starts.container(sleep(Duration::from_millis(300))).await;
            }
        };
        let work = futures::future::join(work, starts.sandbox(sleep(Duration::from_secs(7))));
        tokio::select! {
            _ = work => unreachable!("the loop does not return"),
            at = async { sleep(Duration::from_millis(1)).await; waited().await } => assert!((13..=50).contains(&at), "{at}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_counts_until_it_completes_is_cancelled_or_takes_long() {
        let starts = Starts::for_processors(1);
        let in_progress = starts.in_progress.subscribe();
        let after = |ms: u64| {
            let in_progress = &in_progress;
            async move {
                sleep(Duration::from_millis(ms)).await;
                *in_progress.borrow()
            }
        };
        let hangs = tokio::time::timeout(
            Duration::from_millis(1500),
            starts.container(std::future::pending::<()>()),
        );
        let of_sandboxes = join_all(
            (0..4).map(|_| starts.sandbox(async { sleep(Duration::from_millis(200)).await })),
        );
        let cancelled = tokio::time::timeout(
            Duration::from_millis(100),
            starts.sandbox(std::future::pending::<()>()),
        );
        let ((), counts) = tokio::join!(
            async { drop(tokio::join!(hangs, of_sandboxes, cancelled)) },
            join_all([50, 150, 250, 450, 1050, 1600].map(after))
        );
        // The abandoned one had no slot yet.
        assert_eq!(counts, [6, 5, 2, 1, 0, 0]);
    }
}
