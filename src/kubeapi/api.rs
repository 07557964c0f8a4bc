//! Typed API calls with little generated code per kind. kube sends requests, lists and watches for [`Untyped`] objects.
//! Only the decoding of one object from parsed JSON is specific to a kind. With `kube::Api<K>`, each kind would have
//! its own client, watcher and deserialisers: megabytes of code that stay resident in an idle agent
//! (docs/BENCHMARKS-HISTORY.md, 2026-11-26).

use std::borrow::Cow;
use std::fmt::Debug;
use std::marker::PhantomData;

use futures::stream::BoxStream;
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{
    DeleteParams, ListParams, Patch, PatchParams, PostParams, Request, WatchEvent, WatchParams,
};
use kube::core::{ApiResource, DynamicResourceScope, NamespaceResourceScope};
use kube::runtime::watcher;
use kube::{Client, Error, Resource};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// An object of any kind: parsed JSON, not decoded yet.
#[derive(Debug, Clone)]
pub struct Untyped {
    /// Name, namespace, uid and resource version, which a watcher needs.
    meta: ObjectMeta,
    value: Value,
}

impl<'de> Deserialize<'de> for Untyped {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Untyped, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let text = |field: &str| value["metadata"][field].as_str().map(Into::into);
        let meta = ObjectMeta {
            name: text("name"),
            namespace: text("namespace"),
            uid: text("uid"),
            resource_version: text("resourceVersion"),
            ..ObjectMeta::default()
        };
        Ok(Untyped { meta, value })
    }
}

impl Untyped {
    /// Decodes the object as kind `K`. A condition without a time, which upstream's types allow, gets the zero time of Go if
    /// the kind needs one: otherwise it would hide the whole object.
    pub fn read<K: DeserializeOwned>(mut self) -> Result<K, Error> {
        let has_no_time = |condition: &mut Value| condition["lastTransitionTime"].is_null();
        let is_complete = !conditions(&mut self.value).any(has_no_time);
        if is_complete {
            return serde_json::from_value(self.value).map_err(Error::SerdeError);
        }
        if let Ok(object) = serde_json::from_value(self.value.clone()) {
            return Ok(object);
        }
        for condition in conditions(&mut self.value).filter(|c| c.is_object()) {
            if condition["lastTransitionTime"].is_null() {
                condition["lastTransitionTime"] = ZERO_TIME.into();
            }
        }
        serde_json::from_value(self.value).map_err(Error::SerdeError)
    }
}

/// Go's `time.Time{}`, which upstream serialises as null.
const ZERO_TIME: &str = "0001-01-01T00:00:00Z";

/// The conditions in a status, also those of the devices of a ResourceClaim.
fn conditions(object: &mut Value) -> impl Iterator<Item = &mut Value> {
    let status = object.get_mut("status").and_then(Value::as_object_mut);
    let (mut own, mut devices) = (None, None);
    for (key, value) in status.into_iter().flatten() {
        match key.as_str() {
            "conditions" => own = value.as_array_mut(),
            "devices" => devices = value.as_array_mut(),
            _ => {}
        }
    }
    let devices = devices.into_iter().flatten();
    let of_devices = devices.filter_map(|device| device.get_mut("conditions")?.as_array_mut());
    own.into_iter().chain(of_devices).flatten()
}

impl Resource for Untyped {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn kind(of: &ApiResource) -> Cow<'_, str> {
        of.kind.as_str().into()
    }

    fn group(of: &ApiResource) -> Cow<'_, str> {
        of.group.as_str().into()
    }

    fn version(of: &ApiResource) -> Cow<'_, str> {
        of.version.as_str().into()
    }

    fn plural(of: &ApiResource) -> Cow<'_, str> {
        of.plural.as_str().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.meta
    }
}

/// API calls for objects of kind `K`, in one namespace or in the whole cluster. Errors are those of kube.
pub struct Api<K> {
    calls: kube::Api<Untyped>,
    kind: PhantomData<fn() -> K>,
}

impl<K> Clone for Api<K> {
    fn clone(&self) -> Api<K> {
        self.calls.clone().into()
    }
}

impl<K> From<kube::Api<Untyped>> for Api<K> {
    fn from(calls: kube::Api<Untyped>) -> Api<K> {
        Api {
            calls,
            kind: PhantomData,
        }
    }
}

impl<K: Resource> Api<K>
where
    K::DynamicType: Default,
{
    /// Selects cluster-scoped objects, or the objects of all namespaces.
    #[must_use]
    pub fn all(client: Client) -> Api<K> {
        let kind = ApiResource::erase::<K>(&K::DynamicType::default());
        kube::Api::all_with(client, &kind).into()
    }

    /// Selects the objects of one namespace.
    #[must_use]
    pub fn namespaced(client: Client, namespace: &str) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope>,
    {
        let kind = ApiResource::erase::<K>(&K::DynamicType::default());
        kube::Api::namespaced_with(client, namespace, &kind).into()
    }
}

