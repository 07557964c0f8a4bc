//! Sets, maps and verdict maps.
//!
//! A named set exists until it is deleted. An anonymous set is created in the transaction of the one rule that uses it, never
//! changes, and is deleted with the rule.

use std::time::Duration;

use super::numbers::message::{DEL_ELEMENT, DEL_SET, NEW_SET};
use super::numbers::{
    DATA_VERDICT, elem_list, list, set, set_desc, set_field, set_flag, set_udata,
};
use super::value::{Type, Unfit, concatenation, parts, width};
use super::{Table, marked, user_data};
use crate::netlink::{ACK, Attributes, CREATE, Message, REQUEST, attributes, nested, text};

/// What the elements of a set are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A set of keys.
    Set,
    /// A verdict for each key.
    VerdictMap,
    /// Values of these types for each key.
    Map(Vec<Type>),
}

/// When elements expire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    /// Never.
    Never,
    /// Each element may have a timeout; others stay.
    PerElement,
    /// After this time, unless an element has its own timeout. The kernel counts milliseconds.
    After(Duration),
}

/// A set, map or verdict map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    /// The name; the kernel chooses the name of an anonymous set.
    pub name: String,
    /// The number of an anonymous set within its transaction; `None` for a named set.
    pub anonymous: Option<u32>,
    /// The types of the key's fields.
    pub key: Vec<Type>,
    /// What the elements are.
    pub kind: Kind,
    /// Whether elements may be intervals.
    pub has_intervals: bool,
    /// When elements expire.
    pub expiry: Expiry,
    /// Whether rules add elements.
    pub is_dynamic: bool,
    /// The maximum number of elements; `None` means no limit, and 65,535 if rules add elements.
    pub size: Option<u32>,
    /// A comment, which `nft` displays, of at most 127 bytes; may be empty.
    pub comment: String,
}

/// Orders of bytes in user data (`enum byteorder` of nftables).
const HOST_ENDIAN: u32 = 1;
const BIG_ENDIAN: u32 = 2;

impl Set {
    /// A named set without intervals and timeouts, which rules do not change.
    #[must_use]
    pub fn new(name: &str, key: &[Type], kind: Kind) -> Set {
        Set {
            name: name.to_owned(),
            anonymous: None,
            key: key.to_vec(),
            kind,
            has_intervals: false,
            expiry: Expiry::Never,
            is_dynamic: false,
            size: None,
            comment: String::new(),
        }
    }

    /// An anonymous set. `number` must differ between the anonymous sets of a transaction.
    #[must_use]
    pub fn anonymous(number: u32, key: &[Type], kind: Kind) -> Set {
        let name = match kind {
            Kind::Set => "__set%d",
            Kind::VerdictMap | Kind::Map(_) => "__map%d",
        };
        Set {
            anonymous: Some(number),
            ..Set::new(name, key, kind)
        }
    }

    /// Whether elements are intervals of several fields, for which the kernel stores both ends in one element.
    pub(super) fn has_wide_intervals(&self) -> bool {
        self.has_intervals && self.key.len() > 1
    }

    fn flags(&self) -> u32 {
        [
            (
                self.anonymous.is_some(),
                set_flag::ANONYMOUS | set_flag::CONSTANT,
            ),
            (self.has_intervals, set_flag::INTERVAL),
            (self.has_wide_intervals(), set_flag::CONCAT),
            (self.kind != Kind::Set, set_flag::MAP),
            (self.expiry != Expiry::Never, set_flag::TIMEOUT),
            (self.is_dynamic, set_flag::EVAL),
        ]
        .into_iter()
        .filter_map(|(holds, flag)| holds.then_some(flag))
        .sum()
    }

    /// Checks what the kernel would reject without naming the cause.
    fn check(&self) -> Result<(), Unfit> {
        let name = &self.name;
        let unfit = |why: &str| Err(Unfit(format!("the set {name:?} {why}")));
        // The 16 registers of 4 bytes.
        let most = 64;
        let types: Vec<&[Type]> = match &self.kind {
            Kind::Map(data) => vec![&self.key, data],
            Kind::Set | Kind::VerdictMap => vec![&self.key],
        };
        if types
            .iter()
            .any(|t| t.is_empty() || t.len() > 5 || width(t) > most)
        {
            return unfit(
                "needs 1 to 5 types for its keys, and as many for its data, of at most 64 bytes",
            );
        }
        if self.has_intervals && !self.key.iter().all(|t| t.is_ordered()) {
            return unfit("cannot have intervals of numbers, marks or names");
        }
        if self.comment.len() > super::LONGEST_COMMENT {
            return unfit("has a comment of more than 127 bytes");
        }
        Ok(())
    }

