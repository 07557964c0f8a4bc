//! Resource claims of dynamic resource allocation (kubelet spec, 14.6): which of a pod's claims are to be prepared by their
//! drivers and which are to be given back, and which CDI devices containers find. Pure; the world around it is
//! `agent::node::claims`.
//!
//! A claim is prepared once for all pods that use it, and given back when the last of them has ended. While its drivers are
//! asked it is busy: nobody else begins anything with it. So a claim is never given back while it is prepared for another pod.

pub mod checkpoint;
pub mod health;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;

use self::checkpoint::Device;
use crate::core::meta;
use crate::core::pod;

/// Why a pod's claims cannot be prepared, given back or used, in the words that the kubelet has for it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// The claim of a template is not named in the pod's status yet.
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
    /// A claim of a template is another pod's.
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
        /// Its uid.
        uid: String,
        /// The claim's name.
        claim: String,
        /// Its uid.
        claim_uid: String,
    },
    /// The claim has no devices yet.
    #[error("ResourceClaim {0}: not allocated")]
    NotAllocated(String),
    /// Another claim of the same name is still prepared.
    #[error(
        "old ResourceClaim with same name {name} and different UID {uid} still exists (previous pod force-deleted?!)"
    )]
    Replaced {
        /// The name.
        name: String,
        /// The uid of the old one.
        uid: String,
    },
    /// A driver answered for a claim that it was not asked for.
    #[error("{call} returned result for unknown claim UID {uid}")]
    Unknown {
        /// The method.
        call: &'static str,
        /// The uid in the answer.
        uid: String,
    },
    /// A driver could not do it.
    #[error("{call} failed for ResourceClaim {claim}: {error}")]
    Refused {
        /// The method.
        call: &'static str,
        /// The claim's name.
        claim: String,
        /// The driver's words.
        error: String,
    },
    /// A driver did not answer for all claims.
    #[error("{call} skipped {count} ResourceClaims")]
    Skipped {
        /// The method.
        call: &'static str,
        /// How many are missing.
        count: usize,
    },
    /// A container refers to a claim that has not been prepared.
    #[error(
        "unable to get information for ResourceClaim {namespace}/{name}: it has not been prepared for the pod"
    )]
    NotPrepared {
        /// The claim's namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
}

/// A claim, as drivers are told of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Named {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

/// A claim that a pod refers to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// The claim's name.
    pub name: String,
    /// It was made from a template, for this pod alone.
    pub own: bool,
}

/// A claim that a pod may use, and the drivers of its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The claim.
    pub claim: Named,
    /// The drivers.
    pub drivers: BTreeSet<String>,
}

/// Which claims each driver is to be asked about; no claim stands twice under a driver.
pub type Batches = BTreeMap<String, Vec<Named>>;

/// What is to be done first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Begun {
    /// Somebody is about one of the claims: nothing was changed, and another try makes sense when that has ended.
    Busy,
    /// These are to be asked; the claims are busy until [`Claims::prepared`] or [`Claims::given_back`].
    Ask(Batches),
}

/// Whether a pod has claims, so that something has to be prepared and given back for it.
#[must_use]
pub fn has_claims(pod: &Pod) -> bool {
    let entries = pod::spec(pod).resource_claims.as_ref();
    entries.is_some_and(|entries| !entries.is_empty()) || extended(pod).is_some()
}

/// The claim that gives extended resources of the pod's containers (KEP-5004), and which request of it is whose.
fn extended(pod: &Pod) -> Option<&k8s_openapi::api::core::v1::PodExtendedResourceClaimStatus> {
    pod.status.as_ref()?.extended_resource_claim_status.as_ref()
}

fn full_name(pod: &Pod) -> String {
    format!("{}/{}", meta::namespace(pod), meta::name(pod))
}

/// The claim behind an entry of `spec.resourceClaims`; none where the template's controller has found that none is needed.
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
    let made = pod.status.as_ref();
    let made = made.and_then(|s| s.resource_claim_statuses.as_ref());
    let made = made.into_iter().flatten().find(|s| s.name == entry);
    let made = made.ok_or_else(|| ClaimError::NotCreated(full_name(pod)))?;
    let own = |name: &String| Reference {
        name: name.clone(),
        own: true,
    };
    Ok(made.resource_claim_name.as_ref().map(own))
}

