//! The core: what is read, what may be sent, what is decided, what may be confirmed. Pure: time
//! comes in as an argument, nothing here waits, logs or touches a socket.

pub mod outcome;
