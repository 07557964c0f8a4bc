//! Certificates of nodes: checks of signing requests, comparison of issued certificates with their requests, and
//! renewal times (`pkg/apis/certificates/helpers.go`, `pkg/controller/certificates/approver/sarapprove.go`,
//! `pkg/kubelet/certificate/kubelet.go`). Pure.

use std::collections::BTreeSet;
use std::net::IpAddr;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Node;
use x509_parser::certificate::X509Certificate;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::cri_attributes::ParsedCriAttribute;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::oid_registry::{OID_X509_COMMON_NAME, OID_X509_ORGANIZATION_NAME};
use x509_parser::prelude::FromDer as _;
use x509_parser::x509::{X509Name, X509Version};

use crate::time;

/// Signer of client certificates that authenticate nodes to the apiserver.
pub const CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
/// Signer of serving certificates of nodes.
pub const SERVING: &str = "kubernetes.io/kubelet-serving";
/// Signer of client certificates for the service proxies of nodes. A node requests the certificate of its own proxy.
pub const PROXY: &str = "holdfast.example/proxy-client";
/// The group of the service proxies.
pub const PROXY_GROUP: &str = "holdfast:proxies";
/// The user name of a node's service proxy, before the node's name.
pub const PROXY_USER: &str = "system:holdfast:proxy:";

/// The user that created a signing request.
#[derive(Debug, Clone, Copy)]
pub struct Requester<'a> {
    /// The user's name.
    pub name: &'a str,
    /// The user's groups.
    pub groups: &'a [String],
}

/// Decision about a node's signing request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The request is for another signer.
    Ignore,
    /// The request satisfies the signer's rules and may be approved automatically.
    Allow,
    /// The request satisfies the signer's rules and needs manual approval.
    Wait,
    /// The request violates the signer's rules, for this reason.
    Refuse(String),
}

/// Content of a signing request, parsed once. This value is checked, signed, and compared with the issued certificate.
/// Requests with any other content are rejected, so that no other parser can interpret them differently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CsrRequest {
    /// The subject's only common name.
    pub name: String,
    /// The subject's only organization.
    pub organization: String,
    /// The requested DNS names.
    pub dns: Vec<String>,
    /// The requested IP addresses.
    pub addresses: Vec<IpAddr>,
    /// The public key as a DER-encoded SubjectPublicKeyInfo.
    pub key: Vec<u8>,
}

/// The common name and organization of a subject that has exactly one of each and nothing else.
fn only_names(subject: &X509Name<'_>) -> Result<(String, String), String> {
    let (mut name, mut organization) = (None, None);
    for attribute in subject.iter_attributes() {
        let slot = if *attribute.attr_type() == OID_X509_COMMON_NAME {
            &mut name
        } else if *attribute.attr_type() == OID_X509_ORGANIZATION_NAME {
            &mut organization
        } else {
            return Err(format!(
                "the subject has the attribute {}; only a common name and an organization are allowed",
                attribute.attr_type()
            ));
        };
        let text = attribute
            .as_str()
            .map_err(|_| "a name in the subject is not plain text".to_owned())?;
        if slot.replace(text.to_owned()).is_some() {
            return Err(
                "the subject has two common names or two organizations; only one of each is allowed".into(),
            );
        }
    }
    match (name, organization) {
        (Some(name), Some(organization)) => Ok((name, organization)),
        (None, _) => Err("the common name must be system:node:<name>".into()),
        (_, None) => Err("the only organization must be system:nodes".into()),
    }
}

