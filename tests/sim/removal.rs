//! Pods whose object is removed while they run.

use std::time::Duration;

use super::simulate;
use super::world::World;

/// `kubectl delete --force`, also after `kubectl delete`: whichever revisions the watch delivers, the
/// pod has no grace period left, and its hanging hooks are cancelled.
#[test]
fn a_forced_deletion_stops_a_pod_soon() {
    for seed in 1..20 {
        simulate(seed, async {
            let world = World::new(seed);
            let agent = world.start_agent();
            world.create_stubborn_pod("p");
            tokio::time::sleep(Duration::from_secs(5)).await;
            assert_eq!(world.not_in_phase("Running"), Vec::<String>::new());
            world.remove_stubborn_pod("p").await;
            assert_eq!(world.broken(), Ok(()), "seed {seed}");
            assert_eq!(world.check_stopped(), Ok(()), "seed {seed}");
            tokio::time::sleep(Duration::from_secs(5)).await;
            assert_eq!(world.check_empty(), Ok(()), "seed {seed}");
            agent.abort();
        });
    }
}

/// A pod that was removed while no agent ran is known only from the runtime. Its containers have a
/// grace period of one second (upstream's `HandlePodCleanups`), raised to the minimum of two.
#[test]
fn a_pod_known_only_to_the_runtime_is_stopped_soon() {
    for seed in 1..7 {
        simulate(seed, async {
            let world = World::new(seed);
            let mut agent = world.start_agent();
            world.create_stubborn_pod("p");
            tokio::time::sleep(Duration::from_secs(5)).await;
            world.kill_agent();
            agent.abort();
            world.remove_by_force("p");
            agent = world.start_agent();
            tokio::time::sleep(Duration::from_secs(8)).await;
            assert_eq!(world.check_stopped(), Ok(()), "seed {seed}");
            assert_eq!(world.broken(), Ok(()), "seed {seed}");
            agent.abort();
        });
    }
}
