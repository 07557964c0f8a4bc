use std::collections::HashSet;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Event;
use serde_json::Value;

use super::poster::{EventSink, QueuedEvents};
use super::*;
use crate::Starts;
use holdfast_kubeapi::pods::ApiFailure;

fn emitted(kind: Kind, reason: &str) -> Emitted {
    Emitted {
        occurred_at: Timestamp::UNIX_EPOCH,
        queued_at: Instant::now(),
        about: object("Pod", "p"),
        kind,
        reason: reason.into(),
        message: String::new(),
        annotations: None,
    }
}

#[tokio::test(start_paused = true)]
async fn a_normal_event_waits_until_starts_are_idle_and_a_warning_does_not() {
    let starts = Starts::for_processors(1);
    let (mut idle_gate, begun) = (starts.idle_gate(), Instant::now());
    let (mut waiting, busy) = (QueuedEvents::default(), HashSet::new());
    assert!(waiting.next(Some(&mut idle_gate), &busy).await.is_none());
    waiting.add(emitted(Kind::Normal, "Pulled"));
    waiting.add(emitted(Kind::Normal, "Created"));
    waiting.add(emitted(Kind::Warning, "Failed"));
    let posted = async {
        tokio::time::sleep(Duration::from_millis(1)).await;
        let mut posted = vec![];
        while let Some(next) = waiting.next(Some(&mut idle_gate), &busy).await {
            posted.push((next.reason, begun.elapsed().as_millis() / 100));
        }
        posted
    };
    let start = starts.container(tokio::time::sleep(Duration::from_millis(300)));
    let (posted, ()) = tokio::join!(posted, start);
    let expected = [("Failed", 0), ("Pulled", 3), ("Created", 3)];
    assert_eq!(posted, expected.map(|(reason, at)| (reason.to_owned(), at)));
}

/// Behaviour of the test's apiserver.
#[derive(Default)]
struct Behaviour {
    is_down: bool,
    /// Requests about this object are not answered for 20 s.
    hangs_for: Option<String>,
    refuses: bool,
    requests: usize,
    /// Messages of the stored events with their counts, in order.
    stored: Vec<(String, i32)>,
}

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Behaviour>>);

impl Sink {
    async fn request(&self, about: &str) -> Result<(), ApiFailure> {
        let (hangs, is_down, refuses) = {
            let mut sink = lock(&self.0);
            sink.requests += 1;
            let hangs = sink.hangs_for.as_deref() == Some(about);
            (hangs, sink.is_down, sink.refuses)
        };
        if hangs {
            tokio::time::sleep(Duration::from_secs(20)).await;
            return Err(ApiFailure::Timeout("no answer".into()));
        }
        match (is_down, refuses) {
            (true, _) => Err(ApiFailure::Unavailable("connection refused".into())),
            (_, true) => Err(ApiFailure::Forbidden("the namespace is terminating".into())),
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl EventSink for Sink {
    async fn create(&self, event: &Event) -> Result<(), ApiFailure> {
        let about = event.involved_object.name.clone().unwrap_or_default();
        self.request(&about).await?;
        let message = event.message.clone().unwrap_or_default();
        let stored = (message, event.count.unwrap_or(0));
        lock(&self.0).stored.push(stored);
        Ok(())
    }

    async fn count(&self, _: &str, name: &str, patch: &Value) -> Result<(), ApiFailure> {
        self.request(name.split('.').next().unwrap_or_default())
            .await?;
        let (message, count) = (patch["message"].as_str(), patch["count"].as_i64());
        let count = i32::try_from(count.unwrap_or(0)).expect("small");
        let message = message.unwrap_or_default().to_owned();
        lock(&self.0).stored.push((message, count));
        Ok(())
    }
}

impl Sink {
    fn events(&self) -> Events {
        let (node, clock) = ("n", Clock::starting_at(Timestamp::UNIX_EPOCH));
        let idle_gate = Starts::for_processors(1).idle_gate();
        Events::with_sink(
            Arc::new(self.clone()),
            node,
            clock,
            (50.0, 100.0),
            idle_gate,
        )
    }

    fn stored(&self) -> Vec<(String, i32)> {
        lock(&self.0).stored.clone()
    }
}

fn warn(events: &Events, pod: &str, message: &str) {
    events.emit(object("Pod", pod), Kind::Warning, "Failed", message);
}

#[tokio::test(start_paused = true)]
async fn events_of_an_outage_are_posted_after_it_in_order_and_counted() {
    let sink = Sink::default();
    let events = sink.events();
    lock(&sink.0).is_down = true;
    for n in 0..300 {
        warn(&events, &format!("p{n}"), &format!("a{n}"));
    }
    warn(&events, "p0", "b0");
    warn(&events, "p0", "a0");
    tokio::time::sleep(Duration::from_secs(60)).await;
    let requests = lock(&sink.0).requests;
    assert!(
        (8..=30).contains(&requests),
        "back-off limits the requests: {requests}"
    );
    lock(&sink.0).is_down = false;
    tokio::time::sleep(Duration::from_secs(20)).await;
    let stored = sink.stored();
    assert_eq!(stored.len(), 302);
    let of_first: Vec<_> = stored
        .iter()
        .filter(|(message, _)| message == "a0" || message == "b0")
        .map(|(message, count)| (message.as_str(), *count))
        .collect();
    assert_eq!(of_first, [("a0", 1), ("b0", 1), ("a0", 2)]);
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_request_delays_no_event_of_another_object() {
    let sink = Sink::default();
    let events = sink.events();
    lock(&sink.0).hangs_for = Some("stuck".into());
    for round in 0..60 {
        warn(&events, "stuck", &format!("s{round}"));
        warn(&events, &format!("p{round}"), "m");
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let stored = sink.stored();
        assert!(stored.len() > round, "{round}: {}", stored.len());
    }
    lock(&sink.0).hangs_for = None;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let stored = sink.stored();
    assert!(stored.iter().any(|(message, _)| message == "s0"));
}

#[tokio::test(start_paused = true)]
async fn a_rejected_event_is_dropped_and_the_queue_is_bounded() {
    let sink = Sink::default();
    let events = sink.events();
    lock(&sink.0).refuses = true;
    warn(&events, "p", "refused");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(
        lock(&sink.0).requests,
        1,
        "as upstream: a rejected event is not retried"
    );
    {
        let mut behaviour = lock(&sink.0);
        (behaviour.refuses, behaviour.is_down) = (false, true);
    }
    for n in 0..3000 {
        warn(&events, &format!("p{n}"), "m");
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(Duration::from_secs(900)).await;
    lock(&sink.0).is_down = false;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let stored = sink.stored().len();
    assert!(stored <= MAX_QUEUED + 16, "the queue is bounded: {stored}");
    warn(&events, "last", "m");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(sink.stored().len() > stored, "posting continues");
}
