//! The Node object: the agent does not know it at its start, and it may be deleted.

use std::time::Duration;

use super::simulate;
use super::world::World;

async fn seconds(number: u64) {
    tokio::time::sleep(Duration::from_secs(number)).await;
}

/// Regression: a restarted agent admitted pods without the Node's labels, taints and extended resources.
#[test]
fn api_pods_wait_for_the_node_object_and_static_pods_do_not() {
    simulate(1, async {
        let world = World::new(1);
        world.freeze(true);
        let agent = world.start_agent();
        world.create_steady_pod("late");
        world.add_manifest();
        seconds(20).await;
        let late = world.uid("late");
        assert_eq!(world.sandbox_requests(&late), 0);
        assert_eq!(world.sandboxes(), 1, "only the sandbox of the static pod");
        world.freeze(false);
        seconds(20).await;
        assert_eq!(world.phase("late").unwrap_or_default().0, "Running");
        assert_eq!(world.broken(), Ok(()));
        agent.abort();
        world.end();
    });
}

/// A status in which only heartbeats differ is written every 5 minutes (`nodeStatusReportFrequency`),
/// up to half of it earlier. Regression: the simulated API stored the directive `$patch: replace` as an
/// address, so that every status differed.
#[test]
fn the_status_of_an_idle_node_is_written_every_five_minutes() {
    simulate(1, async {
        let world = World::new(1);
        let agent = world.start_agent();
        seconds(60).await;
        let before = world.status_writes();
        seconds(1800).await;
        let writes = world.status_writes() - before;
        assert!((4..=12).contains(&writes), "{writes} writes in 30 minutes");
        assert_eq!(world.broken(), Ok(()));
        agent.abort();
        world.end();
    });
}

/// The Node is deleted, and the control plane removes a pod that does not stop; its controller may start
/// a replacement elsewhere. The agent must not register the node again while the removed pod runs.
#[test]
fn a_deleted_node_is_registered_again_after_its_removed_pods_stop() {
    for hangs in [false, true] {
        simulate(1, async {
            let world = World::new(1);
            let agent = world.start_agent();
            world.create_steady_pod("removed");
            world.create_steady_pod("kept");
            seconds(20).await;
            let removed = world.uid("removed");
            if hangs {
                world.hang_calls_of(&removed);
            }
            world.delete_node();
            world.remove_by_force("removed");
            seconds(55).await;
            assert_eq!(world.registrations(), 0, "within a minute");
            seconds(25).await;
            if hangs {
                assert_eq!(world.registrations(), 0, "its pod is still running");
                world.release_calls();
                seconds(60).await;
            }
            assert_eq!(world.registrations(), 1);
            assert!(world.has_node());
            assert_eq!(world.phase("kept").unwrap_or_default().0, "Running");
            assert_eq!(world.broken(), Ok(()));
            agent.abort();
            world.end();
        });
    }
}
