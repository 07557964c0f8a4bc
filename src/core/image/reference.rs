//! Image references as defined by `distribution/reference`. Pure.
//!
//! The parser of the library is a regular expression whose compilation takes 20 MiB of memory and 100 ms. The agent
//! must be small, so this module parses by hand; tests compare it with the library.

use std::borrow::Cow;

/// Default registry.
const DEFAULT_REGISTRY: &str = "docker.io";
/// Former name of the default registry.
const LEGACY_REGISTRY: &str = "index.docker.io";
/// Maximum length of a repository in bytes.
const REPOSITORY_LIMIT: usize = 255;
/// Maximum length of a tag in bytes.
const TAG_LIMIT: usize = 128;
const INVALID: &str = "invalid reference format";

/// A parsed image reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference<'a> {
    /// Host and port; `docker.io` if the name has none.
    pub registry: &'a str,
    /// Path in the registry; single names on `docker.io` get the prefix `library/`.
    pub repository: Cow<'a, str>,
    /// The tag, if any.
    pub tag: Option<&'a str>,
    /// The digest, if any.
    pub digest: Option<&'a str>,
}

impl<'a> Reference<'a> {
    /// Parses an image name. The errors are those of `distribution/reference`.
    pub fn parse(text: &'a str) -> Result<Reference<'a>, &'static str> {
        if text.is_empty() {
            return Err("repository name must have at least one component");
        }
        let (tagged, digest) = match text.split_once('@') {
            Some((tagged, digest)) => (tagged, Some(digest)),
            None => (text, None),
        };
        // A colon before the last slash separates a port.
        let (name, tag) = match tagged.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
            _ => (tagged, None),
        };
        if !tag.is_none_or(is_tag) || !is_name(name) {
            return Err(INVALID);
        }
        let (registry, repository) = split(name);
        if repository.len() > REPOSITORY_LIMIT {
            return Err("repository name must not be more than 255 characters");
        }
        digest.map_or(Ok(()), check_digest)?;
        Ok(Reference {
            registry,
            repository,
            tag,
            digest,
        })
    }
}

/// Errors of the kubelet's library (`ParseNormalizedNamed`) that the grammar of references does not have, or words
/// differently.
pub(crate) fn objection(text: &str) -> Option<String> {
    let is_hex = |hex: &str| hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if text.len() == 64 && is_hex(text) {
        return Some(format!(
            "invalid repository name ({text}), cannot specify 64-byte hexadecimal strings"
        ));
    }
    // The library has added a registry and a slash before the empty name.
    if text.is_empty() {
        return Some(INVALID.into());
    }
    let repository = written_repository(text);
    if repository.to_lowercase() != repository {
        return Some(format!(
            "{INVALID}: repository name ({repository}) must be lowercase"
        ));
    }
    // The grammar allows capitals in a digest, but the digest's own rules do not.
    let reference = Reference::parse(text).ok()?;
    let (_, hex) = reference.digest?.split_once(':')?;
    (!is_hex(hex)).then(|| "invalid checksum digest format".into())
}

/// The part of a name that must be in lower case: from the registry to the first colon. A first component with capitals
/// is a registry.
fn written_repository(text: &str) -> Cow<'_, str> {
    let is_registry = |first: &str| {
        first.contains(['.', ':']) || first == "localhost" || first.to_lowercase() != first
    };
    let (registry, rest) = match text.split_once('/') {
        Some((first, rest)) if is_registry(first) => (first, rest),
        _ => (DEFAULT_REGISTRY, text),
    };
    let repository = rest.split(':').next().unwrap_or_default();
    let is_default = matches!(registry, DEFAULT_REGISTRY | LEGACY_REGISTRY);
    if is_default && !rest.contains('/') {
        return format!("library/{repository}").into();
    }
    repository.into()
}

/// Splits a name into registry and repository.
fn split(name: &str) -> (&str, Cow<'_, str>) {
    let is_host = |first: &str| first.contains(['.', ':']) || first == "localhost";
    let (registry, repository) = match name.split_once('/') {
        Some((first, rest)) if is_host(first) => (first, rest),
        _ => (DEFAULT_REGISTRY, name),
    };
    let registry = if registry == LEGACY_REGISTRY {
        DEFAULT_REGISTRY
    } else {
        registry
    };
    if registry == DEFAULT_REGISTRY && !repository.contains('/') {
        return (registry, format!("library/{repository}").into());
    }
    (registry, repository.into())
}

/// Path components; the first one may be a host if others follow.
fn is_name(name: &str) -> bool {
    let is_path = |path: &str| path.split('/').all(is_path_component);
    let on_host = |(first, rest): (&str, &str)| is_host(first) && is_path(rest);
    is_path(name) || name.split_once('/').is_some_and(on_host)
}

