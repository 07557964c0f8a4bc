//! Calls the IPAM plugin of a configuration (CNI spec 1.1, section 4). If `CNI_PATH` leads to
//! a plugin of this binary, calls it as a function; otherwise executes the foreign plugin.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::find as own_plugin;
use crate::cni::{Error, Success};
use crate::skel::{Call, Plugin};

enum Delegate {
    Own(&'static dyn Plugin),
    Foreign(PathBuf),
}

fn find(call: &Call<'_>, kind: &str) -> Result<Delegate, Error> {
    if kind.is_empty() {
        return Err(Error::config(
            "no plugin name provided: set \"type\" in \"ipam\"",
        ));
    }
    if kind.contains('/') || kind == "." || kind == ".." {
        return Err(Error::config(format!(
            "invalid plugin name: {kind:?} must not contain a slash"
        )));
    }
    let found = call
        .path
        .split(':')
        .filter(|d| !d.is_empty())
        .map(|d| Path::new(d).join(kind))
        .find(|p| p.is_file());
    let Some(found) = found else {
        return Err(Error::other(format!(
            "failed to find plugin {kind:?} in path [{}]; install it there",
            call.path.replace(':', " ")
        )));
    };
    let own = std::fs::canonicalize("/proc/self/exe").ok();
    match own_plugin(kind) {
        Some(plugin) if own.is_some() && std::fs::canonicalize(&found).ok() == own => {
            Ok(Delegate::Own(plugin))
        }
        _ => Ok(Delegate::Foreign(found)),
    }
}

fn execute(path: &Path, verb: &str, input: &[u8]) -> Result<Vec<u8>, Error> {
    let failed = |e: std::io::Error| {
        Error::doing(
            format!("the IPAM plugin {} cannot be run", path.display()),
            e,
        )
    };
    let mut child = Command::new(path)
        .env("CNI_COMMAND", verb)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A plugin that does not read its input closes the pipe; its output then contains the error.
        let _ = stdin.write_all(input);
    }
    let output = child.wait_with_output().map_err(failed)?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let parsed: Option<Value> = serde_json::from_slice(&output.stdout).ok();
    let message = parsed.as_ref().and_then(|v| v["msg"].as_str()).map_or_else(
        || String::from_utf8_lossy(&output.stdout).into_owned(),
        str::to_owned,
    );
    let code = parsed
        .as_ref()
        .and_then(|v| v["code"].as_u64())
        .and_then(|c| u32::try_from(c).ok())
        .unwrap_or(Error::OTHER);
    Err(Error::new(
        code,
        format!("IPAM plugin {}: {message}", path.display()),
    ))
}

/// ADD: allocates addresses through the IPAM plugin `kind`.
pub fn add(call: &Call<'_>, kind: &str) -> Result<Success, Error> {
    match find(call, kind)? {
        Delegate::Own(plugin) => plugin.add(call),
        Delegate::Foreign(path) => {
            let output = execute(&path, "ADD", call.input)?;
            let value = serde_json::from_slice(&output).map_err(|e| {
                Error::new(
                    Error::DECODE,
                    format!("the result of the IPAM plugin {kind} is not JSON: {e}"),
                )
            })?;
            Success::parse(&value, call.version)
        }
    }
}

/// Calls DEL or CHECK of the IPAM plugin `kind`.
pub fn forward(call: &Call<'_>, kind: &str, verb: &str) -> Result<(), Error> {
    match (find(call, kind)?, verb) {
        (Delegate::Own(plugin), "DEL") => plugin.del(call),
        (Delegate::Own(plugin), _) => plugin.check(call),
        (Delegate::Foreign(path), verb) => execute(&path, verb, call.input).map(|_| ()),
    }
}

/// Calls STATUS of the IPAM plugin `kind`. If the plugin is missing or cannot be executed, no ADD can succeed, and the code is
/// [`Error::UNAVAILABLE`].
pub fn status(call: &Call<'_>, kind: &str) -> Result<(), Error> {
    let unavailable = |error: Error| match error.code {
        Error::OTHER => Error {
            code: Error::UNAVAILABLE,
            ..error
        },
        _ => error,
    };
    match find(call, kind).map_err(unavailable)? {
        Delegate::Own(plugin) => plugin.status(call),
        Delegate::Foreign(path) => execute(&path, "STATUS", call.input)
            .map(|_| ())
            .map_err(unavailable),
    }
}

/// Calls GC of the IPAM plugin `kind`.
pub fn collect(call: &Call<'_>, kind: &str, keep: &[(String, String)]) -> Result<(), Error> {
    match find(call, kind)? {
        Delegate::Own(plugin) => plugin.gc(call, keep),
        Delegate::Foreign(path) => execute(&path, "GC", call.input).map(|_| ()),
    }
}
