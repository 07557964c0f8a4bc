//! `make bench-dns`: answers per second, latency and memory of the DNS server, on an otherwise idle machine.
//!
//! The server is a child process with 5,000 services of ten endpoints each, so that its memory and processor time are its own.
//! The load generator and a fake upstream share the processors with the server. If `HOLDFAST_UNBOUND` or `HOLDFAST_DNSMASQ` is the
//! path of the program, the program answers the same names from its cache for comparison.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hickory_proto::op::{Message, MessageType, OpCode, Query};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{Name, RData, Record, RecordType};
use holdfast_dns::{Settings, Zone, serve};
use serde_json::json;

const SERVICES: usize = 5000;
const ENDPOINTS: usize = 10;
/// Names outside of the cluster that are in the cache.
const CACHED: usize = 1000;
/// Queries of one client that are outstanding in the throughput test.
const WINDOW: usize = 64;
const DURATION: Duration = Duration::from_secs(5);
/// Queries per second of the latency test.
const RATE: u64 = 5000;
/// Set for the child process: the upstream's address.
const ROLE: &str = "HOLDFAST_BENCH_DNS_UPSTREAM";

fn main() {
    match std::env::var(ROLE) {
        Ok(upstream) => run_server(upstream.parse().unwrap()),
        Err(_) => measure(),
    }
}

fn service_name(n: usize) -> String {
    format!("service-{n}.namespace-{}.svc.cluster.local.", n % 50)
}

fn run_server(upstream: SocketAddr) {
    let zone = Zone::new("cluster.local");
    println!("empty {}", resident(std::process::id()));
    for n in 0..SERVICES {
        let address = format!("10.96.{}.{}", n / 250, n % 250 + 1);
        let service = json!({"spec": {"clusterIP": address, "clusterIPs": [address],
            "ports": [{"name": "http", "port": 80}, {"name": "metrics", "port": 9090}]}});
        let endpoints: Vec<_> = (0..ENDPOINTS)
            .map(|e| json!({"addresses": [format!("10.244.{}.{}", n % 250, (n / 250 * ENDPOINTS + e) % 250)]}))
            .collect();
        let slice = json!({"addressType": "IPv4", "metadata": {}, "endpoints": endpoints,
            "ports": [{"name": "http", "port": 8080}, {"name": "metrics", "port": 9090}]});
        let service = serde_json::from_value(service).unwrap();
        let slice = Arc::new(serde_json::from_value(slice).unwrap());
        let namespace = format!("namespace-{}", n % 50);
        zone.set_namespace(&namespace, true);
        zone.set_service(
            &namespace,
            &format!("service-{n}"),
            Some(&service),
            &[slice],
        );
    }
    zone.set_synced();
    println!("filled {}", resident(std::process::id()));
    let address = free_address();
    let settings = Settings {
        addresses: vec![address],
        stub_domains: BTreeMap::from([(".".to_owned(), vec![upstream])]),
        ..Settings::default()
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    println!("address {address}");
    runtime
        .block_on(serve(settings, zone, std::future::pending()))
        .unwrap();
}

/// Resident memory of a process in KiB.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Processor time of a process in seconds.
fn processor_time(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    ticks as f64 / 100.0
}

/// A measured process.
struct Server {
    child: Child,
    address: SocketAddr,
}

fn free_address() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.local_addr().unwrap()
}

/// Unbound with two threads, as a forwarder.
fn start_unbound(program: &str, upstream: SocketAddr) -> Server {
    let address = free_address();
    let directory = std::env::temp_dir().join(format!("holdfast-bench-unbound-{}", address.port()));
    std::fs::create_dir_all(&directory).unwrap();
    let config = directory.join("unbound.conf");
    let text = format!(
        "server:\n interface: 127.0.0.1@{}\n port: {}\n num-threads: 2\n so-reuseport: yes\n do-daemonize: no\n \
         username: \"\"\n chroot: \"\"\n directory: \"{}\"\n pidfile: \"\"\n use-syslog: no\n \
         do-not-query-localhost: no\n module-config: \"iterator\"\n\
         forward-zone:\n name: \".\"\n forward-addr: {}@{}\nremote-control:\n control-enable: no\n",
        address.port(),
        address.port(),
        directory.display(),
        upstream.ip(),
        upstream.port()
    );
    std::fs::write(&config, text).unwrap();
    let child = Command::new(program)
        .arg("-d")
        .arg("-c")
        .arg(&config)
        .spawn()
        .unwrap();
    Server { child, address }
}

