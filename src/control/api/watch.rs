//! WATCH: streaming lists (KEP-3157), bookmarks, and objects that begin or cease to match the selector
//! (`staging/src/k8s.io/apiserver/pkg/endpoints/handlers/watch.go`).

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Api;
use super::error::ApiError;
use super::list_options::ListOptions;
use super::object::meta;
use super::read::{View, render, table_of};
use super::resources::Resource;
use super::route::Query;
use super::selector::Selector;
use super::table;
use crate::store::{Bytes, Change, Compacted, Event, Record};
use holdfast_https::guard;

/// Interval of bookmarks, if the client requests them.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);
/// Duration of a watch without `timeoutSeconds`.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(2700);

/// Maximum duration of a watch.
const MAX_TIMEOUT: Duration = Duration::from_secs(30 * 24 * 3600);

/// Maximum number of lines queued for a client, and of changes read from the history at a time.
/// It bounds the memory for clients that do not read.
const MAX_QUEUED: usize = 16;
/// How long a send may wait for a full queue before the watch is closed.
const SEND_TIMEOUT: Duration = Duration::from_secs(60);

/// One line of a watch.
#[derive(Debug)]
pub struct Line {
    kind: &'static str,
    /// Shared with the store if the view shows stored objects unchanged.
    object: Bytes,
}

impl Line {
    /// The line as sent, with its newline.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        let mut line = Vec::with_capacity(self.object.len() + 40);
        line.extend_from_slice(format!(r#"{{"type":"{}","object":"#, self.kind).as_bytes());
        line.extend_from_slice(&self.object);
        line.extend_from_slice(b"}\n");
        line.into()
    }
}

/// The objects of a prefix with their keys, and the revision of the list.
type Present = (Vec<(Arc<str>, Record)>, u64);

struct Watch {
    resource: &'static Resource,
    prefix: String,
    selector: Selector,
    view: View,
    bookmarks: bool,
    /// Changes up to this revision are sent.
    position: u64,
    /// Column definitions are sent with the first event only.
    columns_sent: bool,
    out: mpsc::Sender<Line>,
}

impl Api {
    /// Starts a watch; its lines arrive on the returned channel until the watch is closed.
    pub(super) fn watch(
        &self,
        resource: &'static Resource,
        namespace: Option<&str>,
        query: &Query,
        view: View,
    ) -> Result<mpsc::Receiver<Line>, ApiError> {
        let selector = Selector::parse(
            resource,
            query.get("labelSelector"),
            query.get("fieldSelector"),
        )?;
        let options = ListOptions::of(query, true)?;
        let requested = options.revision;
        // An absent revision and 0 name no position: without initial events, the watch begins at the current revision.
        let anywhere = matches!(requested, None | Some(0));
        let state_first = options.initial_events.unwrap_or(anywhere);
        let position = match requested {
            _ if anywhere => self.store.revision(),
            requested => requested.unwrap_or(0),
        };
        // Zero counts as absent.
        let seconds = options.timeout.and_then(|s| u64::try_from(s).ok());
        let seconds = seconds.filter(|s| *s > 0);
        let timeout = seconds.map_or(DEFAULT_TIMEOUT, |s| Duration::from_secs(s).min(MAX_TIMEOUT));
        let (out, lines) = mpsc::channel(MAX_QUEUED);
        let prefix = resource.prefix(namespace);
        // Listed here, not in the task below, so that changes after the response headers are sent as events.
        let present = (state_first && requested.unwrap_or(0) <= self.store.revision())
            .then(|| self.store.list(&prefix));
        let watch = Watch {
            resource,
            prefix,
            selector,
            view,
            bookmarks: query.flag("allowWatchBookmarks"),
            position,
            columns_sent: false,
            out,
        };
        let api = self.clone();
        tokio::spawn(async move {
            // `None` means that the client disconnected. A panic is logged. Either way the watch is closed.
            let _ =
                guard(watch.run(api, state_first, present, requested.unwrap_or(0), timeout)).await;
        });
        Ok(lines)
    }
}

/// The object as it was before a change, with the change's revision.
fn left_selector(event: &Event) -> Option<Record> {
    let previous = event.previous.as_ref()?;
    let mut object: Value = serde_json::from_slice(&previous.value).ok()?;
    meta(&mut object).insert("resourceVersion".into(), event.revision.to_string().into());
    Some(Record {
        value: render(&object),
        attrs: Arc::clone(&previous.attrs),
        revision: event.revision,
    })
}

impl Watch {
    async fn run(
        mut self,
        api: Api,
        state_first: bool,
        present: Option<Present>,
        at_least: u64,
        timeout: Duration,
    ) -> Option<()> {
        let deadline = Instant::now() + timeout;
        let mut head = api.store.head_of(&self.prefix);
        // A future revision, for instance after a restored backup, would leave the watch silent indefinitely.
        if let Err(error) = api.wait_for(at_least).await {
            return self.error(&error).await;
        }
        if state_first {
            let (items, revision) = present.unwrap_or_else(|| api.store.list(&self.prefix));
            self.position = revision;
            for (_, record) in &items {
                if self.selector.matches(&record.attrs) {
                    self.send("ADDED", record).await?;
                }
            }
            if self.bookmarks {
                self.bookmark(true).await?;
            }
        }
        let mut next_bookmark = Instant::now() + BOOKMARK_INTERVAL;
        loop {
            head.borrow_and_update();
            if let Err(compacted) = self.catch_up(&api).await? {
                return self.error(&ApiError::expired(compacted.to_string())).await;
            }
            let now = Instant::now();
            let (ends, due) = (now >= deadline, now >= next_bookmark);
            if self.bookmarks && (ends || due) {
                self.bookmark(false).await?;
            }
            if ends {
                return Some(());
            }
            if due {
                next_bookmark = now + BOOKMARK_INTERVAL;
            }
            tokio::select! {
                // Cancel-safe: `catch_up` finds a change whose notification is lost here.
                changed = head.changed() => changed.ok()?,
                // Cancel-safe: timers and the closing of a channel can be awaited again.
                () = tokio::time::sleep_until(next_bookmark.min(deadline)) => {}
                () = self.out.closed() => return None,
            }
        }
    }

