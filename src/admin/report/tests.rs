//! The verdict that needs more than the endpoints can be made to show.

use super::*;
use crate::config::Config;
use crate::event::UnixMicros;

#[test]
fn full_memory_names_who_holds_it() {
    let text = "[relay]\nname = \"orders\"\n[source]\nurl = \"postgres://u@h/d\"\n\
                [destination.events]\nservers = [\"nats://h\"]\nstream = \"EVENTS\"\n\
                [destination.extra]\nservers = [\"nats://h\"]\nstream = \"EXTRA\"\n\
                required = false\n";
    let status = Status::new(&Config::parse("test", text).unwrap());
    status.phase(Phase::Streaming);
    let full = |bytes| {
        status.undecided(2, bytes, Some(UnixMicros(0)));
        is_full(&status.snapshot(), status.memory_bytes)
    };
    let budget = u64::try_from(status.memory_bytes).unwrap();
    assert!(!full(budget - 1) && full(budget));
    let mut destinations = Report::of(&status).destinations;
    for (one, waiting) in destinations.iter_mut().zip([1, 7]) {
        one.waiting = waiting;
    }
    let cause = held_up(true, false, &destinations).unwrap();
    assert!(cause.contains("destination extra, which has 7 events"), "{cause}");
    assert_eq!(held_up(false, false, &destinations), None);
    for one in &mut destinations {
        one.up = true;
    }
    assert_eq!(held_up(true, false, &destinations), None);
    assert!(held_up(true, true, &destinations).is_some());
}

#[test]
fn lag_knows_of_what_waits_outside_of_memory() {
    let text = "[relay]\nname = \"orders\"\n[source]\nurl = \"postgres://u@h/d\"\n\
                [destination.events]\nservers = [\"nats://h\"]\nstream = \"EVENTS\"\n";
    let status = Status::new(&Config::parse("test", text).unwrap());
    status.phase(Phase::Streaming);
    let mut destinations = Report::of(&status).destinations;
    let of = |destinations: &[DestinationReport]| {
        lag(&status.snapshot(), status.memory_bytes, destinations).unwrap()
    };
    destinations[0].waiting_seconds = Some(90.0);
    assert_eq!(of(&destinations), Duration::ZERO, "memory knows better");
    destinations[0].slow_runs = 1;
    assert_eq!(of(&destinations), Duration::from_secs(90));
}
