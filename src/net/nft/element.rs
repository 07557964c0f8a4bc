//! Elements of sets.
//!
//! An interval contains both its ends. If the key has several fields, the kernel stores both ends in one element. If the key
//! has one field, the kernel stores the first value and the value after the last one as two elements; this module writes
//! and reads both as one.

use std::time::Duration;

use super::Table;
use super::numbers::message::{DEL_ELEMENT, NEW_ELEMENT};
use super::numbers::{data, elem, elem_list, list};
use super::set::{Kind, Set, milliseconds};
use super::value::{Data, Unfit, Value, decode, encode};
use super::verdict::Verdict;
use crate::netlink::{ACK, Attributes, CREATE, Message, REQUEST, attributes, nested};

/// An element of a set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Element {
    /// The key, or the first key of an interval.
    pub key: Vec<Value>,
    /// The last key of an interval; `None` for a single key.
    pub last: Option<Vec<Value>>,
    /// What the key is mapped to.
    pub data: Data,
    /// The timeout; `None` means that of the set. The kernel counts milliseconds.
    pub timeout: Option<Duration>,
    /// The remaining time. The kernel writes this field; writers leave it `None`.
    pub expires: Option<Duration>,
}

impl Element {
    /// A single key without timeout.
    #[must_use]
    pub fn new(key: Vec<Value>, data: Data) -> Element {
        Element {
            key,
            last: None,
            data,
            timeout: None,
            expires: None,
        }
    }

    /// An interval without timeout, from `key` to `last`.
    #[must_use]
    pub fn interval(key: Vec<Value>, last: Vec<Value>, data: Data) -> Element {
        Element {
            last: Some(last),
            ..Element::new(key, data)
        }
    }
}

/// The normal form of an element: the kernel lists an interval of one key as a single key.
#[must_use]
pub fn single(element: Element) -> Element {
    Element {
        last: element.last.filter(|last| *last != element.key),
        ..element
    }
}

fn value(bytes: &[u8]) -> Attributes {
    Attributes::new().put(data::VALUE, bytes)
}

/// The bytes of the next key; `None` after the last one.
fn successor(key: &[u8]) -> Option<Vec<u8>> {
    let mut next = key.to_vec();
    for byte in next.iter_mut().rev() {
        *byte = byte.wrapping_add(1);
        if *byte != 0 {
            return Some(next);
        }
    }
    None
}

/// The bytes of the previous key; `None` before the first one.
fn predecessor(key: &[u8]) -> Option<Vec<u8>> {
    let mut previous = key.to_vec();
    for byte in previous.iter_mut().rev() {
        let borrows = *byte == 0;
        *byte = byte.wrapping_sub(1);
        if !borrows {
            return Some(previous);
        }
    }
    None
}

impl Set {
    fn data(&self, data: &Data) -> Result<Option<Attributes>, Unfit> {
        match (&self.kind, data) {
            (Kind::Set, Data::None) => Ok(None),
            (Kind::VerdictMap, Data::Verdict(verdict)) => Ok(Some(verdict.data())),
            (Kind::Map(types), Data::Values(values)) => Ok(Some(value(&encode(types, values)?))),
            (kind, data) => Err(Unfit(format!(
                "the set {:?} is a {kind:?} and cannot contain {data:?}",
                self.name
            ))),
        }
    }

