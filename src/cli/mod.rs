//! The command line. `holdfast agent` takes the kubelet's own flag names; a binary called `kubelet` is
//! the agent.

pub mod fields;
#[cfg(test)]
mod help;
pub mod join;
mod proxy;
mod trace;

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use holdfast_core::version::Wanted;
pub use trace::TraceFlags;

pub use proxy::ProxyFlags;

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
    /// Stop the cluster and remove its pods, mounts and network interfaces from this machine.
    Down(DownFlags),
    /// Create, list and delete the bootstrap tokens with which machines join a cluster.
    Token {
        /// The cluster.
        #[command(flatten)]
        cluster: join::AdminSelection,
        /// What to do.
        #[command(subcommand)]
        what: join::TokenCommand,
    },
    /// Add this machine to a cluster: start containerd and the agent, which requests its certificate with a bootstrap token.
    ///
    /// `holdfast token create --print-join` on the machine of the control plane prints the whole command. Needs root.
    Join(Box<join::JoinFlags>),
    /// Print the cluster's kubeconfig.
    Kubeconfig {
        /// The cluster's name.
        #[arg(long, default_value = "holdfast")]
        name: String,
    },
    /// Explain why a pod is not running.
    Explain {
        /// The agent to query.
        #[command(flatten)]
        agent: AgentSelection,
        /// What to explain.
        #[command(subcommand)]
        what: ExplainCommand,
    },
    /// Show what an object led to, with times: requests, decisions, and the steps of the agent.
    ///
    /// The objects that it owns follow, down to the pods. The bundled API keeps a bounded record of the requests and events of
    /// each object; this machine's agent adds the steps of its pods. What is not known is named.
    Trace(TraceFlags),
    /// Remove unused images and dead containers now, and print why the others stay.
    ///
    /// The agent's rules apply. If the image filesystem is fuller than imageGCHighThresholdPercent, unused images are
    /// removed until its usage is imageGCLowThresholdPercent, the least recently used first. Images that are unused for
    /// longer than imageMaximumGCAge are removed in any case. Images stay if a pod or a container uses them, if the runtime
    /// pins them, or if they were pulled less than imageMinimumGCAge ago. The agent knows when an image was last used only
    /// since its own start. The last dead instance of each container stays (the agent's
    /// --maximum-dead-containers-per-container). Needs root.
    Gc(GcFlags),
    /// Audit the addresses that host-local has allocated.
    Ipam {
        /// What to do.
        #[command(subcommand)]
        what: Ipam,
    },
    /// Run the node agent against an apiserver, as the kubelet does.
    #[command(args_conflicts_with_subcommands = true)]
    Agent {
        /// A request to the running agent.
        #[command(subcommand)]
        running: Option<AgentCommand>,
        /// Which version to print.
        #[command(flatten)]
        version: VersionFlag,
        /// The agent's flags.
        #[command(flatten)]
        flags: Box<AgentFlags>,
    },
    /// Serve this node's services in place of kube-proxy, and DNS in place of CoreDNS.
    ///
    /// Rules stay in place when the process ends. Needs root.
    Proxy(Box<ProxyFlags>),
    /// Check this machine for problems that affect the node or its pods.
    ///
    /// Prints each problem with its consequence and remedy, and changes nothing. Exits with 1 if there is an error. Needs
    /// root.
    Doctor(Box<DoctorFlags>),
    /// Replay a recorded pod worker and print the decisions that differ.
    ///
    /// Exits with 1 if any decision differs.
    Replay {
        /// A file that `holdfast agent record` wrote; - is standard input.
        file: PathBuf,
    },
    /// Run the control plane (`up` does this).
    #[command(hide = true)]
    ControlPlane(ControlPlaneFlags),
    /// Run a component of a cluster and restart it when it exits (`up` does this).
    #[command(hide = true)]
    Supervise(SuperviseFlags),
}

/// Subcommands of `holdfast up`.
#[derive(Subcommand)]
pub enum UpCommand {
    /// Print which components of the cluster run, and how often each was restarted.
    Status {
        /// The cluster's name.
        #[arg(long, default_value = "holdfast")]
        name: String,
    },
}

