//! Reads the configuration: the file, the drop-ins over it (KEP-3983), and the flags over both.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::document::Document;
use super::resolve::resolve;
use super::{Config, ConfigError, Overrides};

fn read(path: &Path) -> Result<Read, ConfigError> {
    let text =
        std::fs::read_to_string(path).map_err(|e| ConfigError::Read(path.into(), e.to_string()))?;
    parse(&text).map_err(|why| ConfigError::Parse(path.into(), why))
}

/// Lists the drop-ins in a directory and its subdirectories, sorted by path. Only `*.conf` files count
/// (`mergeKubeletConfigurations` in `cmd/kubelet/app/server.go`).
fn drop_ins(dir: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let failed = |e: std::io::Error| ConfigError::Read(dir.into(), e.to_string());
    let mut found = vec![];
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() {
            found.extend(drop_ins(&path)?);
        } else if path.extension().is_some_and(|e| e == "conf") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Reads the file, if one is given, and resolves everything. `hostname` is the machine's own name.
pub fn load(
    file: Option<&Path>,
    overrides: &Overrides,
    hostname: &str,
) -> Result<Config, ConfigError> {
    load_all(file, None, &Value::Null, overrides, hostname)
}

/// Reads the configuration as [`load`] does, with drop-ins, each merged over the previous ones, and with `fields` of
/// flags, which override them.
pub fn load_all(
    file: Option<&Path>,
    drop_in_dir: Option<&Path>,
    fields: &Value,
    overrides: &Overrides,
    hostname: &str,
) -> Result<Config, ConfigError> {
    let mut all = Read {
        fields: Value::Object(serde_json::Map::new()),
        unread: vec![],
    };
    let drop_ins = drop_in_dir.map(drop_ins).transpose()?.unwrap_or_default();
    for path in file.into_iter().map(Path::to_owned).chain(drop_ins) {
        let read = read(&path)?;
        json_patch::merge(&mut all.fields, &read.fields);
        let named = |what: String| format!("{}: {what}", path.display());
        all.unread.extend(read.unread.into_iter().map(named));
    }
    if !fields.is_null() {
        json_patch::merge(&mut all.fields, fields);
    }
    let named = file.or(drop_in_dir).unwrap_or(Path::new("the flags"));
    let document = Document::decode(all.fields);
    let document = document.map_err(|why| ConfigError::Parse(named.into(), why))?;
    let mut config = resolve(document, overrides, hostname)?;
    config.unread = all.unread;
    Ok(config)
}

/// A file's fields as written, and the problems in its text that do not prevent decoding.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) fields: Value,
    pub(super) unread: Vec<String>,
}

/// Decodes a KubeletConfiguration. As in the kubelet, the last of repeated fields counts, and an unknown field is
/// ignored (`DecodeKubeletConfiguration` in `pkg/kubelet/kubeletconfig/util/codec/codec.go`).
pub(super) fn parse(text: &str) -> Result<Read, String> {
    let (mut fields, repeated) = super::yaml::lenient(text)?;
    let mut unread: Vec<String> = repeated.into_iter().collect();
    let of = |key: &str| fields[key].as_str().unwrap_or_default();
    if of("kind") != "KubeletConfiguration" || of("apiVersion") != "kubelet.config.k8s.io/v1beta1" {
        let (version, kind) = (of("apiVersion"), of("kind"));
        return Err(format!(
            "expected apiVersion kubelet.config.k8s.io/v1beta1 and kind KubeletConfiguration, found {version:?} and {kind:?}"
        ));
    }
    let unknown = super::fields::remove_unknown(&mut fields);
    let unknown = unknown.into_iter().map(|path| {
        format!("{path}: KubeletConfiguration v1beta1 has no such field; check its spelling")
    });
    unread.extend(unknown);
    Ok(Read { fields, unread })
}
