//! `outboxd dead-letters redrive` and `discard`: looks first and says what would happen, changes
//! nothing on any doubt, records who did it and why.

use std::time::Duration;

use clap::ArgGroup;
use serde::Serialize;
use tokio::time::{Instant, sleep};
use tokio_postgres::Client;

use super::report::{Change, Kept, Report, text};
use super::select::Select;
use super::{connect, json};
use crate::commands::{Stopped, say};
use crate::config::{Config, Filter, duration};
use crate::event::{Reason, WayOut};
use crate::store::dead_letters::desk::{self, Found, Letter, State};
use crate::store::dead_letters::overtaken;
use crate::store::lock;

/// Letters whose later events are counted: each is a look into table and ledger.
const COUNTED: usize = 100;
/// How often the outcome is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What both take.
#[derive(Debug, clap::Args)]
#[command(group(ArgGroup::new("which").required(true).multiple(true).args([
    "ids", "destination", "run", "kind", "reason", "state", "since", "until", "all",
])))]
struct Common {
    #[command(flatten)]
    select: Select,

    /// Take more than one letter by filters; alone it takes every buried one.
    #[arg(long)]
    all: bool,

    /// Letters at most; how many more there are is said.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    limit: u32,

    /// Why; kept with the letter.
    #[arg(long, value_name = "TEXT", required_unless_present = "dry_run", value_parser = reason)]
    why: Option<String>,

    /// Who; kept with the letter, the database's role beside it [default: user@host].
    #[arg(long, value_name = "NAME")]
    by: Option<String>,

    /// Say what would be done and do nothing.
    #[arg(long)]
    dry_run: bool,

    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `redrive`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The running relay sends the letters, within some seconds. Each goes to the end of its run: later
events of the run are in the stream already, and how many is said. Where the run is blocked
(on_dead_letter = \"block-run\") it goes ahead of the events that wait, and the run goes on behind
it. One that is refused again is buried again, with the new words.

Mend first what the letter's detail names. A letter with the reason unmappable can't be redriven:
its row is no message, whatever is mended. A discarded letter can, by its number or with
--state discarded.

Exit code 1 when nothing was done, or a letter was buried again.")]
pub struct RedriveArgs {
    #[command(flatten)]
    common: Common,

    /// How long to wait for the outcome, when a relay runs.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration)]
    wait: Duration,
}

/// Arguments of `discard`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The event is never sent to that destination. Its row and the letter stay until their retention is
over. A run that waits behind the letter goes on with its next event, within some seconds.

A letter that is being redriven can be discarded only while no relay runs. If the stream turns out
to have its event, it is redriven all the same.")]
pub struct DiscardArgs {
    #[command(flatten)]
    common: Common,
}

fn reason(text: &str) -> Result<String, String> {
    let text = text.trim();
    if text.is_empty() { Err("is blank".to_owned()) } else { Ok(text.to_owned()) }
}

/// What is done with letters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verb {
    /// Have them sent.
    Redrive,
    /// Give them up.
    Discard,
}

impl Verb {
    fn to(self) -> State {
        match self {
            Verb::Redrive => State::Redriving,
            Verb::Discard => State::Discarded,
        }
    }

    /// States that it can begin with.
    fn from(self) -> &'static [State] {
        match self {
            Verb::Redrive => &[State::Buried, State::Discarded],
            Verb::Discard => &[State::Buried, State::Redriving],
        }
    }
}

/// Runs `redrive`.
pub async fn redrive(args: &RedriveArgs, config: &Config) -> Result<(), Stopped> {
    run(Verb::Redrive, &args.common, args.wait, config).await
}

/// Runs `discard`.
pub async fn discard(args: &DiscardArgs, config: &Config) -> Result<(), Stopped> {
    run(Verb::Discard, &args.common, Duration::ZERO, config).await
}

async fn run(verb: Verb, args: &Common, wait: Duration, config: &Config) -> Result<(), Stopped> {
    let control = connect(config).await?;
    let client = &control.client;
    let relay = &config.relay.name;
    let filter = args.select.filter(&[State::Buried]);
    let found = desk::find(client, relay, &filter, i64::from(args.limit)).await?;
    let mut report = Report::new(verb, args.dry_run);
    report.more = found.more;
    report.relay_running = lock::holder(client, relay).await?.is_some();
    report.refused = refusal(args, &found);
    for letter in found.letters {
        match obstacle(verb, &letter, config, report.relay_running) {
            None => report.letters.push(Change::of(letter)),
            Some(why) => report.kept.push(Kept { id: letter.id, state: letter.state, why }),
        }
    }
    // What was named must be right: one wrong number, and nothing happens.
    let wrong = report.kept.first().filter(|_| !args.select.ids.is_empty());
    if let (None, Some(kept)) = (&report.refused, wrong) {
        report.refused = Some(format!("letter {} {}", kept.id, kept.why));
    } else if report.refused.is_none() && report.letters.is_empty() {
        report.refused = Some("nothing is left to do".to_owned());
    }
    if report.refused.is_none() {
        if verb == Verb::Redrive {
            count_overtaken(client, config, &mut report).await?;
        }
        if !args.dry_run {
            carry_out(client, args, config, &mut report).await?;
            if verb == Verb::Redrive && report.relay_running {
                wait_for_outcome(client, config, &mut report, wait).await?;
            }
        }
    }
    say(&if args.json { json(&report) } else { text(&report) })?;
    if report.is_good() { Ok(()) } else { Err(Stopped::Refused) }
}

