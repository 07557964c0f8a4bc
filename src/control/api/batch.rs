//! The kinds of batch/v1: defaults, the generated selector, and table columns (`pkg/apis/batch/v1/defaults.go`,
//! `pkg/registry/batch/job/strategy.go`). Validation is in `validate::batch`.

use serde_json::{Value, json};

use super::columns;
use super::defaults::pod::template;
use super::object::{at, entry, list, meta, set_default, text};

/// Labels on a job's pods with its name: the current label, and the older one without a prefix.
pub(crate) const NAME_LABELS: [&str; 2] = ["batch.kubernetes.io/job-name", "job-name"];
/// Labels on a job's pods with its uid: the current label, which the selector uses, and the older one.
pub(crate) const UID_LABELS: [&str; 2] = ["batch.kubernetes.io/controller-uid", "controller-uid"];
/// Warning for a DELETE without a propagation policy.
pub(crate) const ORPHANS: &str = "child pods are preserved by default when jobs are deleted; set propagationPolicy=Background to remove them or set propagationPolicy=Orphan to suppress this warning";

/// Fills in the defaults of a kind.
pub(super) fn defaults(kind: &str, object: &mut Value) {
    if kind == "CronJob" {
        entry(object, "spec");
        cron_defaults(&mut object["spec"]);
    }
    if kind == "Job" {
        entry(object, "spec");
        job_defaults(&mut object["spec"]);
        let labels = at(object, &["spec", "template", "metadata", "labels"]).cloned();
        let own = at(object, &["metadata", "labels"]).and_then(Value::as_object);
        if let (Some(labels), true) = (labels, own.is_none_or(serde_json::Map::is_empty)) {
            meta(object).insert("labels".into(), labels);
        }
    }
}

/// Defaults the fields of a CronJob. The job template's own defaults are applied when a job is created from it.
fn cron_defaults(spec: &mut Value) {
    set_default(spec, "concurrencyPolicy", json!("Allow"));
    set_default(spec, "suspend", json!(false));
    set_default(spec, "successfulJobsHistoryLimit", json!(3));
    set_default(spec, "failedJobsHistoryLimit", json!(1));
    entry(spec, "jobTemplate");
    meta(&mut spec["jobTemplate"]);
    entry(&mut spec["jobTemplate"], "spec");
    template_defaults(&mut spec["jobTemplate"]["spec"]);
}

fn job_defaults(spec: &mut Value) {
    if at(spec, &["completions"]).is_none() && at(spec, &["parallelism"]).is_none() {
        spec["completions"] = json!(1);
    }
    set_default(spec, "parallelism", json!(1));
    let limit = match at(spec, &["backoffLimitPerIndex"]) {
        Some(_) => i32::MAX,
        None => 6,
    };
    set_default(spec, "backoffLimit", json!(limit));
    set_default(spec, "completionMode", json!("NonIndexed"));
    set_default(spec, "suspend", json!(false));
    let replace = match at(spec, &["podFailurePolicy"]) {
        Some(_) => "Failed",
        None => "TerminatingOrFailed",
    };
    set_default(spec, "podReplacementPolicy", json!(replace));
    set_default(spec, "manualSelector", json!(false));
    template_defaults(spec);
}

/// The defaults that jobs and job templates share: the pod template, and the conditions of a failure policy.
fn template_defaults(spec: &mut Value) {
    let rules = spec
        .pointer_mut("/podFailurePolicy/rules")
        .and_then(Value::as_array_mut);
    for rule in rules.into_iter().flatten() {
        let conditions = rule
            .get_mut("onPodConditions")
            .and_then(Value::as_array_mut);
        for condition in conditions.into_iter().flatten() {
            set_default(condition, "status", json!("True"));
        }
    }
    template(spec);
}

/// Generates a new job's selector and the matching pod labels, unless `manualSelector` is set. Existing labels are
/// kept; if they differ, validation rejects them.
pub(super) fn generate_selector(job: &mut Value) {
    if job["spec"]["manualSelector"] == true || !job["spec"].is_object() {
        return;
    }
    let (name, uid) = (
        super::object::name(job).to_owned(),
        super::object::uid(job).to_owned(),
    );
    let spec = &mut job["spec"];
    entry(spec, "template");
    let labels = entry(entry_value(&mut spec["template"], "metadata"), "labels");
    for (keys, value) in [(NAME_LABELS, &name), (UID_LABELS, &uid)] {
        for key in keys {
            labels.entry(key).or_insert(value.as_str().into());
        }
    }
    entry(spec, "selector");
    let selected = entry(&mut spec["selector"], "matchLabels");
    selected.entry(UID_LABELS[0]).or_insert(uid.into());
}

