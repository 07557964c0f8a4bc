//! Lasting outages: a network plugin that always fails, an unreachable API, a runtime that does not answer list calls.

use super::*;

#[derive(Default)]
pub(super) struct Outage {
    /// The network plugin fails, each time with another sandbox ID in its error.
    is_plugin_broken: bool,
    pub(super) is_api_down: bool,
    pub(super) do_lists_hang: bool,
    /// How often a controller has annotated a pod just before the agent's status write; `None` without such a controller.
    annotations: Option<u64>,
    /// The events that the API has stored: the UID of the pod, and the reason.
    pub(super) posted: Vec<(String, String)>,
}

impl Outage {
    pub(super) fn set_up_network(&self, sandbox: &str) -> Result<(), RuntimeError> {
        if !self.is_plugin_broken {
            return Ok(());
        }
        let digits = sandbox.bytes().fold(0_u64, |all, byte| {
            all.wrapping_mul(31).wrapping_add(u64::from(byte))
        });
        Err(RuntimeError {
            kind: RuntimeErrorKind::Failed,
            code: Some("Unknown"),
            message: format!(
                "failed to setup network for sandbox \"{digits:064x}\": plugin type=\"none\" failed (add)"
            ),
        })
    }
}

impl World {
    /// Makes the network plugin fail, or work again.
    pub fn break_plugin(&self, is_broken: bool) {
        self.state().outage.is_plugin_broken = is_broken;
    }

    /// Makes the API unreachable, or reachable again.
    pub fn cut_off_api(&self, is_down: bool) {
        self.state().outage.is_api_down = is_down;
    }

    /// Makes the runtime's list calls hang, or return again.
    pub fn hang_lists(&self, hang: bool) {
        self.state().outage.do_lists_hang = hang;
    }

    /// A controller annotates pods all the time: four of five status writes carry an old resourceVersion.
    pub fn annotate_pods(&self) {
        self.state().outage.annotations = Some(0);
    }

    /// The controller's annotation, just before the agent's status write.
    pub(super) fn annotate_before_write(&self, uid: &str) {
        let mut state = self.state();
        let Some(annotations) = &mut state.outage.annotations else {
            return;
        };
        *annotations += 1;
        if !annotations.is_multiple_of(5) {
            state.publish(uid);
        }
    }

    /// Whether the API has stored an event with this reason about a pod.
    pub fn has_event(&self, name: &str, reason: &str) -> bool {
        let uid = self.uid(name);
        let state = self.state();
        let mut posted = state.outage.posted.iter();
        posted.any(|(of, why)| *of == uid && why == reason)
    }

    /// The maximum number of requests of a kind for one pod within the last minute.
    pub fn max_calls_for_a_pod(&self, what: &str) -> usize {
        let state = self.state();
        let now = Instant::now();
        let minute = Duration::from_secs(60);
        let of = state
            .recent_calls
            .iter()
            .filter(|((_, kind), _)| *kind == what);
        of.map(|(_, times)| times.iter().filter(|at| **at + minute >= now).count())
            .max()
            .unwrap_or(0)
    }
}
