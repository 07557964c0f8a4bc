//! Slices that systemd creates and removes for the agent, over D-Bus (org.freedesktop.systemd1).

use std::collections::HashMap;
use std::time::Duration;

use tokio::sync::Mutex;
use zbus::Connection;
use zbus::zvariant::Value;

use super::failure::{HostError, doing};
use holdfast_core::lock::lock;

/// Timeout for an answer of systemd.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

#[zbus::proxy(
    interface = "org.freedesktop.systemd1.Manager",
    default_service = "org.freedesktop.systemd1",
    default_path = "/org/freedesktop/systemd1",
    gen_blocking = false
)]
pub(super) trait Manager {
    fn start_transient_unit(
        &self,
        name: &str,
        mode: &str,
        properties: &[(&str, Value<'_>)],
        others: &[(&str, &[(&str, Value<'_>)])],
    ) -> zbus::Result<zbus::zvariant::OwnedObjectPath>;
    fn set_unit_properties(
        &self,
        name: &str,
        runtime: bool,
        properties: &[(&str, Value<'_>)],
    ) -> zbus::Result<()>;
    fn stop_unit(&self, name: &str, mode: &str) -> zbus::Result<zbus::zvariant::OwnedObjectPath>;
    fn kill_unit(&self, name: &str, who: &str, signal: i32) -> zbus::Result<()>;
}

/// systemd's slices, and the properties last requested for each.
#[derive(Default)]
pub struct Slices {
    /// Created at the first call, and again after it broke.
    connection: Mutex<Option<Connection>>,
    known: std::sync::Mutex<HashMap<String, Vec<(&'static str, u64)>>>,
}

impl From<zbus::Error> for HostError {
    fn from(error: zbus::Error) -> HostError {
        HostError::failed(error.to_string())
    }
}

fn is(error: &zbus::Error, name: &str) -> bool {
    matches!(error, zbus::Error::MethodError(found, _, _) if found.as_str() == name)
}

impl Slices {
    async fn manager(&self) -> Result<ManagerProxy<'static>, HostError> {
        let mut held = self.connection.lock().await;
        let connection = match &*held {
            Some(connection) => connection.clone(),
            None => held
                .insert(
                    Connection::system()
                        .await
                        .map_err(doing("systemd cannot be reached over D-Bus"))?,
                )
                .clone(),
        };
        ManagerProxy::new(&connection)
            .await
            .map_err(doing("calling systemd over D-Bus failed"))
    }

    /// Awaits a call with a timeout. After a connection error or timeout, the next call connects again.
    async fn answer<T>(
        &self,
        what: &str,
        call: impl Future<Output = zbus::Result<T>>,
    ) -> Result<zbus::Result<T>, HostError> {
        match tokio::time::timeout(REPLY_TIMEOUT, call).await {
            Ok(Err(error @ (zbus::Error::InputOutput(_) | zbus::Error::Handshake(_)))) => {
                self.connection.lock().await.take();
                Err(doing(what)(error))
            }
            Ok(result) => Ok(result),
            Err(_) => {
                self.connection.lock().await.take();
                let seconds = REPLY_TIMEOUT.as_secs();
                Err(HostError::failed(format!(
                    "{what}: systemd has not answered for {seconds}s"
                )))
            }
        }
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<String, Vec<(&'static str, u64)>>> {
        lock(&self.known)
    }

    /// Creates a slice with these properties, or updates an existing
    /// one. Skips the call if the same properties were requested before.
    pub async fn ensure(
        &self,
        name: &str,
        properties: Vec<(&'static str, u64)>,
    ) -> Result<(), HostError> {
        if self.known().get(name) == Some(&properties) {
            return Ok(());
        }
        let manager = self.manager().await?;
        let values = || {
            properties
                .iter()
                .map(|(key, value)| (*key, Value::from(*value)))
        };
        let flags = [
            "MemoryAccounting",
            "CPUAccounting",
            "IOAccounting",
            "TasksAccounting",
        ]
        .map(|key| (key, Value::from(true)));
        let text = [
            ("Description", Value::from("pods of this node")),
            ("DefaultDependencies", Value::from(false)),
        ];
        let all: Vec<(&str, Value<'_>)> = text.into_iter().chain(flags).chain(values()).collect();
        let what = format!("the slice {name} cannot be created");
        let made = self
            .answer(
                &what,
                manager.start_transient_unit(name, "replace", &all, &[]),
            )
            .await?;
        match made {
            Ok(_) => {}
            Err(error) if is(&error, "org.freedesktop.systemd1.UnitExists") => {
                let own: Vec<(&str, Value<'_>)> = values().collect();
                let set = self
                    .answer(&what, manager.set_unit_properties(name, true, &own))
                    .await?;
                set.map_err(doing(format!(
                    "the properties of the slice {name} cannot be set"
                )))?;
            }
            Err(error) => return Err(doing(what)(error)),
        }
        self.known().insert(name.to_owned(), properties);
        Ok(())
    }

    /// Makes the next [`Slices::ensure`] send the properties again.
    pub fn forget(&self, name: &str) {
        self.known().remove(name);
    }

    /// Removes a slice and everything below it. A missing slice is no error.
    pub async fn remove(&self, name: &str) -> Result<(), HostError> {
        self.forget(name);
        let manager = self.manager().await?;
        let what = format!("the slice {name} cannot be removed");
        match self
            .answer(&what, manager.stop_unit(name, "replace"))
            .await?
        {
            Err(error) if is(&error, "org.freedesktop.systemd1.NoSuchUnit") => Ok(()),
            Err(error) => Err(doing(what)(error)),
            Ok(_) => Ok(()),
        }
    }
}
