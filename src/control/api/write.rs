//! CREATE, UPDATE and PATCH (`staging/src/k8s.io/apiserver/pkg/endpoints/handlers/create.go`, `update.go`, `patch.go`).

use std::sync::{Arc, Mutex};

use serde_json::Value;

use super::Api;
use super::admit;
use super::auth::{self, Attributes, User};
use super::batch;
use super::certificates;
use super::change;
use super::defaults;
use super::error::{ApiError, FieldError};
use super::expansion;
use super::networking;
use super::object;
use super::object::{is_deleting, list, meta, now, text};
use super::patch;
use super::resources::{Resource, Sub};
use super::restriction;
use super::route::Query;
use super::schema;
use super::services;
use super::storage;
use super::unenforced;
use super::validate;
use crate::store::{Bytes, Change, Expect, Record, Write, WriteError};
use holdfast_core::lock::lock;

/// How often the server retries a write that conflicts and names no resource version.
pub(super) const RETRIES: usize = 16;

/// The options of a write, and its user: every write is checked against the user's permissions.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// The authenticated user, who must be permitted to store the object.
    pub user: &'a User,
    /// `dryRun`: do everything except storing.
    pub dry_run: bool,
    /// `fieldValidation`.
    pub strict: Strictness,
}

/// How unknown fields are handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Strictness {
    /// Dropped silently.
    Ignore,
    /// Dropped with a warning.
    #[default]
    Warn,
    /// Rejected.
    Strict,
}

impl<'a> Options<'a> {
    /// Decodes the query of a write; `kind` is `CreateOptions`, `UpdateOptions` or `PatchOptions`.
    pub fn of(query: &Query, kind: &str, user: &'a User) -> Result<Options<'a>, ApiError> {
        let refuse = |error| ApiError::invalid(kind, "meta.k8s.io", "", &[error]);
        let dry_run = match query.get("dryRun") {
            None => false,
            Some("All") => true,
            Some(other) => return Err(refuse(FieldError::unsupported("dryRun", other, &["All"]))),
        };
        let strict = match query.get("fieldValidation") {
            None | Some("Warn") => Strictness::Warn,
            Some("Strict") => Strictness::Strict,
            Some("Ignore") => Strictness::Ignore,
            Some(other) => {
                return Err(refuse(FieldError::unsupported(
                    "fieldValidation",
                    other,
                    &["", "Ignore", "Strict", "Warn"],
                )));
            }
        };
        Ok(Options {
            user,
            dry_run,
            strict,
        })
    }
}

/// The result of a write.
pub struct Written {
    /// The HTTP status.
    pub code: u16,
    /// The body.
    pub body: Bytes,
    /// Warnings for the client.
    pub warnings: Vec<String>,
    /// The object after the write; `None` if nothing was stored, or if the result is about a request.
    pub stored: Option<Stored>,
}

/// The identity of an object after a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// The object's name.
    pub name: String,
    /// The object's uid.
    pub uid: String,
    /// The revision of the write.
    pub revision: u64,
}

impl Stored {
    /// The identity of `object` after the write of `record`.
    pub(super) fn of(object: &Value, record: &Record) -> Stored {
        Stored {
            name: object::name(object).to_owned(),
            uid: object::uid(object).to_owned(),
            revision: record.revision,
        }
    }
}

/// Compares a body with its kind's layout. Mistyped fields are rejected; unknown
/// ones are handled according to `strict`.
pub(super) fn check_fields(
    resource: &Resource,
    body: &mut Value,
    strict: Strictness,
) -> Result<Vec<String>, ApiError> {
    let (version, kind) = (resource.api_version(), resource.kind);
    let findings = schema::check(&version, kind, body);
    if let Some((path, is, expected)) = findings.mistyped {
        return Err(ApiError::bad_request(format!(
            "{kind} in version {:?} cannot be handled as a {kind}: json: cannot unmarshal {is} into Go struct field {kind}.{path} of type {expected}",
            resource.version
        )));
    }
    schema::normalize(&version, kind, body);
    if findings.unknown.is_empty() {
        return Ok(vec![]);
    }
    let texts: Vec<String> = findings
        .unknown
        .iter()
        .map(|path| format!("unknown field {path:?}"))
        .collect();
    if strict == Strictness::Strict {
        return Err(ApiError::bad_request(format!(
            "{kind} in version {:?} cannot be handled as a {kind}: strict decoding error: {}",
            resource.version,
            texts.join(", ")
        )));
    }
    for path in &findings.unknown {
        remove_path(body, path);
    }
    Ok(if strict == Strictness::Warn {
        texts
    } else {
        vec![]
    })
}

