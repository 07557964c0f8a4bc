//! The whole agent in simulated time: a scripted runtime, API and machine that delay, fail, fail after
//! having acted, and hang; containers that exit; pods that come and go; an agent that is killed. What
//! must always hold is checked at every call, and when the faults end the world must come to rest.
//!
//! `HOLDFAST_SEEDS=5000 cargo test --test sim` runs more seeds, `HOLDFAST_SEED=17` one.
#![allow(clippy::unwrap_used)]

mod world;

use std::time::Duration;

use world::World;

async fn scenario(seed: u64) -> Result<(), String> {
    let world = World::new(seed);
    let mut agent = world.start_agent();
    let pods = 2 + world.pick(5);
    for n in 0..pods {
        world.create_pod(&format!("p{n}"));
        tokio::time::sleep(Duration::from_millis(world.pick(400))).await;
    }
    world.set_faults(true);
    for step in 0..40 {
        match world.pick(12) {
            0 => world.create_pod(&format!("q{step}")),
            1 | 2 => world.delete_some_pod(),
            3..=5 => world.exit_some_container(),
            6 => {
                // Killed in the middle of whatever it does, and started again.
                world.kill_agent();
                agent.abort();
                tokio::time::sleep(Duration::from_millis(world.pick(3000))).await;
                agent = world.start_agent();
            }
            7 => world.lose_some_sandbox(),
            _ => {}
        }
        tokio::time::sleep(Duration::from_millis(world.pick(2500))).await;
    }
    world.set_faults(false);
    // Long enough for the longest hang, back-off and grace.
    tokio::time::sleep(Duration::from_secs(900)).await;
    world.check_at_rest()?;
    world.delete_all_pods();
    tokio::time::sleep(Duration::from_secs(900)).await;
    world.check_empty()?;
    agent.abort();
    world.broken()
}

fn run(seed: u64) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(scenario(seed))
}

#[test]
fn no_seed_breaks_an_invariant() {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let seeds: Vec<u64> = match number("HOLDFAST_SEED") {
        Some(seed) => vec![seed],
        None => (1..=number("HOLDFAST_SEEDS").unwrap_or(200)).collect(),
    };
    let failures: Vec<String> = seeds.iter().filter_map(|seed| run(*seed).err().map(|why| format!("seed {seed}: {why}"))).collect();
    assert!(failures.is_empty(), "{} of {} seeds failed, the first:\n{}", failures.len(), seeds.len(), failures[..failures.len().min(5)].join("\n"));
}
