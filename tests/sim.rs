//! The whole agent in simulated time: a scripted runtime, API and machine that delay, fail, fail after
//! having acted, and hang; containers that exit; pods that come and go; an agent that is killed. What
//! must always hold is checked at every call, and when the faults end the world must come to rest.
//!
//! `HOLDFAST_SEEDS=5000 cargo test --test sim` runs more seeds, `HOLDFAST_SEED=17` one.
#![allow(clippy::unwrap_used)]

mod world;

use std::time::Duration;

use tokio::task::JoinHandle;
use world::World;

/// One thing that happens from outside.
async fn happen(world: &World, agent: &mut JoinHandle<()>, step: u64) {
    match world.pick(26) {
        0 | 1 => world.create_pod(&format!("q{step}")),
        2 | 3 => world.delete_some_pod(),
        4..=7 => world.exit_some_container(),
        // Several at once, others may be starting.
        8 => (0..3).for_each(|_| world.exit_some_container()),
        9 => {
            // Killed in the middle of whatever it does, and started again.
            world.kill_agent();
            agent.abort();
            tokio::time::sleep(Duration::from_millis(world.pick(3000))).await;
            *agent = world.start_agent();
        }
        10 => world.lose_some_sandbox(),
        11 => world.freeze(true),
        12 | 13 => world.freeze(false),
        14 => world.deafen(true),
        15 | 16 => world.deafen(false),
        17 => {
            world.set_runtime_down(true);
            tokio::time::sleep(Duration::from_millis(world.pick(8000))).await;
            world.set_runtime_down(false);
        }
        18 => {
            for _ in 0..=world.pick(4) {
                world.change_some_manifest();
                tokio::time::sleep(Duration::from_millis(world.pick(3000))).await;
            }
        }
        19 => world.remove_some_manifest(),
        20 => world.change_some_map(),
        21 => world.change_node(),
        22 => world.drop_some_finalizer(),
        23 => world.set_clock(),
        _ => {}
    }
}

async fn scenario(world: &World) -> Result<(), String> {
    let mut agent = world.start_agent();
    let pods = 2 + world.pick(5);
    for n in 0..pods {
        world.create_pod(&format!("p{n}"));
        tokio::time::sleep(Duration::from_millis(world.pick(400))).await;
    }
    world.set_faults(true);
    for step in 0..50 {
        happen(world, &mut agent, step).await;
        tokio::time::sleep(Duration::from_millis(world.pick(2500))).await;
    }
    world.set_faults(false);
    world.freeze(false);
    world.deafen(false);
    // Long enough for the longest hang, back-off and grace.
    tokio::time::sleep(Duration::from_secs(540)).await;
    world.begin_quiet();
    tokio::time::sleep(Duration::from_secs(60)).await;
    world.check_quiet()?;
    world.check_at_rest()?;
    // Whatever was before, a new pod starts at once.
    world.create_steady_pod("last");
    tokio::time::sleep(Duration::from_secs(3)).await;
    if let Some(late) = world.not_in_phase("Running").iter().find(|n| *n == "last") {
        return Err(format!(
            "{late} did not run within 3 s\n  {}",
            world.last_decisions(late)
        ));
    }
    world.delete_all_pods();
    world.remove_all_manifests();
    tokio::time::sleep(Duration::from_secs(420)).await;
    world.check_released()?;
    world.drop_all_finalizers();
    tokio::time::sleep(Duration::from_secs(120)).await;
    world.check_empty()?;
    agent.abort();
    world.broken()
}

fn simulate<T>(seed: u64, work: impl Future<Output = T>) -> T {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().start_paused(true);
    // The order in which tokio wakes those who wait for the same news is random otherwise
    // (.cargo/config.toml).
    #[cfg(tokio_unstable)]
    builder.rng_seed(tokio::runtime::RngSeed::from_bytes(&seed.to_le_bytes()));
    builder.build().unwrap().block_on(work)
}

fn run(seed: u64) -> (Result<(), String>, Vec<String>) {
    simulate(seed, async {
        let world = World::new(seed);
        let result = scenario(&world).await;
        if std::env::var_os("HOLDFAST_TRACE").is_some() {
            world.trace().iter().for_each(|line| println!("{line}"));
            println!("the most within a minute: {:?}", world.most());
        }
        let trace = world.trace();
        world.end();
        (result, trace)
    })
}

#[cfg(tokio_unstable)]
#[test]
fn a_seed_replays_exactly() {
    for seed in 1..=12 {
        let (first, second) = (run(seed), run(seed));
        let differs = first.1.iter().zip(&second.1).position(|(a, b)| a != b);
        let shown = differs.map(|at| {
            (
                at,
                &first.1[at.saturating_sub(2)..=at],
                &second.1[at.saturating_sub(2)..=at],
            )
        });
        assert_eq!(shown, None, "seed {seed} went another way");
        assert_eq!(
            (first.1.len(), &first.0),
            (second.1.len(), &second.0),
            "seed {seed}"
        );
        assert!(
            first.1.len() > 500,
            "seed {seed}: the trace has {} lines",
            first.1.len()
        );
    }
}

#[test]
fn one_hung_pod_holds_up_no_other() {
    simulate(1, async {
        let world = World::new(1);
        let agent = world.start_agent();
        world.create_steady_pod("stuck");
        tokio::time::sleep(Duration::from_secs(5)).await;
        world.hang(&world.uid("stuck"));
        world.exit_some_container();
        tokio::time::sleep(Duration::from_secs(5)).await;
        for n in 0..20 {
            world.create_steady_pod(&format!("p{n}"));
        }
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(world.not_in_phase("Running"), Vec::<String>::new());
        agent.abort();
    });
}

#[test]
fn no_seed_breaks_an_invariant() {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let seeds: Vec<u64> = match number("HOLDFAST_SEED") {
        Some(seed) => vec![seed],
        None => (1..=number("HOLDFAST_SEEDS").unwrap_or(200)).collect(),
    };
    // Seeds know nothing of each other: they share the machine's processors.
    let threads = std::thread::available_parallelism()
        .map_or(1, std::num::NonZero::get)
        .min(8);
    let failures: Vec<String> = std::thread::scope(|scope| {
        let parts: Vec<_> = (0..threads)
            .map(|part| {
                seeds
                    .iter()
                    .skip(part)
                    .step_by(threads)
                    .copied()
                    .collect::<Vec<u64>>()
            })
            .collect();
        let each = |part: Vec<u64>| {
            part.into_iter()
                .filter_map(|seed| run(seed).0.err().map(|why| format!("seed {seed}: {why}")))
                .collect::<Vec<_>>()
        };
        let running: Vec<_> = parts
            .into_iter()
            .map(|part| scope.spawn(move || each(part)))
            .collect();
        running
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    assert!(
        failures.is_empty(),
        "{} of {} seeds failed, the first:\n{}",
        failures.len(),
        seeds.len(),
        failures[..failures.len().min(5)].join("\n")
    );
}
