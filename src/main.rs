//! The binary: selects the command, the log and the exit code.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, FromArgMatches as _, Parser as _};
use holdfast::ask;
use holdfast::cli::join::{AdminSelection, JoinFlags, TokenCommand};
use holdfast::cli::{
    AgentCommand, AgentFlags, AgentSelection, AuditFlags, Cli, Command, ControlPlaneFlags,
    DoctorFlags, ExplainCommand, ExplainFlags, GcFlags, Ipam, KubeletCli, Output, PodOfAgent,
    ProxyFlags, RecordCommand, RecordFlags, ReportFormat, TraceFlags, UpCommand, UpFlags, fields,
};
use holdfast::join as joining;
use holdfast::logging;
use holdfast::trace;
use holdfast::up;
use holdfast_agent as agent;
use holdfast_cni::ipam::audit as ipam;
use holdfast_config as config;
use holdfast_control as control;
use holdfast_core::node::collection;
use holdfast_core::node::doctor as diagnosis;
use holdfast_core::pod::explain as explanation;
use holdfast_core::pod::record::Report;
use holdfast_core::version::{KUBERNETES, newest_commit, shown_commit};
use holdfast_https as https;
use holdfast_proxy as proxy;
use holdfast_sys as sys;
use tokio_util::sync::CancellationToken;

/// The commit from which this program was built. Only this file refers to the reflog, so that a commit recompiles only
/// this file.
const COMMIT: [u8; 12] = newest_commit(include_bytes!(env!("HOLDFAST_REFLOG")));

/// Parses the command of an invocation as `holdfast`.
fn parse_command(arguments: &[std::ffi::OsString]) -> Command {
    let version = format!(
        "{} ({}), Kubernetes {KUBERNETES}",
        env!("CARGO_PKG_VERSION"),
        shown_commit(&COMMIT)
    );
    // The parser keeps its version for the life of the process.
    let mut parser = Cli::command().version(&*version.leak());
    let matches = parser.clone().get_matches_from(arguments);
    match Cli::from_arg_matches(&matches) {
        Ok(parsed) => parsed.command,
        Err(error) => error.format(&mut parser).exit(),
    }
}

