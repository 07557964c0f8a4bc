//! The bundled images: pause and demo, packed as OCI archives from the programs inside this binary.

use std::collections::HashMap;
use std::path::Path;

use oci_spec::image::{
    Arch, ConfigBuilder, DescriptorBuilder, ImageConfigurationBuilder, ImageIndexBuilder,
    ImageManifestBuilder, MediaType, OciLayoutBuilder, Os, RootFsBuilder, Sha256Digest,
};

/// The image of every sandbox.
pub const PAUSE: &str = "holdfast.local/pause:1";
/// The demo image; the second version is for trying a rollout.
pub const DEMO: [&str; 2] = ["holdfast.local/demo:1", "holdfast.local/demo:2"];

const PAUSE_PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pause"));
const WEB_PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/web"));

/// A file of an image.
pub struct ImageFile<'a> {
    /// The path without a leading slash.
    pub path: &'a str,
    /// The content.
    pub content: &'a [u8],
    /// The mode.
    pub mode: u32,
}

/// An image to pack.
pub struct Image<'a> {
    /// Its name with tag.
    pub name: &'a str,
    /// The files of its only layer.
    pub files: Vec<ImageFile<'a>>,
    /// The entry point.
    pub entrypoint: Vec<String>,
    /// The environment as `K=V`.
    pub env: Vec<String>,
}

/// The SHA-256 of bytes in hexadecimal.
#[must_use]
pub fn digest(bytes: &[u8]) -> String {
    holdfast_core::digest::sha256(bytes)
}

fn append<W: std::io::Write>(
    tar: &mut tar::Builder<W>,
    path: &str,
    content: &[u8],
    mode: u32,
) -> std::io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(mode);
    header.set_entry_type(tar::EntryType::Regular);
    header.set_cksum();
    tar.append_data(&mut header, path, content)
}

/// Packs an image as an OCI archive that `ctr images import` reads.
pub fn pack(image: &Image<'_>) -> anyhow::Result<Vec<u8>> {
    let mut layer = tar::Builder::new(Vec::new());
    for file in &image.files {
        append(&mut layer, file.path, file.content, file.mode)?;
    }
    let layer = layer.into_inner()?;
    let arch: Arch = match std::env::consts::ARCH {
        "x86_64" => Arch::Amd64,
        "aarch64" => Arch::ARM64,
        other => Arch::Other(other.into()),
    };
    let settings = ConfigBuilder::default()
        .entrypoint(image.entrypoint.clone())
        .env(image.env.clone())
        .build()?;
    let rootfs = RootFsBuilder::default()
        .typ("layers")
        .diff_ids(vec![format!("sha256:{}", digest(&layer))])
        .build()?;
    let config = ImageConfigurationBuilder::default()
        .architecture(arch)
        .os(Os::Linux)
        .config(settings)
        .rootfs(rootfs)
        .build()?;
    let config = serde_json::to_vec(&config)?;
    let describe = |kind: MediaType, bytes: &[u8]| -> anyhow::Result<oci_spec::image::Descriptor> {
        let digest: Sha256Digest = digest(bytes).parse()?;
        Ok(DescriptorBuilder::default()
            .media_type(kind)
            .size(bytes.len() as u64)
            .digest(digest)
            .build()?)
    };
    let manifest = ImageManifestBuilder::default()
        .schema_version(2u32)
        .media_type(MediaType::ImageManifest)
        .config(describe(MediaType::ImageConfig, &config)?)
        .layers(vec![describe(MediaType::ImageLayer, &layer)?])
        .build()?;
    let manifest = serde_json::to_vec(&manifest)?;
    let mut named = describe(MediaType::ImageManifest, &manifest)?;
    named.set_annotations(Some(HashMap::from([(
        "io.containerd.image.name".to_owned(),
        image.name.to_owned(),
    )])));
    let index = ImageIndexBuilder::default()
        .schema_version(2u32)
        .manifests(vec![named])
        .build()?;
    let layout = OciLayoutBuilder::default()
        .image_layout_version("1.0.0")
        .build()?;
    let mut archive = tar::Builder::new(Vec::new());
    append(
        &mut archive,
        "oci-layout",
        &serde_json::to_vec(&layout)?,
        0o644,
    )?;
    append(
        &mut archive,
        "index.json",
        &serde_json::to_vec(&index)?,
        0o644,
    )?;
    for blob in [&layer, &config, &manifest] {
        append(
            &mut archive,
            &format!("blobs/sha256/{}", digest(blob)),
            blob,
            0o644,
        )?;
    }
    Ok(archive.into_inner()?)
}

