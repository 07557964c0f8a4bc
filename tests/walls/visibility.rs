//! Public functions, constants and modules that nothing outside of their crate names: they are `pub(crate)`. Types and
//! traits are not checked, because they may stand in the signature of a public function.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::{code, sources_of};

/// The directories whose words count as uses: all crates, and their tests and benchmarks.
const ALL: [&str; 5] = ["src", "tests", "benches", "cni-plugins", "proto"];

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
}

/// The crate of a file, if its items are checked.
fn crate_of(path: &Path) -> Option<&str> {
    let mut parts = path.strip_prefix("src").ok()?.iter();
    let name = parts.next()?.to_str()?;
    // A crate's `tests` are another crate.
    let is_own = parts.next() != Some("tests".as_ref());
    let is_crate = Path::new("src").join(name).join("Cargo.toml").exists();
    (is_crate && is_own).then_some(name)
}

/// The name of the function, constant or module that a line declares as public.
fn declared(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub ")?;
    let mut words = rest
        .split_whitespace()
        .skip_while(|w| ["async", "unsafe"].contains(w));
    let mut kind = words.next()?;
    let mut name = words.next()?;
    if kind == "const" && name == "fn" {
        (kind, name) = (name, words.next()?);
    }
    let is_checked = ["fn", "const", "static", "mod"].contains(&kind);
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_');
    is_checked.then(|| &name[..end.unwrap_or(name.len())])
}

#[test]
fn what_is_public_is_used_by_another_crate() {
    assert_eq!(declared("    pub async fn a<T>(t: T)"), Some("a"));
    assert_eq!(declared("pub const fn b() {}"), Some("b"));
    assert_eq!(declared("pub const C: u8 = 1;"), Some("C"));
    assert_eq!(declared("pub mod d;"), Some("d"));
    assert_eq!(declared("pub struct E;"), None);
    assert_eq!(declared("pub(crate) fn f() {}"), None);
    let files: Vec<(PathBuf, String)> = sources_of(&ALL)
        .into_iter()
        .map(|path| (path.clone(), std::fs::read_to_string(path).unwrap()))
        .collect();
    // The crates that name a word. The root package and the plugins are one of them.
    let mut users: HashMap<&str, HashSet<&str>> = HashMap::new();
    for (path, text) in &files {
        let user = crate_of(path).unwrap_or_default();
        for word in words(text) {
            users.entry(word).or_default().insert(user);
        }
    }
    let mut unused = Vec::new();
    for (path, text) in &files {
        let Some(own) = crate_of(path) else { continue };
        let names = code(text).filter_map(|(_, line)| declared(line));
        let names = names.filter(|name| users[name].iter().all(|user| *user == own));
        unused.extend(names.map(|name| format!("{}: {name}", path.display())));
    }
    assert!(
        unused.is_empty(),
        "no other crate names these; make them pub(crate):\n{}",
        unused.join("\n")
    );
}
