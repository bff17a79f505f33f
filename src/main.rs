//! Arguments to exit code; no logic.

fn main() {}
