//! The thread against fake rules.

use std::sync::Mutex;

use holdfast_core::lock::lock;

use super::*;
use crate::timetable::RETRIES;

/// What the thread did, with the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Done {
    Commit,
    Audit,
}

/// The record of a fake, and its failures.
#[derive(Default)]
struct Record {
    done: Vec<(Done, Instant)>,
    /// The number of policies that were taken, and of those that were committed.
    taken: usize,
    committed: usize,
    commits_fail: bool,
    audits_fail: bool,
}

#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Record>>);

impl Fake {
    fn times(&self, of: Done) -> Vec<Instant> {
        let record = lock(&self.0);
        let of = record.done.iter().filter(|(done, _)| *done == of);
        of.map(|(_, at)| *at).collect()
    }

    fn finish(&mut self, done: Done) -> Result<(), String> {
        let mut record = lock(&self.0);
        record.done.push((done, Instant::now()));
        let fails = match done {
            Done::Commit => record.commits_fail,
            Done::Audit => record.audits_fail,
        };
        if fails {
            return Err("the kernel refuses".into());
        }
        record.committed = record.taken;
        Ok(())
    }
}

impl Rules for Fake {
    fn take(&mut self, change: Change) {
        lock(&self.0).taken += usize::from(matches!(change, Change::Policy(..)));
    }

    fn commit(&mut self) -> Result<(), String> {
        self.finish(Done::Commit)
    }

    fn audit(&mut self) -> Result<bool, String> {
        self.finish(Done::Audit).map(|()| false)
    }
}

/// A running thread.
struct Run {
    fake: Fake,
    inbox: Sender<Change>,
    thread: std::thread::JoinHandle<()>,
}

impl Run {
    fn start(fake: &Fake, audit_interval: Duration) -> Run {
        let (inbox, changes) = mpsc::channel();
        let mut rules = fake.clone();
        let thread = std::thread::spawn(move || work(&mut rules, &changes, audit_interval));
        Run {
            fake: fake.clone(),
            inbox,
            thread,
        }
    }

    fn send(&self, change: Change) {
        assert!(self.inbox.send(change).is_ok(), "the thread runs");
    }

    /// Sends a pod every millisecond until the condition is true.
    fn change_pods_until(&self, what: &str, is_true: impl Fn(&Fake) -> bool) {
        let begun = Instant::now();
        while !is_true(&self.fake) {
            assert!(begun.elapsed() < Duration::from_secs(30), "{what}");
            self.send(Change::Pod(("default".into(), "a".into()), None));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn stop(self) {
        drop(self.inbox);
        assert!(self.thread.join().is_ok());
    }
}

fn policy() -> Change {
    Change::Policy(("default".into(), "p".into()), None)
}

/// Asserts that each attempt followed its predecessor after the back-off.
fn assert_backs_off(attempts: &[Instant]) {
    let mut retries = RETRIES;
    for pair in attempts.windows(2) {
        let (pause, expected) = (pair[1] - pair[0], retries.pause());
        assert!(pause >= expected, "{pause:?} instead of {expected:?}");
    }
}

#[test]
fn nothing_is_written_before_the_lists_are_complete() {
    let fake = Fake::default();
    let run = Run::start(&fake, Duration::from_millis(5));
    let begun = Instant::now();
    run.change_pods_until("time passes", |_| {
        begun.elapsed() > Duration::from_millis(50)
    });
    assert_eq!(lock(&fake.0).done, []);
    run.send(Change::Synced);
    run.change_pods_until("an audit", |fake| !fake.times(Done::Audit).is_empty());
    assert_eq!(lock(&fake.0).done[0].0, Done::Commit, "no audit before");
    run.stop();
}

#[test]
fn audits_happen_while_changes_arrive() {
    let fake = Fake::default();
    let run = Run::start(&fake, Duration::from_millis(50));
    run.send(Change::Synced);
    run.change_pods_until("audits", |fake| fake.times(Done::Audit).len() >= 3);
    run.stop();
    assert!(fake.times(Done::Commit).len() > 3, "changes are committed");
    for pair in fake.times(Done::Audit).windows(2) {
        assert!(pair[1] - pair[0] >= Duration::from_millis(50));
    }
}

#[test]
fn a_failed_write_is_repeated_with_a_back_off_while_changes_arrive() {
    let fake = Fake::default();
    lock(&fake.0).commits_fail = true;
    // Audits would be due all the time.
    let run = Run::start(&fake, Duration::from_millis(5));
    run.send(Change::Synced);
    run.send(policy());
    run.change_pods_until("attempts", |fake| fake.times(Done::Commit).len() >= 4);
    assert_backs_off(&fake.times(Done::Commit));
    assert!(fake.times(Done::Audit).is_empty(), "an audit would write");
    assert_eq!(lock(&fake.0).committed, 0);
    lock(&fake.0).commits_fail = false;
    run.change_pods_until("the policy", |fake| lock(&fake.0).committed == 1);
    run.stop();
}

#[test]
fn a_failed_write_is_repeated_without_changes() {
    let fake = Fake::default();
    lock(&fake.0).commits_fail = true;
    let run = Run::start(&fake, Duration::from_secs(3600));
    run.send(Change::Synced);
    let begun = Instant::now();
    while fake.times(Done::Commit).len() < 3 {
        assert!(begun.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_backs_off(&fake.times(Done::Commit));
    run.stop();
}

#[test]
fn a_failed_audit_is_repeated_and_delays_no_policy() {
    let fake = Fake::default();
    lock(&fake.0).audits_fail = true;
    // The interval is above the delays of the first repetitions.
    let run = Run::start(&fake, Duration::from_secs(2));
    run.send(Change::Synced);
    run.change_pods_until("audits", |fake| fake.times(Done::Audit).len() >= 4);
    let audits = fake.times(Done::Audit);
    assert_backs_off(&audits);
    let took = audits[3] - audits[0];
    assert!(
        took < Duration::from_secs(6),
        "{took:?}: not a whole interval each"
    );
    let before = lock(&fake.0).committed;
    let (sent, audits) = (Instant::now(), audits.len());
    run.send(policy());
    run.change_pods_until("the policy", |fake| lock(&fake.0).committed > before);
    let took = sent.elapsed();
    // On a busy machine, an audit may come first; then the policy is committed nevertheless.
    let is_prompt = took < Duration::from_millis(100) || fake.times(Done::Audit).len() > audits;
    assert!(is_prompt, "{took:?}");
    run.stop();
}

#[test]
fn a_policy_is_written_within_100_ms_while_pods_change() {
    let fake = Fake::default();
    let run = Run::start(&fake, Duration::from_secs(3600));
    run.send(Change::Synced);
    run.change_pods_until("commits", |fake| fake.times(Done::Commit).len() > 10);
    let mut fastest = Duration::MAX;
    for number in 1..=10 {
        let sent = Instant::now();
        run.send(policy());
        run.change_pods_until("the policy", |fake| lock(&fake.0).committed >= number);
        fastest = fastest.min(sent.elapsed());
    }
    run.stop();
    // The fastest of ten, because this machine may pause the test.
    assert!(fastest < Duration::from_millis(100), "{fastest:?}");
}
