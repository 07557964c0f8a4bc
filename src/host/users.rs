//! The user ids for pods with a user namespace (KEP-127, `pkg/kubelet/userns/userns_manager.go`).

use nix::unistd::User;

use super::HostError;
use super::tool::tool;
use holdfast_core::pod::users::{Pool, parse_subordinate_ids};
use holdfast_sys::failure::doing;
use holdfast_sys::process::find_program;

/// The user whose subordinate ids the agent uses.
const USER: &str = "kubelet";
/// The tool that reads subordinate ids.
const GETSUBIDS: &str = "getsubids";

/// The subordinate ids of the user `kubelet`, divided into ranges of `each` ids for at most
/// `pods` pods. Without this user or the tool, all ids except those of the machine's own users.
///
/// # Errors
///
/// The ids cannot be read, or do not suffice.
pub fn pool(each: u32, pods: i64) -> Result<Pool, HostError> {
    let user =
        User::from_name(USER).map_err(doing(format!("the user {USER} cannot be looked up")))?;
    if user.is_none() {
        return Ok(Pool::all(each));
    }
    if find_program(GETSUBIDS).is_none() {
        tracing::warn!(
            "the user {USER} exists, but {GETSUBIDS} is not installed: pods with user namespaces get arbitrary ids instead of those in /etc/subuid; install it (Debian: uidmap)"
        );
        return Ok(Pool::all(each));
    }
    let query = |arguments: &[&str]| -> Result<String, HostError> {
        match tool(GETSUBIDS, arguments)? {
            (0, output) => Ok(output),
            (code, output) => Err(format!(
                "{GETSUBIDS} {} exited with code {code}: {}; give the user {USER} ids in /etc/subuid and /etc/subgid, or remove the user",
                arguments.join(" "),
                output.trim()
            )
            .into()),
        }
    };
    let (users, groups) = (query(&[USER])?, query(&["-g", USER])?);
    if users != groups {
        return Err(format!(
            "the ids of the user {USER} in /etc/subuid ({}) differ from those in /etc/subgid ({}): make them equal",
            users.trim(),
            groups.trim()
        )
        .into());
    }
    let ids = parse_subordinate_ids(&users).ok_or_else(|| {
        format!(
            "the user {USER} needs exactly one range of ids in /etc/subuid and /etc/subgid, but {GETSUBIDS} reports {:?}",
            users.trim()
        )
    })?;
    Pool::of(each, ids, pods).map_err(|e| e.to_string().into())
}
