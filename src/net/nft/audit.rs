//! What a table has, read to find changes of other programs.

use std::io;
use std::ops::ControlFlow;

use super::Table;
use super::connection::{Nft, if_found};
use super::element::{self, Element};
use super::numbers::message::{GET_CHAIN, GET_ELEMENT, GET_GENERATION, GET_RULE, GET_TABLE};
use super::numbers::{chain, elem_list, hook, rule as rule_attribute, table};
use super::rule::{Rule, parse};
use super::set::Set;
use crate::netlink::{DUMP, Message, REQUEST, nested, text};

/// A chain of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Its name.
    pub name: String,
    /// The number of the hook and the priority; `None` for a regular chain.
    pub hook: Option<(u32, i32)>,
}

fn number(bytes: Option<&[u8]>) -> Option<u32> {
    bytes?.try_into().ok().map(u32::from_be_bytes)
}

fn read_chain(body: &[u8]) -> Option<Chain> {
    let attributes = body.get(4..)?;
    let place = nested(attributes, chain::HOOK);
    let hook = place.and_then(|place| {
        let number = |kind| number(nested(place, kind));
        Some((
            number(hook::HOOKNUM)?,
            number(hook::PRIORITY)?.cast_signed(),
        ))
    });
    let name = nested(attributes, chain::NAME).map(text)?;
    Some(Chain { name, hook })
}

impl Nft {
    /// The number of transactions that all processes have committed in this network namespace (`NFTA_GEN_ID`); the kernel counts
    /// from zero again after the greatest number.
    ///
    /// # Errors
    ///
    /// The kernel has no nftables, or this process may not use it.
    pub fn generation(&mut self) -> io::Result<u32> {
        let answers = self
            .0
            .query(Message::new(GET_GENERATION, REQUEST, &[0, 0, 0, 0]))?;
        let body = answers.first().and_then(|(_, body)| body.get(4..));
        let read = body.and_then(|attributes| number(nested(attributes, 1)));
        read.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "the kernel's answer has no generation",
            )
        })
    }

    /// Whether the table exists.
    ///
    /// # Errors
    ///
    /// This process may not read the tables.
    pub fn has_table(&mut self, table: Table) -> io::Result<bool> {
        let query = Message::new(GET_TABLE, REQUEST, &table.header()).text(table::NAME, table.name);
        Ok(if_found(self.0.query(query))?.is_some_and(|answers| !answers.is_empty()))
    }

    /// The chains of a table; empty if the table does not exist.
    ///
    /// # Errors
    ///
    /// This process may not read the tables.
    pub fn chains(&mut self, table: Table) -> io::Result<Vec<Chain>> {
        let query =
            Message::new(GET_CHAIN, REQUEST | DUMP, &table.header()).text(chain::TABLE, table.name);
        let answers = if_found(self.0.query(query))?.unwrap_or_default();
        let bodies = answers.iter().map(|(_, body)| body.as_slice());
        // Older kernels list the chains of all tables.
        let of_table = bodies.filter(|body| {
            let name = body.get(4..).and_then(|a| nested(a, chain::TABLE));
            name.map(text).as_deref() == Some(table.name)
        });
        Ok(of_table.filter_map(read_chain).collect())
    }

    /// Passes the rules of all chains of a table to `each`, those of a chain in their order. Returns whether the rules were
    /// complete: false if they changed in between.
    ///
    /// # Errors
    ///
    /// This process may not read the tables.
    pub fn scan_rules(&mut self, table: Table, mut each: impl FnMut(Rule)) -> io::Result<bool> {
        let query = Message::new(GET_RULE, REQUEST | DUMP, &table.header())
            .text(rule_attribute::TABLE, table.name);
        let scanned = self.0.stream(query, |_, body| {
            each(parse(body));
            ControlFlow::Continue(())
        });
        Ok(if_found(scanned)?.unwrap_or(true))
    }

    /// Passes the elements of a set without intervals to `each`, in no order, without keeping them. Returns whether the elements
    /// were complete: false if they changed in between. While the kernel resizes the set, some elements may occur twice instead of
    /// others.
    ///
    /// # Errors
    ///
    /// This process may not read the tables, or an element has other types than the set (`InvalidInput`).
    pub fn scan_elements(
        &mut self,
        table: Table,
        set: &Set,
        mut each: impl FnMut(Element),
    ) -> io::Result<bool> {
        let query = Message::new(GET_ELEMENT, REQUEST | DUMP, &table.header())
            .text(elem_list::TABLE, table.name)
            .text(elem_list::SET, &set.name);
        let mut unfit = None;
        let scanned = self.0.stream(query, |_, body| {
            match element::read(set, std::iter::once(body)) {
                Ok(elements) => elements.into_iter().for_each(&mut each),
                Err(error) => unfit = Some(error),
            }
            ControlFlow::Continue(())
        });
        let is_whole = if_found(scanned)?.unwrap_or(true);
        match unfit {
            Some(error) => Err(error.into()),
            None => Ok(is_whole),
        }
    }
}