fn remove_path(value: &mut Value, path: &str) {
    let pointer: String = path
        .replace('[', ".")
        .replace(']', "")
        .split('.')
        .map(|p| format!("/{p}"))
        .collect();
    if let Some((parent, key)) = pointer.rsplit_once('/')
        && let Some(map) = value.pointer_mut(parent).and_then(Value::as_object_mut)
    {
        map.remove(key);
    }
}

/// Checks that the body has the kind and namespace of the path, and fills in omitted ones.
pub(super) fn fit_to_path(
    resource: &Resource,
    namespace: Option<&str>,
    body: &mut Value,
) -> Result<(), ApiError> {
    if !body.is_object() {
        return Err(ApiError::bad_request(format!(
            "the object provided is unrecognized (must be of type {}): couldn't get version/kind; the body is not a JSON object",
            resource.kind
        )));
    }
    let (version, kind) = (resource.api_version(), resource.kind);
    let given_kind = text(body, &["kind"]).unwrap_or_default().to_owned();
    let given_version = text(body, &["apiVersion"]).unwrap_or_default().to_owned();
    if (!given_kind.is_empty() && given_kind != kind)
        || (!given_version.is_empty() && given_version != version)
    {
        return Err(ApiError::bad_request(format!(
            "{given_kind} in version {given_version:?} cannot be handled as a {kind}: no kind {given_kind:?} is registered for version {given_version:?} in scheme \"holdfast\""
        )));
    }
    body["apiVersion"] = version.into();
    body["kind"] = kind.into();
    if let Some(namespace) = namespace {
        let meta = meta(body);
        match meta.get("namespace").and_then(Value::as_str) {
            Some(own) if !own.is_empty() && own != namespace => {
                return Err(ApiError::bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request",
                ));
            }
            _ => meta.insert("namespace".into(), namespace.into()),
        };
    }
    Ok(())
}

