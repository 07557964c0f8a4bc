//! The cgroups of pods: made as directories, or by systemd as slices (kubelet spec, 7.1).

use super::blocking;
use crate::core::pod::cgroup::{self, Driver, PodLimits, TierShares};
use crate::core::pod::qos::QosClass;
use crate::sys;
use crate::sys::systemd::Slices;

/// The tiers of pods.
const CLASSES: [QosClass; 3] = [
    QosClass::Guaranteed,
    QosClass::Burstable,
    QosClass::BestEffort,
];

/// Who makes pods' cgroups here, and where.
pub struct Cgroups {
    root: String,
    driver: Driver,
    slices: Slices,
}

impl Cgroups {
    /// Below `root`, which is `/` or a cgroup of its own.
    #[must_use]
    pub fn new(root: &str, driver: Driver) -> Cgroups {
        Cgroups {
            root: root.to_owned(),
            driver,
            slices: Slices::default(),
        }
    }

    fn name(&self, class: QosClass, uid: &str) -> String {
        cgroup::pod_path(&self.root, self.driver, class, uid)
    }

    /// Where a pod's lies below the hierarchies, or a container's by its id.
    pub(in crate::host) fn place(
        &self,
        class: QosClass,
        uid: &str,
        container: Option<&str>,
    ) -> String {
        cgroup::place(&self.name(class, uid), container)
    }

    /// Where all pods' lies.
    pub(in crate::host) fn place_of_all(&self) -> String {
        cgroup::place(&cgroup::all_pods(&self.root, self.driver), None)
    }

    /// Makes a pod's, or gives it these limits; the answer is what the runtime is told.
    pub(in crate::host) async fn ensure(
        &self,
        class: QosClass,
        uid: &str,
        limits: PodLimits,
    ) -> Result<String, String> {
        let name = self.name(class, uid);
        match self.driver {
            Driver::Systemd => {
                if !sys::cgroup::exists(&name) {
                    self.slices.forget(&name);
                }
                self.slices
                    .ensure(&name, cgroup::properties(&limits, sys::cgroup::is_v2()))
                    .await?;
            }
            Driver::Cgroupfs => {
                let (tiers, path) = (cgroup::tiers(&self.root, class), name.clone());
                blocking(move || {
                    sys::cgroup::ensure_pod(&tiers, &path, &limits).map_err(|e| e.to_string())
                })
                .await?;
            }
        }
        Ok(name)
    }

    /// Gives the tiers their shares.
    pub(in crate::host) async fn set_tiers(&self, shares: &TierShares) -> Result<(), String> {
        let tiers = shares.by_path(&self.root, self.driver);
        match self.driver {
            Driver::Systemd => {
                for (slice, shares) in tiers {
                    if !sys::cgroup::has_shares(&slice, shares) {
                        self.slices.forget(&slice);
                    }
                    let property = cgroup::share_property(shares, sys::cgroup::is_v2());
                    self.slices.ensure(&slice, vec![property]).await?;
                }
                Ok(())
            }
            Driver::Cgroupfs => {
                let above = cgroup::tiers(&self.root, QosClass::Guaranteed);
                blocking(move || {
                    sys::cgroup::ensure_tiers(&above, &tiers).map_err(|e| e.to_string())
                })
                .await
            }
        }
    }

    /// Removes a pod's.
    pub(in crate::host) async fn remove(&self, class: QosClass, uid: &str) -> Result<(), String> {
        let name = self.name(class, uid);
        match self.driver {
            Driver::Systemd => self.slices.remove(&name).await,
            Driver::Cgroupfs => {
                blocking(move || sys::cgroup::remove(&name).map_err(|e| e.to_string())).await
            }
        }
    }

    fn tier(&self, class: QosClass) -> String {
        let place = self.place(class, "x", None);
        place
            .rsplit_once('/')
            .map_or(place.clone(), |(tier, _)| tier.to_owned())
    }

    /// The pods that have one, by uid.
    pub(in crate::host) async fn pods(&self) -> Result<Vec<(QosClass, String)>, String> {
        let (driver, tiers) = (self.driver, CLASSES.map(|class| (class, self.tier(class))));
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
