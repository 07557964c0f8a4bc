//! Strategic merge patch: maps are merged field by field, lists by the rule of their field
//! (`staging/src/k8s.io/apimachinery/pkg/util/strategicpatch/patch.go`).

use std::collections::{BTreeSet, HashMap, HashSet};

use serde_json::{Map, Value, json};

use crate::api::error::ApiError;

/// How a list is merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ListRule {
    /// The patch's list replaces the stored one.
    Atomic,
    /// A list of objects, matched by this merge key.
    Key(&'static str),
    /// A list of scalars: the union of both lists.
    Set,
}

/// The merge rule of a list, by its name and its parent field: the `patchStrategy`
/// and `patchMergeKey` tags of upstream's types.
fn list_rule(parent: &str, field: &str) -> ListRule {
    match (parent, field) {
        (_, "ownerReferences") => ListRule::Key("uid"),
        (_, "finalizers") if parent == "metadata" => ListRule::Set,
        (_, "podCIDRs") => ListRule::Set,
        (
            _,
            "containers"
            | "initContainers"
            | "ephemeralContainers"
            | "volumes"
            | "schedulingGates"
            | "resourceClaims",
        ) => ListRule::Key("name"),
        ("spec", "imagePullSecrets") => ListRule::Key("name"),
        (_, "env") => ListRule::Key("name"),
        ("containers" | "initContainers" | "ephemeralContainers", "ports") => {
            ListRule::Key("containerPort")
        }
        ("spec", "ports") => ListRule::Key("port"),
        (_, "volumeMounts") => ListRule::Key("mountPath"),
        (_, "volumeDevices") => ListRule::Key("devicePath"),
        (_, "hostAliases" | "podIPs" | "hostIPs") => ListRule::Key("ip"),
        (_, "topologySpreadConstraints") => ListRule::Key("topologyKey"),
        ("status", "conditions" | "addresses") => ListRule::Key("type"),
        (_, "secrets") => ListRule::Key("name"),
        (_, "resourceClaimStatuses" | "allocatedResourcesStatus") => ListRule::Key("name"),
        _ => ListRule::Atomic,
    }
}

fn unknown_directive(directive: &Value, map: &Map<String, Value>) -> ApiError {
    let text = directive.as_str().unwrap_or_default();
    ApiError::new(
        500,
        "",
        format!(
            "unknown patch type: {text} in map: {}",
            Value::Object(map.clone())
        ),
    )
}

/// Merges a patch into a map; `parent` is the name of the map's field.
pub(super) fn merge_map(
    target: &mut Map<String, Value>,
    patch: &Map<String, Value>,
    parent: &str,
) -> Result<(), ApiError> {
    match patch.get("$patch") {
        None => {}
        Some(Value::String(d)) if d == "merge" => {}
        Some(Value::String(d)) if d == "replace" => {
            *target = patch
                .iter()
                .filter(|(k, _)| *k != "$patch")
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect();
            return Ok(());
        }
        Some(Value::String(d)) if d == "delete" => {
            target.clear();
            return Ok(());
        }
        Some(other) => return Err(unknown_directive(other, patch)),
    }
    if let Some(keep) = patch.get("$retainKeys").and_then(Value::as_array) {
        let keep: HashSet<&str> = keep.iter().filter_map(Value::as_str).collect();
        target.retain(|key, _| keep.contains(key.as_str()));
    }
    for (key, value) in patch {
        if let Some(field) = key.strip_prefix("$deleteFromPrimitiveList/") {
            let gone: HashSet<&Value> = value.as_array().into_iter().flatten().collect();
            if let Some(list) = target.get_mut(field).and_then(Value::as_array_mut) {
                list.retain(|item| !gone.contains(item));
            }
            continue;
        }
        if key.starts_with('$') {
            continue;
        }
        match value {
            Value::Null => {
                target.remove(key);
            }
            Value::Object(map) => {
                let slot = target.entry(key.clone()).or_insert_with(|| json!({}));
                if !slot.is_object() {
                    *slot = json!({});
                }
                if let Some(inner) = slot.as_object_mut() {
                    merge_map(inner, map, key)?;
                }
            }
            Value::Array(items) => {
                let order = patch
                    .get(&format!("$setElementOrder/{key}"))
                    .and_then(Value::as_array);
                let old = match target.get_mut(key) {
                    Some(Value::Array(old)) => std::mem::take(old),
                    _ => vec![],
                };
                let merged = merge_list(old, items, parent, key, order)?;
                target.insert(key.clone(), merged.into());
            }
            other => {
                target.insert(key.clone(), other.clone());
            }
        }
    }
    // A `$setElementOrder` directive without a list reorders the stored elements.
    for (key, value) in patch {
        if let (Some(field), Some(order)) =
            (key.strip_prefix("$setElementOrder/"), value.as_array())
            && !patch.contains_key(field)
            && let Some(list) = target.get_mut(field).and_then(Value::as_array_mut)
        {
            let (old, rule) = (std::mem::take(list), list_rule(parent, field));
            let old_positions = Positions::of(&old, rule);
            *list = in_order(&old_positions, old, vec![], order.iter(), rule);
        }
    }
    Ok(())
}

