//! The client side of the Kubernetes API: connections from a kubeconfig, watched caches.

pub mod answers;
mod api;
pub mod cache;
pub mod client;
mod connections;
pub mod failure;
#[cfg(test)]
mod fake;
mod index;
pub mod measured;
pub mod objects;
pub mod pace;
pub mod pods;
mod pool;
mod proxy;
pub mod reviews;
pub mod signing;

pub use api::Api;
pub use cache::Cache;
pub use failure::ApiFailure;
pub use index::Index;
