//! kubectl as a process whose streams a test reads and writes, and pods for such tests.

use std::process::{Child, Command, Stdio};

use super::Cluster;

/// A command for kubectl with piped streams, not started.
pub fn kubectl(cluster: &Cluster, arguments: &[&str]) -> Command {
    with(std::path::Path::new("kubectl"), cluster, arguments)
}

/// The same for another program with kubectl's flags.
pub fn with(program: &std::path::Path, cluster: &Cluster, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command
        .arg("--kubeconfig")
        .arg(cluster.data().join("kubeconfig"))
        .args(arguments);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Kills a child process on drop, even if the test fails.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An administrator's credentials for the agent's own server, and the certificates with which to verify
/// that server; PEM.
pub struct Administrator {
    pub certificate: String,
    pub key: String,
    pub roots: String,
}

impl Administrator {
    pub fn of(cluster: &Cluster) -> Administrator {
        use base64::Engine as _;
        let text = cluster.kubectl(&["config", "view", "--raw", "-o", "json"]);
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        let user = |field: &str| {
            let data = config["users"][0]["user"][field].as_str();
            let data =
                data.unwrap_or_else(|| panic!("the administrator's kubeconfig has no {field}"));
            let pem = base64::engine::general_purpose::STANDARD.decode(data);
            String::from_utf8(pem.unwrap()).unwrap()
        };
        let pki = cluster.data().join("agent/pki");
        // The serving certificate is self-signed, or signed by the cluster's CA.
        let roots = std::fs::read_to_string(pki.join("kubelet.crt"));
        Administrator {
            certificate: user("client-certificate-data"),
            key: user("client-key-data"),
            roots: roots.unwrap_or_else(|_| std::fs::read_to_string(pki.join("ca.crt")).unwrap()),
        }
    }

    /// The flags of curl for these credentials, and their files, which are deleted when dropped.
    pub fn for_curl(&self) -> (Vec<String>, [tempfile::NamedTempFile; 2]) {
        let file = |text: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), text).unwrap();
            file
        };
        let files = [file(&self.certificate), file(&self.key)];
        let [certificate, key] = files.each_ref().map(|f| f.path().display().to_string());
        (
            vec!["--cert".into(), certificate, "--key".into(), key],
            files,
        )
    }
}

/// The manifest of a pod with one container that runs a shell script of busybox. It ends with `---`, so
/// that another document may follow.
pub fn pod(name: &str, image: &str, script: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, restartPolicy: OnFailure, containers: [{{name: c, image: '{image}', command: [busybox, sh, -c, '{script}']}}]}}\n---\n"
    )
}
