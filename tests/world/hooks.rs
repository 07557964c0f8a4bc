//! preStop hooks of containers that the agent stops.

use super::*;

/// A running hook; dropping this ends it.
pub(super) struct RunningHook(World, String);

impl Drop for RunningHook {
    fn drop(&mut self) {
        let key = (self.0.2, self.1.clone());
        self.0.state().running_hooks.remove(&key);
    }
}

impl State {
    /// The preStop hook of a container, if it is a command.
    fn pre_stop(&self, id: &str) -> Option<String> {
        let container = self.containers.get(id)?;
        let pod = self.pods.get(&container.uid)?;
        let mut all = pod["spec"]["containers"].as_array()?.iter();
        let own = all.find(|c| c["name"] == *container.container.name)?;
        let command = own["lifecycle"]["preStop"]["exec"]["command"].as_array()?;
        let words: Vec<&str> = command.iter().filter_map(Value::as_str).collect();
        Some(words.join(" "))
    }
}

impl World {
    pub(super) fn running_hook(&self, id: &str, command: &[String]) -> Option<RunningHook> {
        if command.first().is_none_or(|word| word != "pre") {
            return None;
        }
        self.state().running_hooks.insert((self.2, id.to_owned()));
        Some(RunningHook(self.clone(), id.to_owned()))
    }

    /// Rule: a container's preStop hook has run before StopContainer, unless the grace period is over.
    pub(super) fn check_hooks(&self, id: &str, grace: i64) {
        let mut state = self.state();
        let is_hooking = state.running_hooks.contains(&(self.2, id.to_owned()));
        state.hooked_stops += usize::from(is_hooking);
        // After the grace period the hook continues until its container is killed.
        if grace > 2 && is_hooking {
            state.report_violation(format!("{id}: stopped while its preStop hook is running"));
        }
        let runs = state
            .containers
            .get(id)
            .is_some_and(|c| c.container.state == ContainerState::Running);
        // If no grace period is left, the agent starts the hook and stops the container at the same time.
        let hook = state.pre_stop(id).filter(|_| runs && grace > 2);
        let ran = |hook: &String| {
            let all = state.hooks.get(id);
            all.is_some_and(|all| all.iter().any(|ran| ran.ends_with(hook.as_str())))
        };
        if let Some(hook) = hook.filter(|hook| !ran(hook)) {
            state.report_violation(format!("{id}: stopped before {hook:?} has run"));
        }
    }

    pub(super) fn check_hooks_of_sandbox(&self, id: &str) {
        let mut state = self.state();
        let hooked: Vec<String> = state
            .running_hooks
            .iter()
            .filter(|(agent_number, _)| *agent_number == self.2)
            .map(|(_, container)| container.clone())
            .filter(|c| {
                let inside = state.containers.get(c);
                inside.is_some_and(|c| {
                    c.container.sandbox == id && c.container.state == ContainerState::Running
                })
            })
            .collect();
        for container in hooked {
            state.report_violation(format!(
                "{id}: stopped while the preStop hook of {container} is running"
            ));
        }
    }
}
