//! Trust bundles and certificates in projected volumes, with a real containerd; the test plays the signer.
#![allow(clippy::unwrap_used)]

use crate::support;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, IsCa, Issuer, KeyPair,
};
use serde_json::{Value, json};
use support::real::ControlPlane;
use support::{Cluster, condition, inside};

/// Signs a pending request and sets the time of its renewal. Returns the certificate chain.
fn sign(
    cluster: &Cluster,
    request: &Value,
    issuer: &Issuer<'_, KeyPair>,
    refresh: jiff::Timestamp,
) -> String {
    use base64::Engine as _;
    let der = base64::engine::general_purpose::STANDARD
        .decode(request["spec"]["stubPKCS10Request"].as_str().unwrap())
        .unwrap();
    let mut csr = CertificateSigningRequestParams::from_der(&der.as_slice().into()).unwrap();
    let now = jiff::Timestamp::now();
    let at = |t: jiff::Timestamp| {
        rcgen::date_time_ymd(2026, 1, 1)
            + std::time::Duration::from_secs((t.as_second() - 1_767_225_600) as u64)
    };
    let ends = now + jiff::SignedDuration::from_hours(2);
    (csr.params.not_before, csr.params.not_after) = (at(now), at(ends));
    let pem = csr.signed_by(issuer).unwrap().pem();
    let second = |t: jiff::Timestamp| {
        jiff::Timestamp::from_second(t.as_second())
            .unwrap()
            .to_string()
    };
    let condition = json!([{"type": "Issued", "status": "True", "reason": "Signed", "message": "", "lastTransitionTime": second(now)}]);
    let status = json!({"status": {"certificateChain": pem, "notBefore": second(now), "notAfter": second(ends), "beginRefreshAt": second(refresh), "conditions": condition}});
    let name = request["metadata"]["name"].as_str().unwrap();
    cluster.kubectl(&[
        "patch",
        "podcertificaterequest",
        name,
        "--subresource=status",
        "--type=merge",
        "--patch",
        &status.to_string(),
    ]);
    pem
}

/// The PodCertificateRequests.
fn requests(cluster: &Cluster) -> Vec<Value> {
    let text = cluster.kubectl(&["get", "podcertificaterequests", "-o", "json"]);
    let list: Value = serde_json::from_str(&text).unwrap();
    list["items"].as_array().unwrap().clone()
}

/// The earliest renewal time that the control plane allows: now with the bundled one. A real one
/// requires ten minutes after the beginning of a certificate's validity.
fn soonest_refresh(cluster: &Cluster) -> jiff::Timestamp {
    let minutes = match cluster.control {
        ControlPlane::Bundled => 0,
        ControlPlane::Real(_) => 15,
    };
    jiff::Timestamp::now() + jiff::SignedDuration::from_mins(minutes)
}

/// The certificate in these files is due for renewal. The agent requests another one at the next
/// refresh and keeps the old one until then.
fn it_is_renewed(cluster: &Cluster, issuer: &Issuer<'_, KeyPair>, both: &str) {
    let read = || inside(cluster, "one", &["busybox", "cat", "/v/both.pem"]);
    cluster.wait("a request for the renewal", || requests(cluster).len() == 2);
    assert_eq!(read(), both);
    let renewal = requests(cluster)
        .into_iter()
        .find(|r| r["status"]["certificateChain"].is_null())
        .unwrap();
    let later = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(1);
    let renewed = sign(cluster, &renewal, issuer, later);
    cluster.wait("the renewed certificate", || {
        read().trim().ends_with(renewed.trim())
    });
    assert_ne!(
        read().split("-----END").next(),
        both.split("-----END").next(),
        "the renewed certificate has a new key"
    );
}

/// Whether the apiserver serves the kinds of this test: a real one may not.
fn are_served(cluster: &Cluster) -> bool {
    let served = cluster.kubectl(&["api-resources", "-o", "name"]);
    let mut kinds = ["podcertificaterequests", "clustertrustbundles"].iter();
    kinds.all(|kind| served.contains(kind))
}