fn main() -> ExitCode {
    let called_as = std::env::args_os().next().unwrap_or_default();
    let as_kubelet = std::path::Path::new(&called_as)
        .file_name()
        .is_some_and(|n| n == "kubelet");
    // Only the agent has flags for fields of its configuration.
    let command = std::env::args_os().nth(1).unwrap_or_default();
    let is_agent = as_kubelet || command == "agent" || command == "doctor";
    let parsed_flags = match if is_agent {
        fields::take(std::env::args_os())
    } else {
        Ok(fields::ParsedFlags {
            rest: std::env::args_os().collect(),
            ..Default::default()
        })
    } {
        Ok(parsed_flags) => parsed_flags,
        Err(error) => {
            eprintln!("holdfast: {error}");
            return ExitCode::FAILURE;
        }
    };
    let command = if as_kubelet {
        let kubelet = KubeletCli::parse_from(&parsed_flags.rest);
        Command::Agent {
            running: None,
            version: kubelet.version,
            flags: Box::new(kubelet.agent),
        }
    } else {
        parse_command(&parsed_flags.rest)
    };
    if let Command::Agent { version, .. } = &command
        && let Some(text) = version
            .wanted
            .text(shown_commit(&COMMIT), std::env::consts::ARCH)
    {
        println!("{text}");
        return ExitCode::SUCCESS;
    }
    sys::memory::limit_malloc();
    https::abort_on_panic();
    // The agent starts its log later, as its configuration requires.
    if !matches!(command, Command::Agent { running: None, .. }) {
        let level = match &command {
            Command::ControlPlane(_) => "info",
            Command::Proxy(flags) => logging::level(flags.verbosity),
            _ => "error",
        };
        if let Err(error) = logging::start(level, false, None) {
            eprintln!("holdfast: {error}");
            return ExitCode::FAILURE;
        }
    }
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        eprintln!("holdfast: the TLS library is already set up; this is a bug");
        return ExitCode::FAILURE;
    }
    // The agent is idle most of the time; the API serves as many concurrent requests as there are processors.
    let workers = match command {
        Command::ControlPlane(_) => std::thread::available_parallelism().map_or(2, usize::from),
        _ => 2,
    };
    // The rules have a thread of their own, so one thread serves the proxy's watches and pages. DNS uses all processors.
    let mut builder = match &command {
        Command::Proxy(flags) if flags.dns.is_none() => {
            tokio::runtime::Builder::new_current_thread()
        }
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = match builder
        .worker_threads(workers.max(2))
        .max_blocking_threads(64)
        .thread_keep_alive(std::time::Duration::from_secs(2))
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("holdfast: the async runtime cannot be started: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(run(command, parsed_flags)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("holdfast: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(command: Command, parsed_flags: fields::ParsedFlags) -> anyhow::Result<()> {
    match command {
        Command::Up(UpFlags {
            what: Some(UpCommand::Status { name }),
            ..
        }) => up::status(&up::Settings::dirs(&name)),
        Command::Supervise(flags) => tokio::task::block_in_place(|| {
            let (program, arguments) = flags
                .command
                .split_first()
                .ok_or_else(|| anyhow::anyhow!("no program: pass one after --"))?;
            up::supervise(
                &flags.part,
                [&flags.run, &flags.logs],
                flags.r#for,
                program.as_ref(),
                arguments,
            )
        }),
        Command::Up(flags) => {
            // This process has the key of the cluster's authority in memory, too. Its limits stay unchanged, because
            // the runtime that it starts and all containers inherit them.
            sys::process::hide_memory()?;
            let mut settings =
                up::Settings::new(&flags.name, flags.containerd_endpoint, flags.api_port).await?;
            (settings.agent_config, settings.agent_port) = (flags.agent_config, flags.agent_port);
            settings.join = flags.join;
            settings.tls_san = flags.tls_san;
            settings.heartbeat_grace = flags.node_monitor_grace_period;
            settings.api_bind_addresses = flags.api_bind_address;
            settings.node_name = flags.node_name.unwrap_or(settings.node_name);
            settings.agent_port()?;
            let wanted = up::Wanted {
                service: flags.service_cidr,
                cluster: flags.cluster_cidr,
                pods: flags.pod_cidr,
            };
            Box::pin(up::up(settings, &wanted)).await
        }
        Command::Down(flags) => {
            let settings = up::Settings::new(&flags.name, flags.containerd_endpoint, 0).await?;
            Box::pin(up::down(settings, flags.purge, flags.kubeconfig)).await
        }
        Command::Token { cluster, what } => token(&cluster, what).await,
        Command::Join(flags) => join(*flags).await,
        Command::Kubeconfig { name } => {
            print!("{}", up::kubeconfig(&up::Settings::dirs(&name))?);
            Ok(())
        }
        Command::Explain {
            agent,
            what: ExplainCommand::Pod(flags),
        } => explain(&agent, &flags).await,
        Command::Trace(flags) => show_trace(&flags).await,
        Command::Gc(flags) => gc(&flags).await,
        Command::Ipam {
            what: Ipam::Audit(flags),
        } => tokio::task::block_in_place(|| audit(flags)),
        Command::Agent {
            running:
                Some(AgentCommand::Record {
                    agent,
                    what: RecordCommand::Pod(flags),
                }),
            ..
        } => record(&agent, &flags).await,
        Command::Proxy(flags) => run_proxy(*flags).await,
        Command::Doctor(flags) => doctor(*flags, parsed_flags).await,
        Command::Replay { file } => tokio::task::block_in_place(|| replay(&file)),
        Command::Agent {
            running: None,
            flags,
            ..
        } => {
            let stop = CancellationToken::new();
            let work = run_agent(*flags, parsed_flags, stop.clone());
            let result = until_drained(Box::pin(work), stop).await;
            // Blocks until a separate thread has sent the remaining traces.
            tokio::task::block_in_place(logging::finish);
            result
        }
        Command::ControlPlane(flags) => {
            // The keys of the cluster's authority and of its tokens are in this process's memory.
            sys::process::forbid_dumps()?;
            until_stopped(Box::pin(control::run(control_settings(flags)?))).await
        }
    }
}

/// The control plane's settings from its flags.
fn control_settings(flags: ControlPlaneFlags) -> anyhow::Result<control::Settings> {
    let service_range = flags.service_cidr.parse();
    Ok(control::Settings {
        dir: flags.dir,
        bind: flags.bind_address,
        port: flags.api_port,
        advertise: flags.advertise_address,
        service_range: service_range.context("invalid --service-cidr")?,
        nodes: flags.nodes.settings(),
    })
}

/// Administers the bootstrap tokens of a cluster.
async fn token(cluster: &AdminSelection, what: TokenCommand) -> anyhow::Result<()> {
    let default = || up::Settings::dirs(&cluster.name).kubeconfig();
    let kubeconfig = cluster.kubeconfig.clone().unwrap_or_else(default);
    match what {
        TokenCommand::Create(flags) => {
            let token = flags.token;
            let token =
                joining::token::create(&kubeconfig, token, &flags.ttl, &flags.description).await?;
            if !flags.print_join {
                println!("{}", token.text());
                return Ok(());
            }
            let server = match flags.server {
                Some(server) => joining::discovery::server_url(&server)?,
                None => up::reachable_server(&kubeconfig).await?,
            };
            let command = joining::token::join_command(&kubeconfig, &server, &token).await?;
            println!("{command}");
        }
        TokenCommand::List { show_secrets } => {
            print!("{}", joining::token::list(&kubeconfig, show_secrets).await?);
        }
        TokenCommand::Delete { token } => {
            let id = joining::token::delete(&kubeconfig, &token).await?;
            println!("deleted the bootstrap token {id}");
        }
    }
    Ok(())
}

/// Adds this machine to a cluster.
async fn join(flags: JoinFlags) -> anyhow::Result<()> {
    let endpoint = flags.containerd_endpoint;
    let mut settings = up::Settings::new(&flags.name, endpoint, 0).await?;
    settings.agent_config = flags.agent_config;
    settings.agent_port = Some(flags.agent_port);
    settings.node_name = flags.node_name.unwrap_or(settings.node_name);
    settings.node_ip = flags.node_ip.unwrap_or(settings.node_ip);
    settings.agent_port()?;
    let server = joining::discovery::server_url(&flags.server)?;
    let hashes = flags.discovery_token_ca_cert_hash;
    Box::pin(up::join::join(settings, server, flags.token, hashes)).await
}

/// Loads the agent's configuration from its files and flags.
fn configuration(
    flags: &AgentFlags,
    parsed_flags: &fields::ParsedFlags,
) -> Result<config::Config, config::ConfigError> {
    config::load_all(
        flags.config.as_deref(),
        flags.config_dir.as_deref(),
        &parsed_flags.fields,
        &flags.overrides(),
        &sys::machine::hostname(),
    )
}

/// The files of a node that kubeadm set up.
const KUBEADM_FILES: [&str; 2] = [
    "/var/lib/kubelet/config.yaml",
    "/etc/kubernetes/kubelet.conf",
];

/// Reports problems that prevent the node or its pods from running.
async fn doctor(flags: DoctorFlags, parsed_flags: fields::ParsedFlags) -> anyhow::Result<()> {
    let DoctorFlags {
        name,
        output,
        mut agent,
    } = flags;
    if !nix::unistd::geteuid().is_root() {
        anyhow::bail!(
            "doctor needs root: it queries the runtime and reads the node's certificates; run it with sudo"
        );
    }
    let cluster = up::Settings::dirs(name.as_deref().unwrap_or("holdfast")).agent();
    let bundled = name.is_some() || cluster.join("config.json").exists();
    if agent.config.is_none() && agent.kubeconfig.is_none() {
        if bundled {
            agent.config = Some(cluster.join("config.json"));
            agent.kubeconfig = Some(cluster.join("kubeconfig"));
            agent.root_dir.get_or_insert(cluster);
        } else {
            let existing =
                |path: &str| Some(path.into()).filter(|p: &std::path::PathBuf| p.exists());
            [agent.config, agent.kubeconfig] = KUBEADM_FILES.map(existing);
        }
    }
    let findings = match configuration(&agent, &parsed_flags) {
        Ok(config) => agent::doctor::run(&config, sys::clock::Clock::system()).await,
        Err(error) => vec![diagnosis::unusable(error.to_string())],
    };
    match output {
        ReportFormat::Text => print!("{}", diagnosis::text(&findings)),
        ReportFormat::Json => println!("{}", serde_json::to_string_pretty(&findings)?),
    }
    if diagnosis::worst(&findings) == diagnosis::Severity::Error {
        anyhow::bail!("there are errors: pods on this node do not run as specified");
    }
    Ok(())
}

/// The number of the agent's free bytes above which they are returned to the system.
const MAX_FREE_BYTES: usize = 2 << 20;

async fn run_agent(
    flags: AgentFlags,
    parsed_flags: fields::ParsedFlags,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        anyhow::bail!("the agent needs root: it creates cgroups and mounts; run it with sudo");
    }
    // Secrets are in this process's memory.
    sys::process::forbid_dumps()?;
    let config = configuration(&flags, &parsed_flags)?;
    let traces = config.logging.traces.clone();
    let traces = traces.map(|(endpoint, per_million)| logging::Traces {
        endpoint,
        per_million,
        node: config.node_name.clone(),
    });
    logging::start(
        logging::level(config.logging.verbosity),
        config.logging.json,
        traces.as_ref(),
    )
    .map_err(anyhow::Error::msg)?;
    for flag in &parsed_flags.without_effect {
        tracing::warn!(flag, "this flag has no effect here");
    }
    if flags.check {
        print!("{}", agent::check::run(&config).await?);
        return Ok(());
    }
    tracing::info!(
        node = config.node_name,
        runtime = config.runtime_endpoint,
        "starting the agent"
    );
    agent::doctor::log_errors_at_startup(&config);
    let agent = tokio::select! {
        agent = agent::build(config) => agent?,
        () = stop.cancelled() => return Ok(()),
    };
    tokio::spawn(sys::service::keep_watchdog_fed());
    tokio::spawn(sys::memory::release_free_memory(MAX_FREE_BYTES));
    Box::pin(agent.run_until(stop.cancelled_owned())).await
}

/// Runs the service proxy, or removes what it leaves.
async fn run_proxy(flags: ProxyFlags) -> anyhow::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        anyhow::bail!("the proxy needs root: it changes nftables and routes; run it with sudo");
    }
    let overrides = flags.overrides();
    if flags.cleanup {
        let config = proxy::Config::for_cleanup(&overrides)?;
        return Ok(proxy::cleanup(&config)?);
    }
    let hostname = sys::machine::hostname();
    let config = proxy::Config::load(flags.config.as_deref(), &overrides, &hostname)?;
    let stop = CancellationToken::new();
    let work = Box::pin(proxy::run(config, stop.clone()));
    until_drained(Box::pin(async { Ok(work.await?) }), stop).await
}

