//! What the runtimes' library for CNI caches of a sandbox's networks (libcni's `CacheDir`, the same with containerd and CRI-O).
//!
//! It does not have these files written through, and deletes no network whose file it cannot read: after a loss of power a
//! sandbox that had just been made could never be stopped ("unexpected end of JSON input"). Without the file the plugins are
//! told to delete what they have made all the same.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;

use super::{HostError, blocking};
use crate::sys::failure::doing;
use crate::sys::file;

/// Where the files are, as `NETWORK-SANDBOX-INTERFACE`.
const DIR: &str = "/var/lib/cni/results";
/// More than any plugin answers.
const LIMIT: u64 = 1 << 20;

/// Removes what is cached of a sandbox and is no JSON. Whether there was such a file: then the sandbox can be stopped now.
pub async fn remove_torn(sandbox: &str) -> bool {
    let of = sandbox.to_owned();
    match blocking(move || remove_torn_below(Path::new(DIR), &of)).await {
        Ok(torn) => {
            for file in &torn {
                tracing::warn!(file = %file.display(), sandbox, "the sandbox could not be stopped, as a loss of power has torn the cached result of its network plugin; that is removed");
            }
            !torn.is_empty()
        }
        Err(error) => {
            tracing::warn!(%error, sandbox, "the cached results of its network plugin cannot be looked through");
            false
        }
    }
}

fn failing(what: &str, path: &Path) -> impl FnOnce(io::Error) -> HostError {
    doing(format!("{} cannot be {what}", path.display()))
}

fn remove_torn_below(dir: &Path, sandbox: &str) -> Result<Vec<PathBuf>, HostError> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        entries => entries.map_err(failing("listed", dir))?,
    };
    let of_sandbox = format!("-{sandbox}-");
    let mut removed = vec![];
    for entry in entries {
        let entry = entry.map_err(failing("listed", dir))?;
        if !entry.file_name().to_string_lossy().contains(&of_sandbox) {
            continue;
        }
        let path = entry.path();
        // One that cannot be read says nothing of what is in it.
        let text = file::read_text(&path, LIMIT).map_err(failing("read", &path))?;
        if serde_json::from_str::<IgnoredAny>(&text).is_err() {
            fs::remove_file(&path).map_err(failing("removed", &path))?;
            removed.push(path);
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_torn_of_one_sandbox_goes_and_nothing_else() {
        let dir = tempfile::tempdir().expect("a directory");
        let whole = r#"{"kind": "cniCacheV1", "containerId": "abc"}"#;
        for (name, text) in [
            ("net-abc-eth0", ""),
            ("net-abc-eth1", whole),
            ("other-net-abc-eth0", &whole[..20]),
            ("net-abcd-eth0", ""),
            ("abc", ""),
        ] {
            fs::write(dir.path().join(name), text).expect("a file");
        }
        let mut removed = remove_torn_below(dir.path(), "abc").expect("removed");
        removed.sort();
        let expected = ["net-abc-eth0", "other-net-abc-eth0"].map(|name| dir.path().join(name));
        assert_eq!(removed, expected);
        let left = fs::read_dir(dir.path()).expect("a directory").count();
        assert_eq!(left, 3);
        let none = remove_torn_below(&dir.path().join("none"), "abc");
        assert!(none.expect("nothing there").is_empty());
    }
}
