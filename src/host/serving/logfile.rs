//! Reads a container's log while the runtime writes it and the agent rotates it. Never follows links,
//! because pods with access to the host's log directory can create files there (CVE-2026-53489).

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use jiff::Timestamp;

use holdfast_core::serving::logs::{ENTRY_HEAD, TailSearch, TailStart};
use holdfast_sys::beneath::Dir;

/// The size of a read in bytes.
const PIECE: usize = 64 << 10;
/// Number of consecutive checks with unchanged length until a rotated file counts
/// as complete. The runtime first gives the new file to the container's writer,
/// then flushes its buffer to the old file. On a busy disk, flushing takes time.
const MAX_QUIET_CHECKS: u32 = 4;

/// A file of a log: plain, or compressed by a rotation.
enum Source {
    Plain(File),
    Compressed(Box<GzDecoder<File>>),
}

impl Source {
    fn read(&mut self, piece: &mut [u8]) -> io::Result<usize> {
        match self {
            Source::Plain(file) => file.read(piece),
            Source::Compressed(decoder) => decoder.read(piece),
        }
    }
}

/// How to continue at the end of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// This is the current file.
    Same,
    /// The file was rotated, but the runtime may still write to
    /// it. Read on, and call [`LogFile::follow`] again at the end.
    Ending,
    /// Reading continues in the next file.
    Another,
}

/// An open log.
pub struct LogFile {
    dir: Dir,
    name: PathBuf,
    source: Source,
    /// The time of the file's first line, which identifies its successor; `None` while the file is empty.
    begins: Option<Timestamp>,
    /// The start of the last lines, if only these are requested.
    tail: Option<TailStart>,
    /// Set if the file is the most recently rotated one: its length
    /// at the last check, and the number of checks with this length.
    ending: Option<(u64, u32)>,
}

impl LogFile {
    /// Opens the log `name` below the directory `dir`. With `tail`, reading
    /// starts that many lines before the end, at [`LogFile::tail`].
    pub fn open(dir: &Path, name: &Path, tail: Option<u64>) -> io::Result<LogFile> {
        let dir = Dir::open(dir)?;
        let mut file = dir.open_file(name)?;
        let tail = tail.map(|lines| last_lines(&file, lines)).transpose()?;
        if let Some(start) = tail {
            file.seek(SeekFrom::Start(start.offset()))?;
        }
        Ok(LogFile {
            dir,
            name: name.into(),
            source: Source::Plain(file),
            begins: None,
            tail,
            ending: None,
        })
    }

    /// The start of the last lines, if only these are requested. Reading may also return entries before it.
    #[must_use]
    pub fn tail(&self) -> Option<TailStart> {
        self.tail
    }

    /// The next piece; empty at the current end.
    pub fn read(&mut self) -> io::Result<Vec<u8>> {
        let mut piece = vec![0; PIECE];
        let length = self.source.read(&mut piece)?;
        piece.truncate(length);
        Ok(piece)
    }

    /// Switches to the next file of the log, if there is one. Call this at the end of the
    /// present file. A slow reader's next file may already be rotated and compressed.
    pub fn follow(&mut self) -> io::Result<Next> {
        let there = match self.dir.open_file(&self.name) {
            Ok(there) => there,
            // The file was renamed, and the runtime has not created the next one yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Next::Same),
            Err(error) => return Err(error),
        };
        if let Source::Plain(file) = &self.source {
            let identity = |file: &File| file.metadata().map(|m| (m.dev(), m.ino()));
            if identity(&there)? == identity(file)? {
                return Ok(Next::Same);
            }
            let mut begin = [0; ENTRY_HEAD];
            let length = file.read_at(&mut begin, 0)?;
            self.begins = first_time(&begin[..length]);
        }
        let successor = match self.begins {
            Some(begins) => self.successor(begins)?,
            None => None,
        };
        // A file with a rotated successor, or a compressed file, is complete.
        if let (None, Source::Plain(file)) = (&successor, &self.source) {
            // The runtime writes to the old file until it has data for the new one.
            if there.metadata()?.len() == 0 {
                return Ok(Next::Same);
            }
            let length = file.metadata()?.len();
            let checks = match self.ending {
                Some((before, checks)) if before == length => checks + 1,
                _ => 0,
            };
            self.ending = Some((length, checks));
            if checks < MAX_QUIET_CHECKS {
                return Ok(Next::Ending);
            }
        }
        let (source, begins) = successor.unwrap_or((Source::Plain(there), None));
        (self.source, self.begins, self.ending) = (source, begins, None);
        Ok(Next::Another)
    }

