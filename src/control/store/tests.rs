use super::*;

fn put(key: &str, expect: Expect, text: &'static str) -> Write {
    Write {
        key: key.into(),
        expect,
        requires: None,
        change: Change::Put,
        render: Box::new(move |revision| Bytes::from(format!("{text}@{revision}"))),
        attrs: Arc::default(),
    }
}

fn delete(key: &str, at: u64) -> Write {
    Write {
        change: Change::Delete,
        ..put(key, Expect::Revision(at), "gone")
    }
}

#[tokio::test]
async fn a_write_that_expects_the_wrong_revision_changes_nothing() {
    let store = Store::in_memory();
    let first = store
        .write(put("a/1", Expect::Absent, "x"))
        .await
        .expect("first write");
    for expect in [Expect::Absent, Expect::Revision(first.revision + 1)] {
        let lost = store.write(put("a/1", expect, "y")).await;
        assert!(
            matches!(lost, Err(WriteError::Conflict(Some(_)))),
            "{expect:?}"
        );
    }
    assert_eq!(
        store.get("a/1").expect("still there").value,
        Bytes::from("x@1")
    );
    assert_eq!(store.revision(), 1);
}

#[tokio::test]
async fn changes_are_ordered_and_contain_the_previous_value() {
    let store = Store::in_memory();
    let first = store
        .write(put("a/1", Expect::Absent, "x"))
        .await
        .expect("put");
    store
        .write(put("b/1", Expect::Absent, "other"))
        .await
        .expect("put");
    let second = store
        .write(put("a/1", Expect::Revision(first.revision), "y"))
        .await
        .expect("put");
    store
        .write(delete("a/1", second.revision))
        .await
        .expect("delete");
    let (seen, complete) = store.changes(1, "a/", usize::MAX).expect("history");
    assert_eq!(complete, 4);
    let (first, complete) = store.changes(1, "a/", 1).expect("history");
    assert_eq!(
        (first.len(), complete),
        (1, 3),
        "the remaining changes are returned by the next call"
    );
    let seen: Vec<_> = seen
        .iter()
        .map(|e| {
            (
                e.revision,
                e.change,
                e.previous.as_ref().map(|p| p.revision),
            )
        })
        .collect();
    assert_eq!(
        seen,
        [(3, Change::Put, Some(1)), (4, Change::Delete, Some(3))]
    );
    let then = store.list_at("a/", 3).expect("history");
    assert_eq!(then.len(), 1);
    assert_eq!(then[0].1.value, Bytes::from("y@3"));
    assert!(store.list_at("a/", 4).expect("history").is_empty());
}

fn changes(store: &Store, after: u64, prefix: &str) -> Result<Vec<Arc<Event>>, Compacted> {
    store
        .changes(after, prefix, usize::MAX)
        .map(|(changes, _)| changes)
}

#[tokio::test]
async fn a_write_whose_required_key_has_changed_is_rejected() {
    let store = Store::in_memory();
    let requires = |revision| Write {
        requires: Some(("namespaces/n".into(), revision)),
        ..put("a/1", Expect::Absent, "x")
    };
    assert!(matches!(
        store.write(requires(1)).await,
        Err(WriteError::Superseded)
    ));
    let namespace = store
        .write(put("namespaces/n", Expect::Absent, "n"))
        .await
        .expect("put");
    // Both writes are decided in the same batch: the second sees the first.
    let (changed, late) = tokio::join!(
        store.write(put(
            "namespaces/n",
            Expect::Revision(namespace.revision),
            "m"
        )),
        store.write(requires(namespace.revision))
    );
    let changed = changed.expect("put");
    assert!(matches!(late, Err(WriteError::Superseded)));
    store
        .write(requires(changed.revision))
        .await
        .expect("nothing has changed since");
}

#[tokio::test]
async fn watchers_are_woken_only_by_changes_of_their_kind() {
    let store = Store::in_memory();
    let (mut pods, mut all) = (store.head_of("pods/default/"), store.head());
    store
        .write(put("leases/1", Expect::Absent, "x"))
        .await
        .expect("put");
    assert!(all.has_changed().expect("open"));
    assert!(!pods.has_changed().expect("open"));
    store
        .write(put("pods/default/1", Expect::Absent, "x"))
        .await
        .expect("put");
    assert_eq!(
        (*pods.borrow_and_update(), *all.borrow_and_update()),
        (2, 2)
    );
}

