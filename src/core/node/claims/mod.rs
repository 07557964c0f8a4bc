//! Resource claims of dynamic resource allocation (KEP-4381, `pkg/kubelet/cm/dra/manager.go`): which claims of a pod
//! the drivers must prepare or unprepare, and which CDI devices containers get. Pure; `agent::node::claims` does the
//! I/O.
//!
//! A claim is prepared once for all pods that use it, and unprepared when the last of them terminates. A claim is busy
//! while calls to its drivers are in progress, and no other operation may start. So a claim is never unprepared while
//! it is being prepared for another pod.

pub mod checkpoint;
pub mod health;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;

use self::checkpoint::Device;
use crate::meta;
use crate::pod;

/// Why a pod's claims cannot be prepared, unprepared or used; the messages are the kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// The pod's status does not name the claim of a template yet.
    #[error("pod {0:?}: ResourceClaim not created yet")]
    NotCreated(String),
    /// An entry of `spec.resourceClaims` names neither a claim nor a template.
    #[error("pod {pod:?}, spec.resourceClaim {entry:?}: none of the supported fields are set")]
    Unsupported {
        /// Namespace and name of the pod.
        pod: String,
        /// The entry's name.
        entry: String,
    },
    /// The claim of a template belongs to another pod.
    #[error("ResourceClaim {claim} was not created for Pod {pod} (Pod is not owner)")]
    NotOwner {
        /// Namespace and name of the claim.
        claim: String,
        /// Namespace and name of the pod.
        pod: String,
    },
    /// The claim is not reserved for the pod.
    #[error("pod {pod} ({uid}) is not allowed to use ResourceClaim {claim} ({claim_uid})")]
    NotReserved {
        /// The pod's name.
        pod: String,
        /// The pod's uid.
        uid: String,
        /// The claim's name.
        claim: String,
        /// The claim's uid.
        claim_uid: String,
    },
    /// The claim has no allocation yet.
    #[error("ResourceClaim {0}: not allocated")]
    NotAllocated(String),
    /// An older claim of the same name is still prepared.
    #[error(
        "old ResourceClaim with same name {name} and different UID {uid} still exists (previous pod force-deleted?!)"
    )]
    Replaced {
        /// The name of both claims.
        name: String,
        /// The uid of the old claim.
        uid: String,
    },
    /// A driver returned a result for a claim that was not in the request.
    #[error("{call} returned result for unknown claim UID {uid}")]
    Unknown {
        /// The gRPC method.
        call: &'static str,
        /// The claim's uid in the response.
        uid: String,
    },
    /// A driver failed for a claim.
    #[error("{call} failed for ResourceClaim {claim}: {error}")]
    Refused {
        /// The gRPC method.
        call: &'static str,
        /// The claim's name.
        claim: String,
        /// The driver's error message.
        error: String,
    },
    /// A driver's response lacks claims of the request.
    #[error("{call} skipped {count} ResourceClaims")]
    Skipped {
        /// The gRPC method.
        call: &'static str,
        /// How many claims are missing.
        count: usize,
    },
    /// A container refers to a claim that has not been prepared.
    #[error(
        "unable to get information for ResourceClaim {namespace}/{name}: it has not been prepared for the pod"
    )]
    NotPrepared {
        /// The claim's namespace.
        namespace: String,
        /// The claim's name.
        name: String,
    },
}

/// Identity of a claim, as in requests to drivers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimId {
    /// The claim's namespace.
    pub namespace: String,
    /// The claim's name.
    pub name: String,
    /// The claim's uid.
    pub uid: String,
}

/// A claim that a pod refers to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// The claim's name.
    pub name: String,
    /// Whether the claim was created from a template for this pod.
    pub own: bool,
}

/// A claim that a pod may use, and the drivers of its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocatedClaim {
    /// The claim.
    pub claim: ClaimId,
    /// The drivers.
    pub drivers: BTreeSet<String>,
}

/// The claims to send to each driver, without duplicates.
pub type Batches = BTreeMap<String, Vec<ClaimId>>;

/// Result of starting to prepare or unprepare claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Started {
    /// Another operation on one of the claims is in progress. Nothing was changed; retry when that operation completes.
    Busy,
    /// Call the drivers with these claims, which stay busy until [`Claims::record_prepared`] or
    /// [`Claims::record_unprepared`].
    Call(Batches),
}

/// Whether a pod has claims that must be prepared and unprepared.
#[must_use]
pub fn has_claims(pod: &Pod) -> bool {
    let entries = pod::spec(pod).resource_claims.as_ref();
    entries.is_some_and(|entries| !entries.is_empty()) || extended(pod).is_some()
}

