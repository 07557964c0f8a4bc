//! The command line. `holdfast agent` takes the kubelet's own flag names; a binary called `kubelet` is
//! the agent.

pub mod fields;

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::core::version::Wanted;

/// A node agent for Kubernetes, with a minimal control plane to try it on one machine.
#[derive(Parser)]
#[command(name = "holdfast", version, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The agent under the kubelet's name.
#[derive(Parser)]
#[command(
    name = "kubelet",
    disable_version_flag = true,
    about = "The Holdfast node agent, as a drop-in kubelet",
    max_term_width = 100
)]
pub struct KubeletCli {
    /// Which version to print.
    #[command(flatten)]
    pub version: VersionFlag,
    /// The agent's flags.
    #[command(flatten)]
    pub agent: AgentFlags,
}

/// The kubelet's `--version`.
#[derive(Args, Debug, Clone)]
pub struct VersionFlag {
    /// Print the Kubernetes version and exit; `raw` prints all its fields.
    #[arg(long = "version", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true",
        hide_default_value = true, value_name = "BOOL|raw")]
    pub wanted: Wanted,
}

/// What to do.
#[derive(Subcommand)]
pub enum Command {
    /// Start a cluster on this machine: containerd, control plane and agent.
    Up(UpFlags),
    /// Stop the cluster and remove everything its pods had on this machine.
    Down(DownFlags),
    /// Print the cluster's kubeconfig.
    Kubeconfig {
        /// The cluster's name.
        #[arg(long, default_value = "holdfast")]
        name: String,
    },
    /// Explain why a pod is not running.
    Explain {
        /// Which agent is asked.
        #[command(flatten)]
        agent: AskedAgent,
        /// Of what.
        #[command(subcommand)]
        what: Explained,
    },
    /// Remove images that nothing uses and dead containers as the agent's next pass would, and say what stays because of what.
    ///
    /// Images go when the disk that they are on is fuller than imageGCHighThresholdPercent, those that were used least
    /// recently first, until it is down to imageGCLowThresholdPercent; and those that nothing has used for longer than
    /// imageMaximumGCAge. Images that a pod or a container uses, that the runtime pins, or that came less than
    /// imageMinimumGCAge ago stay. When an image was used last is known since the agent started. Of each container of a
    /// pod the last dead instance stays (--maximum-dead-containers-per-container of the agent). Needs root.
    Gc(GcFlags),
    /// Audit the addresses that host-local has allocated.
    Ipam {
        /// How.
        #[command(subcommand)]
        what: Ipam,
    },
    /// Run the node agent against an apiserver, as the kubelet does.
    #[command(args_conflicts_with_subcommands = true)]
    Agent {
        /// What to do with an agent that runs already.
        #[command(subcommand)]
        running: Option<Running>,
        /// Which version to print.
        #[command(flatten)]
        version: VersionFlag,
        /// The agent's flags.
        #[command(flatten)]
        flags: Box<AgentFlags>,
    },
    /// Say what on this machine keeps a node or its pods from running, what it leads to, and the remedy. Nothing is
    /// changed; exits with 1 if there is an error. Needs root.
    Doctor(Box<DoctorFlags>),
    /// Decide again what an agent recorded, and show where this program decides otherwise. Exits with 1 if it does.
    Replay {
        /// A file that `holdfast agent record` wrote; - is standard input.
        file: PathBuf,
    },
    /// Run the control plane (`up` does this).
    #[command(hide = true)]
    ControlPlane(ControlPlaneFlags),
    /// Run a part of a cluster and start it again when it ends (`up` does this).
    #[command(hide = true)]
    Supervise(SuperviseFlags),
}

/// What `holdfast up` can do besides.
#[derive(Subcommand)]
pub enum UpWhat {
    /// Say what of the cluster runs, and what was started again.
    Status {
        /// The cluster's name.
        #[arg(long, default_value = "holdfast")]
        name: String,
    },
}

