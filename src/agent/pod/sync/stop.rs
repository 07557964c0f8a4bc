//! Stops containers: the preStop hook first, then the signal (upstream's
//! `killContainer`). The plan determines the order of containers.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, LifecycleHandler};
use std::time::Duration;

use super::{Job, Result, hook_address, hooks};
use crate::Kind;
use holdfast_core::fault::Fault;
use holdfast_core::pod;
use holdfast_core::pod::Role;
use holdfast_core::pod::actions::Kill;
use holdfast_core::pod::journal::Step;
use holdfast_core::pod::observed::ContainerState;
use holdfast_core::pod::worker::Outcome;
use tokio::time::Instant;

/// Minimum grace period of a container, in seconds.
const MIN_GRACE_SECONDS: i64 = 2;

/// Emits the event `FailedPreStopHook` when dropped, if the hook failed or was
/// still running when its container was stopped.
struct HookEventGuard<'a> {
    job: &'a Job,
    path: String,
    is_failure: bool,
}

impl Drop for HookEventGuard<'_> {
    fn drop(&mut self) {
        if self.is_failure {
            self.job.parts().events.pod(
                &self.job.pod,
                Some(std::mem::take(&mut self.path)),
                Kind::Warning,
                "FailedPreStopHook",
                "PreStopHook failed",
            );
        }
    }
}

impl Job {
    fn time_until(&self, until: Timestamp) -> Duration {
        let left = until.duration_since(self.parts().clock.now());
        Duration::try_from(left).unwrap_or_default()
    }

    fn definition(&self, name: &str) -> Option<(Role, Container)> {
        let all = pod::containers(&self.pod);
        let found = all.into_iter().find(|(_, c)| c.name == name);
        found.map(|(role, container)| (role, container.into_owned()))
    }

    /// Stops a container by `until`. The first attempt emits an event and runs the preStop hook; a failed hook
    /// does not prevent the stop. A hook may still be running at the end of the grace period. It then
    /// continues until the container is killed, which gets [`MIN_GRACE_SECONDS`] more seconds (upstream's
    /// `executePreStopHook` and `minimumGracePeriodInSeconds`).
    pub(super) async fn stop(&self, kill: &Kill, first: bool, until: Timestamp) -> Result<Outcome> {
        let at_once = kill.grace == Some(0);
        // Monotonic from here on: the clock may be set while the hook runs.
        let until = Instant::now() + self.time_until(until);
        let mut hook = std::pin::pin!(async {
            if first {
                self.pre_stop(kill, !at_once).await;
            }
        });
        let is_done = tokio::time::timeout_at(until, &mut hook).await.is_ok();
        let left = until.saturating_duration_since(Instant::now());
        let left = left.as_secs_f64().ceil() as i64;
        let grace = if at_once {
            0
        } else {
            left.max(MIN_GRACE_SECONDS)
        };
        let mut signal = std::pin::pin!(self.signal(kill, grace));
        if !is_done {
            tokio::select! {
                biased;
                stopped = &mut signal => return stopped,
                () = hook => {}
            }
        }
        signal.await
    }

    /// Emits the event `Killing` and runs the preStop hook while this future is polled.
    pub(super) async fn pre_stop(&self, kill: &Kill, with_hook: bool) {
        let definition = self.definition(&kill.name);
        let role = definition.as_ref().map_or(Role::Regular, |(role, _)| *role);
        let path = role.field_path(&kill.name);
        let events = &self.parts().events;
        events.pod(
            &self.pod,
            Some(path.clone()),
            Kind::Normal,
            "Killing",
            kill.message.clone(),
        );
        let ended = self
            .observed
            .containers
            .iter()
            .any(|c| c.id == kill.id && c.state != ContainerState::Running);
        let Some((container, handler)) = definition
            .filter(|_| with_hook && !ended)
            .and_then(|(_, c)| Some((c.clone(), c.lifecycle?.pre_stop?)))
        else {
            return;
        };
        let run = self.run_pre_stop(kill, &container, &handler);
        let mut event_guard = HookEventGuard {
            job: self,
            path,
            // As upstream: an interrupted `sleep` hook is no failure.
            is_failure: handler.sleep.is_none(),
        };
        let ran = self.log().step(Step::PreStop, &kill.name, run).await;
        if let Err(error) = &ran {
            tracing::info!(%error, container = kill.name, "preStop hook failed");
        }
        event_guard.is_failure = ran.is_err();
    }

    async fn run_pre_stop(
        &self,
        kill: &Kill,
        container: &Container,
        handler: &LifecycleHandler,
    ) -> std::result::Result<(), String> {
        let ips: &[String] = self.observed.sandboxes.first().map_or(&[], |s| &s.ips);
        let ip = hook_address(&self.pod, ips);
        hooks::run(
            &self.parts().hooks,
            &self.pod,
            container,
            handler,
            &kill.id,
            ip,
        )
        .await
    }

    async fn signal(&self, kill: &Kill, grace: i64) -> Result<Outcome> {
        let stop = async {
            let stopped = self.parts().runtime.stop_container(&kill.id, grace).await;
            stopped.map_err(|e| {
                Fault::from(e).context(&format!("container {} cannot be stopped", kill.name))
            })
        };
        match self.log().step(Step::Stop, &kill.name, stop).await {
            Ok(()) => Ok(Outcome::Done),
            Err(fault) => {
                let message = format!("error killing pod: {fault}");
                self.emit_event(Kind::Warning, "FailedKillPod", message);
                Err(fault.into())
            }
        }
    }

    /// Restarts all containers in their sandbox (KEP-5532): stops them with the minimum grace period and removes them.
    /// The containers that requested the restart are removed last.
    pub(super) async fn restart_all(&self, kills: &[Kill]) -> Result<Outcome> {
        let running = |kill: &&Kill| self.observed.live().any(|c| c.id == kill.id);
        let stops = kills.iter().filter(running).map(|kill| async {
            let events = &self.parts().events;
            let path = Role::Regular.field_path(&kill.name);
            events.pod(
                &self.pod,
                Some(path),
                Kind::Normal,
                "Killing",
                kill.message.clone(),
            );
            self.signal(kill, MIN_GRACE_SECONDS).await
        });
        for stopped in futures::future::join_all(stops).await {
            stopped?;
        }
        for kill in kills {
            let removed = self.parts().runtime.remove_container(&kill.id).await;
            removed.map_err(|e| {
                Fault::from(e).context(&format!(
                    "container {} cannot be removed before the restart of all containers",
                    kill.name
                ))
            })?;
        }
        Ok(Outcome::Done)
    }
}
