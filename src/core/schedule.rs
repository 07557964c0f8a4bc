//! Schedules of CronJobs in cron format, with five fields or a descriptor (github.com/robfig/cron/v3, which upstream
//! uses). Pure: the time zone is an argument.

use std::time::Duration;

use jiff::civil::Weekday;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, ToSpan as _, Unit, Zoned};

/// How many years to search for the next time. A schedule may match no day, such as 31 February.
const MAX_YEARS_AHEAD: i16 = 5;

/// A field: the matching values as bits, and whether the field was written as a wildcard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Field {
    bits: u64,
    star: bool,
}

/// Valid values of a field, and names for them, starting with the lowest value.
struct Bounds {
    low: u32,
    high: u32,
    names: &'static [&'static str],
}

const MINUTES: Bounds = bounds(0, 59, &[]);
const HOURS: Bounds = bounds(0, 23, &[]);
const DAYS: Bounds = bounds(1, 31, &[]);
const MONTHS: Bounds = bounds(
    1,
    12,
    &[
        "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
    ],
);
const WEEKDAYS: Bounds = bounds(0, 6, &["sun", "mon", "tue", "wed", "thu", "fri", "sat"]);

const fn bounds(low: u32, high: u32, names: &'static [&'static str]) -> Bounds {
    Bounds { low, high, names }
}

/// A schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Schedule {
    /// Times that match five fields.
    Fields(Fields),
    /// A fixed interval in whole seconds.
    Every(Duration),
}

/// Minute, hour, day of month, month and day of week.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fields {
    minute: Field,
    hour: Field,
    day: Field,
    month: Field,
    weekday: Field,
}

impl Schedule {
    /// Parses a schedule. The error describes the invalid part.
    pub fn parse(text: &str) -> Result<Schedule, String> {
        if text.is_empty() {
            return Err("empty spec string".into());
        }
        if let Some(every) = text.strip_prefix("@every ") {
            let pause = super::time::duration(every)
                .ok_or_else(|| format!("failed to parse duration {text}"))?;
            return Ok(Schedule::Every(Duration::from_secs(pause.as_secs().max(1))));
        }
        let fields = match text {
            "@yearly" | "@annually" => "0 0 1 1 *",
            "@monthly" => "0 0 1 * *",
            "@weekly" => "0 0 * * 0",
            "@daily" | "@midnight" => "0 0 * * *",
            "@hourly" => "0 * * * *",
            word if word.starts_with('@') => {
                return Err(format!("unrecognized descriptor: {word}"));
            }
            fields => fields,
        };
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let [minute, hour, day, month, weekday] = fields.as_slice() else {
            return Err(format!(
                "expected exactly 5 fields, found {}: [{}]",
                fields.len(),
                fields.join(" ")
            ));
        };
        Ok(Schedule::Fields(Fields {
            minute: Field::parse(minute, &MINUTES)?,
            hour: Field::parse(hour, &HOURS)?,
            day: Field::parse(day, &DAYS)?,
            month: Field::parse(month, &MONTHS)?,
            weekday: Field::parse(weekday, &WEEKDAYS)?,
        }))
    }

    /// The next time after `after`; `None` if there is none within the search limit. An hour skipped by daylight saving
    /// time has no times, and a repeated hour has them twice.
    #[must_use]
    pub fn next(&self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        match self {
            Schedule::Every(pause) => {
                let second = Timestamp::from_second(after.as_second()).ok()?;
                let pause = SignedDuration::try_from(*pause).ok()?;
                second.checked_add(pause).ok()
            }
            Schedule::Fields(fields) => fields.next(after, zone),
        }
    }
}

impl Field {
    fn parse(text: &str, bounds: &Bounds) -> Result<Field, String> {
        let mut all = Field {
            bits: 0,
            star: false,
        };
        for part in text.split(',').filter(|p| !p.is_empty()) {
            let field = Field::range(part, bounds)?;
            all.bits |= field.bits;
            all.star |= field.star;
        }
        Ok(all)
    }

