//! The simulated apiserver.

use k8s_openapi::ByteString;

use super::*;

use holdfast_core::volume::resize::Grown;
use holdfast_core::volume::resize::Resize;

#[async_trait]
impl PodApi for World {
    fn recovery(&self) -> Recovery {
        self.state().answers.subscribe()
    }

    async fn patch_status(&self, _: &str, _: &str, patch: &Value) -> Result<Pod, ApiFailure> {
        let uid = patch["metadata"]["uid"].as_str().unwrap().to_owned();
        self.state().count_call("patch_status", &uid);
        let lost = self.request().await?;
        self.annotate_before_write(&uid);
        let mut state = self.state();
        let Some(earlier) = state.pods.get(&uid).cloned() else {
            return Err(ApiFailure::NotFound("gone".into()));
        };
        let demanded = &patch["metadata"]["resourceVersion"];
        if !demanded.is_null() && *demanded != earlier["metadata"]["resourceVersion"] {
            return Err(ApiFailure::Conflict("the object has been modified".into()));
        }
        let pod = patch::merged(&earlier, patch)?;
        state.pods.insert(uid.clone(), pod.clone());
        let phase = pod["status"]["phase"].as_str().unwrap().to_owned();
        state.check_external_status_preserved(&uid, &pod);
        let runtime_uid = state.runtime_uid(&uid);
        let earlier = state.status_to_continue(&runtime_uid, earlier);
        let live: Vec<String> = state
            .live(&runtime_uid)
            .iter()
            .map(|c| c.name.clone())
            .collect();
        for id in invariants::ids(&pod) {
            let owner = state.owners.get(&id);
            if owner != Some(&runtime_uid) {
                let what = format!("{uid}: the status contains {id} of {owner:?}");
                state.report_violation(what);
            }
        }
        let is_ours = !state.external_terminal_statuses.contains_key(&uid);
        let live = live.as_slice();
        let after = invariants::After {
            pod: &pod,
            live,
            is_ours,
        };
        for broken in invariants::of_status(&earlier, &after, &state.probed) {
            state.report_violation(format!("{uid}: {broken}"));
        }
        let (at, status) = (self.1.now(), &pod["status"]);
        state
            .trace
            .push(format!("{at} status {uid} {phase} {status}"));
        let before = state.final_phase.get(&uid).cloned();
        if before.as_ref().is_some_and(|b| *b != phase) {
            state.report_violation(format!("{uid}: the final phase {before:?} became {phase}"));
        }
        // A patch of another field may be sent before its writer has seen the terminal phase in the stored status.
        let is_told = patch["status"]["phase"].is_string();
        if is_told && matches!(phase.as_str(), "Succeeded" | "Failed") {
            let reason = pod["status"]["reason"].as_str().unwrap_or_default();
            if nodes::REFUSALS.contains(&reason) {
                state.check_rejected(&uid, reason);
            }
            state.ended.insert(runtime_uid);
            state.final_phase.insert(uid.clone(), phase);
        }
        state.publish(&uid);
        if lost {
            return Err(ApiFailure::Timeout("the response was lost".into()));
        }
        Ok(serde_json::from_value(pod).unwrap())
    }

    async fn pod(&self, _: &str, name: &str) -> Result<Pod, ApiFailure> {
        self.request().await?;
        let mut state = self.state();
        let mut pods = state.pods.iter();
        let found = pods.find(|(_, pod)| pod["metadata"]["name"] == *name);
        let Some((uid, pod)) = found.map(|(uid, pod)| (uid.clone(), faults::object(pod))) else {
            return Err(ApiFailure::NotFound("gone".into()));
        };
        state.count_call("get_pod", &uid);
        Ok(pod)
    }

    async fn delete(&self, _: &str, _: &str, uid: &str) -> Result<(), ApiFailure> {
        self.state().count_call("delete", uid);
        let lost = self.request().await?;
        let mut state = self.state();
        let Some(pod) = state.pods.get(uid).cloned() else {
            return Err(ApiFailure::NotFound("gone".into()));
        };
        let is_mirror = state.runtime_uid(uid) != uid;
        if pod["metadata"]["deletionTimestamp"].is_null() && !is_mirror {
            state.report_violation(format!(
                "{uid}: the pod was deleted without a deletion request"
            ));
        }
        let held = !state.live(uid).is_empty()
            || state
                .sandboxes
                .iter()
                .any(|(id, b)| b.uid == uid && !state.late_sandboxes.contains(id))
            || state.volumes.contains(uid)
            || state.cgroups.contains(uid);
        if held {
            state.report_violation(format!(
                "{uid}: the finalizer was removed before all resources were released"
            ));
        }
        if pod["metadata"]["finalizers"].is_null() {
            state.remove(uid);
        } else {
            let pod = state.pods.get_mut(uid).unwrap();
            if pod["metadata"]["deletionTimestamp"].is_null() {
                pod["metadata"]["deletionTimestamp"] = self.1.now().to_string().into();
            }
            pod["metadata"]["deletionGracePeriodSeconds"] = 0.into();
            state.publish(uid);
        }
        match lost {
            true => Err(ApiFailure::Timeout("the response was lost".into())),
            false => Ok(()),
        }
    }