impl Api {
    /// POST to a collection.
    pub(super) async fn create(
        &self,
        resource: &'static Resource,
        namespace: Option<&str>,
        mut body: Value,
        options: &Options<'_>,
    ) -> Result<Written, ApiError> {
        if resource.namespaced && namespace.is_none() {
            return Err(ApiError::method_not_allowed());
        }
        fit_to_path(resource, namespace, &mut body)?;
        let mut warnings = check_fields(resource, &mut body, options.strict)?;
        warnings.extend(batch::warnings(resource.kind, &body));
        warnings.extend(networking::warnings(resource.kind, &body));
        warnings.extend(unenforced::warnings(resource.kind, &body));
        if !object::text(&body, &["metadata", "resourceVersion"])
            .unwrap_or_default()
            .is_empty()
        {
            return Err(ApiError::new(
                500,
                "",
                "resourceVersion should not be set on objects to be created",
            ));
        }
        let generate = text(&body, &["metadata", "generateName"])
            .unwrap_or_default()
            .to_owned();
        let fixed_name = !object::name(&body).is_empty();
        for _ in 0..8 {
            let mut fresh = body.clone();
            if !fixed_name && !generate.is_empty() {
                generate_name(&mut fresh, &generate);
            }
            let name = object::name(&fresh).to_owned();
            // The write requires that the namespace is unchanged since this check. Otherwise an object could be created
            // in a namespace whose deletion has begun.
            let requires = match namespace {
                Some(namespace) => Some(admit::namespace(&self.store, resource, namespace, &name)?),
                None => None,
            };
            let reservation = self.prepare_new(resource, namespace, &mut fresh).await?;
            let errors = validate::new(resource, &fresh);
            if !errors.is_empty() {
                return Err(ApiError::invalid(
                    resource.kind,
                    resource.group,
                    &name,
                    &errors,
                ));
            }
            let kind = (resource, None);
            let write = restriction::Write::new(kind, (namespace, &name), None, Some(&fresh));
            self.check_writer(options.user, &write)?;
            let key = resource.key(namespace, &name);
            if options.dry_run {
                if self.store.get(&key).is_some() {
                    return Err(ApiError::already_exists(
                        resource.group,
                        resource.plural,
                        &name,
                    ));
                }
                return Ok(Written {
                    code: 201,
                    body: super::read::render(&fresh),
                    warnings,
                    stored: None,
                });
            }
            let uid = object::uid(&fresh).to_owned();
            let write = Write {
                requires,
                ..write_of(resource, key, Expect::Absent, Change::Put, fresh)
            };
            match self.commit(write, reservation).await {
                Ok(record) => {
                    return Ok(Written {
                        code: 201,
                        body: record.value,
                        warnings,
                        stored: Some(Stored {
                            name,
                            uid,
                            revision: record.revision,
                        }),
                    });
                }
                Err(WriteError::Superseded) => {}
                Err(WriteError::Conflict(_)) if !fixed_name => {}
                Err(WriteError::Conflict(found)) => return Err(taken(resource, &name, found)),
                Err(other) => return Err(ApiError::internal(other)),
            }
        }
        Err(ApiError::already_exists(
            resource.group,
            resource.plural,
            &generate,
        ))
    }

    /// Completes a new object. The caller keeps the reservation until the write ends.
    async fn prepare_new(
        &self,
        resource: &Resource,
        namespace: Option<&str>,
        fresh: &mut Value,
    ) -> Result<Option<services::Reservation>, ApiError> {
        let metadata = meta(fresh);
        for key in [
            "uid",
            "selfLink",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "resourceVersion",
            "generation",
            "managedFields",
        ] {
            metadata.remove(key);
        }
        metadata.insert("uid".into(), object::new_uid().into());
        metadata.insert("creationTimestamp".into(), now().into());
        if resource.generation {
            metadata.insert("generation".into(), 1.into());
        }
        if resource.has(Sub::Status) && resource.kind != "Node" {
            fresh.as_object_mut().map(|o| o.remove("status"));
        }
        if resource.kind == "Job" {
            batch::generate_selector(fresh);
        }
        defaults::apply(resource.kind, fresh);
        let mut reservation = None;
        match (resource.kind, namespace) {
            ("Pod", Some(namespace)) => admit::pod(&self.store, namespace, fresh).await?,
            ("PersistentVolumeClaim", _) => storage::admit_claim(&self.store, fresh),
            ("PersistentVolume", _) => storage::admit_volume(fresh),
            ("Ingress", _) => networking::admit_ingress(&self.store, fresh),
            ("Service", _) => {
                let reserved = services::allocate(&self.services, &self.store, None, fresh)?;
                reservation = Some(reserved);
            }
            _ => {}
        }
        // Also applies the defaults of fields that admission added.
        defaults::apply(resource.kind, fresh);
        object::Size::check(fresh)?;
        Ok(reservation)
    }

    /// Checks the permissions that depend on the content of the objects.
    pub(super) fn check_writer(
        &self,
        user: &User,
        write: &restriction::Write<'_>,
    ) -> Result<(), ApiError> {
        if let Some(node) = user.node() {
            let read = |key: &str| serde_json::from_slice(&self.store.get(key)?.value).ok();
            restriction::check(node, &read, write)?;
        }
        let Some(new) = write.new else { return Ok(()) };
        if let ("CertificateSigningRequest", Some(old)) = (write.resource.kind, write.old)
            && let Some((verb, signer)) = certificates::required_permission(write.sub, old, new)
        {
            self.check_signer(user, verb, signer)?;
        }
        self.rbac
            .check_write(&self.store, user, write.resource.kind, write.old, new)
    }

