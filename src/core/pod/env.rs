//! The environment of a container: order, references and expansion of `$(VAR)` (`makeEnvironmentVariables` in
//! `pkg/kubelet/kubelet_pods.go`). Pure: the caller passes in the referenced objects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{
    ConfigMap, Container, EnvFromSource, EnvVarSource, FileKeySelector, Pod, ResourceFieldSelector,
    Secret, Service,
};

use super::quoted::quoted;
use super::resources::{Side, of_container, of_pod_level};
use crate::fault::Fault;
use crate::meta;
use crate::quantity::Quantity;

/// Lookup of referenced objects.
pub trait Objects {
    /// The pod's namespace.
    fn namespace(&self) -> &str;
    /// A ConfigMap of the pod's namespace.
    fn config_map(&self, name: &str) -> Option<Arc<ConfigMap>>;
    /// A Secret of the pod's namespace.
    fn secret(&self, name: &str) -> Option<Arc<Secret>>;
}

/// The values that field references resolve to.
pub struct FieldContext<'a> {
    /// The pod whose fields are referenced.
    pub pod: &'a Pod,
    /// The addresses of the pod, the primary one first.
    pub pod_ips: &'a [String],
    /// The addresses of the node, the primary one first.
    pub node_ips: &'a [String],
    /// The node's allocatable resources, which are the values of limits that are not set.
    pub allocatable: &'a super::resources::Amounts,
}

impl FieldContext<'_> {
    /// The pod's addresses as its status reports them.
    fn addresses(&self) -> Vec<String> {
        super::addresses::pod_ips(self.pod_ips, self.node_ips)
    }
}

/// Expands `$(NAME)` if NAME is known. `$$` becomes `$`.
#[must_use]
pub fn expand(text: &str, lookup: impl Fn(&str) -> Option<String>) -> String {
    let expanded = expand_bytes(text, |name| lookup(name).map(String::into_bytes));
    // All parts are valid UTF-8.
    String::from_utf8_lossy(&expanded).into_owned()
}

/// Like [`expand`], for values that may not be UTF-8.
fn expand_bytes(text: &str, lookup: impl Fn(&str) -> Option<Vec<u8>>) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        out.extend_from_slice(before.as_bytes());
        rest = after;
        if let Some(after) = rest.strip_prefix('$') {
            out.push(b'$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|r| r.split_once(')')) {
            match lookup(name) {
                Some(value) => out.extend(value),
                None => out.extend(format!("$({name})").into_bytes()),
            }
            rest = after;
        } else {
            out.push(b'$');
        }
    }
    out.extend_from_slice(rest.as_bytes());
    out
}

/// A variable's value as text, for commands and paths.
#[must_use]
pub fn text_of(env: &[(String, Vec<u8>)], name: &str) -> Option<String> {
    let (_, value) = env.iter().find(|(known, _)| known == name)?;
    Some(String::from_utf8_lossy(value).into_owned())
}

/// The service's cluster IP. `None` for headless services.
fn cluster_ip(service: &Service) -> Option<&str> {
    let ip = service.spec.as_ref()?.cluster_ip.as_deref()?;
    (!ip.is_empty() && ip != "None").then_some(ip)
}

