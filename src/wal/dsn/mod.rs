//! What a connection string means. Owns libpq's URLs, keyword strings, `PG*` variables and password
//! files; opens nothing but the password file, and only when a server asks for the password.

mod parse;
mod passfile;
mod resolve;
mod settings;
mod text;

pub use passfile::Lookup;
pub use settings::{
    ChannelBinding, Dsn, Endpoint, RootCertificates, SslMode, Target, TcpSettings, TlsSettings,
};

use std::fmt;

/// A connection string that can't be used. Says which parameter is at fault and never quotes a
/// value that could be a part of a password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DsnError {
    /// The parameter as libpq names it, or the variable it came from; `None` when the string as a
    /// whole can't be taken apart.
    pub parameter: Option<String>,
    /// What is wrong with it.
    pub message: String,
}

impl DsnError {
    fn whole(message: impl Into<String>) -> DsnError {
        DsnError { parameter: None, message: message.into() }
    }

    /// The variable that is wrong, when it is not the string itself.
    pub fn variable(&self) -> Option<&str> {
        // libpq's parameters are in lower case, its variables in upper case.
        self.parameter.as_deref().filter(|name| name.starts_with("PG"))
    }

    fn of(parameter: &str, message: impl Into<String>) -> DsnError {
        DsnError { parameter: Some(parameter.to_owned()), message: message.into() }
    }
}

impl fmt::Display for DsnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.parameter {
            Some(parameter) => write!(f, "`{parameter}`: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for DsnError {}

/// Takes a connection string apart and checks it, with the process's `PG*` variables as defaults.
/// Opens nothing: whether files and servers exist shows when the connection is made.
pub fn check_dsn(text: &str) -> Result<Dsn, DsnError> {
    resolve::resolve(text, &|name| std::env::var(name).ok())
}
