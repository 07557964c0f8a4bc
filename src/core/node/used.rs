//! Resources of the admitted pods as running sums, so that the cost of an admission does not depend on the number of
//! pods. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::devices::is_from_claim;
use crate::pod::resources::{Amounts, has_host_ports, ports_clash, requests};
use crate::quantity::Quantity;

/// Resources by pod uid, and their sum.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Used {
    taken: BTreeMap<String, Amounts>,
    total: Amounts,
    with_ports: BTreeMap<String, Arc<Pod>>,
}

impl Used {
    /// Sets a pod's resources to its current requests.
    pub fn set(&mut self, uid: &str, pod: &Arc<Pod>) {
        self.remove(uid);
        let amounts = resources_of(pod);
        for (name, amount) in amounts.iter().filter(|(_, amount)| !amount.is_zero()) {
            let total = self.total.entry(name.clone()).or_default();
            *total = *total + *amount;
        }
        self.taken.insert(uid.to_owned(), amounts);
        if has_host_ports(pod) {
            self.with_ports.insert(uid.to_owned(), Arc::clone(pod));
        }
    }

    /// Removes a pod's resources.
    pub fn remove(&mut self, uid: &str) {
        self.with_ports.remove(uid);
        for (name, amount) in self.taken.remove(uid).into_iter().flatten() {
            let Some(total) = self.total.get_mut(&name) else {
                continue;
            };
            *total = *total - amount;
            if total.is_zero() {
                self.total.remove(&name);
            }
        }
    }

    /// Amount of a resource that all other pods take.
    #[must_use]
    pub(crate) fn by_others(&self, uid: &str, resource: &str) -> Quantity {
        let of = |amounts: &Amounts| amounts.get(resource).copied().unwrap_or_default();
        of(&self.total) - self.taken.get(uid).map(of).unwrap_or_default()
    }

    /// Whether a pod requests a host port that another pod uses.
    #[must_use]
    pub fn ports_clash(&self, uid: &str, pod: &Pod) -> bool {
        let others = self.with_ports.iter().filter(|(other, _)| *other != uid);
        ports_clash(pod, others.map(|(_, pod)| &**pod))
    }
}

/// The resources that a pod takes from the node, including one of `pods`. Extended resources that a claim provides
/// (KEP-5004) are excluded: no device plugin allocates them.
pub(super) fn resources_of(pod: &Pod) -> Amounts {
    let status = pod.status.as_ref();
    let claim = status.and_then(|s| s.extended_resource_claim_status.as_ref());
    let mut amounts = match claim {
        None => requests(pod),
        Some(_) => requests(&without_claimed(pod.clone())),
    };
    amounts.insert("pods".into(), Quantity::from_units(1));
    amounts
}

fn without_claimed(mut pod: Pod) -> Pod {
    let Some(mut spec) = pod.spec.take() else {
        return pod;
    };
    let containers = spec.containers.iter_mut();
    for container in containers.chain(spec.init_containers.iter_mut().flatten()) {
        let Some(resources) = &mut container.resources else {
            continue;
        };
        let lists = [&mut resources.requests, &mut resources.limits];
        for list in lists.into_iter().flatten() {
            list.retain(|resource, _| !is_from_claim(&pod, &container.name, resource));
        }
    }
    pod.spec = Some(spec);
    pod
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn pod(cpu: &str, port: u16) -> Arc<Pod> {
        let pod = json!({"spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}},
            "ports": [{"containerPort": 80, "hostPort": port}]}]}});
        Arc::new(serde_json::from_value(pod).expect("a pod"))
    }

    proptest! {
        /// After any sequence of changes, the running sums equal the sums over the present pods.
        #[test]
        fn running_sums_equal_the_recomputed_sums(steps in proptest::collection::vec((0u8..4, proptest::option::of((0usize..6, 0u16..3))), 0..30)) {
            const SIZES: [&str; 6] = ["0", "1", "250m", "1e30", "9223372036854775807", "0.0000001"];
            let (mut used, mut pods) = (Used::default(), BTreeMap::new());
            for (uid, change) in steps {
                let uid = uid.to_string();
                match change {
                    Some((size, port)) => {
                        let pod = pod(SIZES[size], port);
                        used.set(&uid, &pod);
                        pods.insert(uid, pod);
                    }
                    None => {
                        used.remove(&uid);
                        pods.remove(&uid);
                    }
                }
                let mut fresh = Used::default();
                pods.iter().for_each(|(uid, pod)| fresh.set(uid, pod));
                prop_assert_eq!(&used, &fresh);
                for own in pods.keys() {
                    let others = pods.iter().filter(|(uid, _)| *uid != own);
                    let sum: Quantity = others.map(|(_, pod)| resources_of(pod)["cpu"]).sum();
                    prop_assert_eq!(used.by_others(own, "cpu"), sum);
                }
            }
        }
    }
}