fn merge_list(
    old: Vec<Value>,
    patch: &[Value],
    parent: &str,
    field: &str,
    order: Option<&Vec<Value>>,
) -> Result<Vec<Value>, ApiError> {
    let directive =
        |item: &Value, what: &str| item.get("$patch").and_then(Value::as_str) == Some(what);
    if patch.iter().any(|item| directive(item, "replace")) {
        let plain = patch.iter().filter(|i| i.get("$patch").is_none());
        return Ok(plain.cloned().collect());
    }
    let rule = list_rule(parent, field);
    match rule {
        ListRule::Atomic => Ok(patch.to_vec()),
        ListRule::Set => {
            let order = order.map_or(patch, Vec::as_slice);
            let old_positions = Positions::of(&old, rule);
            Ok(in_order(
                &old_positions,
                old,
                patch.to_vec(),
                order.iter(),
                rule,
            ))
        }
        ListRule::Key(key) => {
            let old_positions = Positions::of(&old, rule);
            let mut merged = Merged::new(old, key);
            for item in patch {
                let (map, id) = identified(item, key, field)?;
                if directive(item, "delete") {
                    merged.delete(id);
                } else {
                    merged.merge(id, map, field)?;
                }
            }
            let (kept, added) = merged.finish();
            match order {
                Some(order) => Ok(in_order(&old_positions, kept, added, order.iter(), rule)),
                None => {
                    let named = patch.iter().filter(|item| !directive(item, "delete"));
                    Ok(in_order(&old_positions, kept, added, named, rule))
                }
            }
        }
    }
}

/// An element of the patch of a keyed list, and the value of its merge key. Merge keys are scalars:
/// strings and numbers in every list of [`list_rule`].
fn identified<'a>(
    item: &'a Value,
    key: &str,
    field: &str,
) -> Result<(&'a Map<String, Value>, &'a Value), ApiError> {
    let map = item.as_object().ok_or_else(|| {
        ApiError::bad_request(format!(
            "{field}: every element of the patch must be an object"
        ))
    })?;
    let id = map.get(key).ok_or_else(|| {
        ApiError::new(
            500,
            "",
            format!("map: {item} does not contain declared merge key: {key}"),
        )
    })?;
    if id.is_array() || id.is_object() {
        return Err(ApiError::bad_request(format!(
            "{field}: the merge key {key} must be a string or a number"
        )));
    }
    Ok((map, id))
}

/// A keyed list while a patch is merged into it. An index by key avoids scans.
struct Merged {
    key: &'static str,
    /// The stored elements; `None` where one was deleted.
    kept: Vec<Option<Value>>,
    positions: HashMap<Value, BTreeSet<usize>>,
    added: Vec<Value>,
}

impl Merged {
    fn new(old: Vec<Value>, key: &'static str) -> Merged {
        let mut positions: HashMap<Value, BTreeSet<usize>> = HashMap::new();
        for (position, item) in old.iter().enumerate() {
            if let Some(id) = item.get(key) {
                positions.entry(id.clone()).or_default().insert(position);
            }
        }
        Merged {
            key,
            kept: old.into_iter().map(Some).collect(),
            positions,
            added: vec![],
        }
    }

    /// Removes all elements with this key.
    fn delete(&mut self, id: &Value) {
        for position in self.positions.remove(id).into_iter().flatten() {
            self.kept[position] = None;
        }
    }

