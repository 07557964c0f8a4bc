//! Gives each actor of the agent what it uses. Only this file knows which actor uses what.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::NodeAddress;
use tokio::sync::watch;

use crate::events::Events;
use crate::image::{self, Images, collect};
use crate::metrics::Metrics;
use crate::node::ledger::LedgerHandle;
use crate::node::{
    self, ClaimManager, DeviceManager, OwnNode, binding, cgroup_tree, claims, devices, lease,
    ledger, log_rotation, network, own, pod_network, pressure, registration, runtime, shutdown,
    status,
};
use crate::pod::heartbeats::Heartbeats;
use crate::pod::journal::Journals;
use crate::pod::starts::Starts;
use crate::pod::table::PodTable;
use crate::pod::{
    dead_containers, dispatch, hooks, orphans, probing, relist, sources, sync, worker,
};
use crate::serving::{self, Unserved, local, pod_resources};
use crate::volume::csi::{self, Csi, registry, unstaging};
use crate::volume::{self, AttachedDisks, attached, growth, projected, storage_limits};
use holdfast_config::Config;
use holdfast_core::node::eviction::Pressures;
use holdfast_core::pod::dns::Resolver;
use holdfast_core::pod::resources::Amounts;
use holdfast_core::pod::worker::Network;
use holdfast_cri::{Features, Runtime};
use holdfast_host::PodHost;
use holdfast_host::pod_network::PodNetwork;
use holdfast_kubeapi::pods::PodApi;
use holdfast_probes::Dialer;
use holdfast_sys::clock::Clock;
use holdfast_sys::machine::Machine;

/// What the actors share, as assembled. No actor holds this: each receives the fields that it uses.
pub struct Parts {
    /// The configuration.
    pub config: Arc<Config>,
    /// The container runtime.
    pub runtime: Arc<dyn Runtime>,
    /// The apiserver, as pod workers use it.
    pub api: Arc<dyn PodApi>,
    /// Cgroups, directories and volumes of pods on this machine.
    pub host: Arc<dyn PodHost>,
    /// The clock.
    pub clock: Clock,
    /// Emits events.
    pub events: Events,
    /// Pulls images.
    pub images: Arc<Images>,
    /// Facts about the machine.
    pub machine: Arc<Machine>,
    /// The node's current IP addresses.
    pub node_ips: watch::Sender<Vec<String>>,
    /// The names and addresses in the Node's status; before registration, those that it will have.
    pub node_addresses: watch::Sender<Vec<NodeAddress>>,
    /// DNS settings for pods, derived from the node's current resolver configuration.
    pub resolver: watch::Sender<Arc<Resolver>>,
    /// The runtime's last reported network state.
    pub network: watch::Receiver<Network>,
    /// This node's Node object.
    pub node: Arc<OwnNode>,
    /// The actor that owns resources shared by the node's pods.
    pub ledger: LedgerHandle,
    /// Metrics, recorded as things happen.
    pub metrics: Arc<Metrics>,
    /// Network access for probes and hooks.
    pub dialer: Arc<dyn Dialer>,
    /// The steps taken for each pod.
    pub journals: Arc<Journals>,
    /// Limits how many sandboxes start at the same time.
    pub starts: Arc<Starts>,
    /// CSI drivers.
    pub csi: Arc<Csi>,
    /// Disks that the node attaches without a driver.
    pub disks: Arc<AttachedDisks>,
    /// Device plugins, and the devices of each container.
    pub devices: Arc<DeviceManager>,
    /// Drivers of dynamic resource allocation, and prepared claims.
    pub claims: Arc<ClaimManager>,
    /// The start time of this agent.
    pub started: Timestamp,
}

/// What each actor uses, by actor.
pub(crate) struct Actors {
    /// All pods of this node, for the actors that clean up after pods.
    pub table: watch::Receiver<PodTable>,
    pub runtime: Arc<dyn Runtime>,
    pub devices: Arc<devices::Parts>,
    pub claims: Arc<claims::Parts>,
    pub slices: (Arc<Config>, Arc<OwnNode>, Arc<ClaimManager>),
    pub pod_resources: pod_resources::Parts,
    pub dispatch: dispatch::Parts,
    pub ledger: Arc<ledger::Parts>,
    pub orphans: Arc<orphans::Parts>,
    pub binding: binding::Parts,
    pub mirrors: (Arc<dyn PodApi>, Clock),
    pub shutdown: Arc<shutdown::Parts>,
    pub relist: relist::Parts,
    pub local: Arc<local::Parts>,
    pub log_rotation: log_rotation::Parts,
    pub plugins: Arc<registry::Parts>,
    pub unstaging: Arc<unstaging::Parts>,
    pub storage_limits: Arc<storage_limits::Parts>,
    pub serving: serving::Parts,
    pub images: Arc<collect::Parts>,
    pub dead_containers: Arc<dead_containers::Parts>,
    pub pressure: Arc<pressure::Parts>,
    pub oom: (String, Events),
    pub node: node::Parts,
}

