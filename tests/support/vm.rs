//! A virtual machine with the distribution's kernel, for features that the running kernel lacks. The machine runs
//! one test of the binary that starts it, from an initramfs: nothing is installed, and nothing is left behind.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The marker on such a machine's kernel command line.
const MARK: &str = "holdfast.vm";
/// The timeout of a run: its processor is emulated, on a machine that may be busy.
const RUN_TIMEOUT: Duration = Duration::from_secs(2100);
/// The machine sends a heartbeat every ten seconds. After this time without one the machine counts as hung.
/// (In CI a machine was once silent for 45 minutes; whether the emulator or its host hung is unknown.)
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(300);
/// After how many seconds a node whose test still runs prints its processes and its journal. After the
/// timeout they would be lost.
const SHOW_AFTER: u32 = 1900;

/// An initramfs in the `newc` format.
#[derive(Clone, Default)]
struct Archive {
    bytes: Vec<u8>,
    made: BTreeSet<PathBuf>,
}

impl Archive {
    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        let pad = |bytes: &mut Vec<u8>| bytes.resize(bytes.len().next_multiple_of(4), 0);
        let fields = [
            0,
            mode,
            0,
            0,
            1,
            0,
            u32::try_from(content.len()).unwrap(),
            0,
            0,
            0,
            0,
            u32::try_from(path.len() + 1).unwrap(),
            0,
        ];
        self.bytes.extend(b"070701");
        self.bytes
            .extend(fields.iter().flat_map(|f| format!("{f:08x}").into_bytes()));
        self.bytes.extend(path.as_bytes());
        self.bytes.push(0);
        pad(&mut self.bytes);
        self.bytes.extend(content);
        pad(&mut self.bytes);
    }

    fn dir(&mut self, path: &Path) {
        let parents: Vec<&Path> = path
            .ancestors()
            .filter(|p| p.file_name().is_some())
            .collect();
        for dir in parents.into_iter().rev() {
            if self.made.insert(dir.into()) {
                self.entry(
                    dir.strip_prefix("/").unwrap_or(dir).to_str().unwrap(),
                    0o040_755,
                    b"",
                );
            }
        }
    }

    fn file(&mut self, path: &Path, content: &[u8]) {
        if self.made.contains(path) {
            return;
        }
        self.dir(path.parent().unwrap());
        self.made.insert(path.into());
        self.entry(
            path.strip_prefix("/").unwrap_or(path).to_str().unwrap(),
            0o100_755,
            content,
        );
    }

    /// A program with its shared libraries.
    fn program(&mut self, at: &Path, program: &Path) {
        self.file(at, &std::fs::read(program).unwrap());
        let linked = Command::new("ldd").arg(program).output().unwrap();
        let text = String::from_utf8(linked.stdout).unwrap();
        for library in text
            .split_whitespace()
            .filter(|word| word.starts_with('/'))
            .map(Path::new)
        {
            self.file(library, &std::fs::read(library).unwrap());
        }
    }
}

fn find(dir: &Path, matches: &dyn Fn(&str) -> bool) -> Option<PathBuf> {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if entry.file_type().unwrap().is_dir() {
            if let Some(found) = find(&path, matches) {
                return Some(found);
            }
        } else if matches(&entry.file_name().to_string_lossy()) {
            return Some(path);
        }
    }
    None
}

/// Whether this process runs in such a machine.
pub fn is_inside() -> bool {
    std::fs::read_to_string("/proc/cmdline").is_ok_and(|line| line.contains(MARK))
}

fn kernel(name: &str) -> Option<PathBuf> {
    let found = std::env::var_os("HOLDFAST_MACHINE").map(PathBuf::from);
    if found.is_none() {
        crate::skip::skipped(&format!("{name} needs a virtual machine"));
    }
    found
}

/// The first lines of a machine's init script.
const INIT: &str = "#!/bin/busybox sh
export PATH=/sbin:/usr/sbin:/bin:/usr/bin
for kind in proc sysfs devtmpfs; do at=$kind; case $kind in sysfs) at=sys;; devtmpfs) at=dev;; esac; busybox mount -t $kind $kind /$at; done
";