/// Flags of `holdfast supervise`.
#[derive(Args)]
pub struct SuperviseFlags {
    /// The component's name.
    #[arg(long)]
    pub part: String,
    /// The directory of its pid file.
    #[arg(long)]
    pub run: PathBuf,
    /// The directory of its log.
    #[arg(long)]
    pub logs: PathBuf,
    /// Become the component, if the supervisor with this pid still starts it: write the pid file, then execute the program.
    #[arg(long, value_name = "PID")]
    pub r#for: Option<u32>,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    pub command: Vec<String>,
}

/// Subcommands of `holdfast ipam`.
#[derive(Subcommand)]
pub enum Ipam {
    /// List the addresses that host-local has allocated, and which of them are leaked or allocated twice.
    ///
    /// Exits with 1 if any leaked or doubly allocated addresses remain. `host-local audit` is the same command, for
    /// machines with only the plugins. Needs root.
    Audit(AuditFlags),
}

/// Flags of `holdfast ipam audit`.
#[derive(Args)]
pub struct AuditFlags {
    /// Audit the addresses of this `holdfast up` cluster instead of --data-dir.
    #[arg(long, conflicts_with = "data_dir")]
    pub name: Option<String>,
    /// The directory in which host-local keeps its networks.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/cni/networks")]
    pub data_dir: PathBuf,
    /// The directory of the runtime's CNI results, which name the network namespaces of containers with addresses from
    /// another host-local.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/cni/results")]
    pub cache_dir: PathBuf,
    /// Only this network.
    #[arg(long)]
    pub network: Option<String>,
    /// Release leaked addresses.
    #[arg(long)]
    pub mend: bool,
    /// Release only addresses that were reserved longer ago than this: a younger reservation may belong to a starting pod.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub older_than: u64,
}

/// Subcommands of `holdfast explain`.
#[derive(Subcommand)]
pub enum ExplainCommand {
    /// A pod on this node.
    ///
    /// Prints the step that blocks the pod, why, since when, and when the agent retries, and how long each step of its start
    /// took. Needs root.
    Pod(ExplainFlags),
}

/// How an explanation is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// All details, for programs.
    Json,
    /// The timeline as an image.
    Svg,
}

/// Subcommands of `holdfast agent`.
#[derive(Subcommand)]
pub enum AgentCommand {
    /// Write the inputs and decisions of a pod worker, for a bug report.
    ///
    /// `holdfast replay` reads the record.
    Record {
        /// The agent to query.
        #[command(flatten)]
        agent: AgentSelection,
        /// What to record.
        #[command(subcommand)]
        what: RecordCommand,
    },
}

/// Subcommands of `holdfast agent record`.
#[derive(Subcommand)]
pub enum RecordCommand {
    /// A pod on this node, or one that was deleted recently.
    ///
    /// The record contains the pod's spec and status with the values of its environment variables, but no contents of
    /// Secrets. Needs root.
    Pod(RecordFlags),
}

/// Flags of `holdfast agent record pod`.
#[derive(Args)]
pub struct RecordFlags {
    /// The pod.
    #[command(flatten)]
    pub pod: PodOfAgent,
    /// Write the record to this file instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// A pod, as its agent knows it.
#[derive(Args)]
pub struct PodOfAgent {
    /// The pod's name.
    pub pod: String,
    /// The pod's namespace.
    #[arg(short, long, default_value = "default")]
    pub namespace: String,
}

/// An agent that runs on this machine. The flags may precede or follow the subcommand.
#[derive(Args)]
pub struct AgentSelection {
    /// The cluster that `holdfast up --name` started.
    #[arg(long, value_name = "NAME", global = true)]
    pub name: Option<String>,
    /// The agent's root directory [default: that of the running `holdfast up`, else /var/lib/kubelet].
    #[arg(long, value_name = "DIR", conflicts_with = "name", global = true)]
    pub root_dir: Option<PathBuf>,
}

impl AgentSelection {
    /// Rejects both flags at once: clap misses the conflict if one flag precedes the subcommand and the other follows it.
    pub fn check(&self) -> Result<(), &'static str> {
        match (&self.name, &self.root_dir) {
            (Some(_), Some(_)) => {
                Err("--name and --root-dir cannot be used together: each selects an agent")
            }
            _ => Ok(()),
        }
    }
}

