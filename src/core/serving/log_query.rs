//! Queries of the logs of node services (KEP-2258, `pkg/kubelet/kubelet_server_journal.go`). Pure.

use jiff::Timestamp;

use super::query;

/// Maximum number of services in a query.
const MAX_SERVICES: usize = 4;
/// Maximum number of lines from the end.
const MAX_LINES: i64 = 100_000;
/// Maximum length of a service name.
const MAX_NAME_LENGTH: usize = 256;

/// The logs that a query reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogSource {
    /// A file below the log directory.
    File(String),
    /// Services of systemd.
    Services(Vec<String>),
}

/// A log query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogQuery {
    /// The logs to read.
    pub source: LogSource,
    /// Start of the time range.
    since: Option<Timestamp>,
    /// End of the time range.
    until: Option<Timestamp>,
    /// Number of lines from the end.
    tail: Option<i64>,
    /// Regular expression that lines must match.
    pattern: Option<String>,
    /// The boot, relative to the current one.
    boot: Option<i32>,
}

fn is_service(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_@.".contains(c);
    !name.is_empty()
        && name.len() <= MAX_NAME_LENGTH
        && !name.starts_with('-')
        && name.chars().all(is_allowed)
}

impl LogQuery {
    /// Parses the query of a URL; `None` if it has no log query. The error lists all problems, one per line.
    pub fn parse(text: &str) -> Result<Option<LogQuery>, String> {
        let pairs = query::pairs(text);
        let all = |key: &str| {
            pairs
                .iter()
                .filter(|(k, v)| k == key && !v.is_empty())
                .map(|(_, v)| v.clone())
                .collect::<Vec<_>>()
        };
        let last = |key: &str| all(key).pop();
        let mut wrong = vec![];
        let mut time = |key: &str| {
            let text = last(key)?;
            let parsed = text.parse::<Timestamp>();
            if parsed.is_err() {
                wrong.push(format!(
                    "{key}: {text:?} is invalid: use RFC 3339, such as 2026-11-21T10:00:00Z"
                ));
            }
            parsed.ok()
        };
        let (since, until) = (time("sinceTime"), time("untilTime"));
        if !pairs.iter().any(|(key, _)| key == "query") {
            return Ok(None);
        }
        let mut names = all("query");
        names.retain(|name| !name.trim().is_empty());
        if names.is_empty() {
            return Err("query: empty: use names of services, or one file".into());
        }
        let (files, services): (Vec<String>, Vec<String>) = names
            .into_iter()
            .partition(|name| name.contains(['/', '\\']));
        if since.zip(until).is_some_and(|(since, until)| since > until) {
            wrong.push("untilTime: must be after sinceTime".into());
        }
        let tail = last("tailLines").map(|text| {
            (
                text.parse::<i64>()
                    .ok()
                    .filter(|n| (0..=MAX_LINES).contains(n)),
                text,
            )
        });
        if let Some((None, text)) = &tail {
            wrong.push(format!(
                "tailLines: {text:?} is invalid: use a number from 0 to {MAX_LINES}"
            ));
        }
        let boot = last("boot").map(|text| (text.parse::<i32>().ok().filter(|n| *n <= 0), text));
        if let Some((None, text)) = &boot {
            wrong.push(format!(
                "boot: {text:?} is invalid: use 0 for this boot, or -1 for the previous one"
            ));
        }
        let pattern = last("pattern");
        let has_filters = since.is_some()
            || until.is_some()
            || tail.is_some()
            || boot.is_some()
            || pattern.is_some();
        match (files.len(), services.len()) {
            (0, n) if n > MAX_SERVICES => wrong.push(format!(
                "query: {n} services are too many: use at most {MAX_SERVICES}"
            )),
            (1, 0) if has_filters => wrong
                .push("query: a file is returned unfiltered: use no other option with it".into()),
            (n, _) if n > 1 => wrong.push("query: use only one file".into()),
            (1, n) if n > 0 => wrong.push("query: use either services or one file".into()),
            _ => {}
        }
        if let Some(name) = services.iter().find(|name| !is_service(name)) {
            wrong.push(format!("query: {name:?} is not the name of a service"));
        }
        if !wrong.is_empty() {
            return Err(wrong.join("\n"));
        }
        let source = files
            .into_iter()
            .next()
            .map_or(LogSource::Services(services), |file| {
                LogSource::File(file.trim_start_matches('/').into())
            });
        Ok(Some(LogQuery {
            source,
            since,
            until,
            tail: tail.and_then(|(n, _)| n),
            pattern,
            boot: boot.and_then(|(n, _)| n),
        }))
    }

