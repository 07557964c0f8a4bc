//! Faults of the simulated world, and its external changes. Faults: an API that freezes, rejects
//! connections or loses watches, a runtime that restarts, events that are lost, late or duplicated.
//! Changes: manifests, Nodes, ConfigMaps and finalizers.

use super::*;

/// The client's timeout for a request to a frozen API.
const DEADLINE: Duration = Duration::from_secs(30);
/// The window of the limits of `call_limit`.
const MINUTE: Duration = Duration::from_secs(60);

/// The maximum number of calls of one kind for one pod within a minute, whatever happens to the pod.
/// Hot loops of earlier versions exceeded it a hundredfold.
fn call_limit(what: &str) -> usize {
    match what {
        "observe" => 200,
        "patch_status" => 100,
        // A pod with three containers, four probes and four volumes has thirty different events.
        "post_event" => 120,
        "delete" => 12,
        _ => 60,
    }
}

impl State {
    /// Counts a request or call for a pod and checks it against its budget.
    pub(super) fn count_call(&mut self, what: &'static str, uid: &str) {
        let now = Instant::now();
        let spent = self.recent_calls.entry((uid.to_owned(), what)).or_default();
        spent.push_back(now);
        while spent.front().is_some_and(|first| *first + MINUTE < now) {
            spent.pop_front();
        }
        let count = spent.len();
        let most = self.max_calls.entry(what).or_default();
        *most = count.max(*most);
        if count == call_limit(what) + 1 {
            self.report_violation(format!("{uid}: {count} times {what} within a minute"));
        }
    }

    /// The UID under which the runtime knows the pod of an object. For a mirror pod this is the UID of the static pod.
    pub(super) fn runtime_uid(&self, uid: &str) -> String {
        let mirrored = self
            .pods
            .get(uid)
            .and_then(|pod| pod["metadata"]["annotations"][pod::MIRROR].as_str());
        mirrored.unwrap_or(uid).to_owned()
    }

    /// Whether a source has this pod, or had this static pod. An operation that began while the source had
    /// it may finish a little later.
    pub(super) fn is_known(&self, uid: &str) -> bool {
        self.pods.contains_key(uid) || self.static_uids.contains(uid)
    }

    /// Whether the watch delivers changes now.
    pub(super) fn watch_delivers(&self) -> bool {
        !self.frozen && !self.is_watch_stalled
    }

    /// Sends a pod's object to the watch.
    pub(super) fn publish(&mut self, uid: &str) {
        self.revision += 1;
        let revision = self.revision.to_string();
        let watch_delivers = self.watch_delivers();
        let Some(pod) = self.pods.get_mut(uid) else {
            return;
        };
        pod["metadata"]["resourceVersion"] = revision.into();
        if let (Some(watch), true) = (&self.watcher, watch_delivers) {
            watch.apply(object(pod));
        }
        self.node.note_created(uid);
        if watch_delivers {
            self.note_terminal_status_delivered(uid);
        }
    }

    /// Whether a container of a pod may be started: the pod is wanted, or the watch has not yet delivered its removal.
    pub(super) fn may_start(&self, uid: &str) -> bool {
        let is_known = self.is_known(uid) && !self.has_external_terminal_status(uid);
        is_known || self.is_just_removed(uid)
    }

    /// Restarts the watch with a list, as after its resource version was compacted.
    pub(super) fn relist(&mut self) {
        if self.watch_delivers() {
            self.all_is_seen();
            self.note_all_terminal_statuses_delivered();
        }
        if let Some(watch) = self.watcher.clone().filter(|_| self.watch_delivers()) {
            watch.replace(self.pods.values().map(object).collect());
        }
    }

    /// Sends a runtime event about a pod's sandbox or container to the subscriber. With faults the event
    /// may be lost, late or sent twice.
    pub(super) fn send_event(&mut self, uid: &str, id: &str, kind: EventKind) {
        let fate = if self.faults { self.pick(8) } else { 7 };
        let Some(subscriber) = self.event_subscriber.clone() else {
            return;
        };
        let event = RuntimeEvent {
            pod: uid.to_owned(),
            id: id.to_owned(),
            kind,
        };
        match fate {
            0 => {}
            1 => {
                let late = Duration::from_millis(self.pick(4000));
                tokio::spawn(async move {
                    tokio::time::sleep(late).await;
                    let _ = subscriber.try_send(event);
                });
            }
            2 => {
                let _ = subscriber.try_send(event.clone());
                let _ = subscriber.try_send(event);
            }
            _ => _ = subscriber.try_send(event),
        }
    }
}

/// Deserialises a pod's object.
pub(super) fn object(pod: &Value) -> Pod {
    serde_json::from_value(pod.clone()).unwrap()
}

