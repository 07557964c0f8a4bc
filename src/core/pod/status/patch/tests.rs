use super::*;

/// Other components may write a terminal status: the pod garbage collector, or a kubelet that managed the node before.
#[test]
fn a_terminal_status_in_the_api_is_not_overwritten() {
    let of = |phase: &str, reason: Option<&str>, message: Option<&str>| PodStatus {
        phase: Some(phase.into()),
        reason: reason.map(Into::into),
        message: message.map(Into::into),
        host_ip: Some(phase.into()),
        ..PodStatus::default()
    };
    let published = of("Failed", Some("Evicted"), None);
    let cases = [
        ("Running", None, None, false),
        ("Pending", None, None, false),
        ("Succeeded", None, None, true),
        ("Failed", None, None, true),
        ("Failed", Some("DeadlineExceeded"), Some("m"), true),
        ("Failed", Some("Evicted"), None, true),
    ];
    for (phase, reason, message, is_written) in cases {
        let wanted = of(phase, reason, message);
        let expected = PodStatus {
            phase: published.phase.clone(),
            reason: published.reason.clone(),
            message: None,
            ..wanted.clone()
        };
        let expected = is_written.then_some(expected);
        let allowed =
            allowed(&Pod::default(), &published, &wanted).map(std::borrow::Cow::into_owned);
        assert_eq!(allowed, expected, "{phase} {reason:?}");
        let lives = of("Running", None, None);
        let over_running = super::allowed(&Pod::default(), &lives, &wanted);
        assert_eq!(over_running.as_deref(), Some(&wanted), "{phase}");
    }
}

/// The apiserver rejects the whole status if a container leaves the terminated state for good.
#[test]
fn a_final_container_state_is_kept_and_the_rest_is_written() {
    let status = |state: Value, phase: &str| -> PodStatus {
        let container = json!({"name": "a", "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": state});
        let status = json!({"phase": phase, "containerStatuses": [container]});
        serde_json::from_value(status).expect("a status")
    };
    let exited = |code| status(json!({"terminated": {"exitCode": code}}), "Running");
    let rules = json!([{"action": "Restart", "exitCodes": {"operator": "In", "values": [3]}}]);
    let all =
        json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [9]}}]);
    for (policy, own, rules, code, is_kept) in [
        ("Always", None, None, 0, false),
        ("Always", Some("Never"), None, 0, true),
        ("OnFailure", None, None, 0, true),
        ("OnFailure", None, None, 1, false),
        ("OnFailure", Some("Always"), None, 0, false),
        ("Never", None, None, 1, true),
        ("Never", Some("Never"), Some(&rules), 3, false),
        ("Never", Some("Never"), Some(&rules), 4, true),
        ("Never", Some("Never"), Some(&all), 0, false),
    ] {
        let container = json!({"name": "a", "restartPolicy": own, "restartPolicyRules": rules});
        let pod = json!({"spec": {"restartPolicy": policy, "containers": [container]}});
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let wanted = status(json!({"running": {}}), "Pending");
        let written = allowed(&pod, &exited(code), &wanted).expect("a status");
        assert_eq!(written.phase.as_deref(), Some("Pending"));
        let statuses = match is_kept {
            true => exited(code).container_statuses,
            false => wanted.container_statuses.clone(),
        };
        assert_eq!(
            written.container_statuses, statuses,
            "{policy} {own:?} {code}"
        );
    }
}
