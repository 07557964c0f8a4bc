//! The walls: no module imports another that ARCHITECTURE.md does not allow it.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

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

/// Module to what it may import, from the table.
fn table() -> BTreeMap<String, BTreeSet<String>> {
    let text = std::fs::read_to_string("ARCHITECTURE.md").unwrap();
    let section = text
        .split("## Modules of the `holdfast` package")
        .nth(1)
        .unwrap()
        .split("\n## ")
        .next()
        .unwrap();
    let mut table = BTreeMap::new();
    for line in section.lines().filter(|l| l.starts_with("| `")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let allowed: BTreeSet<String> = cells[3]
            .split(',')
            .map(str::trim)
            .filter(|s| !s.is_empty())
            .map(Into::into)
            .collect();
        for module in cells[1].split(',') {
            table.insert(module.trim().trim_matches('`').to_owned(), allowed.clone());
        }
    }
    assert!(
        table.len() >= 12,
        "the table in ARCHITECTURE.md has been read: {table:?}"
    );
    table
}

/// The table's module that a module path belongs to: the longest that fits.
fn owner<'a>(path: &str, table: &'a BTreeMap<String, BTreeSet<String>>) -> Option<&'a str> {
    table
        .keys()
        .filter(|m| path == *m || path.starts_with(&format!("{m}::")))
        .max_by_key(|m| m.len())
        .map(String::as_str)
}

fn module_path(file: &Path) -> String {
    let relative = file.strip_prefix("src").unwrap().with_extension("");
    let mut parts: Vec<&str> = relative.iter().map(|p| p.to_str().unwrap()).collect();
    if parts.last() == Some(&"mod") {
        parts.pop();
    }
    parts.join("::")
}

/// The imports in `text` of module `from` that the table does not allow.
fn violations(from: &str, text: &str, table: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let prefix = if from == "main" {
        "holdfast::"
    } else {
        "crate::"
    };
    let mut found = Vec::new();
    for (number, line) in text
        .lines()
        .enumerate()
        .filter(|(_, l)| !l.trim_start().starts_with("//"))
    {
        for rest in line.split(prefix).skip(1) {
            let names: Vec<String> = match rest.strip_prefix('{') {
                Some(list) => list
                    .split(['}', ';'])
                    .next()
                    .unwrap()
                    .split(',')
                    .map(|n| n.trim().to_owned())
                    .collect(),
                None => vec![
                    rest.chars()
                        .take_while(|c| c.is_alphanumeric() || *c == '_' || *c == ':')
                        .collect(),
                ],
            };
            for name in names {
                let Some(to) = owner(name.trim_end_matches(':'), table) else {
                    continue;
                };
                let inside = to == from || to.starts_with(&format!("{from}::"));
                let allowed = table[from]
                    .iter()
                    .any(|a| to == a || to.starts_with(&format!("{a}::")));
                if !inside && !allowed {
                    found.push(format!("line {}: {from} may not import {to}", number + 1));
                }
            }
        }
    }
    found
}

#[test]
fn imports_follow_the_table() {
    let table = table();
    let mut files = Vec::new();
    sources(Path::new("src"), &mut files);
    let mut broken = Vec::new();
    for file in &files {
        let path = module_path(file);
        if path == "lib" || path.starts_with("up::images::") {
            continue;
        }
        match owner(&path, &table) {
            None => broken.push(format!(
                "{} belongs to no module of the table",
                file.display()
            )),
            Some(from) => {
                let text = std::fs::read_to_string(file).unwrap();
                broken.extend(
                    violations(from, &text, &table)
                        .into_iter()
                        .map(|v| format!("{}: {v}", file.display())),
                );
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn a_forbidden_import_is_found() {
    let table = table();
    let cases = [
        ("agent", "use crate::control::store::Store;", 1),
        ("agent", "use crate::core::{pod, qos};", 0),
        ("core", "use crate::{sys, core};", 1),
        (
            "control::scheduler",
            "let x = crate::control::store::Store::in_memory();",
            1,
        ),
    ];
    for (from, text, expected) in cases {
        assert_eq!(
            violations(from, text, &table).len(),
            expected,
            "{from}: {text}"
        );
    }
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
    let mut files = Vec::new();
    sources(Path::new("src/core"), &mut files);
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for line in text.lines().filter(|l| !l.trim_start().starts_with("//")) {
            for word in banned {
                assert!(!line.contains(word), "{}: {line}", file.display());
            }
        }
    }
}

#[test]
fn the_plugins_stay_small_and_files_readable() {
    let manifest = std::fs::read_to_string("cni-plugins/Cargo.toml").unwrap();
    for heavy in ["tokio", "tonic", "kube", "rustls", "hyper"] {
        assert!(
            !manifest.lines().any(|l| l.starts_with(heavy)),
            "cni-plugins must not depend on {heavy}"
        );
    }
    let mut files = Vec::new();
    for dir in ["src", "cni-plugins/src", "proto/src", "tests", "benches"] {
        sources(Path::new(dir), &mut files);
    }
    for file in files {
        let lines = std::fs::read_to_string(&file).unwrap().lines().count();
        assert!(
            lines <= 800,
            "{} has {lines} lines: split it",
            file.display()
        );
    }
}
