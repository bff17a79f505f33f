//! Loads a configuration: flag over environment over file.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::fault::{Fault, Faults, Origin};
use super::given::All;
use super::read::{Reader, Shown};
use super::{Config, file, overlay};

/// The file that is read when none is named.
const DEFAULT_FILE: &str = "outboxd.toml";

/// The variable that names another.
const FILE_VARIABLE: &str = "OUTBOXD_CONFIG";

/// Where a configuration is looked for.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// `-c`; without it the variable `OUTBOXD_CONFIG` names the file, and without that
    /// `./outboxd.toml` is read if it is there.
    pub file: Option<PathBuf>,
    /// Environment variables; those of other programs are passed over.
    pub environment: Vec<(OsString, OsString)>,
    /// `--set KEY=VALUE`.
    pub settings: Vec<String>,
}

/// A configuration and what each key came to.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// What the program uses.
    pub config: Config,
    /// What `config show` prints.
    pub shown: Vec<Shown>,
}

impl Config {
    /// Reads a configuration from a file's text alone; `name` stands in the faults.
    pub fn parse(name: &str, text: &str) -> Result<Config, Faults> {
        let mut given = All::default();
        file::read(name, text, &mut given)?;
        mean(name.to_owned(), given).map(|loaded| loaded.config)
    }
}

impl Places {
    /// Is there anything to read? Some commands do without.
    pub fn exist(&self) -> bool {
        let named = self.file.is_some() || self.variable().is_some();
        named || Path::new(DEFAULT_FILE).exists() || self.gives_keys()
    }

    /// Reads the file, lays environment and flags over it, and checks everything.
    pub fn load(&self) -> Result<Loaded, Faults> {
        let mut given = All::default();
        let named = self.named()?;
        let path = named.unwrap_or(Path::new(DEFAULT_FILE));
        let name = path.display().to_string();
        match std::fs::read(path) {
            Ok(bytes) => match String::from_utf8(bytes) {
                Ok(text) => file::read(&name, &text, &mut given)?,
                Err(_) => return Err(whole(&name, "is not UTF-8", "a TOML file")),
            },
            Err(error) if named.is_none() && error.kind() == ErrorKind::NotFound => {
                if !self.gives_keys() {
                    let right = "write one (`outboxd config sample` prints a start), or name it \
                                 with -c or OUTBOXD_CONFIG";
                    return Err(whole(&format!("./{name}"), "there is no such file", right));
                }
            }
            Err(error) => return Err(whole(&name, &format!("can't be read: {error}"), "")),
        }
        overlay::environment(&self.environment, &mut given);
        overlay::flags(&self.settings, &mut given);
        mean(name, given)
    }

    /// The file that is named by flag or variable.
    fn named(&self) -> Result<Option<&Path>, Faults> {
        match (&self.file, self.variable()) {
            (Some(file), _) => Ok(Some(file)),
            (None, Some(value)) if value.to_string_lossy().trim().is_empty() => {
                Err(Faults(vec![Fault {
                    origin: Origin::Variable(FILE_VARIABLE.to_owned()),
                    key: String::new(),
                    wrong: "is blank".to_owned(),
                    right: "the path of a file, or no such variable".to_owned(),
                }]))
            }
            (None, value) => Ok(value.map(Path::new)),
        }
    }

    fn variable(&self) -> Option<&OsString> {
        let ours = |(name, _): &&(OsString, OsString)| *name == *FILE_VARIABLE;
        self.environment.iter().find(ours).map(|(_, value)| value)
    }

    fn gives_keys(&self) -> bool {
        let ours = |name: &OsString| {
            name.to_str().is_some_and(|name| name.starts_with("OUTBOXD_") && name.contains("__"))
        };
        !self.settings.is_empty() || self.environment.iter().any(|(name, _)| ours(name))
    }
}

fn mean(file: String, given: All) -> Result<Loaded, Faults> {
    match Reader::new(file, given).config() {
        Ok((config, shown)) => Ok(Loaded { config, shown }),
        Err(mut faults) => {
            in_reading_order(&mut faults);
            Err(Faults(faults))
        }
    }
}

/// Faults of the file come by line, whoever found them; the others stay as they were found.
fn in_reading_order(faults: &mut [Fault]) {
    faults.sort_by_key(|fault| match &fault.origin {
        Origin::File { line, column, .. } => (0, *line, *column),
        Origin::WholeFile(_) => (1, 0, 0),
        Origin::Variable(_) => (2, 0, 0),
        Origin::Flag(_) | Origin::Default | Origin::Derived(_) => (3, 0, 0),
    });
}

fn whole(file: &str, wrong: &str, right: &str) -> Faults {
    Faults(vec![Fault {
        origin: Origin::WholeFile(file.to_owned()),
        key: String::new(),
        wrong: wrong.to_owned(),
        right: right.to_owned(),
    }])
}
