//! GET and LIST: representations, resource versions, paging
//! (`staging/src/k8s.io/apiserver/pkg/endpoints/handlers/get.go`).

use std::sync::Arc;

use base64::Engine as _;
use serde_json::{Value, json};

use super::Api;
use super::error::ApiError;
use super::list_options::{ListOptions, Match};
use super::resources::Resource;
use super::route::Query;
use super::selector::Selector;
use super::table;
use crate::store::{Bytes, Record};

/// The representation of objects in a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum View {
    /// The objects themselves.
    Plain,
    /// Rows of a Table; contains the `includeObject` parameter.
    Table(Option<String>),
    /// `PartialObjectMetadata`.
    Partial,
}

impl View {
    /// Picks the first supported representation of an `Accept` header.
    pub fn of(accept: &str, query: &Query) -> Result<View, ApiError> {
        if accept.trim().is_empty() {
            return Ok(View::Plain);
        }
        for alternative in accept.split(',') {
            let mut parts = alternative.split(';').map(str::trim);
            let media = parts.next().unwrap_or_default();
            let parameters: Vec<&str> = parts.collect();
            let transform = parameters.iter().find_map(|p| p.strip_prefix("as="));
            let json = matches!(media, "application/json" | "application/*" | "*/*");
            match transform {
                _ if !json => {}
                None => return Ok(View::Plain),
                Some("Table") if parameters.contains(&"v=v1") => {
                    return Ok(View::Table(query.get("includeObject").map(Into::into)));
                }
                Some("PartialObjectMetadata" | "PartialObjectMetadataList")
                    if parameters.contains(&"v=v1") =>
                {
                    return Ok(View::Partial);
                }
                Some(_) => {}
            }
        }
        Err(ApiError::new(
            406,
            "NotAcceptable",
            "only the following media types are accepted: application/json, application/yaml, application/vnd.kubernetes.protobuf",
        ))
    }
}

type Items = Vec<(Arc<str>, Record)>;

