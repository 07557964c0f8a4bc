//! The cgroups of pods, created as directories or by systemd as slices
//! (`pkg/kubelet/cm/cgroup_manager_linux.go`, `pkg/kubelet/cm/pod_container_manager_linux.go`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::{HostError, blocking};
use holdfast_core::lock::lock;
use holdfast_core::node::cgroup_tree::Group;
use holdfast_core::pod::cgroup::{self, Driver};
use holdfast_core::pod::cgroup_values::{
    Bound, Controller, Difference, RestoredCgroup, Setting, Values,
};
use holdfast_core::pod::qos::QosClass;
use holdfast_sys as sys;
use holdfast_sys::systemd::Slices;

/// Interval between checks whether another program has changed the node's cgroups.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Every n-th check includes the cgroups of pods.
const CHECKS_PER_POD_CHECK: u32 = 2;
/// Time for systemd to apply the properties of a unit.
const SETTLE: Duration = Duration::from_millis(200);
/// Interval between checks whether a new slice exists, and the maximum number of checks.
const APPEARS: (Duration, u32) = (Duration::from_millis(20), 50);

/// Minimum interval between searches for containers' cgroups,
/// in the mode in which only the runtime knows their location.
const SEARCH: Duration = Duration::from_secs(5);

/// The cgroups that contain the pods of each QoS class.
const CLASSES: [(QosClass, Group); 3] = [
    (QosClass::Guaranteed, Group::Pods),
    (QosClass::Burstable, Group::Burstable),
    (QosClass::BestEffort, Group::BestEffort),
];

/// Who creates a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// Created for a pod.
    Pod,
    /// An ancestor of pods' cgroups; created if it is missing.
    Node,
    /// Created by other programs; only values are written.
    Foreign,
}

/// The values last written to a cgroup; `None` if writing failed. Locked while the values are being written.
type Written = Arc<tokio::sync::Mutex<Option<Values>>>;

struct KnownGroup {
    owner: Owner,
    written: Written,
}

/// The cgroups of containers by container id, and the time of the last search.
#[derive(Default)]
struct Found {
    at: Option<Instant>,
    places: BTreeMap<String, String>,
}

/// Creates and updates the cgroups of the node and of its pods.
pub struct Cgroups {
    root: String,
    driver: Driver,
    slices: Slices,
    /// The sizes of huge pages that the kernel supports, in bytes.
    page_sizes: Vec<u64>,
    known: Mutex<BTreeMap<String, KnownGroup>>,
    checks: AtomicU32,
    /// Whether pods have no cgroups (`cgroupsPerQOS: false`).
    without_pod_cgroups: bool,
    found: Mutex<Found>,
}

/// The settings that correspond to these values.
fn wanted(values: &Values, systemd: bool) -> Vec<Setting> {
    let unified = sys::cgroup::is_v2();
    match systemd {
        true => values.clone().rounded_by_systemd().settings(unified),
        false => values.settings(unified),
    }
}

/// Limits the huge pages of a slice, since systemd has no property for them.
async fn limit_huge_pages(path: String, mut settings: Vec<Setting>) -> Result<(), HostError> {
    settings.retain(|s| s.controller == Controller::HugeTlb);
    let (pause, most) = APPEARS;
    for _ in 0..most {
        if settings.is_empty() || sys::cgroup::exists(&path) {
            break;
        }
        tokio::time::sleep(pause).await;
    }
    let set = move || {
        if settings.is_empty() {
            return Ok(());
        }
        sys::cgroup::pass_down(&path, Controller::HugeTlb)
            .and_then(|()| sys::cgroup::set(&path, &settings))
            .map(drop)?;
        Ok(())
    };
    blocking(set).await
}

impl Cgroups {
    /// Manages cgroups below `root`, which is `/` or another cgroup.
    #[must_use]
    pub fn new(root: &str, driver: Driver) -> Cgroups {
        let page_sizes = sys::machine::huge_pages().into_iter();
        Cgroups {
            root: root.to_owned(),
            driver,
            slices: Slices::default(),
            page_sizes: page_sizes.map(|(bytes, _)| bytes).collect(),
            known: Mutex::default(),
            checks: AtomicU32::new(0),
            without_pod_cgroups: false,
            found: Mutex::default(),
        }
    }

