//! Spoof check: drops packets that a container sends on a bridge with another hardware
//! address than its own (`pkg/link/spoofcheck.go` of containernetworking/plugins).

use std::io;

use super::ignore_missing;
use holdfast_net::netlink::Message;
use holdfast_net::nft::expression::{interface_is, sender_is};
use holdfast_net::nft::statement::{jump, verdict};
use holdfast_net::nft::verdict::Verdict;
use holdfast_net::nft::{Family, Hook, Nft, OwnerMark, Table};

const TABLE: Table = Table {
    family: Family::Bridge,
    name: "nat",
};
const ENTRY: &str = "PREROUTING";

/// The chains of an attachment, and the comment of its rules.
struct Names {
    first: String,
    second: String,
    comment: String,
}

fn names(container: &str, ifname: &str) -> Names {
    let id = format!("{container}-{ifname}");
    Names {
        first: format!("cni-br-iface-{id}"),
        second: format!("cni-br-iface-{id}-mac"),
        comment: format!("macspoofchk-{id}"),
    }
}

fn scaffold() -> Vec<Message> {
    vec![
        TABLE.create(),
        TABLE.hooked(
            ENTRY,
            Hook {
                kind: "filter",
                hook: 0,
                priority: -300,
            },
        ),
    ]
}

/// Drops packets that enter the bridge at `port` with another source address than `mac`.
pub fn add(port: &str, mac: [u8; 6], container: &str, ifname: &str) -> io::Result<()> {
    let Names {
        first,
        second,
        comment,
    } = names(container, ifname);
    let mark = OwnerMark::Comment(&comment);
    let mut from_port = interface_is(true, port, true);
    from_port.push(jump(&first));
    let mut from_mac = sender_is(mac);
    from_mac.push(verdict(&Verdict::Return));
    let rules = [
        TABLE.create(),
        TABLE.chain(&first),
        TABLE.chain(&second),
        TABLE.append(&first, &[jump(&second)], mark),
        TABLE.append(&second, &from_mac, mark),
        TABLE.append(&second, &[verdict(&Verdict::Drop)], mark),
        TABLE.append(ENTRY, &from_port, mark),
    ];
    Nft::open()?.add(TABLE, ENTRY, scaffold, &rules)
}

/// Removes the rules and chains of an attachment. Missing ones are no error.
pub fn remove(nft: &mut Nft, container: &str, ifname: &str) -> io::Result<()> {
    let Names {
        first,
        second,
        comment,
    } = names(container, ifname);
    let mut to_delete: Vec<Message> = nft
        .rules(TABLE, ENTRY)?
        .iter()
        .filter(|r| r.mark == comment)
        .map(|r| TABLE.delete(ENTRY, r))
        .collect();
    for chain in [&first, &second] {
        if nft.has(TABLE, chain)? {
            to_delete.extend(TABLE.remove(chain));
        }
    }
    ignore_missing(nft.commit(to_delete))
}

/// Whether an attachment has its rules.
pub fn has(container: &str, ifname: &str) -> io::Result<bool> {
    let Names {
        second, comment, ..
    } = names(container, ifname);
    let mut nft = Nft::open()?;
    let entry = nft.rules(TABLE, ENTRY)?.iter().any(|r| r.mark == comment);
    Ok(entry && nft.rules(TABLE, &second)?.len() >= 2)
}

/// Removes the rules of attachments that are not in `keep` and whose port no longer exists. The port
/// decides, because the rules have the reference's comment, which does not contain the network.
pub fn collect(
    keep: &[(String, String)],
    mut is_removed: impl FnMut(&str) -> bool,
) -> io::Result<()> {
    let work = |nft: &mut Nft| {
        for rule in nft.rules(TABLE, ENTRY)? {
            let Some(id) = rule.mark.strip_prefix("macspoofchk-") else {
                continue;
            };
            let port = rule
                .values
                .first()
                .map(|v| holdfast_net::netlink::text(v))
                .unwrap_or_default();
            let Some((container, ifname)) = id.rsplit_once('-') else {
                continue;
            };
            if !keep.iter().any(|(c, i)| c == container && i == ifname) && is_removed(&port) {
                remove(nft, container, ifname)?;
            }
        }
        Ok(())
    };
    Nft::clean_up(work).map(drop)
}