    async fn create(&self, mirror: &Pod) -> Result<Pod, ApiFailure> {
        let name = mirror.metadata.name.clone().unwrap();
        self.state().count_call("create", &name);
        let lost = self.request().await?;
        let mut state = self.state();
        if state.pods.values().any(|p| p["metadata"]["name"] == *name) {
            return Err(ApiFailure::AlreadyExists(format!("{name} exists")));
        }
        let uid = state.id("mirror");
        let mut pod = serde_json::to_value(mirror).unwrap();
        pod["metadata"]["uid"] = uid.clone().into();
        pod["metadata"]["generation"] = 1.into();
        pod["metadata"]["creationTimestamp"] = self.1.now().to_string().into();
        pod["status"] = json!({"phase": "Pending"});
        state.pods.insert(uid.clone(), pod);
        state.publish(&uid);
        match lost {
            true => Err(ApiFailure::Timeout("the response was lost".into())),
            false => Ok(faults::object(&state.pods[&uid])),
        }
    }

    async fn config_map(&self, _: &str, name: &str) -> Result<Arc<ConfigMap>, ApiFailure> {
        let version = self.version_of(name).await?;
        let map =
            json!({"metadata": {"name": name, "namespace": "ns"}, "data": {"version": version}});
        Ok(Arc::new(serde_json::from_value(map).unwrap()))
    }

    async fn secret(&self, _: &str, name: &str) -> Result<Arc<Secret>, ApiFailure> {
        let version = self.version_of(name).await?;
        let secret = Secret {
            data: Some([("version".into(), ByteString(version.into()))].into()),
            ..Secret::default()
        };
        Ok(Arc::new(secret))
    }

    async fn service_account(&self, _: &str, _: &str) -> Result<ServiceAccount, ApiFailure> {
        Err(ApiFailure::Other("no service accounts here".into()))
    }

    async fn token(&self, _: TokenFor<'_>) -> Result<Token, ApiFailure> {
        Err(ApiFailure::Other("no tokens here".into()))
    }

    async fn claimed(&self, _: &str, _: &str) -> Result<Binding, ApiFailure> {
        Err(ApiFailure::Other("no claims here".into()))
    }

    async fn publish_resize(&self, _: &Grown, _: Resize<'_>) -> Result<(), ApiFailure> {
        Ok(())
    }

    async fn device_claim(&self, _: &str, _: &str) -> Result<ResourceClaim, ApiFailure> {
        Err(ApiFailure::Other("no resource claims here".into()))
    }

    async fn csi_driver(&self, _: &str) -> Result<Option<CSIDriver>, ApiFailure> {
        Ok(None)
    }

    async fn attachment(&self, _: &str) -> Result<Attachment, ApiFailure> {
        Ok(Attachment::Awaited)
    }

    async fn trust_bundles(&self) -> Result<Vec<Arc<ClusterTrustBundle>>, ApiFailure> {
        Err(ApiFailure::Other("not here".into()))
    }

    async fn request_certificate(&self, _: CertificateFor<'_>) -> Result<String, ApiFailure> {
        Err(ApiFailure::Other("not here".into()))
    }

    async fn certificate(&self, _: &str, _: &str) -> Result<PodCertificateRequest, ApiFailure> {
        Err(ApiFailure::Other("not here".into()))
    }

    async fn post_event(&self, event: &Event) -> Result<(), ApiFailure> {
        let uid = event.involved_object.uid.clone().unwrap_or_default();
        self.state().count_call("post_event", &uid);
        let reason = event.reason.clone().unwrap_or_default();
        let about = (uid, reason);
        self.state().reasons.insert(about.clone());
        self.request().await?;
        self.state().outage.posted.push(about);
        Ok(())
    }

    async fn count_event(&self, _: &str, name: &str, _: &Value) -> Result<(), ApiFailure> {
        self.state().count_call("count_event", name);
        self.request().await.map(|_| ())
    }

    async fn runtime_handler(&self, class: &str) -> Result<String, ApiFailure> {
        if self.state().is_upkeep_failing {
            let why = format!("runtimeclasses.node.k8s.io {class:?} not found");
            return Err(ApiFailure::NotFound(why));
        }
        Ok(String::new())
    }

    fn follow(
        &self,
        _: &str,
        maps: &BTreeSet<String>,
        secrets: &BTreeSet<String>,
        on_change: &OnChange,
    ) -> Following {
        let mut state = self.state();
        state.next += 1;
        let token = state.next;
        state
            .subscriptions
            .insert(token, (maps | secrets, Arc::clone(on_change)));
        let world = Arc::downgrade(&self.0);
        Following::until(move || {
            if let Some(state) = world.upgrade() {
                state.lock().unwrap().subscriptions.remove(&token);
            }
        })
    }

    fn services(&self) -> Option<Vec<Arc<Service>>> {
        Some(vec![])
    }
}

impl World {
    /// The version of a ConfigMap or Secret, from the agent's cache. With faults the cache sometimes times out.
    async fn version_of(&self, name: &str) -> Result<String, ApiFailure> {
        self.hang_if_killed().await;
        let (late, version) = {
            let mut state = self.state();
            let late = state.faults && state.pick(24) == 0;
            (late, state.maps.get(name).copied().unwrap_or(1))
        };
        if late {
            self.sleep(Duration::from_secs(1)).await;
            return Err(ApiFailure::Timeout(
                "failed to sync configmap cache: timed out waiting for the condition".into(),
            ));
        }
        Ok(version.to_string())
    }
}
