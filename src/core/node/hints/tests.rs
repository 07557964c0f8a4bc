//! `merges.txt` has merges of hints by the kubelet's policies: the kubelet's test cases, and more that follow its
//! rules. Kinds of lines:
//!
//! - `machine`: for each NUMA node its number and its distances to all nodes
//! - otherwise: policy, providers, and the merged hint
//!
//! The policy `best` stands for best-effort and restricted, of which restricted rejects hints that are not preferred;
//! `closest` adds `prefer-closest-numa-nodes`. Providers are separated by `;`. Each provider has resources with hints:
//! the nodes, and whether the hint is preferred. `*` means any nodes, `!` a resource with an empty list, and `-` a
//! provider without hints.

use super::*;

fn machine(text: &str) -> Topology {
    let rows: Vec<(u32, Vec<u64>)> = text.split(' ').map(row).collect();
    let ids: Vec<u32> = rows.iter().map(|(id, _)| *id).collect();
    let node = |(id, distances): (u32, Vec<u64>)| {
        let memory = MemoryNode {
            distances: ids.iter().copied().zip(distances).collect(),
            ..MemoryNode::default()
        };
        (id, memory)
    };
    Topology {
        nodes: rows.into_iter().map(node).collect(),
        ..Topology::default()
    }
}

fn row(text: &str) -> (u32, Vec<u64>) {
    let (id, distances) = text.split_once(':').expect("a node");
    let distances = distances.split(',').map(|d| d.parse().expect("a distance"));
    (id.parse().expect("a number"), distances.collect())
}

/// A hint of the data: the numbers of its nodes, then `+` if preferred or `-` if not.
pub(in crate::node) fn hint(text: &str) -> Hint {
    let (nodes, sign) = text.split_at(text.len() - 1);
    let digits = nodes.chars().filter_map(|c| c.to_digit(10));
    Hint {
        nodes: (nodes != "*").then(|| NodeMask::of(digits)),
        preferred: sign == "+",
    }
}

fn offer(text: &str) -> Hints {
    let resource = |(index, hints): (usize, &str)| {
        let hints = hints.split(',').filter(|hint| *hint != "!");
        let hints: Vec<Hint> = hints.map(hint).collect();
        (format!("example.com/{index}"), hints)
    };
    let resources = text.split(';').filter(|hints| *hints != "-");
    resources.enumerate().map(resource).collect()
}

fn rules(policy: Policy, closest: bool) -> Rules {
    Rules {
        policy,
        scope: Scope::Container,
        closest,
        max_nodes: 8,
    }
}

fn merged(rules: Rules, machine: &Topology, offers: &str) -> String {
    let alignment = Alignment::new(rules, machine).expect("few nodes");
    let offers: Vec<Hints> = offers.split_whitespace().map(offer).collect();
    let Ok(hint) = alignment.merge(&offers) else {
        return "refused".to_owned();
    };
    let nodes = hint.nodes.map(NodeMask::nodes);
    let nodes = nodes.map(|n| n.iter().map(u32::to_string).collect());
    let sign = if hint.preferred { "+" } else { "-" };
    format!("{}{sign}", nodes.unwrap_or_else(|| "*".to_owned()))
}

#[test]
fn hints_are_merged_as_the_kubelet_merges_them() {
    let mut differences = vec![];
    let mut current_machine = Topology::default();
    for line in include_str!("merges.txt").lines() {
        if let Some(rows) = line.strip_prefix("machine ") {
            current_machine = machine(rows);
            continue;
        }
        let (question, answer) = line.split_once(": ").expect("an answer");
        let (way, offers) = question.split_once(' ').unwrap_or((question, ""));
        let restricted = match answer.ends_with('-') {
            true => "refused",
            false => answer,
        };
        let closest = way == "closest";
        let expected = match way {
            "single" => vec![(Policy::SingleNode, answer)],
            _ => vec![
                (Policy::BestEffort, answer),
                (Policy::Restricted, restricted),
            ],
        };
        for (policy, expected) in expected {
            let got = merged(rules(policy, closest), &current_machine, offers);
            if got != expected {
                differences.push(format!("{policy:?} {line}, but got {got}"));
            }
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn more_numa_nodes_are_allowed_by_an_option() {
    let rows: Vec<String> = (0..9)
        .map(|id| format!("{id}:10,10,10,10,10,10,10,10,10"))
        .collect();
    let machine = machine(&rows.join(" "));
    let many = |max_nodes| Rules {
        max_nodes,
        ..rules(Policy::Restricted, true)
    };
    let error = Alignment::new(many(8), &machine).expect_err("nine nodes");
    assert!(error.contains("max-allowable-numa-nodes"), "{error}");
    assert_eq!(merged(many(9), &machine, "8+,7+"), "7+");
}

#[test]
fn without_known_distances_closest_numa_nodes_are_rejected() {
    let mut machine = machine("0:10,11 1:11,10");
    let near = rules(Policy::BestEffort, true);
    assert!(Alignment::new(near, &machine).is_ok());
    machine.nodes.entry(1).or_default().distances.clear();
    let error = Alignment::new(near, &machine).expect_err("no distances");
    assert!(error.contains("prefer-closest-numa-nodes"), "{error}");
    assert!(Alignment::new(rules(Policy::BestEffort, false), &machine).is_ok());
    // A single node has no distance to others.
    machine.nodes.remove(&0);
    assert!(Alignment::new(near, &machine).is_ok());
}

#[test]
fn masks_are_sets_of_numa_nodes() {
    let mask = NodeMask::of([1, 3, 63, 64]);
    assert_eq!(mask.nodes(), [1, 3, 63]);
    assert!(NodeMask::of([3]).is_within(mask) && !mask.is_within(NodeMask::of([3])));
    let all: Vec<Vec<u32>> = NodeMask::all_of(&[0, 2])
        .iter()
        .map(|m| m.nodes())
        .collect();
    assert_eq!(all, [vec![0], vec![2], vec![0, 2]]);
}
