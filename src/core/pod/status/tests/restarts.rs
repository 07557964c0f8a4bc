//! Containers that the agent stops in order to restart them.

use super::*;

/// Between the exit of a stopped instance and the start of its replacement (a pull, a back-off) the container is never
/// reported as terminated: with `Never`, or `OnFailure` and code 0, an apiserver rejects every later status.
#[test]
fn a_container_stopped_to_be_restarted_is_not_terminated() {
    for policy in ["Always", "OnFailure", "Never"] {
        let pod = a_pod(policy, json!([]));
        let stopped: BTreeSet<String> = ["a0".to_owned()].into();
        for (ended, is_waiting) in [(false, true), (true, false)] {
            let (seen, none) = (vec![container("a", 0, Exited, 0)], PodStatus::default());
            let status = status_of_stopped(&pod, seen, &Problems::new(), ended, &none, &stopped);
            let of = &status.container_statuses.expect("a container")[0];
            let (state, last) = (of.state.as_ref(), of.last_state.as_ref());
            let reason = state.and_then(|s| s.waiting.as_ref()?.reason.as_deref());
            let expected = is_waiting.then_some("ContainerCreating");
            assert_eq!(reason, expected, "{policy} {ended}");
            let exit = last
                .and_then(|s| s.terminated.as_ref())
                .map(|t| t.exit_code);
            assert_eq!(exit, is_waiting.then_some(0), "{policy} {ended}");
            assert_eq!(of.restart_count, 0);
        }
    }
}

/// The runtime may be observed between the creation and the start of the next instance. The exit of the stopped instance
/// then completes no pod.
#[test]
fn a_created_instance_completes_no_pod() {
    for policy in ["Always", "OnFailure", "Never"] {
        let pod = a_pod(policy, json!([]));
        let seen = || {
            vec![
                container("a", 1, ContainerState::Created, 0),
                container("a", 0, Exited, 0),
            ]
        };
        let none = PodStatus::default();
        let phase = |ended| status(&pod, seen(), &Problems::new(), ended, &none).phase;
        assert_eq!(phase(false).as_deref(), Some("Running"), "{policy}");
        assert_eq!(phase(true).as_deref(), Some("Succeeded"), "{policy}");
        let ended = status(&pod, seen(), &Problems::new(), true, &none);
        let of = &ended.container_statuses.expect("a container")[0];
        let terminated = of.state.as_ref().and_then(|s| s.terminated.as_ref());
        assert_eq!(terminated.map(|t| t.exit_code), Some(0), "{policy}");
        assert_eq!(of.last_state, None, "{policy}");
    }
    // Without an earlier instance it is lost, as one without any instance.
    let created = vec![container("a", 0, ContainerState::Created, 0)];
    let pod = a_pod("Never", json!([]));
    let ended = status(&pod, created, &Problems::new(), true, &PodStatus::default());
    let of = &ended.container_statuses.expect("a container")[0];
    let terminated = of.state.as_ref().and_then(|s| s.terminated.as_ref());
    assert_eq!(terminated.map(|t| t.exit_code), Some(137));
}
