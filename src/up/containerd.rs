//! Configures a private containerd with its own root, state, socket and CNI directories. A containerd of the system is
//! left unchanged.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};

use super::images;
use super::messages;
use super::settings::{Dirs, Settings};
use holdfast_cri::{CriClient, Runtime as _};
use holdfast_sys::process::find_program;
use holdfast_sys::selinux;

/// Whether this process may lower `oom_score_adj`. If not, containerd must be configured not to try it.
fn may_lower_oom_score() -> bool {
    const CAP_SYS_RESOURCE: u64 = 1 << 24;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|l| l.strip_prefix("CapEff:"))
        .and_then(|h| u64::from_str_radix(h.trim(), 16).ok());
    effective.is_some_and(|caps| caps & CAP_SYS_RESOURCE != 0)
}

fn toml(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}

/// Properties of the machine that containerd's configuration depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// Whether systemd creates the cgroups.
    pub systemd: bool,
    /// Whether an SELinux policy is loaded. Without `enable_selinux`, containerd gives no container a label, whatever
    /// its pod requests.
    pub selinux: bool,
}

impl Machine {
    /// Detects this machine. `systemd` is the agent's cgroup driver, because agent and containerd must use the same
    /// one.
    #[must_use]
    pub fn detect(systemd: bool) -> Machine {
        Machine {
            systemd,
            selinux: selinux::has_selinux(),
        }
    }
}

/// The directories with a `hosts.toml` for each registry: those of the cluster and of the machine. containerd uses the first one
/// that has the registry, and reads it at each pull.
fn registries(dirs: &Dirs) -> PathBuf {
    let own = dirs.data.join("certs.d");
    PathBuf::from(format!("{}:/etc/containerd/certs.d", own.display()))
}

/// Returns containerd's configuration file.
#[must_use]
pub fn config(settings: &Settings, machine: Machine) -> String {
    let Machine { systemd, selinux } = machine;
    let dirs = &settings.dirs;
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "version = 2\nroot = {}\nstate = {}\n\n[grpc]\n  address = {}\n\n[plugins.\"io.containerd.internal.v1.opt\"]\n  path = {}\n",
        toml(&dirs.data.join("containerd/root")),
        toml(&dirs.run.join("containerd")),
        toml(&dirs.socket()),
        toml(&dirs.data.join("containerd/opt")),
    );
    let _ = writeln!(
        text,
        "[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = \"{}\"\n  stream_server_address = \"127.0.0.1\"\n  restrict_oom_score_adj = {}\n  enable_selinux = {selinux}\n\n  [plugins.\"io.containerd.grpc.v1.cri\".registry]\n    config_path = {}\n\n  [plugins.\"io.containerd.grpc.v1.cri\".cni]\n    bin_dir = {}\n    conf_dir = {}\n\n  [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n    runtime_type = \"io.containerd.runc.v2\"\n    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]\n      SystemdCgroup = {systemd}",
        images::PAUSE,
        !may_lower_oom_score(),
        toml(&registries(dirs)),
        toml(&dirs.data.join("cni/bin")),
        toml(&dirs.data.join("cni/net.d")),
    );
    text
}

/// Refuses a runtime that has pods of another kubelet: two agents on one runtime would stop each other's pods. A pod of
/// ours has a directory below `agent`.
pub async fn reject_foreign_pods(endpoint: &str, agent: &Path) -> anyhow::Result<()> {
    let runtime =
        CriClient::new(endpoint, Duration::from_secs(10), None).map_err(anyhow::Error::msg)?;
    let listed = runtime.list().await;
    let listed = listed.with_context(|| format!("the pods of {endpoint} cannot be listed"))?;
    let is_ours = |uid: &str| agent.join("pods").join(uid).is_dir();
    let others: Vec<_> = listed.iter().filter(|pod| !is_ours(&pod.uid)).collect();
    match others.as_slice() {
        [] => Ok(()),
        [pod, ..] => bail!(messages::foreign_pods(
            endpoint,
            others.len(),
            (&pod.namespace, &pod.name)
        )),
    }
}

/// Returns the CNI configuration of the pod network. Pods of other nodes see the addresses of this node's pods, so packets to
/// them are not masqueraded.
#[must_use]
pub fn network(settings: &Settings) -> serde_json::Value {
    serde_json::json!({
        "cniVersion": "1.0.0", "name": settings.name, "plugins": [{
            "type": "bridge", "bridge": settings.bridge, "isDefaultGateway": true, "ipMasq": true, "hairpinMode": true,
            "ipMasqExcept": settings.ranges.cluster,
            "ipam": {"type": "host-local", "dataDir": settings.dirs.data.join("cni/networks"), "ranges": [[{"subnet": settings.ranges.pods}]]},
        }, {"type": "portmap", "capabilities": {"portMappings": true}}],
    })
}

/// Installs the CNI plugins of this build.
pub fn install_plugins(settings: &Settings) -> anyhow::Result<()> {
    let bin = settings.dirs.data.join("cni/bin");
    let source = cni_binary()?;
    let installed = std::process::Command::new(&source)
        .arg("install")
        .arg(&bin)
        .output();
    let installed = installed.with_context(|| format!("{} cannot be run", source.display()))?;
    if !installed.status.success() {
        bail!("{}", String::from_utf8_lossy(&installed.stderr).trim());
    }
    Ok(())
}

