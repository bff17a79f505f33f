//! Partitions are made ahead and dropped whole, and no INSERT waits for it or fails without them.

use std::time::{Duration, Instant};

use outboxd::store::retention::StepKind;
use outboxd::store::settle;
use outboxd::upkeep::retention::Pass;
use tokio_util::sync::CancellationToken;

use crate::place::{DAY, Place, objects};
use crate::support::look::until;

const COUNT: &str = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox.event'::regclass";
const DEFAULT_ROWS: &str = "SELECT count(*) FROM ONLY outbox.event_default";

#[tokio::test]
async fn partitions_are_made_ahead_once() {
    let place = Place::new().await;
    // Today's rows are in the default partition already: that day stays there.
    place.rows(1, 0).await;
    let (_, dry) = place.try_pass(None, true).await.unwrap();
    assert_eq!((dry.partitions_made, place.number(COUNT).await), (14, 1));
    let (steps, summary) = place.pass(None).await;
    assert_eq!((summary.partitions_made, place.number(COUNT).await), (14, 15));
    let skipped: Vec<_> = steps.iter().filter(|step| step.step == StepKind::Skipped).collect();
    assert!(skipped.len() == 1 && skipped[0].note.as_ref().unwrap().contains("rows of that day"));
    assert_eq!(place.pass(None).await.1.partitions_made, 0);

    // Every row finds its place, the indexes are the parent's, and numbers are drawn.
    let sql = "INSERT INTO outbox.event (run_id, kind, created_at) \
               SELECT 'r', 'k', now() + n * interval '1 day' FROM generate_series(-30, 30) AS n";
    place.sql(sql).await;
    assert_eq!(place.number("SELECT count(*) FROM outbox.event").await, 62);
    assert_eq!(place.number(DEFAULT_ROWS).await, 62 - 14);
    let indexes =
        "SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox.event_seq_idx'::regclass";
    assert_eq!(place.number(indexes).await, 15);
    assert_eq!(place.number("SELECT count(DISTINCT seq) FROM outbox.event").await, 62);
}

#[tokio::test]
async fn an_insert_needs_no_partition_at_all() {
    let place = Place::new().await;
    place.sql("DROP TABLE outbox.event_default").await;
    place.sql("CREATE TABLE outbox.event_rest PARTITION OF outbox.event DEFAULT").await;
    for days in [0, 30, 300] {
        place
            .sql(&format!(
                "INSERT INTO outbox.event (run_id, kind, created_at) \
                 VALUES ('r', 'k', now() + interval '{days} days')"
            ))
            .await;
    }
    place.sql("SELECT outbox.publish('r', 'k', '{}')").await;
    assert_eq!(place.seqs().await, [1, 2, 3, 4]);
}

#[tokio::test]
async fn what_others_made_is_left_alone_and_named() {
    let place = Place::new().await;
    place.known().await;
    let sql = "CREATE TABLE outbox.mine PARTITION OF outbox.event \
                   FOR VALUES FROM ('2000-01-01') TO ('2000-02-01'); \
               CREATE TABLE outbox.event_p20010101 PARTITION OF outbox.event \
                   FOR VALUES FROM ('2001-01-01') TO ('2001-02-01'); \
               DO $$ BEGIN EXECUTE format('CREATE TABLE outbox.%I ()', \
                   to_char((now() + interval '2 days') AT TIME ZONE 'UTC', '\"event_p\"YYYYMMDD')); \
                   EXECUTE format('CREATE TABLE outbox.theirs PARTITION OF outbox.event FOR VALUES \
                       FROM (%L) TO (%L)', now() + interval '5 days', now() + interval '6 days'); \
               END $$";
    place.sql(sql).await;
    let (steps, summary) = place.pass(Some(DAY)).await;
    assert_eq!((summary.partitions_made, summary.partitions_dropped), (15 - 3, 0), "{steps:?}");
    let notes: Vec<_> = steps
        .iter()
        .filter(|step| step.step == StepKind::Skipped)
        .map(|step| step.note.clone().unwrap())
        .collect();
    assert_eq!(notes.len(), 3, "{notes:?}");
    assert_eq!(notes.iter().filter(|note| note.contains("overlap")).count(), 2, "{notes:?}");
    assert_eq!(notes.iter().filter(|note| note.contains("no partition")).count(), 1, "{notes:?}");
}

