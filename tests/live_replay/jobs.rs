//! Jobs: what they take, what they refuse, two of them.

use outboxd::sandbox::verdict::Event;

use crate::place::{Place, number};
use crate::support::SETTLE;
use crate::support::look::{publish, until};

/// The numbers of a run in the stream, as they came.
async fn run_of(place: &Place, run: &str) -> Vec<i64> {
    let messages = place.messages().await;
    let events = messages.into_iter().filter_map(|seen| seen.event);
    events.filter(|Event { run: of, .. }| of == run).map(|event| event.n).collect()
}

async fn three_runs() -> Place {
    let place = Place::start().await;
    for n in 1..=20 {
        for run in ["a", "b", "c"] {
            let kind = if n % 2 == 0 { "order.paid" } else { "order.created" };
            publish(&place.client, run, kind, n).await;
        }
    }
    place.recorded().await;
    place.purge().await;
    place
}

#[tokio::test]
async fn filters_take_what_they_say() {
    let place = three_runs().await;
    let (code, plan, words) = place.replay(&["--run", "a", "--dry-run"]).await;
    assert_eq!((code, &plan["state"]), (0, &"planned".into()), "{words}");
    assert_eq!((number(&plan, "planned"), number(&plan, "left")), (20, 20));
    let rows = "SELECT count(*) FROM outbox.replay";
    assert_eq!(place.client.query_one(rows, &[]).await.unwrap().get::<_, i64>(0), 0);
    assert_eq!(place.count().await, 0);

    place.done(&["--run", "a"]).await;
    assert_eq!(run_of(&place, "a").await, (1..=20).collect::<Vec<_>>());
    assert_eq!(place.count().await, 20);

    place.done(&["--run", "b", "--kind", "order.p*"]).await;
    assert_eq!(run_of(&place, "b").await, (2..=20).step_by(2).collect::<Vec<_>>());

    let sql = "SELECT id::text, seq::text FROM outbox.event WHERE run_id = 'c' ORDER BY event.seq";
    let rows = place.client.query(sql, &[]).await.unwrap();
    let (id, seq): (String, String) = (rows[6].get(0), rows[2].get(1));
    let report = place.done(&["--event", &id, "--event", &seq]).await;
    assert_eq!(report["selection"]["events"], serde_json::json!([id, seq]));
    assert_eq!(run_of(&place, "c").await, [3, 7]);
}

#[tokio::test]
async fn two_jobs_are_two_copies_and_one_job_is_never_two() {
    let place = three_runs().await;
    let slow = place.begin(&["--run", "a", "--job", "one", "--rate", "5"]);
    place.reach(2).await;
    let words = place.refused(&["--job", "one"]).await;
    assert!(words.contains("another session works on job one"), "{words}");
    place.done(&["--run", "a", "--job", "two"]).await;
    let output = slow.wait_with_output().await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("one finished: 20 of 20 events"));
    let messages = place.messages().await;
    for job in ["one", "two"] {
        let of_job =
            messages.iter().filter(|seen| seen.msg_id.ends_with(&format!(":replay:{job}")));
        let numbers: Vec<i64> = of_job.map(|seen| seen.event.as_ref().unwrap().n).collect();
        assert_eq!(numbers, (1..=20).collect::<Vec<_>>(), "{job}");
    }
    let words = place.refused(&["--job", "one", "--run", "b"]).await;
    assert!(words.contains("asks for something else"), "{words}");
}

#[tokio::test]
async fn what_it_can_not_bring_back_it_refuses_with_the_next_step() {
    let place = three_runs().await;
    for (arguments, words) in [
        (
            &["--run", "a", "--destination", "nowhere"][..],
            "name one of these with --destination: events",
        ),
        (&[], "nothing is asked for"),
        (&["--job", "unheard-of"], "there is no job unheard-of"),
        (&["--run", "z"], "nothing that was published to events fits this selection"),
        (&["--since-lsn", "FFFF/0"], "nothing that was published to events fits this selection"),
        (&["--until-time", "2000-01-01"], "nothing that was published to events fits"),
        (&["--event", "999999"], "event 999999 has no row (any more)"),
    ] {
        let said = place.refused(arguments).await;
        assert!(said.contains(words), "{arguments:?}: {said}");
    }
    place.client.batch_execute("DELETE FROM outbox.event WHERE seq <= 15").await.unwrap();
    let said = place.refused(&["--since-lsn", "0/0"]).await;
    assert!(said.contains("15 events in this range have no row any more; 45 are left"), "{said}");
    assert!(said.contains("--retained-only"), "{said}");
    assert_eq!(place.count().await, 0);
    let report = place.done(&["--since-lsn", "0/0", "--retained-only"]).await;
    assert_eq!(number(&report, "stored"), 45);
    assert_eq!(place.count().await, 45);
}

/// Rows go after the job was counted, before their turn: counted, and the rest comes.
#[tokio::test]
async fn rows_that_are_pruned_meanwhile_are_counted() {
    let place = Place::start().await;
    place.write(3_000).await;
    place.purge().await;
    let child = place.begin(&["--since-lsn", "0/0", "--rate", "200", "--json", "--job", "long"]);
    place.reach(50).await;
    let sql = "DELETE FROM outbox.event \
               WHERE seq IN (SELECT seq FROM outbox.event ORDER BY seq DESC LIMIT 400)";
    place.client.execute(sql, &[]).await.unwrap();
    outboxd::sandbox::signal(child.id().unwrap(), outboxd::sandbox::Signal::Interrupt).unwrap();
    child.wait_with_output().await.unwrap();
    let (code, report, words) = place.replay(&["--job", "long", "--rate", "unlimited"]).await;
    assert_eq!((code, &report["state"]), (1, &"finished".into()), "{words}");
    assert_eq!((number(&report, "gone"), number(&report, "left")), (400, 0), "{report:#}");
    assert_eq!(number(&report, "stored"), place.count().await);
    place.has_exactly(&place.since(0).await).await;
}

/// An hour later retention has merged the receipts: their positions are coarser, so a replay brings some
/// events too many, and none too few.
#[tokio::test]
async fn merged_receipts_are_taken_whole() {
    let place = Place::start().await;
    place.write(300).await;
    let rows = place.world.committed().await.unwrap().len();
    let since = place.position().await.to_string();
    place.write(150).await;
    // The newest receipt stays as it is.
    place.write(150).await;
    let sql = "UPDATE outbox.receipt SET recorded_at = '2026-01-01 12:02:00Z'";
    place.client.batch_execute(sql).await.unwrap();
    // The relay's own upkeep may be about it; then the command leaves it to that.
    until("merged", SETTLE, || async {
        place.world.relay.run(&["prune"]).await.unwrap();
        let sql =
            "SELECT count(*) FROM outbox.receipt WHERE outcome = 'published' AND NOT isempty(seqs)";
        let left: i64 = place.client.query_one(sql, &[]).await.unwrap().get(0);
        (left <= 2).then_some(()).ok_or_else(|| format!("{left} receipts"))
    })
    .await;
    place.purge().await;
    let report = place.done(&["--since-lsn", &since, "--rate", "unlimited"]).await;
    let (all, lost) = (place.since(0).await, place.since(rows).await);
    assert!(number(&report, "stored") > lost.len() as u64, "{report:#}");
    let verdict = place.judge(&all).await;
    assert_eq!((verdict.copies.count, verdict.order_violations.count), (0, 0), "{verdict}");
    let verdict = place.judge(&lost).await;
    assert_eq!(verdict.missing.count, 0, "{verdict}");
}
