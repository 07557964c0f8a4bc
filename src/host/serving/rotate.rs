//! Rotating the log of a running container (kubelet spec, 8.7): the oldest go, older ones are compressed,
//! the present one is renamed, and the runtime opens a new one. Every byte stays in exactly one file.
//!
//! Pods with a hostPath of the log directory put there what they like. So all is done relative to the handle of a
//! container's log directory, and no link is followed: else a link would have any file of the host compressed into
//! their reach.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::core::serving::logs;
use crate::sys::beneath::Dir;

/// Where the logs of a container lie: a directory below that of all logs.
pub(in crate::host) struct LogPlace {
    pub(in crate::host) logs: PathBuf,
    pub(in crate::host) dir: PathBuf,
}

impl LogPlace {
    pub(in crate::host) fn open(&self) -> io::Result<LogDir> {
        let dir = Dir::open(&self.logs)?.open_dir_without_links(&self.dir)?;
        Ok(LogDir(dir))
    }

    /// What people know it by.
    pub(in crate::host) fn name(&self) -> impl std::fmt::Display {
        self.dir.display()
    }
}

/// A container's log directory.
pub(in crate::host) struct LogDir(Dir);

impl LogDir {
    pub(in crate::host) fn open_log(&self, name: &str) -> io::Result<File> {
        self.0.open_file(Path::new(name))
    }

    pub(in crate::host) fn names(&self) -> io::Result<Vec<String>> {
        self.0.list(Path::new("."))
    }

    /// Removes the log of an instance and its rotated files.
    pub(in crate::host) fn remove_attempt(&self, attempt: u32) -> io::Result<()> {
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

    /// Makes `<file>.gz` beside a file, under its name only when it is whole, and removes the file.
    fn compress(&self, name: &str) -> io::Result<()> {
        let (unfinished, done) = (format!("{name}.tmp"), format!("{name}.gz"));
        let mut plain = self.open_log(name)?;
        self.0.remove_file(&unfinished)?;
        let mut encoder = flate2::write::GzEncoder::new(
            self.0.create_new(Path::new(&unfinished), 0o640)?,
            flate2::Compression::default(),
        );
        io::copy(&mut plain, &mut encoder)?;
        encoder.finish()?.sync_data()?;
        self.0.remove_file(&done)?;
        self.0.rename(&unfinished, &done)?;
        self.0.remove_file(name)
    }

    /// Moves a log aside under a name with `stamp`; the answer is that name. Of the rotated files at most
    /// `files - 2` older ones stay, all but the newest compressed.
    pub(in crate::host) fn move_aside(
        &self,
        log: &str,
        files: usize,
        stamp: &str,
    ) -> io::Result<String> {
        let new = format!("{log}.{stamp}");
        let before = self.rotated(log)?;
        // Two rotations within a second must not overwrite each other.
        if before.iter().any(|name| name.contains(stamp)) {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("{new} was made within this second"),
            ));
        }
        let plan = logs::rotation(&before, files);
        for name in &plan.remove {
            self.0.remove_file(name)?;
        }
        for name in &plan.compress {
            // What cannot be compressed, as a link that a pod has put there, must not stop the log from being rotated.
            if let Err(error) = self.compress(name) {
                tracing::warn!(%error, file = name, "a rotated log was not compressed");
            }
        }
        self.0.rename(log, &new)?;
        Ok(new)
    }

    /// Undoes that, unless there is a new log already.
    pub(in crate::host) fn put_back(&self, aside: &str, log: &str) -> io::Result<()> {
        self.0.rename(aside, log)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Read as _;

    fn place(logs: &Path) -> LogPlace {
        fs::create_dir_all(logs.join("pod/c")).expect("mkdir");
        LogPlace {
            logs: logs.into(),
            dir: "pod/c".into(),
        }
    }

    #[test]
    fn rotated_files_are_bounded_compressed_and_whole() {
        let logs = tempfile::tempdir().expect("a directory");
        let dir = place(logs.path()).open().expect("open");
        let path = logs.path().join("pod/c");
        for n in 0..6 {
            fs::write(path.join("0.log"), format!("content {n}")).expect("write");
            dir.move_aside("0.log", 4, &format!("20261120-00000{n}"))
                .expect("rotated");
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
        let left = dir.rotated("0.log").expect("listed");
        assert!(
            !left.iter().any(|n| n.ends_with(".tmp")),
            "what a crash left half made goes"
        );
        dir.put_back(&aside, "0.log").expect("put back");
        assert_eq!(fs::read_to_string(path.join("0.log")).expect("read"), "x");
        fs::write(path.join("1.log"), "another's").expect("write");
        dir.remove_attempt(0).expect("removed");
        assert_eq!(dir.names().expect("listed"), ["1.log"]);
    }

    #[test]
    fn links_that_a_pod_put_there_lead_to_nothing_of_the_host() {
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
        // Nor does a linked directory.
        fs::rename(&path, logs.path().join("pod/moved")).expect("moved");
        std::os::unix::fs::symlink(host.path(), &path).expect("linked");
        assert!(place.open().is_err());
        assert!(secret.exists());
    }
}
