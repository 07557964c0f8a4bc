//! The directory of named network namespaces: files on which namespaces are mounted.
//!
//! The first `ip netns add` after boot bind-mounts the directory over itself, unless it is a mount already
//! (iproute2, `ip/ipnetns.c`). If the filesystem of the directory is not shared, this hides namespaces that
//! container runtimes have mounted there before. A runtime then unmounts the copy on top, and cannot remove
//! the file, which is still a mount point below (EBUSY). The agent therefore creates this mount before the
//! first sandbox. On a shared filesystem, both copies are peers, and unmounting one unmounts the other.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use nix::mount::MntFlags;

use super::mount::{self as mounts, Sharing, unescape};

/// The directory that iproute2 and container runtimes use.
pub const DIR: &str = "/run/netns";

/// Makes `dir` a shared bind mount of itself, unless it already is on
/// a shared mount. Changes nothing if namespaces are mounted below it.
///
/// # Errors
///
/// The directory cannot be created or mounted.
pub fn share(dir: &Path) -> io::Result<Sharing> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(dir)?;
    let was_mounted = mounts::is_mounted(dir)?;
    let sharing = mounts::share(dir)?;
    if !was_mounted && mounts::is_mounted(dir)? && !hidden(dir)?.is_empty() {
        // A runtime has mounted a namespace meanwhile.
        mounts::unmount(dir, MntFlags::empty())?;
        return Ok(Sharing::Occupied);
    }
    Ok(sharing)
}

/// The mount points below `dir` that a mount over `dir` hides.
///
/// # Errors
///
/// The mount table cannot be read.
pub fn hidden(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let dir = match std::fs::canonicalize(dir) {
        Ok(dir) => dir,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(error) => return Err(error),
    };
    Ok(hidden_in(
        &std::fs::read("/proc/thread-self/mountinfo")?,
        &dir,
    ))
}

/// A line of the mount table.
struct Entry {
    parent: u64,
    point: PathBuf,
    /// The peer group, whose members propagate mounts to each other; `None` for a private mount.
    peers: Option<Vec<u8>>,
}

/// Parses `id parent major:minor root point options [optional…] - …` (proc_pid_mountinfo(5)).
fn parse(line: &[u8]) -> Option<(u64, Entry)> {
    let number = |field: Option<&[u8]>| std::str::from_utf8(field?).ok()?.parse::<u64>().ok();
    let mut fields = line.split(|b| *b == b' ');
    let (id, parent) = (number(fields.next())?, number(fields.next())?);
    let point = PathBuf::from(OsString::from_vec(unescape(fields.nth(2)?)));
    let mut optional = fields.skip(1).take_while(|field| *field != b"-");
    let peers = optional.find(|field| field.starts_with(b"shared:"));
    let entry = Entry {
        parent,
        point,
        peers: peers.map(<[u8]>::to_vec),
    };
    Some((id, entry))
}

fn hidden_in(table: &[u8], dir: &Path) -> Vec<PathBuf> {
    let all: BTreeMap<u64, Entry> = table.split(|b| *b == b'\n').filter_map(parse).collect();
    let over: Vec<u64> = all
        .iter()
        .filter(|(_, entry)| entry.point == dir)
        .map(|(id, _)| *id)
        .collect();
    // Of several mounts at the same path, each is the parent of the next.
    let is_covered = |id: &u64| over.iter().any(|other| all[other].parent == *id);
    let Some(top) = over.iter().find(|id| !is_covered(id)) else {
        return vec![];
    };
    // The mounts below the top one: other mounts over the directory, and the mount that
    // contains the directory. Mounts that are hidden by other mounts do not count.
    let covered: Vec<u64> = over
        .iter()
        .map(|id| all[id].parent)
        .filter(|id| id != top)
        .collect();
    let peers = all[top].peers.as_ref();
    let is_peer = |id: &u64| {
        let own = all.get(id).and_then(|entry| entry.peers.as_ref());
        own.is_some() && own == peers
    };
    let is_below = |entry: &Entry| entry.point.starts_with(dir) && entry.point != dir;
    let is_hidden = |entry: &Entry| {
        let mut base = entry.parent;
        // No chain of parents is longer than the table.
        for _ in 0..all.len() {
            match all.get(&base).filter(|above| is_below(above)) {
                Some(above) => base = above.parent,
                None => break,
            }
        }
        covered.contains(&base) && !is_peer(&base)
    };
    let hidden = all
        .values()
        .filter(|entry| is_below(entry) && is_hidden(entry));
    hidden.map(|entry| entry.point.clone()).collect()
}

#[cfg(test)]
mod tests {
    use nix::mount::{MsFlags, mount};

    use super::*;

