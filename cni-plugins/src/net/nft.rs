//! Masquerading in nftables over netlink, with the names of the reference plugins (CNI reference spec,
//! 2.3 and 2.4), so that either implementation can clean up after the other.
//!
//! ADD only adds: a transaction that deletes makes closing the socket wait for a kernel grace period.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;

use super::netlink::{ACK, APPEND, Attributes, CREATE, DUMP, EXCL, Message, REQUEST, Socket, attributes};

const TABLE: &str = "cni_plugins_masquerade";
const CHECKS: &str = "masq_checks";
const POSTROUTING: &str = "postrouting";

const SUBSYSTEM: u16 = 10 << 8;
const NEW_TABLE: u16 = SUBSYSTEM;
const NEW_CHAIN: u16 = SUBSYSTEM | 3;
const GET_CHAIN: u16 = SUBSYSTEM | 4;
const NEW_RULE: u16 = SUBSYSTEM | 6;
const GET_RULE: u16 = SUBSYSTEM | 7;
const DEL_RULE: u16 = SUBSYSTEM | 8;
const INET: u8 = 1;

fn header() -> [u8; 4] {
    [INET, 0, 0, 0]
}

fn begin() -> Message {
    Message::new(0x10, REQUEST, &[0, 0, 0, 10])
}

fn end() -> Message {
    Message::new(0x11, REQUEST, &[0, 0, 0, 10])
}

fn expression(name: &str, data: &Attributes) -> Attributes {
    Attributes::new().text(1, name).nest(2, data)
}

fn value(bytes: &[u8]) -> Attributes {
    Attributes::new().put(1, bytes)
}

/// `meta nfproto` is IPv4 or IPv6.
fn family_is(v4: bool) -> [Attributes; 2] {
    [
        expression("meta", &Attributes::new().big(2, 15).big(1, 1)),
        expression("cmp", &Attributes::new().big(1, 1).big(2, 0).nest(3, &value(&[if v4 { 2 } else { 10 }]))),
    ]
}

/// Source or destination compared with a network.
fn address_is(source: bool, net: IpNet, equal: bool) -> Vec<Attributes> {
    let (offset, address, mask) = match net {
        IpNet::V4(n) => (if source { 12 } else { 16 }, n.network().octets().to_vec(), n.netmask().octets().to_vec()),
        IpNet::V6(n) => (if source { 8 } else { 24 }, n.network().octets().to_vec(), n.netmask().octets().to_vec()),
    };
    let length = u32::try_from(address.len()).unwrap_or(4);
    let mut list = vec![expression("payload", &Attributes::new().big(1, 1).big(2, 1).big(3, offset).big(4, length))];
    if net.prefix_len() < net.max_prefix_len() {
        let zero = vec![0; address.len()];
        list.push(expression("bitwise", &Attributes::new().big(1, 1).big(2, 1).big(3, length).nest(4, &value(&mask)).nest(5, &value(&zero))));
    }
    list.push(expression("cmp", &Attributes::new().big(1, 1).big(2, u32::from(!equal)).nest(3, &value(&address))));
    list
}

fn verdict(code: i32, chain: Option<&str>) -> Attributes {
    let mut verdict = Attributes::new().big(1, code.cast_unsigned());
    if let Some(chain) = chain {
        verdict = verdict.text(2, chain);
    }
    let data = Attributes::new().nest(2, &verdict);
    expression("immediate", &Attributes::new().big(1, 0).nest(2, &data))
}

fn rule(chain: &str, expressions: &[Attributes], comment: Option<&str>) -> Message {
    let mut list = Attributes::new();
    for expression in expressions {
        list = list.nest(1, expression);
    }
    let mut message = Message::new(NEW_RULE, REQUEST | ACK | CREATE | APPEND, &header()).text(1, TABLE).text(2, chain).nest(4, &list);
    if let Some(comment) = comment {
        let mut data = vec![0, u8::try_from(comment.len() + 1).unwrap_or(u8::MAX)];
        data.extend_from_slice(comment.as_bytes());
        data.push(0);
        message = message.put(7, &data);
    }
    message
}

