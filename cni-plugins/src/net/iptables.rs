//! The tables of iptables, in the layout that `iptables-nft` uses in nftables. This module detects and removes
//! rules of the reference plugins (`pkg/ip/ipmasq_iptables_linux.go` and `plugins/meta/portmap/portmap_iptables.go`
//! of containernetworking/plugins). The firewall plugin writes its rules there, because only a rule in the same
//! chain can accept packets that these tables would drop (`plugins/meta/firewall/iptables.go`).

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use ipnet::IpNet;

use super::ignore_missing;
use crate::cni::{Owner, digest, is_orphaned};
use holdfast_net::netlink::{Attributes, Message};
use holdfast_net::nft::expression::{address_is, extension, interface_is, octets};
use holdfast_net::nft::statement::{counter, verdict};
use holdfast_net::nft::verdict::Verdict;
use holdfast_net::nft::{Family, Hook, Nft, OwnerMark, Rule, Table};

pub(super) const NAT: [Table; 2] = [
    Table {
        family: Family::V4,
        name: "nat",
    },
    Table {
        family: Family::V6,
        name: "nat",
    },
];
const FILTER: [Table; 2] = [
    Table {
        family: Family::V4,
        name: "filter",
    },
    Table {
        family: Family::V6,
        name: "filter",
    },
];

const FORWARD: &str = "FORWARD";
const OURS: &str = "CNI-FORWARD";
const STAGES: [&str; 2] = ["CNI-ISOLATION-STAGE-1", "CNI-ISOLATION-STAGE-2"];

/// The chain in which the reference masquerades the packets of a container.
pub(super) fn masquerade_chain(network: &str, container: &str) -> String {
    format!("CNI-{}", digest(&format!("{network}{container}"), 24))
}

/// The chain in which the reference forwards ports to a container (`DN`),
/// or in which its early versions masqueraded those packets (`SN`).
pub(super) fn hostport_chain(kind: &str, network: &str, container: &str) -> String {
    format!(
        "CNI-{kind}-{}",
        digest(&format!("{network}{container}"), 21)
    )
}

/// Whether the kernel has this table of legacy iptables, which netlink cannot access.
#[must_use]
pub fn is_legacy(table: &str) -> bool {
    ["/proc/net/ip_tables_names", "/proc/net/ip6_tables_names"]
        .iter()
        .any(|path| {
            std::fs::read_to_string(path).is_ok_and(|names| names.lines().any(|name| name == table))
        })
}

/// A hint for an error about missing rules: the reference may have
/// created them with legacy iptables. Empty if it cannot have.
#[must_use]
pub fn legacy_hint() -> &'static str {
    if is_legacy("nat") {
        "; this host also has legacy iptables rules, which this check does not read (see iptables-legacy -t nat -S)"
    } else {
        ""
    }
}

/// Removes a chain and the rules of `entries` that jump to it.
fn drop_chain(nft: &mut Nft, entries: &[&str], chain: &str) -> io::Result<()> {
    if is_legacy("nat") {
        eprintln!(
            "this host has legacy iptables rules; if they contain the chain {chain}, remove it manually (see iptables-legacy -t nat -S {chain})"
        );
    }
    for table in NAT {
        if !nft.has(table, chain)? {
            continue;
        }
        let mut to_delete = vec![];
        for entry in entries {
            let jumps = |r: &&Rule| r.target.as_deref() == Some(chain);
            to_delete.extend(
                nft.rules(table, entry)?
                    .iter()
                    .filter(jumps)
                    .map(|r| table.delete(entry, r)),
            );
        }
        to_delete.extend(table.remove(chain));
        ignore_missing(nft.commit(to_delete))?;
    }
    Ok(())
}

/// Removes the chains of a network's containers, except those in `kept`. The reference marks the jumps to them in
/// `entry` with a comment that contains the network's name (`pkg/utils/utils.go` of containernetworking/plugins).
fn collect_chains(
    nft: &mut Nft,
    network: &str,
    entry: &str,
    prefix: &str,
    kept: &BTreeSet<String>,
) -> io::Result<()> {
    let of_network = format!("name: \"{network}\" id: \"");
    let mut to_delete = BTreeSet::new();
    for table in NAT {
        let rules = nft.rules(table, entry)?;
        let marked = rules.iter().filter(|r| {
            let before = r.comment.split_once(&of_network).map(|(before, _)| before);
            before.is_some_and(|words| ["", "dnat ", "snat "].contains(&words))
        });
        let chains = marked.filter_map(|r| r.target.clone());
        to_delete.extend(chains.filter(|c| c.starts_with(prefix) && !kept.contains(c)));
    }
    to_delete
        .iter()
        .try_for_each(|chain| drop_chain(nft, &[entry], chain))
}

