//! Log lines on standard error: text for people, JSON for machines. Owns their set-up; a line stays
//! one line whatever bytes a row, a server or a file put into it.

use std::io::{self, IsTerminal, Write};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::config::{LogConfig, LogFormat};

/// The filter that a level stands for, or what is wrong with it. The NATS client tells of every
/// connection at `info`, which the relay tells better; a level of its own can be set for it.
pub fn filter(level: &str) -> Result<EnvFilter, String> {
    EnvFilter::builder()
        .parse(format!("async_nats=warn,{level}"))
        .map_err(|error| error.to_string())
}

/// Sends the process's log lines to standard error from now on. An application that set up its own
/// subscriber keeps it.
pub fn init(config: &LogConfig) {
    let filter = filter(&config.level).unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter);
    let installed = match config.format {
        LogFormat::Text => {
            let ansi = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            builder.with_ansi(ansi).with_writer(OneLine { ansi }).try_init()
        }
        LogFormat::Json => builder.json().flatten_event(true).with_writer(io::stderr).try_init(),
    };
    if let Err(error) = installed {
        tracing::debug!(%error, "log lines go where the application sends them");
    }
}

/// Standard error, with control characters inside a line escaped. The formatter hands each event
/// over in one piece that ends in the only newline we let through.
#[derive(Debug, Clone, Copy)]
struct OneLine {
    /// Escape characters are the formatter's own colours: it escapes those of values itself.
    ansi: bool,
}

impl<'a> MakeWriter<'a> for OneLine {
    type Writer = OneLine;

    fn make_writer(&'a self) -> OneLine {
        *self
    }
}

impl Write for OneLine {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        io::stderr().lock().write_all(&printable(line, self.ansi))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

fn printable(line: &[u8], ansi: bool) -> Vec<u8> {
    let text = String::from_utf8_lossy(line);
    let (text, end) = text.strip_suffix('\n').map_or((&*text, ""), |text| (text, "\n"));
    let mut out = String::with_capacity(text.len() + 1);
    for c in text.chars() {
        if c.is_control() && !(ansi && c == '\u{1b}') {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out.push_str(end);
    out.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_stays_a_line() {
        let escaped = printable(b"a\r\nINFO forged\x1b[2J\x00\n", false);
        assert_eq!(escaped, b"a\\r\\nINFO forged\\u{1b}[2J\\u{0}\n");
    }

    #[test]
    fn a_json_line_stays_a_line() {
        #[derive(Clone, Default)]
        struct Lines(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);
        impl Write for Lines {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().unwrap().write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let lines = Lines::default();
        let sink = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .json()
            .flatten_event(true)
            .with_writer(move || sink.clone())
            .finish();
        let hostile = "a\r\n{\"level\":\"ERROR\"}\u{1b}[2J\0";
        tracing::subscriber::with_default(subscriber, || tracing::warn!(hostile, "{hostile}"));
        let written = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert_eq!(written.lines().count(), 1, "{written}");
        let line: serde_json::Value = serde_json::from_str(&written).unwrap();
        assert_eq!((&line["hostile"], &line["message"]), (&hostile.into(), &hostile.into()));
    }

    #[test]
    fn levels_are_checked() {
        assert!(filter("info,outboxd::publish=debug").is_ok());
        assert!(filter("loud=noise=x").is_err());
    }
}
