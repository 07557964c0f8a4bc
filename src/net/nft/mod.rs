//! nftables over netlink: tables, chains and rules, committed in transactions.
//!
//! This module never lists a whole ruleset but requests chains by name.

pub mod expression;
mod numbers;

use std::io;

use crate::netlink::{
    ACK, APPEND, Attributes, CREATE, DUMP, EXCL, Message, REQUEST, Socket, attributes, text,
};
use numbers::{BATCH_BEGIN, BATCH_END, BATCH_GENID, chain, hook, list, rule, table, xt_match};

const SUBSYSTEM: u16 = (numbers::SUBSYSTEM as u16) << 8;
const NEW_TABLE: u16 = SUBSYSTEM;
const NEW_CHAIN: u16 = SUBSYSTEM | 3;
const GET_CHAIN: u16 = SUBSYSTEM | 4;
const DEL_CHAIN: u16 = SUBSYSTEM | 5;
const NEW_RULE: u16 = SUBSYSTEM | 6;
const GET_RULE: u16 = SUBSYSTEM | 7;
const DEL_RULE: u16 = SUBSYSTEM | 8;
const GET_GENERATION: u16 = SUBSYSTEM | 16;

/// The kinds of user data of a rule: the comment of nft, and an owner's key, which iptables does not display.
const COMMENT: u8 = 0;
const KEY: u8 = 0xf0;
/// Maximum number of attempts for a transaction that conflicts with others.
const ATTEMPTS: usize = 100;

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

/// The owner that a rule records.
#[derive(Debug, Clone, Copy)]
pub enum OwnerMark<'a> {
    /// No owner: the rule is shared.
    None,
    /// A comment, which nft displays.
    Comment(&'a str),
    /// A key in the user data, which iptables ignores when it displays the rule.
    Key(&'a str),
    /// A comment, by which the reference finds the rule, and the key, by which we find it.
    Both {
        /// The comment.
        comment: &'a str,
        /// The key.
        key: &'a str,
    },
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
            .text(rule::TABLE, self.name)
            .text(rule::CHAIN, chain)
            .nest(rule::EXPRESSIONS, &list);
        let user_data = match mark {
            OwnerMark::None => return message,
            OwnerMark::Comment(text) => user_data(COMMENT, text),
            OwnerMark::Key(text) => user_data(KEY, text),
            OwnerMark::Both { comment, key } if comment.len() > LONGEST_COMMENT => {
                user_data(KEY, key)
            }
            OwnerMark::Both { comment, key } => {
                [user_data(COMMENT, comment), user_data(KEY, key)].concat()
            }
        };
        message.put(rule::USERDATA, &user_data)
    }

    /// Appends a rule to a chain.
    #[must_use]
    pub fn append(self, chain: &str, expressions: &[Attributes], mark: OwnerMark<'_>) -> Message {
        self.rule(APPEND, chain, expressions, mark)
    }

    /// Inserts a rule at the beginning of a chain.
    #[must_use]
    pub fn prepend(self, chain: &str, expressions: &[Attributes]) -> Message {
        self.rule(0, chain, expressions, OwnerMark::None)
    }

    /// Deletes a rule.
    #[must_use]
    pub fn delete(self, chain: &str, rule: &Rule) -> Message {
        Message::new(DEL_RULE, REQUEST | ACK, &self.header())
            .text(rule::TABLE, self.name)
            .text(rule::CHAIN, chain)
            .put(rule::HANDLE, &rule.handle)
    }

    /// Deletes all rules of a chain, then the chain.
    #[must_use]
    pub fn remove(self, chain: &str) -> [Message; 2] {
        [DEL_RULE, DEL_CHAIN].map(|kind| {
            let (table, name) = match kind {
                DEL_RULE => (rule::TABLE, rule::CHAIN),
                _ => (chain::TABLE, chain::NAME),
            };
            Message::new(kind, REQUEST | ACK, &self.header())
                .text(table, self.name)
                .text(name, chain)
        })
    }
}

/// An item of a rule's user data.
fn user_data(kind: u8, text: &str) -> Vec<u8> {
    let mut data = vec![kind, u8::try_from(text.len() + 1).unwrap_or(u8::MAX)];
    data.extend_from_slice(text.as_bytes());
    data.push(0);
    data
}

