//! What goes wrong by itself: servers, streams, connections, sessions and the process.

use outboxd::relay::Input;

use crate::broker::Micros;
use crate::dice::Fault;
use crate::ledger::Receipt;
use crate::world::{Happening, MS, SECOND, World};

/// A stopped relay is quiet after this long, whatever else happens.
const STOP_BOUND: Micros = 120 * SECOND;

impl World {
    pub fn trouble(&mut self) {
        let wait = self.dice.between(10 * MS, self.calm_between);
        self.after(wait, Happening::Trouble);
        for at in 0..self.sites.len() {
            self.trouble_at(at);
        }
        self.trouble_at_home();
        if self.session.is_none() {
            return;
        }
        if self.swarm.strikes(&mut self.dice, Fault::ProcessCrash) {
            self.end_session(true);
        } else if self.swarm.strikes(&mut self.dice, Fault::SessionLost) {
            self.end_session(false);
        } else if self.postgres.slot && self.swarm.strikes(&mut self.dice, Fault::SlotLost) {
            self.postgres.slot = false;
            self.end_session(false);
        } else if self.swarm.strikes(&mut self.dice, Fault::WalPressure) {
            self.feed(Input::WalPressure(true));
            let wait = self.dice.between(SECOND, 20 * SECOND);
            self.after(wait, Happening::Relief(self.epoch));
        } else if self.swarm.strikes(&mut self.dice, Fault::Stop) {
            self.stop();
            self.after(STOP_BOUND, Happening::StopBound(self.epoch));
        }
    }

    /// In the database.
    fn trouble_at_home(&mut self) {
        if self.swarm.strikes(&mut self.dice, Fault::LeftOut) {
            self.postgres.leaves_out = true;
            let wait = self.dice.between(MS, 3 * SECOND);
            self.after(wait, Happening::Published);
        }
        if self.swarm.strikes(&mut self.dice, Fault::Deleted) {
            let end = self.postgres.last_seq();
            self.delete(end, 3);
        }
        if self.swarm.strikes(&mut self.dice, Fault::Pruned) {
            for seq in self.delete(self.postgres.last_seq(), 3) {
                for destination in 0..self.sites.len() {
                    if !self.postgres.ledger.is_final(destination, seq) {
                        self.postgres.ledger.append(Receipt {
                            destination,
                            seqs: [(seq, seq)].into_iter().collect(),
                            last_lsn: Some(self.postgres.insert_lsn()),
                            ..Receipt::default()
                        });
                    }
                }
            }
        }
    }

    /// Some of the newest rows go away.
    fn delete(&mut self, end: i64, most: u64) -> Vec<i64> {
        let mut seqs = Vec::new();
        for _ in 0..self.dice.between(1, most) {
            let back = i64::try_from(self.dice.between(0, 40)).unwrap();
            if self.postgres.sees(self.now, end - back) {
                self.postgres.deleted.insert(end - back);
                seqs.push(end - back);
            }
        }
        seqs
    }

    fn trouble_at(&mut self, at: usize) {
        let site = &mut self.sites[at];
        let connected = site.publisher.conn.is_some();
        if !site.broker.up {
            return;
        }
        if self.swarm.strikes(&mut self.dice, Fault::StreamFull) {
            self.sites[at].broker.full = true;
            let wait = self.dice.between(MS, 20 * SECOND);
            self.after(wait, Happening::Space(at));
        }
        if self.sites[at].broker.replicated {
            if self.sites[at].broker.quorum && self.swarm.strikes(&mut self.dice, Fault::QuorumLoss)
            {
                self.sites[at].broker.quorum = false;
                let wait = self.dice.between(MS, 20 * SECOND);
                self.after(wait, Happening::Quorum(at));
            } else if self.swarm.strikes(&mut self.dice, Fault::LeaderChange) {
                let lost = self.sites[at].broker.change_leader(self.now, &mut self.dice);
                self.count_lost(lost);
            }
        }
        let replaced = self.swarm.strikes(&mut self.dice, Fault::StreamReplaced);
        let away = self.swarm.strikes(&mut self.dice, Fault::LongAway);
        let down = away || self.swarm.strikes(&mut self.dice, Fault::BrokerDown);
        let cut = connected && self.swarm.strikes(&mut self.dice, Fault::ConnectionCut);
        if replaced {
            // Looked at before it goes: what is stored is looked at only here.
            self.look();
            self.sites[at].broker.replace();
        }
        if replaced || down || cut {
            self.cut(at, self.sites[at].publisher.conn);
            let effects = self.sites[at].publisher.disconnect();
            self.effects(at, effects);
            if down {
                self.sites[at].broker.up = false;
                let longest = if away { 300 * SECOND } else { 10 * SECOND };
                let wait = self.dice.between(MS, longest);
                self.after(wait, Happening::Start(at));
            } else {
                let wait = self.dice.between(0, 300 * MS);
                self.after(wait, Happening::Connect(self.epoch, at));
            }
        }
    }

    fn count_lost(&mut self, lost: usize) {
        if lost > 0 {
            self.swarm.count("proposals lost");
        }
    }

    /// The same leader goes on, or its followers elect another without its proposals.
    pub fn quorum_returns(&mut self, at: usize) {
        if self.dice.coin() {
            let lost = self.sites[at].broker.change_leader(self.now, &mut self.dice);
            self.count_lost(lost);
        } else {
            self.sites[at].broker.quorum = true;
            self.after(MS, Happening::Decide(at));
        }
    }

    /// The connection is gone; what was on its way may still arrive, in order, up to some point.
    pub fn cut(&mut self, at: usize, conn: Option<u64>) {
        let late = self.dice.pick(&[0, 20 * MS, 300 * MS, SECOND, 8 * SECOND]);
        let until = self.now + self.dice.between(0, late);
        let site = &mut self.sites[at];
        if let Some(conn) = conn {
            site.cut.insert(conn, until);
        }
    }

    /// No more faults.
    pub fn calm(&mut self) {
        self.swarm.on = false;
        self.postgres.leaves_out = false;
        self.feed(Input::WalPressure(false));
        for at in 0..self.sites.len() {
            self.sites[at].answers = 0;
            let broker = &mut self.sites[at].broker;
            broker.full = false;
            if !broker.up {
                self.after(0, Happening::Start(at));
            } else if !broker.quorum {
                self.after(0, Happening::Quorum(at));
            }
        }
    }
}
