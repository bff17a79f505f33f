//! The join: the pump with the one `select!`, the session around it, the supervisor around that.
