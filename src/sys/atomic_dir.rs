//! Directories whose files change all at once: the published symlink layout of configMap and secret
//! volumes (kubelet spec, 9.7).
//!
//! The files lie in a directory of their own, `..data` links to it, and every visible name links through
//! `..data`. A change makes a new directory and renames one link.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use crate::core::volume::payload::Files;

const DATA: &str = "..data";

/// Makes the directory hold exactly `files`; true if anything changed. `group` is set on
/// every file where given, and each file's owner.
pub fn write(dir: &Path, files: &Files, group: Option<u32>, stamp: &str) -> io::Result<bool> {
    let current = fs::read_link(dir.join(DATA))
        .ok()
        .filter(|target| target.components().count() == 1);
    if let Some(current) = &current
        && same(&dir.join(current), files)
    {
        return Ok(false);
    }
    let fresh = unused(dir, stamp)?;
    fs::DirBuilder::new().mode(0o755).create(dir.join(&fresh))?;
    fs::set_permissions(dir.join(&fresh), fs::Permissions::from_mode(0o755))?;
    for (path, file) in files {
        let target = dir.join(&fresh).join(path);
        if let Some(parent) = target.parent() {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(parent)?;
        }
        let mut handle = fs::OpenOptions::new()
            .create_new(true)
            .write(true)
            .mode(0o600)
            .open(&target)?;
        handle.write_all(&file.content)?;
        if file.owner.is_some() || group.is_some() {
            std::os::unix::fs::fchown(&handle, file.owner, group)?;
        }
        handle.set_permissions(fs::Permissions::from_mode(file.mode))?;
    }
    let temporary = dir.join("..data_tmp");
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    symlink(&fresh, &temporary)?;
    fs::rename(&temporary, dir.join(DATA))?;
    publish(dir, files)?;
    if let Some(old) = current {
        // `..data` no longer leads there.
        fs::remove_dir_all(dir.join(old))?;
    }
    Ok(true)
}

fn unused(dir: &Path, stamp: &str) -> io::Result<PathBuf> {
    for n in 0..1000 {
        let name = PathBuf::from(format!("..{stamp}.{n}"));
        if fs::symlink_metadata(dir.join(&name)).is_err() {
            return Ok(name);
        }
    }
    Err(io::Error::other(
        "no free name for a new version of the volume",
    ))
}

fn same(dir: &Path, files: &Files) -> bool {
    let mut found = BTreeSet::new();
    walk(dir, Path::new(""), &mut found).is_ok()
        && found.len() == files.len()
        && files.iter().all(|(path, file)| {
            found.contains(Path::new(path))
                && fs::read(dir.join(path)).is_ok_and(|c| c == file.content)
        })
}

fn walk(dir: &Path, below: &Path, found: &mut BTreeSet<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir.join(below))? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            walk(dir, &path, found)?
        } else {
            _ = found.insert(path)
        }
    }
    Ok(())
}

/// Makes the visible links, and removes those whose file is gone.
fn publish(dir: &Path, files: &Files) -> io::Result<()> {
    let wanted: BTreeSet<&str> = files.keys().filter_map(|p| p.split('/').next()).collect();
    for name in &wanted {
        let link = dir.join(name);
        if fs::read_link(&link).is_err() {
            symlink(Path::new(DATA).join(name), &link)?;
        }
    }
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if !name.starts_with("..") && !wanted.contains(name) && entry.file_type()?.is_symlink() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::volume::payload::File;

    fn files(list: &[(&str, &str)]) -> Files {
        list.iter()
            .map(|(p, c)| ((*p).to_owned(), File::new(c.as_bytes().to_vec(), 0o440)))
            .collect()
    }

    #[test]
    fn contents_change_all_at_once_and_only_when_they_differ() {
        let dir = tempfile::tempdir().expect("a directory");
        assert!(write(dir.path(), &files(&[("a", "1"), ("d/x", "2")]), None, "t").expect("first"));
        assert_eq!(
            fs::read_to_string(dir.path().join("d/x")).expect("read"),
            "2"
        );
        assert_eq!(
            fs::metadata(dir.path().join("a"))
                .expect("meta")
                .permissions()
                .mode()
                & 0o777,
            0o440
        );
        let before = fs::read_link(dir.path().join(DATA)).expect("link");
        assert!(!write(dir.path(), &files(&[("a", "1"), ("d/x", "2")]), None, "t").expect("same"));
        assert_eq!(fs::read_link(dir.path().join(DATA)).expect("link"), before);
        assert!(write(dir.path(), &files(&[("b", "3")]), None, "t").expect("changed"));
        let visible: BTreeSet<String> = fs::read_dir(dir.path())
            .expect("list")
            .map(|e| e.expect("entry").file_name().into_string().expect("name"))
            .collect();
        assert_eq!(
            visible
                .iter()
                .filter(|n| !n.starts_with(".."))
                .collect::<Vec<_>>(),
            ["b"]
        );
        assert_eq!(visible.len(), 3, "the old version is gone: {visible:?}");
    }

    #[test]
    fn a_hostile_data_link_is_not_followed_when_cleaning_up() {
        let dir = tempfile::tempdir().expect("a directory");
        let victim = tempfile::tempdir().expect("a directory");
        fs::write(victim.path().join("precious"), "x").expect("write");
        symlink(victim.path(), dir.path().join(DATA)).expect("link");
        write(dir.path(), &files(&[("a", "1")]), None, "t").expect("written");
        assert!(victim.path().join("precious").exists());
        assert_eq!(fs::read_to_string(dir.path().join("a")).expect("read"), "1");
    }
}
