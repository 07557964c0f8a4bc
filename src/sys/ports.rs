//! Finds the process that listens on a TCP port, from the kernel's tables.

use std::fs;
use std::net::{SocketAddr, TcpListener};

/// The state of a listening socket in `/proc/net/tcp`.
const LISTENS: &str = "0A";

/// Whether an address is in use: `None` if it can be bound. Otherwise
/// the name and pid of the listening process, if they can be determined.
#[must_use]
pub fn holder(address: SocketAddr) -> Option<Option<(String, u32)>> {
    match TcpListener::bind(address) {
        Ok(_) => None,
        Err(_) => Some(listener(address.port())),
    }
}

/// The process that listens on a port at any address.
fn listener(port: u16) -> Option<(String, u32)> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(fs::read_to_string);
    let inodes: Vec<String> = tables
        .iter()
        .flatten()
        .flat_map(|table| table.lines().filter_map(|row| listening(row, port)))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    let entries = fs::read_dir("/proc").ok()?.filter_map(Result::ok);
    let mut pids = entries.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let pid = pids.find(|pid| {
        let open = fs::read_dir(format!("/proc/{pid}/fd"));
        let targets = open
            .into_iter()
            .flatten()
            .filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        targets.into_iter().any(|target| {
            inodes
                .iter()
                .any(|inode| target.as_os_str() == inode.as_str())
        })
    })?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some((name.trim().to_owned(), pid))
}

/// The inode of the socket in a row of the table, if it listens on the port.
fn listening(row: &str, port: u16) -> Option<&str> {
    let fields: Vec<&str> = row.split_whitespace().collect();
    let [_, local, _, state, _, _, _, _, _, inode, ..] = &fields[..] else {
        return None;
    };
    let (_, hex) = local.rsplit_once(':')?;
    let is_it = *state == LISTENS && u16::from_str_radix(hex, 16) == Ok(port);
    is_it.then_some(inode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_that_listens_on_a_port_is_found() {
        let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = socket.local_addr().expect("an address");
        // A program that another test has just forked keeps the socket open until its execve.
        let until = |what: &str, holds: &dyn Fn(Option<u32>) -> bool| {
            let begun = std::time::Instant::now();
            while !holds(holder(address).map(|found| found.map_or(0, |(_, pid)| pid))) {
                assert!(begun.elapsed().as_secs() < 60, "{what}");
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        };
        until("this process listens on the port", &|pid| {
            pid == Some(std::process::id())
        });
        drop(socket);
        until("no process listens on the port", &|pid| pid.is_none());
    }
}
