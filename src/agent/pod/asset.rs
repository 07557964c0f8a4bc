//! What the operations of a pod produce for later ones.

use std::collections::BTreeMap;
use std::sync::Arc;

use holdfast_proto::cri as pb;

use crate::image::Pulled;
use crate::volume::objects::Fetched;
use holdfast_core::pod::users::Mappings;

/// A value that an operation produces for later ones. The worker's decisions do not depend on its content.
pub enum Asset {
    /// Cgroup, runtime handler and user namespace.
    Setup(Arc<Setup>),
    /// Volumes, ConfigMaps and Secrets.
    Fetched(Arc<Fetched>),
    /// A container's images, by its name.
    Pulled(String, Arc<Pulled>),
    /// A sandbox's id and the message that created it.
    Sandbox(String, Arc<pb::PodSandboxConfig>),
}

/// The latest asset of each kind.
#[derive(Clone, Default)]
pub(crate) struct Assets {
    pub(super) setup: Option<Arc<Setup>>,
    pub(super) fetched: Option<Arc<Fetched>>,
    pub(super) pulled: BTreeMap<String, Arc<Pulled>>,
    pub(super) sandbox: Option<(String, Arc<pb::PodSandboxConfig>)>,
}

impl Assets {
    /// The runtime handler of the pod; empty for the default.
    pub fn handler(&self) -> &str {
        self.setup.as_ref().map_or("", |setup| &setup.handler)
    }

    /// Stores an operation's asset.
    pub fn keep(&mut self, asset: Asset) {
        match asset {
            Asset::Setup(setup) => self.setup = Some(setup),
            Asset::Fetched(fetched) => self.fetched = Some(fetched),
            Asset::Pulled(name, pulled) => _ = self.pulled.insert(name, pulled),
            Asset::Sandbox(id, config) => self.sandbox = Some((id, config)),
        }
    }
}

/// The settings of the pod's sandbox and containers.
pub struct Setup {
    /// The pod's cgroup in the driver's notation; empty if pods have no cgroups.
    pub(super) cgroup_parent: String,
    /// The runtime handler; empty for the default.
    pub handler: String,
    /// The id mappings of the pod's user namespace, if it has one.
    pub(super) users: Option<Mappings>,
}
