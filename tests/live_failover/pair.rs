//! Two relays of one name, killed in turn while the standby is promoted.

use std::time::Duration;

use outboxd::sandbox::{Relay, Stop, free_port};

use crate::place::{Place, servers};
use crate::support::told::{status, until};
use crate::support::{drill, workload};

const TAKEN_OVER: Duration = Duration::from_secs(60);

/// A second relay of the world's name, with the same configuration but its admin address.
fn another(place: &Place) -> Relay {
    let text = std::fs::read_to_string(place.world.relay.configuration()).unwrap();
    let port = free_port().unwrap();
    let own = place.world.relay.admin_url().replace("http://", "");
    let text = text.replace(&own, &format!("127.0.0.1:{port}"));
    Relay::prepare(&place.options.program, &text, port, false).unwrap()
}

async fn publishes(relay: &Relay) -> bool {
    status(relay, "/destinations/0/events/acked").await.as_u64().unwrap_or(0) > 0
}

/// Waits until one of them has published, and makes it the world's.
async fn find_active(place: &mut Place, second: &mut Relay) {
    let mut swap = false;
    until("one of the two publishes", TAKEN_OVER, async || {
        swap = publishes(second).await;
        swap || publishes(&place.world.relay).await
    })
    .await;
    if swap {
        std::mem::swap(&mut place.world.relay, second);
    }
}

fn kill(relay: &mut Relay) {
    relay.kill9().unwrap();
    relay.start().unwrap();
}

/// The active one is killed each time, and the other one takes over; half way the primary goes: one is
/// killed while there is none, the other when there is one again.
#[tokio::test]
async fn a_pair_is_killed_while_the_standby_is_promoted() {
    let test = "a_pair_is_killed_while_the_standby_is_promoted";
    let Some(servers) = servers(test, "18") else { return };
    let mut place = Place::prepare(servers).await;
    place.world.start_relay().await.unwrap();
    place.guard().await;
    let mut second = another(&place);
    second.start().unwrap();
    let mut load = place.load(workload());
    let kills = if drill() { 20 } else { 6 };
    for round in (1..=kills).step_by(2) {
        let committed = load.committed();
        load.reach(committed + 100).await;
        find_active(&mut place, &mut second).await;
        kill(&mut place.world.relay);
        if round <= kills / 2 && round + 2 > kills / 2 {
            place.world.postgres.stop(Stop::Immediate).await.unwrap();
            kill(&mut second);
            place.other.promote().await.unwrap();
            std::mem::swap(&mut place.world.postgres, &mut place.other);
        } else {
            std::mem::swap(&mut place.world.relay, &mut second);
            find_active(&mut place, &mut second).await;
            kill(&mut place.world.relay);
        }
    }
    find_active(&mut place, &mut second).await;
    place.judge(load).await;
}