/// A rule read from the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rule {
    handle: Vec<u8>,
    /// The owner's key, else the comment; may be empty.
    pub mark: String,
    /// The comment, of nft or iptables; may be empty.
    pub comment: String,
    /// The target chain of its jump or goto.
    pub target: Option<String>,
    /// The values of its comparisons, in order.
    pub values: Vec<Vec<u8>>,
    /// The values that it loads into registers, such as NAT targets, in order.
    pub loads: Vec<Vec<u8>>,
}

fn parse(body: &[u8]) -> Rule {
    let mut rule = Rule::default();
    for (kind, value) in attributes(body.get(4..).unwrap_or_default()) {
        match kind {
            3 => value.clone_into(&mut rule.handle),
            4 => {
                for (_, expression) in attributes(value) {
                    read_expression(expression, &mut rule);
                }
            }
            7 => {
                let (key, comment) = (marked(value, KEY), marked(value, COMMENT));
                rule.mark = key.or_else(|| comment.clone()).unwrap_or_default();
                rule.comment = comment.unwrap_or(rule.comment);
            }
            _ => {}
        }
    }
    rule
}

fn nested(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(k, _)| *k == kind).map(|(_, v)| v)
}

fn read_expression(bytes: &[u8], rule: &mut Rule) {
    let Some(data) = nested(bytes, 2) else { return };
    match nested(bytes, 1).map(text).as_deref() {
        Some("cmp") => rule.values.extend(
            nested(data, 3)
                .and_then(|d| nested(d, 1))
                .map(<[u8]>::to_vec),
        ),
        Some("immediate") => {
            let loaded = nested(data, 2);
            rule.loads
                .extend(loaded.and_then(|d| nested(d, 1)).map(<[u8]>::to_vec));
            let verdict = loaded.and_then(|d| nested(d, 2));
            rule.target = verdict
                .and_then(|v| nested(v, 2))
                .map(text)
                .or(rule.target.take());
        }
        Some("match") if nested(data, xt_match::NAME).map(text).as_deref() == Some("comment") => {
            let comment = nested(data, xt_match::INFO).unwrap_or_default();
            let end = comment.iter().position(|b| *b == 0);
            rule.comment = text(&comment[..end.unwrap_or(comment.len())]);
        }
        _ => {}
    }
}

/// The item of this kind in a rule's user data.
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

/// A netlink connection to the tables of the namespace in which it was opened.
pub struct Nft(Socket);

impl Nft {
    /// Opens a connection.
    pub fn open() -> io::Result<Nft> {
        Socket::netfilter().map(Nft)
    }

    /// Runs `work`, which removes rules, and returns the connection.
    /// Returns `None` without running `work` if the kernel has no nftables.
    pub fn clean_up(work: impl FnOnce(&mut Nft) -> io::Result<()>) -> io::Result<Option<Nft>> {
        use nix::errno::Errno::{EINVAL, EOPNOTSUPP, EPROTONOSUPPORT};
        let opened = Nft::open().and_then(|mut nft| nft.probe().map(|()| nft));
        let mut nft = match opened {
            Err(error)
                if [EINVAL, EOPNOTSUPP, EPROTONOSUPPORT]
                    .iter()
                    .any(|e| error.raw_os_error() == Some(*e as i32)) =>
            {
                return Ok(None);
            }
            nft => nft?,
        };
        work(&mut nft)?;
        Ok(Some(nft))
    }

