//! Metrics in the Prometheus text format. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Labels in the order of output.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

/// The text of a metrics page.
#[derive(Debug, Default)]
pub struct Page(String);

fn escaped(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

fn number(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e15 {
        // Exact below 2^53, and several times faster than formatting a float.
        (value as i64).to_string()
    } else {
        format!("{value}")
    }
}

/// Labels shared by many samples, formatted once.
#[derive(Debug, Clone, Default)]
pub struct Common(Vec<(&'static str, String)>);

impl Common {
    /// Formats these labels, which must be sorted by name.
    #[must_use]
    pub fn new(labels: &[(&'static str, &str)]) -> Common {
        let written = |(key, value): &(&'static str, &str)| {
            let written = format!("{key}=\"{}\"", escaped(value));
            (*key, written)
        };
        Common(labels.iter().map(written).collect())
    }
}

impl Page {
    /// Starts a metric family; all its samples must follow.
    pub fn family(&mut self, name: &str, kind: &str, help: &str) -> &mut Page {
        // Writing to a String cannot fail.
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
        self
    }

    /// Writes a sample; `at` is a timestamp in milliseconds, `None` for now.
    pub fn sample(
        &mut self,
        name: &str,
        labels: Labels<'_>,
        value: f64,
        at: Option<i64>,
    ) -> &mut Page {
        let labels: Vec<String> = labels
            .iter()
            .map(|(key, value)| format!("{key}=\"{}\"", escaped(value)))
            .collect();
        let labels = if labels.is_empty() {
            String::new()
        } else {
            format!("{{{}}}", labels.join(","))
        };
        let at = at.map(|at| format!(" {at}")).unwrap_or_default();
        let _ = writeln!(self.0, "{name}{labels} {}{at}", number(value));
        self
    }

    /// Writes a sample with shared labels and its own labels, both sorted by name.
    pub fn sample_of(
        &mut self,
        name: &str,
        common: &Common,
        own: Labels<'_>,
        value: f64,
        at: Option<i64>,
    ) {
        let out = &mut self.0;
        out.push_str(name);
        let mut separator = '{';
        let mut own = own.iter().peekable();
        for (key, written) in &common.0 {
            while let Some((name, value)) = own.next_if(|(name, _)| name < key) {
                // Writing to a String cannot fail.
                let _ = write!(out, "{separator}{name}=\"{}\"", escaped(value));
                separator = ',';
            }
            out.push(separator);
            out.push_str(written);
            separator = ',';
        }
        for (name, value) in own {
            let _ = write!(out, "{separator}{name}=\"{}\"", escaped(value));
            separator = ',';
        }
        let _ = write!(out, "}} {}", number(value));
        if let Some(at) = at {
            let _ = write!(out, " {at}");
        }
        out.push('\n');
    }

    /// Writes a family with a single sample.
    pub fn single(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        labels: Labels<'_>,
        value: f64,
    ) -> &mut Page {
        self.family(name, kind, help)
            .sample(name, labels, value, None)
    }

    /// The complete text.
    #[must_use]
    pub fn into_string(self) -> String {
        self.0
    }
}

/// A histogram.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
    count: u64,
}

impl Histogram {
    /// An empty histogram; `bounds` are the upper bounds of the buckets, ascending.
    #[must_use]
    pub fn new(bounds: &'static [f64]) -> Histogram {
        Histogram {
            bounds,
            counts: vec![0; bounds.len()],
            sum: 0.0,
            count: 0,
        }
    }

    /// Adds an observation.
    pub fn observe(&mut self, value: f64) {
        for (count, _) in self
            .counts
            .iter_mut()
            .zip(self.bounds)
            .filter(|(_, bound)| value <= **bound)
        {
            *count = count.saturating_add(1);
        }
        self.sum += value;
        self.count = self.count.saturating_add(1);
    }

    /// Writes the samples.
    pub fn write(&self, page: &mut Page, name: &str, labels: Labels<'_>) {
        let bucket = format!("{name}_bucket");
        let bounds = self
            .bounds
            .iter()
            .map(|b| format!("{b}"))
            .chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(self.counts.iter().chain([&self.count])) {
            page.sample(
                &bucket,
                &[labels, &[("le", bound.as_str())]].concat(),
                *count as f64,
                None,
            );
        }
        page.sample(&format!("{name}_sum"), labels, self.sum, None);
        page.sample(&format!("{name}_count"), labels, self.count as f64, None);
    }
}

/// A metric family that is updated by events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Family {
    /// The family's name.
    pub name: &'static str,
    /// The help text.
    pub help: &'static str,
    /// The names of its labels.
    pub labels: &'static [&'static str],
}

type Values = Vec<String>;

/// All metrics that are updated by events.
#[derive(Debug, Default)]
pub struct Registry {
    counters: BTreeMap<&'static str, (Family, BTreeMap<Values, u64>)>,
    gauges: BTreeMap<&'static str, (Family, BTreeMap<Values, f64>)>,
    histograms: BTreeMap<&'static str, (Family, BTreeMap<Values, Histogram>)>,
}

/// Maximum number of label sets per family. Some label values come from clients, which must not exhaust the memory.
const MAX_SERIES: usize = 512;

fn values(values: &[&str]) -> Values {
    values.iter().map(|v| (*v).to_owned()).collect()
}

impl Registry {
    /// Increments a counter.
    pub fn count(&mut self, family: Family, labels: &[&str], by: u64) {
        let (_, all) = self
            .counters
            .entry(family.name)
            .or_insert_with(|| (family, BTreeMap::new()));
        if all.len() < MAX_SERIES || all.contains_key(&values(labels)) {
            let value = all.entry(values(labels)).or_default();
            *value = value.saturating_add(by);
        }
    }

    /// Adds to a gauge, which starts at zero.
    pub fn add(&mut self, family: Family, labels: &[&str], by: f64) {
        let (_, all) = self
            .gauges
            .entry(family.name)
            .or_insert_with(|| (family, BTreeMap::new()));
        if all.len() < MAX_SERIES || all.contains_key(&values(labels)) {
            let value = all.entry(values(labels)).or_default();
            *value += by;
        }
    }

    /// Sets a gauge without labels.
    pub fn set(&mut self, family: Family, value: f64) {
        let all = BTreeMap::from([(Values::new(), value)]);
        self.gauges.insert(family.name, (family, all));
    }

    /// Value of a gauge without labels, if it was set.
    #[must_use]
    pub fn get(&self, family: Family) -> Option<f64> {
        self.gauges.get(family.name)?.1.get(&Values::new()).copied()
    }

    /// Adds an observation to a histogram.
    pub fn observe(&mut self, family: Family, bounds: &'static [f64], labels: &[&str], value: f64) {
        let (_, all) = self
            .histograms
            .entry(family.name)
            .or_insert_with(|| (family, BTreeMap::new()));
        if all.len() < MAX_SERIES || all.contains_key(&values(labels)) {
            all.entry(values(labels))
                .or_insert_with(|| Histogram::new(bounds))
                .observe(value);
        }
    }

    /// Removes all label sets of a family with these label values.
    pub fn remove_series(&mut self, family: Family, labels: Labels<'_>) {
        let is_kept = |values: &Values| {
            let has = |(label, value): &(&str, &str)| {
                let at = family.labels.iter().position(|l| l == label);
                at.and_then(|at| values.get(at)).is_some_and(|v| v == value)
            };
            !labels.iter().all(has)
        };
        if let Some((_, all)) = self.counters.get_mut(family.name) {
            all.retain(|values, _| is_kept(values));
        }
        if let Some((_, all)) = self.histograms.get_mut(family.name) {
            all.retain(|values, _| is_kept(values));
        }
    }

    /// Writes all metrics.
    pub fn write(&self, page: &mut Page) {
        fn pairs<'a>(family: &Family, of: &'a Values) -> Vec<(&'static str, &'a str)> {
            family
                .labels
                .iter()
                .copied()
                .zip(of.iter().map(String::as_str))
                .collect()
        }
        for (family, all) in self.counters.values() {
            page.family(family.name, "counter", family.help);
            for (of, count) in all {
                page.sample(family.name, &pairs(family, of), *count as f64, None);
            }
        }
        for (family, all) in self.gauges.values() {
            page.family(family.name, "gauge", family.help);
            for (of, value) in all {
                page.sample(family.name, &pairs(family, of), *value, None);
            }
        }
        for (family, all) in self.histograms.values() {
            page.family(family.name, "histogram", family.help);
            for (of, histogram) in all {
                histogram.write(page, family.name, &pairs(family, of));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_have_the_prometheus_text_format() {
        let mut registry = Registry::default();
        let seconds = Family {
            name: "a_seconds",
            help: "How long.",
            labels: &["of"],
        };
        for value in [0.1, 0.7, 9.0] {
            registry.observe(seconds, &[0.5, 1.0], &["x\"y"], value);
        }
        registry.count(
            Family {
                name: "b_total",
                help: "How many.",
                labels: &[],
            },
            &[],
            3,
        );
        let mut page = Page::default();
        registry.write(&mut page);
        page.family("c", "gauge", "What.")
            .sample("c", &[("l", "v")], 1.5, Some(7));
        let expected = "# HELP b_total How many.\n# TYPE b_total counter\nb_total 3\n# HELP a_seconds How long.\n# TYPE a_seconds histogram\n\
            a_seconds_bucket{of=\"x\\\"y\",le=\"0.5\"} 1\na_seconds_bucket{of=\"x\\\"y\",le=\"1\"} 2\na_seconds_bucket{of=\"x\\\"y\",le=\"+Inf\"} 3\n\
            a_seconds_sum{of=\"x\\\"y\"} 9.8\na_seconds_count{of=\"x\\\"y\"} 3\n# HELP c What.\n# TYPE c gauge\nc{l=\"v\"} 1.5 7\n";
        assert_eq!(page.into_string(), expected);
    }

    #[test]
    fn label_values_from_clients_are_bounded() {
        let mut registry = Registry::default();
        let family = Family {
            name: "a_total",
            help: "",
            labels: &["path"],
        };
        (0..10_000).for_each(|n| registry.count(family, &[&n.to_string()], 1));
        assert_eq!(registry.counters["a_total"].1.len(), MAX_SERIES);
        let other = Family {
            name: "b",
            ..family
        };
        registry.remove_series(other, &[("path", "7")]);
        registry.remove_series(family, &[("path", "7"), ("verb", "GET")]);
        assert_eq!(registry.counters["a_total"].1.len(), MAX_SERIES);
        registry.remove_series(family, &[("path", "7")]);
        assert_eq!(registry.counters["a_total"].1.len(), MAX_SERIES - 1);
    }

    #[test]
    fn common_labels_are_sorted_among_the_others() {
        let common = Common::new(&[("b", "x\"y"), ("d", "")]);
        let mut page = Page::default();
        for own in [&[][..], &[("a", "1"), ("c", "2"), ("e", "\n")]] {
            page.sample_of("n", &common, own, -0.5, Some(3));
        }
        page.sample_of("n", &Common::default(), &[("a", "1")], 1e14, None);
        let lines = "n{b=\"x\\\"y\",d=\"\"} -0.5 3\nn{a=\"1\",b=\"x\\\"y\",c=\"2\",d=\"\",e=\"\\n\"} -0.5 3\nn{a=\"1\"} 100000000000000\n";
        assert_eq!(page.into_string(), lines);
    }
}