fn start_dnsmasq(program: &str, upstream: SocketAddr) -> Server {
    let address = free_address();
    let server = format!("--server={}#{}", upstream.ip(), upstream.port());
    let port = format!("--port={}", address.port());
    let fixed = [
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--no-resolv",
        "--no-hosts",
        "--bind-interfaces",
        "--listen-address=127.0.0.1",
        "--cache-size=10000",
        "--user=root",
        "--pid-file",
    ];
    let child = Command::new(program)
        .args(fixed)
        .arg(server)
        .arg(port)
        .spawn()
        .unwrap();
    Server { child, address }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

fn start_server(upstream: SocketAddr) -> Server {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(ROLE, upstream.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    loop {
        let line = lines.next().unwrap().unwrap();
        match line.split_once(' ').unwrap() {
            ("address", address) => {
                let address = address.parse().unwrap();
                return Server { child, address };
            }
            (what, kib) => println!("memory of the server, zone {what}: {kib} KiB"),
        }
    }
}

/// An upstream that answers each question at once.
fn start_upstream() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 2000];
        loop {
            let (length, peer) = socket.recv_from(&mut buffer).unwrap();
            let query = Message::from_vec(&buffer[..length]).unwrap();
            let mut reply = Message::response(query.metadata.id, OpCode::Query);
            reply.add_queries(query.queries.clone());
            let name = reply.queries[0].name.clone();
            reply.add_answer(Record::from_rdata(
                name,
                3600,
                RData::A(A::new(192, 0, 2, 1)),
            ));
            socket.send_to(&reply.to_vec().unwrap(), peer).unwrap();
        }
    });
    address
}

/// What the machine and the load generator take themselves.
fn start_echo() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 2000];
        loop {
            let (length, peer) = socket.recv_from(&mut buffer).unwrap();
            socket.send_to(&buffer[..length], peer).unwrap();
        }
    });
    address
}

