//! The configuration as `/configz` shows it: the file over the defaults
//! (`pkg/kubelet/apis/config/v1beta1/defaults.go`).

use serde_json::{Value, json};

fn defaults() -> Value {
    serde_json::from_str(include_str!("defaults.json"))
        .expect("the embedded defaults are valid JSON")
}

/// Replaces durations of zero by the defaults: kubeadm writes zeros for fields that it does not set.
fn replace_zero_durations(all: &mut Value, known: &Value) {
    let is_duration = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_digit()) && text.ends_with(['s', 'm', 'h'])
    };
    match (all, known) {
        (Value::Object(all), Value::Object(known)) => {
            for (key, value) in all.iter_mut() {
                if let Some(known) = known.get(key) {
                    replace_zero_durations(value, known);
                }
            }
        }
        (value, Value::String(known)) if is_duration(known) && (*value == "0s" || *value == 0) => {
            *value = known.as_str().into()
        }
        _ => {}
    }
}

/// Merges the file over the defaults. Headers for requests to `staticPodURL` may be secret and are masked.
pub(super) fn of(file: &Value) -> Value {
    let (mut all, known) = (defaults(), defaults());
    json_patch::merge(&mut all, file);
    replace_zero_durations(&mut all, &known);
    let hard = all.get("evictionHard").filter(|map| !map.is_null());
    let hard = hard.and_then(|map| serde_json::from_value(map.clone()).ok());
    let merge = all["mergeDefaultEvictionSettings"] == true;
    all["evictionHard"] = json!(super::eviction::hard(hard, merge));
    all["apiVersion"] = "kubelet.config.k8s.io/v1beta1".into();
    all["kind"] = "KubeletConfiguration".into();
    for value in all
        .get_mut("staticPodURLHeader")
        .and_then(Value::as_object_mut)
        .into_iter()
        .flat_map(|headers| headers.values_mut())
    {
        *value = json!(["<masked>"]);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_overrides_the_defaults_and_its_secrets_are_hidden() {
        let shown = of(
            &json!({"maxPods": 5, "authentication": {"anonymous": {"enabled": true}}, "staticPodURLHeader": {"Authorization": ["Bearer x"]}}),
        );
        assert_eq!(
            (&shown["maxPods"], &shown["port"]),
            (&json!(5), &json!(10250))
        );
        assert_eq!(shown["authentication"]["webhook"]["enabled"], true);
        assert!(!shown.to_string().contains("Bearer"));
        let zeros = of(
            &json!({"syncFrequency": "0s", "authentication": {"webhook": {"cacheTTL": "0s"}}, "maxPods": 0, "imageMaximumGCAge": "0s"}),
        );
        assert_eq!(
            (
                &zeros["syncFrequency"],
                &zeros["authentication"]["webhook"]["cacheTTL"]
            ),
            (&json!("1m0s"), &json!("2m0s"))
        );
        assert_eq!(
            (&zeros["maxPods"], &zeros["imageMaximumGCAge"]),
            (&json!(0), &json!("0s"))
        );
        assert_eq!(of(&json!({}))["kind"], "KubeletConfiguration");
        let hard = |file: Value| of(&file)["evictionHard"].clone();
        assert_eq!(hard(json!({}))["nodefs.available"], "10%");
        assert_eq!(hard(json!({"evictionHard": {}})), json!({}));
        let own = json!({"evictionHard": {"memory.available": "1Gi"}, "mergeDefaultEvictionSettings": true});
        assert_eq!(
            (
                hard(own.clone())["memory.available"].clone(),
                hard(own)["imagefs.available"].clone()
            ),
            (json!("1Gi"), json!("15%"))
        );
    }
}
