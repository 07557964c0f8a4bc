//! Whether the rules that a user holds grant everything that another rule grants
//! (`staging/src/k8s.io/component-helpers/auth/rbac/validation/policy_comparator.go`).
//!
//! A rule grants the product of its verbs, groups, resources and names. Even a small body can define a huge product, so
//! it is not enumerated. Words of a list that are matched by the same held rules form a class, and only classes are
//! combined. The walk over classes stops early where a single held rule matches all remaining lists. A step limit
//! bounds the walk for users with many rules that each match a different part.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::Rule;

/// Maximum number of steps per write; a step compares the indices of two held rules.
pub(super) const MAX_STEPS: usize = 1_000_000;

/// The write would take more than [`MAX_STEPS`]; contains the number of steps taken so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooManySteps(pub usize);

/// The number of steps that a write has taken.
#[derive(Debug, Default)]
pub(super) struct Steps(usize);

impl Steps {
    fn take(&mut self, steps: usize) -> Result<(), TooManySteps> {
        self.0 = self.0.saturating_add(steps);
        if self.0 > MAX_STEPS {
            return Err(TooManySteps(self.0));
        }
        Ok(())
    }
}

/// Indices of held rules, in ascending order.
type Indices = Vec<usize>;

/// The held rules that match a word, for one of a rule's lists.
#[derive(Debug, Default)]
struct Words<'a> {
    /// Rules that match every word.
    any: Indices,
    exact: HashMap<&'a str, Indices>,
}

fn note(indices: &mut Indices, index: usize) {
    if indices.last() != Some(&index) {
        indices.push(index);
    }
}

impl<'a> Words<'a> {
    fn add(&mut self, words: &'a [String], index: usize) {
        for word in words {
            match word.as_str() {
                "*" => note(&mut self.any, index),
                word => note(self.exact.entry(word).or_default(), index),
            }
        }
    }

    /// The rules that match one of these spellings; `None` if only the rules of `any` do.
    fn matching(&self, spellings: &[&str]) -> Option<BTreeSet<usize>> {
        let known = spellings.iter().filter_map(|word| self.exact.get(word));
        let mut found: BTreeSet<usize> = known.flatten().copied().collect();
        if found.is_empty() {
            return None;
        }
        found.extend(&self.any);
        Some(found)
    }
}

/// The classes of a list's words: for each class, the held rules that match its words.
#[derive(Debug, Default)]
struct Classes(BTreeSet<Indices>);

impl Classes {
    fn of<'w>(
        words: &Words<'_>,
        list: impl Iterator<Item = &'w str>,
        steps: &mut Steps,
    ) -> Result<Classes, TooManySteps> {
        let mut classes = Classes::default();
        for word in list.collect::<HashSet<_>>() {
            classes.add(words, words.matching(&[word]), steps)?;
        }
        Ok(classes)
    }

    fn add(
        &mut self,
        words: &Words<'_>,
        matching: Option<BTreeSet<usize>>,
        steps: &mut Steps,
    ) -> Result<(), TooManySteps> {
        match matching {
            Some(indices) => {
                steps.take(indices.len())?;
                self.0.insert(indices.into_iter().collect());
            }
            None if self.0.contains(&words.any) => {}
            None => drop(self.0.insert(words.any.clone())),
        }
        Ok(())
    }
}

fn common(a: &Indices, b: &Indices, steps: &mut Steps) -> Result<Indices, TooManySteps> {
    steps.take(a.len().min(b.len()) + 1)?;
    let (few, many) = if a.len() < b.len() { (a, b) } else { (b, a) };
    let both = few.iter().filter(|index| many.binary_search(index).is_ok());
    Ok(both.copied().collect())
}

