-- outboxd schema, version 1, second part: what is undecided, what may go, and how it goes.
--
-- Only outbox.maintain() runs with its owner's rights, and it touches outbox.event alone: the names
-- in outbox.relay are written by the relay's role, which must not reach other tables through the
-- owner. Everything else runs with the rights of whoever calls it. `enable_seqscan = off` makes
-- every look into a table go through its index on seq, however the statistics are.

-- The numbers that wait: handed over, and not final. A number that was final before it was handed over
-- is final: it is in the stream. Each receipt since the oldest handed one is read once.
CREATE FUNCTION outbox.waiting(of_relay text, of_destination text) RETURNS int8multirange
    LANGUAGE sql STABLE
    SET search_path = pg_catalog, pg_temp
AS $waiting$
    WITH handed AS MATERIALIZED (
        SELECT min(r.id) AS first_id, range_agg(part) AS seqs
          FROM outbox.receipt r CROSS JOIN unnest(r.seqs) AS part
         WHERE r.relay = of_relay AND r.destination = of_destination AND r.outcome = 'handed')
    SELECT coalesce(handed.seqs, '{}') - coalesce(
               (SELECT range_agg(part)
                  FROM outbox.receipt r CROSS JOIN unnest(r.seqs) AS part
                 WHERE r.relay = of_relay AND r.destination = of_destination
                   AND r.id > handed.first_id AND r.outcome <> 'handed'), '{}')
      FROM handed
$waiting$;

-- The numbers that a destination has not decided: above the frontier and the holes below it, less
-- what receipts have, and what waits. The cost is that of the receipts since the last sweep and since
-- the oldest number that waits, whatever the length of table and ledger.
CREATE FUNCTION outbox.undecided(of_relay text, of_destination text) RETURNS int8multirange
    LANGUAGE sql STABLE
    SET search_path = pg_catalog, pg_temp
AS $undecided$
    SELECT int8multirange(int8range(d.frontier + 1, NULL)) + d.holes
           - coalesce(
               (SELECT range_agg(part)
                  FROM outbox.receipt r CROSS JOIN unnest(r.seqs) AS part
                 WHERE r.relay = d.relay AND r.destination = d.name AND r.id > d.receipt_id
                   AND r.outcome <> 'handed'), '{}')
           + outbox.waiting(d.relay, d.name)
      FROM outbox.destination d
     WHERE d.relay = of_relay AND d.name = of_destination
$undecided$;
COMMENT ON FUNCTION outbox.undecided IS 'Numbers that a destination has not decided.';

-- From now on what the WAL brings for a destination waits: rows were committed that no slot will bring,
-- and go first. What was handed over until then is older than these rows, and goes ahead of them.
--
-- A gap that is open stays the one it is. What was handed over in it waits behind its rows, and would
-- be between these and the rows of the new gap: it is taken back. Its numbers are undecided again, their
-- rows are found by the next look, and all that is missing is sent in the order of the numbers. The
-- receipts stay, with what they say of the stream.
CREATE FUNCTION outbox.open_gap(of_relay text, of_destination text) RETURNS void
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp
AS $open_gap$
DECLARE
    place outbox.destination;
    back  int8multirange;
BEGIN
    SELECT * INTO place FROM outbox.destination d
     WHERE d.relay = of_relay AND d.name = of_destination FOR UPDATE;
    IF place.gap_since IS NULL THEN
        UPDATE outbox.destination d
           SET gap_since = now(), updated_at = now(),
               gap_receipt = (SELECT coalesce(max(r.id), 0) FROM outbox.receipt r
                               WHERE r.relay = of_relay AND r.destination = of_destination)
         WHERE d.relay = of_relay AND d.name = of_destination;
        RETURN;
    END IF;
    SELECT range_agg(part) INTO back
      FROM outbox.receipt r CROSS JOIN unnest(r.seqs) AS part
     WHERE r.relay = of_relay AND r.destination = of_destination
       AND r.outcome = 'handed' AND r.id > place.gap_receipt;
    IF back IS NULL THEN
        RETURN;
    END IF;
    UPDATE outbox.destination d
       SET holes = d.holes + back * outbox.waiting(of_relay, of_destination)
                           * int8multirange(int8range(NULL, d.frontier, '(]')),
           updated_at = now()
     WHERE d.relay = of_relay AND d.name = of_destination;
    UPDATE outbox.receipt r
       SET outcome = 'published', seqs = '{}', events = 0, handed_seqs = NULL, handed_runs = NULL
     WHERE r.relay = of_relay AND r.destination = of_destination
       AND r.outcome = 'handed' AND r.id > place.gap_receipt;
END
$open_gap$;
COMMENT ON FUNCTION outbox.open_gap IS 'Rows were committed that no slot will bring to a destination.';

-- The stream lost what it stored behind `upto`: what receipts say of messages there does not hold. Their
-- numbers are undecided, and so are those that wait, which would be ahead of them in the run otherwise:
-- all of them are found by the next look, and sent in the order of their numbers, unless the stream
-- has them after all, which Resume finds out first. A new receipt says from where it reads: acks come
-- in any order, so messages of a receipt that is withdrawn can be as far down as the floor that held
-- before it was written. One flush writes several receipts with one floor, but only one `published`.
CREATE FUNCTION outbox.withdraw(
    of_relay text, of_destination text, of_created text, upto bigint, upto_msg_id text
) RETURNS TABLE (receipts bigint, events bigint, letters bigint)
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp
AS $withdraw$
DECLARE
    back   int8multirange;
    since  timestamptz;
    newest outbox.receipt;
    before outbox.receipt;
    oldest record;
