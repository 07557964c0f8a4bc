//! Container logs as the runtime writes them: `<time> <stream> <tags> <data>` lines (kubelet spec, 8.8). Pure.

use super::LogOptions;

/// One line of a log file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line<'a> {
    /// RFC 3339 with nanoseconds.
    pub time: &'a str,
    /// `stdout` or `stderr`.
    pub stream: &'a str,
    /// The line goes on in the next one.
    pub partial: bool,
    /// What the container wrote, without the line's end.
    pub data: &'a str,
}

/// Reads one line; `None` if it is not one.
#[must_use]
pub fn parse(line: &str) -> Option<Line<'_>> {
    let mut fields = line.splitn(4, ' ');
    let (time, stream, tags, data) = (
        fields.next()?,
        fields.next()?,
        fields.next()?,
        fields.next().unwrap_or_default(),
    );
    let known = matches!(stream, "stdout" | "stderr") && !tags.is_empty();
    known.then(|| Line {
        time,
        stream,
        partial: tags.split(':').next() == Some("P"),
        data,
    })
}

/// The last `lines` lines of what a container wrote, cut at the front to `limit` bytes. `text` is the end
/// of a log file; its first line may be half of one.
#[must_use]
pub fn tail(text: &str, lines: usize, limit: usize) -> String {
    let mut whole: Vec<String> = vec![];
    let mut goes_on = false;
    for line in text.lines().filter_map(parse) {
        match whole.last_mut() {
            Some(last) if goes_on => last.push_str(line.data),
            _ => whole.push(line.data.to_owned()),
        }
        goes_on = line.partial;
    }
    let mut out: String = whole[whole.len().saturating_sub(lines)..]
        .iter()
        .flat_map(|line| [line.as_str(), "\n"])
        .collect();
    // As the container ended: runtimes mark what it did not end with a line's end as going on.
    if goes_on {
        out.pop();
    }
    let mut cut = out.len().saturating_sub(limit);
    while !out.is_char_boundary(cut) {
        cut += 1;
    }
    out.drain(..cut);
    out
}

/// Turns what is in a log file into what the reader gets, piece by piece.
#[derive(Debug, Default)]
pub struct Decoder {
    since: Option<jiff::Timestamp>,
    timestamps: bool,
    /// So many bytes are still wanted; none for any number.
    left: Option<u64>,
    /// So many lines of the file are still wanted; none for any number.
    lines: Option<u64>,
    /// The beginning of a line whose end has not come.
    rest: Vec<u8>,
    /// The line goes on, and its time has been written.
    within: bool,
    /// A line has come that is new enough: all after it are.
    begun: bool,
}

/// The longest line that is taken whole; runtimes cut theirs far shorter.
const LINE_LIMIT: usize = 1 << 20;

/// Writes a time with nine digits of its second: what has one width lines up and can be sorted.
fn write_time(time: &[u8], out: &mut Vec<u8>) {
    let (seconds, rest) = time.split_at(time.len().min("2026-11-20T00:00:01".len()));
    let fraction = rest.strip_prefix(b".").unwrap_or_default();
    let digits = fraction.iter().take_while(|b| b.is_ascii_digit()).count();
    let zone = if digits == 0 {
        rest
    } else {
        &fraction[digits..]
    };
    let shown = digits.min(9);
    out.extend_from_slice(seconds);
    out.push(b'.');
    out.extend_from_slice(&fraction[..shown]);
    out.extend(std::iter::repeat_n(b'0', 9 - shown));
    out.extend_from_slice(zone);
}

impl Decoder {
    /// For a reader who wants the log so.
    #[must_use]
    pub fn new(options: &LogOptions) -> Decoder {
        Decoder {
            since: options.since,
            timestamps: options.timestamps,
            left: options.limit,
            // Who follows wants what is written later too.
            lines: options.tail.filter(|_| !options.follow),
            ..Decoder::default()
        }
    }

