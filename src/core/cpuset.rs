//! Sets of CPUs and NUMA nodes, and the kernel's list format.

use std::collections::BTreeSet;

/// A set of logical CPUs, or of other things that the kernel numbers.
pub type CpuSet = BTreeSet<u32>;

/// Highest number in a list, which bounds the memory for lists read from files.
const MAX_CPU_NUMBER: u32 = 65_535;

/// Parses a list such as `0-3,8`; `None` if it is malformed. An empty text is the empty set.
#[must_use]
pub fn parse_list(text: &str) -> Option<CpuSet> {
    let text = text.trim();
    let mut set = CpuSet::new();
    if text.is_empty() {
        return Some(set);
    }
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last > MAX_CPU_NUMBER {
            return None;
        }
        set.extend(first..=last);
    }
    Some(set)
}

/// Formats a set as a list such as `0-3,8`.
#[must_use]
pub fn format_list(set: &CpuSet) -> String {
    let mut ranges: Vec<(u32, u32)> = vec![];
    for &cpu in set {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(cpu) => *last = cpu,
            _ => ranges.push((cpu, cpu)),
        }
    }
    let shown = ranges.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    shown.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_parsed_and_printed_in_the_kernels_format() {
        for (text, canonical) in [
            ("", Some("")),
            ("0-3,8\n", Some("0-3,8")),
            ("3,1,2", Some("1-3")),
            ("5", Some("5")),
            ("0-1,1-2", Some("0-2")),
            ("3-1", None),
            ("a", None),
            ("1,", None),
            ("0-4000000000", None),
        ] {
            let read = parse_list(text).map(|set| format_list(&set));
            assert_eq!(read.as_deref(), canonical, "{text:?}");
        }
    }
}
