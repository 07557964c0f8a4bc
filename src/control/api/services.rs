//! Allocation of cluster IPs and node ports (`pkg/registry/core/service/storage/alloc.go`). Values are allocated when a
//! service needs them, kept by its updates, and released when it is deleted or no longer needs them. The stored
//! services are the only record of allocations, so the caller locks allocation and storing.

use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;

use serde_json::{Value, json};

use super::error::{ApiError, FieldError};
use super::object::{self, list, text};
use crate::store::Store;

/// The node port range.
const NODE_PORTS: RangeInclusive<i64> = 30_000..=32_767;
/// The first port for automatic allocation. Lower ports are reserved for services
/// that request a specific port (KEP-3668).
const FIRST_AUTOMATIC_PORT: i64 = 30_086;
/// How a node port is serialised.
const NODE_PORT: &[u8] = b"\"nodePort\":";

fn is(service: &Value, kind: &str) -> bool {
    text(service, &["spec", "type"]).unwrap_or("ClusterIP") == kind
}

fn can_have_node_ports(service: &Value) -> bool {
    is(service, "NodePort") || is(service, "LoadBalancer")
}

fn needs_node_ports(service: &Value) -> bool {
    is(service, "NodePort")
        || is(service, "LoadBalancer") && service["spec"]["allocateLoadBalancerNodePorts"] != false
}

fn node_port(port: &Value) -> Option<i64> {
    port["nodePort"].as_i64().filter(|p| *p != 0)
}

fn ports_of(service: &mut Value) -> impl Iterator<Item = &mut Value> {
    let ports = service["spec"].get_mut("ports");
    ports.and_then(Value::as_array_mut).into_iter().flatten()
}

/// Copies allocated values that an update omits. Values that the new type does not have are removed if the update did
/// not change them; otherwise validation rejects them.
pub(crate) fn carry_over(old: &Value, new: &mut Value) {
    let drop_same = |new: &mut Value, keys: &[&str]| {
        for key in keys {
            if new["spec"][key] == old["spec"][key]
                && let Some(spec) = new["spec"].as_object_mut()
            {
                spec.remove(*key);
            }
        }
    };
    let addresses = ["clusterIP", "clusterIPs"];
    if is(new, "ExternalName") {
        let also = ["ipFamilies", "ipFamilyPolicy", "internalTrafficPolicy"];
        drop_same(new, &[&addresses[..], &also].concat());
    } else if text(old, &["spec", "clusterIP"]).is_some_and(|a| !a.is_empty())
        && text(new, &["spec", "clusterIP"]).is_none_or(str::is_empty)
    {
        for key in addresses {
            new["spec"][key] = old["spec"][key].clone();
        }
    }
    if !can_have_node_ports(new) {
        drop_same(
            new,
            &["externalTrafficPolicy", "allocateLoadBalancerNodePorts"],
        );
    }
    let mut before: HashMap<(&Value, &str), Option<i64>> = HashMap::new();
    for port in list(old, &["spec", "ports"]) {
        let key = (&port["port"], protocol(port));
        before.entry(key).or_insert_with(|| node_port(port));
    }
    let same = |port: &Value| *before.get(&(&port["port"], protocol(port)))?;
    let (keep, fill) = (can_have_node_ports(new), needs_node_ports(new));
    let taken: HashSet<i64> = list(new, &["spec", "ports"])
        .iter()
        .filter_map(node_port)
        .collect();
    for port in ports_of(new) {
        let was = same(port);
        match (node_port(port), was) {
            (None, Some(was)) if fill && !taken.contains(&was) => port["nodePort"] = was.into(),
            (Some(own), Some(was)) if !keep && own == was => {
                port.as_object_mut().map(|p| p.remove("nodePort"));
            }
            _ => {}
        }
    }
}

fn protocol(port: &Value) -> &str {
    text(port, &["protocol"]).unwrap_or("TCP")
}

/// Allocates the values that a service needs and does not have; rejects values that
/// another service has. `old` is the stored service.
pub fn allocate(
    store: &Store,
    range: ipnet::Ipv4Net,
    old: Option<&Value>,
    service: &mut Value,
) -> Result<(), ApiError> {
    if is(service, "ExternalName") {
        return Ok(());
    }
    let has = text(service, &["spec", "clusterIP"]).filter(|a| !a.is_empty());
    let had = old.and_then(|old| text(old, &["spec", "clusterIP"]));
    if has.is_none() || has != had {
        address(store, range, service)?;
    }
    node_ports(store, service)
}

fn refusal(service: &Value, field: String, value: &Value, why: &str) -> ApiError {
    let error = FieldError::invalid(field, value, why);
    ApiError::invalid("Service", "", object::name(service), &[error])
}

