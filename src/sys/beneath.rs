//! Access to files below a directory that a pod can modify. Opens them with `openat2` and
//! `RESOLVE_BENEATH`, so that no link leads outside, even if files are replaced concurrently.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use nix::fcntl::{OFlag, OpenHow, RenameFlags, ResolveFlag, openat2, renameat2};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

/// A directory handle.
#[derive(Debug)]
pub struct Dir(OwnedFd);

fn how(flags: OFlag) -> OpenHow {
    OpenHow::new()
        .flags(flags | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS)
}

fn without_links(how: OpenHow) -> OpenHow {
    how.resolve(
        ResolveFlag::RESOLVE_BENEATH
            | ResolveFlag::RESOLVE_NO_SYMLINKS
            | ResolveFlag::RESOLVE_NO_MAGICLINKS,
    )
}

/// Whether the kernel has `openat2` (Linux 5.6), which this module requires.
#[must_use]
pub fn is_supported() -> bool {
    let root = Dir::open(Path::new("/"));
    let found = root.map(|root| openat2(root.0.as_fd(), ".", how(OFlag::O_PATH)));
    !matches!(found, Ok(Err(nix::errno::Errno::ENOSYS)))
}

impl Dir {
    /// Opens a directory whose path is trusted.
    pub fn open(path: &Path) -> io::Result<Dir> {
        let fd = nix::fcntl::open(
            path,
            OFlag::O_DIRECTORY | OFlag::O_PATH | OFlag::O_CLOEXEC,
            Mode::empty(),
        )?;
        Ok(Dir(fd))
    }

    /// This directory as a [`Found`].
    pub fn itself(&self) -> io::Result<Found> {
        Found::of(self.0.try_clone()?)
    }

    /// Opens a directory below this one.
    pub(crate) fn open_dir(&self, path: &Path) -> io::Result<Dir> {
        Ok(Dir(openat2(
            self.0.as_fd(),
            path,
            how(OFlag::O_DIRECTORY | OFlag::O_PATH),
        )?))
    }

    /// Opens a directory below this one. Fails if any part of the path is a symlink.
    pub fn open_dir_without_links(&self, path: &Path) -> io::Result<Dir> {
        let how = how(OFlag::O_DIRECTORY | OFlag::O_PATH);
        Ok(Dir(openat2(self.0.as_fd(), path, without_links(how))?))
    }

    /// Creates a file for writing. Fails if the name exists, even as a symlink.
    pub fn create_new(&self, name: &Path, mode: u32) -> io::Result<std::fs::File> {
        let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_WRONLY | OFlag::O_NOFOLLOW;
        let how = how(flags).mode(Mode::from_bits_truncate(mode));
        Ok(openat2(self.0.as_fd(), name, without_links(how))?.into())
    }

    /// Renames a file in this directory. Fails if the new name exists.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let dir = self.0.as_fd();
        Ok(renameat2(
            dir,
            from,
            dir,
            to,
            RenameFlags::RENAME_NOREPLACE,
        )?)
    }

    /// Removes a file, or a symlink itself. A missing file is no error.
    pub fn remove_file(&self, name: &str) -> io::Result<()> {
        match unlinkat(self.0.as_fd(), name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(nix::errno::Errno::ENOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the file or directory at a relative path; `None` if it does not exist.
    pub fn find(&self, path: &Path) -> io::Result<Option<Found>> {
        match openat2(self.0.as_fd(), path, how(OFlag::O_PATH)) {
            Ok(fd) => Found::of(fd).map(Some),
            Err(nix::errno::Errno::ENOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Like [`Dir::find`], but creates missing directories with the mode and owner of this directory.
    pub fn find_or_make(&self, path: &Path) -> io::Result<Found> {
        if let Some(found) = self.find(path)? {
            return Ok(found);
        }
        let like = nix::sys::stat::fstat(self.0.as_fd())?;
        let mut here = Dir(self.0.try_clone()?);
        for part in path.components().map(|c| Path::new(c.as_os_str())) {
            match mkdirat(here.0.as_fd(), part, Mode::from_bits_truncate(0o750)) {
                Err(nix::errno::Errno::EEXIST) => here = here.open_dir(part)?,
                Err(error) => return Err(error.into()),
                Ok(()) => {
                    // Open for reading, because the mode of an O_PATH handle cannot be changed.
                    let made = openat2(
                        here.0.as_fd(),
                        part,
                        how(OFlag::O_DIRECTORY | OFlag::O_RDONLY | OFlag::O_NOFOLLOW),
                    )?;
                    nix::unistd::fchown(&made, Some(like.st_uid.into()), Some(like.st_gid.into()))?;
                    nix::sys::stat::fchmod(&made, Mode::from_bits_truncate(like.st_mode & 0o7777))?;
                    here = Dir(made);
                }
            }
        }
        Found::of(here.0)
    }

    /// Opens a file for reading. Fails if any part of the path is a symlink.
    pub fn open_file(&self, path: &Path) -> io::Result<std::fs::File> {
        let how = how(OFlag::O_RDONLY | OFlag::O_NONBLOCK);
        Self::only_a_file(openat2(self.0.as_fd(), path, without_links(how))?)
    }

    /// Like [`Dir::open_file`], but follows symlinks that stay below this directory.
    pub(crate) fn open_within(&self, path: &Path) -> io::Result<std::fs::File> {
        Self::only_a_file(openat2(
            self.0.as_fd(),
            path,
            how(OFlag::O_RDONLY | OFlag::O_NONBLOCK),
        )?)
    }

    /// Like [`Dir::open_within`], but the file may also be a symlink with an absolute path. `at` is the
    /// path of this directory; the target must be below it, and no symlink on the way may lead outside.
    pub fn open_linked(&self, at: &Path, path: &Path) -> io::Result<std::fs::File> {
        match self.open_within(path) {
            Err(error) if error.raw_os_error() == Some(libc::EXDEV) => {
                let target = std::fs::read_link(at.join(path))?;
                let below = target.strip_prefix(at).map_err(|_| error)?;
                self.open_within(below)
            }
            opened => opened,
        }
    }

    /// Rejects anything but regular files: a FIFO could block, and opening a device could have side effects.
    fn only_a_file(fd: OwnedFd) -> io::Result<std::fs::File> {
        let file = std::fs::File::from(fd);
        if file.metadata()?.is_file() {
            Ok(file)
        } else {
            Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file",
            ))
        }
    }

    /// The sorted names in a directory below this one. Names of directories end with a slash.
    pub fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let fd = openat2(
            self.0.as_fd(),
            path,
            how(OFlag::O_DIRECTORY | OFlag::O_RDONLY),
        )?;
        let mut dir = nix::dir::Dir::from_fd(fd)?;
        let mut names = vec![];
        for entry in dir.iter() {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let slash = if entry.file_type() == Some(nix::dir::Type::Directory) {
                "/"
            } else {
                ""
            };
            if name != "." && name != ".." {
                names.push(format!("{name}{slash}"));
            }
        }
        names.sort();
        Ok(names)
    }

    /// Reads a file of at most `limit` bytes below this directory.
    pub fn read(&self, path: &Path, limit: u64) -> io::Result<String> {
        use std::io::Read as _;
        let file = self.open_within(path)?;
        let mut text = String::new();
        file.take(limit + 1).read_to_string(&mut text)?;
        if text.len() as u64 > limit {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("larger than {limit} bytes"),
            ));
        }
        Ok(text)
    }
}

