//! Masquerading and forwarded ports in the tables of iptables, for configurations that name this backend, and for hosts on which the
//! reference has rules there: the reference's DEL finds these rules, in any version (`pkg/ip/ipmasq_iptables_linux.go`,
//! `plugins/meta/portmap/portmap_iptables.go`).
//!
//! All expressions are those that `iptables-nft` can display and delete. Forwarded ports have a chain `CNI-DN-…` for each
//! container, like in the reference. Masquerading of forwarded connections has a chain `CNI-SN-…`, which early versions of the
//! reference created and all versions delete; it needs no packet marks.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;

use super::hostport::{Forward, Plan};
use super::iptables::{self, NAT, comment, end, families, leads_to, state_match};
use holdfast_net::netlink::{Attributes, Message};
use holdfast_net::nft::expression::{address_is, extension, octets, protocol_is, target};
use holdfast_net::nft::statement::counter;
use holdfast_net::nft::verdict::Verdict;
use holdfast_net::nft::{Family, Hook, Nft, OwnerMark, Rule, Table};

const POSTROUTING: &str = "POSTROUTING";
const DNAT: &str = "CNI-HOSTPORT-DNAT";
const SNAT: &str = "CNI-HOSTPORT-SNAT";

/// The base chains of iptables that rules of this module are in: name, hook and priority.
const BASE: [(&str, u32, i32); 3] = [
    ("PREROUTING", 0, -100),
    ("OUTPUT", 3, -100),
    (POSTROUTING, 4, 100),
];