    /// Merges a patch into the first element with this key, or adds an element.
    fn merge(
        &mut self,
        id: &Value,
        patch: &Map<String, Value>,
        field: &str,
    ) -> Result<(), ApiError> {
        let position = self
            .positions
            .get(id)
            .and_then(|positions| positions.first().copied());
        let target = position.and_then(|position| Some((position, self.kept[position].as_mut()?)));
        let Some((position, target)) = target else {
            let mut fresh = Map::new();
            merge_map(&mut fresh, patch, field)?;
            self.added.push(Value::Object(fresh));
            return Ok(());
        };
        if let Some(map) = target.as_object_mut() {
            merge_map(map, patch, field)?;
        }
        // If the patch sets the merge key to null, the element loses its key.
        if target.get(self.key) != Some(id)
            && let Some(positions) = self.positions.get_mut(id)
        {
            positions.remove(&position);
        }
        Ok(())
    }

    /// Returns the remaining stored elements and the added ones.
    fn finish(self) -> (Vec<Value>, Vec<Value>) {
        (self.kept.into_iter().flatten().collect(), self.added)
    }
}

/// The first index of each element of a list, by its identity. All elements without the merge key share one identity.
struct Positions {
    rule: ListRule,
    by_id: HashMap<Value, usize>,
    without: Option<usize>,
}

impl Positions {
    fn of<'a>(list: impl IntoIterator<Item = &'a Value>, rule: ListRule) -> Positions {
        let mut positions = Positions {
            rule,
            by_id: HashMap::new(),
            without: None,
        };
        for (position, item) in list.into_iter().enumerate() {
            positions.insert(item, position);
        }
        positions
    }

    fn id<'a>(&self, item: &'a Value) -> Option<&'a Value> {
        match self.rule {
            ListRule::Key(key) => item.get(key),
            _ => Some(item),
        }
    }

    fn get(&self, item: &Value) -> Option<usize> {
        match self.id(item) {
            Some(id) => self.by_id.get(id).copied(),
            None => self.without,
        }
    }

    /// Adds an element to the index; false if an element with this identity exists.
    fn insert(&mut self, item: &Value, position: usize) -> bool {
        if self.get(item).is_some() {
            return false;
        }
        match self.id(item) {
            Some(id) => drop(self.by_id.insert(id.clone(), position)),
            None => self.without = Some(position),
        }
        true
    }
}