BEGIN
    -- No compaction meanwhile: it would merge what is sound into what is withdrawn.
    PERFORM pg_advisory_xact_lock(hashtextextended('outboxd compact ' || of_relay, 0));
    -- Nor may rows go that were settled by what is withdrawn.
    PERFORM pg_advisory_xact_lock(hashtextextended('outboxd withdraw ' || of_relay, 0));
    PERFORM FROM outbox.destination d
      WHERE d.relay = of_relay AND d.name = of_destination FOR UPDATE;
    SELECT * INTO newest FROM outbox.receipt r
     WHERE r.relay = of_relay AND r.destination = of_destination
       AND r.stream_created = of_created
     ORDER BY r.id DESC LIMIT 1;
    SELECT min(r.id) AS id, min(r.floor_seq) AS floor_seq, min(r.recorded_at) AS recorded_at
      INTO oldest FROM outbox.receipt r
     WHERE r.relay = of_relay AND r.destination = of_destination
       AND r.stream_created = of_created AND r.outcome = 'published' AND r.stream_seq > upto;
    SELECT * INTO before FROM outbox.receipt r
     WHERE r.relay = of_relay AND r.destination = of_destination
       AND r.stream_created = of_created AND r.outcome = 'published'
       AND (oldest.id IS NULL OR r.id < oldest.id)
     ORDER BY r.id DESC LIMIT 1;
    -- What was recorded by then is in no receipt that is withdrawn, nor in a part of one.
    since := least(before.recorded_at, date_bin('5 minutes', oldest.recorded_at, 'epoch'));
    WITH gone AS (
        DELETE FROM outbox.receipt r
         WHERE r.relay = of_relay AND r.destination = of_destination
           AND r.stream_created = of_created AND r.outcome = 'published' AND r.stream_seq > upto
        RETURNING r.seqs, r.events)
    SELECT count(*), coalesce(sum(gone.events), 0),
           (SELECT range_agg(part) FROM gone CROSS JOIN unnest(gone.seqs) AS part)
      INTO receipts, events, back
      FROM gone;
    back := coalesce(back, '{}') + coalesce(outbox.waiting(of_relay, of_destination), '{}');
    DELETE FROM outbox.receipt r
     WHERE r.relay = of_relay AND r.destination = of_destination AND r.outcome = 'handed';
    UPDATE outbox.destination d
       SET holes = d.holes + back * int8multirange(int8range(NULL, d.frontier, '[]')),
           gap_since = coalesce(d.gap_since, now()), gap_receipt = 0, updated_at = now()
     WHERE d.relay = of_relay AND d.name = of_destination;
    -- Letters whose messages may be among those.
    UPDATE outbox.dead_letter l
       SET state = 'redriving', state_changed_at = clock_timestamp(), state_changed_by = 'relay',
           state_reason = 'the stream lost messages that it had acknowledged',
           history = l.history || jsonb_build_array(jsonb_build_object(
               'at', to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'state', 'redriving', 'by', 'relay',
               'why', 'the stream lost messages that it had acknowledged'))
     WHERE l.relay = of_relay AND l.destination = of_destination AND l.state = 'redriven'
       AND (before.id IS NULL OR l.state_changed_at >= since);
    GET DIAGNOSTICS letters = ROW_COUNT;
    INSERT INTO outbox.receipt (relay, generation, destination, outcome, seqs, events, stream,
                                stream_created, stream_seq, stream_msg_id, floor_seq)
    VALUES (of_relay, newest.generation, of_destination, 'published', '{}', 0, newest.stream,
            of_created, upto, upto_msg_id,
            least(upto, oldest.floor_seq, coalesce(before.floor_seq, 0)));
    RETURN NEXT;
END
$withdraw$;
COMMENT ON FUNCTION outbox.withdraw IS
    'Takes back what receipts say of messages that a stream lost.';

-- The numbers that are final for every active required destination of every relay of a table, and
-- have been for as long as `keep`. Where no active destination is required, each counts as required:
-- nothing may go before it went somewhere. A relay that has not said what its destinations are
-- keeps everything.
--
-- The time comes from the receipts, which say when a number became final; those within `keep` are
-- merged to one per five minutes, so that a week of them is some 2,000 rows. What the frontier calls
-- decided and no receipt has any more was final before, but not before its destination was known.
CREATE FUNCTION outbox.settled(of_table text, keep interval) RETURNS int8multirange
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pg_temp
AS $settled$
DECLARE
    place    record;
    receipts record;
    decided  int8multirange;
    result   int8multirange;
