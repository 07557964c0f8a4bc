//! Checks what Cargo cannot express about the structure of the code: that core has no clock and no files, which modules of
//! the control plane and of the plugins import each other, that files do not import each other in a cycle, the maximum length
//! of files and functions, that what is public is used by another crate, that a test uses each snapshot, and that generated
//! code is that of its sources.
#![allow(clippy::unwrap_used)]

#[path = "walls/cycles.rs"]
mod cycles;
#[path = "walls/generated.rs"]
mod generated;
#[path = "walls/snapshots.rs"]
mod snapshots;
#[path = "walls/visibility.rs"]
mod visibility;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Maps a module to its permitted imports.
type Table = BTreeMap<String, BTreeSet<String>>;

/// A package whose modules have a table in ARCHITECTURE.md.
struct Package {
    /// The heading of the table.
    heading: &'static str,
    sources: &'static str,
    /// The name of the library in the binary, which is a separate crate.
    name: &'static str,
}

const PACKAGES: [Package; 2] = [
    Package {
        heading: "### Modules of `holdfast-control`",
        sources: "src/control",
        name: "holdfast_control",
    },
    Package {
        heading: "## Modules of the `holdfast-cni` package",
        sources: "cni-plugins/src",
        name: "holdfast_cni",
    },
];

fn sources(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") {
            into.push(path);
        }
    }
}

fn sources_of(dirs: &[&str]) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for dir in dirs {
        sources(Path::new(dir), &mut files);
    }
    files.sort();
    files
}

/// The rows of the table under a heading: for each name in the first column the names in the last one.
fn table(heading: &str) -> Table {
    let text = std::fs::read_to_string("ARCHITECTURE.md").unwrap();
    let section = text
        .split_once(&format!("{heading}\n"))
        .unwrap_or_else(|| panic!("ARCHITECTURE.md has no {heading:?}"))
        .1
        .split("\n#")
        .next()
        .unwrap();
    let names = |cell: &str| -> BTreeSet<String> {
        cell.split(',')
            .map(|n| n.trim().trim_matches('`').to_owned())
            .filter(|n| !n.is_empty())
            .collect()
    };
    let mut table = Table::new();
    for line in section.lines().filter(|l| l.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
        let allowed = names(cells.last().unwrap());
        for module in names(cells[0]) {
            table.insert(module, allowed.clone());
        }
    }
    assert!(table.len() >= 4, "the table under {heading:?}: {table:?}");
    table
}

/// The table's module that contains a module path: the longest match.
fn owner<'a>(path: &str, table: &'a Table) -> Option<&'a str> {
    table
        .keys()
        .filter(|m| inside(path, m))
        .max_by_key(|m| m.len())
        .map(String::as_str)
}

/// Whether a path is a module or inside it.
fn inside(path: &str, module: &str) -> bool {
    path.strip_prefix(module)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

fn module_path(file: &Path, root: &str) -> String {
    let relative = file.strip_prefix(root).unwrap().with_extension("");
    let mut parts: Vec<&str> = relative.iter().map(|p| p.to_str().unwrap()).collect();
    if matches!(parts.last(), Some(&("mod" | "lib"))) {
        parts.pop();
    }
    parts.join("::")
}

/// The lines that are not comments, with their numbers.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines()
        .enumerate()
        .map(|(n, line)| (n + 1, line))
        .filter(|(_, line)| !line.trim_start().starts_with("//"))
}

/// The text without the tests at its end, which may import more than the module.
fn without_tests(text: &str) -> &str {
    text.split("\n#[cfg(test)]\nmod ").next().unwrap()
}

/// The paths that follow `prefix` in a line; each path in braces separately.
fn paths_after(line: &str, prefix: &str) -> Vec<String> {
    let path = |text: &str| -> String {
        text.chars()
            .take_while(|c| c.is_alphanumeric() || *c == '_' || *c == ':')
            .collect()
    };
    let of = |rest: &str| match rest.strip_prefix('{') {
        Some(list) => list
            .split(['}', ';'])
            .next()
            .unwrap()
            .split(',')
            .map(|n| path(n.trim()))
            .collect(),
        None => vec![path(rest)],
    };
    line.split(prefix).skip(1).flat_map(of).collect()
}

/// The imports in `text` of module `from` that the table does not allow.
fn violations(from: &str, library: &str, text: &str, table: &Table) -> Vec<String> {
    let prefix = match from {
        "main" => format!("{library}::"),
        _ => "crate::".to_owned(),
    };
    let mut found = Vec::new();
    for (number, line) in code(text) {
        for path in paths_after(line, &prefix) {
            let Some(to) = owner(path.trim_end_matches(':'), table) else {
                continue;
            };
            if !inside(to, from) && !table[from].iter().any(|allowed| inside(to, allowed)) {
                found.push(format!("line {number}: {from} may not import {to}"));
            }
        }
    }
    found
}

