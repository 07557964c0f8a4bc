//! A DHCP client that runs inside a container's network namespace (RFC 2131, section 4.4).

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant};

use super::frame::{CLIENT_PORT, SERVER_PORT, from_servers, to_servers};
use super::lease::Lease;
use super::message::{Message, kind, option};
use crate::cni::Error;
use holdfast_net::packet::Packets;

/// Time to wait for the first answer before retransmitting; doubled after each attempt.
const FIRST_WAIT: Duration = Duration::from_secs(1);

/// Time limit for the hardware address of the next hop, before which the kernel holds a packet back: a second request for the
/// address, after a second, still counts.
const NEIGHBOUR_TIMEOUT: Duration = Duration::from_millis(1500);

/// Parameters of the requests to DHCP servers.
#[derive(Debug, Clone)]
pub struct RequestParameters {
    /// The link's index and hardware address.
    pub link: (u32, [u8; 6]),
    /// Options that every message of the client contains.
    pub options: Vec<(u8, Vec<u8>)>,
    /// The option codes that the client requests (option 55).
    pub requested_options: Vec<u8>,
    /// Whether servers must broadcast their answers instead of sending them to the offered address.
    pub broadcast: bool,
    /// Deadline for the whole exchange.
    pub timeout: Duration,
    /// Upper limit of the time before a retransmission.
    pub max_retransmit_delay: Duration,
}

impl RequestParameters {
    fn message(&self, kind: u8, id: u32) -> Message {
        let mut message = Message {
            broadcast: self.broadcast,
            ..Message::new(kind, id, self.link.1)
        };
        message.options.extend(self.options.iter().cloned());
        message.with(option::REQUESTED_OPTIONS, &self.requested_options)
    }

    /// Retransmits the message until an answer of one of these kinds arrives or `until` has passed.
    fn exchange(
        &self,
        packets: &Packets,
        message: &Message,
        kinds: &[u8],
        until: Instant,
    ) -> Result<Message, Error> {
        let packet = to_servers(&message.encode());
        let failed = |e: io::Error| Error::doing("DHCP packets cannot be sent or received", e);
        let mut wait = FIRST_WAIT.min(self.max_retransmit_delay);
        while Instant::now() < until {
            packets.send(&packet).map_err(failed)?;
            let again = (Instant::now() + wait).min(until);
            while let Some(remaining) = again
                .checked_duration_since(Instant::now())
                .filter(|l| !l.is_zero())
            {
                let Some(received) = packets.receive(remaining).map_err(failed)? else {
                    continue;
                };
                let Some(answer) = from_servers(&received).and_then(Message::parse) else {
                    continue;
                };
                if answer.answer
                    && answer.id == message.id
                    && answer.mac == message.mac
                    && kinds.contains(&answer.kind())
                {
                    return Ok(answer);
                }
            }
            wait = (wait * 2).min(self.max_retransmit_delay);
        }
        Err(Error::new(
            Error::TRY_AGAIN,
            format!(
                "no DHCP server answered within {} s",
                self.timeout.as_secs()
            ),
        ))
    }

    /// Acquires a lease from the first server that offers one. `again` is the previous address of the client, if any.
    pub fn acquire(&self, again: Option<Ipv4Addr>) -> Result<Lease, Error> {
        let packets = Packets::open(self.link.0)
            .map_err(|e| Error::doing("opening a socket for DHCP failed", e))?;
        let until = Instant::now() + self.timeout;
        let mut discover = self.message(kind::DISCOVER, random()?);
        if let Some(address) = again {
            discover = discover.with(option::REQUESTED_ADDRESS, &address.octets());
        }
        let offer = self.exchange(&packets, &discover, &[kind::OFFER], until)?;
        let server = offer
            .get(option::SERVER)
            .ok_or_else(|| Error::other("a DHCP server's offer has no server identifier"))?;
        let request = self
            .message(kind::REQUEST, discover.id)
            .with(option::REQUESTED_ADDRESS, &offer.yours.octets())
            .with(option::SERVER, server);
        accept_answer(&self.exchange(&packets, &request, &[kind::ACK, kind::NAK], until)?)
    }