BEGIN
    IF keep IS NULL OR EXISTS (
        SELECT FROM outbox.relay r
         WHERE r.event_table = of_table
           AND NOT EXISTS (SELECT FROM outbox.destination d WHERE d.relay = r.name))
    THEN
        RETURN '{}';
    END IF;
    FOR place IN
        SELECT d.relay, d.name, d.frontier, d.holes, d.required,
               d.created_at < now() - keep AS was_known, bool_or(d.required) OVER () AS any_required
          FROM outbox.destination d JOIN outbox.relay r ON r.name = d.relay
         WHERE r.event_table = of_table AND d.active
    LOOP
        CONTINUE WHEN place.any_required AND NOT place.required;
        SELECT coalesce(range_agg(part) FILTER (WHERE r.recorded_at < now() - keep), '{}') AS old,
               coalesce(range_agg(part) FILTER (WHERE r.recorded_at >= now() - keep), '{}') AS young
          INTO receipts
          FROM outbox.receipt r CROSS JOIN unnest(r.seqs) AS part
         WHERE r.relay = place.relay AND r.destination = place.name AND r.outcome <> 'handed';
        decided := receipts.old;
        IF place.was_known THEN
            decided := decided + (int8multirange(int8range(NULL, place.frontier, '[]'))
                                  - place.holes - receipts.young);
        END IF;
        decided := decided - outbox.waiting(place.relay, place.name);
        result := coalesce(result * decided, decided);
    END LOOP;
    RETURN coalesce(result, '{}');
END
$settled$;
COMMENT ON FUNCTION outbox.settled IS
    'Numbers final for every required destination of a table for as long as `keep`.';

