//! Validation of batch/v1 (`pkg/apis/batch/validation/validation.go`).

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::{Errors, NOT_NEGATIVE, is_label, is_qualified, is_subdomain, pod};
use crate::api::batch::{self, NAME_LABELS, UID_LABELS};
use crate::api::error::FieldError;
use crate::api::object::{at, list, put, text};
use crate::api::selector::Selector;
use holdfast_core::indexes::Indexes;
use holdfast_core::schedule::Schedule;

const ACTIONS: [&str; 4] = ["Count", "FailIndex", "FailJob", "Ignore"];
const OPERATORS: [&str; 2] = ["In", "NotIn"];
const POLICIES: [&str; 3] = ["Allow", "Forbid", "Replace"];
const STATUSES: [&str; 3] = ["False", "True", "Unknown"];
/// Maximum number of rules in a list, and of patterns for pod conditions.
const MAX_RULES: usize = 20;
const MAX_EXIT_CODES: usize = 255;
/// Maximum parallelism of an indexed job, and maximum of `maxFailedIndexes`.
const MAX_INDEXES: i64 = 100_000;
/// The same limits for jobs with more than [`MAX_INDEXES`] completions and `backoffLimitPerIndex`.
const MAX_INDEXES_WITH_BACKOFF: i64 = 10_000;
const MAX_MANAGER_LENGTH: usize = 63;
const MAX_INDEXES_LENGTH: usize = 64 << 10;
/// Maximum length of a CronJob's name: the names of its jobs are eleven characters longer.
const MAX_CRON_NAME_LENGTH: usize = 52;

/// An invalid-value error that does not repeat the value.
pub(super) fn invalid_without_value(field: impl Into<String>, detail: &str) -> FieldError {
    FieldError {
        reason: "FieldValueInvalid",
        field: field.into(),
        detail: format!("Invalid value: {detail}"),
    }
}

fn number(object: &Value, key: &str) -> Option<i64> {
    at(object, &[key]).and_then(Value::as_i64)
}

pub(super) fn not_negative(object: &Value, path: &str, keys: &[&str], errors: &mut Errors) {
    for key in keys {
        if number(object, key).is_some_and(|n| n < 0) {
            let field = format!("{path}.{key}");
            errors.push(FieldError::invalid(field, &object[*key], NOT_NEGATIVE));
        }
    }
}

fn indexed(spec: &Value) -> bool {
    spec["completionMode"] == "Indexed"
}

/// Validates a job.
pub(super) fn job(job: &Value, errors: &mut Errors) {
    let spec = &job["spec"];
    generated(job, errors);
    job_spec(spec, "spec", errors);
    let labels = labels_of(spec);
    match at(spec, &["selector"]) {
        None => errors.push(FieldError::required("spec.selector", "")),
        Some(selector) => {
            if !Selector::of_object(selector).is_some_and(|s| s.matches_labels(&labels)) {
                errors.push(FieldError::invalid(
                    "spec.template.metadata.labels",
                    &spec["template"]["metadata"]["labels"],
                    "`selector` does not match template `labels`",
                ));
            }
        }
    }
    if let Some(last) = number(spec, "completions").filter(|n| *n > 0 && indexed(spec)) {
        let name = crate::api::object::name(job);
        let host = format!("{name}-{}", last - 1);
        if !is_label(&host) {
            errors.push(FieldError::invalid(
                "metadata.name",
                &name.into(),
                &format!("will not able to create pod with invalid DNS label: {host}"),
            ));
        }
    }
}

fn labels_of(spec: &Value) -> std::collections::BTreeMap<String, String> {
    let labels = at(spec, &["template", "metadata", "labels"]).and_then(Value::as_object);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let labels = labels.into_iter().flatten();
    labels.map(|(k, v)| (k.clone(), text(v))).collect()
}