fn network_file(settings: &Settings) -> PathBuf {
    settings.dirs.data.join("cni/net.d/10-holdfast.conflist")
}

/// Returns the address range of the pods in the network's configuration; `None` if there is none.
pub fn pod_range(settings: &Settings) -> Option<ipnet::Ipv4Net> {
    let text = std::fs::read(network_file(settings)).ok()?;
    let network: serde_json::Value = serde_json::from_slice(&text).ok()?;
    let range = network.pointer("/plugins/0/ipam/ranges/0/0/subnet")?;
    range.as_str()?.parse().ok()
}

/// The template of a joined node's network: the agent adds the Node's range.
pub(super) fn network_template(settings: &Settings) -> PathBuf {
    network_file(settings).with_extension("template")
}

/// Writes the template of a joined node's network.
pub(super) fn write_template(settings: &Settings) -> anyhow::Result<()> {
    let (file, mut network) = (network_template(settings), network(settings));
    if let Some(ipam) = network.pointer_mut("/plugins/0/ipam")
        && let Some(fields) = ipam.as_object_mut()
    {
        fields.remove("ranges");
    }
    if let Some(dir) = file.parent() {
        std::fs::create_dir_all(dir)?;
    }
    holdfast_sys::file::replace(&file, network.to_string().as_bytes())
        .with_context(|| format!("{} cannot be written", file.display()))
}

/// Writes the network's configuration, unless it is unchanged.
pub fn write_network(settings: &Settings) -> anyhow::Result<()> {
    let (file, text) = (network_file(settings), network(settings).to_string());
    if let Some(dir) = file.parent() {
        std::fs::create_dir_all(dir)?;
    }
    if std::fs::read_to_string(&file).is_ok_and(|is| is == text) {
        return Ok(());
    }
    holdfast_sys::file::replace(&file, text.as_bytes())
        .with_context(|| format!("{} cannot be written", file.display()))
}

fn cni_binary() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let places = [
        own.with_file_name("holdfast-cni"),
        PathBuf::from("/usr/lib/holdfast/holdfast-cni"),
        PathBuf::from("/opt/cni/bin/holdfast-cni"),
    ];
    places
        .iter()
        .find(|p| p.is_file())
        .cloned()
        .with_context(|| messages::no_plugins(&own))
}

/// Waits until a runtime answers CRI v1 at `endpoint`, as long as `alive` returns true.
pub async fn wait_ready(
    endpoint: &str,
    patience: Duration,
    alive: impl Fn() -> bool,
) -> anyhow::Result<String> {
    let client =
        CriClient::new(endpoint, Duration::from_secs(5), None).map_err(anyhow::Error::msg)?;
    let deadline = tokio::time::Instant::now() + patience;
    loop {
        match client.version().await {
            Ok(version) => return Ok(version),
            Err(error) if tokio::time::Instant::now() > deadline || !alive() => {
                bail!(messages::no_runtime(endpoint, &error.to_string()))
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

/// Imports the bundled images that are missing or outdated.
pub fn import_images(settings: &Settings, endpoint: &str) -> anyhow::Result<()> {
    let ctr = find_program("ctr").context(messages::NO_CTR)?;
    let address = endpoint.trim_start_matches("unix://");
    let run = |arguments: &[&str]| -> anyhow::Result<std::process::Output> {
        Command::new(&ctr)
            .args(["--address", address, "--namespace", "k8s.io"])
            .args(arguments)
            .output()
            .context("ctr cannot be run")
    };
    let listed = run(&["images", "list", "--quiet"])?;
    let present = String::from_utf8_lossy(&listed.stdout).into_owned();
    for (name, archive) in images::write_bundled(&settings.dirs.data.join("images"))? {
        // Archives of one build are equal; another build has other digests.
        let stamp = settings
            .dirs
            .data
            .join("images")
            .join(format!("{}.imported", name.replace(['/', ':'], "_")));
        let current = images::digest(&std::fs::read(&archive)?);
        if present.lines().any(|l| l == name)
            && std::fs::read_to_string(&stamp).is_ok_and(|s| s == current)
        {
            continue;
        }
        let output = run(&["images", "import", &archive.display().to_string()])?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr);
            bail!(messages::not_imported(&name, why.trim()));
        }
        std::fs::write(stamp, current)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_containerd_configuration_matches_the_machine() {
        let endpoint = Some("unix:///nosuch".into());
        let settings = Settings::new("t", endpoint, 1).await;
        let settings = settings.expect("settings");
        for (systemd, selinux) in [(true, false), (false, true)] {
            let text = config(&settings, Machine { systemd, selinux });
            assert!(
                text.contains(&format!("\n  enable_selinux = {selinux}\n")),
                "{text}"
            );
            assert!(
                text.contains(&format!("SystemdCgroup = {systemd}")),
                "{text}"
            );
            let registries =
                "config_path = \"/var/lib/holdfast-t/certs.d:/etc/containerd/certs.d\"";
            assert!(text.contains(registries), "{text}");
        }
    }
}
