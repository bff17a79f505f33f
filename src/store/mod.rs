//! Every SQL statement of the relay: schema, slot and publication, lock, ledger, dead letters.