/// An initramfs with busybox and these modules, and the beginning of its `init`, which loads them.
fn begin(kernel: &Path, modules: &[&str]) -> (Archive, String) {
    let mut disk = Archive::default();
    for dir in ["/proc", "/sys", "/dev", "/tmp", "/run", "/node"] {
        disk.dir(Path::new(dir));
    }
    disk.program(Path::new("/bin/busybox"), Path::new("/bin/busybox"));
    let mut init = INIT.to_owned();
    let version = std::fs::read_dir(kernel.join("lib/modules"))
        .unwrap()
        .flatten()
        .next()
        .expect("modules")
        .file_name()
        .into_string()
        .unwrap();
    for module in modules {
        let (name, options) = module.split_once(' ').unwrap_or((module, ""));
        // With their dependencies, in order.
        let needed = Command::new("/sbin/modprobe")
            .arg("-d")
            .arg(kernel)
            .args(["-S", &version, "--show-depends", name])
            .output()
            .unwrap();
        assert!(
            needed.status.success(),
            "no module {name}: {}",
            String::from_utf8_lossy(&needed.stderr)
        );
        for file in String::from_utf8(needed.stdout)
            .unwrap()
            .lines()
            .filter_map(|line| line.strip_prefix("insmod ")?.split_whitespace().next())
            .map(PathBuf::from)
        {
            let at = Path::new("/modules").join(file.file_name().unwrap());
            let own = if file.file_stem().is_some_and(|stem| stem == name) {
                options
            } else {
                ""
            };
            if !disk.made.contains(&at) {
                init += &format!(
                    "busybox insmod {} {own} || echo cannot load {name}\n",
                    at.display()
                );
            }
            disk.file(&at, &std::fs::read(file).unwrap());
        }
    }
    (disk, init)
}

/// A running machine.
struct Machine {
    process: std::process::Child,
    console: PathBuf,
    /// The file that receives its heartbeats.
    heartbeats: PathBuf,
    _work: tempfile::TempDir,
}

impl Machine {
    /// Boots the kernel with `arguments` in addition to its own; `more` are qemu's.
    fn boot(
        kernel: &Path,
        mut disk: Archive,
        init: &str,
        arguments: &str,
        more: &[String],
    ) -> Machine {
        disk.file(Path::new("/init"), init.as_bytes());
        disk.entry("TRAILER!!!", 0, b"");
        let work = tempfile::tempdir().unwrap();
        let [image, console, heartbeats] =
            ["initrd", "console", "beats"].map(|name| work.path().join(name));
        std::fs::write(&image, disk.bytes).unwrap();
        let boot = kernel.join("boot");
        let boot = find(&boot, &|found| found.starts_with("vmlinuz")).expect("a kernel");
        let always = "-machine q35,accel=tcg -cpu max -m 2048 -display none -monitor none -nodefaults -no-reboot";
        let process = Command::new("qemu-system-x86_64")
            .args(always.split(' '))
            .args(["-serial", &format!("file:{}", console.display())])
            .args(["-serial", &format!("file:{}", heartbeats.display())])
            .arg("-kernel")
            .arg(boot)
            .arg("-initrd")
            .arg(&image)
            .args([
                "-append",
                &format!("console=ttyS0 quiet panic=-1 systemd.unified_cgroup_hierarchy=1 systemd.default_timeout_start_sec=900 {MARK} {arguments}"),
            ])
            .args(more)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Machine {
            process,
            console,
            heartbeats,
            _work: work,
        }
    }

