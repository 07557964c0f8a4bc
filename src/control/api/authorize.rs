//! Authorisation of requests by verb, target and user. The body is not needed.

use super::error::ApiError;
use super::resources::{REVIEWS, Resource, Sub};
use super::route::Target;
use super::selector::Selector;
use super::{Api, Request, auth};

/// The verb of a request for objects.
pub(super) fn verb(request: &Request, name: Option<&str>) -> Result<&'static str, ApiError> {
    let query = &request.query;
    let watching = query.flag("watch") && query.get("watch").is_some();
    Ok(match (request.method.as_str(), name) {
        ("GET" | "HEAD", None) if watching => "watch",
        ("GET" | "HEAD", None) => "list",
        ("GET" | "HEAD", Some(_)) => "get",
        ("POST", _) => "create",
        ("PUT", Some(_)) => "update",
        ("PATCH", Some(_)) => "patch",
        ("DELETE", Some(_)) => "delete",
        ("DELETE", None) => "deletecollection",
        _ => return Err(ApiError::method_not_allowed()),
    })
}

impl Api {
    /// Whether a user is allowed a request, by the built-in rules, the graph and RBAC.
    pub(super) fn is_allowed(&self, user: &auth::User, attributes: &auth::Attributes<'_>) -> bool {
        let related = || match user.node() {
            Some(node) if !user.is_in("system:masters") => {
                self.graph.is_related(&self.store, node, attributes)
            }
            _ => true,
        };
        (auth::is_allowed(user, attributes) && related())
            || self.rbac.allows(&self.store, user, attributes)
    }

    /// Whether a user may GET a path outside the object API.
    pub(super) fn can_get_path(&self, user: &auth::User, path: &str) -> bool {
        let path = if path.is_empty() { "/" } else { path };
        auth::can_get_path(user, path) || self.rbac.allows_path(&self.store, user, "get", path)
    }

    /// Rejects a request if its user is not authorised for its target.
    pub(super) fn authorize(&self, request: &Request, target: &Target) -> Result<(), ApiError> {
        let user = &request.user;
        match target {
            Target::Other(path) => {
                if !self.can_get_path(user, path) {
                    return Err(ApiError::forbidden(format!(
                        "forbidden: User {:?} cannot get path {:?}",
                        user.name,
                        if path.is_empty() { "/" } else { path }
                    )));
                }
            }
            Target::Review(kind) => {
                let (group, resource, _) = REVIEWS
                    .iter()
                    .find(|(_, _, k)| k == kind)
                    .ok_or_else(ApiError::no_such_resource)?;
                let attributes = auth::Attributes {
                    verb: "create",
                    group,
                    resource,
                    ..auth::Attributes::default()
                };
                if !self.is_allowed(user, &attributes) {
                    return Err(auth::forbidden_error(user, &attributes));
                }
            }
            Target::Objects {
                resource,
                namespace,
                name,
                sub,
            } => self.authorize_objects(
                request,
                resource,
                namespace.as_deref(),
                name.as_deref(),
                *sub,
            )?,
        }
        Ok(())
    }

    fn authorize_objects(
        &self,
        request: &Request,
        resource: &Resource,
        namespace: Option<&str>,
        name: Option<&str>,
        sub: Option<Sub>,
    ) -> Result<(), ApiError> {
        let verb = verb(request, name)?;
        // Only these verbs apply the field selector; a POST ignores it, so it must not narrow the authorisation there.
        let selects = matches!(verb, "list" | "watch" | "deletecollection");
        let selector = selects
            .then(|| Selector::parse(resource, None, request.query.get("fieldSelector")).ok())
            .flatten()
            .unwrap_or_default();
        let attributes = auth::Attributes {
            on_node: selector.fixed("spec.nodeName").unwrap_or_default(),
            ..auth::attributes_of(
                verb,
                resource,
                sub.map_or("", Sub::name),
                namespace.unwrap_or_default(),
                name.or(selector.fixed_name()).unwrap_or_default(),
            )
        };
        if self.is_allowed(&request.user, &attributes) {
            Ok(())
        } else {
            Err(auth::forbidden_error(&request.user, &attributes))
        }
    }
}
