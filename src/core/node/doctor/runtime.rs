//! What a runtime tells of its own configuration (CRI's `Status`, verbose; containerd's keys, of which others have some),
//! and what is made of it and of the pod network that it names.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;

use super::judge::{fault, ok};
use super::{Finding, RuntimeFacts, Severity};

/// What a runtime tells of its own configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Details {
    /// Whether its default handler makes cgroups through systemd, as the handler's options say.
    pub systemd: Option<bool>,
    /// The image of sandboxes.
    pub sandbox_image: Option<String>,
    /// Where the configurations of pods' networks are.
    pub conf_dir: Option<PathBuf>,
    /// Where their plugins are.
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
    /// From the parts of the answer, each a document in JSON. What is not told is not known.
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
        let (told, cni) = (&loaded["PluginDirs"], &config["cni"]);
        let conf_dirs = [
            paths(&loaded["PluginConfDir"]),
            paths(&cni["confDir"]),
            vec![],
        ];
        Details {
            // What is not said there is cgroupfs.
            systemd: systemd.or(is_runc.then_some(false)),
            sandbox_image: config["sandboxImage"].as_str().map(str::to_owned),
            conf_dir: first(conf_dirs).and_then(|dirs| dirs.into_iter().next()),
            bin_dirs: first([paths(told), paths(&cni["binDirs"]), paths(&cni["binDir"])])
                .unwrap_or_default(),
        }
    }
}

/// The configuration of pods' networks that a runtime takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNetwork {
    /// Its file.
    pub file: PathBuf,
    /// Its name and its plugins, and of each whether its program is there; or why it cannot be read.
    pub content: Result<(String, Vec<(String, bool)>), String>,
}

/// What is there for pods' networks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkFacts {
    /// Where the configurations are.
    pub conf_dir: PathBuf,
    /// Where the plugins are.
    pub bin_dirs: Vec<PathBuf>,
    /// The first of the configurations by name, which is the one that counts; none where there is none.
    pub first: Option<PodNetwork>,
}

impl NetworkFacts {
    fn places(&self) -> (String, String) {
        let dirs = self.bin_dirs.iter().map(|dir| dir.display().to_string());
        let dirs = dirs.collect::<Vec<String>>().join(" or ");
        (self.conf_dir.display().to_string(), dirs)
    }
}

/// The name of a network and the plugins that it needs, as its configuration says.
///
/// # Errors
///
/// It is not one.
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

/// The runtime has no pod network.
pub(super) fn not_ready(why: &str, facts: Option<&NetworkFacts>) -> Finding {
    fault(
        Severity::Error,
        "network",
        format!("the runtime has no pod network: {why}"),
        "the node is NotReady, and only pods of the host's network start",
        how_to_install(facts),
    )
}

/// How to come by a pod network; the places are those of this runtime, as far as it tells them.
fn how_to_install(facts: Option<&NetworkFacts>) -> String {
    let (conf_dir, bin_dirs) = facts.map(NetworkFacts::places).unwrap_or_default();
    let or = |told: String, usual: &str| match told.is_empty() {
        true => usual.to_owned(),
        false => told,
    };
    format!(
        "install a network plugin: its configuration goes to {}, its programs to {}",
        or(conf_dir, "/etc/cni/net.d"),
        or(bin_dirs, "/opt/cni/bin")
    )
}

/// `is_told` is whether it has been said already that the runtime has no network.
pub(super) fn network(facts: &NetworkFacts, is_told: bool) -> Vec<Finding> {
    let no_start = "no pod with a network of its own starts: its sandbox cannot be made";
    let (conf_dir, bin_dirs) = facts.places();
    let Some(PodNetwork { file, content }) = &facts.first else {
        let finding = fault(
            Severity::Warning,
            "cni",
            format!("{conf_dir} has no network configuration, though the runtime has a network"),
            "the runtime has no pod network any more when it starts again",
            how_to_install(Some(facts)),
        );
        return Vec::from_iter((!is_told).then_some(finding));
    };
    let file = file.display();
    let (name, plugins) = match content {
        Ok(content) => content,
        Err(why) => {
            let found = format!("{file} is not a network configuration: {why}");
            let remedy =
                format!("python3 -m json.tool {file}; or remove it, if another one counts");
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

/// The remedy where network namespaces are hidden.
pub const UNHIDE: &str =
    "umount -R /run/netns; namespaces that `ip netns add` made since then lose their names";

/// Network namespaces of sandboxes that a mount over their directory hides.
pub(super) fn hidden(namespaces: &[PathBuf]) -> Option<Finding> {
    let first = namespaces.first()?;
    let found = format!(
        "a mount over /run/netns hides {} network namespaces of pods, among them {}: probably the first `ip netns add` of this boot",
        namespaces.len(),
        first.display()
    );
    let leads_to =
        "their sandboxes cannot be stopped (device or resource busy): the pods stay Terminating";
    Some(fault(Severity::Error, "netns", found, leads_to, UNHIDE))
}

/// What the runtime's configuration says besides what is seen of it.
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
            "sandboxes cannot be made in the pods' cgroups: no pod starts",
            format!(
                "sed -i 's/SystemdCgroup = {systemd}/SystemdCgroup = {wants_systemd}/' /etc/containerd/config.toml; systemctl restart containerd"
            ),
        ));
    }
    if let Some((image, false)) = &facts.sandbox_image {
        findings.push(fault(
            Severity::Warning,
            "runtime",
            format!("the image of sandboxes, {image}, is not here"),
            "the first pod waits for its pull, and none starts where its registry cannot be reached",
            format!("crictl pull {image}"),
        ));
    }
    findings
}