    /// Arguments for `journalctl`.
    #[must_use]
    pub fn journal(&self, services: &[String]) -> Vec<String> {
        let time = |at: Timestamp| at.strftime("%Y-%m-%d %H:%M:%S").to_string();
        let mut arguments: Vec<String> = ["--utc", "--no-pager", "--output=short-precise"]
            .map(Into::into)
            .into();
        arguments.extend(self.since.map(|at| format!("--since={}", time(at))));
        arguments.extend(self.until.map(|at| format!("--until={}", time(at))));
        arguments.extend(self.tail.map(|lines| format!("--lines={lines}")));
        arguments.extend(services.iter().map(|name| format!("--unit={name}")));
        arguments.extend(
            self.pattern
                .as_ref()
                .map(|pattern| format!("--grep={pattern}")),
        );
        arguments.extend(self.boot.map(|boot| format!("--boot={boot}")));
        arguments
    }

    /// Whether the query has options that do not apply to files.
    #[must_use]
    pub fn has_filters(&self) -> bool {
        self.since.is_some()
            || self.until.is_some()
            || self.tail.is_some()
            || self.boot.is_some()
            || self.pattern.is_some()
    }
}

/// Files below the log directory in which a service may write its own log.
#[must_use]
pub fn files_of(service: &str) -> [String; 3] {
    [
        service.to_owned(),
        format!("{service}.log"),
        format!("{service}/{service}.log"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_queries_are_parsed_and_errors_name_the_parameter() {
        assert_eq!(LogQuery::parse("tailLines=3"), Ok(None), "no query");
        let found = LogQuery::parse(
            "query=kubelet&query=containerd&sinceTime=2026-11-21T10:00:00Z&untilTime=2026-11-21T11:00:00%2B00:00&tailLines=5&pattern=a b&boot=-1",
        );
        let found = found.expect("fine").expect("a search");
        let LogSource::Services(services) = &found.source else {
            panic!("services")
        };
        assert_eq!(
            found.journal(services)[3..].join("|"),
            "--since=2026-11-21 10:00:00|--until=2026-11-21 11:00:00|--lines=5|--unit=kubelet|--unit=containerd|--grep=a b|--boot=-1"
        );
        assert_eq!(
            LogQuery::parse("query=/a/b.log").map(|q| q.map(|q| q.source)),
            Ok(Some(LogSource::File("a/b.log".into())))
        );
        for (text, field) in [
            ("query=a&sinceTime=soon", "sinceTime"),
            (
                "query=a&sinceTime=2026-11-21T10:00:00Z&untilTime=2026-11-20T10:00:00Z",
                "untilTime",
            ),
            ("query=a&tailLines=-1", "tailLines"),
            ("query=a&tailLines=100001", "tailLines"),
            ("query=a&boot=1", "boot"),
            ("query", "query: empty"),
            ("query=%20", "query: empty"),
            ("query=a&query=b&query=c&query=d&query=e", "5 services"),
            ("query=/a&query=/b", "only one file"),
            ("query=/a&query=b", "either"),
            ("query=/a&tailLines=3", "no other option"),
            ("query=a;b", "\"a;b\""),
            ("query=-x", "\"-x\""),
        ] {
            assert!(
                LogQuery::parse(text).is_err_and(|e| e.contains(field)),
                "{text}"
            );
        }
        assert_eq!(
            LogQuery::parse("query=a;b&boot=1").map_err(|e| e.lines().count()),
            Err(2),
            "all errors are reported"
        );
    }
}
