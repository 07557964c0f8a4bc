//! `holdfast up`, `down` and `kubeconfig`: a whole cluster on this machine. containerd, control plane and agent are
//! three processes that communicate only over sockets. Control plane and agent are supervised.

mod containerd;
pub mod images;
pub mod join;
mod leave;
mod messages;
mod process;
mod progress;
mod proxy;
mod ranges;
mod settings;
mod supervise;

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use jiff::Timestamp;
pub use join::reachable_server;
use k8s_openapi::api::core::v1::NodeCondition;
use kube::ResourceExt as _;
use process::Component;
use progress::Progress;
pub use ranges::Wanted;
pub use settings::{Dirs, Joined, Settings};

use holdfast_control::pki::{self, Pki};
use holdfast_cri::{CriClient, Runtime as _};
use holdfast_host::cni_cache;
use holdfast_kubeapi::Api;
use holdfast_sys::process::find_program;
use holdfast_sys::systemd::Slices;

/// The cluster's domain.
const DOMAIN: &str = "cluster.local";

/// The names of the processes.
const COMPONENTS: [&str; 4] = ["containerd", "control-plane", "proxy", "agent"];

struct Components {
    containerd: Component,
    control: Component,
    proxy: Component,
    agent: Component,
}

fn components(dirs: &Dirs) -> Components {
    let component = |name| Component::new(name, &dirs.run, &dirs.logs);
    let [containerd, control, proxy, agent] = COMPONENTS.map(component);
    Components {
        containerd,
        control,
        proxy,
        agent,
    }
}

fn require_root(command: &str) -> anyhow::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!(messages::needs_root(command));
    }
    Ok(())
}

/// Starts every component that does not run yet, and waits until the node is ready. `wanted` are the address ranges that the
/// user wants.
pub async fn up(mut settings: Settings, wanted: &Wanted) -> anyhow::Result<()> {
    require_root("up")?;
    let dirs = settings.dirs.clone();
    let dirs = &dirs;
    for dir in [&dirs.data, &dirs.run, &dirs.logs, &dirs.agent()] {
        fs::create_dir_all(dir)
            .with_context(|| format!("the directory {} cannot be created", dir.display()))?;
    }
    fs::set_permissions(
        &dirs.data,
        std::os::unix::fs::PermissionsExt::from_mode(0o700),
    )?;
    let components = components(dirs);
    settle_ranges(&mut settings, wanted, &components)?;
    let settings = &settings;
    reject_changes(settings, &components)?;
    let mut progress = Progress::new();
    let endpoint = settings.endpoint();

    progress.step("containerd");
    let private = settings.containerd_endpoint.is_none();
    if private {
        start_containerd(settings, &components.containerd)?;
    }
    let alive = || !private || components.containerd.pid().is_some();
    let runtime = containerd::wait_ready(&endpoint, Duration::from_secs(30), alive)
        .await
        .map_err(|error| no_runtime(&components.containerd, private, &error))?;

    if !private {
        containerd::reject_foreign_pods(&endpoint, &dirs.agent()).await?;
    }
    progress.step("bundled images");
    containerd::import_images(settings, &endpoint)?;

    progress.step("control plane");
    let (client, description) = match &settings.join {
        Some(kubeconfig) => use_kubeconfig(dirs, kubeconfig).await?,
        None => {
            let started = start_control_plane(settings, &components.control)?;
            let client = wait_api(settings, &components.control, started).await?;
            progress.step("proxy");
            proxy::prepare(settings)?;
            proxy::start(settings, &components.proxy)?;
            (client, own_api(settings))
        }
    };

    progress.step("agent");
    let started = start_agent(settings, &components.agent, &endpoint)?;
    let node = wait_node(&client, &settings.node_name, &components.agent, started).await?;
    progress.done();

    println!("{}", messages::running(&node, &runtime, &description));
    if settings.join.is_none() && components.proxy.pid().is_none() {
        let proxy = &components.proxy;
        println!("{}", messages::no_services(&proxy.log, &proxy.log_tail()));
    }
    Ok(())
}