/// Flags of `holdfast supervise`.
#[derive(Args)]
pub struct SuperviseFlags {
    /// The part.
    #[arg(long)]
    pub part: String,
    /// Where its pid file lies.
    #[arg(long)]
    pub run: PathBuf,
    /// Where its log lies.
    #[arg(long)]
    pub logs: PathBuf,
    /// Become the part instead, if this process still starts it: note its pid, then run the program in its place.
    #[arg(long, value_name = "PID")]
    pub r#for: Option<u32>,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    pub command: Vec<String>,
}

/// What can be done about addresses.
#[derive(Subcommand)]
pub enum Ipam {
    /// Show which addresses host-local has given out, which of them nobody can use any more, and which two containers have
    /// at once. Exits with 1 if there are such. Needs root. (`host-local audit` is the same, where only the plugins are.)
    Audit(AuditFlags),
}

/// Flags of `holdfast ipam audit`.
#[derive(Args)]
pub struct AuditFlags {
    /// The cluster of `holdfast up` whose addresses are meant, in place of the machine's own.
    #[arg(long, conflicts_with = "data_dir")]
    pub name: Option<String>,
    /// Where host-local keeps its networks.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/cni/networks")]
    pub data_dir: PathBuf,
    /// Where the runtime keeps results, which say where containers are that another host-local has given addresses.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/cni/results")]
    pub cache_dir: PathBuf,
    /// Only this network.
    #[arg(long)]
    pub network: Option<String>,
    /// Release what nobody can use any more.
    #[arg(long)]
    pub mend: bool,
    /// Release only what was reserved longer ago than this: a younger reservation may belong to a pod that is starting.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub older_than: u64,
}

/// What can be explained.
#[derive(Subcommand)]
pub enum Explained {
    /// A pod on this node: the step that blocks it, why, since when, and when it is tried again; where the
    /// time of its start went. Needs root.
    Pod(ExplainFlags),
}

/// How an explanation is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// All that is known, for programs.
    Json,
    /// The timeline as a picture.
    Svg,
}

/// What can be asked of a running agent.
#[derive(Subcommand)]
pub enum Running {
    /// Write what a pod's worker was told and what it decided, for a bug report. `holdfast replay` reads it.
    Record {
        /// Which agent is asked.
        #[command(flatten)]
        agent: AskedAgent,
        /// Of what.
        #[command(subcommand)]
        what: Recorded,
    },
}

/// Whose turns are recorded.
#[derive(Subcommand)]
pub enum Recorded {
    /// A pod on this node, also one that has just gone. The record contains the pod's spec and status with the values of
    /// its environment, but nothing of Secrets. Needs root.
    Pod(RecordFlags),
}

/// Flags of `holdfast agent record pod`.
#[derive(Args)]
pub struct RecordFlags {
    /// Which pod.
    #[command(flatten)]
    pub pod: PodOfAgent,
    /// Write it to this file instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// A pod, as its agent knows it.
#[derive(Args)]
pub struct PodOfAgent {
    /// The pod's name.
    pub pod: String,
    /// Its namespace.
    #[arg(short, long, default_value = "default")]
    pub namespace: String,
}

/// An agent that runs on this machine. The flags may stand before what is asked, or after it.
#[derive(Args)]
pub struct AskedAgent {
    /// The cluster that `holdfast up --name` started.
    #[arg(long, value_name = "NAME", global = true)]
    pub name: Option<String>,
    /// The agent's root directory [default: that of the running `holdfast up`, else /var/lib/kubelet].
    #[arg(long, value_name = "DIR", conflicts_with = "name", global = true)]
    pub root_dir: Option<PathBuf>,
}

impl AskedAgent {
    /// Refuses both flags at once: clap does not see that where one stands before what is asked and the other after it.
    pub fn check(&self) -> Result<(), &'static str> {
        match (&self.name, &self.root_dir) {
            (Some(_), Some(_)) => {
                Err("--name and --root-dir cannot be used together: each names an agent")
            }
            _ => Ok(()),
        }
    }
}

/// Flags of `holdfast gc`.
#[derive(Args)]
pub struct GcFlags {
    /// Which agent is asked.
    #[command(flatten)]
    pub agent: AskedAgent,
    /// Remove nothing: say what would go.
    #[arg(long)]
    pub dry_run: bool,
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t = Findings::Text)]
    pub output: Findings,
}

