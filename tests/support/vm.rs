//! A virtual machine with the distribution's kernel, for what the kernel at hand lacks. It runs one test of the binary that
//! starts it, from a memory disk: nothing is installed, and nothing outlives it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What the kernel's command line says of such a machine.
const MARK: &str = "holdfast.vm";
/// How long it may take.
const PATIENCE: Duration = Duration::from_secs(240);

/// A memory disk in the `newc` format.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    made: BTreeSet<PathBuf>,
}

impl Archive {
    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        let pad = |bytes: &mut Vec<u8>| bytes.resize(bytes.len().next_multiple_of(4), 0);
        let fields = [0, mode, 0, 0, 1, 0, u32::try_from(content.len()).unwrap(), 0, 0, 0, 0, u32::try_from(path.len() + 1).unwrap(), 0];
        self.bytes.extend(b"070701");
        self.bytes.extend(fields.iter().flat_map(|f| format!("{f:08x}").into_bytes()));
        self.bytes.extend(path.as_bytes());
        self.bytes.push(0);
        pad(&mut self.bytes);
        self.bytes.extend(content);
        pad(&mut self.bytes);
    }

    fn dir(&mut self, path: &Path) {
        let parents: Vec<&Path> = path.ancestors().filter(|p| p.file_name().is_some()).collect();
        for dir in parents.into_iter().rev() {
            if self.made.insert(dir.into()) {
                self.entry(dir.strip_prefix("/").unwrap_or(dir).to_str().unwrap(), 0o040_755, b"");
            }
        }
    }

    fn file(&mut self, path: &Path, content: &[u8]) {
        if self.made.contains(path) {
            return;
        }
        self.dir(path.parent().unwrap());
        self.made.insert(path.into());
        self.entry(path.strip_prefix("/").unwrap_or(path).to_str().unwrap(), 0o100_755, content);
    }

    /// A program with the libraries that it is linked to.
    fn program(&mut self, at: &Path, program: &Path) {
        self.file(at, &std::fs::read(program).unwrap());
        let linked = Command::new("ldd").arg(program).output().unwrap();
        let text = String::from_utf8(linked.stdout).unwrap();
        for library in text.split_whitespace().filter(|word| word.starts_with('/')).map(Path::new) {
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

/// Boots a machine with these modules, loaded in their order, and these programs of ours; there it runs the ignored test
/// `name` of this binary. Without a kernel to boot (`make test` has one) nothing is tested.
pub fn run(name: &str, modules: &[&str], programs: &[&str]) {
    let Some(kernel) = std::env::var_os("HOLDFAST_KERNEL").map(PathBuf::from) else {
        eprintln!("HOLDFAST_KERNEL is not set: {name} is not run (make test sets it)");
        return;
    };
    let mut disk = Archive::default();
    for dir in ["/proc", "/sys", "/dev", "/tmp", "/run"] {
        disk.dir(Path::new(dir));
    }
    disk.program(Path::new("/bin/busybox"), Path::new("/bin/busybox"));
    disk.program(Path::new("/test"), &std::env::current_exe().unwrap());
    for program in programs {
        disk.program(Path::new(program), Path::new(program));
    }
    let mut init = String::from("#!/bin/busybox sh\nexport PATH=/sbin:/usr/sbin:/bin:/usr/bin\n");
    init += "for kind in proc sysfs devtmpfs; do at=$kind; case $kind in sysfs) at=sys;; devtmpfs) at=dev;; esac; busybox mount -t $kind $kind /$at; done\n";
    for module in modules {
        let (name, options) = module.split_once(' ').unwrap_or((module, ""));
        let file = find(&kernel.join("lib/modules"), &|found| found == format!("{name}.ko")).unwrap_or_else(|| panic!("no module {name}"));
        let at = PathBuf::from(format!("/modules/{name}.ko"));
        disk.file(&at, &std::fs::read(file).unwrap());
        init += &format!("busybox insmod {} {options} || echo cannot load {name}\n", at.display());
    }
    init += &format!("/test --exact {name} --ignored --nocapture --test-threads=1\necho VM-ENDED-WITH $?\nbusybox poweroff -f\n");
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
            "1024",
            "-smp",
            "1",
            "-display",
            "none",
            "-monitor",
            "none",
            "-nodefaults",
            "-no-reboot",
        ])
        .arg("-serial")
        .arg(format!("file:{}", console.display()))
        .arg("-kernel")
        .arg(boot)
        .arg("-initrd")
        .arg(&image)
        .args(["-append", &format!("console=ttyS0 quiet panic=-1 {MARK}")])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while machine.try_wait().unwrap().is_none() {
        if begun.elapsed() > PATIENCE {
            machine.kill().unwrap();
            machine.wait().unwrap();
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let said = String::from_utf8_lossy(&std::fs::read(&console).unwrap()).into_owned();
    assert!(said.contains("VM-ENDED-WITH 0") && said.contains("1 passed"), "in the virtual machine:\n{said}");
}
