//! Shutdown announcements and inhibitors of logind, over D-Bus (org.freedesktop.login1; KEP-2000).
//!
//! A shutdown waits for holders of an inhibitor for at most `InhibitDelayMaxSec`. If that
//! is too short, the agent raises it in the file that the kubelet uses for this purpose.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use zbus::Connection;
use zbus::connection::Builder;
use zbus::proxy::OwnerChangedStream;
use zbus::zvariant::OwnedFd;

use super::systemd::ManagerProxy;

/// Timeout for an answer of logind.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// The directory of additional configuration files of logind.
const CONFIGURATION: &str = "/etc/systemd/logind.conf.d";
/// The file with the delay. The name is the kubelet's, so that there are never two.
const DELAY_FILE: &str = "99-kubelet.conf";
/// The systemd unit of logind.
const UNIT: &str = "systemd-logind.service";
/// The signal on which logind reloads its configuration.
const SIGHUP: i32 = 1;
/// Maximum number of checks whether logind has reloaded. The
/// pause doubles after each, starting at [`FIRST_CHECK_PAUSE`].
const MAX_CHECKS: u32 = 5;
const FIRST_CHECK_PAUSE: Duration = Duration::from_millis(100);

/// The error of logind when an inhibitor is requested during a shutdown.
const IN_PROGRESS: &str = "org.freedesktop.login1.OperationInProgress";

/// Why shutdowns are not announced or cannot be delayed.
#[derive(Debug, thiserror::Error)]
pub enum LogindError {
    /// A shutdown is in progress; new inhibitors have no effect.
    #[error("a shutdown is in progress")]
    InProgress,
    /// The bus did not answer in time.
    #[error("the system's D-Bus does not respond")]
    NoReply,
    /// A D-Bus call failed.
    #[error("{what}: {why}")]
    Call {
        /// The operation that failed.
        what: &'static str,
        /// The error of the call.
        why: zbus::Error,
    },
    /// logind's configuration could not be written.
    #[error("{} cannot be written: {why}", .file.display())]
    Configuration {
        /// The file.
        file: PathBuf,
        /// The error of the write.
        why: std::io::Error,
    },
}

/// Maps a failed call to an error.
fn failed(what: &'static str) -> impl FnOnce(zbus::Error) -> LogindError {
    move |why| match &why {
        zbus::Error::MethodError(name, ..) if name.as_str() == IN_PROGRESS => {
            LogindError::InProgress
        }
        _ => LogindError::Call { what, why },
    }
}

/// Delays a shutdown until it is dropped.
pub type Inhibitor = Box<dyn Any + Send>;

/// A source of shutdown announcements.
#[async_trait]
pub trait Announcer: Send + Sync + 'static {
    /// Subscribes to announcements, and makes sure that a shutdown waits up to `needed` for inhibitors.
    async fn listen(&self, needed: Duration) -> Result<Box<dyn Announcements>, LogindError>;
}

/// A subscription to shutdown announcements.
#[async_trait]
pub trait Announcements: Send {
    /// Takes an inhibitor. Fails during a shutdown ([`LogindError::InProgress`]).
    async fn inhibit(&mut self) -> Result<Inhibitor, LogindError>;
    /// Whether a shutdown is in progress.
    async fn is_shutting_down(&mut self) -> Result<bool, LogindError>;
    /// The next announcement: true for a pending shutdown, false if it was cancelled.
    /// `None` if there will be no more, because logind was stopped or restarted.
    async fn next(&mut self) -> Option<bool>;
}

#[zbus::proxy(
    interface = "org.freedesktop.login1.Manager",
    default_service = "org.freedesktop.login1",
    default_path = "/org/freedesktop/login1",
    gen_blocking = false
)]
trait Login {
    fn inhibit(&self, what: &str, who: &str, why: &str, mode: &str) -> zbus::Result<OwnedFd>;
    #[zbus(signal)]
    fn prepare_for_shutdown(&self, start: bool) -> zbus::Result<()>;
    #[zbus(property(emits_changed_signal = "false"), name = "InhibitDelayMaxUSec")]
    fn longest_delay(&self) -> zbus::Result<u64>;
    #[zbus(property(emits_changed_signal = "false"))]
    fn preparing_for_shutdown(&self) -> zbus::Result<bool>;
}

/// A connection to logind.
pub struct Logind {
    /// The address of the bus; `None` for the system bus.
    address: Option<String>,
    configuration: PathBuf,
}

impl Logind {
    /// The machine's logind.
    #[must_use]
    pub fn system() -> Logind {
        Logind {
            address: None,
            configuration: CONFIGURATION.into(),
        }
    }

    /// A logind on another bus, with another configuration directory.
    #[must_use]
    pub fn at(address: &str, configuration: &Path) -> Logind {
        Logind {
            address: Some(address.to_owned()),
            configuration: configuration.to_owned(),
        }
    }