    /// Whether the chain exists.
    pub fn has(&mut self, table: Table, chain: &str) -> io::Result<bool> {
        let query = Message::new(GET_CHAIN, REQUEST, &table.header())
            .text(chain::TABLE, table.name)
            .text(chain::NAME, chain);
        match self.0.query(query) {
            Ok(answers) => Ok(!answers.is_empty()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The rules of a chain; empty if the chain does not exist.
    pub fn rules(&mut self, table: Table, chain: &str) -> io::Result<Vec<Rule>> {
        let query = Message::new(GET_RULE, REQUEST | DUMP, &table.header())
            .text(rule::TABLE, table.name)
            .text(rule::CHAIN, chain);
        match self.0.query(query) {
            Ok(answers) => Ok(answers.iter().map(|(_, body)| parse(body)).collect()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(vec![]),
            Err(error) => Err(error),
        }
    }

    fn transact(&mut self, messages: Vec<Message>, generation: Option<&[u8]>) -> io::Result<()> {
        if messages.is_empty() {
            return Ok(());
        }
        let mut begin = Message::new(BATCH_BEGIN, REQUEST, &[0, 0, 0, numbers::SUBSYSTEM]);
        if let Some(generation) = generation {
            begin = begin.put(BATCH_GENID, generation);
        }
        let mut batch = vec![begin];
        batch.extend(messages);
        batch.push(Message::new(
            BATCH_END,
            REQUEST,
            &[0, 0, 0, numbers::SUBSYSTEM],
        ));
        self.0.batch(batch)
    }

    /// Commits all messages, or none.
    pub fn commit(&mut self, messages: Vec<Message>) -> io::Result<()> {
        self.transact(messages, None)
    }

    /// Commits the messages that `plan` returns. Calls `plan`
    /// again if another process has changed the tables in between.
    pub fn commit_if_unchanged(
        &mut self,
        plan: impl Fn(&mut Nft) -> io::Result<Vec<Message>>,
    ) -> io::Result<()> {
        const RESTART: i32 = 85;
        let mut last = Ok(());
        for _ in 0..ATTEMPTS {
            let answers = self
                .0
                .query(Message::new(GET_GENERATION, REQUEST, &[0, 0, 0, 0]))?;
            let generation = answers
                .first()
                .and_then(|(_, body)| nested(body.get(4..)?, 1))
                .map(<[u8]>::to_vec);
            let messages = plan(self)?;
            last = self.transact(messages, generation.as_deref());
            let changed = |e: &io::Error| {
                e.raw_os_error() == Some(RESTART) || e.kind() == io::ErrorKind::AlreadyExists
            };
            if !last.as_ref().is_err_and(changed) {
                return last;
            }
            // Open a new socket, so that unread answers to the rejected
            // batch are not taken for answers to the next one.
            *self = Nft::open()?;
        }
        last
    }

    /// Adds `rules` to a table. If its base chain `entry` is missing, commits `scaffold` as well.
    pub fn add(
        &mut self,
        table: Table,
        entry: &str,
        scaffold: impl Fn() -> Vec<Message>,
        rules: &[Message],
    ) -> io::Result<()> {
        if self.has(table, entry)? {
            return self.commit(rules.to_vec());
        }
        let mut all = scaffold();
        all.extend_from_slice(rules);
        match self.commit(all) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                *self = Nft::open()?;
                self.commit(rules.to_vec())
            }
            other => other,
        }
    }

    /// Deletes the rules for which `selects` is true, in one transaction.
    /// Rules that another process has deleted are no error.
    pub fn delete(
        &mut self,
        chains: &[(Table, &str)],
        selects: impl Fn(&Rule) -> bool,
    ) -> io::Result<()> {
        for _ in 0..ATTEMPTS {
            let mut to_delete = vec![];
            for (table, chain) in chains {
                to_delete.extend(
                    self.rules(*table, chain)?
                        .iter()
                        .filter(|r| selects(r))
                        .map(|r| table.delete(chain, r)),
                );
            }
            match self.commit(to_delete) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => *self = Nft::open()?,
                other => return other,
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Checks that the kernel has nftables and that this process may use it.
    pub fn probe(&mut self) -> io::Result<()> {
        self.0
            .query(Message::new(GET_GENERATION, REQUEST, &[0, 0, 0, 0]))
            .map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_found_among_other_user_data() {
        let both = [COMMENT, 2, b'x', 0, 7, 2, 1, 1, KEY, 3, b'a', b'b', 0];
        assert_eq!(marked(&both, KEY).as_deref(), Some("ab"));
        assert_eq!(marked(&both, COMMENT).as_deref(), Some("x"));
        assert_eq!(marked(&[COMMENT, 200, 1], KEY), None);
    }
}
