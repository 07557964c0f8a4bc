//! DNS configuration of pods (`pkg/kubelet/network/dns/dns.go`), and their `/etc/hosts`. Pure.

use holdfast_proto::cri::DnsConfig;
use k8s_openapi::api::core::v1::Pod;

use crate::fault::Fault;
use crate::{meta, pod};

/// DNS settings of the node's resolver and of the cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resolver {
    /// The cluster's DNS servers.
    pub cluster_dns: Vec<String>,
    /// The domain of the cluster's services, for example `cluster.local`. Empty if there is none.
    pub cluster_domain: String,
    /// The name servers of the node.
    pub servers: Vec<String>,
    /// The search list of the node.
    pub searches: Vec<String>,
    /// The resolver options of the node.
    pub options: Vec<String>,
}

impl Resolver {
    /// Parses a resolv.conf.
    #[must_use]
    pub fn parse(text: &str) -> Resolver {
        let mut resolver = Resolver::default();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            // The search domain `.` (the root) has no effect and is dropped.
            let rest = |words: std::str::SplitWhitespace<'_>| {
                words
                    .map(|w| w.trim_end_matches('.').to_owned())
                    .filter(|w| !w.is_empty())
                    .collect::<Vec<_>>()
            };
            match words.next() {
                Some("nameserver") => resolver.servers.extend(words.next().map(Into::into)),
                Some("search") => resolver.searches = rest(words),
                Some("options") => resolver.options = words.map(Into::into).collect(),
                _ => {}
            }
        }
        resolver
    }
}

const MAX_SERVERS: usize = 3;
const MAX_SEARCHES: usize = 32;
const MAX_SEARCH: usize = 253;
const MAX_SEARCH_LINE: usize = 2048;

