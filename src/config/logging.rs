//! Fields about logs and traces.

use serde::Deserialize;
use serde_json::Value;

use super::ConfigError;
use super::values::{invalid, is_unset};

/// The fields as written in a file.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Section {
    format: Option<String>,
    verbosity: Option<u32>,
    #[serde(flatten)]
    rest: std::collections::BTreeMap<String, Value>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Tracing {
    endpoint: Option<String>,
    sampling_rate_per_million: Option<i64>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Fields {
    logging: Section,
    tracing: Option<Tracing>,
}

/// How the agent logs and traces.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Logging {
    /// Whether each line is JSON.
    pub json: bool,
    /// Verbosity as in the kubelet: 0 to 2 for information, 4 for debugging, more for tracing.
    pub verbosity: u8,
    /// Endpoint of traces, and the number of a million that are sampled; `None` for no traces.
    pub traces: Option<(String, u32)>,
}

/// Resolves the fields; a flag overrides them. Also returns the fields that are not honoured.
pub(super) fn resolve(
    fields: &Fields,
    verbosity: u8,
) -> Result<(Logging, Vec<String>), ConfigError> {
    let section = &fields.logging;
    let json = match section.format.as_deref() {
        None | Some("" | "text") => false,
        Some("json") => true,
        Some(other) => return Err(invalid("logging.format", other, "use text or json")),
    };
    let own = u8::try_from(section.verbosity.unwrap_or(0)).unwrap_or(u8::MAX);
    let mut ignored = vec![];
    for (key, value) in &section.rest {
        match key.as_str() {
            // Lines are never buffered.
            "flushFrequency" => {}
            // kubeadm writes the defaults of `options`.
            "options" | "vmodule" if is_unset(value) => {}
            "options" | "vmodule" => ignored.push(format!("logging.{key}")),
            _ => {
                return Err(invalid(
                    &format!("logging.{key}"),
                    value,
                    "unknown field; use format or verbosity",
                ));
            }
        }
    }
    let traces = match &fields.tracing {
        None => None,
        Some(tracing) => {
            let field = "tracing.samplingRatePerMillion";
            let rate = tracing.sampling_rate_per_million.unwrap_or(0);
            let rate = u32::try_from(rate).ok().filter(|r| *r <= 1_000_000);
            let rate = rate.ok_or_else(|| {
                invalid(
                    field,
                    tracing.sampling_rate_per_million.unwrap_or(0),
                    "use a number from 0 to 1000000",
                )
            })?;
            let endpoint = tracing
                .endpoint
                .clone()
                .filter(|e| !e.is_empty())
                .unwrap_or_else(|| "localhost:4317".into());
            (rate > 0).then_some((endpoint, rate))
        }
    };
    Ok((
        Logging {
            json,
            verbosity: if verbosity > 0 { verbosity } else { own },
            traces,
        },
        ignored,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_parsed_and_the_verbosity_flag_overrides_the_file() {
        let of = |text: &str, flag: u8| {
            resolve(&serde_saphyr::from_str(text).expect("YAML"), flag).map_err(|e| e.to_string())
        };
        assert_eq!(of("{}", 0), Ok((Logging::default(), vec![])));
        for (options, is_reported) in [
            ("{}", false),
            (
                "{json: {infoBufferSize: '0'}, text: {infoBufferSize: '0', splitStream: false}}",
                false,
            ),
            ("{text: {infoBufferSize: '64Ki'}}", true),
            ("{json: {splitStream: true}}", true),
        ] {
            let ignored = of(&format!("logging: {{options: {options}, vmodule: []}}"), 0);
            let expected = Vec::from_iter(is_reported.then(|| "logging.options".to_owned()));
            assert_eq!(
                ignored.map(|(_, ignored)| ignored),
                Ok(expected),
                "{options}"
            );
        }
        let own = "logging: {format: json, verbosity: 4, flushFrequency: 5s, vmodule: [{filePattern: a, verbosity: 9}]}";
        assert_eq!(
            of(own, 0),
            Ok((
                Logging {
                    json: true,
                    verbosity: 4,
                    traces: None
                },
                vec!["logging.vmodule".to_owned()]
            ))
        );
        assert_eq!(of(own, 6).map(|(l, _)| l.verbosity), Ok(6));
        assert_eq!(
            of("tracing: {samplingRatePerMillion: 7}", 0).map(|(l, _)| l.traces),
            Ok(Some(("localhost:4317".into(), 7)))
        );
        assert_eq!(
            of("tracing: {endpoint: 'h:1'}", 0).map(|(l, _)| l.traces),
            Ok(None),
            "nothing is sampled"
        );
        assert!(
            of("tracing: {samplingRatePerMillion: 1000001}", 0)
                .is_err_and(|e| e.contains("tracing.samplingRatePerMillion"))
        );
        assert!(of("logging: {format: xml}", 0).is_err_and(|e| e.contains("logging.format")));
        assert!(of("logging: {formt: json}", 0).is_err_and(|e| e.contains("logging.formt")));
    }
}
