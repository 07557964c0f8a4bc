//! Reads new records of the kernel log from `/dev/kmsg`.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek, read};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::memory_notice::registered;

/// The device of the kernel log.
pub const DEVICE: &str = "/dev/kmsg";
/// The size limit of a line in bytes, above that of the kernel's
/// longest record. The beginning of a longer line is dropped.
const MAX_RECORD_BYTES: usize = 16 << 10;

/// The kernel log, from the time of opening.
pub struct KernelLog {
    fd: AsyncFd<OwnedFd>,
    /// Bytes that were read but not yet returned.
    read: Vec<u8>,
}

impl KernelLog {
    /// Opens the log at its end. Must be called inside a tokio runtime.
    pub fn open(path: &Path) -> io::Result<KernelLog> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        match lseek(&file, 0, Whence::SeekEnd) {
            // A pipe cannot seek.
            Ok(_) | Err(Errno::ESPIPE) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(KernelLog {
            fd: registered(file.into(), Interest::READABLE)?,
            read: vec![],
        })
    }

    /// The next line: a record, or a field of a record, which begins with a space.
    pub async fn next(&mut self) -> io::Result<String> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            if self.read.len() > MAX_RECORD_BYTES {
                self.read.clear();
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> io::Result<()> {
        let mut ready = self.fd.readable().await?;
        let mut some = [0; MAX_RECORD_BYTES];
        match read(self.fd.get_ref(), &mut some) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(length) => self.read.extend_from_slice(&some[..length]),
            Err(Errno::EAGAIN) => ready.clear_ready(),
            // Records were overwritten before they could be read; reading continues with the next.
            Err(Errno::EPIPE | Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[tokio::test]
    async fn records_are_read_completely_and_one_at_a_time() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("log");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let mut log = KernelLog::open(&path).expect("opened");
        let mut other = OpenOptions::new().write(true).open(&path).expect("opened");
        other
            .write_all(b"6,1,2,-;one\n SUBSYSTEM=x\n6,2,")
            .expect("written");
        assert_eq!(log.next().await.expect("a line"), "6,1,2,-;one");
        assert_eq!(log.next().await.expect("a line"), " SUBSYSTEM=x");
        {
            let mut half = std::pin::pin!(log.next());
            assert!(
                futures::poll!(&mut half).is_pending(),
                "an incomplete record is not returned"
            );
        }
        other.write_all(b"2,-;\xfftwo\n").expect("written");
        assert_eq!(log.next().await.expect("a line"), "6,2,2,-;\u{fffd}two");
        // More than any record: the beginning is dropped, so that the buffer stays bounded.
        let flood = vec![b'x'; 40 << 10];
        let writer = std::thread::spawn(move || {
            other.write_all(&flood).expect("written");
            other.write_all(b"\n6,3,2,-;three\n").expect("written");
        });
        assert!(log.next().await.expect("a line").len() <= 2 * MAX_RECORD_BYTES);
        assert_eq!(log.next().await.expect("a line"), "6,3,2,-;three");
        writer.join().expect("written");
        let ended = log.next().await.map_err(|e| e.kind());
        assert_eq!(ended, Err(io::ErrorKind::UnexpectedEof));
    }

    /// If the log is readable: existing records are not returned.
    #[tokio::test]
    async fn reading_begins_at_the_end_of_the_log() {
        let Ok(mut log) = KernelLog::open(Path::new(DEVICE)) else {
            return crate::skip::skipped("this machine has no kernel log that the user may read");
        };
        let mut next = std::pin::pin!(log.next());
        assert!(futures::poll!(&mut next).is_pending());
    }
}
