//! Bytes to rows: pgoutput protocol 1 with checked reads. Pure; input never panics.
