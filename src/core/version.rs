//! Versions: the implemented Kubernetes version, and the output of `--version`.

/// The minor release as Kubernetes writes it, `MAJOR.MINOR`.
macro_rules! release {
    () => {
        "1.36"
    };
}
/// The patch release, with its dot.
macro_rules! patch {
    () => {
        ".2"
    };
}

/// The major version, as `/version` and `kubernetes_build_info` report it.
pub const MAJOR: &str = "1";
/// The minor version.
pub const MINOR: &str = "36";
/// The Kubernetes version that the agent and the bundled API implement; `kubelet --version` prints it. kubeadm reads it
/// with the regular expression of `cmd/kubeadm/app/preflight/utils.go`.
pub const KUBERNETES: &str = concat!("v", release!(), patch!());
/// The version in a Node's `kubeletVersion` and in the API's `/version`. The build metadata names the implementation;
/// semantic versions ignore build metadata when they are compared.
pub const REPORTED: &str = concat!("v", release!(), patch!(), "+holdfast");
/// The User-Agent of probes (`pkg/probe/http/request.go`).
pub const PROBE_AGENT: &str = concat!("kube-probe/", release!());
/// The User-Agent of lifecycle hooks (`pkg/kubelet/lifecycle/handlers.go`).
pub(crate) const HOOK_AGENT: &str = concat!("kube-lifecycle/", release!());

/// An architecture as the compiler names it, in Go's spelling, which Kubernetes uses.
#[must_use]
pub fn arch(machine: &str) -> &str {
    match machine {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Output of the kubelet's `--version` (`staging/src/k8s.io/component-base/version/verflag`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// No output: the agent starts.
    Nothing,
    /// One line, which kubeadm parses.
    Line,
    /// All fields, as Go prints the structure with `%#v`.
    Raw,
}

impl std::str::FromStr for Wanted {
    type Err = String;

    /// Reads the flag's value: `raw`, or a boolean in the spellings of Go's `strconv.ParseBool`.
    fn from_str(text: &str) -> Result<Wanted, String> {
        match text {
            "raw" => Ok(Wanted::Raw),
            "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(Wanted::Line),
            "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(Wanted::Nothing),
            _ => Err("use true, false or raw; the reported version cannot be set".into()),
        }
    }
}

impl Wanted {
    /// The text for standard output; `None` if the agent starts. `commit` is the commit that the program was built
    /// from, and `machine` its architecture.
    #[must_use]
    pub fn text(self, commit: &str, machine: &str) -> Option<String> {
        match self {
            Wanted::Nothing => None,
            Wanted::Line => Some(format!("Kubernetes {KUBERNETES}")),
            Wanted::Raw => Some(format!(
                "version.Info{{Major:\"{MAJOR}\", Minor:\"{MINOR}\", EmulationMajor:\"\", EmulationMinor:\"\", \
                 MinCompatibilityMajor:\"\", MinCompatibilityMinor:\"\", GitVersion:\"{KUBERNETES}\", \
                 GitCommit:\"{commit}\", GitTreeState:\"\", BuildDate:\"1970-01-01T00:00:00Z\", GoVersion:\"none\", \
                 Compiler:\"rustc\", Platform:\"linux/{}\"}}",
                arch(machine)
            )),
        }
    }
}

/// The length of a shown commit, in hexadecimal digits.
const COMMIT_LENGTH: usize = 12;

/// The newest commit in a reflog (`.git/logs/HEAD`): the second word of its last line, shortened; zeros if there is
/// none.
///
/// Evaluated at compile time. The result is a copy, so that the program does not contain the reflog.
#[must_use]
#[expect(
    clippy::arithmetic_side_effects,
    reason = "evaluated at compile time, where an overflow fails the build"
)]
pub const fn newest_commit(reflog: &[u8]) -> [u8; COMMIT_LENGTH] {
    let none = [b'0'; COMMIT_LENGTH];
    let mut end = reflog.len();
    while end > 0 && reflog[end - 1] == b'\n' {
        end -= 1;
    }
    let mut begin = end;
    while begin > 0 && reflog[begin - 1] != b'\n' {
        begin -= 1;
    }
    while begin < end && reflog[begin] != b' ' {
        begin += 1;
    }
    begin += 1;
    if begin + COMMIT_LENGTH > end {
        return none;
    }
    let mut commit = none;
    let mut i = 0;
    while i < COMMIT_LENGTH {
        if !reflog[begin + i].is_ascii_hexdigit() {
            return none;
        }
        commit[i] = reflog[begin + i];
        i += 1;
    }
    commit
}

/// A commit for output: `unknown` if the program was built without git.
#[must_use]
pub fn shown_commit(commit: &[u8; COMMIT_LENGTH]) -> &str {
    match std::str::from_utf8(commit) {
        Ok(text) if text.bytes().any(|digit| digit != b'0') => text,
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_version_strings_agree() {
        assert_eq!(format!("{MAJOR}.{MINOR}"), release!());
        assert!(KUBERNETES.starts_with(&format!("v{MAJOR}.{MINOR}.")));
        assert_eq!(REPORTED.split('+').next(), Some(KUBERNETES));
    }

    #[test]
    fn the_version_flag_accepts_upstreams_values() {
        for (text, expected) in [
            ("true", Some(Wanted::Line)),
            ("T", Some(Wanted::Line)),
            ("1", Some(Wanted::Line)),
            ("false", Some(Wanted::Nothing)),
            ("raw", Some(Wanted::Raw)),
            ("Raw", None),
            ("", None),
            ("v1.36.2-fips", None),
        ] {
            assert_eq!(text.parse().ok(), expected, "{text}");
        }
        let raw = Wanted::Raw.text("abc", "x86_64").expect("a text");
        assert!(raw.starts_with("version.Info{Major:\"1\", Minor:\"36\", EmulationMajor:\"\", "));
        assert!(raw.ends_with("Platform:\"linux/amd64\"}"), "{raw}");
        assert!(
            raw.contains("GitVersion:\"v1.36.2\", GitCommit:\"abc\", "),
            "{raw}"
        );
        assert_eq!(Wanted::Nothing.text("abc", "x86_64"), None);
    }

    #[test]
    fn the_newest_commit_is_on_the_last_line_of_a_reflog() {
        let (one, two) = ("1".repeat(40), "2f".repeat(20));
        let entry = |old: &str, new: &str| format!("{old} {new} A <a@b> 1 +0000\tcommit: x y\n");
        let both = entry(&"0".repeat(40), &one) + &entry(&one, &two);
        for (reflog, expected) in [
            (both.as_str(), "2f2f2f2f2f2f"),
            (both.trim_end(), "2f2f2f2f2f2f"),
            (&entry(&two, &one), "111111111111"),
            ("", "unknown"),
            ("\n", "unknown"),
            ("word", "unknown"),
            ("word short", "unknown"),
            ("some text that is no reflog", "unknown"),
        ] {
            let commit = newest_commit(reflog.as_bytes());
            assert_eq!(shown_commit(&commit), expected, "{reflog:?}");
        }
    }
}
