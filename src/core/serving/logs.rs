//! Container logs in the CRI format, with lines `<time> <stream> <tags> <data>`
//! (`staging/src/k8s.io/cri-client/pkg/logs`), and log rotation (`pkg/kubelet/logs/container_log_manager.go`). Pure.

use super::LogOptions;

/// An entry of a log file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line<'a> {
    /// RFC 3339 timestamp with nanoseconds.
    pub time: &'a str,
    /// `stdout` or `stderr`.
    pub stream: &'a str,
    /// Whether the line continues in the next entry.
    pub partial: bool,
    /// The container's output without the line terminator.
    pub data: &'a str,
}

/// Parses an entry; `None` if it is malformed.
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

/// The last `lines` lines of a container's output, truncated at the front to `limit` bytes. `text` is the end of a log
/// file; its first line may be incomplete.
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
    // Runtimes mark output without a final line terminator as partial.
    if goes_on {
        out.pop();
    }
    let mut cut = out.len().saturating_sub(limit);
    while !out.is_char_boundary(cut) {
        cut = cut.saturating_add(1);
    }
    out.drain(..cut);
    out
}

/// Bytes of an entry that include time, stream and tags. A timestamp with nanoseconds and offset takes 35.
pub const ENTRY_HEAD: usize = 64;
/// The search for the start of a line stops after this many bytes without an entry of that line.
const SEARCH_LIMIT: u64 = 1 << 20;

/// Index of an entry's stream. Runtimes write both streams to one file.
fn stream_index(stream: &[u8]) -> Option<usize> {
    match stream {
        b"stdout" => Some(0),
        b"stderr" => Some(1),
        _ => None,
    }
}

/// Whether the line of an entry with these tags continues in the next entry of its stream.
fn is_partial(tags: &[u8]) -> bool {
    tags.split(|b| *b == b':').next() == Some(b"P")
}

/// Start of the last lines of a file: an offset for each stream, because entries of both streams are interleaved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TailStart([u64; 2]);

impl TailStart {
    /// The smaller offset.
    #[must_use]
    pub fn offset(self) -> u64 {
        self.0[0].min(self.0[1])
    }
}

/// Searches for the last lines of a file, entry by entry from the end. A line consists of an entry with tag F and the
/// preceding entries with tag P, because runtimes split lines longer than 16 KiB. The kubelet counts entries instead
/// and shows only the end of such a line.
#[derive(Debug)]
pub struct TailSearch {
    /// Number of lines still to find.
    lines: u64,
    starts: [u64; 2],
    /// Whether the last line found in a stream may have more entries.
    open: [bool; 2],
    seen: [bool; 2],
}

impl TailSearch {
    /// Searches for the last `lines` lines of a file of `length` bytes.
    #[must_use]
    pub fn new(lines: u64, length: u64) -> TailSearch {
        TailSearch {
            lines,
            starts: [length; 2],
            open: [false; 2],
            seen: [false; 2],
        }
    }

    /// Processes the entry at an offset; `head` is the start of the entry. Returns whether to continue.
    pub fn visit(&mut self, at: u64, head: &[u8]) -> bool {
        let mut fields = head.splitn(4, |b| *b == b' ').skip(1);
        if let (Some(Some(stream)), Some(tags)) = (fields.next().map(stream_index), fields.next()) {
            // The last line of a stream may be incomplete: the container still writes it, or has exited.
            let ends_line = !is_partial(tags) || !self.seen[stream];
            self.seen[stream] = true;
            if ends_line {
                self.open[stream] = self.lines > 0;
                self.lines = self.lines.saturating_sub(1);
            }
            if self.open[stream] {
                self.starts[stream] = at;
            }
        }
        let near = self.start().offset().saturating_sub(at) <= SEARCH_LIMIT;
        self.lines > 0 || (near && self.open.contains(&true))
    }

    /// Start of the lines found so far.
    #[must_use]
    pub fn start(&self) -> TailStart {
        TailStart(self.starts)
    }
}

