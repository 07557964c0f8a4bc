//! Validation of writes to a job's `/status` (`pkg/registry/batch/job/strategy.go`,
//! `pkg/apis/batch/validation/validation.go`). An external controller may write it (`managedBy`), so the status must be
//! consistent in itself. Most rules apply only to fields that the write changes. A change of the spec can make the
//! stored status invalid until the next write corrects it.

use std::collections::HashSet;

use serde_json::Value;

use super::Errors;
use super::batch::{invalid_without_value, not_negative};
use crate::api::batch::has_condition;
use crate::api::error::FieldError;
use crate::api::object::{at, list, text};
use holdfast_core::indexes::Indexes;

/// A job before and after the write.
struct Write<'a> {
    old: &'a Value,
    new: &'a Value,
}

/// Validates a write to a job's `/status`.
pub(super) fn job(old: &Value, new: &Value, errors: &mut Errors) {
    let counts = ["active", "succeeded", "failed", "ready", "terminating"];
    not_negative(&new["status"], "status", &counts, errors);
    uncounted(&new["status"], errors);
    let write = Write { old, new };
    write.conditions(errors);
    write.finished(errors);
    write.times(errors);
    write.indexes(errors);
    write.numbers(errors);
}

/// Pods that are not counted yet: each uid occurs once.
fn uncounted(status: &Value, errors: &mut Errors) {
    let mut seen = HashSet::new();
    for key in ["succeeded", "failed"] {
        let uids = list(status, &["uncountedTerminatedPods", key]);
        for (i, uid) in uids.iter().enumerate() {
            let field = format!("status.uncountedTerminatedPods.{key}[{i}]");
            if uid == "" {
                errors.push(FieldError::invalid(field, uid, "must not be empty"));
            } else if !seen.insert(uid) {
                errors.push(FieldError::duplicate(
                    field,
                    uid.as_str().unwrap_or_default(),
                ));
            }
        }
    }
}

impl<'a> Write<'a> {
    fn is(&self, kind: &str) -> bool {
        has_condition(self.new, kind)
    }

    fn was(&self, kind: &str) -> bool {
        has_condition(self.old, kind)
    }

    /// Whether the write changes one of these conditions to or from true.
    fn condition_changes(&self, kinds: &[&str]) -> bool {
        kinds.iter().any(|kind| self.is(kind) != self.was(kind))
    }

    fn ended(job: &Value) -> bool {
        has_condition(job, "Complete") || has_condition(job, "Failed")
    }

    /// Whether the write changes the job to or from finished.
    fn finished_changes(&self) -> bool {
        Self::ended(self.old) != Self::ended(self.new)
    }

    fn changes(&self, key: &str) -> bool {
        at(self.old, &["status", key]) != at(self.new, &["status", key])
    }

    fn number(job: &Value, key: &str) -> i64 {
        job["status"][key].as_i64().unwrap_or(0)
    }

