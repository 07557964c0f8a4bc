//! Connections through the rules.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use holdfast_core::network::Family;
use holdfast_net::conntrack::Conntrack;
use holdfast_proxy::services::Settings;
use serde_json::json;

use crate::namespace::Namespace;
use crate::skip::skipped;
use crate::world::{Answer, World, address, ask, call, connect, datagram, settings, udp};

/// How long a client waits for an answer that must not come.
const SHORT: Duration = Duration::from_millis(700);

fn endpoints(answers: &[Answer]) -> BTreeSet<u8> {
    answers.iter().map(|answer| answer.endpoint).collect()
}

fn clients(answers: &[Answer]) -> BTreeSet<std::net::IpAddr> {
    answers.iter().map(|answer| answer.client).collect()
}

#[test]
fn cluster_addresses_lead_to_random_endpoints() {
    for family in Family::ALL {
        let Some(mut world) = World::new(family) else {
            return;
        };
        assert!(world.set_up(json!({}), &[2, 3]).is_full);
        let (tcp, dns) = (world.to("service", 20, 80), world.to("service", 20, 53));
        let answers: Vec<Answer> = (0..30).map(|_| call(&world.client, tcp).unwrap()).collect();
        assert_eq!(endpoints(&answers), BTreeSet::from([2, 3]), "{family:?}");
        // The client is outside of the cluster, so the endpoint answers to the node.
        let node = address(family, "pod", 1);
        assert_eq!(clients(&answers), BTreeSet::from([node]), "{family:?}");
        let answers: Vec<Answer> = (0..30)
            .map(|_| datagram(&udp(&world.client, dns)).unwrap())
            .collect();
        assert_eq!(endpoints(&answers), BTreeSet::from([2, 3]), "{family:?}");
        // The node itself is a client, too.
        assert!(call(&world.node, tcp).is_ok(), "{family:?}");
        assert_eq!(world.audit(), [""; 0]);
    }
}

#[test]
fn one_changed_endpoint_is_a_small_transaction() {
    let Some(mut world) = World::new(Family::V4) else {
        return;
    };
    world.set_up(json!({}), &[2]);
    let committed = world.set_up(json!({}), &[3]);
    // For each port, a deleted and an added target; and the hairpin address is another one.
    assert!(!committed.is_full);
    assert!(committed.messages <= 6, "{committed:?}");
    let to = world.to("service", 20, 80);
    let answers: Vec<Answer> = (0..20).map(|_| call(&world.client, to).unwrap()).collect();
    assert_eq!(endpoints(&answers), BTreeSet::from([3]));
    assert_eq!(world.set_up(json!({}), &[3]).messages, 0);
    assert_eq!(world.audit(), [""; 0]);
}

#[test]
fn pods_reach_themselves_and_each_other_through_a_service() {
    for family in Family::ALL {
        let Some(mut world) = World::new(family) else {
            return;
        };
        world.set_up(json!({}), &[2]);
        let (tcp, dns) = (world.to("service", 20, 80), world.to("service", 20, 53));
        let node = address(family, "pod", 1);
        let expected = Answer {
            endpoint: 2,
            client: node,
        };
        assert_eq!(call(&world.pods[0], tcp).unwrap(), expected);
        assert_eq!(datagram(&udp(&world.pods[0], dns)).unwrap(), expected);
        // The other pod is in the cluster, so its address stays.
        let other = Answer {
            endpoint: 2,
            client: address(family, "pod", 3),
        };
        assert_eq!(call(&world.pods[1], tcp).unwrap(), other);
    }
}

#[test]
fn this_process_answers_at_its_own_addresses() {
    for family in Family::ALL {
        let Some(mut world) = World::new(family) else {
            return;
        };
        let own = world.to("service", 20, 80);
        let ip = own.ip().to_string();
        // The kernel binds sockets of IPv6 only to addresses of links.
        let add: &[&str] = match family {
            Family::V4 => &["route", "add", "local", &ip, "dev", "lo"],
            Family::V6 => &["address", "add", &ip, "dev", "lo", "nodad"],
        };
        world.node.ip(add);
        let listener = world.node.inside(|| TcpListener::bind(own).unwrap());
        std::thread::spawn(move || for _ in listener.incoming() {});
        world.open(Settings {
            own_addresses: vec![own.ip()],
            ..settings()
        });
        // The service has no endpoints, and is not rejected.
        world.set_up(json!({}), &[]);
        for from in [&world.client, &world.node, &world.pods[0]] {
            let connected = connect(from, own, SHORT).map_err(|error| error.kind());
            assert!(
                connected.is_ok(),
                "{family:?} from {}: {connected:?}",
                from.name
            );
        }
        assert_eq!(world.audit(), [""; 0]);
    }
}

