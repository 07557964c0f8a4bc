//! The response time of `/readyz` under load.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::Target;

/// The times of the probes.
#[derive(Default)]
pub struct Probes {
    readyz: Vec<Duration>,
    /// The echo of one byte by a thread, right before each probe.
    control: Vec<Duration>,
    failed: u64,
}

/// The 99th percentile, and the maximum.
fn worst(times: &mut [Duration]) -> [Duration; 2] {
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    [at(0.99), at(1.0)]
}

/// Probes `/readyz` twenty times a second, in a separate thread.
pub fn probes(target: &Target, until: Instant) -> JoinHandle<Probes> {
    let target = Target {
        from: [127, 0, 0, 3],
        ..target.clone()
    };
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut other = socket.try_clone().unwrap();
        std::io::copy(&mut socket, &mut other)
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let probe = async move {
        let mut seen = Probes::default();
        let mut echo = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        echo.set_nodelay(true).unwrap();
        let mut connected = None;
        while Instant::now() < until {
            let begun = Instant::now();
            echo.write_all(b"x").await.unwrap();
            echo.read_u8().await.unwrap();
            let control = begun.elapsed();
            let mut stream = match connected.take() {
                Some(stream) => stream,
                None => match target.connect(&target.admin).await {
                    Ok(stream) => stream,
                    Err(_) => {
                        seen.failed += 1;
                        continue;
                    }
                },
            };
            let response = tokio::time::timeout(Duration::from_secs(20), target.ready(&mut stream));
            match response.await {
                Ok(Ok(took)) => {
                    seen.readyz.push(took);
                    seen.control.push(control);
                    connected = Some(stream);
                }
                _ => seen.failed += 1,
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        seen
    };
    std::thread::spawn(move || runtime.block_on(probe))
}

impl Probes {
    /// Checks the limits. If other load runs on the machine, they grow with the time of the echo.
    pub fn check(mut self, alone: bool) {
        let [readyz, control] = [worst(&mut self.readyz), worst(&mut self.control)];
        println!(
            "{} probes of /readyz, {} failed; 99 % within {:?}, all within {:?}; of the control {control:?}",
            self.readyz.len(),
            self.failed,
            readyz[0],
            readyz[1]
        );
        assert!(self.readyz.len() > 100);
        assert!(
            self.failed * 100 <= self.readyz.len() as u64,
            "too many probes of /readyz failed"
        );
        for (i, limit) in [50, 500].into_iter().enumerate() {
            // A response needs several context switches, the echo two.
            let more = if alone {
                Duration::ZERO
            } else {
                control[i] * 10
            };
            let limit = Duration::from_millis(limit) + more;
            assert!(
                readyz[i] <= limit,
                "/readyz took {:?}, the limit is {limit:?}",
                readyz[i]
            );
        }
    }
}
