//! Which images are removed when nothing uses them: for room, and for age (kubelet spec, 8.5). Pure.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

/// When images are removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// Above this share of the filesystem in use, in percent, room is made; 100 for never.
    pub high: u8,
    /// Down to this share.
    pub low: u8,
    /// An image that was seen first less than this ago stays.
    pub minimum_age: SignedDuration,
    /// An image that was not used for this long goes, however much room there is.
    pub maximum_age: Option<SignedDuration>,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            high: 85,
            low: 80,
            minimum_age: SignedDuration::from_mins(2),
            maximum_age: None,
        }
    }
}

impl Rules {
    /// Whether anything can ever be removed.
    #[must_use]
    pub fn enabled(&self) -> bool {
        self.high < 100 || self.maximum_age.is_some()
    }
}

/// A filesystem's bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Filesystem {
    /// All of them.
    pub capacity: u64,
    /// Those that can still be written.
    pub available: u64,
}

impl Filesystem {
    /// How much of it is in use, in percent.
    #[must_use]
    pub fn percent(&self) -> u64 {
        100_u64.saturating_sub(
            u64::try_from(u128::from(self.available) * 100 / u128::from(self.capacity.max(1)))
                .unwrap_or(100),
        )
    }
}

/// An image that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Present {
    /// The runtime's id.
    pub id: String,
    /// Bytes.
    pub size: u64,
    /// The runtime keeps it for itself.
    pub pinned: bool,
    /// A container or a pod uses it.
    pub used: bool,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    detected: Timestamp,
    used: Option<Timestamp>,
}

/// What is to be removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// These in any case: nobody has used them for too long.
    pub aged: Vec<Present>,
    /// These, in this order, until [`Plan::wanted`] bytes are free.
    pub candidates: Vec<Present>,
    /// How many bytes are to be freed.
    pub wanted: u64,
}

/// Since when images are known and when they were used last. It begins anew with the agent, as the kubelet's
/// does.
#[derive(Debug, Default)]
pub struct Ledger {
    known: BTreeMap<String, Known>,
    /// Whether it was looked before.
    begun: bool,
}

impl Ledger {
    /// Notes what is there. What is there at the first look has been there before, nobody knows since when.
    pub fn look(&mut self, images: &[Present], now: Timestamp) {
        let detected = if std::mem::replace(&mut self.begun, true) {
            now
        } else {
            Timestamp::UNIX_EPOCH
        };
        self.known
            .retain(|id, _| images.iter().any(|i| i.id == *id));
        for image in images {
            let known = self.known.entry(image.id.clone()).or_insert(Known {
                detected,
                used: None,
            });
            if image.used {
                known.used = Some(now);
            }
        }
    }

    /// What is to be removed now. `since` is when the agent started: ages are counted from there.
    #[must_use]
    pub fn plan(
        &self,
        images: &[Present],
        rules: &Rules,
        disk: Filesystem,
        since: Timestamp,
        now: Timestamp,
    ) -> Plan {
        let of = |image: &Present| {
            self.known.get(&image.id).copied().unwrap_or(Known {
                detected: now,
                used: None,
            })
        };
        let old_enough =
            |image: &&Present| now.duration_since(of(image).detected) >= rules.minimum_age;
        let mut idle: Vec<Present> = images
            .iter()
            .filter(|i| !i.used && !i.pinned)
            .filter(old_enough)
            .cloned()
            .collect();
        idle.sort_by_key(|image| (of(image).used, of(image).detected, image.id.clone()));
        let too_old = |image: &Present| {
            let known = of(image);
            rules.maximum_age.is_some_and(|most| {
                now.duration_since(since) > most
                    && now.duration_since(known.used.unwrap_or(known.detected)) > most
            })
        };
        let (aged, candidates): (Vec<Present>, Vec<Present>) = idle.into_iter().partition(too_old);
        let crowded = rules.high < 100 && disk.percent() >= u64::from(rules.high);
        let floor =
            u64::try_from(u128::from(disk.capacity) * u128::from(100 - rules.low.min(100)) / 100)
                .unwrap_or(u64::MAX);
        let freed: u64 = aged.iter().map(|i| i.size).sum();
        let wanted = if crowded {
            floor.saturating_sub(disk.available).saturating_sub(freed)
        } else {
            0
        };
        Plan {
            aged,
            candidates: if wanted > 0 { candidates } else { vec![] },
            wanted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).expect("a time")
    }

