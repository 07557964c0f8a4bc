//! The simulated runtime.

use super::*;

#[async_trait]
impl Runtime for World {
    async fn status(&self) -> Result<RuntimeStatus, RuntimeError> {
        self.call(|_| {
            Ok(RuntimeStatus {
                version: "fake://1".into(),
                ..RuntimeStatus::default()
            })
        })
        .await
    }

    async fn systemd_cgroups(&self) -> Result<Option<bool>, RuntimeError> {
        Ok(Some(false))
    }

    async fn list(&self) -> Result<Vec<ListedPod>, RuntimeError> {
        while self.state().outage.do_lists_hang {
            self.sleep(Duration::from_secs(1)).await;
        }
        self.call(|state| {
            let mut pods: BTreeMap<String, ObservedPod> = BTreeMap::new();
            let mut names = BTreeMap::new();
            for b in state.sandboxes.values() {
                names.insert(b.uid.clone(), b.name.clone());
                pods.entry(b.uid.clone())
                    .or_default()
                    .sandboxes
                    .push(b.sandbox.clone());
            }
            for c in state.containers.values() {
                pods.entry(c.uid.clone())
                    .or_default()
                    .containers
                    .push(c.container.clone());
            }
            let listed = |(uid, pod): (String, ObservedPod)| ListedPod {
                name: names.get(&uid).cloned().unwrap_or_default(),
                namespace: "ns".into(),
                fingerprint: pod.fingerprint(),
                is_live: pod.live().next().is_some() || pod.sandboxes.iter().any(|s| s.ready),
                uid,
            };
            Ok(pods.into_iter().map(listed).collect())
        })
        .await
    }

    async fn observe(&self, uid: &str) -> Result<ObservedPod, RuntimeError> {
        self.state().count_call("observe", uid);
        self.wait_while_hung(uid).await;
        self.call(|state| {
            let mut observed = ObservedPod {
                sandboxes: state
                    .sandboxes
                    .values()
                    .filter(|b| b.uid == uid)
                    .map(|b| b.sandbox.clone())
                    .collect(),
                containers: state
                    .containers
                    .values()
                    .filter(|c| c.uid == uid)
                    .map(|c| c.container.clone())
                    .collect(),
            };
            observed.sort();
            Ok(observed)
        })
        .await
    }

    async fn container(&self, id: &str, _: &str) -> Result<Option<Container>, RuntimeError> {
        self.call(|state| Ok(state.containers.get(id).map(|c| c.container.clone())))
            .await
    }

    async fn run_sandbox(
        &self,
        config: pb::PodSandboxConfig,
        _: &str,
    ) -> Result<String, RuntimeError> {
        let now = self.1.now();
        let metadata = config.metadata.clone().unwrap();
        self.state().count_call("run_sandbox", &metadata.uid);
        self.state().check_started(&metadata.uid, self.2);
        let linux = config.linux.and_then(|l| l.security_context);
        let host_network = linux
            .and_then(|s| s.namespace_options)
            .is_some_and(|n| n.network == pb::NamespaceMode::Node as i32);
        let wanted = restarts::SandboxRequest {
            uid: metadata.uid,
            name: metadata.name,
            attempt: metadata.attempt,
            host_network,
        };
        let mut making = restarts::SandboxCreation {
            world: self.clone(),
            wanted: wanted.clone(),
            is_done: false,
        };
        self.wait_for_network().await;
        let made = self.call(|state| {
            if !state.cgroups.contains(&wanted.uid) {
                state.report_violation(format!("{}: a sandbox without a cgroup", wanted.name));
            }
            state.insert_sandbox(wanted, now)
        });
        let made = made.await;
        making.is_done = true;
        made
    }

    async fn sandbox_ips(&self, id: &str) -> Result<Vec<String>, RuntimeError> {
        self.call(|state| {
            state
                .sandboxes
                .get(id)
                .map(|b| b.sandbox.ips.clone())
                .ok_or_else(|| missing("sandbox"))
        })
        .await
    }

    async fn stop_sandbox(&self, id: &str) -> Result<(), RuntimeError> {
        let now = self.1.now();
        self.count_call_on("stop_sandbox", id);
        self.check_hooks_of_sandbox(id);
        let _stopping = self.stopping(id);
        self.call(|state| {
            let inside: Vec<String> = state
                .containers
                .iter()
                .filter(|(_, c)| c.container.sandbox == id)
                .map(|(id, _)| id.clone())
                .collect();
            for container in inside {
                end(state, &container, 137, now);
            }
            if let Some(b) = state.sandboxes.get_mut(id) {
                b.sandbox.ready = false;
                let uid = b.uid.clone();
                state.send_event(&uid, id, EventKind::Stopped);
            }
            Ok(())
        })
        .await
    }