/// Lower-case letters and digits, separated by `.`, `_`, `__` or dashes.
fn is_path_component(component: &str) -> bool {
    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let mut separators = component.split(is_word).filter(|part| !part.is_empty());
    component.starts_with(is_word)
        && component.ends_with(is_word)
        && separators.all(|s| matches!(s, "." | "_" | "__") || s.bytes().all(|b| b == b'-'))
}

fn is_host(text: &str) -> bool {
    let (host, port) = match text.split_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (text, None),
    };
    let is_label = |label: &str| {
        let alphanumeric = |c: char| c.is_ascii_alphanumeric();
        label.starts_with(alphanumeric)
            && label.ends_with(alphanumeric)
            && label.chars().all(|c| alphanumeric(c) || c == '-')
    };
    host.split('.').all(is_label) && port.is_none_or(is_number)
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn is_tag(tag: &str) -> bool {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    tag.starts_with(is_word)
        && tag.len() <= TAG_LIMIT
        && tag.chars().all(|c| is_word(c) || c == '.' || c == '-')
}

fn check_digest(digest: &str) -> Result<(), &'static str> {
    let (algorithm, hex) = digest.split_once(':').ok_or(INVALID)?;
    let is_word = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_alphabetic())
            && word.bytes().all(|b| b.is_ascii_alphanumeric())
    };
    let is_hex = hex.len() >= 32 && hex.bytes().all(|b| b.is_ascii_hexdigit());
    if !algorithm.split(['-', '_', '+', '.']).all(is_word) || !is_hex {
        return Err(INVALID);
    }
    let length = match algorithm {
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        _ => return Err("unsupported digest algorithm"),
    };
    if hex.len() == length {
        Ok(())
    } else {
        Err("invalid checksum digest length")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The library's result: registry, repository, tag and digest, or its error.
    fn library(text: &str) -> Result<[Option<String>; 4], String> {
        let parsed: Result<oci_spec::distribution::Reference, _> = text.parse();
        parsed.map_err(|e| e.to_string()).map(|r| {
            let some = |text: &str| Some(text.to_owned());
            [
                some(r.registry()),
                some(r.repository()),
                r.tag().map(str::to_owned),
                r.digest().map(str::to_owned),
            ]
        })
    }

    fn ours(text: &str) -> Result<[Option<String>; 4], String> {
        let parsed = Reference::parse(text).map_err(str::to_owned)?;
        // The library adds `latest` if there is neither tag nor digest.
        let latest = (parsed.tag.is_none() && parsed.digest.is_none()).then_some("latest");
        Ok([
            Some(parsed.registry.to_owned()),
            Some(parsed.repository.into_owned()),
            parsed.tag.or(latest).map(str::to_owned),
            parsed.digest.map(str::to_owned),
        ])
    }

    #[test]
    fn image_names_parse_as_in_the_reference_library() {
        let (sha256, long) = ("0".repeat(64), "a".repeat(256));
        let names = [
            "",
            "/",
            "a",
            "A",
            "a/",
            "/a",
            "a//b",
            "a:",
            "a:b",
            "a:b:c",
            "a/b:c",
            "A/b",
            "a.b/C",
            "localhost/a",
            "localhost:1",
            "localhost:1/a",
            "index.docker.io/a",
            "docker.io/a/b",
            "a_b",
            "a__b",
            "a___b",
            "a--b",
            "a.-b",
            "a-",
            "-a",
            "r.example:5000/a_b/c-d:v1.0",
            "r.example:/a",
            "r..example/a",
            "-r.example/a",
            "r_x.example/a",
            "a@",
            "a@sha256:12",
            "a:-b",
            "a:.b",
            "a:_b",
            "a b",
            "a/b@c@d",
        ];
        let digests = [
            format!("a@sha256:{sha256}"),
            format!("a:t@sha256:{sha256}"),
            format!("a@sha512:{sha256}"),
            format!("a@md5:{sha256}"),
            format!("a@sha256+b:{sha256}"),
            format!("a@sha256:{}g", &sha256[1..]),
            long.clone(),
            format!("a:{}", &long[..128]),
            format!("a:{}", &long[..129]),
        ];
        for name in names.into_iter().map(str::to_owned).chain(digests) {
            assert_eq!(ours(&name), library(&name), "{name:?}");
        }
    }

    proptest! {
        #[test]
        fn any_image_name_parses_as_in_the_reference_library(name in "[a-cA0-1._:@/-]{0,12}", host in "([a-b.-]{1,5}(:[0-9]{0,2})?/)?", digest in "(@sha(256|512):[0a]{60,66})?") {
            for text in [name.clone(), format!("{host}{name}{digest}")] {
                prop_assert_eq!(ours(&text), library(&text), "{:?}", text);
            }
        }
    }
}
