//! Discovery (aggregated and legacy), version and OpenAPI (KEP-3352,
//! `staging/src/k8s.io/apiserver/pkg/endpoints/discovery`).

use serde_json::{Value, json};

use super::resources::{RESOURCES, REVIEWS, Resource, Sub};
use holdfast_core::version;

/// The content type of aggregated discovery.
pub(crate) const AGGREGATED: &str =
    "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

fn groups() -> Vec<(&'static str, &'static str)> {
    let mut groups: Vec<(&str, &str)> = Vec::new();
    let reviews = REVIEWS.iter().map(|(group, _, _)| (*group, "v1"));
    for pair in RESOURCES
        .iter()
        .map(|r| (r.group, r.version))
        .chain(reviews)
    {
        if !groups.contains(&pair) {
            groups.push(pair);
        }
    }
    groups
}

fn sub_kind(resource: &Resource, sub: Sub) -> (String, String, &'static str, Vec<&'static str>) {
    let edit = vec!["get", "patch", "update"];
    match sub {
        Sub::Status | Sub::Approval => (
            resource.group.into(),
            resource.version.into(),
            resource.kind,
            edit,
        ),
        Sub::Scale => ("autoscaling".into(), "v1".into(), "Scale", edit),
        Sub::Binding => (String::new(), "v1".into(), "Binding", vec!["create"]),
        Sub::Eviction => ("policy".into(), "v1".into(), "Eviction", vec!["create"]),
        Sub::Finalize => (String::new(), "v1".into(), "Namespace", vec!["update"]),
        Sub::EphemeralContainers | Sub::Resize => (String::new(), "v1".into(), "Pod", edit),
        Sub::Log => (String::new(), "v1".into(), "Pod", vec!["get"]),
        Sub::Exec => (
            String::new(),
            "v1".into(),
            "PodExecOptions",
            vec!["create", "get"],
        ),
        Sub::Attach => (
            String::new(),
            "v1".into(),
            "PodAttachOptions",
            vec!["create", "get"],
        ),
        Sub::PortForward => (
            String::new(),
            "v1".into(),
            "PodPortForwardOptions",
            vec!["create", "get"],
        ),
        Sub::Proxy => (
            String::new(),
            "v1".into(),
            match resource.kind {
                "Pod" => "PodProxyOptions",
                "Service" => "ServiceProxyOptions",
                _ => "NodeProxyOptions",
            },
            vec!["create", "delete", "get", "patch", "update"],
        ),
        Sub::Token => (
            "authentication.k8s.io".into(),
            "v1".into(),
            "TokenRequest",
            vec!["create"],
        ),
    }
}

/// The group names, without duplicates.
fn names() -> Vec<&'static str> {
    let mut names: Vec<&str> = groups().into_iter().map(|(group, _)| group).collect();
    let mut seen = std::collections::HashSet::new();
    names.retain(|name| seen.insert(*name));
    names
}

/// The versions of a group, preferred version first.
fn versions(group: &str) -> Vec<&'static str> {
    groups()
        .into_iter()
        .filter(|(g, _)| *g == group)
        .map(|(_, version)| version)
        .collect()
}

fn served(group: &str, version: &str) -> impl Iterator<Item = &'static Resource> {
    let found: Vec<_> = RESOURCES
        .iter()
        .filter(|r| r.group == group && r.version == version)
        .collect();
    found.into_iter()
}

/// The review kinds of a group; all of them are `v1`.
fn reviews(
    group: &str,
    version: &str,
) -> impl Iterator<Item = &'static (&'static str, &'static str, &'static str)> {
    let found: Vec<_> = REVIEWS
        .iter()
        .filter(|(g, _, _)| *g == group && version == "v1")
        .collect();
    found.into_iter()
}

fn described(r: &Resource) -> Value {
    let of = |sub: &Sub| {
        let (group, version, kind, verbs) = sub_kind(r, *sub);
        json!({"subresource": sub.name(), "responseKind": {"group": group, "version": version, "kind": kind}, "verbs": verbs})
    };
    let subs: Vec<Value> = r.subresources.iter().map(of).collect();
    let mut entry = json!({
        "resource": r.plural, "responseKind": {"group": r.group, "version": r.version, "kind": r.kind},
        "scope": if r.namespaced { "Namespaced" } else { "Cluster" }, "singularResource": r.singular, "verbs": r.verbs(),
    });
    if !r.short.is_empty() {
        entry["shortNames"] = json!(r.short);
    }
    if !r.categories.is_empty() {
        entry["categories"] = json!(r.categories);
    }
    if !subs.is_empty() {
        entry["subresources"] = subs.into();
    }
    entry
}

