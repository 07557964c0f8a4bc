//! The capacity and the allocatable resources of the node (`pkg/kubelet/nodestatus/setters.go`). Pure.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;

use super::eviction::{Resource, Threshold, reserved_by_thresholds};
use crate::pod::resources::Amounts;
use crate::quantity::Quantity;

/// The size of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineSize {
    /// Logical processors.
    pub cpus: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of the filesystem that holds the root directory.
    pub storage: u64,
    /// Huge pages: size of a page in bytes, and number of pages.
    pub huge_pages: Vec<(u64, u64)>,
}

/// Settings that limit the node's capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits<'a> {
    /// `maxPods`.
    pub pods: i64,
    /// `podsPerCore`; 0 means no limit.
    pub pods_per_core: i64,
    /// Whether ephemeral storage is a resource (`localStorageCapacityIsolation`).
    pub ephemeral_storage: bool,
    /// `systemReserved` and `kubeReserved` together.
    pub reserved: &'a Amounts,
    /// The eviction thresholds; hard thresholds for memory and disk reduce the allocatable amounts.
    pub thresholds: &'a [Threshold],
}

/// The resource name of huge pages of a size in bytes, for instance `hugepages-2Mi`.
#[must_use]
pub(crate) fn huge_page_resource(bytes: u64) -> String {
    format!("hugepages-{}", Quantity::from_bytes(bytes))
}

/// Whether a resource is an extended one: it has a domain, and the domain is not below `kubernetes.io`.
#[must_use]
pub fn is_extended(name: &str) -> bool {
    name.split_once('/')
        .is_some_and(|(domain, _)| domain != "kubernetes.io" && !domain.ends_with(".kubernetes.io"))
        && !name.starts_with("requests.")
}

/// Number of processors in a list such as `0-3,8`. `None` if the list is malformed.
#[must_use]
pub fn count_cpus(list: &str) -> Option<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        last.checked_sub(first)?.checked_add(1)
    };
    let counts: Option<Vec<u32>> = list.trim().split(',').map(range).collect();
    counts.map(|counts| counts.into_iter().fold(0, u32::saturating_add))
}

/// The capacity of the machine.
#[must_use]
pub fn capacity(machine: &MachineSize, limits: Limits<'_>) -> Amounts {
    let pods = match limits.pods_per_core {
        0 => limits.pods,
        per_core => limits
            .pods
            .min(per_core.saturating_mul(i64::from(machine.cpus))),
    };
    let mut amounts = Amounts::from([
        (
            "cpu".to_owned(),
            Quantity::from_units(i64::from(machine.cpus)),
        ),
        ("memory".to_owned(), Quantity::from_bytes(machine.memory)),
        ("pods".to_owned(), Quantity::from_units(pods)),
    ]);
    if limits.ephemeral_storage {
        amounts.insert(
            "ephemeral-storage".to_owned(),
            Quantity::from_bytes(machine.storage),
        );
    }
    for (bytes, pages) in &machine.huge_pages {
        let total = Quantity::from_bytes(bytes.saturating_mul(*pages));
        amounts.insert(huge_page_resource(*bytes), total);
    }
    amounts
}

/// The allocatable resources: the capacity minus reserved amounts and hard eviction thresholds. Huge pages are also
/// subtracted from memory, because ordinary requests cannot use them.
#[must_use]
pub fn allocatable(machine: &MachineSize, limits: Limits<'_>) -> Amounts {
    let mut amounts = capacity(machine, limits);
    let huge = amounts
        .iter()
        .filter(|(name, _)| name.starts_with("hugepages-"))
        .fold(Quantity::ZERO, |sum, (_, amount)| sum + *amount);
    for (name, amount) in &mut amounts {
        if let Some(reserved) = limits.reserved.get(name) {
            *amount = (*amount - *reserved).max(Quantity::ZERO);
        }
        let (kept, capacity) = match name.as_str() {
            "memory" => (Resource::Memory, machine.memory),
            "ephemeral-storage" => (Resource::EphemeralStorage, machine.storage),
            _ => continue,
        };
        *amount = (*amount - reserved_by_thresholds(limits.thresholds, kept, capacity))
            .max(Quantity::ZERO);
        if kept == Resource::Memory {
            *amount = (*amount - huge).max(Quantity::ZERO);
        }
    }
    amounts
}

/// How to treat extended resources that the Node object had before this agent started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extended {
    /// Keep the amounts: an administrator advertised them.
    Kept,
    /// Advertise zero: device plugins of a previous agent provided them and have not registered with this one.
    Zeroed,
}

