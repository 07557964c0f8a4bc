//! `dhcp daemon`: obtains, renews and releases the leases of containers. The `dhcp`
//! plugin sends requests over a socket, each one JSON object with one JSON answer.
//!
//! Each lease has a thread that sleeps until the lease must be renewed. Leases and their owners
//! are kept in files, from which a restarted daemon resumes. The daemon enters a container's
//! namespace by its path only while it works there, so that it never keeps the namespace alive.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::fd::FromRawFd as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::client::RequestParameters;
use super::lease::{Lease, LeaseAction};
use super::message::option;
use crate::cni::{Error, INPUT_LIMIT, Json, cni_args, digest};
use crate::ipam::owners::Namespace;
use crate::net::netns;
use holdfast_net::link::{Change, parse_mac};
use holdfast_net::local;
use holdfast_net::netlink::Socket;

/// The largest request, in bytes: a list of valid attachments is as long as in the configuration.
const LIMIT: u64 = INPUT_LIMIT;
/// Time limit for a client to send its request.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

const USAGE: &str = "usage: dhcp daemon [options]

Acquires and renews the DHCP leases of containers for the CNI plugin \"dhcp\".
  -socketpath PATH         the socket to listen on (/run/cni/dhcp.sock); a socket from systemd takes precedence
  -pidfile PATH            the file for the daemon's process id
  -hostprefix PATH         the directory below which the daemon sees the host's files, if it runs in a container
  -broadcast               request broadcast replies, which some networks need
  -timeout DURATION        the timeout for a server's reply, including retransmissions (10s)
  -resendmax DURATION      the longest pause between retransmissions (62s)
  -resendtimeout DURATION  the timeout for acquiring a lease, if shorter than -timeout (208s)";

/// The daemon's command-line settings.
#[derive(Debug, Clone)]
struct Settings {
    socket: PathBuf,
    pid_file: Option<PathBuf>,
    prefix: PathBuf,
    broadcast: bool,
    timeout: Duration,
    max_retransmit_delay: Duration,
}

/// Parses a duration such as `10s`, `1m30s` or `500ms`.
fn duration(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let number: u32 = rest.get(..digits)?.parse().ok()?;
        let unit_end = rest
            .get(digits..)?
            .find(|c: char| c.is_ascii_digit())
            .map_or(rest.len(), |n| digits + n);
        let unit = match rest.get(digits..unit_end)? {
            "ms" => Duration::from_millis(1),
            "s" => Duration::from_secs(1),
            "m" => Duration::from_secs(60),
            "h" => Duration::from_secs(3600),
            _ => return None,
        };
        total = total.checked_add(unit.checked_mul(number)?)?;
        rest = rest.get(unit_end..)?;
    }
    Some(total).filter(|t| !t.is_zero())
}

impl Settings {
    fn parse(arguments: &[String]) -> Result<Settings, String> {
        let seconds = Duration::from_secs;
        let mut settings = Settings {
            socket: super::SOCKET.into(),
            pid_file: None,
            prefix: PathBuf::new(),
            broadcast: false,
            timeout: seconds(10),
            max_retransmit_delay: seconds(62),
        };
        let mut all = seconds(208);
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let name = argument.trim_start_matches('-');
            let (name, inline) = name
                .split_once('=')
                .map_or((name, None), |(n, v)| (n, Some(v.to_owned())));
            if name == "broadcast" && argument.starts_with('-') {
                settings.broadcast = inline.is_none_or(|v| v == "true" || v == "1");
                continue;
            }
            if !argument.starts_with('-')
                || ![
                    "socketpath",
                    "pidfile",
                    "hostprefix",
                    "timeout",
                    "resendmax",
                    "resendtimeout",
                ]
                .contains(&name)
            {
                return Err(format!("unknown argument {argument:?}\n{USAGE}"));
            }
            let value = inline
                .or_else(|| rest.next().cloned())
                .ok_or_else(|| format!("-{name} needs a value\n{USAGE}"))?;
            let time = || {
                duration(&value).ok_or_else(|| {
                    format!("invalid -{name} {value:?}: use a duration such as 10s or 1m30s")
                })
            };
            match name {
                "socketpath" => settings.socket = value.into(),
                "pidfile" => settings.pid_file = Some(value.into()),
                "hostprefix" => settings.prefix = value.into(),
                "timeout" => settings.timeout = time()?,
                "resendmax" => settings.max_retransmit_delay = time()?,
                _ => all = time()?,
            }
        }
        settings.timeout = settings.timeout.min(all);
        Ok(settings)
    }
}

