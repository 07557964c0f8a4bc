//! Faults that last.

use std::time::Duration;

use super::simulate;
use super::world::World;

/// Retries of a lasting fault write no status: the requests of many broken pods would delay those of healthy pods.
#[test]
fn a_lasting_fault_causes_few_status_writes() {
    simulate(1, async {
        let world = World::new(1);
        let agent = world.start_agent();
        tokio::time::sleep(Duration::from_secs(5)).await;
        world.break_plugin(true);
        world.hang_remote(Duration::from_secs(3600), true);
        for n in 0..20 {
            world.create_steady_pod(&format!("p{n}"));
        }
        world.create_remote_pod("far");
        tokio::time::sleep(Duration::from_secs(70)).await;
        for minute in 0..5 {
            let writes = world.max_calls_for_a_pod("patch_status");
            assert!(writes <= 2, "minute {minute}: {writes}");
            let status = world.object("p0")["status"].to_string();
            assert!(
                status.contains("the pod's sandbox cannot be created"),
                "{status}"
            );
            assert!(!status.contains("failed to setup network"), "{status}");
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        assert!(world.has_event("p0", "FailedCreatePodSandBox"));
        world.break_plugin(false);
        world.resume_remote();
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(world.not_in_phase("Running"), Vec::<String>::new());
        agent.abort();
    });
}

#[test]
fn events_of_an_outage_are_posted_after_it() {
    simulate(1, async {
        let world = World::new(1);
        let agent = world.start_agent();
        world.create_steady_pod("p");
        tokio::time::sleep(Duration::from_secs(10)).await;
        world.cut_off_api(true);
        world.lose_some_sandbox();
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(!world.has_event("p", "SandboxChanged"));
        world.cut_off_api(false);
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert!(world.has_event("p", "SandboxChanged"));
        agent.abort();
    });
}

/// A runtime whose list calls hang may still send events.
#[test]
fn a_hanging_list_call_delays_no_event() {
    simulate(1, async {
        let world = World::new(1);
        let agent = world.start_agent();
        world.create_steady_pod("p");
        tokio::time::sleep(Duration::from_secs(5)).await;
        world.hang_lists(true);
        // By now the next list call hangs.
        tokio::time::sleep(Duration::from_secs(35)).await;
        world.exit_some_container();
        tokio::time::sleep(Duration::from_secs(3)).await;
        let pod = world.object("p");
        let status = &pod["status"]["containerStatuses"][0];
        assert_eq!(status["restartCount"], 1, "{pod}");
        agent.abort();
    });
}

/// Each conflict is answered with the object as it is now, without a pause: pauses that grow would delay the pod's readiness
/// for as long as the controller is busy.
#[test]
fn a_busy_controller_does_not_delay_statuses() {
    simulate(1, async {
        let world = World::new(1);
        let agent = world.start_agent();
        tokio::time::sleep(Duration::from_secs(5)).await;
        world.annotate_pods();
        world.create_steady_pod("p");
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(world.not_in_phase("Running"), Vec::<String>::new());
        agent.abort();
    });
}
