//! Tests that need fast-ingest batches, on servers that are too old for them: skipped, and told.

use std::io::Write as _;

/// Does this server know batches?
pub fn known_to(client: &async_nats::Client) -> bool {
    let version = client.server_info().version;
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    (parts.next(), parts.next()) >= (Some(2), Some(14))
}

/// Does this server take batches? If not, says on standard error, past the capture of tests' output,
/// that the test leaves itself out.
pub async fn taken_by(client: &async_nats::Client, test: &str) -> bool {
    let taken = known_to(client);
    if !taken {
        let version = client.server_info().version;
        let words =
            format!("skipped: {test}: batches need nats-server 2.14 or newer, this is {version}\n");
        std::io::stderr().write_all(words.as_bytes()).unwrap();
    }
    taken
}
