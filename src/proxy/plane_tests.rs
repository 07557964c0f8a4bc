//! The thread against a fake data plane.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

use super::*;
use crate::timetable::RETRIES;

type Committed = BTreeMap<Key, usize>;

/// A data plane that remembers the number of slices of each service.
#[derive(Default)]
struct Fake {
    staged: Committed,
    committed: Arc<Mutex<Committed>>,
    nodes: Arc<AtomicUsize>,
    fails: Arc<AtomicBool>,
    audits_fail: Arc<AtomicBool>,
    flows_fail: Arc<AtomicBool>,
    flushed: Arc<AtomicBool>,
    commit_takes: Duration,
}

impl Fake {
    fn flows_left(&self) -> Option<FlowsLeft> {
        let fails = self.flows_fail.load(Ordering::SeqCst);
        fails.then(|| FlowsLeft("no buffer space available".into()))
    }
}

impl Plane for Fake {
    fn set_node(&mut self, _: NodeFacts) {
        self.nodes.fetch_add(1, Ordering::SeqCst);
    }

    fn set_service(&mut self, key: &Key, service: Option<&Service>, slices: &[Arc<EndpointSlice>]) {
        match service {
            Some(_) => self.staged.insert(key.clone(), slices.len()),
            None => self.staged.remove(key),
        };
    }

    fn commit(&mut self) -> Result<Option<FlowsLeft>, String> {
        std::thread::sleep(self.commit_takes);
        if self.fails.load(Ordering::SeqCst) {
            return Err("the kernel refuses".into());
        }
        self.staged.clone_into(&mut lock(&self.committed));
        Ok(self.flows_left())
    }

    fn audit(&mut self) -> Result<Audited, String> {
        if self.audits_fail.load(Ordering::SeqCst) {
            return Err("the table cannot be read".into());
        }
        let flushed = self.flushed.swap(false, Ordering::SeqCst);
        Ok(Audited {
            repaired: flushed.then(|| "the table".to_owned()),
            flows_left: self.flows_left(),
        })
    }

    fn health_checks(&self) -> Vec<HealthCheck> {
        vec![]
    }

    fn problems(&self, _: &Key) -> Option<String> {
        None
    }
}

/// The number of slices of each service.
#[derive(Default, Clone)]
struct World(Arc<Mutex<Committed>>);

impl Objects for World {
    fn node(&self) -> NodeFacts {
        NodeFacts::default()
    }

    fn service(&self, key: &Key) -> (Option<Service>, Vec<Arc<EndpointSlice>>) {
        match lock(&self.0).get(key) {
            None => (None, vec![]),
            Some(slices) => (Some(Service::default()), vec![Arc::default(); *slices]),
        }
    }

    fn has_namespace(&self, _: &str) -> bool {
        true
    }
}

#[derive(Default)]
struct Zone {
    services: Mutex<Vec<(Key, bool)>>,
    namespaces: Mutex<Vec<String>>,
    synced_after: Mutex<Option<usize>>,
}

impl Records for Zone {
    fn set_service(&self, key: &Key, service: Option<&Service>, _: &[Arc<EndpointSlice>]) {
        lock(&self.services).push((key.clone(), service.is_some()));
    }

    fn set_namespace(&self, name: &str, _: bool) {
        lock(&self.namespaces).push(name.to_owned());
    }

    fn set_synced(&self) {
        *lock(&self.synced_after) = Some(lock(&self.services).len());
    }
}

/// A running thread with its parts.
struct Run {
    inbox: Arc<Inbox>,
    world: World,
    zone: Arc<Zone>,
    committed: Arc<Mutex<Committed>>,
    fails: Arc<AtomicBool>,
    audits_fail: Arc<AtomicBool>,
    flows_fail: Arc<AtomicBool>,
    flushed: Arc<AtomicBool>,
    nodes: Arc<AtomicUsize>,
    reports: mpsc::Receiver<Report>,
    thread: Option<std::thread::JoinHandle<()>>,
}

fn name(name: &str) -> Key {
    ("default".into(), name.into())
}

impl Run {
    fn start(commit_takes: Duration, pace: Pace) -> Run {
        let (sender, reports) = mpsc::channel();
        let mut fake = Fake {
            commit_takes,
            ..Fake::default()
        };
        let (world, zone) = (World::default(), Arc::<Zone>::default());
        let inbox = Arc::<Inbox>::default();
        let mut run = Run {
            inbox: Arc::clone(&inbox),
            world: world.clone(),
            zone: Arc::clone(&zone),
            committed: Arc::clone(&fake.committed),
            fails: Arc::clone(&fake.fails),
            audits_fail: Arc::clone(&fake.audits_fail),
            flows_fail: Arc::clone(&fake.flows_fail),
            flushed: Arc::clone(&fake.flushed),
            nodes: Arc::clone(&fake.nodes),
            reports,
            thread: None,
        };
        let thread = std::thread::spawn(move || {
            let report = |report| sender.send(report).is_ok();
            let hooks: (&dyn Fn(), &dyn Fn(Report) -> bool) = (&|| {}, &report);
            work(&mut fake, Some(&*zone), &world, &inbox, pace, hooks);
        });
        run.thread = Some(thread);
        run
    }

