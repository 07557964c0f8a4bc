//! The agent's HTTP API: endpoints, authorization attributes, and log options (`pkg/kubelet/server/server.go`,
//! `pkg/kubelet/server/auth.go`). Pure.

pub mod block_io;
pub mod cgroup_stats;
mod command_status;
pub mod exposition;
pub mod health;
pub mod log_query;
pub mod logs;
pub mod machine_stats;
pub mod pressure;
pub mod query;

pub use command_status::command_status;

use jiff::{SignedDuration, Timestamp};

/// A pod, or a container of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodTarget {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's uid, if the path has it.
    pub uid: Option<String>,
    /// The container; empty for the whole pod.
    pub container: String,
}

/// An endpoint of the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// `/healthz`, or one of its checks: `ping`, `log`, `syncloop`.
    Health(String),
    /// `/pods`.
    Pods,
    /// `/runningpods/`.
    RunningPods,
    /// `/containerLogs/…`.
    Logs(PodTarget),
    /// `/exec/…`.
    Exec(PodTarget),
    /// `/attach/…`.
    Attach(PodTarget),
    /// `/portForward/…`.
    PortForward(PodTarget),
    /// `/run/…`.
    Run(PodTarget),
    /// `/configz`.
    Config,
    /// `/stats/summary`.
    Stats,
    /// `/metrics`, or one of its parts: `cadvisor`, `resource`, `probes`, `slis`.
    Metrics(String),
    /// `/logs/…`, with the path below the node's log directory.
    Files(String),
    /// `/checkpoint/…`.
    Checkpoint(PodTarget),
    /// `/debug/flags/v`.
    Verbosity,
    /// `/debug/explain/NAMESPACE/NAME`, as the local socket's `/explain/NAMESPACE/NAME`.
    Explain(PodTarget),
    /// `/statusz`.
    Status,
    /// `/flagz`.
    Flags,
}

/// Result of routing a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// An endpoint.
    Found(Endpoint),
    /// The path exists, but not with this method.
    MethodNotAllowed,
    /// The path does not exist.
    NotFound,
}

fn parse_target(parts: &[&str]) -> Option<PodTarget> {
    let of = |namespace: &str, pod: &str, uid: Option<&str>, container: &str| PodTarget {
        namespace: namespace.into(),
        pod: pod.into(),
        uid: uid.map(Into::into),
        container: container.into(),
    };
    match parts {
        [namespace, pod, container] => Some(of(namespace, pod, None, container)),
        [namespace, pod, uid, container] => Some(of(namespace, pod, Some(uid), container)),
        _ => None,
    }
}

fn parse_pod_target(parts: &[&str]) -> Option<PodTarget> {
    match parts {
        [namespace, pod] => parse_target(&[namespace, pod, ""]),
        [namespace, pod, uid] => parse_target(&[namespace, pod, uid, ""]),
        _ => None,
    }
}

/// The decoded segments of a path.
fn parts(path: &str) -> impl Iterator<Item = String> + '_ {
    let encoded = path.trim_end_matches('/').split('/').skip(1);
    encoded.map(|part| query::decode(&part.replace('+', "%2B")))
}

/// Finds the endpoint of a path.
#[must_use]
pub fn route(method: &str, path: &str) -> Route {
    let decoded: Vec<String> = parts(path).collect();
    let parts: Vec<&str> = decoded.iter().map(String::as_str).collect();
    let get = &["GET", "HEAD"][..];
    let stream = &["GET", "POST"][..];
    let (endpoint, methods) = match parts.as_slice() {
        ["healthz"] => (Some(Endpoint::Health(String::new())), get),
        ["healthz", check @ ("ping" | "log" | "syncloop")] => {
            (Some(Endpoint::Health((*check).into())), get)
        }
        ["pods"] => (Some(Endpoint::Pods), get),
        ["runningpods"] => (Some(Endpoint::RunningPods), get),
        ["containerLogs", rest @ ..] => (
            parse_target(rest)
                .filter(|p| p.uid.is_none())
                .map(Endpoint::Logs),
            get,
        ),
        ["exec", rest @ ..] => (parse_target(rest).map(Endpoint::Exec), stream),
        ["attach", rest @ ..] => (parse_target(rest).map(Endpoint::Attach), stream),
        ["portForward", rest @ ..] => (parse_pod_target(rest).map(Endpoint::PortForward), stream),
        ["run", rest @ ..] => (parse_target(rest).map(Endpoint::Run), &["POST"][..]),
        ["configz"] => (Some(Endpoint::Config), get),
        ["stats", "summary"] => (Some(Endpoint::Stats), stream),
        ["metrics"] => (Some(Endpoint::Metrics(String::new())), get),
        [
            "metrics",
            part @ ("cadvisor" | "resource" | "probes" | "slis"),
        ] => (Some(Endpoint::Metrics((*part).into())), get),
        ["logs", rest @ ..] => (Some(Endpoint::Files(rest.join("/"))), get),
        ["checkpoint", rest @ ..] => (
            parse_target(rest)
                .filter(|p| p.uid.is_none())
                .map(Endpoint::Checkpoint),
            &["POST"][..],
        ),
        ["debug", "flags", "v"] => (Some(Endpoint::Verbosity), &["PUT"][..]),
        ["debug", "explain", namespace, pod] => (
            parse_pod_target(&[namespace, pod]).map(Endpoint::Explain),
            get,
        ),
        ["statusz"] => (Some(Endpoint::Status), get),
        ["flagz"] => (Some(Endpoint::Flags), get),
        _ => (None, get),
    };
    match endpoint {
        None => Route::NotFound,
        Some(endpoint) if methods.contains(&method) => Route::Found(endpoint),
        Some(_) => Route::MethodNotAllowed,
    }
}

