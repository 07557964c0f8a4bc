//! Pressure stall information: how long tasks waited for a resource, from the kernel's pressure files. Pure.
//!
//! The format is that of `Documentation/accounting/psi.rst`: a line `some` and, where it can be told, a line `full`.

/// How long tasks waited.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Waited {
    /// The share of the last 10, 60 and 300 seconds, in percent.
    pub averages: [f64; 3],
    /// Microseconds in all.
    pub total: u64,
}

/// The pressure on one resource.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pressure {
    /// At least one task waited.
    pub some: Waited,
    /// All tasks that were not idle waited at once.
    pub full: Waited,
}

/// The pressure on the three resources that the kernel knows; none where it does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pressures {
    /// On processors.
    pub cpu: Option<Pressure>,
    /// On memory.
    pub memory: Option<Pressure>,
    /// On disks.
    pub io: Option<Pressure>,
}

/// Reads a pressure file. Kernels before 5.13 have no line `full` for processors: it is zero then.
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
        Some(Waited {
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
    fn files_of_kernels_old_and_new_are_read() {
        let some = Waited {
            averages: [91.26, 80.86, 59.3],
            total: 446_294_323,
        };
        let full = Waited {
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
                    full: Waited::default(),
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
