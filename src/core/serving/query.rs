//! Query strings of URLs. Pure.

/// Decodes `%41` and `+`; malformed encodings stay as they are.
#[must_use]
pub fn decode(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let bytes = text.as_bytes();
    let mut i = 0;
    while i < bytes.len() {
        let hex = || {
            text.get(i..)
                .and_then(|encoded| encoded.get(1..3))
                .and_then(|h| u8::from_str_radix(h, 16).ok())
        };
        match bytes[i] {
            b'+' => out.push(b' '),
            b'%' if hex().is_some() => {
                out.extend(hex());
                i = i.saturating_add(2);
            }
            byte => out.push(byte),
        }
        i = i.saturating_add(1);
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Percent-encodes all bytes that are not plain.
fn encode_unless(text: &str, plain: impl Fn(u8) -> bool) -> String {
    text.bytes()
        .map(|b| {
            if plain(b) {
                char::from(b).to_string()
            } else {
                format!("%{b:02X}")
            }
        })
        .collect()
}

/// Encodes a text for use in a query string.
#[must_use]
pub fn encode(text: &str) -> String {
    encode_unless(text, |b| b.is_ascii_alphanumeric() || b"-_.~".contains(&b))
}

/// Encodes characters that a URL must not contain; existing encodings stay.
#[must_use]
pub fn encode_url(text: &str) -> String {
    encode_unless(text, |b| {
        b.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&b)
    })
}

/// The decoded key-value pairs of a query, in order.
#[must_use]
pub fn pairs(text: &str) -> Vec<(String, String)> {
    let pair = |pair: &str| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(key), decode(value))
    };
    text.split('&')
        .filter(|p| !p.is_empty())
        .map(pair)
        .collect()
}

/// The first pair of each key.
#[must_use]
pub fn firsts(text: &str) -> Vec<(String, String)> {
    let mut seen = std::collections::BTreeSet::new();
    let mut pairs = pairs(text);
    pairs.retain(|(key, _)| seen.insert(key.clone()));
    pairs
}

/// Parses a boolean as Go does; a key without value is true.
#[must_use]
pub fn is_true(value: &str) -> bool {
    matches!(value, "1" | "t" | "T" | "true" | "TRUE" | "True" | "")
}

/// Parses a boolean of `PodLogOptions`: everything except `false` and `0` is true.
#[must_use]
pub(crate) fn is_not_false(value: &str) -> bool {
    !(value == "0" || value.eq_ignore_ascii_case("false"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded_and_encoded() {
        let found = pairs("command=sh&command=-c&x=a%3Db%2Cc+d&flag&bad=%zz%");
        let expected = [
            ("command", "sh"),
            ("command", "-c"),
            ("x", "a=b,c d"),
            ("flag", ""),
            ("bad", "%zz%"),
        ];
        assert_eq!(found, expected.map(|(k, v)| (k.to_owned(), v.to_owned())));
        let hard = "a&b=c d/ü%";
        assert_eq!(decode(&encode(hard)), hard);
        assert_eq!(
            encode_url("/a b/%20?c=<d>&e=[f]#g"),
            "/a%20b/%20?c=%3Cd%3E&e=[f]#g"
        );
        assert!(is_not_false("") && is_not_false("no") && !is_not_false("False"));
        assert!(is_true("1") && is_true("") && !is_true("0") && !is_true("yes"));
    }
}