impl Api {
    /// Reads a stored object; 404 if it does not exist.
    pub(super) fn fetch(
        &self,
        resource: &Resource,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<(Record, Value), ApiError> {
        let record = self
            .store
            .get(&resource.key(namespace, name))
            .ok_or_else(|| ApiError::not_found(resource.group, resource.plural, name))?;
        let object = serde_json::from_slice(&record.value).map_err(ApiError::internal)?;
        Ok((record, object))
    }

    /// GET of one object.
    pub(super) fn get(
        &self,
        resource: &Resource,
        namespace: Option<&str>,
        name: &str,
        view: &View,
    ) -> Result<Bytes, ApiError> {
        let (record, object) = self.fetch(resource, namespace, name)?;
        Ok(match view {
            View::Plain => record.value,
            View::Partial => render(&table::partial(&object)),
            View::Table(include) => {
                let row = table::row(
                    resource,
                    &object,
                    include.as_deref(),
                    jiff::Timestamp::now(),
                );
                render(&table_of(
                    resource,
                    json!({"resourceVersion": record.revision.to_string()}),
                    vec![row],
                ))
            }
        })
    }

    /// GET of a collection.
    pub(super) async fn list(
        &self,
        resource: &Resource,
        namespace: Option<&str>,
        query: &Query,
        view: &View,
    ) -> Result<Bytes, ApiError> {
        let selector = Selector::parse(
            resource,
            query.get("labelSelector"),
            query.get("fieldSelector"),
        )?;
        let prefix = resource.prefix(namespace);
        let options = ListOptions::of(query, false)?;
        let (requested, mut limit) = (options.revision, options.limit);
        let (items, revision, start): (Items, u64, Option<String>) = if let Some(token) =
            options.from
        {
            if requested.is_some_and(|v| v != 0) {
                return Err(ApiError::bad_request(
                    "specifying resource version is not allowed when using continue",
                ));
            }
            let (revision, start) = parse_token(token)?;
            let items = self.store.list_at(&prefix, revision).map_err(|_| {
                ApiError::expired("The provided continue parameter is too old to display a consistent list result. You must start a new list without the continue parameter.")
            })?;
            (items, revision, Some(start))
        } else {
            if let Some(revision) = requested.filter(|r| *r > 0) {
                self.wait_for(revision).await?;
            }
            match requested {
                Some(revision)
                    if revision > 0
                        && (options.matching == Some(Match::Exact)
                            || (limit > 0 && options.matching.is_none())) =>
                {
                    let items = self.store.list_at(&prefix, revision).map_err(|_| {
                        ApiError::expired("The resourceVersion for the provided list is too old.")
                    })?;
                    (items, revision, None)
                }
                _ => {
                    if requested == Some(0) {
                        limit = 0;
                    }
                    let (items, revision) = self.store.list(&prefix);
                    (items, revision, None)
                }
            }
        };
        let mut chosen: Items = items
            .into_iter()
            .filter(|(key, _)| start.as_deref().is_none_or(|start| &**key > start))
            .filter(|(_, record)| selector.matches(&record.attrs))
            .collect();
        let mut metadata = json!({"resourceVersion": revision.to_string()});
        if limit > 0 && chosen.len() > limit {
            let rest = chosen.len() - limit;
            chosen.truncate(limit);
            let token =
                json!({"rv": revision, "start": chosen.last().map(|(key, _)| key.to_string())})
                    .to_string();
            metadata["continue"] = base64::engine::general_purpose::URL_SAFE_NO_PAD
                .encode(token)
                .into();
            if selector.is_everything() {
                metadata["remainingItemCount"] = rest.into();
            }
        }
        list_body(resource, view, &metadata, chosen)
    }

    /// Waits until the store reaches `revision`, for at most three seconds.
    pub(super) async fn wait_for(&self, revision: u64) -> Result<(), ApiError> {
        let mut head = self.store.head();
        let reached = head.wait_for(|now| *now >= revision);
        if tokio::time::timeout(std::time::Duration::from_secs(3), reached)
            .await
            .is_err()
        {
            let mut error = ApiError::new(
                504,
                "Timeout",
                format!(
                    "Timeout: Too large resource version: {revision}, current: {}",
                    self.store.revision()
                ),
            );
            error.details = json!({"causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}], "retryAfterSeconds": 1});
            return Err(error);
        }
        Ok(())
    }
}

fn parse_token(token: &str) -> Result<(u64, String), ApiError> {
    let bad = || {
        ApiError::bad_request(
            "continue key is not valid: it must be the value of metadata.continue of an earlier response",
        )
    };
    let bytes = base64::engine::general_purpose::URL_SAFE_NO_PAD
        .decode(token)
        .map_err(|_| bad())?;
    let token: Value = serde_json::from_slice(&bytes).map_err(|_| bad())?;
    Ok((
        token["rv"].as_u64().ok_or_else(bad)?,
        token["start"].as_str().ok_or_else(bad)?.to_owned(),
    ))
}

fn list_body(
    resource: &Resource,
    view: &View,
    metadata: &Value,
    items: Items,
) -> Result<Bytes, ApiError> {
    let parse = |record: &Record| {
        serde_json::from_slice::<Value>(&record.value).map_err(ApiError::internal)
    };
    match view {
        // Joins the stored bytes without parsing them.
        View::Plain => {
            let size: usize = items.iter().map(|(_, r)| r.value.len() + 1).sum();
            let mut body = Vec::with_capacity(size + 128);
            body.extend_from_slice(
                format!(
                    r#"{{"kind":"{}List","apiVersion":"{}","metadata":{metadata},"items":["#,
                    resource.kind,
                    resource.api_version()
                )
                .as_bytes(),
            );
            for (i, (_, record)) in items.iter().enumerate() {
                if i > 0 {
                    body.push(b',');
                }
                body.extend_from_slice(&record.value);
            }
            body.extend_from_slice(b"]}");
            Ok(body.into())
        }
        View::Partial => {
            let items: Result<Vec<Value>, ApiError> = items
                .iter()
                .map(|(_, r)| parse(r).map(|o| table::partial(&o)))
                .collect();
            Ok(render(
                &json!({"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "items": items?}),
            ))
        }
        View::Table(include) => {
            let now = jiff::Timestamp::now();
            let rows: Result<Vec<Value>, ApiError> = items
                .iter()
                .map(|(_, r)| parse(r).map(|o| table::row(resource, &o, include.as_deref(), now)))
                .collect();
            Ok(render(&table_of(resource, metadata.clone(), rows?)))
        }
    }
}

/// Builds a Table.
pub(super) fn table_of(resource: &Resource, metadata: Value, rows: Vec<Value>) -> Value {
    json!({"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "columnDefinitions": table::definitions(resource), "rows": rows})
}

/// Serialises a value as JSON.
#[must_use]
pub fn render(value: &Value) -> Bytes {
    value.to_string().into()
}
