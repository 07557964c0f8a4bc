//! The apiserver's cost of a plain pod: requests by verb and resource, without heartbeats.

use std::collections::BTreeMap;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use serde_json::Value;

use crate::support::{Cluster, real::ControlPlane};
use crate::{create, delete};

/// The variable with the audit log of the real apiserver. The log has the user of each request.
const AUDIT: &str = "HOLDFAST_REAL_AUDIT";

/// The source of the number of requests.
pub enum Source {
    /// The bundled apiserver's metrics, which count a node's requests separately.
    OfNode,
    /// An audit log, and the node's user.
    Audit(PathBuf, String),
    /// A real apiserver's metrics, which count the requests of all clients.
    Everybody,
}

impl Source {
    /// Returns the most precise source that is available.
    pub fn of(cluster: &Cluster) -> Source {
        let user = format!("system:node:{}", cluster.node_name());
        match (&cluster.control, std::env::var_os(AUDIT)) {
            (ControlPlane::Bundled, _) => Source::OfNode,
            (ControlPlane::Real(_), Some(log)) => Source::Audit(log.into(), user),
            (ControlPlane::Real(_), None) => Source::Everybody,
        }
    }

    /// Describes whose requests are counted.
    fn whose(&self) -> String {
        match self {
            Source::OfNode | Source::Audit(..) => "of the node".into(),
            Source::Everybody => format!(
                "of the node, the scheduler and this bench, which deletes the pod: {AUDIT}=<audit log> separates them"
            ),
        }
    }

    /// Returns the number of requests so far.
    async fn count(&self, client: &Client) -> BTreeMap<String, u64> {
        if let Source::Audit(log, user) = self {
            return audited(&std::fs::read_to_string(log).unwrap(), user);
        }
        let request = hyper::Request::get("/metrics").body(vec![]).unwrap();
        let text = client.request_text(request).await.unwrap();
        let mut counts = BTreeMap::new();
        for line in text.lines() {
            let Some((labels, count)) = line.rsplit_once(' ') else {
                continue;
            };
            let label = |name: &str| {
                let rest = labels.split(&format!("{name}=\"")).nth(1);
                rest.and_then(|r| r.split('"').next())
            };
            let counts_here = match self {
                Source::OfNode => label("node") == Some("true"),
                _ => labels.starts_with("apiserver_request_total{"),
            };
            if !counts_here {
                continue;
            }
            let (verb, resource) = (label("verb").unwrap(), label("resource").unwrap());
            let count: f64 = count.parse().unwrap();
            add(
                &mut counts,
                verb,
                resource,
                label("subresource"),
                count as u64,
            );
        }
        // Excludes the requests of this bench, which creates and watches the pods.
        if matches!(self, Source::Everybody) {
            let nodes_write = ["pods", "pods/status", "events", "serviceaccounts/token"];
            counts.retain(|key, _| {
                let (verb, what) = key.split_once(' ').unwrap();
                let others = ["WATCH", "LIST"].contains(&verb) || key == "POST pods";
                nodes_write.contains(&what) && !others
            });
        }
        counts
    }
}

/// Counts a request, unless it is a heartbeat.
fn add(
    counts: &mut BTreeMap<String, u64>,
    verb: &str,
    resource: &str,
    sub: Option<&str>,
    count: u64,
) {
    if ["leases", "nodes", ""].contains(&resource) {
        return;
    }
    let sub = sub
        .filter(|s| !s.is_empty())
        .map_or(String::new(), |s| format!("/{s}"));
    *counts.entry(format!("{verb} {resource}{sub}")).or_default() += count;
}

/// The requests of a user in an audit log.
fn audited(log: &str, user: &str) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    // The last line may be incomplete.
    let events = log.lines().flat_map(serde_json::from_str::<Value>);
    for event in events.filter(|e| e["user"]["username"] == user) {
        if !["ResponseComplete", "ResponseStarted"].contains(&event["stage"].as_str().unwrap()) {
            continue;
        }
        let verb = match event["verb"].as_str().unwrap() {
            "create" => "POST".to_owned(),
            "update" => "PUT".to_owned(),
            verb => verb.to_uppercase(),
        };
        let object = &event["objectRef"];
        let resource = object["resource"].as_str().unwrap_or_default();
        add(
            &mut counts,
            &verb,
            resource,
            object["subresource"].as_str(),
            1,
        );
    }
    counts
}

/// The cost of one plain pod.
pub struct Cost(BTreeMap<String, u64>, String);

impl Cost {
    /// Prints the cost.
    pub fn print(&self) {
        let Cost(requests, whose) = self;
        println!(
            "One plain pod from creation to deletion costs the apiserver (marks: 3 status patches, no GETs, 4 events, one token): {requests:?} ({whose})"
        );
    }
}

/// Measures the cost.
pub async fn of_one(source: &Source, client: &Client, api: &Api<Pod>) -> Cost {
    let before = source.count(client).await;
    create(api, &["plain-0".to_owned()]).await;
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    delete(api, &["plain-0".to_owned()]).await;
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    let after = source.count(client).await.into_iter();
    let more = after.map(|(k, n)| (k.clone(), n - before.get(&k).unwrap_or(&0)));
    Cost(more.filter(|(_, n)| *n > 0).collect(), source.whose())
}
