//! Compares the tables of the documentation with the code that generates them.
#![allow(clippy::unwrap_used)]

use std::path::Path;

const HEAD: &str = "# Flags and fields of the agent\n\nThis page is generated from the code by `HOLDFAST_WRITE_DOCS=1 cargo test --test docs`; a test compares both.\n\nThe agent takes the kubelet's flags below and a KubeletConfiguration v1beta1 file (`--config`). Flags override the file. As with the\nkubelet, unknown fields are ignored with a warning; so are fields that are not honoured yet, unless they have the default value.\nOne default differs from the kubelet's: `failCgroupV1` is false, since the agent supports both versions of cgroups.\n`holdfast agent --check …` checks the flags and the file, and prints what a start would do to pods, without starting.\n\n## Flags\n\n";

#[test]
fn the_tables_of_flags_and_fields_are_up_to_date() {
    let text = format!(
        "{HEAD}{}\n## Flags for fields\n\nEach of these flags sets a field of the configuration and overrides the file.\n\n{}\n## Fields\n\n{}",
        holdfast::cli::flags_table(),
        holdfast::cli::fields::table(),
        holdfast_config::fields_table()
    );
    let path = Path::new("docs/CONFIGURATION.md");
    if std::env::var_os("HOLDFAST_WRITE_DOCS").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    let there = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        there == text,
        "{} differs from the code; generate it with HOLDFAST_WRITE_DOCS=1 cargo test --test docs",
        path.display()
    );
}

/// The files of a Kubernetes tree that declare the gates in `gates.txt`.
const GATE_FILES: [&str; 4] = [
    "pkg/features/kube_features.go",
    "staging/src/k8s.io/apiserver/pkg/features/kube_features.go",
    "staging/src/k8s.io/component-base/zpages/features/kube_features.go",
    "staging/src/k8s.io/component-base/logs/api/v1/kube_features.go",
];

/// The newest minor version that the facts describe.
const MINOR: u32 = 36;

/// Each gate of a file as a line of `gates.txt`: the last entry of its version table that is not newer than [`MINOR`].
fn gates_of(file: &str) -> Vec<String> {
    let word = |line: &str, key: &str| {
        let rest = line.split_once(key)?.1.trim_start();
        let rest = rest.strip_prefix("featuregate.").unwrap_or(rest);
        let end = rest.find(|c: char| !c.is_alphanumeric())?;
        Some(rest[..end].to_owned())
    };
    let mut names = std::collections::BTreeMap::new();
    let (mut gates, mut gate) = (vec![], None::<(String, Option<String>)>);
    for line in file.lines() {
        let text = line.trim();
        if let Some((constant, name)) = text.split_once(" featuregate.Feature = \"") {
            names.insert(
                constant.trim().to_owned(),
                name.trim_end_matches('"').to_owned(),
            );
        } else if let Some(constant) = text.strip_suffix(": {") {
            let constant = constant.rsplit('.').next().unwrap_or(constant);
            let name = names.get(constant).map_or(constant, String::as_str);
            gate = Some((name.to_owned(), None));
        } else if let Some((_, newest)) = &mut gate {
            let minor = text.split_once("MustParse(\"1.").and_then(|(_, rest)| {
                rest.split_once('"')
                    .and_then(|(minor, _)| minor.parse::<u32>().ok())
            });
            match minor {
                Some(minor) if minor <= MINOR => *newest = Some(text.to_owned()),
                Some(_) => {}
                None => {
                    if let Some((name, Some(entry))) = gate.take() {
                        let stage = word(&entry, "PreRelease:").unwrap();
                        let default = word(&entry, "Default:").unwrap();
                        let locked = entry.contains("LockToDefault: true");
                        let locked = if locked { "locked" } else { "-" };
                        gates.push(format!("{name} {stage} {default} {locked}"));
                    }
                }
            }
        }
    }
    gates
}

#[test]
fn the_feature_gates_equal_those_of_upstream() {
    let example = "\tA featuregate.Feature = \"NameOfA\"\n\tA: {\n\t\t{Version: version.MustParse(\"1.35\"), Default: false, PreRelease: featuregate.Alpha},\n\t\t{Version: version.MustParse(\"1.36\"), Default: true, PreRelease: featuregate.GA, LockToDefault: true},\n\t\t{Version: version.MustParse(\"1.37\"), Default: false, PreRelease: featuregate.Beta},\n\t},\n";
    assert_eq!(gates_of(example), ["NameOfA GA true locked"]);
    let Some(tree) = std::env::var_os("HOLDFAST_UPSTREAM") else {
        return;
    };
    let read = |file| std::fs::read_to_string(Path::new(&tree).join(file)).unwrap();
    let upstream: Vec<String> = GATE_FILES
        .iter()
        .flat_map(|file| gates_of(&read(file)))
        .collect();
    let facts = include_str!("../src/core/node/gates.txt");
    for fact in facts.lines().filter(|l| !l.starts_with('#')) {
        assert!(upstream.iter().any(|gate| gate == fact), "{fact}");
    }
}
