//! What the service manager that started this process is told (sd_notify(3)). Without one, nothing happens.

use sd_notify::NotifyState;

fn tell(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "systemd could not be told how the agent is");
    }
}

/// The agent serves.
pub fn ready() {
    tell(NotifyState::Ready);
}

/// The agent ends because it was asked to.
pub fn stopping() {
    tell(NotifyState::Stopping);
}

/// Says that the process is alive, for as long as it is and somebody wants to know: tasks run, or it would not be said.
pub async fn alive() {
    let Some(patience) = sd_notify::watchdog_enabled() else {
        return;
    };
    loop {
        tell(NotifyState::Watchdog);
        tokio::time::sleep(patience / 2).await;
    }
}