    async fn remove_sandbox(&self, id: &str) -> Result<(), RuntimeError> {
        self.count_call_on("remove_sandbox", id);
        self.call(|state| {
            if state
                .containers
                .values()
                .any(|c| c.container.sandbox == id && c.container.state == ContainerState::Running)
            {
                state.report_violation(format!(
                    "{id}: a sandbox was removed with a container running"
                ));
            }
            state.containers.retain(|_, c| c.container.sandbox != id);
            if let Some(removed) = state.sandboxes.remove(id) {
                state.send_event(&removed.uid, id, EventKind::Deleted);
            }
            Ok(())
        })
        .await
    }

    async fn create_container(
        &self,
        sandbox: &str,
        config: pb::ContainerConfig,
        _: pb::PodSandboxConfig,
    ) -> Result<String, RuntimeError> {
        let (now, uid) = (self.1.now(), config.labels[label::POD_UID].clone());
        self.state().count_call("create_container", &uid);
        self.check_not_stopping("a container is created", sandbox);
        self.call(|state| {
            let Some(b) = state.sandboxes.get(sandbox).filter(|b| b.sandbox.ready) else {
                return Err(missing("sandbox"));
            };
            let (uid, metadata) = (b.uid.clone(), config.metadata.clone().unwrap());
            if state.containers.values().any(|c| {
                c.uid == uid
                    && c.container.name == metadata.name
                    && c.container.attempt == metadata.attempt
                    && c.container.sandbox == sandbox
            }) {
                return Err(RuntimeError {
                    kind: RuntimeErrorKind::Failed,
                    code: None,
                    message: format!("failed to reserve container name {}", metadata.name),
                });
            }
            if !state.volumes.contains(&uid) {
                state.report_violation(format!(
                    "{}: a container without its volumes",
                    metadata.name
                ));
            }
            assert_eq!(config.labels[label::POD_UID], uid);
            let id = state.id("ctr");
            state.owners.insert(id.clone(), uid.clone());
            let resources = config.linux.and_then(|linux| linux.resources);
            let shares = resources.map_or(2, |r| r.cpu_shares);
            let container = Container {
                id: id.clone(),
                name: metadata.name,
                sandbox: sandbox.into(),
                attempt: metadata.attempt,
                state: ContainerState::Created,
                created_at: now,
                started_at: None,
                finished_at: None,
                exit_code: 0,
                reason: String::new(),
                message: String::new(),
                image: "i:1".into(),
                image_ref: "sha256:i".into(),
                hash: config
                    .annotations
                    .get(holdfast_core::pod::cri_config::annotation::HASH)
                    .cloned(),
                user: None,
                stop_signal: None,
                message_file: None,
            };
            state.send_event(&uid, &id, EventKind::Created);
            let made = ContainerEntry {
                uid,
                shares,
                container,
            };
            state.containers.insert(id.clone(), made);
            Ok(id)
        })
        .await
    }

