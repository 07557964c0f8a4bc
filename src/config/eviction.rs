//! Eviction thresholds.

use std::collections::BTreeMap;

use super::ConfigError;
use super::allocatable::enforcement;
use super::document::Document;
use super::values::{invalid, time};
use holdfast_core::node::cgroup_tree::Rules;
use holdfast_core::node::eviction::{DEFAULT_HARD, IGNORED, Settings, ThresholdSettings, parse};

type Map = BTreeMap<String, String>;

/// Returns the hard thresholds: the defaults if the file has none. Those of the file replace all defaults, unless
/// `mergeDefaultEvictionSettings` is true.
pub(super) fn hard(given: Option<Map>, merge: bool) -> Map {
    let defaults = DEFAULT_HARD.map(|(signal, level)| (signal.to_owned(), level.to_owned()));
    match given {
        None => Map::from(defaults),
        Some(given) if merge => Map::from_iter(defaults.into_iter().chain(given)),
        Some(given) => given,
    }
}

/// Returns the eviction settings, the limits that are enforced for pods and for reservations, and the fields without
/// effect.
pub(super) fn eviction(
    document: &mut Document,
) -> Result<(Settings, Rules, Vec<String>), ConfigError> {
    let (rules, mut unused) = enforcement(document)?;
    let merge = document.merge_default_eviction_settings.unwrap_or(false);
    let hard = hard(document.eviction_hard.take(), merge);
    let map = |map: &mut Option<Map>| map.take().unwrap_or_default();
    let soft = map(&mut document.eviction_soft);
    let soft_grace = map(&mut document.eviction_soft_grace_period);
    let min_reclaim = map(&mut document.eviction_minimum_reclaim);
    let settings = ThresholdSettings {
        hard: &hard,
        soft: &soft,
        soft_grace: &soft_grace,
        min_reclaim: &min_reclaim,
        pods_are_limited: rules.limits_pods,
    };
    let thresholds = parse(settings).map_err(|wrong| {
        let field = format!("{}.{}", wrong.field, wrong.signal);
        invalid(&field, wrong.value, wrong.remedy)
    })?;
    let signals = hard.keys().chain(soft.keys());
    let ignored = signals.filter(|signal| IGNORED.contains(&signal.as_str()));
    unused.extend(ignored.map(|signal| {
        format!("{signal} (as in the kubelet: the thresholds of nodefs and imagefs apply)")
    }));
    let transition = document.eviction_pressure_transition_period.as_ref();
    let settings = Settings {
        thresholds,
        transition: time("evictionPressureTransitionPeriod", transition, 300)?,
        max_pod_grace: document.eviction_max_pod_grace_period.unwrap_or(0).into(),
    };
    Ok((settings, rules, unused))
}
