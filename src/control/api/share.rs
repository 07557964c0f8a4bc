//! Limits of each user's concurrent use: response bytes that the client has not read, and long-lived requests.
//!
//! Without these limits, one user's unread lists could fill the memory, and one user's watches
//! could take all connections. Requests over a limit get 429 with `Retry-After`, as from a
//! kube-apiserver without a free priority-and-fairness seat.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::error::ApiError;
use crate::store::Bytes;
use holdfast_core::lock::lock;

/// Maximum number of unread response bytes per user. A single response may exceed it.
const MAX_BYTES: usize = 32 << 20;
/// Maximum number of unread response bytes of all users.
const MAX_ALL_BYTES: usize = 256 << 20;
/// Maximum number of watches and followed logs per user. The value is a quarter of the server's connections, and more
/// than the agent of a node with 500 pods opens.
pub const MAX_STREAMS: usize = 1024;

/// The current use by all users.
#[derive(Default)]
pub struct Shares(Mutex<Used>);

#[derive(Default)]
struct Used {
    bytes: usize,
    users: HashMap<String, Share>,
}

#[derive(Default)]
struct Share {
    bytes: usize,
    streams: usize,
}

/// A part of a user's share, released on drop.
pub(crate) struct ShareGuard {
    shares: Arc<Shares>,
    user: String,
    bytes: usize,
    streams: usize,
}

impl Drop for ShareGuard {
    fn drop(&mut self) {
        let mut used = lock(&self.shares.0);
        used.bytes -= self.bytes;
        if let Some(share) = used.users.get_mut(&self.user) {
            share.bytes -= self.bytes;
            share.streams -= self.streams;
            if share.bytes == 0 && share.streams == 0 {
                used.users.remove(&self.user);
            }
        }
    }
}

/// Response bytes with the share that they occupy.
struct Counted {
    bytes: Bytes,
    _guard: ShareGuard,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Shares {
    fn reserve(
        self: &Arc<Self>,
        user: &str,
        bytes: usize,
        streams: usize,
    ) -> Result<ShareGuard, ApiError> {
        let mut used = lock(&self.0);
        let (of_all, all) = (used.bytes, used.bytes + bytes);
        let share = used.users.entry(user.to_owned()).or_default();
        let refuse = |what: &str, count: usize, limit: usize| {
            let text = format!(
                "too many requests: user {user:?} would have {count} {what}, the limit is {limit}; read or close some, then try again"
            );
            let details = serde_json::json!({"retryAfterSeconds": 1});
            Err(ApiError {
                details,
                ..ApiError::new(429, "TooManyRequests", text)
            })
        };
        if share.bytes > 0 && share.bytes + bytes > MAX_BYTES {
            return refuse("unread bytes", share.bytes + bytes, MAX_BYTES);
        }
        if of_all > 0 && share.bytes > 0 && all > MAX_ALL_BYTES {
            return refuse(
                "unread bytes together with all other users",
                all,
                MAX_ALL_BYTES,
            );
        }
        if share.streams + streams > MAX_STREAMS {
            return refuse("watches and streams", share.streams + streams, MAX_STREAMS);
        }
        share.bytes += bytes;
        share.streams += streams;
        used.bytes = all;
        Ok(ShareGuard {
            shares: Arc::clone(self),
            user: user.to_owned(),
            bytes,
            streams,
        })
    }

    /// Counts the bytes of a response until the last reference is dropped; 429 if the user has too many unread bytes.
    pub fn count(self: &Arc<Self>, user: &str, bytes: Bytes) -> Result<Bytes, ApiError> {
        let guard = self.reserve(user, bytes.len(), 0)?;
        Ok(Bytes::from_owner(Counted {
            bytes,
            _guard: guard,
        }))
    }

    /// Counts a long-lived request; 429 if the user has too many.
    pub(crate) fn reserve_stream(self: &Arc<Self>, user: &str) -> Result<ShareGuard, ApiError> {
        self.reserve(user, 0, 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unread_bytes_of_each_user_are_limited_separately() {
        let shares = Arc::new(Shares::default());
        let body = Bytes::from(vec![0; MAX_BYTES / 4]);
        let count = |user: &str| shares.count(user, body.clone());
        let mut unread: Vec<Bytes> = (0..4).map(|_| count("a").expect("within")).collect();
        let error = count("a").expect_err("too many");
        assert_eq!(error.code, 429);
        assert!(
            error.message.contains(&MAX_BYTES.to_string()),
            "{}",
            error.message
        );
        let of_another = count("b").expect("each user has a separate limit");
        // A slice keeps the whole response in memory, so all of it is counted.
        let tail = unread[0].slice(10..);
        unread.remove(0);
        assert!(count("a").is_err());
        drop(tail);
        unread.push(count("a").expect("dropped responses are no longer counted"));
        drop((unread, of_another));
        let used = lock(&shares.0);
        assert_eq!((used.bytes, used.users.len()), (0, 0));
    }

    #[test]
    fn a_single_response_may_have_any_size_and_the_total_is_limited() {
        let shares = Arc::new(Shares::default());
        let large = Bytes::from(vec![0; 2 * MAX_BYTES]);
        let first: Vec<_> = (0..4)
            .map(|i| shares.count(&i.to_string(), large.clone()))
            .collect();
        assert!(first.iter().all(Result::is_ok));
        let small = || Bytes::from_static(b"x");
        assert!(shares.count("0", small()).is_err());
        let _own = shares
            .count("e", small())
            .expect("the first response of a user is always sent");
        assert!(
            shares.count("e", small()).is_err(),
            "the limit of all users is reached"
        );
    }

    #[test]
    fn the_watches_and_streams_of_a_user_are_limited() {
        let shares = Arc::new(Shares::default());
        let mut held: Vec<ShareGuard> = (0..MAX_STREAMS)
            .map(|_| shares.reserve_stream("a").expect("one more"))
            .collect();
        assert_eq!(shares.reserve_stream("a").err().map(|e| e.code), Some(429));
        assert!(shares.reserve_stream("b").is_ok());
        held.pop();
        assert!(shares.reserve_stream("a").is_ok());
    }
}
