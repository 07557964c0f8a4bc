//! Limits the memory that the allocator of this process retains.
#![allow(unsafe_code)]

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

/// Returns the bytes that the allocator keeps but that are not in use.
#[must_use]
pub fn free_bytes() -> usize {
    // SAFETY: mallinfo2 takes nothing and only reads the allocator's counters.
    unsafe { libc::mallinfo2() }.fordblks
}

/// Returns free memory to the system. Takes about a millisecond after a burst.
pub fn trim() {
    // SAFETY: malloc_trim takes a plain integer and touches only free memory.
    unsafe {
        libc::malloc_trim(0);
    }
}