    fn change(&self, key: &str, object: Option<usize>) {
        let mut all = lock(&self.world.0);
        match object {
            Some(object) => all.insert(name(key), object),
            None => all.remove(&name(key)),
        };
        drop(all);
        self.inbox.service_changed(name(key), None);
    }

    fn report(&self) -> Report {
        let report = self.reports.recv_timeout(Duration::from_secs(30));
        report.expect("a report")
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.inbox.stop();
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok());
        }
    }
}

const PACE: Pace = Pace {
    min_sync_period: Duration::ZERO,
    audit_interval: Duration::from_secs(3600),
};

#[test]
fn nothing_is_committed_before_the_lists_are_complete() {
    let run = Run::start(Duration::ZERO, PACE);
    run.change("a", Some(1));
    run.change("b", Some(0));
    run.inbox.namespace_changed("default".into());
    let early = run.reports.recv_timeout(Duration::from_millis(100));
    assert!(early.is_err(), "{early:?}");
    assert_eq!(run.inbox.len(), 2);
    assert!(run.inbox.oldest().is_some());
    run.inbox.set_has_namespaces();
    let early = run.reports.recv_timeout(Duration::from_millis(100));
    assert!(early.is_err(), "{early:?}");
    run.inbox.set_synced();
    assert!(matches!(run.report(), Report::Committed { .. }));
    assert_eq!(run.inbox.oldest(), None);
    assert_eq!(
        *lock(&run.committed),
        [(name("a"), 1), (name("b"), 0)].into()
    );
    assert_eq!(*lock(&run.zone.synced_after), Some(2));
    assert_eq!(*lock(&run.zone.namespaces), ["default"]);
    assert_eq!(run.nodes.load(Ordering::SeqCst), 1);

    run.change("a", Some(2));
    assert!(matches!(run.report(), Report::Committed { .. }));
    assert_eq!(lock(&run.committed).get(&name("a")), Some(&2));
    run.change("a", None);
    assert!(matches!(run.report(), Report::Committed { .. }));
    assert_eq!(*lock(&run.committed), [(name("b"), 0)].into());
    assert_eq!(lock(&run.zone.services).last(), Some(&(name("a"), false)));
}

// On a real apiserver, `system:node-proxier` does not grant namespaces: that must not keep the rules from the kernel.
#[test]
fn services_do_not_wait_for_namespaces_and_names_do() {
    let run = Run::start(Duration::ZERO, PACE);
    run.change("a", Some(1));
    run.inbox.set_synced();
    assert!(matches!(run.report(), Report::Committed { .. }));
    assert_eq!(*lock(&run.committed), [(name("a"), 1)].into());
    assert_eq!(*lock(&run.zone.synced_after), None);
    run.inbox.namespace_changed("default".into());
    run.inbox.set_has_namespaces();
    while lock(&run.zone.synced_after).is_none() {
        assert!(matches!(run.report(), Report::Committed { .. }));
    }
    assert_eq!(*lock(&run.zone.namespaces), ["default"]);
}

#[test]
fn a_failed_transaction_is_repeated_without_further_changes() {
    let run = Run::start(Duration::ZERO, PACE);
    run.fails.store(true, Ordering::SeqCst);
    run.inbox.set_synced();
    run.change("a", Some(3));
    assert!(matches!(run.report(), Report::Failed(_)));
    assert!(run.inbox.oldest().is_some(), "the change still waits");
    run.fails.store(false, Ordering::SeqCst);
    loop {
        match run.report() {
            Report::Failed(_) => {}
            Report::Committed { .. } => break,
            other => panic!("{other:?}"),
        }
    }
    // `a` may have come with the first attempt or after it.
    while lock(&run.committed).get(&name("a")) != Some(&3) {
        assert!(matches!(run.report(), Report::Committed { .. }));
    }
    assert_eq!(run.inbox.oldest(), None);
}

