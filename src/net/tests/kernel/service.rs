//! Packets through the rules of a service proxy: a verdict map from (address, protocol, port) to the service's chain, which
//! translates to a random entry of a map of endpoints.

use std::collections::BTreeSet;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use holdfast_net::netlink::Message;
use holdfast_net::nft::element::Element;
use holdfast_net::nft::expression::{Field, family_is, in_set, protocol_is};
use holdfast_net::nft::set::{Expiry, Kind, Set};
use holdfast_net::nft::statement::{
    Change, Reject, Target, change_set, redirect, redirect_by_map, reject, verdict, verdict_of_map,
};
use holdfast_net::nft::value::{Data, IpVersion, Type, Value};
use holdfast_net::nft::verdict::Verdict;
use holdfast_net::nft::{Hook, Nft, OwnerMark};

use crate::TABLE;
use crate::namespace::Namespace;

const TCP: u8 = 6;
const PORT: u16 = 80;

/// A client, a node that forwards, and endpoints behind the node. Each endpoint answers with its number.
struct World {
    client: Namespace,
    node: Namespace,
    _endpoints: Vec<Namespace>,
    version: IpVersion,
}

/// Answers connections to the port 8080 of a namespace with a number, until the process of the tests exits.
fn serve(endpoint: &Namespace, version: IpVersion, number: u8) {
    let any: IpAddr = match version {
        IpVersion::V4 => [0; 4].into(),
        IpVersion::V6 => [0; 16].into(),
    };
    let listener = endpoint.inside(|| TcpListener::bind((any, 8080)).unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // A client that has closed its connection needs no answer.
            let _ = stream.and_then(|mut s| s.write_all(&[number]));
        }
    });
}

impl World {
    fn new(version: IpVersion) -> Option<World> {
        let (client, node) = (Namespace::new()?, Namespace::new()?);
        let address = |link: usize, host: u8| match version {
            IpVersion::V4 => format!("10.231.{link}.{host}"),
            IpVersion::V6 => format!("fd31:{link}::{host}"),
        };
        let length = match version {
            IpVersion::V4 => 24,
            IpVersion::V6 => 64,
        };
        let with_length = |link, host| format!("{}/{length}", address(link, host));
        let family = match version {
            IpVersion::V4 => "-4",
            IpVersion::V6 => "-6",
        };
        node.connect(
            ("client", &with_length(0, 1)),
            &client,
            ("eth0", &with_length(0, 2)),
        );
        client.ip(&[family, "route", "add", "default", "via", &address(0, 1)]);
        node.inside(|| {
            holdfast_net::sysctl::write("ipv4/ip_forward", "1").unwrap();
            holdfast_net::sysctl::write("ipv6/conf/all/forwarding", "1").unwrap();
        });
        let mut endpoints = vec![];
        for number in 1..=2_u8 {
            let link = usize::from(number);
            let endpoint = Namespace::new()?;
            let (near, far) = (with_length(link, 1), with_length(link, 2));
            node.connect(
                (&format!("endpoint{number}"), &near),
                &endpoint,
                ("eth0", &far),
            );
            endpoint.ip(&[family, "route", "add", "default", "via", &address(link, 1)]);
            serve(&endpoint, version, number);
            endpoints.push(endpoint);
        }
        Some(World {
            client,
            node,
            _endpoints: endpoints,
            version,
        })
    }

    fn endpoint(&self, number: u8) -> IpAddr {
        match self.version {
            IpVersion::V4 => [10, 231, number, 2].into(),
            IpVersion::V6 => format!("fd31:{number}::2").parse().unwrap(),
        }
    }

    /// The address of a service.
    fn service(&self, number: u8) -> IpAddr {
        match self.version {
            IpVersion::V4 => [10, 232, 0, number].into(),
            IpVersion::V6 => format!("fd32::{number}").parse().unwrap(),
        }
    }

    fn commit(&self, messages: Vec<Message>) {
        self.node
            .inside(|| Nft::open().unwrap().commit(messages).unwrap());
    }