/// Chooses the cluster's ranges. A running cluster keeps them.
fn settle_ranges(
    settings: &mut Settings,
    wanted: &Wanted,
    components: &Components,
) -> anyhow::Result<()> {
    let data = &settings.dirs.data;
    let configured = containerd::pod_range(settings);
    let before = ranges::recorded(data)?;
    let runs = components.containerd.pid().is_some() || components.control.pid().is_some();
    if let Some(is) = before.filter(|_| runs) {
        let name = &settings.name;
        let reject = |flag: &str, is: String, wanted: Option<String>| match wanted {
            Some(wanted) if wanted != is => {
                bail!(messages::cannot_change(flag, &wanted, name, &is))
            }
            _ => Ok(()),
        };
        let flag = ranges::Ranges::flag;
        reject(
            "--pod-cidr",
            is.pods.to_string(),
            wanted.pods.map(|pods| pods.to_string()),
        )?;
        reject("--service-cidr", flag(&is.service), wanted.service.clone())?;
        reject("--cluster-cidr", flag(&is.cluster), wanted.cluster.clone())?;
    }
    settings.ranges = ranges::settle(wanted, data, configured, &settings.bridge)?;
    Ok(())
}

/// Refuses values that a running cluster does not have: its files would no longer describe it.
fn reject_changes(settings: &Settings, components: &Components) -> anyhow::Result<()> {
    let reject = |flag: &str, is: String, wanted: String| -> anyhow::Result<()> {
        if is == wanted {
            return Ok(());
        }
        bail!(messages::cannot_change(flag, &wanted, &settings.name, &is));
    };
    if let Some(port) = components.control.argument("--api-port") {
        reject("--api-port", port, settings.api_port.to_string())?;
    }
    if components.containerd.pid().is_some()
        && let Some(range) = containerd::pod_range(settings)
    {
        let wanted = settings.ranges.pods.to_string();
        reject("--pod-cidr", range.to_string(), wanted)?;
    }
    Ok(())
}

/// Describes how to use the bundled API.
fn own_api(settings: &Settings) -> String {
    let kubeconfig = settings.dirs.kubeconfig();
    messages::own_api(settings.api_port, &kubeconfig, images::DEMO[0])
}

/// Installs the node's kubeconfig and its certificate authority where the agent and its clients expect them. Returns a
/// client, and a description of the control plane.
async fn use_kubeconfig(dirs: &Dirs, kubeconfig: &Path) -> anyhow::Result<(kube::Client, String)> {
    let absolute =
        fs::canonicalize(kubeconfig).with_context(|| messages::unreadable("--join", kubeconfig))?;
    let (pki, link) = (dirs.agent().join("pki"), dirs.agent().join("kubeconfig"));
    fs::create_dir_all(&pki)?;
    let authority = holdfast_kubeapi::client::authority(&absolute).await?;
    holdfast_sys::file::replace(&pki.join("ca.crt"), &authority)?;
    // A link, because the file is replaced when the node's certificate is renewed.
    match fs::remove_file(&link) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => std::os::unix::fs::symlink(&absolute, &link)?,
    }
    let client = holdfast_kubeapi::client::connect(&link).await?;
    let version = client.apiserver_version().await.map_err(|e| {
        let why = holdfast_kubeapi::failure::chain(&e);
        anyhow::anyhow!(messages::no_apiserver(kubeconfig, &why))
    })?;
    Ok((client, messages::joined(&version.git_version)))
}

/// The error if the runtime does not answer.
fn no_runtime(component: &Component, is_private: bool, error: &anyhow::Error) -> anyhow::Error {
    if is_private {
        not_started(component.name, component, &format!("{error:#}"))
    } else {
        anyhow::anyhow!("{error:#}; {}", messages::CHECK_ENDPOINT)
    }
}

/// The error if a component did not start, with the end of its log. `name` is its name in the sentence.
fn not_started(name: &str, component: &Component, why: &str) -> anyhow::Error {
    let tail = component.log_tail();
    anyhow::anyhow!(messages::not_started(name, why, &component.log, &tail))
}

