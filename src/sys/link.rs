//! Network links and local sockets of the host.

use std::io;
use std::path::Path;

use futures::TryStreamExt as _;
use tokio::net::UnixListener;

/// Listens on a socket of the filesystem, in place of one that nobody listens on any more. To be called within a runtime
/// of tokio.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let listener = holdfast_cni::net::local::listen(path)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Removes a link; a missing one is fine.
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