    /// The elements of the kernel for an element, with the key by which they are sorted. `only_keys` is for deletions.
    fn encode(
        &self,
        element: &Element,
        only_keys: bool,
        into: &mut Vec<(Vec<u8>, Vec<Attributes>)>,
    ) -> Result<(), Unfit> {
        let unfit = |why: &str| Unfit(format!("the set {:?} {why}: {element:?}", self.name));
        let key = encode(&self.key, &element.key)?;
        let last = element.last.as_ref().map(|last| encode(&self.key, last));
        let last = last.transpose()?;
        if last.is_some() && !self.has_intervals {
            return Err(unfit("has no intervals"));
        }
        // Each field of an interval has its own bounds.
        let mut bounds = element.key.iter().zip(element.last.iter().flatten());
        if bounds.any(|(first, last)| first > last) {
            return Err(unfit(
                "cannot have an interval that ends before its beginning",
            ));
        }
        let mut first = Attributes::new().nest(elem::KEY, &value(&key));
        let mut closing = None;
        if self.has_wide_intervals() {
            first = first.nest(elem::KEY_END, &value(last.as_ref().unwrap_or(&key)));
        } else if self.has_intervals {
            // The interval with the greatest key has no end.
            closing = successor(last.as_ref().unwrap_or(&key)).map(|end| {
                Attributes::new()
                    .nest(elem::KEY, &value(&end))
                    .big(elem::FLAGS, elem::INTERVAL_END)
            });
        }
        if !only_keys {
            if let Some(data) = self.data(&element.data)? {
                first = first.nest(elem::DATA, &data);
            }
            if let Some(timeout) = element.timeout {
                first = first.put(elem::TIMEOUT, &milliseconds(timeout));
            }
        }
        into.push((key, std::iter::once(first).chain(closing).collect()));
        Ok(())
    }
}

impl Table {
    fn elements(
        self,
        kind: u16,
        flags: u16,
        set: &Set,
        elements: &[Element],
    ) -> Result<Vec<Message>, Unfit> {
        let mut encoded = Vec::with_capacity(elements.len());
        for element in elements {
            set.encode(element, kind == DEL_ELEMENT, &mut encoded)?;
        }
        // The kernel finds overlaps of intervals reliably only in their order.
        if set.has_intervals {
            encoded.sort_by(|(one, _), (other, _)| one.cmp(other));
        }
        let message = |elements: &Attributes| {
            let message = Message::new(kind, REQUEST | ACK | flags, &self.header())
                .text(elem_list::TABLE, self.name)
                .text(elem_list::SET, &set.name)
                .nest(elem_list::ELEMENTS, elements);
            match set.anonymous {
                Some(number) => message.big(elem_list::SET_ID, number),
                None => message,
            }
        };
        let mut messages = vec![];
        let mut pending = Attributes::new();
        for (_, parts) in &encoded {
            let added = parts
                .iter()
                .fold(Attributes::new(), |all, part| all.nest(list::ELEM, part));
            // Both ends of an interval are in one message.
            if pending.len() + added.len() > Attributes::MAX_CONTENT {
                messages.push(message(&pending));
                pending = Attributes::new();
            }
            for part in parts {
                pending = pending.nest(list::ELEM, part);
            }
        }
        if !pending.is_empty() {
            messages.push(message(&pending));
        }
        Ok(messages)
    }

    /// Adds elements, about 1,000 with each message. An existing element with the same data is no error.
    ///
    /// # Errors
    ///
    /// An element does not have the types of the set, or the set has no intervals.
    pub fn add_elements(self, set: &Set, elements: &[Element]) -> Result<Vec<Message>, Unfit> {
        self.elements(NEW_ELEMENT, CREATE, set, elements)
    }

    /// Deletes elements. A missing element is an error of the kernel.
    ///
    /// # Errors
    ///
    /// A key does not have the types of the set. The data are not checked.
    pub fn delete_elements(self, set: &Set, elements: &[Element]) -> Result<Vec<Message>, Unfit> {
        self.elements(DEL_ELEMENT, 0, set, elements)
    }
}

/// An element of the kernel, with the bytes of its key.
struct Raw<'a> {
    key: &'a [u8],
    is_end: bool,
    attributes: &'a [u8],
}

fn raw(bytes: &[u8]) -> Option<Raw<'_>> {
    let flags = nested(bytes, elem::FLAGS).and_then(|v| v.try_into().ok());
    Some(Raw {
        key: nested(nested(bytes, elem::KEY)?, data::VALUE)?,
        is_end: flags.map_or(0, u32::from_be_bytes) & elem::INTERVAL_END != 0,
        attributes: bytes,
    })
}

