//! The values of a cgroup, the files that hold them in cgroup v1 and v2, and the corresponding properties of a systemd
//! slice (cgroups(7), systemd.resource-control(5)). Pure.

use std::collections::BTreeMap;

/// The kernel rounds memory limits down to pages of this many bytes.
const PAGE: u64 = 4096;
/// In cgroup v1, limits from this value on mean unlimited.
const UNLIMITED: u64 = 1 << 62;
/// systemd rounds CPU time up to hundredths of a CPU: this many microseconds per second.
const SYSTEMD_STEP: u64 = 10_000;

/// The limit of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// No limit.
    Unlimited,
    /// The limit, in the resource's unit.
    At(u64),
}

/// The CPU bandwidth of a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuTime {
    /// Microseconds of CPU time in each period. `None` means unlimited.
    pub quota: Option<u64>,
    /// The length of a period in microseconds.
    pub period: u64,
}

/// The desired values of a cgroup. Values that are `None` or missing in the map are not changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Values {
    /// CPU weight in cgroup v1 shares.
    pub shares: Option<u64>,
    /// CPU bandwidth.
    pub cpu: Option<CpuTime>,
    /// Memory limit in bytes.
    pub memory: Option<Bound>,
    /// Bytes of memory that are never reclaimed (`memory.min`). Cgroup v1 does not support this.
    pub memory_min: Option<u64>,
    /// Bytes of memory that are reclaimed last (`memory.low`). Cgroup v1 does not support this.
    pub memory_low: Option<u64>,
    /// Limit of processes and threads.
    pub pids: Option<Bound>,
    /// Limits of huge pages in bytes, by page size in bytes.
    pub huge_pages: BTreeMap<u64, Bound>,
}

/// The cgroup controller that a file belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Controller {
    /// CPU time.
    Cpu,
    /// Memory.
    Memory,
    /// Process ids.
    Pids,
    /// Huge pages.
    HugeTlb,
}

impl Controller {
    /// The kernel's name of the controller.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Controller::Cpu => "cpu",
            Controller::Memory => "memory",
            Controller::Pids => "pids",
            Controller::HugeTlb => "hugetlb",
        }
    }
}

/// A cgroup file and its desired value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The controller that owns the file.
    pub controller: Controller,
    /// The file's name.
    pub file: String,
    /// The value to write.
    pub value: String,
    /// The kernel rounds the value down to a multiple of this.
    unit: u64,
}

/// A cgroup file whose value differed from the desired one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The file's name.
    pub file: String,
    /// The value that was found. `None` if the file or the cgroup was missing.
    pub found: Option<String>,
    /// The desired value.
    pub wanted: String,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let found = self.found.as_deref().unwrap_or("missing");
        write!(f, "{} was {found}, expected {}", self.file, self.wanted)
    }
}

/// A cgroup that another program had changed and that the agent has restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestoredCgroup {
    /// The cgroup's path, or the name of its slice.
    pub cgroup: String,
    /// The values that differed.
    pub changes: Vec<Difference>,
    /// Why restoring the values failed. `None` if it succeeded.
    pub error: Option<String>,
}

/// The page size in the spelling of cgroup file names, for example `2MB`.
#[must_use]
pub(crate) fn page_name(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 => format!("{}GB", b >> 30),
        b if b >= 1 << 20 => format!("{}MB", b >> 20),
        b => format!("{}KB", b >> 10),
    }
}

impl Setting {
    fn new(controller: Controller, file: impl Into<String>, value: impl ToString) -> Setting {
        Setting {
            controller,
            file: file.into(),
            value: value.to_string(),
            unit: 1,
        }
    }

    fn limit(
        controller: Controller,
        file: impl Into<String>,
        bound: Bound,
        (none, unit): (&str, u64),
    ) -> Setting {
        let value = match bound {
            Bound::Unlimited => none.to_owned(),
            Bound::At(amount) => amount.to_string(),
        };
        Setting {
            unit,
            ..Setting::new(controller, file, value)
        }
    }

    /// Whether a file with this content has the desired value, after the kernel's rounding.
    #[must_use]
    pub fn is_met_by(&self, text: &str) -> bool {
        let kept = |text: &str| match text {
            "max" | "-1" => Some(UNLIMITED),
            number => {
                let number: u64 = number.parse().ok()?;
                let rest = number.checked_rem(self.unit).unwrap_or(0);
                Some(number.saturating_sub(rest).min(UNLIMITED))
            }
        };
        let text = text.trim();
        text == self.value || kept(text).is_some_and(|found| Some(found) == kept(&self.value))
    }
}

