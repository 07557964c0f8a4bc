//! Disks of tests: one that can be pulled out, grown and put back, and one that is small.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::succeeded;

/// A file as a block device, detached when dropped.
pub struct Loop {
    pub device: String,
    file: tempfile::NamedTempFile,
    /// Whether the device is attached, so that its name is valid.
    is_there: bool,
}

impl Loop {
    pub fn new() -> Loop {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(64 << 20).unwrap();
        Loop {
            device: Loop::attach(&file),
            file,
            is_there: true,
        }
    }

    fn attach(file: &tempfile::NamedTempFile) -> String {
        let output = Command::new("losetup")
            .args(["--find", "--show", file.path().to_str().unwrap()])
            .output();
        succeeded("losetup", output.unwrap()).trim().to_owned()
    }

    /// Detaches the device. The kernel does this when the last user has closed it. The file keeps its content.
    pub fn detach(&mut self) {
        if std::mem::take(&mut self.is_there) {
            let output = Command::new("losetup")
                .args(["--detach", &self.device])
                .output();
            succeeded("losetup", output.unwrap());
        }
    }

    /// Whether the device is attached.
    pub fn is_there(&self) -> bool {
        self.is_there
    }

    /// Whether a detached device is still in use.
    pub fn is_in_use(&self) -> bool {
        let output = Command::new("losetup")
            .args(["--associated", self.file.path().to_str().unwrap()])
            .output();
        let listed = succeeded("losetup", output.unwrap());
        !self.is_there && !listed.trim().is_empty()
    }

    /// Attaches a detached device again, perhaps under another name. It must not be in use: there would be
    /// two filesystems over the same blocks.
    pub fn reattach(&mut self) {
        if !self.is_there {
            assert!(!self.is_in_use(), "{} is in use", self.device);
            self.device = Loop::attach(&self.file);
            self.is_there = true;
        }
    }

    /// Makes the device larger.
    pub fn grow(&self, bytes: u64) {
        self.file.as_file().set_len(bytes).unwrap();
        let output = Command::new("losetup")
            .args(["--set-capacity", &self.device])
            .output();
        succeeded("losetup", output.unwrap());
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // The name of a detached device may belong to another one by now.
        if !self.is_there {
            return;
        }
        // If the device is still in use, the test has failed already.
        let _ = Command::new("losetup")
            .args(["--detach", &self.device])
            .status();
    }
}

/// A small file system at a directory, which a test can fill. It is unmounted when dropped. The space on it does not
/// depend on how full the machine's own disk is.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts a tmpfs with these options (`size=1m`).
    pub fn at(dir: PathBuf, options: &str) -> SmallDisk {
        std::fs::create_dir_all(&dir).unwrap();
        let flags = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("tmpfs"), &dir, Some("tmpfs"), flags, Some(options)).unwrap();
        SmallDisk(dir)
    }

    /// The directory that it is mounted at.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // If it is missing, the test has failed already.
        let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}
