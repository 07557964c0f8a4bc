//! The story of an object and of the objects that it led to, as `holdfast trace` shows it: as text and as an image. Pure.

use std::fmt::Write as _;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use crate::pod::explain::{duration_text, escape};
use crate::trail::{Entry, Trail};

/// The width of the image, in pixels.
const WIDTH: u32 = 1_100;
/// Where the bars begin, and their width at most, in pixels.
const BARS: (f64, f64) = (620.0, 400.0);

/// One step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Step {
    /// When it began.
    pub at: Timestamp,
    /// When it ended; `None` for a moment.
    pub until: Option<Timestamp>,
    /// Who took it.
    pub who: String,
    /// What happened.
    pub what: String,
    /// Whether it failed or was refused.
    pub failed: bool,
}

/// One object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Chapter {
    /// The object, for instance `Pod default/web`.
    pub object: String,
    /// How many owners are between this object and the subject.
    pub depth: usize,
    /// The steps.
    pub steps: Vec<Step>,
    /// The steps that are not known, and why.
    pub missing: Vec<String>,
}

/// The subject and the objects that it led to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Story {
    /// The objects; owners precede what they own.
    pub chapters: Vec<Chapter>,
}

impl Entry {
    fn step(&self) -> Step {
        let times = match self.count {
            0 | 1 => String::new(),
            count => format!(", {count} times"),
        };
        let outcome = match (self.refusal.as_str(), self.revision.as_str()) {
            ("", "") => String::new(),
            ("", revision) => format!(", revision {revision}"),
            (refusal, _) => format!(" refused ({}): {refusal}", self.code),
        };
        let client = self.client.split(['/', ' ']).next().unwrap_or_default();
        let who = match client {
            "" => self.user.clone(),
            client => format!("{} ({client})", self.user),
        };
        Step {
            at: self.first,
            until: (self.count > 1).then_some(self.last),
            who,
            what: format!("{}{times}{outcome}", self.request),
            failed: !self.refusal.is_empty(),
        }
    }
}

impl Chapter {
    /// A chapter about an object without steps.
    #[must_use]
    pub fn new(object: String, depth: usize) -> Chapter {
        Chapter {
            object,
            depth,
            steps: vec![],
            missing: vec![],
        }
    }

    /// Adds the requests of the object with this uid. Another object may have had the same name before.
    pub fn add_trail(&mut self, trail: Option<&Trail>, uid: &str) {
        let Some(trail) = trail else {
            self.missing.push("the API has no record of its requests: they precede the API's start, or the record was dropped".to_owned());
            return;
        };
        let of_object = trail
            .entries
            .iter()
            .filter(|e| e.uid.is_empty() || e.uid == uid);
        self.steps.extend(of_object.map(Entry::step));
        if trail.dropped > 0 {
            self.missing.push(format!(
                "{} requests in between were dropped from the record",
                trail.dropped
            ));
        }
    }
}

/// The steps of a chapter in the order of time.
fn sorted(chapter: &Chapter) -> Vec<&Step> {
    let mut steps: Vec<&Step> = chapter.steps.iter().collect();
    steps.sort_by_key(|s| s.at);
    steps
}

