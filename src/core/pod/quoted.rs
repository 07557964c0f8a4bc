//! Quotes text as Go's `strconv.Quote` does. Programs that read a pod's labels and annotations from a file or a
//! variable expect this format. Pure.

/// Returns the quoted text.
pub(crate) fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{b}' => out.push_str("\\v"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            ' '..='~' => out.push(c),
            _ if c.is_ascii() => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            _ if is_printable(c) => out.push(c),
            '\0'..='\u{ffff}' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            _ => out.push_str(&format!("\\U{:08x}", u32::from(c))),
        }
    }
    out.push('"');
    out
}

/// Whether a non-ASCII character is printed unescaped: letters, marks, numbers, punctuation and symbols are.
fn is_printable(c: char) -> bool {
    // `escape_debug` uses the same character classes. It escapes a combining mark only at the beginning of a text.
    let behind: String = ['a', c].into_iter().collect();
    behind.escape_debug().eq(behind.chars())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unprintable_characters_are_escaped_as_in_go() {
        for (text, expected) in [
            ("", r#""""#),
            ("it's plain", r#""it's plain""#),
            (r#"a"b\c"#, r#""a\"b\\c""#),
            ("\u{7}\u{8}\u{c}\n\r\t\u{b}", r#""\a\b\f\n\r\t\v""#),
            ("\0\u{1b}\u{7f}", r#""\x00\x1b\x7f""#),
            (
                "\u{80}\u{a0}\u{200b}\u{feff}",
                r#""\u0080\u00a0\u200b\ufeff""#,
            ),
            ("\u{e0001}", r#""\U000e0001""#),
            ("äß€語😀", r#""äß€語😀""#),
            ("e\u{301}", "\"e\u{301}\""),
        ] {
            assert_eq!(quoted(text), expected, "{text:?}");
        }
    }
}
