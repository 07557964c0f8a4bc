//! Snapshots of the `Status` bodies of refusals while a request is received or forwarded. `tests/control/statuses.rs` has
//! the others.

use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;
use crate::api::token::Tokens;
use crate::store::Store;

/// A connection of an administrator, without TLS.
struct Client {
    api: Api,
    admin: Peer,
}

impl Client {
    fn new() -> Client {
        let key = rcgen::KeyPair::generate().expect("a key");
        let mut params = rcgen::CertificateParams::default();
        let subject = &mut params.distinguished_name;
        subject.push(rcgen::DnType::OrganizationName, "system:masters");
        subject.push(rcgen::DnType::CommonName, "admin");
        let certificate = params.self_signed(&key).expect("a certificate");
        let certificate = holdfast_https::Certificate::trusted(certificate.der().to_vec());
        let tokens = Tokens::new(&key.serialize_pem(), &key.public_key_pem()).expect("keys");
        let range = "10.96.0.0/16".parse().expect("a range");
        Client {
            api: Api::new(Store::in_memory(), tokens, range),
            admin: Peer {
                address: ([127, 0, 0, 1], 1).into(),
                certificate: Some(Arc::new(certificate)),
            },
        }
    }

    /// Sends a request as HTTP/1.0, whose response is not chunked, and returns status and body.
    async fn send(&self, peer: &Peer, line: &str, more: &str, body: &[u8]) -> String {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let api = &self.api;
        let service = service_fn(move |request| async move {
            Ok::<_, std::convert::Infallible>(respond(api.clone(), peer.clone(), request).await)
        });
        let server = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(theirs), service);
        let (mut from, mut to) = tokio::io::split(ours);
        let head = format!("{line} HTTP/1.0\r\nHost: api\r\n{more}\r\n");
        let written = async {
            // The server may close the connection before it has received the body.
            let _ = to.write_all(head.as_bytes()).await;
            let _ = to.write_all(body).await;
        };
        let mut response = vec![];
        let (_, _, read) = tokio::join!(server, written, from.read_to_end(&mut response));
        read.expect("a response");
        let response = String::from_utf8(response).expect("text");
        let (head, body) = response.split_once("\r\n\r\n").expect("a response");
        let code = head.split(' ').nth(1).unwrap_or_default();
        let retry = head.lines().find(|l| l.starts_with("retry-after"));
        let retry = retry.map_or_else(String::new, |line| format!(", {line}"));
        let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
        format!("HTTP {code}{retry}\n{body:#}\n")
    }
}

#[tokio::test(start_paused = true)]
async fn refusals_below_the_api_have_a_status() {
    let client = Client::new();
    let stranger = Peer {
        certificate: None,
        ..client.admin.clone()
    };
    let admin = &client.admin;
    let maps = "POST /api/v1/namespaces/default/configmaps";
    let log = "GET /api/v1/namespaces/default/pods/web-1/log";
    let large = vec![b' '; BODY_LIMIT + 1];
    let length = format!("Content-Length: {}\r\n", large.len());
    let cases: [(&str, &Peer, &str, &str, &[u8]); 7] = [
        (
            "an invalid token",
            &stranger,
            log,
            "Authorization: Bearer x\r\n",
            b"",
        ),
        (
            "an anonymous write",
            &stranger,
            maps,
            "Content-Length: 100\r\n",
            b"",
        ),
        ("an anonymous stream", &stranger, log, "", b""),
        ("a large body", admin, maps, &length, &large),
        ("a slow body", admin, maps, "Content-Length: 100\r\n", b""),
        ("a log without nodes", admin, log, "", b""),
        (
            "impersonation of a group without a user",
            admin,
            log,
            "Impersonate-Group: dev\r\n",
            b"",
        ),
    ];
    let mut all = String::new();
    for (what, peer, line, more, body) in cases {
        let status = client.send(peer, line, more, body).await;
        all.push_str(&format!("# {what}: {status}\n"));
    }
    let mut held = vec![];
    let refused = loop {
        match client.api.shares.reserve_stream("admin") {
            Ok(guard) => held.push(guard),
            Err(refused) => break refused,
        }
    };
    for (what, error) in [("many watches", refused), ("a slow response", timed_out())] {
        all.push_str(&format!(
            "# {what}: HTTP {}\n{:#}\n\n",
            error.code,
            error.status()
        ));
    }
    insta::assert_snapshot!("refusals", all);
}

#[test]
fn responses_about_endpoints_warn_of_their_deprecation() {
    let of = |path: &str, code: u16| {
        let response = hyper::Response::builder().status(code);
        let response = response.body(holdfast_https::full("")).expect("a response");
        let response = warn(response, deprecation(&route::target(path)));
        let values = response.headers().get_all("warning").iter();
        let texts = values.map(|v| v.to_str().expect("text").to_owned());
        texts.collect::<Vec<_>>()
    };
    let text =
        "299 - \"v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice\"";
    for path in [
        "/api/v1/endpoints",
        "/api/v1/namespaces/n/endpoints",
        "/api/v1/namespaces/n/endpoints/e",
    ] {
        assert_eq!(of(path, 200), [text], "{path}");
        assert_eq!(of(path, 404), [text], "{path}");
        assert!(of(path, 403).is_empty(), "{path}");
    }
    for path in [
        "/api/v1/services",
        "/apis/discovery.k8s.io/v1/endpointslices",
        "/version",
    ] {
        assert!(of(path, 200).is_empty(), "{path}");
    }
}
