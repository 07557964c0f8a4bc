//! The served kinds, in one table for routing, discovery, validation and storage.

/// A kind: its names, scope and behaviour.
#[derive(Debug)]
pub struct Resource {
    /// The API group; empty for core.
    pub group: &'static str,
    /// The version, for instance `v1`.
    pub version: &'static str,
    /// The plural in paths, and the key prefix in the store. It is unique across groups.
    pub plural: &'static str,
    /// The singular.
    pub singular: &'static str,
    /// The kind.
    pub kind: &'static str,
    /// Whether objects are namespaced.
    pub namespaced: bool,
    /// Short names for kubectl.
    pub short: &'static [&'static str],
    /// Discovery categories, for instance `all`.
    pub categories: &'static [&'static str],
    /// The supported subresources.
    pub subresources: &'static [Sub],
    /// Whether `metadata.generation` counts changes of the spec.
    pub generation: bool,
    /// Whether an update of a missing object creates it.
    pub create_on_update: bool,
    /// Whether an update must contain the resource version.
    pub needs_version: bool,
    /// Whether DELETE returns the object instead of a Status.
    pub returns_deleted: bool,
    /// Selectable fields in addition to `metadata.name` and `metadata.namespace`.
    pub fields: &'static [&'static str],
    /// The warning of every response about a deprecated kind; empty for others.
    pub deprecation: &'static str,
}

/// A subresource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sub {
    /// The observed state, written by controllers and agents.
    Status,
    /// `autoscaling/v1` Scale.
    Scale,
    /// Pods: binding to a node.
    Binding,
    /// Pods: eviction; without disruption budgets it deletes the pod.
    Eviction,
    /// Namespaces: removal of spec finalizers.
    Finalize,
    /// Service accounts: TokenRequest.
    Token,
    /// Pods: ephemeral containers for debugging.
    EphemeralContainers,
    /// Pods: in-place resize of CPU and memory.
    Resize,
    /// Certificate requests: approval or denial.
    Approval,
    /// Pods: a container's log.
    Log,
    /// Pods: execution of a command in a container.
    Exec,
    /// Pods: attachment to a container's streams.
    Attach,
    /// Pods: connections to ports.
    PortForward,
    /// Nodes: proxy to the API of the node's agent. Pods and services: proxy to a server in a pod.
    Proxy,
}

impl Sub {
    /// The name in paths.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Sub::Status => "status",
            Sub::Scale => "scale",
            Sub::Binding => "binding",
            Sub::Eviction => "eviction",
            Sub::Finalize => "finalize",
            Sub::Token => "token",
            Sub::EphemeralContainers => "ephemeralcontainers",
            Sub::Resize => "resize",
            Sub::Approval => "approval",
            Sub::Log => "log",
            Sub::Exec => "exec",
            Sub::Attach => "attach",
            Sub::PortForward => "portforward",
            Sub::Proxy => "proxy",
        }
    }
}

const NONE: Resource = Resource {
    group: "",
    version: "v1",
    plural: "",
    singular: "",
    kind: "",
    namespaced: true,
    short: &[],
    categories: &[],
    subresources: &[],
    generation: false,
    create_on_update: false,
    needs_version: false,
    returns_deleted: false,
    fields: &[],
    deprecation: "",
};

