//! Compiles the vendored protocol files with protox, so that no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=cri");
    println!("cargo::rerun-if-changed=grpc");
    println!("cargo::rerun-if-changed=containerd");
    println!("cargo::rerun-if-changed=csi");
    println!("cargo::rerun-if-changed=pluginregistration");
    println!("cargo::rerun-if-changed=deviceplugin");
    println!("cargo::rerun-if-changed=podresources");
    println!("cargo::rerun-if-changed=dra");
    println!("cargo::rerun-if-changed=drahealth");
    let files = protox::compile(
        [
            "cri/v1/api.proto",
            "grpc/health/v1/health.proto",
            "containerd/events/v1/events.proto",
            "containerd/content/v1/content.proto",
            "containerd/tasks/v1/tasks.proto",
            "containerd/containers/v1/containers.proto",
            "csi/v1/csi.proto",
            "pluginregistration/v1/api.proto",
            "deviceplugin/v1beta1/api.proto",
            "podresources/v1/api.proto",
            "podresources/v1alpha1/api.proto",
            "dra/v1/api.proto",
            "dra/v1beta1/api.proto",
            "drahealth/v1alpha1/api.proto",
        ],
        ["."],
    )?;
    tonic_prost_build::configure()
        .build_server(true)
        .build_transport(false)
        .compile_fds(files)?;
    Ok(())
}