/// The owner of a lease, and the options of its requests.
#[derive(Debug, Clone)]
struct LeaseOwner {
    network: String,
    container: String,
    ifname: String,
    netns: String,
    namespace: Namespace,
    options: Vec<(u8, Vec<u8>)>,
    requested_options: Vec<u8>,
}

/// An active lease. Its renewal thread waits on `changed`.
struct ActiveLease {
    owner: LeaseOwner,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone)]
struct State {
    lease: Lease,
    since: SystemTime,
    is_released: bool,
}

struct Daemon {
    settings: Settings,
    leases: Mutex<BTreeMap<String, Arc<ActiveLease>>>,
}

/// The wall clock. Leases outlive this process, so a monotonic clock does not suffice.
#[expect(clippy::disallowed_methods)]
fn now() -> SystemTime {
    SystemTime::now()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn log(text: &str) {
    eprintln!("dhcp: {text}");
}

/// The code of a DHCP option, given by its name or number.
fn code(name: &str) -> Result<u8, Error> {
    let known = match name {
        "subnet-mask" => Some(option::SUBNET_MASK),
        "routers" => Some(option::ROUTERS),
        "host-name" => Some(option::HOST_NAME),
        "static-routes" => Some(option::STATIC_ROUTES),
        "classless-static-routes" => Some(option::CLASSLESS_ROUTES),
        "dhcp-client-identifier" => Some(option::CLIENT_ID),
        "vendor-class-identifier" => Some(option::VENDOR_CLASS),
        "user-class" => Some(option::USER_CLASS),
        figures => figures.parse().ok().filter(|n| (1..255).contains(n)),
    };
    known.ok_or_else(|| {
        Error::config(format!(
            "ipam: the DHCP option {name:?} is unknown: use its number, from 1 to 254"
        ))
    })
}

impl LeaseOwner {
    fn parse(request: Json<'_>, prefix: &Path) -> Result<LeaseOwner, Error> {
        let config = request.object("config")?;
        let ipam = config.object("ipam")?;
        let (network, container, ifname) = (
            config.text("name")?,
            request.text("container")?,
            request.text("ifname")?,
        );
        let arguments: Vec<&str> = request
            .text("args")?
            .split(';')
            .filter_map(|pair| pair.split_once('='))
            .map(|(k, _)| k)
            .collect();
        let arguments = cni_args(request.text("args")?, &arguments)?;
        let mut options = vec![];
        for item in ipam.list("provide")?.iter().map(Json) {
            let (name, value, argument) = (
                item.text("option")?,
                item.text("value")?,
                item.text("fromArg")?,
            );
            let value = if argument.is_empty() {
                value
            } else {
                arguments.get(argument).map_or("", String::as_str)
            };
            if !value.is_empty() {
                options.push((code(name)?, value.as_bytes().to_vec()));
            }
        }
        let id: String = format!("{container}/{network}/{ifname}")
            .chars()
            .take(253)
            .collect();
        if !options.iter().any(|(c, _)| *c == option::CLIENT_ID) {
            options.push((option::CLIENT_ID, [&[0], id.as_bytes()].concat()));
        }
        let mut requested_options = vec![
            option::SUBNET_MASK,
            option::ROUTERS,
            option::STATIC_ROUTES,
            option::CLASSLESS_ROUTES,
        ];
        for item in ipam.list("request")?.iter().map(Json) {
            if item.flag("skipDefault")? {
                requested_options.retain(|w| ![option::ROUTERS, option::SUBNET_MASK].contains(w));
            }
            let name = item.text("option")?;
            if !name.is_empty() {
                requested_options.push(code(name)?);
            }
        }
        requested_options.dedup();
        let netns = request.text("netns")?;
        let below = || {
            prefix
                .join(netns.trim_start_matches('/'))
                .to_string_lossy()
                .into_owned()
        };
        let netns = if prefix.as_os_str().is_empty() {
            netns.to_owned()
        } else {
            below()
        };
        let (network, container, ifname) =
            (network.to_owned(), container.to_owned(), ifname.to_owned());
        Ok(LeaseOwner {
            network,
            container,
            ifname,
            namespace: Namespace::at(Path::new(&netns)),
            netns,
            options,
            requested_options,
        })
    }

    fn key(network: &str, container: &str, ifname: &str) -> String {
        digest(&format!("{network}\n{container}\n{ifname}"), 32)
    }

    fn own_key(&self) -> String {
        Self::key(&self.network, &self.container, &self.ifname)
    }

    /// Runs `work` in the container's namespace. Fails if the path now leads to another namespace.
    fn inside<T>(&self, work: impl FnOnce(&mut Socket) -> Result<T, Error>) -> Result<T, Error> {
        let namespace = netns::require(&self.netns)?;
        if !Namespace::at(Path::new(&self.netns)).may_equal(self.namespace) {
            return Err(Error::new(
                Error::NAMESPACE,
                format!("{} now leads to another network namespace", self.netns),
            ));
        }
        netns::inside(&namespace, || {
            work(
                &mut Socket::route()
                    .map_err(|e| Error::doing("opening a netlink socket failed", e))?,
            )
        })
    }

    /// Sets the container's link up and returns the request parameters.
    fn request_parameters(
        &self,
        settings: &Settings,
        socket: &mut Socket,
    ) -> Result<RequestParameters, Error> {
        let failed = |e| Error::doing(format!("the interface {:?} cannot be used", self.ifname), e);
        let link = socket.link(&self.ifname).map_err(failed)?;
        let link = link.ok_or_else(|| {
            Error::other(format!(
                "the interface {:?} is missing in the container",
                self.ifname
            ))
        })?;
        if !link.up {
            socket.set_up(link.index, true).map_err(failed)?;
        }
        let mac = parse_mac(&link.mac).ok_or_else(|| {
            Error::other(format!(
                "the interface {:?} has no MAC address",
                self.ifname
            ))
        })?;
        Ok(RequestParameters {
            link: (link.index, mac),
            options: self.options.clone(),
            requested_options: self.requested_options.clone(),
            broadcast: settings.broadcast,
            timeout: settings.timeout,
            max_retransmit_delay: settings.max_retransmit_delay,
        })
    }
}

fn to_json(owner: &LeaseOwner, state: &State) -> Value {
    let since = state
        .since
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    json!({"network": owner.network, "container": owner.container, "ifname": owner.ifname, "netns": owner.netns,
        "inode": owner.namespace.inode, "namespace": owner.namespace.json(), "options": owner.options, "wanted": owner.requested_options, "since": since, "lease": state.lease.json()})
}

fn from_json(value: &Value) -> Option<(LeaseOwner, State)> {
    let text = |key: &str| value[key].as_str().map(str::to_owned);
    let byte = |v: &Value| v.as_u64().and_then(|n| u8::try_from(n).ok());
    let bytes = |v: &Value| v.as_array()?.iter().map(byte).collect::<Option<Vec<u8>>>();
    let options = value["options"]
        .as_array()?
        .iter()
        .map(|o| Some((byte(&o[0])?, bytes(&o[1])?)))
        .collect::<Option<_>>()?;
    let owner = LeaseOwner {
        network: text("network")?,
        container: text("container")?,
        ifname: text("ifname")?,
        netns: text("netns")?,
        namespace: Namespace::parse(&value["namespace"], &value["inode"])?,
        options,
        requested_options: bytes(&value["wanted"])?,
    };
    let since = UNIX_EPOCH + Duration::from_secs(value["since"].as_u64()?);
    Some((
        owner,
        State {
            lease: Lease::parse(&value["lease"])?,
            since,
            is_released: false,
        },
    ))
}

impl Daemon {
    fn dir(&self) -> PathBuf {
        self.settings.socket.with_extension("leases")
    }

    fn file(&self, owner: &LeaseOwner) -> PathBuf {
        self.dir().join(owner.own_key())
    }

    /// Stores a lease in its file, atomically.
    fn store_lease(&self, owner: &LeaseOwner, state: &State) -> std::io::Result<()> {
        let path = self.file(owner);
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, to_json(owner, state).to_string())?;
        std::fs::rename(fresh, path)
    }

    fn remove_lease_file(&self, owner: &LeaseOwner) {
        match std::fs::remove_file(self.file(owner)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                log(&format!("removing a lease file failed: {error}"))
            }
            _ => {}
        }
    }

    /// Resumes the leases that an earlier daemon has stored.
    fn resume(self: &Arc<Daemon>) -> std::io::Result<()> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(self.dir())?;
        for entry in std::fs::read_dir(self.dir())? {
            let path = entry?.path();
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            match serde_json::from_str(&text)
                .ok()
                .as_ref()
                .and_then(from_json)
            {
                Some((owner, state)) => self.add_lease(owner, state),
                None => {
                    log(&format!(
                        "{} is not a lease file; removing it",
                        path.display()
                    ));
                    std::fs::remove_file(&path)?;
                }
            }
        }
        Ok(())
    }

    fn add_lease(self: &Arc<Daemon>, owner: LeaseOwner, state: State) {
        let key = owner.own_key();
        let active = Arc::new(ActiveLease {
            owner,
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let before = lock(&self.leases).insert(key, Arc::clone(&active));
        if let Some(before) = before {
            lock(&before.state).is_released = true;
            before.changed.notify_all();
        }
        let daemon = Arc::clone(self);
        std::thread::spawn(move || daemon.renew_until_released(&active));
    }

    /// Renews a lease until it is released or expires, or until the container's namespace is removed.
    fn renew_until_released(&self, active: &Arc<ActiveLease>) {
        let owner = &active.owner;
        let name = format!("{} of {}", owner.ifname, owner.container);
        loop {
            let state = lock(&active.state).clone();
            if state.is_released {
                return;
            }
            let age = now().duration_since(state.since).unwrap_or_default();
            let (any, again) = match state.lease.action(age) {
                LeaseAction::Wait(time) => {
                    self.sleep(active, time);
                    continue;
                }
                LeaseAction::Renew(again) => (false, again),
                LeaseAction::Rebind(again) => (true, again),
                LeaseAction::Expired => {
                    log(&format!(
                        "the lease of {} for {name} has expired; bringing the interface down",
                        state.lease.address
                    ));
                    let down = owner.inside(|socket| {
                        let failed = |e| Error::doing("the interface cannot be brought down", e);
                        match socket.link(&owner.ifname).map_err(failed)? {
                            Some(link) => socket
                                .change_link(
                                    link.index,
                                    Change {
                                        up: Some(false),
                                        ..Change::default()
                                    },
                                )
                                .map_err(failed),
                            None => Ok(()),
                        }
                    });
                    if let Err(error) = down {
                        log(&format!("{name}: {error}"));
                    }
                    return self.drop_lease(active);
                }
            };
            let extended = owner.inside(|socket| {
                owner
                    .request_parameters(&self.settings, socket)?
                    .extend(&state.lease, age, any)
            });
            match extended {
                Ok(lease) => {
                    let mut state = lock(&active.state);
                    (state.lease, state.since) = (lease, now());
                    if !state.is_released
                        && let Err(error) = self.store_lease(owner, &state)
                    {
                        log(&format!(
                            "writing the lease of {name} to its file failed: {error}"
                        ));
                    }
                }
                Err(error) if error.code == Error::NAMESPACE => {
                    log(&format!(
                        "{name} no longer exists; dropping its lease: {error}"
                    ));
                    return self.drop_lease(active);
                }
                Err(error) => {
                    log(&format!(
                        "renewing the lease of {} for {name} failed, retrying: {error}",
                        state.lease.address
                    ));
                    self.sleep(active, Some(again));
                }
            }
        }
    }

    fn sleep(&self, active: &ActiveLease, time: Option<Duration>) {
        // Wakes up at least hourly, because the wall clock may have been set.
        const MAX_SLEEP: Duration = Duration::from_secs(3600);
        let state = lock(&active.state);
        let wait = active.changed.wait_timeout_while(
            state,
            time.unwrap_or(MAX_SLEEP).min(MAX_SLEEP),
            |state| !state.is_released,
        );
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }

    /// Removes a lease, unless a newer lease has replaced it.
    fn drop_lease(&self, active: &Arc<ActiveLease>) {
        let key = active.owner.own_key();
        let mut leases = lock(&self.leases);
        if leases
            .get(&key)
            .is_some_and(|other| Arc::ptr_eq(other, active))
        {
            leases.remove(&key);
            self.remove_lease_file(&active.owner);
        }
    }

    fn add(self: &Arc<Daemon>, request: Json<'_>) -> Result<Value, Error> {
        let owner = LeaseOwner::parse(request, &self.settings.prefix)?;
        let priority = request
            .object("config")?
            .object("ipam")?
            .get("priority")
            .and_then(Value::as_i64);
        let before = lock(&self.leases)
            .get(&owner.own_key())
            .map(|active| lock(&active.state).lease.address.addr());
        let lease = owner.inside(|socket| {
            owner
                .request_parameters(&self.settings, socket)?
                .acquire(before)
        })?;
        let state = State {
            lease,
            since: now(),
            is_released: false,
        };
        let failed = |e| Error::doing("writing the lease to its file failed", e);
        self.store_lease(&owner, &state).map_err(failed)?;
        let result = state.lease.success(priority).json("1.0.0")?;
        self.add_lease(owner, state);
        Ok(result)
    }

    /// Releases the leases for which `selects` is true. If the container's namespace no longer
    /// exists, no message can be sent and the server waits for the lease to expire.
    fn release(&self, selects: impl Fn(&LeaseOwner) -> bool) -> usize {
        let matching: Vec<Arc<ActiveLease>> = lock(&self.leases)
            .values()
            .filter(|h| selects(&h.owner))
            .cloned()
            .collect();
        for active in &matching {
            let lease = {
                let mut state = lock(&active.state);
                state.is_released = true;
                state.lease.clone()
            };
            active.changed.notify_all();
            let released = active.owner.inside(|socket| {
                active
                    .owner
                    .request_parameters(&self.settings, socket)?
                    .release(&lease)
            });
            if let Err(error) = released {
                log(&format!(
                    "releasing the lease of {} for {} failed, so it expires on the server: {error}",
                    lease.address, active.owner.container
                ));
            }
            self.drop_lease(active);
        }
        matching.len()
    }

    fn check(&self, request: Json<'_>) -> Result<Value, Error> {
        let (network, container, ifname) = (
            request.object("config")?.text("name")?,
            request.text("container")?,
            request.text("ifname")?,
        );
        let active = lock(&self.leases)
            .get(&LeaseOwner::key(network, container, ifname))
            .cloned();
        let active = active.ok_or_else(|| {
            Error::other(format!(
                "dhcp: no lease for {ifname} of container {container}"
            ))
        })?;
        let address = lock(&active.state).lease.address.to_string();
        Ok(json!({"address": address}))
    }

    fn answer(self: &Arc<Daemon>, request: Json<'_>) -> Result<Value, Error> {
        let (container, ifname) = (request.text("container")?, request.text("ifname")?);
        let network = request.object("config")?.text("name")?;
        match request.text("verb")? {
            "ADD" => self.add(request),
            "DEL" => {
                self.release(|h| {
                    h.network == network && h.container == container && h.ifname == ifname
                });
                Ok(json!({}))
            }
            "CHECK" => self.check(request),
            "GC" => {
                let keep = request.list("keep")?;
                let is_kept = |h: &LeaseOwner| {
                    keep.iter()
                        .any(|k| k[0] == h.container.as_str() && k[1] == h.ifname.as_str())
                };
                Ok(json!({"released": self.release(|h| h.network == network && !is_kept(h))}))
            }
            "STATUS" => Ok(json!({})),
            other => Err(Error::new(
                Error::DECODE,
                format!("unknown request {other:?}"),
            )),
        }
    }

    fn serve(self: &Arc<Daemon>, mut stream: UnixStream) -> std::io::Result<()> {
        stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
        stream.set_write_timeout(Some(CLIENT_TIMEOUT))?;
        let mut input = vec![];
        std::io::Read::by_ref(&mut stream)
            .take(LIMIT)
            .read_to_end(&mut input)?;
        let request: Result<Value, Error> =
            serde_json::from_slice(&input).map_err(|e| Error::new(Error::DECODE, e.to_string()));
        let answer = match request.and_then(|request| self.answer(Json(&request))) {
            Ok(result) => json!({"result": result}),
            Err(error) => json!({"code": error.code, "msg": error.message}),
        };
        stream.write_all(answer.to_string().as_bytes())
    }
}

/// The socket that systemd passes to this process, or a new socket that is accessible to root only.
#[allow(unsafe_code)]
fn listener(path: &Path) -> std::io::Result<UnixListener> {
    const FIRST: i32 = 3;
    let env = |key: &str| std::env::var(key).ok();
    if env("LISTEN_PID") == Some(std::process::id().to_string())
        && env("LISTEN_FDS").as_deref() == Some("1")
    {
        // SAFETY: LISTEN_PID and LISTEN_FDS guarantee that this descriptor is open and belongs to this process.
        return Ok(unsafe { UnixListener::from_raw_fd(FIRST) });
    }
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    local::listen(path)
}

/// Runs until the process is killed. The next daemon resumes the leases.
pub fn run(arguments: &[String]) -> Result<(), String> {
    if arguments
        .iter()
        .any(|a| ["-h", "-help", "--help"].contains(&a.as_str()))
    {
        println!("{USAGE}");
        return Ok(());
    }
    let settings = Settings::parse(arguments)?;
    let listener = listener(&settings.socket)
        .map_err(|e| format!("listening on {} failed: {e}", settings.socket.display()))?;
    if let Some(path) = &settings.pid_file {
        std::fs::write(path, std::process::id().to_string())
            .map_err(|e| format!("{} cannot be written: {e}", path.display()))?;
    }
    let daemon = Arc::new(Daemon {
        settings,
        leases: Mutex::default(),
    });
    daemon.resume().map_err(|e| {
        format!(
            "the leases in {} cannot be read: {e}",
            daemon.dir().display()
        )
    })?;
    for stream in listener.incoming() {
        let daemon = Arc::clone(&daemon);
        match stream {
            Ok(stream) => drop(std::thread::spawn(move || {
                if let Err(error) = daemon.serve(stream) {
                    log(&format!("a request was interrupted: {error}"));
                }
            })),
            Err(error) => {
                // Most likely out of file descriptors; a later attempt may succeed.
                log(&format!("accepting a request failed: {error}"));
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_lists_the_options() {
        insta::assert_snapshot!("help", USAGE);
    }

    #[test]
    fn the_arguments_of_the_reference_are_accepted() {
        let parse = |text: &str| {
            Settings::parse(
                &text
                    .split_whitespace()
                    .map(str::to_owned)
                    .collect::<Vec<_>>(),
            )
        };
        let settings =
            parse("-socketpath /x -timeout=1m30s --broadcast -resendmax 500ms").expect("fine");
        assert_eq!(
            (settings.socket, settings.timeout, settings.broadcast),
            ("/x".into(), Duration::from_secs(90), true)
        );
        for wrong in [
            "-timeout",
            "-timeout 5",
            "-timeout 0s",
            "-frob",
            "x",
            "-resendmax 1y",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
