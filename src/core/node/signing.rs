//! Certificates of nodes: what a node asks for, what a signer allows, and when one is due again (kubelet spec, 15;
//! control-plane spec, 5.11). Pure.

use jiff::{SignedDuration, Timestamp};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer as _;

/// Signs certificates by which nodes show who they are.
pub const CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
/// Signs certificates with which nodes serve.
pub const SERVING: &str = "kubernetes.io/kubelet-serving";

/// Who asks for a certificate.
#[derive(Debug, Clone, Copy)]
pub struct Requester<'a> {
    /// The user's name.
    pub name: &'a str,
    /// Its groups.
    pub groups: &'a [String],
}

/// What becomes of a request of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is not for us to say anything of it.
    Ignore,
    /// It keeps the signer's rules, and may be allowed without anybody looking.
    Allow,
    /// It keeps the signer's rules; somebody has to allow it.
    Wait,
    /// It breaks them, for this reason.
    Refuse(String),
}

fn names(csr: &X509CertificationRequest<'_>) -> (bool, bool) {
    let mut found = (false, false);
    for extension in csr.requested_extensions().into_iter().flatten() {
        if let ParsedExtension::SubjectAlternativeName(names) = extension {
            for name in &names.general_names {
                match name {
                    GeneralName::DNSName(_) | GeneralName::IPAddress(_) => found.0 = true,
                    _ => found.1 = true,
                }
            }
        }
    }
    found
}

/// Judges a request (DER) for one of the signers of nodes.
#[must_use]
pub fn judge(signer: &str, request: &[u8], usages: &[&str], requester: Requester<'_>) -> Verdict {
    if signer != CLIENT && signer != SERVING {
        return Verdict::Ignore;
    }
    let refuse = |why: &str| Verdict::Refuse(why.to_owned());
    let Ok((_, csr)) = X509CertificationRequest::from_der(request) else {
        return refuse("the request cannot be read");
    };
    let subject = &csr.certification_request_info.subject;
    let organizations: Vec<&str> = subject
        .iter_organization()
        .filter_map(|o| o.as_str().ok())
        .collect();
    let name = subject
        .iter_common_name()
        .next()
        .and_then(|n| n.as_str().ok())
        .unwrap_or_default();
    if organizations != ["system:nodes"] {
        return refuse("the organization must be system:nodes, and no other");
    }
    if name.strip_prefix("system:node:").is_none_or(str::is_empty) {
        return refuse("the common name must be system:node:<name>");
    }
    let main = if signer == CLIENT {
        "client auth"
    } else {
        "server auth"
    };
    if !usages.contains(&main)
        || !usages.contains(&"digital signature")
        || usages
            .iter()
            .any(|u| ![main, "digital signature", "key encipherment"].contains(u))
    {
        return Verdict::Refuse(format!(
            "the usages must be digital signature, {main}, and key encipherment if need be"
        ));
    }
    let (addresses, others) = names(&csr);
    if signer == SERVING {
        return match (addresses, others) {
            (_, true) => refuse("only DNS names and IP addresses may be served"),
            (false, _) => refuse("at least one DNS name or IP address is needed"),
            // A node asks for itself; nobody else may.
            _ if requester.name != name => {
                refuse("a serving certificate is asked for by its own node")
            }
            _ => Verdict::Wait,
        };
    }
    if addresses || others {
        return refuse("a client has no other names");
    }
    let bootstraps = requester
        .groups
        .iter()
        .any(|g| g == "system:bootstrappers" || g.starts_with("system:bootstrappers:"));
    if bootstraps || requester.name == name {
        Verdict::Allow
    } else {
        Verdict::Wait
    }
}

/// The user and the groups that a client certificate (DER) names: its common name and its organizations.
#[must_use]
pub fn subject(der: &[u8]) -> Option<(String, Vec<String>)> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    let subject = certificate.subject();
    let name = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
    Some((
        name,
        subject
            .iter_organization()
            .filter_map(|o| o.as_str().ok().map(Into::into))
            .collect(),
    ))
}

/// The DER of a request in PEM.
#[must_use]
pub fn request_der(pem: &[u8]) -> Option<Vec<u8>> {
    x509_parser::pem::parse_x509_pem(pem)
        .ok()
        .filter(|(_, block)| block.label == "CERTIFICATE REQUEST")
        .map(|(_, block)| block.contents)
}