#[tokio::test]
async fn a_large_default_partition_is_not_read_under_a_lock() {
    let place = Place::new().await;
    place.known().await;
    let sql = "INSERT INTO outbox.event (run_id, kind, payload, created_at) \
               SELECT 'r', 'k', to_json(repeat('x', 1000)), now() - interval '2 days' \
               FROM generate_series(1, 40000)";
    place.sql(sql).await;
    let (steps, summary) = place.pass(None).await;
    assert_eq!(summary.partitions_made, 0);
    assert!(steps[0].note.as_ref().unwrap().contains("INSERTs would wait"), "{steps:?}");
    let pass = Pass { config: &place.config, keep: None, hold_inserts: true, dry_run: false };
    let summary = pass.run(&place.client, &mut |_| ()).await.unwrap();
    assert_eq!(summary.partitions_made, 15);
}

#[tokio::test]
async fn settled_partitions_are_dropped_whole() {
    let place = Place::new().await;
    place.known().await;
    let (old, older) = (place.old_partition(10).await, place.old_partition(12).await);
    let young = place.old_partition(1).await;
    place.rows(3, 12).await;
    place.rows(3, 10).await;
    place.rows(3, 1).await;
    place.receipt("events", "published", "{[1,6),[7,10)}", 9.0).await;
    place.receipt("audit", "published", "{[2,3)}", 9.0).await;
    let (steps, _) = place.try_pass(Some(7 * DAY), true).await.unwrap();
    assert_eq!(objects(&steps, StepKind::Dropped), [older.as_str()]);
    let (steps, summary) = place.pass(Some(7 * DAY)).await;
    assert_eq!(objects(&steps, StepKind::Dropped), [older]);
    assert_eq!(objects(&steps, StepKind::Kept), [old.as_str()]);
    assert_eq!((summary.rows, summary.gone), (3, 2));
    assert_eq!(place.seqs().await, [4, 5, 6, 7, 8, 9]);
    let gone = "SELECT seqs::text FROM outbox.receipt WHERE outcome = 'gone'";
    assert_eq!(place.text(gone).await, "{[1,2),[3,4)}");

    // The last one is decided, long enough ago. The young partition is not old enough, whatever.
    place.receipt("events", "dead", "{[6,7)}", 9.0).await;
    let (steps, summary) = place.pass(Some(7 * DAY)).await;
    assert_eq!(objects(&steps, StepKind::Dropped), [old]);
    assert_eq!((summary.rows, summary.gone), (3, 3));
    assert_eq!(place.seqs().await, [7, 8, 9]);
    assert!(!objects(&steps, StepKind::Dropped).contains(&young.as_str()));
}

/// Longest time that an INSERT may wait, beyond what it waits where nothing goes on: a busy machine
/// keeps any statement waiting.
const WAIT_MAX: Duration = Duration::from_millis(200);