#[test]
fn foreign_changes_are_repaired_by_an_audit() {
    let pace = Pace {
        audit_interval: Duration::from_millis(50),
        ..PACE
    };
    let run = Run::start(Duration::ZERO, pace);
    run.flushed.store(true, Ordering::SeqCst);
    let early = run.reports.recv_timeout(Duration::from_millis(150));
    assert!(early.is_err(), "no audit before the lists: {early:?}");
    run.inbox.set_synced();
    loop {
        match run.report() {
            Report::Committed { .. } => {}
            Report::Repaired(what) => break assert_eq!(what, "the table"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn audits_happen_while_changes_wait_for_their_pause() {
    let pace = Pace {
        audit_interval: Duration::from_millis(50),
        min_sync_period: Duration::from_secs(3600),
    };
    let run = Run::start(Duration::ZERO, pace);
    run.inbox.set_synced();
    assert!(matches!(run.report(), Report::Committed { .. }));
    run.change("a", Some(1));
    for _ in 0..2 {
        run.flushed.store(true, Ordering::SeqCst);
        assert!(matches!(run.report(), Report::Repaired(_)));
    }
    assert!(run.inbox.oldest().is_some(), "the change still waits");
}

#[test]
fn audits_happen_while_changes_arrive() {
    let pace = Pace {
        audit_interval: Duration::from_millis(50),
        ..PACE
    };
    let run = Run::start(Duration::ZERO, pace);
    run.inbox.set_synced();
    let (begun, mut number, mut repaired) = (Instant::now(), 0, 0);
    while repaired < 3 {
        assert!(begun.elapsed() < Duration::from_secs(30), "{repaired}");
        number += 1;
        run.flushed.store(true, Ordering::SeqCst);
        run.change("a", Some(number % 10));
        std::thread::sleep(Duration::from_millis(1));
        for report in run.reports.try_iter() {
            repaired += usize::from(matches!(report, Report::Repaired(_)));
        }
    }
}

#[test]
fn a_failed_audit_is_repeated_and_delays_no_changes() {
    let pace = Pace {
        audit_interval: Duration::from_secs(2),
        ..PACE
    };
    let run = Run::start(Duration::ZERO, pace);
    run.audits_fail.store(true, Ordering::SeqCst);
    run.inbox.set_synced();
    assert!(matches!(run.report(), Report::Committed { .. }));
    assert!(matches!(run.report(), Report::Failed(_)));
    let mut retries = RETRIES;
    for _ in 0..3 {
        let begun = Instant::now();
        assert!(matches!(run.report(), Report::Failed(_)));
        // A little less than the delay, because the report arrives after the failure.
        let (pause, expected) = (begun.elapsed(), retries.pause());
        assert!(pause > expected / 2, "{pause:?} of {expected:?}");
        assert!(pause < Duration::from_secs(2), "{pause:?}");
    }
    // The next audit is 0.8 s away.
    run.change("a", Some(7));
    assert!(matches!(run.report(), Report::Committed { .. }));
    run.audits_fail.store(false, Ordering::SeqCst);
    run.flushed.store(true, Ordering::SeqCst);
    assert!(matches!(run.report(), Report::Repaired(_)));
}

#[test]
fn flows_that_cannot_be_deleted_delay_no_rules_and_no_audit() {
    let run = Run::start(Duration::ZERO, PACE);
    run.flows_fail.store(true, Ordering::SeqCst);
    run.inbox.set_synced();
    assert!(matches!(run.report(), Report::Committed { .. }));
    assert!(matches!(run.report(), Report::FlowsLeft(_)));
    // The next audit tries again long before its interval has passed, and repairs rules, too.
    run.flushed.store(true, Ordering::SeqCst);
    assert!(matches!(run.report(), Report::Repaired(_)));
    assert!(matches!(run.report(), Report::FlowsLeft(_)));
    let (begun, mut number) = (Instant::now(), 0);
    while number < 5 {
        number += 1;
        run.change("a", Some(number));
        while lock(&run.committed).get(&name("a")) != Some(&number) {
            assert!(begun.elapsed() < Duration::from_secs(30), "{number}");
            run.report();
        }
    }
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?} for five changes");
    run.flows_fail.store(false, Ordering::SeqCst);
    run.change("a", Some(100));
    while lock(&run.committed).get(&name("a")) != Some(&100) {
        run.report();
    }
    assert_eq!(run.inbox.oldest(), None, "health does not depend on flows");
}

#[test]
fn a_flood_of_changes_is_coalesced() {
    let run = Run::start(Duration::from_millis(5), PACE);
    run.inbox.set_synced();
    assert!(matches!(run.report(), Report::Committed { .. }));
    let begun = Instant::now();
    let mut changes = 0;
    while begun.elapsed() < Duration::from_millis(500) {
        run.change(&format!("s{}", changes % 50), Some(changes));
        changes += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    let wanted = lock(&run.world.0).clone();
    let is_current = || *lock(&run.committed) == wanted;
    let mut commits = 0;
    while !is_current() {
        assert!(matches!(run.report(), Report::Committed { .. }));
        commits += 1;
    }
    // A transaction of 5 ms has a pause of 45 ms after it.
    assert!(
        commits <= 20,
        "{commits} transactions for {changes} changes"
    );
}

#[test]
fn a_pause_is_a_share_of_the_transaction_before_it() {
    let ms = Duration::from_millis;
    for (took, min_sync_period, expected) in [
        (ms(0), ms(0), MIN_PAUSE),
        (ms(1), ms(0), MIN_PAUSE),
        (ms(10), ms(0), ms(90)),
        (ms(10), ms(1000), ms(1000)),
        (ms(5000), ms(0), MAX_PAUSE),
        (Duration::MAX, ms(0), MAX_PAUSE),
    ] {
        assert_eq!(pause_after(took, min_sync_period), expected, "{took:?}");
    }
}