fn milliseconds(time: SignedDuration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

/// Adds the row of a step at a place of the image. `whole` is the length of the story in milliseconds.
fn row(out: &mut String, step: &Step, (x, y): (usize, usize), start: Timestamp, whole: i64) {
    let begin = milliseconds(step.at.duration_since(start)).max(0);
    let length = step.until.map_or(0, |until| {
        milliseconds(until.duration_since(step.at)).max(0)
    });
    let scale = |ms: i64| ms as f64 * BARS.1 / whole as f64;
    let colour = if step.failed { "#c0392b" } else { "#2e7d6b" };
    let _ = writeln!(
        out,
        "<text x=\"{x}\" y=\"{y}\">{}: {}</text><rect x=\"{:.1}\" y=\"{}\" width=\"{:.1}\" height=\"12\" fill=\"{colour}\"/><text x=\"{}\" y=\"{y}\" text-anchor=\"end\">+{}</text>",
        escape(&step.who),
        escape(&step.what),
        BARS.0 + scale(begin),
        y.saturating_sub(10),
        scale(length).max(2.0),
        WIDTH.saturating_sub(10),
        duration_text(begin),
    );
}

impl Story {
    /// The first moment.
    fn start(&self) -> Option<Timestamp> {
        self.chapters
            .iter()
            .flat_map(|c| &c.steps)
            .map(|s| s.at)
            .min()
    }

    /// The story as text for a terminal. Times are relative to the first step.
    #[must_use]
    pub fn text(&self) -> String {
        let mut out = String::new();
        let Some(start) = self.start() else {
            return self.without_steps();
        };
        let _ = writeln!(out, "Times are relative to {start}.");
        for chapter in &self.chapters {
            let indent = "  ".repeat(chapter.depth);
            let _ = writeln!(out, "\n{indent}{}", chapter.object);
            for step in sorted(chapter) {
                let after = duration_text(milliseconds(step.at.duration_since(start)).max(0));
                let length = step
                    .until
                    .map(|until| milliseconds(until.duration_since(step.at)).max(0));
                let length =
                    length.map_or_else(String::new, |ms| format!(" [{}]", duration_text(ms)));
                let mark = if step.failed { "!" } else { " " };
                let _ = writeln!(
                    out,
                    "{indent}{mark} +{after:<10} {}: {}{length}",
                    step.who, step.what
                );
            }
            for missing in &chapter.missing {
                let _ = writeln!(out, "{indent}? {missing}");
            }
        }
        out
    }

    fn without_steps(&self) -> String {
        let lines = self.chapters.iter().flat_map(|c| {
            c.missing
                .iter()
                .map(move |m| format!("{}: {m}\n", c.object))
        });
        lines.collect()
    }

    /// The story as an image: one row for each step, with a bar from its beginning to its end.
    #[must_use]
    pub fn svg(&self) -> String {
        let start = self.start().unwrap_or_default();
        let ends = self
            .chapters
            .iter()
            .flat_map(|c| &c.steps)
            .map(|s| s.until.unwrap_or(s.at));
        let whole = ends
            .map(|end| milliseconds(end.duration_since(start)))
            .max()
            .unwrap_or(0)
            .max(1);
        let rows: usize = self
            .chapters
            .iter()
            .map(|c| {
                c.steps
                    .len()
                    .saturating_add(c.missing.len())
                    .saturating_add(1)
            })
            .sum();
        let height = rows.saturating_mul(20).saturating_add(30);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        let mut y = 20_usize;
        for chapter in &self.chapters {
            let x = chapter.depth.saturating_mul(16).saturating_add(10);
            let _ = writeln!(
                out,
                "<text x=\"{x}\" y=\"{y}\" font-weight=\"bold\">{}</text>",
                escape(&chapter.object)
            );
            y = y.saturating_add(20);
            let x = x.saturating_add(12);
            for step in sorted(chapter) {
                row(&mut out, step, (x, y), start, whole);
                y = y.saturating_add(20);
            }
            for missing in &chapter.missing {
                let _ = writeln!(
                    out,
                    "<text x=\"{x}\" y=\"{y}\" fill=\"#777\">{}</text>",
                    escape(missing)
                );
                y = y.saturating_add(20);
            }
        }
        out.push_str("</svg>\n");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_millisecond(1_700_000_000_000_i64.saturating_add(ms)).expect("a time")
    }

    fn entry(ms: i64, request: &str, count: u64) -> Entry {
        Entry {
            first: at(ms),
            last: at(ms + 100 * (i64::try_from(count).expect("small") - 1)),
            count,
            request: request.to_owned(),
            user: "kubernetes-admin".to_owned(),
            client: "kubectl/v1.36".to_owned(),
            code: 201,
            refusal: String::new(),
            uid: "u".to_owned(),
            revision: "7".to_owned(),
        }
    }

    fn story() -> Story {
        let mut deployment = Chapter::new("Deployment default/web".to_owned(), 0);
        let other = Entry {
            uid: "another".to_owned(),
            ..entry(-9_000, "create", 1)
        };
        let refused = Entry {
            refusal: "forbidden: <quota>".to_owned(),
            code: 403,
            ..entry(1, "update", 1)
        };
        let entries = [other, entry(0, "create", 1), refused].into();
        deployment.add_trail(
            Some(&Trail {
                entries,
                dropped: 0,
            }),
            "u",
        );
        let mut pod = Chapter::new("Pod default/web-1".to_owned(), 2);
        pod.add_trail(
            Some(&Trail {
                entries: [entry(20, "patch status", 3)].into(),
                dropped: 5,
            }),
            "u",
        );
        pod.steps.push(Step {
            at: at(10),
            until: Some(at(90)),
            who: "agent".to_owned(),
            what: "create the sandbox".to_owned(),
            failed: false,
        });
        let mut unknown = Chapter::new("Pod default/web-2".to_owned(), 2);
        unknown.add_trail(None, "u");
        Story {
            chapters: vec![deployment, pod, unknown],
        }
    }

    #[test]
    fn stories_are_shown_in_the_order_of_time() {
        insta::assert_snapshot!("story", story().text());
        insta::assert_snapshot!("story_as_svg", story().svg());
        let nothing = Story {
            chapters: vec![story().chapters[2].clone()],
        };
        assert!(
            nothing.text().contains("web-2: the API has no record"),
            "{}",
            nothing.text()
        );
        assert!(nothing.svg().starts_with("<svg"));
    }
}
