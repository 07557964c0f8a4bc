//! The constants of `linux/netfilter/nf_tables.h`, without their prefixes.
//! Attributes (`NFTA_…`) have a module for each object or expression.

/// `NFTA_TABLE_…`.
pub mod table {
    pub const NAME: u16 = 1;
}

/// `NFTA_CHAIN_…`.
pub mod chain {
    pub const TABLE: u16 = 1;
    pub const NAME: u16 = 3;
    pub(crate) const HOOK: u16 = 4;
    pub const TYPE: u16 = 7;
}

/// `NFTA_HOOK_…`.
pub mod hook {
    pub(crate) const HOOKNUM: u16 = 1;
    pub const PRIORITY: u16 = 2;
}

/// `NFTA_RULE_…`.
pub mod rule {
    pub const TABLE: u16 = 1;
    pub const CHAIN: u16 = 2;
    pub(crate) const HANDLE: u16 = 3;
    pub(crate) const EXPRESSIONS: u16 = 4;
    pub(crate) const COMPAT: u16 = 5;
    pub(crate) const USERDATA: u16 = 7;
}
/// `NFTA_RULE_COMPAT_…`.
pub(crate) mod rule_compat {
    pub(crate) const PROTO: u16 = 1;
    pub(crate) const FLAGS: u16 = 2;
}

/// `NFTA_SET_…`.
pub mod set {
    pub const TABLE: u16 = 1;
    pub const NAME: u16 = 2;
    pub const FLAGS: u16 = 3;
    pub(crate) const KEY_TYPE: u16 = 4;
    pub(crate) const KEY_LEN: u16 = 5;
    pub(crate) const DATA_TYPE: u16 = 6;
    pub(crate) const DATA_LEN: u16 = 7;
    pub(crate) const DESC: u16 = 9;
    pub const ID: u16 = 10;
    pub const TIMEOUT: u16 = 11;
    pub(crate) const USERDATA: u16 = 13;
}

/// `NFTA_SET_DESC_…`.
pub(crate) mod set_desc {
    pub(crate) const SIZE: u16 = 1;
    pub(crate) const CONCAT: u16 = 2;
}

/// `NFTA_SET_FIELD_…`.
pub(crate) mod set_field {
    pub(crate) const LEN: u16 = 1;
}

/// `NFT_SET_…`: the flags of a set.
pub(crate) mod set_flag {
    pub(crate) const ANONYMOUS: u32 = 0x1;
    pub(crate) const CONSTANT: u32 = 0x2;
    pub const INTERVAL: u32 = 0x4;
    pub(crate) const MAP: u32 = 0x8;
    pub const TIMEOUT: u32 = 0x10;
    pub(crate) const EVAL: u32 = 0x20;
    pub(crate) const CONCAT: u32 = 0x80;
}

/// The kinds of a set's user data (`enum nftnl_udata_set_types` of libnftnl), which only `nft` reads.
pub(crate) mod set_udata {
    pub(crate) const KEY_BYTEORDER: u8 = 0;
    pub(crate) const DATA_BYTEORDER: u8 = 1;
    pub const COMMENT: u8 = 7;
}

/// `NFTA_SET_ELEM_…`.
pub(crate) mod elem {
    pub const KEY: u16 = 1;
    pub const DATA: u16 = 2;
    pub const FLAGS: u16 = 3;
    pub const TIMEOUT: u16 = 4;
    pub(crate) const EXPIRATION: u16 = 5;
    pub(crate) const KEY_END: u16 = 10;
    /// `NFT_SET_ELEM_INTERVAL_END`.
    pub(crate) const INTERVAL_END: u32 = 0x1;
}

/// `NFTA_SET_ELEM_LIST_…`.
pub(crate) mod elem_list {
    pub const TABLE: u16 = 1;
    pub(crate) const SET: u16 = 2;
    pub(crate) const ELEMENTS: u16 = 3;
    pub(crate) const SET_ID: u16 = 4;
}

/// `NFTA_LIST_…`.
pub mod list {
    pub(crate) const ELEM: u16 = 1;
}

/// `NFTA_EXPR_…`.
pub mod expr {
    pub const NAME: u16 = 1;
    pub const DATA: u16 = 2;
}

/// `NFTA_DATA_…`.
pub mod data {
    pub const VALUE: u16 = 1;
    pub(crate) const VERDICT: u16 = 2;
}