    fn spec(&self, key: &str) -> Option<&'a Value> {
        at(self.new, &["spec", key])
    }

    fn conditions(&self, errors: &mut Errors) {
        let mut refuse = |why: &str| errors.push(invalid_without_value("status.conditions", why));
        let complete = self.is("Complete");
        if self.condition_changes(&["Complete", "Failed"]) && complete && self.is("Failed") {
            refuse("cannot set Complete=True and Failed=true conditions");
        }
        if self.condition_changes(&["Complete", "FailureTarget"])
            && complete
            && self.is("FailureTarget")
        {
            refuse("cannot set Complete=True and FailureTarget=true conditions");
        }
        let unannounced = self.is("Failed") && !self.is("FailureTarget");
        if unannounced && (self.condition_changes(&["Failed"]) || self.changes("failedIndexes")) {
            refuse("cannot set Failed=True condition without the FailureTarget=true condition");
        }
        let met = self.is("SuccessCriteriaMet");
        if self.condition_changes(&["Complete", "SuccessCriteriaMet"]) && complete && !met {
            refuse(
                "cannot set Complete=True condition without the SuccessCriteriaMet=true condition",
            );
        }
        if met && self.is("Failed") {
            refuse("cannot set SuccessCriteriaMet=True and Failed=true conditions");
        }
        if met && self.is("FailureTarget") {
            refuse("cannot set SuccessCriteriaMet=True and FailureTarget=true conditions");
        }
        if self.spec("successPolicy").is_some() && !met && complete {
            refuse(
                "cannot set Complete=True for Job with SuccessPolicy unless SuccessCriteriaMet=True",
            );
        }
        for kind in ["Failed", "Complete", "FailureTarget"] {
            if self.was(kind) && !self.is(kind) {
                refuse(&format!(
                    "cannot disable the terminal {kind}=True condition"
                ));
            }
        }
        if self.was("SuccessCriteriaMet") && !met {
            refuse("cannot disable the SuccessCriteriaMet=True condition");
        }
        if self.was("Complete") && !self.was("SuccessCriteriaMet") && met {
            refuse(
                "cannot set SuccessCriteriaMet=True for Job already has Complete=true conditions",
            );
        }
    }

    /// A finished job has a start time and no pods that are active, terminating or uncounted.
    fn finished(&self, errors: &mut Errors) {
        if !Self::ended(self.new) {
            return;
        }
        for key in ["active", "terminating"] {
            if (self.finished_changes() || self.changes(key)) && Self::number(self.new, key) > 0 {
                let why = format!("{key}>0 is invalid for finished job");
                let field = format!("status.{key}");
                errors.push(FieldError::invalid(field, &self.new["status"][key], &why));
            }
        }
        let nothing = self.spec("suspend") == Some(&true.into())
            && self.spec("completions") == Some(&0.into());
        let is_checked = self.finished_changes() || self.changes("startTime");
        if is_checked && !nothing && at(self.new, &["status", "startTime"]).is_none() {
            let why = "startTime is required for finished job";
            errors.push(FieldError::required("status.startTime", why));
        }
        let key = "uncountedTerminatedPods";
        let has_uncounted = ["succeeded", "failed"]
            .iter()
            .any(|list_key| !list(self.new, &["status", key, *list_key]).is_empty());
        if (self.finished_changes() || self.changes(key)) && has_uncounted {
            errors.push(FieldError::invalid(
                format!("status.{key}"),
                &self.new["status"][key],
                "must be empty for finished job",
            ));
        }
    }

    fn times(&self, errors: &mut Errors) {
        let time = |job: &'a Value, key: &str| text(job, &["status", key]);
        let (start, end) = (
            time(self.new, "startTime"),
            time(self.new, "completionTime"),
        );
        let mut refuse = |key: &str, why: &str| {
            let value = &self.new["status"][key];
            errors.push(FieldError::invalid(format!("status.{key}"), value, why));
        };
        let is_checked = self.condition_changes(&["Complete"]) || self.changes("completionTime");
        let complete = self.is("Complete");
        if is_checked && end.is_some() && !complete {
            let why = "cannot set completionTime when there is no Complete=True condition";
            refuse("completionTime", why);
        }
        let moment = |text: Option<&str>| text.and_then(|t| t.parse::<jiff::Timestamp>().ok());
        if (self.changes("startTime") || self.changes("completionTime"))
            && moment(start)
                .zip(moment(end))
                .is_some_and(|(start, end)| end < start)
        {
            refuse("completionTime", "must be equal to or after `startTime`");
        }
        let before = time(self.old, "completionTime");
        if before.is_some() && end.is_some() && before != end {
            refuse("completionTime", "field is immutable");
        }
        let resumes = self.was("Suspended")
            && list(self.new, &["status", "conditions"])
                .iter()
                .any(|c| c["type"] == "Suspended" && c["status"] == "False");
        let runs = self.spec("suspend") != Some(&true.into());
        let began = time(self.old, "startTime");
        if began.is_some() && began != start && runs && !resumes {
            let why = "field is immutable for unsuspended job once set";
            refuse("startTime", why);
        }
        if is_checked && end.is_none() && complete {
            let why = "completionTime is required for Complete jobs";
            errors.push(FieldError::required("status.completionTime", why));
        }
    }

    fn indexes(&self, errors: &mut Errors) {
        let of = |key: &str| text(self.new, &["status", key]);
        let (done, lost) = (of("completedIndexes"), of("failedIndexes"));
        let changed = ["completedIndexes", "failedIndexes"].map(|key| self.changes(key));
        let mut refuse = |key: &str, why: &str| {
            let value = &self.new["status"][key];
            errors.push(FieldError::invalid(format!("status.{key}"), value, why));
        };
        let per_index = self.spec("backoffLimitPerIndex").is_some();
        let completions = self.spec("completions").and_then(Value::as_i64);
        if let Some(completions) = completions {
            let completions = i32::try_from(completions).unwrap_or(i32::MAX);
            for (key, text, is_checked) in [
                ("completedIndexes", done, changed[0]),
                ("failedIndexes", lost.filter(|_| per_index), changed[1]),
            ] {
                let parsed = text.map(|t| Indexes::parse(t, completions));
                if let (true, Some(Err(why))) = (is_checked, parsed) {
                    refuse(key, &format!("error parsing {key}: {why}"));
                }
            }
            let read = |text: Option<&str>| Indexes::read(text.unwrap_or_default(), completions);
            let both = read(done).common(&read(lost)).first();
            if let (true, Some(index)) = (changed[0] || changed[1], both) {
                let why = format!("failedIndexes and completedIndexes overlap at index: {index}");
                refuse("failedIndexes", &why);
            }
        }
        let indexed = self.spec("completionMode") == Some(&"Indexed".into());
        if changed[0] && !indexed && done.is_some_and(|d| !d.is_empty()) {
            let why = "cannot set non-empty completedIndexes when non-indexed completion mode";
            refuse("completedIndexes", why);
        }
        if changed[1] && !per_index && lost.is_some() {
            let why = "cannot set non-null failedIndexes when backoffLimitPerIndex is null";
            refuse("failedIndexes", why);
        }
    }

    /// Counters do not decrease, and at most the active pods are ready.
    fn numbers(&self, errors: &mut Errors) {
        let mut refuse = |key: &str, why: &str| {
            let value = &self.new["status"][key];
            errors.push(FieldError::invalid(format!("status.{key}"), value, why));
        };
        if (self.changes("ready") || self.changes("active"))
            && Self::number(self.new, "ready") > Self::number(self.new, "active")
        {
            refuse("ready", "cannot set more ready pods than active");
        }
        let less = |key: &str| Self::number(self.new, key) < Self::number(self.old, key);
        if less("failed") {
            refuse("failed", "cannot decrease the failed counter");
        }
        // An elastic indexed job can be scaled down.
        let elastic = self.spec("completionMode") == Some(&"Indexed".into())
            && self.spec("completions") == self.spec("parallelism");
        if less("succeeded") && !elastic {
            refuse("succeeded", "cannot decrease the succeeded counter");
        }
    }
}
