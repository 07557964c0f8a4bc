//! The process's own memory: keeping the allocator from hoarding.
#![allow(unsafe_code)]

/// At most two arenas: with more, every thread that once allocated keeps memory of its own.
pub fn limit_arenas() {
    // SAFETY: mallopt only sets a parameter of the allocator and takes plain integers.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}

/// Gives memory that is free back to the system. Costs about a millisecond after a burst.
pub fn trim() {
    // SAFETY: malloc_trim takes a plain integer and touches only free memory.
    unsafe {
        libc::malloc_trim(0);
    }
}
