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

/// A pod of one container that runs a shell script of busybox; what follows it may be another document.
pub fn pod(name: &str, image: &str, script: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, restartPolicy: OnFailure, containers: [{{name: c, image: '{image}', command: [busybox, sh, -c, '{script}']}}]}}\n---\n"
    )
}