/// All stored kinds, in discovery order.
pub static RESOURCES: &[Resource] = &[
    Resource {
        plural: "configmaps",
        singular: "configmap",
        kind: "ConfigMap",
        short: &["cm"],
        ..NONE
    },
    Resource {
        plural: "endpoints",
        singular: "endpoints",
        kind: "Endpoints",
        short: &["ep"],
        create_on_update: true,
        // KEP-4974; the text is that of `WarningMessage` in `staging/src/k8s.io/apiserver/pkg/endpoints/deprecation`.
        deprecation: "v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice",
        ..NONE
    },
    Resource {
        plural: "events",
        singular: "event",
        kind: "Event",
        short: &["ev"],
        create_on_update: true,
        fields: &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "reportingComponent",
            "source",
            "type",
        ],
        ..NONE
    },
    Resource {
        plural: "namespaces",
        singular: "namespace",
        kind: "Namespace",
        namespaced: false,
        short: &["ns"],
        subresources: &[Sub::Status, Sub::Finalize],
        returns_deleted: true,
        fields: &["status.phase"],
        ..NONE
    },
    Resource {
        plural: "nodes",
        singular: "node",
        kind: "Node",
        namespaced: false,
        short: &["no"],
        subresources: &[Sub::Status, Sub::Proxy],
        fields: &["spec.unschedulable"],
        ..NONE
    },
    Resource {
        plural: "persistentvolumeclaims",
        singular: "persistentvolumeclaim",
        kind: "PersistentVolumeClaim",
        short: &["pvc"],
        subresources: &[Sub::Status],
        returns_deleted: true,
        ..NONE
    },
    Resource {
        plural: "persistentvolumes",
        singular: "persistentvolume",
        kind: "PersistentVolume",
        namespaced: false,
        short: &["pv"],
        subresources: &[Sub::Status],
        returns_deleted: true,
        ..NONE
    },
    Resource {
        plural: "pods",
        singular: "pod",
        kind: "Pod",
        short: &["po"],
        categories: &["all"],
        subresources: &[
            Sub::Status,
            Sub::Binding,
            Sub::Eviction,
            Sub::EphemeralContainers,
            Sub::Resize,
            Sub::Log,
            Sub::Exec,
            Sub::Attach,
            Sub::PortForward,
            Sub::Proxy,
        ],
        generation: true,
        returns_deleted: true,
        fields: &[
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "spec.hostNetwork",
            "status.phase",
            "status.podIP",
            "status.nominatedNodeName",
        ],
        ..NONE
    },
    Resource {
        plural: "secrets",
        singular: "secret",
        kind: "Secret",
        fields: &["type"],
        ..NONE
    },
    Resource {
        plural: "serviceaccounts",
        singular: "serviceaccount",
        kind: "ServiceAccount",
        short: &["sa"],
        subresources: &[Sub::Token],
        returns_deleted: true,
        ..NONE
    },
    Resource {
        plural: "services",
        singular: "service",
        kind: "Service",
        short: &["svc"],
        categories: &["all"],
        subresources: &[Sub::Status, Sub::Proxy],
        create_on_update: true,
        returns_deleted: true,
        fields: &["spec.clusterIP", "spec.type"],
        ..NONE
    },
    Resource {
        group: "apps",
        plural: "deployments",
        singular: "deployment",
        kind: "Deployment",
        short: &["deploy"],
        categories: &["all"],
        subresources: &[Sub::Status, Sub::Scale],
        generation: true,
        ..NONE
    },
    Resource {
        group: "apps",
        plural: "replicasets",
        singular: "replicaset",
        kind: "ReplicaSet",
        short: &["rs"],
        categories: &["all"],
        subresources: &[Sub::Status, Sub::Scale],
        generation: true,
        ..NONE
    },
    Resource {
        group: "batch",
        plural: "cronjobs",
        singular: "cronjob",
        kind: "CronJob",
        short: &["cj"],
        categories: &["all"],
        subresources: &[Sub::Status],
        generation: true,
        ..NONE
    },
    Resource {
        group: "batch",
        plural: "jobs",
        singular: "job",
        kind: "Job",
        categories: &["all"],
        subresources: &[Sub::Status],
        generation: true,
        fields: &["status.successful"],
        ..NONE
    },
    Resource {
        group: "coordination.k8s.io",
        plural: "leases",
        singular: "lease",
        kind: "Lease",
        create_on_update: true,
        needs_version: true,
        ..NONE
    },
    Resource {
        group: "node.k8s.io",
        plural: "runtimeclasses",
        singular: "runtimeclass",
        kind: "RuntimeClass",
        namespaced: false,
        ..NONE
    },
    Resource {
        group: "scheduling.k8s.io",
        plural: "priorityclasses",
        singular: "priorityclass",
        kind: "PriorityClass",
        namespaced: false,
        short: &["pc"],
        ..NONE
    },
    Resource {
        group: "storage.k8s.io",
        plural: "csidrivers",
        singular: "csidriver",
        kind: "CSIDriver",
        namespaced: false,
        needs_version: true,
        returns_deleted: true,
        ..NONE
    },
    Resource {
        group: "storage.k8s.io",
        plural: "csinodes",
        singular: "csinode",
        kind: "CSINode",
        namespaced: false,
        needs_version: true,
        returns_deleted: true,
        ..NONE
    },
    Resource {
        group: "storage.k8s.io",
        plural: "storageclasses",
        singular: "storageclass",
        kind: "StorageClass",
        namespaced: false,
        short: &["sc"],
        returns_deleted: true,
        ..NONE
    },
    Resource {
        group: "storage.k8s.io",
        plural: "volumeattachments",
        singular: "volumeattachment",
        kind: "VolumeAttachment",
        namespaced: false,
        subresources: &[Sub::Status],
        needs_version: true,
        returns_deleted: true,
        ..NONE
    },
    Resource {
        group: "resource.k8s.io",
        plural: "resourceclaims",
        singular: "resourceclaim",
        kind: "ResourceClaim",
        subresources: &[Sub::Status],
        needs_version: true,
        returns_deleted: true,
        ..NONE
    },
    Resource {
        group: "resource.k8s.io",
        plural: "resourceslices",
        singular: "resourceslice",
        kind: "ResourceSlice",
        namespaced: false,
        needs_version: true,
        returns_deleted: true,
        fields: &["spec.nodeName", "spec.driver"],
        ..NONE
    },
    Resource {
        group: "certificates.k8s.io",
        plural: "certificatesigningrequests",
        singular: "certificatesigningrequest",
        kind: "CertificateSigningRequest",
        namespaced: false,
        short: &["csr"],
        subresources: &[Sub::Status, Sub::Approval],
        needs_version: true,
        fields: &["spec.signerName"],
        ..NONE
    },
    Resource {
        group: "certificates.k8s.io",
        version: "v1beta1",
        plural: "clustertrustbundles",
        singular: "clustertrustbundle",
        kind: "ClusterTrustBundle",
        namespaced: false,
        needs_version: true,
        fields: &["spec.signerName"],
        ..NONE
    },
    Resource {
        group: "certificates.k8s.io",
        version: "v1beta1",
        plural: "podcertificaterequests",
        singular: "podcertificaterequest",
        kind: "PodCertificateRequest",
        subresources: &[Sub::Status],
        needs_version: true,
        fields: &["spec.signerName", "spec.podName", "spec.nodeName"],
        ..NONE
    },
    Resource {
        group: "rbac.authorization.k8s.io",
        plural: "roles",
        singular: "role",
        kind: "Role",
        ..NONE
    },
    Resource {
        group: "rbac.authorization.k8s.io",
        plural: "clusterroles",
        singular: "clusterrole",
        kind: "ClusterRole",
        namespaced: false,
        ..NONE
    },
    Resource {
        group: "rbac.authorization.k8s.io",
        plural: "rolebindings",
        singular: "rolebinding",
        kind: "RoleBinding",
        ..NONE
    },
    Resource {
        group: "rbac.authorization.k8s.io",
        plural: "clusterrolebindings",
        singular: "clusterrolebinding",
        kind: "ClusterRoleBinding",
        namespaced: false,
        ..NONE
    },
    Resource {
        group: "discovery.k8s.io",
        plural: "endpointslices",
        singular: "endpointslice",
        kind: "EndpointSlice",
        ..NONE
    },
    Resource {
        group: "networking.k8s.io",
        plural: "networkpolicies",
        singular: "networkpolicy",
        kind: "NetworkPolicy",
        short: &["netpol"],
        generation: true,
        ..NONE
    },
    Resource {
        group: "networking.k8s.io",
        plural: "ingresses",
        singular: "ingress",
        kind: "Ingress",
        short: &["ing"],
        subresources: &[Sub::Status],
        generation: true,
        ..NONE
    },
    Resource {
        group: "networking.k8s.io",
        plural: "ingressclasses",
        singular: "ingressclass",
        kind: "IngressClass",
        namespaced: false,
        generation: true,
        ..NONE
    },
    Resource {
        group: "networking.k8s.io",
        plural: "servicecidrs",
        singular: "servicecidr",
        kind: "ServiceCIDR",
        namespaced: false,
        subresources: &[Sub::Status],
        ..NONE
    },
    Resource {
        group: "networking.k8s.io",
        plural: "ipaddresses",
        singular: "ipaddress",
        kind: "IPAddress",
        namespaced: false,
        short: &["ip"],
        ..NONE
    },
];

