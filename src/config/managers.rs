//! The policies of the resource managers (`pkg/kubelet/cm`): CPU, memory and topology.

use super::ConfigError;
use super::document::Document;
use super::values::{invalid, time};
use holdfast_core::cpuset::parse_list;
use holdfast_core::node::cpus::{self, Options};
use holdfast_core::node::features::{CPU_ALPHA_OPTIONS, CPU_BETA_OPTIONS};
use holdfast_core::node::hints::{self, Policy, Scope};
use holdfast_core::node::managers::Rules;
use holdfast_core::node::memory;
use holdfast_core::pod::resources::Amounts;
use holdfast_core::quantity::Quantity;

/// Default for the maximum number of NUMA nodes on which resources are aligned.
const DEFAULT_MAX_NODES: u32 = 8;

fn non_empty(text: Option<&String>) -> Option<&str> {
    text.map(String::as_str).filter(|t| !t.is_empty())
}

/// Parses a flag as Go's `strconv.ParseBool` does.
fn flag(field: &str, text: &str) -> Result<bool, ConfigError> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(invalid(field, text, "use \"true\" or \"false\"")),
    }
}

/// Fails if the feature gate of a CPU option is off.
fn check_gate(field: &str, name: &str, d: &Document) -> Result<(), ConfigError> {
    let (gate, default) = match name {
        "align-by-socket" | "distribute-cpus-across-cores" => (CPU_ALPHA_OPTIONS, false),
        "distribute-cpus-across-numa" => (CPU_BETA_OPTIONS, true),
        _ => return Ok(()),
    };
    let set = d.feature_gates.as_ref().and_then(|gates| gates.get(gate));
    if set.copied().unwrap_or(default) {
        return Ok(());
    }
    let remedy = format!("set featureGates.{gate}: true, or remove the option");
    Err(invalid(field, name, &remedy))
}

fn cpu_options(d: &Document) -> Result<Options, ConfigError> {
    let mut options = Options::default();
    for (name, text) in d.managers.cpu_manager_policy_options.iter().flatten() {
        let field = format!("cpuManagerPolicyOptions.{name}");
        let place = match name.as_str() {
            "full-pcpus-only" => &mut options.full_cores,
            "distribute-cpus-across-numa" => &mut options.across_nodes,
            "align-by-socket" => &mut options.by_socket,
            "distribute-cpus-across-cores" => &mut options.across_cores,
            "strict-cpu-reservation" => &mut options.strict_reservation,
            "prefer-align-cpus-by-uncorecache" => &mut options.by_cache,
            _ => {
                let remedy = "use full-pcpus-only, distribute-cpus-across-numa, align-by-socket, distribute-cpus-across-cores, strict-cpu-reservation or prefer-align-cpus-by-uncorecache";
                return Err(invalid("cpuManagerPolicyOptions", name, remedy));
            }
        };
        check_gate(&field, name, d)?;
        *place = flag(&field, text)?;
    }
    let together = [
        (
            options.full_cores,
            "full-pcpus-only",
            options.across_cores,
            "distribute-cpus-across-cores",
        ),
        (
            options.across_nodes,
            "distribute-cpus-across-numa",
            options.across_cores,
            "distribute-cpus-across-cores",
        ),
        (
            options.by_cache,
            "prefer-align-cpus-by-uncorecache",
            options.across_cores,
            "distribute-cpus-across-cores",
        ),
        (
            options.by_cache,
            "prefer-align-cpus-by-uncorecache",
            options.across_nodes,
            "distribute-cpus-across-numa",
        ),
    ];
    match together.iter().find(|(one, _, other, _)| *one && *other) {
        None => Ok(options),
        Some((_, one, _, other)) => {
            let remedy = format!("it conflicts with {other}: remove one of them");
            Err(invalid("cpuManagerPolicyOptions", one, &remedy))
        }
    }
}

