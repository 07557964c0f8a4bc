//! Pressure stall information: how long tasks waited for a resource, from the kernel's pressure files. Pure.
//!
//! The format is that of `Documentation/accounting/psi.rst`: a line `some` and, for most resources, a line `full`.

/// Waiting time of tasks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StallTime {
    /// Percentage of the last 10, 60 and 300 seconds.
    pub averages: [f64; 3],
    /// Total in microseconds.
    pub total: u64,
}

/// Pressure on one resource.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pressure {
    /// Time in which at least one task waited.
    pub some: StallTime,
    /// Time in which all non-idle tasks waited at once.
    pub full: StallTime,
}

/// Pressure by resource; `None` if the kernel does not report it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pressures {
    /// CPU pressure.
    pub cpu: Option<Pressure>,
    /// Memory pressure.
    pub memory: Option<Pressure>,
    /// I/O pressure.
    pub io: Option<Pressure>,
}

/// Parses a pressure file. Kernels before 5.13 have no line `full` for CPUs; it is zero then.
#[must_use]
pub fn read(text: &str) -> Option<Pressure> {
    let line = |name: &str| {
        let fields = text.lines().find_map(|l| l.strip_prefix(name))?;
        let of = |key: &str| {
            let pairs = fields.split_whitespace();
            pairs
                .filter_map(|f| f.split_once('='))
                .find_map(|(k, v)| (k == key).then_some(v))
        };
        let average = |key: &str| of(key)?.parse().ok();
        Some(StallTime {
            averages: [average("avg10")?, average("avg60")?, average("avg300")?],
            total: of("total")?.parse().ok()?,
        })
    };
    Some(Pressure {
        some: line("some ")?,
        full: line("full ").unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_files_of_old_and_new_kernels_are_parsed() {
        let some = StallTime {
            averages: [91.26, 80.86, 59.3],
            total: 446_294_323,
        };
        let full = StallTime {
            averages: [0.01, 0.28, 0.72],
            total: 65_170_115,
        };
        let first = "some avg10=91.26 avg60=80.86 avg300=59.30 total=446294323\n";
        let second = "full avg10=0.01 avg60=0.28 avg300=0.72 total=65170115\n";
        for (text, read_as) in [
            (format!("{first}{second}"), Some(Pressure { some, full })),
            (
                first.to_owned(),
                Some(Pressure {
                    some,
                    full: StallTime::default(),
                }),
            ),
            (second.to_owned(), None),
            ("some avg10=x avg60=0 avg300=0 total=0".into(), None),
            (String::new(), None),
        ] {
            assert_eq!(read(&text), read_as, "{text}");
        }
    }
}