    /// The number of the endpoint that answers.
    fn call(&self, service: u8) -> io::Result<u8> {
        let address = SocketAddr::from((self.service(service), PORT));
        self.client.inside(|| {
            let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(10))?;
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
            let mut answer = [0];
            stream.read_exact(&mut answer)?;
            Ok(answer[0])
        })
    }

    /// Matches packets to services.
    fn to_services(&self) -> Vec<holdfast_net::netlink::Attributes> {
        let key = [
            Field::Destination(self.version),
            Field::Protocol,
            Field::DestinationPort,
        ];
        let mut rule = family_is(self.version == IpVersion::V4);
        rule.extend(verdict_of_map(&key, &self.services()));
        rule
    }

    fn services(&self) -> Set {
        let key = [self.version.address(), Type::Protocol, Type::Port];
        Set::new("services", &key, Kind::VerdictMap)
    }

    fn endpoints(&self) -> Set {
        let targets = vec![self.version.address(), Type::Port];
        Set::new("endpoints", &[Type::Number], Kind::Map(targets))
    }

    /// The entries of the map of endpoints.
    fn entries(&self, numbers: &[u8]) -> Vec<Element> {
        let entry = |(at, number): (usize, &u8)| {
            let target = vec![Value::Address(self.endpoint(*number)), Value::Port(8080)];
            let key = vec![Value::Number(u32::try_from(at).unwrap())];
            Element::new(key, Data::Values(target))
        };
        numbers.iter().enumerate().map(entry).collect()
    }

    /// An entry of the map of services.
    fn to_chain(&self, service: u8, chain: &str) -> Vec<Message> {
        let key = vec![
            Value::Address(self.service(service)),
            Value::Protocol(TCP),
            Value::Port(PORT),
        ];
        let element = Element::new(key, Data::Verdict(Verdict::goto(chain)));
        TABLE.add_elements(&self.services(), &[element]).unwrap()
    }

    /// Creates the tables and the service 1 with both endpoints.
    fn set_up(&self) {
        let (services, endpoints) = (self.services(), self.endpoints());
        let mut messages = vec![
            TABLE.create(),
            TABLE.hooked(
                "prerouting",
                Hook {
                    kind: "nat",
                    hook: 0,
                    priority: -100,
                },
            ),
            TABLE.chain("service"),
            TABLE.create_set(&services).unwrap(),
            TABLE.create_set(&endpoints).unwrap(),
            TABLE.append("prerouting", &self.to_services(), OwnerMark::None),
        ];
        messages.extend(self.to_chain(1, "service"));
        messages.extend(self.change(&[1, 2]));
        self.commit(messages);
    }

    /// Changes the endpoints of the service.
    fn change(&self, numbers: &[u8]) -> Vec<Message> {
        let endpoints = self.endpoints();
        let random = Field::Random {
            modulus: u32::try_from(numbers.len()).unwrap(),
            offset: 0,
        };
        let mut rule = protocol_is(TCP);
        rule.extend(redirect_by_map(
            &[random],
            &endpoints,
            Target::AddressAndPort(self.version),
        ));
        let mut messages = vec![TABLE.flush("service"), TABLE.flush_set("endpoints")];
        messages.extend(
            TABLE
                .add_elements(&endpoints, &self.entries(numbers))
                .unwrap(),
        );
        messages.push(TABLE.append("service", &rule, OwnerMark::None));
        messages
    }
}

fn answers(world: &World, service: u8) -> BTreeSet<u8> {
    (0..40).map(|_| world.call(service).unwrap()).collect()
}

#[test]
fn connections_reach_random_endpoints() {
    for version in [IpVersion::V4, IpVersion::V6] {
        let Some(world) = World::new(version) else {
            return;
        };
        world.set_up();
        assert_eq!(answers(&world, 1), BTreeSet::from([1, 2]), "{version:?}");
        // One endpoint changes: one transaction of four messages, without a listing.
        let change = world.change(&[2]);
        assert_eq!(change.len(), 4);
        world.commit(change);
        assert_eq!(answers(&world, 1), BTreeSet::from([2]), "{version:?}");
    }
}

