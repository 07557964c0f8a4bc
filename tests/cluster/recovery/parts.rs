//! Manifests, times and processes of the rows.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;

/// The bound for an action that should take so many seconds: twice as long on any machine, and more if
/// the load exceeds the number of CPUs.
pub fn at_most(seconds: u64) -> Duration {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap();
    let load: f64 = text.split(' ').next().unwrap().parse().unwrap();
    let processors = std::thread::available_parallelism().unwrap().get() as f64;
    Duration::from_secs(seconds).mul_f64((load / processors).clamp(2.0, 6.0))
}

pub fn is_within(took: jiff::SignedDuration, seconds: u64) -> bool {
    took.as_secs_f64() <= at_most(seconds).as_secs_f64()
}

pub fn manifest(name: &str, metadata: &str, spec: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, {metadata}}}\nspec: {{terminationGracePeriodSeconds: 2, {spec}}}\n---\n"
    )
}

/// A time in a status or an object's metadata.
pub fn time(value: &Value) -> Timestamp {
    value
        .as_str()
        .unwrap_or_else(|| panic!("not a time: {value}"))
        .parse()
        .unwrap()
}

pub fn uid(pod: &Value) -> String {
    pod["metadata"]["uid"].as_str().unwrap().to_owned()
}

/// The processes whose command line contains a text.
pub fn processes(text: &str) -> Vec<i32> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    all.filter_map(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let id = entry.file_name().to_str()?.parse().ok()?;
        line.contains(text).then_some(id)
    })
    .collect()
}

/// A pod with a sidecar and containers.
pub fn with_sidecar(sidecar: &str, containers: &str) -> String {
    format!("restartPolicy: Never, initContainers: [{sidecar}], containers: [{containers}]")
}
