//! The machine's shutdown as logind announces and delays it, over D-Bus (org.freedesktop.login1; KEP-2000).
//!
//! Whoever holds an inhibitor is waited for when the machine is shut down, as long as `InhibitDelayMaxSec` allows; where
//! that is too short it is raised, in the file that the kubelet uses for it.

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

/// How long logind may take for an answer.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Where logind reads its configuration besides its own file.
const CONFIGURATION: &str = "/etc/systemd/logind.conf.d";
/// The file for the delay: the kubelet's, so that there are never two.
const DELAY_FILE: &str = "99-kubelet.conf";
/// logind, as systemd knows it.
const UNIT: &str = "systemd-logind.service";
/// What makes it read its configuration again.
const SIGHUP: i32 = 1;
/// How often it is looked whether it has, with pauses that double from [`LOOK`].
const LOOKS: u32 = 5;
const LOOK: Duration = Duration::from_millis(100);

/// What logind answers when somebody wants to delay a shutdown that is under way.
const IN_PROGRESS: &str = "org.freedesktop.login1.OperationInProgress";

/// Why a shutdown is not announced, or does not wait.
#[derive(Debug, thiserror::Error)]
pub enum LogindError {
    /// One is under way: it waits for nobody who comes now.
    #[error("a shutdown is under way")]
    UnderWay,
    /// The bus does not answer in time.
    #[error("the system's D-Bus does not answer")]
    Silent,
    /// A call over the bus has failed.
    #[error("{what}: {why}")]
    Call {
        /// What could not be done by it.
        what: &'static str,
        /// Why.
        why: zbus::Error,
    },
    /// logind's configuration cannot be written.
    #[error("{} cannot be written: {why}", .file.display())]
    Configuration {
        /// The file.
        file: PathBuf,
        /// Why.
        why: std::io::Error,
    },
}

/// What a failed call means.
fn failed(what: &'static str) -> impl FnOnce(zbus::Error) -> LogindError {
    move |why| match &why {
        zbus::Error::MethodError(name, ..) if name.as_str() == IN_PROGRESS => LogindError::UnderWay,
        _ => LogindError::Call { what, why },
    }
}

/// While it is held, a shutdown waits; dropping it lets the shutdown go on.
pub type Inhibitor = Box<dyn Any + Send>;

/// Who knows that the machine is to be shut down.
#[async_trait]
pub trait Announcer: Send + Sync + 'static {
    /// Listens from now on, and sees to it that a shutdown waits for inhibitors as long as is `needed`.
    async fn listen(&self, needed: Duration) -> Result<Box<dyn Announcements>, LogindError>;
}

/// What is announced.
#[async_trait]
pub trait Announcements: Send {
    /// Makes a shutdown wait. Refused while one is under way ([`LogindError::UnderWay`]).
    async fn inhibit(&mut self) -> Result<Inhibitor, LogindError>;
    /// Whether a shutdown is under way.
    async fn is_shutting_down(&mut self) -> Result<bool, LogindError>;
    /// The next announcement: that the machine is to be shut down, or that it is not after all. None when there will be
    /// no more, because whoever announces has gone.
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

/// logind behind a bus.
pub struct Logind {
    /// The bus; none for the system's.
    address: Option<String>,
    configuration: PathBuf,
}

impl Logind {
    /// The machine's own.
    #[must_use]
    pub fn system() -> Logind {
        Logind {
            address: None,
            configuration: CONFIGURATION.into(),
        }
    }

    /// Another one, which reads its configuration in this directory.
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

    /// Raises the longest delay to what is needed. The answer is the delay that counts then.
    async fn raise_delay(
        &self,
        connection: &Connection,
        login: &LoginProxy<'_>,
        needed: Duration,
    ) -> Result<Duration, LogindError> {
        let file = self.configuration.join(DELAY_FILE);
        let own = file.clone();
        let written = tokio::task::spawn_blocking(move || write_delay(&own, needed)).await;
        // It does not panic, and is cut off with the process alone.
        let written = written.map_err(std::io::Error::other).flatten();
        written.map_err(|why| LogindError::Configuration { file, why })?;
        let manager = ManagerProxy::new(connection).await;
        let reload = async { manager?.kill_unit(UNIT, "all", SIGHUP).await };
        reload.await.map_err(failed(
            "logind cannot be told to read its configuration again",
        ))?;
        let mut pause = LOOK;
        for _ in 0..LOOKS {
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
    let delay = delay.map_err(failed("logind does not say how long it waits"))?;
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
    // Everybody may read it, as all of logind's configuration.
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o644))
}

#[async_trait]
impl Announcer for Logind {
    async fn listen(&self, needed: Duration) -> Result<Box<dyn Announcements>, LogindError> {
        let connection = tokio::time::timeout(REPLY_TIMEOUT, self.connect()).await;
        let connection = connection
            .map_err(|_| LogindError::Silent)?
            .map_err(failed("the system's D-Bus cannot be reached"))?;
        let listen = async {
            let login = LoginProxy::new(&connection).await?;
            let owners = login.inner().receive_owner_changed().await?;
            let signals = login.receive_prepare_for_shutdown().await?;
            zbus::Result::Ok((login, owners, signals))
        };
        let (login, owners, signals) = listen
            .await
            .map_err(failed("logind cannot be listened to"))?;
        let longest = delay(&login).await?;
        if longest < needed {
            let raised = self.raise_delay(&connection, &login, needed).await;
            let short = match raised {
                Ok(longest) if longest >= needed => None,
                Ok(longest) => Some(format!("it waits for {longest:?}")),
                Err(error) => Some(error.to_string()),
            };
            if let Some(why) = short {
                tracing::warn!(
                    why,
                    ?needed,
                    "logind waits for too short a time: pods may be cut off when the machine is shut down; set InhibitDelayMaxSec in logind.conf"
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
    /// Tells when logind is started anew.
    owners: OwnerChangedStream<'static>,
    signals: PrepareForShutdownStream,
}

#[async_trait]
impl Announcements for Listening {
    async fn inhibit(&mut self) -> Result<Inhibitor, LogindError> {
        let why = "pods of this node need time to end";
        let inhibit = self.login.inhibit("shutdown", "kubelet", why, "delay");
        let inhibitor = inhibit.await.map_err(failed("logind gives no inhibitor"))?;
        Ok(Box::new(inhibitor))
    }

    async fn is_shutting_down(&mut self) -> Result<bool, LogindError> {
        let preparing = self.login.preparing_for_shutdown().await;
        preparing.map_err(failed(
            "logind does not say whether the machine is shut down",
        ))
    }

    async fn next(&mut self) -> Option<bool> {
        tokio::select! {
            // Cancel-safe: streams keep what has not been taken.
            biased;
            signal = self.signals.next() => Some(signal?.args().ok()?.start),
            _ = self.owners.next() => None,
        }
    }
}
