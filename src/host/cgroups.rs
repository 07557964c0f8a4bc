//! The cgroups of pods: made as directories, or by systemd as slices (kubelet spec, 7.1).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::{HostError, blocking};
use crate::core::lock::lock;
use crate::core::node::cgroup_tree::Group;
use crate::core::pod::cgroup::{self, Driver};
use crate::core::pod::cgroup_values::{Bound, Controller, Difference, Mended, Setting, Values};
use crate::core::pod::qos::QosClass;
use crate::sys;
use crate::sys::systemd::Slices;

/// How often it is looked whether somebody else has changed the node's own cgroups.
const LOOK: Duration = Duration::from_secs(5);
/// With every so many looks the pods' are looked at, too.
const PODS_EVERY: u32 = 2;
/// How long systemd may take to write what it was told.
const SETTLE: Duration = Duration::from_millis(200);
/// How often it is looked whether a new slice is there, and how many times.
const APPEARS: (Duration, u32) = (Duration::from_millis(20), 50);

/// How often the cgroups of containers are looked for at most, where only the runtime knows where it puts them.
const SEARCH: Duration = Duration::from_secs(5);

/// The cgroups that the pods of each class lie in.
const CLASSES: [(QosClass, Group); 3] = [
    (QosClass::Guaranteed, Group::Pods),
    (QosClass::Burstable, Group::Burstable),
    (QosClass::BestEffort, Group::BestEffort),
];

/// Whose a cgroup is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// A pod's: made with it.
    Pod,
    /// One above pods: made where it is missing.
    Node,
    /// Made by others: it only gets values.
    Somebody,
}

/// What a cgroup was given last; none where that failed. Locked while it is written.
type Given = Arc<tokio::sync::Mutex<Option<Values>>>;

struct Known {
    owner: Owner,
    given: Given,
}

/// Where containers were found, by id, and when they were looked for.
#[derive(Default)]
struct Found {
    at: Option<Instant>,
    places: BTreeMap<String, String>,
}

/// Who makes the cgroups of the node and of its pods here, and where.
pub struct Cgroups {
    root: String,
    driver: Driver,
    slices: Slices,
    /// The bytes of a huge page of each size that the kernel has.
    page_sizes: Vec<u64>,
    known: Mutex<BTreeMap<String, Known>>,
    looks: AtomicU32,
    /// Whether pods have none (`cgroupsPerQOS: false`).
    flat: bool,
    found: Mutex<Found>,
}

/// The settings that a cgroup with these values has.
fn wanted(values: &Values, systemd: bool) -> Vec<Setting> {
    let unified = sys::cgroup::is_v2();
    match systemd {
        true => values.clone().rounded_by_systemd().settings(unified),
        false => values.settings(unified),
    }
}

