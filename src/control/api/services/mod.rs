//! Services: values that the API allocates (`pkg/registry/core/service/storage/alloc.go`, `storage.go`) and fields that depend
//! on the type (`pkg/registry/core/service/strategy.go`).
//!
//! Cluster IPs and node ports are allocated when a service needs them, kept by its updates, and released when it is deleted or
//! no longer needs them.

mod claims;
mod families;
mod validate;

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use serde_json::Value;

use super::error::{ApiError, FieldError};
use super::object::{self, list, put, text};
use crate::store::Store;
use claims::Refusal;
pub(crate) use claims::{Allocator, Reservation};
pub(crate) use validate::{status as validate_status, update as validate_update, validate};

const IPV4: &str = "IPv4";
const IPV6: &str = "IPv6";

/// The family of an address.
fn family_of(address: &str) -> Option<&'static str> {
    match address.parse().ok()? {
        IpAddr::V4(_) => Some(IPV4),
        IpAddr::V6(_) => Some(IPV6),
    }
}

fn is(service: &Value, kind: &str) -> bool {
    text(service, &["spec", "type"]).unwrap_or("ClusterIP") == kind
}

/// Whether the type of a service has cluster IPs.
fn has_address(service: &Value) -> bool {
    !is(service, "ExternalName")
}

fn has_node_ports(service: &Value) -> bool {
    is(service, "NodePort") || is(service, "LoadBalancer")
}

/// Whether node ports are allocated that the service does not request.
fn needs_node_ports(service: &Value) -> bool {
    is(service, "NodePort")
        || is(service, "LoadBalancer") && service["spec"]["allocateLoadBalancerNodePorts"] != false
}

/// Whether clients outside of the cluster can reach the service.
fn is_external(service: &Value) -> bool {
    has_node_ports(service)
        || is(service, "ClusterIP") && !list(service, &["spec", "externalIPs"]).is_empty()
}

/// Whether load balancers check the nodes of the service.
fn needs_health_check(service: &Value) -> bool {
    is(service, "LoadBalancer")
        && text(service, &["spec", "externalTrafficPolicy"]) == Some("Local")
}

fn is_headless(service: &Value) -> bool {
    let addresses = list(service, &["spec", "clusterIPs"]);
    matches!(addresses, [only] if only == "None")
}

fn node_port(port: &Value) -> Option<i64> {
    port["nodePort"].as_i64().filter(|p| *p != 0)
}

fn node_ports(service: &Value) -> HashSet<i64> {
    let ports = list(service, &["spec", "ports"]).iter();
    ports.filter_map(node_port).collect()
}

fn protocol(port: &Value) -> &str {
    text(port, &["protocol"]).unwrap_or("TCP")
}

/// The strings of a list.
fn words(service: &Value, key: &str) -> Vec<String> {
    let all = list(service, &["spec", key]).iter();
    all.filter_map(Value::as_str).map(str::to_owned).collect()
}

fn cluster_ip(service: &Value) -> &str {
    text(service, &["spec", "clusterIP"]).unwrap_or_default()
}

fn remove(service: &mut Value, key: &str) {
    put(&mut service["spec"], key, None);
}

fn ports_of(service: &mut Value) -> impl Iterator<Item = &mut Value> {
    let ports = service["spec"].get_mut("ports");
    ports.and_then(Value::as_array_mut).into_iter().flatten()
}

/// Prepares an update: keeps allocated values that it omits, and removes values that its type does not have unless the update
/// sets them; otherwise validation rejects them.
pub(crate) fn carry_over(old: &Value, new: &mut Value) {
    keep_allocated(old, new);
    sync_addresses(Some(old), new);
    drop_unused(old, new);
}

/// `patchAllocatedValues`: a client that sends the same manifest again keeps what was allocated.
fn keep_allocated(old: &Value, new: &mut Value) {
    if has_address(old) && has_address(new) {
        if cluster_ip(new).is_empty() {
            put(&mut new["spec"], "clusterIP", old["spec"].get("clusterIP"));
        }
        if list(new, &["spec", "clusterIPs"]).is_empty() {
            put(
                &mut new["spec"],
                "clusterIPs",
                old["spec"].get("clusterIPs"),
            );
        }
    }
    if has_node_ports(old) && has_node_ports(new) {
        let taken = node_ports(new);
        let name = |port: &Value| text(port, &["name"]).unwrap_or_default().to_owned();
        let ports = list(old, &["spec", "ports"]).iter();
        let before: HashMap<String, Option<i64>> =
            ports.map(|port| (name(port), node_port(port))).collect();
        for port in ports_of(new).filter(|port| node_port(port).is_none()) {
            if let Some(Some(number)) = before.get(&name(port))
                && !taken.contains(number)
            {
                port["nodePort"] = (*number).into();
            }
        }
    }
    if needs_health_check(old)
        && needs_health_check(new)
        && new["spec"]["healthCheckNodePort"].as_i64().unwrap_or(0) == 0
    {
        let number = old["spec"].get("healthCheckNodePort");
        put(&mut new["spec"], "healthCheckNodePort", number);
    }
}

