//! The hash that detects a changed definition of a running container. It equals the kubelet's bit for bit
//! (`HashContainer` in `pkg/kubelet/container/helpers.go`). The agent of a node can therefore be replaced in either
//! direction without restarting containers.

use k8s_openapi::api::core::v1::Container;
use serde_json::json;

use crate::digest::fnv32;

/// The hash over name and image in hexadecimal: only a change of these restarts a container. It is the 32-bit FNV-1a
/// hash of the output of Go's deep-hash printer for the JSON bytes.
#[must_use]
pub fn container_hash(container: &Container) -> String {
    let json = go_json(container);
    let bytes = json.bytes().enumerate();
    // No intermediate string: each turn of a pod's worker compares every running container.
    let printed = bytes.flat_map(|(place, byte)| {
        let space = (place > 0).then_some(b' ');
        space.into_iter().chain(digits(byte))
    });
    let open = b"([]uint8)[".iter().copied();
    format!("{:x}", fnv32(open.chain(printed).chain([b']'])))
}

/// The decimal digits of a byte, as Go prints it.
fn digits(byte: u8) -> impl Iterator<Item = u8> {
    let all = [byte / 100, byte / 10 % 10, byte % 10];
    let zeros = all.iter().take(2).take_while(|digit| **digit == 0).count();
    all.into_iter()
        .skip(zeros)
        .map(|digit| digit.saturating_add(b'0'))
}

/// The JSON that Go's `json.Marshal` writes for a map of name and image: sorted keys, and escapes for HTML and
/// JavaScript.
fn go_json(container: &Container) -> String {
    // A map of serde_json is sorted too.
    let text =
        json!({"image": container.image.as_deref().unwrap_or_default(), "name": container.name});
    escape_as_go(&text.to_string())
}

/// JSON with the escapes of Go's `json.Marshal` for HTML and JavaScript.
pub(crate) fn escape_as_go(json: &str) -> String {
    let mut escaped = String::new();
    for c in json.chars() {
        match c {
            '<' => escaped.push_str("\\u003c"),
            '>' => escaped.push_str("\\u003e"),
            '&' => escaped.push_str("\\u0026"),
            '\u{2028}' => escaped.push_str("\\u2028"),
            '\u{2029}' => escaped.push_str("\\u2029"),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// The values that upstream's own tests expect (`TestHashContainer`, `TestHashContainerWithoutResources`).
    #[test]
    fn container_hashes_match_upstream() {
        let resources = json!({"name": "foo", "image": "bar",
            "resources": {"limits": {"cpu": "200m", "memory": "200Mi"}, "requests": {"cpu": "100m", "memory": "100Mi"}},
            "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]});
        let cases = [
            (
                json!({"name": "test_container", "image": "foo/image:v1", "args": ["/bin/sh", "-c", "echo abc"],
                       "ports": [{"containerPort": 8001}]}),
                "8e45cbd0",
            ),
            (json!({"name": "foo", "image": "bar"}), "11a6d6d6"),
            (resources, "11a6d6d6"),
        ];
        for (container, expected) in cases {
            let parsed: Container = serde_json::from_value(container.clone()).expect("a container");
            assert_eq!(container_hash(&parsed), expected, "{container}");
        }
    }

    #[test]
    fn only_name_and_image_affect_the_hash() {
        let of = |container: Value| {
            container_hash(&serde_json::from_value::<Container>(container).expect("a container"))
        };
        let plain = of(json!({"name": "a", "image": "b"}));
        assert_eq!(
            plain,
            of(
                json!({"name": "a", "image": "b", "env": [{"name": "X", "value": "1"}], "restartPolicy": "Always",
                        "livenessProbe": {"exec": {"command": ["true"]}}})
            )
        );
        assert_ne!(plain, of(json!({"name": "a", "image": "c"})));
        assert_ne!(plain, of(json!({"name": "b", "image": "b"})));
    }

    #[test]
    fn bytes_are_printed_without_leading_zeros() {
        for byte in 0..=u8::MAX {
            let printed: Vec<u8> = digits(byte).collect();
            assert_eq!(printed, byte.to_string().into_bytes());
        }
    }

    #[test]
    fn json_is_encoded_as_by_go() {
        let container = Container {
            name: "n".into(),
            image: Some("a<b>&\u{2028}\"".into()),
            ..Container::default()
        };
        assert_eq!(
            go_json(&container),
            r#"{"image":"a\u003cb\u003e\u0026\u2028\"","name":"n"}"#
        );
    }
}
