//! Rotates the log of a running container (`pkg/kubelet/logs/container_log_manager.go`): deletes the oldest files
//! and renames the current one, after which the runtime opens a new file. Older files are compressed separately.
//! Compression may take long, and the log may be rotated again meanwhile. Every byte stays in exactly one file.
//!
//! Pods with a hostPath of the log directory can create arbitrary files there. All operations
//! are therefore relative to a handle of the container's log directory and follow no links.
//! Otherwise a link could make the agent compress any file of the host into the pod's reach.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use holdfast_core::serving::logs;
use holdfast_sys::beneath::Dir;

/// The directory of a container's logs, relative to that of all logs.
pub(crate) struct LogPlace {
    pub(crate) logs: PathBuf,
    pub(crate) dir: PathBuf,
}

impl LogPlace {
    pub(crate) fn open(&self) -> io::Result<LogDir> {
        let dir = Dir::open(&self.logs)?.open_dir_without_links(&self.dir)?;
        Ok(LogDir(dir))
    }

    /// The name for error messages.
    pub(crate) fn name(&self) -> impl std::fmt::Display {
        self.dir.display()
    }
}

/// An open log directory of a container.
pub(crate) struct LogDir(Dir);

impl LogDir {
    pub(crate) fn open_log(&self, name: &str) -> io::Result<File> {
        self.0.open_file(Path::new(name))
    }

    pub(crate) fn names(&self) -> io::Result<Vec<String>> {
        self.0.list(Path::new("."))
    }

    /// Removes the log of an instance and its rotated files.
    pub(crate) fn remove_attempt(&self, attempt: u32) -> io::Result<()> {
        let log = format!("{attempt}.log");
        self.0.remove_file(&log)?;
        self.rotated(&log)?
            .iter()
            .try_for_each(|name| self.0.remove_file(name))
    }

    /// The names of a log's rotated files.
    fn rotated(&self, log: &str) -> io::Result<Vec<String>> {
        let mut names = self.names()?;
        names.retain(|name| {
            name.strip_prefix(log)
                .is_some_and(|rest| rest.starts_with('.') && !rest.ends_with('/'))
        });
        Ok(names)
    }

    /// Compresses a file to `<file>.gz` and removes the file. The new name appears only when the contents are complete.
    fn compress(&self, name: &str) -> io::Result<()> {
        let unfinished = format!("{name}.tmp");
        let compressed = self
            .compress_to(name, &unfinished)
            .and_then(|()| self.0.rename(&unfinished, &format!("{name}.gz")))
            .and_then(|()| self.0.remove_file(name));
        if compressed.is_err() {
            self.0.remove_file(&unfinished)?;
        }
        compressed
    }

    /// Writes the compressed contents of a file to a new file.
    fn compress_to(&self, name: &str, new: &str) -> io::Result<()> {
        let mut plain = self.open_log(name)?;
        let mut encoder = flate2::write::GzEncoder::new(
            self.0.create_new(Path::new(new), 0o640)?,
            flate2::Compression::default(),
        );
        let copied = io::copy(&mut plain, &mut encoder)?;
        encoder.finish()?.sync_data()?;
        let meta = plain.metadata()?;
        if meta.nlink() == 0 {
            return Err(io::ErrorKind::NotFound.into());
        }
        if meta.len() != copied {
            return Err(io::Error::other("the file is still being written"));
        }
        Ok(())
    }