fn time(bytes: &[u8], kind: u16) -> Option<Duration> {
    let bytes = nested(bytes, kind)?.try_into().ok()?;
    Some(Duration::from_millis(u64::from_be_bytes(bytes)))
}

/// Reads an element. `last` is the last key of an interval.
fn element(set: &Set, raw: &Raw<'_>, last: Option<&[u8]>) -> Option<Element> {
    let data = nested(raw.attributes, elem::DATA);
    let data = match &set.kind {
        Kind::Set => Data::None,
        Kind::VerdictMap => Data::Verdict(Verdict::read(data?)?),
        Kind::Map(types) => Data::Values(decode(types, nested(data?, data::VALUE)?)?),
    };
    let last = match last.filter(|last| *last != raw.key) {
        Some(last) => Some(decode(&set.key, last)?),
        None => None,
    };
    Some(Element {
        key: decode(&set.key, raw.key)?,
        last,
        data,
        timeout: time(raw.attributes, elem::TIMEOUT),
        expires: time(raw.attributes, elem::EXPIRATION),
    })
}

/// The number of the kernel's elements in the body of a message.
pub(super) fn count(body: &[u8]) -> usize {
    let list = nested(body.get(4..).unwrap_or_default(), elem_list::ELEMENTS);
    attributes(list.unwrap_or_default()).count()
}

