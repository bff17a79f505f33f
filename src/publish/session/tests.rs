//! A session against a scripted server that reads when it is told to.

use super::super::intruders::Intruders;
use super::super::nats::peer::{Heard, PATIENCE, Peer, listen};
use super::*;
use crate::config::DestinationConfig;
use crate::message::{Envelope, Message};
use crate::relay::outcome::{DestinationId, Pipeline, Retention};
use bytes::Bytes;
use std::collections::BTreeSet;
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_util::sync::CancellationToken;

/// More of these than the buffers of both sides of a socket hold.
const LARGE_BYTES: usize = 4 << 20;
const LARGE: u64 = 8;

struct Ends {
    orders: UnboundedSender<Order>,
    reports: UnboundedReceiver<(DestinationId, Report)>,
}

fn task(config: &DestinationConfig) -> (Task, Ends) {
    let ((reports_in, reports), (orders_in, orders)) = (unbounded_channel(), unbounded_channel());
    let task = Task {
        id: DestinationId(0),
        config: config.clone(),
        envelope: Envelope::new("relay", 1, config),
        reports: reports_in,
        orders,
        stop: CancellationToken::new(),
        intruders: Intruders::default(),
    };
    (task, Ends { orders: orders_in, reports })
}

fn per_run() -> StreamFacts {
    StreamFacts {
        stream: "EVENTS".to_owned(),
        created: "2026-01-02T03:04:05Z".to_owned(),
        replicas: 1,
        retention: Retention::Limits,
        last_seq: 0,
        first_seq: 1,
        max_message_bytes: 64 << 20,
        max_payload_bytes: 64 << 20,
        duplicate_window: Duration::from_secs(120),
        server_version: "2.15.1".to_owned(),
        pipeline: Pipeline::PerRun,
        why: String::new(),
    }
}

/// A small message, and then so much that the connection is full while the server reads nothing.
fn too_much() -> Order {
    let shipment = |n: u64, payload: Bytes| {
        let mut message = Message::bare("events.a", &n.to_string());
        message.payload = payload;
        Shipment { attempt: Attempt(n), message }
    };
    let large = Bytes::from(vec![b'x'; LARGE_BYTES]);
    let mut shipments = vec![shipment(1, Bytes::from_static(b"x"))];
    shipments.extend((2..=1 + LARGE).map(|n| shipment(n, large.clone())));
    Order::Ship(shipments)
}

async fn connect(listener: &TcpListener, config: &DestinationConfig) -> (Link, Peer) {
    let (link, peer) = tokio::join!(Link::connect(config), Peer::accept(listener));
    (link.map_err(|failure| failure.to_string()).unwrap(), peer)
}

/// Reads up to the next message; its subscription's number, and where its answer goes.
async fn next_message(peer: &mut Peer, sid: &mut String) -> String {
    loop {
        match peer.hear().await {
            Heard::Message { reply, .. } => return reply,
            Heard::Line(line) => {
                if let Some(rest) = line.strip_prefix("SUB ") {
                    rest.rsplit(' ').next().unwrap().clone_into(sid);
                }
            }
            Heard::End => panic!("the connection ended"),
        }
    }
}

async fn ack(peer: &mut Peer, sid: &str, reply: &str, seq: u64) {
    let body = format!(r#"{{"stream":"EVENTS","seq":{seq}}}"#);
    peer.say(format!("MSG {reply} {sid} {}\r\n{body}\r\n", body.len())).await;
}

async fn next_stored(reports: &mut UnboundedReceiver<(DestinationId, Report)>) -> Vec<u64> {
    let report = timeout(PATIENCE, reports.recv()).await.unwrap().unwrap().1;
    let Report::Answers(answers) = report else { panic!("{report:?}") };
    let stored = answers.into_iter().flat_map(|answer| {
        assert!(matches!(answer.outcome, Outcome::Stored { .. }), "{answer:?}");
        answer.first.0..=answer.last.0
    });
    stored.collect()
}

#[tokio::test]
async fn answers_and_the_end_of_orders_are_heard_while_the_server_reads_nothing() {
    let (listener, mut config) = listen().await;
    config.ack_timeout = PATIENCE * 2;
    for reads_on in [true, false] {
        let (link, mut peer) = connect(&listener, &config).await;
        let (mut task, mut ends) = task(&config);
        let mut session = Session::new(&mut task, &link, link.open_inbox(), per_run());
        session.halted = false;
        ends.orders.send(too_much()).unwrap();
        let script = async {
            let mut sid = String::new();
            let reply = next_message(&mut peer, &mut sid).await;
            ack(&mut peer, &sid, &reply, 1).await;
            assert_eq!(next_stored(&mut ends.reports).await, [1]);
            let mut stored = BTreeSet::new();
            if reads_on {
                for seq in 2..=1 + LARGE {
                    let reply = next_message(&mut peer, &mut sid).await;
                    ack(&mut peer, &sid, &reply, seq).await;
                }
                while !stored.contains(&(1 + LARGE)) {
                    stored.extend(next_stored(&mut ends.reports).await);
                }
                assert!(stored.into_iter().eq(2..=1 + LARGE));
            }
            drop(ends);
        };
        let (ended, ()) = tokio::join!(timeout(PATIENCE, session.run()), script);
        assert!(matches!(ended, Ok(Ended::Stopped)));
    }
}

#[tokio::test]
async fn a_server_that_reads_and_answers_nothing_is_given_up_for_that() {
    let (listener, mut config) = listen().await;
    config.ack_timeout = Duration::from_millis(100);
    let (link, _peer) = connect(&listener, &config).await;
    let (mut task, mut ends) = task(&config);
    let mut session = Session::new(&mut task, &link, link.open_inbox(), per_run());
    session.halted = false;
    ends.orders.send(too_much()).unwrap();
    let Ok(Ended::Failed(failure)) = timeout(PATIENCE, session.run()).await else {
        panic!("the session goes on");
    };
    assert_eq!(failure.kind, Kind::BrokerUnreachable);
    assert!(failure.detail.contains("takes no more bytes"), "{failure:?}");
    let mut answered = 0;
    while let Ok((_, Report::Answers(answers))) = ends.reports.try_recv() {
        answered += answers.len();
    }
    assert_eq!(answered, 1 + usize::try_from(LARGE).unwrap());
}
