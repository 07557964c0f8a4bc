//! Access to the metadata of API objects. Unset fields are empty. Pure.
//!
//! The core uses these functions instead of a client library's extension traits, because it only needs the values.

use std::collections::BTreeMap;

use k8s_openapi::Metadata;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

type Strings = BTreeMap<String, String>;

static NONE: Strings = Strings::new();

/// `metadata.name`.
#[must_use]
pub fn name(object: &impl Metadata<Ty = ObjectMeta>) -> &str {
    object.metadata().name.as_deref().unwrap_or_default()
}

/// `metadata.namespace`; empty for cluster-scoped objects.
#[must_use]
pub fn namespace(object: &impl Metadata<Ty = ObjectMeta>) -> &str {
    object.metadata().namespace.as_deref().unwrap_or_default()
}

/// `metadata.uid`.
#[must_use]
pub fn uid(object: &impl Metadata<Ty = ObjectMeta>) -> &str {
    object.metadata().uid.as_deref().unwrap_or_default()
}

/// `metadata.labels`.
#[must_use]
pub fn labels(object: &impl Metadata<Ty = ObjectMeta>) -> &Strings {
    object.metadata().labels.as_ref().unwrap_or(&NONE)
}

/// `metadata.annotations`.
#[must_use]
pub fn annotations(object: &impl Metadata<Ty = ObjectMeta>) -> &Strings {
    object.metadata().annotations.as_ref().unwrap_or(&NONE)
}
