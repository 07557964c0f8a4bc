//! Netlink: messages and their attributes, and a socket for both families (rtnetlink and nfnetlink).

mod message;
mod options;
mod socket;

pub use message::{Attributes, Message, TooLong, attributes, nested, text};
pub use socket::{Answer, BatchError, Rejection, Socket};

/// `NLM_F_REQUEST`: the message is for the kernel.
pub const REQUEST: u16 = 0x1;
/// `NLM_F_ACK`: the kernel also answers if it succeeds.
pub const ACK: u16 = 0x4;
/// `NLM_F_DUMP`: the kernel answers with all objects.
pub(crate) const DUMP: u16 = 0x300;
/// `NLM_F_EXCL`: an existing object is an error.
pub(crate) const EXCL: u16 = 0x200;
/// `NLM_F_CREATE`: the kernel creates a missing object.
pub const CREATE: u16 = 0x400;
/// `NLM_F_APPEND`: the object becomes the last one of its list.
pub(crate) const APPEND: u16 = 0x800;
/// `NLA_F_NESTED`: the attribute contains attributes.
pub const NESTED: u16 = 0x8000;