/// Writes `count` keys of a kind concurrently.
async fn fill(store: &Store, kind: &str, count: usize) {
    let writes = (0..count).map(|i| store.write(put(&format!("{kind}/{i}"), Expect::Absent, "v")));
    for written in futures::future::join_all(writes).await {
        written.expect("put");
    }
}

/// No minimum retention.
const SHORT: Retention = Retention {
    fresh: Duration::ZERO,
    total: usize::MAX,
};

/// A store whose history is limited by the number of changes only.
fn short_lived(file: Option<&Path>) -> Store {
    let opened = file.map(|file| Disk::open(file).expect("open"));
    let (disk, loaded) = match opened {
        Some((disk, loaded)) => (Some(disk), loaded),
        None => (None, disk::Loaded::default()),
    };
    Store::start(disk, loaded, |_, _| Attrs::default(), SHORT)
}

#[tokio::test]
async fn a_reader_behind_its_kinds_history_gets_an_error() {
    let store = short_lived(None);
    fill(&store, "pods", 1).await;
    fill(&store, "leases", history::MAX_CHANGES + 5).await;
    let oldest = 6;
    assert_eq!(
        changes(&store, 0, "leases/").expect_err("too old"),
        Compacted {
            requested: 0,
            oldest
        }
    );
    assert!(store.list_at("leases/", 0).is_err());
    let kept = changes(&store, oldest, "leases/").expect("kept");
    assert_eq!(kept.len(), history::MAX_CHANGES);
    // The history of other kinds is not affected.
    assert_eq!(changes(&store, 0, "pods/").expect("kept").len(), 1);
}

/// Opens a copy of the file, in the state that kill -9 would leave.
fn reopened(file: &Path, into: &Path) -> Store {
    std::fs::copy(file, into).expect("copy");
    Store::open(into, |_, _| Attrs::default()).expect("open the copy")
}

#[tokio::test]
async fn history_survives_a_restart() {
    let dir = tempfile::tempdir().expect("a directory");
    let (file, copy) = (dir.path().join("store"), dir.path().join("copy"));
    let store = short_lived(Some(&file));
    let first = store
        .write(put("a/1", Expect::Absent, "x"))
        .await
        .expect("put");
    let second = store
        .write(put("a/1", Expect::Revision(first.revision), "y"))
        .await
        .expect("put");
    store
        .write(put("a/2", Expect::Absent, "z"))
        .await
        .expect("put");
    store
        .write(delete("a/1", second.revision))
        .await
        .expect("delete");
    fill(&store, "b", history::MAX_CHANGES + 5).await;
    // Dropped changes are deleted from the file with the next write.
    store
        .write(put("a/1", Expect::Absent, "again"))
        .await
        .expect("put");
    let again = reopened(&file, &copy);
    let seen = |store: &Store, after, prefix| {
        changes(store, after, prefix).map(|events| {
            events
                .iter()
                .map(|e| format!("{:?}", e))
                .collect::<Vec<_>>()
        })
    };
    for (after, prefix) in [(0, "a/"), (2, "a/"), (0, "b/"), (9, "b/"), (0, "c/")] {
        assert_eq!(seen(&again, after, prefix), seen(&store, after, prefix));
    }
    assert_eq!(changes(&again, 0, "a/").expect("kept").len(), 5);
    assert!(
        changes(&again, 0, "b/").is_err(),
        "dropped changes stay dropped after a restart"
    );
    let then = again.list_at("a/", 2).expect("history");
    assert_eq!(then.len(), 1);
    assert_eq!(then[0].1.value, Bytes::from("y@2"));
}

#[tokio::test]
async fn acknowledged_writes_survive_reopening() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("store");
    let store = Store::open(&file, |_, _| Attrs::default()).expect("open");
    let record = store
        .write(put("a/1", Expect::Absent, "x"))
        .await
        .expect("put");
    store
        .write(put("a/2", Expect::Absent, "y"))
        .await
        .expect("put");
    store
        .write(delete("a/1", record.revision))
        .await
        .expect("delete");
    // A copy of the open file has the state that kill -9 would leave.
    let copy = dir.path().join("copy");
    std::fs::copy(&file, &copy).expect("copy");
    let again = Store::open(&copy, |_, _| Attrs::default()).expect("open the copy");
    assert_eq!(again.revision(), 3);
    assert!(again.get("a/1").is_none());
    assert_eq!(again.get("a/2").expect("kept").value, Bytes::from("y@2"));
    let next = again
        .write(put("a/3", Expect::Absent, "z"))
        .await
        .expect("put");
    assert_eq!(next.revision, 4, "a revision is never reused");
}
