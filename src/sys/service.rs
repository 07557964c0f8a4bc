//! Notifies the service manager that started this process (sd_notify(3)). Does nothing without one.

use sd_notify::NotifyState;

fn tell(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "notifying systemd of the agent's state failed");
    }
}

/// The agent is ready.
pub fn ready() {
    tell(NotifyState::Ready);
}

/// The agent stops on request.
pub fn stopping() {
    tell(NotifyState::Stopping);
}

/// Sends keep-alive messages if the service manager has a watchdog.
/// Runs as a task, so that a blocked runtime is detected.
pub async fn alive() {
    let Some(patience) = sd_notify::watchdog_enabled() else {
        return;
    };
    loop {
        tell(NotifyState::Watchdog);
        tokio::time::sleep(patience / 2).await;
    }
}
