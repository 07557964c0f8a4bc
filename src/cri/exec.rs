//! Commands in containers through containerd's own services, for sessions with input.
//!
//! CRI's `Exec` loses input: containerd closes a command's stdin as soon as the command's stdout or stderr ends
//! (`internal/cri/io/exec_io.go`, `attachOutput`). `sh -c 'cat > f'` ends its stdout about one millisecond after its start.
//! The requests here are those of `execInternal` (`internal/cri/server/container_execsync.go`), without that rule.

use std::path::Path;
use std::time::Duration;

use holdfast_proto::{containers, tasks as pb};
use pb::tasks_client::TasksClient;
use serde_json::Value;
use tonic::Request;
use tonic::transport::Channel;

use super::client::{CriClient, MESSAGE_LIMIT, ignore_not_found};
use super::tasks::SIGKILL;
use super::{RuntimeError, RuntimeErrorKind};

/// The type of a process in a request, as containerd's typeurl package names it.
const PROCESS_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/Process";
/// `RUNNING` of `containerd.v1.types.Status`.
const RUNNING: u32 = 2;
/// Deadline of calls that do not wait for a process.
const DEADLINE: Duration = Duration::from_secs(10);
/// Deadline of a start: the OCI runtime enters the container, and the shim opens the FIFOs.
const START_DEADLINE: Duration = Duration::from_secs(120);
/// Number of bytes of an exec id, which is written in hexadecimal as containerd does.
const ID_LENGTH: usize = 32;

/// containerd's services for tasks; clones share the connection.
#[derive(Debug, Clone)]
pub struct Tasks {
    channel: Channel,
}

/// Paths of the FIFOs of a command.
#[derive(Debug, Clone, Copy)]
pub struct Stdio<'a> {
    /// The FIFO that the command reads.
    pub stdin: &'a Path,
    /// The FIFO to which the command writes.
    pub stdout: &'a Path,
    /// The FIFO for the command's errors. `None` with a terminal, which has one output.
    pub stderr: Option<&'a Path>,
}

/// A command in a container, which may not have been created yet.
#[derive(Debug, Clone)]
pub struct ExecProcess {
    channel: Channel,
    container: String,
    id: String,
}

/// A command that is ready to be created.
#[derive(Debug, Clone)]
pub struct PreparedExec {
    /// The command.
    pub process: ExecProcess,
    /// JSON of the OCI process.
    spec: Vec<u8>,
    terminal: bool,
}

/// Returns the OCI process of a command: the container's own process with other arguments. `None` if the spec has no
/// process.
fn process_of(spec: &[u8], command: &[String], terminal: bool) -> Option<Vec<u8>> {
    let mut spec: Value = serde_json::from_slice(spec).ok()?;
    let process = spec.get_mut("process")?.as_object_mut()?;
    process.insert("args".into(), command.into());
    process.insert("terminal".into(), terminal.into());
    process.remove("commandLine");
    if terminal {
        let env = process.entry("env").or_insert_with(|| Value::Array(vec![]));
        let env = env.as_array_mut()?;
        // As `oci.WithEnv`: an existing value is replaced in place.
        let is_term = |v: &Value| v.as_str().is_some_and(|v| v.starts_with("TERM="));
        match env.iter_mut().find(|v| is_term(v)) {
            Some(term) => *term = "TERM=xterm".into(),
            None => env.push("TERM=xterm".into()),
        }
    }
    serde_json::to_vec(process).ok()
}