#[test]
fn pods_get_trust_bundles_and_their_own_certificates() {
    let cluster = Cluster::start_configured("certificates", 43, "syncFrequency: 2s\n");
    if !are_served(&cluster) {
        return support::skip::skipped("the apiserver serves no certificates of pods");
    }
    let image = support::busybox(&cluster);
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let root = params.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(params, key);
    let bundle = json!({"apiVersion": "certificates.k8s.io/v1beta1", "kind": "ClusterTrustBundle",
        "metadata": {"name": "test.holdfast:own:roots", "labels": {"live": "yes"}}, "spec": {"signerName": "test.holdfast/own", "trustBundle": format!("# a remark\n{root}")}});
    cluster.apply(&bundle.to_string());
    let pod = |name: &str, sources: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, securityContext: {{runAsUser: 1234}}, containers: [{{name: c, image: '{image}', command: [busybox, sleep, '10000'], volumeMounts: [{{name: v, mountPath: /v}}]}}], volumes: [{{name: v, projected: {{sources: [{sources}]}}}}]}}\n---\n"
        )
    };
    let roots = "{clusterTrustBundle: {signerName: test.holdfast/own, labelSelector: {matchLabels: {live: 'yes'}}, path: roots.pem}}, {clusterTrustBundle: {name: absent, optional: true, path: none.pem}}";
    let certificate = "{podCertificate: {signerName: test.holdfast/own, keyType: ED25519, credentialBundlePath: both.pem, userAnnotations: {test.holdfast/for: me}}}";
    cluster.apply(&format!(
        "{}{}",
        pod("one", &format!("{roots}, {certificate}")),
        pod("strict", "{clusterTrustBundle: {name: absent, path: x}}")
    ));
    cluster.wait("an event about the missing bundle", || {
        cluster
            .events("strict")
            .contains(r#"clustertrustbundle "absent" not found"#)
    });
    let requests = || requests(&cluster);
    cluster.wait("the request of the pod", || requests().len() == 1);
    cluster.wait("an event about the pending request", || {
        cluster
            .events("one")
            .contains("its signer test.holdfast/own has not decided yet")
    });
    let request = requests().remove(0);
    let spec = &request["spec"];
    assert_eq!(
        (
            spec["podName"].as_str(),
            spec["unverifiedUserAnnotations"]["test.holdfast/for"].as_str()
        ),
        (Some("one"), Some("me"))
    );
    assert!(
        spec["nodeUID"].as_str().is_some_and(|u| !u.is_empty())
            && spec["serviceAccountUID"]
                .as_str()
                .is_some_and(|u| !u.is_empty())
    );
    let pem = sign(&cluster, &request, &issuer, soonest_refresh(&cluster));
    cluster.wait("the pod to be ready", || {
        condition(&cluster.pod("one"), "Ready") == "True"
    });
    let read = |file: &str| inside(&cluster, "one", &["busybox", "cat", &format!("/v/{file}")]);
    assert_eq!(
        read("roots.pem").trim(),
        root.replace("\r\n", "\n").trim(),
        "the file has no remark"
    );
    assert_eq!(read("none.pem"), "");
    let both = read("both.pem");
    assert!(
        both.starts_with("-----BEGIN PRIVATE KEY-----") && both.trim().ends_with(pem.trim()),
        "{both}"
    );
    assert_eq!(
        inside(
            &cluster,
            "one",
            &["busybox", "sh", "-c", "stat -L -c '%a %u' /v/both.pem"]
        ),
        "600 1234",
        "only the pod's user can read the file"
    );

    if !support::skip::needs_bundled("a real one rejects certificates that are due at once") {
        it_is_renewed(&cluster, &issuer, &both);
    }

    // The pod's event quotes a signer that denies the request.
    cluster.apply(&pod("denied", certificate));
    cluster.wait("the request of the second pod", || {
        requests().iter().any(|r| r["spec"]["podName"] == "denied")
    });
    let request = requests()
        .into_iter()
        .find(|r| r["spec"]["podName"] == "denied")
        .unwrap();
    let status = json!({"status": {"conditions": [{"type": "Denied", "status": "True", "reason": "NotYou", "message": "no", "lastTransitionTime": "2026-11-20T00:00:00Z"}]}});
    let name = request["metadata"]["name"].as_str().unwrap();
    cluster.kubectl(&[
        "patch",
        "podcertificaterequest",
        name,
        "--subresource=status",
        "--type=merge",
        "--patch",
        &status.to_string(),
    ]);
    cluster.wait("an event about the denied request", || {
        cluster.events("denied").contains("was denied: no (NotYou)")
    });
    cluster.delete_all_and_check();
    cluster.kubectl(&["delete", "clustertrustbundle", "test.holdfast:own:roots"]);
}
