//! A volume on a remote server that stops responding at times; then neither mount nor unmount returns.
//! A mount that has begun completes when the server responds again, even if its caller has given up.

use super::*;

/// The name of the volume in pods.
pub(super) const REMOTE: &str = "far";
/// The timeout of a host that limits its wait.
const HOST_TIMEOUT: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(250);

/// The remote server, and the pods that have mounted its volume.
#[derive(Default)]
pub(super) struct RemoteVolume {
    /// The server does not respond before this time.
    hangs_until: Option<Instant>,
    /// Whether the host stops waiting after `HOST_TIMEOUT` and returns an error.
    stops_waiting: bool,
    /// Mounts in progress, by pod UID. False: an unmount was requested meanwhile, so the result is discarded.
    mounting: BTreeMap<String, bool>,
    mounted: BTreeSet<String>,
}

impl RemoteVolume {
    fn is_hanging(&self) -> bool {
        self.hangs_until.is_some_and(|until| Instant::now() < until)
    }

    /// Whether the volume is mounted in a pod's directory, or a mount in progress will be.
    pub(super) fn holds(&self, uid: &str) -> bool {
        self.mounted.contains(uid) || self.mounting.get(uid) == Some(&true)
    }
}

/// Mounts the volume in a pod's first container.
pub(super) fn add_remote_volume(pod: &mut Value) {
    let spec = &mut pod["spec"];
    let mounts = spec["containers"][0]["volumeMounts"].as_array_mut();
    mounts
        .unwrap()
        .push(json!({"name": REMOTE, "mountPath": "/far"}));
    let volumes = spec["volumes"].as_array_mut().unwrap();
    volumes.push(json!({"name": REMOTE, "nfs": {"server": "far.example", "path": "/"}}));
}

fn still_waiting_error() -> HostError {
    HostError::under_way("the kernel has not responded for a while; still waiting")
}

impl World {
    /// Makes the server unresponsive for a time. The host waits without limit, or, if `stops_waiting`, up to
    /// `HOST_TIMEOUT`.
    pub fn hang_remote(&self, time: Duration, stops_waiting: bool) {
        let mut state = self.state();
        let remote = &mut state.remote;
        (remote.hangs_until, remote.stops_waiting) = (Some(Instant::now() + time), stops_waiting);
        self.note_locked(&mut state, "the far volume hangs");
    }

    fn note_locked(&self, state: &mut State, what: &str) {
        let at = self.1.now();
        state.trace.push(format!("{at} {what}"));
    }

    /// Makes the server respond again.
    pub fn resume_remote(&self) {
        self.state().remote.hangs_until = None;
    }

    /// A long-running pod with this volume.
    pub fn create_remote_pod(&self, name: &str) {
        self.create_steady_pod(name);
        let uid = self.uid(name);
        let mut state = self.state();
        add_remote_volume(state.pods.get_mut(&uid).unwrap());
        state.publish(&uid);
    }

    async fn wait_while_hanging(&self) {
        while self.state().remote.is_hanging() {
            tokio::time::sleep(STEP).await;
        }
    }

    /// Mounts the volume for a pod unless it is mounted already.
    pub(super) async fn mount_remote(&self, uid: &str) -> Result<(), HostError> {
        self.hang_if_killed().await;
        let stops_waiting = {
            let mut state = self.state();
            if state.remote.mounted.contains(uid) {
                return Ok(());
            }
            if state.remote.mounting.contains_key(uid) {
                return Err(still_waiting_error());
            }
            state.remote.mounting.insert(uid.to_owned(), true);
            state.remote.stops_waiting
        };
        let (world, of) = (self.clone(), uid.to_owned());
        let mount = tokio::spawn(async move {
            world.wait_while_hanging().await;
            let mut state = world.state();
            let not_wanted = Err("the volume is no longer needed".into());
            if state.agent_number != world.2 || state.remote.mounting.remove(&of) != Some(true) {
                return not_wanted;
            }
            if !state.dirs.contains(&of) {
                state.report_violation(format!("{of}: a mount without its directory"));
            }
            state.volumes.insert(of.clone());
            state.remote.mounted.insert(of);
            Ok(())
        });
        let mounted = match stops_waiting {
            true => tokio::time::timeout(HOST_TIMEOUT, mount).await,
            false => Ok(mount.await),
        };
        mounted.map_or_else(|_| Err(still_waiting_error()), Result::unwrap)
    }

    /// Unmounts the volume of a pod. Cancels a mount in progress and waits until it has finished.
    pub(super) async fn unmount_remote(&self, uid: &str) -> Result<(), HostError> {
        let begun = Instant::now();
        loop {
            self.hang_if_killed().await;
            {
                let mut state = self.state();
                let is_hanging = state.remote.is_hanging();
                let stops_waiting = state.remote.stops_waiting && begun.elapsed() >= HOST_TIMEOUT;
                let mounting = state
                    .remote
                    .mounting
                    .get_mut(uid)
                    .map(|wanted| *wanted = false);
                if mounting.is_none() || stops_waiting {
                    match state.remote.mounted.contains(uid) && is_hanging {
                        true if stops_waiting => return Err(still_waiting_error()),
                        true => {}
                        false => {
                            state.remote.mounted.remove(uid);
                            return Ok(());
                        }
                    }
                }
            }
            tokio::time::sleep(STEP).await;
        }
    }

    /// Removes the mounts in progress of an agent that was killed.
    pub(super) fn drop_pending_mounts(state: &mut State) {
        state.remote.mounting.clear();
    }
}
