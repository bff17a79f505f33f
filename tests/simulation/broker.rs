//! One JetStream stream: fast-ingest batches with gap mode `fail`, plain publishes, with the sequence
//! that they expect or without, a dedupe window that ages, and, with replicas, proposals that are
//! decided later or never.

use outboxd::message::Headers;
use std::collections::{HashMap, VecDeque};

use crate::dice::Dice;

/// Microseconds since the simulation began.
pub type Micros = u64;

/// A published message on its way.
#[derive(Debug, Clone)]
pub struct Packet {
    pub conn: u64,
    pub attempt: u64,
    pub batch: Option<Nth>,
    /// What must be the stream's last message if this one is to be stored.
    pub expected: Option<Expected>,
    pub seq: i64,
    pub msg_id: String,
    pub head: String,
    pub poison: bool,
    /// When the last Resume before this send read the stream.
    pub resumed_at: Micros,
    pub sent_at: Micros,
    /// Sent for a session that was over.
    pub stale: bool,
}

/// The message before one that is sent in sequence.
#[derive(Debug, Clone)]
pub struct Expected {
    pub seq: u64,
    /// On one replica, while that one is unanswered.
    pub msg_id: Option<String>,
}

/// Place in a batch.
#[derive(Debug, Clone, Copy)]
pub struct Nth {
    pub batch: u64,
    pub nth: u64,
    pub commit: bool,
}

#[derive(Debug, Clone)]
pub enum Reply {
    Ack {
        attempt: u64,
        seq: u64,
        duplicate: bool,
    },
    InProgress {
        attempt: u64,
    },
    Refused {
        attempt: u64,
        permanent: bool,
    },
    /// Another sequence is the last one.
    WrongLast {
        attempt: u64,
    },
    BatchAck {
        batch: u64,
        seq: u64,
        count: u64,
        duplicate: bool,
    },
    /// A prefix of `count` is stored (or proposed), the next was refused.
    BatchRefused {
        batch: u64,
        seq: u64,
        count: u64,
        permanent: bool,
    },
    BatchGap {
        batch: u64,
    },
}

#[derive(Debug, Clone)]
pub struct Stored {
    pub seq: i64,
    pub msg_id: String,
    pub head: String,
    pub at: Micros,
    pub resumed_at: Micros,
    pub sent_at: Micros,
    pub stale: bool,
}

impl Stored {
    pub fn headers(&self) -> Headers<'_> {
        Headers::of(self.head.as_bytes())
    }
}

#[derive(Debug, Clone, Copy)]
struct BatchState {
    next: u64,
    failed: bool,
}

#[derive(Debug)]
pub struct Broker {
    /// Which stream of this name it is.
    pub incarnation: u32,
    pub replicated: bool,
    /// With one replica: the dedupe window is looked at before the expected sequence.
    pub dedupes_first: bool,
    pub window: Micros,
    /// Stream sequence n is at n - 1.
    pub log: Vec<Stored>,
    /// What was stored since the checks last looked.
    pub news: Vec<Stored>,
    pub up: bool,
    pub full: bool,
    pub quorum: bool,
    dedupe: HashMap<String, (u64, Micros)>,
    proposals: VecDeque<Packet>,
    batches: HashMap<u64, BatchState>,
}

impl Broker {
    pub fn new(replicated: bool, dedupes_first: bool, window: Micros) -> Broker {
        Broker {
            incarnation: 1,
            replicated,
            dedupes_first,
            window,
            log: Vec::new(),
            news: Vec::new(),
            up: true,
            full: false,
            quorum: true,
            dedupe: HashMap::new(),
            proposals: VecDeque::new(),
            batches: HashMap::new(),
        }
    }

    pub fn created(&self) -> String {
        format!("2026-01-{:02}T00:00:00Z", self.incarnation)
    }

    pub fn last_seq(&self) -> u64 {
        self.log.len() as u64
    }

    pub fn get(&self, seq: u64) -> Option<&Stored> {
        self.log.get(usize::try_from(seq.checked_sub(1)?).ok()?)
    }

    /// Somebody deleted the stream and made it again.
    pub fn replace(&mut self) {
        *self = Broker {
            incarnation: self.incarnation + 1,
            news: std::mem::take(&mut self.news),
            up: self.up,
            ..Broker::new(self.replicated, self.dedupes_first, self.window)
        };
    }

