//! The families of `/metrics/cadvisor` with one value for a cgroup, a
//! filesystem or a disk: cAdvisor's names and help texts.

use holdfast_core::serving::block_io::DiskCounters;
use holdfast_core::serving::cgroup_stats::Usage;
use holdfast_core::serving::exposition::Common;
use holdfast_core::serving::machine_stats::Interface;
use holdfast_core::serving::pressure::Pressure;
use holdfast_sys::meter::{Filesystem, Processes};

/// Units per second.
pub(super) const NANO: f64 = 1e9;
pub(super) const MICRO: f64 = 1e6;
const MILLI: f64 = 1e3;

/// One cgroup with its labels.
pub(super) struct Shown<'a> {
    pub labels: Common,
    pub usage: &'a Usage,
    pub processes: &'a Processes,
    /// Start time in seconds since 1970.
    pub began: i64,
    /// The limit of memory and swap: of both on cgroup v1, of swap alone on v2.
    pub swap_limit: u64,
    /// Whether the cgroup has a main process, such as that of a container.
    pub has_root: bool,
    pub interfaces: &'a [Interface],
    /// The machine's filesystems; only for the root cgroup.
    pub filesystems: &'a [Filesystem],
}

pub(super) type Get = fn(&Shown<'_>) -> Option<f64>;
pub(super) type Family = (&'static str, &'static str, &'static str, Get);

fn waited(pressure: Option<Pressure>, get: fn(Pressure) -> u64) -> Option<f64> {
    pressure.map(|p| get(p) as f64 / MICRO)
}

/// Settings, without a timestamp.
pub(super) const SPEC: [Family; 7] = [
    (
        "container_start_time_seconds",
        "gauge",
        "Start time of the container since unix epoch in seconds.",
        |s| Some(s.began as f64),
    ),
    (
        "container_spec_cpu_period",
        "gauge",
        "CPU period of the container.",
        |s| Some(s.usage.period as f64),
    ),
    (
        "container_spec_cpu_quota",
        "gauge",
        "CPU quota of the container.",
        |s| s.usage.quota.map(|quota| quota as f64),
    ),
    (
        "container_spec_cpu_shares",
        "gauge",
        "CPU share of the container.",
        |s| Some(s.usage.shares as f64),
    ),
    (
        "container_spec_memory_limit_bytes",
        "gauge",
        "Memory limit for the container.",
        |s| Some(s.usage.limit.unwrap_or(0) as f64),
    ),
    (
        "container_spec_memory_swap_limit_bytes",
        "gauge",
        "Memory swap limit for the container.",
        |s| Some(s.swap_limit as f64),
    ),
    (
        "container_spec_memory_reservation_limit_bytes",
        "gauge",
        "Memory reservation limit for the container.",
        |s| Some(s.usage.reserved as f64),
    ),
];

/// CPU usage.
pub(super) const CPU: [Family; 7] = [
    (
        "container_cpu_user_seconds_total",
        "counter",
        "Cumulative user cpu time consumed in seconds.",
        |s| Some(s.usage.user as f64 / NANO),
    ),
    (
        "container_cpu_system_seconds_total",
        "counter",
        "Cumulative system cpu time consumed in seconds.",
        |s| Some(s.usage.system as f64 / NANO),
    ),
    (
        "container_cpu_cfs_periods_total",
        "counter",
        "Number of elapsed enforcement period intervals.",
        |s| s.usage.quota.map(|_| s.usage.periods.0 as f64),
    ),
    (
        "container_cpu_cfs_throttled_periods_total",
        "counter",
        "Number of throttled period intervals.",
        |s| s.usage.quota.map(|_| s.usage.periods.1 as f64),
    ),
    (
        "container_cpu_cfs_throttled_seconds_total",
        "counter",
        "Total time duration the container has been throttled.",
        |s| s.usage.quota.map(|_| s.usage.periods.2 as f64 / NANO),
    ),
    (
        "container_cpu_cfs_burst_periods_total",
        "counter",
        "Number of periods when burst occurs.",
        |s| s.usage.quota.map(|_| s.usage.bursts.0 as f64),
    ),
    (
        "container_cpu_cfs_burst_seconds_total",
        "counter",
        "Total time duration the container has been bursted.",
        |s| s.usage.quota.map(|_| s.usage.bursts.1 as f64 / NANO),
    ),
];

/// Memory usage.
pub(super) const MEMORY: [Family; 12] = [
    (
        "container_memory_cache",
        "gauge",
        "Number of bytes of page cache memory.",
        |s| Some(s.usage.cache as f64),
    ),
    (
        "container_memory_rss",
        "gauge",
        "Size of RSS in bytes.",
        |s| Some(s.usage.rss as f64),
    ),
    (
        "container_memory_kernel_usage",
        "gauge",
        "Size of kernel memory allocated in bytes.",
        |s| Some(s.usage.kernel as f64),
    ),
    (
        "container_memory_mapped_file",
        "gauge",
        "Size of memory mapped files in bytes.",
        |s| Some(s.usage.mapped as f64),
    ),
    (
        "container_memory_swap",
        "gauge",
        "Container swap usage in bytes.",
        |s| Some(s.usage.swap as f64),
    ),
    (
        "container_memory_failcnt",
        "counter",
        "Number of memory usage hits limits",
        |s| Some(s.usage.limit_hits as f64),
    ),
    (
        "container_memory_usage_bytes",
        "gauge",
        "Current memory usage in bytes, including all memory regardless of when it was accessed",
        |s| Some(s.usage.memory as f64),
    ),
    (
        "container_memory_max_usage_bytes",
        "gauge",
        "Maximum memory usage recorded in bytes",
        |s| Some(s.usage.peak as f64),
    ),
    (
        "container_memory_working_set_bytes",
        "gauge",
        "Current working set in bytes.",
        |s| Some(s.usage.working_set as f64),
    ),
    (
        "container_memory_total_active_file_bytes",
        "gauge",
        "Current total active file in bytes.",
        |s| Some(s.usage.file_pages.0 as f64),
    ),
    (
        "container_memory_total_inactive_file_bytes",
        "gauge",
        "Current total inactive file in bytes.",
        |s| Some(s.usage.file_pages.1 as f64),
    ),
    (
        "container_oom_events_total",
        "counter",
        "Count of out of memory events observed for the container",
        |s| Some(s.usage.oom_kills as f64),
    ),
];

/// A value about open files. Zero for a cgroup without processes; missing if the cgroup has too many processes.
fn open(shown: &Shown<'_>, get: fn((u64, u64)) -> u64) -> Option<f64> {
    let none = (shown.usage.processes == 0).then_some((0, 0));
    let counted = shown.processes.descriptors.or(none)?;
    Some(get(counted) as f64)
}

/// Processes, and how long they waited for resources.
pub(super) const PROCESSES: [Family; 12] = [
    (
        "container_health_state",
        "gauge",
        "The result of the container's health check",
        // CRI has no health checks; -1 means none.
        |_| Some(-1.0),
    ),
    (
        "container_processes",
        "gauge",
        "Number of processes running inside the container.",
        |s| Some(s.usage.processes as f64),
    ),
    (
        "container_file_descriptors",
        "gauge",
        "Number of open file descriptors for the container.",
        |s| open(s, |(all, _)| all),
    ),
    (
        "container_sockets",
        "gauge",
        "Number of open sockets for the container.",
        |s| open(s, |(_, sockets)| sockets),
    ),
    (
        "container_threads_max",
        "gauge",
        "Maximum number of threads allowed inside the container, infinity if value is zero",
        |s| Some(s.usage.threads_limit.unwrap_or(0) as f64),
    ),
    (
        "container_threads",
        "gauge",
        "Number of threads running inside the container",
        |s| Some(s.usage.threads as f64),
    ),
    (
        "container_pressure_cpu_stalled_seconds_total",
        "counter",
        "Total time duration no tasks in the container could make progress due to CPU congestion.",
        |s| waited(s.usage.pressure.cpu, |p| p.full.total),
    ),
    (
        "container_pressure_cpu_waiting_seconds_total",
        "counter",
        "Total time duration tasks in the container have waited due to CPU congestion.",
        |s| waited(s.usage.pressure.cpu, |p| p.some.total),
    ),
    (
        "container_pressure_memory_stalled_seconds_total",
        "counter",
        "Total time duration no tasks in the container could make progress due to memory congestion.",
        |s| waited(s.usage.pressure.memory, |p| p.full.total),
    ),
    (
        "container_pressure_memory_waiting_seconds_total",
        "counter",
        "Total time duration tasks in the container have waited due to memory congestion.",
        |s| waited(s.usage.pressure.memory, |p| p.some.total),
    ),
    (
        "container_pressure_io_stalled_seconds_total",
        "counter",
        "Total time duration no tasks in the container could make progress due to IO congestion.",
        |s| waited(s.usage.pressure.io, |p| p.full.total),
    ),
    (
        "container_pressure_io_waiting_seconds_total",
        "counter",
        "Total time duration tasks in the container have waited due to IO congestion.",
        |s| waited(s.usage.pressure.io, |p| p.some.total),
    ),
];

pub(super) type OfRoom = fn(&Filesystem) -> u64;
pub(super) type OfDisk = fn(&DiskCounters) -> f64;

/// The capacity and usage of filesystems.
pub(super) const ROOM: [(&str, &str, OfRoom); 4] = [
    (
        "container_fs_inodes_free",
        "Number of available Inodes",
        |f| f.room.inodes_free,
    ),
    ("container_fs_inodes_total", "Number of Inodes", |f| {
        f.room.inodes
    }),
    (
        "container_fs_limit_bytes",
        "Number of bytes that can be consumed by the container on this filesystem.",
        |f| f.room.capacity,
    ),
    (
        "container_fs_usage_bytes",
        "Number of bytes that are consumed by the container on this filesystem.",
        |f| f.room.capacity.saturating_sub(f.room.free),
    ),
];

/// The kernel's counters of a filesystem's disk.
pub(super) const DISK: [(&str, &str, &str, OfDisk); 9] = [
    (
        "container_fs_sector_reads_total",
        "counter",
        "Cumulative count of sector reads completed",
        |d| d.reads[2] as f64,
    ),
    (
        "container_fs_reads_merged_total",
        "counter",
        "Cumulative count of reads merged",
        |d| d.reads[1] as f64,
    ),
    (
        "container_fs_read_seconds_total",
        "counter",
        "Cumulative count of seconds spent reading",
        |d| d.reads[3] as f64 / MILLI,
    ),
    (
        "container_fs_sector_writes_total",
        "counter",
        "Cumulative count of sector writes completed",
        |d| d.writes[2] as f64,
    ),
    (
        "container_fs_writes_merged_total",
        "counter",
        "Cumulative count of writes merged",
        |d| d.writes[1] as f64,
    ),
    (
        "container_fs_write_seconds_total",
        "counter",
        "Cumulative count of seconds spent writing",
        |d| d.writes[3] as f64 / MILLI,
    ),
    (
        "container_fs_io_current",
        "gauge",
        "Number of I/Os currently in progress",
        |d| d.in_flight as f64,
    ),
    (
        "container_fs_io_time_seconds_total",
        "counter",
        "Cumulative count of seconds spent doing I/Os",
        |d| d.busy.0 as f64 / MILLI,
    ),
    (
        "container_fs_io_time_weighted_seconds_total",
        "counter",
        "Cumulative weighted I/O time in seconds",
        |d| d.busy.1 as f64 / MILLI,
    ),
];

/// Disk requests of cgroups: name, help text, operation, and the corresponding counter of the disk.
pub(super) const REQUESTS: [(&str, &str, &str, Option<OfDisk>); 4] = [
    (
        "container_fs_reads_bytes_total",
        "Cumulative count of bytes read",
        "Read",
        None,
    ),
    (
        "container_fs_reads_total",
        "Cumulative count of reads completed",
        "Read",
        Some(|d| d.reads[0] as f64),
    ),
    (
        "container_fs_writes_bytes_total",
        "Cumulative count of bytes written",
        "Write",
        None,
    ),
    (
        "container_fs_writes_total",
        "Cumulative count of writes completed",
        "Write",
        Some(|d| d.writes[0] as f64),
    ),
];

/// Values of the kernel's IO cost model.
pub(super) const COSTS: [(&str, &str); 4] = [
    (
        "container_fs_io_cost_usage_seconds_total",
        "Cumulative IOCost usage in seconds",
    ),
    (
        "container_fs_io_cost_wait_seconds_total",
        "Cumulative IOCost wait in seconds",
    ),
    (
        "container_fs_io_cost_indebt_seconds_total",
        "Cumulative IOCost debt in seconds",
    ),
    (
        "container_fs_io_cost_indelay_seconds_total",
        "Cumulative IOCost delay in seconds",
    ),
];
