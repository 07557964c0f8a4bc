//! Small files: read as a whole and no further than they may be long, never seen half written.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
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

/// Where the new content of a file is before it is all there.
fn aside_of(path: &Path) -> PathBuf {
    PathBuf::from(format!("{}.new", path.display()))
}

/// The new content beside the old, under a name that what a crash has left there has, too. Who writes the same file
/// meanwhile waits until this file is closed, which is after it was renamed.
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
        // Who held it before has renamed it, and it is not to be written any more.
        if !is_at(&file, &aside)? {
            continue;
        }
        let written = file.set_len(0).and_then(|()| file.write_all(content));
        if let Err(error) = written {
            // A full disk: nothing of it is of use. That it stays then would be no harm.
            _ = fs::remove_file(&aside);
            return Err(error);
        }
        return Ok((aside, file));
    }
}

/// Whether this file is the one at the path.
fn is_at(file: &fs::File, path: &Path) -> io::Result<bool> {
    let (open, there) = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        there => (file.metadata()?, there?),
    };
    Ok((open.dev(), open.ino()) == (there.dev(), there.ino()))
}

/// Replaces a file as a whole, readable by root only, and leaves it to the kernel when it reaches the disk.
pub fn replace_soon(path: &Path, content: &[u8]) -> io::Result<()> {
    let (aside, _locked) = aside(path, content)?;
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

/// Makes a directory for plugins that run in containers, and lets these use it where there is SELinux (the label is the
/// kubelet's `KubeletPluginsDirSELinuxLabel`).
pub fn make_for_plugins(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(dir)?;
    if super::machine::has_selinux() {
        let label = b"system_u:object_r:container_file_t:s0";
        let none = rustix::fs::XattrFlags::empty();
        if let Err(error) = rustix::fs::setxattr(dir, "security.selinux", label, none) {
            tracing::warn!(%error, dir = %dir.display(), "plugins in containers that are not privileged may not use the directory: it cannot be labelled");
        }
    }
    Ok(())
}

/// Removes a file that nobody writes any more, with what a crash or a full disk has left beside it. One that is not there is
/// no error.
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

    #[test]
    fn nothing_is_left_beside_a_file_that_could_not_be_written_or_is_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("f");
        remove(&path).expect("it is not there");
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
    fn several_may_write_a_file_at_once_and_what_a_crash_left_is_overwritten() {
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
