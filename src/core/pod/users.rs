//! Ranges of user and group ids for pods with a user namespace of their own (kubelet spec, 6.1). Pure.

use serde::{Deserialize, Serialize};

/// How many ids each pod gets; also the start of the first range.
pub const LENGTH: u32 = 65_536;

/// One mapping of ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mapping {
    /// The first id on the node.
    pub host_id: u32,
    /// The first id in the pod.
    pub container_id: u32,
    /// How many.
    pub length: u32,
}

/// A pod's mappings, as they are kept in its directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mappings {
    /// Users.
    pub uid_mappings: Vec<Mapping>,
    /// Groups.
    pub gid_mappings: Vec<Mapping>,
}

/// The lowest range that nobody has; `None` if all are taken.
#[must_use]
pub fn free(taken: &[Mappings]) -> Option<Mappings> {
    let used: std::collections::BTreeSet<u32> = taken
        .iter()
        .flat_map(|m| &m.uid_mappings)
        .map(|m| m.host_id)
        .collect();
    let host_id = (1..LENGTH)
        .map(|n| n * LENGTH)
        .find(|start| !used.contains(start))?;
    let mapping = vec![Mapping {
        host_id,
        container_id: 0,
        length: LENGTH,
    }];
    Some(Mappings {
        uid_mappings: mapping.clone(),
        gid_mappings: mapping,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_do_not_overlap_and_gaps_are_filled() {
        let first = free(&[]).expect("free");
        let second = free(std::slice::from_ref(&first)).expect("free");
        assert_eq!(
            (
                first.uid_mappings[0].host_id,
                second.uid_mappings[0].host_id
            ),
            (65_536, 131_072)
        );
        assert_eq!(free(&[second]), Some(first.clone()));
        let text = serde_json::to_string(&first).expect("json");
        assert_eq!(
            text,
            "{\"uidMappings\":[{\"hostId\":65536,\"containerId\":0,\"length\":65536}],\"gidMappings\":[{\"hostId\":65536,\"containerId\":0,\"length\":65536}]}"
        );
    }
}