/// Converts the content of a log file, piece by piece, to the output for the client.
#[derive(Debug, Default)]
pub struct Decoder {
    since: Option<jiff::Timestamp>,
    timestamps: bool,
    /// Remaining bytes to output; `None` if unlimited.
    remaining_bytes: Option<u64>,
    /// Remaining lines to output; `None` if unlimited.
    remaining_lines: Option<u64>,
    /// Start offsets below which entries are skipped, and the file offset of `rest`.
    tail: Option<(TailStart, u64)>,
    /// Whether a line of the stream that started before `since` continues.
    skips_line: [bool; 2],
    /// Incomplete entry at the end of the last piece.
    rest: Vec<u8>,
    /// Whether a line continues, so that its timestamp was written already.
    in_line: bool,
    /// Whether an entry at or after `since` was found; all later entries are newer.
    since_reached: bool,
}

/// Maximum length of an entry; longer ones are dropped. Runtimes split lines far earlier.
const LINE_LIMIT: usize = 1 << 20;

/// Writes a timestamp with nine fractional digits, so that timestamps align and sort.
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
    out.extend(std::iter::repeat_n(b'0', 9_usize.saturating_sub(shown)));
    out.extend_from_slice(zone);
}

impl Decoder {
    /// A decoder with these options.
    #[must_use]
    pub fn new(options: &LogOptions) -> Decoder {
        Decoder {
            since: options.since,
            timestamps: options.timestamps,
            remaining_bytes: options.limit,
            // A following client also gets lines written later.
            remaining_lines: options.tail.filter(|_| !options.follow),
            ..Decoder::default()
        }
    }

    /// Restricts the first file to its last lines. The first piece must start at [`TailStart::offset`].
    #[must_use]
    pub fn starting_at(mut self, start: TailStart) -> Decoder {
        self.tail = Some((start, start.offset()));
        self
    }

    /// Whether the requested output is complete.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.remaining_bytes == Some(0) || self.remaining_lines == Some(0)
    }

    /// Processes a piece of a file; returns the output for the client.
    pub fn push(&mut self, piece: &[u8]) -> Vec<u8> {
        let mut text = std::mem::take(&mut self.rest);
        text.extend_from_slice(piece);
        let mut out = Vec::with_capacity(piece.len());
        let whole = text
            .iter()
            .rposition(|b| *b == b'\n')
            .map_or(0, |end| end.saturating_add(1));
        text[..whole]
            .split_inclusive(|b| *b == b'\n')
            .for_each(|line| {
                self.line(line.strip_suffix(b"\n").unwrap_or(line), &mut out);
                self.advance(line.len());
            });
        if text.len().saturating_sub(whole) <= LINE_LIMIT {
            self.rest = text.split_off(whole);
        } else {
            self.advance(text.len().saturating_sub(whole));
        }
        self.bounded(out)
    }

    /// Advances the file offset.
    fn advance(&mut self, length: usize) {
        if let Some((start, at)) = &mut self.tail {
            *at = at.saturating_add(length as u64);
            if start.0.iter().all(|start| start <= at) {
                self.tail = None;
            }
        }
    }

    /// Processes the end of the log. A final line without terminator is output without one.
    pub fn finish(&mut self) -> Vec<u8> {
        let mut out = vec![];
        let rest = std::mem::take(&mut self.rest);
        self.line(&rest, &mut out);
        if out.last() == Some(&b'\n') {
            out.pop();
        }
        self.bounded(out)
    }

    /// Truncates the output to the remaining bytes.
    fn bounded(&mut self, mut out: Vec<u8>) -> Vec<u8> {
        if let Some(remaining) = &mut self.remaining_bytes {
            out.truncate(usize::try_from(*remaining).unwrap_or(usize::MAX));
            *remaining = remaining.saturating_sub(out.len() as u64);
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
        let Some(stream) = stream_index(stream) else {
            return;
        };
        if self.tail.is_some_and(|(start, at)| at < start.0[stream]) {
            return;
        }
        let partial = is_partial(tags);
        if let Some(lines) = &mut self.remaining_lines {
            if *lines == 0 {
                return;
            }
            *lines = lines.saturating_sub(u64::from(!partial));
        }
        // The age of a line is that of its first entry.
        if std::mem::take(&mut self.skips_line[stream]) {
            self.skips_line[stream] = partial;
            return;
        }
        if let (Some(since), false) = (self.since, self.since_reached) {
            let at = std::str::from_utf8(time)
                .ok()
                .and_then(|t| t.parse::<jiff::Timestamp>().ok());
            if at.is_none_or(|at| at < since) {
                self.skips_line[stream] = partial;
                return;
            }
            self.since_reached = true;
        }
        if self.timestamps && !self.in_line {
            write_time(time, out);
            out.push(b' ');
        }
        out.extend_from_slice(data);
        self.in_line = partial;
        if !self.in_line {
            out.push(b'\n');
        }
    }
}

