//! Network links and local sockets of the host.

pub use holdfast_cni::net::local::listen;

use futures::TryStreamExt as _;

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