#[test]
fn imports_follow_the_tables() {
    let mut broken = Vec::new();
    for package in PACKAGES {
        let table = table(package.heading);
        for file in sources_of(&[package.sources]) {
            let path = module_path(&file, package.sources);
            // The library itself composes its modules.
            if path.is_empty() {
                continue;
            }
            let shown = file.display();
            let Some(from) = owner(&path, &table) else {
                broken.push(format!("{shown} belongs to no module of the table"));
                continue;
            };
            let text = std::fs::read_to_string(&file).unwrap();
            let found = violations(from, package.name, &text, &table);
            broken.extend(found.into_iter().map(|v| format!("{shown}: {v}")));
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn a_forbidden_import_is_found() {
    let cases = [
        (
            &PACKAGES[0],
            "scheduler",
            "let x = crate::store::Store::in_memory();",
            1,
        ),
        (&PACKAGES[0], "api", "use crate::store::Store;", 0),
        (&PACKAGES[1], "net", "use crate::{cni, ipam};", 1),
        (&PACKAGES[1], "main", "use holdfast_cni::ipam::range;", 0),
    ];
    for (package, from, text, expected) in cases {
        let found = violations(from, package.name, text, &table(package.heading));
        assert_eq!(found.len(), expected, "{from}: {text}");
    }
}

/// The crates of the manifest's `[dependencies]`, by their names in code.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let text = std::fs::read_to_string(manifest).unwrap();
    text.split_once("\n[dependencies]\n")
        .unwrap()
        .1
        .split("\n[")
        .next()
        .unwrap()
        .lines()
        .filter_map(|line| line.split_once([' ', '=', '.']))
        .map(|(name, _)| name.replace('-', "_"))
        .collect()
}

#[test]
fn the_core_touches_nothing() {
    let banned = [
        "tokio",
        "std::fs",
        "std::net::Tcp",
        "std::env",
        "std::process",
        "Timestamp::now",
        "Instant::now",
        "SystemTime",
        "tracing::",
        "rand::",
        "nix::",
    ];
    for file in sources_of(&["src/core"]) {
        let text = std::fs::read_to_string(&file).unwrap();
        for (number, line) in code(&text) {
            for word in banned {
                let shown = file.display();
                assert!(!line.contains(word), "{shown}:{number}: {line}");
            }
        }
    }
}

#[test]
fn the_plugins_depend_on_little() {
    let heavy = ["tokio", "tonic", "kube", "rustls", "hyper", "zbus"];
    for manifest in ["cni-plugins/Cargo.toml", "src/net/Cargo.toml"] {
        let used = dependencies(manifest);
        for name in heavy {
            assert!(!used.contains(name), "{manifest} must not name {name}");
        }
    }
}

/// The directories with code.
const CODE: [&str; 7] = [
    "src",
    "cni-plugins/src",
    "cni-plugins/tests",
    "cni-plugins/benches",
    "proto/src",
    "tests",
    "benches",
];

/// The maximum number of lines of a file.
const LONGEST_FILE: usize = 800;

#[test]
fn files_are_short() {
    for file in sources_of(&CODE) {
        let lines = std::fs::read_to_string(&file).unwrap().lines().count();
        let shown = file.display();
        assert!(lines <= LONGEST_FILE, "{shown} has {lines} lines: split it");
    }
}

/// The maximum number of lines of a function, at rustfmt's default width.
const LONGEST_FUNCTION: usize = 100;
/// A function with more lines counts as long.
const LONG_FUNCTION: usize = 60;
/// The maximum number of long functions. Lower it when there are fewer.
const LONG_FUNCTIONS: usize = 214;

/// Functions above the maximum: the beginning of their path, the name, the lines. In the product they
/// are tables, checks of objects and the assembly of the agent; the others are scenarios of tests. They
/// may shrink, and are then removed from the list.
const LONGER_FUNCTIONS: &str = "
cni-plugins/tests/blackbox/addresses static_addresses_come_from_the_source_with_precedence 166
cni-plugins/tests/blackbox/chained bandwidth_limits_received_and_sent_traffic 153
cni-plugins/tests/blackbox/chained tuning_sets_sysctls_and_properties_and_restores_them 131
cni-plugins/tests/blackbox/leaks no_address_is_leaked_or_allocated_twice 105
cni-plugins/tests/blackbox/links macvlans_have_their_own_addresses_and_macs 101
cni-plugins/tests/blackbox/pairs ptp_routes_all_traffic_through_the_host 108
cni-plugins/tests/blackbox/portmap ports_have_their_own_conditions_addresses_and_sources 114
src/agent/assembly build 115
src/control/api/mod objects 113
src/control/api/rbac/bootstrap roles 116
src/control/api/storage cells 130
src/control/api/storage validate 115
src/control/api/table cells 154
src/core/image/pulled only_pods_that_could_have_pulled_an_image_may_use_it 103
src/core/node/admit rejections_name_the_insufficient_resource 114
src/core/pod/status/tests phases_follow_container_states 128
src/core/serving/mod every_path_has_its_route_and_its_required_permission 175
tests/cluster/certificates pods_get_trust_bundles_and_their_own_certificates 109
tests/cluster/containers containers_get_what_their_pod_specifies 151
tests/control/access a_node_reads_only_objects_of_its_pods 197
tests/control/access roles_grant_their_rules_and_users_grant_only_what_they_have 148
tests/control/deletion deletion_waits_for_grace_periods_and_finalizers 143
tests/control/reads watches_see_changes_according_to_their_selector 108
tests/control/refusals refusals_have_the_right_code_reason_and_message 350
tests/control/writes writes_keep_the_servers_fields 152
tests/cluster/credentials a_node_joins_with_the_files_of_kubeadm 147
tests/cluster/credentials a_node_joins_with_a_token_and_renews_its_certificates 154
tests/cluster/csi drivers_register_and_volumes_are_staged_published_and_removed 328
tests/cluster/disks disks_are_attached_mounted_shared_and_detached 159
tests/cluster/e2e a_restarted_agent_finds_its_pods_and_disturbs_none 108
tests/cluster/e2e pods_reach_each_other_and_get_their_volumes_and_settings 123
tests/cluster/images images_are_available_only_to_pods_with_credentials 110
tests/cluster/lifecycle probes_hooks_restarts_and_ends_follow_the_pod_spec 281
tests/cluster/logs container_logs_are_readable_in_every_way 199
tests/machines/main quotas_inside 102
tests/machines/main systemd_inside 157
tests/cluster/mounts a_subpath_never_escapes_its_volume 111
tests/cluster/mounts mounts_follow_their_propagation_and_host_paths_are_checked 140
tests/cluster/streams commands_run_in_containers_and_ports_are_forwarded 161
tests/cluster/streams newer_kubectls_run_commands_and_forward_ports 129
tests/cluster/volumes claims_are_bound_mounted_kept_and_released 217
tests/cluster/volumes volumes_follow_changes_in_the_api 149
";

/// A function and its number of lines, from `fn` to its closing brace.
#[derive(Debug, PartialEq)]
struct Function {
    name: String,
    lines: usize,
}

/// The functions of a text that rustfmt has formatted: a function ends at the next line with its indentation.
fn functions(text: &str) -> Vec<Function> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let Some(name) = declared(code) else { continue };
        let indentation = line.len() - code.len();
        let ends = |line: &&str| {
            let code = line.trim_start();
            let same = line.len() - code.len() == indentation;
            same && (code.starts_with('}') || code.ends_with(';') || code.ends_with("{}"))
        };
        let more = match line.ends_with(['}', ';']) {
            true => 0,
            false => lines[at + 1..]
                .iter()
                .position(ends)
                .map_or(0, |last| last + 1),
        };
        found.push(Function {
            name: name.to_owned(),
            lines: more + 1,
        });
    }
    found
}

