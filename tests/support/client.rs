//! kubectl as a process whose streams a test reads and writes, and the pods that such tests look at.

use std::process::{Child, Command, Stdio};

use super::Cluster;

/// kubectl with its streams piped, not yet started.
pub fn kubectl(cluster: &Cluster, arguments: &[&str]) -> Command {
    with(std::path::Path::new("kubectl"), cluster, arguments)
}

/// The same, by one of several programs.
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

/// Ends a child, whatever the test comes to.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What an administrator shows to the agent itself, and by what its certificate is known; PEM.
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
        // One that is signed by itself, or by the cluster's authority.
        let roots = std::fs::read_to_string(pki.join("kubelet.crt"));
        Administrator {
            certificate: user("client-certificate-data"),
            key: user("client-key-data"),
            roots: roots.unwrap_or_else(|_| std::fs::read_to_string(pki.join("ca.crt")).unwrap()),
        }
    }

    /// The flags of curl for that, and the files, which last as long as this.
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

/// A pod of one container that runs a shell script of busybox; what follows it may be another document.
pub fn pod(name: &str, image: &str, script: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, restartPolicy: OnFailure, containers: [{{name: c, image: '{image}', command: [busybox, sh, -c, '{script}']}}]}}\n---\n"
    )
}
