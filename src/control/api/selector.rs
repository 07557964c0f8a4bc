//! Label and field selectors: grammar and matching.

use std::collections::BTreeMap;

use serde_json::Value;

use super::error::ApiError;
use super::labels::is_label_value;
use super::resources::Resource;
use crate::store::Attrs;
use holdfast_core::selector::Operator;

/// Maximum number of terms of a selector: it is evaluated for every object of a list and every change.
pub(crate) const MAX_TERMS: usize = 1000;

/// A requirement on one label.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    operator: Operator,
    /// Sorted in ascending order.
    values: Vec<String>,
}

impl Requirement {
    fn new(key: String, operator: Operator, mut values: Vec<String>) -> Requirement {
        values.sort_unstable();
        Requirement {
            key,
            operator,
            values,
        }
    }

    /// Whether a label (`None` if absent) meets the requirement. Uses a binary search over the values.
    fn matches(&self, label: Option<&str>) -> bool {
        let found = |label| self.values.binary_search_by(|v| v.as_str().cmp(label));
        match self.operator {
            Operator::In => label.is_some_and(|label| found(label).is_ok()),
            Operator::NotIn => label.is_none_or(|label| found(label).is_err()),
            other => other.matches(&self.values, label),
        }
    }
}

/// The number of terms in a `LabelSelector` object.
#[must_use]
pub fn terms(selector: &Value) -> usize {
    let labels = selector.get("matchLabels").and_then(Value::as_object);
    let expressions = selector.get("matchExpressions").and_then(Value::as_array);
    labels.map_or(0, serde_json::Map::len) + expressions.map_or(0, Vec::len)
}

fn few_enough(what: &str, count: usize) -> Result<(), ApiError> {
    if count <= MAX_TERMS {
        return Ok(());
    }
    Err(ApiError::bad_request(format!(
        "the {what} selector has {count} terms, the limit is {MAX_TERMS}; select by fewer, or list several times"
    )))
}

/// The selector of a list, watch or controller. The default matches everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<(String, bool, String)>,
}

impl Selector {
    /// Parses the `labelSelector` and `fieldSelector` query parameters.
    pub fn parse(
        resource: &Resource,
        labels: Option<&str>,
        fields: Option<&str>,
    ) -> Result<Selector, ApiError> {
        let mut selector = Selector::default();
        for requirement in split_outside_parentheses(labels.unwrap_or_default()) {
            let parsed = requirement_of(&requirement).ok_or_else(|| {
                ApiError::bad_request(format!("unable to parse requirement: {requirement:?}: expected k, !k, k=v, k!=v, k in (a,b) or k notin (a,b)"))
            })?;
            selector.labels.push(parsed);
        }
        few_enough("label", selector.labels.len())?;
        for term in fields
            .unwrap_or_default()
            .split(',')
            .filter(|t| !t.is_empty())
        {
            let (field, equal, value) = if let Some((f, v)) = term.split_once("!=") {
                (f, false, v)
            } else if let Some((f, v)) = term.split_once("==") {
                (f, true, v)
            } else if let Some((f, v)) = term.split_once('=') {
                (f, true, v)
            } else {
                return Err(ApiError::bad_request(format!(
                    "invalid selector: {term:?}: expected field=value"
                )));
            };
            let field = match (resource.kind, field) {
                ("Pod", "spec.host") => "spec.nodeName",
                _ => field,
            };
            let known = field == "metadata.name"
                || (field == "metadata.namespace" && resource.namespaced)
                || resource.fields.contains(&field);
            if !known {
                return Err(ApiError::bad_request(format!(
                    "field label not supported: {field}"
                )));
            }
            selector
                .fields
                .push((field.into(), equal, value.replace('\\', "")));
        }
        few_enough("field", selector.fields.len())?;
        Ok(selector)
    }

