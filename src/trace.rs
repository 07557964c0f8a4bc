//! `holdfast trace`: collects the story of an object and of what it led to, from the API and from the agents of
//! its pods' nodes.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use jiff::Timestamp;
use serde_json::Value;

use holdfast_core::pod::explain::Explanation;
use holdfast_core::pod::journal::Progress;
use holdfast_core::trace::{Chapter, Step, Story};
use holdfast_core::trail::Trail;

use crate::ask;

/// The maximum number of objects in one story.
const MOST_CHAPTERS: usize = 50;
/// The maximum number of owners between the subject and an object.
const DEEPEST: usize = 3;

/// Maximum time for the answer of an agent on another node, which may be down.
const AGENT_TIMEOUT: Duration = Duration::from_secs(5);

/// A kind whose objects can be traced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kind {
    /// What users call it.
    names: &'static [&'static str],
    kind: &'static str,
    group: &'static str,
    version: &'static str,
    plural: &'static str,
}

const KINDS: [Kind; 7] = [
    Kind {
        names: &["deployment", "deployments", "deploy"],
        kind: "Deployment",
        group: "apps",
        version: "v1",
        plural: "deployments",
    },
    Kind {
        names: &["replicaset", "replicasets", "rs"],
        kind: "ReplicaSet",
        group: "apps",
        version: "v1",
        plural: "replicasets",
    },
    Kind {
        names: &["cronjob", "cronjobs", "cj"],
        kind: "CronJob",
        group: "batch",
        version: "v1",
        plural: "cronjobs",
    },
    Kind {
        names: &["job", "jobs"],
        kind: "Job",
        group: "batch",
        version: "v1",
        plural: "jobs",
    },
    Kind {
        names: &["service", "services", "svc"],
        kind: "Service",
        group: "",
        version: "v1",
        plural: "services",
    },
    Kind {
        names: &["endpointslice", "endpointslices"],
        kind: "EndpointSlice",
        group: "discovery.k8s.io",
        version: "v1",
        plural: "endpointslices",
    },
    Kind {
        names: &["pod", "pods", "po"],
        kind: "Pod",
        group: "",
        version: "v1",
        plural: "pods",
    },
];

/// The kinds whose objects have owners of other kinds.
const OWNED: [&str; 4] = ["replicasets", "jobs", "endpointslices", "pods"];

fn kind(name: &str) -> anyhow::Result<Kind> {
    let wanted = name.to_ascii_lowercase();
    let found = KINDS.iter().find(|k| k.names.contains(&wanted.as_str()));
    found.copied().with_context(|| {
        let names: Vec<&str> = KINDS
            .iter()
            .filter_map(|k| k.names.first().copied())
            .collect();
        format!(
            "{name:?} is no kind that can be traced; use one of {}",
            names.join(", ")
        )
    })
}

/// A path segment.
fn checked(what: &str, text: &str) -> anyhow::Result<()> {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    if text.is_empty() || text.len() > 253 || !text.chars().all(is_name) {
        bail!(
            "{what} {text:?} is no name of an object: use lower-case letters, digits, '-' and '.'"
        );
    }
    Ok(())
}

struct Collector<'a> {
    client: kube::Client,
    namespace: &'a str,
    /// The socket of this machine's agent.
    agent: Option<std::path::PathBuf>,
    story: Story,
    left_out: usize,
}

/// Collects the story of an object. `agent` is the socket of the agent on this machine.
///
/// # Errors
///
/// The kind cannot be traced, or the API does not answer, or has no such object.
pub async fn story(
    client: kube::Client,
    agent: Option<&Path>,
    kind_name: &str,
    namespace: &str,
    name: &str,
) -> anyhow::Result<Story> {
    let kind = kind(kind_name)?;
    checked("the namespace", namespace)?;
    checked("the name", name)?;
    let mut collector = Collector {
        client,
        namespace,
        agent: agent.map(Path::to_owned),
        story: Story::default(),
        left_out: 0,
    };
    let object = collector.get(&collector.path(kind, name)).await?;
    let Some(object) = object else {
        bail!("the API has no {} {namespace}/{name}", kind.kind);
    };
    collector.add(kind, &object, 0).await?;
    if collector.left_out > 0 {
        let mut rest = Chapter::new(format!("{} more objects", collector.left_out), 0);
        rest.missing.push(format!(
            "a story has at most {MOST_CHAPTERS} objects; trace one of them"
        ));
        collector.story.chapters.push(rest);
    }
    Ok(collector.story)
}