/// The claim for extended resources of the pod's containers (KEP-5004), with the mapping of requests to containers.
fn extended(pod: &Pod) -> Option<&k8s_openapi::api::core::v1::PodExtendedResourceClaimStatus> {
    pod.status.as_ref()?.extended_resource_claim_status.as_ref()
}

fn full_name(pod: &Pod) -> String {
    format!("{}/{}", meta::namespace(pod), meta::name(pod))
}

/// The claim behind an entry of `spec.resourceClaims`; `None` if the controller found that the template needs no claim.
fn resolve(pod: &Pod, entry: &str) -> Result<Option<Reference>, ClaimError> {
    let entries = pod::spec(pod).resource_claims.iter().flatten();
    let found = entries.into_iter().find(|e| e.name == entry);
    if let Some(name) = found.and_then(|e| e.resource_claim_name.clone()) {
        return Ok(Some(Reference { name, own: false }));
    }
    if found.is_none_or(|e| e.resource_claim_template_name.is_none()) {
        return Err(ClaimError::Unsupported {
            pod: full_name(pod),
            entry: entry.to_owned(),
        });
    }
    let created = pod.status.as_ref();
    let created = created.and_then(|s| s.resource_claim_statuses.as_ref());
    let created = created.into_iter().flatten().find(|s| s.name == entry);
    let created = created.ok_or_else(|| ClaimError::NotCreated(full_name(pod)))?;
    let own = |name: &String| Reference {
        name: name.clone(),
        own: true,
    };
    Ok(created.resource_claim_name.as_ref().map(own))
}

/// The claims that a pod refers to, without duplicates. `pod` must include its status.
///
/// # Errors
///
/// The claim of a template has not been created yet.
pub fn references(pod: &Pod) -> Result<Vec<Reference>, ClaimError> {
    let mut found: Vec<Reference> = vec![];
    for entry in pod::spec(pod).resource_claims.iter().flatten() {
        let reference = resolve(pod, &entry.name)?;
        found.extend(reference.filter(|r| !found.iter().any(|f| f.name == r.name)));
    }
    if let Some(claim) = extended(pod) {
        let name = claim.resource_claim_name.clone();
        found.push(Reference { name, own: false });
    }
    Ok(found)
}

/// Checks that a pod may use a claim, and returns the drivers of its devices.
///
/// # Errors
///
/// The claim belongs to another pod, is not reserved for this one, or is not allocated.
pub fn check_claim(
    pod: &Pod,
    reference: &Reference,
    claim: &ResourceClaim,
) -> Result<AllocatedClaim, ClaimError> {
    let (uid, name) = (pod::uid(pod), meta::name(claim));
    let mut owners = claim.metadata.owner_references.iter().flatten();
    if reference.own && !owners.any(|o| o.controller == Some(true) && o.uid == uid) {
        return Err(ClaimError::NotOwner {
            claim: format!("{}/{name}", meta::namespace(claim)),
            pod: full_name(pod),
        });
    }
    let status = claim.status.as_ref();
    let reserved = status.and_then(|s| s.reserved_for.as_ref());
    if !reserved.into_iter().flatten().any(|r| r.uid == uid) {
        return Err(ClaimError::NotReserved {
            pod: meta::name(pod).to_owned(),
            uid: uid.to_owned(),
            claim: name.to_owned(),
            claim_uid: meta::uid(claim).to_owned(),
        });
    }
    let allocation = status.and_then(|s| s.allocation.as_ref());
    let allocation = allocation.ok_or_else(|| ClaimError::NotAllocated(name.to_owned()))?;
    let results = allocation.devices.as_ref().and_then(|d| d.results.as_ref());
    let drivers = results.into_iter().flatten().map(|r| r.driver.clone());
    Ok(AllocatedClaim {
        claim: ClaimId {
            namespace: meta::namespace(pod).to_owned(),
            name: name.to_owned(),
            uid: meta::uid(claim).to_owned(),
        },
        drivers: drivers.collect(),
    })
}

/// Checks a driver's response against the claims of the request. `answers` is keyed by claim uid.
///
/// # Errors
///
/// The driver failed for a claim, skipped one, or returned a result for an unknown one.
pub fn check_response<T>(
    call: &'static str,
    requested: &[ClaimId],
    answers: BTreeMap<String, Result<T, String>>,
) -> Result<Vec<(ClaimId, T)>, ClaimError> {
    let mut results = vec![];
    for (uid, answer) in answers {
        let Some(claim) = requested.iter().find(|claim| claim.uid == uid) else {
            return Err(ClaimError::Unknown { call, uid });
        };
        let answer = answer.map_err(|error| ClaimError::Refused {
            call,
            claim: claim.name.clone(),
            error,
        })?;
        results.push((claim.clone(), answer));
    }
    match requested.len().saturating_sub(results.len()) {
        0 => Ok(results),
        count => Err(ClaimError::Skipped { call, count }),
    }
}

