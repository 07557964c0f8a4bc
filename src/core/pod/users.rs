//! Ranges of user and group ids for pods with user namespaces (KEP-127). Pure.

use serde::{Deserialize, Serialize};

/// The default number of ids per pod. Configured numbers must be multiples of it.
pub const LENGTH: u32 = 65_536;

/// A mapping of a range of ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mapping {
    /// The first id on the node.
    pub host_id: u32,
    /// The first id in the pod.
    pub container_id: u32,
    /// Number of ids.
    pub length: u32,
}

impl Mapping {
    /// The first id on the node after the range.
    fn end(&self) -> u64 {
        u64::from(self.host_id).saturating_add(self.length.into())
    }
}

/// The mappings of a pod, in the format of the file in the pod's directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mappings {
    /// User ids.
    pub uid_mappings: Vec<Mapping>,
    /// Group ids.
    pub gid_mappings: Vec<Mapping>,
}

/// A range of ids on the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ids {
    /// The first id.
    pub first: u64,
    /// Number of ids.
    pub count: u64,
}

/// Why pods cannot use the subordinate ids of the user `kubelet`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The ids are not a whole number of ranges.
    #[error(
        "userNamespaces.idsPerPod is {each}, but the user kubelet has {count} subordinate ids from {first}: in /etc/subuid and /etc/subgid, start at a positive multiple of {each} and assign a multiple of {each} ids"
    )]
    Uneven {
        /// Number of ids per pod.
        each: u32,
        /// The first id.
        first: u64,
        /// Number of ids.
        count: u64,
    },
    /// There are too few ids.
    #[error(
        "the subordinate ids of the user kubelet suffice for {has} pods, but maxPods is {pods}: assign {needed} ids in /etc/subuid and /etc/subgid, or lower maxPods"
    )]
    Few {
        /// Number of pods that the ids suffice for.
        has: u64,
        /// Maximum number of pods.
        pods: i64,
        /// Number of ids that these pods need.
        needed: u64,
    },
}

/// The node's ids for pods, in ranges of equal length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    each: u32,
    ids: Ids,
}

impl Pool {
    /// All ids except for the first range, which contains the node's own users. `each` is the number of ids per pod, a
    /// positive multiple of [`LENGTH`].
    #[must_use]
    pub fn all(each: u32) -> Pool {
        let first = u64::from(each);
        let ids = Ids {
            first,
            count: (1_u64 << 32).saturating_sub(first),
        };
        Pool { each, ids }
    }

    /// The ids that are reserved for this number of pods.
    ///
    /// # Errors
    ///
    /// The ids are not a whole number of ranges, or there are too few.
    pub fn of(each: u32, ids: Ids, pods: i64) -> Result<Pool, PoolError> {
        let length = u64::from(each);
        let Ids { first, count } = ids;
        let fits = first.saturating_add(count) <= 1 << 32;
        if first == 0 || !first.is_multiple_of(length) || !count.is_multiple_of(length) || !fits {
            return Err(PoolError::Uneven { each, first, count });
        }
        let has = count.checked_div(length).unwrap_or(0);
        let wanted = u64::try_from(pods).unwrap_or(0);
        if has < wanted {
            let needed = wanted.saturating_mul(length);
            return Err(PoolError::Few { has, pods, needed });
        }
        Ok(Pool { each, ids })
    }

    /// The lowest range without an id that is in use. `None` if there is none.
    #[must_use]
    pub fn free(&self, taken: &[Mappings]) -> Option<Mappings> {
        let both = |m: &'_ Mappings| [m.uid_mappings.clone(), m.gid_mappings.clone()].concat();
        let used: Vec<Mapping> = taken.iter().flat_map(both).collect();
        let length = u64::from(self.each);
        let count = self.ids.count.checked_div(length).unwrap_or(0);
        let starts = (0..count).map(|n| n.saturating_mul(length).saturating_add(self.ids.first));
        let is_free = |start: &u64| {
            let end = start.saturating_add(length);
            let overlaps = |m: &Mapping| u64::from(m.host_id) < end && *start < m.end();
            !used.iter().any(overlaps)
        };
        let host_id = starts.into_iter().find(is_free)?;
        let mapping = vec![Mapping {
            host_id: u32::try_from(host_id).ok()?,
            container_id: 0,
            length: self.each,
        }];
        Some(Mappings {
            uid_mappings: mapping.clone(),
            gid_mappings: mapping,
        })
    }
}

