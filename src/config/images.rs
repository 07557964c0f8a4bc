//! Fields about images: pulls, verification and removal.

use std::path::PathBuf;

use super::document::Document;
use super::values::{invalid, pace};
use super::{ConfigError, Overrides};
use holdfast_core::image::gc::Rules as ImageRules;
use holdfast_core::image::pulled::Policy;
use holdfast_core::time::duration;

/// Returns the rate of pulls per second, and the burst.
pub(super) fn pull_quota(d: &Document) -> Result<(f64, f64), ConfigError> {
    pace(
        ("registryPullQPS", d.registry_pull_qps, 5),
        ("registryBurst", d.registry_burst, 10),
    )
}

pub(super) fn image_rules(document: &Document) -> Result<ImageRules, ConfigError> {
    let percent = |field: &str, value: Option<i32>, default: i32| {
        let value = value.unwrap_or(default);
        u8::try_from(value)
            .ok()
            .filter(|p| *p <= 100)
            .ok_or_else(|| invalid(field, value, "use a percentage between 0 and 100"))
    };
    let age = |field: &str, text: Option<&String>, default: &str| {
        let text = text.map_or(default, String::as_str);
        let age = duration(text).and_then(|d| jiff::SignedDuration::try_from(d).ok());
        age.ok_or_else(|| invalid(field, text, "use a duration such as 2m or 168h"))
    };
    let rules = ImageRules {
        high: percent(
            "imageGCHighThresholdPercent",
            document.image_gc_high_threshold_percent,
            85,
        )?,
        low: percent(
            "imageGCLowThresholdPercent",
            document.image_gc_low_threshold_percent,
            80,
        )?,
        // kubeadm writes zeros for fields that it does not set.
        minimum_age: Some(age(
            "imageMinimumGCAge",
            document.image_minimum_gc_age.as_ref(),
            "2m",
        )?)
        .filter(|age| !age.is_zero())
        .unwrap_or(jiff::SignedDuration::from_mins(2)),
        maximum_age: Some(age(
            "imageMaximumGCAge",
            document.image_maximum_gc_age.as_ref(),
            "0s",
        )?)
        .filter(|age| !age.is_zero()),
    };
    if rules.low >= rules.high {
        return Err(invalid(
            "imageGCLowThresholdPercent",
            rules.low,
            "use a percentage below imageGCHighThresholdPercent",
        ));
    }
    if rules
        .maximum_age
        .is_some_and(|most| most <= rules.minimum_age)
    {
        return Err(invalid(
            "imageMaximumGCAge",
            &document.image_maximum_gc_age,
            "use more than imageMinimumGCAge, or 0s",
        ));
    }
    Ok(rules)
}

/// Returns when a pod must prove that it could have pulled an image itself.
pub(super) fn verification(document: &mut Document) -> Result<Policy, ConfigError> {
    let policy = document
        .image_pull_credentials_verification_policy
        .as_deref();
    let allowlist = document.preloaded_images_verification_allowlist.take();
    let allowlist = allowlist.unwrap_or_default();
    let policy = match policy.unwrap_or("NeverVerifyPreloadedImages") {
        "NeverVerify" => Policy::NeverVerify,
        "NeverVerifyPreloadedImages" => Policy::NeverVerifyPreloaded,
        "NeverVerifyAllowlistedImages" => return Ok(Policy::NeverVerifyAllowlisted(allowlist)),
        "AlwaysVerify" => Policy::AlwaysVerify,
        other => {
            let remedy = "use NeverVerify, NeverVerifyPreloadedImages, NeverVerifyAllowlistedImages or AlwaysVerify";
            return Err(invalid(
                "imagePullCredentialsVerificationPolicy",
                other,
                remedy,
            ));
        }
    };
    match allowlist.first() {
        None => Ok(policy),
        Some(_) => Err(invalid(
            "preloadedImagesVerificationAllowlist",
            allowlist,
            "set imagePullCredentialsVerificationPolicy: NeverVerifyAllowlistedImages, or remove the list",
        )),
    }
}

/// Returns the configuration of credential providers, which requires the directory of their programs.
pub(super) fn credential_providers(flags: &Overrides) -> Result<Option<PathBuf>, ConfigError> {
    let config = flags.credential_providers.as_ref();
    let programs = flags.credential_programs.as_ref();
    match (config, programs) {
        (Some(_), None) => Err(invalid(
            "--image-credential-provider-bin-dir",
            "",
            "also set it: it names the directory of the plugins",
        )),
        (None, Some(_)) => Err(invalid(
            "--image-credential-provider-config",
            "",
            "also set it: it configures the plugins",
        )),
        (config, _) => Ok(config.cloned()),
    }
}

/// Returns the maximum number of concurrent pulls.
pub(super) fn parallel_pulls(
    serial: Option<bool>,
    most: Option<usize>,
) -> Result<usize, ConfigError> {
    match (serial, most) {
        (Some(true), Some(n)) if n > 1 => {
            let remedy = "use 1, or set serializeImagePulls: false";
            Err(invalid("maxParallelImagePulls", n, remedy))
        }
        (_, Some(n)) => Ok(n.max(1)),
        (Some(false), None) => Ok(32),
        _ => Ok(1),
    }
}
