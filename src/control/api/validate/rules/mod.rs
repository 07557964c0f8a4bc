//! Field rules as tables: a path, a rule, and values that violate it. Pure, and independent of requests.
//!
//! Fields, reasons and messages follow `pkg/apis/core/validation/validation.go`. The paths of a table are relative to
//! the object that it validates, so that pods and pod templates share tables. A test violates each row once.
//!
//! A path is a list of keys: `ports[].hostPort` is the field `hostPort` of each item of the list `ports`. A field that
//! is absent or null violates [`Rule::Required`] only, because defaults may be applied later.

mod container;
mod ingress;
mod network;
mod others;
mod pod;
mod resources;
mod scheduling;
mod syntax;
mod volume;

use serde_json::Value;

use super::Errors;
use crate::api::error::FieldError;

pub(super) use ingress::{ip_name, status as ingress_status};
pub(super) use others::check as object;
pub(super) use pod::check as pod;

/// The valid values of a field.
#[derive(Clone, Copy)]
enum Rule {
    /// Required and not empty. The text is upstream's explanation, often empty.
    Required(&'static str),
    /// Forbidden, for this reason.
    Absent(&'static str),
    /// An integer between both numbers, inclusive, with the message.
    Between(i64, i64, &'static str),
    /// One of these values; an empty string counts as absent.
    OneOf(&'static [&'static str]),
    /// A string for which the function returns true, with the message. An empty string counts as absent.
    Text(fn(&str) -> bool, &'static str),
    /// A list of at most this many items.
    Most(usize),
    /// Any other rule; the function gets the value and its path.
    Check(fn(&Value, &str, &mut Errors)),
}

/// A rule about one field.
struct Row {
    path: &'static str,
    rule: Rule,
    /// JSON values, each of which violates the rule when set at the path of the
    /// table's example. [`Rule::Most`] has none.
    #[cfg_attr(not(test), allow(dead_code))]
    breaks: &'static [&'static str],
}

const fn row(path: &'static str, rule: Rule, breaks: &'static [&'static str]) -> Row {
    Row { path, rule, breaks }
}

impl Rule {
    fn check(&self, value: &Value, path: &str, errors: &mut Errors) {
        let is_empty = match value {
            Value::Null => true,
            Value::String(text) => text.is_empty(),
            Value::Array(items) => items.is_empty(),
            _ => false,
        };
        match self {
            Rule::Required(why) if is_empty => errors.push(FieldError::required(path, why)),
            Rule::Check(check) if !value.is_null() => check(value, path, errors),
            _ if is_empty => {}
            Rule::Absent(why) => errors.push(FieldError::forbidden(path, why)),
            Rule::Between(least, most, why) => {
                if !value
                    .as_i64()
                    .is_some_and(|n| (*least..=*most).contains(&n))
                {
                    errors.push(FieldError::invalid(path, value, why));
                }
            }
            Rule::OneOf(words) => {
                let word = value.as_str().unwrap_or_default();
                if !words.contains(&word) {
                    errors.push(FieldError::unsupported(path, word, words));
                }
            }
            Rule::Text(is_right, why) => {
                if !value.as_str().is_some_and(is_right) {
                    errors.push(FieldError::invalid(path, value, why));
                }
            }
            Rule::Most(most) => {
                let count = value.as_array().map_or(0, Vec::len);
                if count > *most {
                    errors.push(FieldError::too_many(path, count, *most));
                }
            }
            Rule::Required(_) | Rule::Check(_) => {}
        }
    }
}

/// Appends a key to a path; the path of a whole object is empty.
fn below(path: &str, key: &str) -> String {
    match path {
        "" => key.to_owned(),
        path => format!("{path}.{key}"),
    }
}

/// Validates the values at `path` below `value`; `at` is the path of `value` itself.
fn descend(value: &Value, at: &str, path: &str, rule: &Rule, errors: &mut Errors) {
    if path.is_empty() {
        return rule.check(value, at, errors);
    }
    let (key, rest) = path.split_once('.').unwrap_or((path, ""));
    match key.strip_suffix("[]") {
        Some(key) => {
            let items = value[key].as_array().into_iter().flatten();
            for (i, item) in items.enumerate() {
                descend(
                    item,
                    &format!("{}[{i}]", below(at, key)),
                    rest,
                    rule,
                    errors,
                );
            }
        }
        // Fields of an absent object are not required.
        None if value[key].is_null() && !rest.is_empty() => {}
        None => descend(&value[key], &below(at, key), rest, rule, errors),
    }
}

/// Validates an object, or a part of one, against a table. `at` is its path, empty for a whole object.
fn table(rows: &[Row], value: &Value, at: &str, errors: &mut Errors) {
    for row in rows {
        descend(value, at, row.path, &row.rule, errors);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sets a value at a path, in the first item of each list.
    fn put(object: &mut Value, path: &str, value: Value) {
        let (key, rest) = path.split_once('.').unwrap_or((path, ""));
        let next = match key.strip_suffix("[]") {
            Some(key) => &mut object[key][0],
            None => &mut object[key],
        };
        if rest.is_empty() {
            *next = value;
        } else {
            put(next, rest, value);
        }
    }

    /// All tables, each with an example object.
    fn tables() -> Vec<(&'static str, &'static [Row], Value)> {
        let examples = [
            pod::examples(),
            scheduling::examples(),
            container::examples(),
            resources::examples(),
            volume::examples(),
            others::examples(),
            network::examples(),
            ingress::examples(),
        ];
        examples.into_iter().flatten().collect()
    }

    /// The values that violate a rule.
    fn breaking(row: &Row) -> Vec<Value> {
        let parse = |text: &&str| {
            serde_json::from_str(text).unwrap_or_else(|e| panic!("{}: {text}: {e}", row.path))
        };
        match row.rule {
            Rule::Most(most) => vec![vec![0; most + 1].into()],
            _ => row.breaks.iter().map(parse).collect(),
        }
    }

    #[test]
    fn every_rule_accepts_its_example_and_rejects_invalid_values() {
        let mut count = 0;
        for (name, rows, example) in tables() {
            for row in rows {
                let one = std::slice::from_ref(row);
                let mut errors = vec![];
                table(one, &example, "", &mut errors);
                assert_eq!(errors, [], "{name} {}: the example is valid", row.path);
                let values = breaking(row);
                assert!(
                    !values.is_empty(),
                    "{name} {}: the rule lists no invalid value",
                    row.path
                );
                for value in values {
                    count += 1;
                    let mut broken = example.clone();
                    if row.path.is_empty() {
                        broken = value;
                    } else {
                        put(&mut broken, row.path, value);
                    }
                    errors.clear();
                    table(one, &broken, "", &mut errors);
                    assert!(!errors.is_empty(), "{name} {}: {broken}", row.path);
                    let first = row.path.split(['.', '[']).next().unwrap_or_default();
                    let names_it = errors.iter().all(|e| e.field.starts_with(first));
                    assert!(names_it, "{name} {}: {errors:?}", row.path);
                }
            }
        }
        assert!(count > 250, "{count} values");
    }

    /// A duplicate row would report its error twice.
    #[test]
    fn rules_are_unique() {
        for (name, rows, _) in tables() {
            let mut seen = std::collections::HashSet::new();
            for row in rows {
                if let Rule::Check(check) = row.rule {
                    let is_new = seen.insert((row.path, check as usize));
                    assert!(is_new, "{name} {}", row.path);
                }
            }
        }
    }

    #[test]
    fn paths_select_items_and_absent_parents_require_nothing() {
        let rows = [row("a[].b.c", Rule::Required("why"), &["null"])];
        let object = serde_json::json!({"a": [{"b": {"c": "x"}}, {"b": {}}, {}]});
        let mut errors = vec![];
        table(&rows, &object, "spec", &mut errors);
        assert_eq!(errors, [FieldError::required("spec.a[1].b.c", "why")]);
    }
}
