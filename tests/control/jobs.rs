//! Jobs: their API, and the controllers with only a control plane. No agent runs: the test writes how pods end.

use std::path::Path;
use std::time::Duration;

use holdfast_kubeapi::client::connect;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::server::{MERGE, Server};

const JOBS: &str = "/apis/batch/v1/namespaces/default/jobs";

fn template() -> Value {
    json!({"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i:1"}]}})
}

/// A job with some fields of its spec.
pub fn job(name: &str, fields: Value) -> Value {
    let mut spec = json!({"template": template()});
    let map = spec.as_object_mut().unwrap();
    map.extend(fields.as_object().unwrap().clone());
    json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec})
}

#[tokio::test]
async fn a_job_gets_defaults_a_selector_and_labels_for_it() {
    let server = Server::new().await;
    let made = server.ok("POST", JOBS, &job("j", json!({}))).await;
    let uid = &made["metadata"]["uid"];
    let labels = json!({"batch.kubernetes.io/controller-uid": uid, "controller-uid": uid,
        "batch.kubernetes.io/job-name": "j", "job-name": "j"});
    assert_eq!(made["spec"]["template"]["metadata"]["labels"], labels);
    assert_eq!(made["metadata"]["labels"], labels);
    assert_eq!(
        made["spec"]["selector"],
        json!({"matchLabels": {"batch.kubernetes.io/controller-uid": uid}})
    );
    for (key, value) in [
        ("completions", json!(1)),
        ("parallelism", json!(1)),
        ("backoffLimit", json!(6)),
        ("completionMode", json!("NonIndexed")),
        ("suspend", json!(false)),
        ("podReplacementPolicy", json!("TerminatingOrFailed")),
        ("manualSelector", json!(false)),
    ] {
        assert_eq!(made["spec"][key], value, "{key}");
    }
    let queue = json!({"parallelism": 3, "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "A"}]}]}});
    let queue = server.ok("POST", JOBS, &job("queue", queue)).await;
    assert_eq!(queue["spec"].get("completions"), None);
    assert_eq!(queue["spec"]["podReplacementPolicy"], "Failed");
    let pattern = "/spec/podFailurePolicy/rules/0/onPodConditions/0/status";
    assert_eq!(queue.pointer(pattern), Some(&json!("True")));
    let indexed = json!({"completions": 2, "completionMode": "Indexed", "backoffLimitPerIndex": 1});
    let indexed = server.ok("POST", JOBS, &job("indexed", indexed)).await;
    assert_eq!(indexed["spec"]["backoffLimit"], i32::MAX);
    let warned = server.call("POST", JOBS, &job("a.b", json!({}))).await;
    assert!(warned.warnings[0].contains("a DNS label is recommended"));
    let found = server
        .ok(
            "GET",
            &format!("{JOBS}?fieldSelector=status.successful=0"),
            &Value::Null,
        )
        .await;
    assert_eq!(found["items"].as_array().unwrap().len(), 4);
}

/// The field that is rejected, and the fields of the spec with it. INDEXED stands for an indexed job of
/// three, CODES for the beginning of a rule about exit codes.
const REFUSED: &str = r#"
completions "completions": -1
parallelism "parallelism": -1
activeDeadlineSeconds "activeDeadlineSeconds": -1
ttlSecondsAfterFinished "ttlSecondsAfterFinished": -1
backoffLimitPerIndex "backoffLimitPerIndex": 1
completions "completionMode": "Indexed", "parallelism": 1
completionMode "completionMode": "Other"
parallelism INDEXED, "parallelism": 100001
maxFailedIndexes INDEXED, "backoffLimitPerIndex": 1, "maxFailedIndexes": 4
backoffLimitPerIndex INDEXED, "maxFailedIndexes": 1
maxFailedIndexes "completionMode": "Indexed", "completions": 100001, "backoffLimitPerIndex": 1
managedBy "managedBy": "nobody"
podReplacementPolicy "podReplacementPolicy": "Never"
selector "selector": {"matchLabels": {"a": "1"}}
selector "manualSelector": true
template.metadata.labels "manualSelector": true, "selector": {"matchLabels": {"a": "1"}}
template.spec.restartPolicy "template": {"spec": {"containers": [{"name": "c", "image": "i:1"}]}}
podFailurePolicy.rules[0].action "podFailurePolicy": {"rules": [{"action": "Other", CODES: {"operator": "In", "values": [1]}}]}
podFailurePolicy.rules[0].action "podFailurePolicy": {"rules": [{"action": "FailIndex", CODES: {"operator": "In", "values": [1]}}]}
podFailurePolicy.rules[0] "podFailurePolicy": {"rules": [{"action": "Count"}]}
podFailurePolicy.rules[0].onExitCodes.values "podFailurePolicy": {"rules": [{"action": "Count", CODES: {"operator": "In", "values": []}}]}
podFailurePolicy.rules[0].onExitCodes.values[0] "podFailurePolicy": {"rules": [{"action": "Count", CODES: {"operator": "In", "values": [0]}}]}
podFailurePolicy.rules[0].onExitCodes.values "podFailurePolicy": {"rules": [{"action": "Count", CODES: {"operator": "NotIn", "values": [2, 1]}}]}
podFailurePolicy.rules[0].onExitCodes.values[1] "podFailurePolicy": {"rules": [{"action": "Count", CODES: {"operator": "In", "values": [1, 1]}}]}
podFailurePolicy.rules[0].onExitCodes.operator "podFailurePolicy": {"rules": [{"action": "Count", CODES: {"operator": "", "values": [1]}}]}
successPolicy "successPolicy": {"rules": [{"succeededCount": 1}]}
successPolicy.rules[0] INDEXED, "successPolicy": {"rules": [{}]}
successPolicy.rules[0].succeededCount INDEXED, "successPolicy": {"rules": [{"succeededCount": 4}]}
successPolicy.rules[0].succeededIndexes INDEXED, "successPolicy": {"rules": [{"succeededIndexes": "0-3"}]}
successPolicy.rules[0].succeededCount INDEXED, "successPolicy": {"rules": [{"succeededIndexes": "0,2", "succeededCount": 3}]}"#;

#[tokio::test]
async fn an_invalid_job_is_refused_with_the_field() {
    let server = Server::new().await;
    for line in REFUSED.lines().skip(1) {
        let (field, fields) = line.split_once(' ').unwrap();
        let fields = fields
            .replace(
                "INDEXED",
                r#""completionMode": "Indexed", "completions": 3"#,
            )
            .replace("CODES", r#""onExitCodes""#);
        let fields = serde_json::from_str(&format!("{{{fields}}}")).unwrap();
        let reply = server.call("POST", JOBS, &job("j", fields)).await;
        assert_eq!(reply.code, 422, "{line}");
        let causes = reply.body["details"]["causes"].as_array().unwrap();
        let field = format!("spec.{field}");
        let reported = causes.iter().any(|c| c["field"] == field);
        assert!(reported, "{line}: {}", reply.body);
    }
    let indexed = json!({"completions": 11, "completionMode": "Indexed"});
    let long = server
        .call("POST", JOBS, &job(&"x".repeat(62), indexed))
        .await;
    assert_eq!(long.code, 422, "the names of the job's pods are too long");
    let both = json!({"manualSelector": true, "selector": {"matchLabels": {"a": "1"}}, "template": {"metadata": {"labels": {"a": "1"}}, "spec": template()["spec"]}});
    let own = server.ok("POST", JOBS, &job("own", both)).await;
    assert_eq!(
        own["spec"]["template"]["metadata"]["labels"],
        json!({"a": "1"})
    );
}

#[tokio::test]
async fn the_template_of_a_job_is_immutable() {
    let server = Server::new().await;
    server.ok("POST", JOBS, &job("j", json!({}))).await;
    let indexed = json!({"completions": 3, "parallelism": 3, "completionMode": "Indexed"});
    server.ok("POST", JOBS, &job("indexed", indexed)).await;
    server
        .ok("POST", JOBS, &job("idle", json!({"suspend": true})))
        .await;
    let spec = |spec: Value| json!({"spec": spec});
    let pods = |pods: Value| spec(json!({"template": {"spec": pods}}));
    let bigger = json!({"containers": [{"name": "c", "image": "i:1", "resources": {"requests": {"cpu": "1"}}}]});
    let other = json!({"containers": [{"name": "c", "image": "i:2"}]});
    for (name, patch, code) in [
        ("j", spec(json!({"parallelism": 2})), 200),
        (
            "j",
            spec(
                json!({"backoffLimit": 2, "activeDeadlineSeconds": 5, "ttlSecondsAfterFinished": 5, "suspend": false}),
            ),
            200,
        ),
        ("j", spec(json!({"completions": 2})), 422),
        ("j", spec(json!({"completionMode": "Indexed"})), 422),
        ("j", spec(json!({"selector": null})), 422),
        ("j", spec(json!({"managedBy": "a.b/c"})), 422),
        ("j", pods(json!({"nodeSelector": {"a": "b"}})), 422),
        ("j", pods(bigger.clone()), 422),
        ("indexed", spec(json!({"completions": 2})), 422),
        (
            "indexed",
            spec(json!({"completions": 2, "parallelism": 2})),
            200,
        ),
        ("indexed", spec(json!({"backoffLimitPerIndex": 2})), 422),
        (
            "idle",
            pods(json!({"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]})),
            200,
        ),
        (
            "idle",
            pods(
                json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}}),
            ),
            200,
        ),
        ("idle", pods(json!({"affinity": {"podAffinity": {}}})), 422),
        ("idle", pods(bigger), 200),
        ("idle", pods(other), 422),
        ("idle", spec(json!({"suspend": false})), 200),
        ("idle", pods(json!({"nodeSelector": null})), 422),
    ] {
        let reply = server
            .patch(&format!("{JOBS}/{name}"), MERGE, patch.clone())
            .await;
        assert_eq!(reply.code, code, "{name} {patch}: {}", reply.body);
    }
    let generation = server.ok("GET", &format!("{JOBS}/j"), &Value::Null).await;
    assert_eq!(generation["metadata"]["generation"], 3);
}

#[tokio::test]
async fn a_table_shows_the_progress_of_jobs() {
    let server = Server::new().await;
    for (name, spec, status, expected) in [
        ("a", json!({}), json!({}), json!(["Running", "0/1", ""])),
        (
            "b",
            json!({"parallelism": 3}),
            json!({"startTime": "2026-01-01T00:00:00Z", "succeeded": 1, "completionTime": "2026-01-01T00:02:05Z",
            "conditions": [{"type": "SuccessCriteriaMet", "status": "True"}, {"type": "Complete", "status": "True"}]}),
            json!(["Complete", "1/1 of 3", "2m5s"]),
        ),
        (
            "c",
            json!({"completions": 5, "suspend": true}),
            json!({"conditions": [{"type": "Suspended", "status": "True"}]}),
            json!(["Suspended", "0/5", ""]),
        ),
        (
            "d",
            json!({"parallelism": 1}),
            json!({"conditions": [{"type": "FailureTarget", "status": "True"}]}),
            json!(["FailureTarget", "0/1", ""]),
        ),
    ] {
        server.ok("POST", JOBS, &job(name, spec)).await;
        let patch = json!({"status": status});
        let reply = server
            .patch(&format!("{JOBS}/{name}/status"), MERGE, patch)
            .await;
        assert_eq!(reply.code, 200, "{}", reply.body);
        let mut request = Server::request("GET", &format!("{JOBS}/{name}"), "", vec![]);
        request.accept = "application/json;as=Table;v=v1;g=meta.k8s.io".into();
        let table = server.send(request).await.body;
        let cells = table["rows"][0]["cells"].as_array().unwrap();
        assert_eq!(json!(&cells[1..4]), expected, "{name}");
        assert_eq!((&cells[5], &cells[6]), (&json!("c"), &json!("i:1")));
    }
}

/// The job, the field that is rejected, and the content of the status. START and END are times, DONE
/// the conditions of a complete job, IS one condition.
const WRITTEN: &str = r#"
j active "active": -1
j ready "active": 1, "ready": 2
j uncountedTerminatedPods.failed[0] "uncountedTerminatedPods": {"succeeded": ["a"], "failed": ["a"]}
j uncountedTerminatedPods.succeeded[0] "uncountedTerminatedPods": {"succeeded": [""]}
j completedIndexes "completedIndexes": "0"
j failedIndexes "failedIndexes": "0"
i completedIndexes "completedIndexes": "3"
i failedIndexes "completedIndexes": "0-1", "failedIndexes": "1"
i - "completedIndexes": "0-1", "failedIndexes": "2"
j completionTime "completionTime": END
j conditions "startTime": START, "completionTime": END, "conditions": [IS "Complete"}]
j completionTime "startTime": START, "conditions": DONE
j startTime "completionTime": END, "conditions": DONE
j completionTime "startTime": END, "completionTime": START, "conditions": DONE
j active "startTime": START, "completionTime": END, "active": 1, "conditions": DONE
j terminating "startTime": START, "completionTime": END, "terminating": 1, "conditions": DONE
j conditions "startTime": START, "conditions": [IS "Failed"}]
j conditions "conditions": [IS "SuccessCriteriaMet"}, IS "FailureTarget"}]
j - "startTime": START, "active": 1, "ready": 1, "failed": 1
j startTime "startTime": END
j failed "failed": 0
j uncountedTerminatedPods "active": 0, "ready": 0, "uncountedTerminatedPods": {"failed": ["a"]}, "completionTime": END, "conditions": DONE
j - "active": 0, "ready": 0, "succeeded": 1, "completionTime": END, "conditions": DONE
j succeeded "succeeded": 0
j completionTime "completionTime": START
j conditions "conditions": null, "completionTime": null
f - "startTime": START, "conditions": [IS "FailureTarget"}]
f - "conditions": [IS "FailureTarget"}, IS "Failed"}]
f conditions "conditions": [IS "FailureTarget"}]"#;

