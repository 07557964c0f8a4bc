//! The share of the node that pods may use together, and the resources that are reserved and enforced for others.

use std::collections::BTreeMap;

use super::document::Document;
use super::values::invalid;
use super::{ConfigError, OwnCgroups};
use holdfast_core::node::capacity::count_cpus;
use holdfast_core::node::cgroup_tree::{Reserved, Rules};
use holdfast_core::node::features::{MEMORY_QOS, QOS_RESERVED};
use holdfast_core::pod::memory_qos::MemoryQos;
use holdfast_core::pod::resources::Amounts;
use holdfast_core::quantity::Quantity;

const FIELD: &str = "enforceNodeAllocatable";

fn amounts(field: &str, map: Option<&BTreeMap<String, String>>) -> Result<Amounts, ConfigError> {
    let parse = |(name, text): (&String, &String)| match text.parse::<Quantity>() {
        Ok(amount) => Ok((name.clone(), amount)),
        Err(_) => {
            let remedy = "use a quantity such as 100m or 256Mi";
            Err(invalid(&format!("{field}.{name}"), text, remedy))
        }
    };
    map.into_iter().flatten().map(parse).collect()
}

/// Returns the sum of `systemReserved` and `kubeReserved`.
pub(super) fn reserved(d: &Document) -> Result<Amounts, ConfigError> {
    let mut sums = amounts("systemReserved", d.system_reserved.as_ref())?;
    for (name, amount) in amounts("kubeReserved", d.kube_reserved.as_ref())? {
        let sum = sums.entry(name).or_default();
        *sum = *sum + amount;
    }
    // These processors are the reservation, whatever the other fields state for cpu.
    if let Some(list) = d.reserved_system_cpus.as_ref().filter(|l| !l.is_empty()) {
        let field = "reservedSystemCPUs";
        let remedy = "use a list of CPUs such as 0-1,4";
        let count = count_cpus(list).ok_or_else(|| invalid(field, list, remedy))?;
        let cgroups = [&d.system_reserved_cgroup, &d.kube_reserved_cgroup];
        if cgroups.into_iter().flatten().any(|name| !name.is_empty()) {
            let remedy = "remove it, or systemReservedCgroup and kubeReservedCgroup: CPUs are reserved either by number or by shares";
            return Err(invalid(field, list, remedy));
        }
        sums.insert("cpu".into(), Quantity::from_units(i64::from(count)));
    }
    Ok(sums)
}

/// Returns the cgroups of the agent and of the system's processes. `root` is the configured `cgroupRoot`.
pub(super) fn own_cgroups(d: &Document, root: Option<&str>) -> Result<OwnCgroups, ConfigError> {
    let path = |field: &str, name: Option<&String>| {
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        if name.split('/').any(|part| part == "..") {
            return Err(invalid(field, name, "use a path without '..'"));
        }
        let parts = name.split('/').filter(|part| !["", "."].contains(part));
        Ok(Some(format!("/{}", parts.collect::<Vec<_>>().join("/"))))
    };
    let field = "systemCgroups";
    let system = path(field, d.system_cgroups.as_ref())?;
    match &system {
        Some(name) if root.is_none_or(str::is_empty) => {
            let remedy = "also set cgroupRoot (--cgroup-root), for instance to /";
            return Err(invalid(field, name, remedy));
        }
        Some(name) if name == "/" => {
            let remedy = "use a cgroup below the root: the agent moves system processes out of the root cgroup";
            return Err(invalid(field, name, remedy));
        }
        _ => {}
    }
    Ok(OwnCgroups {
        agent: path("kubeletCgroups", d.kubelet_cgroups.as_ref())?,
        system,
    })
}

/// The fields about one of the two reservations.
struct Fields<'a> {
    whose: &'static str,
    cgroup: (&'static str, Option<&'a String>),
    amounts: (&'static str, Option<&'a BTreeMap<String, String>>),
}

/// Returns the limit that is enforced for one of the two reservations, if any.
fn enforced_reservation(
    list: &[String],
    fields: &Fields<'_>,
) -> Result<Option<Reserved>, ConfigError> {
    let whole = fields.whose.to_owned();
    let compressible = format!("{whole}-compressible");
    let compressible_only = match (list.contains(&whole), list.contains(&compressible)) {
        (false, false) => return Ok(None),
        (true, true) => {
            let remedy = format!("use {whole} or {compressible}, not both");
            return Err(invalid(FIELD, list, &remedy));
        }
        (_, compressible) => compressible,
    };
    let (field, name) = fields.cgroup;
    let named = name.filter(|name| !name.is_empty());
    let cgroup = named.cloned().ok_or_else(|| {
        let remedy = format!("set it to an existing cgroup: {FIELD} contains {whole}");
        invalid(field, "", &remedy)
    })?;
    let (field, map) = fields.amounts;
    if map.is_none() {
        let remedy = format!("set it: {FIELD} contains {whole}, but this field reserves nothing");
        return Err(invalid(field, "", &remedy));
    }
    Ok(Some(Reserved {
        cgroup,
        amounts: amounts(field, map)?,
        compressible_only,
    }))
}