#[test]
fn all_connections_can_get_the_address_of_the_node() {
    let Some(mut world) = World::new(Family::V4) else {
        return;
    };
    world.open(Settings {
        masquerade_all: true,
        ..settings()
    });
    world.set_up(json!({}), &[2]);
    let answer = call(&world.pods[1], world.to("service", 20, 80)).unwrap();
    assert_eq!(answer.client, address(Family::V4, "pod", 1));
    assert_eq!(world.audit(), [""; 0]);
}

#[test]
fn node_ports_follow_the_external_policy() {
    for family in Family::ALL {
        let Some(mut world) = World::new(family) else {
            return;
        };
        let (tcp, dns) = (world.to("client", 1, 30080), world.to("client", 1, 30053));
        world.set_up(json!({}), &[2, 3]);
        let node = address(family, "pod", 1);
        assert_eq!(call(&world.client, tcp).unwrap().client, node);
        // The addresses of the bridge are not in the Node's status, so they have no node ports.
        let bridge = world.to("pod", 1, 30080);
        let error = call(&world.client, bridge).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        let local = json!({"externalTrafficPolicy": "Local"});
        world.set_up(local.clone(), &[2]);
        let client = address(family, "client", 2);
        assert_eq!(call(&world.client, tcp).unwrap().client, client);
        let socket = udp(&world.client, dns);
        assert_eq!(datagram(&socket).unwrap().client, client);
        // Without endpoints on this node, others are dropped, and this node and its pods reach the other nodes' endpoints.
        let service = world.service(local);
        let elsewhere = world.slice("there", &[3]);
        world.set(&service, &[elsewhere]);
        world.commit();
        let error = connect(&world.client, tcp, SHORT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(call(&world.node, tcp).unwrap().endpoint, 3);
        assert_eq!(world.audit(), [""; 0]);
    }
}

#[test]
fn services_without_endpoints_refuse_connections() {
    for family in Family::ALL {
        let Some(mut world) = World::new(family) else {
            return;
        };
        world.set_up(json!({}), &[]);
        let refused = [
            world.to("service", 20, 80),
            world.to("client", 1, 30080),
            // An unused port of a service.
            world.to("service", 20, 81),
        ];
        for to in refused {
            let error = call(&world.client, to).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{to}");
        }
        let socket = udp(&world.client, world.to("service", 20, 53));
        assert_eq!(
            datagram(&socket).unwrap_err().kind(),
            ErrorKind::ConnectionRefused
        );
        let error = call(&world.node, world.to("service", 20, 80)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        // With an endpoint, the same socket gets answers.
        world.set_up(json!({}), &[2]);
        assert!(datagram(&socket).is_ok(), "{family:?}");
        // The internal policy Local drops without local endpoints.
        let service = world.service(json!({"internalTrafficPolicy": "Local"}));
        let elsewhere = world.slice("there", &[3]);
        world.set(&service, &[elsewhere]);
        world.commit();
        let error = connect(&world.client, world.to("service", 20, 80), SHORT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }
}

#[test]
fn clients_keep_their_endpoint() {
    for family in Family::ALL {
        let Some(mut world) = World::new(family) else {
            return;
        };
        let sticky = json!({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 100}}});
        world.set_up(sticky.clone(), &[2, 3]);
        let to = world.to("service", 20, 80);
        let call_often = |world: &World| -> BTreeSet<u8> {
            let answers: Vec<Answer> = (0..20).map(|_| call(&world.client, to).unwrap()).collect();
            endpoints(&answers)
        };
        let first = call_often(&world);
        assert_eq!(first.len(), 1, "{family:?}");
        // Another endpoint and another time leave the client with its endpoint.
        let longer = json!({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 200}}});
        world.set_up(longer, &[2, 3]);
        assert_eq!(call_often(&world), first);
        assert_eq!(world.audit(), [""; 0]);
        // So does another process, or a replaced table.
        world.open(settings());
        assert!(world.set_up(sticky.clone(), &[2, 3]).is_full);
        assert_eq!(call_often(&world), first);
        // Its endpoint is removed.
        let other = if first.contains(&2) { 3 } else { 2 };
        world.set_up(sticky, &[other]);
        assert_eq!(call_often(&world), BTreeSet::from([other]));
        world.set_up(json!({}), &[2, 3]);
        assert_eq!(call_often(&world), BTreeSet::from([2, 3]));
        assert_eq!(world.audit(), [""; 0]);
    }
}