    fn description(&self) -> Attributes {
        let mut description = Attributes::new();
        if let Some(size) = self.size {
            description = description.big(set_desc::SIZE, size);
        }
        if self.has_wide_intervals() {
            let fields = self.key.iter().fold(Attributes::new(), |all, kind| {
                let length = u32::try_from(kind.width()).unwrap_or(u32::MAX);
                all.nest(list::ELEM, &Attributes::new().big(set_field::LEN, length))
            });
            description = description.nest(set_desc::CONCAT, &fields);
        }
        description
    }

    /// The user data with which `nft` displays numbers in the right order of bytes.
    fn user_data(&self) -> Vec<u8> {
        let order = |kind: u8, types: &[Type]| {
            let order = match types {
                [Type::Number | Type::Mark | Type::Interface] => HOST_ENDIAN,
                [_] => BIG_ENDIAN,
                _ => return vec![],
            };
            [&[kind, 4][..], &order.to_ne_bytes()].concat()
        };
        let mut data = order(set_udata::KEY_BYTEORDER, &self.key);
        if let Kind::Map(types) = &self.kind {
            data.extend(order(set_udata::DATA_BYTEORDER, types));
        }
        if !self.comment.is_empty() {
            data.extend(user_data(set_udata::COMMENT, &self.comment));
        }
        data
    }
}

fn length(types: &[Type]) -> u32 {
    u32::try_from(width(types)).unwrap_or(u32::MAX)
}

/// Milliseconds, the kernel's unit of timeouts, at least one: zero would mean no timeout.
pub(super) fn milliseconds(time: Duration) -> [u8; 8] {
    u64::try_from(time.as_millis())
        .unwrap_or(u64::MAX)
        .max(1)
        .to_be_bytes()
}

impl Table {
    /// Creates a set. An existing set with the same types and flags is no error.
    ///
    /// # Errors
    ///
    /// The kernel has no such sets.
    pub fn create_set(self, set: &Set) -> Result<Message, Unfit> {
        set.check()?;
        let mut message = Message::new(NEW_SET, REQUEST | ACK | CREATE, &self.header())
            .text(set::TABLE, self.name)
            .text(set::NAME, &set.name)
            .big(set::FLAGS, set.flags())
            .big(set::KEY_TYPE, concatenation(&set.key))
            .big(set::KEY_LEN, length(&set.key))
            .big(set::ID, set.anonymous.unwrap_or(0));
        match &set.kind {
            Kind::Set => {}
            Kind::VerdictMap => message = message.big(set::DATA_TYPE, DATA_VERDICT),
            Kind::Map(types) => {
                message = message
                    .big(set::DATA_TYPE, concatenation(types))
                    .big(set::DATA_LEN, length(types));
            }
        }
        let description = set.description();
        if !description.is_empty() {
            message = message.nest(set::DESC, &description);
        }
        if let Expiry::After(time) = set.expiry {
            message = message.put(set::TIMEOUT, &milliseconds(time));
        }
        let user_data = set.user_data();
        Ok(if user_data.is_empty() {
            message
        } else {
            message.put(set::USERDATA, &user_data)
        })
    }

    /// Deletes a set. A set that a rule uses cannot be deleted.
    #[must_use]
    pub fn delete_set(self, name: &str) -> Message {
        Message::new(DEL_SET, REQUEST | ACK, &self.header())
            .text(set::TABLE, self.name)
            .text(set::NAME, name)
    }

    /// Deletes all elements of a set.
    #[must_use]
    pub fn flush_set(self, name: &str) -> Message {
        Message::new(DEL_ELEMENT, REQUEST | ACK, &self.header())
            .text(elem_list::TABLE, self.name)
            .text(elem_list::SET, name)
    }
}