/// Events for the pod about settings that were dropped or replaced: reason and message.
pub type Warnings = Vec<(&'static str, String)>;

/// The DNS configuration of a pod.
#[must_use]
pub fn config(pod: &Pod, resolver: &Resolver) -> (DnsConfig, Warnings) {
    let mut warnings = Warnings::new();
    let spec = pod::spec(pod);
    let policy = spec.dns_policy.as_deref().unwrap_or("ClusterFirst");
    let cluster = policy == "ClusterFirstWithHostNet"
        || (policy == "ClusterFirst" && !pod::host_network(pod));
    if cluster && resolver.cluster_dns.is_empty() {
        warnings.push((
            "MissingClusterDNS",
            format!(
                "no cluster DNS is configured (clusterDNS): pod {} has dnsPolicy {policy:?} and gets the node's own name resolution",
                pod::described(pod)
            ),
        ));
    }
    let mut dns = if policy == "None" {
        DnsConfig::default()
    } else if cluster && !resolver.cluster_dns.is_empty() {
        let domain = &resolver.cluster_domain;
        let namespace = meta::namespace(pod);
        let mut searches = if domain.is_empty() {
            vec![]
        } else {
            vec![
                format!("{namespace}.svc.{domain}"),
                format!("svc.{domain}"),
                domain.clone(),
            ]
        };
        searches.extend(resolver.searches.iter().cloned());
        DnsConfig {
            servers: resolver.cluster_dns.clone(),
            searches,
            options: vec!["ndots:5".into()],
        }
    } else {
        DnsConfig {
            servers: resolver.servers.clone(),
            searches: resolver.searches.clone(),
            options: resolver.options.clone(),
        }
    };
    if let Some(own) = &spec.dns_config {
        dns.servers
            .extend(own.nameservers.iter().flatten().cloned());
        dns.searches.extend(own.searches.iter().flatten().cloned());
        for option in own.options.iter().flatten() {
            let name = option.name.clone().unwrap_or_default();
            dns.options.retain(|o| o.split(':').next() != Some(&name));
            dns.options.push(
                option
                    .value
                    .as_ref()
                    .map_or(name.clone(), |v| format!("{name}:{v}")),
            );
        }
    }
    unique(&mut dns.servers);
    unique(&mut dns.searches);
    if dns.servers.len() > MAX_SERVERS {
        dns.servers.truncate(MAX_SERVERS);
        let line = dns.servers.join(" ");
        let message = format!(
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {line}"
        );
        warnings.push(("DNSConfigForming", message));
    }
    let (before, mut length) = (dns.searches.len(), 0_usize);
    dns.searches.retain(|s| s.len() <= MAX_SEARCH);
    dns.searches.truncate(MAX_SEARCHES);
    dns.searches.retain(|s| {
        length = s.len().saturating_add(1).saturating_add(length);
        length <= MAX_SEARCH_LINE + 1
    });
    if dns.searches.len() < before {
        let line = dns.searches.join(" ");
        let message = format!(
            "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {line}"
        );
        warnings.push(("DNSConfigForming", message));
    }
    (dns, warnings)
}

/// Checks the node's resolver configuration. Returns the message of the node's event if pods get only a part of it.
#[must_use]
pub fn check_host(resolver: &Resolver) -> Option<String> {
    let own = if resolver.cluster_domain.is_empty() {
        0
    } else {
        3
    };
    let most = MAX_SEARCHES.saturating_sub(own);
    if resolver.searches.len() > most {
        return Some(format!(
            "the node's resolv.conf has {} search domains; pods get the first {most}",
            resolver.searches.len()
        ));
    }
    if let Some(long) = resolver.searches.iter().find(|s| s.len() > MAX_SEARCH) {
        return Some(format!(
            "a search domain in the node's resolv.conf is longer than {MAX_SEARCH} characters and is omitted: {long}"
        ));
    }
    let line: usize = resolver
        .searches
        .iter()
        .map(|s| s.len().saturating_add(1))
        .sum();
    (line > MAX_SEARCH_LINE + 1)
        .then(|| format!("the search line in the node's resolv.conf is longer than {MAX_SEARCH_LINE} characters; its end is omitted"))
}

fn unique(list: &mut Vec<String>) {
    let mut seen = std::collections::HashSet::new();
    list.retain(|item| seen.insert(item.clone()));
}

/// The host name and the domain of a pod (`GeneratePodHostNameAndDomain` in `pkg/kubelet/kubelet_pods.go`). The error
/// means that the sandbox cannot be created.
pub fn hostname(pod: &Pod, cluster_domain: &str) -> Result<(String, String), Fault> {
    let spec = pod::spec(pod);
    if let Some(name) = spec.hostname_override.clone().filter(|h| !h.is_empty()) {
        return Ok((name, String::new()));
    }
    let name = spec
        .hostname
        .clone()
        .filter(|h| !h.is_empty())
        .unwrap_or_else(|| meta::name(pod).to_owned());
    let short: String = name.chars().take(63).collect();
    let short = short.trim_end_matches(['-', '.']).to_owned();
    let domain = match spec.subdomain.clone().filter(|s| !s.is_empty()) {
        Some(subdomain) => format!("{subdomain}.{}.svc.{cluster_domain}", meta::namespace(pod)),
        None => String::new(),
    };
    if spec.set_hostname_as_fqdn == Some(true) && !domain.is_empty() {
        let full = format!("{short}.{domain}");
        if full.len() > 64 {
            return Err(Fault::invalid(format!(
                "failed to construct FQDN from pod hostname and cluster domain, FQDN {full} is too long (64 characters is the max, {} characters requested)",
                full.len()
            )));
        }
        return Ok((full, domain));
    }
    Ok((short, domain))
}

/// Checks that no name or address of a pod adds lines or words to its `/etc/hosts` and `/etc/resolv.conf`. A
/// kube-apiserver rejects such values, but the manifest of a static pod or another API may contain them.
///
/// # Errors
///
/// Names the first invalid field and its value.
pub(crate) fn check_words(pod: &Pod) -> Result<(), Fault> {
    let spec = pod::spec(pod);
    let mut words = vec![];
    for (i, alias) in spec.host_aliases.iter().flatten().enumerate() {
        words.push((format!("hostAliases[{i}].ip"), alias.ip.as_str()));
        for (n, name) in alias.hostnames.iter().flatten().enumerate() {
            words.push((format!("hostAliases[{i}].hostnames[{n}]"), name));
        }
    }
    let names = [
        ("hostname", &spec.hostname),
        ("subdomain", &spec.subdomain),
        ("hostnameOverride", &spec.hostname_override),
    ];
    for (field, name) in names {
        words.extend(name.as_deref().map(|name| (field.to_owned(), name)));
    }
    if let Some(config) = &spec.dns_config {
        let lists = [
            ("nameservers", &config.nameservers),
            ("searches", &config.searches),
        ];
        for (field, list) in lists {
            for (i, word) in list.iter().flatten().enumerate() {
                words.push((format!("dnsConfig.{field}[{i}]"), word));
            }
        }
        for (i, option) in config.options.iter().flatten().enumerate() {
            for word in [&option.name, &option.value].into_iter().flatten() {
                words.push((format!("dnsConfig.options[{i}]"), word));
            }
        }
    }
    let splits = |c: char| c.is_control() || c.is_whitespace();
    match words.into_iter().find(|(_, word)| word.contains(splits)) {
        None => Ok(()),
        Some((field, word)) => Err(Fault::invalid(format!(
            "spec.{field}: {word:?} has spaces or line breaks: use a single word, because it becomes part of a line of /etc/hosts or /etc/resolv.conf"
        ))),
    }
}

/// The content of a pod's `/etc/hosts`. `node` is the content of the node's own file, which pods on the host network
/// get.
#[must_use]
pub fn hosts_file(pod: &Pod, ips: &[String], cluster_domain: &str, node: &str) -> String {
    let mut text = if pod::host_network(pod) {
        format!("# Kubernetes-managed hosts file (host network).\n{node}")
    } else {
        let mut text = String::from(
            "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nfe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n",
        );
        let (name, domain) = hostname(pod, cluster_domain).unwrap_or_default();
        for ip in ips {
            if domain.is_empty() {
                text.push_str(&format!("{ip}\t{name}\n"));
            } else {
                let short = name.strip_suffix(&format!(".{domain}")).unwrap_or(&name);
                text.push_str(&format!("{ip}\t{short}.{domain}\t{short}\n"));
            }
        }
        text
    };
    let aliases = pod
        .spec
        .as_ref()
        .and_then(|s| s.host_aliases.clone())
        .unwrap_or_default();
    if !aliases.is_empty() {
        text.push_str("\n# Entries added by HostAliases.\n");
        for alias in aliases {
            text.push_str(&format!(
                "{}\t{}\n",
                alias.ip,
                alias.hostnames.unwrap_or_default().join("\t")
            ));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(spec: Value) -> Pod {
        let mut base =
            json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {"containers": []}});
        json_patch::merge(&mut base["spec"], &spec);
        serde_json::from_value(base).expect("a pod")
    }

    #[test]
    fn dns_policies_select_servers_and_search_domains() {
        let mut resolver = Resolver::parse("nameserver 1.1.1.1\nsearch a.b. .\noptions edns0\n");
        assert_eq!(resolver.searches, ["a.b"]);
        resolver.cluster_dns = vec!["10.96.0.10".into()];
        resolver.cluster_domain = "cluster.local".into();
        let (cluster, warnings) = config(&pod(json!({})), &resolver);
        assert_eq!(warnings, []);
        assert_eq!(
            (cluster.servers, cluster.searches, cluster.options),
            (
                vec!["10.96.0.10".into()],
                vec![
                    "n.svc.cluster.local".into(),
                    "svc.cluster.local".into(),
                    "cluster.local".into(),
                    "a.b".into()
                ],
                vec!["ndots:5".to_owned()]
            )
        );
        assert_eq!(
            config(&pod(json!({"hostNetwork": true})), &resolver)
                .0
                .servers,
            ["1.1.1.1"]
        );
        let (none, _) = config(
            &pod(
                json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": ["9.9.9.9", "9.9.9.9"], "options": [{"name": "ndots", "value": "2"}]}}),
            ),
            &resolver,
        );
        assert_eq!(
            (none.servers, none.options),
            (vec!["9.9.9.9".to_owned()], vec!["ndots:2".to_owned()])
        );
    }

    #[test]
    fn excess_servers_and_searches_are_omitted_with_a_warning() {
        let resolver = Resolver {
            searches: (0..40).map(|n| format!("d{n}.example")).collect(),
            ..Resolver::default()
        };
        let many = pod(
            json!({"dnsPolicy": "Default", "dnsConfig": {"nameservers": ["1.1.1.1", "2.2.2.2", "3.3.3.3", "4.4.4.4"]}}),
        );
        let (dns, warnings) = config(&many, &resolver);
        assert_eq!((dns.servers.len(), dns.searches.len()), (3, 32));
        assert!(
            warnings[0].1.ends_with("line is: 1.1.1.1 2.2.2.2 3.3.3.3")
                && warnings[1].1.starts_with("Search Line limits"),
            "{warnings:?}"
        );
        assert!(
            check_host(&resolver).is_some_and(|w| w.contains("32"))
                && check_host(&Resolver::default()).is_none()
        );
        assert_eq!(
            config(&pod(json!({})), &Resolver::default()).1[0].0,
            "MissingClusterDNS"
        );
        assert_eq!(
            hostname(
                &pod(json!({"hostnameOverride": "own.name", "subdomain": "s"})),
                "c"
            ),
            Ok(("own.name".into(), String::new()))
        );
    }

    #[test]
    fn names_with_line_breaks_are_rejected() {
        let right = json!({
            "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a.b"]}], "hostname": "h", "subdomain": "s",
            "dnsConfig": {"nameservers": ["1.1.1.1"], "searches": ["a."], "options": [{"name": "ndots", "value": "2"}]}
        });
        assert_eq!(check_words(&pod(right)), Ok(()));
        for (field, wrong) in [
            (
                "hostAliases[0].ip",
                json!({"hostAliases": [{"ip": "10.0.0.1\n10.0.0.2 c"}]}),
            ),
            (
                "hostAliases[0].hostnames[1]",
                json!({"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a", "b\n10.0.0.2 c"]}]}),
            ),
            ("hostname", json!({"hostname": "a\n10.0.0.2 c"})),
            ("subdomain", json!({"subdomain": "a b"})),
            ("hostnameOverride", json!({"hostnameOverride": "a\tb"})),
            (
                "dnsConfig.nameservers[0]",
                json!({"dnsConfig": {"nameservers": ["1.1.1.1\nsearch x"]}}),
            ),
            (
                "dnsConfig.searches[0]",
                json!({"dnsConfig": {"searches": ["a\nnameserver 1.1.1.1"]}}),
            ),
            (
                "dnsConfig.options[0]",
                json!({"dnsConfig": {"options": [{"name": "ndots", "value": "2\nsearch x"}]}}),
            ),
        ] {
            let error = check_words(&pod(wrong)).expect_err(field).to_string();
            assert!(error.starts_with(&format!("spec.{field}: ")), "{error}");
        }
    }

    #[test]
    fn the_hosts_file_names_the_pod() {
        let text = hosts_file(
            &pod(
                json!({"subdomain": "s", "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["x", "y"]}]}),
            ),
            &["10.0.0.2".into()],
            "cluster.local",
            "",
        );
        assert!(
            text.contains("10.0.0.2\tp.s.n.svc.cluster.local\tp\n"),
            "{text}"
        );
        assert!(text.ends_with("1.2.3.4\tx\ty\n"));
        assert!(
            hosts_file(
                &pod(json!({"hostNetwork": true})),
                &[],
                "",
                "127.0.0.1 me\n"
            )
            .contains("host network).\n127.0.0.1 me")
        );
        let long =
            pod(json!({"hostname": "h".repeat(60), "subdomain": "sub", "setHostnameAsFQDN": true}));
        assert!(hostname(&long, "cluster.local").is_err());
    }
}