/// Why nothing at all is to happen.
fn refusal(args: &Common, found: &Found) -> Option<String> {
    let named = &args.select.ids;
    let there = |id: &&i64| !found.letters.iter().any(|letter| letter.id == **id);
    if let Some(id) = named.iter().find(there) {
        return Some(format!("there is no letter {id} that fits"));
    }
    let all = i64::try_from(found.letters.len()).unwrap_or(i64::MAX).saturating_add(found.more);
    if all == 0 {
        return Some("no letter fits".to_owned());
    }
    (all > 1 && named.is_empty() && !args.all)
        .then(|| format!("{all} letters fit: add --all to take them all, or name them by number"))
}

/// Why this letter is left as it is; the words follow its number.
fn obstacle(verb: Verb, letter: &Letter, config: &Config, relay_running: bool) -> Option<String> {
    let configured = config.destinations.iter().any(|one| one.name == letter.destination);
    let being_sent = letter.state == State::Redriving && relay_running && configured;
    if !verb.from().contains(&letter.state) || being_sent {
        return Some(match letter.state {
            State::Redriving if verb == Verb::Redrive => "is being redriven already".to_owned(),
            State::Redriving => {
                "is being redriven: see what comes of it, or stop the relay first".to_owned()
            }
            State::Redriven => "is redriven: its event is in the stream".to_owned(),
            State::Buried | State::Discarded => format!("is {} already", letter.state.as_str()),
        });
    }
    if verb == Verb::Discard {
        return None;
    }
    if !configured {
        return Some(format!("is of destination {}, which is not configured", letter.destination));
    }
    let reason = Reason::named(&letter.reason)?;
    (reason.way_out() == WayOut::Rewrite)
        .then(|| format!("is {}: {}", letter.reason, reason.remedy()))
}

async fn count_overtaken(
    client: &Client,
    config: &Config,
    report: &mut Report,
) -> Result<(), Stopped> {
    let relay = &config.relay.name;
    for change in report.letters.iter_mut().take(COUNTED) {
        let of = config.destinations.iter().find(|one| one.name == change.letter.destination);
        let takes = of.map_or_else(Filter::default, |one| one.filter.clone());
        change.overtaken =
            overtaken::look(client, relay, &config.source, &takes, &change.letter).await?;
    }
    Ok(())
}

async fn carry_out(
    client: &Client,
    args: &Common,
    config: &Config,
    report: &mut Report,
) -> Result<(), Stopped> {
    let ids: Vec<i64> = report.letters.iter().map(|change| change.letter.id).collect();
    let why = args.why.as_deref().unwrap_or_default();
    let by = args.by.clone().unwrap_or_else(somebody);
    let verb = report.action;
    let relay = &config.relay.name;
    let changed = desk::change(client, relay, &ids, verb.from(), verb.to(), (&by, why)).await?;
    for change in &mut report.letters {
        if changed.binary_search(&change.letter.id).is_ok() {
            change.letter.state = verb.to();
        } else {
            let why = "was changed by somebody else meanwhile".to_owned();
            report.kept.push(Kept { id: change.letter.id, state: change.letter.state, why });
        }
    }
    report.letters.retain(|change| change.letter.state == verb.to());
    Ok(())
}

/// Until every letter is in the stream or buried again, or the time is over.
async fn wait_for_outcome(
    client: &Client,
    config: &Config,
    report: &mut Report,
    wait: Duration,
) -> Result<(), Stopped> {
    let ids: Vec<i64> = report.letters.iter().map(|change| change.letter.id).collect();
    let deadline = Instant::now() + wait;
    while !wait.is_zero() {
        let now = desk::states(client, &ids).await?;
        let done = now.iter().all(|(_, state)| *state != State::Redriving);
        if done || Instant::now() >= deadline {
            break;
        }
        sleep(LOOK_EVERY).await;
    }
    let filter = desk::Filter { ids, ..desk::Filter::default() };
    let found = desk::find(client, &config.relay.name, &filter, i64::MAX).await?;
    // One can be gone by now: an erasure takes letters too.
    for letter in found.letters {
        if let Some(change) = report.letters.iter_mut().find(|one| one.letter.id == letter.id) {
            change.letter = letter;
        }
    }
    Ok(())
}

/// Who runs this, as far as the system says.
fn somebody() -> String {
    let variable = |name| std::env::var(name).ok().filter(|user: &String| !user.trim().is_empty());
    let user = variable("USER").or_else(|| variable("LOGNAME"));
    let user = user.unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()));
    let system = rustix::system::uname();
    let host = system.nodename().to_string_lossy();
    if host.is_empty() { user } else { format!("{user}@{host}") }
}
