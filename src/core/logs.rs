//! Container logs as the runtime writes them: `<time> <stream> <tags> <data>` lines (kubelet spec, 8.8). Pure.

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
    let (time, stream, tags, data) = (fields.next()?, fields.next()?, fields.next()?, fields.next().unwrap_or_default());
    let known = matches!(stream, "stdout" | "stderr") && !tags.is_empty();
    known.then(|| Line { time, stream, partial: tags.split(':').next() == Some("P"), data })
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
    let mut out: String = whole[whole.len().saturating_sub(lines)..].iter().flat_map(|line| [line.as_str(), "\n"]).collect();
    let mut cut = out.len().saturating_sub(limit);
    while !out.is_char_boundary(cut) {
        cut += 1;
    }
    out.drain(..cut);
    out
}

/// What a rotation does with the files rotated before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rotation {
    /// These are deleted.
    pub remove: Vec<String>,
    /// These are compressed.
    pub compress: Vec<String>,
}

/// Decides over the rotated files of a log, so that with the present and the next one at most `files` stay
/// (kubelet spec, 8.7). Their names sort by age.
#[must_use]
pub fn rotation(names: &[String], files: usize) -> Rotation {
    let (unfinished, mut whole): (Vec<String>, Vec<String>) = names.iter().cloned().partition(|n| n.ends_with(".tmp"));
    whole.sort();
    let surplus = whole.len().saturating_sub(files.saturating_sub(2));
    let kept = whole.split_off(surplus);
    Rotation { remove: unfinished.into_iter().chain(whole).collect(), compress: kept.into_iter().filter(|n| !n.ends_with(".gz")).collect() }
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
    fn the_tail_joins_partial_lines_and_keeps_its_end() {
        let text = "half a line\n2026-11-20T00:00:00.1Z stdout F one\n2026-11-20T00:00:00.2Z stderr P tw\n2026-11-20T00:00:00.3Z stderr F o\nnonsense\n2026-11-20T00:00:00.4Z stdout F drei ü\n";
        assert_eq!(tail(text, 2, 100), "two\ndrei ü\n");
        assert_eq!(tail(text, 80, 6), "ei ü\n");
        assert_eq!(tail("", 80, 100), "");
        assert_eq!(parse("t stdout F a b"), Some(Line { time: "t", stream: "stdout", partial: false, data: "a b" }));
    }
}