    /// Sends all changes since the last position.
    async fn catch_up(&mut self, api: &Api) -> Option<Result<(), Compacted>> {
        loop {
            let (events, complete) =
                match api.store.changes(self.position, &self.prefix, MAX_QUEUED) {
                    Ok(changes) => changes,
                    Err(compacted) => return Some(Err(compacted)),
                };
            for event in &events {
                self.send_change(event).await?;
            }
            // The client may have named a future revision.
            self.position = self.position.max(complete);
            if events.len() < MAX_QUEUED {
                return Some(Ok(()));
            }
        }
    }

    /// Sends a change as this watcher's selector sees it.
    async fn send_change(&mut self, event: &Event) -> Option<()> {
        let before = event
            .previous
            .as_ref()
            .is_some_and(|r| self.selector.matches(&r.attrs));
        let after = event.change == Change::Put && self.selector.matches(&event.record.attrs);
        match (before, after) {
            (false, true) => self.send("ADDED", &event.record).await,
            (true, true) => self.send("MODIFIED", &event.record).await,
            (true, false) if event.change == Change::Put => match left_selector(event) {
                // The object no longer matches: the watcher gets a deletion of the version
                // it knows, at the revision of the change.
                Some(record) => self.send("DELETED", &record).await,
                None => Some(()),
            },
            (true, false) => self.send("DELETED", &event.record).await,
            (false, false) => Some(()),
        }
    }

    async fn send(&mut self, kind: &'static str, record: &Record) -> Option<()> {
        let object = match &self.view {
            View::Plain => record.value.clone(),
            view => {
                let object: Value = serde_json::from_slice(&record.value).ok()?;
                match view {
                    View::Table(include) => {
                        let row = table::row(
                            self.resource,
                            &object,
                            include.as_deref(),
                            jiff::Timestamp::now(),
                        );
                        let mut table = table_of(
                            self.resource,
                            json!({"resourceVersion": record.revision.to_string()}),
                            vec![row],
                        );
                        if std::mem::replace(&mut self.columns_sent, true) {
                            table["columnDefinitions"] = Value::Null;
                        }
                        render(&table)
                    }
                    _ => render(&table::partial(&object)),
                }
            }
        };
        self.line(kind, object).await
    }

    async fn bookmark(&mut self, initial: bool) -> Option<()> {
        let mut metadata = json!({"resourceVersion": self.position.to_string()});
        if initial {
            metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        let object = match self.view {
            View::Table(_) => table_of(self.resource, metadata, vec![]),
            View::Partial => {
                json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata})
            }
            View::Plain => {
                json!({"kind": self.resource.kind, "apiVersion": self.resource.api_version(), "metadata": metadata})
            }
        };
        self.line("BOOKMARK", render(&object)).await
    }

    async fn error(&mut self, error: &ApiError) -> Option<()> {
        self.line("ERROR", render(&error.status())).await
    }

    async fn line(&mut self, kind: &'static str, object: Bytes) -> Option<()> {
        let sent = self.out.send(Line { kind, object });
        tokio::time::timeout(SEND_TIMEOUT, sent).await.ok()?.ok()
    }
}
