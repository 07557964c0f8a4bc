//! `dhcp`: addresses from a DHCP server of the network. `dhcp daemon` acquires and renews the leases, since
//! a plugin process terminates too early (`plugins/ipam/dhcp/main.go` of containernetworking/plugins).

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};

use crate::cni::{Error, Success};
use crate::skel::{Call, Plugin};

/// The plugin `dhcp`.
pub struct Dhcp;

/// The largest answer of the daemon, in bytes.
const LIMIT: u64 = 1 << 20;

/// Sends a request to the daemon and returns its answer.
fn call_daemon(call: &Call<'_>, verb: &str, keep: &[(String, String)]) -> Result<Value, Error> {
    let given = call.config.object("ipam")?.text("daemonSocketPath")?;
    let path = if given.is_empty() {
        crate::dhcp::SOCKET
    } else {
        given
    };
    let failed = |e: std::io::Error| {
        Error::new(
            Error::UNAVAILABLE,
            format!(
                "the DHCP daemon does not answer at {path}: {e}; start it (dhcp daemon), or set \"daemonSocketPath\" in \"ipam\""
            ),
        )
    };
    // Only the parts that the daemon reads, because a previous result can be large.
    let config = json!({"name": call.network()?, "ipam": call.config.get("ipam")});
    let request = json!({"verb": verb, "container": call.container, "ifname": call.ifname, "netns": call.netns, "args": call.args,
        "config": config, "keep": keep});
    let mut stream = UnixStream::connect(path).map_err(failed)?;
    stream
        .write_all(request.to_string().as_bytes())
        .map_err(failed)?;
    stream.shutdown(Shutdown::Write).map_err(failed)?;
    let mut text = String::new();
    stream
        .take(LIMIT)
        .read_to_string(&mut text)
        .map_err(failed)?;
    let answer: Value = serde_json::from_str(&text)
        .map_err(|e| Error::doing("the DHCP daemon sent a malformed reply", e))?;
    match answer.get("result") {
        Some(result) => Ok(result.clone()),
        None => {
            let code = answer["code"]
                .as_u64()
                .and_then(|c| u32::try_from(c).ok())
                .unwrap_or(Error::OTHER);
            Err(Error::new(
                code,
                answer["msg"]
                    .as_str()
                    .unwrap_or("the DHCP daemon has failed"),
            ))
        }
    }
}

impl Plugin for Dhcp {
    fn name(&self) -> &'static str {
        "dhcp"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        Success::parse(&call_daemon(call, "ADD", &[])?, "1.0.0")
    }

    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        call_daemon(call, "DEL", &[]).map(|_| ())
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        let address = call_daemon(call, "CHECK", &[])?;
        let address = address["address"].as_str().unwrap_or_default();
        let previous = call.previous()?.unwrap_or_default();
        if previous
            .ips
            .iter()
            .any(|ip| ip.address.to_string() == address)
        {
            return Ok(());
        }
        Err(Error::other(format!(
            "dhcp: the lease is of {address}, which is not in prevResult"
        )))
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        call_daemon(call, "GC", keep).map(|_| ())
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        call_daemon(call, "STATUS", &[]).map(|_| ())
    }
}