fn entry_value<'a>(object: &'a mut Value, key: &str) -> &'a mut Value {
    entry(object, key);
    &mut object[key]
}

/// Warnings for the client that creates a job or a CronJob.
pub(super) fn warnings(kind: &str, object: &Value) -> Vec<String> {
    let name = super::object::name(object);
    if !matches!(kind, "Job" | "CronJob") || super::labels::is_label(name) {
        return vec![];
    }
    vec![format!(
        "metadata.name: this is used in Pod names and hostnames, which can result in surprising behavior; a DNS label is recommended: [{}]",
        super::labels::LABEL
    )]
}

/// Whether a condition of a job is true.
#[must_use]
pub(crate) fn has_condition(job: &Value, kind: &str) -> bool {
    list(job, &["status", "conditions"])
        .iter()
        .any(|c| c["type"] == kind && c["status"] == "True")
}

/// The columns of a kind's table.
pub(super) fn columns(kind: &str) -> Option<&'static [columns::Column]> {
    Some(match kind {
        "Job" => &[
            columns::NAME,
            ("Status", "string", 0),
            ("Completions", "string", 0),
            ("Duration", "string", 0),
            columns::AGE,
            ("Containers", "string", 1),
            ("Images", "string", 1),
            ("Selector", "string", 1),
        ],
        "CronJob" => &[
            columns::NAME,
            ("Schedule", "string", 0),
            ("Timezone", "string", 0),
            ("Suspend", "boolean", 0),
            ("Active", "integer", 0),
            ("Last Schedule", "string", 0),
            columns::AGE,
            ("Containers", "string", 1),
            ("Images", "string", 1),
            ("Selector", "string", 1),
        ],
        _ => return None,
    })
}

/// The cells of a CronJob's row.
pub(super) fn cron_cells(object: &Value, age: &str, now: jiff::Timestamp) -> Vec<Value> {
    let spec = |key: &str| text(object, &["spec", key]).unwrap_or("<none>");
    let last = text(object, &["status", "lastScheduleTime"]);
    let last = last.map_or_else(|| "<none>".into(), |t| columns::age_of(Some(t), now));
    let suspended = at(object, &["spec", "suspend"]).and_then(Value::as_bool);
    let suspended = match suspended {
        Some(true) => "True",
        Some(false) => "False",
        None => "<unset>",
    };
    let (containers, images, selector) = columns::workload(&object["spec"]["jobTemplate"]);
    vec![
        super::object::name(object).into(),
        spec("schedule").into(),
        spec("timeZone").into(),
        suspended.into(),
        list(object, &["status", "active"]).len().into(),
        last.into(),
        age.into(),
        containers,
        images,
        selector,
    ]
}

/// The cells of a job's row.
pub(super) fn cells(object: &Value, age: &str, now: jiff::Timestamp) -> Vec<Value> {
    let name = super::object::name(object);
    let (containers, images, selector) = columns::workload(object);
    vec![
        name.into(),
        status(object).into(),
        completions(object).into(),
        duration(object, now).into(),
        age.into(),
        containers,
        images,
        selector,
    ]
}

fn status(job: &Value) -> &'static str {
    let first = |kinds: &[&'static str]| {
        let mut kinds = kinds.iter().copied();
        kinds.find(|kind| has_condition(job, kind))
    };
    match first(&["Complete", "Failed"]) {
        Some(finished) => finished,
        None if super::object::is_deleting(job) => "Terminating",
        None => first(&["Suspended", "FailureTarget", "SuccessCriteriaMet"]).unwrap_or("Running"),
    }
}

fn completions(job: &Value) -> String {
    let number = |path: &[&str]| at(job, path).and_then(Value::as_i64);
    let done = number(&["status", "succeeded"]).unwrap_or(0);
    match (
        number(&["spec", "completions"]),
        number(&["spec", "parallelism"]),
    ) {
        (Some(wanted), _) => format!("{done}/{wanted}"),
        (None, Some(parallel)) if parallel > 1 => format!("{done}/1 of {parallel}"),
        _ => format!("{done}/1"),
    }
}

fn duration(job: &Value, now: jiff::Timestamp) -> String {
    let time = |key: &str| text(job, &["status", key])?.parse::<jiff::Timestamp>().ok();
    match time("startTime") {
        None => String::new(),
        Some(start) => {
            let end = time("completionTime").unwrap_or(now);
            columns::duration(end.as_second() - start.as_second())
        }
    }
}
