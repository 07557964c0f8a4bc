//! Parser of environment files, which `fileKeyRef` reads (KEP-3721): `KEY='value'` lines. Pure.

use crate::fault::Fault;

/// The value of `key` in a file. `None` if the file has no such key, or if its value is empty. The error describes the
/// syntax error in the file.
pub fn lookup(text: &str, key: &str) -> Result<Option<String>, Fault> {
    let mut rest = text;
    let mut number = 1_usize;
    while !rest.is_empty() {
        let (line, after) = rest.split_once('\n').unwrap_or((rest, ""));
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with('#') {
            rest = after;
            number = number.saturating_add(1);
            continue;
        }
        let wrong =
            |why: &str| Fault::later(format!("couldn't parse env file: line {number}: {why}"));
        let (name, value) = rest
            .split_once('=')
            .filter(|(name, _)| !name.contains('\n'))
            .ok_or_else(|| wrong("missing '='"))?;
        let name = name.trim_start();
        if name.is_empty() || name.ends_with(char::is_whitespace) {
            return Err(wrong("expected a name and no space before '='"));
        }
        let (value, after) = if let Some(quoted) = value.strip_prefix('\'') {
            let (value, after) = quoted
                .split_once('\'')
                .ok_or_else(|| wrong("the closing quote is missing"))?;
            let (end, next) = after.split_once('\n').unwrap_or((after, ""));
            let end = end.trim();
            if !end.is_empty() && !end.starts_with('#') {
                return Err(wrong("only a comment may follow the closing quote"));
            }
            (value, next)
        } else {
            let (bare, next) = value.split_once('\n').unwrap_or((value, ""));
            // A value that begins with white space is empty. Any other unquoted value is an error.
            if !bare.is_empty() && !bare.starts_with(char::is_whitespace) {
                return Err(wrong("the value must be in single quotes"));
            }
            ("", next)
        };
        if name == key {
            return Ok(Some(value.to_owned()).filter(|v| !v.is_empty()));
        }
        number = value.split('\n').count().saturating_add(number);
        rest = after;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn env_file_values_must_be_quoted_and_the_first_wins() {
        let text = "# a comment\n\nA='1' # one\nB='two\nlines'\nA='again'\nC= x\n  D='indented'\n";
        for (key, expected) in [
            ("A", Some("1")),
            ("B", Some("two\nlines")),
            ("C", None),
            ("D", Some("indented")),
            ("E", None),
        ] {
            assert_eq!(lookup(text, key), Ok(expected.map(str::to_owned)), "{key}");
        }
        for (wrong, expected) in [
            ("A=1\n", "single quotes"),
            ("A ='1'\n", "no space"),
            ("A='1\n", "closing quote"),
            ("A='1' x\n", "comment"),
            ("A\n", "line 1: missing '='"),
        ] {
            assert!(
                lookup(wrong, "B").is_err_and(|e| e.message.contains(expected)),
                "{wrong}"
            );
        }
    }
}