/// Prints the allocated addresses and which of them are leaked.
fn audit(flags: AuditFlags) -> anyhow::Result<()> {
    let AuditFlags {
        name,
        data_dir,
        cache_dir,
        network,
        mend,
        older_than,
    } = flags;
    let data_dir = name.map_or(data_dir, |name| {
        up::Settings::dirs(&name).data.join("cni/networks")
    });
    let findings = ipam::audit(&ipam::Request {
        data_dir,
        network,
        cache_dir,
        repair: mend,
        min_age: std::time::Duration::from_secs(older_than),
    })?;
    let (table, all_well) = ipam::table(&findings);
    println!("{table}");
    if all_well {
        Ok(())
    } else {
        anyhow::bail!(
            "some addresses are leaked or allocated twice; --mend releases the leaked ones"
        )
    }
}

/// Returns the socket of the agent to query.
fn socket_of(selection: &AgentSelection) -> anyhow::Result<std::path::PathBuf> {
    selection.check().map_err(anyhow::Error::msg)?;
    let root = match (&selection.root_dir, &selection.name) {
        (Some(dir), _) => dir.clone(),
        (None, Some(name)) => up::Settings::dirs(name).agent(),
        // The cluster of `holdfast up` if its agent has a socket, otherwise the kubelet's directory.
        (None, None) => {
            let bundled = up::Settings::dirs("holdfast").agent();
            if bundled.join(agent::SOCKET).exists() {
                bundled
            } else {
                "/var/lib/kubelet".into()
            }
        }
    };
    Ok(root.join(agent::SOCKET))
}

