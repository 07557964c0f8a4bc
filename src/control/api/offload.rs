//! Expensive requests run on separate threads. A body of 3 MiB takes tens of milliseconds to parse, validate and write,
//! during which a runtime worker would serve no other request.
//!
//! The number of concurrent requests is the number of processors. One user can use half of them, and the bytes of a
//! user's waiting bodies are bounded. A user with many large requests therefore delays only their own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::route::{self, Target};
use super::{Answer, Api, ApiError, Request, rbac};
use holdfast_core::lock::lock;
use holdfast_https::guard;

/// Size in bytes above which a body, or the object that a request changes, is expensive.
const EXPENSIVE_BYTES: usize = 32 << 10;
/// Size in bytes above which a selector is expensive.
const LONG_QUERY: usize = 1 << 10;
/// Maximum number of bytes of a user's expensive requests that wait or run.
const MAX_BYTES: usize = 32 << 20;
/// Bytes counted for each request in addition to its body.
const BASE_BYTES: usize = 64 << 10;

/// Limits and runs expensive requests.
pub(crate) struct Offload {
    all: Arc<Semaphore>,
    of_user: usize,
    users: Mutex<HashMap<String, Weak<UserQueue>>>,
}

/// The expensive requests of one user.
struct UserQueue {
    running: Arc<Semaphore>,
    /// Total bytes of the requests that wait or run.
    bytes: Mutex<usize>,
}

/// The right to run a request.
struct Permit {
    _all: Option<OwnedSemaphorePermit>,
    _own: Option<OwnedSemaphorePermit>,
    _waiting: Waiting,
}

/// Counts the bytes of a request until it is dropped.
struct Waiting {
    queue: Arc<UserQueue>,
    bytes: usize,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        *lock(&self.queue.bytes) -= self.bytes;
    }
}

impl Default for Offload {
    fn default() -> Offload {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Offload::new(processors.max(2))
    }
}

impl Offload {
    fn new(running: usize) -> Offload {
        Offload {
            all: Arc::new(Semaphore::new(running)),
            of_user: (running / 2).max(1),
            users: Mutex::default(),
        }
    }

    fn queue(&self, user: &str) -> Arc<UserQueue> {
        let mut users = lock(&self.users);
        if let Some(queue) = users.get(user).and_then(Weak::upgrade) {
            return queue;
        }
        users.retain(|_, queue| queue.strong_count() > 0);
        let queue = Arc::new(UserQueue {
            running: Arc::new(Semaphore::new(self.of_user)),
            bytes: Mutex::default(),
        });
        users.insert(user.to_owned(), Arc::downgrade(&queue));
        queue
    }

    /// Waits for the right to run; 429 if too many bytes of the user are waiting already.
    async fn permit(&self, user: &str, body: usize) -> Result<Permit, ApiError> {
        let (queue, bytes) = (self.queue(user), body + BASE_BYTES);
        {
            let mut waiting = lock(&queue.bytes);
            if *waiting > 0 && *waiting + bytes > MAX_BYTES {
                let text = format!(
                    "too many requests: queued large requests of user {user:?} would have {} bytes, the limit is {MAX_BYTES}; try again later",
                    *waiting + bytes
                );
                let details = serde_json::json!({"retryAfterSeconds": 1});
                return Err(ApiError {
                    details,
                    ..ApiError::new(429, "TooManyRequests", text)
                });
            }
            *waiting += bytes;
        }
        let waiting = Waiting {
            queue: Arc::clone(&queue),
            bytes,
        };
        // Takes the user's own permit first: a request that waits for it must not occupy a
        // shared one. Neither semaphore is ever closed.
        let own = Arc::clone(&queue.running).acquire_owned().await.ok();
        let all = Arc::clone(&self.all).acquire_owned().await.ok();
        Ok(Permit {
            _all: all,
            _own: own,
            _waiting: waiting,
        })
    }
}

impl Api {
    /// Whether a request can block a runtime worker for long.
    fn is_expensive(&self, request: &Request) -> bool {
        if request.body.len() > EXPENSIVE_BYTES {
            return true;
        }
        let Ok(Target::Objects {
            resource,
            namespace,
            name,
            ..
        }) = route::target(&request.path)
        else {
            return false;
        };
        match (request.method.as_str(), name) {
            // Each table row needs a parsed object, and an old page needs all changes since its revision.
            ("GET", None) => {
                let query = &request.query;
                let watching = query.get("watch").is_some() && query.flag("watch");
                let rendered = request.accept.contains("as=")
                    || query.get("continue").is_some()
                    || query.get("limit").is_some();
                let selects = ["labelSelector", "fieldSelector"];
                let long = |key: &&str| query.get(key).is_some_and(|s| s.len() > LONG_QUERY);
                !watching && (rendered || selects.iter().any(long))
            }
            ("GET" | "HEAD", _) => false,
            _ if resource.group == rbac::GROUP => true,
            ("PUT" | "PATCH" | "DELETE", Some(name)) => {
                let key = resource.key(namespace.as_deref(), &name);
                let stored = self.store.get(&key);
                stored.is_some_and(|record| record.value.len() > EXPENSIVE_BYTES)
            }
            _ => false,
        }
    }

    /// Like [`Api::answer`], but runs an expensive request on a separate thread once the user has a permit.
    pub async fn answer_offloaded(&self, request: Request) -> Answer {
        if !self.is_expensive(&request) {
            return self.answer(request).await;
        }
        let permit = self.offload.permit(&request.user.name, request.body.len());
        let permit = match permit.await {
            Ok(permit) => permit,
            Err(error) => return error.into(),
        };
        let (api, runtime) = (self.clone(), Handle::current());
        let answered = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            runtime.block_on(guard(async move { api.answer(request).await }))
        });
        match answered.await {
            Ok(Ok(answer)) => answer,
            Ok(Err(panicked)) => ApiError::internal(panicked).into(),
            // The runtime is shutting down.
            Err(error) => ApiError::internal(error).into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_user_may_use_half_of_the_permits_and_queue_limited_bytes() {
        let offload = Offload::new(2);
        let first = offload.permit("a", 0).await.expect("a permit");
        let mut second = Box::pin(offload.permit("a", 0));
        assert!(
            (&mut second).now_or_never().is_none(),
            "the user already has half of the permits"
        );
        let other = offload.permit("b", 0).now_or_never().expect("at once");
        assert!(other.is_ok());
        let mut third = Box::pin(offload.permit("c", 0));
        assert!(
            (&mut third).now_or_never().is_none(),
            "all permits are in use"
        );
        let refused = offload.permit("a", MAX_BYTES).now_or_never();
        let refused = refused.expect("at once").err().expect("refused");
        assert_eq!(refused.code, 429);
        assert!(
            refused.message.contains(&MAX_BYTES.to_string()),
            "{}",
            refused.message
        );
        drop(other);
        assert!(third.await.is_ok());
        drop(first);
        drop(second.await);
        let large = offload.permit("d", 2 * MAX_BYTES).await;
        assert!(large.is_ok(), "a single request may have any size");
    }
}
