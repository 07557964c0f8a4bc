//! The simulated machine and its network.

use super::*;

/// Containers answer probes; with faults sometimes late or with an error.
#[async_trait]
impl Dialer for World {
    async fn http(&self, request: &Http, timeout: Duration) -> Result<Reply, HttpError> {
        self.hang_if_killed().await;
        let (faults, fate) = {
            let mut state = self.state();
            (state.faults, state.pick(8))
        };
        match fate {
            0 if faults => {
                self.sleep(timeout).await;
                Err(HttpError::Failed("deadline exceeded".into()))
            }
            1 if faults => Ok(Reply {
                status: 503,
                body: String::new(),
            }),
            _ => {
                // The path names the container, the host its pod.
                let mut state = self.state();
                *state.http_requests.entry(request.path.clone()).or_default() += 1;
                let (_, node_ips) = state.agent.as_ref().unwrap();
                let node = node_ips.borrow()[0].clone();
                let boxes: Vec<String> = state
                    .sandboxes
                    .iter()
                    .filter(|(_, b)| match b.sandbox.host_network {
                        true => node == request.host,
                        false => b.sandbox.ips.contains(&request.host),
                    })
                    .map(|(id, _)| id.clone())
                    .collect();
                let name = request.path.trim_start_matches('/');
                let probed = |c: &&ContainerEntry| {
                    c.container.name == name && boxes.contains(&c.container.sandbox)
                };
                let probed: Vec<&ContainerEntry> =
                    state.containers.values().filter(probed).collect();
                let runs = |c: &&ContainerEntry| c.container.state == ContainerState::Running;
                if !probed.iter().any(runs) {
                    return Err(HttpError::Failed("connection refused".into()));
                }
                // With host networking, the path identifies only the container's name: each container of this name
                // counts as probed.
                let ids: Vec<String> = probed.iter().map(|c| c.container.id.clone()).collect();
                state.probed.extend(ids);
                Ok(Reply {
                    status: 200,
                    body: String::new(),
                })
            }
        }
    }

    async fn tcp(&self, _: &str, _: u16, _: Duration) -> Result<(), String> {
        Ok(())
    }

    async fn grpc(&self, _: &str, _: u16, _: &str, _: Duration) -> Result<(), String> {
        Ok(())
    }
}

impl World {
    /// A call to the machine. With faults it fails before or after it takes effect, or hangs for minutes.
    async fn machine<T>(&self, act: impl FnOnce(&mut State) -> T) -> Result<T, HostError> {
        let fault = self.fault().await;
        if matches!(fault, Fault::Hang) {
            let seconds = 60 + self.pick(120);
            self.sleep(Duration::from_secs(seconds)).await;
        }
        if matches!(fault, Fault::Before) {
            return Err("injected".into());
        }
        let result = act(&mut self.state());
        match fault {
            Fault::After => Err("injected after success".into()),
            _ => Ok(result),
        }
    }
}

impl World {
    /// Sets up or refreshes a volume of this machine.
    async fn make_volume(
        &self,
        pod: &Pod,
        volume: &ResolvedVolume,
        files: Option<Files>,
    ) -> Result<(), Problem> {
        let version = files.and_then(|files| {
            let file = files.get("version")?;
            Some(String::from_utf8(file.content.clone()).unwrap())
        });
        self.machine(|s| {
            if let Some(version) = version {
                s.volume_versions
                    .insert((uid(pod), volume.volume.clone()), version);
            }
            if !s.dirs.contains(&uid(pod)) {
                s.report_violation(format!("{}: a volume without its directory", uid(pod)));
            }
            s.volumes.insert(uid(pod));
        })
        .await?;
        Ok(())
    }
}

fn uid(pod: &Pod) -> String {
    pod.metadata.uid.clone().unwrap()
}

#[async_trait]
impl PodHost for World {
    async fn ensure_cgroup(&self, pod: &Pod, _cpu_limit: bool) -> Result<String, HostError> {
        self.check_processors(pod);
        self.machine(|s| s.cgroups.insert(uid(pod))).await?;
        Ok("/kubepods".into())
    }

    fn cgroup_parent(&self, _: &Pod) -> String {
        "/kubepods".into()
    }

    fn memory_of_pod(&self, _: &Pod) -> Option<u64> {
        Some(0)
    }

    fn cgroup_of_all(&self) -> String {
        "/kubepods".into()
    }

    fn cgroup_path(&self, _: &Pod, _: Option<&str>) -> Option<String> {
        None
    }

    async fn user_mappings(
        &self,
        _: &Pod,
    ) -> Result<holdfast_core::pod::users::Mappings, HostError> {
        Err("no user namespaces here".into())
    }

    async fn make_directories(&self, pod: &Pod) -> Result<(), HostError> {
        if self.state().upkeep_fails(&uid(pod)) {
            return Err("no space left on device".into());
        }
        self.machine(|s| _ = s.dirs.insert(uid(pod))).await
    }

    async fn set_up_volume(
        &self,
        pod: &Pod,
        volume: &ResolvedVolume,
        files: Option<Files>,
    ) -> Result<(), Problem> {
        self.state()
            .count_call("set_up_volume", &format!("{} {}", uid(pod), volume.volume));
        if volume.volume == remote::REMOTE {
            Ok(self.mount_remote(&uid(pod)).await?)
        } else {
            self.make_volume(pod, volume, files).await
        }
    }

