//! The generated code is that of the protocol files. protox reads them, so no `protoc` is needed.

use std::collections::BTreeMap;
use std::path::Path;

/// The vendored protocol files.
const FILES: [&str; 14] = [
    "cri/v1/api.proto",
    "grpc/health/v1/health.proto",
    "containerd/events/v1/events.proto",
    "containerd/content/v1/content.proto",
    "containerd/tasks/v1/tasks.proto",
    "containerd/containers/v1/containers.proto",
    "csi/v1/csi.proto",
    "pluginregistration/v1/api.proto",
    "deviceplugin/v1beta1/api.proto",
    "podresources/v1/api.proto",
    "podresources/v1alpha1/api.proto",
    "dra/v1/api.proto",
    "dra/v1beta1/api.proto",
    "drahealth/v1alpha1/api.proto",
];

/// Texts of the files of a directory, by name.
fn read(dir: &Path) -> BTreeMap<String, String> {
    let entries = std::fs::read_dir(dir).unwrap().map(Result::unwrap);
    entries
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, std::fs::read_to_string(entry.path()).unwrap())
        })
        .collect()
}

/// With `HOLDFAST_UPDATE=1` (`make proto`), the committed code is replaced.
#[test]
fn the_committed_code_is_generated_from_the_protocol_files() {
    let root = &Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let committed = root.join("generated");
    let dir = tempfile::tempdir().unwrap();
    let files = protox::compile(FILES, [root]).unwrap();
    tonic_prost_build::configure()
        .build_server(true)
        .build_transport(false)
        // The protocol files have the comments.
        .disable_comments(["."])
        .out_dir(dir.path())
        .compile_fds(files)
        .unwrap();
    let generated = read(dir.path());
    if std::env::var_os("HOLDFAST_UPDATE").is_some() {
        for name in read(&committed).into_keys() {
            std::fs::remove_file(committed.join(name)).unwrap();
        }
        for (name, text) in &generated {
            std::fs::write(committed.join(name), text).unwrap();
        }
    }
    let present = read(&committed);
    let names: Vec<&String> = generated.keys().collect();
    assert_eq!(present.keys().collect::<Vec<_>>(), names, "run make proto");
    for (name, text) in generated {
        assert!(present[&name] == text, "{name} is outdated: run make proto");
    }
}
