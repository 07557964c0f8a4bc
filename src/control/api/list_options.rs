//! Options of lists and watches, decoded and validated
//! (`staging/src/k8s.io/apimachinery/pkg/apis/meta/internalversion/validation/validation.go`).

use super::error::{ApiError, FieldError};
use super::route::Query;

/// `resourceVersionMatch`: which version of a collection is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Match {
    /// Exactly this revision.
    Exact,
    /// This revision or a newer one.
    NotOlderThan,
}

/// The options of a list or a watch.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ListOptions<'a> {
    /// `resourceVersion`; `None` if absent.
    pub revision: Option<u64>,
    /// `resourceVersionMatch`; `None` if absent.
    pub matching: Option<Match>,
    /// `sendInitialEvents`: whether a watch begins with the current objects; `None` if absent.
    pub initial_events: Option<bool>,
    /// `limit`: maximum number of objects in a page. 0 means no limit; a negative value does too, as upstream.
    pub limit: usize,
    /// `continue`: the token of the next page.
    pub from: Option<&'a str>,
    /// `timeoutSeconds`: how long a watch lasts; `None` if absent. If it is negative, the watch is closed immediately.
    pub timeout: Option<i64>,
}

/// Parses a whole number like Go's `strconv.ParseInt`; an empty parameter counts as absent.
fn number(query: &Query, key: &str) -> Result<Option<i64>, ApiError> {
    let refuse = |text: &str| {
        let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
        let why = if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) {
            "value out of range"
        } else {
            "invalid syntax"
        };
        ApiError::bad_request(format!("strconv.ParseInt: parsing {text:?}: {why}"))
    };
    query
        .get(key)
        .map(|text| text.parse().map_err(|_| refuse(text)))
        .transpose()
}