/// `NFTA_VERDICT_…`.
pub mod verdict {
    pub const CODE: u16 = 1;
    pub const CHAIN: u16 = 2;
}

/// `NFTA_CMP_…`.
pub mod cmp {
    pub(crate) const SREG: u16 = 1;
    pub(crate) const OP: u16 = 2;
    pub const DATA: u16 = 3;
}

/// `NFTA_PAYLOAD_…`.
pub mod payload {
    pub(crate) const DREG: u16 = 1;
    pub(crate) const BASE: u16 = 2;
    pub(crate) const OFFSET: u16 = 3;
    pub(crate) const LEN: u16 = 4;
}

/// `NFTA_META_…`.
pub mod meta {
    pub(crate) const DREG: u16 = 1;
    pub const KEY: u16 = 2;
    pub(crate) const SREG: u16 = 3;
}

/// `NFTA_CT_…`.
pub mod ct {
    pub(crate) const DREG: u16 = 1;
    pub const KEY: u16 = 2;
    pub(crate) const DIRECTION: u16 = 3;
    pub(crate) const SREG: u16 = 4;
}

/// `NFTA_BITWISE_…`.
pub(crate) mod bitwise {
    pub(crate) const SREG: u16 = 1;
    pub(crate) const DREG: u16 = 2;
    pub(crate) const LEN: u16 = 3;
    pub(crate) const MASK: u16 = 4;
    pub(crate) const XOR: u16 = 5;
}

/// `NFTA_FIB_…`.
pub mod fib {
    pub(crate) const DREG: u16 = 1;
    pub(crate) const RESULT: u16 = 2;
    pub const FLAGS: u16 = 3;
}

/// `NFTA_NG_…`.
pub mod numgen {
    pub(crate) const DREG: u16 = 1;
    pub(crate) const MODULUS: u16 = 2;
    pub const TYPE: u16 = 3;
    pub(crate) const OFFSET: u16 = 4;
}

/// `NFTA_LOOKUP_…`.
pub mod lookup {
    pub(crate) const SET: u16 = 1;
    pub(crate) const SREG: u16 = 2;
    pub(crate) const DREG: u16 = 3;
    pub(crate) const SET_ID: u16 = 4;
    pub const FLAGS: u16 = 5;
    /// `NFT_LOOKUP_F_INV`.
    pub(crate) const INVERTED: u32 = 1;
}

/// `NFTA_DYNSET_…`.
pub(crate) mod dynset {
    pub(crate) const SET_NAME: u16 = 1;
    pub(crate) const OP: u16 = 3;
    pub(crate) const SREG_KEY: u16 = 4;
    pub(crate) const SREG_DATA: u16 = 5;
    pub const TIMEOUT: u16 = 6;
}

/// `NFTA_REJECT_…`.
pub mod reject {
    pub const TYPE: u16 = 1;
    pub(crate) const ICMP_CODE: u16 = 2;
}

/// `NFTA_IMMEDIATE_…`.
pub mod immediate {
    pub(crate) const DREG: u16 = 1;
    pub const DATA: u16 = 2;
}

/// `NFTA_NAT_…`.
pub mod nat {
    pub const TYPE: u16 = 1;
    pub(crate) const FAMILY: u16 = 2;
    pub(crate) const REG_ADDR_MIN: u16 = 3;
    pub(crate) const REG_PROTO_MIN: u16 = 5;
}

/// `NFTA_MASQ_…`.
pub(crate) mod masq {
    pub const FLAGS: u16 = 1;
}

/// `NFTA_MATCH_…`: an xtables match.
pub(crate) mod xt_match {
    pub const NAME: u16 = 1;
    pub(crate) const REV: u16 = 2;
    pub const INFO: u16 = 3;
}

pub(crate) const REG_VERDICT: u32 = 0;
/// `NFT_REG32_00`, the first of 16 registers of 4 bytes.
pub(crate) const REG32_00: u32 = 8;

pub(crate) const CMP_EQ: u32 = 0;
pub(crate) const CMP_NEQ: u32 = 1;

pub(crate) const PAYLOAD_LL_HEADER: u32 = 0;
pub(crate) const PAYLOAD_NETWORK_HEADER: u32 = 1;
pub(crate) const PAYLOAD_TRANSPORT_HEADER: u32 = 2;