impl Collector<'_> {
    fn path(&self, kind: Kind, name: &str) -> String {
        let namespace = self.namespace;
        let root = match kind.group {
            "" => format!("/api/{}", kind.version),
            group => format!("/apis/{group}/{}", kind.version),
        };
        let collection = format!("{root}/namespaces/{namespace}/{}", kind.plural);
        match name {
            "" => collection,
            name => format!("{collection}/{name}"),
        }
    }

    /// Gets a path; `None` if it does not exist.
    async fn get(&self, path: &str) -> anyhow::Result<Option<Value>> {
        let request = http_request(path)?;
        match self.client.request::<Value>(request).await {
            Ok(value) => Ok(Some(value)),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            Err(error) => {
                let why = holdfast_kubeapi::failure::chain(&error);
                bail!("the API does not answer GET {path}: {why}")
            }
        }
    }

    /// Adds the chapter of an object, and those of what it owns.
    async fn add(&mut self, kind: Kind, object: &Value, depth: usize) -> anyhow::Result<()> {
        let metadata = &object["metadata"];
        let (name, uid) = (text(&metadata["name"]), text(&metadata["uid"]));
        if self.story.chapters.len() >= MOST_CHAPTERS {
            self.left_out = self.left_out.saturating_add(1);
            return Ok(());
        }
        let mut chapter = Chapter::new(format!("{} {}/{name}", kind.kind, self.namespace), depth);
        let group = if kind.group.is_empty() {
            "core"
        } else {
            kind.group
        };
        let path = format!(
            "/debug/trail/{group}/{}/{}/{name}",
            kind.plural, self.namespace
        );
        let trail = self
            .get(&path)
            .await?
            .map(serde_json::from_value::<Trail>)
            .transpose()?;
        chapter.add_trail(trail.as_ref(), uid);
        if kind.plural == "pods" {
            self.add_agent(object, &mut chapter).await;
        }
        self.story.chapters.push(chapter);
        if depth < DEEPEST && kind.plural != "pods" {
            for owned in KINDS.iter().filter(|k| OWNED.contains(&k.plural)) {
                self.add_owned(*owned, uid, depth).await?;
            }
        }
        Ok(())
    }

    async fn add_owned(&mut self, kind: Kind, owner: &str, depth: usize) -> anyhow::Result<()> {
        // Another control plane may not serve this kind.
        let Some(list) = self.get(&self.path(kind, "")).await? else {
            return Ok(());
        };
        for item in list["items"].as_array().into_iter().flatten() {
            let owners = item["metadata"]["ownerReferences"].as_array();
            if owners.into_iter().flatten().any(|o| o["uid"] == owner) {
                Box::pin(self.add(kind, item, depth.saturating_add(1))).await?;
            }
        }
        Ok(())
    }

    /// Adds the steps of the agent that runs the pod.
    async fn add_agent(&self, pod: &Value, chapter: &mut Chapter) {
        let (name, uid, node) = (
            text(&pod["metadata"]["name"]),
            text(&pod["metadata"]["uid"]),
            text(&pod["spec"]["nodeName"]),
        );
        if node.is_empty() {
            chapter.missing.push("the pod has no node yet".to_owned());
            return;
        }
        let local = match &self.agent {
            Some(socket) => ask::explain(socket, self.namespace, name).await.ok(),
            None => None,
        };
        let answer = match local.filter(|local| local.uid == uid) {
            Some(explanation) => Ok(explanation),
            None => self.remote_explanation(node, name, uid).await,
        };
        match answer {
            Ok(explanation) => chapter.steps.extend(steps(&explanation, Timestamp::now())),
            Err(why) => chapter.missing.push(format!(
                "the steps of the agent on node {node} are not known: {why:#}; run `holdfast explain pod {name} -n {}` there",
                self.namespace
            )),
        }
    }

    /// Reads the explanation of the agent on another node, through the API.
    async fn remote_explanation(
        &self,
        node: &str,
        name: &str,
        uid: &str,
    ) -> anyhow::Result<Explanation> {
        let namespace = self.namespace;
        let path = format!("/api/v1/nodes/{node}/proxy/debug/explain/{namespace}/{name}");
        let answer = tokio::time::timeout(AGENT_TIMEOUT, self.get(&path)).await;
        let answer = answer.context("the agent does not answer in time")??;
        let answer = answer.context("the agent does not know the pod")?;
        let explanation: Explanation = serde_json::from_value(answer)
            .context("the agent's answer cannot be decoded; it may have another version")?;
        anyhow::ensure!(
            explanation.uid == uid,
            "the agent knows only another pod of this name"
        );
        Ok(explanation)
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn http_request(path: &str) -> anyhow::Result<hyper::Request<Vec<u8>>> {
    Ok(hyper::Request::get(path).body(vec![])?)
}

/// The steps of the agent's journal.
fn steps(explanation: &Explanation, now: Timestamp) -> Vec<Step> {
    let step = |entry: &holdfast_core::pod::journal::Entry| {
        let subject = match entry.subject.as_str() {
            "" => String::new(),
            subject => format!(" {subject}"),
        };
        let failure = match &entry.progress {
            Progress::Failed(why) => format!(": {why}"),
            _ => String::new(),
        };
        Step {
            at: entry.since,
            until: Some(entry.ended.unwrap_or(now)),
            who: "agent".to_owned(),
            what: format!("{}{subject}{failure}", entry.step.label()),
            failed: matches!(entry.progress, Progress::Failed(_)),
        }
    };
    explanation.journal.steps.iter().map(step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_the_names_of_kubectl() {
        for (name, plural) in [
            ("Deployment", "deployments"),
            ("deploy", "deployments"),
            ("svc", "services"),
            ("po", "pods"),
        ] {
            assert_eq!(kind(name).expect("a kind").plural, plural);
        }
        let error = kind("secret").expect_err("no kind").to_string();
        assert!(
            error.contains("\"secret\"") && error.contains("deployment, replicaset"),
            "{error}"
        );
        assert!(checked("the name", "a/../b").is_err() && checked("the name", "").is_err());
        assert!(checked("the name", "web-1.x").is_ok());
    }
}
