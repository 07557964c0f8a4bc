//! Reading large types from JSON.

use serde::de::DeserializeOwned;

/// Reads by way of a [`serde_json::Value`], as objects of the API are read: what reads a pod is much program text, and would
/// be there once more for each form that JSON comes in. Fails where the bytes are no JSON or not of this type.
pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    serde_json::from_value(serde_json::from_slice(bytes)?)
}
