//! Traffic control: limits the rate of a link (`plugins/meta/bandwidth/ifb_creator.go` of containernetworking/plugins).

use std::io;

use crate::link::number;
use crate::netlink::{ACK, Attributes, CREATE, DUMP, EXCL, Message, REQUEST, Socket, attributes};

const NEW_QDISC: u16 = 36;
const GET_QDISC: u16 = 38;
const NEW_FILTER: u16 = 44;

const ROOT: u32 = 0xffff_ffff;
const INGRESS: u32 = 0xffff_fff1;
const INGRESS_HANDLE: u32 = 0xffff_0000;
const FIRST_HANDLE: u32 = 0x0001_0000;
const KIND: u16 = 1;
const OPTIONS: u16 = 2;

const TBF_PARMS: u16 = 1;
const TBF_RATE64: u16 = 4;
const TBF_BURST: u16 = 6;

/// The parameters of a token bucket filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket {
    /// Bytes per second.
    pub rate: u64,
    /// The size of a burst in bytes.
    pub burst: u32,
}

impl Bucket {
    /// The limit of the queue in bytes: 25 ms at the rate, plus one burst.
    #[must_use]
    pub fn limit(self) -> u32 {
        u32::try_from(self.rate.saturating_mul(25) / 1000 + u64::from(self.burst))
            .unwrap_or(u32::MAX)
    }
}

fn header(index: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    for field in [index, handle, parent, info] {
        bytes.extend_from_slice(&field.to_ne_bytes());
    }
    bytes
}

impl Socket {
    /// Attaches a token bucket qdisc to a link.
    pub fn add_bucket(&mut self, index: u32, bucket: Bucket) -> io::Result<()> {
        const ETHERNET: u8 = 1;
        let slow = u32::try_from(bucket.rate);
        let rate = slow.unwrap_or(u32::MAX);
        // struct tc_tbf_qopt: tc_ratespec of the rate and of the peak rate, limit, buffer, mtu.
        let mut parameters = vec![0, ETHERNET, 0, 0, 0, 0, 0, 0];
        parameters.extend_from_slice(&rate.to_ne_bytes());
        parameters.extend_from_slice(&[0; 12]);
        parameters.extend_from_slice(&bucket.limit().to_ne_bytes());
        parameters.extend_from_slice(&[0; 8]);
        // The burst in bytes: in ticks, a large burst would overflow.
        let mut options = Attributes::new()
            .put(TBF_PARMS, &parameters)
            .number(TBF_BURST, bucket.burst);
        if slow.is_err() {
            options = options.put(TBF_RATE64, &bucket.rate.to_ne_bytes());
        }
        let message = Message::new(
            NEW_QDISC,
            REQUEST | ACK | CREATE | EXCL,
            &header(index, FIRST_HANDLE, ROOT, 0),
        )
        .text(KIND, "tbf");
        self.execute(message.nest(OPTIONS, &options))
    }

    /// The rate and the limit of a link's token bucket, if it has one.
    pub fn bucket(&mut self, index: u32) -> io::Result<Option<(u64, u32)>> {
        for (_, body) in self.query(Message::new(
            GET_QDISC,
            REQUEST | DUMP,
            &header(index, 0, 0, 0),
        ))? {
            if body.get(4..).and_then(number) != Some(index) {
                continue;
            }
            let all: Vec<(u16, &[u8])> = attributes(body.get(20..).unwrap_or_default()).collect();
            let of = |kind: u16| all.iter().find(|(k, _)| *k == kind).map(|(_, v)| *v);
            if of(KIND) != Some(b"tbf\0") {
                continue;
            }
            let (mut rate, mut limit) = (0, 0);
            for (kind, value) in of(OPTIONS).into_iter().flat_map(attributes) {
                match kind {
                    TBF_PARMS => {
                        rate = rate.max(u64::from(value.get(8..).and_then(number).unwrap_or(0)));
                        limit = value.get(24..).and_then(number).unwrap_or(0);
                    }
                    TBF_RATE64 => {
                        rate = <[u8; 8]>::try_from(value).map_or(rate, u64::from_ne_bytes)
                    }
                    _ => {}
                }
            }
            return Ok(Some((rate, limit)));
        }
        Ok(None)
    }

    /// Redirects the incoming packets of a link so that they leave through another link.
    pub fn redirect(&mut self, from: u32, to: u32) -> io::Result<()> {
        let flags = REQUEST | ACK | CREATE | EXCL;
        let ingress = Message::new(NEW_QDISC, flags, &header(from, INGRESS_HANDLE, INGRESS, 0))
            .text(KIND, "ingress");
        match self.execute(ingress) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        const PRIORITY: u32 = 1 << 16;
        const ALL_PROTOCOLS: u16 = 3;
        const STOLEN: u32 = 4;
        const REDIRECT: u32 = 1;
        // struct tc_u32_sel with a single key that matches every packet.
        let mut selector = vec![1, 0, 1, 0];
        selector.extend_from_slice(&[0; 12]);
        selector.extend_from_slice(&[0; 16]);
        // struct tc_mirred.
        let mut mirred = vec![];
        for field in [0, 0, STOLEN, 0, 0, REDIRECT, to] {
            mirred.extend_from_slice(&field.to_ne_bytes());
        }
        let action = Attributes::new()
            .text(1, "mirred")
            .nest(2, &Attributes::new().put(2, &mirred));
        let actions = Attributes::new().nest(1, &action);
        let options = Attributes::new().put(5, &selector).nest(7, &actions);
        let info = PRIORITY | u32::from(ALL_PROTOCOLS.to_be());
        let message = Message::new(NEW_FILTER, flags, &header(from, 0, INGRESS_HANDLE, info))
            .text(KIND, "u32");
        self.execute(message.nest(OPTIONS, &options))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_holds_a_burst_and_25_ms_of_traffic() {
        assert_eq!(
            Bucket {
                rate: 1_000_000,
                burst: 1000
            }
            .limit(),
            26_000
        );
        assert_eq!(
            Bucket {
                rate: u64::MAX,
                burst: 1
            }
            .limit(),
            u32::MAX
        );
    }
}
