//! Runs system tools with bounded output, and never through a shell.
//!
//! Tools that mount may be killed after a timeout or when the call is cancelled. Tools that
//! write to a disk are never killed, because a partial filesystem is worse than a delay.

use std::fs::File;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::HostError;
use holdfast_core::backoff::Doubling;
use holdfast_sys::blocking_calls::Call;

/// Timeout for tools that may be killed.
const TOOL_TIMEOUT: Duration = Duration::from_secs(110);
/// Interval between checks whether a tool has exited. Short at first, since most tools exit quickly.
const CHECK_INTERVAL: Doubling = Doubling::new(Duration::from_millis(2), Duration::from_millis(50));

/// When to kill a tool.
#[derive(Clone, Copy)]
enum Limit<'a> {
    /// After [`TOOL_TIMEOUT`].
    Time,
    /// After [`TOOL_TIMEOUT`], or when the call is cancelled.
    Cancellable(&'a Call),
    /// Never.
    None,
}

/// Runs a system tool and waits for at most 110 seconds. Returns its exit code and output.
pub(crate) fn tool(program: &str, arguments: &[&str]) -> Result<(i32, String), HostError> {
    run(program, arguments, Stdio::null(), Limit::Time)
}

/// Like [`tool`], but also kills the tool when `call` is cancelled. The caller must undo what the tool has done.
pub(crate) fn run_tool_cancellable(
    program: &str,
    arguments: &[&str],
    call: &Call,
) -> Result<(i32, String), HostError> {
    run(program, arguments, Stdio::null(), Limit::Cancellable(call))
}

/// Like [`tool`], but without a timeout, for tools that write to a device. The tool inherits `input_file` as its
/// input, and with it a lock on that file. The lock lasts as long as the tool runs, even if the agent exits.
pub(crate) fn run_tool_to_completion(
    program: &str,
    arguments: &[&str],
    input_file: File,
) -> Result<(i32, String), HostError> {
    run(program, arguments, input_file.into(), Limit::None)
}

fn run(
    program: &str,
    arguments: &[&str],
    input: Stdio,
    limit: Limit<'_>,
) -> Result<(i32, String), HostError> {
    let missing = |e: std::io::Error| {
        HostError::from(e).as_text(|why| {
            format!("{program} cannot be run ({why}): install the package that has it")
        })
    };
    // In memory, so that a full disk does not hide the error.
    let output = memfd_create(c"output", MFdFlags::MFD_CLOEXEC).map(File::from)?;
    let stdio = || output.try_clone().map(Stdio::from);
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(input)
        .stdout(stdio()?)
        .stderr(stdio()?)
        .spawn()
        .map_err(missing)?;
    let status = wait(program, &mut child, limit)?;
    let text = {
        use std::io::{Read as _, Seek as _};
        let mut file = output;
        file.rewind()?;
        let mut bytes = vec![];
        file.take(8 << 10).read_to_end(&mut bytes)?;
        String::from_utf8_lossy(&bytes).trim().to_owned()
    };
    Ok((status.code().unwrap_or(-1), text))
}

fn wait(program: &str, child: &mut Child, limit: Limit<'_>) -> Result<ExitStatus, HostError> {
    let start = Instant::now();
    let mut pauses = CHECK_INTERVAL;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        let late = || start.elapsed() > TOOL_TIMEOUT;
        let over = match limit {
            Limit::Time => late(),
            Limit::Cancellable(call) => late() || call.is_cancelled(),
            Limit::None => false,
        };
        if over {
            child.kill()?;
            // The process may block in the kernel even now; only this thread waits for it.
            child.wait()?;
            return Err(format!(
                "{program} did not exit within {}s and was killed",
                start.elapsed().as_secs()
            )
            .into());
        }
        std::thread::sleep(pauses.pause());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostErrorKind;
    use holdfast_sys::blocking_calls::BlockingCalls;

    #[test]
    fn a_tools_output_and_exit_code_are_returned() {
        assert_eq!(tool("echo", &["hello"]), Ok((0, "hello".into())));
        assert_eq!(tool("false", &[]).map(|(code, _)| code), Ok(1));
        let missing = tool("no-such-tool", &[]).expect_err("it is missing");
        assert_eq!(missing.kind, HostErrorKind::NotFound);
        assert!(missing.message.starts_with("no-such-tool cannot be run"));
        assert!(missing.message.contains("install"), "{missing}");
    }

    #[tokio::test]
    async fn a_cancelled_tool_is_killed_unless_it_writes_to_a_device() {
        let calls = BlockingCalls::default();
        let (short, long) = (Duration::from_millis(500), Duration::from_secs(60));
        let begun = Instant::now();
        let mounting = calls.call_with("u/v", short, |call| {
            run_tool_cancellable("sleep", &["600"], call).map(|_| ())
        });
        assert!(mounting.await.is_err());
        assert_eq!(calls.cancel("u/", long).await, Ok(()));
        assert!(
            begun.elapsed() < Duration::from_secs(90),
            "the tool was killed"
        );
        let dir = tempfile::tempdir().expect("a directory");
        let (go, done) = (dir.path().join("go"), dir.path().join("done"));
        let script = format!(
            "for i in $(seq 1200); do test -e {0} && break; sleep 0.05; done; test -e {0} && touch {1}",
            go.display(),
            done.display()
        );
        let (began, begun) = std::sync::mpsc::channel::<()>();
        let formatting = calls.call_with("u/v", short, move |call| {
            call.doing("formatting");
            began.send(()).expect("the receiver is alive");
            let input_file = File::open("/dev/null")?;
            run_tool_to_completion("sh", &["-c", &script], input_file).map(|_| ())
        });
        // While a blocking thread of tokio runs, the paused clock does not
        // advance, so the call cannot time out before its thread has started.
        tokio::time::pause();
        let begun = tokio::task::spawn_blocking(move || begun.recv());
        let (formatting, begun) = tokio::join!(formatting, begun);
        tokio::time::resume();
        begun.expect("waited for").expect("it has begun");
        assert!(formatting.is_err_and(|e| e.message.contains("formatting")));
        let cancelled = calls.cancel("u/", short).await;
        assert!(cancelled.is_err_and(|e| e.message.contains("formatting")));
        std::fs::write(&go, "").expect("written");
        assert_eq!(calls.cancel("u/", long).await, Ok(()));
        assert!(done.exists(), "the tool ran to completion");
    }
}
