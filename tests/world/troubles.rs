//! Additional faults that only some seeds have: terminal statuses of other clients, a volume that
//! hangs, a node that changes under its pods, a pod with very many objects. A separate generator
//! chooses them, so that a seed's other choices stay the same.

use super::nodes::LANE;
use super::remote::add_remote_volume;
use super::*;

/// The troubles of a seed.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Troubles {
    ends: bool,
    far: bool,
    node: bool,
    wide: bool,
    upkeep: bool,
}

impl State {
    /// A random number for a choice about troubles.
    pub(super) fn draw(&mut self, below: u64) -> u64 {
        self.trouble_random.pick(below)
    }

    /// Gives a new pod features that the seed's troubles affect.
    pub(super) fn trouble_pod(&mut self, pod: &mut Value) {
        let troubles = self.troubles;
        if troubles.far && self.draw(3) == 0 {
            add_remote_volume(pod);
        }
        if !troubles.node {
            return;
        }
        let spec = &mut pod["spec"];
        match self.draw(8) {
            0 => spec["hostNetwork"] = true.into(),
            1 | 2 => {
                let lanes = (1 + self.draw(2)).to_string();
                let resources = &mut spec["containers"][0]["resources"];
                resources["requests"][LANE] = lanes.clone().into();
                resources["limits"][LANE] = lanes.into();
            }
            _ => {}
        }
        if self.draw(2) == 0 {
            spec["tolerations"] = json!([{"operator": "Exists"}]);
        }
    }
}

impl World {
    /// Chooses the troubles of the seed.
    pub fn choose_troubles(&self) {
        let mut state = self.state();
        let chosen = state.draw(8);
        state.troubles = Troubles {
            ends: chosen & 1 != 0,
            far: chosen & 2 != 0,
            node: chosen & 4 != 0,
            wide: state.draw(16) == 0,
            upkeep: state.draw(4) == 0,
        };
        let line = format!("{:?}", state.troubles);
        state.trace.push(line);
    }

    /// Whether the seed has a volume that hangs.
    pub fn has_remote_volume(&self) -> bool {
        self.state().troubles.far
    }

    /// Whether the seed has a pod with very many objects.
    pub fn has_wide_pod(&self) -> bool {
        self.state().troubles.wide
    }

    /// Whether the upkeep of running pods fails until the end of the run.
    pub fn has_failing_upkeep(&self) -> bool {
        self.state().troubles.upkeep
    }

    /// Causes one trouble, or none.
    pub fn cause_trouble(&self) {
        let (troubles, kind) = {
            let mut state = self.state();
            let kind = state.draw(24);
            (state.troubles, kind)
        };
        match kind {
            0 if troubles.ends => self.write_some_terminal_status(),
            1 if troubles.ends => self.disrupt_some_pod(),
            2 if troubles.ends => self.write_some_mirror_status(),
            3 | 4 if troubles.far => {
                let (seconds, stops_waiting) = {
                    let mut state = self.state();
                    let most = [20, 400][usize::try_from(state.draw(2)).unwrap()];
                    (1 + state.draw(most), state.draw(2) == 0)
                };
                self.hang_remote(Duration::from_secs(seconds), stops_waiting);
            }
            5 if troubles.far => self.resume_remote(),
            6..=8 if troubles.node => self.change_more_of_node(),
            9 | 10 => {
                let mut state = self.state();
                state.is_upkeep_failing = troubles.upkeep && kind == 9;
            }
            _ => {}
        }
    }

    /// Ends the troubles. The node keeps its changes, except for the NoExecute taint.
    pub fn end_troubles(&self) {
        self.resume_remote();
        if self.state().troubles.node {
            self.tolerate_node();
            self.move_node_somewhere();
        }
    }
}