/// `normalizeClusterIPs`: old clients set only `clusterIP`, or change it and send `clusterIPs` as they received it.
fn sync_addresses(old: Option<&Value>, new: &mut Value) {
    let (one, all) = (cluster_ip(new).to_owned(), words(new, "clusterIPs"));
    let Some(old) = old else {
        if !one.is_empty() && all.is_empty() {
            new["spec"]["clusterIPs"] = vec![one].into();
        }
        return;
    };
    let (old_one, old_all) = (cluster_ip(old), words(old, "clusterIPs"));
    if !old_all.is_empty() && all.is_empty() && old_one == one {
        new["spec"]["clusterIPs"] = old_all.into();
    } else if old_one != one && old_all == all {
        match one.is_empty() {
            true => remove(new, "clusterIPs"),
            false => new["spec"]["clusterIPs"] = vec![one].into(),
        }
    }
}

/// `dropTypeDependentFields`.
fn drop_unused(old: &Value, new: &mut Value) {
    let is_same = |new: &Value, key: &str| new["spec"][key] == old["spec"][key];
    if has_address(old) && !has_address(new) {
        if is_same(new, "clusterIP") && is_same(new, "clusterIPs") {
            remove(new, "clusterIP");
            remove(new, "clusterIPs");
        }
        for key in ["ipFamilies", "ipFamilyPolicy"] {
            if is_same(new, key) {
                remove(new, key);
            }
        }
    }
    if has_node_ports(old) && !has_node_ports(new) && node_ports(old).is_superset(&node_ports(new))
    {
        ports_of(new).for_each(|port| put(port, "nodePort", None));
    }
    for (key, has) in [
        (
            "healthCheckNodePort",
            needs_health_check as fn(&Value) -> bool,
        ),
        ("allocateLoadBalancerNodePorts", |s| is(s, "LoadBalancer")),
        ("loadBalancerClass", |s| is(s, "LoadBalancer")),
        ("externalTrafficPolicy", is_external),
    ] {
        if has(old) && !has(new) && is_same(new, key) {
            remove(new, key);
        }
    }
    // The status of a load balancer is removed too: its addresses are no longer those of the service.
    if !is(new, "LoadBalancer") && new["status"]["loadBalancer"].is_object() {
        new["status"]["loadBalancer"] = Value::Object(serde_json::Map::new());
    }
}

fn refuse(service: &Value, errors: &[FieldError]) -> ApiError {
    ApiError::invalid("Service", "", object::name(service), errors)
}

/// Allocates the values that a service needs and does not have; rejects values that another service has. `old` is the stored
/// service. The caller keeps the reservation until the write ends.
pub(crate) fn allocate(
    allocator: &Allocator,
    store: &Store,
    old: Option<&Value>,
    service: &mut Value,
) -> Result<Reservation, ApiError> {
    if old.is_none() {
        sync_addresses(None, service);
    }
    let mut reservation = allocator.begin(store, old);
    let errors = families::init(&allocator.ranges, old, service);
    if !errors.is_empty() {
        return Err(refuse(service, &errors));
    }
    let was_headless = old.is_some_and(|old| has_address(old) && is_headless(old));
    if has_address(service) && !is_headless(service) && !was_headless {
        allocate_addresses(&mut reservation, service)?;
    }
    if has_node_ports(service) {
        allocate_ports(&mut reservation, old.is_none(), service)?;
    }
    if needs_health_check(service) {
        allocate_health_check(&mut reservation, service)?;
    }
    Ok(reservation)
}