/// Flags of `holdfast gc`.
#[derive(Args)]
pub struct GcFlags {
    /// The agent to query.
    #[command(flatten)]
    pub agent: AgentSelection,
    /// Remove nothing; print what would be removed.
    #[arg(long)]
    pub dry_run: bool,
    /// The output format.
    #[arg(short, long, value_enum, default_value_t = ReportFormat::Text)]
    pub output: ReportFormat,
}

/// Flags of `holdfast explain pod`.
#[derive(Args)]
pub struct ExplainFlags {
    /// The pod.
    #[command(flatten)]
    pub pod: PodOfAgent,
    /// The output format.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

/// How findings are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ReportFormat {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// Flags of `holdfast doctor`.
#[derive(Args)]
pub struct DoctorFlags {
    /// The `holdfast up` cluster whose node to check [default: the running one, else the node that kubeadm set up].
    #[arg(long, value_name = "CLUSTER", conflicts_with = "config")]
    pub name: Option<String>,
    /// The output format.
    #[arg(short, long, value_enum, default_value_t = ReportFormat::Text)]
    pub output: ReportFormat,
    /// The agent's flags, which are checked too.
    #[command(flatten)]
    pub agent: AgentFlags,
}

/// Flags of `holdfast up`.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct UpFlags {
    /// What to do instead of starting the cluster.
    #[command(subcommand)]
    pub what: Option<UpCommand>,
    /// The cluster's name; clusters with different names are independent of each other.
    #[arg(long, default_value = "holdfast")]
    pub name: String,
    /// Use this containerd instead of starting a private one, for instance unix:///run/containerd/containerd.sock. It must have its own CNI network.
    #[arg(long, value_name = "URL")]
    pub containerd_endpoint: Option<String>,
    /// The port of the API, on 127.0.0.1 and the node's address.
    #[arg(long, default_value_t = 6443)]
    pub api_port: u16,
    /// Another address for the API to listen on; 0.0.0.0 is every address of this machine. May be given several times.
    #[arg(long, value_name = "ADDRESS")]
    pub api_bind_address: Vec<IpAddr>,
    /// Another DNS name or address in the certificate of the API, for clients that reach it through another machine. May be given
    /// several times.
    #[arg(long, value_name = "NAME", value_parser = join::parse_name)]
    pub tls_san: Vec<String>,
    /// How long a node may send no heartbeat until it is not ready [default: 50s].
    #[arg(long, value_name = "DURATION", value_parser = join::parse_grace)]
    pub node_monitor_grace_period: Option<std::time::Duration>,
    /// The port of the agent's HTTP API [default: 10250 if the API port is 6443, else the API port + 1000].
    #[arg(long, value_name = "PORT")]
    pub agent_port: Option<u16>,
    /// The address range of this node's pods [default: the first /24 of --cluster-cidr].
    #[arg(long, value_name = "RANGE")]
    pub pod_cidr: Option<ipnet::Ipv4Net>,
    /// The address range of services, or two of different families separated by a comma [default: the cluster's previous
    /// range, else the first free one of 10.96.0.0/16, 10.97.0.0/16 and so on].
    #[arg(long, value_name = "RANGES")]
    pub service_cidr: Option<String>,
    /// The address range of all nodes' pods, or two of different families separated by a comma [default: the cluster's
    /// previous range, else the first free one of 10.244.0.0/16, 10.245.0.0/16 and so on].
    #[arg(long, value_name = "RANGES")]
    pub cluster_cidr: Option<String>,
    /// A KubeletConfiguration for the agent; its fields override those that `up` sets.
    #[arg(long, value_name = "FILE")]
    pub agent_config: Option<PathBuf>,
    /// Start no control plane and join the cluster of this kubeconfig, which must be the node's own (user system:node:NAME, as in kubelet.conf).
    #[arg(long, value_name = "KUBECONFIG")]
    pub join: Option<PathBuf>,
    /// The node's name [default: this machine's host name].
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
}