    /// Whether nothing more is wanted.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.left == Some(0) || self.lines == Some(0)
    }

    /// Takes a piece of a file; the answer is what the reader gets of it.
    pub fn push(&mut self, piece: &[u8]) -> Vec<u8> {
        let mut text = std::mem::take(&mut self.rest);
        text.extend_from_slice(piece);
        let mut out = Vec::with_capacity(piece.len());
        let whole = text
            .iter()
            .rposition(|b| *b == b'\n')
            .map_or(0, |end| end + 1);
        text[..whole]
            .split(|b| *b == b'\n')
            .for_each(|line| self.line(line, &mut out));
        if text.len() - whole <= LINE_LIMIT {
            self.rest = text.split_off(whole);
        }
        self.bounded(out)
    }

    /// Takes the end of the log: a line that has not ended by now is whole, but for its end.
    pub fn finish(&mut self) -> Vec<u8> {
        let mut out = vec![];
        let rest = std::mem::take(&mut self.rest);
        self.line(&rest, &mut out);
        if out.last() == Some(&b'\n') {
            out.pop();
        }
        self.bounded(out)
    }

    /// What is still wanted of what comes.
    fn bounded(&mut self, mut out: Vec<u8>) -> Vec<u8> {
        if let Some(left) = &mut self.left {
            out.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
            *left -= out.len() as u64;
        }
        out
    }

    fn line(&mut self, line: &[u8], out: &mut Vec<u8>) {
        let mut fields = line.splitn(4, |b| *b == b' ');
        let (Some(time), Some(stream), Some(tags)) = (fields.next(), fields.next(), fields.next())
        else {
            return;
        };
        let data = fields.next().unwrap_or_default();
        if !matches!(stream, b"stdout" | b"stderr") {
            return;
        }
        if let Some(lines) = &mut self.lines {
            let Some(left) = lines.checked_sub(1) else {
                return;
            };
            *lines = left;
        }
        if let (Some(since), false) = (self.since, self.begun) {
            let at = std::str::from_utf8(time)
                .ok()
                .and_then(|t| t.parse::<jiff::Timestamp>().ok());
            if at.is_none_or(|at| at < since) {
                return;
            }
            self.begun = true;
        }
        if self.timestamps && !self.within {
            write_time(time, out);
            out.push(b' ');
        }
        out.extend_from_slice(data);
        self.within = tags.split(|b| *b == b':').next() == Some(b"P");
        if !self.within {
            out.push(b'\n');
        }
    }
}

/// The rotated files of a log that are one too many when it becomes one of them itself, so that with it and the next one
/// at most `files` stay (kubelet spec, 8.7). Their names sort by age.
#[must_use]
pub fn surplus(rotated: &[String], files: usize) -> Vec<String> {
    let counts = |name: &&String| !name.ends_with(".tmp") && !is_superseded(name, rotated);
    let mut whole: Vec<String> = rotated.iter().filter(counts).cloned().collect();
    whole.sort();
    whole.truncate(whole.len().saturating_sub(files.saturating_sub(2)));
    whole
}

/// What is done with rotated files after a rotation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Compression {
    /// These are deleted: what a crash has left half made, and what there is compressed already.
    pub remove: Vec<String>,
    /// These are compressed.
    pub compress: Vec<String>,
}

/// Decides over the rotated files of a log. The newest stays as it is: the runtime may still have bytes for it, and
/// readers may not be at its end.
#[must_use]
pub fn compression(rotated: &[String]) -> Compression {
    let goes = |name: &&String| name.ends_with(".tmp") || is_superseded(name, rotated);
    let (remove, mut whole): (Vec<&String>, Vec<&String>) = rotated.iter().partition(goes);
    whole.sort();
    whole.pop();
    whole.retain(|name| !name.ends_with(".gz"));
    Compression {
        remove: remove.into_iter().cloned().collect(),
        compress: whole.into_iter().cloned().collect(),
    }
}

/// Whether a rotated file is there compressed, too. That one is whole: it gets its name when it is.
fn is_superseded(name: &str, rotated: &[String]) -> bool {
    let is_it = |other: &String| other.strip_suffix(".gz") == Some(name);
    rotated.iter().any(is_it)
}