/// The environment variables of services: those of the pod's namespace if `links` is set, and always `kubernetes`. The
/// service `kubernetes` of namespace `default` is used unless the pod's namespace has one.
#[must_use]
pub fn of_services(
    services: &[std::sync::Arc<Service>],
    namespace: &str,
    links: bool,
) -> BTreeMap<String, String> {
    let mut env = BTreeMap::new();
    let own = |service: &Service| links && meta::namespace(service) == namespace;
    let is_api = |service: &Service| meta::name(service) == "kubernetes";
    let api_of = match services
        .iter()
        .any(|s| own(s) && is_api(s) && cluster_ip(s).is_some())
    {
        true => namespace,
        false => "default",
    };
    for service in services {
        let name = meta::name(service.as_ref());
        let wanted = match is_api(service) {
            true => meta::namespace(service.as_ref()) == api_of,
            false => own(service),
        };
        let Some(ip) = cluster_ip(service).filter(|_| wanted) else {
            continue;
        };
        let ports = service
            .spec
            .as_ref()
            .and_then(|s| s.ports.clone())
            .unwrap_or_default();
        let Some(first) = ports.first() else { continue };
        let upper = name.to_uppercase().replace('-', "_");
        let host = if ip.contains(':') {
            format!("[{ip}]")
        } else {
            ip.to_owned()
        };
        env.insert(format!("{upper}_SERVICE_HOST"), ip.to_owned());
        env.insert(format!("{upper}_SERVICE_PORT"), first.port.to_string());
        let url = |port: &k8s_openapi::api::core::v1::ServicePort| {
            format!(
                "{}://{host}:{}",
                port.protocol.as_deref().unwrap_or("TCP").to_lowercase(),
                port.port
            )
        };
        env.insert(format!("{upper}_PORT"), url(first));
        for port in &ports {
            let protocol = port.protocol.as_deref().unwrap_or("TCP");
            if let Some(name) = port.name.as_deref().filter(|n| !n.is_empty()) {
                env.insert(
                    format!(
                        "{upper}_SERVICE_PORT_{}",
                        name.to_uppercase().replace('-', "_")
                    ),
                    port.port.to_string(),
                );
            }
            let prefix = format!("{upper}_PORT_{}_{protocol}", port.port);
            env.insert(prefix.clone(), url(port));
            env.insert(format!("{prefix}_PROTO"), protocol.to_lowercase());
            env.insert(format!("{prefix}_PORT"), port.port.to_string());
            env.insert(format!("{prefix}_ADDR"), ip.to_owned());
        }
    }
    env
}

/// The value of a field reference.
pub fn field(path: &str, around: &FieldContext<'_>) -> Result<String, Fault> {
    let pod = around.pod;
    let keyed = |prefix: &str| {
        path.strip_prefix(prefix)
            .and_then(|r| r.strip_prefix("['"))
            .and_then(|r| r.strip_suffix("']"))
    };
    if let Some(key) = keyed("metadata.labels") {
        return Ok(meta::labels(pod).get(key).cloned().unwrap_or_default());
    }
    if let Some(key) = keyed("metadata.annotations") {
        return Ok(meta::annotations(pod).get(key).cloned().unwrap_or_default());
    }
    let spec = super::spec(pod);
    let lines = |map: &BTreeMap<String, String>| {
        map.iter()
            .map(|(k, v)| format!("{k}={}", quoted(v)))
            .collect::<Vec<_>>()
            .join("\n")
    };
    Ok(match path {
        "metadata.name" => meta::name(pod).to_owned(),
        "metadata.namespace" => meta::namespace(pod).to_owned(),
        "metadata.uid" => meta::uid(pod).to_owned(),
        "metadata.labels" => lines(meta::labels(pod)),
        "metadata.annotations" => lines(meta::annotations(pod)),
        "spec.nodeName" => spec.node_name.clone().unwrap_or_default(),
        "spec.serviceAccountName" => spec.service_account_name.clone().unwrap_or_default(),
        // The container would keep an empty value for its whole life.
        "status.hostIP" | "status.hostIPs" if around.node_ips.is_empty() => {
            return Err(Fault::later(format!(
                "{path}: the node has no address yet: bring its network up, or name an address with --node-ip"
            )));
        }
        "status.hostIP" => around.node_ips[0].clone(),
        "status.hostIPs" => around.node_ips.join(","),
        "status.podIP" => around.addresses().into_iter().next().unwrap_or_default(),
        "status.podIPs" => around.addresses().join(","),
        other => return Err(Fault::invalid(format!("unsupported fieldPath: {other}"))),
    })
}

