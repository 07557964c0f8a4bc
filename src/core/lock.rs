//! Mutexes that ignore poisoning. A panic while a mutex is locked either aborts the process, or fails a single request
//! and leaves the guarded data consistent; see `https::panic_boundary`.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks the mutex.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