/// An open file or directory. The handle refers to the same object even if its path changes.
#[derive(Debug)]
pub struct Found {
    fd: OwnedFd,
    /// Whether this is a directory.
    pub is_dir: bool,
    identity: (u64, u64),
}

impl Found {
    fn of(fd: OwnedFd) -> io::Result<Found> {
        let stat = nix::sys::stat::fstat(fd.as_fd())?;
        let is_dir = nix::sys::stat::SFlag::from_bits_truncate(stat.st_mode)
            .contains(nix::sys::stat::SFlag::S_IFDIR);
        Ok(Found {
            fd,
            is_dir,
            identity: (stat.st_dev, stat.st_ino),
        })
    }

    /// Whether a path leads to the same object.
    #[must_use]
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        nix::sys::stat::lstat(path).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.identity)
    }

    /// A path to the object, for calls that accept only paths. It is valid while the handle is open.
    #[must_use]
    pub(crate) fn magic_path(&self) -> std::path::PathBuf {
        use std::os::fd::AsRawFd as _;
        format!("/proc/self/fd/{}", self.fd.as_raw_fd()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absolute_links_to_targets_below_are_followed() {
        use std::os::unix::fs::symlink;

        let dir = tempfile::tempdir().expect("a directory");
        let at = dir.path();
        std::fs::create_dir_all(at.join("pods/p")).expect("a directory");
        std::fs::write(at.join("pods/p/0.log"), "said").expect("written");
        std::fs::create_dir(at.join("containers")).expect("a directory");
        let outside = at.join("pods/../../outside");
        for (name, target) in [
            ("ours", at.join("pods/p/0.log")),
            ("passwd", "/etc/passwd".into()),
            ("outside", outside),
            ("chain", at.join("containers/passwd")),
        ] {
            symlink(target, at.join("containers").join(name)).expect("linked");
        }
        let below = Dir::open(at).expect("a directory");
        let open = |name: &str| below.open_linked(at, &Path::new("containers").join(name));
        let text = open("ours").map(|file| io::read_to_string(file).expect("text"));
        assert_eq!(text.expect("followed"), "said");
        for name in ["passwd", "outside", "chain", "none"] {
            assert!(open(name).is_err(), "{name}");
        }
        assert!(below.open_linked(at, Path::new("../x")).is_err());
    }

    #[test]
    fn links_to_targets_outside_are_rejected() {
        let outside = tempfile::tempdir().expect("a directory");
        let inside = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(inside.path().join("fine")).expect("mkdir");
        std::os::unix::fs::symlink(outside.path(), inside.path().join("out")).expect("link");
        std::os::unix::fs::symlink("fine", inside.path().join("in")).expect("link");
        let dir = Dir::open(inside.path()).expect("open");
        assert!(dir.open_dir(Path::new("fine")).is_ok() && dir.open_dir(Path::new("in")).is_ok());
        for path in ["out", "..", "fine/../..", "/etc", "out/x"] {
            assert!(dir.open_dir(Path::new(path)).is_err(), "{path}");
            assert!(dir.find_or_make(Path::new(path)).is_err(), "{path}");
        }
        let made = dir.find_or_make(Path::new("a/b")).expect("made");
        assert!(
            made.is_dir && made.is_at(&inside.path().join("a/b")) && !made.is_at(inside.path())
        );
        std::fs::write(inside.path().join("fine/file"), "text").expect("write");
        assert!(
            !dir.find_or_make(Path::new("in/file"))
                .expect("found")
                .is_dir,
            "links within are followed"
        );
        assert_eq!(dir.read(Path::new("in/file"), 4).expect("read"), "text");
        assert!(
            dir.read(Path::new("in/file"), 3).is_err()
                && dir.read(Path::new("out"), 9).is_err()
                && dir.read(Path::new("fine"), 9).is_err()
        );
    }
}
