//! Which traffic network policies allow.
