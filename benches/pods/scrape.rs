//! The agent's cost of a monitoring system that scrapes its metrics.

use std::time::{Duration, Instant};

/// Number of scrapes, and the pause between them, which is longer than the agent caches readings of cgroups.
const SCRAPES: u32 = 10;
const PAUSE: Duration = Duration::from_secs(2);
/// The scrape interval of a monitoring system.
const PERIOD: Duration = Duration::from_secs(15);

/// Processor time of a process, in seconds.
fn cpu(pid: i32) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let nanos = tasks.flatten().filter_map(|task| {
        // A thread may exit meanwhile.
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    nanos.sum::<f64>() / 1e9
}

/// The agent's cost of one scrape of cAdvisor's page.
pub struct Cost {
    /// Processor time, in milliseconds.
    pub cpu: f64,
    /// Size of the page in bytes.
    pub bytes: usize,
}

impl Cost {
    /// The share of a core in percent, with one scrape every 15 s.
    pub fn share(&self) -> f64 {
        self.cpu / 1000.0 / PERIOD.as_secs_f64() * 100.0
    }
}

/// Measures the cost; `idle` is the agent's share of a core in percent without scrapes.
pub async fn cost(client: &kube::Client, node: &str, pid: i32, idle: f64) -> Cost {
    let path = format!("/api/v1/nodes/{node}/proxy/metrics/cadvisor");
    let read = async || {
        let request = hyper::Request::get(&path).body(vec![]).unwrap();
        client.request_text(request).await.unwrap()
    };
    // The first scrape reads values that are then cached for a while.
    let bytes = read().await.len();
    let (begun, before) = (Instant::now(), cpu(pid));
    for _ in 0..SCRAPES {
        tokio::time::sleep(PAUSE).await;
        read().await;
    }
    let besides = idle / 100.0 * begun.elapsed().as_secs_f64();
    Cost {
        cpu: (cpu(pid) - before - besides) / f64::from(SCRAPES) * 1000.0,
        bytes,
    }
}
