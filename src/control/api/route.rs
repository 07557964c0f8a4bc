//! Parses the path and query of a request. Pure.

use std::collections::HashMap;

use super::error::ApiError;
use super::resources::{REVIEWS, Resource, Sub};
use holdfast_core::serving::query::{self, decode};

/// The query parameters, decoded; the last of repeated ones applies.
#[derive(Debug, Default, Clone)]
pub struct Query(HashMap<String, String>);

impl Query {
    /// Decodes `a=b&c=d`.
    #[must_use]
    pub fn parse(text: &str) -> Query {
        Query(query::pairs(text).into_iter().collect())
    }

    /// A parameter that is present and not empty.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0
            .get(key)
            .map(String::as_str)
            .filter(|v| !v.is_empty())
    }

    /// Whether a parameter is present, with or without a value.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// A boolean in Go's syntax; a parameter without a value is true.
    #[must_use]
    pub fn flag(&self, key: &str) -> bool {
        self.0.get(key).is_some_and(|value| query::is_true(value))
    }
}

/// The target of a request.
#[derive(Debug)]
pub enum Target {
    /// Objects of a stored kind.
    Objects {
        /// The kind.
        resource: &'static Resource,
        /// The namespace; `None` for cluster-scoped kinds and lists over all namespaces.
        namespace: Option<String>,
        /// The object's name; `None` for collections.
        name: Option<String>,
        /// The subresource, if any.
        sub: Option<Sub>,
    },
    /// A review, which is evaluated and not stored: its kind.
    Review(&'static str),
    /// Any other path (discovery, health, version), without trailing slash.
    Other(String),
}

/// Parses a path.
pub fn target(path: &str) -> Result<Target, ApiError> {
    let trimmed = path.trim_end_matches('/');
    let segments: Vec<String> = trimmed.split('/').skip(1).map(decode).collect();
    let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
    let (group, version, rest) = match segments.as_slice() {
        ["api", version, rest @ ..] if !rest.is_empty() => ("", *version, rest),
        ["apis", group, version, rest @ ..] if !rest.is_empty() => (*group, *version, rest),
        _ => return Ok(Target::Other(trimmed.to_owned())),
    };
    if let [plural] = rest
        && let Some((_, _, kind)) = REVIEWS.iter().find(|(g, p, _)| *g == group && p == plural)
    {
        return Ok(Target::Review(kind));
    }
    let (namespace, rest) = match rest {
        // `namespaces/x/status` and `/finalize` are subresources of the namespace itself.
        ["namespaces", _] | ["namespaces", _, "status" | "finalize"] if group.is_empty() => {
            (None, rest)
        }
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() => {
            (Some((*namespace).to_owned()), rest)
        }
        rest => (None, rest),
    };
    let resource =
        Resource::find(group, version, rest[0]).ok_or_else(ApiError::no_such_resource)?;
    if namespace.is_some() && !resource.namespaced {
        return Err(ApiError::no_such_resource());
    }
    let (name, sub) = match &rest[1..] {
        [] => (None, None),
        [name] => (Some((*name).to_owned()), None),
        // The path after `proxy` belongs to the server behind it.
        [name, "proxy", ..] if resource.has(Sub::Proxy) => {
            (Some((*name).to_owned()), Some(Sub::Proxy))
        }
        [name, sub] => {
            let sub = resource
                .subresources
                .iter()
                .find(|s| s.name() == *sub)
                .ok_or_else(ApiError::no_such_resource)?;
            (Some((*name).to_owned()), Some(*sub))
        }
        _ => return Err(ApiError::no_such_resource()),
    };
    if name.is_some() && resource.namespaced && namespace.is_none() {
        return Err(ApiError::no_such_resource());
    }
    Ok(Target::Objects {
        resource,
        namespace,
        name,
        sub,
    })
}

/// The parts of a name in the path: `NAME`, `NAME:PORT` or `SCHEME:NAME:PORT`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Requested<'a> {
    pub(super) is_https: bool,
    pub(super) name: &'a str,
    /// A number, the name of a service's port, or empty.
    pub(super) port: &'a str,
}

