//! Parses the kernel's messages about processes that it kills because the machine is out of memory
//! (`pkg/kubelet/oom/oom_watcher_linux.go`). Pure.
//!
//! Kills by the memory limit of a cgroup are ignored here, because the runtime reports them.

/// A process that was killed because the machine was out of memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kill {
    /// Process name from the kernel log.
    pub process: String,
    /// Process id.
    pub pid: u32,
}

impl Kill {
    fn of(process: &str, pid: &str) -> Option<Kill> {
        Some(Kill {
            process: process.to_owned(),
            pid: pid.parse().ok()?,
        })
    }

    /// Message of the kubelet's event.
    #[must_use]
    pub fn message(&self) -> String {
        let Kill { process, pid } = self;
        format!("System OOM encountered, victim process: {process}, pid: {pid}")
    }
}

/// Parses the kernel log record by record. Kernels before 5.0 report a kill in several records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reader {
    /// Set while the records of one kill are being read; whether the kill is system-wide.
    machine: Option<bool>,
}

/// The text of a `/dev/kmsg` record, if the kernel wrote it. Other programs can also write there, but their records
/// have other facilities.
fn of_kernel(record: &str) -> Option<&str> {
    const FACILITIES: u32 = 8;
    let (prefix, text) = record.split_once(';')?;
    let level: u32 = prefix.split(',').next()?.parse().ok()?;
    (level < FACILITIES).then_some(text)
}

/// The process in a line such as `Killed process 1234 (name) total-vm:...`. The name may contain parentheses.
fn killed(text: &str) -> Option<Kill> {
    let (_, victim) = text.split_once("Killed process ")?;
    let (pid, name) = victim.split_once(" (")?;
    let name = name
        .split_once(") total-vm")
        .or_else(|| name.rsplit_once(')'))?;
    Kill::of(name.0, pid.trim_end_matches(','))
}

