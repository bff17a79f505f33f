//! How far the slot may be confirmed: never above what the relay's row says, which is raised first
//! and in large steps. So a slot that is found above was moved by somebody else.

use crate::lsn::Lsn;

/// WAL between two writes of the row: beside it they are nothing.
const STEP_BYTES: u64 = 16 << 20;

/// See the module.
#[derive(Debug)]
pub struct Ceiling {
    recorded: Lsn,
    asked: bool,
}

impl Ceiling {
    /// As the relay's row has it; `None`: nothing was ever confirmed.
    pub fn new(recorded: Option<Lsn>) -> Ceiling {
        Ceiling { recorded: recorded.unwrap_or(Lsn::ZERO), asked: false }
    }

    /// What may be confirmed of this now.
    pub fn bound(&self, confirmable: Lsn) -> Lsn {
        confirmable.min(self.recorded)
    }

    /// What is to be recorded so that this may be confirmed. Once, until it is [`Self::raised`].
    pub fn wanted(&mut self, confirmable: Lsn) -> Option<Lsn> {
        if self.asked || confirmable <= self.recorded {
            return None;
        }
        self.asked = true;
        Some(Lsn(confirmable.0.saturating_add(STEP_BYTES)))
    }

    /// It is recorded.
    pub fn raised(&mut self, to: Lsn) {
        self.recorded = self.recorded.max(to);
        self.asked = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_confirmed_above_what_is_recorded() {
        let mut ceiling = Ceiling::new(Some(Lsn(100)));
        assert_eq!((ceiling.bound(Lsn(90)), ceiling.wanted(Lsn(100))), (Lsn(90), None));
        let to = ceiling.wanted(Lsn(101)).unwrap();
        assert_eq!((ceiling.bound(Lsn(101)), ceiling.wanted(Lsn(102))), (Lsn(100), None));
        ceiling.raised(to);
        assert_eq!(ceiling.bound(Lsn(102)), Lsn(102));
        assert_eq!(ceiling.wanted(Lsn(101 + STEP_BYTES)), None, "one write for all of a step");
        assert_eq!(Ceiling::new(None).bound(Lsn(1)), Lsn::ZERO);
    }
}
