//! Reads the fixtures that `capture_pgoutput.rs` writes. Owns their form; decodes nothing.

/// A recorded server: the rows it committed and the frames it sent for them.
pub struct Fixture {
    /// PostgreSQL's major version.
    pub server: &'static str,
    /// Committed rows in commit order, as the server told them when they were inserted.
    pub rows: Vec<&'static str>,
    /// The same WAL, read with different options.
    pub streams: Vec<Stream>,
}

/// The frames of one read.
pub struct Stream {
    /// `binary`, `text`, `everything`.
    pub name: &'static str,
    /// In the order they were sent.
    pub frames: Vec<Vec<u8>>,
}

/// All recorded servers.
pub fn all() -> Vec<Fixture> {
    [
        ("14", include_str!("../fixtures/pgoutput-14.txt")),
        ("16", include_str!("../fixtures/pgoutput-16.txt")),
        ("18", include_str!("../fixtures/pgoutput-18.txt")),
    ]
    .map(|(server, text)| parse(server, text))
    .into()
}

fn parse(server: &'static str, text: &'static str) -> Fixture {
    let mut fixture = Fixture { server, rows: Vec::new(), streams: Vec::new() };
    for line in text.lines().filter(|line| !line.starts_with('#') && *line != "[rows]") {
        if let Some(name) = line.strip_prefix('[') {
            let name = name.trim_end_matches(']');
            fixture.streams.push(Stream { name, frames: Vec::new() });
        } else if let Some(stream) = fixture.streams.last_mut() {
            stream.frames.push(unhex(line));
        } else {
            fixture.rows.push(line);
        }
    }
    fixture
}

/// Bytes of a line of hexadecimal digits.
pub fn unhex(line: &str) -> Vec<u8> {
    let digit =
        |byte: &u8| char::from(*byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    line.as_bytes()
        .chunks(2)
        .map(|pair| pair.iter().filter_map(digit).fold(0, |byte, digit| byte << 4 | digit))
        .collect()
}
