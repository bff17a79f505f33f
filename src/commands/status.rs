//! `outboxd status`: what the running relay tells of itself, over its admin address. Knows HTTP only
//! as far as one GET needs it.

use std::io::IsTerminal;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::{Stopped, say};
use crate::admin::destination::Unpublished;
use crate::admin::report::{DestinationReport, Latency, Report};
use crate::config::Places;
use crate::error::{Failure, Kind};
use crate::store::lag::{Lag, lag};
use crate::store::settle;
use crate::wal::connect_upkeep;

/// Rows that are counted while no relay runs, per destination: a second at most.
const COUNT_TO: i64 = 1_000_000;

/// The relay answers from memory; what takes longer is no relay.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);

/// Longest answer that is read: far more than the report of a thousand destinations.
const ANSWER_MAX: u64 = 4 << 20;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Asks the relay at [admin] listen. When none answers there, it says what the database knows of the lag
(`outbox.lag()`), and exits with 1; with --check also when the relay is not ready.

Examples:
  outboxd status --watch
  outboxd status --check                  for a container's health check
  outboxd status --admin 10.0.0.7:7790 --json")]
pub struct Args {
    /// Repeat every second until Ctrl-C.
    #[arg(long)]
    pub watch: bool,
    /// Exit with 1 unless the relay is ready.
    #[arg(long, conflicts_with = "watch")]
    pub check: bool,
    /// As JSON, one object a line.
    #[arg(long)]
    pub json: bool,
    /// Address of the relay's admin endpoints, in place of `[admin] listen`.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub admin: Option<SocketAddr>,
}

/// Asks and prints.
pub async fn run(args: &Args, places: &Places) -> Result<(), Stopped> {
    let address = match args.admin {
        Some(address) => address,
        None => {
            let config = places.load()?.config;
            match config.admin.listen {
                Some(address) => address,
                None => {
                    let off = "[admin] listen is \"off\", so the relay can't be asked";
                    let failure = Failure::new(Kind::AdminOff, off);
                    return without_relay(args, places, failure).await;
                }
            }
        }
    };
    let mut seconds = interval(Duration::from_secs(1));
    seconds.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let clear = args.watch && !args.json && std::io::stdout().is_terminal();
    loop {
        seconds.tick().await;
        let mut ready = true;
        let text = match ask(reachable(address)).await {
            Ok(body) => {
                if args.check {
                    ready = understand(&body)?.ready.ok;
                }
                if args.json { body } else { show(&understand(&body)?) }
            }
            Err(failure) if args.watch => {
                format!("{failure}\n{}", from_database(places).await.unwrap_or_default())
            }
            Err(failure) => return without_relay(args, places, failure).await,
        };
        say(&format!("{}{text}", if clear { "\x1b[H\x1b[2J" } else { "" }))?;
        if !args.watch {
            return if ready { Ok(()) } else { Err(Stopped::Refused) };
        }
    }
}

/// What the database says of the lag while no relay answers.
struct Database {
    relay: String,
    lag: Result<Vec<Lag>, Failure>,
}

/// Asks it; `None` without a configuration that names it.
async fn look(places: &Places) -> Option<Database> {
    let config = places.load().ok()?.config;
    let asked = async {
        let (control, _) = connect_upkeep(&config.source).await?;
        settle(&control.client).await?;
        lag(&control.client, &config.relay.name, COUNT_TO).await
    };
    let answer = timeout(config.source.connect_timeout.max(ANSWER_WITHIN), asked).await;
    let lag = answer.unwrap_or_else(|_| {
        Err(Failure::new(Kind::SourceSilent, "the database did not answer in time"))
    });
    Some(Database { relay: config.relay.name, lag })
}