/// Application transactions are open in the oldest and the newest partition. Both kinds of DDL go
/// around them, and other writers don't notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_insert_waits_while_partitions_come_and_go() {
    let place = Place::new().await;
    place.known().await;
    let oldest = place.old_partition(10).await;
    place.rows(3, 10).await;
    place.receipt("events", "published", "{[1,4)}", 9.0).await;
    // In the oldest, in the default (the newest there is), and by a reader of all of them.
    let open = place.postgres.connect().await.unwrap();
    let begin = "BEGIN; \
                 INSERT INTO outbox.event (run_id, kind, created_at) \
                     VALUES ('r', 'k', now() - interval '10 days'), \
                            ('r', 'k', now()), ('r', 'k', now() + interval '30 days'); \
                 SELECT count(*) FROM outbox.event";
    open.batch_execute(begin).await.unwrap();
    place.client.batch_execute("CREATE TABLE public.elsewhere (n int)").await.unwrap();

    let stop = CancellationToken::new();
    let writer = async |sql: &'static str| {
        let client = place.postgres.connect().await.unwrap();
        let (mut longest, mut count) = (Duration::ZERO, 0);
        while !stop.is_cancelled() {
            let start = Instant::now();
            client.batch_execute(sql).await.unwrap();
            longest = longest.max(start.elapsed());
            count += 1;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        (longest, count)
    };
    let today = "SELECT outbox.publish('w', 'k', '{}')";
    let far = "INSERT INTO outbox.event (run_id, kind, created_at) \
               VALUES ('w', 'k', now() + interval '300 days')";
    let elsewhere = "INSERT INTO public.elsewhere VALUES (1)";
    let upkeep = async {
        let client = place.postgres.connect().await.unwrap();
        settle(&client).await.unwrap();
        let keep = Some(7 * DAY);
        let pass = Pass { config: &place.config, keep, hold_inserts: false, dry_run: false };
        let mut steps = Vec::new();
        let summary = pass.run(&client, &mut |step| steps.push(step.clone())).await.unwrap();
        stop.cancel();
        (steps, summary)
    };
    let held_for = Duration::from_secs(if crate::support::drill() { 60 } else { 6 });
    let application = async {
        tokio::time::sleep(held_for).await;
        // Nothing could be dropped or attached meanwhile.
        assert_eq!(place.number(COUNT).await, 2);
        // The row in the oldest partition is rolled back: what was settled stays so.
        open.batch_execute("ROLLBACK").await.unwrap();
    };
    let (first, second, usual, (steps, summary), ()) =
        tokio::join!(writer(today), writer(far), writer(elsewhere), upkeep, application);
    println!("INSERTs today {first:?}, far ahead {second:?}, elsewhere {usual:?}; {summary:?}");
    assert_eq!(summary.partitions_made, 14, "{steps:?}");
    assert_eq!(objects(&steps, StepKind::Dropped), [oldest]);
    for (longest, count) in [first, second] {
        assert!(count > 100, "{count} INSERTs");
        assert!(longest < WAIT_MAX + usual.0, "an INSERT waited for {longest:?}");
    }
}

/// A row that comes into an old partition after it was looked through keeps it.
#[tokio::test]
async fn a_late_row_keeps_its_partition() {
    let place = Place::new().await;
    place.known().await;
    let old = place.old_partition(10).await;
    place.rows(3, 10).await;
    place.receipt("events", "published", "{[1,4)}", 9.0).await;
    let late = place.postgres.connect().await.unwrap();
    let insert = "BEGIN; INSERT INTO outbox.event (run_id, kind, created_at) \
                  VALUES ('r', 'k', now() - interval '10 days')";
    late.batch_execute(insert).await.unwrap();
    // The step finds everything settled, and waits for the table.
    let step = async {
        let client = place.postgres.connect().await.unwrap();
        client.batch_execute("SET lock_timeout = 0").await.unwrap();
        let sql = "SELECT step || coalesce(': ' || note, '') FROM outbox.maintain('7 days', \
                   steps => '{drop}')";
        client.query_one(sql, &[]).await.unwrap().get::<_, String>(0)
    };
    place.sql("ALTER FUNCTION outbox.maintain SET lock_timeout = '20s'").await;
    let commit = async {
        let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted \
                     AND relation = 'outbox.event'::regclass";
        until("the step waits", Duration::from_secs(10), || async {
            (place.number(waits).await == 1).then_some(()).ok_or_else(|| "no".to_owned())
        })
        .await;
        late.batch_execute("COMMIT").await.unwrap();
    };
    let (said, ()) = tokio::join!(step, commit);
    assert_eq!(said, "busy: a row came in meanwhile");
    assert_eq!(place.number(&format!("SELECT count(*) FROM ONLY {old}")).await, 4);
    let gone = "SELECT count(*) FROM outbox.receipt WHERE outcome = 'gone'";
    assert_eq!(place.number(gone).await, 0, "nothing went");
}
