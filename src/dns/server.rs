//! The server's tasks: one for each UDP socket, one for each TCP listener and connection, and one for each query that waits for
//! upstreams. While no query arrives, no task wakes up.

mod responder;
mod tcp;
mod udp;

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::task::JoinSet;

use crate::forward::upstreams::Upstreams;
use crate::forward::{Forwarder, is_usable_address};
use crate::sockets;
use crate::wire::Name;
use crate::zone::{DEFAULT_DOMAIN, Zone};
use responder::Responder;

/// Most UDP sockets for each address.
const MAX_WORKERS: usize = 4;

/// Settings of the server.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The cluster's domain, such as `cluster.local`; that of the zone.
    pub domain: String,
    /// Where the server listens, over UDP and TCP.
    pub addresses: Vec<SocketAddr>,
    /// The file with the node's name servers, to which names outside of the cluster are forwarded.
    pub resolv_conf: PathBuf,
    /// Name servers of domains; `.` stands for all names and replaces `resolv_conf`.
    pub stub_domains: BTreeMap<String, Vec<SocketAddr>>,
    /// UDP sockets for each address, at most 4; 0 means one for each processor.
    pub workers: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            domain: DEFAULT_DOMAIN.to_owned(),
            addresses: Vec::new(),
            resolv_conf: PathBuf::from("/etc/resolv.conf"),
            stub_domains: BTreeMap::new(),
            workers: 0,
        }
    }
}

/// Why the server does not run.
#[derive(Debug)]
pub enum ServeError {
    /// A setting is invalid. The text names the field, the value and the remedy.
    Setting(String),
    /// A socket could not be opened.
    Bind {
        /// The address of the socket.
        address: SocketAddr,
        /// `UDP` or `TCP`.
        protocol: &'static str,
        /// The kernel's error.
        error: io::Error,
    },
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServeError::Setting(text) => f.write_str(text),
            ServeError::Bind {
                address,
                protocol,
                error,
            } => write!(
                f,
                "DNS address {address}: cannot listen on {protocol}: {error}; stop the program that uses the address, or choose another one"
            ),
        }
    }
}

impl std::error::Error for ServeError {}

/// Serves DNS until `ended` resolves. The caller makes the addresses local to this machine (`ip route add local ADDRESS dev lo`),
/// before or after this call.
///
/// # Errors
///
/// A setting is invalid, or a socket cannot be opened.
pub async fn serve(
    settings: Settings,
    zone: Zone,
    ended: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    check(&settings, &zone)?;
    let upstreams = Upstreams::new(
        settings.resolv_conf,
        &settings.stub_domains,
        settings.addresses.clone(),
    );
    zone.set_addresses(settings.addresses.iter().map(SocketAddr::ip).collect());
    let responder = Arc::new(Responder::new(zone, Arc::new(Forwarder::new(upstreams))));
    let workers = match settings.workers {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        workers => workers,
    };
    let mut tasks = JoinSet::new();
    for address in settings.addresses {
        let failed = |protocol| {
            move |error| ServeError::Bind {
                address,
                protocol,
                error,
            }
        };
        for _ in 0..workers.clamp(1, MAX_WORKERS) {
            let socket = sockets::bind_udp(address).map_err(failed("UDP"))?;
            tasks.spawn(udp::serve(socket, responder.clone()));
        }
        let listener = sockets::bind_tcp(address).map_err(failed("TCP"))?;
        tasks.spawn(tcp::serve(listener, responder.clone()));
    }
    ended.await;
    tasks.shutdown().await;
    Ok(())
}

fn check(settings: &Settings, zone: &Zone) -> Result<(), ServeError> {
    let invalid = |text| Err(ServeError::Setting(text));
    let domain = Name::parse(&settings.domain).map(|name| name.lowercase());
    let is_same = domain.is_some_and(|name| name.wire() == zone.read().zone.wire());
    if !is_same {
        return invalid(format!(
            "invalid cluster domain {:?}: not a domain name of labels with at most 63 characters; use for example {DEFAULT_DOMAIN:?}",
            settings.domain
        ));
    }
    for (domain, servers) in &settings.stub_domains {
        if Name::parse(domain).is_none() {
            return invalid(format!(
                "invalid stub domain {domain:?}: not a domain name; use for example \"corp.example\""
            ));
        }
        if let Some(server) = servers.iter().find(|s| !is_usable_address(s)) {
            return invalid(format!(
                "stub domain {domain:?}: invalid name server {server}; use the address of one server with its port"
            ));
        }
    }
    Ok(())
}
