//! Removing images that nothing uses, when room is needed or they are too old (kubelet spec, 8.5).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::agent::Context;
use crate::agent::events::Kind;
use crate::core::image::canonical;
use crate::core::image::gc::{Filesystem, Ledger, Present};
use crate::core::pod;
use crate::cri::Stock;

/// How often it is looked.
const PERIOD: Duration = Duration::from_secs(300);

/// Runs until the process ends.
pub async fn run(context: Arc<Context>) {
    let rules = &context.config.image_rules;
    let (mut ledger, mut failures) = (Ledger::default(), 0_u32);
    loop {
        if rules.enabled() {
            match pass(&context, &mut ledger).await {
                Ok(()) => failures = 0,
                Err(error) => {
                    failures += 1;
                    tracing::warn!(error, failures, "unused images could not all be removed");
                    // Once is nothing: the runtime may just have been restarted.
                    if failures > 1 {
                        context.events.node(
                            &context.config.node_name,
                            Kind::Warning,
                            "ImageGCFailed",
                            error,
                        );
                    }
                }
            }
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// The names of the images that pods of this node want, volumes included: in use, also while they are
/// between two containers.
async fn wanted(context: &Context) -> BTreeSet<String> {
    let pods = context.ledger.pods().await;
    let images = pods.iter().flat_map(|pod| {
        let containers = pod::containers(pod)
            .into_iter()
            .filter_map(|(_, c)| c.image.clone());
        let volumes = pod::spec(pod)
            .volumes
            .iter()
            .flatten()
            .filter_map(|v| v.image.as_ref()?.reference.clone());
        containers.chain(volumes).collect::<Vec<_>>()
    });
    images.filter_map(|name| canonical(&name)).collect()
}

fn present(stock: &Stock, wanted: &BTreeSet<String>) -> Vec<Present> {
    let used = |image: &crate::cri::Image| {
        let names = || image.names.iter().chain(std::iter::once(&image.id));
        names().any(|name| stock.in_use.contains(name) || wanted.contains(name))
    };
    let of = |image: &crate::cri::Image| Present {
        id: image.id.clone(),
        size: image.size,
        pinned: image.pinned,
        used: used(image),
    };
    stock.images.iter().map(of).collect()
}

async fn pass(context: &Context, ledger: &mut Ledger) -> Result<(), String> {
    let stock = context
        .runtime
        .stock()
        .await
        .map_err(|e| format!("images cannot be listed: {e}"))?;
    let images = present(&stock, &wanted(context).await);
    let now = context.clock.now();
    ledger.look(&images, now);
    let disk: Filesystem = context.host.filesystem(&stock.mountpoint).await?;
    if disk.capacity == 0 {
        let message = "invalid capacity 0 on image filesystem".to_owned();
        context.events.node(
            &context.config.node_name,
            Kind::Warning,
            "InvalidDiskCapacity",
            message.clone(),
        );
        return Err(message);
    }
    let plan = ledger.plan(
        &images,
        &context.config.image_rules,
        disk,
        context.started,
        now,
    );
    let mut failed = None;
    for image in &plan.aged {
        if let Err(error) = remove(
            context,
            image,
            ("age", "unused for longer than imageMaximumGCAge"),
        )
        .await
        {
            failed = Some(error);
        }
    }
    let mut freed = 0;
    for image in &plan.candidates {
        if freed >= plan.wanted {
            break;
        }
        match remove(
            context,
            image,
            ("space", "disk usage is above imageGCHighThresholdPercent"),
        )
        .await
        {
            Ok(()) => freed += image.size,
            Err(error) => failed = Some(error),
        }
    }
    if freed < plan.wanted {
        let message = format!(
            "Insufficient free disk space on the node's image filesystem ({}% of {} bytes used). Failed to free sufficient space by deleting unused images (freed {freed} bytes). Remove what else fills the disk, or make it larger.",
            disk.percent(),
            disk.capacity
        );
        context.events.node(
            &context.config.node_name,
            Kind::Warning,
            "FreeDiskSpaceFailed",
            message.clone(),
        );
        return Err(message);
    }
    failed.map_or(Ok(()), Err)
}

async fn remove(
    context: &Context,
    image: &Present,
    (reason, why): (&str, &str),
) -> Result<(), String> {
    let result = context
        .runtime
        .remove_image(&image.id)
        .await
        .map_err(|e| format!("image {} cannot be removed: {e}", image.id));
    if result.is_ok() {
        context.metrics.collected(reason);
        tracing::info!(
            image = image.id,
            bytes = image.size,
            "removed unused image: {why}"
        );
    }
    result
}