fn alternative_names(names: &[GeneralName<'_>]) -> Result<(Vec<String>, Vec<IpAddr>), String> {
    let (mut dns, mut addresses) = (vec![], vec![]);
    for name in names {
        match name {
            GeneralName::DNSName(name) => dns.push((*name).to_owned()),
            GeneralName::IPAddress(bytes) => {
                let v4 = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
                let v6 = <[u8; 16]>::try_from(*bytes).map(IpAddr::from);
                addresses.push(
                    v4.or(v6)
                        .map_err(|_| "an IP address has neither 4 nor 16 bytes")?,
                );
            }
            _ => {
                return Err(
                    "only DNS names and IP addresses are allowed as alternative names".into(),
                );
            }
        }
    }
    Ok((dns, addresses))
}

/// Parses a DER-encoded request for one of the node signers; the error names the content that is not allowed.
pub fn parse_request(request: &[u8]) -> Result<CsrRequest, String> {
    let Ok((rest, csr)) = X509CertificationRequest::from_der(request) else {
        return Err("the request is not a valid PKCS#10 request".into());
    };
    if !rest.is_empty() {
        return Err("the request has trailing bytes".into());
    }
    let info = &csr.certification_request_info;
    let (name, organization) = only_names(&info.subject)?;
    let (mut dns, mut addresses) = (vec![], vec![]);
    let mut extensions = vec![];
    for attribute in info.iter_attributes() {
        match attribute.parsed_attribute() {
            ParsedCriAttribute::ExtensionRequest(request) => extensions.extend(&request.extensions),
            _ => {
                return Err(format!(
                    "the request has the attribute {}; only extensions are allowed",
                    attribute.oid
                ));
            }
        }
    }
    for (i, extension) in extensions.iter().enumerate() {
        match extension.parsed_extension() {
            ParsedExtension::SubjectAlternativeName(names) if i == 0 => {
                (dns, addresses) = alternative_names(&names.general_names)?;
            }
            _ => {
                return Err(format!(
                    "the request has the extension {}; only one extension of alternative names is allowed",
                    extension.oid
                ));
            }
        }
    }
    Ok(CsrRequest {
        name,
        organization,
        dns,
        addresses,
        key: info.subject_pki.raw.to_vec(),
    })
}

/// Checks that a DER-encoded certificate has exactly the requested content; the error names the difference.
pub fn check_issued(certificate: &[u8], csr: &CsrRequest, client: bool) -> Result<(), String> {
    let (_, certificate) = x509_parser::parse_x509_certificate(certificate)
        .map_err(|_| "the certificate is not a valid X.509 certificate".to_owned())?;
    if only_names(certificate.subject())? != (csr.name.clone(), csr.organization.clone()) {
        return Err("the certificate has another subject".into());
    }
    let names = certificate
        .subject_alternative_name()
        .map_err(|e| e.to_string())?
        .map_or(Ok((vec![], vec![])), |names| {
            alternative_names(&names.value.general_names)
        })?;
    if names != (csr.dns.clone(), csr.addresses.clone()) {
        return Err("the certificate has other alternative names".into());
    }
    if certificate.public_key().raw != csr.key {
        return Err("the certificate is for another key".into());
    }
    let usage = certificate
        .extended_key_usage()
        .map_err(|e| e.to_string())?;
    let usage = usage.map(|u| {
        (
            u.value.client_auth,
            u.value.server_auth,
            u.value.any || !u.value.other.is_empty(),
        )
    });
    if certificate.is_ca() || usage != Some((client, !client, false)) {
        return Err("the certificate allows other uses than requested".into());
    }
    Ok(())
}

fn check_usages(usages: &[&str], signer: &str) -> Result<(), String> {
    let main = match signer {
        SERVING => "server auth",
        _ => "client auth",
    };
    let mut others = usages.iter();
    let is_fine = usages.contains(&main)
        && usages.contains(&"digital signature")
        && others.all(|u| [main, "digital signature", "key encipherment"].contains(u));
    is_fine.then_some(()).ok_or_else(|| {
        format!("the usages must be digital signature, {main} and optionally key encipherment")
    })
}

/// Decides about a parsed request to one of the node signers.
#[must_use]
pub fn decide(
    signer: &str,
    csr: &Result<CsrRequest, String>,
    usages: &[&str],
    requester: Requester<'_>,
) -> Verdict {
    let (group, prefix) = match signer {
        CLIENT | SERVING => ("system:nodes", "system:node:"),
        PROXY => (PROXY_GROUP, PROXY_USER),
        _ => return Verdict::Ignore,
    };
    let reject = |why: &str| Verdict::Refuse(why.to_owned());
    let csr = match csr {
        Ok(csr) => csr,
        Err(why) => return reject(why),
    };
    let name = csr.name.as_str();
    if csr.organization != group {
        return Verdict::Refuse(format!("the only organization must be {group}"));
    }
    let Some(node) = name.strip_prefix(prefix).filter(|node| !node.is_empty()) else {
        return Verdict::Refuse(format!("the common name must be {prefix}<name>"));
    };
    if let Err(why) = check_usages(usages, signer) {
        return Verdict::Refuse(why);
    }
    let has_names = !csr.dns.is_empty() || !csr.addresses.is_empty();
    if signer == SERVING {
        return match has_names {
            false => reject("at least one DNS name or IP address is needed"),
            // Only the node itself may request its serving certificate.
            true if requester.name != name => {
                reject("only the node itself may request its serving certificate")
            }
            true => Verdict::Wait,
        };
    }
    if has_names {
        return reject("a client certificate must not have alternative names");
    }
    if signer == PROXY {
        return match requester.name.strip_prefix("system:node:") {
            Some(own) if own == node => Verdict::Wait,
            _ => reject("only the node itself may request the certificate of its service proxy"),
        };
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

/// The names and addresses of a Node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeNames {
    /// Its own name and its DNS names.
    pub dns: BTreeSet<String>,
    /// Its addresses.
    pub addresses: BTreeSet<IpAddr>,
}

impl NodeNames {
    /// Reads a Node. Malformed addresses are omitted.
    #[must_use]
    pub fn of(node: &Node) -> NodeNames {
        let mut names = NodeNames::default();
        names.dns.extend(node.metadata.name.clone());
        let reported = node
            .status
            .iter()
            .flat_map(|s| s.addresses.iter().flatten());
        for one in reported {
            match one.type_.as_str() {
                "InternalIP" | "ExternalIP" => {
                    names.addresses.extend(one.address.parse::<IpAddr>())
                }
                "Hostname" | "InternalDNS" | "ExternalDNS" => {
                    names.dns.insert(one.address.clone());
                }
                _ => {}
            }
        }
        names
    }

    /// Removes the names and addresses that another Node has, too.
    pub fn remove(&mut self, other: &NodeNames) {
        self.dns.retain(|name| !other.dns.contains(name));
        self.addresses
            .retain(|address| !other.addresses.contains(address));
    }
}

/// Names that stand for the apiserver or the machine itself: no node gets a certificate for them.
fn is_reserved(name: &str) -> bool {
    name == "localhost" || name == "kubernetes" || name.starts_with("kubernetes.default")
}

/// Whether a request that a node has made for itself ([`Verdict::Wait`]) may be approved: the Node must exist, and all requested
/// names and addresses must belong to it. Upstream leaves this decision to operators
/// (`pkg/controller/certificates/approver/sarapprove.go` approves client certificates only).
#[must_use]
pub fn belongs_to_node(
    signer: &str,
    csr: &CsrRequest,
    node_names: impl FnOnce(&str) -> Option<NodeNames>,
) -> bool {
    let prefix = match signer {
        SERVING => "system:node:",
        PROXY => PROXY_USER,
        _ => return false,
    };
    let node = csr.name.strip_prefix(prefix);
    let Some(known) = node.and_then(node_names) else {
        return false;
    };
    let has_name = |name: &String| known.dns.contains(name) && !is_reserved(name);
    let has_address =
        |address: &IpAddr| known.addresses.contains(address) && !address.is_loopback();
    csr.dns.iter().all(has_name) && csr.addresses.iter().all(has_address)
}

/// User and groups of a DER-encoded client certificate: its common name, of which there must be exactly one, and its
/// organizations.
#[must_use]
pub fn subject(der: &[u8]) -> Option<(String, Vec<String>)> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    let subject = certificate.subject();
    let mut names = subject.iter_common_name();
    let (Some(name), None) = (names.next(), names.next()) else {
        return None;
    };
    let name = name.as_str().ok()?.to_owned();
    let groups = subject
        .iter_organization()
        .map(|o| o.as_str().ok().map(Into::into))
        .collect::<Option<Vec<String>>>()?;
    Some((name, groups))
}

/// The DER content of a PEM-encoded request.
#[must_use]
pub fn request_der(pem: &[u8]) -> Option<Vec<u8>> {
    x509_parser::pem::parse_x509_pem(pem)
        .ok()
        .filter(|(_, block)| block.label == "CERTIFICATE REQUEST")
        .map(|(_, block)| block.contents)
}

/// Encodes a single PEM block.
#[must_use]
pub fn pem(label: &str, der: &[u8]) -> String {
    use base64::Engine as _;
    let text = base64::engine::general_purpose::STANDARD.encode(der);
    let lines: Vec<&str> = text
        .as_bytes()
        .chunks(64)
        .filter_map(|line| std::str::from_utf8(line).ok())
        .collect();
    format!(
        "-----BEGIN {label}-----\n{}\n-----END {label}-----\n",
        lines.join("\n")
    )
}

/// When to renew a certificate: after 70 to 90 % of its validity. `share` is between 0 and 1.
#[must_use]
pub(crate) fn renewal_time(begins: Timestamp, ends: Timestamp, share: f64) -> Timestamp {
    let life = ends.duration_since(begins);
    let until_due = life.as_secs_f64() * (0.7 + 0.2 * share.clamp(0.0, 1.0));
    // A fraction of the validity is never longer than the validity.
    time::later(
        begins,
        SignedDuration::try_from_secs_f64(until_due).unwrap_or(life),
    )
}

/// The signer and the usages of the client certificate of a node's service proxy.
pub const PROXY_REQUEST: (&str, &[&str]) = (PROXY, &["digital signature", "client auth"]);

/// Whether a certificate (PEM) must be renewed now: late in its validity, or because it cannot be read. Machines that started
/// together renew at different times, because the time of the call contributes a share.
#[must_use]
pub fn is_renewal_due(pem: &[u8], now: Timestamp) -> bool {
    let share = f64::from(now.subsec_nanosecond() % 1000) / 1000.0;
    let due = lifetime(pem).map(|(begins, ends)| renewal_time(begins, ends, share));
    due.is_none_or(|due| due <= now)
}

/// Reads a value from the first certificate of a PEM text.
fn read<T>(pem: &[u8], what: impl FnOnce(&X509Certificate<'_>) -> Option<T>) -> Option<T> {
    let block = x509_parser::pem::Pem::iter_from_buffer(pem)
        .flatten()
        .find(|b| b.label == "CERTIFICATE")?;
    let (_, certificate) = x509_parser::parse_x509_certificate(&block.contents).ok()?;
    what(&certificate)
}

/// Start and end of validity of the first certificate in a PEM text.
#[must_use]
pub fn lifetime(pem: &[u8]) -> Option<(Timestamp, Timestamp)> {
    read(pem, |certificate| {
        let validity = certificate.validity();
        Some((
            Timestamp::from_second(validity.not_before.timestamp()).ok()?,
            Timestamp::from_second(validity.not_after.timestamp()).ok()?,
        ))
    })
}

/// Public key of the first certificate in a PEM text, as a DER-encoded SubjectPublicKeyInfo.
#[must_use]
pub fn public_key(pem: &[u8]) -> Option<Vec<u8>> {
    read(pem, |certificate| {
        Some(certificate.public_key().raw.to_vec())
    })
}

/// Whether the first certificate in a PEM text is X.509 version 1, without extensions, which rustls rejects.
#[must_use]
pub fn is_version_1(pem: &[u8]) -> bool {
    read(pem, |certificate| {
        Some(certificate.version() == X509Version::V1)
    })
    .unwrap_or_default()
}

/// Whether the first certificate in a PEM text is valid for all of these names and addresses.
#[must_use]
pub fn covers_names(pem: &[u8], names: &[String]) -> bool {
    let names_covered = read(pem, |certificate| {
        let extension = certificate.subject_alternative_name().ok()??;
        alternative_names(&extension.value.general_names).ok()
    });
    let (dns, addresses) = names_covered.unwrap_or_default();
    names.iter().all(|name| match name.parse() {
        Ok(address) => addresses.contains(&address),
        Err(_) => dns.contains(name),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(organization: &str, name: &str, alternative: &[&str]) -> Vec<u8> {
        request_with(organization, name, alternative, |_| {})
    }

    fn request_with(
        organization: &str,
        name: &str,
        alternative: &[&str],
        more: impl FnOnce(&mut rcgen::CertificateParams),
    ) -> Vec<u8> {
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
        more(&mut params);
        params
            .serialize_request(&rcgen::KeyPair::generate().expect("a key"))
            .expect("a request")
            .der()
            .to_vec()
    }

    fn decide(signer: &str, der: &[u8], usages: &[&str], requester: Requester<'_>) -> Verdict {
        super::decide(signer, &parse_request(der), usages, requester)
    }

    /// Signers or relying parties could interpret content other than one common name, one organization and alternative
    /// names differently.
    #[test]
    fn ambiguous_certificate_requests_are_rejected() {
        type Change = fn(&mut rcgen::CertificateParams);
        let second_name: Change = |p| {
            p.distinguished_name.push(
                rcgen::DnType::CustomDnType(vec![2, 5, 4, 3]),
                "system:serviceaccount:kube-system:admin",
            );
        };
        let second_group: Change = |p| {
            p.distinguished_name.push(
                rcgen::DnType::CustomDnType(vec![2, 5, 4, 10]),
                "system:masters",
            );
        };
        let unit: Change = |p| {
            p.distinguished_name
                .push(rcgen::DnType::OrganizationalUnitName, "system:masters");
        };
        let extension: Change = |p| {
            p.custom_extensions
                .push(rcgen::CustomExtension::from_oid_content(
                    &[1, 3, 6, 1, 4, 1, 1],
                    vec![5, 0],
                ));
        };
        let usage: Change = |p| p.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
        let email: Change = |p| {
            p.subject_alt_names = vec![rcgen::SanType::Rfc822Name(
                "a@b".try_into().expect("an address"),
            )];
        };
        for (what, change, words) in [
            ("two common names", second_name, "two common names"),
            (
                "two organizations",
                second_group,
                "two common names or two organizations",
            ),
            ("a unit", unit, "the attribute 2.5.4.11"),
            (
                "an unknown extension",
                extension,
                "the extension 1.3.6.1.4.1.1",
            ),
            ("key usages", usage, "the extension 2.5.29.15"),
            ("a mail address", email, "only DNS names"),
        ] {
            let der = request_with("system:nodes", "system:node:n", &[], change);
            let why = parse_request(&der).expect_err(what);
            assert!(why.contains(words), "{what}: {why}");
        }
        let mut trailing = request("system:nodes", "system:node:n", &[]);
        trailing.push(0);
        assert!(parse_request(&trailing).is_err());
        let mut two = rcgen::CertificateParams::default();
        second_name(&mut two);
        let key = rcgen::KeyPair::generate().expect("a key");
        let certificate = two.self_signed(&key).expect("a certificate");
        assert_eq!(
            subject(certificate.der()),
            None,
            "such a certificate has no subject either"
        );
    }

    #[test]
    fn nodes_get_certificates_only_for_themselves() {
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
        assert_eq!(decide(CLIENT, &own, &client, bootstrapper), Verdict::Allow);
        assert_eq!(decide(CLIENT, &own, &client, node), Verdict::Allow);
        assert_eq!(
            decide(CLIENT, &own, &client, other),
            Verdict::Wait,
            "an administrator decides"
        );
        assert_eq!(decide(SERVING, &served, &serving, node), Verdict::Wait);
        assert_eq!(
            decide("example.com/other", &own, &client, node),
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
                matches!(decide(signer, der, usages, requester), Verdict::Refuse(_)),
                "{signer} {usages:?}"
            );
        }
    }

    #[test]
    fn certificates_are_renewed_before_they_expire() {
        let at = |s: i64| Timestamp::from_second(s).expect("a time");
        assert_eq!(
            (
                renewal_time(at(0), at(1000), 0.0),
                renewal_time(at(0), at(1000), 1.0)
            ),
            (at(700), at(900))
        );
        let made = rcgen::generate_simple_self_signed(["a".into()]).expect("a certificate");
        let text = format!("{}{}", made.signing_key.serialize_pem(), made.cert.pem());
        assert!(lifetime(text.as_bytes()).is_some_and(|(begins, ends)| begins < ends));
        assert_eq!(lifetime(b"nothing"), None);
    }

    #[test]
    fn a_certificate_covers_only_its_own_names() {
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        let of = |own: &[&str], requested: &[&str]| {
            let made = rcgen::generate_simple_self_signed(names(own)).expect("a certificate");
            covers_names(made.cert.pem().as_bytes(), &names(requested))
        };
        assert!(of(
            &["n1", "192.0.2.1", "2001:db8::1"],
            &["n1", "2001:db8:0::1"]
        ));
        assert!(!of(&["n1", "192.0.2.1"], &["n1", "192.0.2.2"]));
        assert!(!of(&["192.0.2.1"], &["n1"]));
        assert!(of(&["n1"], &[]) && !covers_names(b"", &names(&["n1"])));
    }

    #[test]
    fn a_node_requests_only_the_certificate_of_its_own_proxy() {
        let usages = ["client auth", "digital signature"];
        let of = |group: &str, name: &str, alternative: &[&str], user: &str| {
            let groups = ["system:nodes".to_owned()];
            let requester = Requester {
                name: user,
                groups: &groups,
            };
            decide(
                PROXY,
                &request(group, name, alternative),
                &usages,
                requester,
            )
        };
        let (group, user, node) = (PROXY_GROUP, "system:holdfast:proxy:n", "system:node:n");
        assert_eq!(of(group, user, &[], node), Verdict::Wait);
        for (group, name, alternative, user) in [
            (group, user, &[][..], "system:node:m"),
            (group, user, &[], "system:holdfast:proxy:n"),
            (group, user, &[], "n"),
            (group, user, &["n"], node),
            (group, "system:holdfast:proxy:", &[], "system:node:"),
            (group, node, &[], node),
            ("system:nodes", user, &[], node),
            ("system:masters", user, &[], node),
        ] {
            let verdict = of(group, name, alternative, user);
            assert!(
                matches!(verdict, Verdict::Refuse(_)),
                "{group} {name} {alternative:?} {user}: {verdict:?}"
            );
        }
    }

    #[test]
    fn certificates_are_for_a_nodes_own_names() {
        let node = |name: &str, addresses: &[(&str, &str)]| -> NodeNames {
            let addresses: Vec<_> = addresses
                .iter()
                .map(|(kind, address)| serde_json::json!({"type": kind, "address": address}))
                .collect();
            let node =
                serde_json::json!({"metadata": {"name": name}, "status": {"addresses": addresses}});
            NodeNames::of(&serde_json::from_value(node).expect("a Node"))
        };
        let mut known = node(
            "n",
            &[
                ("InternalIP", "192.0.2.7"),
                ("ExternalIP", "2001:db8::7"),
                ("InternalIP", "192.0.2.1"),
                ("InternalIP", "127.0.0.1"),
                ("InternalIP", "no address"),
                ("Hostname", "n.example"),
                ("InternalDNS", "kubernetes.default.svc"),
                ("ExternalDNS", "localhost"),
                ("Other", "other"),
            ],
        );
        known.remove(&node("m", &[("InternalIP", "192.0.2.1")]));
        let of = |signer: &str, user: &str, names: &[&str]| {
            let csr = parse_request(&request("system:nodes", user, names)).expect("plain");
            belongs_to_node(signer, &csr, |name| (name == "n").then(|| known.clone()))
        };
        for (names, expected) in [
            (&["n", "n.example", "192.0.2.7", "2001:db8::7"][..], true),
            (&["192.0.2.7"], true),
            (&["n", "192.0.2.8"], false),
            (&["other"], false),
            (&["kubernetes.default.svc"], false),
            (&["localhost"], false),
            (&["127.0.0.1"], false),
            // Another Node reports this address, too.
            (&["192.0.2.1"], false),
        ] {
            assert_eq!(of(SERVING, "system:node:n", names), expected, "{names:?}");
        }
        assert!(
            !of(SERVING, "system:node:m", &["n"]),
            "there is no such Node"
        );
        assert!(!of(CLIENT, "system:node:n", &[]));
        assert!(of(PROXY, "system:holdfast:proxy:n", &[]));
        assert!(!of(PROXY, "system:holdfast:proxy:m", &[]));
    }
}
