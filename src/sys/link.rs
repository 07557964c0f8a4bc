//! Network links, local sockets, and TCP keep-alive.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt as _;
use holdfast_net::local;
pub use holdfast_net::local::{clear, client};
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

/// Delay after a failed `accept`: the process lacks file descriptors or memory.
const RETRY: Duration = Duration::from_secs(1);

/// TCP keep-alive: seconds of idle time before the first probe, and seconds between probes.
/// The last is the number of unanswered probes after which the kernel closes the connection.
const PROBED: (u32, u32, u32) = (20, 5, 3);

/// Lets a socket bind to an address that the machine does not have (yet).
pub fn bind_to_any(socket: &impl AsFd) -> io::Result<()> {
    Ok(setsockopt(socket, sockopt::IpFreebind, &true)?)
}

/// Enables TCP keep-alive, so that the kernel closes connections to
/// unreachable peers. Otherwise a read would block indefinitely.
pub fn keep_alive(connection: &impl AsFd) -> io::Result<()> {
    setsockopt(connection, sockopt::TcpKeepIdle, &PROBED.0)?;
    setsockopt(connection, sockopt::TcpKeepInterval, &PROBED.1)?;
    setsockopt(connection, sockopt::TcpKeepCount, &PROBED.2)?;
    setsockopt(connection, sockopt::KeepAlive, &true)?;
    Ok(())
}

/// Listens on a socket path and replaces a stale socket. Must be called inside a tokio runtime.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let listener = local::listen(path)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Serves connections until the process exits, each in a separate
/// task. At most `most` connections are served at once; others wait.
pub async fn serve<S>(listener: UnixListener, most: usize, serve: impl Fn(UnixStream) -> S)
where
    S: Future<Output = ()> + Send + 'static,
{
    let slots = Arc::new(Semaphore::new(most));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let served = serve(stream);
                tokio::spawn(async move {
                    let _slot = slot;
                    served.await;
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a connection to a socket of the agent failed");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

/// Deletes a link. A missing link is no error.
pub async fn remove(name: &str) -> anyhow::Result<()> {
    let (connection, handle, _) = rtnetlink::new_connection()?;
    let task = tokio::spawn(connection);
    let result = async {
        let mut found = handle.link().get().match_name(name.to_owned()).execute();
        match found.try_next().await {
            Ok(Some(link)) => Ok(handle.link().del(link.header.index).execute().await?),
            Ok(None) => Ok(()),
            Err(rtnetlink::Error::NetlinkError(error)) if error.raw_code() == -libc::ENODEV => {
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }
    .await;
    task.abort();
    result
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn idle_connections_have_keep_alive_probes() {
        use nix::sys::socket::getsockopt;

        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("a port");
        let at = listener.local_addr().expect("an address");
        let connection = tokio::net::TcpStream::connect(at).await;
        let connection = connection.expect("a connection");
        keep_alive(&connection).expect("set");
        assert_eq!(getsockopt(&connection, sockopt::KeepAlive), Ok(true));
        assert_eq!(getsockopt(&connection, sockopt::TcpKeepIdle), Ok(PROBED.0));
    }

    #[tokio::test]
    async fn the_number_of_concurrent_connections_is_limited() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("socket");
        let listener = listen(&path).expect("a socket");
        let (now, most, all) = (AtomicUsize::new(0), AtomicUsize::new(0), Semaphore::new(0));
        let counts = Arc::new((now, most, all));
        let counted = Arc::clone(&counts);
        let server = tokio::spawn(serve(listener, 2, move |_stream| {
            let counts = Arc::clone(&counted);
            async move {
                let (now, most, all) = &*counts;
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                for _ in 0..10 {
                    tokio::task::yield_now().await;
                }
                now.fetch_sub(1, Ordering::SeqCst);
                all.add_permits(1);
            }
        }));
        let mut streams = vec![];
        for _ in 0..6 {
            streams.push(UnixStream::connect(&path).await.expect("connected"));
        }
        let (_, most, all) = &*counts;
        let _all = all.acquire_many(6).await.expect("all are served");
        assert_eq!(most.load(Ordering::SeqCst), 2);
        server.abort();
    }
}
