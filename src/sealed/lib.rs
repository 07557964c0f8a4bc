//! Seals the data with which the agent starts its pods while no apiserver answers: the pods bound to it and the objects
//! that they need. Each is in a file that only root can read and only this node's key can decrypt.
//!
//! Every write uses AES-256-GCM with a random nonce. Kind and name of a value are authenticated with it, so that no
//! file can be put in another's place. A file that cannot be decrypted counts as missing. The key lies next to the
//! files or, better, is a credential of the service that systemd decrypts (`holdfast-sealed-key`).
//!
//! [`OfflineStart`](holdfast_core::node::offline::OfflineStart) sets how much is sealed: by default only the data that
//! static pods need. Data that no apiserver has confirmed for a week are discarded.

mod api;
mod keeper;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use api::SealedApi;
pub use keeper::{Keeper, follow};

use holdfast_core::digest;
use holdfast_core::json;
use holdfast_core::node::offline::OfflineStart;
use holdfast_sys::clock::Clock;
use holdfast_sys::file;

const KEY_LENGTH: usize = 32;
/// Maximum size of a file that is read.
const LIMIT: u64 = 4 << 20;

/// A kind of sealed value; also its directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Pods, by uid.
    Pods,
    /// ConfigMaps, by namespace and name.
    ConfigMaps,
    /// Secrets, by namespace and name.
    Secrets,
    /// Tokens, by pod and audience.
    Tokens,
    /// Claims with their volumes, by namespace and name.
    Claims,
    /// The list of all services.
    Services,
    /// Handlers of RuntimeClasses.
    Handlers,
    /// Our own Node, with the fields that admission reads.
    Node,
    /// When an apiserver answered last.
    Confirmed,
}

impl Kind {
    const ALL: [Kind; 9] = [
        Kind::Pods,
        Kind::ConfigMaps,
        Kind::Secrets,
        Kind::Tokens,
        Kind::Claims,
        Kind::Services,
        Kind::Handlers,
        Kind::Node,
        Kind::Confirmed,
    ];

    /// Whether static pods need this kind. The other kinds are objects to which static pods may not refer.
    fn is_for_static_pods(self) -> bool {
        matches!(self, Kind::Services | Kind::Handlers | Kind::Confirmed)
    }

    fn dir(self) -> &'static str {
        match self {
            Kind::Pods => "pods",
            Kind::ConfigMaps => "configmaps",
            Kind::Secrets => "secrets",
            Kind::Tokens => "tokens",
            Kind::Claims => "claims",
            Kind::Services => "services",
            Kind::Handlers => "handlers",
            Kind::Node => "node",
            Kind::Confirmed => "confirmed",
        }
    }
}

/// The sealed files of one agent.
pub(crate) struct Vault {
    dir: PathBuf,
    key: RandomizedNonceKey,
}

impl Vault {
    /// Opens the vault below `dir`. The key is in the file `credential` if that exists, otherwise in `key` in the
    /// directory, which is created if it is missing.
    pub fn open(dir: &Path, credential: Option<&Path>) -> anyhow::Result<Vault> {
        let make = |dir: &Path| {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(dir)
                .with_context(|| format!("{} cannot be created", dir.display()))
        };
        make(dir)?;
        for kind in Kind::ALL {
            make(&dir.join(kind.dir()))?;
        }
        let key_file = dir.join("key");
        let given = match credential {
            Some(path) => read_key(
                path,
                "write a new key, for instance with `head -c 32 /dev/urandom`",
            )?,
            None => None,
        };
        let bytes = match given {
            Some(bytes) => {
                // Values sealed with the old key are sealed again with the other one.
                ignore_missing(fs::remove_file(&key_file))
                    .with_context(|| format!("{} cannot be removed", key_file.display()))?;
                bytes
            }
            None => match read_key(
                &key_file,
                "remove it; data that was sealed with it is sealed again with a new key",
            )? {
                Some(bytes) => bytes,
                None => new_key(&key_file)?,
            },
        };
        let key = RandomizedNonceKey::new(&AES_256_GCM, &bytes).map_err(|_| {
            anyhow::anyhow!("AES-256-GCM does not accept a key of {KEY_LENGTH} bytes")
        })?;
        Ok(Vault {
            dir: dir.to_owned(),
            key,
        })
    }

    fn path(&self, kind: Kind, name: &str) -> PathBuf {
        // As a digest, a name reveals nothing and needs no escaping.
        self.dir
            .join(kind.dir())
            .join(digest::sha256(name.as_bytes()))
    }

    fn about(kind: Kind, name: &str) -> Vec<u8> {
        format!("{}\u{0}{name}", kind.dir()).into_bytes()
    }

