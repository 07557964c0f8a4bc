//! Limits the memory that the allocator of this process retains.
#![allow(unsafe_code)]

use std::time::Duration;

/// The size from which malloc maps a buffer of its own, in bytes.
const MMAP_THRESHOLD: i32 = 256 << 10;

/// Limits what malloc retains: it has two arenas, because otherwise every thread that has allocated may retain memory, and
/// it maps large buffers, such as bodies of lists, which the system gets back when they are freed. By default, the first
/// freed buffer raises that size up to 32 MiB, and the heap keeps the holes that such buffers leave.
pub fn limit_malloc() {
    // SAFETY: mallopt only sets a parameter of the allocator and takes plain integers.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD);
    }
}

/// Interval between checks of the allocator.
const TRIM_INTERVAL: Duration = Duration::from_secs(30);

/// Returns memory to the system after bursts, until the process exits. Freed buffers and objects leave holes all over the
/// heap, and the allocator alone returns only its end. Nothing happens as long as at most `max_free` bytes are free.
pub async fn release_free_memory(max_free: usize) {
    loop {
        tokio::time::sleep(TRIM_INTERVAL).await;
        // On a separate thread: a heap of some hundred MiB takes milliseconds.
        let trimmed = tokio::task::spawn_blocking(move || {
            if free_bytes() > max_free {
                trim();
            }
        });
        // A panic stops the process.
        let _ = trimmed.await;
    }
}

/// Returns the bytes that the allocator keeps but that are not in use.
fn free_bytes() -> usize {
    // SAFETY: mallinfo2 takes nothing and only reads the allocator's counters.
    unsafe { libc::mallinfo2() }.fordblks
}

/// Returns free memory to the system.
fn trim() {
    // SAFETY: malloc_trim takes a plain integer and touches only free memory.
    unsafe {
        libc::malloc_trim(0);
    }
}
