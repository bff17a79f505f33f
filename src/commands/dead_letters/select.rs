//! Which letters a command is about: the filters that all of them take.

use crate::config::duration;
use crate::event::Reason;
use crate::store::dead_letters::desk::{Filter, State, When};

/// States to choose from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum States {
    /// Buried or redriving.
    Open,
    /// Waits for a decision.
    Buried,
    /// To be sent again by the relay.
    Redriving,
    /// In the stream after all.
    Redriven,
    /// Never to be sent.
    Discarded,
    /// Every letter.
    All,
}

impl States {
    fn states(self) -> Vec<State> {
        match self {
            States::Open => vec![State::Buried, State::Redriving],
            States::Buried => vec![State::Buried],
            States::Redriving => vec![State::Redriving],
            States::Redriven => vec![State::Redriven],
            States::Discarded => vec![State::Discarded],
            States::All => Vec::new(),
        }
    }
}

/// The filters; a letter must fit all that are given.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Select {
    /// Numbers of letters.
    #[arg(value_name = "ID")]
    pub ids: Vec<i64>,

    /// Of this destination.
    #[arg(long, value_name = "NAME")]
    pub destination: Option<String>,

    /// Of this run (ordering key).
    #[arg(long, value_name = "RUN")]
    pub run: Option<String>,

    /// Of this kind; `*` stands for any text.
    #[arg(long, value_name = "KIND")]
    pub kind: Option<String>,

    /// With this reason: unmappable, too_large, subject or header.
    #[arg(long, value_name = "REASON", value_parser = reason)]
    pub reason: Option<&'static str>,

    /// In this state.
    #[arg(long, value_enum, value_name = "STATE")]
    pub state: Option<States>,

    /// Buried then or later: a time such as 2026-11-30T18:00:00Z, or how long ago, such as 2h.
    #[arg(long, value_name = "TIME", value_parser = when)]
    pub since: Option<When>,

    /// Buried before then.
    #[arg(long, value_name = "TIME", value_parser = when)]
    pub until: Option<When>,
}

impl Select {
    /// The filter. Without --state the letters are in one of `states`; those that were named may be
    /// in any.
    pub fn filter(&self, states: &[State]) -> Filter {
        let states = match self.state {
            Some(chosen) => chosen.states(),
            None if self.ids.is_empty() => states.to_vec(),
            None => Vec::new(),
        };
        Filter {
            ids: self.ids.clone(),
            states,
            destination: self.destination.clone(),
            run: self.run.clone(),
            kind: self.kind.clone(),
            reason: self.reason,
            since: self.since,
            until: self.until,
        }
    }
}

fn reason(text: &str) -> Result<&'static str, String> {
    let known = || Reason::ALL.iter().map(|reason| reason.as_str()).collect::<Vec<_>>().join(", ");
    Reason::named(text).map(Reason::as_str).ok_or_else(|| format!("is none of {}", known()))
}

/// A point in time or a time ago. Without an offset a time is UTC, as all that is printed.
pub fn when(text: &str) -> Result<When, String> {
    if let Ok(ago) = duration(text) {
        return Ok(When::Ago(i64::try_from(ago.as_micros()).unwrap_or(i64::MAX)));
    }
    let civil = || {
        let civil: jiff::civil::DateTime = text.parse().ok()?;
        jiff::tz::Offset::UTC.to_timestamp(civil).ok()
    };
    let at = text.parse::<jiff::Timestamp>().ok().or_else(civil);
    let at =
        at.ok_or("is neither a time such as 2026-11-30T18:00:00Z nor a duration such as 2h")?;
    Ok(When::At(at.as_microsecond()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_points_or_durations() {
        assert_eq!(when("2h"), Ok(When::Ago(7_200_000_000)));
        for same in ["2023-11-14T22:13:20Z", "2023-11-14T23:13:20+01:00", "2023-11-14 22:13:20"] {
            assert_eq!(when(same), Ok(When::At(1_700_000_000_000_000)), "{same}");
        }
        assert_eq!(when("2023-11-14"), Ok(When::At(1_699_920_000_000_000)));
        assert!(when("soon").is_err() && when("5").is_err());
    }

    #[test]
    fn every_reason_is_in_the_help() {
        let mut command = <Select as clap::Args>::augment_args(clap::Command::new("x"));
        let help = command.render_help().to_string();
        assert!(Reason::ALL.iter().all(|reason| help.contains(reason.as_str())), "{help}");
        assert!(reason("late").unwrap_err().contains("too_large"));
    }
}
