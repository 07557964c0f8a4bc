//! Small files: read as a whole and no further than they may be long, never seen half written.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// The text of a file of at most `limit` bytes; `InvalidData` where it is longer, or no text. Blocking.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    let mut text = String::new();
    let file = fs::File::open(path)?;
    file.take(limit + 1).read_to_string(&mut text)?;
    if text.len() as u64 > limit {
        let why = format!("the file is larger than {limit} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(text)
}

/// The same; none where there is no such file. Blocking.
pub fn read_text_if_there(path: &Path, limit: u64) -> io::Result<Option<String>> {
    match read_text(path, limit) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

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
