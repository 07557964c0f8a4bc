//! Static pods and their mirror pods.

use std::time::Duration;

use super::simulate;
use super::world::World;

/// Regression: each pod that was created or removed caused another DELETE of every mirror pod that
/// waits for a finalizer.
#[test]
fn a_mirror_that_waits_for_a_finalizer_is_deleted_once() {
    simulate(1, async {
        let world = World::new(1);
        let agent = world.start_agent();
        world.add_manifest();
        tokio::time::sleep(Duration::from_secs(10)).await;
        world.put_finalizer("steady-node");
        world.remove_all_manifests();
        tokio::time::sleep(Duration::from_secs(12)).await;
        for n in 0..10 {
            world.create_steady_pod(&format!("p{n}"));
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let mirror = world.object("steady-node");
        assert!(
            mirror["metadata"]["deletionTimestamp"].is_string(),
            "{mirror}"
        );
        assert_eq!(world.recent_calls("delete", "steady-node"), 1);
        world.drop_all_finalizers();
        assert_eq!(world.phase("steady-node"), None);
        agent.abort();
    });
}

/// The manifest of a static pod with a terminal phase changes, while the agent runs or is down.
#[test]
fn a_completed_static_pod_is_replaced_by_its_next_manifest() {
    for (seed, policy) in [
        (1, "Never"),
        (2, "OnFailure"),
        (3, "Never"),
        (4, "OnFailure"),
    ] {
        simulate(seed, async {
            let world = World::new(seed);
            let mut agent = world.start_agent();
            for version in 1..6 {
                world.set_manifest(version, policy);
                tokio::time::sleep(Duration::from_secs(15)).await;
                let is = |phase: &str| {
                    let expected = Some((phase.to_owned(), String::new()));
                    assert_eq!(world.phase("steady-node"), expected, "{version} {policy}");
                };
                is("Running");
                world.complete("steady-node");
                tokio::time::sleep(Duration::from_secs(15)).await;
                is("Succeeded");
                if version % 2 == 0 {
                    world.kill_agent();
                    agent.abort();
                    agent = world.start_agent();
                    tokio::time::sleep(Duration::from_secs(15 * (seed % 2))).await;
                }
            }
            assert_eq!(world.check_converged(), Ok(()));
            assert_eq!(world.broken(), Ok(()));
            agent.abort();
            world.end();
        });
    }
}

/// The agent is still cleaning up a static pod when its manifest returns with the same UID. The pod
/// starts when the cleanup is complete, however long that takes.
#[test]
fn a_static_pod_waits_for_the_cleanup_of_its_predecessor() {
    simulate(1, async {
        let world = World::new(1);
        let agent = world.start_agent();
        world.add_manifest();
        tokio::time::sleep(Duration::from_secs(15)).await;
        world.power_off_and_lose_runtime();
        agent.abort();
        world.remove_all_manifests();
        world.hang_calls_of("steady-v1");
        let agent = world.start_agent();
        tokio::time::sleep(Duration::from_secs(70)).await;
        world.add_manifest();
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(
            world.sandboxes(),
            0,
            "its directories are still being removed"
        );
        world.release_calls();
        tokio::time::sleep(Duration::from_secs(5)).await;
        let running = Some(("Running".to_owned(), String::new()));
        assert_eq!(world.phase("steady-node"), running);
        assert_eq!(world.check_converged(), Ok(()));
        assert_eq!(world.broken(), Ok(()));
        agent.abort();
    });
}

/// A static pod runs before its apiserver does. Its mirror pod is created as soon as the apiserver
/// answers, without waiting for a back-off.
#[test]
fn a_mirror_is_created_as_soon_as_the_api_answers() {
    for seed in 1..6 {
        simulate(seed, async {
            let world = World::new(seed);
            world.refuse(true);
            let agent = world.start_agent();
            world.add_manifest();
            tokio::time::sleep(Duration::from_secs(90 + seed)).await;
            assert_eq!(world.phase("steady-node"), None);
            let spent = world.creations("steady-node");
            assert!((4..=8).contains(&spent), "{spent} requests in a minute");
            world.refuse(false);
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert!(world.phase("steady-node").is_some(), "no mirror");
            tokio::time::sleep(Duration::from_secs(5)).await;
            assert_eq!(world.check_converged(), Ok(()));
            assert_eq!(world.broken(), Ok(()));
            agent.abort();
        });
    }
}

/// The manifest is removed and written again before the agent reads the directory: the pod stops and starts again
/// (upstream's e2e test for mirror pods, "should successfully recreate when file is removed and recreated").
#[test]
fn a_static_pod_whose_manifest_is_rewritten_restarts() {
    for seed in [1, 2, 3] {
        simulate(seed, async {
            let world = World::new(seed);
            let agent = world.start_agent();
            world.add_manifest();
            tokio::time::sleep(Duration::from_secs(15)).await;
            let mut before = world.object("steady-node");
            for restarts in 0..3 {
                let pod = world.object("steady-node");
                let status = &pod["status"]["containerStatuses"][0];
                assert_eq!(status["restartCount"], restarts, "seed {seed}: {pod}");
                assert!(status["state"]["running"].is_object(), "seed {seed}: {pod}");
                assert_eq!(pod["metadata"]["uid"], before["metadata"]["uid"]);
                let same =
                    before["status"]["containerStatuses"] == pod["status"]["containerStatuses"];
                assert_eq!(same, restarts == 0, "seed {seed}: {pod}");
                before = pod;
                world.rewrite_manifest("steady");
                tokio::time::sleep(Duration::from_secs(15)).await;
            }
            assert_eq!(world.broken(), Ok(()));
            agent.abort();
        });
    }
}
