//! Limits the memory that the allocator of this process retains.
#![allow(unsafe_code)]

use std::ops::Range;
use std::time::Duration;

use super::failure::{HostError, doing};

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

/// Removes this process's mapped code from its memory, for a process that only waits from now on. What runs later is mapped
/// again from the page cache. Reading `/proc/self/maps` may fail; then nothing changes.
pub fn unmap_code() -> Result<(), HostError> {
    const WHAT: &str = "releasing the memory of this process's code failed";
    let maps = std::fs::read_to_string("/proc/self/maps").map_err(doing(WHAT))?;
    for range in maps.lines().filter_map(code) {
        // SAFETY: the range is executable and backed by a file, and nothing writes to code, so its pages equal the file's and
        // are read from there again.
        let failed = unsafe {
            libc::madvise(
                range.start as *mut libc::c_void,
                range.len(),
                libc::MADV_DONTNEED,
            )
        };
        if failed != 0 {
            return Err(std::io::Error::last_os_error()).map_err(doing(WHAT));
        }
    }
    Ok(())
}

/// The addresses of a row of `/proc/self/maps` if it is unchanged code of a file: `r-xp` and an inode.
fn code(row: &str) -> Option<Range<usize>> {
    // Columns: addresses, permissions, offset, device, inode, path.
    let mut columns = row.split_whitespace();
    let (start, end) = columns.next()?.split_once('-')?;
    let is_code = columns.next()? == "r-xp" && columns.nth(2)? != "0";
    let address = |text| usize::from_str_radix(text, 16).ok();
    is_code.then_some(address(start)?..address(end)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_executable_and_of_a_file() {
        let rows = [
            (
                "1000-3000 r-xp 00001000 fe:00 12 /bin/program",
                Some(0x1000..0x3000),
            ),
            ("1000-3000 r--p 00000000 fe:00 12 /bin/program", None),
            ("1000-3000 rwxp 00000000 fe:00 12 /bin/program", None),
            ("1000-3000 r-xs 00000000 fe:00 12 /bin/program", None),
            ("1000-3000 r-xp 00000000 00:00 0 [vdso]", None),
            ("1000-3000 r-xp", None),
            ("", None),
        ];
        for (row, expected) in rows {
            assert_eq!(code(row), expected, "{row}");
        }
    }

    #[test]
    fn a_process_runs_on_without_its_mapped_code() {
        let resident = || {
            let all = std::fs::read_to_string("/proc/self/smaps").expect("/proc");
            let mut in_code = false;
            let mut kilobytes = 0;
            for line in all.lines() {
                match line.strip_prefix("Rss:") {
                    Some(rss) if in_code => {
                        let number = rss.trim().trim_end_matches(" kB");
                        kilobytes += number.parse::<u64>().expect("a number");
                    }
                    None if line.contains('-') => in_code = code(line).is_some(),
                    _ => {}
                }
            }
            kilobytes
        };
        let before = resident();
        unmap_code().expect("released");
        let after = resident();
        assert!(after < before, "{after} of {before} KiB");
    }
}
