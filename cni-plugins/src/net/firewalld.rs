//! Registers containers' addresses with firewalld as sources of a zone. firewalld drops packets from
//! addresses without a zone (`plugins/meta/firewall/firewalld.go` of containernetworking/plugins).

use std::io;
use std::net::IpAddr;

use super::dbus::{Answer, Bus, Method};

const NAME: &str = "org.fedoraproject.FirewallD1";

/// A connection to firewalld.
pub struct Firewalld(Bus);

/// The notation of an address as a source of a zone.
fn source(address: IpAddr) -> String {
    format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 })
}

impl Firewalld {
    /// Connects to firewalld; `Ok(None)` if it is not running.
    pub fn connect() -> io::Result<Option<Firewalld>> {
        let Some(mut bus) = Bus::connect()? else {
            return Ok(None);
        };
        Ok(bus.has(NAME)?.then_some(Firewalld(bus)))
    }

    fn call(&mut self, method: &str, zone: &str, address: IpAddr) -> io::Result<Answer> {
        let method = Method {
            destination: NAME,
            path: "/org/fedoraproject/FirewallD1",
            interface: "org.fedoraproject.FirewallD1.zone",
            name: method,
        };
        self.0.call(method, &[zone, &source(address)])
    }

    /// Adds an address to a zone. An address that already is in a zone is no error.
    pub fn add(&mut self, zone: &str, address: IpAddr) -> io::Result<()> {
        match self.call("addSource", zone, address)? {
            Answer::Refused(why)
                if !why.starts_with("ZONE_ALREADY_SET") && !why.starts_with("ALREADY_ENABLED") =>
            {
                Err(io::Error::other(why))
            }
            _ => Ok(()),
        }
    }

    /// Removes an address from a zone. A missing address is no error.
    pub fn remove(&mut self, zone: &str, address: IpAddr) -> io::Result<()> {
        match self.call("removeSource", zone, address)? {
            Answer::Refused(why)
                if !why.starts_with("UNKNOWN_SOURCE") && !why.starts_with("NOT_ENABLED") =>
            {
                Err(io::Error::other(why))
            }
            _ => Ok(()),
        }
    }

    /// Whether an address is in a zone.
    pub fn has(&mut self, zone: &str, address: IpAddr) -> io::Result<bool> {
        Ok(self.call("querySource", zone, address)? == Answer::Flag(true))
    }
}