-- A table as the ledger writes its name, quoted; and its columns. Those of outbox.event are known:
-- outbox.maintain() must not take them from a table that others write.
CREATE FUNCTION outbox.quoted(of_table text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path = pg_catalog, pg_temp
AS $quoted$
    SELECT format('%I.%I', split_part(of_table, '.', 1), split_part(of_table, '.', 2))
$quoted$;

CREATE FUNCTION outbox.column_of(of_table text, what text, otherwise text) RETURNS text
    LANGUAGE sql STABLE
    SET search_path = pg_catalog, pg_temp
AS $column_of$
    SELECT coalesce(min(r.columns ->> what), otherwise)
      FROM outbox.relay r WHERE r.event_table = of_table AND of_table <> 'outbox.event'
$column_of$;

-- Is there a row with one of these numbers?
CREATE FUNCTION outbox.has_rows(rows_of text, seq_column text, within int8multirange)
    RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
AS $has_rows$
DECLARE
    found_one boolean;
BEGIN
    EXECUTE format(
        'SELECT EXISTS (SELECT FROM unnest($1) AS part CROSS JOIN LATERAL ('
        '    SELECT FROM %s AS t WHERE t.%2$I >= coalesce(lower(part), $2)'
        '                          AND t.%2$I <= coalesce(upper(part) - 1, $3) LIMIT 1) AS t)',
        rows_of, seq_column)
        INTO found_one
        USING within, '-9223372036854775808'::bigint, '9223372036854775807'::bigint;
    RETURN found_one;
END
$has_rows$;

-- Before rows go: a receipt `gone` for each of these numbers that has a row and is undecided at a
-- destination, so that nobody waits for it. `everywhere`: at required destinations too. Says how
-- many, each once per destination. Their commits are before this statement: hence `last_lsn`.
CREATE FUNCTION outbox.record_gone(
    of_table text, rows_of text, seq_column text, within int8multirange, everywhere boolean
) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
AS $record_gone$
DECLARE
    place record;
    open  int8multirange;
    lost  int8multirange;
    total bigint := 0;
BEGIN
    FOR place IN
        SELECT d.relay, d.name, r.generation, d.required, bool_or(d.required) OVER () AS any_required
          FROM outbox.destination d JOIN outbox.relay r ON r.name = d.relay
         WHERE r.event_table = of_table AND d.active
         ORDER BY 1, 2
    LOOP
        CONTINUE WHEN NOT everywhere AND (place.required OR NOT place.any_required);
        open := within * outbox.undecided(place.relay, place.name);
        CONTINUE WHEN isempty(open);
        EXECUTE format(
            'SELECT range_agg(int8range(t.seq, t.seq, ''[]''))'
            '  FROM unnest($1) AS part CROSS JOIN LATERAL ('
            '    SELECT t.%2$I::int8 AS seq FROM %1$s AS t'
            '     WHERE t.%2$I >= coalesce(lower(part), $2)'
            '       AND t.%2$I <= coalesce(upper(part) - 1, $3)) AS t',
            rows_of, seq_column)
            INTO lost
            USING open, '-9223372036854775808'::bigint, '9223372036854775807'::bigint;
        CONTINUE WHEN lost IS NULL;
        INSERT INTO outbox.receipt (relay, destination, generation, outcome, seqs, events, last_lsn,
                                    stream, stream_created, stream_seq, stream_msg_id, floor_seq)
        SELECT place.relay, place.name, place.generation, 'gone', range_agg(p.part),
               least(sum(upper(p.part) - lower(p.part)), 2147483647)::int,
               pg_current_wal_insert_lsn(), '', '', 0, '', 0
          FROM (SELECT part, (row_number() OVER (ORDER BY part) - 1) / 10000 AS chunk
                  FROM unnest(lost) AS part) AS p
         GROUP BY p.chunk;
        total := total + (SELECT sum(upper(part) - lower(part)) FROM unnest(lost) AS part);
    END LOOP;
    RETURN total;
END
$record_gone$;

-- Deletes settled rows one by one, at most `at_most` of them, in the order of their numbers from
-- `after_seq` on: for a table that is not partitioned by us, and for our default partition. One call
-- is one transaction; call again with `last_seq` until it is NULL. Rows that somebody has locked are
-- left for the next time where this role may lock rows at all (UPDATE). While receipts are withdrawn
-- nothing is settled for certain: it fails with lock_not_available then.
CREATE FUNCTION outbox.prune_rows(
    of_table text, keep interval, at_most int DEFAULT 1000, after_seq bigint DEFAULT NULL,
    of_partition regclass DEFAULT NULL, dry_run boolean DEFAULT false
) RETURNS TABLE (row_count bigint, gone bigint, last_seq bigint)
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp
    SET lock_timeout = '100ms'
    SET enable_seqscan = off
AS $prune_rows$
DECLARE
    rows_of    text := coalesce('ONLY ' || of_partition::text, outbox.quoted(of_table));
    seq_column text := outbox.column_of(of_table, 'seq', 'seq');
    relation   regclass := coalesce(of_partition, outbox.quoted(of_table)::regclass);
    skip       text := '';
    seqs       bigint[];
BEGIN
    IF NOT dry_run AND has_table_privilege(relation, 'UPDATE') THEN
        skip := 'FOR UPDATE SKIP LOCKED';
    END IF;
    PERFORM pg_advisory_xact_lock_shared(hashtextextended('outboxd withdraw ' || r.name, 0))
       FROM outbox.relay r WHERE r.event_table = of_table AND NOT dry_run;
    EXECUTE format(
        'SELECT array(SELECT t.seq FROM unnest($1) AS part CROSS JOIN LATERAL ('
        '    SELECT t.%2$I::int8 AS seq FROM %1$s AS t'
        '     WHERE t.%2$I >= coalesce(lower(part), $2)'
        '       AND t.%2$I <= coalesce(upper(part) - 1, $3)'
        '       AND ($4 IS NULL OR t.%2$I > $4)'
        '     ORDER BY t.%2$I LIMIT $5 %3$s) AS t LIMIT $5)',
        rows_of, seq_column, skip)
        INTO seqs
        USING outbox.settled(of_table, keep), '-9223372036854775808'::bigint,
              '9223372036854775807'::bigint, after_seq, at_most;
    row_count := cardinality(seqs);
    gone := 0;
    last_seq := seqs[cardinality(seqs)];
    IF row_count > 0 AND NOT dry_run THEN
        gone := outbox.record_gone(
            of_table, rows_of, seq_column,
            (SELECT range_agg(int8range(seq, seq, '[]')) FROM unnest(seqs) AS seq), false);
        EXECUTE format('DELETE FROM %s AS t WHERE t.%I = ANY ($1)', rows_of, seq_column) USING seqs;
        GET DIAGNOSTICS row_count = ROW_COUNT;
    END IF;
    RETURN NEXT;
END
$prune_rows$;
COMMENT ON FUNCTION outbox.prune_rows IS
    'Deletes a bounded number of settled rows; outboxd calls it again until nothing is left.';

-- One bounded step of keeping outbox.event: makes the next partition, or drops a settled one, or
-- deletes settled rows of the default partition. Returns what it did, and what stands in the way;
-- call it again until it reports none of `made`, `dropped`, `deleted`.
--
-- A partition is made standalone and then attached: CREATE TABLE with PARTITION OF would hold up
-- every INSERT behind one open transaction. Attaching locks the default partition alone, and reads
-- it: so it is not tried while that is larger than `scan_bytes`. Dropping locks the whole table for a moment, and
-- looks again under that lock. No lock is waited for longer than 100 ms, since INSERTs queue behind
-- whoever waits: `busy` is for the caller to try again.
CREATE FUNCTION outbox.maintain(
    keep       interval,
    ahead      interval DEFAULT '14 days',
    steps      text[]   DEFAULT '{make,drop,delete}',
    at_most    int      DEFAULT 1000,
    after_seq  bigint   DEFAULT NULL,
    scan_bytes bigint   DEFAULT 33554432,
    dry_run    boolean  DEFAULT false
) RETURNS TABLE (
    step text, object text, row_count bigint, gone bigint, last_seq bigint, note text
)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    SET lock_timeout = '100ms'
    SET timezone = 'UTC'
    SET datestyle = 'ISO'
AS $maintain$
DECLARE
    root      CONSTANT regclass := 'outbox.event'::regclass;
    others    regclass;
    part      record;
    settled   int8multirange;
    span      int8multirange;
    found_one boolean;
BEGIN
    -- Two at once would only wait for each other.
    IF NOT dry_run AND NOT pg_try_advisory_xact_lock(hashtextextended('outboxd maintain', 0)) THEN
        step := 'busy';
        object := 'outbox.event';
        row_count := 0;
        gone := 0;
        note := 'another session maintains it';
        RETURN NEXT;
        RETURN;
    END IF;
    SELECT nullif(partdefid, 0)::regclass INTO others
      FROM pg_partitioned_table WHERE partrelid = root;

    IF 'make' = ANY (steps) THEN
        FOR part IN
            SELECT 'event_p' || to_char(day, 'YYYYMMDD') AS name, day::timestamptz AS starts,
                   (day + interval '1 day')::timestamptz AS ends, c.oid AS oid,
                   c.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = root) AS is_ours
              FROM generate_series(date_trunc('day', now()::timestamp), (now() + ahead)::timestamp,
                                   interval '1 day') AS day
                   LEFT JOIN pg_class c ON c.relname = 'event_p' || to_char(day, 'YYYYMMDD')
                        AND c.relnamespace = 'outbox'::regnamespace
             ORDER BY day
        LOOP
            CONTINUE WHEN part.is_ours;
            step := 'skipped';
            object := 'outbox.' || part.name;
            row_count := 0;
            gone := 0;
            IF part.oid IS NOT NULL THEN
                note := 'there is a table of this name that is no partition';
                RETURN NEXT;
                CONTINUE;
            END IF;
            IF others IS NOT NULL THEN
                IF pg_relation_size(others) > scan_bytes THEN
                    note := format('the default partition has %s bytes, and INSERTs would wait while '
                                   'it is read', pg_relation_size(others));
                    RETURN NEXT;
                    EXIT;
                END IF;
                EXECUTE format('SELECT EXISTS (SELECT FROM ONLY %s WHERE created_at >= $1 '
                               'AND created_at < $2)', others)
                    INTO found_one USING part.starts, part.ends;
                IF found_one THEN
                    note := 'the default partition has rows of that day';
                    RETURN NEXT;
                    CONTINUE;
                END IF;
            END IF;
            IF dry_run THEN
                step := 'made';
                note := NULL;
                RETURN NEXT;
                CONTINUE;
            END IF;
            BEGIN
                EXECUTE format('CREATE TABLE outbox.%I (LIKE outbox.event INCLUDING ALL)', part.name);
                EXECUTE format('ALTER TABLE outbox.event ATTACH PARTITION outbox.%I '
                               'FOR VALUES FROM (%L) TO (%L)', part.name, part.starts, part.ends);
                step := 'made';
                note := NULL;
                RETURN NEXT;
                RETURN;
            EXCEPTION
                WHEN lock_not_available THEN
                    step := 'busy';
                    note := SQLERRM;
                    RETURN NEXT;
                    EXIT;
                -- Another partition has that day, or a row came in.
                WHEN invalid_object_definition OR check_violation THEN
                    note := SQLERRM;
                    RETURN NEXT;
            END;
        END LOOP;
    END IF;

    IF 'drop' = ANY (steps) AND keep IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock_shared(hashtextextended('outboxd withdraw ' || r.name, 0))
           FROM outbox.relay r WHERE r.event_table = 'outbox.event' AND NOT dry_run;
        settled := outbox.settled('outbox.event', keep);
        FOR part IN
            SELECT c.oid::regclass AS name, c.oid, c.reltuples, d.day + interval '1 day' AS ends
              FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                   CROSS JOIN LATERAL (
                       SELECT to_timestamp(substr(c.relname, 8), 'YYYYMMDD')::timestamp AS day
                        WHERE c.relname ~ '^event_p[0-9]{8}$') AS d
             WHERE i.inhparent = root
               -- Made by us, and not by hand with other bounds.
               AND pg_get_expr(c.relpartbound, c.oid) =
                   format('FOR VALUES FROM (''%s+00'') TO (''%s+00'')', d.day,
                          d.day + interval '1 day')
             ORDER BY c.relname
        LOOP
            EXIT WHEN part.ends::timestamptz > now() - keep;
            object := part.name::text;
            row_count := 0;
            gone := 0;
            span := outbox.span(part.name);
            IF outbox.has_rows('ONLY ' || object, 'seq', span - settled) THEN
                step := 'kept';
                note := 'rows are undecided at a required destination, or have not been decided for '
                        'long enough';
                RETURN NEXT;
                CONTINUE;
            END IF;
            -- Counted where that is quick; else as the last ANALYZE had it.
            IF pg_relation_size(part.name) < 134217728 OR part.reltuples < 0 THEN
                EXECUTE format('SELECT count(*) FROM ONLY %s', object) INTO row_count;
            ELSE
                row_count := part.reltuples;
            END IF;
            step := 'dropped';
            note := NULL;
            IF dry_run THEN
                RETURN NEXT;
                CONTINUE;
            END IF;
            BEGIN
                gone := outbox.record_gone('outbox.event', 'ONLY ' || object, 'seq', span, false);
                LOCK TABLE ONLY outbox.event IN ACCESS EXCLUSIVE MODE;
                -- A transaction older than the partition's end may have written to it since.
                span := outbox.span(part.name);
                IF outbox.has_rows('ONLY ' || object, 'seq', span - settled) THEN
                    RAISE lock_not_available USING MESSAGE = 'a row came in meanwhile';
                END IF;
                gone := gone
                    + outbox.record_gone('outbox.event', 'ONLY ' || object, 'seq', span, false);
                EXECUTE format('DROP TABLE %s', object);
                RETURN NEXT;
                RETURN;
            EXCEPTION WHEN lock_not_available THEN
                step := 'busy';
                gone := 0;
                note := SQLERRM;
                RETURN NEXT;
                EXIT;
            END;
        END LOOP;
    END IF;

    IF 'delete' = ANY (steps) AND keep IS NOT NULL AND others IS NOT NULL THEN
        step := 'deleted';
        object := others::text;
        note := NULL;
        SELECT p.row_count, p.gone, p.last_seq INTO row_count, gone, last_seq
          FROM outbox.prune_rows('outbox.event', keep, at_most, after_seq, others, dry_run) AS p;
        IF row_count > 0 THEN
            RETURN NEXT;
        END IF;
    END IF;
