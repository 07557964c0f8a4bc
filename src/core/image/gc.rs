//! Image garbage collection: which unused images are removed, to free disk space or because of age
//! (`pkg/kubelet/images/image_gc_manager.go`). Pure.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use crate::node::collection::{Decision, KeepReason, RemovalReason};

/// When images are removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// Disk usage in percent above which images are removed (`imageGCHighThresholdPercent`); 100 disables it.
    pub high: u8,
    /// Disk usage in percent at which removal stops (`imageGCLowThresholdPercent`).
    pub low: u8,
    /// Images first seen more recently than this are kept (`imageMinimumGCAge`).
    pub minimum_age: SignedDuration,
    /// Images unused for longer than this are removed regardless of disk usage (`imageMaximumGCAge`).
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
    /// Whether any image can be removed.
    #[must_use]
    pub fn enabled(&self) -> bool {
        self.high < 100 || self.maximum_age.is_some()
    }
}

/// Size of a filesystem in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Filesystem {
    /// Capacity.
    pub capacity: u64,
    /// Available bytes.
    pub available: u64,
}

impl Filesystem {
    /// Usage in percent.
    #[must_use]
    pub fn percent(&self) -> u64 {
        100_u64.saturating_sub(
            u128::from(self.available)
                .saturating_mul(100)
                .checked_div(self.capacity.max(1).into())
                .and_then(|percent| u64::try_from(percent).ok())
                .unwrap_or(100),
        )
    }
}

/// An image on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageOnNode {
    /// The image id of the runtime.
    pub id: String,
    /// Size in bytes.
    pub size: u64,
    /// Whether the runtime has pinned the image.
    pub pinned: bool,
    /// Whether a container or a pod uses the image.
    pub used: bool,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    detected: Timestamp,
    used: Option<Timestamp>,
}

/// Images to remove.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Images to remove because they were unused for too long.
    pub aged: Vec<ImageOnNode>,
    /// Images to remove in this order until [`Plan::wanted`] bytes are free.
    pub candidates: Vec<ImageOnNode>,
    /// Bytes to free.
    pub wanted: u64,
}

/// When each image was first seen and last used. As in the kubelet, the record starts empty with every start of the
/// agent.
#[derive(Debug, Default)]
pub struct Ledger {
    known: BTreeMap<String, Known>,
    /// Whether images were recorded before.
    is_initialised: bool,
}

impl Ledger {
    /// Records the present images. Images of the first call existed before, so they count as seen at the epoch.
    pub fn record(&mut self, images: &[ImageOnNode], now: Timestamp) {
        let detected = if std::mem::replace(&mut self.is_initialised, true) {
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

    /// Images that may be removed, least recently used first. Images first seen less than `minimum_age` ago are kept,
    /// because a pod may be about to use them.
    #[must_use]
    pub fn unused(
        &self,
        images: &[ImageOnNode],
        minimum_age: SignedDuration,
        now: Timestamp,
    ) -> Vec<ImageOnNode> {
        let of = |image: &ImageOnNode| self.known(image, now);
        let mut idle: Vec<ImageOnNode> = images
            .iter()
            .filter(|i| !i.used && !i.pinned)
            .filter(|i| now.duration_since(of(i).detected) >= minimum_age)
            .cloned()
            .collect();
        idle.sort_by_key(|image| (of(image).used, of(image).detected, image.id.clone()));
        idle
    }

    fn known(&self, image: &ImageOnNode, now: Timestamp) -> Known {
        self.known.get(&image.id).copied().unwrap_or(Known {
            detected: now,
            used: None,
        })
    }

    /// The images to remove now. `since` is the start of the agent; ages are counted from there.
    #[must_use]
    pub fn plan(
        &self,
        images: &[ImageOnNode],
        rules: &Rules,
        disk: Filesystem,
        since: Timestamp,
        now: Timestamp,
    ) -> Plan {
        let idle = self.unused(images, rules.minimum_age, now);
        let too_old = |image: &ImageOnNode| {
            let known = self.known(image, now);
            rules.maximum_age.is_some_and(|most| {
                now.duration_since(since) > most
                    && now.duration_since(known.used.unwrap_or(known.detected)) > most
            })
        };
        let (aged, candidates): (Vec<ImageOnNode>, Vec<ImageOnNode>) =
            idle.into_iter().partition(too_old);
        let crowded = rules.high < 100 && disk.percent() >= u64::from(rules.high);
        let floor = u64::try_from(
            u128::from(disk.capacity).saturating_mul(100_u8.saturating_sub(rules.low).into()) / 100,
        )
        .unwrap_or(u64::MAX);
        let freed: u64 = aged.iter().map(|i| i.size).fold(0, u64::saturating_add);
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

    /// The decision about each image under a plan: removed images first, in their order. `users` returns what uses an
    /// image.
    #[must_use]
    pub fn decisions(
        &self,
        images: &[ImageOnNode],
        plan: &Plan,
        minimum_age: SignedDuration,
        now: Timestamp,
        users: impl Fn(&ImageOnNode) -> Vec<String>,
    ) -> Vec<PlannedImage> {
        let planned = |image: &ImageOnNode, decision| PlannedImage {
            image: image.clone(),
            last_used: self.known(image, now).used,
            decision,
        };
        let mut freed = 0;
        let mut all: Vec<PlannedImage> = plan
            .aged
            .iter()
            .map(|image| planned(image, Decision::Remove(RemovalReason::Age)))
            .collect();
        for image in &plan.candidates {
            let decision = match freed < plan.wanted {
                true => Decision::Remove(RemovalReason::Space),
                false => Decision::Keep(KeepReason::Enough),
            };
            freed = freed.saturating_add(image.size);
            all.push(planned(image, decision));
        }
        let rest = images
            .iter()
            .filter(|i| !plan.aged.contains(i) && !plan.candidates.contains(i));
        let mut rest: Vec<PlannedImage> = rest
            .map(|image| {
                let age = now.duration_since(self.known(image, now).detected);
                let stay = match image {
                    ImageOnNode { used: true, .. } => KeepReason::InUse(users(image)),
                    ImageOnNode { pinned: true, .. } => KeepReason::Pinned,
                    _ if age < minimum_age => KeepReason::New,
                    _ => KeepReason::NoNeed,
                };
                planned(image, Decision::Keep(stay))
            })
            .collect();
        rest.sort_by_key(|planned| (planned.last_used, planned.image.id.clone()));
        all.extend(rest);
        all
    }
}

/// An image and the decision about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedImage {
    /// The image.
    pub image: ImageOnNode,
    /// When the image was last seen in use.
    pub last_used: Option<Timestamp>,
    /// The decision.
    pub decision: Decision,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).expect("a time")
    }

