//! Reading a container's log while the runtime writes it and we rotate it. No link is followed: what lies in a pod's log
//! directory is not all ours (CVE-2026-53489).

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::sys::beneath::Dir;

/// How much is read at once.
const PIECE: usize = 64 << 10;

/// An open log.
pub struct LogFile {
    dir: Dir,
    name: PathBuf,
    file: File,
}

impl LogFile {
    /// Opens the log `name` below the directory `dir`. With `tail` reading begins so many lines before its end.
    pub fn open(dir: &Path, name: &Path, tail: Option<u64>) -> io::Result<LogFile> {
        let dir = Dir::open(dir)?;
        let mut file = dir.open_file(name)?;
        if let Some(lines) = tail {
            seek_lines(&mut file, lines)?;
        }
        Ok(LogFile {
            dir,
            name: name.into(),
            file,
        })
    }

    /// The next piece; empty at the present end.
    pub fn read(&mut self) -> io::Result<Vec<u8>> {
        let mut piece = vec![0; PIECE];
        let length = self.file.read(&mut piece)?;
        piece.truncate(length);
        Ok(piece)
    }

    /// Goes on with the file that has taken this one's name, if another has; call it at the end of this one.
    pub fn follow_name(&mut self) -> io::Result<bool> {
        let there = match self.dir.open_file(&self.name) {
            Ok(there) => there,
            // Moved aside, and the runtime has not opened another yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        let identity = |file: &File| file.metadata().map(|m| (m.dev(), m.ino()));
        if identity(&there)? == identity(&self.file)? {
            return Ok(false);
        }
        self.file = there;
        Ok(true)
    }
}

/// Goes to where the last `lines` lines begin.
fn seek_lines(file: &mut File, lines: u64) -> io::Result<()> {
    let mut at = file.metadata()?.len();
    if lines == 0 {
        file.seek(SeekFrom::Start(at))?;
        return Ok(());
    }
    let mut found = 0;
    let mut last = true;
    let mut piece = vec![0; PIECE];
    while at > 0 {
        let length = usize::try_from(at.min(PIECE as u64)).unwrap_or(PIECE);
        at -= length as u64;
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(&mut piece[..length])?;
        for (i, byte) in piece[..length].iter().enumerate().rev() {
            // The end of the last line begins none.
            let ends = *byte == b'\n' && !std::mem::take(&mut last);
            last = false;
            if ends {
                found += 1;
                if found == lines {
                    file.seek(SeekFrom::Start(at + i as u64 + 1))?;
                    return Ok(());
                }
            }
        }
    }
    file.seek(SeekFrom::Start(0))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(log: &mut LogFile) -> String {
        let mut text = vec![];
        loop {
            let piece = log.read().expect("read");
            if piece.is_empty() {
                return String::from_utf8(text).expect("text");
            }
            text.extend(piece);
        }
    }

    #[test]
    fn the_end_of_a_log_is_found_whatever_its_length() {
        let dir = tempfile::tempdir().expect("a directory");
        let lines: Vec<String> = (0..20_000).map(|n| format!("line {n}\n")).collect();
        std::fs::write(dir.path().join("0.log"), lines.concat()).expect("written");
        for (tail, first) in [
            (0, 20_000),
            (1, 19_999),
            (15_000, 5_000),
            (20_000, 0),
            (99_999, 0),
        ] {
            let mut log = LogFile::open(dir.path(), Path::new("0.log"), Some(tail)).expect("open");
            assert_eq!(all(&mut log), lines[first..].concat(), "{tail}");
        }
        std::fs::write(dir.path().join("1.log"), "whole\nhalf").expect("written");
        let mut log = LogFile::open(dir.path(), Path::new("1.log"), Some(1)).expect("open");
        assert_eq!(all(&mut log), "half");
    }

    #[test]
    fn a_rotated_log_goes_on_in_the_next_and_links_are_not_followed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("0.log");
        std::fs::write(&path, "one\n").expect("written");
        let mut log = LogFile::open(dir.path(), Path::new("0.log"), None).expect("open");
        assert_eq!(all(&mut log), "one\n");
        assert!(!log.follow_name().expect("the same"));
        std::fs::rename(&path, dir.path().join("0.log.old")).expect("moved");
        assert!(!log.follow_name().expect("none yet"));
        std::fs::write(&path, "two\n").expect("written");
        assert!(log.follow_name().expect("another"));
        assert_eq!(all(&mut log), "two\n");
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("2.log")).expect("linked");
        assert!(LogFile::open(dir.path(), Path::new("2.log"), None).is_err());
        assert!(LogFile::open(dir.path(), Path::new("../x"), None).is_err());
    }
}
