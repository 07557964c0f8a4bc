//! Masquerading (`pkg/ip/ipmasq_nftables_linux.go` of containernetworking/plugins).

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;

use super::iptables;
use crate::cni::{Owner, is_orphaned};
use holdfast_net::netlink::Message;
use holdfast_net::nft::expression::{address_is, family_is};
use holdfast_net::nft::statement::{goto, masquerade, verdict};
use holdfast_net::nft::verdict::Verdict;
use holdfast_net::nft::{Family, Hook, Nft, OwnerMark, Table};

const TABLE: Table = Table {
    family: Family::Inet,
    name: "cni_plugins_masquerade",
};
const CHECKS: &str = "masq_checks";
const POSTROUTING: &str = "postrouting";

fn scaffold() -> Vec<Message> {
    let v4: IpNet = IpNet::new(IpAddr::from([224, 0, 0, 0]), 4).unwrap_or_default();
    let v6: IpNet = IpNet::new(IpAddr::from([0xff00, 0, 0, 0, 0, 0, 0, 0]), 8).unwrap_or_default();
    let multicast = |net: IpNet| {
        let mut list = family_is(net.addr().is_ipv4());
        list.extend(address_is(false, net, true));
        list.push(verdict(&Verdict::Return));
        TABLE.append(POSTROUTING, &list, OwnerMark::None)
    };
    vec![
        TABLE.create(),
        TABLE.chain(CHECKS),
        TABLE.hooked(
            POSTROUTING,
            Hook {
                kind: "nat",
                hook: 4,
                priority: 100,
            },
        ),
        multicast(v4),
        multicast(v6),
        TABLE.append(POSTROUTING, &[goto(CHECKS)], OwnerMark::None),
    ]
}

/// Masquerades packets from `addresses` to destinations outside their networks and outside the networks `except`.
pub fn add(addresses: &[IpNet], except: &[IpNet], owner: &Owner) -> io::Result<()> {
    let rules: Vec<Message> = addresses
        .iter()
        .map(|address| {
            let host = IpNet::new(address.addr(), address.max_prefix_len()).unwrap_or(*address);
            let mut list = family_is(address.addr().is_ipv4());
            list.extend(address_is(true, host, true));
            list.extend(address_is(false, address.trunc(), false));
            let family = |net: &&IpNet| net.addr().is_ipv4() == address.addr().is_ipv4();
            for net in except.iter().filter(family) {
                list.extend(address_is(false, *net, false));
            }
            list.push(masquerade());
            TABLE.append(CHECKS, &list, OwnerMark::Comment(&owner.comment))
        })
        .collect();
    Nft::open()?.add(TABLE, POSTROUTING, scaffold, &rules)
}

/// Removes the rules of an owner.
pub fn remove(nft: &mut Nft, owner: &Owner) -> io::Result<()> {
    nft.delete(&[(TABLE, CHECKS)], |rule| owner.has(&rule.mark))
}

/// Removes the rules of attachments that are not in `keep`, including
/// those that the reference has created in the tables of iptables.
pub fn collect(network: &str, keep: &[(String, String)]) -> io::Result<()> {
    Nft::clean_up(|nft| {
        nft.delete(&[(TABLE, CHECKS)], |rule| {
            is_orphaned(&rule.mark, network, keep)
        })?;
        iptables::collect_masquerades(nft, network, keep)
    })
    .map(drop)
}

/// Whether the owner has rules.
pub fn has(owner: &Owner) -> io::Result<bool> {
    Ok(Nft::open()?
        .rules(TABLE, CHECKS)?
        .iter()
        .any(|r| owner.has(&r.mark)))
}
