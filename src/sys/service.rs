//! Notifies the service manager that started this process (sd_notify(3)). Does nothing without one.

use sd_notify::NotifyState;

fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "notifying systemd of the agent's state failed");
    }
}

/// The agent is ready.
pub fn ready() {
    notify(NotifyState::Ready);
}

/// The agent stops on request.
pub fn stopping() {
    notify(NotifyState::Stopping);
}

/// Sends keep-alive messages if the service manager has a watchdog.
/// Runs as a task, so that a blocked runtime is detected.
pub async fn keep_watchdog_fed() {
    let Some(timeout) = sd_notify::watchdog_enabled() else {
        return;
    };
    loop {
        notify(NotifyState::Watchdog);
        tokio::time::sleep(timeout / 2).await;
    }
}