#[test]
fn load_balancers_check_their_clients() {
    for family in Family::ALL {
        let Some(mut world) = World::new(family) else {
            return;
        };
        let balancer = address(family, "balancer", 7);
        let allows = |world: &mut World, range: &str| {
            let spec = json!({"type": "LoadBalancer", "loadBalancerSourceRanges": [range]});
            let mut service = world.service(spec);
            let status = json!({"loadBalancer": {"ingress": [{"ip": balancer}]}});
            service.status = serde_json::from_value(status).unwrap();
            let slice = world.slice("here", &[2, 3]);
            world.set(&service, &[slice]);
            world.commit();
            connect(&world.client, (balancer, 80).into(), SHORT)
                .map(|mut stream| ask(&mut stream).unwrap())
        };
        let client = address(family, "client", 2);
        assert!(allows(&mut world, &format!("{client}/24")).is_ok());
        let other = allows(&mut world, "192.0.2.0/24");
        match family {
            Family::V4 => assert_eq!(other.unwrap_err().kind(), ErrorKind::TimedOut),
            // A family without ranges is open.
            Family::V6 => assert!(other.is_ok()),
        }
        assert_eq!(world.audit(), [""; 0]);
    }
}

/// Fills the connection tracking of a namespace, which counts its own flows only. `None` if its maximum is too large for a test.
fn fill_connection_tracking(namespace: &Namespace) -> Option<()> {
    let read = |name: &str| -> usize {
        let path = format!("/proc/sys/net/netfilter/{name}");
        let text = std::fs::read_to_string(path).unwrap();
        text.trim().parse().unwrap()
    };
    namespace.inside(|| {
        let max = read("nf_conntrack_max");
        if max > 300_000 {
            return None;
        }
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        for round in 0..20 {
            for port in 1..=u16::MAX {
                // An error belongs to an earlier datagram, which no program has received.
                let target = SocketAddr::from(([127, 0, 9, round], port));
                let _ = socket.send_to(b"x", target);
            }
            if read("nf_conntrack_count") >= max {
                return Some(());
            }
        }
        panic!("{} of {max} flows", read("nf_conntrack_count"));
    })
}

#[test]
fn rules_change_and_flows_end_while_connection_tracking_is_full() {
    let Some(mut world) = World::new(Family::V4) else {
        return;
    };
    world.set_up(json!({}), &[2]);
    if fill_connection_tracking(&world.node).is_none() {
        skipped("nf_conntrack_max is too large to fill the table");
        return;
    }
    // The kernel drops another flow for a new one, or else the packet.
    let service = world.to("service", 20, 53);
    let ask = |world: &World| {
        let begun = Instant::now();
        loop {
            let socket = udp(&world.client, service);
            socket.set_read_timeout(Some(SHORT)).unwrap();
            match datagram(&socket) {
                Ok(answer) => return (socket, answer.endpoint),
                Err(error) => assert!(begun.elapsed() < SHORT * 20, "{error}"),
            }
        }
    };
    let (socket, endpoint) = ask(&world);
    assert_eq!(endpoint, 2);
    let begun = Instant::now();
    let committed = world.set_up(json!({}), &[3]);
    let took = begun.elapsed();
    assert_eq!((committed.deleted_flows, committed.flows_left), (1, None));
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!(world.audit(), [""; 0]);
    assert_eq!(ask(&world).1, 3);
    // The same client reaches the new endpoint as well, once the kernel has room for its flow.
    let answers = (0..20).filter_map(|_| datagram(&socket).ok());
    assert_eq!(answers.map(|answer| answer.endpoint).next(), Some(3));
}

#[test]
fn flows_to_removed_endpoints_end() {
    for family in Family::ALL {
        let Some(mut world) = World::new(family) else {
            return;
        };
        world.set_up(json!({}), &[2]);
        let cluster = udp(&world.client, world.to("service", 20, 53));
        let node_port = udp(&world.client, world.to("client", 1, 30053));
        for socket in [&cluster, &node_port] {
            assert_eq!(datagram(socket).unwrap().endpoint, 2);
        }
        let committed = world.set_up(json!({}), &[3]);
        assert_eq!(committed.deleted_flows, 2, "{family:?}");
        for socket in [&cluster, &node_port] {
            assert_eq!(datagram(socket).unwrap().endpoint, 3);
        }
        // Flows to remaining endpoints stay.
        let committed = world.set_up(json!({}), &[2, 3]);
        assert_eq!(committed.deleted_flows, 0);
        assert_eq!(datagram(&cluster).unwrap().endpoint, 3);
        let known = world.node.inside(|| {
            let is_v4 = family == Family::V4;
            let mut table = Conntrack::open().unwrap();
            let flows = table.flows(is_v4, 10, |f| f.original.protocol == 17);
            flows.unwrap().flows.len()
        });
        assert_eq!(known, 2);
    }
}