impl Values {
    /// The files for these values, in the order in which they are written. `unified` means cgroup v2.
    #[must_use]
    pub fn settings(&self, unified: bool) -> Vec<Setting> {
        use Controller::{Cpu, HugeTlb, Memory, Pids};
        let mut all = vec![];
        if let Some(shares) = self.shares {
            all.push(match unified {
                true => Setting::new(Cpu, "cpu.weight", weight(shares)),
                false => Setting::new(Cpu, "cpu.shares", shares),
            });
        }
        if let Some(CpuTime { quota, period }) = self.cpu {
            let quota = |none: &str| quota.map_or_else(|| none.to_owned(), |q| q.to_string());
            if unified {
                let both = format!("{} {period}", quota("max"));
                all.push(Setting::new(Cpu, "cpu.max", both));
            } else {
                all.push(Setting::new(Cpu, "cpu.cfs_period_us", period));
                all.push(Setting::new(Cpu, "cpu.cfs_quota_us", quota("-1")));
            }
        }
        let none = if unified { "max" } else { "-1" };
        if let Some(bound) = self.memory {
            let file = match unified {
                true => "memory.max",
                false => "memory.limit_in_bytes",
            };
            all.push(Setting::limit(Memory, file, bound, (none, PAGE)));
        }
        for (file, bytes) in self.protection(unified) {
            all.push(Setting::limit(Memory, file, Bound::At(bytes), (none, PAGE)));
        }
        if let Some(bound) = self.pids {
            all.push(Setting::limit(Pids, "pids.max", bound, ("max", 1)));
        }
        for (bytes, bound) in &self.huge_pages {
            let size = page_name(*bytes);
            let limit = if unified { "max" } else { "limit_in_bytes" };
            for kind in ["", "rsvd."] {
                let file = format!("hugetlb.{size}.{kind}{limit}");
                all.push(Setting::limit(HugeTlb, file, *bound, (none, *bytes)));
            }
        }
        all
    }

    /// The protected memory in bytes, by file.
    fn protection(&self, unified: bool) -> impl Iterator<Item = (&'static str, u64)> {
        let files = [
            ("memory.min", self.memory_min),
            ("memory.low", self.memory_low),
        ];
        let files = files.into_iter().filter(move |_| unified);
        files.filter_map(|(file, bytes)| Some((file, bytes?)))
    }

    /// The values as properties of a systemd slice, in systemd's units. `u64::MAX` means unlimited. systemd has no
    /// property for huge pages.
    #[must_use]
    pub fn properties(&self, unified: bool) -> Vec<(&'static str, u64)> {
        let max = |bound| match bound {
            Bound::Unlimited => u64::MAX,
            Bound::At(amount) => amount,
        };
        let mut all = vec![];
        if let Some(shares) = self.shares {
            all.push(match unified {
                true => ("CPUWeight", weight(shares)),
                false => ("CPUShares", shares),
            });
        }
        if let Some(cpu) = self.cpu {
            all.push((
                "CPUQuotaPerSecUSec",
                cpu.each_second_of_systemd().unwrap_or(u64::MAX),
            ));
            all.push(("CPUQuotaPeriodUSec", cpu.period));
        }
        if let Some(bound) = self.memory {
            let name = if unified { "MemoryMax" } else { "MemoryLimit" };
            all.push((name, max(bound)));
        }
        for (file, bytes) in self.protection(unified) {
            let name = match file {
                "memory.min" => "MemoryMin",
                _ => "MemoryLow",
            };
            all.push((name, bytes));
        }
        if let Some(bound) = self.pids {
            all.push(("TasksMax", max(bound)));
        }
        all
    }

    /// The values with CPU time rounded as systemd does.
    #[must_use]
    pub fn rounded_by_systemd(mut self) -> Values {
        if let Some(cpu) = &mut self.cpu {
            let each = cpu.each_second_of_systemd();
            cpu.quota = each.map(|each| each.saturating_mul(cpu.period) / 1_000_000);
        }
        self
    }
}

impl CpuTime {
    /// CPU time in microseconds per second, rounded as systemd does.
    fn each_second_of_systemd(self) -> Option<u64> {
        let exact = self.quota?.saturating_mul(1_000_000);
        let exact = exact.checked_div(self.period).unwrap_or(exact);
        exact.checked_next_multiple_of(SYSTEMD_STEP).or(Some(exact))
    }
}