fn query(name: &str) -> Vec<u8> {
    let mut message = Message::new(0, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
    message.to_vec().unwrap()
}

fn client(server: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(server).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    socket
}

/// Answers per second to two clients that each keep `WINDOW` queries outstanding.
fn throughput(what: &str, server: &Server, queries: &Arc<Vec<Vec<u8>>>) {
    let pid = server.child.id();
    let (address, before) = (server.address, processor_time(pid));
    let lost = Arc::new(AtomicU64::new(0));
    let start = Instant::now();
    let clients: Vec<_> = (0..2)
        .map(|n| {
            let (queries, lost) = (queries.clone(), lost.clone());
            thread::spawn(move || {
                let socket = client(address);
                let mut buffer = [0; 2000];
                let (mut next, mut answers) = (n * queries.len() / 2, 0_u64);
                let mut send = || {
                    next = (next + 1) % queries.len();
                    socket.send(&queries[next]).unwrap();
                };
                for _ in 0..WINDOW {
                    send();
                }
                while start.elapsed() < DURATION {
                    match socket.recv(&mut buffer) {
                        // NOERROR with an answer.
                        Ok(_) if buffer[3] & 0xf == 0 && buffer[7] > 0 => answers += 1,
                        Ok(_) => panic!("not an answer: {:?}", &buffer[..12]),
                        Err(_) => {
                            lost.fetch_add(WINDOW as u64, Ordering::Relaxed);
                            (1..WINDOW).for_each(|_| send());
                        }
                    }
                    send();
                }
                answers
            })
        })
        .collect();
    let answers: u64 = clients.into_iter().map(|c| c.join().unwrap()).sum();
    let seconds = start.elapsed().as_secs_f64();
    let used = processor_time(pid) - before;
    println!(
        "{what}: {:.0} answers/s, {:.0} per second of the server's processor time ({used:.1} s used), {} lost, {} KiB",
        answers as f64 / seconds,
        answers as f64 / used,
        lost.load(Ordering::Relaxed),
        resident(pid),
    );
}

/// Latencies at a constant rate, independent of the answers.
fn latency(what: &str, server: SocketAddr, queries: &Arc<Vec<Vec<u8>>>) {
    let socket = client(server);
    let receiver = socket.try_clone().unwrap();
    let start = Instant::now();
    let sent: Arc<Vec<AtomicU64>> = Arc::new((0..1 << 16).map(|_| AtomicU64::new(0)).collect());
    let is_done = Arc::new(AtomicBool::new(false));
    let (times, done) = (sent.clone(), is_done.clone());
    let receiving = thread::spawn(move || {
        let mut latencies = Vec::new();
        let mut buffer = [0; 2000];
        while !done.load(Ordering::Relaxed) {
            if receiver.recv(&mut buffer).is_ok() {
                let id = usize::from(u16::from_be_bytes([buffer[0], buffer[1]]));
                let at = times[id].load(Ordering::Relaxed);
                latencies.push(start.elapsed().as_nanos() as u64 - at);
            }
        }
        latencies
    });
    let total = RATE * DURATION.as_secs();
    let mut packet = Vec::new();
    for n in 0..total {
        let due = Duration::from_nanos(n * 1_000_000_000 / RATE);
        while let Some(left) = due.checked_sub(start.elapsed()) {
            thread::sleep(left);
        }
        packet.clone_from(&queries[n as usize % queries.len()]);
        packet[..2].copy_from_slice(&(n as u16).to_be_bytes());
        sent[usize::from(n as u16)].store(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        socket.send(&packet).unwrap();
    }
    thread::sleep(Duration::from_millis(500));
    is_done.store(true, Ordering::Relaxed);
    let mut latencies = receiving.join().unwrap();
    latencies.sort_unstable();
    let at = |part: f64| latencies[((latencies.len() - 1) as f64 * part) as usize] as f64 / 1e6;
    println!(
        "{what} at {RATE}/s: p50 {:.3} ms, p99 {:.3} ms, p99.9 {:.3} ms, {} of {total} answered",
        at(0.5),
        at(0.99),
        at(0.999),
        latencies.len(),
    );
}

/// Fills a server's cache, and waits until the server listens.
fn warm(server: &Server, queries: &[Vec<u8>]) {
    let socket = client(server.address);
    let mut buffer = [0; 2000];
    for query in queries {
        // The port is closed until the server listens.
        while socket.send(query).is_err() || socket.recv(&mut buffer).is_err() {}
    }
}

fn measure() {
    let upstream = start_upstream();
    let server = start_server(upstream);
    let names = |count: usize, name: &dyn Fn(usize) -> String| {
        Arc::new((0..count).map(|n| query(&name(n))).collect::<Vec<_>>())
    };
    let cluster = names(SERVICES, &service_name);
    let cached = names(CACHED, &|n| format!("host-{n}.example.com."));
    warm(&server, &cached);
    println!(
        "memory of the server, serving: {} KiB",
        resident(server.child.id())
    );
    latency("floor: a thread that echoes", start_echo(), &cluster);
    latency("cluster names", server.address, &cluster);
    latency("cached names", server.address, &cached);
    throughput("cluster names", &server, &cluster);
    throughput("cached names", &server, &cached);
    drop(server);
    let unbound =
        std::env::var("HOLDFAST_UNBOUND").map(|p| ("Unbound", start_unbound(&p, upstream)));
    let dnsmasq =
        std::env::var("HOLDFAST_DNSMASQ").map(|p| ("dnsmasq", start_dnsmasq(&p, upstream)));
    for (name, peer) in [unbound, dnsmasq].into_iter().flatten() {
        warm(&peer, &cached);
        latency(&format!("{name}, cached names"), peer.address, &cached);
        throughput(&format!("{name}, cached names"), &peer, &cached);
    }
}
