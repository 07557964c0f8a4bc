//! Requirements on the machine before the agent starts, and limits of the agent's process
//! (`pkg/kubelet/cm/container_manager_linux.go`).

use anyhow::bail;

use holdfast_config::Config;
use holdfast_sys::{beneath, machine, process};

/// The sysctls that `protectKernelDefaults` requires, below `/proc/sys`.
const KERNEL: [(&str, i64); 6] = [
    ("vm/overcommit_memory", 1),
    ("vm/panic_on_oom", 0),
    ("kernel/panic", 10),
    ("kernel/panic_on_oops", 1),
    ("kernel/keys/root_maxkeys", 1_000_000),
    ("kernel/keys/root_maxbytes", 25_000_000),
];

/// Why the agent must not start on this machine, as sentences with remedies; empty if it may.
#[must_use]
pub fn refusals(config: &Config) -> Vec<String> {
    let mut refusals = vec![];
    if !beneath::is_supported() {
        refusals.push(format!(
            "this kernel ({}) does not support openat2, which is required to open files below pods' directories safely: use Linux 5.6 or newer",
            machine::kernel()
        ));
    }
    if config.refuses_cgroup_v1 && !holdfast_sys::cgroup::is_v2() {
        refusals.push(
            "failCgroupV1 is true and this machine has cgroup v1: boot it with cgroup v2, or set failCgroupV1: false".into(),
        );
    }
    let swaps = machine::swaps();
    if config.refuses_swap && !swaps.is_empty() {
        refusals.push(format!(
            "this machine swaps ({}) and failSwapOn is true: run swapoff -a, or set failSwapOn: false (--fail-swap-on=false)",
            swaps.join(", ")
        ));
    }
    if config.protects_kernel {
        refusals.extend(unprotected());
    }
    refusals
}

/// Fails if the agent must not start on this machine; otherwise sets the limits of this process.
pub fn prepare(config: &Config) -> anyhow::Result<()> {
    let refusals = refusals(config);
    if !refusals.is_empty() {
        bail!("{}", refusals.join("; "));
    }
    raise_open_files(config.max_open_files);
    if let Err(error) = process::set_oom_score_adj(config.oom_score_adj) {
        tracing::warn!(%error, wanted = config.oom_score_adj, "cannot set oomScoreAdj: this process may be killed before its pods when memory is short");
    }
    Ok(())
}

/// The sysctls that violate `protectKernelDefaults`.
fn unprotected() -> Option<String> {
    let wrong = KERNEL.iter().filter_map(|(name, wanted)| {
        let found = machine::sysctl(name);
        (found.parse() != Ok(*wanted)).then(|| {
            let name = name.replace('/', ".");
            format!("{name} is {found}, but must be {wanted}")
        })
    });
    let wrong: Vec<String> = wrong.collect();
    (!wrong.is_empty()).then(|| {
        format!(
            "protectKernelDefaults is true and the kernel's settings differ: {}; set them with sysctl, or set protectKernelDefaults: false",
            wrong.join("; ")
        )
    })
}

/// Raises the limit of open files to `wanted`, or as far as possible.
fn raise_open_files(wanted: u64) {
    match process::limit_open_files(wanted) {
        Ok(limit) if limit < wanted => tracing::warn!(
            wanted,
            limit,
            "the open file limit is below maxOpenFiles; raise LimitNOFILE= in the service unit"
        ),
        Ok(_) => {}
        Err(error) => {
            tracing::warn!(%error, wanted, "cannot set the open file limit (maxOpenFiles)")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_settings_that_differ_are_named() {
        let wrong = unprotected().unwrap_or_default();
        for (name, wanted) in KERNEL {
            let differs = machine::sysctl(name).parse() != Ok(wanted);
            assert_eq!(
                wrong.contains(&name.replace('/', ".")),
                differs,
                "{name}: {wrong}"
            );
        }
    }
}