impl<'a> ListOptions<'a> {
    /// Decodes the options from a query.
    ///
    /// # Errors
    ///
    /// 400 for a malformed number, 422 for options that cannot be combined.
    pub fn of(query: &'a Query, watch: bool) -> Result<ListOptions<'a>, ApiError> {
        let (limit, timeout) = (number(query, "limit")?, number(query, "timeoutSeconds")?);
        let initial_events = query
            .has("sendInitialEvents")
            .then(|| query.flag("sendInitialEvents"));
        let errors = check(query, watch, initial_events.is_some());
        if !errors.is_empty() {
            return Err(ApiError::invalid("ListOptions", "meta.k8s.io", "", &errors));
        }
        let revision = query.get("resourceVersion").map(|v| {
            v.parse().map_err(|_| {
                ApiError::bad_request(format!(
                    "invalid resource version: {v:?}: must be a decimal number"
                ))
            })
        });
        Ok(ListOptions {
            revision: revision.transpose()?,
            matching: match query.get("resourceVersionMatch") {
                Some("Exact") => Some(Match::Exact),
                Some(_) => Some(Match::NotOlderThan),
                None => None,
            },
            initial_events,
            limit: limit.and_then(|l| usize::try_from(l).ok()).unwrap_or(0),
            from: query.get("continue"),
            timeout,
        })
    }
}

fn check(query: &Query, watch: bool, initial: bool) -> Vec<FieldError> {
    const MATCH: &str = "resourceVersionMatch";
    let mut errors = vec![];
    let matching = query.get(MATCH);
    let mut forbid = |field: &str, why: &str| errors.push(FieldError::forbidden(field, why));
    if watch {
        if initial && matching != Some("NotOlderThan") {
            forbid(
                MATCH,
                "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
            );
        }
        if matching.is_some() && !initial {
            forbid(
                MATCH,
                "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
            );
        }
        if let Some(other) = matching.filter(|m| *m != "NotOlderThan") {
            errors.push(FieldError::unsupported(MATCH, other, &["NotOlderThan"]));
        }
    } else {
        if matching.is_some() && query.get("resourceVersion").is_none() {
            forbid(
                MATCH,
                "resourceVersionMatch is forbidden unless resourceVersion is provided",
            );
        }
    }
    if matching.is_some() && query.get("continue").is_some() {
        errors.push(FieldError::forbidden(
            MATCH,
            "resourceVersionMatch is forbidden when continue is provided",
        ));
    }
    if watch {
        return errors;
    }
    if let Some(other) = matching.filter(|m| !["Exact", "NotOlderThan"].contains(m)) {
        let known = ["Exact", "NotOlderThan", ""];
        errors.push(FieldError::unsupported(MATCH, other, &known));
    }
    if matching == Some("Exact") && query.get("resourceVersion") == Some("0") {
        errors.push(FieldError::forbidden(
            MATCH,
            "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"",
        ));
    }
    if initial {
        errors.push(FieldError::forbidden(
            "sendInitialEvents",
            "sendInitialEvents is forbidden for list",
        ));
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(query: &str, watch: bool) -> Result<(usize, Option<u64>, Option<bool>), (u16, String)> {
        let query = Query::parse(query);
        ListOptions::of(&query, watch)
            .map(|o| (o.limit, o.revision, o.initial_events))
            .map_err(|e| (e.code, e.message))
    }

    #[test]
    fn conflicting_list_options_are_rejected() {
        let invalid = |what: &str| {
            Err((
                422,
                format!("ListOptions.meta.k8s.io \"\" is invalid: {what}"),
            ))
        };
        let matching = |what: &str| invalid(&format!("resourceVersionMatch: {what}"));
        for (query, expected) in [
            ("", Ok((0, None, None))),
            ("limit=5&resourceVersion=7", Ok((5, Some(7), None))),
            ("limit=-1", Ok((0, None, None))),
            (
                "limit=abc",
                Err((
                    400,
                    "strconv.ParseInt: parsing \"abc\": invalid syntax".into(),
                )),
            ),
            (
                "limit=99999999999999999999",
                Err((
                    400,
                    "strconv.ParseInt: parsing \"99999999999999999999\": value out of range".into(),
                )),
            ),
            (
                "timeoutSeconds=x",
                Err((
                    400,
                    "strconv.ParseInt: parsing \"x\": invalid syntax".into(),
                )),
            ),
            (
                "resourceVersion=1&resourceVersionMatch=Bogus",
                matching(
                    "Unsupported value: \"Bogus\": supported values: \"Exact\", \"NotOlderThan\", \"\"",
                ),
            ),
            (
                "resourceVersion=0&resourceVersionMatch=Exact",
                matching(
                    "Forbidden: resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"",
                ),
            ),
            (
                "resourceVersionMatch=Exact",
                matching(
                    "Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided",
                ),
            ),
            (
                "resourceVersion=1&resourceVersionMatch=Exact&continue=x",
                matching("Forbidden: resourceVersionMatch is forbidden when continue is provided"),
            ),
            (
                "sendInitialEvents=false",
                invalid("sendInitialEvents: Forbidden: sendInitialEvents is forbidden for list"),
            ),
            (
                "resourceVersion=1&resourceVersionMatch=NotOlderThan",
                Ok((0, Some(1), None)),
            ),
        ] {
            assert_eq!(of(query, false), expected, "list {query}");
        }
        for (query, expected) in [
            ("resourceVersion=7", Ok((0, Some(7), None))),
            (
                "sendInitialEvents=true&resourceVersionMatch=NotOlderThan",
                Ok((0, None, Some(true))),
            ),
            (
                "sendInitialEvents=0&resourceVersionMatch=NotOlderThan",
                Ok((0, None, Some(false))),
            ),
            (
                "sendInitialEvents=true",
                matching(
                    "Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
                ),
            ),
            (
                "resourceVersionMatch=NotOlderThan",
                matching(
                    "Forbidden: resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
                ),
            ),
            (
                "sendInitialEvents=true&resourceVersionMatch=Exact",
                invalid(
                    "[resourceVersionMatch: Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan, resourceVersionMatch: Unsupported value: \"Exact\": supported values: \"NotOlderThan\"]",
                ),
            ),
        ] {
            assert_eq!(of(query, true), expected, "watch {query}");
        }
    }
}
