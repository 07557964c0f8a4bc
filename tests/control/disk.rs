//! The store on a disk that becomes full.

use std::sync::Arc;

use holdfast_control::api::object;
use holdfast_control::store::{Attrs, Change, Expect, Record, Store, Write, WriteError};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::json;

use crate::server::{MAPS, MERGE, Server, next};

/// A small filesystem, removed when dropped.
struct Disk(tempfile::TempDir);

impl Disk {
    fn new(size: &str) -> Disk {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={size}");
        mount(
            Some("tmpfs"),
            dir.path(),
            Some("tmpfs"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
        .expect("this test mounts a small disk: run it as root");
        Disk(dir)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = umount2(self.0.path(), MntFlags::MNT_DETACH);
    }
}

async fn put(store: &Store, key: &str) -> Result<Record, WriteError> {
    let value = vec![b'x'; 64 << 10];
    store
        .write(Write {
            key: key.into(),
            expect: Expect::Absent,
            requires: None,
            change: Change::Put,
            render: Box::new(|_| value.into()),
            attrs: Arc::new(Attrs::default()),
        })
        .await
}

/// The status codes of `/livez` and of its check of the store.
async fn health(store: &Store) -> (u16, u16) {
    let server = Server::over(store.clone());
    let null = serde_json::Value::Null;
    let all = server.call("GET", "/livez", &null).await;
    let one = server.call("GET", "/livez/store", &null).await;
    (all.code, one.code)
}

fn keys(store: &Store) -> Vec<(String, u64)> {
    let (items, _) = store.list("a/");
    items
        .iter()
        .map(|(key, record)| (key.to_string(), record.revision))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_resume_when_a_full_disk_has_room() {
    let disk = Disk::new("16m");
    let (file, ballast) = (disk.0.path().join("store"), disk.0.path().join("ballast"));
    std::fs::write(&ballast, vec![0; 6 << 20]).unwrap();
    let store = Store::open(&file, |_, _| Attrs::default()).unwrap();
    let mut acknowledged = vec![];
    let mut refused = 0;
    for i in 0..400 {
        let key = format!("a/{i:04}");
        match put(&store, &key).await {
            Ok(record) => acknowledged.push((key, record.revision)),
            Err(_) => refused += 1,
        }
        if refused == 3 {
            break;
        }
    }
    assert!(
        refused == 3 && !acknowledged.is_empty(),
        "the disk was full"
    );
    assert_eq!(keys(&store), acknowledged, "a failed write is not visible");
    assert_eq!(
        health(&store).await,
        (500, 500),
        "the health checks report a full disk"
    );
    std::fs::remove_file(ballast).unwrap();
    for i in 0..5 {
        let key = format!("a/later{i}");
        let record = put(&store, &key).await.expect("there is room again");
        acknowledged.push((key, record.revision));
    }
    assert_eq!(health(&store).await, (200, 200));
    let revision = store.revision();
    drop(store);
    // The committing thread closes the file a moment later.
    let reopened = loop {
        match Store::open(&file, |_, _| Attrs::default()) {
            Ok(store) => break store,
            Err(error) => {
                assert!(error.to_string().contains("in use"), "{error}");
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        }
    };
    assert_eq!(
        keys(&reopened),
        acknowledged,
        "only acknowledged writes exist, and all of them"
    );
    assert_eq!(reopened.revision(), revision);
}

/// A client whose watch was closed by a restart resumes where it was, with the events that match its selector.
#[tokio::test]
async fn a_watch_resumes_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (file, copy) = (dir.path().join("store"), dir.path().join("copy"));
    let server = Server::over(Store::open(&file, object::index).unwrap());
    let namespace = json!({"metadata": {"name": "default"}});
    server.ok("POST", "/api/v1/namespaces", &namespace).await;
    let map = |name: &str| json!({"metadata": {"name": name, "labels": {"l": "1"}}});
    let first = server.ok("POST", MAPS, &map("a")).await;
    server.ok("POST", MAPS, &map("b")).await;
    let away = json!({"metadata": {"labels": {"l": "2"}}});
    server.patch(&format!("{MAPS}/a"), MERGE, away).await;
    server.ok("DELETE", &format!("{MAPS}/b"), &json!({})).await;
    // The file as kill -9 leaves it.
    std::fs::copy(&file, &copy).unwrap();
    let server = Server::over(Store::open(&copy, object::index).unwrap());
    let since = first["metadata"]["resourceVersion"].as_str().unwrap();
    let url = format!("{MAPS}?watch=1&resourceVersion={since}&labelSelector=l=1");
    let mut lines = server.watch(&url).await;
    for (kind, name) in [("ADDED", "b"), ("DELETED", "a"), ("DELETED", "b")] {
        let event = next(&mut lines).await;
        let object = &event["object"]["metadata"];
        assert_eq!(
            (&event["type"], &object["name"]),
            (&json!(kind), &json!(name))
        );
        assert_eq!(object["labels"]["l"], "1");
    }
}
