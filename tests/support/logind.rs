//! A logind of the test's own, on its own message bus. It announces shutdowns when the test requests
//! it, and lists the inhibitor locks.

use std::io::{PipeReader, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use zbus::connection::Builder;
use zbus::object_server::SignalEmitter;

const PATH: &str = "/org/freedesktop/login1";

#[derive(Default)]
struct State {
    shutting_down: bool,
    /// In microseconds.
    longest_delay: u64,
    /// The configuration file, which SIGHUP makes it read again.
    configuration: PathBuf,
    /// A description of each inhibitor lock, and the reader of its pipe, which reaches end of file when the
    /// lock is released.
    inhibitors: Vec<(String, PipeReader)>,
    /// Units that received a signal.
    signals: Vec<(String, i32)>,
}

type Shared = Arc<Mutex<State>>;

struct Manager(Shared);

/// Errors of logind.
#[derive(Debug, zbus::DBusError)]
#[zbus(prefix = "org.freedesktop.login1")]
enum LoginError {
    #[zbus(error)]
    ZBus(zbus::Error),
    OperationInProgress(String),
}

#[zbus::interface(name = "org.freedesktop.login1.Manager")]
impl Manager {
    fn inhibit(
        &self,
        what: &str,
        who: &str,
        _why: &str,
        mode: &str,
    ) -> Result<zbus::zvariant::OwnedFd, LoginError> {
        let mut state = self.0.lock().unwrap();
        if state.shutting_down {
            let why = "The operation inhibition has been requested for is already running";
            return Err(LoginError::OperationInProgress(why.into()));
        }
        let (reader, writer) = std::io::pipe().unwrap();
        let flags = nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK);
        nix::fcntl::fcntl(reader.as_fd(), flags).unwrap();
        state
            .inhibitors
            .push((format!("{what} {who} {mode}"), reader));
        Ok(OwnedFd::from(writer).into())
    }

    #[zbus(property(emits_changed_signal = "false"), name = "InhibitDelayMaxUSec")]
    fn longest_delay(&self) -> u64 {
        self.0.lock().unwrap().longest_delay
    }

    #[zbus(property(emits_changed_signal = "false"))]
    fn preparing_for_shutdown(&self) -> bool {
        self.0.lock().unwrap().shutting_down
    }

    #[zbus(signal)]
    async fn prepare_for_shutdown(emitter: &SignalEmitter<'_>, start: bool) -> zbus::Result<()>;
}

struct Units(Shared);

#[zbus::interface(name = "org.freedesktop.systemd1.Manager")]
impl Units {
    fn kill_unit(&self, name: &str, _who: &str, signal: i32) {
        let mut state = self.0.lock().unwrap();
        state.signals.push((name.to_owned(), signal));
        let file = state.configuration.join("99-kubelet.conf");
        let text = std::fs::read_to_string(file).unwrap();
        let seconds = text
            .lines()
            .find_map(|l| l.strip_prefix("InhibitDelayMaxSec="));
        state.longest_delay = seconds.unwrap().parse::<u64>().unwrap() * 1_000_000;
    }
}

/// The bus and the service; dropping this stops both.
pub struct Logind {
    state: Shared,
    bus: Child,
    dir: tempfile::TempDir,
    runtime: tokio::runtime::Runtime,
    connection: Option<zbus::Connection>,
}

impl Logind {
    /// A logind whose configured maximum delay is `delay`.
    pub fn start(delay: Duration) -> Logind {
        let dir = tempfile::tempdir().unwrap();
        let address = format!("unix:path={}", dir.path().join("bus").display());
        let bus = Command::new("dbus-daemon")
            .args(["--session", "--nofork", "--nopidfile", "--address"])
            .arg(&address)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("dbus-daemon is installed (make test installs it)");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let state = State {
            longest_delay: u64::try_from(delay.as_micros()).unwrap(),
            configuration: dir.path().join("logind.conf.d"),
            ..State::default()
        };
        let mut logind = Logind {
            state: Arc::new(Mutex::new(state)),
            bus,
            dir,
            runtime,
            connection: None,
        };
        let begun = Instant::now();
        // The socket exists a moment before the bus listens on it.
        while std::os::unix::net::UnixStream::connect(logind.dir.path().join("bus")).is_err() {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "the bus did not start in time"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        logind.restart();
        logind
    }

    /// The address of the bus.
    pub fn address(&self) -> String {
        format!("unix:path={}", self.dir.path().join("bus").display())
    }

    /// The path of its configuration.
    pub fn configuration(&self) -> PathBuf {
        self.state.lock().unwrap().configuration.clone()
    }

    /// Stops the service if it runs, and starts it again.
    pub fn restart(&mut self) {
        let (address, state) = (self.address(), Arc::clone(&self.state));
        let before = self.connection.take();
        let connection = self.runtime.block_on(async {
            if let Some(before) = before {
                before.close().await.unwrap();
            }
            Builder::address(address.as_str())
                .unwrap()
                .serve_at(PATH, Manager(Arc::clone(&state)))
                .unwrap()
                .serve_at("/org/freedesktop/systemd1", Units(state))
                .unwrap()
                .name("org.freedesktop.login1")
                .unwrap()
                .name("org.freedesktop.systemd1")
                .unwrap()
                .build()
                .await
                .unwrap()
        });
        self.connection = Some(connection);
    }

    /// Announces a shutdown, or cancels it.
    pub fn announce(&self, shutting_down: bool) {
        self.state.lock().unwrap().shutting_down = shutting_down;
        let connection = self.connection.as_ref().unwrap();
        self.runtime.block_on(async {
            let emitter = SignalEmitter::new(connection, PATH).unwrap();
            Manager::prepare_for_shutdown(&emitter, shutting_down)
                .await
                .unwrap();
        });
    }

    /// Descriptions of the inhibitor locks that are held.
    pub fn inhibitors(&self) -> Vec<String> {
        let mut state = self.state.lock().unwrap();
        // When all writers have closed the pipe, a read succeeds with end of file. Before that, it fails with
        // WouldBlock.
        state
            .inhibitors
            .retain_mut(|(_, reader)| reader.read(&mut [0]).is_err());
        state
            .inhibitors
            .iter()
            .map(|(what, _)| what.clone())
            .collect()
    }

    /// Units that received a signal.
    pub fn signals(&self) -> Vec<(String, i32)> {
        self.state.lock().unwrap().signals.clone()
    }
}

impl Drop for Logind {
    fn drop(&mut self) {
        // Connections are closed in tasks of the runtime.
        let _entered = self.runtime.enter();
        self.connection.take();
        // The bus may have exited already.
        let _ = self.bus.kill();
        let _ = self.bus.wait();
    }
}