    async fn start_container(&self, id: &str) -> Result<(), RuntimeError> {
        let now = self.1.now();
        self.count_call_on("start_container", id);
        let may_start = {
            let state = self.state();
            let owner = state.owners.get(id);
            owner.is_none_or(|uid| state.may_start(uid))
        };
        self.check_not_stopping("a container is started", &self.sandbox_of(id));
        self.call(|state| {
            let Some(c) = state.containers.get(id) else {
                return Err(missing("container"));
            };
            let (uid, name, attempt) =
                (c.uid.clone(), c.container.name.clone(), c.container.attempt);
            if c.container.state != ContainerState::Created {
                return Err(RuntimeError {
                    kind: RuntimeErrorKind::Failed,
                    code: None,
                    message: "already started".into(),
                });
            }
            let sandbox = state.sandboxes.get(&c.container.sandbox);
            if !sandbox.is_some_and(|b| b.sandbox.ready) {
                return Err(RuntimeError {
                    kind: RuntimeErrorKind::Failed,
                    code: None,
                    message: "sandbox container is not running".into(),
                });
            }
            state.check_not_over(&uid, &name);
            if state.live(&uid).iter().any(|other| other.name == name) {
                state.report_violation(format!("{uid}/{name}: two instances run concurrently"));
            }
            if !state.started.insert((uid.clone(), name.clone(), attempt))
                && !state
                    .sandboxes
                    .values()
                    .any(|b| b.uid == uid && b.sandbox.attempt > 0)
            {
                state
                    .report_violation(format!("{uid}/{name}: attempt {attempt} was started twice"));
            }
            if name.starts_with('c')
                && state.pods.get(&uid).is_some_and(|p| {
                    p["spec"]["initContainers"]
                        .as_array()
                        .is_some_and(|i| i.iter().any(|i| i["name"] == "i0"))
                })
            {
                let sandbox = state.containers[id].container.sandbox.clone();
                let initialised = state.containers.values().any(|c| {
                    c.uid == uid
                        && c.container.name == "i0"
                        && c.container.sandbox == sandbox
                        && c.container.state == ContainerState::Exited
                        && c.container.exit_code == 0
                });
                let ran = state.containers.values().any(|c| {
                    c.uid == uid
                        && c.container.name.starts_with('c')
                        && c.container.sandbox == sandbox
                        && c.container.started_at.is_some()
                });
                if !initialised && !ran {
                    state.report_violation(format!(
                        "{uid}/{name}: started before its init container had succeeded"
                    ));
                }
            }
            let c = state.containers.get_mut(id).unwrap();
            c.container.state = ContainerState::Running;
            c.container.started_at = Some(now);
            state
                .trace
                .push(format!("{now} started {uid}/{name} {id} {attempt}"));
            state.send_event(&uid, id, EventKind::Started);
            if state.final_phase.contains_key(&uid) {
                state
                    .report_violation(format!("{uid}/{name}: started after the pod's final phase"));
            }
            if !may_start {
                state.report_violation(format!("{uid}/{name}: started for a pod that was removed"));
            }
            if state.ended.contains(&uid) {
                state.report_violation(format!(
                    "{uid}/{name}: started after the pod's terminal phase was published"
                ));
            }
            state.ran.insert(uid);
            if name.starts_with('i') {
                end(state, id, 0, now);
            }
            Ok(())
        })
        .await
    }

    async fn stop_container(&self, id: &str, grace: i64) -> Result<(), RuntimeError> {
        let now = self.1.now();
        self.count_call_on("stop_container", id);
        self.check_hooks(id, grace);
        self.state().stop_requested.insert(id.to_owned());
        // Some processes take long to stop.
        let slow = {
            let mut state = self.state();
            let slow = state.pick(4) == 0;
            // The limit applies to running containers only.
            let runs = |c: &&ContainerEntry| c.container.state == ContainerState::Running;
            let container = state.containers.get(id).filter(runs);
            let uid = container.map(|c| c.uid.clone());
            if let Some(limit) = uid.map(|uid| state.grace_limit(&uid))
                && grace > limit
            {
                state.report_violation(format!(
                    "{id}: stopped with a grace period of {grace} s instead of at most {limit} s"
                ));
            }
            slow
        };
        if slow {
            self.sleep(Duration::from_secs(u64::try_from(grace).unwrap()))
                .await;
        }
        self.call(|state| {
            // Some exit with 0 on SIGTERM.
            let code = if slow {
                137
            } else {
                [143, 143, 0][usize::try_from(state.draw(3)).unwrap()]
            };
            end(state, id, code, now);
            Ok(())
        })
        .await
    }

    async fn update_container(
        &self,
        id: &str,
        resources: pb::LinuxContainerResources,
    ) -> Result<(), RuntimeError> {
        self.count_call_on("update_container", id);
        self.call(|state| {
            let container = state.containers.get_mut(id);
            container.ok_or_else(|| missing("container"))?.shares = resources.cpu_shares;
            Ok(())
        })
        .await
    }

    async fn update_sandbox(
        &self,
        _: &str,
        _: pb::LinuxPodSandboxConfig,
    ) -> Result<(), RuntimeError> {
        Err(RuntimeError {
            kind: RuntimeErrorKind::Unimplemented,
            code: None,
            message: "unknown method".into(),
        })
    }

    async fn memory_in_use(&self, _: &str) -> Result<u64, RuntimeError> {
        Ok(0)
    }

    async fn exec_url(&self, _: &str, _: &[String], _: Streams) -> Result<String, RuntimeError> {
        Err(RuntimeError {
            kind: RuntimeErrorKind::Unimplemented,
            code: None,
            message: "no streams here".into(),
        })
    }

    async fn attach_url(&self, _: &str, _: Streams) -> Result<String, RuntimeError> {
        Err(RuntimeError {
            kind: RuntimeErrorKind::Unimplemented,
            code: None,
            message: "no streams here".into(),
        })
    }

    async fn forward_url(&self, _: &str, _: &[i32]) -> Result<String, RuntimeError> {
        Err(RuntimeError {
            kind: RuntimeErrorKind::Unimplemented,
            code: None,
            message: "no streams here".into(),
        })
    }