/// Removes the reference's port forwarding for containers of a network that are not in `keep`.
pub fn collect_hostports(
    nft: &mut Nft,
    network: &str,
    keep: &[(String, String)],
) -> io::Result<()> {
    for (kind, entry) in [("DN", "CNI-HOSTPORT-DNAT"), ("SN", "CNI-HOSTPORT-SNAT")] {
        let of = |(id, _): &(String, String)| hostport_chain(kind, network, id);
        let kept = keep.iter().map(of).collect();
        collect_chains(nft, network, entry, &format!("CNI-{kind}-"), &kept)?;
    }
    Ok(())
}

/// Removes the reference's masquerading for containers of a network that are not in `keep`.
pub fn collect_masquerades(
    nft: &mut Nft,
    network: &str,
    keep: &[(String, String)],
) -> io::Result<()> {
    let of = |(id, _): &(String, String)| masquerade_chain(network, id);
    let kept = keep.iter().map(of).collect();
    collect_chains(nft, network, "POSTROUTING", "CNI-", &kept)
}

/// Removes the reference's masquerading for a container.
pub fn remove_masquerade(nft: &mut Nft, network: &str, container: &str) -> io::Result<()> {
    drop_chain(nft, &["POSTROUTING"], &masquerade_chain(network, container))
}