/// Limits the huge pages of a slice, of which systemd knows nothing.
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
    /// Below `root`, which is `/` or a cgroup of its own.
    #[must_use]
    pub fn new(root: &str, driver: Driver) -> Cgroups {
        let page_sizes = sys::machine::huge_pages().into_iter();
        Cgroups {
            root: root.to_owned(),
            driver,
            slices: Slices::default(),
            page_sizes: page_sizes.map(|(bytes, _)| bytes).collect(),
            known: Mutex::default(),
            looks: AtomicU32::new(0),
            flat: false,
            found: Mutex::default(),
        }
    }

    /// The same where neither pods nor their classes have cgroups: nothing is made or removed for pods, and the runtime
    /// says where their containers lie.
    #[must_use]
    pub fn without_pods(self) -> Cgroups {
        Cgroups { flat: true, ..self }
    }

    /// The bytes of a huge page of each size that the kernel has.
    pub(in crate::host) fn page_sizes(&self) -> &[u64] {
        &self.page_sizes
    }

    fn name(&self, class: QosClass, uid: &str) -> String {
        cgroup::pod_path(&self.root, self.driver, class, uid)
    }

    /// Where a pod's lies below the hierarchies, or a container's by its id; none where there is none that is known.
    pub(in crate::host) fn place(
        &self,
        class: QosClass,
        uid: &str,
        container: Option<&str>,
    ) -> Option<String> {
        match container {
            Some(id) if self.flat => self.search(id),
            None if self.flat => None,
            _ => Some(cgroup::place(&self.name(class, uid), container)),
        }
    }

    /// Where the runtime has put a container. A container never moves.
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

    /// Where all pods' lies; where they have none, the root that the configuration names.
    pub(in crate::host) fn place_of_all(&self) -> String {
        match self.flat {
            true => self.place_of(&Group::Root),
            false => self.place_of(&Group::Pods),
        }
    }

    /// Where the cgroups of the classes that have one lie.
    pub(in crate::host) fn places_of_classes(&self) -> Vec<String> {
        if self.flat {
            return vec![];
        }
        [Group::Burstable, Group::BestEffort]
            .map(|group| self.place_of(&group))
            .into()
    }

    fn place_of(&self, group: &Group) -> String {
        self.path(&group.name(&self.root, self.driver))
    }

    /// The path of a cgroup below the hierarchies; a slice's name stands for one.
    fn path(&self, name: &str) -> String {
        match self.driver {
            Driver::Systemd => cgroup::place(name, None),
            Driver::Cgroupfs => name.to_owned(),
        }
    }

    /// Whether a cgroup of the node is there.
    #[must_use]
    pub fn has(&self, group: &Group) -> bool {
        sys::cgroup::exists(&self.place_of(group))
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, Known>> {
        lock(&self.known)
    }

    /// Gives a cgroup its values and keeps in mind that it has them; the answer is what was different.
    async fn give(
        &self,
        name: &str,
        owner: Owner,
        values: &Values,
    ) -> Result<Vec<Difference>, HostError> {
        let given = {
            let mut known = self.known();
            let known = known.entry(name.to_owned()).or_insert_with(|| Known {
                owner,
                given: Arc::default(),
            });
            Arc::clone(&known.given)
        };
        let mut given = given.lock().await;
        *given = None;
        let changes = self.write(name, owner, values).await?;
        *given = Some(values.clone());
        Ok(changes)
    }

    /// The one place where values are written.
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
                if owner != Owner::Somebody {
                    sys::cgroup::make(&path)?;
                }
                Ok(sys::cgroup::set(&path, &settings)?)
            })
            .await;
        }
        let settings = values.clone().rounded_by_systemd().settings(unified);
        let is_there = sys::cgroup::exists(&path);
        if owner == Owner::Somebody && !is_there {
            return Err(format!("there is no slice {name}").into());
        }
        let changes = sys::cgroup::differences(&path, &settings);
        if !is_there || !changes.is_empty() {
            self.slices.forget(name);
        }
        self.slices.ensure(name, values.properties(unified)).await?;
        if unified && sys::cgroup::has_controller(Controller::HugeTlb) {
            // A pod without these limits is better than none: its containers have them all the same.
            if let Err(error) = limit_huge_pages(path, settings).await {
                tracing::debug!(name, %error, "the huge pages of a slice are not limited");
            }
        }
        Ok(changes)
    }

    /// Makes a pod's, or gives it these values; the answer is what the runtime is told, which is nothing where pods have
    /// none.
    pub(in crate::host) async fn ensure(
        &self,
        class: QosClass,
        uid: &str,
        values: &Values,
    ) -> Result<String, HostError> {
        if self.flat {
            return Ok(String::new());
        }
        let name = self.name(class, uid);
        self.give(&name, Owner::Pod, values).await?;
        Ok(name)
    }

    /// A pod's, in the driver's spelling; empty where pods have none. Nothing is touched.
    pub(in crate::host) fn parent(&self, class: QosClass, uid: &str) -> String {
        match self.flat {
            true => String::new(),
            false => self.name(class, uid),
        }
    }

    /// The bytes of memory that a pod's uses, caches included; none where that is not known.
    pub(in crate::host) fn memory_in_use(&self, class: QosClass, uid: &str) -> Option<u64> {
        if self.flat {
            return None;
        }
        sys::cgroup::memory_in_use(&self.path(&self.name(class, uid)))
    }

    /// Gives the node's own cgroups their values, each by itself; the answers are in their order.
    pub(in crate::host) async fn apply(
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
                Group::Reserved(_) | Group::Root => Owner::Somebody,
                Group::Pods | Group::Burstable | Group::BestEffort => Owner::Node,
            };
            let mut given = self.give(&name, owner, values).await;
            // A class may use more already than what it is to have from now on: then it gets no more than that.
            let used = sys::cgroup::memory_in_use(&self.path(&name));
            if let (
                Err(_),
                Group::Burstable | Group::BestEffort,
                Some(Bound::At(limit)),
                Some(used),
            ) = (&given, group, values.memory, used)
                && used > limit
            {
                let memory = Some(Bound::At(used));
                let values = Values {
                    memory,
                    ..values.clone()
                };
                given = self.give(&name, owner, &values).await;
            }
            answers.push(given);
        }
        answers
    }

    /// Waits until somebody else has changed what cgroups were given, and sets it back. The kernel tells nobody of such
    /// changes: the files are read again and again.
    pub(in crate::host) async fn mend(&self) -> Vec<Mended> {
        loop {
            tokio::time::sleep(LOOK).await;
            let looks = self.looks.fetch_add(1, Ordering::Relaxed);
            let suspects = self.changed(looks.is_multiple_of(PODS_EVERY)).await;
            if self.driver == Driver::Systemd && !suspects.is_empty() {
                // systemd writes a moment after it was told.
                tokio::time::sleep(SETTLE).await;
            }
            let mut mended = vec![];
            for suspect in suspects {
                mended.extend(self.set_back(suspect).await);
            }
            if !mended.is_empty() {
                return mended;
            }
        }
    }

    /// The cgroups that are not as they were made. One that is being written just now is as it should be.
    async fn changed(&self, with_pods: bool) -> Vec<(String, Owner, Given)> {
        let all: Vec<(String, String, Owner, Given)> = self
            .known()
            .iter()
            .filter(|(_, known)| with_pods || known.owner != Owner::Pod)
            .map(|(name, known)| {
                let given = Arc::clone(&known.given);
                (name.clone(), self.path(name), known.owner, given)
            })
            .collect();
        let systemd = self.driver == Driver::Systemd;
        let compare = move || {
            let is_changed = |(_, path, owner, given): &(String, String, Owner, Given)| {
                let Ok(given) = given.try_lock() else {
                    return false;
                };
                let Some(values) = &*given else {
                    return false;
                };
                if !sys::cgroup::exists(path) {
                    // A pod whose cgroup is gone has no containers: its worker sees to that.
                    return *owner != Owner::Pod;
                }
                !sys::cgroup::differences(path, &wanted(values, systemd)).is_empty()
            };
            let changed = all.into_iter().filter(is_changed);
            Ok(changed
                .map(|(name, _, owner, given)| (name, owner, given))
                .collect())
        };
        blocking(compare).await.unwrap_or_default()
    }

    async fn set_back(&self, (name, owner, given): (String, Owner, Given)) -> Option<Mended> {
        let given = given.lock().await;
        let values = given.as_ref()?;
        let path = self.path(&name);
        let found =
            sys::cgroup::differences(&path, &wanted(values, self.driver == Driver::Systemd));
        if found.is_empty() && sys::cgroup::exists(&path) {
            return None;
        }
        let written = self.write(&name, owner, values).await;
        Some(Mended {
            cgroup: name,
            changes: found,
            error: written.err().map(|e| e.to_string()),
        })
    }

    /// Removes a pod's.
    pub(in crate::host) async fn remove(
        &self,
        class: QosClass,
        uid: &str,
    ) -> Result<(), HostError> {
        if self.flat {
            return Ok(());
        }
        let name = self.name(class, uid);
        let known = self.known().remove(&name);
        if let Some(known) = known {
            *known.given.lock().await = None;
        }
        match self.driver {
            Driver::Systemd => self.slices.remove(&name).await,
            Driver::Cgroupfs => blocking(move || Ok(sys::cgroup::remove(&name)?)).await,
        }
    }

    /// The pods that have one, by uid.
    pub(in crate::host) async fn pods(&self) -> Result<Vec<(QosClass, String)>, HostError> {
        if self.flat {
            return Ok(vec![]);
        }
        let driver = self.driver;
        let tiers = CLASSES.map(|(class, group)| (class, self.place_of(&group)));
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
    async fn where_pods_have_no_cgroups_nothing_is_made_for_them() {
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
        assert_eq!(cgroups.place_of_all(), "/");
        assert_eq!(cgroups.places_of_classes(), Vec::<String>::new());
        // The root of the hierarchies is nobody's to set.
        let tree = [(Group::Root, Values::default())];
        assert_eq!(cgroups.apply(&tree).await, [Ok(vec![])]);
    }
}
