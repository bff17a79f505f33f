//! Durations and sizes as people write them. Pure.

use std::time::Duration;

use super::fault::quote;

const MICROS: &[(&str, u64)] = &[
    ("us", 1),
    ("ms", 1_000),
    ("s", 1_000_000),
    ("m", 60_000_000),
    ("h", 3_600_000_000),
    ("d", 86_400_000_000),
];

const BYTES: &[(&str, u64)] = &[
    ("B", 1),
    ("", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// Reads a duration as the configuration has it: `100ms`, `1.5s`, `2m`. The words of an error follow
/// the name of what was read.
///
/// # Errors
/// When the text is no number with a unit of time.
pub fn duration(text: &str) -> Result<Duration, String> {
    scaled(text, MICROS, "no unit of time (us, ms, s, m, h, d)").map(Duration::from_micros)
}

/// `32MiB`, `1GB`, `65536`.
pub(super) fn size(text: &str) -> Result<u64, String> {
    scaled(text, BYTES, "no unit of size (B, KiB, MiB, GiB, TiB, kB, MB, GB, TB)")
}

fn scaled(text: &str, units: &[(&str, u64)], without: &str) -> Result<u64, String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.trim();
    let Some((_, factor)) = units.iter().find(|(name, _)| *name == unit) else {
        return Err(match unit {
            "" => format!("{} has {without}", quote(text)),
            unit => format!("{} has the unit {}: {without}", quote(text), quote(unit)),
        });
    };
    exact(number, *factor).ok_or_else(|| format!("{} has no number that fits", quote(text)))
}

/// `number × factor` without floating point; digits behind the last whole unit are refused.
fn exact(number: &str, factor: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let power = 10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let product = digits.checked_mul(u128::from(factor))?;
    let whole = !whole.is_empty() && !fraction.is_empty() && product.is_multiple_of(power);
    whole.then(|| u64::try_from(product / power).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        for (text, micros) in [
            ("100ms", 100_000),
            ("10s", 10_000_000),
            ("1.5s", 1_500_000),
            ("2m", 120_000_000),
            ("1 h", 3_600_000_000),
            ("7d", 604_800_000_000),
            ("0s", 0),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_micros(micros)), "{text}");
        }
        for text in ["", "10", "s", "-1s", "1.s", ".5s", "1..5s", "1.0000001s", "1x", "9999999999d"]
        {
            assert!(duration(text).is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn sizes() {
        for (text, bytes) in
            [("32MiB", 32 << 20), ("65536", 65_536), ("1.5 GiB", 3 << 29), ("1kB", 1_000)]
        {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["MiB", "32mib", "32M", "0x10", "1.3B", "99999999999TiB"] {
            assert!(size(text).is_err(), "{text:?} was accepted");
        }
    }
}
