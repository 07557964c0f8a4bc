//! What the kernel does with the traffic of services.
