//! What the agent must know to start its pods when no apiserver answers: the pods bound to it and the
//! objects they need, each in a file that only root may read and only this node's key opens.
//!
//! AES-256-GCM with a random nonce for every writing; what a file is about is authenticated with it, so
//! that one cannot be put in another's place. A file that does not open is as good as none.

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

use crate::core::digest;
use crate::sys::file;

const KEY_LENGTH: usize = 32;
/// The largest file that is read.
const LIMIT: u64 = 4 << 20;

/// A kind of thing that is sealed; also its directory.
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
}

impl Kind {
    const ALL: [Kind; 7] = [
        Kind::Pods,
        Kind::ConfigMaps,
        Kind::Secrets,
        Kind::Tokens,
        Kind::Claims,
        Kind::Services,
        Kind::Handlers,
    ];

    fn dir(self) -> &'static str {
        match self {
            Kind::Pods => "pods",
            Kind::ConfigMaps => "configmaps",
            Kind::Secrets => "secrets",
            Kind::Tokens => "tokens",
            Kind::Claims => "claims",
            Kind::Services => "services",
            Kind::Handlers => "handlers",
        }
    }
}

/// The sealed files of one agent.
pub struct Vault {
    dir: PathBuf,
    key: RandomizedNonceKey,
}

impl Vault {
    /// Opens the vault below `dir`, with a new key where there is none.
    pub fn open(dir: &Path) -> anyhow::Result<Vault> {
        let make = |dir: &Path| {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(dir)
                .with_context(|| format!("{} cannot be made", dir.display()))
        };
        make(dir)?;
        for kind in Kind::ALL {
            make(&dir.join(kind.dir()))?;
        }
        let path = dir.join("key");
        let bytes = match fs::read(&path) {
            Ok(bytes) if bytes.len() == KEY_LENGTH => bytes,
            Ok(_) => anyhow::bail!(
                "{} is not a key of {KEY_LENGTH} bytes: remove it, and what was sealed with it is written anew",
                path.display()
            ),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let mut bytes = vec![0; KEY_LENGTH];
                aws_lc_rs::rand::fill(&mut bytes)
                    .map_err(|_| anyhow::anyhow!("the system gives no random numbers"))?;
                file::replace(&path, &bytes)
                    .with_context(|| format!("{} cannot be written", path.display()))?;
                bytes
            }
            Err(error) => {
                return Err(error).with_context(|| format!("{} cannot be read", path.display()));
            }
        };
        let key = RandomizedNonceKey::new(&AES_256_GCM, &bytes)
            .map_err(|_| anyhow::anyhow!("{} is not a usable key", path.display()))?;
        Ok(Vault {
            dir: dir.to_owned(),
            key,
        })
    }

    fn path(&self, kind: Kind, name: &str) -> PathBuf {
        // A name says nothing and needs no escaping as its digest.
        self.dir
            .join(kind.dir())
            .join(digest::sha256(name.as_bytes()))
    }

    fn about(kind: Kind, name: &str) -> Vec<u8> {
        format!("{}\u{0}{name}", kind.dir()).into_bytes()
    }

    /// A value as it is sealed. The name stands in it: a listing has only digests.
    fn content(name: &str, value: &impl Serialize) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&(name, value))
    }

    /// The value of an opened content, if it is this name's.
    fn value<T: DeserializeOwned>(name: &str, content: &[u8]) -> Option<T> {
        let (inside, value): (String, T) = serde_json::from_slice(content).ok()?;
        (inside == name).then_some(value)
    }

    /// Seals a content under a name. Blocking. A loss of power may lose what was written within the last
    /// half minute, never what was written before: a file that is half there does not open.
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

    /// What was sealed under a name. Blocking, but small.
    #[must_use]
    pub fn get<T: DeserializeOwned>(&self, kind: Kind, name: &str) -> Option<T> {
        self.unseal(kind, name, &self.path(kind, name))
    }

    /// Removes what is sealed under other names than these. Blocking.
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

    /// Removes what was sealed under a name. Blocking.
    pub fn remove(&self, kind: Kind, name: &str) -> io::Result<()> {
        match fs::remove_file(self.path(kind, name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
