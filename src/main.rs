//! Temporary entry.
#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).with_writer(std::io::stderr).init();
    let dir = std::path::PathBuf::from(std::env::args().nth(1).unwrap());
    let pki = holdfast::control::pki::Pki::open(&dir.join("pki"))?;
    let admin = pki.client("admin", "kubernetes-admin", &["system:masters"])?;
    holdfast::control::write_private(&dir.join("kubeconfig"), &holdfast::control::pki::kubeconfig("https://127.0.0.1:16443", &pki.ca, "admin", &admin))?;
    holdfast::control::run(holdfast::control::Settings { dir, listen: "127.0.0.1:16443".parse()?, advertise: "127.0.0.1".parse()?, service_range: "10.96.0.0/16".parse()? }).await
}
