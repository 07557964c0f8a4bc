//! Reads of the API in this process. Tests wait for conditions by reading again, and a kubectl process for each read took a
//! quarter of the processor time of all tests.

use std::path::Path;
use std::sync::{LazyLock, Mutex, PoisonError};

use hyper::http;

use super::condition_timeout;

static RUNTIME: LazyLock<tokio::runtime::Runtime> = LazyLock::new(|| {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().unwrap()
});

/// Reads objects with the credentials of a kubeconfig.
#[derive(Default)]
pub struct Reader(Mutex<Option<kube::Client>>);

impl Reader {
    /// The API's answer to a GET of a path, or why there is none. `{namespace}` in the path stands for the kubeconfig's
    /// namespace.
    pub fn get(&self, kubeconfig: &Path, path: &str) -> Result<String, String> {
        let mut client = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let answer = async {
            // The control plane may have been restarted since the last read, with other certificates.
            for _ in 0..2 {
                let known = match client.take() {
                    Some(known) => known,
                    None => holdfast_kubeapi::client::connect(kubeconfig)
                        .await
                        .map_err(|e| e.to_string())?,
                };
                let path = path.replace("{namespace}", known.default_namespace());
                let request = http::Request::get(path).body(vec![]).unwrap();
                match known.request_text(request).await {
                    Err(kube::Error::Api(status)) => return Err(status.message),
                    Err(error) => drop(error),
                    Ok(text) => return Ok((known, text)),
                }
            }
            Err("the API does not answer".to_owned())
        };
        let limited = async { tokio::time::timeout(2 * condition_timeout(), answer).await };
        // A test may itself run on a runtime, on whose threads nothing may block.
        let answer = std::thread::scope(|scope| {
            let read = scope.spawn(|| RUNTIME.block_on(limited));
            read.join().unwrap()
        });
        let (known, text) = answer.map_err(|_| "the API has not answered in time".to_owned())??;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(known);
        Ok(text)
    }
}
