//! Rotating the log of a running container (kubelet spec, 8.7): the oldest go, older ones are compressed,
//! the present one is renamed, and the runtime opens a new one. Every byte stays in exactly one file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::core::serving::logs;

/// The names of a log's rotated files in its directory.
fn rotated(log: &Path) -> io::Result<Vec<String>> {
    let (Some(dir), Some(name)) = (log.parent(), log.file_name().and_then(|n| n.to_str())) else {
        return Ok(vec![]);
    };
    let entries = fs::read_dir(dir)?
        .filter_map(Result::ok)
        .filter_map(|e| e.file_name().into_string().ok());
    Ok(entries
        .filter(|entry| {
            entry
                .strip_prefix(name)
                .is_some_and(|rest| rest.starts_with('.'))
        })
        .collect())
}

/// Makes `<file>.gz` beside a file, under its name only when it is whole, and removes the file.
fn compress(file: &Path) -> io::Result<()> {
    let named = |extension: &str| PathBuf::from(format!("{}.{extension}", file.display()));
    let (unfinished, done) = (named("tmp"), named("gz"));
    let mut encoder = flate2::write::GzEncoder::new(
        fs::File::create(&unfinished)?,
        flate2::Compression::default(),
    );
    io::copy(&mut fs::File::open(file)?, &mut encoder)?;
    encoder.finish()?.sync_data()?;
    fs::rename(unfinished, done)?;
    fs::remove_file(file)
}

/// Moves a log aside under a name with `stamp`; the answer is that name. Of the rotated files at most
/// `files - 2` older ones stay, all but the newest compressed.
pub fn aside(log: &Path, files: usize, stamp: &str) -> io::Result<PathBuf> {
    let Some(dir) = log.parent() else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let new = PathBuf::from(format!("{}.{stamp}", log.display()));
    let before = rotated(log)?;
    // Two rotations within a second must not overwrite each other.
    if before.iter().any(|name| name.contains(stamp)) {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            format!("{} was made within this second", new.display()),
        ));
    }
    let plan = logs::rotation(&before, files);
    for name in &plan.remove {
        fs::remove_file(dir.join(name))?;
    }
    for name in &plan.compress {
        compress(&dir.join(name))?;
    }
    fs::rename(log, &new)?;
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    #[test]
    fn rotated_files_are_bounded_compressed_and_whole() {
        let dir = tempfile::tempdir().expect("a directory");
        let log = dir.path().join("0.log");
        for n in 0..6 {
            fs::write(&log, format!("content {n}")).expect("write");
            aside(&log, 4, &format!("20261120-00000{n}")).expect("rotated");
        }
        let mut names = rotated(&log).expect("listed");
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
        flate2::read::GzDecoder::new(fs::File::open(dir.path().join(&names[0])).expect("open"))
            .read_to_string(&mut text)
            .expect("gunzip");
        assert_eq!(text, "content 3");
        fs::write(&log, "x").expect("write");
        assert!(
            aside(&log, 4, "20261120-000005").is_err() && log.exists(),
            "nothing is overwritten"
        );
        fs::write(dir.path().join("0.log.20261120-000006.tmp"), "half").expect("write");
        aside(&log, 4, "20261120-000007").expect("rotated");
        assert!(
            !rotated(&log)
                .expect("listed")
                .iter()
                .any(|n| n.ends_with(".tmp")),
            "what a crash left half made goes"
        );
    }
}
