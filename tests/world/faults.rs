//! What goes wrong in the simulated world, and what changes in it from outside: an API that freezes, refuses and loses
//! watches, a runtime that restarts, hints that are lost, late or doubled, manifests, Nodes, ConfigMaps and finalizers.

use super::*;

/// How long a client waits for a frozen API.
const DEADLINE: Duration = Duration::from_secs(30);
/// Every kind of request or call may be made so often for one pod within a minute.
const MINUTE: Duration = Duration::from_secs(60);

/// How often one kind of request or call may be made for one pod within a minute, whatever happens to the pod. What the
/// loops of the past did is a hundred times that.
fn budget(what: &str) -> usize {
    match what {
        "observe" => 200,
        "patch_status" => 100,
        // A pod with three containers, four probes and four volumes has thirty different things to say.
        "post_event" => 120,
        "delete" => 12,
        _ => 60,
    }
}

impl State {
    /// Counts a request or a call about a pod, and holds it to its budget.
    pub(super) fn spend(&mut self, what: &'static str, uid: &str) {
        let now = Instant::now();
        let spent = self.spent.entry((uid.to_owned(), what)).or_default();
        spent.push_back(now);
        while spent.front().is_some_and(|first| *first + MINUTE < now) {
            spent.pop_front();
        }
        let count = spent.len();
        let most = self.most.entry(what).or_default();
        *most = count.max(*most);
        if count == budget(what) + 1 {
            self.deny(format!("{uid}: {count} times {what} within a minute"));
        }
    }

    /// The uid under which the runtime has the pod of an object: that of the static pod for its mirror.
    pub(super) fn runtime_uid(&self, uid: &str) -> String {
        let mirrored = self
            .pods
            .get(uid)
            .and_then(|pod| pod["metadata"]["annotations"][pod::MIRROR].as_str());
        mirrored.unwrap_or(uid).to_owned()
    }

    /// Whether some source wants this pod, or has wanted it: what was begun then may end a little later.
    pub(super) fn is_known(&self, uid: &str) -> bool {
        self.pods.contains_key(uid) || self.static_uids.contains(uid)
    }

    /// Whether the watch brings changes now.
    fn hears(&self) -> bool {
        !self.frozen && !self.deaf
    }

    /// Hands a pod's object to the watch.
    pub(super) fn publish(&mut self, uid: &str) {
        self.revision += 1;
        let revision = self.revision.to_string();
        let hears = self.hears();
        let Some(pod) = self.pods.get_mut(uid) else {
            return;
        };
        pod["metadata"]["resourceVersion"] = revision.into();
        if let (Some(writer), true) = (&self.watcher, hears) {
            writer.apply(object(pod));
        }
    }

    /// Removes a pod's object.
    pub(super) fn remove(&mut self, uid: &str) {
        self.revision += 1;
        let Some(pod) = self.pods.remove(uid) else {
            return;
        };
        if let (Some(writer), true) = (&self.watcher, self.hears()) {
            writer.delete(&object(&pod));
        }
    }

    /// The watch begins anew, after what it has missed was compacted away.
    pub(super) fn list_anew(&mut self) {
        if let Some(writer) = self.watcher.clone().filter(|_| self.hears()) {
            writer.replace(self.pods.values().map(object).collect());
        }
    }

    /// Says to whoever listens what has happened to a pod's sandbox or container. With faults it may be lost, late or said
    /// twice.
    pub(super) fn hint(&mut self, uid: &str, id: &str, kind: EventKind) {
        let fate = if self.faults { self.pick(8) } else { 7 };
        let Some(hinted) = self.hinted.clone() else {
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
                    let _ = hinted.try_send(event);
                });
            }
            2 => {
                let _ = hinted.try_send(event.clone());
                let _ = hinted.try_send(event);
            }
            _ => _ = hinted.try_send(event),
        }
    }
}

/// A pod's object with its type.
pub(super) fn object(pod: &Value) -> Pod {
    serde_json::from_value(pod.clone()).unwrap()
}

fn node(version: u64, zone: &str, tainted: bool) -> Node {
    let taints = match tainted {
        true => json!([{"key": "sim", "effect": "NoSchedule"}]),
        false => json!(null),
    };
    serde_json::from_value(json!({
        "metadata": {"name": "node", "uid": "node", "resourceVersion": version.to_string(), "labels": {"zone": zone, "kubernetes.io/os": "linux"}},
        "spec": {"taints": taints}
    }))
    .unwrap()
}

