//! Validation of writes to `/status`, by the rules of upstream's status strategies (`pkg/registry/*/*/strategy.go`).

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use serde_json::Value;

use super::Errors;
use crate::api::error::{FieldError, IP};
use crate::api::object::{self, at, list, text};
use crate::api::resources::Resource;
use crate::api::services;

/// Validates a write to `/status`.
#[must_use]
pub fn status(resource: &Resource, old: &Value, new: &Value) -> Errors {
    let mut errors = Errors::new();
    super::metadata(resource, new, &mut errors);
    finalizers(old, new, &mut errors);
    match resource.kind {
        "Pod" => pod(old, new, &mut errors),
        "Deployment" => {
            counts(new, &mut errors);
            let of = |o: &Value| o["status"]["collisionCount"].as_i64();
            if of(new).unwrap_or(0) < of(old).unwrap_or(0) {
                errors.push(FieldError::invalid(
                    "status.collisionCount",
                    &new["status"]["collisionCount"],
                    "cannot be decremented",
                ));
            }
        }
        "ReplicaSet" => counts(new, &mut errors),
        "Service" => services::validate_status(new, &mut errors),
        "Ingress" => super::rules::ingress_status(new, &mut errors),
        "Job" => super::job_status::job(old, new, &mut errors),
        "Namespace" => {
            let wanted = if object::is_deleting(new) {
                "Terminating"
            } else {
                "Active"
            };
            if text(new, &["status", "phase"]).is_some_and(|p| !p.is_empty() && p != wanted) {
                errors.push(FieldError::invalid(
                    "status.phase",
                    &new["status"]["phase"],
                    &format!("may only be '{wanted}' as `deletionTimestamp` is"),
                ));
            }
        }
        "PersistentVolumeClaim" => amounts(new, "capacity", &mut errors),
        "Node" => {
            amounts(new, "capacity", &mut errors);
            amounts(new, "allocatable", &mut errors);
        }
        _ => {}
    }
    errors
}

/// An object that is being deleted must not get new finalizers, through any endpoint.
pub(super) fn finalizers(old: &Value, new: &Value, errors: &mut Errors) {
    let had: HashSet<&Value> = list(old, &["metadata", "finalizers"]).iter().collect();
    let added = list(new, &["metadata", "finalizers"])
        .iter()
        .any(|f| !had.contains(f));
    if object::is_deleting(old) && added {
        errors.push(FieldError::forbidden(
            "metadata.finalizers",
            "no new finalizers can be added if the object is being deleted",
        ));
    }
}

/// Replica counts are not negative and do not exceed the total.
fn counts(new: &Value, errors: &mut Errors) {
    let of = |key: &str| new["status"][key].as_i64().unwrap_or(0);
    let mut refuse = |key: &str, why: &str| {
        let field = format!("status.{key}");
        errors.push(FieldError::invalid(field, &new["status"][key], why));
    };
    for key in [
        "observedGeneration",
        "replicas",
        "updatedReplicas",
        "fullyLabeledReplicas",
        "readyReplicas",
        "availableReplicas",
        "unavailableReplicas",
        "terminatingReplicas",
    ] {
        if of(key) < 0 {
            refuse(key, "must be greater than or equal to 0");
        }
    }
    for (part, whole) in [
        ("updatedReplicas", "replicas"),
        ("fullyLabeledReplicas", "replicas"),
        ("readyReplicas", "replicas"),
        ("availableReplicas", "replicas"),
        ("availableReplicas", "readyReplicas"),
    ] {
        if of(part) > of(whole) {
            refuse(part, &format!("cannot be greater than status.{whole}"));
        }
    }
}

/// Quantities can be parsed and are not negative.
fn amounts(new: &Value, field: &str, errors: &mut Errors) {
    use holdfast_core::quantity::Quantity;
    let amounts = at(new, &["status", field]).and_then(Value::as_object);
    for (name, value) in amounts.into_iter().flatten() {
        let text = value.as_str().unwrap_or_default();
        let fine = match text.parse::<Quantity>() {
            Ok(amount) => amount >= Quantity::ZERO,
            Err(_) => value.is_number(),
        };
        if !fine {
            errors.push(FieldError::invalid(
                format!("status.{field}[{name}]"),
                value,
                "must be a quantity greater than or equal to 0",
            ));
        }
    }
}