impl Reader {
    /// Parses a record; returns the process if the record completes a system-wide kill.
    pub fn read(&mut self, record: &str) -> Option<Kill> {
        let text = of_kernel(record)?;
        if text.contains("invoked oom-killer:") {
            self.machine = Some(true);
            return None;
        }
        if let Some(fields) = text.strip_prefix("oom-kill:constraint=") {
            self.machine = None;
            let of = |from: &str| Some(fields.split_once(from)?.1);
            let limit = of(",oom_memcg=").and_then(|rest| rest.split(',').next());
            let is_of_machine = limit.is_none_or(|cgroup| cgroup == "/");
            let (name, ids) = of(",task=")?.rsplit_once(",pid=")?;
            let kill = Kill::of(name, ids.split(',').next()?);
            return kill.filter(|_| is_of_machine);
        }
        let of_machine = self.machine?;
        if let Some((_, limit)) = text.split_once(" killed as a result of limit of ") {
            self.machine = Some(limit.trim() == "/");
            return None;
        }
        let kill = killed(text)?;
        self.machine = None;
        let of_machine = of_machine && !text.starts_with("Memory cgroup out of memory");
        Some(kill).filter(|_| of_machine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Case = (
        &'static str,
        &'static [&'static str],
        &'static [(&'static str, u32)],
    );

    const CASES: [Case; 8] = [
        (
            "the machine, since 5.0",
            &[
                "4,2100,500,-;stress-ng-brk invoked oom-killer: gfp_mask=0x100dca(GFP_HIGHUSER_MOVABLE|__GFP_ZERO), order=0, oom_score_adj=1000",
                "4,2101,500,-;CPU: 1 PID: 212 Comm: stress-ng-brk Not tainted 5.10.0 #4",
                "6,2102,500,-;Tasks state (memory values in pages):",
                "6,2103,500,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/kubepods/burstable/pod1/c1,task=stress-ng-brk,pid=213,uid=0",
                "3,2104,500,-;Out of memory: Killed process 213 (stress-ng-brk) total-vm:1048572kB, anon-rss:94172kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:232kB oom_score_adj:1000",
                "6,2105,500,-;oom_reaper: reaped process 213 (stress-ng-brk), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
            ],
            &[("stress-ng-brk", 213)],
        ),
        (
            "a container at its limit",
            &[
                "4,3000,900,-;tail invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=999",
                "6,3001,900,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c1,mems_allowed=0,oom_memcg=/kubepods/burstable/pod1/c1,task_memcg=/kubepods/burstable/pod1/c1,task=tail,pid=4711,uid=0",
                "3,3002,900,-;Memory cgroup out of memory: Killed process 4711 (tail) total-vm:465176kB, anon-rss:102168kB, file-rss:640kB, shmem-rss:0kB, UID:0 pgtables:252kB oom_score_adj:999",
            ],
            &[],
        ),
        (
            "all pods at their limit",
            &[
                "6,3001,900,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c1,mems_allowed=0,oom_memcg=/kubepods,task_memcg=/kubepods/burstable/pod1/c1,task=tail,pid=4711,uid=0",
            ],
            &[],
        ),
        (
            "a process of no cgroup, and one of a NUMA node",
            &[
                "6,1,900,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/,task=a, b (c),pid=17,uid=1000",
                "6,2,900,-;oom-kill:constraint=CONSTRAINT_MEMORY_POLICY,nodemask=0,cpuset=/,mems_allowed=0-1,global_oom,task_memcg=/system.slice/x.service,task=db,pid=18,uid=0",
            ],
            &[("a, b (c)", 17), ("db", 18)],
        ),
        (
            "the machine, before 5.0",
            &[
                "4,10,7,-;java invoked oom-killer: gfp_mask=0x6280ca(GFP_HIGHUSER_MOVABLE|__GFP_ZERO), nodemask=(null), order=0, oom_score_adj=0",
                "3,11,7,-;Out of memory: Kill process 1287 (java) score 901 or sacrifice child",
                "3,12,7,-;Killed process 1287 (java) total-vm:4194304kB, anon-rss:3670016kB, file-rss:0kB, shmem-rss:0kB",
            ],
            &[("java", 1287)],
        ),
        (
            "a container at its limit, before 5.0",
            &[
                "4,10,7,-;ruby invoked oom-killer: gfp_mask=0x14000c0(GFP_KERNEL), nodemask=(null), order=0, oom_score_adj=939",
                "6,11,7,-;Task in /kubepods/burstable/pod1/c1 killed as a result of limit of /kubepods/burstable/pod1/c1",
                "3,12,7,-;Memory cgroup out of memory: Kill process 13536 (ruby) score 1990 or sacrifice child",
                "3,13,7,-;Killed process 13536 (ruby) total-vm:1212340kB, anon-rss:1043540kB, file-rss:8940kB, shmem-rss:0kB",
            ],
            &[],
        ),
        (
            "the middle was overwritten before it was read",
            &[
                "3,13,7,-;Killed process 13536 (ruby) total-vm:1212340kB, anon-rss:1043540kB, file-rss:8940kB, shmem-rss:0kB",
                "4,20,7,-;tail invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=999",
                "3,29,7,-;Memory cgroup out of memory: Killed process 4711 (tail) total-vm:465176kB, anon-rss:102168kB",
            ],
            &[],
        ),
        (
            "lines of other programs, and lines that are no records",
            &[
                "12,20,7,-;x invoked oom-killer: gfp_mask=0",
                "12,21,7,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/,task=x,pid=1,uid=0",
                "11,22,7,-;Killed process 1 (x) total-vm:1kB",
                " SUBSYSTEM=memory",
                "",
                ";",
                "x,1;Killed process 1 (x)",
                "6,23,7,-;oom-kill:constraint=CONSTRAINT_NONE,task_memcg=/,task=x,pid=many,uid=0",
            ],
            &[],
        ),
    ];

    #[test]
    fn only_system_oom_kills_emit_events() {
        for (name, records, expected) in CASES {
            let mut reader = Reader::default();
            let found: Vec<Kill> = records.iter().filter_map(|r| reader.read(r)).collect();
            let found: Vec<(&str, u32)> =
                found.iter().map(|k| (k.process.as_str(), k.pid)).collect();
            assert_eq!(found, expected, "{name}");
        }
        let kill = Kill {
            process: "java".into(),
            pid: 1287,
        };
        assert_eq!(
            kill.message(),
            "System OOM encountered, victim process: java, pid: 1287"
        );
    }
}
