//! Images of the tests: Debian's static busybox, imported with containerd's own client.

use std::path::Path;

use super::{Cluster, command_with_timeout, succeeded};

/// Runs containerd's own client in one of its namespaces; it must succeed.
pub fn ctr(cluster: &Cluster, namespace: &str, arguments: &[&str]) -> String {
    ctr_at(&cluster.run_dir(), namespace, arguments)
}

/// As [`ctr`], for the containerd of the cluster or machine whose run directory is `run`.
pub fn ctr_at(run: &Path, namespace: &str, arguments: &[&str]) -> String {
    let socket = run.join("containerd.sock");
    let output = command_with_timeout("ctr")
        .arg("--address")
        .arg(socket)
        .args(["--namespace", namespace])
        .args(arguments)
        .output();
    succeeded(&format!("ctr {arguments:?}"), output.unwrap())
}

/// Imports a busybox image made from Debian's static busybox, and returns its name.
pub fn busybox(cluster: &Cluster) -> String {
    busybox_in(cluster, "k8s.io", "test.local/busybox:1", b"")
}

/// As [`busybox`], into a namespace of containerd and under a name; different marks produce different layers.
pub fn busybox_in(cluster: &Cluster, namespace: &str, name: &'static str, mark: &[u8]) -> String {
    let commands = [
        "sh", "cat", "echo", "busybox", "test", "grep", "wget", "sleep", "false", "true", "ls",
    ];
    import_busybox(cluster, namespace, name, mark, &commands)
}

/// As [`busybox`], without the commands as separate programs: a tenth of the size, for tests where
/// unpacking takes long.
pub fn busybox_alone(cluster: &Cluster, name: &'static str) -> String {
    import_busybox(cluster, "k8s.io", name, b"", &["busybox"])
}

fn import_busybox(
    cluster: &Cluster,
    namespace: &str,
    name: &'static str,
    mark: &[u8],
    commands: &[&str],
) -> String {
    import(&cluster.run_dir(), namespace, name, mark, commands)
}

/// As [`busybox_alone`], into the containerd of the machine whose run directory is `run`.
pub fn busybox_alone_at(run: &Path, name: &'static str) -> String {
    import(run, "k8s.io", name, b"", &["busybox"])
}

fn import(
    run: &Path,
    namespace: &str,
    name: &'static str,
    mark: &[u8],
    commands: &[&str],
) -> String {
    use holdfast::up::images::{Image, ImageFile, pack};
    let program =
        std::fs::read("/bin/busybox").expect("busybox-static is installed (make test installs it)");
    let programs = commands.iter().map(|c| format!("bin/{c}"));
    let programs: Vec<String> = programs.collect();
    let mut files = vec![ImageFile {
        path: "mark",
        content: mark,
        mode: 0o644,
    }];
    // The archive contains regular files only, so every command is a copy: a few megabytes each.
    files.extend(programs.iter().map(|path| ImageFile {
        path,
        content: &program,
        mode: 0o755,
    }));
    let image = Image {
        name,
        files,
        entrypoint: vec![],
        env: vec!["PATH=/bin".into()],
    };
    let archive = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(archive.path(), pack(&image).unwrap()).unwrap();
    ctr_at(
        run,
        namespace,
        &["images", "import", archive.path().to_str().unwrap()],
    );
    name.to_owned()
}
