//! Tests that need what newer servers have, on servers that are too old for them: skipped, and told.

use std::io::Write as _;

/// Does this server know batches?
pub fn known_to(client: &async_nats::Client) -> bool {
    is_since(client, (2, 14))
}

fn is_since(client: &async_nats::Client, since: (u32, u32)) -> bool {
    let version = client.server_info().version;
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    (parts.next(), parts.next()) >= (Some(since.0), Some(since.1))
}

/// Does this server take batches? If not, says on standard error, past the capture of tests' output,
/// that the test leaves itself out.
pub async fn taken_by(client: &async_nats::Client, test: &str) -> bool {
    is_new_enough(client, test, (2, 14), "batches need")
}

fn is_new_enough(client: &async_nats::Client, test: &str, since: (u32, u32), what: &str) -> bool {
    let enough = is_since(client, since);
    if !enough {
        let version = client.server_info().version;
        let (major, minor) = since;
        let words = format!(
            "skipped: {test}: {what} nats-server {major}.{minor} or newer, this is {version}\n"
        );
        std::io::stderr().write_all(words.as_bytes()).unwrap();
    }
    enough
}