/// The addresses of a pod or its host: valid, and at most one per IP family. Invalid addresses that are stored already
/// are accepted. This also detects a list that was merged with the stored one instead of replacing it.
fn addresses(old: &Value, new: &Value, [one, all]: [&str; 2], errors: &mut Errors) {
    let ips = |pod| -> Vec<&str> {
        let all = list(pod, &["status", all]).iter();
        all.map(|a| text(a, &["ip"]).unwrap_or_default()).collect()
    };
    let (before, after): (HashSet<&str>, _) = (ips(old).into_iter().collect(), ips(new));
    let mut families = vec![];
    for (i, ip) in after.iter().enumerate() {
        match ip.parse::<IpAddr>() {
            Ok(address) => families.push(address.is_ipv4()),
            Err(_) if before.contains(ip) => {}
            Err(_) => errors.push(FieldError::invalid(
                format!("status.{all}[{i}].ip"),
                &(*ip).into(),
                IP,
            )),
        }
    }
    families.sort_unstable();
    families.dedup();
    if after.len() > 1 && families.len() != after.len() {
        errors.push(FieldError::invalid(
            format!("status.{all}"),
            &new["status"][all],
            "may specify no more than one IP for each IP family",
        ));
    }
    let own = text(new, &["status", one]).unwrap_or_default();
    // `podIP` may be omitted when `podIPs` is set; `hostIP` may not.
    let must_equal = !own.is_empty() || one == "hostIP";
    if let Some(first) = after.first().filter(|first| must_equal && **first != own) {
        errors.push(FieldError::invalid(
            format!("status.{all}[0].ip"),
            &(*first).into(),
            &format!("must be equal to `{one}`"),
        ));
    }
}

fn pod(old: &Value, new: &Value, errors: &mut Errors) {
    for fields in [["podIP", "podIPs"], ["hostIP", "hostIPs"]] {
        addresses(old, new, fields, errors);
    }
    let nominated = text(new, &["status", "nominatedNodeName"]).unwrap_or_default();
    if !nominated.is_empty() && !super::is_subdomain(nominated) {
        errors.push(FieldError::invalid(
            "status.nominatedNodeName",
            &nominated.into(),
            super::SUBDOMAIN,
        ));
    }
    for (statuses, containers) in [
        ("containerStatuses", "containers"),
        ("initContainerStatuses", "initContainers"),
    ] {
        let policies = Policies::of(old, containers);
        let not_ended = list(new, &["status", statuses]).iter();
        let not_ended = not_ended.filter(|is| at(is, &["state", "terminated"]).is_none());
        let not_ended: HashSet<&Value> = not_ended.map(|is| &is["name"]).collect();
        for (i, was) in list(old, &["status", statuses]).iter().enumerate() {
            if not_ended.contains(&was["name"]) && policies.is_terminal(was) {
                errors.push(FieldError::forbidden(
                    format!("status.{statuses}[{i}].state"),
                    "may not be transitioned to non-terminated state",
                ));
            }
        }
    }
}

/// The restart policies of a pod's containers.
struct Policies<'a> {
    pod: Option<&'a str>,
    /// The policies of containers that set one, by container name.
    own: HashMap<&'a Value, &'a str>,
    /// Whether a container has restart rules (KEP-5307, KEP-5532): these can restart all other containers.
    rules: bool,
}

impl<'a> Policies<'a> {
    fn of(pod: &'a Value, containers: &str) -> Policies<'a> {
        let all = |kind| list(pod, &["spec", kind]).iter();
        let mut own = HashMap::new();
        for container in all(containers) {
            if let Some(policy) = text(container, &["restartPolicy"]) {
                own.entry(&container["name"]).or_insert(policy);
            }
        }
        Policies {
            pod: text(pod, &["spec", "restartPolicy"]),
            own,
            rules: all("containers")
                .chain(all("initContainers"))
                .any(|c| at(c, &["restartPolicyRules"]).is_some()),
        }
    }

    /// Whether a terminated container is never restarted.
    fn is_terminal(&self, status: &Value) -> bool {
        let Some(terminated) = at(status, &["state", "terminated"]) else {
            return false;
        };
        if self.rules {
            return false;
        }
        match self.own.get(&status["name"]).copied().or(self.pod) {
            Some("Never") => true,
            Some("OnFailure") => terminated["exitCode"] == 0,
            _ => false,
        }
    }
}