/// The error of an endpoint if debugging handlers are disabled, and on the read-only port; `None` if the endpoint is
/// served anyway.
#[must_use]
pub fn disabled_response(endpoint: &Endpoint) -> Option<Rejection> {
    match endpoint {
        Endpoint::Health(_) | Endpoint::Pods | Endpoint::Stats | Endpoint::Metrics(_) => None,
        Endpoint::Run(_)
        | Endpoint::Exec(_)
        | Endpoint::Attach(_)
        | Endpoint::PortForward(_)
        | Endpoint::Logs(_)
        | Endpoint::Files(_)
        | Endpoint::RunningPods => Some((405, "Debug endpoints are disabled.".into())),
        Endpoint::Config
        | Endpoint::Checkpoint(_)
        | Endpoint::Verbosity
        | Endpoint::Explain(_)
        | Endpoint::Status
        | Endpoint::Flags => Some((404, "404 page not found".into())),
    }
}

/// Permission for a request: a verb on one of these subresources of the node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RequiredPermission {
    /// The verb.
    pub verb: &'static str,
    /// The subresources, in the order in which they are checked; any one is sufficient.
    pub subresources: &'static [&'static str],
}

/// The permission that a request needs. Unknown paths need `proxy`, which covers everything.
#[must_use]
pub fn required_permission(method: &str, path: &str) -> RequiredPermission {
    let mut verb = match method {
        "POST" => "create",
        "GET" | "HEAD" => "get",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => "",
    };
    // Decodes the path as `route` does, so that the checked endpoint is the served one.
    let first = parts(path).next().unwrap_or_default();
    let first = first.as_str();
    let subresources: &[&str] = match first {
        "healthz" => &["healthz", "proxy"],
        "pods" | "runningpods" => &["pods", "proxy"],
        "configz" | "flagz" => &["configz", "proxy"],
        "statusz" => &["statusz", "proxy"],
        "stats" => &["stats"],
        "metrics" => &["metrics"],
        "logs" => &["log"],
        "checkpoint" => &["checkpoint"],
        _ => &["proxy"],
    };
    // Running a command always needs `create`, even though WebSocket requests use GET.
    if matches!(first, "exec" | "attach" | "run" | "portForward") {
        verb = "create";
    }
    RequiredPermission { verb, subresources }
}

/// The path of a request in metrics: its first segment, for metrics the first two, or `other` for unknown paths.
#[must_use]
pub fn metric_path(path: &str) -> &'static str {
    const KNOWN: [&str; 19] = [
        "healthz",
        "pods",
        "runningpods",
        "containerLogs",
        "exec",
        "attach",
        "portForward",
        "run",
        "configz",
        "stats",
        "metrics",
        "metrics/cadvisor",
        "metrics/probes",
        "metrics/resource",
        "logs",
        "checkpoint",
        "debug",
        "statusz",
        "flagz",
    ];
    let mut parts = parts(path);
    let first = parts.next().unwrap_or_default();
    let shown = match parts.next() {
        Some(part) if first == "metrics" => format!("metrics/{part}"),
        _ => first,
    };
    KNOWN
        .into_iter()
        .find(|known| *known == shown)
        .unwrap_or("other")
}

/// Whether requests count as long-running. As in the kubelet, port forwarding and logs do not.
#[must_use]
pub fn is_long_running(path: &str) -> bool {
    matches!(path, "exec" | "attach" | "debug")
}

