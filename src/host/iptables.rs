//! The iptables chains that a kubelet creates for other programs (`makeIPTablesUtilChains`,
//! `pkg/kubelet/kubelet_network_linux.go`,
//! [KEP-3178](https://github.com/kubernetes/enhancements/tree/master/keps/sig-network/3178-iptables-cleanup)).
//!
//! `KUBE-IPTABLES-HINT` shows images with a bundled iptables (network plugins, kube-proxy) which of the kernel's
//! two interfaces the node uses. `KUBE-FIREWALL` drops packets to 127.0.0.0/8 from other machines. Where
//! kube-proxy enables `route_localnet`, such packets would otherwise reach services that listen on localhost only.

use super::tool::tool;
use super::{HostError, blocking};

const HINT: &str = "KUBE-IPTABLES-HINT";
const FIREWALL: &str = "KUBE-FIREWALL";
/// Identical to kube-proxy's rule, so that only one of the two programs adds it.
const MARTIANS: &str = "--dst 127.0.0.0/8 ! --src 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP";
const COMMENT: &str = "block incoming localnet connections";

/// The iptables command of an address family.
struct Family(&'static str);

impl Family {
    fn run(&self, table: &str, arguments: &[&str]) -> Result<(i32, String), HostError> {
        let common = ["-w", "5", "-t", table];
        tool(self.0, &[&common[..], arguments].concat())
    }

    /// Whether a chain or rule exists.
    fn has(&self, table: &str, arguments: &[&str]) -> Result<bool, HostError> {
        // Exit code 1 means that it does not exist; 2 to 4 are errors.
        match self.run(table, arguments)? {
            (0, _) => Ok(true),
            (1, _) => Ok(false),
            (code, output) => Err(format!("{} exited with {code}: {output}", self.0).into()),
        }
    }

    fn change(&self, table: &str, arguments: &[&str]) -> Result<(), HostError> {
        match self.run(table, arguments)? {
            (0, _) => Ok(()),
            (code, output) => Err(format!(
                "{} -t {table} {} exited with {code}: {output}",
                self.0,
                arguments.join(" ")
            )
            .into()),
        }
    }

    /// Creates a chain if it is missing. Returns whether it was missing.
    fn chain(&self, table: &str, chain: &str) -> Result<bool, HostError> {
        let missing = !self.has(table, &["-S", chain])?;
        if missing {
            self.change(table, &["-N", chain])?;
        }
        Ok(missing)
    }

    /// Adds a rule to a chain of the filter table if it is missing, with `-I` at the beginning or with `-A` at the end.
    fn rule(&self, place: &str, chain: &str, rule: &[&str]) -> Result<bool, HostError> {
        let missing = !self.has("filter", &[&["-C", chain], rule].concat())?;
        if missing {
            self.change("filter", &[&[place, chain], rule].concat())?;
        }
        Ok(missing)
    }

    fn ensure(&self) -> Result<bool, HostError> {
        let mut made = self.chain("mangle", HINT)?;
        // IPv6 has no loopback network.
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

/// Creates missing chains and rules for both families. Returns whether any was missing.
///
/// # Errors
///
/// An iptables command failed. Both families are always attempted.
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

    /// Runs `work` in a separate network namespace, which is removed when the thread exits.
    fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> T {
        let run = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
            work()
        };
        std::thread::scope(|scope| scope.spawn(run).join().expect("it ends"))
    }

    #[test]
    fn chains_are_created_once_and_restored_after_a_flush() {
        apart(|| {
            let family = Family("iptables");
            let rules = || family.run("filter", &["-S"]).expect("rules").1;
            assert_eq!(family.ensure(), Ok(true));
            assert_eq!(family.ensure(), Ok(false), "all chains and rules exist");
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
    fn missing_iptables_is_reported_with_the_remedy() {
        let missing = Family("no-such-iptables").ensure();
        assert!(missing.is_err_and(|e| e.message.contains("install")));
    }
}
