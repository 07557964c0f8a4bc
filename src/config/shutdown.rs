//! Fields about the time that a shutdown of the machine waits for pods.

use super::ConfigError;
use super::document::Document;
use super::values::{invalid, time};
use holdfast_core::node::shutdown::{Periods, ShutdownSettings};

/// The feature gates of these fields.
const GATES: [&str; 2] = [
    "GracefulNodeShutdown",
    "GracefulNodeShutdownBasedOnPodPriority",
];

/// Returns the periods by the kubelet's rules.
pub(super) fn periods(d: &Document) -> Result<Periods, ConfigError> {
    let every = |field, text: &Option<String>| time(field, text.as_ref(), 0);
    let critical = &d.shutdown_grace_period_critical_pods;
    let settings = ShutdownSettings {
        all: every("shutdownGracePeriod", &d.shutdown_grace_period)?,
        critical: every("shutdownGracePeriodCriticalPods", critical)?,
        by_priority: d
            .shutdown_grace_period_by_pod_priority
            .clone()
            .unwrap_or_default(),
    };
    let periods =
        Periods::new(&settings).map_err(|wrong| invalid(wrong.field, wrong.value, wrong.remedy))?;
    let [simple, by_priority] = GATES;
    let (gate, field) = match settings.by_priority.is_empty() {
        true => (simple, "shutdownGracePeriod"),
        false => (by_priority, "shutdownGracePeriodByPodPriority"),
    };
    let gates = d.feature_gates.as_ref();
    if !periods.is_empty() && gates.and_then(|g| g.get(gate)) == Some(&false) {
        let remedy = format!("remove featureGates.{gate}, or the field");
        return Err(invalid(field, format!("{:?}", periods.total()), &remedy));
    }
    Ok(periods)
}