    async fn exec(
        &self,
        id: &str,
        command: &[String],
        _: Option<Duration>,
    ) -> Result<Exec, RuntimeError> {
        self.count_call_on("exec", id);
        let _running = self.running_hook(id, command);
        {
            let mut state = self.state();
            let (agent_number, what) = (self.2, command.join(" "));
            let hooks = state.hooks.entry(id.to_owned()).or_default();
            // An agent cannot know which hooks ran before an earlier agent was killed.
            let entry = format!("{agent_number} {what}");
            let twice = hooks.contains(&entry);
            hooks.push(entry);
            if twice {
                let owner = state.owners.get(id).cloned().unwrap_or_default();
                let name = state
                    .pods
                    .get(&owner)
                    .map(|p| p["metadata"]["name"].to_string());
                state.report_violation(format!("{id} of {name:?}: the hook {what:?} ran twice"));
                drop(state);
                let name = name.unwrap_or_default();
                let last = self.last_decisions(name.trim_matches('"'));
                self.state().report_violation(last);
            }
        }
        // Some hooks take long.
        let slow = {
            let mut state = self.state();
            state.pick(4) == 0
        };
        if slow {
            let seconds = self.pick(25);
            self.sleep(Duration::from_secs(seconds)).await;
        }
        match command.last().map(String::as_str) {
            Some("hangs") => {
                // The hook runs until its container is killed.
                while self.is_running(id) {
                    self.sleep(Duration::from_millis(100)).await;
                }
            }
            Some("lasts") => self.sleep(Duration::from_secs(30)).await,
            _ => {}
        }
        let code = i32::from(command.last().is_some_and(|word| word == "fails"));
        self.call(|state| match state.containers.get(id) {
            Some(c) if c.container.state == ContainerState::Running => Ok(Exec {
                code,
                ..Exec::default()
            }),
            _ => Err(missing("container")),
        })
        .await
    }

    async fn layers(
        &self,
    ) -> Result<BTreeMap<(String, String), holdfast_cri::Layer>, RuntimeError> {
        Ok(BTreeMap::new())
    }

    async fn running(&self) -> Result<Vec<RunningContainer>, RuntimeError> {
        Ok(self.writers_of_logs())
    }

    async fn reopen_log(&self, _: &str) -> Result<(), RuntimeError> {
        Ok(())
    }

    async fn checkpoint(&self, _: &str, _: &str, _: Duration) -> Result<(), RuntimeError> {
        Ok(())
    }

    async fn remove_container(&self, id: &str) -> Result<(), RuntimeError> {
        self.count_call_on("remove_container", id);
        self.call(|state| {
            if state
                .containers
                .get(id)
                .is_some_and(|c| c.container.state == ContainerState::Running)
            {
                state.report_violation(format!("{id}: removed while it is running"));
            }
            state.containers.remove(id);
            Ok(())
        })
        .await
    }

    async fn image(&self, _: &str) -> Result<Option<Image>, RuntimeError> {
        self.call(|_| {
            Ok(Some(Image {
                id: "sha256:i".into(),
                ..Image::default()
            }))
        })
        .await
    }

    async fn images(&self) -> Result<Vec<Image>, RuntimeError> {
        Ok(vec![])
    }

    async fn image_inventory(&self) -> Result<ImageInventory, RuntimeError> {
        Ok(ImageInventory::default())
    }

    async fn remove_image(&self, _: &str) -> Result<(), RuntimeError> {
        Ok(())
    }

    async fn fetching(&self) -> Result<Fetching, RuntimeError> {
        Ok(Fetching::default())
    }

    async fn pull(
        &self,
        _: &str,
        _: Option<Credentials>,
        sandbox: &pb::PodSandboxConfig,
    ) -> Result<String, RuntimeError> {
        {
            let mut state = self.state();
            let uid = &sandbox.metadata.as_ref().unwrap().uid;
            assert!(
                state.cgroups.contains(uid),
                "a pull requires the pod's cgroup"
            );
            state.pulls.0 += 1;
            state.pulls.1 = state.pulls.1.max(state.pulls.0);
        }
        let result = self.call(|_| Ok("sha256:i".into())).await;
        self.state().pulls.0 -= 1;
        result
    }

    async fn events(&self) -> Result<mpsc::Receiver<RuntimeEvent>, RuntimeError> {
        if !self.state().has_events {
            return Err(RuntimeError {
                kind: RuntimeErrorKind::Unimplemented,
                code: None,
                message: String::new(),
            });
        }
        self.call(|state| {
            let (sender, events) = mpsc::channel(256);
            state.event_subscriber = Some(sender);
            Ok(events)
        })
        .await
    }
}