fn start_containerd(settings: &Settings, component: &Component) -> anyhow::Result<()> {
    if component.pid().is_some() {
        // containerd reloads the network's file when it changes. Without the file, no pod starts or stops.
        return match settings.joined {
            None => containerd::write_network(settings),
            Some(_) => Ok(()),
        };
    }
    let program = find_program("containerd").context(messages::NO_CONTAINERD)?;
    find_program("runc").context(messages::NO_RUNC)?;
    containerd::install_plugins(settings)?;
    // A joined node has no range before the control plane assigns one.
    if settings.joined.is_none() {
        containerd::write_network(settings)?;
    }
    let config = settings.dirs.data.join("containerd.toml");
    // Agent and containerd must use the same cgroup driver.
    let systemd = own_fields(settings)?.is_some_and(|own| own["cgroupDriver"] == "systemd");
    fs::write(
        &config,
        containerd::config(settings, containerd::Machine::detect(systemd)),
    )?;
    component
        .start(
            &program,
            &[
                "--config".into(),
                config.display().to_string(),
                "--log-level".into(),
                "warn".into(),
            ],
        )
        .map(drop)
}

/// Starts the control plane unless it runs. Returns whether it was started.
fn start_control_plane(settings: &Settings, component: &Component) -> anyhow::Result<bool> {
    let dir = settings.dirs.data.join("control");
    let pki = Pki::open(&dir.join("pki"))?;
    let server = format!("https://127.0.0.1:{}", settings.api_port);
    let write = |path: &Path, user: &str, pair: &pki::Pair| {
        holdfast_sys::file::replace(
            path,
            pki::kubeconfig(&server, &pki.ca, user, pair).as_bytes(),
        )
    };
    write(
        &settings.dirs.kubeconfig(),
        "holdfast-admin",
        &pki.client("admin", "kubernetes-admin", &["system:masters"])?,
    )?;
    let node = &settings.node_name;
    let pair = pki.client(
        &format!("node-{node}"),
        &format!("system:node:{node}"),
        &["system:nodes"],
    )?;
    write(&settings.dirs.agent().join("kubeconfig"), node, &pair)?;
    // The agent's own API: the cluster's CA verifies its clients and has signed its certificate.
    let certs = settings.dirs.agent().join("pki");
    fs::create_dir_all(&certs)?;
    let serving = pki.serving(&format!("system:node:{node}"), &[node], &[settings.node_ip])?;
    holdfast_sys::file::replace(&certs.join("ca.crt"), pki.ca.as_bytes())?;
    holdfast_sys::file::replace(&certs.join("serving.key"), serving.key.as_bytes())?;
    holdfast_sys::file::replace(&certs.join("serving.crt"), serving.certificate.as_bytes())?;
    if component.runs_supervised() {
        return Ok(false);
    }
    let own = std::env::current_exe()?;
    let mut arguments = vec![
        "control-plane".to_owned(),
        format!("--dir={}", dir.display()),
        format!("--api-port={}", settings.api_port),
        format!("--advertise-address={}", settings.node_ip),
        format!(
            "--service-cidr={}",
            ranges::Ranges::flag(&settings.ranges.service)
        ),
    ];
    arguments.push(format!("--node-pod-cidr={node}={}", settings.ranges.pods));
    let cluster = ranges::Ranges::flag(&settings.ranges.cluster);
    arguments.push(format!("--cluster-cidr={cluster}"));
    arguments.extend(
        settings
            .tls_san
            .iter()
            .map(|name| format!("--tls-san={name}")),
    );
    let grace = settings.heartbeat_grace.iter();
    arguments.extend(grace.map(|g| format!("--node-monitor-grace-period={}ms", g.as_millis())));
    let more = settings.api_bind_addresses.iter();
    arguments.extend(more.map(|address| format!("--bind-address={address}")));
    component.start_supervised(&own, &arguments)
}