    /// The first rotated file that begins after a time.
    fn successor(&self, begins: Timestamp) -> io::Result<Option<(Source, Option<Timestamp>)>> {
        let (Some(parent), Some(name)) = (
            self.name.parent(),
            self.name.file_name().and_then(|n| n.to_str()),
        ) else {
            return Ok(None);
        };
        let parent = match parent.as_os_str().is_empty() {
            true => Path::new("."),
            false => parent,
        };
        let mut rotated = self.dir.list(parent)?;
        let is_part = |rest: &str| rest.starts_with('.') && !rest.ends_with(".tmp");
        rotated.retain(|other| other.strip_prefix(name).is_some_and(is_part));
        // The names contain the time of rotation.
        rotated.sort();
        for other in rotated {
            // If a rotated file was removed before a slow reader reached it, its contents are lost.
            let Ok((is_compressed, mut file)) = self.open_rotated(parent, &other) else {
                continue;
            };
            let source = |file: File| match is_compressed {
                true => Source::Compressed(Box::new(GzDecoder::new(file))),
                false => Source::Plain(file),
            };
            let mut begin = vec![];
            let time = match source(file.try_clone()?) {
                Source::Plain(file) => file.take(ENTRY_HEAD as u64).read_to_end(&mut begin),
                Source::Compressed(decoder) => {
                    decoder.take(ENTRY_HEAD as u64).read_to_end(&mut begin)
                }
            }
            .ok()
            .and_then(|_| first_time(&begin));
            if time.is_some_and(|time| time > begins) {
                file.rewind()?;
                return Ok(Some((source(file), time)));
            }
        }
        Ok(None)
    }

    /// Opens a rotated file and returns whether it is compressed. Compression may have just replaced the file.
    fn open_rotated(&self, dir: &Path, name: &str) -> io::Result<(bool, File)> {
        let open = |name: &str| self.dir.open_file(&dir.join(name));
        if name.ends_with(".gz") {
            return Ok((true, open(name)?));
        }
        match open(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok((true, open(&format!("{name}.gz"))?))
            }
            opened => Ok((false, opened?)),
        }
    }
}

