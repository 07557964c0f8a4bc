//! Image names: tags, canonical names, and the errors of pulls. Pure.

pub mod gc;
pub mod keyring;
pub mod pulled;
mod reference;
pub mod tokens;

use reference::Reference;

/// Whether an image name means the latest image: tag `latest`, or neither tag nor digest. Invalid names do not.
#[must_use]
pub fn tag_is_latest(image: &str) -> bool {
    Reference::parse(image)
        .is_ok_and(|r| r.digest.is_none() && r.tag.is_none_or(|tag| tag == "latest"))
}

/// The full image reference for the runtime: `:latest` is added if there is neither tag nor digest. The error describes
/// the invalid name (waiting reason `InvalidImageName`).
pub fn with_default_tag(image: &str) -> Result<String, String> {
    let read = match reference::objection(image) {
        Some(why) => Err(why),
        None => Reference::parse(image).map_err(str::to_owned),
    };
    let reference = read.map_err(|e| {
        format!(
            "Failed to apply default image tag {image:?}: couldn't parse image name {image:?}: {e}"
        )
    })?;
    Ok(if reference.digest.is_some() || reference.tag.is_some() {
        image.to_owned()
    } else {
        format!("{image}:latest")
    })
}

/// A name as runtimes list it: complete, with the digest if there is one, or else the tag.
#[must_use]
pub fn canonical_name(image: &str) -> Option<String> {
    let reference = Reference::parse(image).ok()?;
    let repository = format!("{}/{}", reference.registry, reference.repository);
    Some(match (reference.digest, reference.tag) {
        (Some(digest), _) => format!("{repository}@{digest}"),
        (None, tag) => format!("{repository}:{}", tag.unwrap_or("latest")),
    })
}

/// The name as written, without tag and digest.
#[must_use]
pub fn untagged(image: &str) -> &str {
    let Ok(reference) = Reference::parse(image) else {
        return image;
    };
    let tagged = match reference.digest {
        Some(_) => image.split_once('@').map_or(image, |(tagged, _)| tagged),
        None => image,
    };
    match reference.tag {
        Some(_) => tagged.rsplit_once(':').map_or(tagged, |(name, _)| name),
        None => tagged,
    }
}

/// Reason and message of a failed pull. A runtime's error starts with the name of a known reason, if it has one.
#[must_use]
pub fn pull_failure(image: &str, error: &str) -> (&'static str, String) {
    let known = [
        ("RegistryUnavailable", "the registry is unavailable"),
        (
            "SignatureValidationFailed",
            "the signature validation failed",
        ),
    ];
    let named = |(reason, why): (&'static str, &str)| {
        let rest = error.strip_prefix(reason)?;
        let message = format!("image pull failed for {image} because {why}{rest}");
        Some((reason, message))
    };
    known
        .into_iter()
        .find_map(named)
        .unwrap_or_else(|| ("ErrImagePull", error.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_and_registries_are_distinguished_from_ports_and_digests() {
        let digest = format!("a@sha256:{}", "0".repeat(64));
        let cases = [
            ("busybox", true, "docker.io", Ok("busybox:latest")),
            ("busybox:1.36", false, "docker.io", Ok("busybox:1.36")),
            (
                "reg.example:5000/a/b",
                true,
                "reg.example:5000",
                Ok("reg.example:5000/a/b:latest"),
            ),
            (
                "reg.example:5000/a/b:latest",
                true,
                "reg.example:5000",
                Ok("reg.example:5000/a/b:latest"),
            ),
            (digest.as_str(), false, "docker.io", Ok(digest.as_str())),
        ];
        for (image, latest, host, full) in cases {
            assert_eq!(tag_is_latest(image), latest, "{image}");
            assert_eq!(
                Reference::parse(image).map(|r| r.registry),
                Ok(host),
                "{image}"
            );
            assert_eq!(with_default_tag(image).as_deref(), full, "{image}");
        }
        assert!(with_default_tag("Not Valid!").is_err() && !tag_is_latest("Not Valid!"));
        assert_eq!(
            canonical_name("busybox").as_deref(),
            Some("docker.io/library/busybox:latest")
        );
        assert_eq!(
            canonical_name("r.example:5000/a:1").as_deref(),
            Some("r.example:5000/a:1")
        );
        let both = digest.replace('@', ":1@");
        for (image, expected) in [
            ("busybox", "busybox"),
            ("busybox:1.36", "busybox"),
            ("reg.example:5000/a/b", "reg.example:5000/a/b"),
            ("reg.example:5000/a/b:1", "reg.example:5000/a/b"),
            (digest.as_str(), "a"),
            (both.as_str(), "a"),
            ("Not Valid!", "Not Valid!"),
        ] {
            assert_eq!(untagged(image), expected, "{image}");
        }
        assert_eq!(
            canonical_name(&digest),
            Some(format!("docker.io/library/{digest}"))
        );
    }

    #[test]
    fn an_invalid_image_name_has_the_kubelets_error() {
        let (hex, upper) = ("0a".repeat(32), "0A".repeat(32));
        let lower_case = |name: &str| {
            format!("invalid reference format: repository name ({name}) must be lowercase")
        };
        let invalid = "invalid reference format".to_owned();
        for (image, expected) in [
            ("", invalid.clone()),
            ("a b", invalid.clone()),
            ("a:", invalid),
            ("Busybox", lower_case("library/Busybox")),
            ("Not Valid!", lower_case("library/Not Valid!")),
            ("team/One:1", lower_case("team/One")),
            ("docker.io/One", lower_case("library/One")),
            ("r.example:5000/One", lower_case("One")),
            (
                &hex,
                format!(
                    "invalid repository name ({hex}), cannot specify 64-byte hexadecimal strings"
                ),
            ),
            (
                &format!("a@sha256:{upper}"),
                "invalid checksum digest format".into(),
            ),
            (
                &format!("a@sha256:{}", &hex[2..]),
                "invalid checksum digest length".into(),
            ),
            (
                &format!("a@sha256:{}", &upper[2..]),
                "invalid checksum digest length".into(),
            ),
        ] {
            let message = format!(
                "Failed to apply default image tag {image:?}: couldn't parse image name {image:?}: {expected}"
            );
            assert_eq!(with_default_tag(image), Err(message));
        }
        // A first component with capitals is taken as a host. Tags may have capitals too.
        for image in ["Host/one:1", "one:LATEST"] {
            assert_eq!(with_default_tag(image).as_deref(), Ok(image));
        }
    }

    #[test]
    fn the_prefix_of_a_runtimes_pull_error_becomes_the_reason() {
        for (error, reason, message) in [
            (
                "RegistryUnavailable: no route",
                "RegistryUnavailable",
                "image pull failed for r/x because the registry is unavailable: no route",
            ),
            (
                "SignatureValidationFailed",
                "SignatureValidationFailed",
                "image pull failed for r/x because the signature validation failed",
            ),
            (
                "not found: RegistryUnavailable/x",
                "ErrImagePull",
                "not found: RegistryUnavailable/x",
            ),
        ] {
            assert_eq!(pull_failure("r/x", error), (reason, message.to_owned()));
        }
    }
}