async fn wait_api(
    settings: &Settings,
    component: &Component,
    started: bool,
) -> anyhow::Result<kube::Client> {
    let client = holdfast_kubeapi::client::connect(&settings.dirs.kubeconfig()).await?;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    loop {
        let error = match client.apiserver_version().await {
            Ok(_) => return Ok(client),
            Err(error) => holdfast_kubeapi::failure::chain(&error),
        };
        if component.has_stopped_for_good(started) || tokio::time::Instant::now() > deadline {
            stop_restarts(component, started)?;
            return Err(not_started("the control plane", component, &error));
        }
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
}

/// Starts the agent unless it runs. Returns whether it was started.
fn start_agent(settings: &Settings, component: &Component, endpoint: &str) -> anyhow::Result<bool> {
    if component.runs_supervised() {
        return Ok(false);
    }
    let root = settings.dirs.agent();
    let manifests = root.join("manifests");
    fs::create_dir_all(&manifests)?;
    let mut config = serde_json::json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration", "clusterDomain": DOMAIN,
        // The disk is shared with everything else on this machine, and the bundled images cannot be pulled again.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%", "imagefs.inodesFree": "0%"},
        "staticPodPath": manifests, "podLogsDir": settings.dirs.data.join("pods-logs"), "cgroupRoot": settings.cgroup(),
        "containerRuntimeEndpoint": endpoint, "maxPods": 110.min((1_i64 << (32 - settings.ranges.pods.prefix_len())) - 3),
        "serializeImagePulls": false, "failSwapOn": false,
        // No program expects these chains here: the machine's iptables stay unchanged.
        "makeIPTablesUtilChains": false,
        "port": settings.agent_port()?, "healthzPort": settings.healthz_port(),
        "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": true}, "x509": {"clientCAFile": root.join("pki/ca.crt")}},
        "authorization": {"mode": "Webhook"},
    });
    // A joined control plane issues no serving certificate: the agent signs its own, or requests one if it is
    // configured to.
    if settings.join.is_none() {
        config["tlsCertFile"] = serde_json::json!(root.join("pki/serving.crt"));
        config["tlsPrivateKeyFile"] = serde_json::json!(root.join("pki/serving.key"));
        // The proxy answers there.
        config["clusterDNS"] = settings
            .ranges
            .dns()
            .iter()
            .map(ToString::to_string)
            .collect();
    }
    let mut joined = vec![];
    if let Some(known) = &settings.joined {
        known.configure(&mut config, &mut joined);
        if settings.containerd_endpoint.is_none() {
            let template = containerd::network_template(settings);
            joined.push(format!("--pod-network-template={}", template.display()));
        }
    }
    if let Some(own) = own_fields(settings)? {
        json_patch::merge(&mut config, &own);
    }
    fs::write(root.join("config.json"), format!("{config:#}\n"))?;
    let mut arguments = agent_arguments(settings);
    arguments.extend(joined);
    if settings.join.is_none() {
        // No other node could run the pods meanwhile.
        arguments.push("--offline-start=always".into());
    }
    component.start_supervised(&std::env::current_exe()?, &arguments)
}

/// The arguments of every agent.
fn agent_arguments(settings: &Settings) -> Vec<String> {
    let root = settings.dirs.agent();
    vec![
        "agent".to_owned(),
        format!("--config={}", root.join("config.json").display()),
        format!("--kubeconfig={}", root.join("kubeconfig").display()),
        format!("--root-dir={}", root.display()),
        format!(
            "--device-plugin-dir={}",
            root.join("device-plugins").display()
        ),
        format!("--node-ip={}", settings.node_ip),
        format!("--hostname-override={}", settings.node_name),
    ]
}

/// Reads the fields of the user's own configuration of the agent.
fn own_fields(settings: &Settings) -> anyhow::Result<Option<serde_json::Value>> {
    let Some(path) = &settings.agent_config else {
        return Ok(None);
    };
    let text =
        fs::read_to_string(path).with_context(|| messages::unreadable("--agent-config", path))?;
    let own = serde_saphyr::from_str(&text)
        .map_err(|e| anyhow::anyhow!(messages::invalid_agent_config(path, &e.to_string())))?;
    Ok(Some(own))
}

/// Stops the restarts of a component that this process has started without success. A component that ran before keeps
/// its supervisor.
fn stop_restarts(component: &Component, started: bool) -> anyhow::Result<()> {
    match started {
        true => component.kill_supervisor(),
        false => Ok(()),
    }
}