/// Returns a random id in containerd's format.
fn new_id() -> Option<String> {
    let mut bytes = [0; ID_LENGTH];
    aws_lc_rs::rand::fill(&mut bytes).ok()?;
    Some(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

impl Tasks {
    pub(super) fn new(channel: Channel) -> Tasks {
        Tasks { channel }
    }

    /// Prepares a command in a running container. The error is the reason why CRI must serve the command. Either the
    /// runtime is not containerd, or the container does not run, or its streams are not FIFOs.
    pub async fn prepare(
        &self,
        container: &str,
        command: &[String],
        terminal: bool,
    ) -> Result<PreparedExec, String> {
        let mut clients =
            containers::containers_client::ContainersClient::new(self.channel.clone())
                .max_decoding_message_size(MESSAGE_LIMIT);
        let request = containers::GetContainerRequest {
            id: container.into(),
        };
        let request = CriClient::to_containerd(DEADLINE, request);
        let found = clients.get(request).await;
        let found = found.map_err(|status| RuntimeError::from(status).to_string())?;
        let spec = found.into_inner().container.and_then(|c| c.spec);
        let spec = spec.ok_or("containerd has no spec for the container")?;
        let request = pb::GetRequest {
            container_id: container.into(),
            exec_id: String::new(),
        };
        let request = CriClient::to_containerd(DEADLINE, request);
        let task = TasksClient::new(self.channel.clone()).get(request).await;
        let task = task.map_err(|status| RuntimeError::from(status).to_string())?;
        let task = task.into_inner().process.unwrap_or_default();
        if task.status != RUNNING {
            return Err(format!(
                "the container's task has status {} and is not running",
                task.status
            ));
        }
        // Sandboxes with `io_type = "streaming"` have no FIFOs of the host.
        if task.stdout.contains("://") {
            return Err(format!(
                "the container's streams are at {:?}, which is not supported",
                task.stdout
            ));
        }
        let spec = process_of(&spec.value, command, terminal)
            .ok_or("the container's spec has no process")?;
        let id = new_id().ok_or("reading the system's random numbers failed")?;
        Ok(PreparedExec {
            process: self.find(container, &id),
            spec,
            terminal,
        })
    }

    /// Returns a command that was created earlier.
    #[must_use]
    pub fn find(&self, container: &str, id: &str) -> ExecProcess {
        ExecProcess {
            channel: self.channel.clone(),
            container: container.into(),
            id: id.into(),
        }
    }
}

impl PreparedExec {
    /// Registers the command with containerd. It does not run yet.
    pub async fn create(&self, stdio: Stdio<'_>) -> Result<(), RuntimeError> {
        let path = |path: &Path| path.to_string_lossy().into_owned();
        let process = &self.process;
        let request = pb::ExecProcessRequest {
            container_id: process.container.clone(),
            exec_id: process.id.clone(),
            stdin: path(stdio.stdin),
            stdout: path(stdio.stdout),
            stderr: stdio.stderr.map(path).unwrap_or_default(),
            terminal: self.terminal,
            spec: Some(pb::Any {
                type_url: PROCESS_TYPE.into(),
                value: self.spec.clone(),
            }),
        };
        let request = CriClient::to_containerd(DEADLINE, request);
        process.client().exec(request).await?;
        Ok(())
    }
}

impl ExecProcess {
    fn client(&self) -> TasksClient<Channel> {
        TasksClient::new(self.channel.clone())
    }

    /// The id of the command in its container.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The id of the container.
    #[must_use]
    pub fn container(&self) -> &str {
        &self.container
    }

    /// Whether the command runs; false if it was never started.
    pub async fn is_running(&self) -> Result<bool, RuntimeError> {
        let request = pb::GetRequest {
            container_id: self.container.clone(),
            exec_id: self.id.clone(),
        };
        let request = CriClient::to_containerd(DEADLINE, request);
        match self.client().get(request).await.map_err(RuntimeError::from) {
            Ok(found) => Ok(found
                .into_inner()
                .process
                .is_some_and(|p| p.status == RUNNING)),
            Err(error) if error.kind == RuntimeErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Starts the command. When this returns, the shim has opened the outputs; it opens the input soon after.
    pub async fn start(&self) -> Result<(), RuntimeError> {
        let request = pb::StartRequest {
            container_id: self.container.clone(),
            exec_id: self.id.clone(),
        };
        let request = CriClient::to_containerd(START_DEADLINE, request);
        self.client().start(request).await?;
        Ok(())
    }

    /// The request that waits for the command's exit.
    fn exit(&self) -> pb::WaitRequest {
        pb::WaitRequest {
            container_id: self.container.clone(),
            exec_id: self.id.clone(),
        }
    }

    /// Waits until the command exits and returns its exit code. Has no deadline, because a command may take days.
    pub async fn wait(&self) -> Result<u32, RuntimeError> {
        let mut request = Request::new(self.exit());
        CriClient::name_namespace(&mut request);
        Ok(self.client().wait(request).await?.into_inner().exit_status)
    }

    /// Changes the size of the terminal.
    pub async fn resize(&self, width: u16, height: u16) -> Result<(), RuntimeError> {
        let request = pb::ResizePtyRequest {
            container_id: self.container.clone(),
            exec_id: self.id.clone(),
            width: width.into(),
            height: height.into(),
        };
        let request = CriClient::to_containerd(DEADLINE, request);
        self.client().resize_pty(request).await?;
        Ok(())
    }

    /// Closes the shim's own end of the input: the command reads end of file once every writer has closed its end.
    pub async fn close_input(&self) -> Result<(), RuntimeError> {
        let request = pb::CloseIoRequest {
            container_id: self.container.clone(),
            exec_id: self.id.clone(),
            stdin: true,
        };
        let request = CriClient::to_containerd(DEADLINE, request);
        ignore_not_found(self.client().close_io(request).await)
    }

    /// Deletes the command; kills it first if it still runs.
    pub async fn delete(&self) -> Result<(), RuntimeError> {
        let deleted = self.delete_stopped().await;
        if !deleted
            .as_ref()
            .is_err_and(|e| e.kind == RuntimeErrorKind::Failed)
        {
            return deleted;
        }
        let request = pb::KillRequest {
            container_id: self.container.clone(),
            exec_id: self.id.clone(),
            signal: SIGKILL,
            all: false,
        };
        let request = CriClient::to_containerd(DEADLINE, request);
        ignore_not_found(self.client().kill(request).await)?;
        let request = CriClient::to_containerd(DEADLINE, self.exit());
        ignore_not_found(self.client().wait(request).await)?;
        self.delete_stopped().await
    }

    async fn delete_stopped(&self) -> Result<(), RuntimeError> {
        let request = pb::DeleteProcessRequest {
            container_id: self.container.clone(),
            exec_id: self.id.clone(),
        };
        // The shim waits 10 s for a grandchild that keeps the output open.
        let request = CriClient::to_containerd(DEADLINE * 2, request);
        ignore_not_found(self.client().delete_process(request).await)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_exec_process_inherits_the_containers_process_except_arguments() {
        let process = |env: Value, terminal| {
            let spec = json!({"ociVersion": "1.1.0", "process": {
                "args": ["sleep"], "commandLine": "x", "cwd": "/w", "env": env, "user": {"uid": 7},
            }});
            let spec = serde_json::to_vec(&spec).expect("a value");
            let command = ["a".to_owned(), "b c".to_owned()];
            let process = process_of(&spec, &command, terminal).expect("a value");
            serde_json::from_slice::<Value>(&process).expect("a value")
        };
        let expected = |env: Value, terminal: bool| json!({"args": ["a", "b c"], "cwd": "/w", "env": env, "terminal": terminal, "user": {"uid": 7}});
        for (before, terminal, after) in [
            (json!(["A=1"]), false, json!(["A=1"])),
            (json!(["A=1"]), true, json!(["A=1", "TERM=xterm"])),
            (
                json!(["TERM=vt100", "A=1"]),
                true,
                json!(["TERM=xterm", "A=1"]),
            ),
            (
                json!(["TERMINAL=x"]),
                true,
                json!(["TERMINAL=x", "TERM=xterm"]),
            ),
        ] {
            assert_eq!(process(before, terminal), expected(after, terminal));
        }
        for spec in ["", "{}", "[]", r#"{"process":7}"#] {
            assert_eq!(process_of(spec.as_bytes(), &[], false), None, "{spec:?}");
        }
    }

    #[test]
    fn exec_ids_are_random_and_valid_names() {
        let (one, two) = (new_id().expect("a value"), new_id().expect("a value"));
        assert_ne!(one, two);
        assert!(one.len() == 64 && one.chars().all(|c| c.is_ascii_hexdigit()));
    }
}
