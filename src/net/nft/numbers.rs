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
    pub const HOOK: u16 = 4;
    pub const TYPE: u16 = 7;
}

/// `NFTA_HOOK_…`.
pub mod hook {
    pub const HOOKNUM: u16 = 1;
    pub const PRIORITY: u16 = 2;
}

/// `NFTA_RULE_…`.
pub mod rule {
    pub const TABLE: u16 = 1;
    pub const CHAIN: u16 = 2;
    pub const HANDLE: u16 = 3;
    pub const EXPRESSIONS: u16 = 4;
    pub const USERDATA: u16 = 7;
}

/// `NFTA_LIST_…`.
pub mod list {
    pub const ELEM: u16 = 1;
}

/// `NFTA_EXPR_…`.
pub mod expr {
    pub const NAME: u16 = 1;
    pub const DATA: u16 = 2;
}

/// `NFTA_DATA_…`.
pub mod data {
    pub const VALUE: u16 = 1;
    pub const VERDICT: u16 = 2;
}

/// `NFTA_VERDICT_…`.
pub mod verdict {
    pub const CODE: u16 = 1;
    pub const CHAIN: u16 = 2;
}

/// `NFTA_CMP_…`.
pub mod cmp {
    pub const SREG: u16 = 1;
    pub const OP: u16 = 2;
    pub const DATA: u16 = 3;
}

/// `NFTA_PAYLOAD_…`.
pub mod payload {
    pub const DREG: u16 = 1;
    pub const BASE: u16 = 2;
    pub const OFFSET: u16 = 3;
    pub const LEN: u16 = 4;
}

/// `NFTA_META_…`.
pub mod meta {
    pub const DREG: u16 = 1;
    pub const KEY: u16 = 2;
}

/// `NFTA_BITWISE_…`.
pub mod bitwise {
    pub const SREG: u16 = 1;
    pub const DREG: u16 = 2;
    pub const LEN: u16 = 3;
    pub const MASK: u16 = 4;
    pub const XOR: u16 = 5;
}

/// `NFTA_FIB_…`.
pub mod fib {
    pub const DREG: u16 = 1;
    pub const RESULT: u16 = 2;
    pub const FLAGS: u16 = 3;
}

/// `NFTA_IMMEDIATE_…`.
pub mod immediate {
    pub const DREG: u16 = 1;
    pub const DATA: u16 = 2;
}

/// `NFTA_NAT_…`.
pub mod nat {
    pub const TYPE: u16 = 1;
    pub const FAMILY: u16 = 2;
    pub const REG_ADDR_MIN: u16 = 3;
    pub const REG_PROTO_MIN: u16 = 5;
}

/// `NFTA_MATCH_…`: an xtables match.
pub mod xt_match {
    pub const NAME: u16 = 1;
    pub const REV: u16 = 2;
    pub const INFO: u16 = 3;
}

pub const REG_VERDICT: u32 = 0;
pub const REG_1: u32 = 1;
pub const REG_2: u32 = 2;

pub const CMP_EQ: u32 = 0;
pub const CMP_NEQ: u32 = 1;

pub const PAYLOAD_LL_HEADER: u32 = 0;
pub const PAYLOAD_NETWORK_HEADER: u32 = 1;
pub const PAYLOAD_TRANSPORT_HEADER: u32 = 2;

pub const META_IIFNAME: u32 = 6;
pub const META_OIFNAME: u32 = 7;
pub const META_NFPROTO: u32 = 15;
pub const META_L4PROTO: u32 = 16;

pub const FIB_RESULT_ADDRTYPE: u32 = 3;
/// `NFTA_FIB_F_DADDR`.
pub const FIB_DADDR: u32 = 1 << 1;

pub const NAT_DNAT: u32 = 1;

pub const NF_DROP: i32 = 0;
pub const NF_ACCEPT: i32 = 1;
pub const NFT_JUMP: i32 = -3;
pub const NFT_GOTO: i32 = -4;
pub const NFT_RETURN: i32 = -5;

/// `NFPROTO_IPV4` and `NFPROTO_IPV6`.
pub const IPV4: u8 = 2;
pub const IPV6: u8 = 10;

/// `NFNL_MSG_BATCH_BEGIN` and its attribute `NFNL_BATCH_GENID` (`linux/netfilter/nfnetlink.h`).
pub const BATCH_BEGIN: u16 = 0x10;
pub const BATCH_GENID: u16 = 1;
/// `NFNL_MSG_BATCH_END`.
pub const BATCH_END: u16 = 0x11;
/// `NFNL_SUBSYS_NFTABLES`.
pub const SUBSYSTEM: u8 = 10;
