//! Rules: the owners that they record, and what of them is read back.

use super::numbers::{expr, rule as attribute, xt_match};
use super::verdict::Verdict;
use super::{LONGEST_COMMENT, marked, user_data};
use crate::netlink::{attributes, nested, text};

/// The kinds of user data of a rule: the comment of nft, and an owner's key, which iptables does not display.
const COMMENT: u8 = 0;
const KEY: u8 = 0xf0;

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

impl OwnerMark<'_> {
    /// The user data of a rule with this mark.
    pub(super) fn user_data(self) -> Option<Vec<u8>> {
        Some(match self {
            OwnerMark::None => return None,
            OwnerMark::Comment(text) => user_data(COMMENT, text),
            OwnerMark::Key(text) => user_data(KEY, text),
            OwnerMark::Both { comment, key } if comment.len() > LONGEST_COMMENT => {
                user_data(KEY, key)
            }
            OwnerMark::Both { comment, key } => {
                [user_data(COMMENT, comment), user_data(KEY, key)].concat()
            }
        })
    }
}

/// A rule read from the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rule {
    pub(super) handle: Vec<u8>,
    /// The chain that has the rule.
    pub chain: String,
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

/// Reads the body of a rule's message.
pub(super) fn parse(body: &[u8]) -> Rule {
    let mut rule = Rule::default();
    for (kind, value) in attributes(body.get(4..).unwrap_or_default()) {
        match kind {
            attribute::HANDLE => value.clone_into(&mut rule.handle),
            attribute::CHAIN => rule.chain = text(value),
            attribute::EXPRESSIONS => {
                for (_, expression) in attributes(value) {
                    read_expression(expression, &mut rule);
                }
            }
            attribute::USERDATA => {
                let (key, comment) = (marked(value, KEY), marked(value, COMMENT));
                rule.mark = key.or_else(|| comment.clone()).unwrap_or_default();
                rule.comment = comment.unwrap_or(rule.comment);
            }
            _ => {}
        }
    }
    rule
}

fn read_expression(bytes: &[u8], rule: &mut Rule) {
    let Some(data) = nested(bytes, expr::DATA) else {
        return;
    };
    match nested(bytes, expr::NAME).map(text).as_deref() {
        Some("cmp") => rule.values.extend(
            nested(data, 3)
                .and_then(|d| nested(d, 1))
                .map(<[u8]>::to_vec),
        ),
        Some("immediate") => {
            let loaded = nested(data, 2);
            rule.loads
                .extend(loaded.and_then(|d| nested(d, 1)).map(<[u8]>::to_vec));
            if let Some(Verdict::Jump(chain) | Verdict::Goto(chain)) =
                loaded.and_then(Verdict::read)
            {
                rule.target = Some(chain);
            }
        }
        Some("match") if nested(data, xt_match::NAME).map(text).as_deref() == Some("comment") => {
            let comment = nested(data, xt_match::INFO).unwrap_or_default();
            let end = comment.iter().position(|b| *b == 0);
            rule.comment = text(&comment[..end.unwrap_or(comment.len())]);
        }
        _ => {}
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
