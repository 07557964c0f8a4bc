//! One question to one upstream: over UDP, and over TCP if the reply is truncated.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};

use super::reply::{Question, Reply, Unusable};
use crate::query::{self, MAX_PAYLOAD};
use crate::random::Random;
use crate::wire::code;

/// After so many packets with a wrong id or question, the reply is requested over TCP: an attacker may be guessing ids.
const MAX_FOREIGN: u32 = 64;

/// Queries an upstream. The kernel chooses a random port for each query, and delivers only packets from the upstream's address.
/// The caller limits the time.
///
/// # Errors
///
/// The upstream is unreachable or sends malformed messages.
pub(crate) async fn exchange(
    upstream: SocketAddr,
    question: &Question,
    random: &Random,
) -> io::Result<Reply> {
    let reply = try_exchange(upstream, question, Some(question.dnssec_ok), random).await?;
    if !matches!(reply.code, code::FORMERR | code::NOTIMP | code::BADVERS) {
        return Ok(reply);
    }
    // Some servers do not know EDNS (RFC 6891 section 7).
    try_exchange(upstream, question, None, random).await
}

async fn try_exchange(
    upstream: SocketAddr,
    question: &Question,
    edns: Option<bool>,
    random: &Random,
) -> io::Result<Reply> {
    let id = random.next_id();
    let message = query::for_upstream(
        id,
        &question.name,
        question.kind,
        question.checking_disabled,
        edns,
    );
    match over_udp(upstream, question, id, &message).await? {
        Some(reply) => Ok(reply),
        None => over_tcp(upstream, question, id, &message).await,
    }
}

/// `None` if the reply has to be requested over TCP.
async fn over_udp(
    upstream: SocketAddr,
    question: &Question,
    id: u16,
    message: &[u8],
) -> io::Result<Option<Reply>> {
    let local: SocketAddr = match upstream {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(local).await?;
    socket.connect(upstream).await?;
    socket.send(message).await?;
    // Larger datagrams than the advertised size come from servers without EDNS support only, and are cut by 512 bytes.
    let mut buffer = vec![0; MAX_PAYLOAD];
    for _ in 0..MAX_FOREIGN {
        let length = socket.recv(&mut buffer).await?;
        match Reply::read(&buffer[..length], id, question) {
            Ok(reply) => return Ok(Some(reply)),
            Err(Unusable::Foreign) => {}
            // A datagram that was cut on its way.
            Err(Unusable::Truncated | Unusable::Malformed) => return Ok(None),
        }
    }
    Ok(None)
}

async fn over_tcp(
    upstream: SocketAddr,
    question: &Question,
    id: u16,
    message: &[u8],
) -> io::Result<Reply> {
    let mut stream = TcpStream::connect(upstream).await?;
    stream.set_nodelay(true)?;
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    let mut framed = length.to_be_bytes().to_vec();
    framed.extend_from_slice(message);
    stream.write_all(&framed).await?;
    let length = stream.read_u16().await?;
    let mut packet = vec![0; usize::from(length)];
    stream.read_exact(&mut packet).await?;
    Reply::read(&packet, id, question).map_err(|e| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("unusable DNS reply: {e:?}"),
        )
    })
}