    async fn connect(&self) -> zbus::Result<Connection> {
        let builder = match &self.address {
            Some(address) => Builder::address(address.as_str())?,
            None => Builder::system()?,
        };
        builder.method_timeout(REPLY_TIMEOUT).build().await
    }

    /// Raises the maximum delay to what is needed. Returns the effective delay.
    async fn raise_delay(
        &self,
        connection: &Connection,
        login: &LoginProxy<'_>,
        needed: Duration,
    ) -> Result<Duration, LogindError> {
        let file = self.configuration.join(DELAY_FILE);
        let own = file.clone();
        let written = tokio::task::spawn_blocking(move || write_delay(&own, needed)).await;
        // The task does not panic, and is cancelled only when the process exits.
        let written = written.map_err(std::io::Error::other).flatten();
        written.map_err(|why| LogindError::Configuration { file, why })?;
        let manager = ManagerProxy::new(connection).await;
        let reload = async { manager?.kill_unit(UNIT, "all", SIGHUP).await };
        reload.await.map_err(failed(
            "requesting logind to reload its configuration failed",
        ))?;
        let mut pause = FIRST_CHECK_PAUSE;
        for _ in 0..MAX_CHECKS {
            tokio::time::sleep(pause).await;
            if delay(login).await? >= needed {
                break;
            }
            pause *= 2;
        }
        delay(login).await
    }
}

async fn delay(login: &LoginProxy<'_>) -> Result<Duration, LogindError> {
    let delay = login.longest_delay().await;
    let delay = delay.map_err(failed("reading InhibitDelayMaxUSec of logind failed"))?;
    Ok(Duration::from_micros(delay))
}

fn write_delay(file: &Path, needed: Duration) -> std::io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
    let seconds = needed.as_secs();
    let text = format!(
        "# A shutdown waits for the pods of this node (shutdownGracePeriod of its agent).\n[Login]\nInhibitDelayMaxSec={seconds}\n"
    );
    if let Some(dir) = file.parent() {
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(0o755).create(dir)?;
    }
    super::file::replace(file, text.as_bytes())?;
    // World-readable, like all of logind's configuration.
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o644))
}

#[async_trait]
impl Announcer for Logind {
    async fn listen(&self, needed: Duration) -> Result<Box<dyn Announcements>, LogindError> {
        let connection = tokio::time::timeout(REPLY_TIMEOUT, self.connect()).await;
        let connection = connection
            .map_err(|_| LogindError::NoReply)?
            .map_err(failed("the system's D-Bus cannot be reached"))?;
        let listen = async {
            let login = LoginProxy::new(&connection).await?;
            let owners = login.inner().receive_owner_changed().await?;
            let signals = login.receive_prepare_for_shutdown().await?;
            zbus::Result::Ok((login, owners, signals))
        };
        let (login, owners, signals) = listen
            .await
            .map_err(failed("subscribing to the signals of logind failed"))?;
        let longest = delay(&login).await?;
        if longest < needed {
            let raised = self.raise_delay(&connection, &login, needed).await;
            let short = match raised {
                Ok(longest) if longest >= needed => None,
                Ok(longest) => Some(format!("its delay is {longest:?}")),
                Err(error) => Some(error.to_string()),
            };
            if let Some(why) = short {
                tracing::warn!(
                    why,
                    ?needed,
                    "logind's shutdown delay is too short: pods may be killed when the machine shuts down; set InhibitDelayMaxSec in logind.conf"
                );
            }
        }
        Ok(Box::new(Listening {
            login,
            owners,
            signals,
        }))
    }
}

struct Listening {
    login: LoginProxy<'static>,
    /// Notifies when logind restarts.
    owners: OwnerChangedStream<'static>,
    signals: PrepareForShutdownStream,
}

#[async_trait]
impl Announcements for Listening {
    async fn inhibit(&mut self) -> Result<Inhibitor, LogindError> {
        let why = "pods of this node need time to end";
        let inhibit = self.login.inhibit("shutdown", "kubelet", why, "delay");
        let inhibitor = inhibit
            .await
            .map_err(failed("taking a shutdown inhibitor of logind failed"))?;
        Ok(Box::new(inhibitor))
    }

    async fn is_shutting_down(&mut self) -> Result<bool, LogindError> {
        let preparing = self.login.preparing_for_shutdown().await;
        preparing.map_err(failed("reading PreparingForShutdown of logind failed"))
    }

    async fn next(&mut self) -> Option<bool> {
        tokio::select! {
            // Cancel-safe: streams keep items that were not taken.
            biased;
            signal = self.signals.next() => Some(signal?.args().ok()?.start),
            _ = self.owners.next() => None,
        }
    }
}