/// Flags of `holdfast explain pod`.
#[derive(Args)]
pub struct ExplainFlags {
    /// Which pod.
    #[command(flatten)]
    pub pod: PodOfAgent,
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

/// How findings are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Findings {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// Flags of `holdfast doctor`.
#[derive(Args)]
pub struct DoctorFlags {
    /// The cluster of `holdfast up` whose node is meant [default: that of the running `holdfast up`, else the node whose
    /// kubelet kubeadm set up].
    #[arg(long, value_name = "CLUSTER", conflicts_with = "config")]
    pub name: Option<String>,
    /// How to print what was found.
    #[arg(short, long, value_enum, default_value_t = Findings::Text)]
    pub output: Findings,
    /// The agent's flags: what they say is looked at.
    #[command(flatten)]
    pub agent: AgentFlags,
}

/// Flags of `holdfast up`.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct UpFlags {
    /// What to do instead of starting it.
    #[command(subcommand)]
    pub what: Option<UpWhat>,
    /// The cluster's name; clusters of different names do not touch each other.
    #[arg(long, default_value = "holdfast")]
    pub name: String,
    /// Use this containerd instead of starting a private one, for instance unix:///run/containerd/containerd.sock. It needs a CNI network of its own.
    #[arg(long, value_name = "URL")]
    pub containerd_endpoint: Option<String>,
    /// The port of the API, on 127.0.0.1 and the node's address.
    #[arg(long, default_value_t = 6443)]
    pub api_port: u16,
    /// Another address for the API to listen on; 0.0.0.0 is every address of this machine. May be given several times.
    #[arg(long, value_name = "ADDRESS")]
    pub api_bind_address: Vec<IpAddr>,
    /// The port of the agent's HTTP API [default: 10250 beside API port 6443, else 1000 above the API's].
    #[arg(long, value_name = "PORT")]
    pub agent_port: Option<u16>,
    /// The addresses of the pods.
    #[arg(long, default_value = "10.244.0.0/24")]
    pub pod_cidr: ipnet::Ipv4Net,
    /// A KubeletConfiguration for the agent: its fields win over what the cluster sets by itself.
    #[arg(long, value_name = "FILE")]
    pub agent_config: Option<PathBuf>,
    /// Start no control plane: this machine becomes a node of the cluster that the node's kubeconfig names (system:node:NAME, as kubelet.conf has it).
    #[arg(long, value_name = "KUBECONFIG")]
    pub join: Option<PathBuf>,
    /// The name of the node [default: this machine's name].
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
}

/// Flags of `holdfast down`.
#[derive(Args)]
pub struct DownFlags {
    /// The cluster's name.
    #[arg(long, default_value = "holdfast")]
    pub name: String,
    /// The containerd that the cluster was started with, if it was not a private one.
    #[arg(long, value_name = "URL")]
    pub containerd_endpoint: Option<String>,
    /// Remove the cluster's data too: objects, certificates, images.
    #[arg(long)]
    pub purge: bool,
}

/// Flags of the control plane.
#[derive(Args)]
pub struct ControlPlaneFlags {
    /// Where store and certificates lie.
    #[arg(long)]
    pub dir: PathBuf,
    /// The port of the API, on 127.0.0.1 and the address of --advertise-address.
    #[arg(long, default_value_t = 6443)]
    pub api_port: u16,
    /// Another address for the API to listen on; 0.0.0.0 is every address of this machine. May be given several times.
    #[arg(long, value_name = "ADDRESS")]
    pub bind_address: Vec<IpAddr>,
    /// The address under which nodes and pods reach it.
    #[arg(long)]
    pub advertise_address: IpAddr,
}

