//! A disk that can be pulled out, grown and put back.

use std::process::Command;

use super::succeeded;

/// A file as a block device; taken away when dropped.
pub struct Loop {
    pub device: String,
    file: tempfile::NamedTempFile,
    /// It was not taken away: the name is still this one's.
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

    /// Takes the device away: at once, or when nobody has it open any more, as the kernel does it. What it holds stays.
    pub fn vanish(&mut self) {
        if std::mem::take(&mut self.is_there) {
            let told = Command::new("losetup")
                .args(["--detach", &self.device])
                .output();
            succeeded("losetup", told.unwrap());
        }
    }

    /// It was not taken away.
    pub fn is_there(&self) -> bool {
        self.is_there
    }

    /// Somebody still has a device that was taken away.
    pub fn is_held(&self) -> bool {
        let output = Command::new("losetup")
            .args(["--associated", self.file.path().to_str().unwrap()])
            .output();
        let listed = succeeded("losetup", output.unwrap());
        !self.is_there && !listed.trim().is_empty()
    }

    /// Has a device that was taken away, and that nobody has any more, back under another name perhaps. Were it held, there
    /// would be two filesystems over the same blocks.
    pub fn come_back(&mut self) {
        if !self.is_there {
            assert!(!self.is_held(), "{} is in use", self.device);
            self.device = Loop::attach(&self.file);
            self.is_there = true;
        }
    }

    /// Makes the device larger.
    pub fn grow(&self, bytes: u64) {
        self.file.as_file().set_len(bytes).unwrap();
        let told = Command::new("losetup")
            .args(["--set-capacity", &self.device])
            .output();
        succeeded("losetup", told.unwrap());
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // The name of one that has vanished may be another's by now.
        if !self.is_there {
            return;
        }
        // The test has failed already if it is still in use.
        let _ = Command::new("losetup")
            .args(["--detach", &self.device])
            .status();
    }
}
