//! The cluster's DNS server: the records of services and pods (Kubernetes DNS specification 1.1.0), and a caching forwarder for
//! all other names.
