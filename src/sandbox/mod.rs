//! Throw-away PostgreSQL and nats-server on loopback, for `outboxd demo` and the tests.
