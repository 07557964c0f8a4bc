//! Spans of calls for OpenTelemetry. libcni passes the span of the runtime in `TRACEPARENT` (W3C Trace Context; OTEP 0258 for
//! environment variables). A call within a sampled trace is exported to the collector that the runtime's environment names, over
//! OTLP/HTTP with JSON. Calls outside of traces, which are the usual ones, only read one variable.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::cni::Error;

/// Time limit for each step of the export: the runtime waits for the exit of the plugin.
const STEP_TIMEOUT: Duration = Duration::from_millis(100);

/// A collector's address, and the `Host` and the path of requests to it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Collector {
    address: SocketAddr,
    host: String,
    path: String,
}

/// The span of a call that runs.
#[derive(Debug)]
pub(crate) struct Span {
    trace: String,
    parent: String,
    begun: SystemTime,
    collector: Collector,
}

#[expect(clippy::disallowed_methods)]
fn now() -> SystemTime {
    SystemTime::now()
}

/// The trace and the span of a `TRACEPARENT`, if the trace is sampled.
fn parse_context(text: &str) -> Option<(&str, &str)> {
    let hex = |part: &str, digits: usize| {
        let is_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        part.len() == digits && part.bytes().all(is_hex)
    };
    let mut parts = text.split('-');
    let (version, trace, span, flags) =
        (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    // Later versions may have more parts.
    let is_well_formed = hex(version, 2)
        && version != "ff"
        && (version != "00" || parts.next().is_none())
        && hex(trace, 32)
        && hex(span, 16)
        && hex(flags, 2)
        && [trace, span].iter().all(|id| id.bytes().any(|b| b != b'0'));
    let is_sampled = u8::from_str_radix(flags, 16).is_ok_and(|f| f & 1 == 1);
    (is_well_formed && is_sampled).then_some((trace, span))
}

/// The collector of an endpoint. Names other than `localhost` would need DNS, which could delay each call.
fn parse_endpoint(endpoint: &str, path: &str) -> Option<Collector> {
    let rest = endpoint.strip_prefix("http://")?;
    let (host, own_path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let address = match host.parse::<SocketAddr>() {
        Ok(address) => address,
        Err(_) => {
            let (name, port) = host.split_once(':').unwrap_or((host, "80"));
            let ip: IpAddr = match name {
                "localhost" => Ipv4Addr::LOCALHOST.into(),
                name => name.parse().ok()?,
            };
            SocketAddr::new(ip, port.parse().ok()?)
        }
    };
    let printable = endpoint.bytes().all(|b| b.is_ascii_graphic());
    printable.then(|| Collector {
        address,
        host: host.to_owned(),
        path: format!("{}{path}", own_path.trim_end_matches('/')),
    })
}

impl Span {
    /// The span of this call; `None` if the runtime does not trace it, or names no collector that understands HTTP.
    pub(crate) fn begin(env: &dyn Fn(&str) -> String) -> Option<Span> {
        let context = env("TRACEPARENT");
        let (trace, parent) = parse_context(&context)?;
        let first = |names: [&str; 2]| {
            let values = names.map(env);
            values.into_iter().find(|v| !v.is_empty())
        };
        let protocol = first([
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
            "OTEL_EXPORTER_OTLP_PROTOCOL",
        ]);
        if protocol.is_some_and(|p| !p.starts_with("http/")) {
            return None;
        }
        let collector = match env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").as_str() {
            "" => parse_endpoint(&env("OTEL_EXPORTER_OTLP_ENDPOINT"), "/v1/traces"),
            endpoint => parse_endpoint(endpoint, ""),
        };
        Some(Span {
            trace: trace.to_owned(),
            parent: parent.to_owned(),
            begun: now(),
            collector: collector?,
        })
    }

    /// Ends the span and exports it. A failure is only logged.
    pub(crate) fn export(self, plugin: &str, env: &dyn Fn(&str) -> String, error: Option<&Error>) {
        let exported = self
            .body(plugin, env, error)
            .and_then(|body| self.send(&body.to_string()));
        if let Err(error) = exported {
            eprintln!(
                "exporting the span of this call to {} failed: {error}",
                self.collector.address
            );
        }
    }

    fn body(
        &self,
        plugin: &str,
        env: &dyn Fn(&str) -> String,
        error: Option<&Error>,
    ) -> io::Result<Value> {
        let mut id = [0; 8];
        holdfast_net::random(&mut id)?;
        let id: String = id.iter().map(|b| format!("{b:02x}")).collect();
        let nanoseconds = |time: SystemTime| {
            let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
            since.as_nanos().to_string()
        };
        let attribute =
            |key: &str, value: &str| json!({"key": key, "value": {"stringValue": value}});
        let verb = env("CNI_COMMAND");
        let attributes = [
            attribute("cni.plugin", plugin),
            attribute("cni.command", &verb),
            attribute("cni.container_id", &env("CNI_CONTAINERID")),
            attribute("cni.ifname", &env("CNI_IFNAME")),
        ];
        let status = match error {
            None => json!({"code": 1}),
            Some(error) => json!({"code": 2, "message": error.message}),
        };
        let span = json!({"traceId": self.trace, "spanId": id, "parentSpanId": self.parent, "name": format!("CNI {verb} {plugin}"),
            "kind": 1, "startTimeUnixNano": nanoseconds(self.begun), "endTimeUnixNano": nanoseconds(now()),
            "attributes": attributes, "status": status});
        let scope = json!({"name": "holdfast-cni", "version": env!("CARGO_PKG_VERSION")});
        Ok(json!({"resourceSpans": [{
            "resource": {"attributes": [attribute("service.name", "holdfast-cni")]},
            "scopeSpans": [{"scope": scope, "spans": [span]}]}]}))
    }

    fn send(&self, body: &str) -> io::Result<()> {
        let Collector {
            address,
            host,
            path,
        } = &self.collector;
        let mut stream = TcpStream::connect_timeout(address, STEP_TIMEOUT)?;
        stream.set_write_timeout(Some(STEP_TIMEOUT))?;
        stream.set_read_timeout(Some(STEP_TIMEOUT))?;
        let length = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes())?;
        // Closing a connection with an unread answer would reset it, and the collector could lose the request.
        let mut answer = [0; 512];
        let read = stream.read(&mut answer)?;
        match answer.get(..read) {
            Some(text) if text.starts_with(b"HTTP/1.1 2") => Ok(()),
            _ => Err(io::Error::other("the collector rejected the request")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sampled_contexts_count() {
        let (trace, span) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
        let parse = |text: String| parse_context(&text).map(|(t, s)| (t.to_owned(), s.to_owned()));
        let expected = Some((trace.to_owned(), span.to_owned()));
        for good in ["00-T-S-01", "00-T-S-03", "01-T-S-01", "01-T-S-01-more"] {
            let text = good.replace('T', trace).replace('S', span);
            assert_eq!(parse(text), expected, "{good}");
        }
        let upper = trace.to_uppercase();
        for wrong in [
            "",
            "00-T-S",
            "00-T-S-00",
            "00-T-S-1",
            "00-T-S-01-more",
            "ff-T-S-01",
            "0-T-S-01",
            "00-U-S-01",
            "00-S-T-01",
            "00-00000000000000000000000000000000-S-01",
            "00-T-0000000000000000-01",
            "00-T-S-zz",
        ] {
            let text = wrong
                .replace('T', trace)
                .replace('S', span)
                .replace('U', &upper);
            assert_eq!(parse(text), None, "{wrong}");
        }
    }

    #[test]
    fn endpoints_need_no_dns() {
        let parse = |text: &str| {
            parse_endpoint(text, "/v1/traces").map(|c| (c.address.to_string(), c.path))
        };
        for (text, address, path) in [
            ("http://127.0.0.1:4318", "127.0.0.1:4318", "/v1/traces"),
            ("http://localhost:4318/", "127.0.0.1:4318", "/v1/traces"),
            ("http://192.0.2.1/otlp", "192.0.2.1:80", "/otlp/v1/traces"),
            ("http://[::1]:4318", "[::1]:4318", "/v1/traces"),
        ] {
            assert_eq!(parse(text), Some((address.into(), path.into())), "{text}");
        }
        for wrong in [
            "",
            "http://",
            "https://127.0.0.1:4318",
            "127.0.0.1:4318",
            "http://collector:4318",
            "http://127.0.0.1:x",
            "http://127.0.0.1/a b",
            "http://127.0.0.1/a\r\nX: y",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
