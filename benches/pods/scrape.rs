//! What a monitoring system costs that reads the agent's figures.

use std::time::{Duration, Instant};

/// How often the page is read, and the pause between: longer than a reading of the cgroups counts.
const SCRAPES: u32 = 10;
const PAUSE: Duration = Duration::from_secs(2);
/// How often a monitoring system reads it.
const PERIOD: Duration = Duration::from_secs(15);

/// Processor time of a process, in seconds.
fn cpu(pid: i32) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let nanos = tasks.flatten().filter_map(|task| {
        // A thread may end meanwhile.
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    nanos.sum::<f64>() / 1e9
}

/// What one scrape of cAdvisor's page costs the agent.
pub struct Cost {
    /// Processor time, in milliseconds.
    pub cpu: f64,
    /// Bytes of the page.
    pub bytes: usize,
}

impl Cost {
    /// The share of a core in percent, with one scrape every 15 s.
    pub fn share(&self) -> f64 {
        self.cpu / 1000.0 / PERIOD.as_secs_f64() * 100.0
    }
}

/// Measures it; `idle` is the share of a core in percent that the agent needs without.
pub async fn cost(client: &kube::Client, node: &str, pid: i32, idle: f64) -> Cost {
    let path = format!("/api/v1/nodes/{node}/proxy/metrics/cadvisor");
    let read = async || {
        let request = hyper::Request::get(&path).body(vec![]).unwrap();
        client.request_text(request).await.unwrap()
    };
    // The first reads what is kept for a while.
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
