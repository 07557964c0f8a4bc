use super::*;
use serde_json::json;

fn rule(value: Value) -> Rule {
    serde_json::from_value(value).expect("a rule")
}

fn attributes<'a>(verb: &'a str, resource: &'a str, sub: &'a str, name: &'a str) -> Attributes<'a> {
    Attributes {
        verb,
        group: "",
        resource,
        sub,
        namespace: "n",
        name,
        on_node: "",
    }
}

#[test]
fn rules_allow_only_the_listed_verbs_and_resources() {
    let pods = rule(json!({"verbs": ["get", "list"], "apiGroups": [""], "resources": ["pods"]}));
    let logs = rule(json!({"verbs": ["get"], "apiGroups": [""], "resources": ["pods/log"]}));
    let scale = rule(json!({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*/scale"]}));
    let one = rule(
        json!({"verbs": ["get"], "apiGroups": [""], "resources": ["secrets"], "resourceNames": ["s"]}),
    );
    let all = rule(json!({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}));
    for (rule, attributes, expected) in [
        (&pods, attributes("get", "pods", "", "p"), true),
        (&pods, attributes("delete", "pods", "", "p"), false),
        (&pods, attributes("get", "pods", "log", "p"), false),
        (&logs, attributes("get", "pods", "log", "p"), true),
        (&logs, attributes("get", "pods", "", "p"), false),
        (
            &scale,
            attributes("patch", "deployments", "scale", "d"),
            true,
        ),
        (&scale, attributes("patch", "deployments", "", "d"), false),
        (&one, attributes("get", "secrets", "", "s"), true),
        (&one, attributes("get", "secrets", "", "t"), false),
        (&one, attributes("list", "secrets", "", ""), false),
        (&all, attributes("delete", "nodes", "proxy", "x"), true),
    ] {
        assert_eq!(
            rule.allows(&attributes),
            expected,
            "{rule:?} {attributes:?}"
        );
    }
    let paths = rule(json!({"verbs": ["get"], "nonResourceURLs": ["/metrics", "/api/*"]}));
    assert!(
        paths.allows_path("get", "/metrics")
            && paths.allows_path("get", "/api/v1")
            && !paths.allows_path("get", "/metrics/x")
    );
    assert!(
        !paths.allows_path("post", "/metrics") && !paths.allows(&attributes("get", "pods", "", ""))
    );
}

#[test]
fn subjects_are_users_groups_and_accounts() {
    let user = |name: &str| User {
        name: name.into(),
        groups: vec!["g".into()],
        ..User::default()
    };
    let is = |subject: Value, name: &str| {
        let subject: Subject = serde_json::from_value(subject).expect("a subject");
        let grant = Grant {
            namespace: Some("b".into()),
            rules: Arc::default(),
        };
        let mut grants = Grants::default();
        grants.add(grant, subject.holder(Some("b")).into_iter());
        grants.of(&user(name)).count() == 1
    };
    assert!(
        is(json!({"kind": "User", "name": "u"}), "u")
            && !is(json!({"kind": "User", "name": "u"}), "v")
    );
    assert!(
        is(json!({"kind": "Group", "name": "g"}), "u")
            && !is(json!({"kind": "Group", "name": "h"}), "u")
    );
    assert!(is(
        json!({"kind": "ServiceAccount", "name": "s", "namespace": "n"}),
        "system:serviceaccount:n:s"
    ));
    assert!(is(
        json!({"kind": "ServiceAccount", "name": "s"}),
        "system:serviceaccount:b:s"
    ));
    assert!(!is(
        json!({"kind": "ServiceAccount", "name": "s", "namespace": "n"}),
        "system:serviceaccount:m:s"
    ));
}

#[test]
fn invalid_roles_and_bindings_are_rejected_with_the_field() {
    let of = |kind: &str, object: Value| {
        let mut errors = vec![];
        validate(kind, &object, &mut errors);
        errors.into_iter().map(|e| e.field).collect::<Vec<_>>()
    };
    assert_eq!(
        of(
            "Role",
            json!({"rules": [{"verbs": ["get"], "nonResourceURLs": ["/x"]}]})
        ),
        ["rules[0].nonResourceURLs"]
    );
    assert_eq!(
        of("ClusterRole", json!({"rules": [{"resources": ["pods"]}]})),
        ["rules[0].verbs", "rules[0].apiGroups"]
    );
    assert_eq!(
        of(
            "ClusterRoleBinding",
            json!({"roleRef": {"kind": "Role"}, "subjects": [{"kind": "Robot", "name": "r"}]})
        ),
        ["roleRef.kind", "roleRef.name", "subjects[0].kind"]
    );
    for (plural, object) in bootstrap() {
        let kind = if plural == "clusterroles" {
            "ClusterRole"
        } else {
            "ClusterRoleBinding"
        };
        assert_eq!(of(kind, object.clone()), Vec::<String>::new(), "{object}");
    }
}

#[test]
fn aggregation_is_transitive() {
    let all = [
        json!({"metadata": {"name": "outer"}, "rules": [{"verbs": ["stale"]}], "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"to": "outer"}}]}}),
        json!({"metadata": {"name": "inner", "labels": {"to": "outer"}}, "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"to": "inner"}}, {"matchLabels": {"to": "outer"}}]}}),
        json!({"metadata": {"name": "leaf", "labels": {"to": "inner"}}, "rules": [{"verbs": ["get"]}]}),
        json!({"metadata": {"name": "other", "labels": {"to": "nobody"}}, "rules": [{"verbs": ["delete"]}]}),
    ];
    let verbs: Vec<String> = gathered(&all[0], &all)
        .into_iter()
        .flat_map(|r| r.verbs)
        .collect();
    assert_eq!(
        verbs,
        ["get"],
        "stale rules are dropped, and a cycle of aggregations terminates"
    );
}

#[test]
fn bootstrap_roles_of_older_clusters_are_reset_and_bindings_keep_added_subjects() {
    let ours = bootstrap();
    let (_, admin) = ours
        .iter()
        .find(|(_, o)| o["metadata"]["name"] == "system:aggregate-to-admin")
        .expect("the role");
    let mut old = admin.clone();
    old["rules"][3]["verbs"] = json!(["*"]);
    old["metadata"]["annotations"] = Value::Null;
    let new = renewed(&old, admin).expect("a change");
    assert_eq!(new["rules"], admin["rules"]);
    assert_eq!(renewed(&new, admin), None);
    old["metadata"]["annotations"] =
        json!({"rbac.authorization.kubernetes.io/autoupdate": "false"});
    assert_eq!(
        renewed(&old, admin),
        None,
        "autoupdate is disabled by the annotation"
    );
    let (_, binding) = ours.last().expect("a binding");
    let mut more = binding.clone();
    more["subjects"] = json!([{"kind": "User", "name": "own"}]);
    let new = renewed(&more, binding).expect("a change");
    assert_eq!(list(&new, &["subjects"]).len(), 2);
}