/// Checks the generated selector and the matching pod labels.
fn generated(job: &Value, errors: &mut Errors) {
    use crate::api::object::{name, uid};
    let spec = &job["spec"];
    if spec["manualSelector"] == true || at(spec, &["selector"]).is_none() {
        return;
    }
    let labels = labels_of(spec);
    let mut expected = std::collections::BTreeMap::new();
    for (keys, value) in [(UID_LABELS, uid(job)), (NAME_LABELS, name(job))] {
        for key in keys {
            expected.insert(key.to_owned(), value.to_owned());
            let field = format!("spec.template.metadata.labels[{key}]");
            let must = format!("must be '{value}'");
            match labels.get(key) {
                None => errors.push(FieldError::required(field, &must)),
                Some(is) if is != value => {
                    let all = &spec["template"]["metadata"]["labels"];
                    errors.push(FieldError::invalid(field, all, &must));
                }
                Some(_) => {}
            }
        }
    }
    let selector = Selector::of_object(&spec["selector"]);
    if !selector.is_some_and(|s| s.matches_labels(&expected)) {
        errors.push(FieldError::invalid(
            "spec.selector",
            &spec["selector"],
            "`selector` not auto-generated",
        ));
    }
}

/// Validates the spec of a job or a job template.
pub(super) fn job_spec(spec: &Value, path: &str, errors: &mut Errors) {
    let counts = [
        "parallelism",
        "completions",
        "activeDeadlineSeconds",
        "backoffLimit",
        "ttlSecondsAfterFinished",
        "backoffLimitPerIndex",
        "maxFailedIndexes",
    ];
    not_negative(spec, path, &counts, errors);
    if number(spec, "maxFailedIndexes").is_some() && number(spec, "backoffLimitPerIndex").is_none()
    {
        errors.push(FieldError::required(
            format!("{path}.backoffLimitPerIndex"),
            "when maxFailedIndexes is specified",
        ));
    }
    if let Some(manager) = text(spec, &["managedBy"]) {
        managed_by(manager, &format!("{path}.managedBy"), errors);
    }
    match text(spec, &["completionMode"]).unwrap_or("NonIndexed") {
        "Indexed" => indexed_spec(spec, path, errors),
        mode => {
            if mode != "NonIndexed" {
                let (field, known) = (format!("{path}.completionMode"), ["NonIndexed", "Indexed"]);
                errors.push(FieldError::unsupported(field, mode, &known));
            } else {
                for key in ["backoffLimitPerIndex", "maxFailedIndexes"] {
                    if number(spec, key).is_some() {
                        errors.push(FieldError::invalid(
                            format!("{path}.{key}"),
                            &spec[key],
                            "requires indexed completion mode",
                        ));
                    }
                }
            }
            if let Some(policy) = at(spec, &["successPolicy"]) {
                let field = format!("{path}.successPolicy");
                let why = "requires indexed completion mode";
                errors.push(FieldError::invalid(field, policy, why));
            }
        }
    }
    if at(spec, &["podFailurePolicy"]).is_some() {
        failure_policy(spec, &format!("{path}.podFailurePolicy.rules"), errors);
    }
    replacement(spec, &format!("{path}.podReplacementPolicy"), errors);
    let template = &spec["template"]["spec"];
    pod::spec(template, &format!("{path}.template.spec"), None, errors);
    restart_policy(spec, &format!("{path}.template.spec.restartPolicy"), errors);
}

fn managed_by(manager: &str, field: &str, errors: &mut Errors) {
    let is_path = |p: &str| {
        let other = |c: char| c.is_ascii_alphanumeric() || "/-._~%!$&'()*+,;=:".contains(c);
        !p.is_empty() && p.chars().all(other)
    };
    let fine = manager
        .split_once('/')
        .is_some_and(|(domain, path)| is_subdomain(domain) && is_path(path));
    if !fine {
        errors.push(FieldError::invalid(
            field,
            &manager.into(),
            "must be a domain-prefixed path (such as \"acme.io/foo\")",
        ));
    }
    if manager.len() > MAX_MANAGER_LENGTH {
        errors.push(FieldError::too_long(field, MAX_MANAGER_LENGTH));
    }
}

