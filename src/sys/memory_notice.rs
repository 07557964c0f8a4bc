//! Kernel notifications about memory shortage: tasks stall on memory (PSI, all cgroup versions), or a v1 cgroup
//! has grown by a number of bytes. They are hints to read the usage, and may come early, late or not at all.
#![allow(unsafe_code)]

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt as _, select_all};
use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::cgroup::is_v2;

const STALLS: &str = "/proc/pressure/memory";
/// The PSI trigger: 50 ms of stalls within a second, in microseconds. The kernel requires the terminating zero.
const STALLED: &[u8] = b"some 50000 1000000\0";
const V1: &str = "/sys/fs/cgroup/memory";
/// Delay after a notification, so that continuous notifications do not keep a processor busy.
const PAUSE: Duration = Duration::from_millis(20);

/// The notifications to receive.
pub struct MemoryNotices {
    stalls: Option<AsyncFd<OwnedFd>>,
    grown: Vec<AsyncFd<OwnedFd>>,
}

/// Registers a descriptor for readiness with tokio.
pub(super) fn registered(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an owned descriptor stays the same, and open, until it is dropped.
    let registered = unsafe { AsyncFd::register_with_interest(fd, interest) };
    registered.map_err(Into::into)
}

fn watch_stalls() -> io::Result<AsyncFd<OwnedFd>> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(STALLS)?;
    file.write_all(STALLED)?;
    registered(file.into(), Interest::PRIORITY)
}

/// The registration lasts until the returned descriptor is dropped.
fn watch_growth(cgroup: &str, by: u64) -> io::Result<AsyncFd<OwnedFd>> {
    let dir = Path::new(V1).join(cgroup.trim_matches('/'));
    let usage = OpenOptions::new()
        .read(true)
        .open(dir.join("memory.usage_in_bytes"))?;
    let used: u64 = io::read_to_string(&usage)?
        .trim()
        .parse()
        .map_err(io::Error::other)?;
    let eventfd = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
    let text = format!(
        "{} {} {}",
        eventfd.as_raw_fd(),
        usage.as_raw_fd(),
        used.saturating_add(by)
    );
    OpenOptions::new()
        .write(true)
        .open(dir.join("cgroup.event_control"))?
        .write_all(text.as_bytes())?;
    registered(eventfd.into(), Interest::READABLE)
}

/// Returns on the next notification. If no more can come, never returns.
async fn notice(fd: &AsyncFd<OwnedFd>, interest: Interest) {
    let Ok(mut ready) = fd.ready(interest).await else {
        return std::future::pending().await;
    };
    if interest.is_readable() {
        // The value read is a count, which is not needed.
        let _ = nix::unistd::read(fd.get_ref(), &mut [0; 8]);
    }
    ready.clear_ready();
}

impl MemoryNotices {
    /// Registers for notifications of stalls. Must be called inside a tokio runtime.
    #[must_use]
    pub fn open() -> MemoryNotices {
        let stalls = watch_stalls();
        if let Err(error) = &stalls {
            tracing::debug!(%error, "registering for notifications of memory stalls failed");
        }
        MemoryNotices {
            stalls: stalls.ok(),
            grown: vec![],
        }
    }

    /// Registers for notifications when cgroups grow by these
    /// numbers of bytes from now on. Replaces earlier registrations.
    pub fn report_growth(&mut self, cgroups: &[(&str, u64)]) {
        self.grown.clear();
        if is_v2() {
            return;
        }
        for (cgroup, by) in cgroups {
            match watch_growth(cgroup, *by) {
                Ok(fd) => self.grown.push(fd),
                Err(error) => {
                    tracing::debug!(%error, cgroup, "registering for notifications of a cgroup's growth failed")
                }
            }
        }
    }

    /// Returns on the next notification.
    pub async fn next(&mut self) {
        let stalls = self.stalls.iter().map(|fd| (fd, Interest::PRIORITY));
        let grown = self.grown.iter().map(|fd| (fd, Interest::READABLE));
        let all: Vec<BoxFuture<'_, ()>> = stalls
            .chain(grown)
            .map(|(fd, interest)| notice(fd, interest).boxed())
            .collect();
        if all.is_empty() {
            return std::future::pending().await;
        }
        select_all(all).await;
        tokio::time::sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// A process grows in a separate cgroup: the notification comes only after it has grown enough.
    #[tokio::test]
    async fn a_growing_cgroup_causes_a_notification() {
        let name = format!("holdfast-notice-{}", std::process::id());
        let dir = Path::new(V1).join(&name);
        let mut notices = MemoryNotices {
            stalls: None,
            grown: vec![],
        };
        if is_v2() {
            notices.report_growth(&[(&name, 32 << 20)]);
            assert!(notices.grown.is_empty(), "version 2 has no notifications");
            return;
        }
        if std::fs::create_dir(&dir).is_err() {
            return crate::skip::skipped("the user may not create cgroups");
        }
        // `sort` keeps all its input in memory.
        let mut sort = Command::new("sort")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("sort runs");
        std::fs::write(dir.join("cgroup.procs"), sort.id().to_string()).expect("moved");
        notices.report_growth(&[(&name, 32 << 20)]);
        let mut input = sort.stdin.take().expect("a pipe");
        let mut grow = |megabytes: usize| {
            for _ in 0..megabytes {
                input.write_all(&vec![b'x'; 1 << 20]).expect("written");
            }
        };
        grow(4);
        let early = tokio::time::timeout(Duration::from_millis(200), notices.next()).await;
        grow(124);
        let noticed = tokio::time::timeout(Duration::from_secs(60), notices.next()).await;
        sort.kill().expect("killed");
        sort.wait().expect("ended");
        drop(notices);
        for _ in 0..100 {
            if std::fs::remove_dir(&dir).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(early.is_err() && noticed.is_ok(), "{early:?} {noticed:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn without_kernel_notifications_none_are_reported() {
        let mut notices = MemoryNotices {
            stalls: None,
            grown: vec![],
        };
        let noticed = tokio::time::timeout(Duration::from_secs(3600), notices.next()).await;
        assert!(noticed.is_err());
    }
}