    /// Switches to the mode without cgroups for pods and QoS classes. Nothing is
    /// created or removed for pods, and the runtime chooses the location of containers.
    #[must_use]
    pub fn without_pods(self) -> Cgroups {
        Cgroups {
            without_pod_cgroups: true,
            ..self
        }
    }

    /// The sizes of huge pages that the kernel supports, in bytes.
    pub(crate) fn page_sizes(&self) -> &[u64] {
        &self.page_sizes
    }

    fn name(&self, class: QosClass, uid: &str) -> String {
        cgroup::pod_path(&self.root, self.driver, class, uid)
    }

    /// The path of a pod's or container's cgroup relative to the
    /// cgroup hierarchies; `None` if it does not exist or is unknown.
    pub(crate) fn place(
        &self,
        class: QosClass,
        uid: &str,
        container: Option<&str>,
    ) -> Option<String> {
        match container {
            Some(id) if self.without_pod_cgroups => self.search(id),
            None if self.without_pod_cgroups => None,
            _ => Some(cgroup::hierarchy_path(&self.name(class, uid), container)),
        }
    }

    /// The cgroup in which the runtime has put a container. A container never moves.
    fn search(&self, id: &str) -> Option<String> {
        let mut found = lock(&self.found);
        if let Some(place) = found.places.get(id) {
            return Some(place.clone());
        }
        if found.at.is_none_or(|at| at.elapsed() >= SEARCH) {
            let key = |name: &str| cgroup::container_of(name).map(str::to_owned);
            found.places = sys::cgroup::named(key);
            found.at = Some(Instant::now());
        }
        found.places.get(id).cloned()
    }

    /// The path of the cgroup of all pods; without cgroups for pods, that of the configured root.
    pub(crate) fn path_of_all_pods(&self) -> String {
        match self.without_pod_cgroups {
            true => self.group_path(&Group::Root),
            false => self.group_path(&Group::Pods),
        }
    }

    /// The paths of the cgroups of QoS classes that have one.
    pub(crate) fn paths_of_classes(&self) -> Vec<String> {
        if self.without_pod_cgroups {
            return vec![];
        }
        [Group::Burstable, Group::BestEffort]
            .map(|group| self.group_path(&group))
            .into()
    }

    fn group_path(&self, group: &Group) -> String {
        self.path(&group.name(&self.root, self.driver))
    }

    /// The path of a cgroup relative to the hierarchies. With systemd, `name` is a slice.
    fn path(&self, name: &str) -> String {
        match self.driver {
            Driver::Systemd => cgroup::hierarchy_path(name, None),
            Driver::Cgroupfs => name.to_owned(),
        }
    }