fn indexed_spec(spec: &Value, path: &str, errors: &mut Errors) {
    let completions = number(spec, "completions");
    let failed = number(spec, "maxFailedIndexes");
    if completions.is_none() {
        errors.push(FieldError::required(
            format!("{path}.completions"),
            "when completion mode is Indexed",
        ));
    }
    let mut at_most = |key: &str, most: i64, why: &str| {
        if number(spec, key).is_some_and(|n| n > most) {
            errors.push(FieldError::invalid(
                format!("{path}.{key}"),
                &spec[key],
                &format!("must be less than or equal to {why}"),
            ));
        }
    };
    let when = format!("{MAX_INDEXES} when completion mode is Indexed");
    at_most("parallelism", MAX_INDEXES, &when);
    at_most(
        "maxFailedIndexes",
        completions.unwrap_or(i64::MAX),
        "completions",
    );
    at_most("maxFailedIndexes", MAX_INDEXES, &MAX_INDEXES.to_string());
    if completions.is_some_and(|n| n > MAX_INDEXES)
        && number(spec, "backoffLimitPerIndex").is_some()
    {
        let when = format!(
            "{MAX_INDEXES_WITH_BACKOFF} when completions are above {MAX_INDEXES} and used with backoff limit per index"
        );
        at_most("parallelism", MAX_INDEXES_WITH_BACKOFF, &when);
        at_most("maxFailedIndexes", MAX_INDEXES_WITH_BACKOFF, &when);
        if failed.is_none() {
            errors.push(FieldError::required(
                format!("{path}.maxFailedIndexes"),
                &format!("must be specified when completions is above {MAX_INDEXES}"),
            ));
        }
    }
    if at(spec, &["successPolicy"]).is_some() {
        success_policy(spec, &format!("{path}.successPolicy.rules"), errors);
    }
}

fn restart_policy(spec: &Value, field: &str, errors: &mut Errors) {
    match text(spec, &["template", "spec", "restartPolicy"]).unwrap_or_default() {
        "" | "Always" => errors.push(FieldError::required(
            field,
            "valid values: \"OnFailure\", \"Never\"",
        )),
        "OnFailure" if at(spec, &["podFailurePolicy"]).is_some() => {
            errors.push(FieldError::invalid(
                field,
                &"OnFailure".into(),
                "only \"Never\" is supported when podFailurePolicy is specified",
            ));
        }
        // Unknown policies are rejected by the validation of the pod template.
        _ => {}
    }
}

fn replacement(spec: &Value, field: &str, errors: &mut Errors) {
    let allowed: &[&str] = match at(spec, &["podFailurePolicy"]) {
        Some(_) => &["Failed"],
        None => &["Failed", "TerminatingOrFailed"],
    };
    if let Some(policy) = text(spec, &["podReplacementPolicy"]).filter(|p| !allowed.contains(p)) {
        errors.push(FieldError::unsupported(field, policy, allowed));
    }
}

/// Checks a required value against the allowed ones.
fn required_value(value: Option<&str>, field: String, allowed: &[&str], errors: &mut Errors) {
    match value.unwrap_or_default() {
        "" => {
            let words = format!("{allowed:?}").replace(',', "");
            let why = format!("valid values: {words}");
            errors.push(FieldError::required(field, &why));
        }
        value if !allowed.contains(&value) => {
            errors.push(FieldError::unsupported(field, value, allowed));
        }
        _ => {}
    }
}