/// The name of the function that a line begins to declare.
fn declared(code: &str) -> Option<&str> {
    let (before, after) = match code.strip_prefix("fn ") {
        Some(after) => ("", after),
        None => code.split_once(" fn ")?,
    };
    let words = before.replace("pub(in ", "pub(");
    let qualifies = |word: &str| {
        word.starts_with("pub") || matches!(word, "const" | "async" | "unsafe" | "extern" | "\"C\"")
    };
    words
        .split_whitespace()
        .all(qualifies)
        .then(|| after.split(['(', '<']).next().unwrap_or_default())
}

#[test]
fn functions_are_counted() {
    let text = "fn one() {}\n\nimpl X {\n    pub(crate) async fn two(\n        a: u8,\n    ) -> u8 {\n        let f = |x| {\n            x\n        };\n        f(a)\n    }\n\n    fn three();\n}\n// a comment about a fn here\n";
    let counted: Vec<(String, usize)> = functions(text)
        .into_iter()
        .map(|f| (f.name, f.lines))
        .collect();
    assert_eq!(
        counted,
        [("one".into(), 1), ("two".into(), 8), ("three".into(), 1)]
    );
}

#[test]
fn functions_are_short() {
    let mut excused: Vec<(&str, &str, usize)> = LONGER_FUNCTIONS
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            Some((words.next()?, words.next()?, words.next()?.parse().ok()?))
        })
        .collect();
    let (mut broken, mut long) = (Vec::new(), 0);
    for file in sources_of(&CODE) {
        let shown = file.to_str().unwrap();
        for function in functions(&std::fs::read_to_string(&file).unwrap()) {
            let Function { name, lines } = &function;
            long += usize::from(*lines > LONG_FUNCTION);
            if *lines <= LONGEST_FUNCTION {
                continue;
            }
            let excuse = excused
                .iter()
                .position(|(path, n, most)| shown.starts_with(path) && n == name && lines <= most);
            match excuse {
                Some(at) => drop(excused.swap_remove(at)),
                None => broken.push(format!("{shown}: {name} has {lines} lines")),
            }
        }
    }
    assert!(broken.is_empty(), "split these:\n{}", broken.join("\n"));
    assert!(
        excused.is_empty(),
        "these are short enough by now, and leave the list: {excused:?}"
    );
    assert!(
        long <= LONG_FUNCTIONS,
        "{long} functions have more than {LONG_FUNCTION} lines, and {LONG_FUNCTIONS} may"
    );
}
