//! nftables over netlink: tables, chains, rules and sets, committed in transactions.
//!
//! Functions of [`Table`] create messages, and [`Nft`] commits any number of them at once. Nothing here lists a whole ruleset:
//! callers name the chains and sets that they read.
//!
//! - [`expression`] loads and compares fields of packets, and [`statement`] acts on packets;
//! - [`set`] and [`element`] are sets, maps and verdict maps, and [`value`] their keys and data;
//! - [`rule`] marks rules with owners and reads them;
//! - [`connection`] commits and reads, and `audit` reads whole tables.

mod audit;
pub mod connection;
pub mod element;
pub mod expression;
mod numbers;
pub mod rule;
pub mod set;
pub mod statement;
pub mod value;
pub mod verdict;

pub use connection::Nft;
pub use rule::{OwnerMark, Rule};

use crate::netlink::{ACK, APPEND, Attributes, CREATE, EXCL, Message, REQUEST, text};
use numbers::message::{DEL_CHAIN, DEL_RULE, DEL_TABLE, NEW_CHAIN, NEW_RULE, NEW_TABLE};
use numbers::{chain, hook, list, rule as rule_attribute, rule_compat, table};

/// The address family of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// IPv4 and IPv6.
    Inet = 1,
    /// IPv4.
    V4 = 2,
    /// Packets that pass a bridge.
    Bridge = 7,
    /// IPv6.
    V6 = 10,
}

/// A table of nftables.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    /// The family of its packets.
    pub family: Family,
    /// Its name.
    pub name: &'static str,
}

/// The hook of a base chain.
#[derive(Debug, Clone, Copy)]
pub struct Hook {
    /// `filter` or `nat`.
    pub kind: &'static str,
    /// The number of the hook in the kernel.
    pub hook: u32,
    /// The priority; chains with lower numbers see a packet first.
    pub priority: i32,
}

/// The length limit of comments in nft: `NFTNL_UDATA_COMMENT_MAXLEN` without the terminating zero.
const LONGEST_COMMENT: usize = 127;

impl Table {
    fn header(self) -> [u8; 4] {
        [self.family as u8, 0, 0, 0]
    }

    /// Creates the table. An existing table is no error.
    #[must_use]
    pub fn create(self) -> Message {
        Message::new(NEW_TABLE, REQUEST | ACK | CREATE, &self.header()).text(table::NAME, self.name)
    }

    /// Deletes the table with its chains and sets. A missing table is no error, because the first message creates it.
    #[must_use]
    pub fn destroy(self) -> [Message; 2] {
        let delete = Message::new(DEL_TABLE, REQUEST | ACK, &self.header());
        [self.create(), delete.text(table::NAME, self.name)]
    }

    /// Creates a regular chain. An existing chain is no error.
    #[must_use]
    pub fn chain(self, name: &str) -> Message {
        Message::new(NEW_CHAIN, REQUEST | ACK | CREATE, &self.header())
            .text(chain::TABLE, self.name)
            .text(chain::NAME, name)
    }

    /// Creates a base chain. An existing chain is an error: if two processes
    /// set up the table concurrently, the second one adds only its rules.
    #[must_use]
    pub fn hooked(self, name: &str, hook: Hook) -> Message {
        let place = Attributes::new()
            .big(hook::HOOKNUM, hook.hook)
            .big(hook::PRIORITY, hook.priority.cast_unsigned());
        let message = Message::new(NEW_CHAIN, REQUEST | ACK | CREATE | EXCL, &self.header())
            .text(chain::TABLE, self.name)
            .text(chain::NAME, name);
        message
            .nest(chain::HOOK, &place)
            .text(chain::TYPE, hook.kind)
    }

    fn rule(
        self,
        flags: u16,
        chain: &str,
        expressions: &[Attributes],
        mark: OwnerMark<'_>,
    ) -> Message {
        let list = expressions
            .iter()
            .fold(Attributes::new(), |list, expression| {
                list.nest(list::ELEM, expression)
            });
        let message = Message::new(NEW_RULE, REQUEST | ACK | CREATE | flags, &self.header())
            .text(rule_attribute::TABLE, self.name)
            .text(rule_attribute::CHAIN, chain)
            .nest(rule_attribute::EXPRESSIONS, &list);
        match mark.user_data() {
            Some(user_data) => message.put(rule_attribute::USERDATA, &user_data),
            None => message,
        }
    }

    /// Appends a rule to a chain.
    #[must_use]
    pub fn append(self, chain: &str, expressions: &[Attributes], mark: OwnerMark<'_>) -> Message {
        self.rule(APPEND, chain, expressions, mark)
    }

    /// Appends a rule whose xtables matches need to know its transport protocol. The rule also matches this protocol itself.
    #[must_use]
    pub fn append_for_protocol(
        self,
        chain: &str,
        expressions: &[Attributes],
        protocol: u8,
    ) -> Message {
        let compat = Attributes::new()
            .big(rule_compat::PROTO, protocol.into())
            .big(rule_compat::FLAGS, 0);
        self.append(chain, expressions, OwnerMark::None)
            .nest(rule_attribute::COMPAT, &compat)
    }

    /// Inserts a rule at the beginning of a chain.
    #[must_use]
    pub fn prepend(self, chain: &str, expressions: &[Attributes]) -> Message {
        self.rule(0, chain, expressions, OwnerMark::None)
    }

    /// Deletes a rule.
    #[must_use]
    pub fn delete(self, chain: &str, rule: &Rule) -> Message {
        self.flush(chain).put(rule_attribute::HANDLE, &rule.handle)
    }

    /// Deletes all rules of a chain. Together with [`Table::append`] in one transaction, replaces the rules, and no packet
    /// passes in between.
    #[must_use]
    pub fn flush(self, chain: &str) -> Message {
        Message::new(DEL_RULE, REQUEST | ACK, &self.header())
            .text(rule_attribute::TABLE, self.name)
            .text(rule_attribute::CHAIN, chain)
    }

    /// Deletes all rules of a chain, then the chain.
    #[must_use]
    pub fn remove(self, chain: &str) -> [Message; 2] {
        let delete = Message::new(DEL_CHAIN, REQUEST | ACK, &self.header())
            .text(chain::TABLE, self.name)
            .text(chain::NAME, chain);
        [self.flush(chain), delete]
    }
}

/// An item of user data. A text whose length exceeds the field of 8 bits also exceeds the 256 bytes of user data, so the kernel
/// rejects the message.
fn user_data(kind: u8, text: &str) -> Vec<u8> {
    let mut data = vec![kind, u8::try_from(text.len() + 1).unwrap_or(u8::MAX)];
    data.extend_from_slice(text.as_bytes());
    data.push(0);
    data
}

/// The item of this kind in user data.
fn marked(mut bytes: &[u8], wanted: u8) -> Option<String> {
    while let [kind, length, rest @ ..] = bytes {
        let length = usize::from(*length);
        if *kind == wanted {
            return Some(text(rest.get(..length).unwrap_or_default()));
        }
        bytes = rest.get(length..).unwrap_or_default();
    }
    None
}
