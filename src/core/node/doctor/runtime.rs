//! The runtime's own configuration, from the verbose response of the CRI call `Status`, and the evaluation of that
//! configuration and of the CNI network. The keys are containerd's; some other runtimes use the same ones.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;

use super::{Finding, RuntimeFacts, Severity, fault, ok};

/// The runtime's configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Details {
    /// Whether the default handler's options select the systemd cgroup driver.
    pub systemd: Option<bool>,
    /// The sandbox image.
    pub sandbox_image: Option<String>,
    /// Directory of CNI configurations.
    pub conf_dir: Option<PathBuf>,
    /// Directories of CNI plugins.
    pub bin_dirs: Vec<PathBuf>,
}

fn paths(value: &Value) -> Vec<PathBuf> {
    let many = value.as_array().into_iter().flatten();
    let texts = many.chain([value]).filter_map(Value::as_str);
    texts
        .filter(|text| !text.is_empty())
        .map(PathBuf::from)
        .collect()
}

impl Details {
    /// Parses the parts of the response, each a JSON document. Missing fields are unknown.
    #[must_use]
    pub fn of(info: &BTreeMap<String, String>) -> Details {
        let part = |name: &str| -> Value {
            let text = info.get(name).map_or("null", String::as_str);
            serde_json::from_str(text).unwrap_or_default()
        };
        let (config, loaded) = (part("config"), part("cniconfig"));
        let handlers = &config["containerd"];
        let default = handlers["defaultRuntimeName"].as_str().unwrap_or("runc");
        let handler = &handlers["runtimes"][default];
        let is_runc = handler["runtimeType"]
            .as_str()
            .is_some_and(|kind| kind.starts_with("io.containerd.runc."));
        let systemd = handler["options"]["SystemdCgroup"].as_bool();
        let first = |lists: [Vec<PathBuf>; 3]| lists.into_iter().find(|list| !list.is_empty());
        let (plugin_dirs, cni) = (&loaded["PluginDirs"], &config["cni"]);
        let conf_dirs = [
            paths(&loaded["PluginConfDir"]),
            paths(&cni["confDir"]),
            vec![],
        ];
        Details {
            // A runc handler without this option uses cgroupfs.
            systemd: systemd.or(is_runc.then_some(false)),
            sandbox_image: config["sandboxImage"].as_str().map(str::to_owned),
            conf_dir: first(conf_dirs).and_then(|dirs| dirs.into_iter().next()),
            bin_dirs: first([
                paths(plugin_dirs),
                paths(&cni["binDirs"]),
                paths(&cni["binDir"]),
            ])
            .unwrap_or_default(),
        }
    }
}

/// The CNI configuration that the runtime uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNetwork {
    /// Path of the configuration.
    pub file: PathBuf,
    /// The network's name and its plugins, each with whether its executable exists; or why the file cannot be parsed.
    pub content: Result<(String, Vec<(String, bool)>), String>,
}

/// CNI configuration on the machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkFacts {
    /// Directory of CNI configurations.
    pub conf_dir: PathBuf,
    /// Directories of CNI plugins.
    pub bin_dirs: Vec<PathBuf>,
    /// The first configuration by file name, which the runtime uses; `None` if there is none.
    pub first: Option<PodNetwork>,
}

impl NetworkFacts {
    fn directories(&self) -> (String, String) {
        let dirs = self.bin_dirs.iter().map(|dir| dir.display().to_string());
        let dirs = dirs.collect::<Vec<String>>().join(" or ");
        (self.conf_dir.display().to_string(), dirs)
    }
}

/// The network name and plugin types in a CNI configuration.
///
/// # Errors
///
/// The text is not a CNI configuration.
pub fn parse_network(text: &str) -> Result<(String, Vec<String>), String> {
    let config: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
    let list = config["plugins"].as_array();
    let single = std::slice::from_ref(&config);
    let plugins = list.map_or(single, Vec::as_slice).iter();
    let types = plugins.map(|plugin| {
        let kind = plugin["type"].as_str().filter(|kind| !kind.is_empty());
        kind.map(str::to_owned)
            .ok_or_else(|| "a plugin without a type".to_owned())
    });
    let types = types.collect::<Result<Vec<String>, String>>()?;
    match config["name"].as_str() {
        Some(name) if !types.is_empty() => Ok((name.to_owned(), types)),
        Some(_) => Err("no plugins".into()),
        None => Err("no name".into()),
    }
}

/// Finding: the runtime has no pod network.
pub(super) fn not_ready(why: &str, facts: Option<&NetworkFacts>) -> Finding {
    fault(
        Severity::Error,
        "network",
        format!("the runtime has no pod network: {why}"),
        "the node is NotReady, and only host-network pods start",
        how_to_install(facts),
    )
}

