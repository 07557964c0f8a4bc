//! The verbosity of this process's log. The program that sets up the log provides the function that changes it.

use std::sync::OnceLock;

/// Changes the verbosity. The error is the reason why it cannot be changed.
type Setter = dyn Fn(u8) -> Result<(), String> + Send + Sync;

static SETTER: OnceLock<Box<Setter>> = OnceLock::new();

/// Records how the verbosity is changed. Only the first call has an effect, because a process has one log.
pub fn provide(setter: impl Fn(u8) -> Result<(), String> + Send + Sync + 'static) {
    let _ = SETTER.set(Box::new(setter));
}

/// Changes the verbosity, from 0 to 255 as in the kubelet. The error is the reason why it cannot be changed.
pub fn set(verbosity: u8) -> Result<(), String> {
    let no_log = "this process has no log whose verbosity can be changed";
    SETTER.get().ok_or(no_log)?(verbosity)
}
