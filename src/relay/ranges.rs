//! A set of sequence numbers as ranges. Contiguous numbers cost one entry however many they are.

use std::collections::BTreeMap;

/// Disjoint, non-adjacent, inclusive ranges of `i64`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RangeSet {
    /// start → end
    ranges: BTreeMap<i64, i64>,
}

impl RangeSet {
    /// Adds one number; adding it again changes nothing.
    pub fn insert(&mut self, number: i64) {
        self.insert_range(number, number);
    }

    /// Adds `start..=end`, merged with whatever it touches. An empty range adds nothing.
    pub fn insert_range(&mut self, start: i64, end: i64) {
        if end < start {
            return;
        }
        let (mut low, mut high) = (start, end);
        if let Some((&before, &before_end)) = self.ranges.range(..=start).next_back()
            && before_end >= start.saturating_sub(1)
        {
            low = before;
            high = high.max(before_end);
            if before_end >= end {
                return;
            }
        }
        while let Some((&next, &next_end)) = self.ranges.range(low.saturating_add(1)..).next()
            && next <= high.saturating_add(1)
        {
            high = high.max(next_end);
            self.ranges.remove(&next);
        }
        self.ranges.insert(low, high);
    }

    /// Takes `start..=end` out, as far as it is in.
    pub fn remove_range(&mut self, start: i64, end: i64) {
        if end < start {
            return;
        }
        if let Some((&first, &last)) = self.ranges.range(..start).next_back()
            && last >= start
        {
            // `start` is above `first`, so there is a number below it.
            self.ranges.insert(first, start - 1);
            if last > end {
                self.ranges.insert(end + 1, last);
            }
        }
        while let Some((&first, &last)) = self.ranges.range(start..=end).next() {
            self.ranges.remove(&first);
            if last > end {
                self.ranges.insert(end + 1, last);
            }
        }
    }

    /// The numbers that are in both.
    #[must_use]
    pub fn intersection(&self, other: &RangeSet) -> RangeSet {
        let mut both = RangeSet::default();
        for (start, end) in self.iter() {
            let before = other.ranges.range(..start).next_back();
            for (&first, &last) in before.into_iter().chain(other.ranges.range(start..=end)) {
                both.insert_range(first.max(start), last.min(end));
            }
        }
        both
    }

    /// Is the number in the set?
    pub fn contains(&self, number: i64) -> bool {
        self.ranges.range(..=number).next_back().is_some_and(|(_, &end)| end >= number)
    }

    /// Nothing in it?
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// How many ranges (its memory grows with these, not with the numbers).
    pub fn range_count(&self) -> usize {
        self.ranges.len()
    }

    /// The ranges in ascending order, inclusive at both ends.
    pub fn iter(&self) -> impl Iterator<Item = (i64, i64)> + '_ {
        self.ranges.iter().map(|(&start, &end)| (start, end))
    }
}

impl Extend<(i64, i64)> for RangeSet {
    fn extend<T: IntoIterator<Item = (i64, i64)>>(&mut self, ranges: T) {
        for (start, end) in ranges {
            self.insert_range(start, end);
        }
    }
}

impl FromIterator<(i64, i64)> for RangeSet {
    fn from_iter<T: IntoIterator<Item = (i64, i64)>>(ranges: T) -> Self {
        let mut set = RangeSet::default();
        set.extend(ranges);
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn agrees_with_a_plain_set(
            steps in prop::collection::vec((any::<bool>(), -40i64..40, 0i64..6), 0..60),
            others in prop::collection::vec((-40i64..40, 0i64..6), 0..20),
        ) {
            let mut ranges = RangeSet::default();
            let mut plain = BTreeSet::new();
            for (adds, start, length) in steps {
                if adds {
                    ranges.insert_range(start, start + length - 1);
                    plain.extend(start..start + length);
                } else {
                    ranges.remove_range(start, start + length - 1);
                    plain.retain(|number| !(start..start + length).contains(number));
                }
            }
            let other: RangeSet = others.iter().map(|(first, n)| (*first, first + n - 1)).collect();
            let both = ranges.intersection(&other);
            for number in -50..60 {
                let expected = plain.contains(&number) && other.contains(number);
                prop_assert_eq!(both.contains(number), expected, "{}", number);
            }
            for number in -50..60 {
                prop_assert_eq!(ranges.contains(number), plain.contains(&number), "{}", number);
            }
            let listed: Vec<_> = ranges.iter().collect();
            for pair in listed.windows(2) {
                prop_assert!(pair[0].1 + 1 < pair[1].0, "touching ranges: {:?}", listed);
            }
            let numbers: i64 = listed.iter().map(|(start, end)| end - start + 1).sum();
            prop_assert_eq!(numbers, i64::try_from(plain.len()).unwrap());
        }
    }

    #[test]
    fn the_ends_of_the_number_line_are_numbers_too() {
        let mut set = RangeSet::default();
        set.insert(i64::MAX);
        set.insert(i64::MIN);
        set.insert_range(i64::MIN, i64::MIN + 1);
        assert!(set.contains(i64::MAX) && set.contains(i64::MIN) && !set.contains(0));
        assert_eq!(set.range_count(), 2);
        set.remove_range(i64::MAX, i64::MAX);
        set.remove_range(i64::MIN, i64::MIN);
        assert_eq!(set.iter().collect::<Vec<_>>(), [(i64::MIN + 1, i64::MIN + 1)]);
    }
}
