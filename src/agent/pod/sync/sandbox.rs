//! Creates and stops sandboxes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::{Asset, Job, Result};
use crate::Kind;
use holdfast_core::fault::Fault;
use holdfast_core::node::claims::has_claims;
use holdfast_core::pod;
use holdfast_core::pod::journal::{Progress, Step};
use holdfast_core::pod::worker::Outcome;
use holdfast_core::pod::{cri_config, dns};

/// More than a runtime takes to create a sandbox while no network plugin hangs. containerd (1.6 to 2.2)
/// calls the plugins and then starts the sandbox's shim. If the call is cancelled during that start, the
/// shim is leaked, and the runtime does not know it.
const USUAL_CREATION_TIME: Duration = Duration::from_secs(5);

impl Job {
    pub(super) async fn sandbox(&self, attempt: u32) -> Result<(Outcome, Option<Asset>)> {
        let request_sent = AtomicBool::new(false);
        let make = async {
            self.prepare_claims().await?;
            let make = self.make_sandbox(attempt, &request_sent);
            Ok(self.log().step(Step::Sandbox, "", make).await?)
        };
        tokio::select! {
                    // The order is fixed: `make` marks the call as sent before the second branch reads the mark.
                    biased;
                    made = make => made,
                    // A terminating pod does not wait for a network plugin that may hang. Dropping the call cancels it in the
                    // runtime, as in the kubelet (`pkg/kubelet/pod_workers.go` cancels the context of `SyncPod`). The worker
                    // observes a sandbox that was created nevertheless.
        ( ) = self . wait_until_terminating ( & request_sent ) => match request_sent . load ( Ordering :: Relaxed ) { false => Ok ( ( Outcome :: Abandoned , None ) ) ,
                        true => Err(Fault::later("the pod is terminating: creating its sandbox was cancelled").into()),
                    },
                }
    }

    /// Waits until the pod terminates. If the runtime is then creating the
    /// sandbox, waits for the usual duration of that.
    async fn wait_until_terminating(&self, request_sent: &AtomicBool) {
        self.tools.ending.cancelled().await;
        if request_sent.load(Ordering::Relaxed) {
            tokio::time::sleep(USUAL_CREATION_TIME).await;
        }
    }

    /// Prepares the pod's resource claims; the runtime reads their CDI devices when containers are created.
    async fn prepare_claims(&self) -> Result<()> {
        let (parts, pod) = (self.parts(), self.update.with_status());
        if !has_claims(pod) {
            return Ok(());
        }
        let prepare = async {
            let prepared = parts.claims.prepare(&*parts.api, &parts.metrics, pod);
            prepared.await.map_err(|why| {
                let fault = Fault::later(format!("prepare dynamic resources: {why}"));
                let message = format!("Failed to prepare dynamic resources: {fault}");
                self.emit_event(Kind::Warning, "FailedPrepareDynamicResources", message);
                fault
            })
        };
        let step = self.log().step(Step::Claims, "", prepare);
        Ok(step.await?)
    }

    async fn make_sandbox(
        &self,
        attempt: u32,
        request_sent: &AtomicBool,
    ) -> std::result::Result<(Outcome, Option<Asset>), Fault> {
        let (parts, pod) = (self.parts(), &self.pod);
        let node = self.node().await?;
        let config = cri_config::sandbox(pod, attempt, &node);
        let config = config.map_err(|fault| self.no_sandbox(fault))?;
        for (reason, warning) in dns::config(pod, &node.resolver).1 {
            self.emit_event(Kind::Warning, reason, warning);
        }
        let own_users = pod::spec(pod).host_users == Some(false);
        let make = async {
            request_sent.store(true, Ordering::Relaxed);
            let begun = Instant::now();
            let made = parts
                .runtime
                .run_sandbox(config.clone(), &node.handler)
                .await;
            parts
                .metrics
                .sandbox(&node.handler, own_users, made.is_err(), begun.elapsed());
            made
        };
        let made = parts.starts.sandbox(make).await;
        let id = made.map_err(|e| self.no_sandbox(e))?;
        let ips = parts.runtime.sandbox_ips(&id).await.map_err(|e| {
            let what = "Unable to get pod sandbox status";
            self.emit_warning("FailedPodSandBoxStatus", what, e)
        })?;
        let asset = Asset::Sandbox(id.clone(), Arc::new(config));
        Ok((Outcome::Sandbox { id, ips }, Some(asset)))
    }

    pub(super) async fn stop_sandbox(&self, id: &str) -> Result<Outcome> {
        if self.can_wait {
            let mut idle_gate = self.parts().starts.idle_gate();
            tokio::select! {
                biased;
                () = idle_gate.wait(Instant::now()) => {}
                () = self.tools.end_awaited.cancelled() => {}
            }
        }
        self.log().begin(Step::StopSandbox, "");
        let parts = self.parts();
        let mut stopped = parts.runtime.stop_sandbox(id).await;
        if stopped.is_err() && parts.host.remove_corrupt_results(id).await {
            stopped = parts.runtime.stop_sandbox(id).await;
        }
        match stopped {
            Ok(()) => {
                self.log().end(Step::StopSandbox, "", Progress::Done);
                Ok(Outcome::Done)
            }
            Err(error) => {
                let fault =
                    Fault::from(error).context(&format!("the sandbox {id} cannot be stopped"));
                self.log()
                    .end(Step::StopSandbox, "", Progress::Failed(fault.to_string()));
                self.emit_event(
                    Kind::Warning,
                    "FailedKillPod",
                    format!("error killing pod: {fault}"),
                );
                Err(fault.into())
            }
        }
    }
}
