//! The pods of a scenario: their containers, hooks, sizes and the objects that they use.

use super::*;

/// The number of ConfigMaps and Secrets, and the number that a wide pod uses.
const OBJECTS: u64 = 300;
const OBJECTS_PER_POD: u64 = 30;

/// The name of an object: even numbers are ConfigMaps, odd ones Secrets.
pub(super) fn object_name(n: u64) -> String {
    match n.is_multiple_of(2) {
        true => format!("m{n}"),
        false => format!("k{n}"),
    }
}

/// A volume that shows an object; it has the object's name.
fn object_volume(n: u64) -> Value {
    let name = object_name(n);
    match n.is_multiple_of(2) {
        true => json!({"name": name, "configMap": {"name": name}}),
        false => json!({"name": name, "secret": {"secretName": name}}),
    }
}

/// Mounts volumes with these objects in a pod's first container.
fn show_objects(pod: &mut Value, objects: std::ops::Range<u64>) {
    let spec = &mut pod["spec"];
    let mounts = &mut spec["containers"][0]["volumeMounts"];
    let mounts = mounts.as_array_mut().unwrap();
    mounts.extend(objects.clone().map(|n| {
        let name = object_name(n);
        json!({"name": name, "mountPath": format!("/{name}")})
    }));
    let volumes = spec["volumes"].as_array_mut().unwrap();
    volumes.extend(objects.map(object_volume));
}

impl State {
    /// One of the restart policies.
    pub(super) fn some_policy(&mut self) -> &'static str {
        ["Always", "Always", "OnFailure", "Never"][usize::try_from(self.pick(4)).unwrap()]
    }

    /// A hook that returns soon, fails, takes longer than any grace period, or never returns.
    fn some_pre_stop(&mut self) -> Value {
        match self.pick(6) {
            0 => json!({"exec": {"command": ["pre"]}}),
            1 => json!({"exec": {"command": ["pre", "fails"]}}),
            2 => json!({"exec": {"command": ["pre", "lasts"]}}),
            3 => json!({"exec": {"command": ["pre", "hangs"]}}),
            _ => json!({"sleep": {"seconds": 1}}),
        }
    }

    fn some_container(&mut self, i: u64, probing: bool) -> Value {
        let mut container = json!({"name": format!("c{i}"), "image": "i:1", "volumeMounts": [{"name": "v", "mountPath": "/v"}]});
        if probing {
            let probe =
                json!({"httpGet": {"port": 80, "path": format!("/c{i}")}, "periodSeconds": 1});
            container["startupProbe"] = probe.clone();
            container["readinessProbe"] = probe.clone();
            container["livenessProbe"] = probe;
            container["lifecycle"]["postStart"] = json!({"exec": {"command": ["post"]}});
        }
        if probing || self.pick(3) == 0 {
            container["lifecycle"]["preStop"] = self.some_pre_stop();
        }
        container
    }

    /// A random pod of a scenario.
    fn some_pod(&mut self, name: &str, uid: &str, now: Timestamp) -> Value {
        let policy = self.some_policy();
        let count = 1 + self.pick(2);
        let probing = self.pick(2) == 0;
        let mut containers: Vec<Value> = (0..count)
            .map(|i| self.some_container(i, probing))
            .collect();
        self.size(&mut containers[0]);
        let mut init: Vec<Value> = if self.pick(3) == 0 {
            vec![json!({"name": "i0", "image": "i:1"})]
        } else {
            vec![]
        };
        if self.pick(4) == 0 {
            init.push(json!({"name": "s0", "image": "i:1", "restartPolicy": "Always"}));
        }
        let grace = 1 + self.pick(20);
        let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "ns", "uid": uid, "creationTimestamp": now.to_string(), "generation": 1},
            "spec": {"nodeName": "node", "restartPolicy": policy, "terminationGracePeriodSeconds": grace, "containers": containers, "initContainers": init,
                     "volumes": [{"name": "v", "emptyDir": {}}]}, "status": {"phase": "Pending"}});
        if self.pick(4) == 0 {
            pod["metadata"]["finalizers"] = json!(["sim.example/hold"]);
        }
        if self.pick(6) == 0 {
            pod["spec"]["nodeSelector"] = json!({"zone": "a"});
        }
        let objects = match self.pick(12) {
            0 => {
                let first = OBJECTS_PER_POD * self.pick(OBJECTS / OBJECTS_PER_POD);
                first..first + OBJECTS_PER_POD
            }
            1..=4 => 0..2,
            _ => 0..0,
        };
        show_objects(&mut pod, objects);
        pod
    }

    /// Changes an object and returns the callbacks of its subscribers.
    fn change_object(&mut self, name: String) -> Vec<OnChange> {
        *self.maps.entry(name.clone()).or_insert(1) += 1;
        let users = self.subscriptions.values();
        users
            .filter(|(names, _)| names.contains(&name))
            .map(|(_, callback)| Arc::clone(callback))
            .collect()
    }
}

