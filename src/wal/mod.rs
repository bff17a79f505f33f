//! PostgreSQL in: sockets, TLS, log-in, the paired control connection, and the replication stream
//! with its feedback. Knows no NATS and takes no frame apart.