/// Whether every combination of classes, one of each list, has a rule of `left` in common.
fn covered(lists: &[Classes], left: &Indices, steps: &mut Steps) -> Result<bool, TooManySteps> {
    if left.is_empty() {
        return Ok(false);
    }
    let Some((first, rest)) = lists.split_first() else {
        return Ok(true);
    };
    // A single rule that matches every class of all remaining lists covers all their combinations.
    let mut whole = left.clone();
    for class in lists.iter().flat_map(|list| &list.0) {
        if whole.is_empty() {
            break;
        }
        whole = common(&whole, class, steps)?;
    }
    if !whole.is_empty() {
        return Ok(true);
    }
    for class in &first.0 {
        let left = common(left, class, steps)?;
        if !covered(rest, &left, steps)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A user's rules for resources, indexed by the words of their lists.
#[derive(Debug, Default)]
pub(super) struct HeldObjects<'a> {
    count: usize,
    verbs: Words<'a>,
    groups: Words<'a>,
    resources: Words<'a>,
    names: Words<'a>,
}

impl<'a> HeldObjects<'a> {
    pub(super) fn of(rules: impl Iterator<Item = &'a Rule>) -> HeldObjects<'a> {
        let mut held = HeldObjects::default();
        for (index, rule) in rules.enumerate() {
            held.count = index + 1;
            held.verbs.add(&rule.verbs, index);
            held.groups.add(&rule.api_groups, index);
            held.resources.add(&rule.resources, index);
            if rule.resource_names.is_empty() {
                note(&mut held.names.any, index);
            }
            // A resource name is always literal, also `*`.
            for name in &rule.resource_names {
                note(held.names.exact.entry(name.as_str()).or_default(), index);
            }
        }
        held
    }

    /// Whether these rules grant everything that `rule` grants on resources.
    pub(super) fn cover(&self, rule: &Rule, steps: &mut Steps) -> Result<bool, TooManySteps> {
        if rule.verbs.is_empty() || rule.api_groups.is_empty() || rule.resources.is_empty() {
            return Ok(true);
        }
        let mut resources = Classes::default();
        for resource in rule.resources.iter().collect::<HashSet<_>>() {
            let matching = match resource.split_once('/').filter(|(_, sub)| !sub.is_empty()) {
                Some((_, sub)) => self.resources.matching(&[resource, &format!("*/{sub}")]),
                None => self.resources.matching(&[resource.trim_end_matches('/')]),
            };
            resources.add(&self.resources, matching, steps)?;
        }
        // A rule without names applies to all objects; held rules that have names do not cover it.
        let unnamed = rule.resource_names.is_empty().then_some("");
        let names = rule
            .resource_names
            .iter()
            .map(String::as_str)
            .chain(unnamed);
        let lists = [
            Classes::of(&self.verbs, rule.verbs.iter().map(String::as_str), steps)?,
            Classes::of(
                &self.groups,
                rule.api_groups.iter().map(String::as_str),
                steps,
            )?,
            resources,
            Classes::of(&self.names, names, steps)?,
        ];
        covered(&lists, &(0..self.count).collect(), steps)
    }
}

/// A user's rules for non-resource URLs.
#[derive(Debug, Default)]
pub(super) struct HeldPaths<'a> {
    count: usize,
    verbs: Words<'a>,
    paths: Words<'a>,
    /// The prefix before the `*` of a pattern, and the index of its rule.
    prefixes: Vec<(&'a str, usize)>,
}

impl<'a> HeldPaths<'a> {
    pub(super) fn of(rules: impl Iterator<Item = &'a Rule>) -> HeldPaths<'a> {
        let mut held = HeldPaths::default();
        for (index, rule) in rules.enumerate() {
            held.count = index + 1;
            held.verbs.add(&rule.verbs, index);
            held.paths.add(&rule.paths, index);
            let patterns = rule.paths.iter().filter_map(|p| p.strip_suffix('*'));
            let prefixes = patterns.filter(|begin| !begin.is_empty());
            held.prefixes.extend(prefixes.map(|begin| (begin, index)));
        }
        held
    }

    /// Whether these rules grant everything that `rule` grants on non-resource URLs.
    pub(super) fn cover(&self, rule: &Rule, steps: &mut Steps) -> Result<bool, TooManySteps> {
        if rule.verbs.is_empty() || rule.paths.is_empty() {
            return Ok(true);
        }
        let mut paths = Classes::default();
        for path in rule.paths.iter().collect::<HashSet<_>>() {
            steps.take(self.prefixes.len())?;
            let begins = self
                .prefixes
                .iter()
                .filter(|(begin, _)| path.starts_with(begin));
            let mut found: BTreeSet<usize> = begins.map(|(_, index)| *index).collect();
            found.extend(self.paths.matching(&[path]).into_iter().flatten());
            found.extend(&self.paths.any);
            paths.add(&self.paths, Some(found), steps)?;
        }
        let verbs = rule.verbs.iter().map(String::as_str);
        let lists = [Classes::of(&self.verbs, verbs, steps)?, paths];
        covered(&lists, &(0..self.count).collect(), steps)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;
    use crate::api::auth::Attributes;

    fn words(list: &[&'static str]) -> impl Strategy<Value = Vec<String>> {
        vec(select(list.to_vec()).prop_map(String::from), 0..4)
    }

    fn rule() -> impl Strategy<Value = Rule> {
        (
            words(&["get", "list", "*"]),
            words(&["", "apps", "*"]),
            words(&["pods", "pods/log", "*", "*/log", "maps/"]),
            words(&["", "a", "b", "*"]),
            words(&["/a", "/a/b", "/a/*", "*", "/*"]),
        )
            .prop_map(
                |(verbs, api_groups, resources, resource_names, paths)| Rule {
                    verbs,
                    api_groups,
                    resources,
                    resource_names,
                    paths,
                },
            )
    }

    /// Reference implementation: enumerates the product of a rule.
    fn by_points(held: &[Rule], rule: &Rule) -> (bool, bool) {
        let names = match rule.resource_names.as_slice() {
            [] => vec![String::new()],
            names => names.to_vec(),
        };
        let mut objects = true;
        for verb in &rule.verbs {
            for group in &rule.api_groups {
                for resource in &rule.resources {
                    let (resource, sub) = resource.split_once('/').unwrap_or((resource, ""));
                    objects &= names.iter().all(|name| {
                        let attributes = Attributes {
                            verb,
                            group,
                            resource,
                            sub,
                            name,
                            ..Attributes::default()
                        };
                        held.iter().any(|held| held.allows(&attributes))
                    });
                }
            }
        }
        let allows_path =
            |verb: &str, path: &str| held.iter().any(|held| held.allows_path(verb, path));
        let all = |verb: &String| rule.paths.iter().all(|path| allows_path(verb, path));
        (objects, rule.verbs.iter().all(all))
    }

    proptest! {
        #[test]
        fn covering_by_classes_equals_checking_every_combination(held in vec(rule(), 0..5), rule in rule()) {
            let mut steps = Steps::default();
            let objects = HeldObjects::of(held.iter()).cover(&rule, &mut steps).expect("few");
            let paths = HeldPaths::of(held.iter()).cover(&rule, &mut steps).expect("few");
            prop_assert_eq!((objects, paths), by_points(&held, &rule));
        }
    }

    fn of(words: impl Fn(&str) -> Vec<String>) -> Rule {
        Rule {
            verbs: words("v"),
            api_groups: words("g"),
            resources: words("r"),
            resource_names: words("n"),
            ..Rule::default()
        }
    }

    /// A body of 2 KB defines a product of 38⁴ combinations. The number of steps is in the order of the number of
    /// words, for repeated and distinct words, and for held and other rules.
    #[test]
    fn covering_a_large_product_takes_few_steps() {
        let held = [
            of(|_| vec!["get".into(), "pods".into()]),
            of(|_| vec!["x".into()]),
        ];
        let repeated = of(|_| vec!["get".into(); 38]);
        let distinct = of(|kind| (0..38).map(|i| format!("{kind}{i}")).collect());
        let everything = Rule {
            resource_names: vec![],
            ..of(|_| vec!["*".into()])
        };
        for rule in [repeated, distinct] {
            for held in [
                &held[..],
                std::slice::from_ref(&rule),
                std::slice::from_ref(&everything),
            ] {
                let mut steps = Steps::default();
                HeldObjects::of(held.iter())
                    .cover(&rule, &mut steps)
                    .expect("few");
                assert!(steps.0 < 1000, "{} steps", steps.0);
            }
        }
    }

    /// Each held rule matches one combination only, so the walk is as large as the
    /// product until the step limit stops it.
    #[test]
    fn the_number_of_steps_is_limited() {
        let word = |kind: &str, i: usize| format!("{kind}{i}");
        let point = |i: usize| {
            of(|kind| {
                let index = "vgrn".find(kind).expect("one of them");
                let digit = i / 20_usize.pow(u32::try_from(index).expect("small"));
                vec![word(kind, digit % 20)]
            })
        };
        let held: Vec<Rule> = (0..20_usize.pow(4)).map(point).collect();
        let rule = of(|kind| (0..20).map(|i| word(kind, i)).collect());
        let mut steps = Steps::default();
        let error = HeldObjects::of(held.iter())
            .cover(&rule, &mut steps)
            .expect_err("too many");
        assert!(error.0 > MAX_STEPS && error.0 < 2 * MAX_STEPS, "{error:?}");
    }
}