END
$maintain$;
COMMENT ON FUNCTION outbox.maintain IS
    'One step of making and dropping partitions of outbox.event; needs EXECUTE only.';
REVOKE ALL ON FUNCTION outbox.maintain FROM PUBLIC;

-- The numbers between the lowest and the highest of a partition.
CREATE FUNCTION outbox.span(of_partition regclass) RETURNS int8multirange
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
AS $span$
DECLARE
    found_span int8multirange;
BEGIN
    EXECUTE format('SELECT CASE WHEN min(seq) IS NOT NULL '
                   'THEN int8multirange(int8range(min(seq), max(seq), ''[]'')) END '
                   'FROM ONLY %s', of_partition)
        INTO found_span;
    RETURN coalesce(found_span, '{}');
END
$span$;

-- Compaction of a relay's receipts, at most `at_most` of them, from (`after_destination`,
-- `after_id`) on; call again with what it returns until that is NULL.
--
-- Merging keeps the newest receipt of each five minutes and gives it the numbers of the others: with
-- its higher id no sweep that has come as far as one of the parts misses a number, and with the
-- highest `last_lsn` it is read at a start for as long as any part would have been. So it need not
-- wait for the slot. Its message is the last one of all parts, and its floor the one that held before
-- the first of them: nothing that it speaks of is above the one or below the other. Not beyond a handed
-- receipt, though: what was recorded before it says nothing about its numbers. Nor does one with
-- exceptions to the order go beyond another that has some and is not merged with it: they count in the
-- order of the receipts. An exception goes when an earlier part has its number: that was the event,
-- and this is a copy.
--
-- Deleting needs all of: older than `keep`; below the slot's restart_lsn, to which a crash can at
-- most take the slot back; in the frontier already; no row left; no handed receipt that it makes
-- final. The newest receipt of a destination has its floor and stays.
CREATE FUNCTION outbox.compact(
    of_relay text, of_slot text, keep interval, at_most int DEFAULT 2000,
    after_destination text DEFAULT '', after_id bigint DEFAULT 0
) RETURNS TABLE (merged bigint, deleted bigint, last_destination text, last_id bigint)
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
AS $compact$
DECLARE
    event_table text := (SELECT r.event_table FROM outbox.relay r WHERE r.name = of_relay);
    above       pg_lsn;
    places      text[];
    ids         bigint[];
    doomed      bigint[];
    removed     bigint;
