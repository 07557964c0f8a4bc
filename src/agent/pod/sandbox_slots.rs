//! How many sandboxes the runtime makes at once.
//!
//! Making a sandbox keeps a processor busy: a network plugin, a shim and two runs of the runtime's binary. When 50 begin
//! together, all of them take turns on the processors and on the runtime's locks, none is done soon, and all together take
//! a fifth longer than a few at a time (BENCHMARKS.md). So a few are made at a time, in the order in which they are wanted.

use std::pin::pin;
use std::time::Duration;

use tokio::sync::Semaphore;

/// How many are made at once, of each processor.
const OF_EACH_PROCESSOR: u32 = 3;

/// How long one that is being made keeps its slot. What takes longer waits for something else than a processor, such as a
/// network plugin whose server does not answer, and keeps no other pod back.
const HOLDS_FOR: Duration = Duration::from_secs(1);

/// The slots of a node.
#[derive(Debug)]
pub struct SandboxSlots(Semaphore);

impl SandboxSlots {
    /// As many as suit so many processors.
    #[must_use]
    pub fn for_processors(count: u32) -> SandboxSlots {
        SandboxSlots(Semaphore::new(
            count.max(1).saturating_mul(OF_EACH_PROCESSOR) as usize,
        ))
    }

    /// Carries out `make` as soon as there is a slot.
    pub async fn one_of<F: Future>(&self, make: F) -> F::Output {
        // The semaphore is never closed; without a slot it would only be slower.
        let slot = self.0.acquire().await.ok();
        let mut make = pin!(make);
        match tokio::time::timeout(HOLDS_FOR, &mut make).await {
            Ok(made) => made,
            Err(_) => {
                drop(slot);
                make.await
            }
        }
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
    async fn a_few_are_made_at_a_time_in_their_order() {
        let slots = SandboxSlots::for_processors(2);
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let begun = Instant::now();
        let make = |i: u64| {
            let (now, most) = (&now, &most);
            slots.one_of(async move {
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
    async fn what_hangs_keeps_no_other_back_for_long() {
        let slots = Arc::new(SandboxSlots::for_processors(1));
        for _ in 0..3 {
            let slots = Arc::clone(&slots);
            tokio::spawn(async move { slots.one_of(std::future::pending::<()>()).await });
        }
        tokio::task::yield_now().await;
        let begun = Instant::now();
        slots.one_of(std::future::ready(())).await;
        assert_eq!(begun.elapsed().as_millis() / 10, 100);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_given_up_leaves_its_slot() {
        let slots = SandboxSlots::for_processors(1);
        for _ in 0..3 {
            let hangs = slots.one_of(std::future::pending::<()>());
            let given_up = tokio::time::timeout(Duration::from_millis(10), hangs).await;
            assert!(given_up.is_err());
        }
        let begun = Instant::now();
        slots.one_of(std::future::ready(())).await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }
}