    /// Whether this cgroup of the node exists.
    #[must_use]
    pub fn has(&self, group: &Group) -> bool {
        sys::cgroup::exists(&self.group_path(group))
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, KnownGroup>> {
        lock(&self.known)
    }

    /// Writes values to a cgroup and remembers them. Returns the differences from the previous values.
    async fn write_and_remember(
        &self,
        name: &str,
        owner: Owner,
        values: &Values,
    ) -> Result<Vec<Difference>, HostError> {
        let written = {
            let mut known = self.known();
            let known = known.entry(name.to_owned()).or_insert_with(|| KnownGroup {
                owner,
                written: Arc::default(),
            });
            Arc::clone(&known.written)
        };
        let mut written = written.lock().await;
        *written = None;
        let changes = self.write(name, owner, values).await?;
        *written = Some(values.clone());
        Ok(changes)
    }

    /// Writes values to a cgroup. No other code does so.
    async fn write(
        &self,
        name: &str,
        owner: Owner,
        values: &Values,
    ) -> Result<Vec<Difference>, HostError> {
        let (unified, path) = (sys::cgroup::is_v2(), self.path(name));
        if self.driver == Driver::Cgroupfs {
            let settings = values.settings(unified);
            return blocking(move || {
                if owner != Owner::Foreign {
                    sys::cgroup::make(&path)?;
                }
                Ok(sys::cgroup::set(&path, &settings)?)
            })
            .await;
        }
        let settings = values.clone().rounded_by_systemd().settings(unified);
        let is_there = sys::cgroup::exists(&path);
        if owner == Owner::Foreign && !is_there {
            return Err(format!("slice {name} does not exist").into());
        }
        let changes = sys::cgroup::differences(&path, &settings);
        if !is_there || !changes.is_empty() {
            self.slices.forget(name);
        }
        self.slices.ensure(name, values.properties(unified)).await?;
        if unified && sys::cgroup::has_controller(Controller::HugeTlb) {
            // A pod without these limits is better than none, and its containers have them in any case.
            if let Err(error) = limit_huge_pages(path, settings).await {
                tracing::debug!(name, %error, "setting the huge page limits of a slice failed");
            }
        }
        Ok(changes)
    }

    /// Creates or updates a pod's cgroup. Returns the cgroup parent
    /// for the runtime, which is empty if pods have no cgroups.
    pub(crate) async fn ensure(
        &self,
        class: QosClass,
        uid: &str,
        values: &Values,
    ) -> Result<String, HostError> {
        if self.without_pod_cgroups {
            return Ok(String::new());
        }
        let name = self.name(class, uid);
        self.write_and_remember(&name, Owner::Pod, values).await?;
        Ok(name)
    }

    /// The name of a pod's cgroup in the driver's syntax; empty if pods have no cgroups. Changes nothing.
    pub(crate) fn parent(&self, class: QosClass, uid: &str) -> String {
        match self.without_pod_cgroups {
            true => String::new(),
            false => self.name(class, uid),
        }
    }

    /// The memory usage of a pod in bytes, including caches; `None` if unknown.
    pub(crate) fn memory_in_use(&self, class: QosClass, uid: &str) -> Option<u64> {
        if self.without_pod_cgroups {
            return None;
        }
        sys::cgroup::memory_in_use(&self.path(&self.name(class, uid)))
    }

    /// Writes values to the node's cgroups, each independently. Returns the results in the same order.
    pub(crate) async fn apply(
        &self,
        tree: &[(Group, Values)],
    ) -> Vec<Result<Vec<Difference>, HostError>> {
        let mut answers = vec![];
        for (group, values) in tree {
            let name = group.name(&self.root, self.driver);
            // The root of the hierarchies has no values.
            if name == "/" {
                answers.push(Ok(vec![]));
                continue;
            }
            let owner = match group {
                Group::Reserved(_) | Group::Root => Owner::Foreign,
                Group::Pods | Group::Burstable | Group::BestEffort => Owner::Node,
            };
            let mut written = self.write_and_remember(&name, owner, values).await;
            // A class may already use more memory than its new limit, so that
            // writing the limit fails. The present usage then becomes the limit.
            let used = sys::cgroup::memory_in_use(&self.path(&name));
            if let (
                Err(_),
                Group::Burstable | Group::BestEffort,
                Some(Bound::At(limit)),
                Some(used),
            ) = (&written, group, values.memory, used)
                && used > limit
            {
                let memory = Some(Bound::At(used));
                let values = Values {
                    memory,
                    ..values.clone()
                };
                written = self.write_and_remember(&name, owner, &values).await;
            }
            answers.push(written);
        }
        answers
    }

    /// Waits until another program has changed values of a cgroup, then restores them.
    /// The kernel does not notify anyone of such changes, so this polls the files.
    pub(crate) async fn wait_and_restore(&self) -> Vec<RestoredCgroup> {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            let checks = self.checks.fetch_add(1, Ordering::Relaxed);
            let suspects = self
                .changed(checks.is_multiple_of(CHECKS_PER_POD_CHECK))
                .await;
            if self.driver == Driver::Systemd && !suspects.is_empty() {
                // systemd applies properties with a delay.
                tokio::time::sleep(SETTLE).await;
            }
            let mut mended = vec![];
            for suspect in suspects {
                mended.extend(self.restore(suspect).await);
            }
            if !mended.is_empty() {
                return mended;
            }
        }
    }