BEGIN
    merged := 0;
    deleted := 0;
    IF event_table IS NULL
       OR NOT pg_try_advisory_xact_lock(hashtextextended('outboxd compact ' || of_relay, 0))
    THEN
        RETURN NEXT;
        RETURN;
    END IF;
    -- Without a slot nothing comes again; a lost one says nothing.
    SELECT coalesce(max(coalesce(s.restart_lsn, '0/0')), 'FFFFFFFF/FFFFFFFF') INTO above
      FROM pg_replication_slots s WHERE s.slot_name = of_slot;
    -- What the WAL never showed committed before now.
    UPDATE outbox.receipt r SET last_lsn = pg_current_wal_insert_lsn()
     WHERE r.relay = of_relay AND r.last_lsn IS NULL AND r.outcome <> 'handed'
       AND NOT isempty(r.seqs);

    SELECT array_agg(w.destination ORDER BY w.destination, w.id),
           array_agg(w.id ORDER BY w.destination, w.id)
      INTO places, ids
      FROM (SELECT r.destination, r.id FROM outbox.receipt r
             WHERE r.relay = of_relay AND (r.destination, r.id) > (after_destination, after_id)
             ORDER BY r.destination, r.id LIMIT at_most) AS w;
    IF cardinality(ids) = at_most THEN
        last_destination := places[at_most];
        last_id := ids[at_most];
    END IF;

    -- Handed ones are done when every number is final.
    WITH still AS MATERIALIZED (
        SELECT place, outbox.waiting(of_relay, place) AS seqs
          FROM (SELECT DISTINCT unnest(places) AS place) AS each)
    DELETE FROM outbox.receipt r USING still
     WHERE r.relay = of_relay AND r.outcome = 'handed' AND r.id = ANY (ids)
       AND r.destination = still.place AND NOT r.seqs && still.seqs
       AND r.id < (SELECT max(n.id) FROM outbox.receipt n
                    WHERE n.relay = r.relay AND n.destination = r.destination
                      AND n.outcome NOT IN ('gone', 'adopted'));
    GET DIAGNOSTICS deleted = ROW_COUNT;

    doomed := array(
        SELECT r.id
          FROM outbox.receipt r
               LEFT JOIN outbox.destination d ON d.relay = r.relay AND d.name = r.destination
         WHERE r.relay = of_relay AND r.destination = ANY (places) AND r.id = ANY (ids)
           AND r.outcome <> 'handed' AND r.recorded_at < now() - keep
           AND (r.last_lsn < above OR isempty(r.seqs)) AND r.id <= coalesce(d.receipt_id, r.id)
           AND r.id < (SELECT max(n.id) FROM outbox.receipt n
                        WHERE n.relay = r.relay AND n.destination = r.destination
                          AND n.outcome NOT IN ('gone', 'adopted'))
           AND NOT EXISTS (SELECT FROM outbox.receipt h
                            WHERE h.relay = r.relay AND h.destination = r.destination
                              AND h.outcome = 'handed' AND h.seqs && r.seqs));
    IF cardinality(doomed) > 0 THEN
        EXECUTE format(
            'DELETE FROM outbox.receipt r'
            ' WHERE r.relay = $1 AND r.destination = ANY ($2) AND r.id = ANY ($3)'
            '   AND NOT EXISTS (SELECT FROM unnest(r.seqs) AS part CROSS JOIN LATERAL ('
            '           SELECT FROM %s AS t'
            '            WHERE t.%2$I >= lower(part) AND t.%2$I <= upper(part) - 1 LIMIT 1) AS t)',
            outbox.quoted(event_table), outbox.column_of(event_table, 'seq', 'seq'))
            USING of_relay, places, doomed;
        GET DIAGNOSTICS removed = ROW_COUNT;
        deleted := deleted + removed;
    END IF;

    WITH slices AS (
        SELECT r.destination, max(r.id) AS id, array_agg(r.id) AS ids,
               least(sum(r.events::bigint), 2147483647)::int AS events,
               least(sum(r.unmatched::bigint), 2147483647)::int AS unmatched,
               min(r.first_lsn) AS first_lsn, max(r.last_lsn) AS last_lsn,
               max(r.stream_seq) AS stream_seq,
               (array_agg(r.stream_msg_id
                          ORDER BY r.stream_seq DESC, r.stream_msg_id DESC))[1] AS stream_msg_id,
               least(min(r.floor_seq), coalesce(
                   (SELECT b.floor_seq FROM outbox.receipt b
                     WHERE b.relay = of_relay AND b.destination = r.destination
                       AND b.stream_created = r.stream_created AND b.outcome = 'published'
                       AND b.id < min(r.id)
                     ORDER BY b.id DESC LIMIT 1), 0)) AS floor_seq
          FROM outbox.receipt r
         WHERE r.relay = of_relay AND r.destination = ANY (places) AND r.id = ANY (ids)
           AND r.outcome <> 'handed'
           AND date_bin('5 minutes', r.recorded_at, 'epoch') < date_bin('5 minutes', now(), 'epoch')
           AND r.id < (SELECT max(n.id) FROM outbox.receipt n
                        WHERE n.relay = r.relay AND n.destination = r.destination
                          AND n.outcome NOT IN ('gone', 'adopted'))
         GROUP BY r.destination, r.outcome, r.generation, r.stream, r.stream_created,
                  r.first_lsn IS NULL AND NOT isempty(r.seqs),
                  (SELECT max(h.id) FROM outbox.receipt h
                    WHERE h.relay = r.relay AND h.destination = r.destination
                      AND h.outcome = 'handed' AND h.id < r.id),
                  CASE WHEN r.late_seqs IS NOT NULL THEN
                      (SELECT max(o.id) FROM outbox.receipt o
                        WHERE o.relay = of_relay AND o.destination = r.destination
                          AND o.id = ANY (ids) AND o.id < r.id AND o.late_seqs IS NOT NULL
                          AND (o.outcome, o.generation, o.stream, o.stream_created,
                               o.first_lsn IS NULL AND NOT isempty(o.seqs))
                              IS DISTINCT FROM
                              (r.outcome, r.generation, r.stream, r.stream_created,
                               r.first_lsn IS NULL AND NOT isempty(r.seqs))) END,
                  date_bin('5 minutes', r.recorded_at, 'epoch')
        HAVING count(*) > 1),
    parts AS (
        DELETE FROM outbox.receipt r USING slices s
         WHERE r.relay = of_relay AND r.destination = s.destination
           AND r.id = ANY (s.ids) AND r.id <> s.id
        RETURNING 1),
    kept AS (
        UPDATE outbox.receipt r
           SET seqs = coalesce((SELECT range_agg(part)
                                  FROM outbox.receipt p CROSS JOIN unnest(p.seqs) AS part
                                 WHERE p.relay = of_relay AND p.destination = s.destination
                                   AND p.id = ANY (s.ids)), '{}'),
               late_seqs = late.seqs, late_behind = late.behind,
               events = s.events, unmatched = s.unmatched,
               first_lsn = s.first_lsn, last_lsn = s.last_lsn,
               stream_seq = s.stream_seq, stream_msg_id = s.stream_msg_id,
               floor_seq = s.floor_seq
          FROM slices s CROSS JOIN LATERAL (
                   SELECT array_agg(l.seq ORDER BY p.id, l.place) AS seqs,
                          array_agg(l.behind ORDER BY p.id, l.place) AS behind
                     FROM outbox.receipt p CROSS JOIN
                          unnest(p.late_seqs, p.late_behind) WITH ORDINALITY
                              AS l (seq, behind, place)
                    WHERE p.relay = of_relay AND p.destination = s.destination
                      AND p.id = ANY (s.ids)
                      AND NOT EXISTS (SELECT FROM outbox.receipt e
                                       WHERE e.relay = of_relay AND e.destination = s.destination
                                         AND e.id = ANY (s.ids) AND e.id < p.id
                                         AND e.seqs @> l.seq)) AS late
         WHERE r.relay = of_relay AND r.destination = s.destination AND r.id = s.id)
    SELECT count(*) INTO merged FROM parts;
    RETURN NEXT;
