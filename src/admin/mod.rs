//! HTTP on `[admin] listen`: liveness, readiness, health, metrics and status; the metric names.