/// Reads the body of a set's message.
///
/// # Errors
///
/// The set has types or flags that this crate does not write.
pub(super) fn read(body: &[u8]) -> Result<Set, Unfit> {
    let body = body.get(4..).unwrap_or_default();
    let big = |kind: u16| {
        let bytes = nested(body, kind).and_then(|v| v.try_into().ok());
        bytes.map(u32::from_be_bytes)
    };
    let name = nested(body, set::NAME).map(text).unwrap_or_default();
    let foreign = |what: &str| {
        Unfit(format!(
            "the set {name:?} has {what}, which Holdfast never creates"
        ))
    };
    let types = |number: Option<u32>| {
        number
            .and_then(parts)
            .filter(|types| !types.is_empty())
            .ok_or_else(|| foreign("a type"))
    };
    let flags = big(set::FLAGS).unwrap_or(0);
    let has = |flag: u32| flags & flag != 0;
    let kind = match big(set::DATA_TYPE) {
        _ if !has(set_flag::MAP) => Kind::Set,
        Some(DATA_VERDICT) => Kind::VerdictMap,
        number => Kind::Map(types(number)?),
    };
    let description = nested(body, set::DESC).unwrap_or_default();
    let size = nested(description, set_desc::SIZE).and_then(|v| v.try_into().ok());
    let timeout = nested(body, set::TIMEOUT).and_then(|v| v.try_into().ok());
    let user_data = nested(body, set::USERDATA).unwrap_or_default();
    let found = Set {
        key: types(big(set::KEY_TYPE))?,
        kind,
        anonymous: has(set_flag::ANONYMOUS).then(|| big(set::ID).unwrap_or(0)),
        has_intervals: has(set_flag::INTERVAL),
        expiry: match timeout.map(u64::from_be_bytes) {
            _ if !has(set_flag::TIMEOUT) => Expiry::Never,
            None | Some(0) => Expiry::PerElement,
            Some(time) => Expiry::After(Duration::from_millis(time)),
        },
        is_dynamic: has(set_flag::EVAL),
        size: size.map(u32::from_be_bytes).filter(|size| *size > 0),
        comment: marked(user_data, set_udata::COMMENT).unwrap_or_default(),
        name: name.clone(),
    };
    if found.flags() != flags || big(set::KEY_LEN) != Some(length(&found.key)) {
        return Err(foreign("flags or a length of keys"));
    }
    Ok(found)
}

/// Whether the body of a set's message is about this table; the kernel lists the sets of a table, but older kernels of all.
pub(super) fn is_of(table: Table, body: &[u8]) -> bool {
    let attributes = attributes(body.get(4..).unwrap_or_default());
    let mut names = attributes.filter(|(kind, _)| *kind == set::TABLE);
    names.any(|(_, name)| text(name) == table.name)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::nft::Family;
    use crate::nft::value::tests::types;
    use proptest::prelude::*;

    pub const TABLE: Table = Table {
        family: Family::Inet,
        name: "t",
    };

    fn kind() -> impl Strategy<Value = Kind> {
        prop_oneof![
            Just(Kind::Set),
            Just(Kind::VerdictMap),
            types().prop_map(Kind::Map)
        ]
    }

    /// A set that the kernel could have.
    pub fn sets() -> impl Strategy<Value = Set> {
        let expiry = prop_oneof![
            Just(Expiry::Never),
            Just(Expiry::PerElement),
            (1_u64..1_000_000).prop_map(|ms| Expiry::After(Duration::from_millis(ms)))
        ];
        let rest = (
            "[ -~]{0,127}",
            any::<bool>(),
            proptest::option::of(1_u32..),
            any::<bool>(),
        );
        (types(), kind(), expiry, rest).prop_map(
            |(key, kind, expiry, (comment, is_dynamic, size, has_intervals))| Set {
                has_intervals: has_intervals && key.iter().all(|t| t.is_ordered()),
                expiry,
                is_dynamic,
                size,
                comment,
                ..Set::new("s", &key, kind)
            },
        )
    }

    proptest! {
        #[test]
        fn any_set_is_read_back(set in sets()) {
            let fits = |types: &[Type]| width(types) <= 64;
            let message = TABLE.create_set(&set);
            let data_fits = !matches!(&set.kind, Kind::Map(types) if !fits(types));
            prop_assert_eq!(message.is_ok(), fits(&set.key) && data_fits);
            if let Ok(message) = message {
                prop_assert!(is_of(TABLE, message.body()));
                prop_assert_eq!(read(message.body()), Ok(set));
            }
        }

        #[test]
        fn any_bytes_of_a_set_are_read_within_their_bounds(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (read(&bytes), is_of(TABLE, &bytes));
        }
    }

    #[test]
    fn sets_that_the_kernel_lacks_are_refused() {
        let marks = Set {
            has_intervals: true,
            ..Set::new("s", &[Type::Port, Type::Mark], Kind::Set)
        };
        let error = TABLE.create_set(&marks).expect_err("marks have no order");
        assert_eq!(
            error.to_string(),
            "the set \"s\" cannot have intervals of numbers, marks or names"
        );
    }
}