/// `GET /api` (core) or `GET /apis` in aggregated form.
#[must_use]
pub fn aggregated(core: bool) -> Value {
    let version_of = |group: &'static str, version: &'static str| {
        let mut resources: Vec<Value> = served(group, version).map(described).collect();
        resources.extend(reviews(group, version).map(|(group, plural, kind)| {
            json!({"resource": plural, "responseKind": {"group": group, "version": "v1", "kind": kind}, "scope": "Cluster",
                   "singularResource": kind.to_lowercase(), "verbs": ["create"]})
        }));
        json!({"version": version, "freshness": "Current", "resources": resources})
    };
    let of = |group: &'static str| {
        let versions: Vec<Value> = versions(group)
            .into_iter()
            .map(|version| version_of(group, version))
            .collect();
        json!({"metadata": if core { json!({}) } else { json!({"name": group}) }, "versions": versions})
    };
    let items: Vec<Value> = names()
        .into_iter()
        .filter(|group| group.is_empty() == core)
        .map(of)
        .collect();
    json!({"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items})
}

fn group_object(group: &str) -> Value {
    let of =
        |version: &str| json!({"groupVersion": format!("{group}/{version}"), "version": version});
    let versions: Vec<Value> = versions(group).into_iter().map(of).collect();
    json!({"name": group, "preferredVersion": versions.first(), "versions": versions})
}

/// `GET /apis`, legacy form.
#[must_use]
pub(crate) fn group_list() -> Value {
    let list: Vec<Value> = names()
        .into_iter()
        .filter(|g| !g.is_empty())
        .map(group_object)
        .collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": list})
}

/// `GET /apis/<group>`.
#[must_use]
pub fn group(name: &str) -> Option<Value> {
    let group = names().into_iter().find(|g| *g == name && !g.is_empty())?;
    let mut object = group_object(group);
    object["kind"] = "APIGroup".into();
    object["apiVersion"] = "v1".into();
    Some(object)
}

/// `GET /api/v1` or `GET /apis/<group>/<version>`.
#[must_use]
pub(crate) fn resource_list(group: &str, version: &str) -> Option<Value> {
    groups()
        .into_iter()
        .find(|pair| *pair == (group, version))?;
    let mut list = Vec::new();
    for r in served(group, version) {
        let mut entry = json!({"name": r.plural, "singularName": r.singular, "namespaced": r.namespaced, "kind": r.kind, "verbs": r.verbs()});
        if !r.short.is_empty() {
            entry["shortNames"] = json!(r.short);
        }
        if !r.categories.is_empty() {
            entry["categories"] = json!(r.categories);
        }
        list.push(entry);
        for sub in r.subresources {
            let (group, version, kind, verbs) = sub_kind(r, *sub);
            list.push(json!({"name": format!("{}/{}", r.plural, sub.name()), "singularName": "", "namespaced": r.namespaced,
                             "group": group, "version": version, "kind": kind, "verbs": verbs}));
        }
    }
    for (_, plural, kind) in reviews(group, version) {
        list.push(json!({"name": plural, "singularName": kind.to_lowercase(), "namespaced": false, "kind": kind, "verbs": ["create"]}));
    }
    let group_version = if group.is_empty() {
        version.to_owned()
    } else {
        format!("{group}/{version}")
    };
    Some(
        json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": list}),
    )
}

/// `GET /version`.
#[must_use]
pub fn version() -> Value {
    json!({
        "major": version::MAJOR, "minor": version::MINOR, "gitVersion": version::REPORTED, "gitCommit": "", "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "none", "compiler": "rustc", "platform": format!("linux/{}", version::arch(std::env::consts::ARCH)),
    })
}

fn path_of(group: &str, version: &str) -> String {
    if group.is_empty() {
        format!("api/{version}")
    } else {
        format!("apis/{group}/{version}")
    }
}

/// The content type with which kubectl requests OpenAPI v2.
pub(crate) const OPENAPI_V2: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";

/// `GET /openapi/v2`: a document without definitions. kubectl and Helm fall back to it for kinds
/// that `/openapi/v3` does not describe, such as `List`. They skip client-side validation of kinds
/// without a definition; the server validates them.
#[must_use]
pub(crate) fn openapi_v2() -> Value {
    json!({"swagger": "2.0", "info": {"title": "Holdfast", "version": version::REPORTED}, "paths": {}})
}

/// The same document as protobuf, the form that kubectl reads.
#[must_use]
pub(crate) fn openapi_v2_protobuf() -> Vec<u8> {
    // All fields here are shorter than 128 bytes, so that each length is a single byte.
    let field = |number: u8, content: &[u8]| {
        let head = [
            number << 3 | 2,
            u8::try_from(content.len()).unwrap_or(u8::MAX),
        ];
        [&head[..], content].concat()
    };
    let info = [
        field(1, b"Holdfast"),
        field(2, version::REPORTED.as_bytes()),
    ]
    .concat();
    [field(1, b"2.0"), field(2, &info)].concat()
}

/// `GET /openapi/v3`.
#[must_use]
pub(crate) fn openapi_index() -> Value {
    let paths: serde_json::Map<String, Value> = groups()
        .into_iter()
        .map(|(g, v)| {
            let path = path_of(g, v);
            let url = format!("/openapi/v3/{path}?hash={}", env!("CARGO_PKG_VERSION"));
            (path, json!({"serverRelativeURL": url}))
        })
        .collect();
    json!({"paths": paths})
}

/// `GET /openapi/v3/<path>`, which `kubectl apply` and `create -f` fetch. Its `fieldValidation`
/// parameters announce that the server validates fields.
#[must_use]
pub fn openapi(path: &str) -> Option<Value> {
    let (group, version) = groups().into_iter().find(|(g, v)| path_of(g, v) == path)?;
    let paths: serde_json::Map<String, Value> = served(group, version)
        .map(|r| {
            let scope = if r.namespaced { "/namespaces/{namespace}" } else { "" };
            let gvk = json!({"group": r.group, "version": r.version, "kind": r.kind});
            let parameters = json!([{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]);
            let operations =
                json!({"patch": {"x-kubernetes-group-version-kind": gvk, "parameters": parameters, "responses": {"200": {"description": "OK"}}}});
            (format!("/{path}{scope}/{}/{{name}}", r.plural), operations)
        })
        .collect();
    Some(
        json!({"openapi": "3.0.0", "info": {"title": "Holdfast", "version": version}, "paths": paths}),
    )
}