/// The method of a request in metrics.
#[must_use]
pub fn metric_method(method: &str) -> &'static str {
    ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
        .into_iter()
        .find(|known| *known == method)
        .unwrap_or("other")
}

/// Options for reading a log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// Follows the log until the container exits.
    pub follow: bool,
    /// Reads the log of the previous instance.
    pub previous: bool,
    /// Skips lines before this time.
    pub since: Option<Timestamp>,
    /// Prefixes each line with its timestamp.
    pub timestamps: bool,
    /// Number of lines from the end.
    pub tail: Option<u64>,
    /// Maximum number of bytes.
    pub limit: Option<u64>,
}

/// Why a request is rejected: HTTP status code and message.
pub type Rejection = (u16, String);

impl LogOptions {
    /// Parses the query parameters of `PodLogOptions`.
    pub fn parse(text: &str, now: Timestamp) -> Result<LogOptions, Rejection> {
        let mut options = LogOptions::default();
        let (mut seconds, mut time) = (None, None);
        let given = |key: &str, value: &str| {
            !value.is_empty() || matches!(key, "follow" | "previous" | "timestamps")
        };
        for (key, value) in query::firsts(text).into_iter().filter(|(k, v)| given(k, v)) {
            let number = || {
                let wrong = || (400, format!("{key}: {value:?} is not a number"));
                value.parse::<i64>().map_err(|_| wrong())
            };
            let at_least = |least: i64| {
                let number = number()?;
                let wrong = || {
                    (
                        422,
                        format!(
                            "PodLogOptions.{key}: Invalid value: {number}: must be greater than or equal to {least}"
                        ),
                    )
                };
                if number < least {
                    Err(wrong())
                } else {
                    Ok(number)
                }
            };
            match key.as_str() {
                "follow" => options.follow = query::is_not_false(&value),
                "previous" => options.previous = query::is_not_false(&value),
                "timestamps" => options.timestamps = query::is_not_false(&value),
                "tail" if value == "all" => {}
                "tail" | "tailLines" => options.tail = u64::try_from(at_least(0)?).ok(),
                "limitBytes" => options.limit = u64::try_from(at_least(1)?).ok(),
                "sinceSeconds" => seconds = Some(at_least(1)?),
                "sinceTime" => {
                    time =
                        Some(value.parse::<Timestamp>().map_err(|e| {
                            (400, format!("sinceTime: {value:?} is not a time: {e}"))
                        })?)
                }
                "stream" if value != "All" => {
                    return Err((
                        400,
                        format!(
                            "stream: {value:?} is not supported: a log is returned with all its streams, use All"
                        ),
                    ));
                }
                // The container name, and parameters for the apiserver.
                _ => {}
            }
        }
        if seconds.is_some() && time.is_some() {
            return Err((422, "PodLogOptions: Forbidden: at most one of `sinceTime` or `sinceSeconds` may be specified".into()));
        }
        options.since = time
            .or_else(|| seconds.and_then(|s| now.checked_sub(SignedDuration::from_secs(s)).ok()));
        Ok(options)
    }
}

/// The streams of an exec or attach session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Streams {
    /// Input.
    pub stdin: bool,
    /// Output.
    pub stdout: bool,
    /// Errors.
    pub stderr: bool,
    /// Whether the session has a terminal.
    pub tty: bool,
}

impl Streams {
    /// Parses the query parameters `input`, `output`, `error` and `tty`, each `1`.
    pub fn parse(text: &str) -> Result<Streams, Rejection> {
        let tty = query::pairs(text).contains(&("tty".to_owned(), "1".to_owned()));
        Streams::with_tty(text, tty)
    }

