//! Directories whose files change atomically: the symlink layout of
//! configMap and secret volumes (`pkg/volume/util/atomic_writer.go`).
//!
//! The files are in a versioned directory, `..data` links to it, and every visible
//! name links through `..data`. A change creates a new directory and renames one link.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink,
};
use std::path::{Path, PathBuf};

use super::removal;
use holdfast_core::volume::payload::Files;

const DATA: &str = "..data";

/// The mode bits that a volume's group needs on files, and additionally on
/// directories (`pkg/volume/volume_linux.go`; these volumes are read-only).
const FILE: u32 = 0o440;
const DIR: u32 = 0o2110 | FILE;

/// Makes the directory contain exactly `files`. Returns whether their contents have changed.
/// With a `group`, every file belongs to it and is readable for it. Always recreates missing
/// visible links, because an agent may have been killed between the two steps of a change.
pub fn write(dir: &Path, files: &Files, group: Option<u32>, stamp: &str) -> io::Result<bool> {
    let current = fs::read_link(dir.join(DATA))
        .ok()
        .filter(|target| target.components().count() == 1);
    let unchanged = current
        .as_ref()
        .is_some_and(|current| same(&dir.join(current), files));
    let version = match current {
        Some(current) if unchanged => current,
        _ => {
            let fresh = unused(dir, stamp)?;
            fill(&dir.join(&fresh), files, group)?;
            let temporary = dir.join("..data_tmp");
            match fs::remove_file(&temporary) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            symlink(&fresh, &temporary)?;
            fs::rename(&temporary, dir.join(DATA))?;
            fresh
        }
    };
    publish(dir, files, &version)?;
    Ok(!unchanged)
}

/// Writes the files into a new version directory.
fn fill(version: &Path, files: &Files, group: Option<u32>) -> io::Result<()> {
    make_dir(version, group)?;
    for (path, file) in files {
        let mut place = version.to_owned();
        for part in Path::new(path).parent().into_iter().flatten() {
            place.push(part);
            match make_dir(&place, group) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                other => other?,
            }
        }
        let mut handle = fs::OpenOptions::new()
            .create_new(true)
            .write(true)
            .mode(0o600)
            .open(version.join(path))?;
        handle.write_all(&file.content)?;
        if file.owner.is_some() || group.is_some() {
            std::os::unix::fs::fchown(&handle, file.owner, group)?;
        }
        let bits = if group.is_some() { FILE } else { 0 };
        handle.set_permissions(fs::Permissions::from_mode(file.mode | bits))?;
    }
    Ok(())
}

fn make_dir(path: &Path, group: Option<u32>) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o700).create(path)?;
    let bits = if group.is_some() { DIR } else { 0 };
    if group.is_some() {
        std::os::unix::fs::chown(path, None, group)?;
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o755 | bits))
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

/// Creates the visible links, and removes links without a file and versions other than `current`. A
/// link belongs to the owner of its file, as upstream since 1.36 (`pkg/volume/util/atomic_writer.go`).
fn publish(dir: &Path, files: &Files, current: &Path) -> io::Result<()> {
    let mut wanted: BTreeMap<&str, Option<u32>> = BTreeMap::new();
    for (path, file) in files {
        let name = path.split('/').next().unwrap_or_default();
        let owner = wanted.entry(name).or_default();
        *owner = owner.or(file.owner);
    }
    for (name, owner) in &wanted {
        let (link, target) = (dir.join(name), Path::new(DATA).join(name));
        match fs::read_link(&link) {
            Ok(there) if there == target => {}
            Ok(_) => {
                fs::remove_file(&link)?;
                symlink(target, &link)?;
            }
            Err(_) => symlink(target, &link)?,
        }
        if let Some(owner) = *owner
            && fs::symlink_metadata(&link)?.uid() != owner
        {
            std::os::unix::fs::lchown(&link, Some(owner), None)?;
        }
    }
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let kind = entry.file_type()?;
        if name.starts_with("..") {
            if kind.is_dir() && Path::new(name) != current {
                removal::remove_tree(&entry.path()).map_err(io::Error::other)?;
            }
        } else if !wanted.contains_key(name) && kind.is_symlink() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_core::volume::payload::File;

    fn files(list: &[(&str, &str)]) -> Files {
        list.iter()
            .map(|(p, c)| ((*p).to_owned(), File::new(c.as_bytes().to_vec(), 0o440)))
            .collect()
    }

    #[test]
    fn contents_change_atomically_and_only_if_they_differ() {
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
        assert_eq!(visible.len(), 3, "the old version is removed: {visible:?}");
    }

    #[test]
    fn partial_files_of_a_killed_agent_are_repaired() {
        let dir = tempfile::tempdir().expect("a directory");
        let content = files(&[("a", "1"), ("d/x", "2")]);
        write(dir.path(), &content, None, "t").expect("first");
        let version = fs::read_link(dir.path().join(DATA)).expect("link");
        // The state after a kill: visible links are missing or stray, and the old version still exists.
        fs::remove_file(dir.path().join("a")).expect("removed");
        fs::remove_file(dir.path().join("d")).expect("removed");
        symlink("..data/elsewhere", dir.path().join("d")).expect("link");
        symlink("..data/gone", dir.path().join("gone")).expect("link");
        fs::create_dir_all(dir.path().join("..old/d")).expect("mkdir");
        assert!(!write(dir.path(), &content, None, "u").expect("mended"));
        assert_eq!(fs::read_link(dir.path().join(DATA)).expect("link"), version);
        assert_eq!(fs::read_to_string(dir.path().join("a")).expect("read"), "1");
        assert_eq!(
            fs::read_to_string(dir.path().join("d/x")).expect("read"),
            "2"
        );
        assert!(fs::symlink_metadata(dir.path().join("gone")).is_err());
        assert!(!dir.path().join("..old").exists());
    }

    #[test]
    fn every_file_is_readable_by_the_group() {
        if crate::skip::needs_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let mut content = files(&[("key", "1"), ("d/x", "2")]);
        for file in content.values_mut() {
            file.mode = 0o400;
        }
        let stat = |path: &str| {
            let stat = fs::metadata(dir.path().join(path)).expect("stat");
            (stat.gid(), stat.mode() & 0o7777)
        };
        write(dir.path(), &content, Some(4242), "t").expect("written");
        assert_eq!(stat("key"), (4242, 0o440));
        assert_eq!(stat("d/x"), (4242, 0o440));
        assert_eq!(stat("d"), (4242, 0o2755));
        // Without a group, files have the requested mode.
        content.insert("new".into(), File::new(b"3".to_vec(), 0o400));
        write(dir.path(), &content, None, "u").expect("written");
        assert_eq!(stat("key").1, 0o400);
    }

    #[test]
    fn links_belong_to_the_owner_of_their_files() {
        if crate::skip::needs_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let mut content = files(&[("token", "1"), ("d/x", "2"), ("d/y", "3"), ("ca.crt", "4")]);
        // As an earlier version wrote it.
        write(dir.path(), &content, None, "t").expect("written");
        for path in ["token", "d/y"] {
            content.get_mut(path).expect("a file").owner = Some(4242);
        }
        let owner = |path: &str| {
            let metadata = fs::symlink_metadata(dir.path().join(path));
            metadata.expect("metadata").uid()
        };
        for _ in 0..2 {
            write(dir.path(), &content, None, "u").expect("written");
            assert_eq!(["token", "d", "ca.crt"].map(owner), [4242, 4242, 0]);
            assert_eq!(owner(DATA), 0);
            fs::remove_file(dir.path().join("token")).expect("removed");
        }
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
