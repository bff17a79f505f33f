//! From an event to the NATS message: subject template, headers, message id, size. Pure.

/// Subject template; see the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {}
