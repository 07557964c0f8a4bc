//! The simulated API.

use super::*;

#[async_trait]
impl PodApi for World {
    async fn patch_status(&self, _: &str, _: &str, patch: &Value) -> Result<Pod, ApiFailure> {
        let fault = self.fault().await;
        if matches!(fault, Fault::Before) {
            return Err(ApiFailure::Other("injected".into()));
        }
        let mut state = self.state();
        let uid = patch["metadata"]["uid"].as_str().unwrap().to_owned();
        let earlier = state.pods.get(&uid).cloned();
        let Some(pod) = state.pods.get_mut(&uid) else {
            return Err(ApiFailure::NotFound("gone".into()));
        };
        for (key, value) in patch["status"]
            .as_object()
            .unwrap()
            .iter()
            .filter(|(k, _)| !k.starts_with('$'))
        {
            if key == "conditions" {
                let mut list = pod["status"]["conditions"]
                    .as_array()
                    .cloned()
                    .unwrap_or_default();
                for condition in value.as_array().unwrap() {
                    list.retain(|c| c["type"] != condition["type"]);
                    let mut condition = condition.clone();
                    condition
                        .as_object_mut()
                        .unwrap()
                        .retain(|_, v| !v.is_null());
                    list.push(condition);
                }
                pod["status"]["conditions"] = list.into();
            } else if value.is_null() {
                pod["status"].as_object_mut().unwrap().remove(key);
            } else {
                pod["status"][key] = value.clone();
            }
        }
        let phase = pod["status"]["phase"].as_str().unwrap().to_owned();
        let pod = pod.clone();
        let live: Vec<String> = state
            .live(&uid)
            .iter()
            .filter(|c| c.name.starts_with('c'))
            .map(|c| c.name.clone())
            .collect();
        for broken in invariants::of_status(&earlier.unwrap(), &pod, &live, &state.probed) {
            state.deny(format!("{uid}: {broken}"));
        }
        let at = self.1.now();
        state.trace.push(format!("{at} status {uid} {phase}"));
        let before = state.final_phase.get(&uid).cloned();
        if before.as_ref().is_some_and(|b| *b != phase) {
            state.deny(format!("{uid}: the final phase {before:?} became {phase}"));
        }
        if matches!(phase.as_str(), "Succeeded" | "Failed") {
            state.final_phase.insert(uid.clone(), phase);
        }
        state.publish(&uid);
        if matches!(fault, Fault::After | Fault::Hang) {
            return Err(ApiFailure::Other("the answer was lost".into()));
        }
        Ok(serde_json::from_value(pod).unwrap())
    }

    async fn delete(&self, _: &str, _: &str, uid: &str) -> Result<(), ApiFailure> {
        let fault = self.fault().await;
        if matches!(fault, Fault::Before) {
            return Err(ApiFailure::Other("injected".into()));
        }
        let mut state = self.state();
        let Some(pod) = state.pods.remove(uid) else {
            return Err(ApiFailure::NotFound("gone".into()));
        };
        if pod["metadata"]["deletionTimestamp"].is_null() {
            state.deny(format!("{uid}: nobody asked for this pod's deletion"));
        }
        let held = !state.live(uid).is_empty()
            || state.boxes.values().any(|b| b.uid == uid)
            || state.volumes.contains(uid)
            || state.cgroups.contains(uid);
        if held {
            state.deny(format!(
                "{uid}: given back to the API before everything was released"
            ));
        }
        state.revision += 1;
        if let Some(writer) = state.watcher.clone() {
            writer.delete(&serde_json::from_value(pod).unwrap());
        }
        if matches!(fault, Fault::After | Fault::Hang) {
            Err(ApiFailure::Other("the answer was lost".into()))
        } else {
            Ok(())
        }
    }

    async fn create(&self, _: &Pod) -> Result<Pod, ApiFailure> {
        Err(ApiFailure::Other("no mirrors here".into()))
    }

    async fn config_map(&self, _: &str, name: &str) -> Result<Arc<ConfigMap>, ApiFailure> {
        Err(ApiFailure::NotFound(name.into()))
    }

    async fn secret(&self, _: &str, name: &str) -> Result<Arc<Secret>, ApiFailure> {
        Err(ApiFailure::NotFound(name.into()))
    }

    async fn token(&self, _: TokenFor<'_>) -> Result<Token, ApiFailure> {
        Err(ApiFailure::Other("no tokens here".into()))
    }

    async fn claimed(&self, _: &str, _: &str) -> Result<Binding, ApiFailure> {
        Err(ApiFailure::Other("no claims here".into()))
    }

    async fn claim_has(&self, _: &str, _: &str, _: &str) -> Result<(), ApiFailure> {
        Ok(())
    }

    async fn csi_driver(&self, _: &str) -> Result<Option<CSIDriver>, ApiFailure> {
        Ok(None)
    }

    async fn attached(&self, _: &str) -> Result<Option<HashMap<String, String>>, ApiFailure> {
        Ok(None)
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

    async fn post_event(&self, _: &Event) -> Result<(), ApiFailure> {
        Ok(())
    }

    async fn count_event(&self, _: &str, _: &str, _: &Value) -> Result<(), ApiFailure> {
        Ok(())
    }

    async fn runtime_handler(&self, _: &str) -> Result<String, ApiFailure> {
        Ok(String::new())
    }

    fn follow(&self, _: &str, _: &BTreeSet<String>, _: &BTreeSet<String>, _: &News) -> Following {
        Following::nothing()
    }

    fn services(&self) -> Option<Vec<Arc<Service>>> {
        Some(vec![])
    }
}
