//! JetStream out: one task per destination that keeps a connection, chooses a pipeline, sends what
//! the core hands it in that order, and answers every attempt exactly once. Knows no PostgreSQL and
//! decides nothing about order: after anything but a plain success it stops and reports.