/// Packs the bundled images into `dir` and returns their archives by name.
pub fn write_bundled(dir: &Path) -> anyhow::Result<Vec<(String, std::path::PathBuf)>> {
    std::fs::create_dir_all(dir)?;
    let mut archives = Vec::new();
    let pause = Image {
        name: PAUSE,
        files: vec![ImageFile {
            path: "pause",
            content: PAUSE_PROGRAM,
            mode: 0o755,
        }],
        entrypoint: vec!["/pause".into()],
        env: vec![],
    };
    let demo = |name, version: &str| Image {
        name,
        files: vec![ImageFile {
            path: "web",
            content: WEB_PROGRAM,
            mode: 0o755,
        }],
        entrypoint: vec!["/web".into()],
        env: vec![format!("VERSION={version}")],
    };
    for image in [pause, demo(DEMO[0], "1"), demo(DEMO[1], "2")] {
        let file = dir.join(format!("{}.tar", image.name.replace(['/', ':'], "_")));
        std::fs::write(&file, pack(&image)?)?;
        archives.push((image.name.to_owned(), file));
    }
    Ok(archives)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether an ELF file of 64 bits has a PT_INTERP segment.
    fn has_interpreter(elf: &[u8]) -> bool {
        let number = |at: usize, size: usize| {
            elf[at..at + size]
                .iter()
                .rev()
                .fold(0usize, |n, b| n << 8 | usize::from(*b))
        };
        let (start, size, count) = (number(32, 8), number(54, 2), number(56, 2));
        (0..count).any(|i| number(start + i * size, 4) == 3)
    }

    #[test]
    fn the_bundled_programs_need_no_libraries_and_exit_on_sigterm() {
        use nix::sys::signal::{Signal, kill};
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().expect("a directory");
        for (name, program) in [("pause", PAUSE_PROGRAM), ("web", WEB_PROGRAM)] {
            assert!(
                !has_interpreter(program),
                "{name} must not need a dynamic linker"
            );
            let file = dir.path().join(name);
            std::fs::write(&file, program).expect("written");
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755))
                .expect("executable");
            // Until a child of another test calls exec, it keeps this file open for writing, too.
            let began = std::time::Instant::now();
            let mut child = loop {
                let mut command = std::process::Command::new(&file);
                match command.arg("0").stdout(std::process::Stdio::null()).spawn() {
                    Err(error)
                        if error.kind() == std::io::ErrorKind::ExecutableFileBusy
                            && began.elapsed().as_secs() < 60 => {}
                    started => break started.expect("started"),
                }
            };
            let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).expect("a pid"));
            // Ready once the handler is installed: SIGTERM is bit 14 of the caught signals.
            let caught = |status: &str| {
                status
                    .lines()
                    .find_map(|l| l.strip_prefix("SigCgt:"))
                    .and_then(|h| u64::from_str_radix(h.trim(), 16).ok())
            };
            while caught(&std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs"))
                .is_none_or(|c| c & (1 << 14) == 0)
            {
                assert!(
                    child.try_wait().expect("waited").is_none(),
                    "{name} exited before SIGTERM"
                );
            }
            kill(pid, Signal::SIGTERM).expect("SIGTERM is sent");
            assert_eq!(child.wait().expect("waited").code(), Some(0), "{name}");
        }
    }

    #[test]
    fn images_are_packed_with_matching_digests() {
        let image = Image {
            name: "x/y:1",
            files: vec![ImageFile {
                path: "a",
                content: b"1",
                mode: 0o644,
            }],
            entrypoint: vec!["/a".into()],
            env: vec![],
        };
        let archive = pack(&image).expect("packed");
        let mut tar = tar::Archive::new(archive.as_slice());
        let mut blobs = 0;
        for entry in tar.entries().expect("entries") {
            let mut entry = entry.expect("entry");
            let path = entry.path().expect("path").to_string_lossy().into_owned();
            if let Some(name) = path.strip_prefix("blobs/sha256/") {
                let mut content = Vec::new();
                std::io::Read::read_to_end(&mut entry, &mut content).expect("content");
                assert_eq!(digest(&content), name);
                blobs += 1;
            }
        }
        assert_eq!(blobs, 3);
    }
}
