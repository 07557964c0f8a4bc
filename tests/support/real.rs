//! A real control plane in place of the bundled one. `HOLDFAST_REAL_APISERVER` names the kubeconfig of
//! a cluster administrator. A test's cluster is then a node and a namespace, and its pods run only on
//! this node: other tests and other nodes may use the control plane at the same time.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::json;

use super::{Cluster, succeeded, text};

/// The control plane that stores the objects of a cluster's pods.
#[derive(Clone)]
pub enum ControlPlane {
    /// The bundled one, which belongs to this cluster alone.
    Bundled,
    /// The one that this kubeconfig names.
    Real(PathBuf),
}

impl ControlPlane {
    /// The control plane that tests use.
    pub fn wanted() -> ControlPlane {
        match std::env::var_os(super::skip::REAL_APISERVER) {
            Some(kubeconfig) => ControlPlane::Real(kubeconfig.into()),
            None => ControlPlane::Bundled,
        }
    }
}

/// Runs kubectl with the administrator's own kubeconfig.
fn run(admin: &Path, arguments: &[&str], input: &str) -> Output {
    use std::io::Write as _;
    let mut command = Command::new("kubectl");
    command.arg("--kubeconfig").arg(admin).args(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut kubectl = command.stderr(Stdio::piped()).spawn().unwrap();
    // Dropped at once, so that kubectl sees the end of its input.
    let sent = kubectl.stdin.take().unwrap().write_all(input.as_bytes());
    // A command without input may exit before the write.
    sent.or_else(|e| if input.is_empty() { Ok(()) } else { Err(e) })
        .unwrap();
    kubectl.wait_with_output().unwrap()
}

fn kubectl(admin: &Path, arguments: &[&str]) -> String {
    succeeded(&format!("kubectl {arguments:?}"), run(admin, arguments, ""))
}

fn apply(admin: &Path, object: &serde_json::Value) {
    let output = run(admin, &["apply", "-f", "-"], &object.to_string());
    succeeded("kubectl apply", output);
}

/// Creates the objects of a cluster unless they exist: its namespace, and the kubeconfigs of the tests
/// and of the node.
pub fn prepare(cluster: &Cluster, admin: &Path) {
    let node = cluster.data().join(NODE);
    if node.exists() {
        return;
    }
    std::fs::create_dir_all(cluster.data()).unwrap();
    let own = cluster.data().join("kubeconfig");
    let flat = ["config", "view", "--raw", "--flatten", "--minify"];
    std::fs::write(&own, kubectl(admin, &flat)).unwrap();
    let namespace = ["--namespace", cluster.name()];
    let context = ["config", "set-context", "--current"];
    kubectl(&own, &[&context[..], &namespace[..]].concat());

    kubectl(admin, &["create", "namespace", cluster.name()]);
    cluster.wait_quietly("the namespace's default objects", || {
        let furniture = ["serviceaccount/default", "configmap/kube-root-ca.crt"];
        let get = [&["get"], &furniture[..]].concat();
        run(&own, &get, "").status.success()
    });
    if has_policies(admin) {
        keep_pods_together(cluster, admin, &own);
    }
    std::fs::write(node, node_kubeconfig(cluster, admin, &own)).unwrap();
}

/// The node's kubeconfig, in the data directory.
pub const NODE: &str = "node.conf";

/// Whether the apiserver has MutatingAdmissionPolicies. The bundled one and versions before 1.36 do
/// not; there the scheduler may choose any node.
fn has_policies(admin: &Path) -> bool {
    let group = "--api-group=admissionregistration.k8s.io";
    kubectl(admin, &["api-resources", "-o", "name", group]).contains("mutatingadmissionpolicies")
}

/// Makes every pod of the namespace without a node run on the cluster's own node.
fn keep_pods_together(cluster: &Cluster, admin: &Path, own: &Path) {
    let group = "admissionregistration.k8s.io/v1";
    let (name, label) = (cluster.name(), "kubernetes.io/hostname");
    let pods = json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]});
    let patch = format!(
        "has(object.spec.nodeSelector) ? [JSONPatch{{op: 'add', path: '/spec/nodeSelector/' + jsonpatch.escapeKey('{label}'), value: '{name}'}}] : [JSONPatch{{op: 'add', path: '/spec/nodeSelector', value: {{'{label}': '{name}'}}}}]"
    );
    apply(
        admin,
        &json!({"apiVersion": group, "kind": "MutatingAdmissionPolicy", "metadata": {"name": name}, "spec": {
            "matchConstraints": {"resourceRules": [pods]}, "failurePolicy": "Fail", "reinvocationPolicy": "Never",
            "matchConditions": [{"name": "unbound", "expression": "!has(object.spec.nodeName)"}],
            "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}]}}),
    );
    let here = json!({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}});
    apply(
        admin,
        &json!({"apiVersion": group, "kind": "MutatingAdmissionPolicyBinding", "metadata": {"name": name},
            "spec": {"policyName": name, "matchResources": here}}),
    );
    let tried = "run tried --image=none --dry-run=server -o jsonpath={.spec.nodeSelector}";
    let tried: Vec<&str> = tried.split(' ').collect();
    cluster.wait_quietly("the policy to be in force", || {
        let output = run(own, &tried, "");
        String::from_utf8_lossy(&output.stdout).contains(name)
    });
}

/// Obtains the node's kubeconfig as real nodes do: with a CSR, its approval, and a certificate from the
/// cluster's signer.
fn node_kubeconfig(cluster: &Cluster, admin: &Path, own: &Path) -> String {
    use base64::Engine as _;
    let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    let who = [
        (rcgen::DnType::OrganizationName, "system:nodes".to_owned()),
        (
            rcgen::DnType::CommonName,
            format!("system:node:{}", cluster.name()),
        ),
    ];
    for (kind, value) in who {
        params.distinguished_name.push(kind, value);
    }
    let csr = params.serialize_request(&key).unwrap().pem().unwrap();
    let name = cluster.name();
    let request = json!({"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": {"name": name},
        "spec": {"signerName": "kubernetes.io/kube-apiserver-client-kubelet", "request": encode(&csr), "usages": ["digital signature", "client auth"]}});
    apply(admin, &request);
    kubectl(admin, &["certificate", "approve", name]);
    let signed = || {
        let path = "jsonpath={.status.certificate}";
        kubectl(admin, &["get", "csr", name, "-o", path])
    };
    cluster.wait_quietly("the node's certificate", || !signed().is_empty());

    let text = kubectl(own, &["config", "view", "--raw", "-o", "json"]);
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config["users"][0]["user"] = json!({"client-certificate-data": signed(), "client-key-data": encode(&key.serialize_pem())});
    config.to_string()
}

/// Removes a cluster's objects, with its pods.
pub fn remove(cluster: &Cluster, admin: &Path) -> Result<(), String> {
    let name = cluster.name();
    let namespace = format!("namespace/{name}");
    let delete = ["delete", "--ignore-not-found", "--wait=false"];
    // The agent that would confirm the pods' termination no longer runs.
    let force = ["--force", "--grace-period=0", "--all", "-n", name];
    let mut steps = vec![
        [&delete[..], &["namespace", name]].concat(),
        [&delete[..], &["pods"], &force].concat(),
        [&delete[..], &["node", name]].concat(),
        [&delete[..], &["csr", name]].concat(),
        vec!["wait", "--for=delete", &namespace, "--timeout=60s"],
    ];
    if has_policies(admin) {
        for kind in ["mutatingadmissionpolicybinding", "mutatingadmissionpolicy"] {
            steps.push([&delete[..], &[kind, name]].concat());
        }
    }
    for step in steps {
        let output = run(admin, &step, "");
        if !output.status.success() {
            return Err(format!("kubectl {step:?} failed: {}", text(&output)));
        }
    }
    Ok(())
}
