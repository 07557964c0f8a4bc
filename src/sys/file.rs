//! Small files that must never be seen half written.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

fn aside(path: &Path, content: &[u8]) -> io::Result<(PathBuf, fs::File)> {
    let aside = PathBuf::from(format!("{}.new", path.display()));
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&aside)?;
    file.write_all(content)?;
    Ok((aside, file))
}

/// Replaces a file as a whole, readable by root only, and leaves it to the kernel when it reaches the disk.
pub fn replace_soon(path: &Path, content: &[u8]) -> io::Result<()> {
    let (aside, _) = aside(path, content)?;
    fs::rename(aside, path)
}

/// Replaces a file as a whole, readable by root only: after a crash there is the old content or the new.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let (aside, file) = aside(path, content)?;
    file.sync_all()?;
    fs::rename(aside, path)?;
    if let Some(dir) = path.parent() {
        fs::File::open(dir)?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn content_is_replaced_and_private() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("f");
        replace(&path, b"one").expect("written");
        replace(&path, b"two").expect("written");
        assert_eq!(fs::read(&path).expect("read"), b"two");
        assert_eq!(
            fs::metadata(&path).expect("metadata").permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 1);
    }
}