/// Converts cgroup v1 shares to a cgroup v2 weight.
#[must_use]
pub fn weight(shares: u64) -> u64 {
    let above = shares.clamp(2, 262_144).saturating_sub(2);
    (above.saturating_mul(9999) / 262_142).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn values() -> Values {
        Values {
            shares: Some(1024),
            cpu: Some(CpuTime {
                quota: Some(12_345),
                period: 100_000,
            }),
            memory: Some(Bound::At(1 << 20)),
            memory_min: Some(8192),
            memory_low: Some(0),
            pids: Some(Bound::At(7)),
            huge_pages: [(2 << 20, Bound::At(4 << 20)), (1 << 30, Bound::Unlimited)].into(),
        }
    }

    fn open() -> Values {
        Values {
            shares: Some(2),
            cpu: Some(CpuTime {
                quota: None,
                period: 100_000,
            }),
            memory: Some(Bound::Unlimited),
            ..Values::default()
        }
    }

    fn files(values: &Values, unified: bool) -> Vec<(String, String)> {
        let settings = values.settings(unified).into_iter();
        settings.map(|s| (s.file, s.value)).collect()
    }

    #[test]
    fn huge_page_sizes_match_cgroup_file_names() {
        for (bytes, name) in [(64 << 10, "64KB"), (2 << 20, "2MB"), (1 << 30, "1GB")] {
            assert_eq!(page_name(bytes), name);
        }
    }

    #[test]
    fn values_are_written_in_the_format_of_each_cgroup_version() {
        let text = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            let pairs = pairs.iter();
            pairs.map(|(a, b)| ((*a).into(), (*b).into())).collect()
        };
        assert_eq!(
            files(&values(), true),
            text(&[
                ("cpu.weight", "39"),
                ("cpu.max", "12345 100000"),
                ("memory.max", "1048576"),
                ("memory.min", "8192"),
                ("memory.low", "0"),
                ("pids.max", "7"),
                ("hugetlb.2MB.max", "4194304"),
                ("hugetlb.2MB.rsvd.max", "4194304"),
                ("hugetlb.1GB.max", "max"),
                ("hugetlb.1GB.rsvd.max", "max"),
            ])
        );
        assert_eq!(
            files(&values(), false)[..5],
            text(&[
                ("cpu.shares", "1024"),
                ("cpu.cfs_period_us", "100000"),
                ("cpu.cfs_quota_us", "12345"),
                ("memory.limit_in_bytes", "1048576"),
                ("pids.max", "7"),
            ])
        );
        assert_eq!(
            files(&open(), false),
            text(&[
                ("cpu.shares", "2"),
                ("cpu.cfs_period_us", "100000"),
                ("cpu.cfs_quota_us", "-1"),
                ("memory.limit_in_bytes", "-1"),
            ]),
            "earlier limits are removed"
        );
        assert_eq!(files(&Values::default(), true), []);
    }

    #[test]
    fn values_that_the_kernel_rounds_are_no_difference() {
        let limits = Values {
            memory: Some(Bound::At(10_000)),
            ..Values::default()
        };
        let setting = &limits.settings(false)[0];
        for (text, met) in [
            ("8192\n", true),
            ("10000", true),
            ("12288", false),
            ("9223372036854771712", false),
            ("", false),
        ] {
            assert_eq!(setting.is_met_by(text), met, "{text:?}");
        }
        let unlimited = &open().settings(false)[3];
        assert!(unlimited.is_met_by("9223372036854771712\n") && !unlimited.is_met_by("4096"));
        let quota = &open().settings(false)[2];
        assert!(quota.is_met_by("-1\n") && !quota.is_met_by("1000"));
        let both = &open().settings(true)[1];
        assert!(both.is_met_by("max 100000\n") && !both.is_met_by("1000 100000"));
    }

    #[test]
    fn systemd_properties_use_systemd_units() {
        assert_eq!(
            values().properties(true),
            [
                ("CPUWeight", 39),
                ("CPUQuotaPerSecUSec", 130_000),
                ("CPUQuotaPeriodUSec", 100_000),
                ("MemoryMax", 1 << 20),
                ("MemoryMin", 8192),
                ("MemoryLow", 0),
                ("TasksMax", 7)
            ]
        );
        assert_eq!(
            open().properties(false),
            [
                ("CPUShares", 2),
                ("CPUQuotaPerSecUSec", u64::MAX),
                ("CPUQuotaPeriodUSec", 100_000),
                ("MemoryLimit", u64::MAX)
            ]
        );
        let quota = |values: Values| values.rounded_by_systemd().cpu.and_then(|c| c.quota);
        assert_eq!((quota(values()), quota(open())), (Some(13_000), None));
    }

    #[test]
    fn weights_stay_within_kernel_bounds() {
        assert_eq!([weight(2), weight(1024), weight(262_144)], [1, 39, 10_000]);
    }

    proptest! {
        /// A value that was just written is never reported as a change by another program.
        #[test]
        fn written_values_are_never_a_difference(shares in 2_u64..262_144, quota in proptest::option::of(1000_u64..1 << 40), memory in any::<u64>(), pids in any::<u32>(), unified: bool) {
            let all = Values {
                shares: Some(shares),
                cpu: Some(CpuTime { quota, period: 100_000 }),
                memory: Some(Bound::At(memory)),
                memory_min: Some(memory),
                memory_low: Some(memory),
                pids: Some(Bound::At(pids.into())),
                huge_pages: [(2 << 20, Bound::At(memory))].into(),
            };
            for setting in all.settings(unified) {
                prop_assert!(setting.is_met_by(&setting.value), "{:?}", setting);
                if setting.unit > 1 {
                    let kept = memory / setting.unit * setting.unit;
                    prop_assert!(setting.is_met_by(&format!("{kept}\n")), "{:?}", setting);
                }
            }
        }
    }
}