    fn range(text: &str, bounds: &Bounds) -> Result<Field, String> {
        let parts: Vec<&str> = text.split('/').collect();
        let ends: Vec<&str> = parts[0].split('-').collect();
        let mut star = matches!(ends[0], "*" | "?");
        let (low, mut high) = match ends.as_slice() {
            _ if star => (bounds.low, bounds.high),
            [one] => (value(one, bounds)?, value(one, bounds)?),
            [low, high] => (value(low, bounds)?, value(high, bounds)?),
            _ => return Err(format!("too many hyphens: {text}")),
        };
        let step = match parts.as_slice() {
            [_] => 1,
            [_, step] => {
                if ends.len() == 1 {
                    high = bounds.high;
                }
                number(step)?
            }
            _ => return Err(format!("too many slashes: {text}")),
        };
        star &= step <= 1;
        let range = |what: &str, is: u32, how: &str, most: String| {
            Err(format!("{what} of range ({is}) {how} ({most}): {text}"))
        };
        if low < bounds.low {
            return range("beginning", low, "below minimum", bounds.low.to_string());
        }
        if high > bounds.high {
            return range("end", high, "above maximum", bounds.high.to_string());
        }
        if low > high {
            return range("beginning", low, "beyond end of range", high.to_string());
        }
        if step == 0 {
            return Err(format!("step of range should be a positive number: {text}"));
        }
        let step = usize::try_from(step).unwrap_or(usize::MAX);
        let bits = (low..=high).step_by(step).fold(0, |bits, n| bits | 1 << n);
        Ok(Field { bits, star })
    }

    fn has(self, value: i8) -> bool {
        u32::try_from(value).is_ok_and(|v| self.bits >> v & 1 == 1)
    }
}

fn value(text: &str, bounds: &Bounds) -> Result<u32, String> {
    let named = bounds
        .names
        .iter()
        .position(|n| text.eq_ignore_ascii_case(n))
        .and_then(|place| u32::try_from(place).ok());
    named.map_or_else(
        || number(text),
        |place| Ok(bounds.low.saturating_add(place)),
    )
}

fn number(text: &str) -> Result<u32, String> {
    match text.parse::<i64>() {
        Err(_) => Err(format!("failed to parse int from {text}")),
        Ok(n) if n < 0 => Err(format!("negative number ({n}) not allowed: {text}")),
        Ok(n) => Ok(u32::try_from(n).unwrap_or(u32::MAX)),
    }
}

impl Fields {
    fn next(&self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        let mut at = after.to_zoned(zone.clone());
        at = begin(&at, Unit::Minute)?.checked_add(1.minute()).ok()?;
        let last = at.year().saturating_add(MAX_YEARS_AHEAD);
        while at.year() <= last {
            if !self.month.has(at.month()) {
                let next = at.first_of_month().ok()?.checked_add(1.month()).ok()?;
                at = next.start_of_day().ok()?;
            } else if !self.fits_day(&at) {
                at = at.tomorrow().ok()?.start_of_day().ok()?;
            } else if !self.hour.has(at.hour()) {
                at = begin(&at, Unit::Hour)?.checked_add(1.hour()).ok()?;
            } else if !self.minute.has(at.minute()) {
                at = at.checked_add(1.minute()).ok()?;
            } else {
                return Some(at.timestamp());
            }
        }
        None
    }

    /// If one of the two day fields is a wildcard, both must match; otherwise one is enough.
    fn fits_day(&self, at: &Zoned) -> bool {
        let day = self.day.has(at.day());
        let weekday = self.weekday.has(at.weekday().since(Weekday::Sunday));
        if self.day.star || self.weekday.star {
            day && weekday
        } else {
            day || weekday
        }
    }
}