fn failure_policy(spec: &Value, path: &str, errors: &mut Errors) {
    let rules = list(spec, &["podFailurePolicy", "rules"]);
    if rules.len() > MAX_RULES {
        errors.push(FieldError::too_many(path, rules.len(), MAX_RULES));
    }
    let containers: HashSet<&str> = ["containers", "initContainers"]
        .iter()
        .flat_map(|kind| list(spec, &["template", "spec", kind]))
        .filter_map(|c| text(c, &["name"]))
        .collect();
    for (i, rule) in rules.iter().enumerate() {
        let here = format!("{path}[{i}]");
        let action = text(rule, &["action"]);
        let field = format!("{here}.action");
        if action == Some("FailIndex") && number(spec, "backoffLimitPerIndex").is_none() {
            let why = "requires the backoffLimitPerIndex to be set";
            errors.push(FieldError::invalid(field, &rule["action"], why));
        } else {
            required_value(action, field, &ACTIONS, errors);
        }
        let codes = at(rule, &["onExitCodes"]);
        let conditions = list(rule, &["onPodConditions"]);
        if let Some(codes) = codes {
            exit_codes(codes, &format!("{here}.onExitCodes"), &containers, errors);
        }
        pod_conditions(conditions, &format!("{here}.onPodConditions"), errors);
        match (codes.is_some(), conditions.is_empty()) {
            (true, false) => errors.push(invalid_without_value(
                here,
                "specifying both OnExitCodes and OnPodConditions is not supported",
            )),
            (false, true) => errors.push(invalid_without_value(
                here,
                "specifying one of OnExitCodes and OnPodConditions is required",
            )),
            _ => {}
        }
    }
}

fn pod_conditions(patterns: &[Value], path: &str, errors: &mut Errors) {
    if patterns.len() > MAX_RULES {
        errors.push(FieldError::too_many(path, patterns.len(), MAX_RULES));
    }
    for (i, pattern) in patterns.iter().enumerate() {
        let kind = text(pattern, &["type"]).unwrap_or_default();
        if !is_qualified(kind) {
            let field = format!("{path}[{i}].type");
            errors.push(FieldError::invalid(field, &kind.into(), super::QUALIFIED));
        }
        let status = text(pattern, &["status"]);
        required_value(status, format!("{path}[{i}].status"), &STATUSES, errors);
    }
}

fn exit_codes(codes: &Value, path: &str, containers: &HashSet<&str>, errors: &mut Errors) {
    let operator = text(codes, &["operator"]);
    required_value(operator, format!("{path}.operator"), &OPERATORS, errors);
    if let Some(name) = text(codes, &["containerName"]).filter(|n| !containers.contains(n)) {
        errors.push(FieldError::invalid(
            format!("{path}.containerName"),
            &name.into(),
            "must be one of the container or initContainer names in the pod template",
        ));
    }
    let field = format!("{path}.values");
    let values = list(codes, &["values"]);
    if values.is_empty() {
        let why = "at least one value is required";
        errors.push(FieldError::invalid(&field, &codes["values"], why));
    } else if values.len() > MAX_EXIT_CODES {
        errors.push(FieldError::too_many(&*field, values.len(), MAX_EXIT_CODES));
    }
    let numbers: Vec<i64> = values.iter().filter_map(Value::as_i64).collect();
    let mut seen = HashSet::new();
    for (i, code) in numbers.iter().enumerate() {
        let here = format!("{field}[{i}]");
        if *code == 0 && operator == Some("In") {
            let why = "must not be 0 for the In operator";
            errors.push(FieldError::invalid(&here, &0.into(), why));
        }
        if !seen.insert(code) {
            errors.push(FieldError {
                detail: format!("Duplicate value: {code}"),
                ..FieldError::duplicate(here, "")
            });
        }
    }
    if !numbers.is_sorted() {
        errors.push(FieldError::invalid(
            field,
            &codes["values"],
            "must be ordered",
        ));
    }
}

fn success_policy(spec: &Value, path: &str, errors: &mut Errors) {
    let rules = list(spec, &["successPolicy", "rules"]);
    if rules.is_empty() {
        let why = "at least one rules must be specified when the successPolicy is specified";
        errors.push(FieldError::required(path, why));
    }
    if rules.len() > MAX_RULES {
        errors.push(FieldError::too_many(path, rules.len(), MAX_RULES));
    }
    let completions = number(spec, "completions").unwrap_or(0);
    for (i, rule) in rules.iter().enumerate() {
        success_rule(rule, &format!("{path}[{i}]"), completions, errors);
    }
}

