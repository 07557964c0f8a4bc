//! UDP over IPv4, encoded by hand: the kernel cannot send packets for a client that has no address.

use std::net::Ipv4Addr;

/// The UDP port of DHCP servers.
pub const SERVER_PORT: u16 = 67;
/// The UDP port of DHCP clients.
pub const CLIENT_PORT: u16 = 68;

const UDP: u8 = 17;
const IP_HEADER: usize = 20;
const UDP_HEADER: usize = 8;

fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u32;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u32::from(u16::from_be_bytes([
                pair[0],
                pair.get(1).copied().unwrap_or(0),
            ]));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(u16::MAX)
}

/// A broadcast packet without a source address that carries `payload` to servers.
#[must_use]
pub fn to_servers(payload: &[u8]) -> Vec<u8> {
    let (source, destination) = (Ipv4Addr::UNSPECIFIED.octets(), Ipv4Addr::BROADCAST.octets());
    let size = |bytes: usize| u16::try_from(bytes).unwrap_or(u16::MAX).to_be_bytes();
    let udp_size = size(UDP_HEADER + payload.len());
    let mut ip = vec![0x45, 0x10];
    ip.extend_from_slice(&size(IP_HEADER + UDP_HEADER + payload.len()));
    ip.extend_from_slice(&[0, 0, 0x40, 0, 64, UDP, 0, 0]);
    ip.extend_from_slice(&source);
    ip.extend_from_slice(&destination);
    let sum = checksum(&[&ip]).to_be_bytes();
    ip[10..12].copy_from_slice(&sum);
    let mut udp = vec![];
    udp.extend_from_slice(&CLIENT_PORT.to_be_bytes());
    udp.extend_from_slice(&SERVER_PORT.to_be_bytes());
    udp.extend_from_slice(&udp_size);
    udp.extend_from_slice(&[0, 0]);
    let sum = match checksum(&[&source, &destination, &[0, UDP], &udp_size, &udp, payload]) {
        0 => 0xffff,
        sum => sum,
    };
    udp[6..8].copy_from_slice(&sum.to_be_bytes());
    [ip, udp, payload.to_vec()].concat()
}

/// The payload of a packet to a DHCP client; `None` for other packets. The checksum is not
/// verified, because packets between links of the same host have no computed checksum yet.
#[must_use]
pub fn from_servers(packet: &[u8]) -> Option<&[u8]> {
    let header = usize::from(packet.first()? & 0xf) * 4;
    let fragment = u16::from_be_bytes([*packet.get(6)?, *packet.get(7)?]) & 0x3fff;
    if packet.first()? >> 4 != 4 || header < IP_HEADER || *packet.get(9)? != UDP || fragment != 0 {
        return None;
    }
    let udp = packet.get(header..)?;
    let port = u16::from_be_bytes([*udp.get(2)?, *udp.get(3)?]);
    let length = usize::from(u16::from_be_bytes([*udp.get(4)?, *udp.get(5)?]));
    if port != CLIENT_PORT {
        None
    } else {
        udp.get(UDP_HEADER..length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        /// Any packet yields a part of itself, or `None`.
        #[test]
        fn any_packet_is_decoded_or_ignored(mut bytes in vec(any::<u8>(), 0..100), payload in vec(any::<u8>(), 0..60), options in 5_u8..16) {
            let _ = from_servers(&bytes);
            // An IP header with options, followed by a well-formed datagram.
            let header = usize::from(options) * 4;
            bytes.resize(header, 0);
            (bytes[0], bytes[6], bytes[7], bytes[9]) = (0x40 | options, 0x40, 0, UDP);
            bytes.extend(SERVER_PORT.to_be_bytes());
            bytes.extend(CLIENT_PORT.to_be_bytes());
            bytes.extend(u16::try_from(UDP_HEADER + payload.len()).expect("short").to_be_bytes());
            bytes.extend([0, 0]);
            bytes.extend(&payload);
            prop_assert_eq!(from_servers(&bytes), Some(&payload[..]));
        }
    }

    #[test]
    fn packets_are_well_formed() {
        let packet = to_servers(b"abc");
        assert_eq!(
            checksum(&[&packet[..20]]),
            0,
            "the checksum of a header with its checksum is zero"
        );
        assert_eq!(
            (packet.len(), packet[9], &packet[16..20]),
            (31, UDP, &[255; 4][..])
        );
        assert_eq!(
            from_servers(&packet),
            None,
            "a request is addressed to servers"
        );
        let mut answer = packet;
        answer[22..24].copy_from_slice(&CLIENT_PORT.to_be_bytes());
        assert_eq!(from_servers(&answer), Some(&b"abc"[..]));
        for cut in 0..answer.len() {
            assert_eq!(from_servers(&answer[..cut]), None);
        }
    }
}