    fn image(id: &str, used: bool) -> Present {
        Present {
            id: id.into(),
            size: 10,
            pinned: false,
            used,
        }
    }

    fn ids(images: &[Present]) -> Vec<&str> {
        images.iter().map(|i| i.id.as_str()).collect()
    }

    #[test]
    fn room_is_made_by_what_was_used_least_recently() {
        let (mut ledger, rules, full) = (
            Ledger::default(),
            Rules::default(),
            Filesystem {
                capacity: 1000,
                available: 100,
            },
        );
        ledger.look(
            &[image("a", true), image("b", true), image("never", false)],
            at(0),
        );
        ledger.look(
            &[image("a", true), image("b", false), image("never", false)],
            at(50),
        );
        let mut pinned = image("pause", false);
        pinned.pinned = true;
        let now = [
            image("a", false),
            image("b", false),
            image("never", false),
            image("new", false),
            image("busy", true),
            pinned,
        ];
        ledger.look(&now, at(150));
        let plan = ledger.plan(&now, &rules, full, at(0), at(150));
        assert_eq!(
            (ids(&plan.candidates), plan.wanted, plan.aged.len()),
            (vec!["never", "b", "a"], 100, 0)
        );
        let roomy = Filesystem {
            available: 500,
            ..full
        };
        assert_eq!(
            ledger.plan(&now, &rules, roomy, at(0), at(150)),
            Plan::default()
        );
        assert_eq!(
            ledger.plan(
                &now,
                &Rules {
                    high: 100,
                    ..rules.clone()
                },
                full,
                at(0),
                at(150)
            ),
            Plan::default()
        );
        // Seen first a moment ago: somebody may be about to use it.
        assert!(
            ledger
                .plan(&now[3..4], &rules, full, at(0), at(200))
                .candidates
                .is_empty()
        );
        assert_eq!(
            ids(&ledger
                .plan(&now[3..4], &rules, full, at(0), at(270))
                .candidates),
            ["new"]
        );
    }

    #[test]
    fn what_was_there_before_the_agent_is_old() {
        let (mut ledger, full) = (
            Ledger::default(),
            Filesystem {
                capacity: 1000,
                available: 100,
            },
        );
        let there = [image("old", false)];
        ledger.look(&there, at(1000));
        assert_eq!(
            ids(&ledger
                .plan(&there, &Rules::default(), full, at(1000), at(1000))
                .candidates),
            ["old"]
        );
        let more = [image("old", false), image("new", false)];
        ledger.look(&more, at(1001));
        assert_eq!(
            ids(&ledger
                .plan(&more, &Rules::default(), full, at(1000), at(1001))
                .candidates),
            ["old"]
        );
    }

    #[test]
    fn what_nobody_has_used_for_too_long_goes() {
        let rules = Rules {
            maximum_age: Some(SignedDuration::from_secs(300)),
            ..Rules::default()
        };
        let (mut ledger, roomy) = (
            Ledger::default(),
            Filesystem {
                capacity: 1000,
                available: 900,
            },
        );
        let images = [image("a", false), image("b", false)];
        ledger.look(&[image("a", true), image("b", false)], at(0));
        ledger.look(&[image("a", true), image("b", false)], at(200));
        ledger.look(&images, at(400));
        assert_eq!(
            ids(&ledger.plan(&images, &rules, roomy, at(0), at(400)).aged),
            ["b"]
        );
        assert_eq!(
            ledger.plan(&images, &rules, roomy, at(300), at(400)),
            Plan::default(),
            "the agent is too young to know"
        );
        let full = Filesystem {
            capacity: 1000,
            available: 190,
        };
        assert_eq!(
            ledger
                .plan(&images, &Rules { high: 81, ..rules }, full, at(0), at(400))
                .wanted,
            0,
            "what has gone by age counts as freed"
        );
    }

    #[test]
    fn a_filesystem_that_says_nothing_is_full() {
        assert_eq!(Filesystem::default().percent(), 100);
        assert_eq!(
            Filesystem {
                capacity: u64::MAX,
                available: u64::MAX / 2
            }
            .percent(),
            51
        );
    }
}
