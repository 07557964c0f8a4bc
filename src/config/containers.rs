//! Fields about containers: logs, quotas, swap, sysctls, restarts.

use std::time::Duration;

use super::document::{CrashLoop, Document, MemorySwap, UserNamespaces};
use super::values::{invalid, time};
use super::{ConfigError, Logs};
use holdfast_core::pod::users::LENGTH;
use holdfast_core::quantity::Quantity;
use holdfast_core::time::duration;

/// Returns a count of at least `least`.
fn at_least(
    field: &str,
    value: Option<i32>,
    default: i32,
    least: usize,
) -> Result<usize, ConfigError> {
    let value = value.unwrap_or(default);
    usize::try_from(value)
        .ok()
        .filter(|count| *count >= least)
        .ok_or_else(|| invalid(field, value, &format!("use {least} or more")))
}

/// Returns how container logs are rotated.
pub(super) fn logs(document: &Document) -> Result<Logs, ConfigError> {
    let size = document.container_log_max_size.as_ref();
    let files = document.container_log_max_files;
    let interval = document.container_log_monitor_interval.as_ref();
    let workers = document.container_log_max_workers;
    let text = size.map_or("10Mi", String::as_str);
    let bytes = text.parse::<Quantity>().ok().map(Quantity::units);
    Ok(Logs {
        max_size: match bytes {
            // No log is this large, so none is rotated.
            Some(..0) => u64::MAX,
            Some(bytes @ 1..) => bytes.unsigned_abs(),
            Some(0) | None => {
                let remedy =
                    "use a positive quantity such as 10Mi, or a negative one for no rotation";
                return Err(invalid("containerLogMaxSize", text, remedy));
            }
        },
        max_files: at_least("containerLogMaxFiles", files, 5, 2)?,
        interval: time("containerLogMonitorInterval", interval, 10)?,
        workers: at_least("containerLogMaxWorkers", workers, 1, 1)?,
    })
}

pub(super) fn limited_swap(swap: Option<MemorySwap>) -> Result<bool, ConfigError> {
    match swap.and_then(|s| s.swap_behavior).as_deref() {
        None | Some("" | "NoSwap") => Ok(false),
        Some("LimitedSwap") => Ok(true),
        Some(other) => Err(invalid(
            "memorySwap.swapBehavior",
            other,
            "use NoSwap or LimitedSwap",
        )),
    }
}

/// Returns the number of user and group ids of a pod with a user namespace. The node itself needs one range of this
/// size, so there must be room for two.
pub(super) fn ids_per_pod(given: Option<UserNamespaces>) -> Result<u32, ConfigError> {
    let each = given.and_then(|g| g.ids_per_pod).unwrap_or(LENGTH.into());
    let whole = u32::try_from(each).ok();
    let whole = whole.filter(|n| *n > 0 && n.is_multiple_of(LENGTH) && *n <= 1 << 31);
    let field = "userNamespaces.idsPerPod";
    whole.ok_or_else(|| invalid(field, each, "use a multiple of 65536, 2147483648 at most"))
}

/// Returns the period of CPU quotas in microseconds; `None` if quotas are not enforced.
pub(super) fn quota_period(
    enforced: Option<bool>,
    period: Option<&String>,
) -> Result<Option<u64>, ConfigError> {
    let Some(text) = period else {
        return Ok((enforced != Some(false)).then_some(holdfast_core::pod::cgroup::PERIOD));
    };
    let micros = duration(text).and_then(|d| u64::try_from(d.as_micros()).ok());
    let Some(micros) = micros.filter(|m| (1_000..=1_000_000).contains(m)) else {
        let remedy = "use a duration between 1ms and 1s";
        return Err(invalid("cpuCFSQuotaPeriod", text, remedy));
    };
    Ok((enforced != Some(false)).then_some(micros))
}

pub(super) fn unsafe_sysctls(patterns: Vec<String>) -> Result<Vec<String>, ConfigError> {
    match patterns
        .iter()
        .find(|p| !holdfast_core::pod::sysctl::is_namespaced(p))
    {
        None => Ok(patterns),
        Some(bad) => Err(invalid(
            "allowedUnsafeSysctls",
            bad,
            "use kernel.shm*, kernel.msg*, kernel.sem, fs.mqueue.* or net.*: only these are isolated per pod",
        )),
    }
}

/// Returns the maximum crash-loop back-off.
pub(super) fn max_back_off(section: Option<CrashLoop>) -> Result<Duration, ConfigError> {
    let field = "crashLoopBackOff.maxContainerRestartPeriod";
    let text = section.and_then(|c| c.max_container_restart_period);
    let longest = time(field, text.as_ref(), 300)?;
    if (Duration::from_secs(1)..=Duration::from_secs(300)).contains(&longest) {
        Ok(longest)
    } else {
        Err(invalid(field, text, "use between 1s and 300s"))
    }
}

/// Whether systemd creates cgroups if the runtime does not report its driver.
pub(super) fn cgroup_driver(text: Option<&str>) -> Result<bool, ConfigError> {
    match text {
        None | Some("cgroupfs") => Ok(false),
        Some("systemd") => Ok(true),
        Some(other) => Err(invalid("cgroupDriver", other, "use cgroupfs or systemd")),
    }
}