/// A claim that is prepared, or is to be prepared, on this node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Claim {
    uid: String,
    /// Uids of the pods that use the claim.
    pods: BTreeSet<String>,
    /// The devices that each driver has prepared.
    drivers: BTreeMap<String, Vec<Device>>,
    /// Whether the drivers have prepared the claim since this agent started. After a restart they are called again,
    /// because they may have lost their state.
    prepared: bool,
    /// Whether calls to the drivers are in progress.
    busy: bool,
}

impl Claim {
    /// The prepared devices of a request, or of all requests, each with its driver.
    fn devices<'a>(
        &'a self,
        request: Option<&str>,
    ) -> impl Iterator<Item = (&'a String, &'a Device)> {
        let of_driver = |(driver, devices): (&'a String, &'a Vec<Device>)| {
            devices.iter().map(move |device| (driver, device))
        };
        let all = self.drivers.iter().flat_map(of_driver);
        // A device without request names serves all requests.
        all.filter(move |(_, device)| match (request, &device.request_names) {
            (Some(request), Some(names)) => names.is_empty() || names.iter().any(|n| n == request),
            _ => true,
        })
    }
}

/// The claims of this node, by namespace and name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Claims(BTreeMap<(String, String), Claim>);

fn key(claim: &ClaimId) -> (String, String) {
    (claim.namespace.clone(), claim.name.clone())
}

impl Claims {
    fn claim_id(&self, (namespace, name): &(String, String)) -> Option<ClaimId> {
        let claim = self.0.get(&(namespace.clone(), name.clone()))?;
        Some(ClaimId {
            namespace: namespace.clone(),
            name: name.clone(),
            uid: claim.uid.clone(),
        })
    }

    /// Adds a pod to all its claims and returns the driver calls that prepare the unprepared ones. On error nothing is
    /// changed.
    ///
    /// # Errors
    ///
    /// An older claim of the same name still exists.
    pub fn prepare(&mut self, pod: &str, wanted: &[AllocatedClaim]) -> Result<Started, ClaimError> {
        for AllocatedClaim { claim, .. } in wanted {
            match self.0.get(&key(claim)) {
                Some(known) if known.uid != claim.uid => {
                    return Err(ClaimError::Replaced {
                        name: claim.name.clone(),
                        uid: known.uid.clone(),
                    });
                }
                Some(known) if known.busy => return Ok(Started::Busy),
                _ => {}
            }
        }
        let mut batches = Batches::new();
        for AllocatedClaim { claim, drivers } in wanted {
            let known = self.0.entry(key(claim)).or_default();
            known.uid.clone_from(&claim.uid);
            known.pods.insert(pod.to_owned());
            for driver in drivers {
                known.drivers.entry(driver.clone()).or_default();
            }
            // If two entries name the same claim, the second finds it busy.
            if known.prepared || std::mem::replace(&mut known.busy, true) {
                continue;
            }
            for driver in known.drivers.keys() {
                let batch = batches.entry(driver.clone()).or_default();
                batch.push(claim.clone());
            }
            // A claim without devices needs no driver call.
            known.prepared = known.drivers.is_empty();
            known.busy = !known.prepared;
        }
        Ok(Started::Call(batches))
    }

    /// Records the results of prepare calls; `done` has the devices from each driver that succeeded. A claim is
    /// prepared when all its drivers have succeeded. The next attempt calls the other drivers again, and all are called
    /// to unprepare the claim when the pod terminates.
    pub fn record_prepared(
        &mut self,
        requested: &Batches,
        done: &BTreeMap<String, Vec<(ClaimId, Vec<Device>)>>,
    ) {
        for claim in requested.values().flatten() {
            let Some(known) = self.0.get_mut(&key(claim)) else {
                continue;
            };
            let mut open = false;
            for (driver, devices) in &mut known.drivers {
                let answers = done.get(driver).into_iter().flatten();
                match answers.into_iter().find(|(claim_id, _)| claim_id == claim) {
                    Some((_, prepared)) => devices.clone_from(prepared),
                    None => open = true,
                }
            }
            (known.prepared, known.busy) = (!open, false);
        }
    }

