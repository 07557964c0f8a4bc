use super::*;
use std::os::unix::fs::PermissionsExt as _;

#[test]
fn sealed_values_open_only_with_the_same_key_kind_and_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let vault = Vault::open(dir.path(), None).expect("opened");
    vault
        .seal(
            Kind::Secrets,
            "ns/canary",
            Vault::content("ns/canary", &"the-canary-value").expect("json"),
        )
        .expect("sealed");
    vault
        .seal(
            Kind::Secrets,
            "ns/other",
            Vault::content("ns/other", &"other").expect("json"),
        )
        .expect("sealed");
    assert_eq!(
        vault.get::<String>(Kind::Secrets, "ns/canary").as_deref(),
        Some("the-canary-value")
    );
    assert_eq!(vault.get::<String>(Kind::ConfigMaps, "ns/canary"), None);
    let again = Vault::open(dir.path(), None).expect("opened again");
    assert_eq!(
        again.get::<String>(Kind::Secrets, "ns/canary").as_deref(),
        Some("the-canary-value")
    );

    let (canary, other) = (
        vault.path(Kind::Secrets, "ns/canary"),
        vault.path(Kind::Secrets, "ns/other"),
    );
    for path in [&canary, &dir.path().join("key")] {
        assert_eq!(
            fs::metadata(path).expect("metadata").permissions().mode() & 0o777,
            0o600,
            "{}",
            path.display()
        );
    }
    let bytes = fs::read(&canary).expect("read");
    for secret in ["the-canary-value", "canary"] {
        assert!(
            !bytes.windows(secret.len()).any(|w| w == secret.as_bytes()),
            "{secret} can be read in the file"
        );
    }
    fs::copy(&other, &canary).expect("copied");
    assert_eq!(
        vault.get::<String>(Kind::Secrets, "ns/canary"),
        None,
        "a file copied to another name does not open"
    );
    let mut bent = bytes;
    *bent.last_mut().expect("bytes") ^= 1;
    fs::write(&canary, bent).expect("write");
    assert_eq!(
        vault.get::<String>(Kind::Secrets, "ns/canary"),
        None,
        "a modified file does not open"
    );
    fs::write(&canary, b"short").expect("write");
    assert_eq!(vault.get::<String>(Kind::Secrets, "ns/canary"), None);

    vault
        .seal(
            Kind::Secrets,
            "ns/kept",
            Vault::content("ns/kept", &"kept").expect("json"),
        )
        .expect("sealed");
    vault
        .retain(
            Kind::Secrets,
            &["ns/kept".to_owned(), "ns/other".to_owned()].into(),
        )
        .expect("retained");
    assert!(
        !canary.exists() && vault.get::<String>(Kind::Secrets, "ns/kept").is_some(),
        "values that no pod needs are removed"
    );
    vault.remove(Kind::Secrets, "ns/other").expect("removed");
    vault
        .remove(Kind::Secrets, "ns/other")
        .expect("removing a missing value succeeds");
    fs::write(dir.path().join("key"), b"not a key").expect("write");
    assert!(Vault::open(dir.path(), None).is_err_and(|e| e.to_string().contains("remove it")));
}

fn clock(days: i64) -> Clock {
    let start = jiff::Timestamp::from_second(1_800_000_000).expect("a time");
    Clock::starting_at(start + jiff::SignedDuration::from_hours(24 * days))
}

/// Waits until this number of values is written; returns the number that is written then.
async fn written(dir: &Path, kind: Kind, expected: usize) -> usize {
    let count = || {
        fs::read_dir(dir.join(kind.dir()))
            .expect("a directory")
            .count()
    };
    // Time is paused, but a thread writes the values in real time. Values that must not be written get some time to
    // appear as well.
    for round in 0..30_000 {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        std::thread::sleep(std::time::Duration::from_millis(2));
        if round >= 200 && count() == expected {
            break;
        }
    }
    count()
}