impl<K> Api<K> {
    /// Returns the underlying client.
    #[must_use]
    pub fn client(&self) -> Client {
        self.calls.clone().into_client()
    }

    /// Streams the events of a watch that restarts after errors; the caller decodes each object.
    pub fn watcher(
        self,
        config: watcher::Config,
    ) -> impl Stream<Item = watcher::Result<watcher::Event<Untyped>>> + Send + use<K> {
        watcher(self.calls, config)
    }

    /// Deletes the objects that match `which`.
    pub async fn delete_collection(
        &self,
        params: &DeleteParams,
        which: &ListParams,
    ) -> Result<(), Error> {
        self.calls.delete_collection(params, which).await.map(drop)
    }
}

/// The result of a list.
pub struct Listed<K> {
    /// The objects.
    pub items: Vec<K>,
    /// The resource version of the list, from which a watch can continue.
    pub version: Option<String>,
}

impl<K: DeserializeOwned> Api<K> {
    /// Gets one object.
    pub async fn get(&self, name: &str) -> Result<K, Error> {
        self.calls.get(name).await?.read()
    }

    /// Gets one object, or `None` if it does not exist.
    pub async fn get_opt(&self, name: &str) -> Result<Option<K>, Error> {
        self.calls
            .get_opt(name)
            .await?
            .map(Untyped::read)
            .transpose()
    }

    /// Lists the objects that match `which`.
    pub async fn list(&self, which: &ListParams) -> Result<Listed<K>, Error> {
        let listed = self.calls.list(which).await?;
        Ok(Listed {
            version: listed.metadata.resource_version,
            items: listed
                .items
                .into_iter()
                .map(Untyped::read)
                .collect::<Result<_, _>>()?,
        })
    }

    /// Opens one watch for changes after resource version `version`.
    pub async fn watch(
        &self,
        which: &WatchParams,
        version: &str,
    ) -> Result<BoxStream<'static, Result<WatchEvent<K>, Error>>, Error>
    where
        K: Send + 'static,
    {
        let events = self.calls.watch(which, version).await?;
        let read = |event| {
            Ok(match event {
                WatchEvent::Added(object) => WatchEvent::Added(Untyped::read(object)?),
                WatchEvent::Modified(object) => WatchEvent::Modified(object.read()?),
                WatchEvent::Deleted(object) => WatchEvent::Deleted(object.read()?),
                WatchEvent::Bookmark(mark) => WatchEvent::Bookmark(mark),
                WatchEvent::Error(status) => WatchEvent::Error(status),
            })
        };
        Ok(events
            .and_then(move |event| std::future::ready(read(event)))
            .boxed())
    }

    /// Watches one object and restarts after errors; yields `None` when the object does not exist.
    pub fn watch_object(
        self,
        name: &str,
    ) -> impl Stream<Item = watcher::Result<Option<Result<K, Error>>>> + Send + use<K> {
        let objects = watcher::watch_object(self.calls, name);
        objects.map(|object| Ok(object?.map(Untyped::read)))
    }

    /// Deletes an object. Returns the object if its deletion has only begun.
    pub async fn delete(&self, name: &str, params: &DeleteParams) -> Result<Option<K>, Error> {
        let answer = self.calls.delete(name, params).await?;
        answer.left().map(Untyped::read).transpose()
    }

    /// Creates an object.
    pub async fn create(&self, params: &PostParams, object: &K) -> Result<K, Error>
    where
        K: Serialize,
    {
        self.send(self.request().create(params, body(object)?))
            .await
    }

    /// Replaces an object.
    pub async fn replace(&self, name: &str, params: &PostParams, object: &K) -> Result<K, Error>
    where
        K: Serialize,
    {
        self.send(self.request().replace(name, params, body(object)?))
            .await
    }

    /// Replaces an object's status.
    pub async fn replace_status(
        &self,
        name: &str,
        params: &PostParams,
        object: &K,
    ) -> Result<K, Error>
    where
        K: Serialize,
    {
        let request = self.request();
        self.send(request.replace_subresource("status", name, params, body(object)?))
            .await
    }

    /// Creates a subresource of an object: a token, a binding.
    pub async fn create_below<T: Serialize, A: DeserializeOwned>(
        &self,
        name: &str,
        below: &str,
        object: &T,
    ) -> Result<A, Error> {
        let (request, params) = (self.request(), PostParams::default());
        self.send(request.create_subresource(below, name, &params, body(object)?))
            .await
    }