/// Waits until the running agent has reported its node as Ready; reports of an earlier agent do not count.
async fn wait_node(
    client: &kube::Client,
    name: &str,
    component: &Component,
    started: bool,
) -> anyhow::Result<String> {
    let api: Api<k8s_openapi::api::core::v1::Node> = Api::all(client.clone());
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    let mut why = messages::NOT_REGISTERED.to_owned();
    loop {
        match api.get_opt(name).await {
            Ok(Some(node)) => {
                let conditions = node.status.iter().flat_map(|s| s.conditions.iter());
                match conditions.flatten().find(|c| c.type_ == "Ready") {
                    Some(c) if !is_reported_by(c, component) => {
                        messages::NOT_REPORTED.clone_into(&mut why);
                    }
                    Some(c) if c.status == "True" => return Ok(node.name_any()),
                    Some(c) => why = c.message.clone().unwrap_or_default(),
                    None => {}
                }
            }
            Ok(None) => {}
            // The control plane may be about to restart.
            Err(error) => why = holdfast_kubeapi::failure::chain(&error),
        }
        if component.has_stopped_for_good(started) || tokio::time::Instant::now() > deadline {
            stop_restarts(component, started)?;
            let tail = component.log_tail();
            bail!(messages::not_ready(name, &why, &component.log, &tail));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Whether the running process reported the condition: an agent reports it at its start, even if the status is
/// unchanged. Heartbeats have whole seconds. If the start is in the future, the clock was set back since, and every
/// report counts.
fn is_reported_by(condition: &NodeCondition, component: &Component) -> bool {
    let (Some(heartbeat), Some(started)) = (&condition.last_heartbeat_time, component.started())
    else {
        return false;
    };
    let Ok(started) = Timestamp::try_from(started) else {
        return false;
    };
    started > Timestamp::now() || heartbeat.0.as_second() >= started.as_second()
}

/// Stops everything and removes the pods' files, mounts and cgroups from this machine; with `purge` also the data. A machine that
/// has joined evicts its pods before; `admin` is an administrator's kubeconfig, with which its Node is deleted.
pub async fn down(
    mut settings: Settings,
    purge: bool,
    admin: Option<std::path::PathBuf>,
) -> anyhow::Result<()> {
    require_root("down")?;
    let recorded = ranges::recorded(&settings.dirs.data)?;
    if let Some(ranges) = &recorded {
        settings.ranges = ranges.clone();
    }
    // The range of a joined node may have changed since.
    if let Some(pods) = containerd::pod_range(&settings) {
        settings.ranges.pods = pods;
    }
    let settings = &settings;
    let dirs = &settings.dirs;
    let components = components(dirs);
    let mut progress = Progress::new();
    let mut leaving = leave::Leaving::read(dirs, admin)?;
    if let Some(leaving) = &mut leaving {
        progress.step("eviction");
        leaving.drain(dirs, components.agent.pid().is_some()).await;
    }
    progress.step("agent");
    let mut stopped = components.agent.stop(Duration::from_secs(10))?;
    progress.step("control plane");
    stopped |= components.control.stop(Duration::from_secs(10))?;
    progress.step("pods");
    let private = settings.containerd_endpoint.is_none();
    if private && components.containerd.pid().is_some() {
        containerd::write_network(settings)?;
    }
    if !private || components.containerd.pid().is_some() {
        remove_all_pods(settings).await?;
    }
    progress.step("proxy");
    stopped |= components.proxy.stop(Duration::from_secs(10))?;
    proxy::remove(settings, recorded.as_ref())?;
    progress.step("containerd");
    stopped |= components.containerd.stop(Duration::from_secs(10))?;
    progress.step("leftovers");
    clean_up(settings).await?;
    let reports = match leaving {
        Some(leaving) => leaving.finish(dirs).await,
        None => vec![],
    };
    progress.done();
    if purge {
        for dir in [&dirs.run, &dirs.data] {
            remove_dir(dir)?;
        }
    }
    let kept = Some(dirs.data.as_path()).filter(|dir| !purge && dir.exists());
    println!("{}", messages::stopped(stopped, kept));
    for report in reports {
        println!("{report}");
    }
    Ok(())
}

/// Calls [`remove_pods`], and retries for a while if it fails: a runtime takes a moment to reload its network's file.
async fn remove_all_pods(settings: &Settings) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        match remove_pods(settings).await {
            Err(_) if tokio::time::Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            done => return done,
        }
    }
}

/// Removes the sandboxes of this cluster's pods; in a private runtime these are all sandboxes.
async fn remove_pods(settings: &Settings) -> anyhow::Result<()> {
    let endpoint = settings.endpoint();
    let runtime =
        CriClient::new(&endpoint, Duration::from_secs(30), None).map_err(anyhow::Error::msg)?;
    let listed = runtime
        .list()
        .await
        .with_context(|| format!("the pods of the runtime at {endpoint} cannot be listed"))?;
    let private = settings.containerd_endpoint.is_none();
    let ours = listed
        .into_iter()
        .filter(|p| private || settings.dirs.agent().join("pods").join(&p.uid).exists());
    let work = ours.map(|pod| {
        let runtime = &runtime;
        async move {
            let observed = runtime.observe(&pod.uid).await?;
            for container in observed.live() {
                runtime.stop_container(&container.id, 1).await?;
            }
            for sandbox in &observed.sandboxes {
                let mut stopped = runtime.stop_sandbox(&sandbox.id).await;
                if stopped.is_err() && cni_cache::remove_corrupt(&sandbox.id).await {
                    stopped = runtime.stop_sandbox(&sandbox.id).await;
                }
                stopped?;
                runtime.remove_sandbox(&sandbox.id).await?;
            }
            Ok::<(), holdfast_cri::RuntimeError>(())
        }
    });
    for result in futures::future::join_all(work).await {
        result.context("a pod cannot be removed")?;
    }
    Ok(())
}

/// Unmounts and removes pod directories, logs, cgroups and the bridge.
async fn clean_up(settings: &Settings) -> anyhow::Result<()> {
    let dirs = settings.dirs.clone();
    let cgroup = settings.cgroup();
    let private = settings.containerd_endpoint.is_none();
    tokio::task::spawn_blocking(move || -> anyhow::Result<()> {
        holdfast_sys::mount::unmount_all(&dirs.agent())?;
        if private {
            process::kill_shims(&dirs.run.join("containerd.sock"));
            holdfast_sys::mount::unmount_all(&dirs.run)?;
        }
        for dir in [
            dirs.agent().join("pods"),
            dirs.data.join("pods-logs"),
            dirs.data.join("containers"),
        ] {
            remove_dir(&dir)?;
        }
        holdfast_sys::cgroup::remove(&cgroup)?;
        Ok(())
    })
    .await??;
    if holdfast_sys::cgroup::exists(&settings.slice()) {
        Slices::default()
            .remove(&settings.slice())
            .await
            .map_err(anyhow::Error::msg)?;
    }
    if private {
        holdfast_sys::link::remove(&settings.bridge)
            .await
            .with_context(|| format!("the bridge {} cannot be removed", settings.bridge))?;
    }
    Ok(())
}

/// Removes a directory of pods, never across a mount: mounted files belong to other programs.
fn remove_dir(dir: &Path) -> anyhow::Result<()> {
    Ok(holdfast_sys::removal::remove_tree(dir)?)
}

/// Prints for every component whether it runs, and how often it was restarted. Fails if a component does not run.
pub fn status(dirs: &Dirs) -> anyhow::Result<()> {
    let Components {
        containerd,
        control,
        proxy,
        agent,
    } = components(dirs);
    let now = Timestamp::now().as_second();
    let mut all_run = true;
    for component in [containerd, control, proxy, agent] {
        let (text, runs) = component.status(now);
        println!("{text}");
        all_run &= runs;
    }
    anyhow::ensure!(all_run, messages::NOT_ALL_RUN);
    Ok(())
}

/// Runs a component of a cluster, whose files are in `run` and `logs`, and restarts it whenever it exits. With
/// `parent`, becomes the component that this supervising process starts.
pub fn supervise(
    name: &str,
    [run, logs]: [&Path; 2],
    parent: Option<u32>,
    program: &Path,
    arguments: &[String],
) -> anyhow::Result<()> {
    let name = COMPONENTS
        .iter()
        .find(|known| **known == name)
        .with_context(|| messages::unknown_component(name, &COMPONENTS))?;
    let component = Component::new(name, run, logs);
    match parent {
        Some(parent) => component.exec_program(parent, program, arguments),
        None => supervise::supervise(&component, program, arguments),
    }
}

/// Returns the kubeconfig's text.
pub fn kubeconfig(dirs: &Dirs) -> anyhow::Result<String> {
    let path = dirs.kubeconfig();
    fs::read_to_string(&path).with_context(|| messages::no_kubeconfig(&path))
}
