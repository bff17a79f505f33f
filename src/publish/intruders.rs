//! Who else writes a stream that should be ours alone, as far as it was noticed, and for how long the
//! relay does without the pipeline that relies on it. Pure.

use std::time::{Duration, Instant};

use crate::relay::outcome::{Pipeline, StreamFacts};

/// So long after the second message of others in so long, each run has one event in flight. Their
/// messages stop nothing then; with `sequence` each of them costs a look at the stream.
const AWAY: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Intruders {
    noticed: Option<Instant>,
    away_until: Option<Instant>,
    words: String,
}

impl Intruders {
    /// The stream went on without us, in the server's words. True: do without `sequence` for a while.
    pub(super) fn noticed(&mut self, words: &str, now: Instant) -> bool {
        let again = self.noticed.replace(now).is_some_and(|before| now < before + AWAY);
        if again {
            self.away_until = Some(now + AWAY);
            words.clone_into(&mut self.words);
        }
        again
    }

    /// The facts with the pipeline that is used now.
    pub(super) fn temper(&self, facts: StreamFacts, now: Instant) -> StreamFacts {
        if facts.pipeline != Pipeline::Sequence || self.away_until.is_none_or(|until| until <= now)
        {
            return facts;
        }
        let why = format!(
            "`exclusive` is set and somebody else writes stream `{}` ({}): find out who; \
             `sequence` is tried again every {} s",
            facts.stream,
            self.words,
            AWAY.as_secs()
        );
        StreamFacts { pipeline: Pipeline::PerRun, why, ..facts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_message_of_others_is_borne_and_two_in_a_minute_are_avoided() {
        let (mut intruders, now) = (Intruders::default(), Instant::now());
        let fast = crate::relay::machine::tests::facts("s1", 10, Pipeline::Sequence);
        let pipeline = |intruders: &Intruders, at| intruders.temper(fast.clone(), at).pipeline;
        assert!(!intruders.noticed("a", now));
        assert_eq!(pipeline(&intruders, now), Pipeline::Sequence);
        assert!(!intruders.noticed("b", now + AWAY), "long ago");
        let again = now + AWAY + AWAY / 2;
        assert!(intruders.noticed("wrong last sequence: 7", again));
        assert_eq!(pipeline(&intruders, again), Pipeline::PerRun);
        let why = intruders.temper(fast.clone(), again).why;
        assert!(why.contains("wrong last sequence: 7") && why.contains("exclusive"), "{why}");
        assert_eq!(pipeline(&intruders, again + AWAY), Pipeline::Sequence);
        let batch = StreamFacts { pipeline: Pipeline::Batch, ..fast.clone() };
        assert_eq!(intruders.temper(batch.clone(), again), batch);
    }
}