/// How to install a network plugin, with the runtime's directories if they are known.
fn how_to_install(facts: Option<&NetworkFacts>) -> String {
    let (conf_dir, bin_dirs) = facts.map(NetworkFacts::directories).unwrap_or_default();
    let or = |known: String, usual: &str| match known.is_empty() {
        true => usual.to_owned(),
        false => known,
    };
    format!(
        "install a network plugin: its configuration goes to {}, its binaries to {}",
        or(conf_dir, "/etc/cni/net.d"),
        or(bin_dirs, "/opt/cni/bin")
    )
}

/// Findings about the CNI configuration. `already_reported` is whether a missing network was already reported.
pub(super) fn network(facts: &NetworkFacts, already_reported: bool) -> Vec<Finding> {
    let no_start = "only host-network pods start: the sandboxes of others cannot be created";
    let (conf_dir, bin_dirs) = facts.directories();
    let Some(PodNetwork { file, content }) = &facts.first else {
        let finding = fault(
            Severity::Warning,
            "cni",
            format!(
                "{conf_dir} has no network configuration, although the runtime's network is ready"
            ),
            "the runtime has no pod network after its next restart",
            how_to_install(Some(facts)),
        );
        return Vec::from_iter((!already_reported).then_some(finding));
    };
    let file = file.display();
    let (name, plugins) = match content {
        Ok(content) => content,
        Err(why) => {
            let found = format!("{file} is not a network configuration: {why}");
            let remedy = format!(
                "find the error with python3 -m json.tool {file}, or remove the file if another one is right"
            );
            return vec![fault(Severity::Error, "cni", found, no_start, remedy)];
        }
    };
    let missing = plugins.iter().filter(|(_, is_there)| !is_there);
    let missing: Vec<&str> = missing.map(|(kind, _)| kind.as_str()).collect();
    if missing.is_empty() {
        let kinds: Vec<&str> = plugins.iter().map(|(kind, _)| kind.as_str()).collect();
        let found = format!("network {name} ({file}) with {}", kinds.join(", "));
        return vec![ok("cni", found)];
    }
    let missing = missing.join(", ");
    vec![fault(
        Severity::Error,
        "cni",
        format!("network {name} ({file}) needs {missing}, which is not in {bin_dirs}"),
        no_start,
        format!(
            "tar -xzf cni-plugins-linux-*.tgz -C {bin_dirs} for the common plugins; others come with the cluster's network: kubectl -n kube-system get daemonsets"
        ),
    )]
}

/// Remedy for hidden network namespaces.
pub(crate) const UNHIDE: &str =
    "umount -R /run/netns; namespaces that `ip netns add` has created since then lose their names";

/// Finding: a mount over their directory hides the network namespaces of sandboxes.
pub(super) fn hidden(namespaces: &[PathBuf]) -> Option<Finding> {
    let first = namespaces.first()?;
    let found = format!(
        "a mount over /run/netns hides {} network namespaces of pods, among them {}; the probable cause is the first `ip netns add` of this boot",
        namespaces.len(),
        first.display()
    );
    let leads_to =
        "their sandboxes cannot be stopped (device or resource busy): the pods stay Terminating";
    Some(fault(Severity::Error, "netns", found, leads_to, UNHIDE))
}

/// Findings about the runtime's configuration.
pub(super) fn configured(facts: &RuntimeFacts, wants_systemd: bool) -> Vec<Finding> {
    let mut findings = vec![];
    let handlers = facts
        .handler_systemd
        .filter(|_| facts.systemd_cgroups.is_none());
    if let Some(systemd) = handlers.filter(|systemd| *systemd != wants_systemd) {
        let wanted = if wants_systemd { "systemd" } else { "cgroupfs" };
        findings.push(fault(
            Severity::Error,
            "cgroups",
            format!("cgroupDriver is {wanted}, and the runtime's handler has SystemdCgroup = {systemd}"),
            "sandboxes cannot be created in the pods' cgroups: no pod starts",
            format!(
                "sed -i 's/SystemdCgroup = {systemd}/SystemdCgroup = {wants_systemd}/' /etc/containerd/config.toml; systemctl restart containerd"
            ),
        ));
    }
    if let Some((image, false)) = &facts.sandbox_image {
        findings.push(fault(
            Severity::Warning,
            "runtime",
            format!("the sandbox image {image} is not on this machine"),
            "the first pod waits for its pull, and no pod starts if its registry cannot be reached",
            format!("crictl pull {image}"),
        ));
    }
    findings
}