#[tokio::test(start_paused = true)]
async fn only_the_configured_data_is_kept_and_for_one_week() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("sealed");
    let start = |offline: &str, days| {
        let offline = offline.parse().expect("fine");
        start(&path, None, offline, clock(days)).expect("started")
    };
    let always = start("always", 0).expect("a keeper");
    always.confirm();
    always.put(Kind::Secrets, "n/s", &"secret");
    always.put(Kind::Handlers, "c", &"handler");
    assert_eq!(written(&path, Kind::Secrets, 1).await, 1);
    assert_eq!(written(&path, Kind::Confirmed, 1).await, 1);

    // A week later the values are valid, after that no longer.
    let week = start("always", 7).expect("a keeper");
    assert_eq!(
        week.get::<String>(Kind::Secrets, "n/s").as_deref(),
        Some("secret")
    );
    tokio::time::advance(std::time::Duration::from_secs(86_400)).await;
    assert_eq!(week.get::<String>(Kind::Secrets, "n/s"), None);
    let late = start("always", 8).expect("a keeper");
    assert_eq!(late.get::<String>(Kind::Secrets, "n/s"), None);
    assert_eq!(
        fs::read_dir(path.join("secrets"))
            .expect("a directory")
            .count(),
        0
    );

    always.put(Kind::Secrets, "n/t", &"another");
    assert_eq!(written(&path, Kind::Secrets, 1).await, 1);
    let statics = start("static-only", 0).expect("a keeper");
    statics.put(Kind::Secrets, "n/s", &"secret");
    statics.put(Kind::Handlers, "d", &"handler");
    assert_eq!(written(&path, Kind::Secrets, 0).await, 0);
    assert_eq!(written(&path, Kind::Handlers, 1).await, 1);
    assert_eq!(statics.get::<String>(Kind::Secrets, "n/s"), None);

    assert!(start("never", 0).is_none() && !path.exists());
}

/// A start without an apiserver admits pods by the labels, taints and resources that the Node had.
#[tokio::test]
async fn the_node_is_kept_with_the_fields_that_admission_reads() {
    let dir = tempfile::tempdir().expect("a directory");
    let start = |offline: &str| {
        let (offline, path) = (offline.parse().expect("fine"), dir.path().join(offline));
        start(&path, None, offline, clock(0))
            .expect("started")
            .expect("a keeper")
    };
    let node = serde_json::json!({"metadata": {"name": "n", "uid": "u", "resourceVersion": "7", "labels": {"zone": "a"}},
        "spec": {"taints": [{"key": "k", "effect": "NoExecute"}]},
        "status": {"allocatable": {"example.com/x": "2"}, "conditions": [{"type": "Ready", "status": "True"}]}});
    let node = serde_json::from_value(node).expect("a node");
    let keeper = start("always");
    keeper.put_node(&node);
    let mut expected = node.clone();
    expected.metadata.resource_version = None;
    if let Some(status) = &mut expected.status {
        status.conditions = None;
    }
    assert_eq!(keeper.last_node().await, Some(expected));
    let statics = start("static-only");
    statics.put_node(&node);
    assert_eq!(statics.last_node().await, None);
}

#[test]
fn the_key_may_be_a_systemd_credential() {
    let dir = tempfile::tempdir().expect("a directory");
    let (path, credential) = (dir.path().join("sealed"), dir.path().join("credential"));
    let seal = |vault: &Vault| {
        let content = Vault::content("n/s", &"secret").expect("json");
        vault.seal(Kind::Secrets, "n/s", content).expect("sealed");
    };
    seal(&Vault::open(&path, Some(&credential)).expect("without the credential"));
    assert!(path.join("key").exists());
    fs::write(&credential, [7; KEY_LENGTH]).expect("write");
    let vault = Vault::open(&path, Some(&credential)).expect("with it");
    assert!(!path.join("key").exists(), "no other key is left");
    assert_eq!(vault.get::<String>(Kind::Secrets, "n/s"), None);
    seal(&vault);
    let again = Vault::open(&path, Some(&credential)).expect("with it again");
    assert_eq!(
        again.get::<String>(Kind::Secrets, "n/s").as_deref(),
        Some("secret")
    );
    fs::write(&credential, [7; KEY_LENGTH + 1]).expect("write");
    let error = Vault::open(&path, Some(&credential))
        .err()
        .expect("an error");
    assert!(
        error.to_string().contains("not a key of 32 bytes"),
        "{error}"
    );
}