    #[test]
    fn a_mount_over_a_directory_hides_what_was_mounted_below_it() {
        let base = "20 1 0:20 / / rw - tmpfs t rw\n30 20 0:25 / /run rw - tmpfs t rw\n\
                    41 30 0:4 net:[1] /run/netns/cni-1 rw - nsfs nsfs rw\n";
        let over = "50 30 0:25 /netns /run/netns rw shared:5 - tmpfs t rw\n\
                    51 50 0:4 net:[1] /run/netns/cni-1 rw - nsfs nsfs rw\n\
                    52 50 0:4 net:[2] /run/netns/a\\040b rw - nsfs nsfs rw\n";
        // Hidden by a mount over /run.
        let base = &format!("{base}25 20 0:4 net:[3] /run/netns/older rw - nsfs nsfs rw\n");
        let twice = "60 50 0:25 /netns /run/netns rw shared:6 - tmpfs t rw\n";
        let names = |table: &str| {
            let found = hidden_in(table.as_bytes(), Path::new("/run/netns"));
            let name = |path: PathBuf| path.file_name().map(|n| n.to_string_lossy().into_owned());
            found.into_iter().filter_map(name).collect::<Vec<_>>()
        };
        assert_eq!(names(base), Vec::<String>::new());
        assert_eq!(names(&format!("{base}{over}")), ["cni-1"]);
        assert_eq!(
            names(&format!("{base}{over}{twice}")),
            ["cni-1", "cni-1", "a b"]
        );
        let shared = base.replace("/run rw - ", "/run rw shared:5 - ");
        assert_eq!(
            names(&format!("{shared}{over}")),
            Vec::<String>::new(),
            "mounts of a shared directory propagate to it"
        );
        assert_eq!(names("1 1 0:1 / / rw - a b c\nx\n"), Vec::<String>::new());
    }

    /// Runs `work` in a thread with a separate mount namespace and an empty `/run`.
    fn with_a_run_of_its_own(work: impl FnOnce() + Send) {
        let thread = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("unshared");
            let none = None::<&str>;
            let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
            mount(none, "/", none, private, none).expect("private");
            for old in mounts::below(Path::new("/run")).expect("listed") {
                mounts::unmount(&old.point, MntFlags::MNT_DETACH).expect("unmounted");
            }
            mount(Some("tmpfs"), "/run", Some("tmpfs"), MsFlags::empty(), none).expect("mounted");
            mount(none, "/run", none, private, none).expect("made private, as without systemd");
            work();
        };
        std::thread::scope(|scope| {
            scope
                .spawn(thread)
                .join()
                .expect("the thread does not panic")
        });
    }

    /// Pins a namespace as a runtime does for a sandbox.
    fn pin(name: &str) -> PathBuf {
        let path = Path::new(DIR).join(name);
        std::fs::create_dir_all(DIR).expect("mkdir");
        std::fs::write(&path, "").expect("written");
        let (none, own) = (None::<&str>, Some("/proc/thread-self/ns/net"));
        mount(own, &path, none, MsFlags::MS_BIND, none).expect("mounted");
        path
    }

    fn unpin(path: &Path) -> io::Result<()> {
        mounts::unmount(path, MntFlags::MNT_DETACH)?;
        std::fs::remove_file(path)
    }

    fn add(name: &str) {
        let status = std::process::Command::new("ip")
            .args(["netns", "add", name])
            .status();
        assert!(status.expect("iproute2 is installed").success());
    }

    #[test]
    fn the_first_ip_netns_add_hides_no_sandbox() {
        if crate::skip::needs_root() {
            return;
        }
        let dir = Path::new(DIR);
        with_a_run_of_its_own(|| {
            let sandbox = pin("cni-1");
            assert_eq!(share(dir).expect("checked"), Sharing::Occupied);
            assert!(!mounts::is_mounted(dir).expect("checked"));
            add("first");
            assert_eq!(hidden(dir).expect("read"), std::slice::from_ref(&sandbox));
            let error = unpin(&sandbox).expect_err("the hidden mount is still there");
            assert_eq!(error.raw_os_error(), Some(nix::errno::Errno::EBUSY as i32));
            // The remedy that `holdfast doctor` suggests.
            mounts::unmount_all(dir).expect("unmounted");
            assert!(hidden(dir).expect("read").is_empty());
        });
        with_a_run_of_its_own(|| {
            for _ in 0..2 {
                assert_eq!(share(dir).expect("shared"), Sharing::Shared);
            }
            let sandbox = pin("cni-1");
            add("first");
            assert!(hidden(dir).expect("read").is_empty());
            unpin(&sandbox).expect("the namespace is unpinned");
        });
    }
}