    /// Starts to unprepare the claims of a terminated pod that no other pod uses, and returns the driver calls.
    pub fn begin_unprepare(&mut self, pod: &str) -> Started {
        let own = |claim: &Claim| claim.pods.contains(pod);
        if self.0.values().any(|claim| own(claim) && claim.busy) {
            return Started::Busy;
        }
        let mut batches = Batches::new();
        let mut unused = vec![];
        for (at, claim) in &mut self.0 {
            if !own(claim) {
                continue;
            }
            if claim.pods.len() > 1 {
                claim.pods.remove(pod);
                continue;
            }
            if claim.drivers.is_empty() {
                unused.push(at.clone());
                continue;
            }
            claim.busy = true;
            for driver in claim.drivers.keys() {
                let batch = batches.entry(driver.clone()).or_default();
                batch.push(ClaimId {
                    namespace: at.0.clone(),
                    name: at.1.clone(),
                    uid: claim.uid.clone(),
                });
            }
        }
        self.0.retain(|at, _| !unused.contains(at));
        Started::Call(batches)
    }

    /// Records the results of unprepare calls. If all succeeded (`done`), the claims are removed; otherwise the next
    /// attempt repeats the calls.
    pub fn record_unprepared(&mut self, requested: &Batches, done: bool) {
        for claim in requested.values().flatten() {
            if done {
                self.0.remove(&key(claim));
            } else if let Some(known) = self.0.get_mut(&key(claim)) {
                // Some drivers may have unprepared the claim, so the next pod that uses it prepares it again.
                (known.prepared, known.busy) = (false, false);
            }
        }
    }

    /// Whether a pod uses any claim.
    #[must_use]
    pub fn uses(&self, pod: &str) -> bool {
        self.0.values().any(|claim| claim.pods.contains(pod))
    }

    /// Uids of the pods that use claims.
    #[must_use]
    pub fn pods(&self) -> BTreeSet<String> {
        let pods = self.0.values().flat_map(|claim| &claim.pods);
        pods.cloned().collect()
    }

    /// Number of prepared claims by driver; the empty name has the total.
    #[must_use]
    pub fn in_use(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::from([(String::new(), 0_usize)]);
        for claim in self.0.values().filter(|claim| claim.prepared) {
            for driver in claim.drivers.keys().map(String::as_str).chain([""]) {
                let count = counts.entry(driver.to_owned()).or_default();
                *count = count.saturating_add(1);
            }
        }
        counts
    }

    /// The names of the claims that a container refers to, each with a request name; `None` means all requests.
    fn of_container(
        pod: &Pod,
        container: &Container,
    ) -> Result<Vec<(String, Option<String>)>, ClaimError> {
        let resources = container.resources.as_ref();
        let mut found = vec![];
        for claim in resources
            .and_then(|r| r.claims.as_ref())
            .into_iter()
            .flatten()
        {
            let reference = resolve(pod, &claim.name)?;
            let request = claim.request.clone().filter(|r| !r.is_empty());
            found.extend(reference.map(|r| (r.name, request)));
        }
        if let Some(claim) = extended(pod) {
            let mappings = claim.request_mappings.iter();
            let own = mappings.filter(|m| m.container_name == container.name);
            let of = |request: &String| (claim.resource_claim_name.clone(), Some(request.clone()));
            found.extend(own.map(|m| of(&m.request_name)));
        }
        Ok(found)
    }

    fn get(&self, pod: &Pod, name: &str) -> Result<&Claim, ClaimError> {
        let namespace = meta::namespace(pod);
        let known = self.0.get(&(namespace.to_owned(), name.to_owned()));
        known
            .filter(|claim| claim.pods.contains(pod::uid(pod)))
            .ok_or_else(|| ClaimError::NotPrepared {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            })
    }

    /// Fully qualified names of a container's CDI devices, without duplicates.
    ///
    /// # Errors
    ///
    /// The container refers to a claim that is not prepared for the pod.
    pub fn cdi(&self, pod: &Pod, container: &Container) -> Result<Vec<String>, ClaimError> {
        let mut ids: Vec<String> = vec![];
        for (name, request) in Self::of_container(pod, container)? {
            for (_, device) in self.get(pod, &name)?.devices(request.as_deref()) {
                for id in device.cdi_device_ids.iter().flatten() {
                    if !ids.contains(id) {
                        ids.push(id.clone());
                    }
                }
            }
        }
        Ok(ids)
    }

    /// The claims that a container refers to, with their devices by driver. Unprepared claims are omitted.
    #[must_use]
    pub fn claims_of_container(
        &self,
        pod: &Pod,
        container: &Container,
    ) -> Vec<(ClaimId, &BTreeMap<String, Vec<Device>>)> {
        let mut names: Vec<String> = vec![];
        for (name, _) in Self::of_container(pod, container).unwrap_or_default() {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let claims = names.into_iter().filter_map(|name| {
            let claim = self.get(pod, &name).ok()?;
            let claim_id = self.claim_id(&(meta::namespace(pod).to_owned(), name))?;
            Some((claim_id, &claim.drivers))
        });
        claims.collect()
    }
}