/// The name of the link to a container's log in the directory that log collectors read.
#[must_use]
pub fn link_name(pod: &str, namespace: &str, container: &str, id: &str) -> String {
    let end = format!("-{id}.log");
    let mut start = format!("{pod}_{namespace}_{container}");
    let mut room = 255_usize.saturating_sub(end.len()).min(start.len());
    while !start.is_char_boundary(room) {
        room -= 1;
    }
    start.truncate(room);
    start + &end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_read_in_pieces_of_any_size() {
        let text = "2026-11-20T00:00:01Z stdout F one\n2026-11-20T00:00:02Z stderr P tw\n2026-11-20T00:00:03Z stderr F o\nnonsense\n2026-11-20T00:00:04Z stdout F \n2026-11-20T00:00:05Z stdout F half";
        for size in [1, 7, 1000] {
            let read = |mut decoder: Decoder| {
                let bytes: Vec<u8> = text
                    .as_bytes()
                    .chunks(size)
                    .flat_map(|piece| decoder.push(piece))
                    .collect();
                String::from_utf8(bytes).expect("text")
            };
            assert_eq!(read(Decoder::default()), "one\ntwo\n\n", "pieces of {size}");
            let times = read(Decoder {
                timestamps: true,
                ..Decoder::default()
            });
            assert_eq!(
                times,
                "2026-11-20T00:00:01.000000000Z one\n2026-11-20T00:00:02.000000000Z two\n2026-11-20T00:00:04.000000000Z \n"
            );
            let since = "2026-11-20T00:00:02Z".parse().ok();
            assert_eq!(
                read(Decoder {
                    since,
                    ..Decoder::default()
                }),
                "two\n\n"
            );
            assert_eq!(
                read(Decoder {
                    left: Some(5),
                    ..Decoder::default()
                }),
                "one\nt"
            );
        }
    }

    #[test]
    fn no_more_lines_come_than_are_wanted() {
        let line = |n: u32| format!("2026-11-20T00:00:0{n}Z stdout F {n}\n");
        for (query, expected, full) in [
            ("tailLines=2", "1\n2\n", true),
            ("tailLines=0", "", true),
            ("tailLines=2&follow=true", "1\n2\n3\n", false),
            ("", "1\n2\n3\n", false),
        ] {
            let options = LogOptions::parse(query, jiff::Timestamp::UNIX_EPOCH);
            let mut decoder = Decoder::new(&options.expect("options"));
            let mut out = decoder.push((line(1) + &line(2)).as_bytes());
            // Written while it was read.
            out.extend(decoder.push(line(3).as_bytes()));
            assert_eq!(out, expected.as_bytes(), "{query}");
            assert_eq!(decoder.is_full(), full, "{query}");
        }
    }

    #[test]
    fn times_have_one_width() {
        for (time, expected) in [
            ("2026-11-20T00:00:01Z", "2026-11-20T00:00:01.000000000Z"),
            ("2026-11-20T00:00:01.5Z", "2026-11-20T00:00:01.500000000Z"),
            (
                "2026-11-20T00:00:01.123456789+01:00",
                "2026-11-20T00:00:01.123456789+01:00",
            ),
            (
                "2026-11-20T00:00:01.1234567891-01:00",
                "2026-11-20T00:00:01.123456789-01:00",
            ),
        ] {
            let mut out = vec![];
            write_time(time.as_bytes(), &mut out);
            assert_eq!(out, expected.as_bytes(), "{time}");
        }
    }

    #[test]
    fn a_last_line_without_an_end_is_read() {
        let finished = |text: &str, query: &str| {
            let options = LogOptions::parse(query, jiff::Timestamp::UNIX_EPOCH);
            let mut decoder = Decoder::new(&options.expect("options"));
            let mut out = decoder.push(text.as_bytes());
            out.extend(decoder.finish());
            String::from_utf8(out).expect("text")
        };
        let whole = "2026-11-20T00:00:01Z stdout F one\n";
        let half = format!("{whole}2026-11-20T00:00:02Z stderr F half");
        for (text, query, expected) in [
            (half.as_str(), "", "one\nhalf"),
            (&half, "limitBytes=6", "one\nha"),
            (&half, "tailLines=1", "one\n"),
            (whole, "", "one\n"),
            (&format!("{whole}2026-11-20T00:00"), "", "one\n"),
            ("", "", ""),
        ] {
            assert_eq!(finished(text, query), expected, "{text:?} {query}");
        }
    }

    #[test]
    fn of_rotated_files_the_newest_stays_plain_and_none_counts_twice() {
        let names = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for (rotated, surplus_of_4, removed, compressed) in [
            ("1.gz 2", "", "", ""),
            ("2 1", "", "", "1"),
            ("1.gz 2 3", "1.gz", "", "2"),
            ("1.gz 2.gz 3 4", "1.gz 2.gz", "", "3"),
            // It is being compressed, or was when the agent was killed.
            ("1.tmp 1 2", "", "1.tmp", "1"),
            ("1.gz 2.gz 2 3", "1.gz", "2", ""),
            // The newest went back.
            ("1 2.gz", "", "", "1"),
        ] {
            let rotated = names(rotated);
            let plan = compression(&rotated);
            let found = [&surplus(&rotated, 4), &plan.remove, &plan.compress];
            let found = found.map(|names| names.join(" "));
            assert_eq!(found, [surplus_of_4, removed, compressed], "{rotated:?}");
        }
    }

    #[test]
    fn the_tail_joins_partial_lines_and_keeps_its_end() {
        let text = "half a line\n2026-11-20T00:00:00.1Z stdout F one\n2026-11-20T00:00:00.2Z stderr P tw\n2026-11-20T00:00:00.3Z stderr F o\nnonsense\n2026-11-20T00:00:00.4Z stdout F drei ü\n";
        assert_eq!(tail(text, 2, 100), "two\ndrei ü\n");
        assert_eq!(tail(text, 80, 6), "ei ü\n");
        assert_eq!(tail("", 80, 100), "");
        let unended = "2026-11-20T00:00:00Z stdout F one\n2026-11-20T00:00:00Z stdout P DO";
        assert_eq!(tail(unended, 80, 100), "one\nDO");
        assert_eq!(tail(&format!("{unended}\n"), 80, 100), "one\nDO");
        assert_eq!(
            parse("t stdout F a b"),
            Some(Line {
                time: "t",
                stream: "stdout",
                partial: false,
                data: "a b"
            })
        );
    }
}
