//! Parsing large types from JSON.

use serde::de::DeserializeOwned;

/// Parses by way of a [`serde_json::Value`]. The deserialisation code of API types is large, and would be instantiated
/// again for every input format. Fails if the bytes are not JSON or do not match the type.
pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    serde_json::from_value(serde_json::from_slice(bytes)?)
}