    /// Patches an object.
    pub async fn patch<P: Serialize + Debug>(
        &self,
        name: &str,
        params: &PatchParams,
        patch: &Patch<P>,
    ) -> Result<K, Error> {
        self.calls.patch(name, params, patch).await?.read()
    }

    /// Patches an object's status.
    pub async fn patch_status<P: Serialize + Debug>(
        &self,
        name: &str,
        params: &PatchParams,
        patch: &Patch<P>,
    ) -> Result<K, Error> {
        self.patch_below("status", name, params, patch).await
    }

    /// Patches a subresource of an object: its status, its approval.
    pub async fn patch_below<P: Serialize + Debug>(
        &self,
        below: &str,
        name: &str,
        params: &PatchParams,
        patch: &Patch<P>,
    ) -> Result<K, Error> {
        let calls = &self.calls;
        calls
            .patch_subresource(below, name, params, patch)
            .await?
            .read()
    }

    fn request(&self) -> Request {
        Request::new(self.calls.resource_url())
    }

    async fn send<T: DeserializeOwned>(
        &self,
        request: Result<hyper::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<T, Error> {
        let request = request.map_err(Error::BuildRequest)?;
        let answer: Untyped = self.client().request(request).await?;
        answer.read()
    }
}

fn body(object: &impl Serialize) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(object).map_err(Error::SerdeError)
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::{Pod, Service};
    use k8s_openapi::api::resource::v1::ResourceClaim;
    use serde_json::json;

    #[test]
    fn metadata_is_available_before_an_object_is_decoded() {
        let metadata = json!({"name": "a", "namespace": "n", "uid": "u", "resourceVersion": "7", "labels": {"l": "1"}});
        let event = json!({"type": "ADDED", "object": {"kind": "Pod", "apiVersion": "v1", "metadata": metadata}});
        // An event's fields may come in any order.
        let reversed = r#"{"object": {"metadata": {"name": "a"}}, "type": "ADDED"}"#;
        for (text, version) in [(&*event.to_string(), Some("7")), (reversed, None)] {
            let Ok(WatchEvent::<Untyped>::Added(object)) = serde_json::from_str(text) else {
                panic!("{text} is not a watch event");
            };
            assert_eq!(object.meta().name.as_deref(), Some("a"));
            assert_eq!(object.meta().resource_version.as_deref(), version);
            let pod: Pod = object.read().expect("a pod");
            assert_eq!(pod.metadata.labels.is_some(), version.is_some());
        }
    }

    #[test]
    fn an_object_of_another_kind_or_type_is_rejected() {
        let read = |value: Value| -> Result<Pod, Error> {
            serde_json::from_value::<Untyped>(value)
                .expect("any JSON")
                .read()
        };
        assert!(read(json!({"kind": "Node", "apiVersion": "v1"})).is_err());
        assert!(read(json!({"spec": {"containers": 5}})).is_err());
        assert!(read(json!("no object")).is_err());
    }

    #[test]
    fn a_condition_without_a_time_does_not_hide_its_object() {
        let read = |value: Value| serde_json::from_value::<Untyped>(value).expect("any JSON");
        let of = |time: Value| json!({"type": "Ready", "status": "True", "reason": "A", "message": "", "lastTransitionTime": time});
        let full = of("2026-11-30T07:00:00Z".into());
        let mut missing = of(Value::Null);
        if let Some(condition) = missing.as_object_mut() {
            condition.remove("lastTransitionTime");
        }
        for condition in [of(Value::Null), missing] {
            let conditions = json!([condition, full]);
            let service =
                read(json!({"metadata": {"name": "web"}, "status": {"conditions": conditions}}));
            let service: Service = service.read().expect("a Service");
            let read_back = service.status.and_then(|status| status.conditions);
            let times = read_back.into_iter().flatten();
            let times: Vec<String> = times
                .map(|c| c.last_transition_time.0.to_string())
                .collect();
            assert_eq!(times, [ZERO_TIME, "2026-11-30T07:00:00Z"]);
            let devices =
                json!([{"driver": "d", "pool": "p", "device": "e", "conditions": conditions}]);
            let claim = read(json!({"metadata": {}, "spec": {}, "status": {"devices": devices}}));
            assert!(claim.read::<ResourceClaim>().is_ok());
            // A Pod's condition needs no time, and gets none.
            let pod: Pod = read(json!({"status": {"conditions": conditions}}))
                .read()
                .expect("a Pod");
            let first = pod
                .status
                .and_then(|status| status.conditions?.into_iter().next());
            assert_eq!(first.expect("a condition").last_transition_time, None);
        }
    }
}