fn address(store: &Store, range: ipnet::Ipv4Net, service: &mut Value) -> Result<(), ApiError> {
    let requested = text(service, &["spec", "clusterIP"])
        .unwrap_or_default()
        .to_owned();
    if requested == "None" {
        service["spec"]["clusterIPs"] = json!(["None"]);
        return Ok(());
    }
    let services = store.list("services/").0;
    let taken: HashSet<&str> = services
        .iter()
        .filter_map(|(_, r)| r.attrs.field("spec.clusterIP"))
        .collect();
    let address = if requested.is_empty() {
        // The first 15 addresses are reserved for well-known services, such as .1 for the API and .10 for DNS.
        range
            .hosts()
            .skip(15)
            .map(|a| a.to_string())
            .find(|a| !taken.contains(a.as_str()))
    } else {
        requested
            .parse::<std::net::Ipv4Addr>()
            .ok()
            .filter(|a| range.contains(a) && !taken.contains(requested.as_str()))
            .map(|_| requested.clone())
    };
    let Some(address) = address else {
        let why = format!(
            "failed to allocate IP {requested}: it is already allocated or not in the valid range {range}"
        );
        let field = "spec.clusterIPs".into();
        return Err(refusal(service, field, &json!([requested]), &why));
    };
    service["spec"]["clusterIP"] = address.as_str().into();
    service["spec"]["clusterIPs"] = json!([address]);
    Ok(())
}

/// The node ports of all other services.
fn taken_node_ports(store: &Store, service: &Value) -> HashSet<i64> {
    let (own_namespace, own_name) = (
        object::namespace(service).unwrap_or_default().to_owned(),
        object::name(service).to_owned(),
    );
    let own_key = format!("services/{own_namespace}/{own_name}");
    let mut taken: HashSet<i64> = HashSet::new();
    // Most services have no node port and need not be parsed. The stored JSON contains the key in this spelling only.
    let has_any = |value: &[u8]| value.windows(NODE_PORT.len()).any(|w| w == NODE_PORT);
    for (key, record) in store.list("services/").0 {
        if *key != *own_key
            && has_any(&record.value)
            && let Ok(other) = serde_json::from_slice::<Value>(&record.value)
        {
            taken.extend(
                list(&other, &["spec", "ports"])
                    .iter()
                    .filter_map(node_port),
            );
        }
    }
    taken
}

fn node_ports(store: &Store, service: &mut Value) -> Result<(), ApiError> {
    if !can_have_node_ports(service) {
        return Ok(());
    }
    let mut taken = taken_node_ports(store, service);
    for (i, port) in list(service, &["spec", "ports"]).iter().enumerate() {
        let Some(number) = node_port(port) else {
            continue;
        };
        let field = format!("spec.ports[{i}].nodePort");
        if !NODE_PORTS.contains(&number) {
            let (first, last) = (NODE_PORTS.start(), NODE_PORTS.end());
            let why = format!(
                "provided port is not in the valid range. The range of valid ports is {first}-{last}"
            );
            return Err(refusal(service, field, &number.into(), &why));
        }
        if taken.contains(&number) {
            let why = "provided port is already allocated";
            return Err(refusal(service, field, &number.into(), why));
        }
    }
    if !needs_node_ports(service) {
        return Ok(());
    }
    taken.extend(
        list(service, &["spec", "ports"])
            .iter()
            .filter_map(node_port),
    );
    let mut free = (FIRST_AUTOMATIC_PORT..=*NODE_PORTS.end())
        .chain(*NODE_PORTS.start()..FIRST_AUTOMATIC_PORT)
        .filter(|p| !taken.contains(p));
    let mut full = false;
    for port in ports_of(service).filter(|p| node_port(p).is_none()) {
        match free.next() {
            Some(number) => port["nodePort"] = number.into(),
            None => full = true,
        }
    }
    if full {
        return Err(ApiError::internal(
            "failed to allocate a nodePort: range is full",
        ));
    }
    Ok(())
}

/// Validates ports and addresses against the service's type.
pub fn validate(service: &Value, errors: &mut Vec<FieldError>) {
    let kind = text(service, &["spec", "type"]).unwrap_or("ClusterIP");
    if kind == "ExternalName" {
        if text(service, &["spec", "externalName"]).is_none_or(str::is_empty) {
            errors.push(FieldError::required("spec.externalName", ""));
        }
        if text(service, &["spec", "clusterIP"]).is_some_and(|a| !a.is_empty() && a != "None") {
            errors.push(FieldError::forbidden(
                "spec.clusterIPs",
                "may not be set when `type` is 'ExternalName'",
            ));
        }
    }
    if can_have_node_ports(service) && text(service, &["spec", "clusterIP"]) == Some("None") {
        errors.push(FieldError::invalid(
            "spec.clusterIPs[0]",
            &"None".into(),
            &format!("may not be set to 'None' for {kind} services"),
        ));
    }
    let mut seen = HashSet::new();
    for (i, port) in list(service, &["spec", "ports"]).iter().enumerate() {
        let Some(number) = node_port(port) else {
            continue;
        };
        let field = format!("spec.ports[{i}].nodePort");
        if !can_have_node_ports(service) {
            let why = format!("may not be used when `type` is '{kind}'");
            errors.push(FieldError::forbidden(field, &why));
        } else if !seen.insert((protocol(port), number)) {
            errors.push(FieldError::duplicate(field, &number.to_string()));
        }
    }
}