/// The value of a resource reference in units of the divisor, rounded up. A limit of CPU, memory or ephemeral storage
/// that is not set is the pod's, else the node's allocatable amount.
pub fn resource(
    container: &Container,
    name: &str,
    divisor: Option<&str>,
    around: &FieldContext<'_>,
) -> Result<String, Fault> {
    let (side, key) = match name.split_once('.') {
        Some(("limits", key)) => (Side::Limits, key),
        Some(("requests", key)) => (Side::Requests, key),
        _ => {
            return Err(Fault::invalid(format!(
                "unsupported container resource: {name}"
            )));
        }
    };
    let set = of_container(container, side)
        .get(key)
        .copied()
        .filter(|q| !q.is_zero());
    // Other resources, such as huge pages, are never overcommitted: without a limit the amount is zero.
    let shared = ["cpu", "memory", "ephemeral-storage"].contains(&key);
    let of_others = || {
        of_pod_level(around.pod, side)
            .get(key)
            .or(around.allocatable.get(key))
            .copied()
    };
    let amount = set
        .or_else(|| {
            if side == Side::Limits && shared {
                of_others()
            } else {
                None
            }
        })
        .unwrap_or(Quantity::ZERO);
    let divisor: Quantity = match divisor {
        None | Some("" | "0") => Quantity::from_units(1),
        Some(text) => text
            .parse()
            .map_err(|_| Fault::invalid(format!("invalid divisor {text:?}")))?,
    };
    let (amount, divisor) = if key == "cpu" {
        (amount.milli(), divisor.milli().max(1))
    } else {
        (amount.units(), divisor.units().max(1))
    };
    let divided = amount.div_euclid(divisor);
    let rounded = divided.saturating_add(i64::from(amount.rem_euclid(divisor) != 0));
    Ok(rounded.to_string())
}

/// The resource that a variable references: of the container itself, or of the container that the reference names.
fn selected(
    own: &Container,
    reference: &ResourceFieldSelector,
    around: &FieldContext<'_>,
) -> Result<String, Fault> {
    let divisor = reference.divisor.as_ref().map(|q| q.0.as_str());
    let of = |container: &Container| resource(container, &reference.resource, divisor, around);
    match reference.container_name.as_deref() {
        None | Some("") => of(own),
        Some(name) => match super::containers(around.pod)
            .iter()
            .find(|(_, c)| c.name == name)
        {
            Some((_, container)) => of(container),
            None => Err(Fault::invalid(format!("container {name} not found"))),
        },
    }
}

/// The contents of referenced files, by volume and path.
pub type Files = BTreeMap<(String, String), Result<String, Fault>>;

/// The files that a container's variables reference: volume and path.
pub fn file_references(container: &Container) -> impl Iterator<Item = (String, String)> {
    let sources = container
        .env
        .iter()
        .flatten()
        .filter_map(|v| v.value_from.as_ref()?.file_key_ref.as_ref());
    sources.map(|reference| (reference.volume_name.clone(), reference.path.clone()))
}

/// Expands `$(NAME)`. Unknown and empty variables are an error (`ExpandContainerVolumeMounts` in
/// `pkg/kubelet/container/helpers.go`).
pub(crate) fn expand_all(
    text: &str,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<String, Fault> {
    let missing = std::cell::RefCell::new(BTreeSet::new());
    let expanded = expand(text, |name| {
        let value = lookup(name).filter(|value| !value.is_empty());
        if value.is_none() {
            missing.borrow_mut().insert(name.to_owned());
        }
        value
    });
    let missing: Vec<String> = missing.into_inner().into_iter().collect();
    match missing.as_slice() {
        [] => Ok(expanded),
        names => Err(Fault::missing(format!(
            "missing value for {}",
            names.join(", ")
        ))),
    }
}

/// Variables in the order in which they were first set.
#[derive(Default)]
struct Variables {
    names: Vec<String>,
    values: BTreeMap<String, Vec<u8>>,
}

impl Variables {
    fn set(&mut self, name: String, value: Vec<u8>) {
        if self.values.insert(name.clone(), value).is_none() {
            self.names.push(name);
        }
    }

    fn in_order(mut self) -> Vec<(String, Vec<u8>)> {
        let value = |name: String| {
            let value = self.values.remove(&name).unwrap_or_default();
            (name, value)
        };
        self.names.into_iter().map(value).collect()
    }
}

/// Returns an error if a required object, key or value is missing.
fn unless_optional<T>(
    found: Option<T>,
    optional: Option<bool>,
    missing: impl FnOnce() -> String,
) -> Result<Option<T>, Fault> {
    match found {
        None if optional != Some(true) => Err(Fault::missing(missing())),
        found => Ok(found),
    }
}

/// The sources of a container's environment.
struct Origins<'a> {
    container: &'a Container,
    around: &'a FieldContext<'a>,
    objects: &'a dyn Objects,
    files: &'a Files,
}