/// Whether rules belong into the tables of iptables: if `backend` names them, or if it is empty and the reference has NAT rules there.
/// Such a host may go back to the reference. Legacy iptables has other tables, which netlink cannot access.
pub fn is_wanted(backend: &str) -> io::Result<bool> {
    if !["", "iptables"].contains(&backend) || iptables::is_legacy("nat") {
        return Ok(false);
    }
    if backend == "iptables" {
        return Ok(true);
    }
    let mut nft = Nft::open()?;
    for table in NAT {
        let of_plugins = |rule: &Rule| rule.target.as_ref().is_some_and(|t| t.starts_with("CNI-"));
        if nft.has(table, DNAT)? || nft.rules(table, POSTROUTING)?.iter().any(of_plugins) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Messages that create the base chains of iptables as far as they are missing.
fn missing_base(nft: &mut Nft, table: Table) -> io::Result<Vec<Message>> {
    let mut messages = vec![table.create()];
    for (name, hook, priority) in BASE {
        if !nft.has(table, name)? {
            let kind = "nat";
            messages.push(table.hooked(
                name,
                Hook {
                    kind,
                    hook,
                    priority,
                },
            ));
        }
    }
    Ok(messages)
}

/// A message that creates the chain, if it is missing.
fn missing_chain(nft: &mut Nft, table: Table, chain: &str) -> io::Result<Option<Message>> {
    Ok((!nft.has(table, chain)?).then(|| table.chain(chain)))
}

/// `-j MASQUERADE`: `struct nf_nat_ipv4_multi_range_compat` with one empty range, or for IPv6 `struct nf_nat_range`.
fn masquerade_target(v4: bool) -> Attributes {
    let mut info = vec![0; if v4 { 24 } else { 40 }];
    if v4 {
        info[..4].copy_from_slice(&1_u32.to_ne_bytes());
    }
    target("MASQUERADE", 0, &info)
}

/// `-j DNAT --to-destination`: `struct nf_nat_range2` with equal ends.
fn destination_target(address: IpAddr, port: u16) -> Attributes {
    const MAP_IPS: u32 = 1;
    const PROTO_SPECIFIED: u32 = 2;
    let mut info = vec![0; 48];
    info[..4].copy_from_slice(&(MAP_IPS | PROTO_SPECIFIED).to_ne_bytes());
    let bytes = octets(address);
    for at in [4, 20] {
        info[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    for at in [36, 38] {
        info[at..at + 2].copy_from_slice(&port.to_be_bytes());
    }
    target("DNAT", 2, &info)
}

/// `-m multiport --destination-ports` with one port, for any protocol: `struct xt_multiport_v1`.
fn port_match(port: u16) -> Attributes {
    const DESTINATION: u8 = 1;
    let mut info = vec![0; 48];
    (info[0], info[1]) = (DESTINATION, 1);
    info[2..4].copy_from_slice(&port.to_ne_bytes());
    extension("multiport", 1, &info)
}

/// `-m addrtype --dst-type LOCAL`: `struct xt_addrtype_info_v1`.
fn local_match() -> Attributes {
    const LOCAL: u16 = 1 << 2;
    let mut info = vec![0; 8];
    info[2..4].copy_from_slice(&LOCAL.to_ne_bytes());
    extension("addrtype", 1, &info)
}

/// The expressions, a counter, and a target.
fn to_target(mut expressions: Vec<Attributes>, last: Attributes) -> Vec<Attributes> {
    expressions.push(counter());
    expressions.push(last);
    expressions
}

/// Masquerades packets from `addresses` to destinations outside their networks.
pub fn masquerade(addresses: &[IpNet], network: &str, container: &str) -> io::Result<()> {
    let chain = iptables::masquerade_chain(network, container);
    let text = format!("name: \"{network}\" id: \"{container}\"");
    let hosts: Vec<IpAddr> = addresses.iter().map(IpNet::addr).collect();
    Nft::open()?.commit_if_unchanged(|nft| {
        let mut messages = vec![];
        for table in families(NAT, &hosts) {
            let v4 = table.family == Family::V4;
            messages.extend(missing_base(nft, table)?);
            messages.extend(missing_chain(nft, table, &chain)?);
            let multicast = match v4 {
                true => IpNet::new([224, 0, 0, 0].into(), 4),
                false => IpNet::new([0xff00, 0, 0, 0, 0, 0, 0, 0].into(), 8),
            }
            .unwrap_or_default();
            let mut append = |chain: &str, list: &[Attributes]| {
                messages.push(table.append(chain, list, OwnerMark::None));
            };
            for net in addresses.iter().filter(|a| a.addr().is_ipv4() == v4) {
                let mut inside = address_is(false, net.trunc(), true);
                inside.push(comment(&text));
                append(&chain, &end(inside, Verdict::Accept));
                let mut outside = address_is(false, multicast, false);
                outside.push(comment(&text));
                append(&chain, &to_target(outside, masquerade_target(v4)));
                let mut from = address_is(true, IpNet::from(net.addr()), true);
                from.push(comment(&text));
                append(POSTROUTING, &end(from, Verdict::jump(&chain)));
            }
        }
        Ok(messages)
    })
}

/// The expressions that match a forwarded port.
fn to_port(forward: &Forward) -> Vec<Attributes> {
    let mut list = forward
        .host
        .map(|host| address_is(false, IpNet::from(host), true))
        .unwrap_or_default();
    list.extend(protocol_is(forward.protocol));
    list.push(port_match(forward.port));
    list
}

/// Messages that create the shared chains and the jumps to them, as far as they are missing.
fn shared(nft: &mut Nft, table: Table) -> io::Result<Vec<Message>> {
    let mut messages = missing_base(nft, table)?;
    messages.extend(missing_chain(nft, table, DNAT)?);
    messages.extend(missing_chain(nft, table, SNAT)?);
    for base in ["PREROUTING", "OUTPUT"] {
        if !leads_to(nft, table, base, DNAT)? {
            let list = end(vec![local_match()], Verdict::jump(DNAT));
            messages.push(table.append(base, &list, OwnerMark::None));
        }
    }
    // Before the rules of `bridge`, which accept packets within a network.
    if !leads_to(nft, table, POSTROUTING, SNAT)? {
        let text = comment("CNI portfwd requiring masquerade");
        messages.push(table.prepend(POSTROUTING, &end(vec![text], Verdict::jump(SNAT))));
    }
    Ok(messages)
}

/// Adds the rules of a plan.
pub fn forward(plan: &Plan, network: &str, container: &str) -> io::Result<()> {
    let (v4, to) = (plan.is_v4(), plan.container.addr());
    let table = NAT[usize::from(!v4)];
    let [to_container, of_forwarded] =
        ["DN", "SN"].map(|kind| iptables::hostport_chain(kind, network, container));
    let text = |kind: &str| {
        let text = format!("{kind} name: \"{network}\" id: \"{container}\"");
        comment(&text.chars().take(255).collect::<String>())
    };
    Nft::open()?.commit_if_unchanged(|nft| {
        let mut messages = shared(nft, table)?;
        for chain in [&to_container, &of_forwarded] {
            messages.extend(missing_chain(nft, table, chain)?);
        }
        let mut append = |chain: &str, list: &[Attributes]| {
            messages.push(table.append(chain, list, OwnerMark::None));
        };
        let mut entry: Vec<Attributes> = plan
            .conditions
            .iter()
            .flat_map(|c| c.expressions())
            .collect();
        entry.push(text("dnat"));
        append(DNAT, &end(entry, Verdict::jump(&to_container)));
        append(SNAT, &end(vec![text("snat")], Verdict::jump(&of_forwarded)));
        for forward in &plan.forwards {
            let last = destination_target(to, forward.target);
            let list = to_target(to_port(forward), last);
            let protocol = forward.protocol;
            messages.push(table.append_for_protocol(&to_container, &list, protocol));
            for source in plan.masqueraded() {
                let mut list = if source.prefix_len() == 0 {
                    vec![]
                } else {
                    address_is(true, source, true)
                };
                list.extend(address_is(false, IpNet::from(to), true));
                list.extend(protocol_is(forward.protocol));
                list.push(state_match(iptables::DNAT_STATE, Some(forward.port)));
                let list = to_target(list, masquerade_target(v4));
                messages.push(table.append(&of_forwarded, &list, OwnerMark::None));
            }
        }
        Ok(messages)
    })
}

/// Whether an error means that the kernel lacks one of the matches and targets of iptables.
#[must_use]
pub fn is_unsupported(error: &io::Error) -> bool {
    [io::ErrorKind::NotFound, io::ErrorKind::Unsupported].contains(&error.kind())
}
