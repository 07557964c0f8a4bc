//! A virtual machine with the distribution's kernel, for what the kernel at hand lacks. It runs one test of the binary that
//! starts it, from a memory disk: nothing is installed, and nothing outlives it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What the kernel's command line says of such a machine.
const MARK: &str = "holdfast.vm";
/// How long it may take: its processor is emulated, on a machine that may be busy.
const RUN_TIMEOUT: Duration = Duration::from_secs(2700);

/// A memory disk in the `newc` format.
#[derive(Default)]
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

    /// A program with the libraries that it is linked to.
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

/// Whether this is such a machine.
pub fn is_inside() -> bool {
    std::fs::read_to_string("/proc/cmdline").is_ok_and(|line| line.contains(MARK))
}

fn kernel(name: &str) -> Option<PathBuf> {
    let found = std::env::var_os("HOLDFAST_MACHINE").map(PathBuf::from);
    if found.is_none() {
        crate::skip::skipped(&format!(
            "{name} needs the virtual machine that `make test` makes; HOLDFAST_MACHINE is not set"
        ));
    }
    found
}

/// The beginning of what a machine does first.
const INIT: &str = "#!/bin/busybox sh
export PATH=/sbin:/usr/sbin:/bin:/usr/bin
for kind in proc sysfs devtmpfs; do at=$kind; case $kind in sysfs) at=sys;; devtmpfs) at=dev;; esac; busybox mount -t $kind $kind /$at; done
";

/// A memory disk with busybox and these modules, and the beginning of its `init`, which loads them.
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
        // With those that it needs, in their order.
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

/// Boots it, and waits for the test's end.
fn boot(kernel: &Path, mut disk: Archive, init: &str, more: &[&str]) {
    disk.file(Path::new("/init"), init.as_bytes());
    disk.entry("TRAILER!!!", 0, b"");
    let work = tempfile::tempdir().unwrap();
    let (image, console) = (work.path().join("initrd"), work.path().join("console"));
    std::fs::write(&image, disk.bytes).unwrap();
    let boot = find(&kernel.join("boot"), &|found| found.starts_with("vmlinuz")).expect("a kernel");
    let mut machine = Command::new("qemu-system-x86_64")
        .args([
            "-machine",
            "q35,accel=tcg",
            "-cpu",
            "max",
            "-m",
            "2048",
            "-smp",
            "2",
            "-display",
            "none",
            "-monitor",
            "none",
            "-nodefaults",
        ])
        .args([
            "-no-reboot",
            "-serial",
            &format!("file:{}", console.display()),
            "-kernel",
        ])
        .arg(boot)
        .arg("-initrd")
        .arg(&image)
        .args([
            "-append",
            &format!("console=ttyS0 quiet panic=-1 systemd.unified_cgroup_hierarchy=1 systemd.default_timeout_start_sec=900 {MARK}"),
        ])
        .args(more)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while machine.try_wait().unwrap().is_none() {
        if begun.elapsed() > RUN_TIMEOUT {
            machine.kill().unwrap();
            machine.wait().unwrap();
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let said = String::from_utf8_lossy(&std::fs::read(&console).unwrap()).into_owned();
    assert!(
        said.contains("VM-ENDED-WITH 0") && said.contains("1 passed"),
        "in the virtual machine:\n{said}"
    );
}

/// How it ended is said twice, and with time to be written: the kernel may speak in between, and what is not written when
/// the machine goes is lost.
fn test(name: &str) -> String {
    let said = "echo VM-ENDED-WITH $code; busybox sleep 2";
    format!("/test --exact {name} --ignored --nocapture --test-threads=1; code=$?; {said}; {said}")
}

/// Boots a machine that has only these modules, loaded in their order, and these programs of ours; there it runs the ignored
/// test `name` of this binary. Without a kernel to boot (`make test` has one) nothing is tested.
pub fn run(name: &str, modules: &[&str], programs: &[&str]) {
    let Some(kernel) = kernel(name) else { return };
    let (mut disk, mut init) = begin(&kernel, modules);
    disk.program(Path::new("/test"), &std::env::current_exe().unwrap());
    for program in programs {
        disk.program(Path::new(program), Path::new(program));
    }
    init += &format!("{}\nbusybox poweroff -f\n", test(name));
    boot(&kernel, disk, &init, &[]);
}

/// The same with a whole Debian, with systemd, containerd and cgroup v2; the programs lie where they lie here.
pub fn run_on_node(name: &str, programs: &[PathBuf]) {
    let Some(kernel) = kernel(name) else { return };
    let virtio = ["virtio_pci", "virtio_blk"];
    let (mut disk, mut init) = begin(&kernel, &virtio);
    let stripped = tempfile::tempdir().unwrap();
    let mut carry = |at: &Path, program: &Path| {
        // What nobody debugs there need not be carried there.
        let small = stripped.path().join("program");
        let status = Command::new("strip")
            .arg("-o")
            .arg(&small)
            .arg(program)
            .status()
            .unwrap();
        let program = if status.success() { &*small } else { program };
        disk.file(
            &Path::new("/carried").join(at.strip_prefix("/").unwrap()),
            &std::fs::read(program).unwrap(),
        );
    };
    carry(Path::new("/test"), &std::env::current_exe().unwrap());
    for program in programs {
        // Directories may be links there too.
        let dir = std::fs::canonicalize(program.parent().unwrap()).unwrap();
        carry(
            &dir.join(program.file_name().unwrap()),
            &std::fs::canonicalize(program).unwrap(),
        );
    }
    let unit = "[Unit]\nAfter=multi-user.target\n[Service]\nType=idle\nExecStart=/run-test\nStandardOutput=tty\nStandardError=tty\nTTYPath=/dev/ttyS0\n";
    disk.file(
        Path::new("/unit/etc/systemd/system/test.service"),
        unit.as_bytes(),
    );
    // Only now: what lies in temporary directories is removed while the node comes up.
    let script = format!(
        "#!/bin/sh\nexport HOME=/root HOLDFAST_TEST_TIMEOUT=600\ncp -a /carried/. /\n{}\nsystemctl poweroff --force --force\n",
        test(name)
    );
    disk.file(Path::new("/unit/run-test"), script.as_bytes());
    // The disk may come a moment after its driver.
    init += "n=0; until busybox test -b /dev/vda || busybox test $n -ge 300; do n=$((n+1)); busybox sleep 0.2; done\n";
    init += "busybox mount -t ext4 /dev/vda /node && busybox cp -a /unit/. /node/ && busybox cp -a /carried /node/\n";
    init += "busybox mkdir -p /node/etc/systemd/system/multi-user.target.wants\n";
    init += "busybox ln -s ../test.service /node/etc/systemd/system/multi-user.target.wants/test.service\n";
    init += "for at in proc sys dev; do busybox umount -l /$at; done\nexec busybox switch_root /node /sbin/init\n";
    let drive = format!(
        "file={},if=virtio,format=raw,snapshot=on",
        kernel.join("node.img").display()
    );
    boot(&kernel, disk, &init, &["-drive", &drive]);
}