    /// Compresses the rotated files of a log except the newest. Only one
    /// thread may do this for a log; others may rotate the log meanwhile.
    pub(crate) fn compress_older(&self, log: &str) -> io::Result<()> {
        let plan = logs::compression(&self.rotated(log)?);
        for name in &plan.remove {
            self.0.remove_file(name)?;
        }
        for name in &plan.compress {
            match self.compress(name) {
                // A rotation has removed the file meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // A file that cannot be compressed, such as a link created
                // by a pod, must not prevent the compression of others.
                Err(error) => {
                    tracing::warn!(%error, file = name, "compressing a rotated log failed");
                }
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Renames a log to a name with `stamp`, and returns that name. Keeps at most `files - 2` older rotated files.
    pub(crate) fn move_aside(&self, log: &str, files: usize, stamp: &str) -> io::Result<String> {
        let new = format!("{log}.{stamp}");
        let before = self.rotated(log)?;
        // A second rotation within a second must not overwrite the first.
        if before.iter().any(|name| name.contains(stamp)) {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("{new} already exists: the log was rotated within the same second"),
            ));
        }
        for name in logs::files_to_delete(&before, files) {
            self.0.remove_file(&name)?;
        }
        self.0.rename(log, &new)?;
        Ok(new)
    }

    /// Reverts the renaming, unless a new log exists.
    pub(crate) fn put_back(&self, aside: &str, log: &str) -> io::Result<()> {
        self.0.rename(aside, log)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_core::lock::lock;
    use std::fs;
    use std::io::{Read as _, Write as _};
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn place(logs: &Path) -> LogPlace {
        fs::create_dir_all(logs.join("pod/c")).expect("mkdir");
        LogPlace {
            logs: logs.into(),
            dir: "pod/c".into(),
        }
    }

    #[test]
    fn rotated_files_are_limited_compressed_and_complete() {
        let logs = tempfile::tempdir().expect("a directory");
        let dir = place(logs.path()).open().expect("open");
        let path = logs.path().join("pod/c");
        for n in 0..6 {
            fs::write(path.join("0.log"), format!("content {n}")).expect("write");
            dir.move_aside("0.log", 4, &format!("20261120-00000{n}"))
                .expect("rotated");
            dir.compress_older("0.log").expect("compressed");
        }
        let mut names = dir.rotated("0.log").expect("listed");
        names.sort();
        assert_eq!(
            names,
            [
                "0.log.20261120-000003.gz",
                "0.log.20261120-000004.gz",
                "0.log.20261120-000005"
            ]
        );
        let mut text = String::new();
        flate2::read::GzDecoder::new(fs::File::open(path.join(&names[0])).expect("open"))
            .read_to_string(&mut text)
            .expect("gunzip");
        assert_eq!(text, "content 3");
        fs::write(path.join("0.log"), "x").expect("write");
        assert!(
            dir.move_aside("0.log", 4, "20261120-000005").is_err() && path.join("0.log").exists(),
            "nothing is overwritten"
        );
        fs::write(path.join("0.log.20261120-000006.tmp"), "half").expect("write");
        let aside = dir
            .move_aside("0.log", 4, "20261120-000007")
            .expect("rotated");
        dir.compress_older("0.log").expect("compressed");
        let left = dir.rotated("0.log").expect("listed");
        assert!(
            !left.iter().any(|n| n.ends_with(".tmp")),
            "temporary files of a crashed compression are removed"
        );
        dir.put_back(&aside, "0.log").expect("put back");
        assert_eq!(fs::read_to_string(path.join("0.log")).expect("read"), "x");
        fs::write(path.join("1.log"), "another's").expect("write");
        dir.remove_attempt(0).expect("removed");
        assert_eq!(dir.names().expect("listed"), ["1.log"]);
    }

    #[test]
    fn links_created_by_a_pod_give_no_access_to_files_of_the_host() {
        let (logs, host) = (
            tempfile::tempdir().expect("a directory"),
            tempfile::tempdir().expect("a directory"),
        );
        let secret = host.path().join("0.log");
        fs::write(&secret, "secret").expect("write");
        let place = place(logs.path());
        let (dir, path) = (place.open().expect("open"), logs.path().join("pod/c"));
        let link = |name: &str| {
            std::os::unix::fs::symlink(&secret, path.join(name)).expect("linked");
        };
        link("0.log.20261120-000001");
        link("0.log.20261120-000002");
        link("0.log.20261120-000003.tmp");
        fs::write(path.join("0.log"), "content").expect("write");
        dir.move_aside("0.log", 9, "20261120-000009")
            .expect("rotated");
        dir.compress_older("0.log").expect("compressed");
        for name in dir.names().expect("listed") {
            let meta = fs::symlink_metadata(path.join(&name)).expect("stat");
            let holds = || fs::read_to_string(path.join(&name)).is_ok_and(|text| text == "secret");
            assert!(
                meta.is_symlink() || (!holds() && !name.ends_with(".gz")),
                "{name}"
            );
        }
        link("1.log");
        assert!(dir.open_log("1.log").is_err());
        assert_eq!(fs::read_to_string(&secret).expect("read"), "secret");
        // A symlink in place of the directory is not followed either.
        fs::rename(&path, logs.path().join("pod/moved")).expect("moved");
        std::os::unix::fs::symlink(host.path(), &path).expect("linked");
        assert!(place.open().is_err());
        assert!(secret.exists());
    }

    /// Writes numbered lines in batches, as a runtime does: to the file that it has open.
    fn write_lines(open: &Mutex<fs::File>, lines: usize) {
        const PIECE: usize = 500;
        for first in (0..lines).step_by(PIECE) {
            let text: String = (first..first + PIECE)
                .map(|n| format!("{n:0100}\n"))
                .collect();
            lock(open).write_all(text.as_bytes()).expect("written");
        }
    }

    /// The numbers in the log's files, from the oldest on.
    fn numbers(path: &Path, mut names: Vec<String>) -> Vec<usize> {
        // The names contain times; the current log comes last.
        names.sort_by_key(|name| (name == "0.log", name.clone()));
        let mut text = String::new();
        for name in &names {
            let file = fs::File::open(path.join(name)).expect("open");
            let read = match name.ends_with(".gz") {
                true => flate2::read::GzDecoder::new(file).read_to_string(&mut text),
                false => (&file).read_to_string(&mut text),
            };
            read.expect("read");
        }
        text.lines()
            .map(|line| line.parse().expect("a number"))
            .collect()
    }

    /// A fast writer, rotations without pauses, and concurrent compression.
    #[test]
    fn rotation_during_writes_loses_no_bytes() {
        const LINES: usize = 200_000;
        let logs = tempfile::tempdir().expect("a directory");
        let place = place(logs.path());
        let path = logs.path().join("pod/c");
        let opened = || {
            let mut options = fs::OpenOptions::new();
            options.create(true).append(true);
            options.open(path.join("0.log")).expect("open")
        };
        let open = Mutex::new(opened());
        let is_over = AtomicBool::new(false);
        let mut rotations = 0;
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| write_lines(&open, LINES));
            let compressor = scope.spawn(|| {
                let dir = place.open().expect("open");
                while !is_over.load(Ordering::Relaxed) {
                    dir.compress_older("0.log").expect("compressed");
                }
            });
            let dir = place.open().expect("open");
            while !writer.is_finished() {
                if fs::metadata(path.join("0.log")).expect("stat").len() > 1 << 20 {
                    dir.move_aside("0.log", 1000, &format!("20261120-{rotations:06}"))
                        .expect("rotated");
                    *lock(&open) = opened();
                    rotations += 1;
                }
            }
            let written = writer.join();
            is_over.store(true, Ordering::Relaxed);
            compressor.join().expect("compressed");
            written.expect("written");
        });
        let dir = place.open().expect("open");
        dir.compress_older("0.log").expect("compressed");
        let names = dir.names().expect("listed");
        let compressed = names.iter().filter(|name| name.ends_with(".gz"));
        assert!(rotations > 1, "{rotations} rotations");
        assert_eq!(
            (names.len(), compressed.count()),
            (rotations + 1, rotations - 1),
            "{names:?}"
        );
        let found = numbers(&path, names);
        assert!(found.into_iter().eq(0..LINES));
    }

    #[test]
    fn a_file_that_changes_or_disappears_during_compression_is_kept() {
        let logs = tempfile::tempdir().expect("a directory");
        let dir = place(logs.path()).open().expect("open");
        let path = logs.path().join("pod/c");
        for n in 0..3 {
            fs::write(path.join("0.log"), format!("content {n}")).expect("write");
            dir.move_aside("0.log", 9, &format!("20261120-00000{n}"))
                .expect("rotated");
        }
        let names = || dir.names().expect("listed").join(" ");
        let plain = "0.log.20261120-000000 0.log.20261120-000001 0.log.20261120-000002";
        assert_eq!(names(), plain, "rotation does not wait for compression");
        // A FIFO created by a pod cannot be compressed; the partial result is removed.
        fs::remove_file(path.join("0.log.20261120-000001")).expect("removed");
        nix::unistd::mkfifo(
            &path.join("0.log.20261120-000001"),
            nix::sys::stat::Mode::S_IRWXU,
        )
        .expect("a pipe");
        dir.compress_older("0.log").expect("compressed");
        let expected = "0.log.20261120-000000.gz 0.log.20261120-000001 0.log.20261120-000002";
        assert_eq!(names(), expected);
        // An agent was killed after compressing a file and before removing it.
        fs::write(path.join("0.log.20261120-000000"), "content 0").expect("write");
        fs::remove_file(path.join("0.log.20261120-000001")).expect("removed");
        fs::write(path.join("0.log"), "content 3").expect("write");
        dir.move_aside("0.log", 4, "20261120-000003")
            .expect("rotated");
        dir.compress_older("0.log").expect("compressed");
        let expected = "0.log.20261120-000000.gz 0.log.20261120-000002.gz 0.log.20261120-000003";
        assert_eq!(names(), expected);
    }
}