    /// A message arrives at the leader.
    pub fn receive(&mut self, now: Micros, packet: Packet) -> Option<Reply> {
        if !self.up {
            return None;
        }
        let (attempt, Some(place)) = (packet.attempt, packet.batch) else {
            return self.receive_one(now, packet);
        };
        let Nth { batch, nth, commit } = place;
        if nth == 1 {
            self.batches.insert(batch, BatchState { next: 1, failed: false });
        }
        let state = self.batches.get_mut(&batch)?;
        if state.failed {
            return None;
        }
        if state.next != nth {
            state.failed = true;
            return Some(Reply::BatchGap { batch });
        }
        state.next += 1;
        if self.full || packet.poison {
            state.failed = true;
            let (seq, permanent) = (self.last_seq(), packet.poison);
            return Some(Reply::BatchRefused { batch, seq, count: nth - 1, permanent });
        }
        if commit {
            state.failed = true;
        }
        if nth == 1 && commit {
            return match self.receive_one(now, packet)? {
                Reply::Ack { seq, duplicate, .. } => {
                    Some(Reply::BatchAck { batch, seq, count: 1, duplicate })
                }
                other => Some(other),
            };
        }
        if self.duplicate(now, &packet.msg_id).is_some() {
            let seq = self.last_seq();
            let proposed = self.proposals.len() as u64;
            // Counted without another look: what it is a duplicate of may be undecided.
            return commit.then_some(Reply::BatchAck {
                batch,
                seq: seq + proposed,
                count: nth,
                duplicate: false,
            });
        }
        if self.replicated {
            self.proposals.push_back(packet);
            return None;
        }
        debug_assert!(attempt > 0);
        let seq = self.store(now, packet);
        commit.then_some(Reply::BatchAck { batch, seq, count: nth, duplicate: false })
    }

    fn receive_one(&mut self, now: Micros, packet: Packet) -> Option<Reply> {
        let attempt = packet.attempt;
        let last = self.last_seq() + self.proposals.len() as u64;
        let last_id = self.log.last().map(|stored| &stored.msg_id);
        let wrong_last = packet.expected.as_ref().is_some_and(|expected| {
            let wrong_id = expected.msg_id.as_ref().is_some_and(|id| Some(id) != last_id);
            expected.seq != last || wrong_id
        });
        if wrong_last && !self.replicated && !self.dedupes_first {
            return Some(Reply::WrongLast { attempt });
        }
        match self.duplicate(now, &packet.msg_id) {
            Some(0) => return Some(Reply::InProgress { attempt }),
            Some(seq) => return Some(Reply::Ack { attempt, seq, duplicate: true }),
            None => {}
        }
        if wrong_last {
            return Some(Reply::WrongLast { attempt });
        }
        if self.full || packet.poison {
            return Some(Reply::Refused { attempt, permanent: packet.poison });
        }
        if self.replicated {
            self.proposals.push_back(packet);
            return None;
        }
        let seq = self.store(now, packet);
        Some(Reply::Ack { attempt, seq, duplicate: false })
    }

    /// Sequence of the message with this id inside the window; 0 for one that is undecided.
    fn duplicate(&self, now: Micros, msg_id: &str) -> Option<u64> {
        if self.proposals.iter().any(|packet| packet.msg_id == msg_id) {
            return Some(0);
        }
        let (seq, at) = self.dedupe.get(msg_id)?;
        (now - at < self.window).then_some(*seq)
    }

    fn store(&mut self, now: Micros, packet: Packet) -> u64 {
        let stored = Stored {
            seq: packet.seq,
            msg_id: packet.msg_id.clone(),
            head: packet.head,
            at: now,
            resumed_at: packet.resumed_at,
            sent_at: packet.sent_at,
            stale: packet.stale,
        };
        self.log.push(stored.clone());
        self.news.push(stored);
        let seq = self.last_seq();
        self.dedupe.insert(packet.msg_id, (seq, now));
        seq
    }

    pub fn has_proposals(&self) -> bool {
        !self.proposals.is_empty()
    }

    /// The followers have them.
    pub fn decide(&mut self, now: Micros) -> Vec<(u64, Reply)> {
        let mut replies = Vec::new();
        while self.quorum
            && let Some(packet) = self.proposals.pop_front()
        {
            let (conn, attempt, batch) = (packet.conn, packet.attempt, packet.batch);
            let seq = self.store(now, packet);
            match batch {
                None => replies.push((conn, Reply::Ack { attempt, seq, duplicate: false })),
                Some(Nth { batch, nth, commit: true }) => {
                    let ack = Reply::BatchAck { batch, seq, count: nth, duplicate: false };
                    replies.push((conn, ack));
                }
                Some(_) => {}
            }
        }
        replies
    }

    /// Another server leads. Of what the old one proposed, some first part may have reached a
    /// majority; the rest is gone, and nobody is told. How many are gone?
    pub fn change_leader(&mut self, now: Micros, dice: &mut Dice) -> usize {
        let known = self.proposals.len() as u64;
        let kept = if self.quorum { dice.between(0, known) } else { 0 };
        for _ in 0..kept {
            if let Some(packet) = self.proposals.pop_front() {
                self.store(now, packet);
            }
        }
        let lost = self.proposals.len();
        self.proposals.clear();
        self.batches.clear();
        self.quorum = true;
        lost
    }

    /// kill -9 and restart: what was stored is stored, batches are forgotten.
    pub fn restart(&mut self) {
        self.up = true;
        self.batches.clear();
        self.proposals.clear();
        self.quorum = true;
    }
}
