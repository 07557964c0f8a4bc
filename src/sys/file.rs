//! Small files: read with a size limit, and replaced atomically.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Reads a text file of at most `limit` bytes. `InvalidData` if it is longer or not UTF-8. Blocking.
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

/// Like [`read_text`], but `None` if the file does not exist. Blocking.
pub fn read_text_if_there(path: &Path, limit: u64) -> io::Result<Option<String>> {
    match read_text(path, limit) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

/// The path of the new contents before they are complete.
fn aside_of(path: &Path) -> PathBuf {
    PathBuf::from(format!("{}.new", path.display()))
}

/// Writes the new contents next to the file and returns the locked temporary file. The
/// fixed name lets a later write replace leftovers of a crash. A concurrent writer of
/// the same file waits until the lock is released, which happens after the rename.
fn aside(path: &Path, content: &[u8]) -> io::Result<(PathBuf, fs::File)> {
    let aside = aside_of(path);
    loop {
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&aside)?;
        file.lock()?;
        // The previous holder of the lock has renamed this file, so it must not be written to.
        if !is_at(&file, &aside)? {
            continue;
        }
        let written = file.set_len(0).and_then(|()| file.write_all(content));
        if let Err(error) = written {
            // A partial file, for instance on a full disk. If removing it fails, it does no harm.
            _ = fs::remove_file(&aside);
            return Err(error);
        }
        return Ok((aside, file));
    }
}

/// Whether the open file is the one at the path.
fn is_at(file: &fs::File, path: &Path) -> io::Result<bool> {
    let (open, there) = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        there => (file.metadata()?, there?),
    };
    Ok((open.dev(), open.ino()) == (there.dev(), there.ino()))
}

/// Replaces a file atomically, readable by root only. Does not sync it to disk.
pub fn replace_soon(path: &Path, content: &[u8]) -> io::Result<()> {
    let (aside, _locked) = aside(path, content)?;
    fs::rename(aside, path)
}

/// Replaces a file atomically, readable by root only, and syncs it.
/// After a crash, the file has either the old or the new contents.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let (aside, file) = aside(path, content)?;
    file.sync_all()?;
    fs::rename(aside, path)?;
    if let Some(dir) = path.parent() {
        fs::File::open(dir)?.sync_all()?;
    }
    Ok(())
}

/// Creates a directory for plugins in containers. On a machine with SELinux, sets the
/// label that lets containers use it (the kubelet's `KubeletPluginsDirSELinuxLabel`).
pub fn make_for_plugins(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(dir)?;
    if super::selinux::has_selinux() {
        let label = b"system_u:object_r:container_file_t:s0";
        let none = rustix::fs::XattrFlags::empty();
        if let Err(error) = rustix::fs::setxattr(dir, "security.selinux", label, none) {
            tracing::warn!(%error, dir = %dir.display(), "setting the SELinux label of the directory failed: plugins in unprivileged containers may not be able to use it");
        }
    }
    Ok(())
}

/// Removes a file and its temporary file, which a crash or a full disk may
/// have left. There must be no concurrent writer. A missing file is no error.
pub fn remove(path: &Path) -> io::Result<()> {
    for path in [&aside_of(path), path] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn content_is_replaced_with_a_private_mode() {
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

    #[test]
    fn temporary_files_are_removed_after_failures_and_removals() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("f");
        remove(&path).expect("the file does not exist");
        fs::write(dir.path().join("f.new"), b"left by a crash").expect("written");
        fs::write(&path, b"there").expect("written");
        remove(&path).expect("removed");
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 0);
        // As on a full disk.
        std::os::unix::fs::symlink("/dev/full", dir.path().join("f.new")).expect("a link");
        replace(&path, b"one").expect_err("no room");
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 0);
    }

    #[test]
    fn concurrent_writes_succeed_and_leftovers_of_a_crash_are_overwritten() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("f");
        fs::write(dir.path().join("f.new"), b"left by a crash, and long").expect("written");
        std::thread::scope(|scope| {
            for writer in 0..4_u8 {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..200 {
                        replace_soon(path, &[b'0' + writer; 9]).expect("written");
                        let content = fs::read(path).expect("read");
                        assert_eq!(content, [content[0]; 9], "the content of one writer");
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 1);
    }
}