fn check(list: &[String], flat: bool) -> Result<(), ConfigError> {
    for (place, what) in list.iter().enumerate() {
        if list[..place].contains(what) {
            return Err(invalid(FIELD, list, &format!("list {what} once")));
        }
        if flat && !matches!(what.as_str(), "" | "none") {
            let remedy = format!("{FIELD} contains {what}: set {FIELD}: [], or use true");
            return Err(invalid("cgroupsPerQOS", false, &remedy));
        }
        match what.as_str() {
            ""
            | "pods"
            | "system-reserved"
            | "system-reserved-compressible"
            | "kube-reserved"
            | "kube-reserved-compressible" => {}
            "none" if list.len() == 1 => {}
            "none" => return Err(invalid(FIELD, list, "use none without other entries")),
            other => {
                let remedy =
                    "use pods, system-reserved, kube-reserved, their -compressible forms, or none";
                return Err(invalid(FIELD, other, remedy));
            }
        }
    }
    Ok(())
}

/// Returns the percentage of requested memory that `qosReserved` withholds from lower QoS classes.
fn qos_memory(d: &Document) -> Result<Option<u8>, ConfigError> {
    let mut percent = None;
    for (resource, text) in d.qos_reserved.iter().flatten() {
        let field = format!("qosReserved.{resource}");
        if resource != "memory" {
            return Err(invalid(
                &field,
                text,
                "only memory can be reserved: remove it",
            ));
        }
        let number = text.strip_suffix('%').and_then(|n| n.parse::<u8>().ok());
        let number = number.filter(|n| *n <= 100);
        percent = Some(number.ok_or_else(|| invalid(&field, text, "use 0% to 100%"))?);
    }
    Ok(percent)
}

/// Returns how memory is protected and throttled, if the feature gate is on.
fn memory(d: &Document, is_open: bool) -> Result<Option<MemoryQos>, ConfigError> {
    let throttling = d.memory_throttling_factor.unwrap_or(0.9);
    if !(throttling > 0.0 && throttling <= 1.0) {
        let remedy = "use a number above 0 and up to 1";
        return Err(invalid("memoryThrottlingFactor", throttling, remedy));
    }
    let field = "memoryReservationPolicy";
    let reserves = match d.memory_reservation_policy.as_deref() {
        None | Some("" | "None") => false,
        Some(policy @ "TieredReservation") if !is_open => {
            let remedy = format!("set featureGates.{MEMORY_QOS}: true, or use None");
            return Err(invalid(field, policy, &remedy));
        }
        Some("TieredReservation") => true,
        Some(other) => return Err(invalid(field, other, "use None or TieredReservation")),
    };
    Ok(is_open.then_some(MemoryQos {
        throttling,
        reserves,
    }))
}

/// Returns the rules that are enforced, and the fields that have no effect.
pub(super) fn enforcement(d: &Document) -> Result<(Rules, Vec<String>), ConfigError> {
    let default = ["pods".to_owned()];
    let list = d.enforce_node_allocatable.as_deref().unwrap_or(&default);
    let flat = d.cgroups_per_qos == Some(false);
    check(list, flat)?;
    let mut unused = vec![];
    let gates = d.feature_gates.as_ref();
    let is_open = |name| gates.and_then(|gates| gates.get(name)) == Some(&true);
    let qos_memory = match qos_memory(d)? {
        Some(_) if !is_open(QOS_RESERVED) => {
            unused.push(format!(
                "qosReserved (set featureGates.{QOS_RESERVED}: true)"
            ));
            None
        }
        percent => percent,
    };
    let system = Fields {
        whose: "system-reserved",
        cgroup: ("systemReservedCgroup", d.system_reserved_cgroup.as_ref()),
        amounts: ("systemReserved", d.system_reserved.as_ref()),
    };
    let kube = Fields {
        whose: "kube-reserved",
        cgroup: ("kubeReservedCgroup", d.kube_reserved_cgroup.as_ref()),
        amounts: ("kubeReserved", d.kube_reserved.as_ref()),
    };
    let rules = Rules {
        flat,
        limits_pods: list.iter().any(|what| what == "pods"),
        system: enforced_reservation(list, &system)?,
        kube: enforced_reservation(list, &kube)?,
        qos_memory,
        memory: memory(d, is_open(MEMORY_QOS))?,
    };
    Ok((rules, unused))
}
