//! A connection to the kernel's tables: transactions and listings.

use std::collections::BTreeSet;
use std::io;
use std::ops::ControlFlow;

use super::Table;
use super::element::{self, Element};
use super::numbers::message::{GET_CHAIN, GET_ELEMENT, GET_GENERATION, GET_RULE, GET_SET};
use super::numbers::{
    self, BATCH_BEGIN, BATCH_END, BATCH_GENID, chain, elem_list, rule as rule_attribute,
    set as set_attribute,
};
use super::rule::{Rule, parse};
use super::set::{self, Set};
use super::value::Value;
use crate::netlink::{ACK, BatchError, DUMP, Message, REQUEST, Rejection, Socket, nested};

/// Maximum number of attempts for a transaction or listing that conflicts with others.
const ATTEMPTS: usize = 100;
/// `ERESTART`: another process has changed the tables.
const RESTART: i32 = 85;

/// A netlink connection to the tables of the namespace in which it was opened.
pub struct Nft(pub(super) Socket);

/// A result without the error that the object does not exist.
pub(super) fn if_found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

impl Nft {
    /// Opens a connection.
    ///
    /// # Errors
    ///
    /// The kernel has no nfnetlink, or the process has too many open files.
    pub fn open() -> io::Result<Nft> {
        Socket::netfilter().map(Nft)
    }

    /// Runs `work`, which removes rules, and returns the connection.
    /// Returns `None` without running `work` if the kernel has no nftables.
    ///
    /// # Errors
    ///
    /// `work` fails, or this process may not use nftables.
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
    ///
    /// # Errors
    ///
    /// This process may not read the tables.
    pub fn has(&mut self, table: Table, chain: &str) -> io::Result<bool> {
        let query = Message::new(GET_CHAIN, REQUEST, &table.header())
            .text(chain::TABLE, table.name)
            .text(chain::NAME, chain);
        Ok(if_found(self.0.query(query))?.is_some_and(|answers| !answers.is_empty()))
    }

    /// The rules of a chain; empty if the chain does not exist.
    ///
    /// # Errors
    ///
    /// This process may not read the tables.
    pub fn rules(&mut self, table: Table, chain: &str) -> io::Result<Vec<Rule>> {
        let query = Message::new(GET_RULE, REQUEST | DUMP, &table.header())
            .text(rule_attribute::TABLE, table.name)
            .text(rule_attribute::CHAIN, chain);
        let answers = if_found(self.0.query(query))?.unwrap_or_default();
        Ok(answers.iter().map(|(_, body)| parse(body)).collect())
    }

    /// The sets of a table, including anonymous ones; empty if the table does not exist.
    ///
    /// # Errors
    ///
    /// This process may not read the tables, or a set has a type or a flag that this crate never writes (`InvalidInput`).
    pub fn sets(&mut self, table: Table) -> io::Result<Vec<Set>> {
        let query = Message::new(GET_SET, REQUEST | DUMP, &table.header())
            .text(set_attribute::TABLE, table.name);
        let answers = if_found(self.0.query(query))?.unwrap_or_default();
        let bodies = answers.iter().map(|(_, body)| body.as_slice());
        let of_table = bodies.filter(|body| set::is_of(table, body));
        of_table.map(|body| Ok(set::read(body)?)).collect()
    }

    /// The set with this name, if it exists.
    ///
    /// # Errors
    ///
    /// This process may not read the tables, or the set has a type or a flag that this crate never writes (`InvalidInput`).
    pub fn set(&mut self, table: Table, name: &str) -> io::Result<Option<Set>> {
        let query = Message::new(GET_SET, REQUEST, &table.header())
            .text(set_attribute::TABLE, table.name)
            .text(set_attribute::NAME, name);
        let answers = if_found(self.0.query(query))?.unwrap_or_default();
        let found = answers.first().map(|(_, body)| set::read(body));
        Ok(found.transpose()?)
    }