    fn image(id: &str, used: bool) -> ImageOnNode {
        ImageOnNode {
            id: id.into(),
            size: 10,
            pinned: false,
            used,
        }
    }

    fn ids(images: &[ImageOnNode]) -> Vec<&str> {
        images.iter().map(|i| i.id.as_str()).collect()
    }

    #[test]
    fn the_least_recently_used_images_are_removed_first() {
        let (mut ledger, rules, full) = (
            Ledger::default(),
            Rules::default(),
            Filesystem {
                capacity: 1000,
                available: 100,
            },
        );
        ledger.record(
            &[image("a", true), image("b", true), image("never", false)],
            at(0),
        );
        ledger.record(
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
        ledger.record(&now, at(150));
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
        // First seen a moment ago: a pod may be about to use it.
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
    fn images_older_than_the_agent_may_be_removed() {
        let (mut ledger, full) = (
            Ledger::default(),
            Filesystem {
                capacity: 1000,
                available: 100,
            },
        );
        let there = [image("old", false)];
        ledger.record(&there, at(1000));
        assert_eq!(
            ids(&ledger
                .plan(&there, &Rules::default(), full, at(1000), at(1000))
                .candidates),
            ["old"]
        );
        let more = [image("old", false), image("new", false)];
        ledger.record(&more, at(1001));
        assert_eq!(
            ids(&ledger
                .plan(&more, &Rules::default(), full, at(1000), at(1001))
                .candidates),
            ["old"]
        );
    }

    #[test]
    fn unused_images_are_removed_after_the_maximum_age() {
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
        ledger.record(&[image("a", true), image("b", false)], at(0));
        ledger.record(&[image("a", true), image("b", false)], at(200));
        ledger.record(&images, at(400));
        assert_eq!(
            ids(&ledger.plan(&images, &rules, roomy, at(0), at(400)).aged),
            ["b"]
        );
        assert_eq!(
            ledger.plan(&images, &rules, roomy, at(300), at(400)),
            Plan::default(),
            "the agent has not run for the maximum age"
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
            "images removed by age count as freed"
        );
    }

    #[test]
    fn every_image_is_removed_or_kept_for_a_reason() {
        let (mut ledger, full) = (
            Ledger::default(),
            Filesystem {
                capacity: 1000,
                available: 190,
            },
        );
        let mut pinned = image("pause", false);
        pinned.pinned = true;
        let images = [
            image("a", false),
            image("b", false),
            image("used", true),
            pinned,
        ];
        ledger.record(&images, at(0));
        let more: Vec<ImageOnNode> = images.into_iter().chain([image("new", false)]).collect();
        ledger.record(&more, at(100));
        let decisions = |rules: &Rules| -> Vec<(String, Decision)> {
            let plan = ledger.plan(&more, rules, full, at(0), at(150));
            let by = |_: &ImageOnNode| vec!["pod n/p".to_owned()];
            let all = ledger.decisions(&more, &plan, rules.minimum_age, at(150), by);
            all.into_iter().map(|j| (j.image.id, j.decision)).collect()
        };
        let in_use = Decision::Keep(KeepReason::InUse(vec!["pod n/p".into()]));
        let kept = |stay| Decision::Keep(stay);
        let expected = |first: Decision, second: Decision| {
            [
                ("a".to_owned(), first),
                ("b".to_owned(), second),
                ("new".to_owned(), kept(KeepReason::New)),
                ("pause".to_owned(), kept(KeepReason::Pinned)),
                ("used".to_owned(), in_use.clone()),
            ]
        };
        // Ten bytes must be freed: one image is enough.
        let high = Rules {
            high: 81,
            low: 80,
            ..Rules::default()
        };
        assert_eq!(
            decisions(&high),
            expected(
                Decision::Remove(RemovalReason::Space),
                kept(KeepReason::Enough)
            )
        );
        assert_eq!(
            decisions(&Rules::default()),
            expected(kept(KeepReason::NoNeed), kept(KeepReason::NoNeed))
        );
        let old = Rules {
            maximum_age: Some(SignedDuration::from_secs(60)),
            ..Rules::default()
        };
        let aged = || Decision::Remove(RemovalReason::Age);
        assert_eq!(decisions(&old), expected(aged(), aged()));
    }

    #[test]
    fn a_filesystem_of_unknown_size_counts_as_full() {
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