impl Origins<'_> {
    /// Sets all keys of a ConfigMap or a Secret.
    fn set_all(&self, source: &EnvFromSource, variables: &mut Variables) -> Result<(), Fault> {
        let prefix = source.prefix.clone().unwrap_or_default();
        if let Some(reference) = &source.config_map_ref {
            let map = self.config_map(&reference.name, reference.optional)?;
            for (key, value) in map.iter().flat_map(|map| map.data.iter().flatten()) {
                variables.set(format!("{prefix}{key}"), value.clone().into_bytes());
            }
        }
        if let Some(reference) = &source.secret_ref {
            let secret = self.secret(&reference.name, reference.optional)?;
            for (key, value) in secret.iter().flat_map(|s| s.data.iter().flatten()) {
                variables.set(format!("{prefix}{key}"), value.0.clone());
            }
        }
        Ok(())
    }

    fn config_map(
        &self,
        name: &str,
        optional: Option<bool>,
    ) -> Result<Option<Arc<ConfigMap>>, Fault> {
        let missing = || format!("configmap {name:?} not found");
        unless_optional(self.objects.config_map(name), optional, missing)
    }

    fn secret(&self, name: &str, optional: Option<bool>) -> Result<Option<Arc<Secret>>, Fault> {
        let missing = || format!("secret {name:?} not found");
        unless_optional(self.objects.secret(name), optional, missing)
    }

    /// The value of a variable from its source. `None` if the source is optional and missing.
    fn value(&self, name: &str, source: &EnvVarSource) -> Result<Option<Vec<u8>>, Fault> {
        let namespace = meta::namespace(self.around.pod);
        let missing = |kind: &str, key: &str, of: &str| {
            format!("couldn't find key {key} in {kind} {namespace}/{of}")
        };
        if let Some(reference) = &source.field_ref {
            return Ok(Some(
                field(&reference.field_path, self.around)?.into_bytes(),
            ));
        }
        if let Some(reference) = &source.resource_field_ref {
            let value = selected(self.container, reference, self.around)?;
            return Ok(Some(value.into_bytes()));
        }
        if let Some(reference) = &source.config_map_key_ref {
            let (key, optional) = (&reference.key, reference.optional);
            let Some(map) = self.config_map(&reference.name, optional)? else {
                return Ok(None);
            };
            let value = map.data.as_ref().and_then(|data| data.get(key));
            let value = value.map(|value| value.clone().into_bytes());
            let missing = || missing("ConfigMap", key, &reference.name);
            return unless_optional(value, optional, missing);
        }
        if let Some(reference) = &source.secret_key_ref {
            let (key, optional) = (&reference.key, reference.optional);
            let Some(secret) = self.secret(&reference.name, optional)? else {
                return Ok(None);
            };
            let value = secret.data.as_ref().and_then(|data| data.get(key));
            let value = value.map(|value| value.0.clone());
            let missing = || missing("Secret", key, &reference.name);
            return unless_optional(value, optional, missing);
        }
        match &source.file_key_ref {
            Some(reference) => self.in_file(reference),
            None => Err(Fault::invalid(format!(
                "environment variable {name:?} has an unsupported source"
            ))),
        }
    }

    /// The value of a variable from a file in a volume.
    fn in_file(&self, reference: &FileKeySelector) -> Result<Option<Vec<u8>>, Fault> {
        let FileKeySelector { key, path, .. } = reference;
        let place = (reference.volume_name.clone(), path.clone());
        let text = match self.files.get(&place) {
            Some(Ok(text)) => text,
            Some(Err(error)) => return Err(error.clone().context("couldn't parse env file")),
            None => {
                return Err(Fault::later(format!(
                    "couldn't parse env file: {path} has not been read"
                )));
            }
        };
        let value = super::env_file::lookup(text, key)?.map(String::into_bytes);
        let missing = || format!("environment variable key {key:?} not found in file {path:?}");
        unless_optional(value, reference.optional, missing)
    }
}

