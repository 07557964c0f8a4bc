//! Checks that a test uses each snapshot file (`*.snap` of `insta`). An orphaned file would show a text that no longer
//! exists. A test that computes the names of its snapshots lists them, so that this check finds them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The directories whose crates have snapshots.
const ROOTS: [&str; 3] = ["src", "cni-plugins", "tests"];

/// Collects the files in directories of snapshots. Git ignores the files of failed tests, `*.snap.new`.
fn files(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            files(&path, into);
        } else if dir.ends_with("snapshots") && path.extension().is_none_or(|e| e != "new") {
            into.push(path);
        }
    }
}

/// The name that a test gave its snapshot: `insta` puts the path of the module in front of it.
fn name(file: &Path) -> Option<&str> {
    let stem = file.file_name()?.to_str()?.strip_suffix(".snap")?;
    Some(stem.rsplit_once("__")?.1)
}

/// The source file that the head of a snapshot names.
fn source(snapshot: &str) -> Option<&str> {
    let head = snapshot.split("\n---").next()?;
    head.lines().find_map(|line| line.strip_prefix("source: "))
}

#[test]
fn a_test_uses_each_snapshot() {
    let mut all = Vec::new();
    for root in ROOTS {
        files(Path::new(root), &mut all);
    }
    assert!(!all.is_empty(), "no snapshots were found");
    let mut broken = Vec::new();
    let mut seen: BTreeMap<(String, String), PathBuf> = BTreeMap::new();
    for file in all {
        let shown = file.display();
        let text = std::fs::read_to_string(&file).unwrap();
        let (Some(name), Some(source)) = (name(&file), source(&text)) else {
            broken.push(format!("{shown} is no snapshot: review or remove the file"));
            continue;
        };
        let code = std::fs::read_to_string(source).unwrap_or_default();
        let is_used = code.contains(&format!("\"{name}\""));
        let is_next_to_code = Path::new(source).parent() == file.parent().and_then(Path::parent);
        if !is_used || !is_next_to_code {
            broken.push(format!(
                "{shown}: {source} does not use it; remove the file"
            ));
        }
        let key = (source.to_owned(), name.to_owned());
        if let Some(other) = seen.insert(key, file.clone()) {
            broken.push(format!("{shown} and {} have one name", other.display()));
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}
