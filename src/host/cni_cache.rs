//! libcni's cache of a sandbox's network results (`CacheDir`, the same for containerd and CRI-O).
//!
//! libcni does not sync these files, and DEL fails if it cannot parse one. After a power
//! loss, a recently created sandbox could thus never be stopped ("unexpected end of JSON
//! input"). Without the file, libcni still calls the plugins to delete the networks.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;

use super::{HostError, blocking};
use holdfast_sys::failure::doing;
use holdfast_sys::file;

/// The directory of the files, which are named `NETWORK-SANDBOX-INTERFACE`.
const DIR: &str = "/var/lib/cni/results";
/// Size limit in bytes, larger than any plugin's result.
const LIMIT: u64 = 1 << 20;

/// Removes a sandbox's cached results that are not valid JSON. Returns whether
/// there was such a file, so that stopping the sandbox can now succeed.
pub async fn remove_corrupt(sandbox: &str) -> bool {
    let of = sandbox.to_owned();
    match blocking(move || remove_corrupt_below(Path::new(DIR), &of)).await {
        Ok(torn) => {
            for file in &torn {
                tracing::warn!(file = %file.display(), sandbox, "a corrupt cached CNI result prevented stopping the sandbox; removed the file");
            }
            !torn.is_empty()
        }
        Err(error) => {
            tracing::warn!(%error, sandbox, "searching the cached CNI results of a sandbox failed");
            false
        }
    }
}

fn failing(what: &str, path: &Path) -> impl FnOnce(io::Error) -> HostError {
    doing(format!("{} cannot be {what}", path.display()))
}

fn remove_corrupt_below(dir: &Path, sandbox: &str) -> Result<Vec<PathBuf>, HostError> {
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
        // An unreadable file may be valid, so it is an error.
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
    fn only_corrupt_cached_results_of_the_sandbox_are_removed() {
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
        let mut removed = remove_corrupt_below(dir.path(), "abc").expect("removed");
        removed.sort();
        let expected = ["net-abc-eth0", "other-net-abc-eth0"].map(|name| dir.path().join(name));
        assert_eq!(removed, expected);
        let left = fs::read_dir(dir.path()).expect("a directory").count();
        assert_eq!(left, 3);
        let none = remove_corrupt_below(&dir.path().join("none"), "abc");
        assert!(none.expect("nothing there").is_empty());
    }
}