/// Reads the elements of a set from the bodies of messages.
///
/// # Errors
///
/// An element does not have the types of the set.
pub(super) fn read<'a>(
    set: &Set,
    bodies: impl Iterator<Item = &'a [u8]>,
) -> Result<Vec<Element>, Unfit> {
    let unfit = || {
        let name = &set.name;
        Unfit(format!(
            "the set {name:?} has an element of other types than its own"
        ))
    };
    let mut raws = vec![];
    for body in bodies {
        let list = nested(body.get(4..).unwrap_or_default(), elem_list::ELEMENTS);
        for (_, bytes) in attributes(list.unwrap_or_default()) {
            raws.push(raw(bytes).ok_or_else(unfit)?);
        }
    }
    if !set.has_intervals || set.has_wide_intervals() {
        let read = |raw: &Raw<'_>| {
            let end = nested(raw.attributes, elem::KEY_END);
            element(set, raw, end.and_then(|end| nested(end, data::VALUE)))
        };
        return raws.iter().map(|raw| read(raw).ok_or_else(unfit)).collect();
    }
    // At equal keys an interval ends before the next one begins.
    raws.sort_by(|one, other| (one.key, !one.is_end).cmp(&(other.key, !other.is_end)));
    let mut elements = vec![];
    for (at, raw) in raws.iter().enumerate().filter(|(_, raw)| !raw.is_end) {
        let last = match raws.get(at + 1) {
            Some(next) => predecessor(next.key).ok_or_else(unfit)?,
            None => vec![u8::MAX; raw.key.len()],
        };
        elements.push(element(set, raw, Some(&last)).ok_or_else(unfit)?);
    }
    Ok(elements)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nft::set::tests::{TABLE, sets};
    use crate::nft::value::tests::value;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn values(types: &[super::super::value::Type]) -> Vec<BoxedStrategy<Value>> {
        types.iter().map(|t| value(*t)).collect()
    }

    fn data(kind: &Kind) -> BoxedStrategy<Data> {
        let verdict = prop_oneof![
            Just(Verdict::Drop),
            Just(Verdict::Accept),
            Just(Verdict::Return),
            "[a-z]{1,9}".prop_map(Verdict::Jump),
            "[a-z]{1,9}".prop_map(Verdict::Goto)
        ];
        match kind {
            Kind::Set => Just(Data::None).boxed(),
            Kind::VerdictMap => verdict.prop_map(Data::Verdict).boxed(),
            Kind::Map(types) => values(types).prop_map(Data::Values).boxed(),
        }
    }

    /// A set and elements of it. Intervals of one field do not overlap.
    fn filled() -> impl Strategy<Value = (Set, Vec<Element>)> {
        let filled = |set: Set| {
            let timeout = proptest::option::of((1_u64..100_000).prop_map(Duration::from_millis));
            let one = (values(&set.key), values(&set.key), data(&set.kind), timeout);
            (Just(set), vec(one, 0..20))
        };
        sets().prop_flat_map(filled).prop_map(|(set, raw)| {
            let mut elements: Vec<Element> = raw
                .into_iter()
                .map(|(one, other, data, timeout)| {
                    let (mut key, mut last) = (one, other);
                    for (first, last) in key.iter_mut().zip(&mut last) {
                        if *first > *last {
                            std::mem::swap(first, last);
                        }
                    }
                    let last = Some(last).filter(|last| set.has_intervals && *last != key);
                    Element {
                        last,
                        timeout,
                        ..Element::new(key, data)
                    }
                })
                .collect();
            if set.has_intervals && set.key.len() == 1 {
                elements.sort_by(|one, other| one.key.cmp(&other.key));
                let mut end: Option<Vec<Value>> = None;
                elements.retain(|e| {
                    let is_free = end.as_ref().is_none_or(|end| *end < e.key);
                    if is_free {
                        end = Some(e.last.clone().unwrap_or_else(|| e.key.clone()));
                    }
                    is_free
                });
            }
            (set, elements)
        })
    }

    proptest! {
        #[test]
        fn any_elements_are_read_back((set, mut elements) in filled()) {
            let messages = TABLE.add_elements(&set, &elements).expect("the elements fit");
            let read = read(&set, messages.iter().map(Message::body)).expect("the elements are known");
            if set.has_wide_intervals() {
                elements.sort_by_key(|e| encode(&set.key, &e.key).ok());
            }
            prop_assert_eq!(read, elements);
        }

        #[test]
        fn any_bytes_of_elements_are_read_within_their_bounds(set in sets(), bytes in vec(any::<u8>(), 0..200)) {
            let _ = read(&set, std::iter::once(bytes.as_slice()));
        }
    }

    #[test]
    fn many_elements_are_split_into_messages_that_fit() {
        let set = Set::new("s", &[super::super::value::Type::Number], Kind::Set);
        let elements: Vec<Element> = (0..100_000)
            .map(|n| Element::new(vec![Value::Number(n)], Data::None))
            .collect();
        let mut messages = TABLE.add_elements(&set, &elements).expect("they fit");
        assert!((20..60).contains(&messages.len()), "{}", messages.len());
        let read = read(&set, messages.iter().map(Message::body)).expect("they are known");
        assert_eq!(read, elements);
        assert!(messages.iter_mut().all(Message::is_complete));
    }

    #[test]
    fn elements_that_do_not_fit_are_refused() {
        use super::super::value::Type;
        let set = Set::new("s", &[Type::Port], Kind::Set);
        let ports = Set {
            has_intervals: true,
            ..set.clone()
        };
        let port = |p| vec![Value::Port(p)];
        let cases = [
            (&set, Element::interval(port(1), port(2), Data::None)),
            (&ports, Element::interval(port(2), port(1), Data::None)),
            (&set, Element::new(port(1), Data::Verdict(Verdict::Drop))),
            (&set, Element::new(vec![Value::Protocol(6)], Data::None)),
        ];
        for (set, element) in cases {
            assert!(
                TABLE
                    .add_elements(set, std::slice::from_ref(&element))
                    .is_err(),
                "{element:?}"
            );
        }
    }

    #[test]
    fn keys_have_successors_and_predecessors() {
        assert_eq!(successor(&[0, 255]), Some(vec![1, 0]));
        assert_eq!(successor(&[255, 255]), None);
        assert_eq!(predecessor(&[1, 0]), Some(vec![0, 255]));
        assert_eq!(predecessor(&[0, 0]), None);
    }
}