    /// Encodes a value for sealing. The name is included, because a directory listing has only digests.
    fn content(name: &str, value: &impl Serialize) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&(name, value))
    }

    /// Returns the value of decrypted content, if the content has this name.
    fn value<T: DeserializeOwned>(name: &str, content: &[u8]) -> Option<T> {
        let (inside, value): (String, T) = json::read(content).ok()?;
        (inside == name).then_some(value)
    }

    /// Seals content under a name. Blocking. A power failure may lose content that was written within the last half
    /// minute, but nothing older: a partial file cannot be decrypted.
    fn seal(&self, kind: Kind, name: &str, mut content: Vec<u8>) -> io::Result<()> {
        let nonce = self
            .key
            .seal_in_place_append_tag(Aad::from(Self::about(kind, name)), &mut content)
            .map_err(|_| io::Error::other("sealing failed"))?;
        let mut bytes = nonce.as_ref().to_vec();
        bytes.append(&mut content);
        file::replace_soon(&self.path(kind, name), &bytes)
    }

    fn unseal<T: DeserializeOwned>(&self, kind: Kind, name: &str, path: &Path) -> Option<T> {
        use std::io::Read as _;
        let mut bytes = Vec::new();
        fs::File::open(path)
            .ok()?
            .take(LIMIT)
            .read_to_end(&mut bytes)
            .ok()?;
        let (nonce, content) = bytes.split_at_mut_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let opened = self
            .key
            .open_in_place(nonce, Aad::from(Self::about(kind, name)), content)
            .ok()?;
        Self::value(name, opened)
    }

    /// Returns the value that was sealed under a name. Blocking, but short.
    #[must_use]
    pub fn get<T: DeserializeOwned>(&self, kind: Kind, name: &str) -> Option<T> {
        self.unseal(kind, name, &self.path(kind, name))
    }

    /// Removes the values under other names than these. Blocking.
    pub fn retain(&self, kind: Kind, names: &BTreeSet<String>) -> io::Result<()> {
        let kept: BTreeSet<PathBuf> = names.iter().map(|name| self.path(kind, name)).collect();
        for entry in fs::read_dir(self.dir.join(kind.dir()))? {
            let path = entry?.path();
            if !kept.contains(&path) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// Removes the value that was sealed under a name. Blocking.
    pub fn remove(&self, kind: Kind, name: &str) -> io::Result<()> {
        ignore_missing(fs::remove_file(self.path(kind, name)))
    }
}

/// Reads a key from its file; `None` if there is none.
fn read_key(path: &Path, remedy: &str) -> anyhow::Result<Option<Vec<u8>>> {
    use std::io::Read as _;
    let mut bytes = vec![];
    match fs::File::open(path) {
        Ok(file) => file
            .take(KEY_LENGTH as u64 + 1)
            .read_to_end(&mut bytes)
            .with_context(|| format!("{} cannot be read", path.display()))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            return Err(error).with_context(|| format!("{} cannot be read", path.display()));
        }
    };
    anyhow::ensure!(
        bytes.len() == KEY_LENGTH,
        "{} is not a key of {KEY_LENGTH} bytes: {remedy}",
        path.display()
    );
    Ok(Some(bytes))
}

fn new_key(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut bytes = vec![0; KEY_LENGTH];
    aws_lc_rs::rand::fill(&mut bytes)
        .map_err(|_| anyhow::anyhow!("reading the system's random numbers failed"))?;
    file::replace(path, &bytes).with_context(|| format!("{} cannot be written", path.display()))?;
    Ok(bytes)
}

/// Treats the removal of a missing file as success.
fn ignore_missing(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The name of the service's credential with the key (`LoadCredentialEncrypted=` in its unit).
const CREDENTIAL: &str = "holdfast-sealed-key";

/// Starts to seal in `dir` the data for a start without an apiserver, with a key from the directory `credentials` if it
/// has one. If nothing is to be sealed, earlier data are removed.
pub fn start(
    dir: &Path,
    credentials: Option<&Path>,
    offline: OfflineStart,
    clock: Clock,
) -> anyhow::Result<Option<Keeper>> {
    if !offline.keeps_any() {
        ignore_missing(fs::remove_dir_all(dir))
            .with_context(|| format!("{} cannot be removed", dir.display()))?;
        return Ok(None);
    }
    let credential = credentials.map(|dir| dir.join(CREDENTIAL));
    let vault = Vault::open(dir, credential.as_deref())?;
    Ok(Some(Keeper::start(vault, offline, clock)))
}

#[cfg(test)]
mod tests;