    /// The cgroups whose values differ from those written. Skips a cgroup that is being written.
    async fn changed(&self, with_pods: bool) -> Vec<(String, Owner, Written)> {
        let all: Vec<(String, String, Owner, Written)> = self
            .known()
            .iter()
            .filter(|(_, known)| with_pods || known.owner != Owner::Pod)
            .map(|(name, known)| {
                let written = Arc::clone(&known.written);
                (name.clone(), self.path(name), known.owner, written)
            })
            .collect();
        let systemd = self.driver == Driver::Systemd;
        let compare = move || {
            let is_changed = |(_, path, owner, written): &(String, String, Owner, Written)| {
                let Ok(written) = written.try_lock() else {
                    return false;
                };
                let Some(values) = &*written else {
                    return false;
                };
                if !sys::cgroup::exists(path) {
                    // If a pod's cgroup was removed, its containers are not running. The pod worker handles this.
                    return *owner != Owner::Pod;
                }
                !sys::cgroup::differences(path, &wanted(values, systemd)).is_empty()
            };
            let changed = all.into_iter().filter(is_changed);
            Ok(changed
                .map(|(name, _, owner, written)| (name, owner, written))
                .collect())
        };
        blocking(compare).await.unwrap_or_default()
    }

    async fn restore(
        &self,
        (name, owner, written): (String, Owner, Written),
    ) -> Option<RestoredCgroup> {
        let written = written.lock().await;
        let values = written.as_ref()?;
        let path = self.path(&name);
        let found =
            sys::cgroup::differences(&path, &wanted(values, self.driver == Driver::Systemd));
        if found.is_empty() && sys::cgroup::exists(&path) {
            return None;
        }
        let outcome = self.write(&name, owner, values).await;
        Some(RestoredCgroup {
            cgroup: name,
            changes: found,
            error: outcome.err().map(|e| e.to_string()),
        })
    }

    /// Removes a pod's cgroup.
    pub(crate) async fn remove(&self, class: QosClass, uid: &str) -> Result<(), HostError> {
        if self.without_pod_cgroups {
            return Ok(());
        }
        let name = self.name(class, uid);
        let known = self.known().remove(&name);
        if let Some(known) = known {
            *known.written.lock().await = None;
        }
        match self.driver {
            Driver::Systemd => self.slices.remove(&name).await,
            Driver::Cgroupfs => blocking(move || Ok(sys::cgroup::remove(&name)?)).await,
        }
    }

    /// The pods that have a cgroup, by QoS class and uid.
    pub(crate) async fn pods(&self) -> Result<Vec<(QosClass, String)>, HostError> {
        if self.without_pod_cgroups {
            return Ok(vec![]);
        }
        let driver = self.driver;
        let tiers = CLASSES.map(|(class, group)| (class, self.group_path(&group)));
        blocking(move || {
            let below = |(class, tier): (QosClass, String)| {
                let names = sys::cgroup::children(&tier).into_iter();
                names.filter_map(move |name| Some((class, cgroup::uid_of(&name, driver)?)))
            };
            Ok(tiers.into_iter().flat_map(below).collect())
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn no_cgroups_are_created_if_cgroups_per_qos_is_off() {
        let (uid, class) = ("flat-1", QosClass::Guaranteed);
        let cgroups = Cgroups::new("/", Driver::Cgroupfs).without_pods();
        let made = cgroups.ensure(class, uid, &Values::default()).await;
        assert_eq!(made, Ok(String::new()));
        assert!(!sys::cgroup::exists("/kubepods/podflat-1"));
        assert_eq!(cgroups.place(class, uid, None), None);
        assert_eq!(cgroups.place(class, uid, Some(&"0".repeat(64))), None);
        assert_eq!(cgroups.memory_in_use(class, uid), None);
        assert_eq!(cgroups.pods().await, Ok(vec![]));
        assert_eq!(cgroups.remove(class, uid).await, Ok(()));
        assert_eq!(cgroups.path_of_all_pods(), "/");
        assert_eq!(cgroups.paths_of_classes(), Vec::<String>::new());
        // The root of the hierarchies cannot be changed.
        let tree = [(Group::Root, Values::default())];
        assert_eq!(cgroups.apply(&tree).await, [Ok(vec![])]);
    }
}