    /// The elements of a set, at most `most`; empty if the set does not exist. Intervals are in the order of their keys, other
    /// elements in no order.
    ///
    /// # Errors
    ///
    /// This process may not read the tables, the set has more elements (`FileTooLarge`), or an element has other types than
    /// the set (`InvalidInput`).
    pub fn elements(&mut self, table: Table, set: &Set, most: usize) -> io::Result<Vec<Element>> {
        let query = Message::new(GET_ELEMENT, REQUEST | DUMP, &table.header())
            .text(elem_list::TABLE, table.name)
            .text(elem_list::SET, &set.name);
        for _ in 0..ATTEMPTS {
            let mut bodies: Vec<Vec<u8>> = vec![];
            let mut count = 0;
            // An interval of one field has two elements in the kernel.
            let limit = most.saturating_mul(2);
            let streamed = self.0.stream(query.clone(), |_, body| {
                count += element::count(body);
                if count > limit {
                    return ControlFlow::Break(());
                }
                bodies.push(body.to_vec());
                ControlFlow::Continue(())
            });
            let Some(is_whole) = if_found(streamed)? else {
                return Ok(vec![]);
            };
            let too_large = || {
                let name = &set.name;
                let text = format!("the set {name:?} has more than {most} elements");
                io::Error::new(io::ErrorKind::FileTooLarge, text)
            };
            if count > limit {
                return Err(too_large());
            }
            if !is_whole {
                continue;
            }
            let elements = element::read(set, bodies.iter().map(Vec::as_slice))?;
            // While the kernel resizes a hash table, a listing has some elements twice instead of others, without a flag.
            let keys: BTreeSet<&[Value]> = elements.iter().map(|e| e.key.as_slice()).collect();
            if keys.len() < elements.len() {
                continue;
            }
            return if elements.len() > most {
                Err(too_large())
            } else {
                Ok(elements)
            };
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Sends a transaction. The kernel acknowledges only the last message, so that the answers fit the receive buffer.
    fn transact(
        &mut self,
        messages: Vec<Message>,
        generation: Option<&[u8]>,
    ) -> Result<(), BatchError> {
        let count = messages.len();
        if count == 0 {
            return Ok(());
        }
        let mut begin = Message::new(BATCH_BEGIN, REQUEST, &[0, 0, 0, numbers::SUBSYSTEM]);
        if let Some(generation) = generation {
            begin = begin.put(BATCH_GENID, generation);
        }
        let mut batch = Vec::with_capacity(count.saturating_add(2));
        batch.push(begin);
        for (index, message) in messages.into_iter().enumerate() {
            batch.push(if index + 1 < count {
                message.without_flags(ACK)
            } else {
                message
            });
        }
        batch.push(Message::new(
            BATCH_END,
            REQUEST,
            &[0, 0, 0, numbers::SUBSYSTEM],
        ));
        self.0.batch(batch).map_err(|error| match error {
            // An error about the first or the last message of the batch is about the transaction.
            BatchError::Rejected(rejection) => BatchError::Rejected(Rejection {
                index: rejection
                    .index
                    .and_then(|index| index.checked_sub(1))
                    .filter(|index| *index < count),
                ..rejection
            }),
            other => other,
        })
    }

    /// Commits all messages, or none.
    ///
    /// # Errors
    ///
    /// See [`BatchError`]; a rejection has the position in `messages`.
    pub fn commit(&mut self, messages: Vec<Message>) -> Result<(), BatchError> {
        self.transact(messages, None)
    }

    /// Commits the messages that `plan` returns. Calls `plan`
    /// again if another process has changed the tables in between.
    ///
    /// # Errors
    ///
    /// `plan` fails, the kernel rejects a message, or other processes have changed the tables during each of 100 attempts.
    pub fn commit_if_unchanged(
        &mut self,
        plan: impl Fn(&mut Nft) -> io::Result<Vec<Message>>,
    ) -> io::Result<()> {
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
            last = self
                .transact(messages, generation.as_deref())
                .map_err(io::Error::from);
            let changed = |e: &io::Error| {
                e.raw_os_error() == Some(RESTART) || e.kind() == io::ErrorKind::AlreadyExists
            };
            if !last.as_ref().is_err_and(changed) {
                return last;
            }
        }
        last
    }

    /// Adds `rules` to a table. If its base chain `entry` is missing, commits `scaffold` as well.
    ///
    /// # Errors
    ///
    /// The kernel rejects a rule, for instance because another chain of the table is missing (`NotFound`).
    pub fn add(
        &mut self,
        table: Table,
        entry: &str,
        scaffold: impl Fn() -> Vec<Message>,
        rules: &[Message],
    ) -> io::Result<()> {
        if !self.has(table, entry)? {
            let mut all = scaffold();
            all.extend_from_slice(rules);
            match self.commit(all).map_err(io::Error::from) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                other => return other,
            }
        }
        Ok(self.commit(rules.to_vec())?)
    }

    /// Deletes the rules for which `selects` is true, in one transaction.
    /// Rules that another process has deleted are no error.
    ///
    /// # Errors
    ///
    /// This process may not change the tables, or other processes delete the same rules in each of 100 attempts.
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
            match self.commit(to_delete).map_err(io::Error::from) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => return other,
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Checks that the kernel has nftables and that this process may use it.
    ///
    /// # Errors
    ///
    /// The kernel has no nftables, or this process may not use it.
    pub fn probe(&mut self) -> io::Result<()> {
        self.0
            .query(Message::new(GET_GENERATION, REQUEST, &[0, 0, 0, 0]))
            .map(drop)
    }
}
