//! Snapshots of the `--help` of each command.

use clap::{Command, CommandFactory as _};

use super::{Cli, KubeletCli};

/// The names of the snapshots: a command with its subcommands. `tests/walls.rs` reads from here that they are in use.
const COMMANDS: [&str; 25] = [
    "holdfast",
    "holdfast_agent",
    "holdfast_agent_record",
    "holdfast_agent_record_pod",
    "holdfast_control-plane",
    "holdfast_doctor",
    "holdfast_down",
    "holdfast_explain",
    "holdfast_explain_pod",
    "holdfast_gc",
    "holdfast_ipam",
    "holdfast_ipam_audit",
    "holdfast_join",
    "holdfast_kubeconfig",
    "holdfast_proxy",
    "holdfast_replay",
    "holdfast_supervise",
    "holdfast_token",
    "holdfast_token_create",
    "holdfast_token_delete",
    "holdfast_token_list",
    "holdfast_trace",
    "holdfast_up",
    "holdfast_up_status",
    "kubelet",
];

/// Collects the help of a command and of the commands below it, by the names of their snapshots.
fn walk(command: &mut Command, name: &str, into: &mut Vec<(String, String)>) {
    into.push((name.to_owned(), command.render_long_help().to_string()));
    for below in command.get_subcommands_mut() {
        // clap adds `help` to each command with subcommands.
        if below.get_name() != "help" {
            let name = format!("{name}_{}", below.get_name());
            walk(below, &name, into);
        }
    }
}

/// A change of any help must appear as the diff of a snapshot.
#[test]
fn every_command_has_a_help() {
    let mut found = vec![];
    for command in [Cli::command(), KubeletCli::command()] {
        // The width of a terminal would change the line breaks.
        let mut command = command.term_width(100);
        command.build();
        let name = command.get_name().to_owned();
        walk(&mut command, &name, &mut found);
    }
    found.sort();
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, COMMANDS);
    for (name, help) in &found {
        insta::assert_snapshot!(name.as_str(), help);
    }
}
