//! The namespace controllers. They create the `default` service account and the CA ConfigMap in each namespace
//! (`pkg/controller/serviceaccount`, `pkg/controller/certificates/rootcacertpublisher`). They delete the content of a
//! namespace before its finalizer is removed (`pkg/controller/namespace/deletion/namespaced_resources_deleter.go`).

use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ServiceAccount};
use kube::api::{DynamicObject, ListParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, Resource, ResourceExt as _};
use serde_json::json;

use super::runtime::{Keys, Next};
use super::{Caches, is_stale};
use crate::api::resources::RESOURCES;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::client::code;

/// Number of namespaces reconciled concurrently.
const WORKERS: usize = 4;
/// How often the content of a terminating namespace is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

pub(super) async fn run(client: Client, caches: Caches, ca: String) {
    fn namespace<K: Resource>(object: Option<&K>) -> Option<String> {
        object?.meta().namespace.clone()
    }
    let keys = Keys::new();
    keys.watch(&caches.namespaces, |before, after| {
        after.or(before).map(|namespace| namespace.name_any())
    });
    keys.watch(&caches.accounts, |before, after| {
        let is_default = |account: &&ServiceAccount| account.name_any() == "default";
        // Only the deletion of the account requires work.
        namespace(before.filter(is_default).filter(|_| after.is_none()))
    });
    keys.watch(&caches.config_maps, |before, after| {
        namespace(after.or(before))
    });
    // A terminating namespace waits for its pods.
    keys.watch(&caches.pods, |before, after| {
        namespace(before.filter(|_| after.is_none()))
    });
    let turn = |name: String| reconcile(&client, &caches, name, &ca);
    keys.work(WORKERS, turn).await;
}

async fn reconcile(client: &Client, caches: &Caches, name: String, ca: &str) -> Next {
    let Some(namespace) = caches.namespaces.get("", &name) else {
        return Next::Done;
    };
    let (result, next) = if namespace.metadata.deletion_timestamp.is_some() {
        let emptied = empty(client, caches, &namespace).await;
        (emptied, Next::After(POLL_INTERVAL))
    } else {
        let ensured = ensure_defaults(client, caches, &name, ca).await;
        (ensured, Next::Done)
    };
    match result {
        Ok(()) => next,
        Err(error) => {
            tracing::debug!(%error, namespace = name, "reconcile of a namespace failed, retrying");
            Next::Retry
        }
    }
}

async fn ensure_defaults(
    client: &Client,
    caches: &Caches,
    namespace: &str,
    ca: &str,
) -> Result<(), kube::Error> {
    let taken = |error: kube::Error| {
        if code(&error) == Some(409) {
            Ok(())
        } else {
            Err(error)
        }
    };
    if caches.accounts.get(namespace, "default").is_none() {
        let account = ServiceAccount {
            metadata: named("default", namespace),
            ..ServiceAccount::default()
        };
        Api::namespaced(client.clone(), namespace)
            .create(&PostParams::default(), &account)
            .await
            .map(|_| ())
            .or_else(taken)?;
    }
    let have = caches.config_maps.get(namespace, "kube-root-ca.crt");
    if have
        .as_ref()
        .and_then(|c| c.data.as_ref())
        .and_then(|d| d.get("ca.crt"))
        .map(String::as_str)
        != Some(ca)
    {
        let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
        let mut metadata = named("kube-root-ca.crt", namespace);
        metadata.annotations = Some([("kubernetes.io/description".to_owned(), "Contains a CA bundle that can be used to verify the kube-apiserver when using internal endpoints such as the internal service IP or kubernetes.default.svc.".to_owned())].into());
        let map = ConfigMap {
            metadata,
            data: Some([("ca.crt".to_owned(), ca.to_owned())].into()),
            ..ConfigMap::default()
        };
        match have {
            None => api
                .create(&PostParams::default(), &map)
                .await
                .map(|_| ())
                .or_else(taken)?,
            Some(_) => api
                .replace("kube-root-ca.crt", &PostParams::default(), &map)
                .await
                .map(|_| ())?,
        }
    }
    Ok(())
}

fn named(name: &str, namespace: &str) -> kube::core::ObjectMeta {
    kube::core::ObjectMeta {
        name: Some(name.into()),
        namespace: Some(namespace.into()),
        ..Default::default()
    }
}

async fn empty(client: &Client, caches: &Caches, namespace: &Namespace) -> Result<(), kube::Error> {
    let name = namespace.name_any();
    let options = kube::api::DeleteParams::background();
    let api_of = |plural: &str| {
        RESOURCES.iter().find(|r| r.plural == plural).map(|r| {
            let gvk = GroupVersionKind::gvk(r.group, r.version, r.kind);
            kube::Api::<DynamicObject>::namespaced_with(
                client.clone(),
                &name,
                &ApiResource::from_gvk_with_plural(&gvk, r.plural),
            )
        })
    };
    // Workloads are deleted before pods, so that pods are not recreated, and pods before the objects that they use.
    for plural in ["deployments", "replicasets", "cronjobs", "jobs", "pods"] {
        if let Some(api) = api_of(plural) {
            for item in api
                .list(&ListParams::default())
                .await?
                .items
                .iter()
                .filter(|i| i.metadata.deletion_timestamp.is_none())
            {
                match api.delete(&item.name_any(), &options).await {
                    Err(error) if code(&error) != Some(404) => return Err(error),
                    _ => {}
                }
            }
        }
    }
    if caches
        .pods
        .list()
        .iter()
        .any(|p| p.namespace().as_deref() == Some(&name))
    {
        return Ok(());
    }
    let mut left = 0;
    for resource in RESOURCES.iter().filter(|r| r.namespaced) {
        if let Some(api) = api_of(resource.plural) {
            api.delete_collection(&options, &ListParams::default())
                .await?;
            left += api.list(&ListParams::default()).await?.items.len();
        }
    }
    if left > 0 {
        return Ok(());
    }
    let mut finished = namespace.clone();
    finished.spec = Some(k8s_openapi::api::core::v1::NamespaceSpec {
        finalizers: Some(vec![]),
    });
    finished.metadata.resource_version = None;
    let body = serde_json::to_vec(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": finished.metadata, "spec": {"finalizers": []}}))
        .map_err(kube::Error::SerdeError)?;
    let request = kube::core::Request::new("/api/v1/namespaces")
        .replace_subresource("finalize", &name, &PostParams::default(), body)
        .map_err(kube::Error::BuildRequest)?;
    match client.request::<Namespace>(request).await {
        Err(error) if !is_stale(&error) => Err(error),
        _ => Ok(()),
    }
}