/// Writes the inputs and the decisions of a pod's worker.
async fn record(selection: &AgentSelection, flags: &RecordFlags) -> anyhow::Result<()> {
    let RecordFlags { pod, output } = flags;
    let report = ask::record(&socket_of(selection)?, &pod.namespace, &pod.pod).await?;
    let mut text = serde_json::to_string_pretty(&report)?;
    text.push('\n');
    match output {
        None => print!("{text}"),
        Some(file) => sys::file::replace_soon(file, text.as_bytes())
            .with_context(|| format!("{} cannot be written", file.display()))?,
    }
    Ok(())
}

/// Maximum size of a record that is read, in bytes.
const MAX_RECORD_BYTES: u64 = 64 << 20;

/// Replays a recorded pod worker, and prints its decisions.
fn replay(file: &std::path::Path) -> anyhow::Result<()> {
    use std::io::Read as _;
    let source: Box<dyn std::io::Read> = if file.as_os_str() == "-" {
        Box::new(std::io::stdin())
    } else {
        let opened = std::fs::File::open(file);
        Box::new(opened.with_context(|| format!("{} cannot be read", file.display()))?)
    };
    let mut bytes = vec![];
    source.take(MAX_RECORD_BYTES).read_to_end(&mut bytes)?;
    let report = Report::read(&bytes).map_err(|why| {
        anyhow::anyhow!(
            "{} cannot be replayed: {why}; create one with `holdfast agent record pod`",
            file.display()
        )
    })?;
    let (text, differences) = report.replayed();
    print!("{text}");
    match differences {
        0 => Ok(()),
        n => anyhow::bail!("{n} decisions differ from the record"),
    }
}

