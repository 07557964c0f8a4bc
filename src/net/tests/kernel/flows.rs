//! Flows of connection tracking: listed with bounds, and deleted by their original destination and the source of replies.

use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use holdfast_net::conntrack::{Conntrack, Flow};
use holdfast_net::nft::expression::{protocol_is, status};
use holdfast_net::nft::statement::redirect;
use holdfast_net::nft::{Hook, Nft, OwnerMark};

use crate::TABLE;
use crate::namespace::Namespace;

const UDP: u8 = 17;

#[test]
fn flows_to_a_removed_endpoint_are_deleted() {
    let Some(namespace) = Namespace::new() else {
        return;
    };
    let endpoint: IpAddr = [127, 0, 0, 1].into();
    let service: IpAddr = [127, 0, 0, 9].into();
    namespace.inside(|| {
        let server = UdpSocket::bind("127.0.0.1:5353").unwrap();
        server
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let rule = [protocol_is(UDP), redirect(endpoint, 5353)].concat();
        let messages = vec![
            TABLE.create(),
            TABLE.hooked(
                "output",
                Hook {
                    kind: "nat",
                    hook: 3,
                    priority: -100,
                },
            ),
            TABLE.append("output", &rule, OwnerMark::None),
        ];
        Nft::open().unwrap().commit(messages).unwrap();
        let send = |count: usize| {
            for _ in 0..count {
                let client = UdpSocket::bind("127.0.0.1:0").unwrap();
                client.send_to(b"x", (service, 53)).unwrap();
                server.recv(&mut [0]).unwrap();
            }
        };
        send(5);
        let mut table = Conntrack::open().unwrap();
        let is_stale = |flow: &Flow| {
            flow.original.protocol == UDP
                && flow.original.destination == Some(service)
                && flow.original.destination_port == 53
                && flow.reply.source == Some(endpoint)
        };
        let found = table.flows(true, 100, is_stale).unwrap();
        assert_eq!(found.flows.len(), 5);
        assert!(!found.is_partial);
        for flow in &found.flows {
            assert_eq!(flow.reply.source_port, 5353);
            assert_eq!(flow.reply.destination_port, flow.original.source_port);
            assert_ne!(flow.status & status::DNAT, 0);
        }
        let some = table.flows(true, 3, is_stale).unwrap();
        assert_eq!((some.flows.len(), some.is_partial), (3, true));
        assert_eq!(table.flows(false, 3, |_| true).unwrap().flows, []);
        // Flows to other endpoints stay.
        let other = |flow: &Flow| is_stale(flow) && flow.reply.source == Some(service);
        assert_eq!(table.delete(true, other).unwrap(), 0);
        assert_eq!(table.delete(true, is_stale).unwrap(), 5);
        assert_eq!(table.flows(true, 3, is_stale).unwrap().flows, []);
        send(1);
        assert_eq!(table.flows(true, 3, is_stale).unwrap().flows.len(), 1);
    });
}