/// Builds the environment of a container. Values from Secrets may be arbitrary bytes. An error is a
/// `CreateContainerConfigError`.
pub fn build(
    container: &Container,
    around: &FieldContext<'_>,
    services: &BTreeMap<String, String>,
    objects: &dyn Objects,
    files: &Files,
) -> Result<Vec<(String, Vec<u8>)>, Fault> {
    let origins = Origins {
        container,
        around,
        objects,
        files,
    };
    let mut variables = Variables::default();
    for source in container.env_from.iter().flatten() {
        origins.set_all(source, &mut variables)?;
    }
    for var in container.env.iter().flatten() {
        let value = match &var.value_from {
            Some(source) => origins.value(&var.name, source)?,
            None => Some(expand_bytes(var.value.as_deref().unwrap_or(""), |name| {
                let of_service = || services.get(name).map(|v| v.clone().into_bytes());
                variables.values.get(name).cloned().or_else(of_service)
            })),
        };
        if let Some(value) = value {
            variables.set(var.name.clone(), value);
        }
    }
    for (name, value) in services {
        if !variables.values.contains_key(name) {
            variables.set(name.clone(), value.clone().into_bytes());
        }
    }
    Ok(variables.in_order())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::sync::Arc;

    struct Fixed;

    impl Objects for Fixed {
        fn namespace(&self) -> &str {
            "n"
        }
        fn config_map(&self, name: &str) -> Option<Arc<ConfigMap>> {
            (name == "cm").then(|| {
                Arc::new(
                    serde_json::from_value(json!({"data": {"k": "v", "A": "from-cm"}}))
                        .expect("a map"),
                )
            })
        }
        fn secret(&self, name: &str) -> Option<Arc<Secret>> {
            (name == "s").then(|| {
                Arc::new(
                    serde_json::from_value(json!({"data": {"p": "cXE=", "b": "/wCAQQ=="}}))
                        .expect("a secret"),
                )
            })
        }
    }

    #[test]
    fn kubernetes_service_variables_are_set_unless_the_namespace_overrides_them() {
        let service = |namespace: &str, name: &str, ip: &str| -> Arc<Service> {
            let service = json!({"metadata": {"namespace": namespace, "name": name},
                "spec": {"clusterIP": ip, "ports": [{"port": 443}]}});
            Arc::new(serde_json::from_value(service).expect("a service"))
        };
        let api = service("default", "kubernetes", "10.0.0.1");
        let own = service("n", "kubernetes", "10.0.0.2");
        let headless = service("n", "kubernetes", "None");
        let other = service("n", "other", "10.0.0.3");
        for (services, links, expected) in [
            (
                vec![&own, &api, &other],
                true,
                [Some("10.0.0.2"), Some("10.0.0.3")],
            ),
            (
                vec![&api, &own, &other],
                true,
                [Some("10.0.0.2"), Some("10.0.0.3")],
            ),
            (vec![&own, &api, &other], false, [Some("10.0.0.1"), None]),
            (vec![&headless, &api], true, [Some("10.0.0.1"), None]),
        ] {
            let services: Vec<Arc<Service>> = services.into_iter().cloned().collect();
            let env = of_services(&services, "n", links);
            let hosts = ["KUBERNETES_SERVICE_HOST", "OTHER_SERVICE_HOST"]
                .map(|name| env.get(name).map(String::as_str));
            assert_eq!(hosts, expected, "{services:?} {links}");
        }
    }

    #[test]
    fn variable_references_expand_as_documented() {
        let lookup = |name: &str| (name == "X").then(|| "1".to_owned());
        for (text, expected) in [
            ("$(X)", "1"),
            ("$$(X)", "$(X)"),
            ("$(Y)", "$(Y)"),
            ("a$b", "a$b"),
            ("$(X", "$(X"),
            ("$$$(X)", "$1"),
            ("$", "$"),
        ] {
            assert_eq!(expand(text, lookup), expected, "{text}");
        }
    }

    #[test]
    fn a_host_address_that_is_not_known_yet_is_an_error() {
        let pod = Pod::default();
        let value = |path: &str, node_ips: &[String]| {
            let around = FieldContext {
                pod: &pod,
                pod_ips: &[],
                node_ips,
                allocatable: &Default::default(),
            };
            field(path, &around)
        };
        let both = ["192.0.2.1".to_owned(), "2001:db8::1".to_owned()];
        for (path, expected) in [
            ("status.hostIP", "192.0.2.1"),
            ("status.hostIPs", "192.0.2.1,2001:db8::1"),
        ] {
            assert_eq!(value(path, &both).as_deref(), Ok(expected));
            let error = value(path, &[]).expect_err("no address");
            assert!(
                error.message.starts_with(path) && error.message.contains("--node-ip"),
                "{error}"
            );
        }
        assert_eq!(value("status.podIP", &[]).as_deref(), Ok(""));
    }

    #[test]
    fn resource_fields_refer_to_the_named_container() {
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "initContainers": [{"name": "i", "resources": {"limits": {"cpu": "3"}}}],
            "containers": [{"name": "c", "resources": {"limits": {"cpu": "1"}}}]}}))
        .expect("a pod");
        let allocatable = ["cpu", "hugepages-2Mi"]
            .map(|name| (name.to_owned(), Quantity::from_units(8)))
            .into();
        let around = FieldContext {
            pod: &pod,
            pod_ips: &[],
            node_ips: &[],
            allocatable: &allocatable,
        };
        for (of, resource, expected) in [
            (json!(null), "limits.cpu", Ok("1")),
            (json!(""), "limits.cpu", Ok("1")),
            (json!("i"), "limits.cpu", Ok("3")),
            (json!("x"), "limits.cpu", Err("container x not found")),
            (json!(null), "limits.hugepages-2Mi", Ok("0")),
            (json!(null), "requests.cpu", Ok("0")),
        ] {
            let reference =
                serde_json::from_value(json!({"containerName": of, "resource": resource}))
                    .expect("a reference");
            let found = selected(&super::super::spec(&pod).containers[0], &reference, &around);
            let found = found.as_deref().map_err(|fault| fault.message.as_str());
            assert_eq!(found, expected, "{of} {resource}");
        }
    }

    #[test]
    fn later_sources_win_and_services_come_last() {
        let pod: Pod = serde_json::from_value(
            json!({"metadata": {"name": "p", "namespace": "n", "labels": {"l": "x"}}, "spec": {"nodeName": "node", "containers": []}}),
        )
        .expect("a pod");
        let container: Container = serde_json::from_value(json!({"name": "c",
        "resources": {"limits": {"cpu": "1500m"}},
        "envFrom": [{"prefix": "P_", "configMapRef": {"name": "cm"}}, {"secretRef": {"name": "none", "optional": true}}],
        "env": [
            {"name": "A", "value": "$(P_k)-$(SVC_SERVICE_HOST)-$(LATER)"},
            {"name": "P_k", "value": "own"},
            {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['l']"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
            {"name": "BYTES", "valueFrom": {"secretKeyRef": {"name": "s", "key": "b"}}},
            {"name": "MORE", "value": "<$(BYTES)>"},
            {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "p"}}},
            {"name": "GONE", "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "no", "optional": true}}},
        ]}))
        .expect("a container");
        let around = FieldContext {
            pod: &pod,
            pod_ips: &["10.0.0.2".into()],
            node_ips: &[],
            allocatable: &Default::default(),
        };
        let services = [
            ("SVC_SERVICE_HOST".to_owned(), "10.96.0.9".to_owned()),
            ("A".to_owned(), "shadowed".to_owned()),
        ]
        .into();
        let env = build(&container, &around, &services, &Fixed, &Files::new()).expect("builds");
        let raw = |name: &str| {
            env.iter()
                .find(|(n, _)| n == name)
                .map(|(_, v)| v.as_slice())
        };
        assert_eq!(raw("BYTES"), Some(&b"\xff\0\x80A"[..]));
        assert_eq!(raw("MORE"), Some(&b"<\xff\0\x80A>"[..]));
        let get = |name: &str| raw(name).map(|v| std::str::from_utf8(v).expect("text"));
        assert_eq!(get("A"), Some("v-10.96.0.9-$(LATER)"));
        assert_eq!(
            (
                get("P_k"),
                get("LABEL"),
                get("IP"),
                get("CPU"),
                get("SECRET"),
                get("GONE")
            ),
            (
                Some("own"),
                Some("x"),
                Some("10.0.0.2"),
                Some("2"),
                Some("qq"),
                None
            )
        );
        let missing: Container =
            serde_json::from_value(json!({"name": "c", "env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "s", "key": "no"}}}]}))
                .expect("a container");
        assert_eq!(
            build(&missing, &around, &services, &Fixed, &Files::new()),
            Err(Fault::missing("couldn't find key no in Secret n/s"))
        );
    }
}
