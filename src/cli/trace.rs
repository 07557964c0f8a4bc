//! `holdfast trace`.

use std::path::PathBuf;

use clap::Args;

use super::Output;

/// Flags of `holdfast trace`.
#[derive(Args)]
pub struct TraceFlags {
    /// The kind: deployment, replicaset, job, cronjob, service, pod, or any other kind's plural name.
    pub kind: String,
    /// The object's name.
    pub object: String,
    /// The object's namespace.
    #[arg(short, long, default_value = "default")]
    pub namespace: String,
    /// The cluster that `holdfast up --name` started.
    #[arg(long, value_name = "NAME", default_value = "holdfast")]
    pub name: String,
    /// The administrator's kubeconfig [default: that of the cluster].
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The output format.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}
