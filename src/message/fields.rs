//! Reads a header block as it is on the wire or in a stream. Pure; a block that is none has no
//! headers.

/// The headers of a message. Names are compared as they are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Headers<'a> {
    /// What follows `NATS/1.0` in the first line.
    inline: &'a [u8],
    lines: &'a [u8],
}

impl<'a> Headers<'a> {
    /// Of a block from its version line to its empty line.
    pub fn of(block: &'a [u8]) -> Headers<'a> {
        let Some(rest) = block.strip_prefix(b"NATS/1.0") else { return Headers::default() };
        let (inline, lines) = line(rest).unwrap_or_default();
        Headers { inline, lines }
    }

    /// The server's own word about a message that is not there, e.g. 503.
    pub fn status(&self) -> Option<u16> {
        let text = str::from_utf8(self.inline).ok()?.trim_start();
        text.get(..3)?.parse().ok()
    }

    /// All lines, in their order.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, &'a str)> + use<'a> {
        let mut rest = self.lines;
        let lines = std::iter::from_fn(move || {
            let (first, lines) = line(rest).filter(|(first, _)| !first.is_empty())?;
            rest = lines;
            Some(first)
        });
        // A line that is no header hides none behind it.
        lines.filter_map(|line| {
            let colon = line.iter().position(|byte| *byte == b':')?;
            let (name, value) = line.split_at_checked(colon)?;
            let value = str::from_utf8(value.get(1..)?).ok()?;
            Some((str::from_utf8(name).ok()?, value.trim()))
        })
    }

    /// The first header of this name.
    pub fn get(&self, name: &str) -> Option<&'a str> {
        self.get_all(name).next()
    }

    /// All headers of this name.
    pub fn get_all(&self, name: &str) -> impl Iterator<Item = &'a str> {
        self.iter().filter(move |(own, _)| *own == name).map(|(_, value)| value)
    }
}

/// The first line without its end, and what follows.
fn line(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = text.windows(2).position(|pair| pair == b"\r\n")?;
    Some((text.get(..end)?, text.get(end + 2..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_as_they_are_written() {
        let block = b"NATS/1.0\r\nA: one\r\nB:two: three \r\nA: four\r\n\r\nC: body\r\n";
        let headers = Headers::of(block);
        assert_eq!(headers.get("A"), Some("one"));
        assert_eq!(headers.get_all("A").collect::<Vec<_>>(), ["one", "four"]);
        assert_eq!(
            (headers.get("B"), headers.get("a"), headers.get("C")),
            (Some("two: three"), None, None)
        );
        assert_eq!(headers.status(), None);
    }

    #[test]
    fn the_servers_words_have_a_status() {
        assert_eq!(Headers::of(b"NATS/1.0 503\r\n\r\n").status(), Some(503));
        let timeout =
            Headers::of(b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 1\r\n\r\n");
        assert_eq!(
            (timeout.status(), timeout.get("Nats-Pending-Messages")),
            (Some(408), Some("1"))
        );
    }

    #[test]
    fn what_is_no_block_has_no_headers() {
        for block in [
            &b""[..],
            b"NATS/1.0",
            b"HTTP/1.0\r\nA: b\r\n\r\n",
            b"NATS/1.0\r\nA",
            b"NATS/1.0\r\n\xff: a\r\n\r\n",
        ] {
            assert_eq!((Headers::of(block).iter().count(), Headers::of(block).status()), (0, None));
        }
    }
}