fn scaffold() -> Vec<Message> {
    let new = REQUEST | ACK | CREATE;
    let hook = Attributes::new().big(1, 4).big(2, 100);
    let v4: IpNet = IpNet::new(IpAddr::from([224, 0, 0, 0]), 4).unwrap_or_default();
    let v6: IpNet = IpNet::new(IpAddr::from([0xff00, 0, 0, 0, 0, 0, 0, 0]), 8).unwrap_or_default();
    let multicast = |net: IpNet| {
        let mut list = family_is(net.addr().is_ipv4()).to_vec();
        list.extend(address_is(false, net, true));
        list.push(verdict(-5, None));
        rule(POSTROUTING, &list, None)
    };
    vec![
        Message::new(NEW_TABLE, new, &header()).text(1, TABLE),
        Message::new(NEW_CHAIN, new, &header()).text(1, TABLE).text(3, CHECKS),
        // Exclusive: of two processes that set up at once one loses, and adds only its rules.
        Message::new(NEW_CHAIN, new | EXCL, &header()).text(1, TABLE).text(3, POSTROUTING).nest(4, &hook).text(7, "nat"),
        multicast(v4),
        multicast(v6),
        rule(POSTROUTING, &[verdict(-4, Some(CHECKS))], None),
    ]
}

fn exists(socket: &mut Socket) -> io::Result<bool> {
    let query = Message::new(GET_CHAIN, REQUEST, &header()).text(1, TABLE).text(3, POSTROUTING);
    match socket.query(query) {
        Ok(answers) => Ok(!answers.is_empty()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// The comment that names a rule's owner; the part before the comma is its key.
#[must_use]
pub fn comment(network: &str, container: &str, ifname: &str) -> String {
    let hash = |text: &str| {
        use sha2::Digest as _;
        let digest = sha2::Sha512::digest(text.as_bytes());
        digest.iter().take(8).map(|b| format!("{b:02x}")).collect::<String>()
    };
    let text = format!("{}-{}, net: {network}, if: {ifname}, id: {container}", hash(network), hash(&format!("{ifname}:{container}")));
    text.replace('"', "").chars().take(127).collect()
}

/// Masquerades what `addresses` send to outside their networks.
pub fn add(addresses: &[IpNet], comment: &str) -> io::Result<()> {
    let mut socket = Socket::netfilter()?;
    let rules: Vec<Message> = addresses
        .iter()
        .map(|address| {
            let host = IpNet::new(address.addr(), address.max_prefix_len()).unwrap_or(*address);
            let mut list = family_is(address.addr().is_ipv4()).to_vec();
            list.extend(address_is(true, host, true));
            list.extend(address_is(false, address.trunc(), false));
            list.push(expression("masq", &Attributes::new()));
            rule(CHECKS, &list, Some(comment))
        })
        .collect();
    let transact = |socket: &mut Socket, with_scaffold: bool| {
        let mut batch = vec![begin()];
        if with_scaffold {
            batch.extend(scaffold());
        }
        batch.extend(rules.clone());
        batch.push(end());
        socket.batch(batch)
    };
    if exists(&mut socket)? {
        return transact(&mut socket, false);
    }
    match transact(&mut socket, true) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => transact(&mut Socket::netfilter()?, false),
        other => other,
    }
}

/// Handles and comments of the rules that masquerade.
fn rules(socket: &mut Socket) -> io::Result<Vec<(Vec<u8>, String)>> {
    let query = Message::new(GET_RULE, REQUEST | DUMP, &header()).text(1, TABLE).text(2, CHECKS);
    let answers = match socket.query(query) {
        Ok(answers) => answers,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for (_, body) in answers {
        let (mut handle, mut comment) = (None, String::new());
        for (kind, value) in attributes(body.get(4..).unwrap_or_default()) {
            match kind {
                3 => handle = Some(value.to_vec()),
                7 if value.first() == Some(&0) => {
                    comment = String::from_utf8_lossy(value.get(2..).unwrap_or_default()).trim_end_matches('\0').to_owned()
                }
                _ => {}
            }
        }
        if let Some(handle) = handle {
            found.push((handle, comment));
        }
    }
    Ok(found)
}

/// Removes the rules whose comment `gone` selects, all in one transaction.
pub fn remove(gone: impl Fn(&str) -> bool) -> io::Result<()> {
    let mut socket = Socket::netfilter()?;
    let doomed: Vec<Message> = rules(&mut socket)?
        .into_iter()
        .filter(|(_, comment)| gone(comment))
        .map(|(handle, _)| Message::new(DEL_RULE, REQUEST | ACK, &header()).text(1, TABLE).text(2, CHECKS).put(3, &handle))
        .collect();
    if doomed.is_empty() {
        return Ok(());
    }
    let mut batch = vec![begin()];
    batch.extend(doomed);
    batch.push(end());
    match socket.batch(batch) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Whether a rule with this comment is there.
pub fn has(comment: &str) -> io::Result<bool> {
    Ok(rules(&mut Socket::netfilter()?)?.iter().any(|(_, c)| c == comment))
}