/// The time of the first line of a file, given the file's first bytes.
fn first_time(begin: &[u8]) -> Option<Timestamp> {
    let text = begin.split(|b| *b == b' ').next()?;
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Finds the start of the last `lines` lines of a file.
fn last_lines(file: &File, lines: u64) -> io::Result<TailStart> {
    let length = file.metadata()?.len();
    let mut search = TailSearch::new(lines, length);
    let mut at = if lines == 0 { 0 } else { length };
    let mut piece = vec![0; 1 + PIECE + ENTRY_HEAD];
    while at > 0 {
        // Finds entries that begin in this piece. Also reads the byte before the piece, to see whether an entry
        // begins at its start. Reads as many bytes after the piece as the head of the last entry may need.
        let end = at;
        at = at.saturating_sub(PIECE as u64);
        let from = at.saturating_sub(1);
        let wanted = (end + ENTRY_HEAD as u64).min(length) - from;
        let wanted = usize::try_from(wanted).unwrap_or(piece.len());
        file.read_exact_at(&mut piece[..wanted], from)?;
        for offset in (at..end).rev() {
            let i = usize::try_from(offset - from).unwrap_or(0);
            if offset > 0 && piece[i - 1] != b'\n' {
                continue;
            }
            let head = &piece[i..wanted.min(i + ENTRY_HEAD)];
            let head = head.split(|b| *b == b'\n').next().unwrap_or_default();
            if !search.visit(offset, head) {
                return Ok(search.start());
            }
        }
    }
    Ok(search.start())
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
    fn the_tail_of_a_log_of_any_length_is_found() {
        let dir = tempfile::tempdir().expect("a directory");
        let entry = |data: &str| format!("2026-11-20T00:00:01.5Z stdout F {data}\n");
        let lines: Vec<String> = (0..20_000).map(|n| entry(&format!("line {n}"))).collect();
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
        // The runtime splits long lines: this one has four times the size of a read.
        let part = entry(&"x".repeat(16 << 10)).replace(" F ", " P ");
        let long = part.repeat(16) + &entry("end");
        let half = "2026-11-20T00:00:01.5Z stdout F half";
        std::fs::write(dir.path().join("1.log"), entry("first") + &long + half).expect("written");
        for (tail, expected) in [(1, half.to_owned()), (2, long.clone() + half)] {
            let mut log = LogFile::open(dir.path(), Path::new("1.log"), Some(tail)).expect("open");
            assert_eq!(all(&mut log), expected, "{tail}");
        }
    }

    fn line(second: u32) -> String {
        format!("2026-11-20T00:00:{second:02}.5Z stdout F line {second}\n")
    }

    #[test]
    fn a_reader_continues_after_rotation_and_does_not_follow_links() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("0.log");
        std::fs::write(&path, line(1)).expect("written");
        let mut log = LogFile::open(dir.path(), Path::new("0.log"), None).expect("open");
        assert_eq!(all(&mut log), line(1));
        assert_eq!(log.follow().expect("the same"), Next::Same);
        let old = dir.path().join("0.log.20261120-000001");
        std::fs::rename(&path, &old).expect("moved");
        assert_eq!(log.follow().expect("none yet"), Next::Same);
        let mut last = std::fs::OpenOptions::new()
            .append(true)
            .open(&old)
            .expect("open");
        let mut append = |n| io::Write::write_all(&mut last, line(n).as_bytes()).expect("written");
        // The new file exists, but the container still writes to the old one.
        std::fs::write(&path, "").expect("written");
        assert_eq!(log.follow().expect("none yet"), Next::Same);
        append(2);
        assert_eq!(all(&mut log), line(2));
        // The runtime has another line for the old file, and one more afterwards.
        std::fs::write(&path, line(5)).expect("written");
        for n in [3, 4] {
            assert_eq!(log.follow().expect("another"), Next::Ending);
            append(n);
            assert_eq!(all(&mut log), line(n));
        }
        for _ in 0..MAX_QUIET_CHECKS {
            assert_eq!(log.follow().expect("another"), Next::Ending);
            assert_eq!(all(&mut log), "");
        }
        assert_eq!(log.follow().expect("another"), Next::Another);
        assert_eq!(all(&mut log), line(5));
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("2.log")).expect("linked");
        assert!(LogFile::open(dir.path(), Path::new("2.log"), None).is_err());
        assert!(LogFile::open(dir.path(), Path::new("../x"), None).is_err());
    }

    /// Files are rotated and compressed by the code that runs on a node.
    #[test]
    fn a_slow_reader_reads_every_rotated_file_once() {
        for (rotations, stay) in [(1, 10), (2, 10), (5, 10)] {
            let dir = tempfile::tempdir().expect("a directory");
            let below = dir.path().join("c");
            std::fs::create_dir(&below).expect("made");
            let path = below.join("0.log");
            std::fs::write(&path, line(0)).expect("written");
            let mut log = LogFile::open(dir.path(), Path::new("c/0.log"), None).expect("open");
            let mut text = all(&mut log);
            for n in 0..rotations {
                let stamp = format!("20261120-00000{n}");
                let place = super::super::rotate::LogPlace {
                    logs: dir.path().into(),
                    dir: "c".into(),
                };
                let logs = place.open().expect("open");
                logs.move_aside("0.log", stay, &stamp).expect("rotated");
                logs.compress_older("0.log").expect("compressed");
                std::fs::write(&path, line(n + 1)).expect("written");
            }
            loop {
                text += &all(&mut log);
                if log.follow().expect("followed") == Next::Same {
                    break;
                }
            }
            let expected: String = (0..=rotations).map(line).collect();
            assert_eq!(text, expected, "{rotations} rotations");
        }
    }
}
