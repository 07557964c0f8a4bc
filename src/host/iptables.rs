//! The chains that a kubelet makes with iptables for others (`makeIPTablesUtilChains`,
//! [KEP-3178](https://github.com/kubernetes/enhancements/tree/master/keps/sig-network/3178-iptables-cleanup)).
//!
//! `KUBE-IPTABLES-HINT` tells images that bring an iptables of their own (network plugins, kube-proxy) which of the
//! kernel's two interfaces the node uses. `KUBE-FIREWALL` drops packets for 127.0.0.0/8 that come from elsewhere: where
//! kube-proxy lets local addresses be routed, they would reach what listens on localhost only.

use super::tool::tool;
use super::{HostError, blocking};

const HINT: &str = "KUBE-IPTABLES-HINT";
const FIREWALL: &str = "KUBE-FIREWALL";
/// As kube-proxy writes it too: whoever comes second finds the rule there.
const MARTIANS: &str = "--dst 127.0.0.0/8 ! --src 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP";
const COMMENT: &str = "block incoming localnet connections";

/// One family's iptables.
struct Family(&'static str);

impl Family {
    fn run(&self, table: &str, arguments: &[&str]) -> Result<(i32, String), HostError> {
        let common = ["-w", "5", "-t", table];
        tool(self.0, &[&common[..], arguments].concat())
    }

    /// Whether what is asked about is there.
    fn has(&self, table: &str, arguments: &[&str]) -> Result<bool, HostError> {
        // 1: it is not there; 2 to 4: it cannot be said.
        match self.run(table, arguments)? {
            (0, _) => Ok(true),
            (1, _) => Ok(false),
            (code, said) => Err(format!("{} ended with {code}: {said}", self.0).into()),
        }
    }

    fn change(&self, table: &str, arguments: &[&str]) -> Result<(), HostError> {
        match self.run(table, arguments)? {
            (0, _) => Ok(()),
            (code, said) => Err(format!(
                "{} -t {table} {} ended with {code}: {said}",
                self.0,
                arguments.join(" ")
            )
            .into()),
        }
    }

    /// Makes a chain that is not there; true if it was made.
    fn chain(&self, table: &str, chain: &str) -> Result<bool, HostError> {
        let missing = !self.has(table, &["-S", chain])?;
        if missing {
            self.change(table, &["-N", chain])?;
        }
        Ok(missing)
    }

    /// Puts a rule into a chain of the filter table, with `-I` first or with `-A` last, unless it is there.
    fn rule(&self, place: &str, chain: &str, rule: &[&str]) -> Result<bool, HostError> {
        let missing = !self.has("filter", &[&["-C", chain], rule].concat())?;
        if missing {
            self.change("filter", &[&[place, chain], rule].concat())?;
        }
        Ok(missing)
    }

    fn ensure(&self) -> Result<bool, HostError> {
        let mut made = self.chain("mangle", HINT)?;
        // There is no network of local addresses in IPv6.
        if self.0 == "iptables" {
            made |= self.chain("filter", FIREWALL)?;
            let comment = ["-m", "comment", "--comment", COMMENT].into_iter();
            let martians: Vec<&str> = comment.chain(MARTIANS.split(' ')).collect();
            made |= self.rule("-A", FIREWALL, &martians)?;
            for chain in ["OUTPUT", "INPUT"] {
                made |= self.rule("-I", chain, &["-j", FIREWALL])?;
            }
        }
        Ok(made)
    }
}

/// Makes what is missing, for both families. True if anything was.
///
/// # Errors
/// What cannot be made, and why; the other family is seen to nevertheless.
pub async fn ensure() -> Result<bool, HostError> {
    blocking(|| {
        let families = [Family("iptables"), Family("ip6tables")];
        let results = families.map(|family| family.ensure());
        results
            .into_iter()
            .try_fold(false, |made, one| Ok(made | one?))
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sched::{CloneFlags, unshare};

    /// In a network of its own, which ends with the thread.
    fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> T {
        let run = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
            work()
        };
        std::thread::scope(|scope| scope.spawn(run).join().expect("it ends"))
    }

    #[test]
    fn chains_are_made_once_and_again_after_a_flush() {
        apart(|| {
            let family = Family("iptables");
            let rules = || family.run("filter", &["-S"]).expect("rules").1;
            assert_eq!(family.ensure(), Ok(true));
            assert_eq!(family.ensure(), Ok(false), "all is there");
            let made = rules();
            for part in [
                "-A INPUT -j KUBE-FIREWALL",
                "-A OUTPUT -j KUBE-FIREWALL",
                COMMENT,
                "-j DROP",
            ] {
                assert_eq!(made.matches(part).count(), 1, "{part}: {made}");
            }
            family.change("filter", &["-F", "INPUT"]).expect("flushed");
            assert_eq!(family.ensure(), Ok(true));
            assert_eq!(rules(), made);
            let sixth = Family("ip6tables");
            assert_eq!((sixth.ensure(), sixth.ensure()), (Ok(true), Ok(false)));
            assert_eq!(sixth.has("filter", &["-S", FIREWALL]), Ok(false));
        });
    }

    #[test]
    fn a_machine_without_iptables_says_so() {
        let missing = Family("no-such-iptables").ensure();
        assert!(missing.is_err_and(|e| e.message.contains("install")));
    }
}