/// State that several actors read and one of them writes.
#[derive(Default)]
struct Published {
    /// The node's current resource pressures.
    pressures: watch::Sender<Pressures>,
    /// Whether the machine is shutting down.
    shutting_down: watch::Sender<bool>,
    /// The features that the runtime last reported.
    features: watch::Sender<Features>,
    /// All pods of this node. The dispatcher writes the table.
    table: watch::Sender<PodTable>,
    /// Heartbeats of the dispatcher and of the runtime's listing.
    heartbeats: Arc<Heartbeats>,
    /// Parts of the agent's HTTP API that cannot be served.
    unserved: Arc<Unserved>,
}

impl Actors {
    pub(crate) fn new(parts: Parts) -> Actors {
        let published = Published::default();
        let volumes = Arc::new(parts.volumes());
        let devices = Arc::new(parts.devices());
        let claims = Arc::new(parts.claims());
        let dead_containers = Arc::new(parts.dead_containers(&published));
        let images = Arc::new(parts.image_collection(&dead_containers));
        Actors {
            table: published.table.subscribe(),
            slices: (
                Arc::clone(&parts.config),
                Arc::clone(&parts.node),
                Arc::clone(&parts.claims),
            ),
            pod_resources: parts.pod_resources(),
            dispatch: parts.dispatch(&published, &volumes),
            ledger: Arc::new(parts.ledger(&published)),
            orphans: Arc::new(parts.orphans(&volumes)),
            binding: parts.binding(),
            mirrors: (Arc::clone(&parts.api), parts.clock),
            shutdown: Arc::new(parts.shutdown(&published)),
            relist: parts.relist(&published),
            local: Arc::new(parts.local(&images)),
            log_rotation: parts.log_rotation(),
            plugins: Arc::new(parts.plugins(&devices, &claims)),
            unstaging: Arc::new(parts.unstaging()),
            storage_limits: Arc::new(parts.storage_limits()),
            serving: parts.serving(&published),
            pressure: Arc::new(parts.pressure(&published, &images, &dead_containers)),
            oom: (parts.config.node_name.clone(), parts.events.clone()),
            node: parts.node(&published),
            runtime: parts.runtime,
            devices,
            claims,
            images,
            dead_containers,
        }
    }
}

impl Parts {
    /// The resources that pods may use on this node.
    fn allocatable(&self) -> Amounts {
        node::allocatable(&self.machine, &self.config)
    }

    pub(crate) fn sources(&self) -> sources::Parts {
        sources::Parts {
            config: Arc::clone(&self.config),
            runtime: Arc::clone(&self.runtime),
            clock: self.clock,
        }
    }

    pub(crate) fn network(&self) -> network::Parts {
        network::Parts {
            config: Arc::clone(&self.config),
            events: self.events.clone(),
            node: Arc::clone(&self.node),
            node_ips: self.node_ips.clone(),
            resolver: self.resolver.clone(),
        }
    }

    fn expansion(&self) -> growth::Parts {
        growth::Parts {
            config: Arc::clone(&self.config),
            api: Arc::clone(&self.api),
            host: Arc::clone(&self.host),
            clock: self.clock,
            events: self.events.clone(),
            metrics: Arc::clone(&self.metrics),
            expansions: self.csi.expansions(),
        }
    }

    fn csi_volumes(&self) -> csi::Parts {
        csi::Parts {
            config: Arc::clone(&self.config),
            api: Arc::clone(&self.api),
            host: Arc::clone(&self.host),
            machine: Arc::clone(&self.machine),
            metrics: Arc::clone(&self.metrics),
            node: Arc::clone(&self.node),
            csi: Arc::clone(&self.csi),
            expansion: self.expansion(),
        }
    }

