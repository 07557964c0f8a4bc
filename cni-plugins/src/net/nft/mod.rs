//! nftables over netlink: tables, chains and rules, committed in transactions.
//!
//! What plugins share stands in tables with the names of the reference plugins (CNI reference spec, 2.3 to 2.5, 7.3
//! and 9), so that either implementation can clean up after the other. Nothing here lists a ruleset: chains are asked
//! for by name. ADD only adds: a transaction that deletes makes closing the socket wait for a kernel grace period.

pub mod expression;
pub mod hostport;
pub mod iptables;
pub mod masquerade;
mod numbers;
pub mod spoof;

use std::io;

use super::netlink::{
    ACK, APPEND, Attributes, CREATE, DUMP, EXCL, Message, REQUEST, Socket, attributes,
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

/// The kinds of user data of a rule: nft's comment, and an owner's key that iptables does not show.
const COMMENT: u8 = 0;
const KEY: u8 = 0xf0;
/// How often a transaction is made anew because another came in between.
const ATTEMPTS: usize = 100;

/// What a table is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// IPv4 and IPv6.
    Inet = 1,
    /// IPv4.
    V4 = 2,
    /// What passes a bridge.
    Bridge = 7,
    /// IPv6.
    V6 = 10,
}

/// A table.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    /// What it is for.
    pub family: Family,
    /// Its name.
    pub name: &'static str,
}

/// Where a base chain is hooked in.
#[derive(Debug, Clone, Copy)]
pub struct Hook {
    /// `filter` or `nat`.
    pub kind: &'static str,
    /// The kernel's number of the hook.
    pub hook: u32,
    /// Lower ones see packets first.
    pub priority: i32,
}

