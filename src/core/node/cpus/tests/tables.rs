//! `gives.txt` has the kubelet's test cases of its static policy, on the machines of `takes.txt`. Kinds of lines:
//!
//! - `machine NAME`
//! - `give`: options, reserved CPUs (`#` precedes a number of CPUs), shared CPUs before (another pod has the rest),
//!   preferred NUMA nodes, and requests; then the allocated CPUs, or part of the error
//! - `hints`: the same with the container's present CPUs; then the hints for the container and for its pod
//! - `state`: the content of a checkpoint; then the shared CPUs after restoring it

use super::*;

fn options(text: &str) -> Options {
    let has = |word: &str| text.split(',').any(|option| option == word);
    Options {
        full_cores: has("full"),
        across_nodes: has("nodes"),
        by_socket: has("socket"),
        across_cores: has("cores"),
        strict_reservation: has("strict"),
        by_cache: has("cache"),
    }
}

fn numbers(text: &str) -> CpuSet {
    match text {
        "-" => CpuSet::new(),
        _ => set(text),
    }
}

fn unused(topology: &Arc<Topology>, options: Options, reserved: &str) -> Cpus {
    let number = reserved.strip_prefix('#');
    let number = number.map(|n| n.parse::<i64>().expect("a number"));
    let rules = Rules {
        options,
        reserved_milli: number.unwrap_or(0) * 1000,
        reserved: number.is_none().then(|| numbers(reserved)),
    };
    Cpus::new(&rules, None, Arc::clone(topology)).expect("valid rules")
}

/// Restores a state with these shared CPUs; CPUs that are neither shared nor in `own` belong to another pod.
fn used(mut cpus: Cpus, shared: &CpuSet, own: &CpuSet) -> Cpus {
    let rest = &(&cpus.usable() - shared) - own;
    let mut exclusive = Exclusive::new();
    for (uid, set) in [("own", own), ("other", &rest)] {
        if !set.is_empty() {
            let container = BTreeMap::from([("main-0".to_owned(), set.clone())]);
            exclusive.insert(uid.to_owned(), container);
        }
    }
    let shared = shared.clone();
    let adopted = cpus.load(State { shared, exclusive });
    adopted.expect("a valid state");
    cpus
}

fn given(cpus: &mut Cpus, asks: &str, near: &str) -> String {
    let asks = asks.split(',').map(|ask| ask.split_once('='));
    let asks: Vec<(&str, &str)> = asks.map(|ask| ask.expect("an amount")).collect();
    let pod = pod("own", &asks);
    let digits = near.chars().filter_map(|c| c.to_digit(10));
    let affinity = Hint {
        nodes: (near != "*").then(|| NodeMask::of(digits)),
        preferred: true,
    };
    let mut sets = vec![];
    for (role, container) in pod::containers(&pod) {
        if let Err(refusal) = cpus.allocate(&pod, role, &container, affinity, &mut vec![]) {
            return format!("! {}", refusal.message);
        }
        let own = &cpus.state().exclusive["own"][&container.name];
        assert!(own.is_disjoint(&cpus.state().shared), "{asks:?}");
        sets.push(format_list(own));
    }
    sets.join(" ")
}

fn shown(hints: &Hints) -> String {
    let one = |hint: &Hint| {
        let nodes = hint.nodes.unwrap_or_default().nodes();
        let nodes: String = nodes.iter().map(u32::to_string).collect();
        format!("{nodes}{}", if hint.preferred { "+" } else { "-" })
    };
    let hints: Vec<String> = hints["cpu"].iter().map(one).collect();
    match hints.is_empty() {
        true => "!".to_owned(),
        false => hints.join(","),
    }
}

fn hinted(cpus: &Cpus, asks: &str) -> String {
    let pod = pod("own", &[("main", asks)]);
    let container = &pod.spec.as_ref().expect("a spec").containers[0];
    let of_container = shown(&cpus.hints(Subject::Container(&pod, container)));
    assert_eq!(shown(&cpus.hints(Subject::Pod(&pod))), of_container);
    of_container
}

fn adopted(mut cpus: Cpus, shared: &str, given: &str) -> String {
    let pods = given.split(';').filter(|set| *set != "-").enumerate();
    let pod = |(index, set): (usize, &str)| {
        let container = BTreeMap::from([("main-0".to_owned(), numbers(set))]);
        (index.to_string(), container)
    };
    let state = State {
        shared: numbers(shared),
        exclusive: pods.map(pod).collect(),
    };
    match cpus.load(state) {
        Ok(()) => format_list(&cpus.state().shared),
        Err(_) => "refused".to_owned(),
    }
}

fn answer(topology: &Arc<Topology>, question: &str) -> String {
    let words: Vec<&str> = question.split(' ').collect();
    let pairs = words[2..].chunks(2).map(|pair| (pair[0], pair[1]));
    let fields: BTreeMap<&str, &str> = pairs.collect();
    let field = |name: &str| fields.get(name).copied().unwrap_or("-");
    let cpus = unused(topology, options(words[1]), field("reserved"));
    let shared = numbers(field("shared"));
    match words[0] {
        "give" => {
            let mut cpus = used(cpus, &shared, &CpuSet::new());
            given(&mut cpus, field("asks"), field("near"))
        }
        "hints" => hinted(&used(cpus, &shared, &numbers(field("own"))), field("asks")),
        _ => adopted(cpus, field("shared"), field("given")),
    }
}

#[test]
fn cpus_are_allocated_as_by_the_kubelet() {
    let mut topology = Arc::new(Topology::default());
    let mut differences = vec![];
    for line in include_str!("../gives.txt").lines() {
        if let Some(name) = line.strip_prefix("machine ") {
            topology = named(name).topology;
            continue;
        }
        let (question, expected) = line.split_once(": ").expect("an answer");
        let got = answer(&topology, question);
        let is_expected = match expected.strip_prefix("! ") {
            Some(refusal) => got.starts_with("! ") && got.contains(refusal),
            None => got == expected,
        };
        if !is_expected {
            differences.push(format!("{line}, but got {got}"));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn a_pod_gets_the_peak_cpus_of_its_containers() {
    for (containers, expected) in [
        (vec![("init", "0"), ("main", "0")], 0),
        (vec![("init", "2"), ("main", "2")], 2),
        (vec![("init", "5"), ("main", "5")], 5),
        (vec![("init", "2"), ("main", "5")], 5),
        (vec![("init", "5"), ("main", "2")], 5),
        (
            vec![("init", "2"), ("init", "4"), ("main", "2"), ("main", "4")],
            6,
        ),
        (vec![("sidecar", "1"), ("main", "1")], 2),
        (
            vec![
                ("init", "5"),
                ("sidecar", "1"),
                ("sidecar", "2"),
                ("sidecar", "3"),
                ("main", "1"),
            ],
            7,
        ),
        (
            vec![
                ("init", "5"),
                ("sidecar", "1"),
                ("sidecar", "2"),
                ("init", "5"),
                ("sidecar", "3"),
                ("main", "1"),
            ],
            8,
        ),
        (
            vec![("sidecar", "10"), ("init", "200"), ("main", "100")],
            210,
        ),
    ] {
        let pod = pod("a", &containers);
        assert_eq!(wanted_by_pod(&pod), expected, "{containers:?}");
    }
}