impl World {
    /// Waits for the API to serve a request. True: the request is served but its response is lost. An
    /// error: the request is not served.
    pub(super) async fn request(&self) -> Result<bool, ApiFailure> {
        if self.state().refuses {
            self.state().answers.record(None);
            return Err(ApiFailure::Unavailable("connection refused".into()));
        }
        let fault = self.fault().await;
        if self.state().outage.is_api_down {
            return Err(ApiFailure::Unavailable("connection refused".into()));
        }
        let begun = Instant::now();
        while self.state().frozen {
            if begun.elapsed() >= DEADLINE {
                return Err(ApiFailure::Timeout("no response within 30s".into()));
            }
            self.sleep(Duration::from_secs(1)).await;
        }
        match fault {
            Fault::None => Ok(false),
            Fault::After | Fault::Hang => Ok(true),
            Fault::Before => Err(match self.pick(6) {
                0 => ApiFailure::Forbidden("injected 403".into()),
                1 => ApiFailure::Conflict("injected 409".into()),
                2 => ApiFailure::Invalid("injected 422".into()),
                3 => ApiFailure::TooManyRequests {
                    message: "injected 429".into(),
                    retry_after: Some(Duration::from_secs(1)),
                },
                4 => ApiFailure::Unavailable("injected 500".into()),
                _ => ApiFailure::Timeout("injected timeout".into()),
            }),
        }
    }

    /// The number of requests to create a pod within the last minute.
    pub fn creations(&self, name: &str) -> usize {
        let state = self.state();
        let spent = state.recent_calls.get(&(name.to_owned(), "create"));
        spent.map_or(0, VecDeque::len)
    }

    /// Makes the API refuse connections; or ends that, and the agent has seen another successful response.
    pub fn refuse(&self, refuses: bool) {
        let mut state = self.state();
        state.refuses = refuses;
        state.answers.record((!refuses).then_some(200));
    }

    /// Makes the API stop answering, or answer again.
    pub fn freeze(&self, frozen: bool) {
        let mut state = self.state();
        state.frozen = frozen;
        state.relist();
    }

    /// Makes the watch stop delivering changes without an error, or restart.
    pub fn stall_watch(&self, stalled: bool) {
        let mut state = self.state();
        state.is_watch_stalled = stalled;
        state.relist();
    }

    /// Stops the runtime, or starts it again with all its state. Its event stream ends in both cases.
    pub fn set_runtime_down(&self, down: bool) {
        let mut state = self.state();
        state.is_runtime_down = down;
        state.event_subscriber = None;
    }

    /// Sets the machine's clock forward or back, by minutes or days.
    pub fn set_clock(&self) {
        let minutes = [-600, -30, -1, 1, 20, 5000][usize::try_from(self.pick(6)).unwrap()];
        self.1.set_by(SignedDuration::from_mins(minutes));
    }

    /// Writes a new version of some static pod's manifest, or a first one.
    pub fn change_some_manifest(&self) {
        let mut state = self.state();
        let name = format!("s{}", state.pick(2));
        state.next += 1;
        let (uid, grace) = (format!("{name}-v{}", state.next), 1 + state.pick(8));
        let (sidecar, policy) = (state.pick(2) == 0, state.some_policy());
        let mut pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": format!("{name}-node"), "namespace": "ns", "uid": uid, "annotations": {pod::SOURCE: "file", pod::HASH: uid}},
            "spec": {"nodeName": "node", "restartPolicy": policy, "terminationGracePeriodSeconds": grace,
                     "containers": [{"name": "c0", "image": "i:1", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}], "volumes": [{"name": "v", "emptyDir": {}}]}});
        if sidecar {
            pod["spec"]["initContainers"] =
                json!([{"name": "s0", "image": "i:1", "restartPolicy": "Always"}]);
        }
        state.static_uids.insert(uid);
        state.statics.insert(name, pod);
        state.publish_statics();
    }

    /// Removes a manifest and writes it again before the agent lists the directory.
    pub fn rewrite_manifest(&self, name: &str) {
        let mut state = self.state();
        let uid = state.statics[name]["metadata"]["uid"].clone();
        let uid = uid.as_str().unwrap().to_owned();
        *state.appearances.entry(uid).or_default() += 1;
        state.publish_statics();
    }

    /// Removes some manifest, rewrites one, or restores a removed one unchanged.
    pub fn move_some_manifest(&self) {
        let rewritten = {
            let mut state = self.state();
            let rewrites = state.draw(3) == 0;
            state.statics.keys().next().filter(|_| rewrites).cloned()
        };
        if let Some(name) = rewritten {
            return self.rewrite_manifest(&name);
        }
        let mut state = self.state();
        if state.pick(2) == 0 {
            let removed = state.statics.pop_first();
            state.parked.extend(removed);
        } else if let Some((name, pod)) = state.parked.pop_first() {
            state.statics.entry(name).or_insert(pod);
        }
        state.publish_statics();
    }

    /// Removes the finalizers of some pod.
    pub fn drop_some_finalizer(&self) {
        let mut state = self.state();
        let held: Vec<String> = state
            .pods
            .iter()
            .filter(|(_, pod)| !pod["metadata"]["finalizers"].is_null())
            .map(|(uid, _)| uid.clone())
            .collect();
        let place = usize::try_from(state.pick(held.len() as u64)).unwrap();
        if let Some(uid) = held.get(place) {
            state.drop_finalizer(uid);
        }
    }

    /// Removes the finalizers of all pods, at the end of a run.
    pub fn drop_all_finalizers(&self) {
        let mut state = self.state();
        let uids: Vec<String> = state.pods.keys().cloned().collect();
        uids.iter().for_each(|uid| state.drop_finalizer(uid));
    }

    /// Removes all manifests of static pods.
    pub fn remove_all_manifests(&self) {
        let mut state = self.state();
        state.statics.clear();
        state.publish_statics();
    }
}