impl World {
    pub fn create_pod(&self, name: &str) {
        let now = self.1.now();
        let mut state = self.state();
        let uid = state.id("uid");
        let mut pod = state.some_pod(name, &uid, now);
        state.trouble_pod(&mut pod);
        state.pods.insert(uid.clone(), pod);
        state.publish(&uid);
    }

    /// A long-running pod that shows so many objects.
    pub fn create_pod_with_objects(&self, name: &str, count: u64) {
        self.create_steady_pod(name);
        let uid = self.uid(name);
        let mut state = self.state();
        show_objects(state.pods.get_mut(&uid).unwrap(), 0..count);
        state.publish(&uid);
    }

    /// `kubectl delete --force`: removes some pod's object immediately. In two of three cases a controller
    /// creates another pod with its name.
    pub fn replace_some_pod(&self) {
        let mut state = self.state();
        let uids: Vec<String> = state.pods.keys().cloned().collect();
        let of_api: Vec<&String> = uids
            .iter()
            .filter(|uid| state.runtime_uid(uid) == **uid)
            .collect();
        let place = state.pick(of_api.len() as u64);
        let Some(uid) = of_api.get(usize::try_from(place).unwrap()) else {
            return;
        };
        let name = state.pods[*uid]["metadata"]["name"].clone();
        state.remove(uid);
        let again = state.pick(3) > 0;
        drop(state);
        if again {
            self.create_pod(name.as_str().unwrap());
        }
    }

    /// Shortens the grace period of some pod's deletion to 1 s.
    pub fn shorten_some_deletion(&self) {
        let Some(uid) = self.some_uid() else {
            return;
        };
        let mut state = self.state();
        let metadata = &mut state.pods.get_mut(&uid).unwrap()["metadata"];
        let grace = metadata["deletionGracePeriodSeconds"].as_i64();
        if grace.is_some_and(|grace| grace > 1) {
            metadata["deletionGracePeriodSeconds"] = 1.into();
            state.publish(&uid);
        }
    }

    /// Changes an object that pods may use: one of the first few, which many pods use, or any.
    pub fn change_some_object(&self) {
        let callbacks = {
            let mut state = self.state();
            let among = [4, OBJECTS][usize::try_from(state.pick(2)).unwrap()];
            let name = object_name(state.pick(among));
            state.change_object(name)
        };
        callbacks.iter().for_each(|callback| callback());
    }

    /// How often a pod's volume was set up or refreshed within the last minute.
    pub fn refreshes(&self, name: &str, volume: &str) -> usize {
        let key = (format!("{} {volume}", self.uid(name)), "set_up_volume");
        self.state().recent_calls.get(&key).map_or(0, VecDeque::len)
    }

    /// Changes all objects, one after the other.
    pub fn change_all_objects(&self) {
        for n in 0..OBJECTS {
            let callbacks = self.state().change_object(object_name(n));
            callbacks.iter().for_each(|callback| callback());
        }
    }
}