    fn volumes(&self) -> volume::Parts {
        volume::Parts {
            config: Arc::clone(&self.config),
            api: Arc::clone(&self.api),
            host: Arc::clone(&self.host),
            events: self.events.clone(),
            metrics: Arc::clone(&self.metrics),
            machine: Arc::clone(&self.machine),
            node: Arc::clone(&self.node),
            node_ips: self.node_ips.clone(),
            allocatable: self.allocatable(),
            ledger: self.ledger.clone(),
            csi: self.csi_volumes(),
            disks: attached::Parts {
                config: Arc::clone(&self.config),
                node: Arc::clone(&self.node),
                metrics: Arc::clone(&self.metrics),
                disks: Arc::clone(&self.disks),
            },
            credentials: projected::Parts {
                api: Arc::clone(&self.api),
                clock: self.clock,
                node: Arc::clone(&self.node),
            },
        }
    }

    fn devices(&self) -> devices::Parts {
        devices::Parts {
            clock: self.clock,
            metrics: Arc::clone(&self.metrics),
            manager: Arc::clone(&self.devices),
        }
    }

    fn claims(&self) -> claims::Parts {
        claims::Parts {
            runtime: Arc::clone(&self.runtime),
            clock: self.clock,
            metrics: Arc::clone(&self.metrics),
            ledger: self.ledger.clone(),
            manager: Arc::clone(&self.claims),
        }
    }

    fn plugins(
        &self,
        devices: &Arc<devices::Parts>,
        claims: &Arc<claims::Parts>,
    ) -> registry::Parts {
        registry::Parts {
            config: Arc::clone(&self.config),
            api: Arc::clone(&self.api),
            clock: self.clock,
            metrics: Arc::clone(&self.metrics),
            node: Arc::clone(&self.node),
            csi: Arc::clone(&self.csi),
            ledger: self.ledger.clone(),
            devices: Arc::clone(devices),
            claims: Arc::clone(claims),
        }
    }

    fn unstaging(&self) -> unstaging::Parts {
        unstaging::Parts {
            clock: self.clock,
            metrics: Arc::clone(&self.metrics),
            csi: Arc::clone(&self.csi),
        }
    }

    fn storage_limits(&self) -> storage_limits::Parts {
        storage_limits::Parts {
            config: Arc::clone(&self.config),
            runtime: Arc::clone(&self.runtime),
            host: Arc::clone(&self.host),
            ledger: self.ledger.clone(),
        }
    }

    fn image_pulls(&self) -> image::Parts {
        image::Parts {
            runtime: Arc::clone(&self.runtime),
            api: Arc::clone(&self.api),
            clock: self.clock,
            events: self.events.clone(),
            metrics: Arc::clone(&self.metrics),
            images: Arc::clone(&self.images),
        }
    }

    fn image_collection(&self, dead_containers: &Arc<dead_containers::Parts>) -> collect::Parts {
        collect::Parts {
            config: Arc::clone(&self.config),
            runtime: Arc::clone(&self.runtime),
            host: Arc::clone(&self.host),
            clock: self.clock,
            events: self.events.clone(),
            metrics: Arc::clone(&self.metrics),
            ledger: self.ledger.clone(),
            images: Arc::clone(&self.images),
            started: self.started,
            dead_containers: Arc::clone(dead_containers),
        }
    }

    fn dead_containers(&self, published: &Published) -> dead_containers::Parts {
        dead_containers::Parts {
            config: Arc::clone(&self.config),
            runtime: Arc::clone(&self.runtime),
            host: Arc::clone(&self.host),
            clock: self.clock,
            events: self.events.clone(),
            table: published.table.subscribe(),
        }
    }

    fn hooks(&self) -> hooks::Parts {
        hooks::Parts {
            runtime: Arc::clone(&self.runtime),
            dialer: Arc::clone(&self.dialer),
            events: self.events.clone(),
            metrics: Arc::clone(&self.metrics),
        }
    }

    fn probing(&self) -> probing::Parts {
        probing::Parts {
            runtime: Arc::clone(&self.runtime),
            dialer: Arc::clone(&self.dialer),
            clock: self.clock,
            events: self.events.clone(),
            metrics: Arc::clone(&self.metrics),
            node_ips: self.node_ips.clone(),
            started: self.started,
        }
    }

    fn settings(&self, published: &Published) -> sync::prepare::Parts {
        sync::prepare::Parts {
            config: Arc::clone(&self.config),
            machine: Arc::clone(&self.machine),
            allocatable: self.allocatable(),
            swaps: node::swaps(&self.machine, &self.config),
            host: Arc::clone(&self.host),
            ledger: self.ledger.clone(),
            resolver: self.resolver.clone(),
            features: published.features.clone(),
        }
    }

