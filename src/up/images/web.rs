//! The demo: a page on port 80 that names the pod that serves it. Exits at once on SIGTERM.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;

unsafe extern "C" {
    fn signal(number: i32, handler: extern "C" fn(i32)) -> usize;
    fn _exit(code: i32) -> !;
}

extern "C" fn leave(_: i32) {
    // SAFETY: _exit may be called in a signal handler and does not return.
    unsafe { _exit(0) }
}

fn main() {
    // SAFETY: the handler only calls an async-signal-safe function.
    unsafe {
        signal(15, leave);
        signal(2, leave);
    }
    let env = |name: &str| std::env::var(name).unwrap_or_default();
    let port = std::env::args().nth(1).unwrap_or_else(|| "80".into());
    let listener = match TcpListener::bind(format!("0.0.0.0:{port}")) {
        Ok(listener) => listener,
        Err(error) => {
            eprintln!("port {port} cannot be used: {error}");
            std::process::exit(1);
        }
    };
    println!("serving on port {port}");
    for socket in listener.incoming() {
        let Ok(mut socket) = socket else { continue };
        let mut request = [0; 1024];
        let _ = socket.read(&mut request);
        let page = format!(
            "<!doctype html><title>Holdfast</title><h1>Hello from {}</h1><p>This page is version {} of the Holdfast demo.</p>\n",
            env("HOSTNAME"),
            env("VERSION")
        );
        let _ = write!(socket, "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{page}", page.len());
    }
}
