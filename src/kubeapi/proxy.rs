//! Selects the proxy to an apiserver: `proxy-url` of the kubeconfig's cluster, otherwise the environment
//! (`HTTPS_PROXY`, `HTTP_PROXY`, `NO_PROXY`), as client-go does.

use std::net::IpAddr;

use hyper::Uri;
use hyper::header::HeaderValue;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use kube::config::Kubeconfig;

/// The proxy on the way to a server.
#[derive(Debug, Clone)]
pub(super) enum Proxy {
    /// No proxy.
    None,
    /// An HTTP proxy, used with `CONNECT`.
    Http {
        uri: Uri,
        /// `Proxy-Authorization`, for a URL with a user.
        auth: Option<HeaderValue>,
    },
    /// The same over TLS; its certificate is verified like the apiserver's.
    Https { uri: Uri, auth: Option<HeaderValue> },
    /// SOCKS 5; the proxy resolves host names.
    Socks5 {
        uri: Uri,
        /// User and password.
        auth: Option<(String, String)>,
    },
}

/// Returns the `proxy-url` of the current context's cluster.
pub(super) fn proxy_url(file: &Kubeconfig) -> Option<String> {
    let current = file.current_context.as_ref()?;
    let context = file.contexts.iter().find(|c| c.name == *current)?;
    let cluster = &context.context.as_ref()?.cluster;
    let found = file.clusters.iter().find(|c| c.name == *cluster)?;
    let url = found.cluster.as_ref()?.proxy_url.clone();
    url.filter(|url| !url.is_empty())
}

/// Whether a server is on this machine: the environment's proxy does not apply to it.
fn is_local(server: &Uri) -> bool {
    let host = server.host().unwrap_or_default();
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare == "localhost" || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

impl Proxy {
    /// Selects the proxy to `server`; `own` is the kubeconfig's `proxy-url`. The error is a sentence.
    pub(super) fn towards(server: &Uri, own: Option<&str>) -> Result<Proxy, String> {
        let found = match own {
            Some(url) => {
                let matcher = Matcher::builder().all(url).build();
                // The message omits the URL, which may contain a password.
                Some(matcher.intercept(server).ok_or(
                    "proxy-url is not a valid URL: use http://, https:// or socks5:// with a host and a port",
                )?)
            }
            None if is_local(server) => None,
            None => Matcher::from_env().intercept(server),
        };
        found.map_or(Ok(Proxy::None), |found| Proxy::of(&found))
    }

    fn of(found: &Intercept) -> Result<Proxy, String> {
        let uri = found.uri().clone();
        let auth = found.basic_auth().cloned();
        match uri.scheme_str() {
            Some("http") => Ok(Proxy::Http { uri, auth }),
            Some("https") => Ok(Proxy::Https { uri, auth }),
            Some("socks5" | "socks5h") => {
                let own = |(user, password): (&str, &str)| (user.to_owned(), password.to_owned());
                let auth = found.raw_auth().map(own);
                Ok(Proxy::Socks5 { uri, auth })
            }
            other => Err(format!(
                "proxy-url has the unsupported scheme {:?}: use http://, https:// or socks5://",
                other.unwrap_or_default()
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_url_of_another_scheme_is_rejected() {
        let server: Uri = "https://10.0.0.1:6443".parse().expect("a URI");
        let of = |url: &str| Proxy::towards(&server, Some(url));
        assert!(matches!(
            of("http://proxy:3128"),
            Ok(Proxy::Http { auth: None, .. })
        ));
        assert!(matches!(of("https://proxy"), Ok(Proxy::Https { .. })));
        let Ok(Proxy::Http {
            auth: Some(auth), ..
        }) = of("http://u:p%40ss@proxy:3128")
        else {
            panic!("a proxy with a user");
        };
        assert_eq!(auth, "Basic dTpwQHNz");
        let Ok(Proxy::Socks5 {
            auth: Some(auth), ..
        }) = of("socks5://u:p@proxy:1080")
        else {
            panic!("a SOCKS proxy with a user");
        };
        assert_eq!(auth, ("u".into(), "p".into()));
        for wrong in ["http://", "ftp://proxy"] {
            assert!(of(wrong).is_err_and(|e| e.contains("proxy-url")), "{wrong}");
        }
        for here in [
            "https://127.0.0.1:6443",
            "https://[::1]:6443",
            "https://localhost",
        ] {
            assert!(is_local(&here.parse().expect("a URI")), "{here}");
        }
    }
}