impl World {
    /// Counts a call about a container or sandbox for its pod.
    pub(super) fn count_call_on(&self, what: &'static str, id: &str) {
        let mut state = self.state();
        let of_box = state.sandboxes.get(id).map(|b| b.uid.clone());
        if let Some(uid) = of_box.or_else(|| state.owners.get(id).cloned()) {
            state.count_call(what, &uid);
        }
    }
}

impl State {
    /// The directories of a pod are removed. If `keeps`, the pod is a static pod that starts again, and its
    /// logs are kept.
    pub(super) fn keep_logs(&mut self, uid: &str, keeps: bool) {
        if !keeps {
            self.kept_logs.retain(|(of, _), _| of != uid);
            return;
        }
        let started = self.started.iter().filter(|(of, ..)| of == uid);
        for (uid, name, attempt) in started.cloned().collect::<Vec<_>>() {
            let kept = self.kept_logs.entry((uid, name)).or_default();
            *kept = attempt.max(*kept);
        }
    }

    /// The world drops all state of a pod. If a static pod with this UID returns, its restart counts begin at 0.
    pub(super) fn forget(&mut self, uid: &str) {
        self.started.retain(|(of, ..)| of != uid);
        self.finished.retain(|(of, _), _| of != uid);
        self.ran.remove(uid);
        self.ended.remove(uid);
        if self.static_uids.contains(uid) {
            self.dropped_statics.insert(uid.to_owned());
            self.reset_terminal_state(uid);
        }
    }

    /// Resets the terminal state of a static pod: a new agent is not bound by the status that an earlier agent wrote.
    fn reset_terminal_state(&mut self, uid: &str) {
        self.ended.remove(uid);
        let mirrors: Vec<String> = self.pods.keys().cloned().collect();
        for mirror in mirrors {
            if self.runtime_uid(&mirror) == uid {
                self.final_phase.remove(&mirror);
            }
        }
    }

    /// A new agent starts.
    pub(super) fn begin_agent(&mut self) {
        for uid in self.static_uids.clone() {
            match self.containers.values().any(|c| c.uid == uid) {
                true => self.reset_terminal_state(&uid),
                false => self.forget(&uid),
            }
        }
    }

    /// The status of an object that the pod must continue from. Empty for a static pod whose state was dropped.
    pub(super) fn status_to_continue(&mut self, uid: &str, earlier: Value) -> Value {
        if !self.dropped_statics.contains(uid) {
            return earlier;
        }
        if self.containers.values().any(|c| c.uid == uid) {
            self.dropped_statics.remove(uid);
        }
        let mut earlier = earlier;
        earlier["status"] = json!({});
        earlier
    }

    fn drop_finalizer(&mut self, uid: &str) {
        let Some(pod) = self.pods.get_mut(uid) else {
            return;
        };
        pod["metadata"]["finalizers"] = Value::Null;
        if pod["metadata"]["deletionGracePeriodSeconds"] == 0 {
            self.remove(uid);
        } else {
            self.publish(uid);
        }
    }

    pub(super) fn publish_statics(&self) {
        let pods = self.statics.values().map(|pod| Arc::new(object(pod)));
        if let Some(sender) = &self.statics_sender {
            let pods: Vec<Arc<Pod>> = pods.collect();
            let appearance = |pod: &Arc<Pod>| {
                let uid = pod::uid(pod).to_owned();
                let times = self.appearances.get(&uid).copied();
                (uid, times.unwrap_or_default())
            };
            let appearances = pods.iter().map(appearance).collect();
            sender.send_replace(Statics::of(pods).with_appearances(appearances));
        }
    }
}
