//! Running tools of the system: bounded in time and in what they may say, and never through a shell.

use std::fs::File;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::memfd::{MFdFlags, memfd_create};

/// How long a tool may take.
const HELPER: Duration = Duration::from_secs(110);

/// Runs a tool of the system and waits for it, at most so long. The answer is its code and what it said.
pub(in crate::host) fn tool(program: &str, arguments: &[&str]) -> Result<(i32, String), String> {
    let missing = |e: std::io::Error| {
        format!("{program} cannot be run ({e}): install the package that has it")
    };
    // In memory, so that a full disk does not hide what is wrong.
    let output = memfd_create(c"output", MFdFlags::MFD_CLOEXEC)
        .map(File::from)
        .map_err(|e| e.to_string())?;
    let said = || {
        output
            .try_clone()
            .map(Stdio::from)
            .map_err(|e| e.to_string())
    };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(said()?)
        .stderr(said()?)
        .spawn()
        .map_err(missing)?;
    let start = std::time::Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().map_err(|e| e.to_string())? {
            break status;
        }
        if start.elapsed() > HELPER {
            child.kill().map_err(|e| e.to_string())?;
            // It may hang in the kernel even then; this thread is the only one that waits.
            child.wait().map_err(|e| e.to_string())?;
            return Err(format!(
                "{program} did not end within {}s",
                HELPER.as_secs()
            ));
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let text = {
        use std::io::{Read as _, Seek as _};
        let mut file = output;
        file.rewind().map_err(|e| e.to_string())?;
        let mut bytes = vec![];
        file.take(8 << 10)
            .read_to_end(&mut bytes)
            .map_err(|e| e.to_string())?;
        String::from_utf8_lossy(&bytes).trim().to_owned()
    };
    Ok((status.code().unwrap_or(-1), text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_tool_says_and_how_it_ends_is_known() {
        assert_eq!(tool("echo", &["hello"]), Ok((0, "hello".into())));
        assert_eq!(tool("false", &[]).map(|(code, _)| code), Ok(1));
        assert!(
            tool("no-such-tool", &[])
                .is_err_and(|e| e.contains("no-such-tool") && e.contains("install"))
        );
    }
}