#[test]
fn services_without_endpoints_are_rejected() {
    let Some(world) = World::new(IpVersion::V4) else {
        return;
    };
    let services = world.services();
    let mut messages = vec![
        TABLE.create(),
        // NAT chains cannot reject.
        TABLE.hooked(
            "forward",
            Hook {
                kind: "filter",
                hook: 2,
                priority: 0,
            },
        ),
        TABLE.chain("reset"),
        TABLE.chain("unreachable"),
        TABLE.create_set(&services).unwrap(),
        TABLE.append("forward", &world.to_services(), OwnerMark::None),
        TABLE.append(
            "reset",
            &[protocol_is(TCP), vec![reject(Reject::TcpReset)]].concat(),
            OwnerMark::None,
        ),
        TABLE.append(
            "unreachable",
            &[reject(Reject::PortUnreachable)],
            OwnerMark::None,
        ),
    ];
    messages.extend(world.to_chain(1, "reset"));
    messages.extend(world.to_chain(2, "unreachable"));
    world.commit(messages);
    // The node needs a route to forward packets to services.
    world
        .node
        .ip(&["route", "add", "10.232.0.0/24", "via", "10.231.1.2"]);
    for service in [1, 2] {
        let error = world.call(service).unwrap_err();
        assert_eq!(
            error.kind(),
            io::ErrorKind::ConnectionRefused,
            "service {service}"
        );
    }
}

/// Messages that replace the rules of the service: a client without an entry in an endpoint's set gets a random endpoint,
/// whose chain adds the client to the endpoint's set.
fn sticky(world: &World) -> Vec<Message> {
    let source = [Field::Source(IpVersion::V4)];
    let random = Field::Random {
        modulus: 2,
        offset: 0,
    };
    let mut messages = vec![TABLE.flush("service")];
    let chains = Set::anonymous(1, &[Type::Number], Kind::VerdictMap);
    let mut choices = vec![];
    let mut rules = vec![];
    for number in 1..=2_u8 {
        let chain = format!("endpoint-{number}");
        let affinity = Set {
            expiry: Expiry::After(Duration::from_secs(3600)),
            is_dynamic: true,
            size: Some(1000),
            ..Set::new(
                &format!("affinity-{number}"),
                &[Type::Ipv4Address],
                Kind::Set,
            )
        };
        let mut known = in_set(&source, &affinity, true);
        known.push(verdict(&Verdict::goto(&chain)));
        rules.push(TABLE.append("service", &known, OwnerMark::None));
        let mut translate = change_set(Change::Update, &affinity, &source, &[], None).unwrap();
        translate.extend(protocol_is(TCP));
        translate.extend(redirect(world.endpoint(number), 8080));
        messages.push(TABLE.create_set(&affinity).unwrap());
        messages.push(TABLE.chain(&chain));
        messages.push(TABLE.append(&chain, &translate, OwnerMark::None));
        let key = vec![Value::Number(u32::from(number) - 1)];
        choices.push(Element::new(key, Data::Verdict(Verdict::goto(&chain))));
    }
    messages.push(TABLE.create_set(&chains).unwrap());
    messages.extend(TABLE.add_elements(&chains, &choices).unwrap());
    messages.extend(rules);
    messages.push(TABLE.append(
        "service",
        &verdict_of_map(&[random], &chains),
        OwnerMark::None,
    ));
    messages
}

#[test]
fn clients_stay_with_their_endpoint() {
    let Some(world) = World::new(IpVersion::V4) else {
        return;
    };
    world.set_up();
    world.commit(sticky(&world));
    let first = world.call(1).unwrap();
    assert_eq!(answers(&world, 1), BTreeSet::from([first]));
    // Its set has the client, with the remaining time.
    world.node.inside(|| {
        let mut nft = Nft::open().unwrap();
        let set = nft
            .set(TABLE, &format!("affinity-{first}"))
            .unwrap()
            .unwrap();
        let elements = nft.elements(TABLE, &set, 10).unwrap();
        let client = Value::Address([10, 231, 0, 2].into());
        assert_eq!(
            elements.iter().map(|e| &e.key).collect::<Vec<_>>(),
            [&vec![client]]
        );
        assert!(elements[0].expires.unwrap() > Duration::from_secs(3000));
    });
    // Without the entry, the client gets random endpoints again.
    let forget = || {
        [1, 2]
            .map(|number| TABLE.flush_set(&format!("affinity-{number}")))
            .to_vec()
    };
    let calls = (0..40).map(|_| {
        world.commit(forget());
        world.call(1).unwrap()
    });
    assert_eq!(calls.collect::<BTreeSet<u8>>(), BTreeSet::from([1, 2]));
}
