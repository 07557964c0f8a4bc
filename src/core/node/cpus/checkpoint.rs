//! The checkpoint of exclusive CPUs, `cpu_manager_state`, in the kubelet's format (version 2 of
//! `pkg/kubelet/cm/cpumanager/state/checkpoint.go`). With it, a node can switch between the kubelet and this agent, and
//! pods keep their CPUs. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::State;
use crate::cpuset::{format_list, parse_list};
use crate::digest::fnv32;
use crate::node::checkpoint::Head;

/// File name, below the root directory.
pub const FILE: &str = "cpu_manager_state";

#[derive(Debug, Default, Serialize, Deserialize)]
struct Document {
    #[serde(rename = "policyName", default)]
    policy: String,
    #[serde(rename = "defaultCpuSet", alias = "defaultCPUSet", default)]
    shared: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<String, BTreeMap<String, String>>,
    #[serde(default)]
    checksum: u64,
}

/// FNV-1a of the document as Go's `spew` dumps it, which is what the kubelet compares.
fn checksum(document: &Document) -> u64 {
    let pods = document.entries.iter().map(|(uid, containers)| {
        let containers = containers.iter().map(|(name, set)| format!("{name}:{set}"));
        let containers: Vec<String> = containers.collect();
        format!("{uid}:map[{}]", containers.join(" "))
    });
    let pods: Vec<String> = pods.collect();
    let dump = format!(
        "(*state.CPUManagerCheckpoint){{PolicyName:(string){} DefaultCPUSet:(string){} Entries:(map[string]map[string]string)map[{}] Checksum:(checksum.Checksum)0}}",
        document.policy,
        document.shared,
        pods.join(" ")
    );
    fnv32(dump.bytes()).into()
}

/// Serialises the checkpoint.
#[must_use]
pub fn write(policy: &str, state: &State) -> String {
    let lists = |containers: &BTreeMap<String, _>| -> BTreeMap<String, String> {
        let listed = containers
            .iter()
            .map(|(name, set)| (name.clone(), format_list(set)));
        listed.collect()
    };
    let mut document = Document {
        policy: policy.into(),
        shared: format_list(&state.shared),
        entries: state
            .exclusive
            .iter()
            .map(|(uid, containers)| (uid.clone(), lists(containers)))
            .collect(),
        checksum: 0,
    };
    document.checksum = checksum(&document);
    serde_json::to_string(&document).unwrap_or_default()
}

/// Reads a checkpoint.
///
/// # Errors
///
/// The file is corrupt, or was written under another policy.
pub fn read(text: &str, policy: &str) -> Result<State, String> {
    let document: Document = serde_json::from_str(text).map_err(|e| e.to_string())?;
    Head {
        field: "cpuManagerPolicy",
        policy: &document.policy,
        checksum: document.checksum,
        expected: checksum(&document),
    }
    .check(policy)?;
    let set = |text: &str| parse_list(text).ok_or_else(|| format!("{text:?} is not a CPU list"));
    let mut state = State {
        shared: set(&document.shared)?,
        ..State::default()
    };
    for (uid, containers) in &document.entries {
        let own = state.exclusive.entry(uid.clone()).or_default();
        for (name, text) in containers {
            own.insert(name.clone(), set(text)?);
        }
    }
    Ok(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by the kubelet's code.
    const STATIC: &str = r#"{"policyName":"static","defaultCpuSet":"0,2","entries":{"a":{},"a-1":{"c":"5"},"b":{"a":"3-4","x":"1"}},"checksum":1979447490}"#;

    #[test]
    fn the_kubelets_checkpoint_round_trips_unchanged() {
        let state = read(STATIC, "static").expect("a state");
        assert_eq!(format_list(&state.shared), "0,2");
        assert_eq!(format_list(&state.exclusive["b"]["a"]), "3-4");
        assert_eq!(write("static", &state), STATIC);
        for (text, policy) in [
            (
                r#"{"policyName":"none","defaultCPUSet":"4-6","entries":{},"checksum":354655845}"#,
                "none",
            ),
            (
                r#"{"policyName":"none","defaultCPUSet":"1-3","entries":{"pod":{"container1":"4-6","container2":"1-3"}},"checksum":3610638499}"#,
                "none",
            ),
            (r#"{"policyName":"static","defaultCpuSet":"0-1"}"#, "static"),
        ] {
            assert!(read(text, policy).is_ok(), "{text}");
        }
    }

    #[test]
    fn checkpoint_mismatches_are_reported() {
        for (text, policy, expected) in [
            ("{", "static", "EOF"),
            (&STATIC.replace("0,2", "0,3"), "static", "checksum"),
            (STATIC, "none", "cpuManagerPolicy: static"),
            (
                r#"{"policyName":"none","defaultCPUSet":"1.3","entries":{},"checksum":3021697696}"#,
                "none",
                "\"1.3\"",
            ),
        ] {
            let error = read(text, policy).expect_err(text);
            assert!(error.contains(expected), "{error}");
        }
    }
}
