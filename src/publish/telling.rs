//! What the log is told of refusals that may heal: they come with every try, so one is told when it
//! is another, or every half a minute. Dead letters are told by who writes them.

use std::time::{Duration, Instant};

use crate::relay::outcome::{Answer, Outcome, Refusal};

/// How often the same refusal is told.
const TELL_EVERY: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Telling {
    last: Option<(String, Instant)>,
}

impl Telling {
    /// Looks at answers of a destination before they go to the core.
    pub(super) fn answers(&mut self, destination: &str, answers: &[Answer], now: Instant) {
        let mut refusals = answers.iter().filter_map(|answer| {
            let Outcome::Refused(refusal) = &answer.outcome else { return None };
            refusal.permanent.is_none().then_some(refusal)
        });
        let Some(Refusal { detail, code, .. }) = refusals.next() else { return };
        if self.is_news(detail, now) {
            tracing::warn!(
                destination,
                code,
                "an event is refused and will be tried again; its run waits: {detail}"
            );
        }
    }

    fn is_news(&mut self, detail: &str, now: Instant) -> bool {
        let last = self.last.as_ref();
        if last.is_some_and(|(told, at)| told == detail && now < *at + TELL_EVERY) {
            return false;
        }
        self.last = Some((detail.to_owned(), now));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_told_now_and_then_and_another_at_once() {
        let (mut telling, now) = (Telling::default(), Instant::now());
        assert!(telling.is_news("full", now));
        assert!(!telling.is_news("full", now + Duration::from_secs(1)));
        assert!(telling.is_news("forbidden", now + Duration::from_secs(1)));
        assert!(telling.is_news("forbidden", now + Duration::from_secs(31)));
    }
}
