//! CronJobs: their API, and their controller with only a control plane.

use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::jobs::{Plane, job};
use crate::server::{MERGE, Server};

const CRONS: &str = "/apis/batch/v1/namespaces/default/cronjobs";

fn cron(name: &str, fields: Value) -> Value {
    let mut spec = json!({"schedule": "* * * * *", "jobTemplate": {"metadata": {"labels": {"a": "1"}}, "spec": job("x", json!({}))["spec"]}});
    let map = spec.as_object_mut().unwrap();
    map.extend(fields.as_object().unwrap().clone());
    json!({"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": name}, "spec": spec})
}

#[tokio::test]
async fn a_cron_job_gets_defaults_and_a_table_row() {
    let server = Server::new().await;
    let made = server
        .ok("POST", CRONS, &cron("c", json!({"timeZone": "Etc/UTC"})))
        .await;
    for (key, value) in [
        ("concurrencyPolicy", json!("Allow")),
        ("suspend", json!(false)),
        ("successfulJobsHistoryLimit", json!(3)),
        ("failedJobsHistoryLimit", json!(1)),
    ] {
        assert_eq!(made["spec"][key], value, "{key}");
    }
    let template = &made["spec"]["jobTemplate"]["spec"];
    assert_eq!(template["template"]["spec"]["dnsPolicy"], "ClusterFirst");
    assert_eq!(
        template.get("backoffLimit"),
        None,
        "only the created job gets a default"
    );
    let status = json!({"status": {"active": [{"name": "a"}], "lastScheduleTime": jiff::Timestamp::now().to_string()}});
    let url = format!("{CRONS}/c");
    server.patch(&format!("{url}/status"), MERGE, status).await;
    let mut request = Server::request("GET", &url, "", vec![]);
    request.accept = "application/json;as=Table;v=v1;g=meta.k8s.io".into();
    let table = server.send(request).await.body;
    let cells = table["rows"][0]["cells"].as_array().unwrap();
    assert_eq!(
        cells[..5],
        [
            json!("c"),
            json!("* * * * *"),
            json!("Etc/UTC"),
            json!("False"),
            json!(1)
        ]
    );
    assert!(cells[5].as_str().unwrap().ends_with('s'), "{table}");
    assert_eq!((&cells[7], &cells[8]), (&json!("c"), &json!("i:1")));
}

/// The field that is rejected, and the content of the spec. TEMPLATE stands for the beginning of a job's spec.
const REFUSED: &str = r#"
schedule "schedule": ""
schedule "schedule": "* * * *"
schedule "schedule": "TZ=UTC * * * * *"
timeZone "timeZone": ""
timeZone "timeZone": "Local"
timeZone "timeZone": "Europe/Atlantis"
timeZone "timeZone": "../etc/passwd"
concurrencyPolicy "concurrencyPolicy": "Sometimes"
startingDeadlineSeconds "startingDeadlineSeconds": -1
failedJobsHistoryLimit "failedJobsHistoryLimit": -1
jobTemplate.spec.selector TEMPLATE, "selector": {"matchLabels": {"a": "1"}}}}
jobTemplate.spec.manualSelector TEMPLATE, "manualSelector": true}}
jobTemplate.spec.parallelism TEMPLATE, "parallelism": -1}}
jobTemplate.spec.template.spec.restartPolicy TEMPLATE}}"#;

#[tokio::test]
async fn an_invalid_cron_job_is_refused_with_the_field() {
    let server = Server::new().await;
    let template = r#""jobTemplate": {"spec": {"template": {"spec": {"containers": [{"name": "c", "image": "i:1"}]}}"#;
    for line in REFUSED.lines().skip(1) {
        let (field, fields) = line.split_once(' ').unwrap();
        let fields = fields.replace("TEMPLATE", template);
        let fields = serde_json::from_str(&format!("{{{fields}}}")).unwrap();
        let reply = server.call("POST", CRONS, &cron("c", fields)).await;
        assert_eq!(reply.code, 422, "{line}");
        let causes = reply.body["details"]["causes"].as_array().unwrap();
        let field = format!("spec.{field}");
        let reported = causes.iter().any(|c| c["field"] == field);
        assert!(reported, "{line}: {}", reply.body);
    }
    let long = cron(&"x".repeat(53), json!({}));
    assert_eq!(server.call("POST", CRONS, &long).await.code, 422);
    server.ok("POST", CRONS, &cron("c", json!({}))).await;
    for (patch, code) in [
        (json!({"spec": {"timeZone": "Europe/Atlantis"}}), 422),
        (
            json!({"spec": {"timeZone": "Europe/Vienna", "schedule": "@hourly"}}),
            200,
        ),
    ] {
        let reply = server.patch(&format!("{CRONS}/c"), MERGE, patch).await;
        assert_eq!(reply.code, code, "{}", reply.body);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cron_job_creates_jobs_on_time_and_deletes_them() {
    let plane = Plane::start().await;
    let crons = plane.api::<CronJob>();
    let jobs = || async {
        plane
            .api::<Job>()
            .list(&ListParams::default())
            .await
            .unwrap()
            .items
    };
    let made: CronJob = plane
        .create(cron("c", json!({"concurrencyPolicy": "Forbid"})))
        .await;
    // As if the last run was two minutes ago.
    let before = jiff::Timestamp::now() - jiff::SignedDuration::from_secs(120);
    let patch = Patch::Merge(json!({"status": {"lastScheduleTime": before.to_string()}}));
    let parameters = PatchParams::default();
    crons.patch_status("c", &parameters, &patch).await.unwrap();
    let job = plane
        .wait("a job", || async { jobs().await.into_iter().next() })
        .await;
    assert_eq!(job.owner_references()[0].uid, made.uid().unwrap());
    assert_eq!(job.labels()["a"], "1");
    assert!(job.annotations()["batch.kubernetes.io/cronjob-scheduled-timestamp"].ends_with(":00Z"));
    let listed = plane
        .wait("the job in the status", || async {
            let status = crons.get("c").await.unwrap().status?;
            let last = status.last_schedule_time.filter(|t| t.0 > before)?;
            Some((status.active?.first()?.uid.clone(), last))
        })
        .await;
    assert_eq!(listed.0, job.uid());
    let minute = listed.1.0.as_second() / 60;
    assert_eq!(job.name_any(), format!("c-{minute}"));
    plane.wait_for_events("c", &["SuccessfulCreate"]).await;

    let suspend = Patch::Merge(json!({"spec": {"suspend": true}}));
    crons.patch("c", &parameters, &suspend).await.unwrap();
    let pods = plane.active(1).await;
    plane.finish_pod(&pods[0], "Succeeded", 0).await;
    plane
        .wait("the success in the status", || async {
            let status = crons.get("c").await.unwrap().status?;
            (status.active.is_none() && status.last_successful_time.is_some()).then_some(())
        })
        .await;
    plane.wait_for_events("c", &["SawCompletedJob"]).await;
    crons
        .delete("c", &DeleteParams::background())
        .await
        .unwrap();
    plane
        .wait("the jobs and pods to be deleted", || async {
            let pods = plane
                .api::<Pod>()
                .list(&ListParams::default())
                .await
                .unwrap()
                .items;
            (jobs().await.is_empty() && pods.is_empty()).then_some(())
        })
        .await;
}
