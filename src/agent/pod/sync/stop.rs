//! Stopping containers: the preStop hook first, then the signal (upstream's `killContainer`). Their order is the
//! plan's.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, LifecycleHandler};
use std::time::Duration;

use super::{Job, Result, hook_address, hooks};
use crate::agent::Kind;
use crate::core::fault::Fault;
use crate::core::pod;
use crate::core::pod::Role;
use crate::core::pod::actions::Kill;
use crate::core::pod::journal::Step;
use crate::core::pod::observed::ContainerState;
use crate::core::pod::worker::Outcome;
use tokio::time::Instant;

/// What a container that is told to stop gets at least, in seconds.
const FLOOR: i64 = 2;

impl Job {
    fn time_until(&self, until: Timestamp) -> Duration {
        let left = until.duration_since(self.context().clock.now());
        Duration::try_from(left).unwrap_or_default()
    }

    fn definition(&self, name: &str) -> Option<(Role, Container)> {
        let all = pod::containers(&self.pod);
        let found = all.into_iter().find(|(_, c)| c.name == name);
        found.map(|(role, container)| (role, container.into_owned()))
    }

    /// Stops a container by `until`. At the first try its hook runs and an event says so; a hook that
    /// fails is reported and stops nothing.
    pub(super) async fn stop(&self, kill: &Kill, first: bool, until: Timestamp) -> Result<Outcome> {
        let at_once = kill.grace == Some(0);
        // From here on as a duration: the clock may be set while the hook runs.
        let until = Instant::now() + self.time_until(until);
        if first {
            self.pre_stop(kill, until, !at_once).await;
        }
        let left = until.saturating_duration_since(Instant::now());
        let left = left.as_secs_f64().ceil() as i64;
        let grace = if at_once { 0 } else { left.max(FLOOR) };
        self.signal(kill, grace).await
    }

    /// Tells a container that it will be stopped by `until`: the event, and its hook.
    pub(super) async fn told(&self, kill: &Kill, until: Timestamp) {
        let until = Instant::now() + self.time_until(until);
        self.pre_stop(kill, until, true).await;
    }

    async fn pre_stop(&self, kill: &Kill, until: Instant, with_hook: bool) {
        let definition = self.definition(&kill.name);
        let role = definition.as_ref().map_or(Role::Regular, |(role, _)| *role);
        let path = role.field_path(&kill.name);
        let events = &self.context().events;
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
        let run = self.run_pre_stop(kill, &container, &handler, until);
        if let Err(error) = self.log().step(Step::PreStop, &kill.name, run).await {
            tracing::info!(%error, container = kill.name, "preStop hook failed");
            events.pod(
                &self.pod,
                Some(path),
                Kind::Warning,
                "FailedPreStopHook",
                "PreStopHook failed",
            );
        }
    }

    async fn run_pre_stop(
        &self,
        kill: &Kill,
        container: &Container,
        handler: &LifecycleHandler,
        until: Instant,
    ) -> std::result::Result<(), String> {
        let ips: &[String] = self.observed.sandboxes.first().map_or(&[], |s| &s.ips);
        let ip = hook_address(&self.pod, ips);
        let hook = hooks::run(self.context(), &self.pod, container, handler, &kill.id, ip);
        tokio::time::timeout_at(until, hook)
            .await
            .unwrap_or_else(|_| Err("the hook took longer than the grace period".into()))
    }

    async fn signal(&self, kill: &Kill, grace: i64) -> Result<Outcome> {
        let stop = async {
            let stopped = self.context().runtime.stop_container(&kill.id, grace).await;
            stopped.map_err(|e| {
                Fault::from(e).within(&format!("container {} cannot be stopped", kill.name))
            })
        };
        match self.log().step(Step::Stop, &kill.name, stop).await {
            Ok(()) => Ok(Outcome::Done),
            Err(fault) => {
                let message = format!("error killing pod: {fault}");
                self.say(Kind::Warning, "FailedKillPod", message);
                Err(fault.into())
            }
        }
    }

    /// Starts all containers over in their sandbox (KEP-5532): stopped with the shortest grace and removed, the ones
    /// that asked for it last.
    pub(super) async fn restart_all(&self, kills: &[Kill]) -> Result<Outcome> {
        let running = |kill: &&Kill| self.observed.live().any(|c| c.id == kill.id);
        let stops = kills.iter().filter(running).map(|kill| async {
            let events = &self.context().events;
            let path = Role::Regular.field_path(&kill.name);
            events.pod(
                &self.pod,
                Some(path),
                Kind::Normal,
                "Killing",
                kill.message.clone(),
            );
            self.signal(kill, FLOOR).await
        });
        for stopped in futures::future::join_all(stops).await {
            stopped?;
        }
        for kill in kills {
            let removed = self.context().runtime.remove_container(&kill.id).await;
            removed.map_err(|e| {
                Fault::from(e).within(&format!(
                    "container {} cannot be removed to start over",
                    kill.name
                ))
            })?;
        }
        Ok(Outcome::Done)
    }
}
