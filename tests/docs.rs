//! The documentation says what the code does: its tables are made from it.
#![allow(clippy::unwrap_used)]

use std::path::Path;

const HEAD: &str = "# Flags and fields of the agent\n\nThis page is made from the code by `HOLDFAST_WRITE_DOCS=1 cargo test --test docs`; a test compares the two.\n\nThe agent takes the kubelet's flags below and a KubeletConfiguration v1beta1 file (`--config`). Flags win over the file. As with the\nkubelet, a field that is not one of the format is left out with a warning; so is one that is not honoured yet, where it is not the default.\nOne default differs from the kubelet's: `failCgroupV1` is false, since the agent supports both versions of cgroups.\n`holdfast agent --check …` looks at all of it, and says what a start would do to pods, without starting.\n\n## Flags\n\n";

#[test]
fn the_tables_of_flags_and_fields_are_up_to_date() {
    let text = format!(
        "{HEAD}{}\n## Flags for fields\n\nThese set a field of the configuration, and win over the file.\n\n{}\n## Fields\n\n{}",
        holdfast::cli::flags_table(),
        holdfast::cli::fields::table(),
        holdfast::config::fields_table()
    );
    let path = Path::new("docs/CONFIGURATION.md");
    if std::env::var_os("HOLDFAST_WRITE_DOCS").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    let there = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        there == text,
        "{} is not what the code makes: write it with HOLDFAST_WRITE_DOCS=1 cargo test --test docs",
        path.display()
    );
}