    /// Whether a user may `approve` or `sign` for a signer, or for all signers of its domain.
    fn check_signer(&self, user: &User, verb: &str, signer: &str) -> Result<(), ApiError> {
        let domain = signer.split('/').next().unwrap_or_default();
        let is_allowed = |name: &str| {
            let attributes = Attributes {
                verb,
                group: "certificates.k8s.io",
                resource: "signers",
                name,
                ..Attributes::default()
            };
            self.is_allowed(user, &attributes)
        };
        if is_allowed(signer) || is_allowed(&format!("{domain}/*")) {
            return Ok(());
        }
        Err(ApiError::forbidden(format!(
            "certificatesigningrequests is forbidden: user {:?} is not permitted to {verb} requests with signerName {signer:?}",
            user.name
        )))
    }

    /// Whether a claim may be expanded as requested.
    fn check_growth(&self, resource: &Resource, old: &Value, new: &Value) -> Result<(), ApiError> {
        if resource.kind != "PersistentVolumeClaim" {
            return Ok(());
        }
        expansion::check(old, new, |class| {
            let key = format!("storageclasses/{class}");
            serde_json::from_slice(&self.store.get(&key)?.value).ok()
        })
    }

    /// Allocates the values that an update of a service needs. The caller keeps the reservation until the write ends.
    fn reserve(
        &self,
        resource: &Resource,
        sub: Option<Sub>,
        old: &Value,
        new: &mut Value,
    ) -> Result<Option<services::Reservation>, ApiError> {
        if resource.kind != "Service" || sub.is_some() {
            return Ok(None);
        }
        services::allocate(&self.services, &self.store, Some(old), new).map(Some)
    }

    /// Performs a write, and then releases the values that were reserved for it. A client that disconnects meanwhile does not
    /// release them early.
    async fn commit(
        &self,
        write: Write,
        reservation: Option<services::Reservation>,
    ) -> Result<Record, WriteError> {
        let Some(reservation) = reservation else {
            return self.store.write(write).await;
        };
        let store = self.store.clone();
        let task = tokio::spawn(async move {
            let written = store.write(write).await;
            drop(reservation);
            written
        });
        task.await.map_err(|_| WriteError::Closed)?
    }

    /// Stores an object; the store assigns the revision, which is then set in the object.
    pub(super) async fn put(
        &self,
        resource: &Resource,
        key: String,
        expect: Expect,
        value: Value,
    ) -> Result<Record, WriteError> {
        let write = write_of(resource, key, expect, Change::Put, value);
        self.store.write(write).await
    }

    pub(super) async fn remove(
        &self,
        resource: &Resource,
        key: String,
        revision: u64,
        value: Value,
    ) -> Result<Record, WriteError> {
        let expect = Expect::Revision(revision);
        let write = write_of(resource, key, expect, Change::Delete, value);
        self.store.write(write).await
    }

    /// PUT of an object or subresource.
    pub(super) async fn update(
        &self,
        resource: &'static Resource,
        namespace: Option<&str>,
        name: &str,
        sub: Option<Sub>,
        mut body: Value,
        options: &Options<'_>,
    ) -> Result<Written, ApiError> {
        fit_to_path(resource, namespace, &mut body)?;
        let warnings = check_fields(resource, &mut body, options.strict)?;
        let own = object::name(&body);
        if !own.is_empty() && own != name {
            return Err(ApiError::bad_request(format!(
                "the name of the object ({own}) does not match the name on the URL ({name})"
            )));
        }
        meta(&mut body).insert("name".into(), name.into());
        if sub.is_none()
            && resource.create_on_update
            && self.store.get(&resource.key(namespace, name)).is_none()
        {
            // An update that creates an object needs permission to create it (upstream's `withAuthorization`,
            // `staging/src/k8s.io/apiserver/pkg/endpoints/handlers/update.go`).
            let namespace_of = namespace.unwrap_or_default();
            let attributes = auth::attributes_of("create", resource, "", namespace_of, name);
            if !self.is_allowed(options.user, &attributes) {
                return Err(auth::forbidden_error(options.user, &attributes));
            }
            return Box::pin(self.create(resource, namespace, body, options)).await;
        }
        if resource.needs_version
            && text(&body, &["metadata", "resourceVersion"])
                .unwrap_or_default()
                .is_empty()
        {
            let error = FieldError::invalid(
                "metadata.resourceVersion",
                &0.into(),
                "must be specified for an update",
            );
            return Err(ApiError::invalid(
                resource.kind,
                resource.group,
                name,
                &[error],
            ));
        }
        self.change(resource, namespace, name, sub, options, warnings, |_| {
            Ok(body.clone())
        })
        .await
    }

