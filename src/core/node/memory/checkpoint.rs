//! The checkpoint of memory allocations, `memory_manager_state`, in the kubelet's format (version 1 of
//! `pkg/kubelet/cm/memorymanager/state/checkpoint.go`). Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Allocations, Block, NodeState, State, Table};
use crate::digest::fnv32;
use crate::node::checkpoint::Head;

/// File name, below the root directory.
pub const FILE: &str = "memory_manager_state";

#[derive(Debug, Default, Serialize, Deserialize)]
struct Document {
    #[serde(rename = "policyName", default)]
    policy: String,
    #[serde(rename = "machineState", default)]
    nodes: BTreeMap<u32, NodeState>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    entries: Allocations,
    #[serde(default)]
    checksum: u64,
}

fn joined(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(" ")
}

fn numbers(list: &[u32]) -> String {
    format!("([]int)[{}]", joined(list.iter().map(u32::to_string)))
}

fn dump_table(table: &Table) -> String {
    format!(
        "<*>{{TotalMemSize:(uint64){} SystemReserved:(uint64){} Allocatable:(uint64){} Reserved:(uint64){} Free:(uint64){}}}",
        table.total, table.system_reserved, table.allocatable, table.reserved, table.free
    )
}

fn dump_node(node: &NodeState) -> String {
    let tables = node.tables.iter();
    let tables = joined(tables.map(|(name, table)| format!("{name}:{}", dump_table(table))));
    format!(
        "<*>{{NumberOfAssignments:(int){} MemoryMap:(map[v1.ResourceName]*state.MemoryTable)map[{tables}] Cells:{}}}",
        node.assignments,
        numbers(&node.cells)
    )
}

fn dump_block(block: &Block) -> String {
    format!(
        "{{NUMAAffinity:{} Type:(v1.ResourceName){} Size:(uint64){}}}",
        numbers(&block.nodes),
        block.resource,
        block.size
    )
}

/// FNV-1a of the document as Go's `spew` dumps it, which is what the kubelet compares.
fn checksum(document: &Document) -> u64 {
    let nodes = document.nodes.iter();
    let nodes = joined(nodes.map(|(id, node)| format!("{id}:{}", dump_node(node))));
    let pods = document.entries.iter().map(|(uid, containers)| {
        let containers = containers
            .iter()
            .map(|(name, blocks)| format!("{name}:[{}]", joined(blocks.iter().map(dump_block))));
        format!("{uid}:map[{}]", joined(containers))
    });
    let dump = format!(
        "(*state.MemoryManagerCheckpoint){{PolicyName:(string){} MachineState:(state.NUMANodeMap)map[{nodes}] Entries:(state.ContainerMemoryAssignments)map[{}] Checksum:(checksum.Checksum)0}}",
        document.policy,
        joined(pods)
    );
    fnv32(dump.bytes()).into()
}

/// Serialises the checkpoint.
#[must_use]
pub fn write(policy: &str, state: &State) -> String {
    let mut document = Document {
        policy: policy.into(),
        nodes: state.nodes.clone(),
        entries: state.allocations.clone(),
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
        field: "memoryManagerPolicy",
        policy: &document.policy,
        checksum: document.checksum,
        expected: checksum(&document),
    }
    .check(policy)?;
    Ok(State {
        nodes: document.nodes,
        allocations: document.entries,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by the kubelet's code.
    const WRITTEN: [&str; 2] = [
        r#"{"policyName":"Static","machineState":{"0":{"numberOfAssignments":0,"memoryMap":{"memory":{"total":10,"systemReserved":1,"allocatable":9,"reserved":0,"free":9}},"cells":[0]}},"checksum":2775645453}"#,
        r#"{"policyName":"Static","machineState":{"0":{"numberOfAssignments":0,"memoryMap":{},"cells":[]},"1":{"numberOfAssignments":2,"memoryMap":{"hugepages-1Gi":{"total":0,"systemReserved":0,"allocatable":0,"reserved":0,"free":0},"memory":{"total":10,"systemReserved":1,"allocatable":9,"reserved":4,"free":5}},"cells":[0,1]}},"entries":{"p":{"c":[{"numaAffinity":[0,1],"type":"memory","size":4},{"numaAffinity":[1],"type":"hugepages-1Gi","size":0}],"d":[]}},"checksum":405516962}"#,
    ];

    #[test]
    fn the_kubelets_checkpoint_round_trips_unchanged() {
        for text in WRITTEN {
            let state = read(text, "Static").expect("a state");
            assert_eq!(write("Static", &state), text);
        }
        for (text, policy, expected) in [
            (WRITTEN[0].replace("9}", "8}"), "Static", "checksum"),
            (WRITTEN[0].to_owned(), "None", "memoryManagerPolicy: Static"),
        ] {
            let error = read(&text, policy).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
    }
}