/// The claims that a pod refers to, each once. What its status says has to be in `pod`.
///
/// # Errors
///
/// One that a template stands for has not been made yet.
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

/// Whether a pod may use a claim, and what of it is to be prepared.
///
/// # Errors
///
/// It is another pod's, not reserved for this one, or has no devices yet.
pub fn checked(
    pod: &Pod,
    reference: &Reference,
    claim: &ResourceClaim,
) -> Result<Wanted, ClaimError> {
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
    Ok(Wanted {
        claim: Named {
            namespace: meta::namespace(pod).to_owned(),
            name: name.to_owned(),
            uid: meta::uid(claim).to_owned(),
        },
        drivers: drivers.collect(),
    })
}

/// What a driver answered, for all that it was asked about. The answers are by the claims' uids.
///
/// # Errors
///
/// It could not do it for one of the claims, or has answered for others.
pub fn judge<T>(
    call: &'static str,
    asked: &[Named],
    answers: BTreeMap<String, Result<T, String>>,
) -> Result<Vec<(Named, T)>, ClaimError> {
    let mut judged = vec![];
    for (uid, answer) in answers {
        let Some(claim) = asked.iter().find(|claim| claim.uid == uid) else {
            return Err(ClaimError::Unknown { call, uid });
        };
        let answer = answer.map_err(|error| ClaimError::Refused {
            call,
            claim: claim.name.clone(),
            error,
        })?;
        judged.push((claim.clone(), answer));
    }
    match asked.len().saturating_sub(judged.len()) {
        0 => Ok(judged),
        count => Err(ClaimError::Skipped { call, count }),
    }
}

/// A claim that was or is to be prepared on this node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Claim {
    uid: String,
    /// The pods that use it, by uid.
    pods: BTreeSet<String>,
    /// What each of its drivers has prepared.
    drivers: BTreeMap<String, Vec<Device>>,
    /// Its drivers have prepared it since this agent started: after a restart they are asked once more, as they may have lost
    /// what they had.
    prepared: bool,
    /// Its drivers are being asked.
    busy: bool,
}

impl Claim {
    /// What was prepared for a request, or for all, each with its driver.
    fn devices<'a>(
        &'a self,
        request: Option<&str>,
    ) -> impl Iterator<Item = (&'a String, &'a Device)> {
        let of_driver = |(driver, devices): (&'a String, &'a Vec<Device>)| {
            devices.iter().map(move |device| (driver, device))
        };
        let all = self.drivers.iter().flat_map(of_driver);
        // A device without names of requests is for all of them.
        all.filter(move |(_, device)| match (request, &device.request_names) {
            (Some(request), Some(names)) => names.is_empty() || names.iter().any(|n| n == request),
            _ => true,
        })
    }
}

/// The claims of this node, by namespace and name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Claims(BTreeMap<(String, String), Claim>);

fn key(claim: &Named) -> (String, String) {
    (claim.namespace.clone(), claim.name.clone())
}

impl Claims {
    fn named(&self, (namespace, name): &(String, String)) -> Option<Named> {
        let claim = self.0.get(&(namespace.clone(), name.clone()))?;
        Some(Named {
            namespace: namespace.clone(),
            name: name.clone(),
            uid: claim.uid.clone(),
        })
    }

    /// Counts a pod in with all its claims, and says which drivers are to be asked to prepare those that are not prepared.
    /// Where it fails, nothing is changed.
    ///
    /// # Errors
    ///
    /// Another claim of the same name is still there.
    pub fn prepare(&mut self, pod: &str, wanted: &[Wanted]) -> Result<Begun, ClaimError> {
        for Wanted { claim, .. } in wanted {
            match self.0.get(&key(claim)) {
                Some(known) if known.uid != claim.uid => {
                    return Err(ClaimError::Replaced {
                        name: claim.name.clone(),
                        uid: known.uid.clone(),
                    });
                }
                Some(known) if known.busy => return Ok(Begun::Busy),
                _ => {}
            }
        }
        let mut batches = Batches::new();
        for Wanted { claim, drivers } in wanted {
            let known = self.0.entry(key(claim)).or_default();
            known.uid.clone_from(&claim.uid);
            known.pods.insert(pod.to_owned());
            for driver in drivers {
                known.drivers.entry(driver.clone()).or_default();
            }
            // The second of two entries that name one claim finds it busy.
            if known.prepared || std::mem::replace(&mut known.busy, true) {
                continue;
            }
            for driver in known.drivers.keys() {
                let batch = batches.entry(driver.clone()).or_default();
                batch.push(claim.clone());
            }
            // One without devices has nobody to ask.
            known.prepared = known.drivers.is_empty();
            known.busy = !known.prepared;
        }
        Ok(Begun::Ask(batches))
    }