pub(crate) const META_MARK: u32 = 3;
pub(crate) const META_IIFNAME: u32 = 6;
pub(crate) const META_OIFNAME: u32 = 7;
pub(crate) const META_NFPROTO: u32 = 15;
pub(crate) const META_L4PROTO: u32 = 16;

pub(crate) const CT_STATE: u32 = 0;
pub(crate) const CT_DIRECTION: u32 = 1;
pub(crate) const CT_STATUS: u32 = 2;
pub(crate) const CT_MARK: u32 = 3;
pub(crate) const CT_PROTO_DST: u32 = 12;
pub(crate) const CT_DST_IP: u32 = 20;
pub(crate) const CT_DST_IP6: u32 = 22;

pub(crate) const FIB_RESULT_ADDRTYPE: u32 = 3;
/// `NFTA_FIB_F_SADDR`.
pub(crate) const FIB_SADDR: u32 = 1;
/// `NFTA_FIB_F_DADDR`.
pub(crate) const FIB_DADDR: u32 = 1 << 1;

pub(crate) const NG_INCREMENTAL: u32 = 0;
pub(crate) const NG_RANDOM: u32 = 1;

pub(crate) const REJECT_ICMP_UNREACH: u32 = 0;
pub(crate) const REJECT_TCP_RST: u32 = 1;
pub(crate) const REJECT_ICMPX_UNREACH: u32 = 2;

pub(crate) const NAT_DNAT: u32 = 1;
/// `NF_NAT_RANGE_PROTO_RANDOM_FULLY`.
pub(crate) const NAT_FULLY_RANDOM: u32 = 1 << 4;

/// `NFT_DATA_VERDICT`: the type of a verdict map's data.
pub(crate) const DATA_VERDICT: u32 = 0xffff_ff00;

pub(crate) const NF_DROP: i32 = 0;
pub(crate) const NF_ACCEPT: i32 = 1;
pub(crate) const NFT_JUMP: i32 = -3;
pub(crate) const NFT_GOTO: i32 = -4;
pub(crate) const NFT_RETURN: i32 = -5;

/// `NFPROTO_IPV4` and `NFPROTO_IPV6`.
pub(crate) const IPV4: u8 = 2;
pub(crate) const IPV6: u8 = 10;

/// `NFNL_MSG_BATCH_BEGIN` and its attribute `NFNL_BATCH_GENID` (`linux/netfilter/nfnetlink.h`).
pub(crate) const BATCH_BEGIN: u16 = 0x10;
pub(crate) const BATCH_GENID: u16 = 1;
/// `NFNL_MSG_BATCH_END`.
pub(crate) const BATCH_END: u16 = 0x11;
/// `NFNL_SUBSYS_NFTABLES`.
pub const SUBSYSTEM: u8 = 10;

/// `NFT_MSG_…` with the subsystem.
pub mod message {
    const SUBSYSTEM: u16 = (super::SUBSYSTEM as u16) << 8;
    pub(crate) const NEW_TABLE: u16 = SUBSYSTEM;
    pub(crate) const GET_TABLE: u16 = SUBSYSTEM | 1;
    pub(crate) const DEL_TABLE: u16 = SUBSYSTEM | 2;
    pub(crate) const NEW_CHAIN: u16 = SUBSYSTEM | 3;
    pub(crate) const GET_CHAIN: u16 = SUBSYSTEM | 4;
    pub(crate) const DEL_CHAIN: u16 = SUBSYSTEM | 5;
    pub(crate) const NEW_RULE: u16 = SUBSYSTEM | 6;
    pub(crate) const GET_RULE: u16 = SUBSYSTEM | 7;
    pub(crate) const DEL_RULE: u16 = SUBSYSTEM | 8;
    pub(crate) const NEW_SET: u16 = SUBSYSTEM | 9;
    pub(crate) const GET_SET: u16 = SUBSYSTEM | 10;
    pub(crate) const DEL_SET: u16 = SUBSYSTEM | 11;
    pub(crate) const NEW_ELEMENT: u16 = SUBSYSTEM | 12;
    pub(crate) const GET_ELEMENT: u16 = SUBSYSTEM | 13;
    pub(crate) const DEL_ELEMENT: u16 = SUBSYSTEM | 14;
    pub(crate) const GET_GENERATION: u16 = SUBSYSTEM | 16;
}