/// Joins the stored and the added elements of a list in the order of apimachinery's `strategicpatch`. Elements named in
/// `order` (`$setElementOrder`, else the patch's own list) come in that order. Any other element keeps its place before
/// the elements that followed it in the old list, else it comes last.
fn in_order<'a>(
    old_positions: &Positions,
    kept: Vec<Value>,
    added: Vec<Value>,
    order: impl Iterator<Item = &'a Value>,
    rule: ListRule,
) -> Vec<Value> {
    let order = Positions::of(order, rule);
    let mut present = Positions::of(&kept, rule);
    let mut all = kept;
    for item in added {
        if present.insert(&item, all.len()) {
            all.push(item);
        }
    }
    let (mut named, others): (Vec<Value>, Vec<Value>) =
        all.into_iter().partition(|item| order.get(item).is_some());
    named.sort_by_cached_key(|item| order.get(item));
    let mut others = others.into_iter().peekable();
    let mut result = Vec::new();
    for item in named {
        let position = old_positions.get(&item);
        while let Some(other) = others.next_if(|other| {
            let before = old_positions.get(other).zip(position);
            before.is_some_and(|(other, item)| other < item)
        }) {
            result.push(other);
        }
        result.push(item);
    }
    result.extend(others);
    result
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::super::{Format, apply};
    use super::*;

    fn strategic(object: Value, patch: Value) -> Value {
        apply(Format::Strategic, &object, &patch).expect("applies")
    }

    #[test]
    fn strategic_merge_follows_the_merge_keys() {
        let pod = json!({"spec": {"containers": [
            {"name": "a", "image": "x", "args": ["1"], "env": [{"name": "E", "value": "1"}]},
            {"name": "b", "image": "y"}]}});
        let cases = [
            (
                "merge by name",
                json!({"spec": {"containers": [{"name": "a", "image": "z"}]}}),
                "/spec/containers/0/image",
                json!("z"),
            ),
            (
                "others stay",
                json!({"spec": {"containers": [{"name": "a", "image": "z"}]}}),
                "/spec/containers/1/image",
                json!("y"),
            ),
            (
                "atomic list",
                json!({"spec": {"containers": [{"name": "a", "args": ["2"]}]}}),
                "/spec/containers/0/args",
                json!(["2"]),
            ),
            (
                "nested key",
                json!({"spec": {"containers": [{"name": "a", "env": [{"name": "E", "value": "2"}]}]}}),
                "/spec/containers/0/env",
                json!([{"name": "E", "value": "2"}]),
            ),
            (
                "new ones first",
                json!({"spec": {"containers": [{"name": "c"}]}}),
                "/spec/containers/0/name",
                json!("c"),
            ),
            (
                "given order",
                json!({"spec": {"$setElementOrder/containers": [{"name": "a"}, {"name": "b"}, {"name": "c"}], "containers": [{"name": "c"}]}}),
                "/spec/containers/2/name",
                json!("c"),
            ),
            (
                "delete",
                json!({"spec": {"containers": [{"name": "a", "$patch": "delete"}]}}),
                "/spec/containers",
                json!([{"name": "b", "image": "y"}]),
            ),
            (
                "replace",
                json!({"spec": {"containers": [{"$patch": "replace"}, {"name": "n"}]}}),
                "/spec/containers",
                json!([{"name": "n"}]),
            ),
        ];
        for (what, patch, path, expected) in cases {
            let merged = strategic(pod.clone(), patch);
            assert_eq!(merged.pointer(path), Some(&expected), "{what}");
        }
    }

    #[test]
    fn strategic_merge_of_maps_and_sets() {
        assert_eq!(
            strategic(json!({"a": {"x": 1, "y": 2}}), json!({"a": {"x": null}})),
            json!({"a": {"y": 2}})
        );
        assert_eq!(
            strategic(
                json!({"spec": {"strategy": {"type": "R", "rollingUpdate": {}}}}),
                json!({"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}})
            ),
            json!({"spec": {"strategy": {"type": "Recreate"}}})
        );
        assert_eq!(
            strategic(
                json!({"metadata": {"finalizers": ["a", "b"]}}),
                json!({"metadata": {"finalizers": ["c"], "$deleteFromPrimitiveList/finalizers": ["a"]}})
            ),
            json!({"metadata": {"finalizers": ["c", "b"]}})
        );
        let addresses = json!({"status": {"addresses": [{"type": "Hostname", "address": "old"}]}});
        let patch = json!({"status": {"addresses": [{"type": "InternalIP", "address": "1"}, {"$patch": "replace"}]}});
        assert_eq!(
            strategic(addresses, patch),
            json!({"status": {"addresses": [{"type": "InternalIP", "address": "1"}]}})
        );
    }

    /// Reference implementation of a keyed merge, with scans: [`merge_list`] must agree with it.
    fn scanned(old: &[Value], patch: &[Value], key: &str) -> Vec<String> {
        let name = |item: &Value| item[key].as_str().unwrap_or_default().to_owned();
        let deletes = |item: &Value| item["$patch"] == "delete";
        let (mut all, mut order): (Vec<String>, Vec<String>) =
            (old.iter().map(name).collect(), vec![]);
        let old_positions = all.clone();
        for item in patch.iter().filter(|item| deletes(item)) {
            all.retain(|have| *have != name(item));
        }
        for item in patch.iter().filter(|item| !deletes(item)) {
            if !all.contains(&name(item)) {
                all.push(name(item));
            }
            order.push(name(item));
        }
        let position =
            |list: &[String], wanted: &String| list.iter().position(|have| have == wanted);
        let (mut named, mut others): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|item| position(&order, item).is_some());
        named.sort_by_key(|item| position(&order, item));
        let mut result = vec![];
        for item in named {
            let before = |other: &String| {
                let positions =
                    position(&old_positions, other).zip(position(&old_positions, &item));
                positions.is_some_and(|(other, item)| other < item)
            };
            while others.first().is_some_and(before) {
                result.push(others.remove(0));
            }
            result.push(item);
        }
        result.extend(others);
        result
    }

    #[test]
    fn large_lists_are_merged_in_linear_time() {
        let names = |from: usize| (from..from + 20_000).map(|i| format!("example.com/{i:05}"));
        let list = |names: &mut dyn Iterator<Item = String>| Value::from(names.collect::<Vec<_>>());
        let object = json!({"metadata": {"finalizers": list(&mut names(0))}});
        let patch = json!({"metadata": {"finalizers": list(&mut names(20_000)),
            "$deleteFromPrimitiveList/finalizers": list(&mut names(0).take(1000)),
            "$setElementOrder/finalizers": list(&mut names(20_000))}});
        let keyed = |from| -> Value {
            names(from)
                .map(|name| json!({"name": name, "value": "x"}))
                .collect()
        };
        let pod = json!({"spec": {"containers": [{"name": "c", "env": keyed(0)}]}});
        let more = json!({"spec": {"containers": [{"name": "c", "env": keyed(10_000)}]}});
        let begun = std::time::Instant::now();
        let merged = strategic(object, patch);
        let merged = merged["metadata"]["finalizers"].as_array().expect("a list");
        assert!(merged.len() >= 39_000, "{}", merged.len());
        let merged = strategic(pod, more);
        let env = &merged["spec"]["containers"][0]["env"];
        assert_eq!(env.as_array().map(Vec::len), Some(30_000));
        // A merge by scans compares 10^9 pairs of texts here, which takes a minute. The limit
        // is far below that, also on a busy machine.
        assert!(begun.elapsed().as_secs() < 20, "{:?}", begun.elapsed());
    }

    #[test]
    fn a_merge_key_must_be_a_scalar() {
        let object = json!({"spec": {"containers": [{"name": "a"}]}});
        for id in [json!({"name": "a"}), json!(["a"])] {
            let patch = json!({"spec": {"containers": [{"name": id}]}});
            let error = apply(Format::Strategic, &object, &patch).expect_err("refused");
            assert_eq!(error.code, 400, "{}", error.message);
        }
    }

    proptest! {
        /// A keyed list is merged like the reference implementation merges it.
        #[test]
        fn keyed_lists_are_merged_like_the_reference_implementation(
            old in proptest::sample::subsequence(vec!["a", "b", "c", "d", "e"], 0..5).prop_shuffle(),
            patch in vec((proptest::sample::select(vec!["a", "b", "c", "d", "e", "f"]), proptest::bool::weighted(0.2)), 0..5),
        ) {
            // Skips keys that are both deleted and patched: their result depends on
            // the order, and upstream deletes first.
            let deleted: HashSet<&str> = patch.iter().filter(|(_, gone)| *gone).map(|(name, _)| *name).collect();
            let items = |(name, gone): &(&str, bool)| match gone {
                true => json!({"name": name, "$patch": "delete"}),
                false => json!({"name": name}),
            };
            let patch: Vec<Value> = patch.iter().filter(|(name, gone)| *gone || !deleted.contains(name)).map(items).collect();
            let old: Vec<Value> = old.iter().map(|name| json!({"name": name})).collect();
            let object = json!({"spec": {"containers": old.clone()}});
            let merged = strategic(object, json!({"spec": {"containers": patch.clone()}}));
            let names: Vec<&str> = merged["spec"]["containers"].as_array().expect("a list").iter().filter_map(|c| c["name"].as_str()).collect();
            prop_assert_eq!(names, scanned(&old, &patch, "name"));
        }
    }

    #[test]
    fn set_element_order_defines_the_order_of_the_result() {
        let object = json!({"spec": {"containers": [{"name": "a"}, {"name": "server"}, {"name": "b"}, {"name": "c"}]}});
        let names = |patch: Value| {
            let merged = strategic(object.clone(), patch);
            let names: Vec<String> = merged["spec"]["containers"]
                .as_array()
                .expect("a list")
                .iter()
                .map(|c| c["name"].as_str().unwrap_or_default().to_owned())
                .collect();
            names.join(" ")
        };
        let order = |names: &[&str]| -> Value {
            names
                .iter()
                .map(|n| json!({"name": n}))
                .collect::<Vec<_>>()
                .into()
        };
        // Elements that the order does not name stay before the elements that followed them.
        assert_eq!(
            names(json!({"spec": {"$setElementOrder/containers": order(&["c", "b", "a"])}})),
            "server c b a"
        );
        // Without the directive, the patch's own order applies.
        assert_eq!(
            names(json!({"spec": {"containers": [{"name": "b"}, {"name": "new"}, {"name": "a"}]}})),
            "server b new a c"
        );
        assert_eq!(
            names(
                json!({"spec": {"$setElementOrder/containers": order(&["a", "new", "b", "c"]), "containers": [{"name": "new"}]}})
            ),
            "a new server b c"
        );
    }
}