/// The rotated files to delete before the current log is rotated, so that at most `files` files remain afterwards,
/// including the next current one. File names sort by age.
#[must_use]
pub fn files_to_delete(rotated: &[String], files: usize) -> Vec<String> {
    let counts = |name: &&String| !name.ends_with(".tmp") && !is_superseded(name, rotated);
    let mut whole: Vec<String> = rotated.iter().filter(counts).cloned().collect();
    whole.sort();
    whole.truncate(whole.len().saturating_sub(files.saturating_sub(2)));
    whole
}

/// What to do with rotated files after a rotation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Compression {
    /// Files to delete: leftovers of a crash, and files that are already compressed.
    pub remove: Vec<String>,
    /// Files to compress.
    pub compress: Vec<String>,
}

/// Decides about the rotated files of a log. The newest stays uncompressed, because the runtime may still write to it,
/// and clients may not have read it completely.
#[must_use]
pub fn compression(rotated: &[String]) -> Compression {
    let is_removed = |name: &&String| name.ends_with(".tmp") || is_superseded(name, rotated);
    let (remove, mut whole): (Vec<&String>, Vec<&String>) = rotated.iter().partition(is_removed);
    whole.sort();
    whole.pop();
    whole.retain(|name| !name.ends_with(".gz"));
    Compression {
        remove: remove.into_iter().cloned().collect(),
        compress: whole.into_iter().cloned().collect(),
    }
}

/// Whether a compressed copy of a rotated file exists. A copy is renamed to its final name only when it is complete.
fn is_superseded(name: &str, rotated: &[String]) -> bool {
    let is_compressed_copy = |other: &String| other.strip_suffix(".gz") == Some(name);
    rotated.iter().any(is_compressed_copy)
}