    /// PATCH of an object or subresource.
    pub(super) async fn patch(
        &self,
        resource: &'static Resource,
        namespace: Option<&str>,
        name: &str,
        sub: Option<Sub>,
        format: patch::Format,
        patch: &Value,
        options: &Options<'_>,
    ) -> Result<Written, ApiError> {
        let wanted_uid = text(patch, &["metadata", "uid"]).map(str::to_owned);
        let warnings = Mutex::new(vec![]);
        let change = self.change(resource, namespace, name, sub, options, vec![], |old| {
            if let Some(uid) = wanted_uid.as_deref().filter(|uid| *uid != object::uid(old)) {
                return Err(ApiError::conflict(
                    resource.group,
                    resource.plural,
                    name,
                    &format!(
                        "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
                        object::uid(old)
                    ),
                ));
            }
            let mut new = patch::apply(format, old, patch)?;
            // If the patch leaves the resource version unchanged, it is no precondition. Any
            // other version is one and leads to a conflict.
            let version =
                |object: &Value| text(object, &["metadata", "resourceVersion"]).map(str::to_owned);
            if version(&new) == version(old) {
                meta(&mut new).remove("resourceVersion");
            }
            fit_to_path(resource, namespace, &mut new)?;
            if object::name(&new) != name {
                return Err(ApiError::bad_request(format!(
                    "the name of the object ({}) does not match the name on the URL ({name})",
                    object::name(&new)
                )));
            }
            let unknown = check_fields(resource, &mut new, options.strict);
            *lock(&warnings) = unknown.map_err(|error| {
                match error.message.split_once("strict decoding error: ") {
                    Some((_, what)) => ApiError::invalid(
                        resource.kind,
                        resource.group,
                        name,
                        &[FieldError::invalid(
                            "patch",
                            patch,
                            &format!("strict decoding error: {what}"),
                        )],
                    ),
                    None => ApiError::invalid(
                        resource.kind,
                        resource.group,
                        name,
                        &[FieldError::invalid("patch", patch, &error.message)],
                    ),
                }
            })?;
            Ok(new)
        });
        let mut written = change.await?;
        written.warnings.append(&mut lock(&warnings));
        Ok(written)
    }

