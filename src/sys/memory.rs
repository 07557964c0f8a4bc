//! Limits the memory that the allocator of this process retains.
#![allow(unsafe_code)]

/// Limits malloc to two arenas. Otherwise every thread that has allocated may retain memory.
pub fn limit_arenas() {
    // SAFETY: mallopt only sets a parameter of the allocator and takes plain integers.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
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
