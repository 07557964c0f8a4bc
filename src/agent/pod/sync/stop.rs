//! Stopping containers: the hook first, then the signal, sidecars last and in reverse (kubelet spec, 3.4
//! and 3.6). A pod's containers share one deadline, which only ever moves closer.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::agent::pod::journal::Log;
use crate::agent::{Context, Kind, pod::hooks};
use crate::core::pod::actions::Kill;
use crate::core::pod::journal::{Progress, Step};
use crate::core::pod::observed::{self, ContainerState, ObservedPod};
use crate::core::pod::{self, Role};

/// What a container that is told to stop gets at least.
const FLOOR: i64 = 2;

/// How a pod's end goes on over several tries.
#[derive(Debug, Default)]
pub struct Ending {
    /// When the grace period is over.
    until: Option<Instant>,
    /// Containers whose hook has run.
    hooked: BTreeSet<String>,
}

impl Ending {
    /// The pod has `grace` seconds from now on, unless it has less already.
    pub fn within(&mut self, grace: i64) {
        let until = Instant::now() + Duration::from_secs(u64::try_from(grace).unwrap_or(0));
        self.until = Some(self.until.map_or(until, |before| before.min(until)));
    }
}

/// Who stops.
pub struct Stopping<'a> {
    /// The agent.
    pub context: &'a Context,
    /// The pod.
    pub pod: &'a Pod,
    /// What the runtime has of it.
    pub observed: &'a ObservedPod,
    /// Its journal.
    pub log: &'a Log,
}

fn seconds_until(until: Instant) -> i64 {
    i64::try_from(
        until
            .saturating_duration_since(Instant::now())
            .as_secs_f64()
            .ceil() as u64,
    )
    .unwrap_or(i64::MAX)
}

impl Stopping<'_> {
    /// Stops one container within `grace` seconds; 0 means at once and without its hook.
    pub async fn container(&self, kill: &Kill, grace: i64) -> Result<(), String> {
        let until = Instant::now() + Duration::from_secs(u64::try_from(grace).unwrap_or(0));
        self.hook(kill, until, grace > 0).await;
        self.signal(
            kill,
            if grace > 0 {
                seconds_until(until).max(FLOOR)
            } else {
                0
            },
        )
        .await
    }

    fn runs(&self, id: &str) -> bool {
        self.observed
            .containers
            .iter()
            .any(|c| c.id == id && c.state == ContainerState::Running)
    }

    fn role(&self, name: &str) -> Role {
        pod::containers(self.pod)
            .into_iter()
            .find(|(_, c)| c.name == name)
            .map_or(Role::Regular, |(role, _)| role)
    }

    fn handler(&self, name: &str) -> Option<k8s_openapi::api::core::v1::LifecycleHandler> {
        pod::containers(self.pod)
            .into_iter()
            .find(|(_, c)| c.name == name)
            .and_then(|(_, c)| c.lifecycle.as_ref()?.pre_stop.clone())
    }

    /// Says that the container is stopped and runs its preStop hook. A hook that fails is reported and
    /// stops nothing.
    async fn hook(&self, kill: &Kill, until: Instant, wanted: bool) {
        let path = self.role(&kill.name).field_path(&kill.name);
        self.context.events.pod(
            self.pod,
            Some(path.clone()),
            Kind::Normal,
            "Killing",
            kill.message.clone(),
        );
        let Some(handler) = self
            .handler(&kill.name)
            .filter(|_| wanted && self.runs(&kill.id))
        else {
            return;
        };
        let ips = self
            .observed
            .sandboxes
            .first()
            .map(|s| s.ips.clone())
            .unwrap_or_default();
        let run = async {
            let all = pod::containers(self.pod);
            let container = all
                .iter()
                .find(|(_, c)| c.name == kill.name)
                .ok_or("the container is not in the pod's spec any more")?;
            let hook = hooks::run(
                self.context,
                self.pod,
                &container.1,
                &handler,
                &kill.id,
                ips.first().map(String::as_str),
            );
            tokio::time::timeout_at(until, hook)
                .await
                .map_err(|_| "it did not end within the grace period".to_owned())?
        };
        if let Err(error) = self.log.step(Step::PreStop, &kill.name, run).await {
            tracing::info!(container = kill.name, error, "the preStop hook failed");
            self.context.events.pod(
                self.pod,
                Some(path),
                Kind::Warning,
                "FailedPreStopHook",
                "PreStopHook failed",
            );
            // It was the hook's last word: the container's end does not wait for a second try.
            self.log.close(Step::PreStop, &kill.name);
        }
    }

    async fn signal(&self, kill: &Kill, grace: i64) -> Result<(), String> {
        let stop = async {
            let result = self.context.runtime.stop_container(&kill.id, grace).await;
            result.map_err(|e| format!("container {} cannot be stopped: {e}", kill.name))
        };
        self.log.step(Step::Stop, &kill.name, stop).await
    }

    /// Stops all containers at once, each sidecar when the regular containers and the sidecars after it
    /// have ended or the grace is over, then every sandbox.
    pub async fn pod(&self, ending: &mut Ending) -> Result<(), String> {
        let until = ending.until.unwrap_or_else(Instant::now);
        let all = pod::containers(self.pod);
        let order = |name: &str| {
            all.iter()
                .position(|(role, c)| *role == Role::Sidecar && c.name == name)
        };
        let kill = |c: &observed::Container| Kill {
            id: c.id.clone(),
            name: c.name.clone(),
            message: format!("Stopping container {}", c.name),
            grace: None,
        };
        let live: Vec<(Option<usize>, Kill)> = self
            .observed
            .live()
            .map(|c| (order(&c.name), kill(c)))
            .collect();
        // Places of those that are still there; regular containers count as the last of all.
        let places: Vec<usize> = live
            .iter()
            .map(|(place, _)| place.unwrap_or(usize::MAX))
            .collect();
        let (left, _) = watch::channel(places);
        let hooked = ending.hooked.clone();
        ending.hooked.extend(live.iter().map(|(_, k)| k.id.clone()));
        let each = live.iter().map(|(place, kill)| {
            let (left, hooked) = (&left, &hooked);
            async move {
                self.hook(kill, until, !hooked.contains(&kill.id)).await;
                if let Some(place) = place {
                    let mut others = left.subscribe();
                    // The sender is ours: it does not go away. Past the deadline nobody waits.
                    let _ = tokio::time::timeout_at(
                        until,
                        others.wait_for(|left| left.iter().all(|p| p <= place)),
                    )
                    .await;
                }
                let result = self.signal(kill, seconds_until(until).max(FLOOR)).await;
                left.send_modify(|left| {
                    if let Some(at) = left.iter().position(|p| *p == place.unwrap_or(usize::MAX)) {
                        left.remove(at);
                    }
                });
                result
            }
        });
        futures::future::join_all(each)
            .await
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?;
        if self.observed.sandboxes.is_empty() {
            return Ok(());
        }
        self.log.begin(Step::StopSandbox, "");
        for sandbox in &self.observed.sandboxes {
            if let Err(error) = self.context.runtime.stop_sandbox(&sandbox.id).await {
                let error = format!("the sandbox {} cannot be stopped: {error}", sandbox.id);
                self.log
                    .end(Step::StopSandbox, "", Progress::Failed(error.clone()));
                return Err(error);
            }
        }
        self.log.end(Step::StopSandbox, "", Progress::Done);
        Ok(())
    }
}
