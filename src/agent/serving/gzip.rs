//! Compression of large answers.

use std::io::Write as _;

use flate2::{Compression, write::GzEncoder};
use http_body_util::BodyExt as _;
use hyper::header::{ACCEPT_ENCODING, CONTENT_ENCODING, HeaderValue};
use hyper::{HeaderMap, Response, StatusCode};

use super::Refusal;
use holdfast_host::blocking;
use holdfast_https::{Body, full};

/// Whether the client accepts gzip.
fn is_taken(headers: &HeaderMap) -> bool {
    let values = headers.get_all(ACCEPT_ENCODING).iter();
    let mut codings = values
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','));
    codings.any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let weight = |part: &str| part.strip_prefix("q=").and_then(|q| q.parse::<f32>().ok());
        parts.next() == Some("gzip") && parts.all(|part| weight(part).is_none_or(|q| q > 0.0))
    })
}

fn gzip(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes)?;
    encoder.finish()
}

/// Compresses an answer if the request's headers accept it.
pub(super) async fn compressed(
    headers: &HeaderMap,
    response: Response<Body>,
) -> Result<Response<Body>, Refusal> {
    if !is_taken(headers) {
        return Ok(response);
    }
    let failed = |why: String| Refusal(StatusCode::INTERNAL_SERVER_ERROR, why);
    let (mut head, body) = response.into_parts();
    let whole = body.collect().await.map_err(|e| failed(e.to_string()))?;
    let bytes = whole.to_bytes();
    let packed = blocking(move || Ok(gzip(&bytes)?)).await;
    let packed = packed.map_err(|e| failed(e.to_string()))?;
    head.headers
        .insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    Ok(Response::from_parts(head, full(packed)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_https::text;

    #[tokio::test]
    async fn an_answer_is_compressed_if_the_client_accepts_gzip() {
        for (accepted, packed) in [
            (None, false),
            (Some("identity"), false),
            (Some("gzip;q=0, br"), false),
            (Some("gzip"), true),
            (Some("deflate, gzip;q=0.5"), true),
        ] {
            let mut headers = HeaderMap::new();
            if let Some(accepted) = accepted {
                headers.insert(ACCEPT_ENCODING, HeaderValue::from_static(accepted));
            }
            let plain = "one 1\n".repeat(1000);
            let answer = compressed(&headers, text(StatusCode::OK, plain.clone())).await;
            let answer = answer.expect("an answer");
            let is_encoded = answer.headers().get(CONTENT_ENCODING).is_some();
            assert_eq!(is_encoded, packed, "{accepted:?}");
            let bytes = answer
                .into_body()
                .collect()
                .await
                .expect("a body")
                .to_bytes();
            assert_eq!(bytes.len() < plain.len(), packed, "{accepted:?}");
            let unpacked = if packed {
                let decoder = flate2::read::GzDecoder::new(&bytes[..]);
                std::io::read_to_string(decoder).expect("gzip")
            } else {
                String::from_utf8(bytes.to_vec()).expect("text")
            };
            assert_eq!(unpacked, plain, "{accepted:?}");
        }
    }
}