/// The agent's own amounts in API form, merged with other extended resources of the Node object.
#[must_use]
pub fn reported(
    own: &Amounts,
    before: Option<&BTreeMap<String, Text>>,
    extended: Extended,
) -> BTreeMap<String, Text> {
    let foreign = before.into_iter().flatten();
    let foreign = foreign.filter(|(name, _)| is_extended(name) && !own.contains_key(*name));
    let mut texts: BTreeMap<String, Text> = foreign
        .map(|(name, amount)| match extended {
            Extended::Kept => (name.clone(), amount.clone()),
            Extended::Zeroed => (name.clone(), Text("0".into())),
        })
        .collect();
    texts.extend(
        own.iter()
            .map(|(name, amount)| (name.clone(), Text(amount.to_string()))),
    );
    texts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(reserved: &Amounts) -> Limits<'_> {
        Limits {
            pods: 110,
            pods_per_core: 0,
            ephemeral_storage: true,
            reserved,
            thresholds: &[],
        }
    }

    #[test]
    fn huge_pages_are_advertised_and_subtracted_from_memory() {
        let machine = MachineSize {
            cpus: 4,
            memory: 8 << 30,
            storage: 100 << 30,
            huge_pages: vec![(2 << 20, 512), (1 << 30, 0)],
        };
        let reserved = Amounts::from([("memory".to_owned(), Quantity::from_bytes(1 << 30))]);
        let text = |amounts: &Amounts, name: &str| amounts[name].to_string();
        let all = capacity(&machine, limits(&reserved));
        assert_eq!(text(&all, "hugepages-2Mi"), "1Gi");
        assert_eq!(text(&all, "hugepages-1Gi"), "0");
        assert_eq!(text(&all, "memory"), "8Gi");
        let usable = allocatable(&machine, limits(&reserved));
        assert_eq!(text(&usable, "memory"), "6Gi");
        assert_eq!(text(&usable, "hugepages-2Mi"), "1Gi");
    }

    #[test]
    fn hard_eviction_thresholds_are_subtracted_from_allocatable() {
        use crate::node::eviction::{DEFAULT_HARD, ThresholdSettings, parse};
        let machine = MachineSize {
            cpus: 4,
            memory: 8 << 30,
            storage: 100 << 30,
            huge_pages: vec![],
        };
        let hard = DEFAULT_HARD.map(|(k, v)| (k.to_owned(), v.to_owned()));
        let none = BTreeMap::new();
        let soft = [("memory.available".to_owned(), "1Gi".to_owned())].into();
        let grace = [("memory.available".to_owned(), "1m".to_owned())].into();
        let thresholds = parse(ThresholdSettings {
            hard: &hard.into(),
            soft: &soft,
            soft_grace: &grace,
            min_reclaim: &none,
            pods_are_limited: true,
        });
        let reserved = Amounts::from([("memory".to_owned(), Quantity::from_bytes(1 << 30))]);
        let limits = Limits {
            thresholds: &thresholds.expect("thresholds"),
            ..limits(&reserved)
        };
        let usable = allocatable(&machine, limits);
        // Ten percent as the kubelet computes it, with 32-bit floating point.
        let text = |name: &str| usable[name].to_string();
        assert_eq!(
            (text("memory"), text("ephemeral-storage")),
            ("7068Mi".into(), "96636764000".into())
        );
        assert_eq!(capacity(&machine, limits)["memory"].to_string(), "8Gi");
    }

    #[test]
    fn cpus_are_counted_from_the_kernels_list() {
        for (list, expected) in [
            ("0", Some(1)),
            ("0-3\n", Some(4)),
            ("0-3,8,10-11", Some(7)),
            ("", None),
            ("3-0", None),
            ("a-b", None),
        ] {
            assert_eq!(count_cpus(list), expected, "{list:?}");
        }
    }

    #[test]
    fn pods_per_core_and_storage_isolation_limit_what_is_advertised() {
        let machine = MachineSize {
            cpus: 4,
            ..MachineSize::default()
        };
        let reserved = Amounts::new();
        for (per_core, expected) in [(0, 110), (10, 40), (100, 110)] {
            let limits = Limits {
                pods_per_core: per_core,
                ephemeral_storage: false,
                ..limits(&reserved)
            };
            let all = capacity(&machine, limits);
            assert_eq!(all["pods"].units(), expected, "{per_core} per core");
            assert!(!all.contains_key("ephemeral-storage"));
        }
    }

    #[test]
    fn extended_resources_of_others_are_kept_or_zeroed() {
        let text = |t: &str| Text(t.into());
        let before = BTreeMap::from([
            ("cpu".to_owned(), text("9")),
            ("example.com/gpu".to_owned(), text("4")),
            ("hugepages-2Mi".to_owned(), text("1Gi")),
        ]);
        let own = Amounts::from([("cpu".to_owned(), Quantity::from_units(2))]);
        for (extended, gpus) in [(Extended::Kept, "4"), (Extended::Zeroed, "0")] {
            let expected = BTreeMap::from([
                ("cpu".to_owned(), text("2")),
                ("example.com/gpu".to_owned(), text(gpus)),
            ]);
            assert_eq!(reported(&own, Some(&before), extended), expected);
        }
        assert!(!is_extended("kubernetes.io/x") && !is_extended("a.kubernetes.io/x"));
        assert!(!is_extended("cpu") && !is_extended("requests.example.com/x"));
    }
}
