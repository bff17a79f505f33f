//! Figures of several rounds, and percentiles of many times.

/// The smallest, the middle and the largest of some figures.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    pub min: f64,
    pub median: f64,
    pub max: f64,
}

impl Spread {
    pub fn of(figures: impl IntoIterator<Item = f64>) -> Spread {
        let mut figures: Vec<f64> = figures.into_iter().collect();
        figures.sort_by(f64::total_cmp);
        let at = |place: usize| figures.get(place).copied().unwrap_or(f64::NAN);
        let middle = figures.len() / 2;
        let median = match figures.len() % 2 {
            0 => f64::midpoint(at(middle.wrapping_sub(1)), at(middle)),
            _ => at(middle),
        };
        Spread { min: at(0), median, max: at(figures.len().wrapping_sub(1)) }
    }

    /// `98.2 (95.1 … 101.3)`, of one figure `98.2`.
    pub fn show(self, digits: usize) -> String {
        let Spread { min, median, max } = self;
        if min.total_cmp(&max).is_eq() {
            return format!("{median:.digits$}");
        }
        format!("{median:.digits$} ({min:.digits$} … {max:.digits$})")
    }
}

/// Percentiles of one round.
#[derive(Debug, Clone, Copy)]
pub struct Percentiles {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

impl Percentiles {
    pub const NAMES: [&str; 5] = ["p50", "p90", "p99", "p99.9", "max"];

    pub fn of(ascending: &[f64]) -> Percentiles {
        Percentiles {
            p50: percentile(ascending, 0.5),
            p90: percentile(ascending, 0.9),
            p99: percentile(ascending, 0.99),
            p999: percentile(ascending, 0.999),
            max: percentile(ascending, 1.0),
        }
    }

    pub fn all(&self) -> [f64; 5] {
        [self.p50, self.p90, self.p99, self.p999, self.max]
    }
}

/// Nearest rank.
pub fn percentile(ascending: &[f64], share: f64) -> f64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a length is a place in it"
    )]
    let rank = (ascending.len() as f64 * share).ceil() as usize;
    ascending.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}