    /// Extends a lease by unicast to its server, or by broadcast to any server. Stops when the
    /// lease (which has this age) expires, since another client may then have the address.
    pub fn extend(&self, lease: &Lease, age: Duration, any: bool) -> Result<Lease, Error> {
        let mut request = self.message(kind::REQUEST, random()?);
        request.client = lease.address.addr();
        let until = Instant::now() + lease.remaining(age).min(self.timeout);
        if any {
            let packets = Packets::open(self.link.0)
                .map_err(|e| Error::doing("opening a socket for DHCP failed", e))?;
            let answer = self.exchange(&packets, &request, &[kind::ACK, kind::NAK], until)?;
            return accept_answer(&answer);
        }
        request.broadcast = false;
        let server = lease.server;
        let failed = |e: io::Error| {
            Error::doing(
                format!("sending a request to the DHCP server {server} failed"),
                e,
            )
        };
        let socket = UdpSocket::bind(SocketAddrV4::new(lease.address.addr(), CLIENT_PORT))
            .map_err(failed)?;
        let mut wait = FIRST_WAIT.min(self.max_retransmit_delay);
        let mut buffer = [0; 2048];
        while let Some(remaining) = until
            .checked_duration_since(Instant::now())
            .filter(|remaining| !remaining.is_zero())
        {
            socket
                .send_to(&request.encode(), SocketAddrV4::new(server, SERVER_PORT))
                .map_err(failed)?;
            socket
                .set_read_timeout(Some(wait.min(remaining)))
                .map_err(failed)?;
            match socket.recv(&mut buffer) {
                Ok(length) => {
                    let answer = buffer
                        .get(..length)
                        .and_then(Message::parse)
                        .filter(|a| a.id == request.id);
                    if let Some(answer) =
                        answer.filter(|a| [kind::ACK, kind::NAK].contains(&a.kind()))
                    {
                        return accept_answer(&answer);
                    }
                }
                Err(error)
                    if [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut]
                        .contains(&error.kind()) => {}
                Err(error) => return Err(failed(error)),
            }
            wait = (wait * 2).min(self.max_retransmit_delay);
        }
        Err(Error::other(format!(
            "the DHCP server {server} does not answer"
        )))
    }

    /// Releases a lease. Servers do not answer this message. Returns after the packet has left, because DEL then removes the link,
    /// and with it a packet that still waits for the hardware address of the next hop.
    pub fn release(&self, lease: &Lease) -> Result<(), Error> {
        let mut message = Message {
            broadcast: false,
            ..Message::new(kind::RELEASE, random()?, self.link.1)
        };
        message.client = lease.address.addr();
        message.options.extend(
            self.options
                .iter()
                .filter(|(code, _)| *code == option::CLIENT_ID)
                .cloned(),
        );
        message = message.with(option::SERVER, &lease.server.octets());
        let sent = UdpSocket::bind(SocketAddrV4::new(lease.address.addr(), CLIENT_PORT)).and_then(
            |socket| {
                socket.send_to(
                    &message.encode(),
                    SocketAddrV4::new(lease.server, SERVER_PORT),
                )
            },
        );
        sent.map_err(|e| Error::doing("releasing the lease failed", e))?;
        let hops: Vec<Ipv4Addr> = lease
            .routers
            .iter()
            .copied()
            .chain([lease.server])
            .collect();
        let until = Instant::now() + NEIGHBOUR_TIMEOUT;
        // The neighbours of the namespace that this thread has entered, and not of the one of the process.
        let neighbours =
            || std::fs::read_to_string("/proc/thread-self/net/arp").unwrap_or_default();
        while is_unresolved(&neighbours(), &hops) {
            if Instant::now() > until {
                let server = lease.server;
                return Err(Error::other(format!(
                    "releasing the lease failed: no neighbour answers for the DHCP server {server}"
                )));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// Whether the kernel searches for the hardware address of one of `hops`, according to a table of neighbours (`/proc/net/arp` in
/// proc_pid_net(5)). The flags of such an entry are 0.
fn is_unresolved(table: &str, hops: &[Ipv4Addr]) -> bool {
    table.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [address, _, "0x0", ..] = fields[..] else {
            return false;
        };
        address.parse().is_ok_and(|a| hops.contains(&a))
    })
}

fn accept_answer(answer: &Message) -> Result<Lease, Error> {
    if answer.kind() == kind::NAK {
        let why = answer
            .get(option::MESSAGE)
            .map(|m| String::from_utf8_lossy(m).into_owned())
            .unwrap_or_default();
        return Err(Error::other(
            format!("the DHCP server rejected the address {why}")
                .trim_end()
                .to_owned(),
        ));
    }
    Lease::of(answer)
}

fn random() -> Result<u32, Error> {
    let mut bytes = [0; 4];
    holdfast_net::random(&mut bytes)
        .map_err(|e| Error::doing("reading a random number failed", e))?;
    Ok(u32::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_entries_without_flags_of_the_hops_are_unresolved() {
        let table = "IP address       HW type     Flags       HW address            Mask     Device
10.0.0.1         0x1         0x2         02:00:00:00:00:01     *        eth0
10.0.0.2         0x1         0x0         00:00:00:00:00:00     *        eth0
";
        let hop = |last: u8| [Ipv4Addr::from([10, 0, 0, last])];
        assert!(is_unresolved(table, &hop(2)));
        assert!(!is_unresolved(table, &hop(1)));
        assert!(!is_unresolved(table, &hop(3)));
        assert!(!is_unresolved("", &hop(2)));
    }
}
