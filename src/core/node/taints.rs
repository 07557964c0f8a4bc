//! Taints and tolerations. Pure.

use k8s_openapi::api::core::v1::{Taint, Toleration};

/// Whether one of the tolerations covers the taint.
#[must_use]
pub fn tolerates(tolerations: &[Toleration], taint: &Taint) -> bool {
    tolerations.iter().any(|t| {
        let effect = t.effect.as_deref().unwrap_or_default();
        let key = t.key.as_deref().unwrap_or_default();
        (effect.is_empty() || effect == taint.effect)
            && (key.is_empty() || key == taint.key)
            && match t.operator.as_deref() {
                Some("Exists") => true,
                _ => {
                    !key.is_empty()
                        && t.value.as_deref().unwrap_or_default()
                            == taint.value.as_deref().unwrap_or_default()
                }
            }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_toleration_matches_by_key_value_and_effect() {
        let taint: Taint =
            serde_json::from_value(json!({"key": "k", "value": "v", "effect": "NoSchedule"}))
                .expect("a taint");
        let cases = [
            (json!({"operator": "Exists"}), true),
            (json!({"key": "k", "operator": "Exists"}), true),
            (json!({"key": "k", "value": "v"}), true),
            (json!({"key": "k", "value": "w"}), false),
            (json!({"key": "other", "operator": "Exists"}), false),
            (
                json!({"key": "k", "operator": "Exists", "effect": "NoExecute"}),
                false,
            ),
            (json!({"value": "v"}), false),
        ];
        for (toleration, expected) in cases {
            let toleration: Toleration = serde_json::from_value(toleration).expect("a toleration");
            assert_eq!(
                tolerates(std::slice::from_ref(&toleration), &taint),
                expected,
                "{toleration:?}"
            );
        }
    }
}