#[tokio::test]
async fn the_status_of_a_job_is_consistent_and_final() {
    let server = Server::new().await;
    let indexed = json!({"completions": 3, "completionMode": "Indexed", "backoffLimitPerIndex": 1});
    server.ok("POST", JOBS, &job("i", indexed)).await;
    server.ok("POST", JOBS, &job("j", json!({}))).await;
    server.ok("POST", JOBS, &job("f", json!({}))).await;
    for line in WRITTEN.lines().skip(1) {
        let (name, rest) = line.split_once(' ').unwrap();
        let (field, status) = rest.split_once(' ').unwrap();
        let status = status
            .replace("DONE", r#"[IS "SuccessCriteriaMet"}, IS "Complete"}]"#)
            .replace("IS ", r#"{"status": "True", "type": "#)
            .replace("START", r#""2026-01-01T00:00:00Z""#)
            .replace("END", r#""2026-01-01T00:01:00Z""#);
        let patch: Value = serde_json::from_str(&format!("{{\"status\": {{{status}}}}}")).unwrap();
        let url = format!("{JOBS}/{name}/status");
        let reply = server.patch(&url, MERGE, patch).await;
        let causes = reply.body["details"]["causes"].as_array();
        let reported = causes.into_iter().flatten();
        let mut reported = reported.filter_map(|c| c["field"].as_str());
        let fine = match field {
            "-" => reply.code == 200,
            field => reported.any(|f| f == format!("status.{field}")),
        };
        assert!(fine, "{line}: {}", reply.body);
    }
}

/// A control plane without nodes, which stops when dropped.
pub struct Plane {
    pub client: Client,
    runs: tokio::task::JoinHandle<anyhow::Result<()>>,
    _dir: tempfile::TempDir,
}

impl Drop for Plane {
    fn drop(&mut self) {
        self.runs.abort();
    }
}

async fn client(path: &Path) -> Client {
    for _ in 0..600 {
        if let Ok(client) = connect(path).await
            && client.apiserver_version().await.is_ok()
        {
            return client;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the control plane does not respond");
}

impl Plane {
    pub async fn start() -> Plane {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let dir = tempfile::tempdir().unwrap();
        let settings = holdfast_control::Settings {
            dir: dir.path().into(),
            bind: vec![],
            port: 0,
            advertise: [127, 0, 0, 1].into(),
            service_range: "10.96.0.0/16".parse().unwrap(),
            nodes: holdfast_control::join::NodeSettings::default(),
        };
        let runs = tokio::spawn(holdfast_control::run(settings));
        let client = client(&dir.path().join("controller-manager.kubeconfig")).await;
        Plane {
            client,
            runs,
            _dir: dir,
        }
    }

    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), "default")
    }

    pub async fn create<K>(&self, object: Value) -> K
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned
            + Serialize,
        K::DynamicType: Default,
    {
        let object = serde_json::from_value(object).unwrap();
        let api: Api<K> = self.api();
        api.create(&PostParams::default(), &object).await.unwrap()
    }

    /// Waits until `find` finds something.
    pub async fn wait<T, F: Future<Output = Option<T>>>(
        &self,
        what: &str,
        find: impl Fn() -> F,
    ) -> T {
        for _ in 0..600 {
            if let Some(found) = find().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("not in time: {what}");
    }

    async fn pods(&self) -> Vec<Pod> {
        let mut pods = self
            .api::<Pod>()
            .list(&ListParams::default())
            .await
            .unwrap()
            .items;
        pods.sort_by_key(|p| p.name_any());
        pods
    }

    /// Waits until so many pods without a terminal phase exist.
    pub async fn active(&self, count: usize) -> Vec<Pod> {
        let what = format!("{count} active pods");
        self.wait(&what, || async {
            let ended = |p: &Pod| {
                let phase = p.status.as_ref().and_then(|s| s.phase.clone());
                matches!(phase.as_deref(), Some("Succeeded" | "Failed"))
            };
            let mut pods = self.pods().await;
            pods.retain(|p| !ended(p));
            (pods.len() == count).then_some(pods)
        })
        .await
    }

    pub async fn finish_pod(&self, pod: &Pod, phase: &str, code: i32) {
        let now = jiff::Timestamp::now().to_string();
        let patch = json!({"status": {"phase": phase, "containerStatuses": [{"name": "c", "image": "i:1", "imageID": "", "ready": false,
            "restartCount": 0, "state": {"terminated": {"exitCode": code, "finishedAt": now}}}]}});
        let parameters = PatchParams::default();
        let patch = Patch::Merge(patch);
        let api = self.api::<Pod>();
        api.patch_status(&pod.name_any(), &parameters, &patch)
            .await
            .unwrap();
    }

    async fn condition(&self, name: &str, kind: &str) -> Job {
        self.wait(&format!("{kind} of {name}"), || async {
            let job = self.api::<Job>().get(name).await.unwrap();
            let conditions = job.status.as_ref().and_then(|s| s.conditions.as_ref());
            let is = conditions
                .is_some_and(|all| all.iter().any(|c| c.type_ == kind && c.status == "True"));
            is.then_some(job)
        })
        .await
    }

    /// Waits until events with these reasons about an object exist.
    pub async fn wait_for_events(&self, name: &str, reasons: &[&str]) {
        self.wait(&format!("events {reasons:?} of {name}"), || async {
            let events = self
                .api::<Event>()
                .list(&ListParams::default())
                .await
                .unwrap();
            let has = |reason: &&str| {
                events.items.iter().any(|e| {
                    e.involved_object.name.as_deref() == Some(name)
                        && e.reason.as_deref() == Some(reason)
                })
            };
            reasons.iter().all(has).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_jobs_pods_are_created_counted_and_released() {
    let plane = Plane::start().await;
    let fields = json!({"completions": 2, "parallelism": 2, "completionMode": "Indexed"});
    let made: Job = plane.create(job("j", fields)).await;
    let pods = plane.active(2).await;
    for (i, pod) in pods.iter().enumerate() {
        let index = i.to_string();
        assert!(pod.name_any().starts_with(&format!("j-{i}-")));
        assert_eq!(pod.finalizers(), ["batch.kubernetes.io/job-tracking"]);
        assert_eq!(pod.owner_references()[0].uid, made.uid().unwrap());
        assert_eq!(
            pod.labels()["batch.kubernetes.io/job-completion-index"],
            index
        );
        assert_eq!(
            pod.annotations()["batch.kubernetes.io/job-completion-index"],
            index
        );
        let spec = pod.spec.as_ref().unwrap();
        assert_eq!(spec.hostname, Some(format!("j-{i}")));
        let variable = &spec.containers[0].env.as_ref().unwrap()[0];
        assert_eq!(variable.name, "JOB_COMPLETION_INDEX");
    }
    plane.finish_pod(&pods[1], "Succeeded", 0).await;
    plane
        .wait("one pod to be counted", || async {
            let status = plane.api::<Job>().get("j").await.unwrap().status?;
            (status.completed_indexes.as_deref() == Some("1") && status.active == Some(1))
                .then_some(())
        })
        .await;
    plane.finish_pod(&pods[0], "Succeeded", 0).await;
    let status = plane.condition("j", "Complete").await.status.unwrap();
    assert_eq!(
        (status.succeeded, status.active, status.failed),
        (Some(2), None, None)
    );
    assert_eq!(status.completed_indexes.as_deref(), Some("0,1"));
    assert!(status.completion_time >= status.start_time);
    assert!(plane.pods().await.iter().all(|p| p.finalizers().is_empty()));
    plane
        .wait_for_events("j", &["SuccessfulCreate", "Completed"])
        .await;
    plane
        .api::<Job>()
        .delete("j", &DeleteParams::background())
        .await
        .unwrap();
    plane
        .wait("the pods to be deleted", || async {
            plane.pods().await.is_empty().then_some(())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_fails_is_suspended_and_resumes() {
    let plane = Plane::start().await;
    plane
        .create::<Job>(job(
            "f",
            json!({"backoffLimit": 0, "ttlSecondsAfterFinished": 3}),
        ))
        .await;
    let pods = plane.active(1).await;
    plane.finish_pod(&pods[0], "Failed", 1).await;
    let status = plane.condition("f", "Failed").await.status.unwrap();
    let reasons: Vec<_> = status
        .conditions
        .iter()
        .flatten()
        .map(|c| (c.type_.as_str(), c.reason.as_deref().unwrap()))
        .collect();
    assert_eq!(
        reasons,
        [
            ("FailureTarget", "BackoffLimitExceeded"),
            ("Failed", "BackoffLimitExceeded")
        ]
    );
    assert_eq!(status.failed, Some(1));
    plane.wait_for_events("f", &["BackoffLimitExceeded"]).await;
    plane
        .wait("the deletion after the job's ttl", || async {
            let gone = plane.api::<Job>().get_opt("f").await.unwrap().is_none();
            (gone && plane.pods().await.is_empty()).then_some(())
        })
        .await;

    plane
        .create::<Job>(job(
            "s",
            json!({"suspend": true, "activeDeadlineSeconds": 3}),
        ))
        .await;
    plane.condition("s", "Suspended").await;
    assert!(plane.pods().await.is_empty());
    let resume = Patch::Merge(json!({"spec": {"suspend": false}}));
    let parameters = PatchParams::default();
    plane
        .api::<Job>()
        .patch("s", &parameters, &resume)
        .await
        .unwrap();
    plane.active(1).await;
    let late = plane.condition("s", "Failed").await.status.unwrap();
    assert_eq!(
        late.conditions.unwrap().last().unwrap().reason.as_deref(),
        Some("DeadlineExceeded")
    );
    plane
        .wait_for_events("s", &["Suspended", "Resumed", "DeadlineExceeded"])
        .await;
    assert!(plane.pods().await.is_empty(), "running pods are deleted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pods_of_a_job_are_orphaned_by_default() {
    let plane = Plane::start().await;
    plane.create::<Job>(job("j", json!({}))).await;
    let before = plane.active(1).await;
    plane
        .api::<Job>()
        .delete("j", &DeleteParams::default())
        .await
        .unwrap();
    let free = plane
        .wait("the pod without an owner", || async {
            let pods = plane.pods().await;
            let free = |p: &Pod| p.owner_references().is_empty() && p.finalizers().is_empty();
            pods.iter().all(free).then_some(pods)
        })
        .await;
    assert_eq!(free[0].uid(), before[0].uid());
    plane
        .wait("the job to be deleted", || async {
            let job = plane.api::<Job>().get_opt("j").await.unwrap();
            job.is_none().then_some(())
        })
        .await;
    // A job whose selector matches the pod adopts it.
    let uid = before[0].labels()["controller-uid"].clone();
    let labels = json!({"controller-uid": uid});
    let adopting = json!({"manualSelector": true, "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": template()["spec"]}});
    let other: Job = plane.create(job("other", adopting)).await;
    plane
        .wait("the pod to be adopted", || async {
            let pods = plane.pods().await;
            let owned = |p: &Pod| {
                p.owner_references()
                    .iter()
                    .any(|o| Some(&o.uid) == other.uid().as_ref())
            };
            (owned(&pods[0]) && pods[0].finalizers().len() == 1).then_some(())
        })
        .await;
    assert_eq!(plane.active(1).await[0].uid(), before[0].uid());
}