    /// The drivers were asked to prepare; `done` is what those that could have prepared, by driver. A claim is prepared when
    /// all its drivers have: the others are asked again at the next try, and told to give it back when the pod ends.
    pub fn prepared(
        &mut self,
        asked: &Batches,
        done: &BTreeMap<String, Vec<(Named, Vec<Device>)>>,
    ) {
        for claim in asked.values().flatten() {
            let Some(known) = self.0.get_mut(&key(claim)) else {
                continue;
            };
            let mut open = false;
            for (driver, devices) in &mut known.drivers {
                let answers = done.get(driver).into_iter().flatten();
                match answers.into_iter().find(|(named, _)| named == claim) {
                    Some((_, prepared)) => devices.clone_from(prepared),
                    None => open = true,
                }
            }
            (known.prepared, known.busy) = (!open, false);
        }
    }

    /// A pod has ended: the drivers of claims that no other pod uses are to be told.
    pub fn give_back(&mut self, pod: &str) -> Begun {
        let own = |claim: &Claim| claim.pods.contains(pod);
        if self.0.values().any(|claim| own(claim) && claim.busy) {
            return Begun::Busy;
        }
        let mut batches = Batches::new();
        let mut nobodys = vec![];
        for (at, claim) in &mut self.0 {
            if !own(claim) {
                continue;
            }
            if claim.pods.len() > 1 {
                claim.pods.remove(pod);
                continue;
            }
            if claim.drivers.is_empty() {
                nobodys.push(at.clone());
                continue;
            }
            claim.busy = true;
            for driver in claim.drivers.keys() {
                let batch = batches.entry(driver.clone()).or_default();
                batch.push(Named {
                    namespace: at.0.clone(),
                    name: at.1.clone(),
                    uid: claim.uid.clone(),
                });
            }
        }
        self.0.retain(|at, _| !nobodys.contains(at));
        Begun::Ask(batches)
    }

    /// The drivers were told to give back: where all have (`done`), the claims are forgotten; otherwise they are told again at
    /// the next try.
    pub fn given_back(&mut self, asked: &Batches, done: bool) {
        for claim in asked.values().flatten() {
            if done {
                self.0.remove(&key(claim));
            } else if let Some(known) = self.0.get_mut(&key(claim)) {
                // Some of its drivers may have given it back: whoever wants it now has it prepared anew.
                (known.prepared, known.busy) = (false, false);
            }
        }
    }

    /// Whether a pod uses any.
    #[must_use]
    pub fn uses(&self, pod: &str) -> bool {
        self.0.values().any(|claim| claim.pods.contains(pod))
    }

    /// The pods that use claims.
    #[must_use]
    pub fn pods(&self) -> BTreeSet<String> {
        let pods = self.0.values().flat_map(|claim| &claim.pods);
        pods.cloned().collect()
    }

    /// How many claims are prepared, by driver; under an empty name all of them.
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

    /// The names of the claims that a container refers to, with the requests of each; none means all requests.
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

    /// The full names of the CDI devices that a container finds, each once.
    ///
    /// # Errors
    ///
    /// It refers to a claim that has not been prepared for the pod.
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

    /// The claims that a container refers to, with the devices of each by driver. Those that are not prepared are left out.
    #[must_use]
    pub fn held(
        &self,
        pod: &Pod,
        container: &Container,
    ) -> Vec<(Named, &BTreeMap<String, Vec<Device>>)> {
        let mut names: Vec<String> = vec![];
        for (name, _) in Self::of_container(pod, container).unwrap_or_default() {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let held = names.into_iter().filter_map(|name| {
            let claim = self.get(pod, &name).ok()?;
            let named = self.named(&(meta::namespace(pod).to_owned(), name))?;
            Some((named, &claim.drivers))
        });
        held.collect()
    }
}