async fn from_database(places: &Places) -> Option<String> {
    let Database { relay, lag } = look(places).await?;
    let mut text = format!("the database says of relay {relay}:\n");
    match lag {
        Err(failure) => text.push_str(&format!("  nothing: {failure}\n")),
        Ok(lag) if lag.is_empty() => text.push_str("  it never ran\n"),
        Ok(lag) => text.extend(lag.iter().map(|one| {
            let Lag { destination, unpublished, oldest_seconds, counted_all, .. } = one;
            let found = unpublished.map(|events| Unpublished {
                events,
                at_least: !counted_all,
                oldest_seconds: *oldest_seconds,
            });
            format!("  destination {destination}: {}\n", unpublished_words(found.as_ref()))
        })),
    }
    Some(printable(text.trim_end()))
}

/// What can be said all the same; and the failure.
async fn without_relay(args: &Args, places: &Places, failure: Failure) -> Result<(), Stopped> {
    if let Some(told) = told_without_relay(args, places, &failure).await {
        say(&told)?;
    }
    Err(failure.into())
}

/// For a single look: text, or one JSON object in place of the relay's.
async fn told_without_relay(args: &Args, places: &Places, failure: &Failure) -> Option<String> {
    if !args.json {
        return from_database(places).await;
    }
    let Database { relay, lag } = look(places).await?;
    let (lag, error) = match lag {
        Ok(lag) => (Some(lag), None),
        Err(error) => (None, Some(error.to_string())),
    };
    let report = serde_json::json!({
        "relay": relay,
        "answers": false,
        "failure": failure.to_string(),
        "database": { "destinations": lag, "failure": error },
    });
    Some(report.to_string())
}

fn unpublished_words(found: Option<&Unpublished>) -> String {
    let Some(Unpublished { events, at_least, oldest_seconds }) = found else {
        return "unpublished ?".to_owned();
    };
    let sign = if *at_least { "≥ " } else { "" };
    let oldest = oldest_seconds.filter(|_| *events > 0);
    let oldest = oldest.map_or(String::new(), |seconds| format!(", oldest {}", age(seconds)));
    format!("{sign}{events} unpublished{oldest}")
}

/// A relay that listens on every address is asked on the loopback one.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        });
    }
    address
}

async fn ask(address: SocketAddr) -> Result<String, Failure> {
    let failed = |what: &str| {
        Failure::new(Kind::RelayUnreachable, format!("no relay answers on {address}: {what}"))
    };
    let answer = timeout(ANSWER_WITHIN, get(address)).await;
    let answer = answer.map_err(|_| failed("no answer in time"))?;
    let answer = answer.map_err(|error| failed(&error.to_string()))?;
    let answer = String::from_utf8(answer).map_err(|_| failed("the answer is not text"))?;
    match answer.split_once("\r\n\r\n") {
        Some((head, body)) if head.starts_with("HTTP/1.1 200") => Ok(body.to_owned()),
        Some(_) | None => Err(failed("what listens there is something else")),
    }
}

/// One GET. `Connection: close`, and a body whose length is known to the server, so that the answer
/// ends with the connection and is not chunked.
async fn get(address: SocketAddr) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address).await?;
    let request =
        format!("GET /api/status HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(ANSWER_MAX).read_to_end(&mut answer).await?;
    Ok(answer)
}

fn understand(body: &str) -> Result<Report, Failure> {
    serde_json::from_str(body).map_err(|error| {
        let what = format!("the relay is of another version, its status can't be read: {error}");
        Failure::new(Kind::RelayVersion, what)
    })
}