    async fn mount_source(
        &self,
        _: &Pod,
        _: &ResolvedVolume,
        _: &SubPath,
    ) -> Result<PathBuf, HostError> {
        Ok("/v".into())
    }

    async fn read_file(&self, _: &Pod, _: &ResolvedVolume, _: &str) -> Result<String, HostError> {
        Ok(String::new())
    }

    async fn write_hosts(&self, _: &Pod, _: String) -> Result<PathBuf, HostError> {
        self.machine(|_| "/h".into()).await
    }

    async fn termination_log(&self, _: &Pod, _: &str, _: u32) -> Result<PathBuf, HostError> {
        Ok("/t".into())
    }

    async fn termination_message(
        &self,
        _: &str,
        _: &holdfast_core::pod::observed::Container,
    ) -> Option<String> {
        None
    }

    async fn log_tail(&self, _: &Pod, _: &str, _: u32) -> Option<String> {
        None
    }

    async fn last_attempt(&self, pod: &Pod, name: &str) -> Result<Option<u32>, HostError> {
        let kept = (uid(pod), name.to_owned());
        Ok(self.state().kept_logs.get(&kept).copied())
    }

    async fn link_log(&self, _: &Pod, _: &str, _: u32, _: &str) -> Result<(), HostError> {
        Ok(())
    }

    async fn remove_instance(&self, _: &Pod, _: &str, _: u32, _: &str) -> Result<(), HostError> {
        self.machine(|_| ()).await
    }

    async fn log_sizes(&self, logs: &[Log]) -> Vec<Option<u64>> {
        logs.iter()
            .map(|log| self.size_of_log(&log.container))
            .collect()
    }

    async fn rotate_log(&self, log: &Log, _: usize, _: &str) -> Result<String, HostError> {
        self.log_was_moved(&log.container);
        Ok("l".into())
    }

    async fn compress_log(&self, log: &Log) -> Result<(), HostError> {
        self.compress_files_of(&log.container).await;
        Ok(())
    }

    async fn revert_log_rotation(&self, _: &Log, _: String) -> Result<(), HostError> {
        Ok(())
    }

    async fn volume_usage(
        &self,
        _: &Pod,
        _: &str,
        _: u64,
    ) -> Result<holdfast_sys::usage::Usage, HostError> {
        Ok(holdfast_sys::usage::Usage::default())
    }

    async fn log_usage(&self, _: &Pod, _: &str) -> Result<u64, HostError> {
        Ok(0)
    }

    async fn filesystem(&self, _: &Path) -> Result<Filesystem, HostError> {
        Ok(Filesystem {
            capacity: 100,
            available: 50,
        })
    }

    async fn unbind_sub_paths(&self, _: &str) -> Result<(), HostError> {
        self.machine(|_| ()).await
    }

    async fn tear_down_volumes(&self, uid: &str, _: OnRemoval<'_>) -> Result<(), HostError> {
        self.unmount_remote(uid).await?;
        self.machine(|s| {
            if !s.live(uid).is_empty() {
                s.report_violation(format!(
                    "{uid}: volumes were unmounted while a container is running"
                ));
            }
            s.volumes.remove(uid);
        })
        .await
    }

    async fn remove_cgroup(&self, pod: &Pod) -> Result<(), HostError> {
        self.machine(|s| _ = s.cgroups.remove(&uid(pod))).await
    }

    async fn remove_directories(&self, pod: &Pod, keeps_logs: bool) -> Result<(), HostError> {
        self.machine(|s| {
            s.keep_logs(&uid(pod), keeps_logs);
            if s.volumes.contains(&uid(pod)) || s.remote.holds(&uid(pod)) {
                s.report_violation(format!(
                    "{}: directories were removed while a volume is mounted",
                    uid(pod)
                ));
            }
            s.dirs.remove(&uid(pod));
            s.forget(&uid(pod));
        })
        .await
    }

    fn log_directory(&self, _: &Pod) -> PathBuf {
        "/l".into()
    }

    async fn node_hosts(&self) -> String {
        String::new()
    }

    async fn leftovers(&self) -> Vec<String> {
        let state = self.state();
        state.dirs.union(&state.cgroups).cloned().collect()
    }

    async fn unknown_volumes(&self, _uid: &str) -> u64 {
        0
    }

    async fn remove_leftovers(&self, uid: &str) -> Result<(), HostError> {
        self.wait_while_hung(uid).await;
        self.machine(|s| {
            // A static pod whose manifest returns meanwhile cannot start before this cleanup, so its old volumes
            // may be removed.
            let has_begun = s.volumes.contains(uid) || s.sandboxes.values().any(|b| b.uid == uid);
            let is_static = s.statics.values().any(|p| p["metadata"]["uid"] == *uid);
            if s.pods.contains_key(uid) || is_static && has_begun {
                s.report_violation(format!(
                    "{uid}: directories of a known pod were removed as orphaned"
                ));
            }
            s.volumes.remove(uid);
            s.dirs.remove(uid);
            s.cgroups.remove(uid);
            s.keep_logs(uid, false);
        })
        .await
    }
}