    /// Its console output so far.
    fn console_output(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.console).unwrap_or_default()).into_owned()
    }

    fn power_off(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Waits until the machine stops, prints `until`, hangs, or reaches the timeout.
    fn wait(&mut self, until: Option<&str>) -> WaitResult {
        let begun = Instant::now();
        let (mut heartbeats, mut last_heartbeat) = (0, begun);
        while self.process.try_wait().unwrap().is_none() {
            if until.is_some_and(|until| self.console_output().contains(until)) {
                return WaitResult::Printed;
            }
            let now = std::fs::metadata(&self.heartbeats).map_or(0, |file| file.len());
            if now > heartbeats {
                (heartbeats, last_heartbeat) = (now, Instant::now());
            }
            if last_heartbeat.elapsed() > HEARTBEAT_TIMEOUT {
                self.power_off();
                return WaitResult::Hung;
            }
            if begun.elapsed() > RUN_TIMEOUT {
                self.power_off();
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        WaitResult::Exited
    }
}

#[derive(PartialEq)]
enum WaitResult {
    Printed,
    Exited,
    Hung,
}

/// The processors of a machine, as arguments of qemu.
pub const PLAIN: &str = "-smp 2";

/// Boots a machine and waits for the test's result; boots once more if the machine hangs.
fn boot(kernel: &Path, disk: Archive, init: &str, arguments: &str, more: &[String]) {
    let mut machine = Machine::boot(kernel, disk.clone(), init, arguments, more);
    if machine.wait(None) == WaitResult::Hung {
        eprintln!(
            "the virtual machine made no progress for {HEARTBEAT_TIMEOUT:?} and is booted once more; its output was:\n{}",
            machine.console_output()
        );
        machine = Machine::boot(kernel, disk, init, arguments, more);
        machine.wait(None);
    }
    let console_output = machine.console_output();
    assert!(
        console_output.contains("VM-ENDED-WITH 0") && console_output.contains("1 passed"),
        "in the virtual machine:\n{console_output}"
    );
}

fn words(arguments: &str) -> Vec<String> {
    arguments.split(' ').map(str::to_owned).collect()
}

/// Prints the test's exit code twice, and waits for the output: kernel messages may interrupt a line,
/// and unwritten output is lost at power-off.
fn test(name: &str) -> String {
    let report = "echo VM-ENDED-WITH $code; busybox sleep 2";
    let beat = "(while echo beat; do busybox sleep 10; done) >/dev/ttyS1 &";
    format!(
        "{beat}\n/test --exact {name} --ignored --nocapture --test-threads=1; code=$?; {report}; {report}"
    )
}

/// Boots a machine with only these modules, loaded in order, and these programs, and runs the ignored test
/// `name` of this binary in it. Without a kernel to boot (`make machine` fetches one) the test is skipped.
pub fn run(name: &str, modules: &[&str], programs: &[&str]) {
    let Some(kernel) = kernel(name) else { return };
    let (mut disk, mut init) = begin(&kernel, modules);
    disk.program(Path::new("/test"), &std::env::current_exe().unwrap());
    for program in programs {
        disk.program(Path::new(program), Path::new(program));
    }
    init += &format!("{}\nbusybox poweroff -f\n", test(name));
    boot(&kernel, disk, &init, "", &words(PLAIN));
}

/// A whole Debian with systemd, containerd and cgroup v2. The programs have the same paths as here.
pub struct Node {
    kernel: PathBuf,
    disk: Archive,
    init: String,
    arguments: &'static str,
}

impl Node {
    /// A node that runs the ignored test `name` of this binary. `None` without a kernel to boot (`make
    /// test` fetches one).
    pub fn new(name: &str, programs: &[PathBuf]) -> Option<Node> {
        let kernel = kernel(name)?;
        let virtio = ["virtio_pci", "virtio_blk"];
        let (mut disk, mut init) = begin(&kernel, &virtio);
        let mut carry = |at: &Path, program: &Path| {
            let at = Path::new("/carried").join(at.strip_prefix("/").unwrap());
            disk.file(&at, &stripped(program));
        };
        carry(Path::new("/test"), &std::env::current_exe().unwrap());
        for program in programs {
            // The directories may be links in the machine too.
            let dir = std::fs::canonicalize(program.parent().unwrap()).unwrap();
            carry(
                &dir.join(program.file_name().unwrap()),
                &std::fs::canonicalize(program).unwrap(),
            );
        }
        disk.file(
            Path::new("/unit/etc/systemd/system/test.service"),
            b"[Unit]\nAfter=multi-user.target\n[Service]\nType=idle\nExecStart=/run-test\nStandardOutput=tty\nStandardError=tty\nTTYPath=/dev/ttyS0\n",
        );
        // The script copies the files late: files in temporary directories are deleted while the node boots.
        let script = format!(
            "#!/bin/sh\nexport HOME=/root HOLDFAST_TEST_TIMEOUT=300\n(sleep {SHOW_AFTER}; busybox ps -o pid,ppid,stat,args; journalctl --no-pager -b -n 100) &\ncp -a /carried/. /\n{}\nsystemctl poweroff --force --force\n",
            test(name)
        );
        disk.file(Path::new("/unit/run-test"), script.as_bytes());
        // The disk may appear a moment after its driver is loaded.
        init += "n=0; until busybox test -b /dev/vda || busybox test $n -ge 300; do n=$((n+1)); busybox sleep 0.2; done\n";
        init += "busybox mount -t ext4 /dev/vda /node && busybox cp -a /unit/. /node/ && busybox cp -a /carried /node/\n";
        init += "busybox mkdir -p /node/etc/systemd/system/multi-user.target.wants\n";
        init += "busybox ln -sf ../test.service /node/etc/systemd/system/multi-user.target.wants/test.service\n";
        // A login prompt on the console that starts after the test would hang up the test's terminal.
        init += "busybox ln -sf /dev/null /node/etc/systemd/system/serial-getty@ttyS0.service\n";
        init += "for at in proc sys dev; do busybox umount -l /$at; done\nexec busybox switch_root /node /sbin/init\n";
        Some(Node {
            kernel,
            disk,
            init,
            arguments: "",
        })
    }

    /// Adds a file at its path in the machine.
    pub fn with_file(mut self, at: &Path, content: &[u8]) -> Node {
        let at = Path::new("/carried").join(at.strip_prefix("/").unwrap());
        self.disk.file(&at, content);
        self
    }

    /// Adds arguments for its kernel.
    pub fn with_kernel_arguments(mut self, arguments: &'static str) -> Node {
        self.arguments = arguments;
        self
    }

    /// Boots the node with these processors and memory (qemu's arguments). Changes to its disk are discarded.
    pub fn run(self, machine: &str) {
        let mut more = words(machine);
        more.extend(drive(&self.kernel.join("node.img"), "snapshot=on"));
        boot(&self.kernel, self.disk, &self.init, self.arguments, &more);
    }

    /// A disk that survives the machine, as a file below `dir`.
    pub fn own_disk(&self, dir: &Path) -> PathBuf {
        let own = dir.join("disk.img");
        let copied = Command::new("cp")
            .arg("--sparse=always")
            .args([&self.kernel.join("node.img"), &own])
            .status();
        assert!(copied.unwrap().success());
        own
    }

    /// Boots the node with such a disk. It runs until it powers off, or until its power is cut `after` it
    /// has printed `mark`. Returns its console output.
    pub fn run_until(&self, disk: &Path, mark: &str, after: Duration) -> String {
        let mut more = words(PLAIN);
        more.extend(drive(disk, "cache=unsafe"));
        let mut machine = Machine::boot(
            &self.kernel,
            self.disk.clone(),
            &self.init,
            self.arguments,
            &more,
        );
        if machine.wait(Some(mark)) == WaitResult::Printed {
            std::thread::sleep(after);
            machine.power_off();
        }
        machine.console_output()
    }
}

/// Removes debug symbols, which are not needed in the machine.
fn stripped(program: &Path) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let small = dir.path().join("program");
    let status = Command::new("strip")
        .arg("-o")
        .arg(&small)
        .arg(program)
        .status()
        .unwrap();
    let program = if status.success() { &small } else { program };
    std::fs::read(program).unwrap()
}

fn drive(file: &Path, how: &str) -> [String; 2] {
    let drive = format!("file={},if=virtio,format=raw,{how}", file.display());
    ["-drive".into(), drive]
}

/// Boots such a node for one test.
pub fn run_on_node(name: &str, programs: &[PathBuf]) {
    if let Some(node) = Node::new(name, programs) {
        node.run(PLAIN);
    }
}
