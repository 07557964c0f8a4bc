//! `/livez`, `/readyz` and `/healthz` (`staging/src/k8s.io/apiserver/pkg/server/healthz`).

use super::route::Query;
use super::{Answer, ApiError};

/// A check: its name and its result.
pub type Check = (&'static str, Result<(), String>);

/// Responds to a health endpoint, or to one of its checks by name.
pub fn answer(
    endpoint: &str,
    one: Option<&str>,
    checks: &[Check],
    query: &Query,
) -> Result<Answer, ApiError> {
    if let Some(name) = one {
        let Some((_, result)) = checks.iter().find(|(known, _)| *known == name) else {
            return Ok(Answer::text(404, "404 page not found\n"));
        };
        return Ok(match result {
            Ok(()) => Answer::text(200, "ok"),
            Err(why) => Answer::text(500, &format!("internal server error: {why}\n")),
        });
    }
    let excluded = query.get("exclude");
    let (mut text, mut failed) = (String::new(), false);
    for (name, result) in checks {
        let line = match result {
            _ if excluded == Some(name) => format!("[+]{name} excluded: ok\n"),
            Ok(()) => format!("[+]{name} ok\n"),
            Err(why) => {
                failed = true;
                tracing::warn!(check = name, error = why, endpoint, "a health check failed");
                format!("[-]{name} failed: reason withheld\n")
            }
        };
        text.push_str(&line);
    }
    Ok(if failed {
        Answer::text(500, &format!("{text}{endpoint} check failed\n"))
    } else if query.flag("verbose") {
        Answer::text(200, &format!("{text}{endpoint} check passed\n"))
    } else {
        Answer::text(200, "ok")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_check_fails_its_health_endpoint() {
        let of = |one: Option<&str>, store: Result<(), String>, query: &str| {
            let checks = [("ping", Ok(())), ("store", store)];
            match answer("readyz", one, &checks, &Query::parse(query)) {
                Ok(Answer::Body { code, body, .. }) => {
                    (code, String::from_utf8_lossy(&body).into_owned())
                }
                _ => panic!("no body"),
            }
        };
        let bad = || Err("no space left".to_owned());
        assert_eq!(of(None, Ok(()), ""), (200, "ok".into()));
        assert_eq!(
            of(None, Ok(()), "verbose"),
            (200, "[+]ping ok\n[+]store ok\nreadyz check passed\n".into())
        );
        assert_eq!(
            of(None, bad(), ""),
            (
                500,
                "[+]ping ok\n[-]store failed: reason withheld\nreadyz check failed\n".into()
            )
        );
        assert_eq!(of(None, bad(), "exclude=store"), (200, "ok".into()));
        assert_eq!(of(Some("ping"), bad(), ""), (200, "ok".into()));
        assert_eq!(
            of(Some("store"), bad(), ""),
            (500, "internal server error: no space left\n".into())
        );
        assert_eq!(of(Some("etcd"), bad(), "").0, 404);
    }
}