    /// The common part of all updates: compute the new object from the stored one, restore immutable fields, validate
    /// and store. If the write conflicts and the caller named no version, it is retried.
    #[allow(clippy::too_many_arguments)]
    pub(super) async fn change(
        &self,
        resource: &'static Resource,
        namespace: Option<&str>,
        name: &str,
        sub: Option<Sub>,
        options: &Options<'_>,
        mut warnings: Vec<String>,
        make: impl Fn(&Value) -> Result<Value, ApiError>,
    ) -> Result<Written, ApiError> {
        for _ in 0..RETRIES {
            let (record, old) = self.fetch(resource, namespace, name)?;
            let mut new = make(&old)?;
            let named = text(&new, &["metadata", "resourceVersion"])
                .unwrap_or_default()
                .to_owned();
            if !named.is_empty() && named != record.revision.to_string() {
                return Err(ApiError::modified(resource.group, resource.plural, name));
            }
            let uid = object::uid(&new);
            if !uid.is_empty() && uid != object::uid(&old) {
                return Err(ApiError::conflict(
                    resource.group,
                    resource.plural,
                    name,
                    &format!(
                        "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
                        object::uid(&old)
                    ),
                ));
            }
            change::merge(resource, sub, &old, &mut new);
            let reservation = self.reserve(resource, sub, &old, &mut new)?;
            if new != old {
                let kind = (resource, sub);
                let write =
                    restriction::Write::new(kind, (namespace, name), Some(&old), Some(&new));
                self.check_writer(options.user, &write)?;
            }
            let errors = change::check(resource, sub, &old, &new);
            if !errors.is_empty() {
                return Err(ApiError::invalid(
                    resource.kind,
                    resource.group,
                    name,
                    &errors,
                ));
            }
            object::Size::check(&new)?;
            if sub.is_none() && new != old {
                self.check_growth(resource, &old, &new)?;
                // A retry adds the same warnings again; `warnings::headers` removes duplicates.
                warnings.extend(unenforced::warnings(resource.kind, &new));
            }
            if new == old || options.dry_run {
                let stored = (!options.dry_run).then(|| Stored::of(&old, &record));
                let body = if new == old {
                    record.value
                } else {
                    super::read::render(&new)
                };
                return Ok(Written {
                    code: 200,
                    body,
                    warnings,
                    stored,
                });
            }
            let key = resource.key(namespace, name);
            let finished = if is_finished(resource, &new) {
                self.remove(resource, key, record.revision, new).await
            } else {
                let expect = Expect::Revision(record.revision);
                let write = write_of(resource, key, expect, Change::Put, new);
                self.commit(write, reservation).await
            };
            match finished {
                Ok(record) => {
                    return Ok(Written {
                        code: 200,
                        stored: Some(Stored::of(&old, &record)),
                        body: record.value,
                        warnings,
                    });
                }
                Err(WriteError::Conflict(_)) if named.is_empty() => {}
                Err(WriteError::Conflict(Some(_))) => {
                    return Err(ApiError::modified(resource.group, resource.plural, name));
                }
                Err(WriteError::Conflict(None)) => {
                    return Err(ApiError::not_found(resource.group, resource.plural, name));
                }
                Err(other) => return Err(ApiError::internal(other)),
            }
        }
        Err(ApiError::modified(resource.group, resource.plural, name))
    }
}

fn generate_name(object: &mut Value, beginning: &str) {
    let beginning: String = beginning.chars().take(58).collect();
    let name = format!("{beginning}{}", object::name_suffix());
    meta(object).insert("name".into(), name.into());
}

/// The error for a name that `found` already has.
fn taken(resource: &Resource, name: &str, found: Option<Record>) -> ApiError {
    let mut error = ApiError::already_exists(resource.group, resource.plural, name);
    let old: Option<Value> = found.and_then(|r| serde_json::from_slice(&r.value).ok());
    if old.is_some_and(|o| is_deleting(&o)) {
        error.message = format!("object is being deleted: {}", error.message);
    }
    error
}

fn write_of(
    resource: &Resource,
    key: String,
    expect: Expect,
    change: Change,
    mut value: Value,
) -> Write {
    let attrs = Arc::new(object::attrs(resource, &value));
    let render = Box::new(move |revision: u64| {
        meta(&mut value).insert("resourceVersion".into(), revision.to_string().into());
        super::read::render(&value)
    });
    Write {
        key,
        expect,
        requires: None,
        change,
        render,
        attrs,
    }
}

/// Whether an object that is being deleted can be removed: no finalizers, and no grace period.
pub(super) fn is_finished(resource: &Resource, object: &Value) -> bool {
    let held = !list(object, &["metadata", "finalizers"]).is_empty()
        || !list(object, &["spec", "finalizers"]).is_empty() && resource.kind == "Namespace";
    let graceful = object["metadata"]["deletionGracePeriodSeconds"]
        .as_i64()
        .is_some_and(|g| g > 0);
    is_deleting(object) && !held && !graceful
}
