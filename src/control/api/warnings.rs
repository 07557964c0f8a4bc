//! `Warning` headers, limited in size like upstream's
//! (`staging/src/k8s.io/apiserver/pkg/endpoints/filters/warning.go`).

use std::collections::HashSet;

/// Number of characters of all warnings above which each is truncated.
const MAX_TOTAL_CHARS: usize = 4 * 1024;
/// Number of characters of each warning after truncation.
const MAX_TRUNCATED_CHARS: usize = 256;

/// The header values. Duplicates and texts with control characters are omitted.
#[must_use]
pub fn headers(texts: &[String]) -> Vec<String> {
    let mut seen = HashSet::new();
    let texts: Vec<&str> = texts
        .iter()
        .map(String::as_str)
        .filter(|t| !t.is_empty() && !t.chars().any(char::is_control) && seen.insert(*t))
        .collect();
    let all: usize = texts.iter().map(|t| t.chars().count()).sum();
    let mut written = 0;
    let mut headers = vec![];
    for text in texts {
        if written >= MAX_TOTAL_CHARS {
            break;
        }
        let text: String = if all > MAX_TOTAL_CHARS {
            text.chars().take(MAX_TRUNCATED_CHARS).collect()
        } else {
            text.to_owned()
        };
        written += text.chars().count();
        let quoted = text.replace('\\', "\\\\").replace('"', "\\\"");
        headers.push(format!("299 - \"{quoted}\""));
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_limited_and_unique() {
        let of = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(|t| (*t).to_owned()).collect();
            headers(&texts)
        };
        assert_eq!(
            of(&["unknown field \"a\\b\"", "x", "x", "", "new\nline"]),
            ["299 - \"unknown field \\\"a\\\\b\\\"\"", "299 - \"x\""]
        );
        let many: Vec<String> = (0..3000).map(|i| format!("unknown field {i:04}")).collect();
        let sent = headers(&many);
        let size: usize = sent.iter().map(String::len).sum();
        assert!(
            (200..300).contains(&sent.len()) && size < 3 * MAX_TOTAL_CHARS,
            "{}",
            sent.len()
        );
        let long = "é".repeat(5000);
        assert_eq!(
            of(&[&long]),
            [format!("299 - \"{}\"", "é".repeat(MAX_TRUNCATED_CHARS))]
        );
        assert_eq!(
            of(&[&long[..2 * MAX_TOTAL_CHARS]]),
            [format!("299 - \"{}\"", "é".repeat(MAX_TOTAL_CHARS))]
        );
    }
}
