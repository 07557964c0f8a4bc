//! A volume on a remote server that stops responding at times; then neither mount nor unmount returns.
//! A mount that has begun completes when the server responds again, even if its caller has given up.

use super::*;

/// The name of the volume in pods.
pub(super) const FAR: &str = "far";
/// The timeout of a host that limits its wait.
const PATIENCE: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(250);

/// The remote server, and the pods that have mounted its volume.
#[derive(Default)]
pub(super) struct Far {
    /// The server does not respond before this time.
    silent_until: Option<Instant>,
    /// Whether the host stops waiting after `PATIENCE` and returns an error.
    is_given_up: bool,
    /// Mounts in progress, by pod UID. False: an unmount was requested meanwhile, so the result is discarded.
    mounting: BTreeMap<String, bool>,
    mounted: BTreeSet<String>,
}

impl Far {
    fn is_silent(&self) -> bool {
        self.silent_until
            .is_some_and(|until| Instant::now() < until)
    }

    /// Whether the volume is mounted in a pod's directory, or a mount in progress will be.
    pub(super) fn holds(&self, uid: &str) -> bool {
        self.mounted.contains(uid) || self.mounting.get(uid) == Some(&true)
    }
}

/// Mounts the volume in a pod's first container.
pub(super) fn show_far(pod: &mut Value) {
    let spec = &mut pod["spec"];
    let mounts = spec["containers"][0]["volumeMounts"].as_array_mut();
    mounts
        .unwrap()
        .push(json!({"name": FAR, "mountPath": "/far"}));
    let volumes = spec["volumes"].as_array_mut().unwrap();
    volumes.push(json!({"name": FAR, "nfs": {"server": "far.example", "path": "/"}}));
}

fn unanswered() -> HostError {
    HostError::under_way("the kernel has not responded for a while; still waiting")
}

impl World {
    /// Makes the server unresponsive for a time. The host waits without limit, or, if `is_given_up`, up to `PATIENCE`.
    pub fn silence_far(&self, time: Duration, is_given_up: bool) {
        let mut state = self.state();
        let far = &mut state.far;
        (far.silent_until, far.is_given_up) = (Some(Instant::now() + time), is_given_up);
        self.note_locked(&mut state, "the far volume hangs");
    }

    fn note_locked(&self, state: &mut State, what: &str) {
        let at = self.1.now();
        state.trace.push(format!("{at} {what}"));
    }

    /// Makes the server respond again.
    pub fn answer_far(&self) {
        self.state().far.silent_until = None;
    }

    /// A long-running pod with this volume.
    pub fn create_far_pod(&self, name: &str) {
        self.create_steady_pod(name);
        let uid = self.uid(name);
        let mut state = self.state();
        show_far(state.pods.get_mut(&uid).unwrap());
        state.publish(&uid);
    }

    async fn while_silent(&self) {
        while self.state().far.is_silent() {
            tokio::time::sleep(STEP).await;
        }
    }

    /// Mounts the volume for a pod unless it is mounted already.
    pub(super) async fn mount_far(&self, uid: &str) -> Result<(), HostError> {
        self.only_alive().await;
        let is_given_up = {
            let mut state = self.state();
            if state.far.mounted.contains(uid) {
                return Ok(());
            }
            if state.far.mounting.contains_key(uid) {
                return Err(unanswered());
            }
            state.far.mounting.insert(uid.to_owned(), true);
            state.far.is_given_up
        };
        let (world, of) = (self.clone(), uid.to_owned());
        let mount = tokio::spawn(async move {
            world.while_silent().await;
            let mut state = world.state();
            let not_wanted = Err("the volume is no longer needed".into());
            if state.life != world.2 || state.far.mounting.remove(&of) != Some(true) {
                return not_wanted;
            }
            if !state.dirs.contains(&of) {
                state.deny(format!("{of}: a mount without its directory"));
            }
            state.volumes.insert(of.clone());
            state.far.mounted.insert(of);
            Ok(())
        });
        let mounted = match is_given_up {
            true => tokio::time::timeout(PATIENCE, mount).await,
            false => Ok(mount.await),
        };
        mounted.map_or_else(|_| Err(unanswered()), Result::unwrap)
    }

    /// Unmounts the volume of a pod. Cancels a mount in progress and waits until it has finished.
    pub(super) async fn unmount_far(&self, uid: &str) -> Result<(), HostError> {
        let begun = Instant::now();
        loop {
            self.only_alive().await;
            {
                let mut state = self.state();
                let is_silent = state.far.is_silent();
                let is_given_up = state.far.is_given_up && begun.elapsed() >= PATIENCE;
                let mounting = state
                    .far
                    .mounting
                    .get_mut(uid)
                    .map(|wanted| *wanted = false);
                if mounting.is_none() || is_given_up {
                    match state.far.mounted.contains(uid) && is_silent {
                        true if is_given_up => return Err(unanswered()),
                        true => {}
                        false => {
                            state.far.mounted.remove(uid);
                            return Ok(());
                        }
                    }
                }
            }
            tokio::time::sleep(STEP).await;
        }
    }

    /// Removes the mounts in progress of an agent that was killed.
    pub(super) fn no_task_waits_for_mounts(state: &mut State) {
        state.far.mounting.clear();
    }
}
