//! Creates TAP devices through `/dev/net/tun`.
#![allow(unsafe_code)]

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd as _;

/// `struct ifreq`, with only the name and the flags set.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: i16,
    rest: [u8; 22],
}

nix::ioctl_write_ptr_bad!(
    set_interface,
    nix::request_code_write!(b'T', 202, size_of::<i32>()),
    Request
);
nix::ioctl_write_int_bad!(
    set_persistent,
    nix::request_code_write!(b'T', 203, size_of::<i32>())
);
nix::ioctl_write_int_bad!(
    set_owner,
    nix::request_code_write!(b'T', 204, size_of::<i32>())
);
nix::ioctl_write_int_bad!(
    set_group,
    nix::request_code_write!(b'T', 206, size_of::<i32>())
);

/// Creates a persistent device in the network namespace of this thread.
pub fn add(
    name: &str,
    several_queues: bool,
    owner: Option<u32>,
    group: Option<u32>,
) -> io::Result<()> {
    const TAP: i16 = 0x2;
    const NO_HEADER: i16 = 0x1000;
    const SEVERAL_QUEUES: i16 = 0x100;
    const HEADER: i16 = 0x4000;
    const EXCLUSIVE: i16 = i16::MIN;
    let mut request = Request {
        name: [0; 16],
        flags: TAP | NO_HEADER | HEADER | EXCLUSIVE,
        rest: [0; 22],
    };
    if several_queues {
        request.flags |= SEVERAL_QUEUES;
    }
    let bytes = name.as_bytes();
    if bytes.len() >= request.name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    request.name[..bytes.len()].copy_from_slice(bytes);
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: the request lives through the call, is as large as the kernel's, and the descriptor is open.
    unsafe { set_interface(device.as_raw_fd(), &raw const request) }?;
    let number =
        |id: u32| i32::try_from(id).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    // SAFETY: these take plain numbers.
    unsafe {
        if let Some(owner) = owner {
            set_owner(device.as_raw_fd(), number(owner)?)?;
        }
        if let Some(group) = group {
            set_group(device.as_raw_fd(), number(group)?)?;
        }
        set_persistent(device.as_raw_fd(), 1)?;
    }
    Ok(())
}

/// Runs `work` so that the sockets and devices it creates get an SELinux label. An empty label changes nothing.
///
/// # Errors
///
/// The kernel rejects the label, or `work` fails.
pub fn with_socket_label<T>(label: &str, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    const ATTRIBUTE: &str = "/proc/thread-self/attr/sockcreate";
    if label.is_empty() {
        return work();
    }
    std::fs::write(ATTRIBUTE, label)?;
    let result = work();
    std::fs::write(ATTRIBUTE, "")?;
    result
}
