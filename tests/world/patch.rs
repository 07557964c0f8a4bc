//! How the API applies a patch to a pod's status (a strategic merge patch, as far as agents use it).

use serde_json::{Value, json};

use super::ApiFailure;

/// Merges lists of addresses by address, in the order that the patch names.
fn merge_addresses(list: &mut Value, patch: &Value, order: &Value) {
    let items = |list: &Value| list.as_array().cloned().unwrap_or_default();
    let mut merged = items(list);
    for item in items(patch) {
        merged.retain(|known| known["ip"] != item["ip"]);
        if item["$patch"] != "delete" {
            merged.push(item);
        }
    }
    let order = items(order);
    let place = |item: &Value| order.iter().position(|named| named["ip"] == item["ip"]);
    merged.sort_by_key(|item| place(item).unwrap_or(usize::MAX));
    *list = merged.into();
}

/// Merges conditions by their type.
fn merge_conditions(list: &mut Value, patch: &Value) {
    let mut merged = list.as_array().cloned().unwrap_or_default();
    for condition in patch.as_array().unwrap() {
        merged.retain(|known| known["type"] != condition["type"]);
        if condition["$patch"] == "delete" {
            continue;
        }
        let mut condition = condition.clone();
        condition
            .as_object_mut()
            .unwrap()
            .retain(|_, value| !value.is_null());
        merged.push(condition);
    }
    *list = merged.into();
}

/// Whether a list has two addresses of one family; `ValidatePodStatusUpdate` allows at most one.
fn has_two_of_a_family(list: &Value) -> bool {
    let items = list.as_array().into_iter().flatten();
    let (v6, v4): (Vec<&str>, Vec<&str>) = items
        .filter_map(|item| item["ip"].as_str())
        .partition(|ip| ip.contains(':'));
    v6.len() > 1 || v4.len() > 1
}

/// The pod with the patch merged into its status.
pub(super) fn merged(pod: &Value, patch: &Value) -> Result<Value, ApiFailure> {
    let mut pod = pod.clone();
    let (status, changes) = (&mut pod["status"], &patch["status"]);
    for (key, value) in changes.as_object().unwrap() {
        match key.as_str() {
            key if key.starts_with('$') => {}
            "conditions" => merge_conditions(&mut status["conditions"], value),
            "podIPs" | "hostIPs" => {
                let order = &changes[format!("$setElementOrder/{key}")];
                merge_addresses(&mut status[key], value, order);
                if has_two_of_a_family(&status[key]) {
                    let message = format!("{key}: {} are refused (422)", status[key]);
                    return Err(ApiFailure::Invalid(message));
                }
            }
            key if value.is_null() => _ = status.as_object_mut().unwrap().remove(key),
            key => status[key] = value.clone(),
        }
    }
    if status.is_null() {
        *status = json!({});
    }
    Ok(pod)
}
