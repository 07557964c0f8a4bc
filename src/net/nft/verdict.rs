//! Verdicts: of rules, and of the elements of verdict maps.

use super::numbers::{
    NF_ACCEPT, NF_DROP, NFT_GOTO, NFT_JUMP, NFT_RETURN, data, verdict as attribute,
};
use crate::netlink::{Attributes, nested, text};

/// What happens to a packet.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verdict {
    /// Discards the packet.
    Drop,
    /// Ends the base chain; the packet passes.
    Accept,
    /// Returns to the calling chain.
    Return,
    /// Continues in another chain, and returns afterwards.
    Jump(String),
    /// Continues in another chain, and does not return.
    Goto(String),
}

impl Verdict {
    /// Continues in `chain`, and returns afterwards.
    #[must_use]
    pub fn jump(chain: &str) -> Verdict {
        Verdict::Jump(chain.to_owned())
    }

    /// Continues in `chain`, and does not return.
    #[must_use]
    pub fn goto(chain: &str) -> Verdict {
        Verdict::Goto(chain.to_owned())
    }

    /// The contents of `NFTA_…_DATA`.
    pub(super) fn data(&self) -> Attributes {
        let (code, chain) = match self {
            Verdict::Drop => (NF_DROP, None),
            Verdict::Accept => (NF_ACCEPT, None),
            Verdict::Return => (NFT_RETURN, None),
            Verdict::Jump(chain) => (NFT_JUMP, Some(chain)),
            Verdict::Goto(chain) => (NFT_GOTO, Some(chain)),
        };
        let mut verdict = Attributes::new().big(attribute::CODE, code.cast_unsigned());
        if let Some(chain) = chain {
            verdict = verdict.text(attribute::CHAIN, chain);
        }
        Attributes::new().nest(data::VERDICT, &verdict)
    }

    /// Reads the contents of `NFTA_…_DATA`; `None` if they are no known verdict.
    pub(super) fn read(bytes: &[u8]) -> Option<Verdict> {
        let verdict = nested(bytes, data::VERDICT)?;
        let code = nested(verdict, attribute::CODE)?.try_into().ok()?;
        let chain = || nested(verdict, attribute::CHAIN).map(text);
        match i32::from_be_bytes(code) {
            NF_DROP => Some(Verdict::Drop),
            NF_ACCEPT => Some(Verdict::Accept),
            NFT_RETURN => Some(Verdict::Return),
            NFT_JUMP => chain().map(Verdict::Jump),
            NFT_GOTO => chain().map(Verdict::Goto),
            _ => None,
        }
    }
}
