//! One file per verb of the command line.
