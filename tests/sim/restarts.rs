//! Containers that restart or must not, and faults that must not block them.

use std::time::Duration;

use super::simulate;
use super::world::World;

/// A Job's container has succeeded when the sandbox of its pod is stopped by hand and replaced. The
/// container must not run again.
#[test]
fn a_succeeded_container_does_not_run_again_in_a_new_sandbox() {
    for seed in 1..=6 {
        simulate(seed, async {
            let world = World::new(seed);
            let agent = world.start_agent();
            world.create_pod_that_does_a_part("job", "1");
            tokio::time::sleep(Duration::from_secs(5)).await;
            world.complete_container("job", "c0");
            tokio::time::sleep(Duration::from_secs(60)).await;
            for round in 0..3 {
                world.stop_sandbox_by_hand("job").await;
                tokio::time::sleep(Duration::from_secs(600)).await;
                let starts = world.starts_of("job", "c1");
                assert!(starts >= 2 + round, "seed {seed}: {starts}");
                assert_eq!(world.starts_of("job", "c0"), 1, "seed {seed}");
                assert_eq!(world.in_phase("Running"), ["job"], "seed {seed}");
            }
            world.complete("job");
            tokio::time::sleep(Duration::from_secs(10)).await;
            assert_eq!(world.in_phase("Succeeded"), ["job"], "seed {seed}");
            assert_eq!(world.broken(), Ok(()), "seed {seed}");
            agent.abort();
        });
    }
}

/// The RuntimeClass of a running pod was deleted, and its directories cannot be repaired, not even by a
/// restarted agent. The pod keeps working; only the creation of a new sandbox waits.
#[test]
fn failing_upkeep_does_not_block_a_running_pod() {
    for restarts in [false, true] {
        simulate(1, async {
            let world = World::new(1);
            let mut agent = world.start_agent();
            world.create_pod_with_objects("web", 2);
            world.set_runtime_class("web", "gone");
            tokio::time::sleep(Duration::from_secs(5)).await;
            assert_eq!(world.in_phase("Running"), ["web"]);
            world.fail_upkeep(true);
            if restarts {
                world.kill_agent();
                agent.abort();
                agent = world.start_agent();
            }
            tokio::time::sleep(Duration::from_secs(120)).await;
            world.change_all_objects();
            tokio::time::sleep(Duration::from_secs(5)).await;
            assert_eq!(world.volume_version("web", "m0").as_deref(), Some("2"));
            world.exit_some_container();
            tokio::time::sleep(Duration::from_secs(5)).await;
            assert_eq!(world.starts_of("web", "c0"), 2);
            assert_eq!(world.in_phase("Running"), ["web"]);
            let reasons = world.event_reasons("web");
            assert!(!reasons.contains("FailedCreatePodSandBox"), "{reasons:?}");
            world.stop_sandbox_by_hand("web").await;
            tokio::time::sleep(Duration::from_secs(30)).await;
            assert!(
                world
                    .event_reasons("web")
                    .contains("FailedCreatePodSandBox")
            );
            world.fail_upkeep(false);
            tokio::time::sleep(Duration::from_secs(30)).await;
            assert_eq!(world.in_phase("Running"), ["web"]);
            assert_eq!(world.broken(), Ok(()));
            agent.abort();
        });
    }
}

/// A network plugin hangs during RunPodSandbox. The pod's deletion waits as long as a sandbox usually
/// takes. A sandbox that the runtime creates later is removed, even if a finalizer keeps the object.
#[test]
fn a_deleted_pod_does_not_wait_for_a_hanging_network_plugin() {
    for seed in 1..=12 {
        simulate(seed, async {
            let world = World::new(seed);
            let agent = world.start_agent();
            tokio::time::sleep(Duration::from_secs(5)).await;
            world.hang_network(true);
            world.create_steady_pod("slow");
            if seed % 2 == 0 {
                world.put_finalizer("slow");
            }
            tokio::time::sleep(Duration::from_secs(5)).await;
            let uid = world.uid("slow");
            assert_eq!(world.sandbox_requests(&uid), 1, "seed {seed}");
            world.delete_pod("slow");
            tokio::time::sleep(Duration::from_secs(8)).await;
            match seed % 2 {
                0 => assert_eq!(world.in_phase("Failed"), ["slow"], "seed {seed}"),
                _ => assert_eq!(world.not_in_phase(""), Vec::<String>::new(), "seed {seed}"),
            }
            // Every 30 s the agent lists everything that the runtime has.
            tokio::time::sleep(Duration::from_secs(60)).await;
            assert_eq!(world.check_released(), Ok(()), "seed {seed}");
            assert_eq!(world.broken(), Ok(()), "seed {seed}");
            agent.abort();
        });
    }
}

/// A preStop hook that never returns runs until its container is killed, 2 s after the grace period. Meanwhile
/// readiness probes continue. Liveness probes stop, even those of sidecars, because no container of the pod restarts.
#[test]
fn during_a_pre_stop_hook_only_readiness_is_probed() {
    simulate(1, async {
        let world = World::new(1);
        let agent = world.start_agent();
        world.create_pod_that_stops_slowly("slow", 20);
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(world.http_requests("/s0") > 3 && world.http_requests("/c0") > 3);
        world.delete_pod("slow");
        tokio::time::sleep(Duration::from_secs(2)).await;
        let before = (world.http_requests("/s0"), world.http_requests("/c0"));
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(world.http_requests("/s0"), before.0);
        assert!(world.http_requests("/c0") >= before.1 + 9);
        assert_eq!(world.hooked_stops(), 0);
        tokio::time::sleep(Duration::from_secs(12)).await;
        assert_eq!(
            world.hooked_stops(),
            1,
            "the container is killed, but not its hook before"
        );
        assert_eq!(world.not_in_phase(""), Vec::<String>::new());
        assert_eq!(world.broken(), Ok(()));
        agent.abort();
    });
}

/// Whatever its restart policy, a pod whose container gets another image runs the new one: the exit of the instance that
/// the agent stopped completes no pod, also if the runtime is observed before the next instance starts.
#[test]
fn a_changed_image_restarts_a_container_of_any_policy() {
    for seed in 1..=12 {
        simulate(seed, async {
            let world = World::new(seed);
            let agent = world.start_agent();
            for policy in ["Always", "OnFailure", "Never"] {
                world.create_plain_pod(policy, policy);
            }
            tokio::time::sleep(Duration::from_secs(5)).await;
            for rounds in 1..=4 {
                for policy in ["Always", "OnFailure", "Never"] {
                    world.change_image(policy);
                }
                tokio::time::sleep(Duration::from_secs(60)).await;
                for policy in ["Always", "OnFailure", "Never"] {
                    let starts = world.starts_of(policy, "c0");
                    assert_eq!(starts, 1 + rounds, "seed {seed}, {policy}");
                }
                assert_eq!(world.not_in_phase("Running"), Vec::<String>::new());
            }
            assert_eq!(world.broken(), Ok(()), "seed {seed}");
            agent.abort();
        });
    }
}
