//! What the user may type. Owns flags and help; does nothing.
