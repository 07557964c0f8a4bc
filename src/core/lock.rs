//! Mutexes without poison. Who panics while it holds one ends the process, or a request that fails and leaves what it
//! guards whole: `https::border` says which.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits for the mutex.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