/// Flags of `holdfast down`.
#[derive(Args)]
pub struct DownFlags {
    /// The cluster's name.
    #[arg(long, default_value = "holdfast")]
    pub name: String,
    /// The containerd with which the cluster was started, if it is not the private one.
    #[arg(long, value_name = "URL")]
    pub containerd_endpoint: Option<String>,
    /// Remove the cluster's data too: objects, certificates, images.
    #[arg(long)]
    pub purge: bool,
    /// The administrator's kubeconfig, with which the Node of a machine that joined is deleted.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

/// Flags of the control plane.
#[derive(Args)]
pub struct ControlPlaneFlags {
    /// The directory of the store and the certificates.
    #[arg(long)]
    pub dir: PathBuf,
    /// The port of the API, on 127.0.0.1 and the address of --advertise-address.
    #[arg(long, default_value_t = 6443)]
    pub api_port: u16,
    /// Another address for the API to listen on; 0.0.0.0 is every address of this machine. May be given several times.
    #[arg(long, value_name = "ADDRESS")]
    pub bind_address: Vec<IpAddr>,
    /// The address at which nodes and pods reach the API.
    #[arg(long)]
    pub advertise_address: IpAddr,
    /// The range of service addresses, or one of each IP family separated by a comma.
    #[arg(long, value_name = "RANGES", default_value = "10.96.0.0/16")]
    pub service_cidr: String,
    /// Flags about several nodes.
    #[command(flatten)]
    pub nodes: join::NodeFlags,
}

/// Flags of the agent; the names are the kubelet's.
#[derive(Args, Debug, Clone, Default)]
pub struct AgentFlags {
    /// A KubeletConfiguration file; flags override it.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A directory of `*.conf` files that are merged over the file of --config, in the order of their names.
    #[arg(long, value_name = "DIR")]
    pub config_dir: Option<PathBuf>,
    /// The kubeconfig for the apiserver. Without it, only static pods run.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// A kubeconfig for requesting the node's first certificate, if --kubeconfig has no usable one.
    #[arg(long, value_name = "FILE")]
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// The node's name [default: the host name].
    #[arg(long, value_name = "NAME")]
    pub hostname_override: Option<String>,
    /// The node's IP address, or two of different families separated by a comma; this machine must have them. 0.0.0.0 or ::
    /// selects only the family [default: the address to which the node's name resolves, if this machine has it, else the
    /// address of the interface with the default route].
    #[arg(long, value_name = "IP")]
    pub node_ip: Option<String>,
    /// `external` if a cloud controller manager initialises the node and sets its addresses.
    #[arg(long, value_name = "PROVIDER")]
    pub cloud_provider: Option<String>,
    /// The directory of the agent's files [default: /var/lib/kubelet].
    #[arg(long, value_name = "DIR")]
    pub root_dir: Option<PathBuf>,
    /// The directory of certificates [default: <root-dir>/pki].
    #[arg(long, value_name = "DIR")]
    pub cert_dir: Option<PathBuf>,
    /// The directory of the sockets of the agent and of device plugins; plugins use the default, whatever the root
    /// directory is [default: /var/lib/kubelet/device-plugins].
    #[arg(long, value_name = "DIR")]
    pub device_plugin_dir: Option<PathBuf>,
    /// A CNI configuration without the ranges of its first plugin's host-local. The agent adds the Node's pod range and writes
    /// the result next to the template, with the extension `conflist`; a changed range follows when no pod has an address.
    #[arg(long, value_name = "FILE")]
    pub pod_network_template: Option<PathBuf>,
    /// Labels for the node when it registers, as key=value separated by commas. On an existing Node, the agent updates only
    /// the labels for zone, region and instance type; the administrator owns the others.
    #[arg(long, value_name = "LABELS")]
    pub node_labels: Option<String>,
    /// Whether to create the Node object [default: true].
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub register_node: Option<bool>,
    /// The runtime's socket [default: unix:///run/containerd/containerd.sock].
    #[arg(long, value_name = "URL")]
    pub container_runtime_endpoint: Option<String>,
    /// The directory of static pods.
    #[arg(long, value_name = "DIR")]
    pub pod_manifest_path: Option<PathBuf>,
    /// The parent cgroup of `kubepods`.
    #[arg(long, value_name = "PATH")]
    pub cgroup_root: Option<String>,
    /// The maximum number of pods on the node [default: 110].
    #[arg(long, value_name = "N")]
    pub max_pods: Option<i64>,
    /// The IP addresses of the cluster's DNS servers, separated by commas.
    #[arg(long, value_name = "IPS")]
    pub cluster_dns: Option<String>,
    /// The cluster's domain.
    #[arg(long, value_name = "DOMAIN")]
    pub cluster_domain: Option<String>,
    /// The configuration of image credential provider plugins, a file or a directory.
    #[arg(long, value_name = "PATH")]
    pub image_credential_provider_config: Option<PathBuf>,
    /// The directory of the image credential provider plugins.
    #[arg(long, value_name = "DIR")]
    pub image_credential_provider_bin_dir: Option<PathBuf>,
    /// Which pods the agent starts without an apiserver: `never` and `static-only` start only static pods; `after=5m`, or any
    /// other duration, also starts the pods that were bound to the node before, once no apiserver has answered for that long; `always` starts
    /// these immediately. The agent keeps the required objects encrypted in <root-dir>/sealed, except with `never`
    /// [default: static-only].
    #[arg(long, value_name = "WHEN")]
    pub offline_start: Option<String>,
    /// The maximum number of dead containers to keep on the node; a negative number is no limit [default: -1].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub maximum_dead_containers: Option<i32>,
    /// The maximum number of dead instances to keep of each container of a pod; a negative number is no limit [default: 1].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub maximum_dead_containers_per_container: Option<i32>,
    /// The minimum age of a dead container, counted from its creation, before it is removed [default: 0s].
    #[arg(long, value_name = "DURATION")]
    pub minimum_container_ttl_duration: Option<String>,
    /// Check the configuration, the runtime and the apiserver, print what a start would do to pods, and exit.
    #[arg(long)]
    pub check: bool,
    /// Log verbosity: 0 to 2 for information, 4 for debugging, higher for tracing.
    #[arg(short = 'v', long = "v", default_value_t = 0, value_name = "LEVEL")]
    pub verbosity: u8,
}

impl AgentFlags {
    /// The flags as overrides of a configuration file.
    #[must_use]
    pub fn overrides(&self) -> holdfast_config::Overrides {
        holdfast_config::Overrides {
            hostname: self.hostname_override.clone(),
            node_ip: self.node_ip.clone(),
            cloud_provider: self.cloud_provider.clone(),
            kubeconfig: self.kubeconfig.clone(),
            bootstrap_kubeconfig: self.bootstrap_kubeconfig.clone(),
            verbosity: self.verbosity,
            root_dir: self.root_dir.clone(),
            cert_dir: self.cert_dir.clone(),
            device_plugin_dir: self.device_plugin_dir.clone(),
            pod_network_template: self.pod_network_template.clone(),
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
    fn agent_flags_are_accepted_before_and_after_the_subcommand() {
        for arguments in [
            ["record", "--root-dir", "/r", "pod", "p"],
            ["record", "pod", "--root-dir", "/r", "p"],
            ["record", "pod", "p", "--root-dir", "/r"],
        ] {
            let all = ["holdfast", "agent"].into_iter().chain(arguments);
            let Command::Agent {
                running: Some(AgentCommand::Record { agent, .. }),
                ..
            } = Cli::try_parse_from(all).expect("parses").command
            else {
                panic!("{arguments:?} was parsed as another command");
            };
            assert_eq!(agent.root_dir, Some("/r".into()), "{arguments:?}");
        }
        let one = ["holdfast", "explain", "--name", "n", "pod", "p"];
        let both = one.into_iter().chain(["--root-dir", "/r"]).collect();
        for (arguments, is_clear) in [(one.to_vec(), true), (both, false)] {
            let Command::Explain { agent, .. } =
                Cli::try_parse_from(&arguments).expect("parses").command
            else {
                panic!("{arguments:?} was parsed as another command");
            };
            assert_eq!(agent.check().is_ok(), is_clear, "{arguments:?}");
        }
    }

    #[test]
    fn flags_are_consistent_and_accept_go_style_booleans() {
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