/// Flags of the agent; the names are the kubelet's.
#[derive(Args, Debug, Clone, Default)]
pub struct AgentFlags {
    /// A KubeletConfiguration file; flags win over it.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A directory of `*.conf` files that are merged over it, in the order of their names.
    #[arg(long, value_name = "DIR")]
    pub config_dir: Option<PathBuf>,
    /// The kubeconfig of the apiserver. Without one only static pods run.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// A kubeconfig with which the node's first certificate is asked for, if --kubeconfig has none that can be used.
    #[arg(long, value_name = "FILE")]
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// The node's name instead of the host name.
    #[arg(long, value_name = "NAME")]
    pub hostname_override: Option<String>,
    /// The node's address, or two of different families separated by a comma, which this machine must have; 0.0.0.0 or ::
    /// to choose the family alone. Without it the address is what the node's name resolves to, if this machine has that,
    /// else that of the interface with the default route.
    #[arg(long, value_name = "IP")]
    pub node_ip: Option<String>,
    /// `external` where a cloud controller initialises the node and sets its addresses.
    #[arg(long, value_name = "PROVIDER")]
    pub cloud_provider: Option<String>,
    /// Where the agent keeps its files [default: /var/lib/kubelet].
    #[arg(long, value_name = "DIR")]
    pub root_dir: Option<PathBuf>,
    /// Where certificates lie [default: <root-dir>/pki].
    #[arg(long, value_name = "DIR")]
    pub cert_dir: Option<PathBuf>,
    /// Where device plugins find the agent's socket and have their own; they look for it there whatever the root directory is
    /// [default: /var/lib/kubelet/device-plugins].
    #[arg(long, value_name = "DIR")]
    pub device_plugin_dir: Option<PathBuf>,
    /// Labels for the node when it registers, key=value separated by commas. Of a Node that exists already, those for zone,
    /// region and instance type are kept as the flag has them; others are the administrator's.
    #[arg(long, value_name = "LABELS")]
    pub node_labels: Option<String>,
    /// Whether to make the Node object [default: true].
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub register_node: Option<bool>,
    /// The runtime's socket [default: unix:///run/containerd/containerd.sock].
    #[arg(long, value_name = "URL")]
    pub container_runtime_endpoint: Option<String>,
    /// The directory of static pods.
    #[arg(long, value_name = "DIR")]
    pub pod_manifest_path: Option<PathBuf>,
    /// The cgroup below which `kubepods` is made.
    #[arg(long, value_name = "PATH")]
    pub cgroup_root: Option<String>,
    /// How many pods the node takes [default: 110].
    #[arg(long, value_name = "N")]
    pub max_pods: Option<i64>,
    /// The cluster's DNS servers, separated by commas.
    #[arg(long, value_name = "IPS")]
    pub cluster_dns: Option<String>,
    /// The cluster's domain.
    #[arg(long, value_name = "DOMAIN")]
    pub cluster_domain: Option<String>,
    /// The configuration of credential provider plugins, a file or a directory.
    #[arg(long, value_name = "PATH")]
    pub image_credential_provider_config: Option<PathBuf>,
    /// Where these plugins lie.
    #[arg(long, value_name = "DIR")]
    pub image_credential_provider_bin_dir: Option<PathBuf>,
    /// Which pods a start without an apiserver begins: `never` and `static-only` static ones alone, `after=5m` and the like
    /// also those that were bound to the node before, once no apiserver has answered for so long, `always` these at once.
    /// What that takes is kept encrypted in <root-dir>/sealed; with `never` nothing is kept [default: static-only].
    #[arg(long, value_name = "WHEN")]
    pub offline_start: Option<String>,
    /// How many dead containers stay on the node; below 0 for any number [default: -1].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub maximum_dead_containers: Option<i32>,
    /// How many dead instances of each container of a pod stay; below 0 for any number [default: 1].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub maximum_dead_containers_per_container: Option<i32>,
    /// A container that was made less than this ago stays when it has ended [default: 0s].
    #[arg(long, value_name = "DURATION")]
    pub minimum_container_ttl_duration: Option<String>,
    /// Look at the configuration, the runtime and the apiserver, say what a start would do to pods, and end.
    #[arg(long)]
    pub check: bool,
    /// Log verbosity: 0 to 2 for information, 4 for debugging, more for tracing.
    #[arg(short = 'v', long = "v", default_value_t = 0, value_name = "LEVEL")]
    pub verbosity: u8,
}

