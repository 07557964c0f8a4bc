//! Sets of completion indexes in the format of Jobs, `0,2-4,7` (KEP-2214, `pkg/controller/job/indexed_job_utils.go`,
//! `pkg/apis/batch/validation`).

use std::fmt;

/// A set of indexes, as sorted, non-adjacent intervals with inclusive ends.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Indexes(Vec<(i32, i32)>);

impl Indexes {
    /// Parses the indexes in a Job's status. Malformed parts, and indexes of `completions` or above, are omitted.
    #[must_use]
    pub fn read(text: &str, completions: i32) -> Indexes {
        let mut all = Indexes::default();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            if let (Ok(first), Ok(last)) = (first.parse::<i32>(), last.parse::<i32>())
                && 0 <= first
                && first < completions
                && first <= last
            {
                all.add(first, last.min(completions.saturating_sub(1)));
            }
        }
        all
    }

    /// Parses indexes that must be sorted and below `completions`. The error describes the problem.
    pub fn parse(text: &str, completions: i32) -> Result<Indexes, String> {
        let mut all = Indexes::default();
        if text.is_empty() {
            return Ok(all);
        }
        let number = |text: &str| match text.parse::<i32>() {
            Err(_) => Err(format!(
                "cannot convert string to integer for index: {text:?}"
            )),
            Ok(index) if index >= completions => Err(format!("too large index: {text:?}")),
            Ok(index) => Ok(index),
        };
        let order = |before: i32, index: i32| {
            if before < index {
                return Ok(());
            }
            Err(format!(
                "non-increasing order, previous: {before}, current: {index}"
            ))
        };
        let mut before = None;
        for part in text.split(',') {
            let ends: Vec<&str> = part.split('-').collect();
            let (first, last) = match ends.as_slice() {
                [one] => (number(one)?, number(one)?),
                [first, last] => {
                    let (first, last) = (number(first)?, number(last)?);
                    order(first, last)?;
                    (first, last)
                }
                _ => {
                    return Err(format!(
                        "the fragment {part:?} violates the requirement that an index interval can have at most two parts separated by '-'"
                    ));
                }
            };
            if let Some(before) = before {
                order(before, first)?;
            }
            before = Some(last);
            all.add(first, last);
        }
        Ok(all)
    }

    fn add(&mut self, mut first: i32, mut last: i32) {
        self.0.retain(|(f, l)| {
            let apart = last < f.saturating_sub(1) || *l < first.saturating_sub(1);
            if !apart {
                first = first.min(*f);
                last = last.max(*l);
            }
            apart
        });
        let place = self.0.partition_point(|(f, _)| *f < first);
        self.0.insert(place, (first, last));
    }

    /// Adds one index.
    pub fn insert(&mut self, index: i32) {
        self.add(index, index);
    }

    /// Adds all indexes of another set.
    pub fn extend(&mut self, other: &Indexes) {
        for (first, last) in &other.0 {
            self.add(*first, *last);
        }
    }

    /// Number of indexes.
    #[must_use]
    pub fn total(&self) -> i32 {
        let counts = self
            .0
            .iter()
            .map(|(first, last)| last.saturating_sub(*first).saturating_add(1));
        counts.fold(0, i32::saturating_add)
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the set contains an index.
    #[must_use]
    pub fn contains(&self, index: i32) -> bool {
        self.0.iter().any(|(f, l)| (*f..=*l).contains(&index))
    }

    /// Intersection of two sets.
    #[must_use]
    pub fn common(&self, other: &Indexes) -> Indexes {
        let mut common = Indexes::default();
        for (first, last) in &self.0 {
            for (f, l) in &other.0 {
                let (first, last) = (*first.max(f), *last.min(l));
                if first <= last {
                    common.add(first, last);
                }
            }
        }
        common
    }

    /// The lowest index; `None` if the set is empty.
    #[must_use]
    pub fn first(&self) -> Option<i32> {
        self.0.first().map(|(first, _)| *first)
    }

    /// The lowest indexes below `completions` that the set lacks, at most `count`.
    #[must_use]
    pub fn missing(&self, completions: i32, count: usize) -> Vec<i32> {
        let mut missing = vec![];
        let mut next = 0;
        let end = (completions, i32::MAX);
        for (first, last) in self.0.iter().chain([&end]) {
            let room = count.saturating_sub(missing.len());
            missing.extend((next..(*first).min(completions)).take(room));
            next = last.saturating_add(1);
        }
        missing
    }
}

impl fmt::Display for Indexes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (first, last)) in self.0.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            match last.saturating_sub(*first) {
                0 => write!(f, "{comma}{first}")?,
                1 => write!(f, "{comma}{first},{last}")?,
                _ => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsed_indexes_are_printed_in_the_shortest_form() {
        for (text, completions, written, total) in [
            ("", 5, "", 0),
            ("0", 5, "0", 1),
            ("0,1", 5, "0,1", 2),
            ("0,1,2", 5, "0-2", 3),
            ("0-2,3", 9, "0-3", 4),
            ("1,3-9", 5, "1,3,4", 3),
            ("7", 5, "", 0),
            ("x,2,-1,3-y", 5, "2", 1),
        ] {
            let read = Indexes::read(text, completions);
            assert_eq!((read.to_string().as_str(), read.total()), (written, total));
        }
    }

    #[test]
    fn indexes_of_users_must_be_in_order_and_in_range() {
        for (text, fine) in [
            ("", true),
            ("0,2-4", true),
            ("2,2", false),
            ("2-2", false),
            ("3-2", false),
            ("0-1-2", false),
            ("a", false),
            ("5", false),
            ("3-5", false),
            ("2-3,1", false),
        ] {
            assert_eq!(Indexes::parse(text, 5).is_ok(), fine, "{text}");
        }
    }

    #[test]
    fn the_lowest_missing_indexes_come_first() {
        let mut set = Indexes::read("1,3-4", 10);
        assert_eq!(set.missing(7, 9), [0, 2, 5, 6]);
        assert_eq!(set.missing(7, 2), [0, 2]);
        assert_eq!(set.missing(3, 9), [0, 2]);
        set.insert(2);
        set.extend(&Indexes::read("0,5-6", 10));
        assert_eq!(set.to_string(), "0-6");
        assert_eq!(set.missing(7, 9), [0; 0]);
        let common = set.common(&Indexes::read("2-3,6-9", 10));
        assert_eq!((common.total(), common.first()), (3, Some(2)));
        assert!(set.contains(6) && !set.contains(7));
    }
}