impl World {
    /// A request to the API: waits as long as it takes. Whether the answer is to be lost after the request was served;
    /// an error is one that is not served.
    pub(super) async fn request(&self) -> Result<bool, ApiFailure> {
        let fault = self.fault().await;
        let begun = Instant::now();
        while self.state().frozen {
            if begun.elapsed() >= DEADLINE {
                return Err(ApiFailure::Timeout("not answered within 30s".into()));
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

    /// The API answers nothing, or answers again.
    pub fn freeze(&self, frozen: bool) {
        let mut state = self.state();
        state.frozen = frozen;
        state.list_anew();
    }

    /// The watch is silently dead, or begins anew.
    pub fn deafen(&self, deaf: bool) {
        let mut state = self.state();
        state.deaf = deaf;
        state.list_anew();
    }

    /// The runtime goes down, or comes back with everything it had; its events end with it.
    pub fn set_runtime_down(&self, down: bool) {
        let mut state = self.state();
        state.down = down;
        state.hinted = None;
    }

    /// The Node gets another label or taint.
    pub fn change_node(&self) {
        let mut state = self.state();
        state.revision += 1;
        let zone = ["a", "a", "b"][usize::try_from(state.pick(3)).unwrap()];
        let tainted = state.pick(2) == 0;
        state.node = node(state.revision, zone, tainted);
        if let Some(context) = &state.context {
            context.node.see(state.node.clone());
        }
    }

    /// The machine's clock is set forward or back, by minutes or days.
    pub fn set_clock(&self) {
        let minutes = [-600, -30, -1, 1, 20, 5000][usize::try_from(self.pick(6)).unwrap()];
        self.1.set_by(SignedDuration::from_mins(minutes));
    }

    /// Content of a ConfigMap that pods may use.
    pub fn change_some_map(&self) {
        let told: Vec<OnChange> = {
            let mut state = self.state();
            let name = format!("m{}", state.pick(4));
            *state.maps.entry(name.clone()).or_insert(1) += 1;
            let users = state.followers.values();
            users
                .filter(|(names, _)| names.contains(&name))
                .map(|(_, news)| Arc::clone(news))
                .collect()
        };
        told.iter().for_each(|news| news());
    }

    /// Another version of a static pod's manifest, or a first one.
    pub fn change_some_manifest(&self) {
        let mut state = self.state();
        let name = format!("s{}", state.pick(2));
        state.next += 1;
        let (uid, grace) = (format!("{name}-v{}", state.next), 1 + state.pick(8));
        let sidecar = state.pick(2) == 0;
        let mut pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": format!("{name}-node"), "namespace": "ns", "uid": uid, "annotations": {pod::SOURCE: "file", pod::HASH: uid}},
            "spec": {"nodeName": "node", "restartPolicy": "Always", "terminationGracePeriodSeconds": grace,
                     "containers": [{"name": "c0", "image": "i:1", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}], "volumes": [{"name": "v", "emptyDir": {}}]}});
        if sidecar {
            pod["spec"]["initContainers"] =
                json!([{"name": "s0", "image": "i:1", "restartPolicy": "Always"}]);
        }
        state.static_uids.insert(uid);
        state.statics.insert(name, pod);
        state.publish_statics();
    }

    /// A manifest is removed.
    pub fn remove_some_manifest(&self) {
        let mut state = self.state();
        state.statics.pop_first();
        state.publish_statics();
    }

    /// Whoever has put a finalizer on a pod takes it away.
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

    /// The end: nothing holds a pod any more.
    pub fn drop_all_finalizers(&self) {
        let mut state = self.state();
        let uids: Vec<String> = state.pods.keys().cloned().collect();
        uids.iter().for_each(|uid| state.drop_finalizer(uid));
    }

    /// No static pods are wanted any more.
    pub fn remove_all_manifests(&self) {
        let mut state = self.state();
        state.statics.clear();
        state.publish_statics();
    }
}

impl State {
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
            sender.send_replace(Statics::of(pods.collect()));
        }
    }
}