END
$compact$;
COMMENT ON FUNCTION outbox.compact IS
    'Merges and deletes receipts that nobody asks for one by one any more.';

-- How far each destination is behind the table, on the database's clock, whether its relay runs or
-- not. `unpublished` counts up to `count_to`; beyond that `counted_all` is false, and the age is
-- that of the oldest one counted. Needs SELECT on the columns that it reads, and no more: seq and
-- created_at of the table.
CREATE FUNCTION outbox.lag(count_to bigint DEFAULT 1000000) RETURNS TABLE (
    relay text, destination text, required boolean, unpublished bigint,
    oldest_seconds double precision, counted_all boolean
)
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
AS $lag$
DECLARE
    place  record;
    oldest timestamptz;
BEGIN
    FOR place IN
        SELECT d.relay, d.name, d.required, outbox.quoted(r.event_table) AS events,
               coalesce(r.columns ->> 'seq', 'seq') AS seq,
               CASE WHEN r.columns ? 'created_at' THEN r.columns ->> 'created_at'
                    ELSE 'created_at' END AS created_at
          FROM outbox.destination d JOIN outbox.relay r ON r.name = d.relay
         WHERE d.active
         ORDER BY d.relay, d.name
    LOOP
        relay := place.relay;
        destination := place.name;
        required := place.required;
        unpublished := NULL;
        oldest_seconds := NULL;
        counted_all := false;
        -- A relay that was left behind may name a table that is gone.
        IF to_regclass(place.events) IS NOT NULL THEN
            EXECUTE format(
                'SELECT count(*), min(t.at) FROM ('
                '    SELECT t.at FROM unnest($1) AS part CROSS JOIN LATERAL ('
                '        SELECT %3$s AS at FROM %1$s AS t'
                '         WHERE t.%2$I >= coalesce(lower(part), $2)'
                '           AND t.%2$I <= coalesce(upper(part) - 1, $3)'
                '         ORDER BY t.%2$I LIMIT $4 + 1) AS t LIMIT $4 + 1) AS t',
                place.events, place.seq,
                coalesce(format('t.%I::timestamptz', place.created_at), 'NULL::timestamptz'))
                INTO unpublished, oldest
                USING outbox.undecided(place.relay, place.name), '-9223372036854775808'::bigint,
                      '9223372036854775807'::bigint, count_to;
            counted_all := unpublished <= count_to;
            unpublished := least(unpublished, count_to);
            IF unpublished = 0 THEN
                oldest_seconds := 0;
            ELSIF isfinite(oldest) THEN
                oldest_seconds := greatest(extract(epoch FROM clock_timestamp() - oldest), 0);
            END IF;
        END IF;
        RETURN NEXT;
    END LOOP;
