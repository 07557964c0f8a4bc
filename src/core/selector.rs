//! Label selectors: operators of label and node selectors, and matching. Pure.
//!
//! The rules are those of `k8s.io/apimachinery/pkg/labels`: an absent label matches `NotIn` and `DoesNotExist`, and a
//! selector with an unknown operator matches nothing.

use std::collections::BTreeMap;
use std::str::FromStr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

/// How a requirement compares a label with its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operator {
    /// The label is one of the values.
    In,
    /// The label is none of the values, or absent.
    NotIn,
    /// The label is present.
    Exists,
    /// The label is absent.
    DoesNotExist,
    /// The label is an integer above the first value. Only in node selectors and the text form.
    Gt,
    /// The label is an integer below the first value. Only in node selectors and the text form.
    Lt,
}

/// The operator is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnknownOperator;

impl FromStr for Operator {
    type Err = UnknownOperator;

    fn from_str(text: &str) -> Result<Operator, UnknownOperator> {
        Ok(match text {
            "In" => Operator::In,
            "NotIn" => Operator::NotIn,
            "Exists" => Operator::Exists,
            "DoesNotExist" => Operator::DoesNotExist,
            "Gt" => Operator::Gt,
            "Lt" => Operator::Lt,
            _ => return Err(UnknownOperator),
        })
    }
}

impl Operator {
    /// The operator of a `LabelSelector`, which has neither `Gt` nor `Lt`.
    pub fn of_labels(text: &str) -> Result<Operator, UnknownOperator> {
        match text.parse()? {
            Operator::Gt | Operator::Lt => Err(UnknownOperator),
            operator => Ok(operator),
        }
    }

    /// Whether a label (`None` if absent) satisfies a requirement with these values.
    #[must_use]
    pub fn matches(self, values: &[String], label: Option<&str>) -> bool {
        let listed = |label: &str| values.iter().any(|v| v == label);
        let numbers = || Some((label?.parse::<i64>().ok()?, values.first()?.parse().ok()?));
        match self {
            Operator::In => label.is_some_and(listed),
            Operator::NotIn => !label.is_some_and(listed),
            Operator::Exists => label.is_some(),
            Operator::DoesNotExist => label.is_none(),
            Operator::Gt => numbers().is_some_and(|(label, bound)| label > bound),
            Operator::Lt => numbers().is_some_and(|(label, bound)| label < bound),
        }
    }
}

/// Whether a `LabelSelector` matches. An empty selector matches everything; the caller decides what a missing selector
/// means.
#[must_use]
pub fn matches(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let equal = |(key, value): (&String, &String)| labels.get(key) == Some(value);
    selector.match_labels.iter().flatten().all(equal)
        && selector.match_expressions.iter().flatten().all(|e| {
            let (values, label) = (e.values.as_deref().unwrap_or_default(), labels.get(&e.key));
            Operator::of_labels(&e.operator)
                .is_ok_and(|operator| operator.matches(values, label.map(String::as_str)))
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_operator_matches_present_and_absent_labels_correctly() {
        let values = ["5".to_owned(), "7".to_owned()];
        for (operator, of_6, of_5, of_text, of_absent) in [
            ("In", false, true, false, false),
            ("NotIn", true, false, true, true),
            ("Exists", true, true, true, false),
            ("DoesNotExist", false, false, false, true),
            ("Gt", true, false, false, false),
            ("Lt", false, false, false, false),
        ] {
            let parsed: Operator = operator.parse().expect(operator);
            let matches = |label| parsed.matches(&values, label);
            assert_eq!(
                [
                    matches(Some("6")),
                    matches(Some("5")),
                    matches(Some("x")),
                    matches(None)
                ],
                [of_6, of_5, of_text, of_absent],
                "{operator}"
            );
        }
        assert_eq!("in".parse::<Operator>(), Err(UnknownOperator));
        assert!(!Operator::Gt.matches(&[], Some("6")), "no value to compare");
    }

    #[test]
    fn selectors_match_labels_and_expressions() {
        let labels = BTreeMap::from([("a".to_owned(), "1".to_owned())]);
        for (selector, expected) in [
            (json!({}), true),
            (json!({"matchLabels": {"a": "1"}}), true),
            (json!({"matchLabels": {"a": "2"}}), false),
            (
                json!({"matchExpressions": [{"key": "b", "operator": "DoesNotExist"}]}),
                true,
            ),
            (
                json!({"matchExpressions": [{"key": "b", "operator": "Absent"}]}),
                false,
            ),
            (
                json!({"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["0"]}]}),
                false,
            ),
        ] {
            let selector: LabelSelector = serde_json::from_value(selector).expect("a selector");
            assert_eq!(matches(&selector, &labels), expected, "{selector:?}");
        }
    }
}