/// Parses the name of an object whose server a request is for.
pub(super) fn requested<'a>(id: &'a str, what: &str) -> Result<Requested<'a>, ApiError> {
    let parts: Vec<&str> = id.split(':').collect();
    let (scheme, name, port) = match parts.as_slice() {
        [name] => ("", *name, ""),
        [name, port] => ("", *name, *port),
        [scheme @ ("" | "http" | "https"), name, port] => (*scheme, *name, *port),
        _ => ("", "", ""),
    };
    if name.is_empty() {
        return Err(ApiError::bad_request(format!(
            "invalid {what} request {id:?}"
        )));
    }
    Ok(Requested {
        is_https: scheme == "https",
        name,
        port,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_after_a_services_proxy_has_any_length() {
        let found = target("/api/v1/namespaces/a/services/https:s:web/proxy/x/y/").ok();
        let Some(Target::Objects { name, sub, .. }) = found else {
            panic!("no objects: {found:?}");
        };
        assert_eq!(name.as_deref(), Some("https:s:web"));
        assert_eq!(sub, Some(Sub::Proxy));
    }

    #[test]
    fn a_name_has_a_scheme_and_a_port() {
        for (id, expected) in [
            ("a", Some((false, "a", ""))),
            ("a:80", Some((false, "a", "80"))),
            ("a:web", Some((false, "a", "web"))),
            ("http:a:80", Some((false, "a", "80"))),
            ("https:a:", Some((true, "a", ""))),
            (":a:80", Some((false, "a", "80"))),
            ("ftp:a:80", None),
            ("https::80", None),
            ("https:a:80:81", None),
            ("", None),
        ] {
            let found = requested(id, "pod").ok();
            let found = found.map(|of| (of.is_https, of.name, of.port));
            assert_eq!(found, expected, "{id}");
        }
    }

    #[test]
    fn paths_are_parsed_into_targets() {
        let shape = |path: &str| match target(path) {
            Ok(Target::Objects {
                resource,
                namespace,
                name,
                sub,
            }) => {
                format!(
                    "{} {namespace:?} {name:?} {:?}",
                    resource.plural,
                    sub.map(Sub::name)
                )
            }
            Ok(Target::Review(kind)) => format!("review {kind}"),
            Ok(Target::Other(path)) => format!("other {path}"),
            Err(error) => error.code.to_string(),
        };
        let cases = [
            ("/api/v1/pods", "pods None None None"),
            (
                "/api/v1/namespaces/a/pods/p/status",
                "pods Some(\"a\") Some(\"p\") Some(\"status\")",
            ),
            ("/api/v1/namespaces/a", "namespaces None Some(\"a\") None"),
            (
                "/api/v1/namespaces/a/finalize",
                "namespaces None Some(\"a\") Some(\"finalize\")",
            ),
            (
                "/apis/apps/v1/namespaces/a/deployments/d/scale",
                "deployments Some(\"a\") Some(\"d\") Some(\"scale\")",
            ),
            (
                "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
                "review SelfSubjectAccessReview",
            ),
            ("/api/v1", "other /api/v1"),
            ("/version/", "other /version"),
            (
                "/api/v1/nodes/n/proxy/pods/x",
                "nodes None Some(\"n\") Some(\"proxy\")",
            ),
            (
                "/api/v1/namespaces/a/pods/p/log",
                "pods Some(\"a\") Some(\"p\") Some(\"log\")",
            ),
            ("/api/v1/widgets", "404"),
            ("/api/v1/namespaces/a/nodes", "404"),
            ("/api/v1/pods/p", "404"),
            ("/api/v1/namespaces/a/pods/p/frob", "404"),
        ];
        for (path, expected) in cases {
            assert_eq!(shape(path), expected, "{path}");
        }
        let query = Query::parse("labelSelector=a%3Db%2Cc&watch=true&x");
        assert_eq!(query.get("labelSelector"), Some("a=b,c"));
        assert!(query.flag("watch") && query.flag("x") && !query.flag("y"));
    }
}