/// Allocates an address of each family of the service.
fn allocate_addresses(reservation: &mut Reservation, service: &mut Value) -> Result<(), ApiError> {
    let mut addresses = words(service, "clusterIPs");
    for (i, family) in words(service, "ipFamilies").iter().enumerate() {
        let requested = addresses.get(i).filter(|a| !a.is_empty()).cloned();
        let result = match requested.as_ref().map(|text| text.parse()) {
            None => {
                let next = reservation.next_address(family == IPV4);
                next.map(|address| addresses.push(address.to_string()))
            }
            Some(Ok(address)) => reservation.address(address),
            // Validation rejects it.
            Some(Err(_)) => Ok(()),
        };
        match result {
            Ok(()) => {}
            Err(Refusal::Full) => {
                let why = format!("failed to allocate a serviceIP: {}", Refusal::Full);
                return Err(ApiError::internal(why));
            }
            Err(why) => {
                let requested = requested.unwrap_or_default();
                let why = format!("failed to allocate IP {requested}: {why}");
                let all = addresses.into();
                let error = FieldError::invalid("spec.clusterIPs", &all, &why);
                return Err(refuse(service, &[error]));
            }
        }
    }
    if let Some(first) = addresses.first() {
        service["spec"]["clusterIP"] = first.as_str().into();
        service["spec"]["clusterIPs"] = addresses.into();
    }
    Ok(())
}

/// Allocates node ports. In a new service, ports with the same number and different protocols share a node port.
fn allocate_ports(
    reservation: &mut Reservation,
    is_new: bool,
    service: &mut Value,
) -> Result<(), ApiError> {
    let allocates = needs_node_ports(service);
    let mut errors = vec![];
    let mut shared: HashMap<i64, i64> = HashMap::new();
    let ports = list(service, &["spec", "ports"]).to_vec();
    for (i, port) in ports.iter().enumerate() {
        let Some(number) = node_port(port) else {
            continue;
        };
        shared
            .entry(port["port"].as_i64().unwrap_or(0))
            .or_insert(number);
        if let Err(why) = reservation.port(number) {
            let field = format!("spec.ports[{i}].nodePort");
            errors.push(FieldError::invalid(field, &number.into(), &why.to_string()));
        }
    }
    if !errors.is_empty() {
        return Err(refuse(service, &errors));
    }
    for port in ports_of(service).filter(|port| allocates && node_port(port).is_none()) {
        let own = port["port"].as_i64().unwrap_or(0);
        let known = shared.get(&own).copied().filter(|_| is_new);
        let number = known.map_or_else(|| reservation.next_port(), Ok);
        let number = number.map_err(|_| full("nodePort"))?;
        shared.entry(own).or_insert(number);
        port["nodePort"] = number.into();
    }
    Ok(())
}

fn full(what: &str) -> ApiError {
    ApiError::internal(format!("failed to allocate a {what}: {}", Refusal::Full))
}

fn allocate_health_check(
    reservation: &mut Reservation,
    service: &mut Value,
) -> Result<(), ApiError> {
    let requested = service["spec"]["healthCheckNodePort"].as_i64().unwrap_or(0);
    if requested == 0 {
        let number = reservation.next_port();
        let number = number.map_err(|_| full("HealthCheck NodePort"))?;
        service["spec"]["healthCheckNodePort"] = number.into();
        return Ok(());
    }
    reservation.port(requested).map_err(|why| {
        let why = format!("failed to allocate requested HealthCheck NodePort {requested}: {why}");
        let error = FieldError::invalid("spec.healthCheckNodePort", &requested.into(), &why);
        refuse(service, &[error])
    })
}

/// Fills in the defaults of a service (`SetDefaults_Service`). The allocation adds those of the IP families.
pub(crate) fn defaults(service: &mut Value) {
    use super::object::set_default;
    use serde_json::json;
    let spec = &mut service["spec"];
    set_default(spec, "type", json!("ClusterIP"));
    set_default(spec, "sessionAffinity", json!("None"));
    if spec["sessionAffinity"] == "None" {
        put(spec, "sessionAffinityConfig", None);
    } else if spec["sessionAffinity"] == "ClientIP"
        && spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"].is_null()
    {
        spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": 10_800}});
    }
    for port in ports_of(service) {
        set_default(port, "protocol", json!("TCP"));
        let same = port["port"].clone();
        let target = &port["targetPort"];
        if target.is_null() || *target == 0 || *target == "" {
            port["targetPort"] = same;
        }
    }
    let (has_address, is_external) = (has_address(service), is_external(service));
    let is_balanced = is(service, "LoadBalancer");
    let spec = &mut service["spec"];
    if has_address {
        set_default(spec, "internalTrafficPolicy", json!("Cluster"));
    }
    if is_external {
        set_default(spec, "externalTrafficPolicy", json!("Cluster"));
    }
    if is_balanced {
        set_default(spec, "allocateLoadBalancerNodePorts", json!(true));
        let ingress = service["status"]["loadBalancer"]
            .get_mut("ingress")
            .and_then(Value::as_array_mut);
        for ingress in ingress.into_iter().flatten() {
            if text(ingress, &["ip"]).is_some_and(|ip| !ip.is_empty()) {
                set_default(ingress, "ipMode", json!("VIP"));
            }
        }
    }
}
