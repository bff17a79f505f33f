//! Numbers and times as text, appended to what is there: what every message has, without the
//! general machinery of formatting. Pure.

use crate::event::UnixMicros;
use crate::lsn::Lsn;

/// Room for the digits of every number in base 10.
pub type Room = [u8; 20];

/// The decimal digits of a number, in ASCII.
pub fn decimal(room: &mut Room, number: u64) -> &[u8] {
    digits::<10>(room, number)
}

/// Appends the decimal digits of a number.
pub fn push_decimal(text: &mut String, number: u64) {
    push_digits::<10>(text, number);
}

/// The same with a sign in front when it is below zero.
pub(super) fn push_signed(text: &mut String, number: i64) {
    if number < 0 {
        text.push('-');
    }
    push_decimal(text, number.unsigned_abs());
}

/// As PostgreSQL's `pg_lsn` writes it.
pub(super) fn push_lsn(text: &mut String, lsn: Lsn) {
    push_digits::<16>(text, lsn.0 >> 32);
    text.push('/');
    push_digits::<16>(text, lsn.0 & 0xFFFF_FFFF);
}

fn push_digits<const BASE: u64>(text: &mut String, number: u64) {
    for digit in digits::<BASE>(&mut Room::default(), number) {
        text.push(char::from(*digit));
    }
}

fn digits<const BASE: u64>(room: &mut Room, number: u64) -> &[u8] {
    let (mut rest, mut written) = (number, 0);
    for digit in room.iter_mut().rev() {
        let value = (rest % BASE).to_le_bytes()[0];
        *digit = if value < 10 { b'0' + value } else { b'A' - 10 + value };
        (rest, written) = (rest / BASE, written + 1);
        if rest == 0 {
            break;
        }
    }
    room.get(room.len() - written..).unwrap_or_default()
}

/// Appends a time as RFC 3339 writes it, in UTC and with the digits behind the second that are
/// needed. `false`: it is beyond the years -9999 to 9999 and has no such text.
pub(super) fn push_time(text: &mut String, at: UnixMicros) -> bool {
    const DAY_SECONDS: i64 = 86_400;
    let (seconds, micros) = (at.0.div_euclid(1_000_000), at.0.rem_euclid(1_000_000));
    let (days, second) = (seconds.div_euclid(DAY_SECONDS), seconds.rem_euclid(DAY_SECONDS));
    let (year, month, day) = civil(days);
    if !(0..9999).contains(&year) {
        // Once in ten thousand years: the library writes it, and knows where its times end.
        let timestamp = jiff::Timestamp::from_microsecond(at.0);
        return timestamp.is_ok_and(|timestamp| {
            text.push_str(&timestamp.to_string());
            true
        });
    }
    let mut whole = *b"0000-00-00T00:00:00.000000";
    for (at, number) in [
        (0, year / 100),
        (2, year % 100),
        (5, month),
        (8, day),
        (11, second / 3_600),
        (14, second / 60 % 60),
        (17, second % 60),
        (20, micros / 10_000),
        (22, micros / 100 % 100),
        (24, micros % 100),
    ] {
        let number = number.to_le_bytes()[0];
        if let Some([tens, ones]) = whole.get_mut(at..at + 2) {
            (*tens, *ones) = (b'0' + number / 10, b'0' + number % 10);
        }
    }
    let mut needed = whole.as_slice();
    if micros == 0 {
        needed = needed.get(.."0000-00-00T00:00:00".len()).unwrap_or_default();
    } else {
        while let [rest @ .., b'0'] = needed {
            needed = rest;
        }
    }
    // At once: text that grows by single characters looks for room at each.
    text.push_str(str::from_utf8(needed).unwrap_or_default());
    text.push('Z');
    true
}

/// Year, month and day of the proleptic Gregorian calendar, so many days after 1970-01-01. Counts
/// years from March, so that the leap day is the last of its year, and in eras of 400 of them,
/// which all have as many days.
fn civil(days: i64) -> (i64, i64, i64) {
    const ERA_DAYS: i64 = 146_097;
    // 1970-01-01 is this many days behind the first of March of the year 0.
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(ERA_DAYS), days.rem_euclid(ERA_DAYS));
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // From March on the months' lengths repeat every five: 153 days.
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(push: impl FnOnce(&mut String)) -> String {
        let mut text = String::from("x");
        push(&mut text);
        text.split_off(1)
    }

    proptest! {
        #[test]
        fn numbers_are_written_as_the_standard_library_writes_them(number: i64, high: u32, low: u32) {
            prop_assert_eq!(written(|text| push_signed(text, number)), number.to_string());
            let lsn = Lsn(u64::from(high) << 32 | u64::from(low));
            prop_assert_eq!(written(|text| push_lsn(text, lsn)), lsn.to_string());
        }

        /// All times that PostgreSQL has, and beyond.
        #[test]
        fn times_are_written_as_the_library_writes_them(
            micros in prop_oneof![
                any::<i64>(),
                -63_000_000_000_000_000_i64..260_000_000_000_000_000,
                (-63_000_000_000_i64..260_000_000_000).prop_map(|seconds| seconds * 1_000_000),
                (0_i64..4_000_000_000_000).prop_map(|millis| millis * 1_000),
            ]
        ) {
            let expected = jiff::Timestamp::from_microsecond(micros).map(|at| at.to_string());
            let mut text = String::new();
            prop_assert_eq!(push_time(&mut text, UnixMicros(micros)), expected.is_ok());
            prop_assert_eq!(text, expected.unwrap_or_default());
        }
    }

    #[test]
    fn the_ends_of_numbers_and_years() {
        for number in [0, 9, 10, 99, 100, i64::MAX, i64::MIN, -1] {
            assert_eq!(written(|text| push_signed(text, number)), number.to_string());
        }
        assert_eq!(written(|text| push_decimal(text, u64::MAX)), u64::MAX.to_string());
        for day in
            ["0000-01-01", "2000-02-29", "1900-03-01", "2100-02-28", "9998-12-31", "9999-12-29"]
        {
            let at: jiff::Timestamp = format!("{day}T23:59:59.9Z").parse().unwrap();
            let micros = UnixMicros(at.as_microsecond());
            assert_eq!(written(|text| assert!(push_time(text, micros))), at.to_string());
        }
    }
}