    /// Parses the query parameters for a session with or without a terminal. With a terminal, stderr is part of stdout.
    pub fn with_tty(text: &str, tty: bool) -> Result<Streams, Rejection> {
        let pairs = query::pairs(text);
        let has = |name: &str| pairs.iter().any(|(key, value)| key == name && value == "1");
        let streams = Streams {
            stdin: has("input"),
            stdout: has("output"),
            stderr: has("error") && !tty,
            tty,
        };
        if !streams.stdin && !streams.stdout && !streams.stderr {
            return Err((
                400,
                "you must specify at least 1 of stdin, stdout, stderr".into(),
            ));
        }
        Ok(streams)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_explanation_is_for_those_who_may_do_everything() {
        let path = "/debug/explain/n/p";
        let target = PodTarget {
            namespace: "n".into(),
            pod: "p".into(),
            uid: None,
            container: String::new(),
        };
        let explain = Endpoint::Explain(target);
        assert_eq!(route("GET", path), Route::Found(explain.clone()));
        assert_eq!(route("POST", path), Route::MethodNotAllowed);
        assert_eq!(route("GET", "/debug/explain/n"), Route::NotFound);
        assert_eq!(required_permission("GET", path).subresources, ["proxy"]);
        assert!(disabled_response(&explain).is_some());
    }

    #[test]
    fn every_path_has_its_route_and_its_required_permission() {
        let place = |uid: Option<&str>, container: &str| PodTarget {
            namespace: "n".into(),
            pod: "p".into(),
            uid: uid.map(Into::into),
            container: container.into(),
        };
        let found = Route::Found;
        for (method, path, expected, verb, subresources) in [
            (
                "GET",
                "/healthz",
                found(Endpoint::Health(String::new())),
                "get",
                &["healthz", "proxy"][..],
            ),
            (
                "GET",
                "/healthz/ping",
                found(Endpoint::Health("ping".into())),
                "get",
                &["healthz", "proxy"],
            ),
            (
                "GET",
                "/pods",
                found(Endpoint::Pods),
                "get",
                &["pods", "proxy"],
            ),
            (
                "GET",
                "/pods/",
                found(Endpoint::Pods),
                "get",
                &["pods", "proxy"],
            ),
            ("GET", "/podsx", Route::NotFound, "get", &["proxy"]),
            (
                "GET",
                "/runningpods/",
                found(Endpoint::RunningPods),
                "get",
                &["pods", "proxy"],
            ),
            (
                "GET",
                "/containerLogs/n/p/c",
                found(Endpoint::Logs(place(None, "c"))),
                "get",
                &["proxy"],
            ),
            (
                "GET",
                "/containerLogs/n/p",
                Route::NotFound,
                "get",
                &["proxy"],
            ),
            (
                "POST",
                "/exec/n/p/c",
                found(Endpoint::Exec(place(None, "c"))),
                "create",
                &["proxy"],
            ),
            (
                "GET",
                "/exec/n/p/u/c",
                found(Endpoint::Exec(place(Some("u"), "c"))),
                "create",
                &["proxy"],
            ),
            (
                "GET",
                "/attach/n/p/c",
                found(Endpoint::Attach(place(None, "c"))),
                "create",
                &["proxy"],
            ),
            (
                "POST",
                "/portForward/n/p",
                found(Endpoint::PortForward(place(None, ""))),
                "create",
                &["proxy"],
            ),
            (
                "POST",
                "/run/n/p/c",
                found(Endpoint::Run(place(None, "c"))),
                "create",
                &["proxy"],
            ),
            (
                "GET",
                "/run/n/p/c",
                Route::MethodNotAllowed,
                "create",
                &["proxy"],
            ),
            (
                "GET",
                "/configz",
                found(Endpoint::Config),
                "get",
                &["configz", "proxy"],
            ),
            (
                "GET",
                "/stats/summary",
                found(Endpoint::Stats),
                "get",
                &["stats"],
            ),
            (
                "GET",
                "/metrics",
                found(Endpoint::Metrics(String::new())),
                "get",
                &["metrics"],
            ),
            (
                "GET",
                "/metrics/resource",
                found(Endpoint::Metrics("resource".into())),
                "get",
                &["metrics"],
            ),
            (
                "GET",
                "/metrics/other",
                Route::NotFound,
                "get",
                &["metrics"],
            ),
            (
                "GET",
                "/logs/a/b",
                found(Endpoint::Files("a/b".into())),
                "get",
                &["log"],
            ),
            (
                "DELETE",
                "/pods",
                Route::MethodNotAllowed,
                "delete",
                &["pods", "proxy"],
            ),
            (
                "GET",
                "/statusz",
                found(Endpoint::Status),
                "get",
                &["statusz", "proxy"],
            ),
            (
                "GET",
                "/flagz",
                found(Endpoint::Flags),
                "get",
                &["configz", "proxy"],
            ),
            ("GET", "/", Route::NotFound, "get", &["proxy"]),
            ("BREW", "/coffee", Route::NotFound, "", &["proxy"]),
        ] {
            assert_eq!(route(method, path), expected, "{method} {path}");
            assert_eq!(
                required_permission(method, path),
                RequiredPermission { verb, subresources },
                "{method} {path}"
            );
        }
    }

    #[test]
    fn encoded_paths_need_the_permission_of_their_route() {
        for (path, plain) in [
            ("/%65xec/n/p/c", "/exec/n/p/c"),
            ("/ru%6E/n/p/c", "/run/n/p/c"),
            ("/metric%73", "/metrics"),
        ] {
            assert_eq!(route("GET", path), route("GET", plain), "{path}");
            assert_eq!(
                required_permission("GET", path),
                required_permission("GET", plain),
                "{path}"
            );
            assert_eq!(metric_path(path), metric_path(plain), "{path}");
        }
        assert_eq!(required_permission("GET", "/%65xec/n/p/c").verb, "create");
        // An empty first segment is not routed.
        assert_eq!(route("GET", "//exec/n/p/c"), Route::NotFound);
    }

    #[test]
    fn request_metrics_have_the_kubelets_path_labels() {
        for (path, shown, long) in [
            ("/pods/", "pods", false),
            ("/exec/n/p/c", "exec", true),
            ("/attach/n/p/c", "attach", true),
            ("/debug/flags/v", "debug", true),
            ("/portForward/n/p", "portForward", false),
            ("/containerLogs/n/p/c", "containerLogs", false),
            ("/metrics", "metrics", false),
            ("/metrics/", "metrics", false),
            ("/metrics/cadvisor", "metrics/cadvisor", false),
            ("/metrics/secret", "other", false),
            ("/coffee", "other", false),
        ] {
            assert_eq!(metric_path(path), shown, "{path}");
            assert_eq!(is_long_running(shown), long, "{path}");
        }
    }

    #[test]
    fn without_debugging_handlers_few_paths_are_served() {
        for (method, path, code) in [
            ("GET", "/healthz", None),
            ("GET", "/pods", None),
            ("GET", "/stats/summary", None),
            ("GET", "/metrics/cadvisor", None),
            ("POST", "/run/n/p/c", Some(405)),
            ("GET", "/exec/n/p/c", Some(405)),
            ("POST", "/attach/n/p/c", Some(405)),
            ("POST", "/portForward/n/p", Some(405)),
            ("GET", "/containerLogs/n/p/c", Some(405)),
            ("GET", "/logs/syslog", Some(405)),
            ("GET", "/runningpods/", Some(405)),
            ("GET", "/configz", Some(404)),
            ("POST", "/checkpoint/n/p/c", Some(404)),
            ("PUT", "/debug/flags/v", Some(404)),
            ("GET", "/statusz", Some(404)),
            ("GET", "/flagz", Some(404)),
        ] {
            let Route::Found(endpoint) = route(method, path) else {
                panic!("{path} has no route");
            };
            let answer = disabled_response(&endpoint);
            assert_eq!(answer.map(|(code, _)| code), code, "{path}");
        }
    }

    #[test]
    fn log_options_are_validated() {
        let now = Timestamp::from_second(1000).expect("a time");
        let of = |text: &str| LogOptions::parse(text, now);
        assert_eq!(
            of(
                "follow=true&tailLines=5&sinceSeconds=10&limitBytes=7&timestamps=1&previous=false&container=c"
            ),
            Ok(LogOptions {
                follow: true,
                previous: false,
                since: Timestamp::from_second(990).ok(),
                timestamps: true,
                tail: Some(5),
                limit: Some(7)
            })
        );
        assert_eq!(of("tail=all"), Ok(LogOptions::default()));
        assert_eq!(
            of("follow=yes&follow=false&previous&timestamps=&tailLines=1&tailLines=2"),
            Ok(LogOptions {
                follow: true,
                previous: true,
                timestamps: true,
                tail: Some(1),
                ..LogOptions::default()
            })
        );
        assert_eq!(
            of("follow=FALSE&previous=0&timestamps=False"),
            Ok(LogOptions::default())
        );
        for (text, code) in [
            ("tailLines=-1", 422),
            ("tailLines=x", 400),
            ("limitBytes=0", 422),
            ("sinceSeconds=1&sinceTime=1970-01-01T00:00:00Z", 422),
            ("sinceTime=now", 400),
            ("stream=Stdout", 400),
        ] {
            assert_eq!(of(text).map_err(|(code, _)| code), Err(code), "{text}");
        }
    }

    #[test]
    fn a_terminal_has_no_stderr_and_at_least_one_stream_is_needed() {
        assert_eq!(
            Streams::parse("output=1&error=1&tty=1"),
            Ok(Streams {
                stdout: true,
                tty: true,
                ..Streams::default()
            })
        );
        assert!(Streams::parse("tty=1&error=1").is_err_and(|(code, _)| code == 400));
        let attached = |tty| Streams::with_tty("output=1&error=1&tty=1", tty);
        assert_eq!(
            attached(false),
            Ok(Streams {
                stdout: true,
                stderr: true,
                ..Streams::default()
            })
        );
        assert!(attached(true).is_ok_and(|streams| streams.tty && !streams.stderr));
    }
}