fn success_rule(rule: &Value, here: &str, completions: i64, errors: &mut Errors) {
    let indexes = text(rule, &["succeededIndexes"]);
    let count = number(rule, "succeededCount");
    if indexes.is_none() && count.is_none() {
        let why = "at least one of succeededCount or succeededIndexes must be specified";
        errors.push(FieldError::required(here, why));
    }
    let mut total = None;
    if let Some(indexes) = indexes {
        let field = format!("{here}.succeededIndexes");
        if indexes.len() > MAX_INDEXES_LENGTH {
            errors.push(FieldError::too_long(field.clone(), MAX_INDEXES_LENGTH));
        }
        let parsed = Indexes::parse(indexes, i32::try_from(completions).unwrap_or(i32::MAX));
        total = Some(parsed.as_ref().map_or(0, |p| i64::from(p.total())));
        if let Err(why) = parsed {
            let why = format!("error parsing succeededIndexes: {why}");
            errors.push(FieldError::invalid(field, &indexes.into(), &why));
        }
    }
    not_negative(rule, here, &["succeededCount"], errors);
    let limits = [
        (Some(completions), "the number of specified completions"),
        (
            total,
            "the number of indexes in the specified succeededIndexes field",
        ),
    ];
    for (limit, what) in limits {
        if let (Some(count), Some(limit)) = (count, limit)
            && count > limit
        {
            errors.push(FieldError::invalid(
                format!("{here}.succeededCount"),
                &count.into(),
                &format!("must be less than or equal to {limit} ({what})"),
            ));
        }
    }
}

/// Validates a CronJob, except for rules on creation and update.
pub(super) fn cron_job(cron: &Value, errors: &mut Errors) {
    let spec = &cron["spec"];
    match text(spec, &["schedule"]).unwrap_or_default() {
        "" => errors.push(FieldError::required("spec.schedule", "")),
        schedule if schedule.contains("TZ") => errors.push(FieldError::invalid(
            "spec.schedule",
            &schedule.into(),
            "cannot use TZ or CRON_TZ in schedule, use timeZone field instead",
        )),
        schedule => {
            if let Err(why) = Schedule::parse(schedule) {
                errors.push(FieldError::invalid("spec.schedule", &schedule.into(), &why));
            }
        }
    }
    let counts = [
        "startingDeadlineSeconds",
        "successfulJobsHistoryLimit",
        "failedJobsHistoryLimit",
    ];
    not_negative(spec, "spec", &counts, errors);
    let policy = text(spec, &["concurrencyPolicy"]);
    if let Some(policy) = policy.filter(|p| !POLICIES.contains(p)) {
        errors.push(FieldError::unsupported(
            "spec.concurrencyPolicy",
            policy,
            &POLICIES,
        ));
    }
    let template = &spec["jobTemplate"]["spec"];
    let path = "spec.jobTemplate.spec";
    job_spec(template, path, errors);
    if let Some(selector) = at(template, &["selector"]) {
        let why = "`selector` will be auto-generated";
        errors.push(FieldError::invalid(
            format!("{path}.selector"),
            selector,
            why,
        ));
    }
    if template["manualSelector"] == true {
        let field = format!("{path}.manualSelector");
        errors.push(FieldError::unsupported(field, "true", &["nil", "false"]));
    }
    // On creation only, so that an existing CronJob with an invalid name or time zone can still be changed.
    if at(cron, &["metadata", "resourceVersion"]).is_none() {
        let name = crate::api::object::name(cron);
        if name.len() > MAX_CRON_NAME_LENGTH {
            let why = format!("must be no more than {MAX_CRON_NAME_LENGTH} characters");
            errors.push(FieldError::invalid("metadata.name", &name.into(), &why));
        }
        time_zone(spec, errors);
    }
}

/// Checks the time zone of a schedule: the name of a zone in the tz database.
fn time_zone(spec: &Value, errors: &mut Errors) {
    let Some(zone) = text(spec, &["timeZone"]) else {
        return;
    };
    let part = |part: &str| {
        let other = |c: char| c.is_ascii_alphanumeric() || ".-_+".contains(c);
        !matches!(part, "" | "." | "..")
            && part.len() <= 14
            && !part.starts_with('-')
            && part.chars().all(other)
    };
    let why = if zone.is_empty() {
        "timeZone must be nil or non-empty string".to_owned()
    } else if zone.eq_ignore_ascii_case("local") {
        "timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones"
            .into()
    } else if !zone.split('/').all(part) || jiff::tz::TimeZone::get(zone).is_err() {
        format!("unknown time zone {zone}")
    } else {
        return;
    };
    errors.push(FieldError::invalid("spec.timeZone", &zone.into(), &why));
}

