//! `holdfast proxy`: services, network policies and DNS of one node, in place of kube-proxy and CoreDNS.

pub mod policies;
