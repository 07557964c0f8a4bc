//! Shutdowns of the node.

use std::time::Duration;

use tokio::task::JoinHandle;

use super::simulate;
use super::world::{Logind, World};

/// Seconds since `since`.
fn seconds(since: tokio::time::Instant) -> u64 {
    since.elapsed().as_secs()
}

/// A shutdown from its announcement to the next boot. Pods with low priority stop first, each group within
/// its period. A pod that is being deleted gets no more time than its group. New pods are rejected.
async fn shut_down(seed: u64) {
    let world = World::new(seed);
    let logind = world.wait_for_pods(&[(2_000_000_000, 5), (0, 10), (1000, 20)]);
    let agent = world.start_agent();
    for (name, priority, grace) in [
        ("low", 0, 600),
        ("lower", -5, 3),
        ("leaving", 0, 900),
        ("middle", 1000, 8),
        ("high", 2_000_001_000, 30),
    ] {
        world.create_ranked_pod(name, priority, grace);
    }
    world.add_manifest();
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(world.not_in_phase("Running"), Vec::<String>::new());
    assert_eq!(logind.inhibitors(), (1, 1));
    // After a restart of logind the agent subscribes again and takes a new inhibitor lock.
    logind.restart();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(logind.inhibitors(), (1, 2));

    let uids = ["low", "lower", "leaving", "middle", "high"].map(|name| world.uid(name));
    world.delete_pod("leaving");
    let begun = tokio::time::Instant::now();
    logind.announce(true);
    tokio::time::sleep(Duration::from_millis(20)).await;
    world.create_steady_pod("late");
    while logind.inhibitors().0 > 0 {
        assert!(
            seconds(begun) < 40,
            "seed {seed}: the shutdown is delayed too long"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let ends: Vec<_> = uids.iter().map(|uid| world.lifetime_of(uid).1).collect();
    let first = ends[..3].iter().flatten().max();
    assert!(
        first <= ends[3].as_ref() && ends[3] <= ends[4] && ends[4].is_some(),
        "seed {seed}: {ends:?}"
    );
    for name in ["low", "lower", "middle", "high", "steady-node"] {
        let ended = Some(("Failed".to_owned(), "Terminated".to_owned()));
        assert_eq!(world.phase(name), ended, "seed {seed}: {name}");
    }
    let refused = Some(("Failed".to_owned(), "NodeShutdown".to_owned()));
    assert_eq!(world.phase("late"), refused, "seed {seed}");

    goes_on(seed, &world, &logind, agent).await;
    world.end();
}

/// After a shutdown: it was cancelled, or the machine boots.
async fn goes_on(seed: u64, world: &World, logind: &Logind, mut agent: JoinHandle<()>) {
    let runs = |name: &str| {
        world
            .phase(name)
            .is_some_and(|(phase, _)| phase == "Running")
    };
    if seed.is_multiple_of(2) {
        // After a cancelled shutdown the node works as before; only the stopped pods remain terminated.
        logind.announce(false);
        world.create_steady_pod("after");
    } else {
        world.power_off();
        agent.abort();
        logind.announce(false);
        tokio::time::sleep(Duration::from_secs(5)).await;
        agent = world.start_agent();
        world.create_steady_pod("after");
    }
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(runs("after") && runs("steady-node"), "seed {seed}");
    assert_eq!(logind.inhibitors().0, 1, "seed {seed}");
    for name in ["low", "lower", "middle", "high", "late"] {
        assert!(
            world
                .phase(name)
                .is_some_and(|(phase, _)| phase == "Failed")
        );
    }
    assert_eq!(world.phase("leaving"), None);
    assert_eq!(world.broken(), Ok(()), "seed {seed}");
    agent.abort();
}

#[test]
fn a_shutdown_waits_for_pods_by_priority_and_leaves_the_node_usable() {
    for seed in 1..=20 {
        simulate(seed, shut_down(seed));
    }
}

/// A shutdown waits for a pod that hangs only as long as its configured period.
#[test]
fn a_shutdown_does_not_wait_for_a_pod_that_never_terminates() {
    simulate(1, async {
        let world = World::new(1);
        let logind = world.wait_for_pods(&[(0, 10), (1000, 20)]);
        let agent = world.start_agent();
        world.create_ranked_pod("stuck", 0, 5);
        world.create_ranked_pod("next", 1000, 5);
        tokio::time::sleep(Duration::from_secs(10)).await;
        world.hang_calls_of(&world.uid("stuck"));
        let begun = tokio::time::Instant::now();
        logind.announce(true);
        tokio::time::sleep(Duration::from_secs(9)).await;
        let next = || world.phase("next").map(|(phase, _)| phase);
        assert_eq!(
            next().as_deref(),
            Some("Running"),
            "its phase has not started"
        );
        while logind.inhibitors().0 > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!((10..=17).contains(&seconds(begun)), "{}", seconds(begun));
        assert_eq!(next().as_deref(), Some("Failed"));
        agent.abort();
    });
}

/// A shutdown is announced after the agent has queried for one, but before the agent takes its
/// inhibitor lock. The agent stops the pods immediately.
#[test]
fn a_shutdown_before_the_inhibitor_lock_stops_pods_immediately() {
    simulate(1, async {
        let world = World::new(1);
        let logind = world.wait_for_pods(&[(0, 20)]);
        let agent = world.start_agent();
        world.create_ranked_pod("quick", 0, 5);
        tokio::time::sleep(Duration::from_secs(10)).await;
        logind.announce_late();
        logind.restart();
        // The agent subscribes again after a second.
        tokio::time::sleep(Duration::from_secs(2)).await;
        world.create_steady_pod("late");
        tokio::time::sleep(Duration::from_secs(20)).await;
        let of = |name: &str| world.phase(name).map(|(_, reason)| reason);
        assert_eq!(of("late").as_deref(), Some("NodeShutdown"));
        assert_eq!(of("quick").as_deref(), Some("Terminated"));
        agent.abort();
    });
}