/// Whose rule it is.
#[derive(Debug, Clone, Copy)]
pub enum Mark<'a> {
    /// Nobody's: it is shared.
    None,
    /// Written where nft shows it.
    Comment(&'a str),
    /// Written where iptables does not take it for a part of the rule.
    Key(&'a str),
    /// A comment, by which the reference finds the rule, and the key, by which we do.
    Both {
        /// The comment.
        comment: &'a str,
        /// The key.
        key: &'a str,
    },
}

/// The longest comment that nft writes: `NFTNL_UDATA_COMMENT_MAXLEN` without the final zero.
const LONGEST_COMMENT: usize = 127;

impl Table {
    fn header(self) -> [u8; 4] {
        [self.family as u8, 0, 0, 0]
    }

    /// Creates the table; one that is there is fine.
    #[must_use]
    pub fn create(self) -> Message {
        Message::new(NEW_TABLE, REQUEST | ACK | CREATE, &self.header()).text(table::NAME, self.name)
    }

    /// Creates a chain for jumps; one that is there is fine.
    #[must_use]
    pub fn chain(self, name: &str) -> Message {
        Message::new(NEW_CHAIN, REQUEST | ACK | CREATE, &self.header())
            .text(chain::TABLE, self.name)
            .text(chain::NAME, name)
    }

    /// Creates a base chain. Exclusive: of two processes that set up at once one loses, and then adds only its rules.
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

    fn rule(self, flags: u16, chain: &str, expressions: &[Attributes], mark: Mark<'_>) -> Message {
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
            Mark::None => return message,
            Mark::Comment(text) => user_data(COMMENT, text),
            Mark::Key(text) => user_data(KEY, text),
            Mark::Both { comment, key } if comment.len() > LONGEST_COMMENT => user_data(KEY, key),
            Mark::Both { comment, key } => {
                [user_data(COMMENT, comment), user_data(KEY, key)].concat()
            }
        };
        message.put(rule::USERDATA, &user_data)
    }

    /// A rule behind all others of its chain.
    #[must_use]
    pub fn append(self, chain: &str, expressions: &[Attributes], mark: Mark<'_>) -> Message {
        self.rule(APPEND, chain, expressions, mark)
    }

    /// A rule before all others of its chain.
    #[must_use]
    pub fn prepend(self, chain: &str, expressions: &[Attributes]) -> Message {
        self.rule(0, chain, expressions, Mark::None)
    }

    /// Deletes a rule.
    #[must_use]
    pub fn delete(self, chain: &str, rule: &Rule) -> Message {
        Message::new(DEL_RULE, REQUEST | ACK, &self.header())
            .text(rule::TABLE, self.name)
            .text(rule::CHAIN, chain)
            .put(rule::HANDLE, &rule.handle)
    }

    /// Empties a chain and deletes it.
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

/// One piece of a rule's user data.
fn user_data(kind: u8, text: &str) -> Vec<u8> {
    let mut data = vec![kind, u8::try_from(text.len() + 1).unwrap_or(u8::MAX)];
    data.extend_from_slice(text.as_bytes());
    data.push(0);
    data
}

/// A rule as the kernel shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rule {
    handle: Vec<u8>,
    /// Its owner's key, else its comment, or empty.
    pub mark: String,
    /// Its comment, that of nft or that of iptables, or empty.
    pub comment: String,
    /// The chain that it jumps or goes to.
    pub target: Option<String>,
    /// What it compares, in order: each value as bytes.
    pub values: Vec<Vec<u8>>,
    /// What it loads to do something with, such as where it leads to, in order: each value as bytes.
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

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .trim_end_matches('\0')
        .to_owned()
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

/// The piece of this kind in a rule's user data.
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

/// A connection to the tables of the namespace that it was opened in.
pub struct Nft(Socket);

impl Nft {
    /// Opens one.
    pub fn open() -> io::Result<Nft> {
        Socket::netfilter().map(Nft)
    }

    /// Removes what `work` removes, and leaves the connection open; where the kernel has no nftables, nothing is there.
    pub fn clean(work: impl FnOnce(&mut Nft) -> io::Result<()>) -> io::Result<Option<Nft>> {
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

    /// Whether there is such a chain.
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

    /// The rules of a chain, none if there is no such chain.
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

    /// All of it or nothing.
    pub fn commit(&mut self, messages: Vec<Message>) -> io::Result<()> {
        self.transact(messages, None)
    }

    /// Commits what `plan` finds to be necessary; made anew if anybody changed a table in between.
    pub fn agree(&mut self, plan: impl Fn(&mut Nft) -> io::Result<Vec<Message>>) -> io::Result<()> {
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
            // What is left of the refused batch's answers must not be taken for the next one's.
            *self = Nft::open()?;
        }
        last
    }

    /// Adds `rules` to a table with a base chain `entry`; without it `scaffold` comes first.
    fn add(
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

    /// Deletes the rules of chains that `gone` selects, all at once. Those that somebody else has deleted are fine.
    pub fn delete(
        &mut self,
        chains: &[(Table, &str)],
        gone: impl Fn(&Rule) -> bool,
    ) -> io::Result<()> {
        for _ in 0..ATTEMPTS {
            let mut doomed = vec![];
            for (table, chain) in chains {
                doomed.extend(
                    self.rules(*table, chain)?
                        .iter()
                        .filter(|r| gone(r))
                        .map(|r| table.delete(chain, r)),
                );
            }
            match self.commit(doomed) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => *self = Nft::open()?,
                other => return other,
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Whether the kernel has nftables and this process may use them.
    pub fn probe(&mut self) -> io::Result<()> {
        self.0
            .query(Message::new(GET_GENERATION, REQUEST, &[0, 0, 0, 0]))
            .map(|_| ())
    }
}

fn missing_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_found_among_other_user_data() {
        let both = [COMMENT, 2, b'x', 0, 7, 2, 1, 1, KEY, 3, b'a', b'b', 0];
        assert_eq!(marked(&both, KEY).as_deref(), Some("ab"));
        assert_eq!(marked(&both, COMMENT).as_deref(), Some("x"));
        assert_eq!(marked(&[COMMENT, 200, 1], KEY), None);
    }
}