/// Start of the minute or hour that contains a time.
fn begin(at: &Zoned, unit: Unit) -> Option<Zoned> {
    let into = SignedDuration::new(at.second().into(), at.subsec_nanosecond());
    let more = match unit {
        Unit::Hour => SignedDuration::from_mins(at.minute().into()),
        _ => SignedDuration::ZERO,
    };
    at.checked_sub(into.saturating_add(more)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(text: &str, after: &str, zone: &TimeZone, count: usize) -> Vec<String> {
        let schedule = Schedule::parse(text).expect("a schedule");
        let mut at: Timestamp = after.parse().expect("a time");
        let mut times = vec![];
        while let (true, Some(next)) = (times.len() < count, schedule.next(at, zone)) {
            times.push(next.to_string());
            at = next;
        }
        times
    }

    #[test]
    fn an_invalid_schedule_is_rejected_with_the_part() {
        for (text, why) in [
            ("", "empty spec string"),
            ("* * * *", "expected exactly 5 fields, found 4: [* * * *]"),
            ("@often", "unrecognized descriptor: @often"),
            ("@every x", "failed to parse duration @every x"),
            ("60 * * * *", "end of range (60) above maximum (59): 60"),
            ("* * 0 * *", "beginning of range (0) below minimum (1): 0"),
            ("* * * * 7", "end of range (7) above maximum (6): 7"),
            (
                "5-1 * * * *",
                "beginning of range (5) beyond end of range (1): 5-1",
            ),
            ("1-2-3 * * * *", "too many hyphens: 1-2-3"),
            ("1/2/3 * * * *", "too many slashes: 1/2/3"),
            (
                "*/0 * * * *",
                "step of range should be a positive number: */0",
            ),
            ("x * * * *", "failed to parse int from x"),
            ("* * * foo *", "failed to parse int from foo"),
        ] {
            assert_eq!(Schedule::parse(text), Err(why.to_owned()), "{text}");
        }
    }

    /// Columns: schedule, start time, following times.
    const TIMES: &str = "\
* * * * *            2026-01-01T00:00:30 2026-01-01T00:01:00 2026-01-01T00:02:00
*/20 * * * *         2026-01-01T00:40:00 2026-01-01T01:00:00 2026-01-01T01:20:00
5/25 3 * * *         2026-01-01T00:00:00 2026-01-01T03:05:00 2026-01-01T03:30:00 2026-01-01T03:55:00 2026-01-02T03:05:00
0 9-17/4 * * Mon-FRI 2026-11-27T13:00:00 2026-11-27T17:00:00 2026-11-30T09:00:00
0 0 13 * 5           2026-11-20T00:00:00 2026-11-27T00:00:00 2026-12-04T00:00:00 2026-12-11T00:00:00 2026-12-13T00:00:00
0 0 1,15 * ?         2026-12-02T00:00:00 2026-12-15T00:00:00 2027-01-01T00:00:00
0 0 29 feb *         2026-01-01T00:00:00 2028-02-29T00:00:00
59 23 31 2 *         2026-01-01T00:00:00
@weekly              2026-11-26T00:00:00 2026-11-29T00:00:00
@yearly              2026-11-26T00:00:00 2027-01-01T00:00:00
@every 90s           2026-01-01T00:00:00 2026-01-01T00:01:30 2026-01-01T00:03:00";

    #[test]
    fn schedule_times_follow_the_fields() {
        for line in TIMES.lines() {
            let (text, rest) = line.split_at(21);
            let all: Vec<String> = rest.split(' ').map(|t| format!("{t}Z")).collect();
            let (after, expected) = all.split_first().expect("a time");
            let count = expected.len().max(1);
            let is = times(text.trim(), after, &TimeZone::UTC, count);
            assert_eq!(is, expected, "{text}");
        }
    }

    /// A zone with central European rules, given as a POSIX description so that no file is read.
    #[test]
    fn a_skipped_hour_has_no_times_and_a_repeated_hour_has_them_twice() {
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").expect("a zone");
        let of = |text: &str, after: &str, count: usize| times(text, after, &zone, count);
        assert_eq!(
            of("30 2 * * *", "2026-03-28T02:00:00Z", 1),
            ["2026-03-30T00:30:00Z"]
        );
        assert_eq!(
            of("30 2 * * *", "2026-10-24T12:00:00Z", 3),
            [
                "2026-10-25T00:30:00Z",
                "2026-10-25T01:30:00Z",
                "2026-10-26T01:30:00Z"
            ]
        );
        assert_eq!(
            of("0 12 * * *", "2026-07-01T00:00:00Z", 1),
            ["2026-07-01T10:00:00Z"]
        );
    }
}