fn cpus(d: &Document, reserved: &Amounts) -> Result<Option<cpus::Rules>, ConfigError> {
    let options = cpu_options(d)?;
    match non_empty(d.managers.cpu_manager_policy.as_ref()) {
        None | Some("none") if options == Options::default() => Ok(None),
        None | Some("none") => {
            let remedy =
                "the policy none has no options: set cpuManagerPolicy: static, or remove them";
            Err(invalid("cpuManagerPolicyOptions", "", remedy))
        }
        Some("static") => {
            let reserved_milli = reserved.get("cpu").map_or(0, |cpu| cpu.milli());
            if reserved_milli <= 0 {
                let remedy = "the static policy needs reserved CPUs: set reservedSystemCPUs, or a cpu of more than 0 in systemReserved or kubeReserved";
                return Err(invalid("cpuManagerPolicy", "static", remedy));
            }
            let list = non_empty(d.reserved_system_cpus.as_ref());
            Ok(Some(cpus::Rules {
                options,
                reserved_milli,
                reserved: list.and_then(parse_list),
            }))
        }
        Some(other) => Err(invalid("cpuManagerPolicy", other, "use none or static")),
    }
}

fn memory(d: &Document) -> Result<Option<memory::Rules>, ConfigError> {
    let mut reserved = memory::Reserved::new();
    for (index, reservation) in d.managers.reserved_memory.iter().flatten().enumerate() {
        let node = reserved.entry(reservation.numa_node).or_default();
        for (resource, text) in &reservation.limits {
            let field = format!("reservedMemory[{index}].limits.{resource}");
            if !memory::is_memory(resource) {
                return Err(invalid(&field, text, "use memory or hugepages-<size>"));
            }
            let amount: Option<Quantity> = text.parse().ok();
            let bytes = amount.and_then(|q| u64::try_from(q.units()).ok());
            let bytes = bytes.filter(|b| *b > 0);
            let remedy = "use a quantity of more than 0, such as 1Gi";
            let bytes = bytes.ok_or_else(|| invalid(&field, text, remedy))?;
            if node.insert(resource.clone(), bytes).is_some() {
                let remedy = "list each resource of a NUMA node once: add up the amounts";
                return Err(invalid(&field, text, remedy));
            }
        }
    }
    match non_empty(d.managers.memory_manager_policy.as_ref()) {
        None | Some("None") => Ok(None),
        Some("Static") => Ok(Some(memory::Rules { reserved })),
        Some(other) => Err(invalid("memoryManagerPolicy", other, "use None or Static")),
    }
}

fn alignment(d: &Document) -> Result<Option<hints::Rules>, ConfigError> {
    let fields = &d.managers;
    let scope = match non_empty(fields.topology_manager_scope.as_ref()) {
        None | Some("container") => Scope::Container,
        Some("pod") => Scope::Pod,
        Some(other) => {
            let remedy = "use container or pod";
            return Err(invalid("topologyManagerScope", other, remedy));
        }
    };
    let policy = match non_empty(fields.topology_manager_policy.as_ref()) {
        None | Some("none") => return Ok(None),
        Some("best-effort") => Policy::BestEffort,
        Some("restricted") => Policy::Restricted,
        Some("single-numa-node") => Policy::SingleNode,
        Some(other) => {
            let remedy = "use none, best-effort, restricted or single-numa-node";
            return Err(invalid("topologyManagerPolicy", other, remedy));
        }
    };
    let mut rules = hints::Rules {
        policy,
        scope,
        closest: false,
        max_nodes: DEFAULT_MAX_NODES,
    };
    for (name, text) in fields.topology_manager_policy_options.iter().flatten() {
        let field = format!("topologyManagerPolicyOptions.{name}");
        match name.as_str() {
            "prefer-closest-numa-nodes" => rules.closest = flag(&field, text)?,
            "max-allowable-numa-nodes" => {
                let most = text.parse().ok().filter(|most| *most >= DEFAULT_MAX_NODES);
                let remedy = format!("use {DEFAULT_MAX_NODES} or more");
                rules.max_nodes = most.ok_or_else(|| invalid(&field, text, &remedy))?;
            }
            _ => {
                let remedy = "use prefer-closest-numa-nodes or max-allowable-numa-nodes";
                return Err(invalid("topologyManagerPolicyOptions", name, remedy));
            }
        }
    }
    Ok(Some(rules))
}

/// Resolves the managers' rules. `reserved` is the reservation for the system and for Kubernetes.
pub(super) fn resolve(d: &Document, reserved: &Amounts) -> Result<Rules, ConfigError> {
    let period = d.managers.cpu_manager_reconcile_period.as_ref();
    Ok(Rules {
        cpus: cpus(d, reserved)?,
        memory: memory(d)?,
        alignment: alignment(d)?,
        reconcile: time("cpuManagerReconcilePeriod", period, 10)?,
    })
}