END
$lag$;
COMMENT ON FUNCTION outbox.lag IS
    'Per relay and active destination: events not yet decided, and the age of the oldest.';

-- Removes the rows of one run, decided or not, from the next `at_most` rows after `after_seq` on:
-- call it again with `last_seq` until that is NULL. First a receipt `gone` for what is undecided.
CREATE FUNCTION outbox.erase_rows(
    of_table text, of_run text, after_seq bigint DEFAULT NULL, at_most int DEFAULT 20000,
    dry_run boolean DEFAULT false
) RETURNS TABLE (row_count bigint, gone bigint, last_seq bigint)
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
AS $erase_rows$
DECLARE
    rows_of    text := outbox.quoted(of_table);
    seq_column text := outbox.column_of(of_table, 'seq', 'seq');
    seqs       bigint[];
BEGIN
    EXECUTE format(
        'SELECT max(t.seq), coalesce(array_agg(t.seq) FILTER (WHERE t.run = $1), ''{}'') FROM ('
        '    SELECT t.%2$I::int8 AS seq, t.%3$I::text AS run FROM %1$s AS t'
        '     WHERE $2 IS NULL OR t.%2$I > $2 ORDER BY t.%2$I LIMIT $3) AS t',
        rows_of, seq_column, outbox.column_of(of_table, 'run', 'run_id'))
        INTO last_seq, seqs
        USING of_run, after_seq, at_most;
    row_count := cardinality(seqs);
    gone := 0;
    IF row_count > 0 AND NOT dry_run THEN
        gone := outbox.record_gone(
            of_table, rows_of, seq_column,
            (SELECT range_agg(int8range(seq, seq, '[]')) FROM unnest(seqs) AS seq), true);
        EXECUTE format('DELETE FROM %s AS t WHERE t.%I = ANY ($1)', rows_of, seq_column) USING seqs;
        GET DIAGNOSTICS row_count = ROW_COUNT;
    END IF;
    RETURN NEXT;
END
$erase_rows$;
COMMENT ON FUNCTION outbox.erase_rows IS 'Removes rows of one run; see outboxd erase.';