/// Kinds that are evaluated and not stored: group, plural, kind.
pub(crate) static REVIEWS: &[(&str, &str, &str)] = &[
    ("authentication.k8s.io", "tokenreviews", "TokenReview"),
    (
        "authentication.k8s.io",
        "selfsubjectreviews",
        "SelfSubjectReview",
    ),
    (
        "authorization.k8s.io",
        "selfsubjectaccessreviews",
        "SelfSubjectAccessReview",
    ),
    (
        "authorization.k8s.io",
        "subjectaccessreviews",
        "SubjectAccessReview",
    ),
];

impl Resource {
    /// Finds a kind by group, version and plural.
    #[must_use]
    pub fn find(group: &str, version: &str, plural: &str) -> Option<&'static Resource> {
        RESOURCES
            .iter()
            .find(|r| r.group == group && r.version == version && r.plural == plural)
    }

    /// Finds a kind by its name, in any group.
    #[must_use]
    pub(crate) fn of_kind(kind: &str) -> Option<&'static Resource> {
        RESOURCES.iter().find(|r| r.kind == kind)
    }

    /// `v1` or `apps/v1`.
    #[must_use]
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.into()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// The key prefix of all objects of this kind, or of those in one namespace.
    #[must_use]
    pub fn prefix(&self, namespace: Option<&str>) -> String {
        match namespace {
            Some(namespace) if self.namespaced => format!("{}/{namespace}/", self.plural),
            _ => format!("{}/", self.plural),
        }
    }

    /// The store key of one object.
    #[must_use]
    pub fn key(&self, namespace: Option<&str>, name: &str) -> String {
        format!("{}{name}", self.prefix(namespace))
    }

    /// Whether the garbage collector tracks dependents of this kind's objects.
    #[must_use]
    pub(crate) fn has_dependents(&self) -> bool {
        matches!(
            self.kind,
            "Deployment" | "ReplicaSet" | "Job" | "CronJob" | "Service" | "Endpoints"
        )
    }

    /// Whether the kind has the subresource `sub`.
    #[must_use]
    pub fn has(&self, sub: Sub) -> bool {
        self.subresources.contains(&sub)
    }

    /// The supported standard verbs.
    #[must_use]
    pub fn verbs(&self) -> Vec<&'static str> {
        let mut verbs = vec![
            "create",
            "delete",
            "deletecollection",
            "get",
            "list",
            "patch",
            "update",
            "watch",
        ];
        if self.kind == "Namespace" {
            verbs.retain(|v| *v != "deletecollection");
        }
        verbs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Store keys contain only the plural, and `of_kind` only the kind, so both must be unique across groups.
    #[test]
    fn plural_names_and_kinds_are_unique_across_groups() {
        let mut seen = std::collections::HashSet::new();
        for resource in RESOURCES {
            assert!(seen.insert(resource.plural), "{}", resource.plural);
            assert!(seen.insert(resource.kind), "{}", resource.kind);
        }
    }
}