    /// Converts a `LabelSelector` object (`matchLabels`, `matchExpressions`). An absent or empty selector matches
    /// nothing, as workload controllers require; so does one with more than [`MAX_TERMS`].
    #[must_use]
    pub(crate) fn of_object(selector: &Value) -> Option<Selector> {
        let mut result = Selector::default();
        if let Some(labels) = selector.get("matchLabels").and_then(Value::as_object) {
            for (key, value) in labels {
                let values = vec![value.as_str().unwrap_or_default().into()];
                let required = Requirement::new(key.clone(), Operator::In, values);
                result.labels.push(required);
            }
        }
        for expression in selector
            .get("matchExpressions")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            let key = expression["key"].as_str()?.to_owned();
            let values = expression["values"].as_array().into_iter().flatten();
            let values: Vec<String> = values.filter_map(|v| v.as_str().map(Into::into)).collect();
            let operator = Operator::of_labels(expression["operator"].as_str()?).ok()?;
            result.labels.push(Requirement::new(key, operator, values));
        }
        (1..=MAX_TERMS)
            .contains(&result.labels.len())
            .then_some(result)
    }

    /// Whether it matches everything.
    #[must_use]
    pub(crate) fn is_everything(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// The name that a `metadata.name=` term fixes.
    #[must_use]
    pub(crate) fn fixed_name(&self) -> Option<&str> {
        self.fixed("metadata.name")
    }

    /// The value that an equality term fixes for a field.
    #[must_use]
    pub fn fixed(&self, field: &str) -> Option<&str> {
        self.fields
            .iter()
            .find(|(f, equal, _)| *equal && f == field)
            .map(|(_, _, v)| v.as_str())
    }

    /// Whether an object with these attributes matches.
    #[must_use]
    pub fn matches(&self, attrs: &Attrs) -> bool {
        self.matches_labels(&attrs.labels)
            && self.fields.iter().all(|(field, equal, value)| {
                (attrs.field(field).unwrap_or_default() == value) == *equal
            })
    }

    /// Whether these labels match.
    #[must_use]
    pub(crate) fn matches_labels(&self, labels: &BTreeMap<String, String>) -> bool {
        let label = |key: &String| labels.get(key).map(String::as_str);
        self.labels.iter().all(|r| r.matches(label(&r.key)))
    }
}

fn split_outside_parentheses(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut depth = 0;
    for c in text.chars() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if c == ',' && depth == 0 {
            parts.push(String::new());
        } else if let Some(last) = parts.last_mut() {
            last.push(c);
        }
    }
    parts
        .into_iter()
        .map(|p| p.trim().to_owned())
        .filter(|p| !p.is_empty())
        .collect()
}