/// Name of the symlink to a container's log in the directory for log collectors.
#[must_use]
pub fn link_name(pod: &str, namespace: &str, container: &str, id: &str) -> String {
    let end = format!("-{id}.log");
    let mut start = format!("{pod}_{namespace}_{container}");
    let mut room = 255_usize.saturating_sub(end.len()).min(start.len());
    while !start.is_char_boundary(room) {
        room = room.saturating_sub(1);
    }
    start.truncate(room);
    start + &end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_parsed_from_chunks_of_any_size() {
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
                    remaining_bytes: Some(5),
                    ..Decoder::default()
                }),
                "one\nt"
            );
        }
    }

    #[test]
    fn tail_lines_bound_the_output() {
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
            // Written during the read.
            out.extend(decoder.push(line(3).as_bytes()));
            assert_eq!(out, expected.as_bytes(), "{query}");
            assert_eq!(decoder.is_complete(), full, "{query}");
        }
    }

    fn found(text: &str, lines: u64) -> TailSearch {
        let mut search = TailSearch::new(lines, text.len() as u64);
        let mut at = text.len();
        for entry in text.split_inclusive('\n').rev() {
            at -= entry.len();
            let head = &entry.as_bytes()[..entry.len().min(ENTRY_HEAD)];
            if lines == 0 || !search.visit(at as u64, head) {
                break;
            }
        }
        search
    }

    /// Output for a client that requests the last lines.
    fn last(text: &str, lines: u64, more: &str) -> String {
        let start = found(text, lines).start();
        let options = LogOptions {
            tail: Some(lines),
            follow: true,
            ..LogOptions::default()
        };
        let mut decoder = Decoder::new(&options).starting_at(start);
        let mut out = vec![];
        let from = usize::try_from(start.offset()).expect("an offset");
        for piece in [&text[from..], more].concat().as_bytes().chunks(7) {
            out.extend(decoder.push(piece));
        }
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn the_last_lines_are_whole_lines() {
        let entry = |stream: &str, tag: &str, data: &str| {
            format!("2026-11-20T00:00:01Z {stream} {tag} {data}\n")
        };
        let out = |tag: &str, data: &str| entry("stdout", tag, data);
        let err = |tag: &str, data: &str| entry("stderr", tag, data);
        let long = [
            out("F", "one"),
            out("P", "tw"),
            out("P:x", "o"),
            out("F", "!"),
        ]
        .concat();
        let unended = long.clone() + &out("P", "thr") + &out("P", "ee");
        // Interleaved entries of both streams.
        let mixed = [
            err("F", "e1"),
            out("P", "o"),
            err("F", "e2"),
            out("F", "1"),
            err("P", "e"),
        ]
        .concat();
        for (text, lines, expected) in [
            (&long, 0, ""),
            (&long, 1, "two!\n"),
            (&long, 2, "one\ntwo!\n"),
            (&long, 9, "one\ntwo!\n"),
            (&unended, 1, "three"),
            (&unended, 2, "two!\nthree"),
            (&mixed, 1, "e"),
            (&mixed, 2, "o1\ne"),
            (&mixed, 3, "oe2\n1\ne"),
            (&mixed, 4, "e1\noe2\n1\ne"),
            (&String::new(), 3, ""),
            (&"nonsense\n\n".to_owned(), 3, ""),
        ] {
            assert_eq!(last(text, lines, ""), expected, "{lines} of {text}");
        }
        // The line of stderr started before the last line of stdout; both continue.
        let more = err("F", "3") + &out("F", "2");
        assert_eq!(last(&mixed, 1, &more), "e3\n2\n");
        assert_eq!(last(&mixed, 0, &out("F", "2")), "2\n");
    }

    #[test]
    fn the_search_for_a_line_start_is_bounded() {
        let other = format!("t stderr F {}\n", "x".repeat(1000)).repeat(4000);
        let text = format!("t stdout P a\n{other}t stdout F b\n");
        let from = found(&text, 1).start();
        assert_eq!(from.0[0], (text.len() - "t stdout F b\n".len()) as u64);
        let near = format!("t stdout P a\n{}t stdout F b\n", &other[..1012 * 900]);
        assert_eq!(found(&near, 1).start().0[0], 0);
    }

    #[test]
    fn a_split_line_counts_once_with_the_time_of_its_first_entry() {
        let entry = |n: u32, tag: &str| format!("2026-11-20T00:00:0{n}Z stdout {tag} {n}\n");
        let text = [
            entry(1, "P"),
            entry(2, "P"),
            entry(3, "F"),
            entry(4, "P"),
            entry(5, "F"),
        ]
        .concat();
        for (query, expected) in [
            ("sinceTime=2026-11-20T00:00:02Z", "45\n"),
            ("sinceTime=2026-11-20T00:00:01Z", "123\n45\n"),
            ("tailLines=1", "123\n"),
            ("tailLines=1&limitBytes=2", "12"),
            ("tailLines=2&sinceTime=2026-11-20T00:00:02Z", "45\n"),
        ] {
            let options = LogOptions::parse(query, jiff::Timestamp::UNIX_EPOCH).expect("options");
            for size in [1, 1000] {
                let mut decoder = Decoder::new(&options);
                let pieces = text.as_bytes().chunks(size);
                let out: Vec<u8> = pieces.flat_map(|piece| decoder.push(piece)).collect();
                assert_eq!(String::from_utf8_lossy(&out), expected, "{query}");
            }
        }
    }

    #[test]
    fn timestamps_have_a_fixed_width() {
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
    fn a_last_line_without_a_line_feed_is_read() {
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
    fn the_newest_rotated_file_stays_uncompressed_and_none_counts_twice() {
        let names = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for (rotated, surplus_of_4, removed, compressed) in [
            ("1.gz 2", "", "", ""),
            ("2 1", "", "", "1"),
            ("1.gz 2 3", "1.gz", "", "2"),
            ("1.gz 2.gz 3 4", "1.gz 2.gz", "", "3"),
            // Compression is in progress, or was interrupted.
            ("1.tmp 1 2", "", "1.tmp", "1"),
            ("1.gz 2.gz 2 3", "1.gz", "2", ""),
            // The newest file was moved back to be the current log, because its rotation failed.
            ("1 2.gz", "", "", "1"),
        ] {
            let rotated = names(rotated);
            let plan = compression(&rotated);
            let found = [&files_to_delete(&rotated, 4), &plan.remove, &plan.compress];
            let found = found.map(|names| names.join(" "));
            assert_eq!(found, [surplus_of_4, removed, compressed], "{rotated:?}");
        }
    }

    #[test]
    fn the_tail_joins_partial_lines_and_keeps_the_last_bytes() {
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
