use super::*;
use std::os::unix::fs::PermissionsExt as _;

#[test]
fn what_is_sealed_opens_only_here_and_only_as_what_it_is() {
    let dir = tempfile::tempdir().expect("a directory");
    let vault = Vault::open(dir.path()).expect("opened");
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
    let again = Vault::open(dir.path()).expect("opened again");
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
        "one cannot be put in another's place"
    );
    let mut bent = bytes;
    *bent.last_mut().expect("bytes") ^= 1;
    fs::write(&canary, bent).expect("write");
    assert_eq!(
        vault.get::<String>(Kind::Secrets, "ns/canary"),
        None,
        "what was changed does not open"
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
        "what nobody needs goes"
    );
    vault.remove(Kind::Secrets, "ns/other").expect("removed");
    vault
        .remove(Kind::Secrets, "ns/other")
        .expect("removing what is gone is fine");
    fs::write(dir.path().join("key"), b"not a key").expect("write");
    assert!(Vault::open(dir.path()).is_err_and(|e| e.to_string().contains("remove it")));
}