/// Prints why a pod is not running.
async fn explain(selection: &AgentSelection, flags: &ExplainFlags) -> anyhow::Result<()> {
    let PodOfAgent { pod, namespace } = &flags.pod;
    let answer = ask::explain(&socket_of(selection)?, namespace, pod).await?;
    let now = sys::clock::Clock::system().now();
    match flags.output {
        Output::Text => print!("{}", explanation::text(&answer, now)),
        Output::Json => println!("{}", serde_json::to_string_pretty(&answer)?),
        Output::Svg => print!("{}", explanation::svg(&answer, now)),
    }
    Ok(())
}

/// Prints what an object led to.
async fn show_trace(flags: &TraceFlags) -> anyhow::Result<()> {
    let dirs = up::Settings::dirs(&flags.name);
    let kubeconfig = flags
        .kubeconfig
        .clone()
        .unwrap_or_else(|| dirs.kubeconfig());
    let client = holdfast_kubeapi::client::connect(&kubeconfig).await?;
    let selection = AgentSelection {
        name: flags.kubeconfig.is_none().then(|| flags.name.clone()),
        root_dir: None,
    };
    // Without an agent on this machine, the story names what is missing.
    let agent = socket_of(&selection).ok();
    let story = trace::story(
        client,
        agent.as_deref(),
        &flags.kind,
        &flags.namespace,
        &flags.object,
    )
    .await?;
    match flags.output {
        Output::Text => print!("{}", story.text()),
        Output::Json => println!("{}", serde_json::to_string_pretty(&story)?),
        Output::Svg => print!("{}", story.svg()),
    }
    Ok(())
}

/// Prints the images and containers that a collection would remove, or removes them.
async fn gc(flags: &GcFlags) -> anyhow::Result<()> {
    let report = ask::gc(&socket_of(&flags.agent)?, flags.dry_run).await?;
    match flags.output {
        ReportFormat::Text => print!("{}", collection::text(&report, !flags.dry_run)),
        ReportFormat::Json => println!("{}", serde_json::to_string_pretty(&report)?),
    }
    match report.failures.len() {
        0 => Ok(()),
        n => anyhow::bail!("{n} images and containers could not be removed"),
    }
}

/// Waits for the signals that stop the process, one after the other.
struct Signals(tokio::signal::unix::Signal, tokio::signal::unix::Signal);

impl Signals {
    fn listen() -> std::io::Result<Signals> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Signals(
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
        ))
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}

/// Runs `work` until it completes or the process receives a signal to stop.
async fn until_stopped(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    tokio::select! {
        result = work => result,
        () = signals.next() => Ok(()),
    }
}

/// Runs `work`, which completes after `stop` is cancelled. The first signal cancels `stop`; the second one ends the
/// wait.
async fn until_drained(
    mut work: impl Future<Output = anyhow::Result<()>> + Unpin,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    tokio::select! {
        result = &mut work => return result,
        () = signals.next() => stop.cancel(),
    }
    tokio::select! {
        result = work => result,
        () = signals.next() => Ok(()),
    }
}
