//! The password file. Owns its format and the rule on its permissions.

use secrecy::SecretString;
use std::path::Path;

use super::settings::Endpoint;

/// What the password file says about one server.
#[derive(Debug)]
pub enum Lookup {
    /// The first line that fits.
    Found(SecretString),
    /// No line fits, or the file was not used; with the reason when the operator should know it.
    Nothing(Option<String>),
}

/// Whom the password is for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub endpoint: &'a Endpoint,
    pub port: u16,
    pub database: &'a str,
    pub user: &'a str,
}

/// Reads the file, unless others than its owner may read it too.
pub(super) fn look_up(file: &Path, wanted: Wanted<'_>) -> Lookup {
    let metadata = match std::fs::metadata(file) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Lookup::Nothing(None),
        Err(error) => return ignored(file, &error.to_string()),
    };
    if !metadata.is_file() {
        return ignored(file, "it is not a plain file");
    }
    #[cfg(unix)]
    if std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o077 != 0 {
        return ignored(file, "group or others may access it; its permissions should be 0600");
    }
    match std::fs::read_to_string(file) {
        Ok(text) => match search(&text, wanted) {
            Some(password) => Lookup::Found(SecretString::from(password)),
            None => Lookup::Nothing(Some(format!("no line of {} fits", file.display()))),
        },
        Err(error) => ignored(file, &error.to_string()),
    }
}

fn ignored(file: &Path, reason: &str) -> Lookup {
    Lookup::Nothing(Some(format!("password file {} was not used: {reason}", file.display())))
}

/// First line of `host:port:database:user:password` that fits.
fn search(text: &str, wanted: Wanted<'_>) -> Option<String> {
    let host = match wanted.endpoint {
        Endpoint::Tcp { host, .. } => host.clone(),
        // A socket in its usual directory goes by the name of localhost.
        Endpoint::Unix(directory) if Endpoint::is_default_directory(directory) => {
            "localhost".to_owned()
        }
        Endpoint::Unix(directory) => directory.display().to_string(),
    };
    let port = wanted.port.to_string();
    let wants = [host.as_str(), port.as_str(), wanted.database, wanted.user];
    text.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
        let fields = split(line);
        let (keys, password) = (fields.get(..4)?, fields.get(4)?);
        let fits = keys.iter().zip(wants).all(|(key, want)| match key.raw {
            "*" => true,
            _ => key.text == want,
        });
        (fits && !password.text.is_empty()).then(|| password.text.clone())
    })
}

struct Field<'a> {
    raw: &'a str,
    text: String,
}

/// Four fields end with a colon, the fifth is the rest of the line; `\:` and `\\` are literal.
fn split(line: &str) -> Vec<Field<'_>> {
    let mut fields = Vec::with_capacity(5);
    let mut text = String::new();
    let mut start = 0;
    let mut chars = line.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => text.extend(chars.next().map(|(_, c)| c)),
            ':' if fields.len() < 4 => {
                let raw = line.get(start..at).unwrap_or_default();
                fields.push(Field { raw, text: std::mem::take(&mut text) });
                start = at + 1;
            }
            _ => text.push(c),
        }
    }
    fields.push(Field { raw: line.get(start..).unwrap_or_default(), text });
    fields
}

#[cfg(test)]
mod tests {
    use super::*;
    use secrecy::ExposeSecret;
    use std::path::PathBuf;

    fn tcp(host: &str) -> Endpoint {
        Endpoint::Tcp { host: host.to_owned(), address: None }
    }

    #[test]
    fn the_first_line_that_fits_wins() {
        let text = "# host:port:db:user:pw\nshort:line\ndb:5432:app:o\\:x:a\\:b\\\\c:d\n\
                    /run/pg:*:*:*:socket\nlocalhost:*:*:*:local\n*:*:other:*:empty\n\\*:*:*:*:star\n*:*:*:*:any";
        let cases = [
            (tcp("db"), "app", "o:x", "a:b\\c:d"),
            (tcp("db"), "app", "other", "any"),
            (tcp("x"), "other", "u", "empty"),
            (Endpoint::Unix(PathBuf::from("/run/pg")), "app", "u", "socket"),
            (Endpoint::Unix(PathBuf::from("/tmp")), "app", "u", "local"),
        ];
        for (endpoint, database, user, password) in cases {
            let wanted = Wanted { endpoint: &endpoint, port: 5432, database, user };
            assert_eq!(search(text, wanted).as_deref(), Some(password), "{endpoint:?} {user}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_others_may_read_is_not_used() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pgpass");
        std::fs::write(&file, "*:*:*:*:secret").unwrap();
        let endpoint = tcp("db");
        let wanted = Wanted { endpoint: &endpoint, port: 1, database: "d", user: "u" };
        let mode = |mode| {
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            look_up(&file, wanted)
        };
        assert!(matches!(mode(0o644), Lookup::Nothing(Some(why)) if why.contains("0600")));
        assert!(matches!(mode(0o600), Lookup::Found(pw) if pw.expose_secret() == "secret"));
        let absent = directory.path().join("absent");
        assert!(matches!(look_up(&absent, wanted), Lookup::Nothing(None)));
    }
}
