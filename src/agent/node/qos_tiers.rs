//! The tiers of pods' cgroups: what each may have of the processors beside the others (kubelet spec, 7.2).

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use crate::agent::Context;
use crate::core::pod;
use crate::core::pod::cgroup::tier_shares;

/// How often the tiers are looked at in any case: somebody else may have changed them.
const AUDIT: Duration = Duration::from_secs(60);
/// How long changes are collected: pods come and go in crowds.
const GATHER: Duration = Duration::from_millis(200);
/// The pause after tiers could not be set.
const AGAIN: Duration = Duration::from_secs(5);

/// Keeps them up to date with the pods that this node is to have.
pub(super) async fn keep(context: &Context) {
    let mut roster = context.roster.subscribe();
    let allocatable = context.allocatable();
    let mut failing = false;
    loop {
        let pods: Vec<_> = roster
            .borrow_and_update()
            .iter()
            .map(|k| k.pod.clone())
            .collect();
        let alive: Vec<&Pod> = pods
            .iter()
            .map(|p| &**p)
            .filter(|p| !pod::is_terminal(p))
            .collect();
        let shares = tier_shares(&allocatable, &alive);
        let wait = match context.host.set_tiers(&shares).await {
            Ok(()) => {
                failing = false;
                AUDIT
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(
                        error,
                        "the tiers of pods' cgroups cannot be set: pods may get more or less CPU than they ask for; it is tried again"
                    );
                }
                AGAIN
            }
        };
        tokio::select! {
            biased;
            Ok(()) = roster.changed() => tokio::time::sleep(GATHER).await,
            () = tokio::time::sleep(wait) => {}
        }
    }
}
