//! Pods of jobs: attributes that the controller reads, and the pods that it creates
//! (`pkg/controller/job/indexed_job_utils.go`).

use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::{
    Container, EnvVar, EnvVarSource, ObjectFieldSelector, Pod, PodSpec,
};
use kube::ResourceExt as _;

use super::super::owned::owner;
use super::policy::{Verdict, verdict};
use holdfast_core::pod;

/// Finalizer that keeps a pod until the job's status counts it.
pub(super) const FINALIZER: &str = "batch.kubernetes.io/job-tracking";
/// The annotation and label with a pod's index.
const INDEX: &str = "batch.kubernetes.io/job-completion-index";
/// Annotations: how many earlier pods of the index have failed, and how many further failures were ignored.
const FAILURES: &str = "batch.kubernetes.io/job-index-failure-count";
const IGNORED: &str = "batch.kubernetes.io/job-index-ignored-failure-count";
const VARIABLE: &str = "JOB_COMPLETION_INDEX";
/// Maximum length of the prefix of a generated name.
const MAX_PREFIX_LENGTH: usize = 58;

/// A pod to create.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct New {
    /// Its index, for an indexed job.
    pub index: Option<i32>,
    /// The counted and ignored failures of earlier pods of the index, if there is a limit per index.
    pub failures: Option<(i32, i32)>,
}

pub(super) fn is_deleting(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

pub(super) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|c| c.type_ == "Ready" && c.status == "True")
}

/// Whether the pod may still have to be counted.
pub(super) fn is_tracked(pod: &Pod) -> bool {
    pod.finalizers().iter().any(|f| f == FINALIZER)
}

/// A pod's index, if it is valid for the job.
pub(super) fn index(spec: &JobSpec, pod: &Pod) -> Option<i32> {
    let index = any_index(pod)?;
    (index < spec.completions.unwrap_or(0)).then_some(index)
}

fn any_index(pod: &Pod) -> Option<i32> {
    let index: i32 = pod.annotations().get(INDEX)?.parse().ok()?;
    (index >= 0).then_some(index)
}

/// Whether a pod is replaced only when it has terminated, not as soon as it is being deleted.
pub(super) fn replaces_ended_only(spec: &JobSpec) -> bool {
    spec.pod_replacement_policy.as_deref() == Some("Failed") || spec.pod_failure_policy.is_some()
}

pub(super) fn has_failed(spec: &JobSpec, pod: &Pod) -> bool {
    let phase = pod::phase(pod);
    phase == "Failed" || !replaces_ended_only(spec) && is_deleting(pod) && phase != "Succeeded"
}

fn counter(pod: &Pod, key: &str) -> i32 {
    let text = pod.annotations().get(key);
    let count = text.and_then(|t| t.parse::<i32>().ok()).unwrap_or(0);
    count.max(0)
}

/// The counted and ignored failures of earlier pods of this pod's index.
pub(super) fn failures_before(pod: &Pod) -> (i32, i32) {
    (counter(pod, FAILURES), counter(pod, IGNORED))
}

/// The same for the replacement of a failed pod; zero if the new pod replaces none.
pub(super) fn failures_with(spec: &JobSpec, replaced: Option<&Pod>) -> (i32, i32) {
    let Some(pod) = replaced else {
        return (0, 0);
    };
    let (failed, ignored) = failures_before(pod);
    if verdict(spec, pod).is_counted() {
        (failed.saturating_add(1), ignored)
    } else {
        (failed, ignored.saturating_add(1))
    }
}

/// Whether the failure of a pod makes its index fail.
pub(super) fn fails_index(spec: &JobSpec, pod: &Pod) -> bool {
    let limit = spec.backoff_limit_per_index.unwrap_or(i32::MAX);
    has_failed(spec, pod)
        && match verdict(spec, pod) {
            Verdict::FailIndex => true,
            Verdict::Ignore => false,
            Verdict::Count | Verdict::FailJob(_) => failures_before(pod).0 >= limit,
        }
}

/// The pod to create; the API generates its name.
pub(super) fn object(job: &Job, new: &New) -> Pod {
    let template = job.spec.as_ref().map(|s| s.template.clone());
    let template = template.unwrap_or_default();
    let (mut metadata, mut spec) = (
        template.metadata.unwrap_or_default(),
        template.spec.unwrap_or_default(),
    );
    let name = job.name_any();
    metadata.name = None;
    metadata.generate_name = Some(format!("{name}-"));
    metadata.namespace = job.namespace();
    metadata.owner_references = Some(vec![owner(job)]);
    let finalizers = metadata.finalizers.get_or_insert_default();
    if !finalizers.iter().any(|f| f == FINALIZER) {
        finalizers.push(FINALIZER.into());
    }
    if let Some(index) = new.index {
        let annotations = metadata.annotations.get_or_insert_default();
        annotations.insert(INDEX.into(), index.to_string());
        if let Some((failed, ignored)) = new.failures {
            annotations.insert(FAILURES.into(), failed.to_string());
            if ignored > 0 {
                annotations.insert(IGNORED.into(), ignored.to_string());
            }
        }
        let labels = metadata.labels.get_or_insert_default();
        labels.insert(INDEX.into(), index.to_string());
        metadata.generate_name = Some(prefix(&name, index));
        spec.hostname = Some(format!("{name}-{index}"));
        variables(&mut spec);
    }
    Pod {
        metadata,
        spec: Some(spec),
        status: None,
    }
}

fn prefix(name: &str, index: i32) -> String {
    let end = format!("-{index}-");
    let room = MAX_PREFIX_LENGTH - end.len();
    let name: String = name.chars().take(room).collect();
    name + &end
}

fn variables(spec: &mut PodSpec) {
    let add_variable = |container: &mut Container| {
        let env = container.env.get_or_insert_default();
        if env.iter().any(|v| v.name == VARIABLE) {
            return;
        }
        let field = ObjectFieldSelector {
            field_path: format!("metadata.labels['{INDEX}']"),
            ..ObjectFieldSelector::default()
        };
        let source = EnvVarSource {
            field_ref: Some(field),
            ..EnvVarSource::default()
        };
        env.push(EnvVar {
            name: VARIABLE.into(),
            value_from: Some(source),
            ..EnvVar::default()
        });
    };
    let first = spec.init_containers.iter_mut().flatten();
    first.chain(&mut spec.containers).for_each(add_variable);
}