/// Parses the output of `getsubids` for a user: one line such as `0: kubelet 65536 7208960`. `None` if it has another
/// form.
#[must_use]
pub fn parse_subordinate_ids(output: &str) -> Option<Ids> {
    let mut lines = output.lines();
    let (line, None) = (lines.next()?, lines.next()) else {
        return None;
    };
    let words: Vec<&str> = line.split_whitespace().collect();
    let [_, _, first, count] = words[..] else {
        return None;
    };
    Some(Ids {
        first: first.parse().ok()?,
        count: count.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(mappings: &Mappings) -> u32 {
        mappings.uid_mappings[0].host_id
    }

    #[test]
    fn ranges_do_not_overlap_and_gaps_are_filled() {
        let pool = Pool::all(LENGTH);
        let one = pool.free(&[]).expect("free");
        let two = pool.free(std::slice::from_ref(&one)).expect("free");
        assert_eq!((first(&one), first(&two)), (65_536, 131_072));
        assert_eq!(pool.free(&[two]), Some(one.clone()));
        let text = serde_json::to_string(&one).expect("json");
        assert_eq!(
            text,
            "{\"uidMappings\":[{\"hostId\":65536,\"containerId\":0,\"length\":65536}],\"gidMappings\":[{\"hostId\":65536,\"containerId\":0,\"length\":65536}]}"
        );
    }

    #[test]
    fn pods_keep_their_id_ranges_when_the_length_changes() {
        let (short, long) = (Pool::all(LENGTH), Pool::all(4 * LENGTH));
        let mut taken: Vec<Mappings> = vec![];
        for pool in [short, long, short, long, short] {
            taken.extend(pool.free(&taken));
        }
        // The short ranges occupy the first long range, so the first free one is the second.
        let firsts: Vec<u32> = taken.iter().map(|m| first(m) / LENGTH).collect();
        assert_eq!(firsts, [1, 4, 2, 8, 3]);
        let last = Pool::all(1 << 31);
        assert_eq!(last.free(&[]).as_ref().map(first), Some(1 << 31));
        let all_taken: Vec<Mappings> = last.free(&[]).into_iter().collect();
        assert_eq!(last.free(&all_taken), None);
    }

    #[test]
    fn subordinate_ids_must_be_whole_ranges_for_all_pods() {
        let ids = |first, count| Ids { first, count };
        let (length, pods) = (u64::from(LENGTH), 3);
        let pool = Pool::of(LENGTH, ids(10 * length, 3 * length), pods).expect("enough");
        let mut taken: Vec<Mappings> = vec![];
        while let Some(free) = pool.free(&taken) {
            taken.push(free);
        }
        let firsts: Vec<u32> = taken.iter().map(|m| first(m) / LENGTH).collect();
        assert_eq!(firsts, [10, 11, 12]);
        for (first, count) in [
            (0, 3 * length),
            (100_000, 3 * length),
            (length, 3 * length + 1),
            (3 << 31, 3 * length),
        ] {
            let refused = Pool::of(LENGTH, ids(first, count), pods);
            assert!(
                matches!(refused, Err(PoolError::Uneven { .. })),
                "{first} {count}"
            );
        }
        let few = Pool::of(LENGTH, ids(length, 2 * length), pods).expect_err("too few");
        assert_eq!(
            few.to_string(),
            "the subordinate ids of the user kubelet suffice for 2 pods, but maxPods is 3: assign 196608 ids in /etc/subuid and /etc/subgid, or lower maxPods"
        );
    }

    #[test]
    fn only_a_single_line_of_getsubids_is_accepted() {
        let one = Ids {
            first: 65_536,
            count: 7_208_960,
        };
        assert_eq!(
            parse_subordinate_ids("0: kubelet 65536 7208960\n"),
            Some(one)
        );
        for other in [
            "",
            "0: kubelet 65536\n",
            "0: kubelet x 1\n",
            "0: kubelet 65536 1\n1: kubelet 131072 1\n",
        ] {
            assert_eq!(parse_subordinate_ids(other), None, "{other:?}");
        }
    }
}
