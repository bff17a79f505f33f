//! Randomness from a seed, and the swarm of faults: in each run every kind is off, or on with a
//! weight of its own, so that rare combinations get runs of their own.

use std::collections::BTreeMap;

/// splitmix64.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed ^ 0x5DEE_CE66_D1CE_4E5B)
    }

    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// `low..=high`
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.roll() % (high - low + 1)
    }

    pub fn per_mille(&mut self, chance: u64) -> bool {
        self.roll() % 1000 < chance
    }

    pub fn coin(&mut self) -> bool {
        self.per_mille(500)
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::try_from(self.between(0, from.len() as u64 - 1)).unwrap()]
    }
}

/// What can go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    LostBeforeStore,
    LostAck,
    LateStore,
    LateAnswer,
    LeaderChange,
    QuorumLoss,
    StreamFull,
    BrokerDown,
    ConnectionCut,
    StreamReplaced,
    PipelineChange,
    ResumeFails,
    SessionLost,
    TwoAtOnce,
    ProcessCrash,
    CrashAfterWrite,
    LedgerHangs,
    BurialFails,
    LostConfirm,
    Stop,
    LongAway,
    LongTransaction,
    LateVisible,
    LeftOut,
    Deleted,
    Pruned,
    WalPressure,
    SlotLost,
    NoSlot,
    ReadFails,
}

impl Fault {
    pub const ALL: [Fault; 30] = [
        Fault::LostBeforeStore,
        Fault::LostAck,
        Fault::LateStore,
        Fault::LateAnswer,
        Fault::LeaderChange,
        Fault::QuorumLoss,
        Fault::StreamFull,
        Fault::BrokerDown,
        Fault::ConnectionCut,
        Fault::StreamReplaced,
        Fault::PipelineChange,
        Fault::ResumeFails,
        Fault::SessionLost,
        Fault::TwoAtOnce,
        Fault::ProcessCrash,
        Fault::CrashAfterWrite,
        Fault::LedgerHangs,
        Fault::BurialFails,
        Fault::LostConfirm,
        Fault::Stop,
        Fault::LongAway,
        Fault::LongTransaction,
        Fault::LateVisible,
        Fault::LeftOut,
        Fault::Deleted,
        Fault::Pruned,
        Fault::WalPressure,
        Fault::SlotLost,
        Fault::NoSlot,
        Fault::ReadFails,
    ];

    /// Per mille of the occasions at full weight. Occasions are messages, answers, statements, or
    /// a tick of the clock, whatever the fault is about.
    fn full(self) -> u64 {
        match self {
            Fault::LostBeforeStore | Fault::LateStore => 60,
            Fault::LostAck => 200,
            Fault::LeaderChange | Fault::QuorumLoss => 300,
            Fault::StreamFull | Fault::BrokerDown | Fault::ConnectionCut => 100,
            Fault::PipelineChange | Fault::LateAnswer => 500,
            Fault::StreamReplaced | Fault::Stop => 20,
            Fault::SessionLost | Fault::ProcessCrash => 100,
            Fault::CrashAfterWrite | Fault::TwoAtOnce => 1000,
            Fault::ResumeFails | Fault::BurialFails | Fault::LostConfirm => 500,
            Fault::LedgerHangs | Fault::WalPressure | Fault::LeftOut => 100,
            Fault::LongAway | Fault::SlotLost => 30,
            Fault::LongTransaction | Fault::LateVisible => 300,
            Fault::Deleted | Fault::Pruned => 500,
            Fault::NoSlot => 700,
            Fault::ReadFails => 200,
        }
    }
}

/// Which faults this run has, and what happened so far.
#[derive(Debug)]
pub struct Swarm {
    chance: BTreeMap<Fault, u64>,
    pub happened: BTreeMap<String, u64>,
    pub on: bool,
}

impl Swarm {
    pub fn new(dice: &mut Dice) -> Swarm {
        let density = dice.pick(&[100, 300, 500, 700]);
        let mut chance = BTreeMap::new();
        for fault in Fault::ALL {
            if dice.per_mille(density) {
                let weight = dice.pick(&[10u64, 30, 100, 100]);
                chance.insert(fault, (fault.full() * weight / 100).max(1));
            }
        }
        Swarm { chance, happened: BTreeMap::new(), on: true }
    }

    /// Does it happen on this occasion?
    pub fn strikes(&mut self, dice: &mut Dice, fault: Fault) -> bool {
        let chance = self.chance.get(&fault).copied().unwrap_or(0);
        let strikes = self.on && chance > 0 && dice.per_mille(chance);
        if strikes {
            self.count(&format!("{fault:?}"));
        }
        strikes
    }

    pub fn count(&mut self, what: &str) {
        *self.happened.entry(what.to_owned()).or_default() += 1;
    }
}
