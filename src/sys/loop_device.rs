//! Finds and detaches loop devices.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

// `LOOP_CLR_FD` of the kernel's `linux/loop.h`.
nix::ioctl_none_bad!(clear, 0x4c01);

/// The loop devices with this backing file. The path must not
/// contain symlinks, because the kernel reports the real path.
pub fn of(file: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = vec![];
    for entry in fs::read_dir("/sys/block")? {
        let entry = entry?;
        // Not a loop device, or one without a backing file.
        let Ok(text) = fs::read(entry.path().join("loop/backing_file")) else {
            continue;
        };
        let text = text.strip_suffix(b"\n").unwrap_or(&text);
        if text == file.as_os_str().as_encoded_bytes() {
            found.push(Path::new("/dev").join(entry.file_name()));
        }
    }
    Ok(found)
}

/// Detaches a loop device from its backing file, immediately or when the last
/// process closes the device. A device without a backing file is no error.
pub fn detach(device: &Path) -> io::Result<()> {
    let device = File::open(device)?;
    // SAFETY: the call takes no argument, and the descriptor is open.
    match unsafe { clear(device.as_raw_fd()) } {
        Ok(_) | Err(Errno::ENXIO) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