fn requirement_of(text: &str) -> Option<Requirement> {
    let one = |operator, value: &str| (operator, vec![value.trim().to_owned()]);
    let number = |operator, value: &str| {
        value.trim().parse::<i64>().ok()?;
        Some(one(operator, value))
    };
    let (key, (operator, values)) = if let Some(key) = text.strip_prefix('!') {
        (key, (Operator::DoesNotExist, vec![]))
    } else if let Some((key, value)) = text.split_once("!=") {
        (key, one(Operator::NotIn, value))
    } else if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        (key, one(Operator::In, value))
    } else if let Some((key, value)) = text.split_once('>') {
        (key, number(Operator::Gt, value)?)
    } else if let Some((key, value)) = text.split_once('<') {
        (key, number(Operator::Lt, value)?)
    } else if let Some((head, values)) = text.split_once('(') {
        let values = values.strip_suffix(')')?;
        let values: Vec<String> = values.split(',').map(|v| v.trim().to_owned()).collect();
        let head = head.trim();
        match head.strip_suffix(" notin") {
            Some(key) => (key, (Operator::NotIn, values)),
            None => (head.strip_suffix(" in")?, (Operator::In, values)),
        }
    } else {
        (text, (Operator::Exists, vec![]))
    };
    let key = key.trim();
    let valid = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    let valid =
        !key.is_empty() && key.chars().all(valid) && values.iter().all(|v| is_label_value(v));
    valid.then(|| Requirement::new(key.to_owned(), operator, values))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Attrs {
        let labels = pairs
            .iter()
            .map(|(k, v)| ((*k).into(), (*v).into()))
            .collect();
        Attrs {
            labels,
            ..Attrs::default()
        }
    }

    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    proptest! {
        /// Any text parses or gets a 400, and any parsed selector can be evaluated against any object.
        #[test]
        fn any_text_is_parsed_or_rejected(
            text in "[a-c!=<>(), ]{0,24}|\\PC{0,24}",
            fields in "metadata\\.name[=!]{1,3}\\PC{0,8}|\\PC{0,16}",
            have in btree_map("[a-c]", "[a-c0-9]{0,2}", 0..3),
        ) {
            let pods = Resource::find("", "v1", "pods").expect("pods");
            let attrs = Attrs { labels: have, ..Attrs::default() };
            match Selector::parse(pods, Some(&text), Some(&fields)) {
                Ok(selector) => {
                    // Matching does not panic and is deterministic.
                    prop_assert_eq!(selector.matches(&attrs), selector.clone().matches(&attrs));
                    prop_assert!(!selector.is_everything() || selector.matches(&attrs));
                }
                Err(error) => prop_assert_eq!(error.code, 400),
            }
        }

        /// `in` and `notin` are always opposites, as are a key and its negation with `!`.
        #[test]
        fn opposite_requirements_never_both_match(
            key in "[a-c]", values in vec("[a-c]{0,2}", 1..4), have in btree_map("[a-c]", "[a-c]{0,2}", 0..3),
        ) {
            let pods = Resource::find("", "v1", "pods").expect("pods");
            let attrs = Attrs { labels: have, ..Attrs::default() };
            let matches = |text: String| {
                Selector::parse(pods, Some(&text), None).expect("a selector").matches(&attrs)
            };
            let values = values.join(",");
            prop_assert_ne!(matches(format!("{key} in ({values})")), matches(format!("{key} notin ({values})")));
            prop_assert_ne!(matches(key.clone()), matches(format!("!{key}")));
        }
    }

    #[test]
    fn the_number_of_terms_is_limited_and_that_of_values_is_not() {
        let pods = Resource::find("", "v1", "pods").expect("pods");
        let terms = |count: usize| {
            let all: Vec<String> = (0..count).map(|i| format!("metadata.name!=n{i}")).collect();
            all.join(",")
        };
        let labels = terms(MAX_TERMS).replace("metadata.name", "k");
        assert!(Selector::parse(pods, Some(&labels), Some(&terms(MAX_TERMS))).is_ok());
        let more = terms(MAX_TERMS + 1);
        for (labels, fields) in [
            (Some(more.replace("metadata.name", "k")), None),
            (None, Some(more)),
        ] {
            let parsed = Selector::parse(pods, labels.as_deref(), fields.as_deref());
            let error = parsed.expect_err("too many");
            assert!(
                error.code == 400 && error.message.contains("1001 terms, the limit is 1000"),
                "{}",
                error.message
            );
        }
        let values: Vec<String> = (0..5000).rev().map(|i| format!("v{i}")).collect();
        let text = format!("a in ({})", values.join(","));
        let selector = Selector::parse(pods, Some(&text), None).expect("a selector");
        let is = |value: &str| {
            let labels = [("a".to_owned(), value.to_owned())].into();
            selector.matches_labels(&labels)
        };
        assert!(is("v0") && is("v4999") && is("v77") && !is("v5000") && !is(""));
        let expressions: Vec<Value> = (0..=MAX_TERMS)
            .map(|i| serde_json::json!({"key": format!("k{i}"), "operator": "Exists"}))
            .collect();
        assert_eq!(
            Selector::of_object(&serde_json::json!({"matchExpressions": expressions})),
            None
        );
    }

    #[test]
    fn label_selectors_match_as_documented_upstream() {
        let pods = Resource::find("", "v1", "pods").expect("pods");
        let cases: &[(&str, &[(&str, &str)], bool)] = &[
            ("", &[], true),
            ("a=1", &[("a", "1")], true),
            ("a==1", &[("a", "2")], false),
            ("a!=1", &[], true),
            ("a in (1, 2),b", &[("a", "2"), ("b", "")], true),
            ("a notin (1,2)", &[("a", "2")], false),
            ("!a", &[("a", "")], false),
            ("n>5", &[("n", "6")], true),
            ("n<5", &[("n", "x")], false),
        ];
        for (text, have, expected) in cases {
            let selector = Selector::parse(pods, Some(text), None).expect(text);
            assert_eq!(selector.matches(&labels(have)), *expected, "{text}");
        }
        for bad in [
            "a in 1",
            "a b",
            "=x",
            "n>five",
            "a=1)),b",
            "a=b c",
            "a in (-b)",
        ] {
            assert_eq!(
                Selector::parse(pods, Some(bad), None).expect_err(bad).code,
                400,
                "{bad}"
            );
        }
        assert!(Selector::parse(pods, None, Some("spec.foo=1")).is_err());
    }
}