    fn sync(&self, published: &Published, volumes: &Arc<volume::Parts>) -> sync::Parts {
        sync::Parts {
            runtime: Arc::clone(&self.runtime),
            api: Arc::clone(&self.api),
            host: Arc::clone(&self.host),
            clock: self.clock,
            events: self.events.clone(),
            metrics: Arc::clone(&self.metrics),
            ledger: self.ledger.clone(),
            node: Arc::clone(&self.node),
            claims: Arc::clone(&self.claims),
            starts: Arc::clone(&self.starts),
            settings: self.settings(published),
            containers: sync::start::Parts {
                config: Arc::clone(&self.config),
                machine: Arc::clone(&self.machine),
                allocatable: self.allocatable(),
                node_ips: self.node_ips.clone(),
                devices: Arc::clone(&self.devices),
                csi: Arc::clone(&self.csi),
            },
            hooks: self.hooks(),
            images: self.image_pulls(),
            volumes: Arc::clone(volumes),
        }
    }

    fn workers(&self, published: &Published, volumes: &Arc<volume::Parts>) -> worker::Parts {
        worker::Parts {
            config: Arc::clone(&self.config),
            api: Arc::clone(&self.api),
            clock: self.clock,
            events: self.events.clone(),
            metrics: Arc::clone(&self.metrics),
            journals: Arc::clone(&self.journals),
            ledger: self.ledger.clone(),
            devices: Arc::clone(&self.devices),
            claims: Arc::clone(&self.claims),
            features: published.features.clone(),
            node_ips: self.node_ips.clone(),
            probes: Arc::new(self.probing()),
            sync: Arc::new(self.sync(published, volumes)),
        }
    }

    fn dispatch(&self, published: &Published, volumes: &Arc<volume::Parts>) -> dispatch::Parts {
        dispatch::Parts {
            config: Arc::clone(&self.config),
            clock: self.clock,
            metrics: Arc::clone(&self.metrics),
            heartbeats: Arc::clone(&published.heartbeats),
            ledger: self.ledger.clone(),
            network: self.network.clone(),
            node: Arc::clone(&self.node),
            table: published.table.clone(),
            workers: Arc::new(self.workers(published, volumes)),
        }
    }

    fn orphans(&self, volumes: &Arc<volume::Parts>) -> orphans::Parts {
        orphans::Parts {
            runtime: Arc::clone(&self.runtime),
            host: Arc::clone(&self.host),
            clock: self.clock,
            metrics: Arc::clone(&self.metrics),
            ledger: self.ledger.clone(),
            csi: Arc::clone(&self.csi),
            volumes: Arc::clone(volumes),
        }
    }

    fn relist(&self, published: &Published) -> relist::Parts {
        relist::Parts {
            config: Arc::clone(&self.config),
            runtime: Arc::clone(&self.runtime),
            clock: self.clock,
            metrics: Arc::clone(&self.metrics),
            heartbeats: Arc::clone(&published.heartbeats),
        }
    }

    fn ledger(&self, published: &Published) -> ledger::Parts {
        ledger::Parts {
            config: Arc::clone(&self.config),
            machine: Arc::clone(&self.machine),
            allocatable: self.allocatable(),
            swaps: node::swaps(&self.machine, &self.config),
            node: Arc::clone(&self.node),
            events: self.events.clone(),
            metrics: Arc::clone(&self.metrics),
            devices: Arc::clone(&self.devices),
            features: published.features.clone(),
            pressures: published.pressures.clone(),
            shutting_down: published.shutting_down.clone(),
            handle: self.ledger.clone(),
        }
    }

    fn binding(&self) -> binding::Parts {
        binding::Parts {
            config: Arc::clone(&self.config),
            runtime: Arc::clone(&self.runtime),
            ledger: self.ledger.clone(),
        }
    }

    fn shutdown(&self, published: &Published) -> shutdown::Parts {
        shutdown::Parts {
            config: Arc::clone(&self.config),
            clock: self.clock,
            events: self.events.clone(),
            metrics: Arc::clone(&self.metrics),
            ledger: self.ledger.clone(),
            node: Arc::clone(&self.node),
            table: published.table.subscribe(),
            shutting_down: published.shutting_down.clone(),
        }
    }

    fn log_rotation(&self) -> log_rotation::Parts {
        log_rotation::Parts {
            config: Arc::clone(&self.config),
            runtime: Arc::clone(&self.runtime),
            host: Arc::clone(&self.host),
            clock: self.clock,
        }
    }