/// Whether the reference masquerades the packets of a container in each family of its addresses.
pub fn masquerades(addresses: &[IpAddr], network: &str, container: &str) -> io::Result<bool> {
    let chain = masquerade_chain(network, container);
    let mut nft = Nft::open()?;
    for table in families(NAT, addresses) {
        // The first rule of the chain accepts packets to the container's own network.
        if !leads_to(&mut nft, table, "POSTROUTING", &chain)? || nft.rules(table, &chain)?.len() < 2
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a rule of `entry` jumps to a chain.
pub(super) fn leads_to(nft: &mut Nft, table: Table, entry: &str, chain: &str) -> io::Result<bool> {
    let rules = nft.rules(table, entry)?;
    Ok(rules.iter().any(|r| r.target.as_deref() == Some(chain)))
}

/// Removes the reference's port forwarding for a container.
pub fn remove_hostports(nft: &mut Nft, network: &str, container: &str) -> io::Result<()> {
    let chain = |kind| hostport_chain(kind, network, container);
    drop_chain(nft, &["CNI-HOSTPORT-DNAT"], &chain("DN"))?;
    drop_chain(nft, &["CNI-HOSTPORT-SNAT"], &chain("SN"))
}

/// Whether the reference forwards ports to a container in a family. `wanted` are the minimum
/// numbers of rules with the container as target and of rules that mark packets for masquerading.
pub fn forwards(
    v4: bool,
    wanted: (usize, usize),
    network: &str,
    container: &str,
) -> io::Result<bool> {
    let table = NAT[usize::from(!v4)];
    let chain = hostport_chain("DN", network, container);
    let mut nft = Nft::open()?;
    let rules = nft.rules(table, &chain)?;
    let jumps = rules.iter().filter(|r| r.target.is_some()).count();
    // The reference marks packets for masquerading, and our rules masquerade without marks.
    let masquerading = hostport_chain("SN", network, container);
    let marking = jumps + nft.rules(table, &masquerading)?.len();
    Ok(rules.len() - jumps >= wanted.0
        && marking >= wanted.1
        && leads_to(&mut nft, table, "CNI-HOSTPORT-DNAT", &chain)?)
}

pub(super) fn comment(text: &str) -> Attributes {
    let mut bytes = text.as_bytes().to_vec();
    bytes.resize(256, 0);
    extension("comment", 0, &bytes)
}

/// States of a connection in the match `conntrack` (`XT_CONNTRACK_STATE_…`).
const ESTABLISHED_RELATED: u16 = 2 | 4;
/// A connection with destination NAT.
pub(super) const DNAT_STATE: u16 = 1 << 7;

/// `-m conntrack --ctstate … --ctorigdstport …`: `struct xt_conntrack_mtinfo3` with the states and, if given, the port to which
/// the connection was opened.
pub(super) fn state_match(states: u16, original_port: Option<u16>) -> Attributes {
    const ORIGINAL_PORT: usize = 140;
    const MATCH_FLAGS: usize = 146;
    const STATE_MASK: usize = 150;
    const LAST_ORIGINAL_PORT: usize = 156;
    const STATE_FLAG: u16 = 1;
    const ORIGINAL_PORT_FLAG: u16 = 1 << 9;
    let mut info = vec![0; 168];
    let mut put = |at: usize, value: u16| info[at..at + 2].copy_from_slice(&value.to_ne_bytes());
    put(STATE_MASK, states);
    put(MATCH_FLAGS, STATE_FLAG);
    if let Some(port) = original_port {
        put(MATCH_FLAGS, STATE_FLAG | ORIGINAL_PORT_FLAG);
        put(ORIGINAL_PORT, port);
        put(LAST_ORIGINAL_PORT, port);
    }
    extension("conntrack", 3, &info)
}

pub(super) fn end(mut expressions: Vec<Attributes>, last: Verdict) -> Vec<Attributes> {
    expressions.push(counter());
    expressions.push(verdict(&last));
    expressions
}

/// Selects those of two tables, the first for IPv4, whose family has one of the addresses.
pub(super) fn families(tables: [Table; 2], addresses: &[IpAddr]) -> Vec<Table> {
    [true, false]
        .into_iter()
        .zip(tables)
        .filter(|(v4, _)| addresses.iter().any(|a| a.is_ipv4() == *v4))
        .map(|(_, t)| t)
        .collect()
}

fn belongs(table: Table, address: IpAddr) -> bool {
    address.is_ipv4() == (table.family == Family::V4)
}

fn is_about(rule: &Rule, address: IpAddr) -> bool {
    rule.target.is_none() && rule.values.first() == Some(&octets(address))
}

/// Messages that create the table's base chain and `chains`, as far as they are missing.
fn missing_chains(nft: &mut Nft, table: Table, chains: &[&str]) -> io::Result<Vec<Message>> {
    let mut messages = vec![];
    if !nft.has(table, FORWARD)? {
        messages.push(table.create());
        messages.push(table.hooked(
            FORWARD,
            Hook {
                kind: "filter",
                hook: 2,
                priority: 0,
            },
        ));
    }
    for chain in chains {
        if !nft.has(table, chain)? {
            messages.push(table.chain(chain));
        }
    }
    Ok(messages)
}

/// A jump at the beginning of `from`, unless one exists.
fn jump(
    nft: &mut Nft,
    table: Table,
    from: &str,
    to: &str,
    text: &str,
) -> io::Result<Option<Message>> {
    let there = leads_to(nft, table, from, to)?;
    Ok((!there).then(|| table.prepend(from, &end(vec![comment(text)], Verdict::jump(to)))))
}

/// Accepts packets from `addresses` and the replies to them.
pub fn allow(addresses: &[IpAddr], admin: &str, owner: &Owner) -> io::Result<()> {
    Nft::open()?.commit_if_unchanged(|nft| {
        let mut messages = vec![];
        for table in families(FILTER, addresses) {
            messages.extend(missing_chains(nft, table, &[OURS, admin])?);
            messages.extend(jump(
                nft,
                table,
                FORWARD,
                OURS,
                "CNI firewall plugin rules",
            )?);
            messages.extend(jump(
                nft,
                table,
                OURS,
                admin,
                "CNI firewall plugin admin overrides",
            )?);
            let rules = nft.rules(table, OURS)?;
            for address in addresses.iter().filter(|a| belongs(table, **a)) {
                if rules.iter().filter(|r| is_about(r, *address)).count() >= 2 {
                    continue;
                }
                let host = IpNet::from(*address);
                let mut back = address_is(false, host, true);
                back.push(state_match(ESTABLISHED_RELATED, None));
                messages.push(table.append(
                    OURS,
                    &end(back, Verdict::Accept),
                    OwnerMark::Key(&owner.comment),
                ));
                messages.push(table.append(
                    OURS,
                    &end(address_is(true, host, true), Verdict::Accept),
                    OwnerMark::Key(&owner.comment),
                ));
            }
        }
        Ok(messages)
    })
}

/// Whether all rules of [`allow`] exist.
pub fn allows(addresses: &[IpAddr]) -> io::Result<bool> {
    let mut nft = Nft::open()?;
    for table in families(FILTER, addresses) {
        let entered = leads_to(&mut nft, table, FORWARD, OURS)?;
        let rules = nft.rules(table, OURS)?;
        let complete = |a: &IpAddr| rules.iter().filter(|r| is_about(r, *a)).count() >= 2;
        if !entered
            || !addresses
                .iter()
                .filter(|a| belongs(table, **a))
                .all(complete)
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Removes the owner's rules. The reference's rules have no owner; of those, removes the ones about `addresses`.
pub fn disallow(addresses: &[IpAddr], owner: &Owner) -> io::Result<()> {
    let chains = FILTER.map(|table| (table, OURS));
    let of_reference = |r: &Rule| r.mark.is_empty() && addresses.iter().any(|a| is_about(r, *a));
    Nft::clean_up(|nft| nft.delete(&chains, |r| owner.has(&r.mark) || of_reference(r))).map(drop)
}

/// Removes the rules of attachments that are not in `keep`.
pub fn collect(network: &str, keep: &[(String, String)]) -> io::Result<()> {
    Nft::clean_up(|nft| {
        nft.delete(&FILTER.map(|table| (table, OURS)), |r| {
            is_orphaned(&r.mark, network, keep)
        })
    })
    .map(drop)
}

fn names(rule: &Rule) -> Vec<String> {
    rule.values
        .iter()
        .map(|v| holdfast_net::netlink::text(v))
        .collect()
}

/// Drops packets from this bridge to other isolated bridges and the reverse.
/// With `within`, also drops packets between containers of this bridge.
pub fn isolate(bridge: &str, within: bool, addresses: &[IpAddr]) -> io::Result<()> {
    let text = format!(
        "CNI firewall plugin rules (ingressPolicy: {})",
        if within { "isolated" } else { "same-bridge" }
    );
    Nft::open()?.commit_if_unchanged(|nft| {
        let mut messages = vec![];
        for table in families(FILTER, addresses) {
            messages.extend(missing_chains(nft, table, &STAGES)?);
            messages.extend(jump(nft, table, FORWARD, STAGES[0], &text)?);
            let [first, second] = [nft.rules(table, STAGES[0])?, nft.rules(table, STAGES[1])?];
            let here = |r: &&Rule| names(r) == [bridge, bridge];
            if !first.iter().filter(here).any(|r| r.target.is_some()) {
                let mut leaving = interface_is(true, bridge, true);
                leaving.extend(interface_is(false, bridge, false));
                leaving.push(comment(&text));
                messages.push(table.prepend(STAGES[0], &end(leaving, Verdict::jump(STAGES[1]))));
            }
            if within && !first.iter().filter(here).any(|r| r.target.is_none()) {
                let mut staying = interface_is(true, bridge, true);
                staying.extend(interface_is(false, bridge, true));
                staying.push(comment(&text));
                messages.push(table.prepend(STAGES[0], &end(staying, Verdict::Drop)));
            }
            if !second.iter().any(|r| names(r) == [bridge]) {
                let mut entering = interface_is(false, bridge, true);
                entering.push(comment(&text));
                messages.push(table.prepend(STAGES[1], &end(entering, Verdict::Drop)));
            }
            for (stage, rules) in STAGES.iter().zip([first, second]) {
                if rules.is_empty() {
                    messages.push(table.append(
                        stage,
                        &end(vec![comment(&text)], Verdict::Return),
                        OwnerMark::None,
                    ));
                }
            }
        }
        Ok(messages)
    })
}

/// Whether the rules of [`isolate`] exist.
pub fn is_isolated(bridge: &str, within: bool, addresses: &[IpAddr]) -> io::Result<bool> {
    let mut nft = Nft::open()?;
    for table in families(FILTER, addresses) {
        let first = nft.rules(table, STAGES[0])?;
        let here: Vec<&Rule> = first
            .iter()
            .filter(|r| names(r) == [bridge, bridge])
            .collect();
        let inner = !within || here.iter().any(|r| r.target.is_none());
        let outer = here.iter().any(|r| r.target.is_some())
            && nft
                .rules(table, STAGES[1])?
                .iter()
                .any(|r| names(r) == [bridge]);
        if !inner || !outer {
            return Ok(false);
        }
    }
    Ok(true)
}