/// Validates an update of a CronJob: a changed time zone must be valid.
pub(super) fn cron_update(old: &Value, new: &Value, errors: &mut Errors) {
    if text(&old["spec"], &["timeZone"]) != text(&new["spec"], &["timeZone"]) {
        time_zone(&new["spec"], errors);
    }
}

/// Validates an update of a job.
pub(super) fn job_update(old: &Value, new: &Value, errors: &mut Errors) {
    let (before, after) = (&old["spec"], &new["spec"]);
    let mut fixed = |key: &str| {
        if at(before, &[key]) != at(after, &[key]) {
            let field = format!("spec.{key}");
            errors.push(FieldError::invalid(
                field,
                &after[key],
                "field is immutable",
            ));
        }
    };
    for key in [
        "selector",
        "completionMode",
        "podFailurePolicy",
        "backoffLimitPerIndex",
        "managedBy",
        "successPolicy",
    ] {
        fixed(key);
    }
    if !indexed(after) {
        fixed("completions");
    } else if let Some(completions) = at(after, &["completions"])
        && at(before, &["completions"]) != Some(completions)
        && Some(completions) != at(after, &["parallelism"])
    {
        let why = "can only be modified in tandem with spec.parallelism";
        errors.push(FieldError::invalid("spec.completions", completions, why));
    }
    if comparable(old, &after["template"]) != after["template"] {
        errors.push(FieldError::invalid(
            "spec.template",
            &after["template"],
            "field is immutable",
        ));
    }
}

/// The old template with the mutable fields of the new one. While the job is suspended and has no active pods, the
/// scheduling fields, labels, annotations and container resources are mutable.
fn comparable(old: &Value, new: &Value) -> Value {
    let mut template = old["spec"]["template"].clone();
    let started = at(old, &["status", "startTime"]).is_some();
    let idle = old["status"]["active"].as_i64().unwrap_or(0) == 0
        && (!started || batch::has_condition(old, "Suspended"));
    if old["spec"]["suspend"] != true || !idle {
        return template;
    }
    for key in ["labels", "annotations"] {
        put(&mut template["metadata"], key, at(new, &["metadata", key]));
    }
    for key in ["nodeSelector", "tolerations", "schedulingGates"] {
        put(&mut template["spec"], key, at(new, &["spec", key]));
    }
    node_affinity(&mut template["spec"], &new["spec"]);
    for kind in ["containers", "initContainers"] {
        let sizes: HashMap<&str, &Value> = list(new, &["spec", kind])
            .iter()
            .filter_map(|c| Some((text(c, &["name"])?, &c["resources"])))
            .collect();
        let containers = template["spec"].get_mut(kind).and_then(Value::as_array_mut);
        for container in containers.into_iter().flatten() {
            if let Some(resources) = text(container, &["name"]).and_then(|n| sizes.get(n)) {
                let resources = (!resources.is_null()).then_some(*resources);
                put(container, "resources", resources);
            }
        }
    }
    template
}

/// Copies the node affinity; other kinds of affinity stay unchanged.
fn node_affinity(into: &mut Value, new: &Value) {
    let wanted = at(new, &["affinity", "nodeAffinity"]);
    let there = at(new, &["affinity"]).is_some();
    if at(into, &["affinity"]).is_none() {
        if !there {
            return;
        }
        into["affinity"] = serde_json::json!({});
    }
    put(&mut into["affinity"], "nodeAffinity", wanted);
    let rest = into["affinity"].as_object();
    if !there && rest.is_none_or(serde_json::Map::is_empty) {
        put(into, "affinity", None);
    }
}
