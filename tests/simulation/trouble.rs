//! What goes wrong by itself: servers, streams, connections, sessions and the process.

use crate::broker::Micros;
use crate::dice::Fault;
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
        if self.session.is_none() {
            return;
        }
        if self.swarm.strikes(&mut self.dice, Fault::ProcessCrash) {
            self.end_session(true);
        } else if self.swarm.strikes(&mut self.dice, Fault::SessionLost) {
            self.end_session(false);
        } else if self.swarm.strikes(&mut self.dice, Fault::Stop) {
            self.stop();
            self.after(STOP_BOUND, Happening::StopBound(self.epoch));
        }
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
        let down = self.swarm.strikes(&mut self.dice, Fault::BrokerDown);
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
                let wait = self.dice.between(MS, 10 * SECOND);
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
        self.postgres.close(&mut self.dice);
        for at in 0..self.sites.len() {
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
