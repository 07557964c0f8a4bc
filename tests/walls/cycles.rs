//! Files of a crate that import each other, directly or through others. A parent and its children may.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{code, module_path, sources_of, without_tests};

/// The packages whose files are checked.
const ROOTS: [&str; 17] = [
    "src/agent",
    "src/cli",
    "src/config",
    "src/control",
    "src/core",
    "src/cri",
    "src/csi",
    "src/devices",
    "src/host",
    "src/https",
    "src/kubeapi",
    "src/net",
    "src/probes",
    "src/sealed",
    "src/sys",
    "src/up",
    "cni-plugins/src",
];

/// Maps each module of a crate to the modules that it imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Reads the path or the tree of paths at the beginning of `text`, below `base`. Returns the rest of the text.
fn read_paths<'a>(text: &'a str, base: &str, into: &mut BTreeSet<String>) -> &'a str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    let (name, rest) = text.split_at(end.unwrap_or(text.len()));
    let path = match (base, name) {
        ("", _) => name.to_owned(),
        (_, "" | "self") => base.to_owned(),
        _ => format!("{base}::{name}"),
    };
    if let Some(rest) = rest.strip_prefix("::") {
        return read_paths(rest, &path, into);
    }
    let Some(mut rest) = rest.strip_prefix('{').filter(|_| name.is_empty()) else {
        into.insert(path);
        return rest;
    };
    loop {
        rest = read_paths(rest.trim_start(), base, into).trim_start();
        // The rest of an item, such as `as name`, ends at a comma or a brace.
        let Some(end) = rest.find([',', '}', ';']) else {
            return "";
        };
        let closes = !rest[end..].starts_with(',');
        rest = &rest[end + 1..];
        if closes {
            return rest;
        }
        if let Some(after) = rest.trim_start().strip_prefix('}') {
            return after;
        }
    }
}

/// The paths in `text` that begin with `crate`, `self` or `super`, of a file that is the module `module`.
fn paths(module: &str, text: &str) -> BTreeSet<String> {
    let code: Vec<&str> = code(without_tests(text)).map(|(_, line)| line).collect();
    let code = code.join("\n");
    let mut found = BTreeSet::new();
    for word in ["crate::", "self::", "super::"] {
        for (at, _) in code.match_indices(word) {
            if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let mut rest = &code[at..];
            let mut base = module;
            if let Some(after) = rest.strip_prefix("crate::") {
                (rest, base) = (after, "");
            }
            rest = rest.strip_prefix("self::").unwrap_or(rest);
            while let Some(after) = rest.strip_prefix("super::") {
                base = base.rsplit_once("::").map_or("", |(parent, _)| parent);
                rest = after;
            }
            read_paths(rest, base, &mut found);
        }
    }
    found
}

/// Whether one of two modules contains the other.
fn is_nested(one: &str, other: &str) -> bool {
    super::inside(one, other) || super::inside(other, one)
}

/// The imports between the files below a directory.
fn imports(root: &str) -> Imports {
    let files = sources_of(&[root]);
    let module = |file: &Path| module_path(file, root);
    let modules: BTreeSet<String> = files.iter().map(|f| module(f)).collect();
    let mut all = Imports::new();
    for file in &files {
        let from = module(file);
        if from.is_empty() || from.split("::").any(|part| part == "tests") {
            continue;
        }
        let text = std::fs::read_to_string(file).unwrap();
        let imported = all.entry(from.clone()).or_default();
        for mut path in paths(&from, &text) {
            while !modules.contains(&path) {
                path = path
                    .rsplit_once("::")
                    .map_or_else(String::new, |(parent, _)| parent.to_owned());
                if path.is_empty() {
                    break;
                }
            }
            if !path.is_empty() && !is_nested(&from, &path) {
                imported.insert(path);
            }
        }
    }
    all
}

/// Whether a module leads to another one through imports.
fn leads(all: &Imports, from: &str, to: &str) -> bool {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        if module == to {
            return true;
        }
        if seen.insert(module) {
            next.extend(all.get(module).into_iter().flatten().map(String::as_str));
        }
    }
    false
}

/// The imports that are on a cycle.
fn cyclic(all: &Imports) -> Vec<(String, String)> {
    // Modules that import nothing, or only such modules, are on none.
    let mut rest = all.clone();
    loop {
        let before = rest.len();
        let kept: BTreeSet<String> = rest.keys().cloned().collect();
        rest.values_mut()
            .for_each(|to| to.retain(|to| kept.contains(to)));
        rest.retain(|_, to| !to.is_empty());
        if rest.len() == before {
            break;
        }
    }
    let edges = rest
        .iter()
        .flat_map(|(from, to)| to.iter().map(move |to| (from.clone(), to.clone())));
    edges.filter(|(from, to)| leads(&rest, to, from)).collect()
}

#[test]
fn files_import_each_other_in_no_cycle() {
    let mut broken = Vec::new();
    for root in ROOTS {
        let found = cyclic(&imports(root)).into_iter();
        broken.extend(found.map(|(from, to)| format!("{root}: {from} imports {to}")));
    }
    assert!(
        broken.is_empty(),
        "these imports are on a cycle:\n{}",
        broken.join("\n")
    );
}

#[test]
fn paths_are_read() {
    let text = "use crate::a::{self, b::{C, d}, e as f};\nuse super::g;\n// use crate::not;\nlet x = self::h::new(super::super::i);\n#[cfg(test)]\nmod tests { use crate::not; }\n";
    let found = paths("m::n::o", text);
    let expected = [
        "a",
        "a::b::C",
        "a::b::d",
        "a::e",
        "m::i",
        "m::n::g",
        "m::n::o::h::new",
    ];
    assert_eq!(
        found.iter().map(String::as_str).collect::<Vec<_>>(),
        expected
    );
}

#[test]
fn cycles_are_found() {
    let imports = |edges: &[(&str, &str)]| {
        let mut all = Imports::new();
        for (from, to) in edges {
            all.entry((*from).to_owned())
                .or_default()
                .insert((*to).to_owned());
        }
        all
    };
    assert_eq!(cyclic(&imports(&[("a", "b"), ("b", "c"), ("a", "c")])), []);
    let cycle = imports(&[("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")]);
    assert_eq!(cyclic(&cycle).len(), 3);
}