    fn pressure(
        &self,
        published: &Published,
        images: &Arc<collect::Parts>,
        dead_containers: &Arc<dead_containers::Parts>,
    ) -> pressure::Parts {
        pressure::Parts {
            config: Arc::clone(&self.config),
            runtime: Arc::clone(&self.runtime),
            host: Arc::clone(&self.host),
            machine: Arc::clone(&self.machine),
            events: self.events.clone(),
            metrics: Arc::clone(&self.metrics),
            ledger: self.ledger.clone(),
            table: published.table.subscribe(),
            pressures: published.pressures.clone(),
            images: Arc::clone(images),
            dead_containers: Arc::clone(dead_containers),
        }
    }

    fn status(&self, published: &Published) -> status::Parts {
        status::Parts {
            registration: registration::Parts {
                config: Arc::clone(&self.config),
                clock: self.clock,
                machine: Arc::clone(&self.machine),
                metrics: Arc::clone(&self.metrics),
                started: self.started,
            },
            node: Arc::clone(&self.node),
            node_addresses: self.node_addresses.clone(),
            events: self.events.clone(),
            reports: status::Reports {
                node_ips: self.node_ips.clone(),
                pressures: published.pressures.clone(),
                shutting_down: published.shutting_down.clone(),
                unserved: Arc::clone(&published.unserved),
                csi: Arc::clone(&self.csi),
                disks: Arc::clone(&self.disks),
                devices: Arc::clone(&self.devices),
            },
        }
    }

    fn node(&self, published: &Published) -> node::Parts {
        node::Parts {
            runtime: runtime::Parts {
                config: Arc::clone(&self.config),
                runtime: Arc::clone(&self.runtime),
                features: published.features.clone(),
                heartbeats: Arc::clone(&published.heartbeats),
                node: Arc::clone(&self.node),
            },
            pod_network: pod_network::Parts {
                network: self
                    .config
                    .pod_network_template
                    .as_deref()
                    .map(PodNetwork::new),
                node: Arc::clone(&self.node),
                events: self.events.clone(),
                name: self.config.node_name.clone(),
            },
            status: self.status(published),
            lease: lease::Parts {
                config: Arc::clone(&self.config),
                clock: self.clock,
                node: Arc::clone(&self.node),
            },
            own: own::Parts {
                config: Arc::clone(&self.config),
                events: self.events.clone(),
                node: Arc::clone(&self.node),
            },
            cgroup_tree: cgroup_tree::Parts {
                config: Arc::clone(&self.config),
                machine: Arc::clone(&self.machine),
                allocatable: self.allocatable(),
                host: Arc::clone(&self.host),
                events: self.events.clone(),
                ledger: self.ledger.clone(),
                table: published.table.subscribe(),
            },
        }
    }

    fn pod_resources(&self) -> pod_resources::Parts {
        pod_resources::Parts {
            config: Arc::clone(&self.config),
            clock: self.clock,
            metrics: Arc::clone(&self.metrics),
            ledger: self.ledger.clone(),
            devices: Arc::clone(&self.devices),
            claims: Arc::clone(&self.claims),
        }
    }

    fn local(&self, images: &Arc<collect::Parts>) -> local::Parts {
        local::Parts {
            config: Arc::clone(&self.config),
            runtime: Arc::clone(&self.runtime),
            clock: self.clock,
            journals: Arc::clone(&self.journals),
            images: Arc::clone(images),
        }
    }

    fn serving(&self, published: &Published) -> serving::Parts {
        serving::Parts {
            config: Arc::clone(&self.config),
            runtime: Arc::clone(&self.runtime),
            host: Arc::clone(&self.host),
            clock: self.clock,
            machine: Arc::clone(&self.machine),
            metrics: Arc::clone(&self.metrics),
            table: published.table.subscribe(),
            journals: Arc::clone(&self.journals),
            heartbeats: Arc::clone(&published.heartbeats),
            csi: Arc::clone(&self.csi),
            started: self.started,
            managers: serving::metrics::Parts {
                ledger: self.ledger.clone(),
                claims: Arc::clone(&self.claims),
            },
            listen: serving::listen::Parts {
                config: Arc::clone(&self.config),
                events: self.events.clone(),
                node_ips: self.node_ips.clone(),
                unserved: Arc::clone(&published.unserved),
            },
        }
    }
}
