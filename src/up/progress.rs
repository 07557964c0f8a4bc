//! Shows progress: one line for each step on a terminal, nothing in a pipe.

use std::io::{IsTerminal as _, Write as _};
use std::time::Instant;

/// Shows steps as they run.
pub struct Progress {
    terminal: bool,
    current: Option<(String, Instant)>,
}

impl Progress {
    /// Detects whether stderr is a terminal.
    #[must_use]
    pub fn new() -> Progress {
        Progress {
            terminal: std::io::stderr().is_terminal(),
            current: None,
        }
    }

    fn finish(&mut self) {
        if let Some((step, since)) = self.current.take()
            && self.terminal
        {
            eprintln!("\r\x1b[2K ✓ {step} ({:.1}s)", since.elapsed().as_secs_f32());
        }
    }

    /// Begins the next step; the one before has succeeded.
    pub fn step(&mut self, what: &str) {
        self.finish();
        if self.terminal {
            eprint!(" … {what}");
            // A failed flush only delays the output.
            let _ = std::io::stderr().flush();
        }
        self.current = Some((what.to_owned(), Instant::now()));
    }

    /// Ends the last step; all steps have succeeded.
    pub fn done(mut self) {
        self.finish();
    }
}

impl Default for Progress {
    fn default() -> Progress {
        Progress::new()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((step, _)) = &self.current
            && self.terminal
        {
            eprintln!("\r\x1b[2K ✗ {step}");
        }
    }
}
