//! Comparison of error messages without their varying parts. Pure.

/// Masks identifiers, durations, times and ports in an error message, because they differ for every failure of the same
/// operation.
#[must_use]
pub fn masked(text: &str) -> String {
    let is_separator = |c: char| !(c.is_alphanumeric() || matches!(c, '-' | '.' | ':' | '_'));
    let mut masked = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(is_separator).unwrap_or(rest.len());
        let (word, tail) = rest.split_at(end);
        mask_word(word, &mut masked);
        let separator = tail.chars().next();
        masked.extend(separator);
        rest = &tail[separator.map_or(0, char::len_utf8)..];
    }
    masked
}

/// Whether two messages are equal after masking.
#[must_use]
pub fn is_same(a: &str, b: &str) -> bool {
    a == b || masked(a) == masked(b)
}

fn mask_word(word: &str, masked: &mut String) {
    if is_date(word) {
        masked.push('#');
        return;
    }
    let mut is_digest = false;
    for (index, part) in word.split(':').enumerate() {
        if index > 0 {
            masked.push(':');
        }
        // Digests are not masked: a different image digest is a different error.
        let varies = !is_digest && (is_duration(part) || is_identifier(part) || is_number(part));
        masked.push_str(if varies { "#" } else { part });
        is_digest = part.starts_with("sha");
    }
}

/// `2026-11-28T03:51:20Z`, or only the date.
fn is_date(word: &str) -> bool {
    let digits = |range| {
        word.get(range)
            .is_some_and(|part: &str| part.bytes().all(|b| b.is_ascii_digit()))
    };
    let bytes = word.as_bytes();
    bytes.len() >= 10
        && digits(0..4)
        && digits(5..7)
        && digits(8..10)
        && bytes[4] == b'-'
        && bytes[7] == b'-'
}

/// `37s`, `1m30.5s`, `250ms`.
fn is_duration(part: &str) -> bool {
    let part = part.trim_end_matches('.');
    let mut rest = part;
    while !rest.is_empty() {
        let unit = rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        let number = rest.len().saturating_sub(unit.len());
        let units = ["ns", "µs", "us", "ms", "s", "m", "h"];
        let after = units.iter().find_map(|name| unit.strip_prefix(name));
        // `ms` must be tried before `m`.
        match after {
            Some(after) if number > 0 => rest = after,
            _ => return false,
        }
    }
    !part.is_empty()
}

/// A hexadecimal identifier of at least 8 digits, or a UUID.
fn is_identifier(part: &str) -> bool {
    let part = part.trim_end_matches('.');
    let is_hex = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_hexdigit());
    let has_digit = part.bytes().any(|b| b.is_ascii_digit());
    let groups: Vec<usize> = part.split('-').map(str::len).collect();
    let is_uuid = groups == [8, 4, 4, 4, 12] && part.split('-').all(is_hex);
    is_uuid || (has_digit && part.len() >= 8 && is_hex(part))
}

/// A port, process id or timestamp: a number of at least 5 digits.
fn is_number(part: &str) -> bool {
    let part = part.trim_end_matches(['.', '-']);
    part.len() >= 5 && part.bytes().all(|b| b.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_error_has_one_masked_text_and_different_errors_differ() {
        let id = "4f0c8b1d2e3a4f0c8b1d2e3a4f0c8b1d2e3a4f0c8b1d2e3a4f0c8b1d2e3a4f0c";
        let same = [
            (
                format!("failed to setup network for sandbox \"{id}\": plugin type=\"x\" failed"),
                format!(
                    "failed to setup network for sandbox \"{}\": plugin type=\"x\" failed",
                    id.replace('4', "7")
                ),
            ),
            (
                "the kernel has not answered for 37s".into(),
                "the kernel has not answered for 1m47s".into(),
            ),
            ("waited 1.5s, (250ms)".into(), "waited 2.25s, (10ms)".into()),
            (
                "read tcp 10.0.0.1:43210->10.0.0.2:443: reset".into(),
                "read tcp 10.0.0.1:51234->10.0.0.2:443: reset".into(),
            ),
            (
                "mount 123e4567-e89b-12d3-a456-426614174000 busy".into(),
                "mount 323e4567-e89b-12d3-a456-426614174abc busy".into(),
            ),
            (
                "expired at 2026-11-28T03:51:20Z".into(),
                "expired at 2026-11-29T00:00:01.5Z".into(),
            ),
        ];
        for (a, b) in &same {
            assert!(is_same(a, b), "{a} {b}");
        }
        let other = [
            ("configmap \"a\" not found", "configmap \"b\" not found"),
            ("image nginx:1.25 not found", "image nginx:1.26 not found"),
            ("back-off of container c1", "back-off of container c2"),
            ("no route to 10.0.0.1", "no route to 10.0.0.2"),
            ("exit code 1", "exit code 2"),
        ];
        for (a, b) in other {
            assert!(!is_same(a, b), "{a} {b}");
        }
        let digest = |of: &str| format!("image x@sha256:{} not found", of.repeat(64));
        assert!(!is_same(&digest("1"), &digest("2")));
        assert!(is_same("", "") && !is_same("", "x"));
    }

    proptest! {
        #[test]
        fn any_text_can_be_masked(text in "\\PC{0,80}") {
            let once = masked(&text);
            prop_assert!(is_same(&text, &text));
            prop_assert!(once.len() <= text.len().max(1));
        }
    }
}