fn show(report: &Report) -> String {
    let mark = |ok: bool, yes: &str, no: &str| if ok { yes.to_owned() } else { no.to_owned() };
    let mut lines = vec![format!(
        "{} (outboxd {}, up {}): {} for {}, {}, {}",
        report.relay,
        report.version,
        age(report.uptime_seconds),
        report.phase.as_str(),
        age(report.phase_seconds),
        mark(report.ready.ok, "ready", "NOT READY"),
        mark(report.healthy.ok, "healthy", "UNHEALTHY"),
    )];
    let mut causes: Vec<_> = report.ready.causes.iter().chain(&report.healthy.causes).collect();
    causes.dedup();
    lines.extend(causes.iter().map(|cause| format!("  ! {cause}")));
    if let Some(failure) = &report.failure {
        let ago = age(failure.seconds_ago);
        lines.push(format!("  last failure {ago} ago: {}: {}", failure.code, failure.detail));
        lines.push(format!("  next: {}", failure.remedy));
    }
    let source = &report.source;
    lines.push(format!(
        "source       {} slot {} ({}), confirmed {}, received {}, holds back {}",
        source.database,
        source.slot,
        mark(source.slot_active, "active", "not active"),
        source.confirmed_lsn,
        source.received_lsn,
        source.slot_retained_bytes.map_or("?".to_owned(), bytes),
    ));
    lines.push(format!(
        "lag          {}, {} undecided ({} of {}), commit to ack {}",
        report.lag_seconds.map_or("of the active relay".to_owned(), age),
        report.undecided.events,
        bytes(report.undecided.bytes),
        bytes(report.undecided.budget_bytes),
        latency(report.commit_to_ack.as_ref()),
    ));
    lines.extend(report.destinations.iter().map(destination));
    lines.iter().map(|line| printable(line)).collect()
}

fn destination(one: &DestinationReport) -> String {
    let state = match one.procedure.as_str() {
        _ if !one.up => "DOWN",
        "" => "up",
        procedure => procedure,
    };
    let optional = if one.required { "" } else { " (optional)" };
    let stream = one.stream.as_ref().map_or(String::new(), |stream| {
        format!(
            ", stream {} R{}, {}: {}",
            stream.name, stream.replicas, stream.pipeline, stream.why
        )
    });
    let events = &one.events;
    let mut text = format!(
        "destination  {}{optional}: {state}{stream}\n             {} acked, {} recorded, {} \
         waiting, {} in flight, {} runs retrying, {} duplicates, {} unknown, {} dead; ack {}",
        one.name,
        events.acked,
        events.recorded,
        one.waiting,
        one.in_flight,
        one.retrying,
        events.duplicates,
        events.unknown,
        events.dead,
        latency(one.publish_duration.as_ref()),
    );
    if let Some(found) = &one.unpublished {
        text.push_str(&format!("; {}", unpublished_words(Some(found))));
    }
    if one.blocked > 0 {
        text.push_str(&format!(
            "\n             {} runs BLOCKED behind dead letters: outboxd dead-letters list",
            one.blocked
        ));
    }
    if let Some(failure) = one.failure.as_ref().filter(|_| !one.up) {
        text.push_str(&format!("\n             next: {}", failure.remedy));
    }
    text
}

/// The line with a newline, and nothing in it that moves the cursor; ours are its inner newlines.
fn printable(line: &str) -> String {
    let escape = |c: char| {
        let plain = !c.is_control() || c == '\n';
        if plain { c.to_string() } else { c.escape_default().to_string() }
    };
    line.chars().map(escape).chain(["\n".to_owned()]).collect()
}

fn latency(latency: Option<&Latency>) -> String {
    latency
        .map_or("-".to_owned(), |one| format!("p50 {:.2} ms p99 {:.2} ms", one.p50_ms, one.p99_ms))
}

fn age(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0} ms", s * 1000.0),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

fn bytes(bytes: u64) -> String {
    match bytes {
        b if b < 10 << 10 => format!("{b} B"),
        b if b < 10 << 20 => format!("{} KiB", b >> 10),
        b if b < 10 << 30 => format!("{} MiB", b >> 20),
        b => format!("{} GiB", b >> 30),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_holds_no_control_characters() {
        assert_eq!(printable("a\x1b[2Jb\n  c\r"), "a\\u{1b}[2Jb\n  c\\r\n");
    }

    #[test]
    fn any_address_is_asked_on_loopback() {
        let any: SocketAddr = "0.0.0.0:7790".parse().unwrap();
        assert_eq!(reachable(any).to_string(), "127.0.0.1:7790");
        let any: SocketAddr = "[::]:7790".parse().unwrap();
        assert_eq!(reachable(any).to_string(), "[::1]:7790");
    }
}
