//! The pause process: keeps a pod's namespaces, reaps its orphans, and exits on SIGTERM.
//!
//! build.rs compiles it into a static binary without the standard library, so the few functions of libc are declared
//! here.
#![no_std]
#![no_main]

use core::ffi::{c_int, c_void};

unsafe extern "C" {
    fn pause() -> c_int;
    fn signal(number: c_int, handler: extern "C" fn(c_int)) -> *const c_void;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn _exit(code: c_int) -> !;
}

const SIGINT: c_int = 2;
const SIGTERM: c_int = 15;
const SIGCHLD: c_int = 17;
const WNOHANG: c_int = 1;

extern "C" fn leave(_: c_int) {
    // SAFETY: _exit may be called in a signal handler and does not return.
    unsafe { _exit(0) }
}

extern "C" fn reap(_: c_int) {
    // SAFETY: waitpid may be called in a signal handler; a null status is allowed.
    while unsafe { waitpid(-1, core::ptr::null_mut(), WNOHANG) } > 0 {}
}

#[unsafe(no_mangle)]
extern "C" fn main() -> c_int {
    // SAFETY: the handlers only call async-signal-safe functions; pause has no arguments.
    unsafe {
        signal(SIGINT, leave);
        signal(SIGTERM, leave);
        signal(SIGCHLD, reap);
        loop {
            pause();
        }
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: as above.
    unsafe { _exit(2) }
}