/// When a certificate is due to be renewed: between seven and nine tenths of its life. `share` is between 0 and 1.
#[must_use]
pub fn due(begins: Timestamp, ends: Timestamp, share: f64) -> Timestamp {
    let life = ends.duration_since(begins);
    begins + SignedDuration::from_secs_f64(life.as_secs_f64() * (0.7 + 0.2 * share.clamp(0.0, 1.0)))
}

/// From when until when the first certificate of a PEM text is good.
#[must_use]
pub fn lifetime(pem: &[u8]) -> Option<(Timestamp, Timestamp)> {
    let block = x509_parser::pem::Pem::iter_from_buffer(pem)
        .flatten()
        .find(|b| b.label == "CERTIFICATE")?;
    let (_, certificate) = x509_parser::parse_x509_certificate(&block.contents).ok()?;
    let validity = certificate.validity();
    Some((
        Timestamp::from_second(validity.not_before.timestamp()).ok()?,
        Timestamp::from_second(validity.not_after.timestamp()).ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(organization: &str, name: &str, alternative: &[&str]) -> Vec<u8> {
        let mut params = rcgen::CertificateParams::new(
            alternative
                .iter()
                .map(|n| (*n).to_owned())
                .collect::<Vec<_>>(),
        )
        .expect("names");
        params
            .distinguished_name
            .push(rcgen::DnType::OrganizationName, organization);
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, name);
        params
            .serialize_request(&rcgen::KeyPair::generate().expect("a key"))
            .expect("a request")
            .der()
            .to_vec()
    }

    #[test]
    fn nodes_get_certificates_for_themselves_and_nothing_more() {
        let bootstrapper = Requester {
            name: "system:bootstrap:abcdef",
            groups: &["system:bootstrappers".to_owned()],
        };
        let node = Requester {
            name: "system:node:n",
            groups: &[],
        };
        let other = Requester {
            name: "system:node:m",
            groups: &[],
        };
        let client = ["digital signature", "client auth"];
        let serving = ["digital signature", "server auth", "key encipherment"];
        let own = request("system:nodes", "system:node:n", &[]);
        let served = request("system:nodes", "system:node:n", &["n", "192.0.2.1"]);
        assert_eq!(judge(CLIENT, &own, &client, bootstrapper), Verdict::Allow);
        assert_eq!(judge(CLIENT, &own, &client, node), Verdict::Allow);
        assert_eq!(
            judge(CLIENT, &own, &client, other),
            Verdict::Wait,
            "that is for somebody to decide"
        );
        assert_eq!(judge(SERVING, &served, &serving, node), Verdict::Wait);
        assert_eq!(
            judge("example.com/other", &own, &client, node),
            Verdict::Ignore
        );
        for (signer, der, usages, requester) in [
            (
                CLIENT,
                &request("system:masters", "system:node:n", &[]),
                &client[..],
                bootstrapper,
            ),
            (
                CLIENT,
                &request("system:nodes", "admin", &[]),
                &client,
                bootstrapper,
            ),
            (
                CLIENT,
                &request("system:nodes", "system:node:", &[]),
                &client,
                bootstrapper,
            ),
            (CLIENT, &served, &client, bootstrapper),
            (
                CLIENT,
                &own,
                &["client auth", "digital signature", "code signing"],
                bootstrapper,
            ),
            (CLIENT, &own, &serving, bootstrapper),
            (SERVING, &own, &serving, node),
            (SERVING, &served, &serving, other),
            (CLIENT, &vec![1, 2, 3], &client, bootstrapper),
        ] {
            assert!(
                matches!(judge(signer, der, usages, requester), Verdict::Refuse(_)),
                "{signer} {usages:?}"
            );
        }
    }

    #[test]
    fn renewal_is_due_before_the_end() {
        let at = |s: i64| Timestamp::from_second(s).expect("a time");
        assert_eq!(
            (due(at(0), at(1000), 0.0), due(at(0), at(1000), 1.0)),
            (at(700), at(900))
        );
        let made = rcgen::generate_simple_self_signed(["a".into()]).expect("a certificate");
        let text = format!("{}{}", made.signing_key.serialize_pem(), made.cert.pem());
        assert!(lifetime(text.as_bytes()).is_some_and(|(begins, ends)| begins < ends));
        assert_eq!(lifetime(b"nothing"), None);
    }
}