impl AgentFlags {
    /// The flags as overrides of a configuration file.
    #[must_use]
    pub fn overrides(&self) -> crate::config::Overrides {
        crate::config::Overrides {
            hostname: self.hostname_override.clone(),
            node_ip: self.node_ip.clone(),
            cloud_provider: self.cloud_provider.clone(),
            kubeconfig: self.kubeconfig.clone(),
            bootstrap_kubeconfig: self.bootstrap_kubeconfig.clone(),
            verbosity: self.verbosity,
            root_dir: self.root_dir.clone(),
            cert_dir: self.cert_dir.clone(),
            device_plugin_dir: self.device_plugin_dir.clone(),
            node_labels: self.node_labels.clone(),
            register_node: self.register_node,
            runtime_endpoint: self.container_runtime_endpoint.clone(),
            static_pod_path: self.pod_manifest_path.clone(),
            cgroup_root: self.cgroup_root.clone(),
            max_pods: self.max_pods,
            cluster_dns: self.cluster_dns.clone(),
            cluster_domain: self.cluster_domain.clone(),
            credential_providers: self.image_credential_provider_config.clone(),
            credential_programs: self.image_credential_provider_bin_dir.clone(),
            offline_start: self.offline_start.clone(),
            maximum_dead_containers: self.maximum_dead_containers,
            maximum_dead_containers_per_container: self.maximum_dead_containers_per_container,
            minimum_container_ttl_duration: self.minimum_container_ttl_duration.clone(),
        }
    }
}

/// The table of the agent's flags for the documentation.
#[must_use]
pub fn flags_table() -> String {
    use clap::CommandFactory as _;
    let command = KubeletCli::command();
    let mut rows: Vec<String> = command
        .get_arguments()
        .filter_map(|a| {
            let name = a.get_long()?;
            let help = a
                .get_help()
                .map(ToString::to_string)
                .unwrap_or_default()
                .replace('|', "\\|");
            Some(format!("| `--{name}` | {help} |\n"))
        })
        .collect();
    rows.sort();
    format!("| Flag | |\n|---|---|\n{}", rows.concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn which_agent_is_asked_may_be_said_before_and_after_what() {
        for arguments in [
            ["record", "--root-dir", "/r", "pod", "p"],
            ["record", "pod", "--root-dir", "/r", "p"],
            ["record", "pod", "p", "--root-dir", "/r"],
        ] {
            let all = ["holdfast", "agent"].into_iter().chain(arguments);
            let Command::Agent {
                running: Some(Running::Record { agent, .. }),
                ..
            } = Cli::try_parse_from(all).expect("parses").command
            else {
                panic!("{arguments:?} is another command");
            };
            assert_eq!(agent.root_dir, Some("/r".into()), "{arguments:?}");
        }
        let one = ["holdfast", "explain", "--name", "n", "pod", "p"];
        let both = one.into_iter().chain(["--root-dir", "/r"]).collect();
        for (arguments, is_clear) in [(one.to_vec(), true), (both, false)] {
            let Command::Explain { agent, .. } =
                Cli::try_parse_from(&arguments).expect("parses").command
            else {
                panic!("{arguments:?} is another command");
            };
            assert_eq!(agent.check().is_ok(), is_clear, "{arguments:?}");
        }
    }

    #[test]
    fn flags_are_consistent_and_take_go_style_booleans() {
        Cli::command().debug_assert();
        KubeletCli::command().debug_assert();
        for (arguments, expected) in [
            (vec!["kubelet"], None),
            (vec!["kubelet", "--register-node"], Some(true)),
            (vec!["kubelet", "--register-node=false"], Some(false)),
        ] {
            let cli = KubeletCli::try_parse_from(arguments).expect("parses");
            assert_eq!(cli.agent.register_node, expected);
        }
        assert_eq!(
            KubeletCli::try_parse_from(["kubelet", "--v=4"])
                .expect("parses")
                .agent
                .verbosity,
            4
        );
    }
}
