-- outboxd schema, version 1: the outbox table, its one way in, and the relay's own records.
--
-- Runs in one transaction on PostgreSQL 14 and newer, needs no extension, and names every object
-- in full, so that any migration tool can apply it as it is.

CREATE SCHEMA IF NOT EXISTS outbox;

CREATE TABLE outbox.schema_version (
    version     int         PRIMARY KEY,
    applied_at  timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE outbox.schema_version IS
    'One row per applied migration of outboxd; the highest is the version of the schema.';

-- The sequence is one of our own and not GENERATED ALWAYS AS IDENTITY: a partitioned table can't
-- have an identity column before PostgreSQL 17, and the schema is to be the same on every version.
-- What identity would give is kept otherwise: writers get no right on table or sequence, only
-- EXECUTE on outbox.publish(), which lets nobody choose a number. CACHE 1, since a session that
-- keeps numbers back could use them after the sweeper declared them void.
CREATE SEQUENCE outbox.event_seq AS bigint CACHE 1 NO CYCLE;

-- Partitioned from the start, so that retention can drop whole partitions without a rewrite. The
-- default partition takes what no other takes: an INSERT never fails for want of a partition.
--
-- No primary key: on a partitioned table it would have to hold created_at, and would promise
-- nothing about seq (the sequence does) or id (one id is one event: the writer's duty). The index
-- on seq serves what is asked later: rows beyond the frontier, and whether a number has its row.
-- An index on id is left out on purpose: random keys cost every writer a full-page image.
CREATE TABLE outbox.event (
    seq         bigint      NOT NULL DEFAULT nextval('outbox.event_seq'),
    id          uuid        NOT NULL DEFAULT gen_random_uuid(),
    tenant      text,
    run_id      text        NOT NULL,
    kind        text        NOT NULL,
    version     int,
    payload     json /* payload type */,
    headers     jsonb,
    created_at  timestamptz NOT NULL DEFAULT now()
) PARTITION BY RANGE (created_at);
ALTER SEQUENCE outbox.event_seq OWNED BY outbox.event.seq;
CREATE TABLE outbox.event_default PARTITION OF outbox.event DEFAULT;
CREATE INDEX event_seq_idx ON outbox.event (seq);

COMMENT ON TABLE outbox.event IS
    'Events to publish. Write with outbox.publish() in the transaction that makes them true.';
COMMENT ON COLUMN outbox.event.run_id IS
    'Ordering key: events of one run are published in commit order.';
COMMENT ON COLUMN outbox.event.payload IS
    'Body of the message, byte for byte; NULL is a tombstone.';
COMMENT ON COLUMN outbox.event.headers IS
    'Object of strings: further headers of the message; Nats-* and Outbox-* are refused.';

-- The parameters come in the order of use. The type of payload is that of the column.
CREATE FUNCTION outbox.publish(
    run_id   text,
    kind     text,
    payload  outbox.event.payload%TYPE,
    tenant   text  DEFAULT NULL,
    version  int   DEFAULT NULL,
    headers  jsonb DEFAULT NULL,
    id       uuid  DEFAULT NULL
) RETURNS uuid
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
AS $publish$
DECLARE
    event_id uuid := coalesce(publish.id, gen_random_uuid());
BEGIN
    INSERT INTO outbox.event (id, tenant, run_id, kind, version, payload, headers)
    VALUES (event_id, publish.tenant, publish.run_id, publish.kind, publish.version,
            publish.payload, publish.headers);
    RETURN event_id;
END
$publish$;
COMMENT ON FUNCTION outbox.publish IS
    'Writes one event and returns its id. Needs EXECUTE only; the event leaves on commit.';
REVOKE ALL ON FUNCTION outbox.publish FROM PUBLIC;

CREATE TABLE outbox.relay (
    name               text        PRIMARY KEY,
    generation         int         NOT NULL DEFAULT 1 CHECK (generation > 0),
    event_table        text        NOT NULL,
    columns            jsonb       NOT NULL DEFAULT '{}',
    system_identifier  text        NOT NULL,
    timeline           bigint      NOT NULL,
    slot_ceiling       pg_lsn,
    created_at         timestamptz NOT NULL DEFAULT now(),
    updated_at         timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE outbox.relay IS
    'Which history a relay''s ledger belongs to: the outbox table and the cluster it was written in.';
COMMENT ON COLUMN outbox.relay.columns IS
    'Names of the table''s columns, by use; those of outbox.event where none is given.';
COMMENT ON COLUMN outbox.relay.slot_ceiling IS
    'The relay never confirmed its slot above this: one that is above was moved by somebody else.';
COMMENT ON COLUMN outbox.relay.generation IS
    'Goes up when the history of the database was replaced (restore to an older point).';

CREATE TABLE outbox.destination (
    relay       text           NOT NULL,
    name        text           NOT NULL,
    active      boolean        NOT NULL DEFAULT true,
    required    boolean        NOT NULL DEFAULT true,
    frontier    bigint         NOT NULL,
    holes       int8multirange NOT NULL DEFAULT '{}',
    receipt_id  bigint         NOT NULL DEFAULT 0,
    gap_since   timestamptz,
    gap_receipt bigint,
    began_after bigint         NOT NULL DEFAULT 0,
    marked_receipt bigint      NOT NULL DEFAULT 0,
    compared_in text,
    created_at  timestamptz    NOT NULL DEFAULT now(),
    updated_at  timestamptz    NOT NULL DEFAULT now(),
    PRIMARY KEY (relay, name),
    CHECK ((gap_since IS NULL) = (gap_receipt IS NULL))
);
COMMENT ON TABLE outbox.destination IS
    'How far the table was looked through for each destination: where a sweep begins.';
COMMENT ON COLUMN outbox.destination.active IS
    'Is it in the configuration of the relay that ran last? Others hold nothing back.';
COMMENT ON COLUMN outbox.destination.frontier IS
    'Every number up to this one is in a receipt, or no row has it and none will; but for the holes.';
COMMENT ON COLUMN outbox.destination.holes IS
    'Numbers up to the frontier that may have a row without a receipt.';
COMMENT ON COLUMN outbox.destination.receipt_id IS
    'Receipts up to this id are in frontier and holes already.';
COMMENT ON COLUMN outbox.destination.gap_since IS
    'Not NULL: rows were committed that no slot will bring. What WAL brings waits until they are sent.';

COMMENT ON COLUMN outbox.destination.compared_in IS
    'Cluster and timeline in which the stream was compared with the outbox; in another one all is looked at.';
COMMENT ON COLUMN outbox.destination.gap_receipt IS
    'With a gap: what receipts up to this id handed over is older than the rows that are missing.';

COMMENT ON COLUMN outbox.destination.began_after IS
    'The sequence''s last value when the destination became known: what is older is not waited for.';
COMMENT ON COLUMN outbox.destination.marked_receipt IS
    'With [source] mark: what receipts up to this id decided is marked in the table.';

-- The ledger: append-only, one row per destination and flush.
--
-- Small on purpose. A row of one unbroken range is about 230 bytes, with both indexes and the
-- commit record about 500 bytes of WAL: at ten flushes a second and 2,000 events a second 2.5 bytes
-- per event. To keep the ranges unbroken a `published` receipt lists every number that its flush
-- decided, those that matched no filter too; `events` and `unmatched` tell them apart in count.
CREATE TABLE outbox.receipt (
    id              bigint         GENERATED ALWAYS AS IDENTITY,
    relay           text           NOT NULL,
    destination     text           NOT NULL,
    generation      int            NOT NULL,
    outcome         text           NOT NULL
        CHECK (outcome IN ('published', 'dead', 'unmatched', 'gone', 'handed', 'adopted')),
    seqs            int8multirange NOT NULL,
    events          int            NOT NULL,
    unmatched       int            NOT NULL DEFAULT 0,
    first_lsn       pg_lsn,
    last_lsn        pg_lsn,
    stream          text           NOT NULL,
    stream_created  text           NOT NULL,
    stream_seq      bigint         NOT NULL,
    stream_msg_id   text           NOT NULL,
    floor_seq       bigint         NOT NULL,
    handed_seqs     bigint[],
    handed_runs     bigint[],
    late_seqs       bigint[],
    late_behind     bigint[],
    recorded_at     timestamptz    NOT NULL DEFAULT now(),
    PRIMARY KEY (relay, destination, id)
);
CREATE INDEX receipt_last_lsn_idx ON outbox.receipt (relay, last_lsn);
CREATE INDEX receipt_handed_idx ON outbox.receipt (relay, destination, id) WHERE outcome = 'handed';

COMMENT ON TABLE outbox.receipt IS
    'What was decided, for which destination. Only receipts say whether an event is done.';
COMMENT ON COLUMN outbox.receipt.seqs IS
    'Numbers decided (or, `handed`, waiting); empty in the first receipt, which records a floor.';
COMMENT ON COLUMN outbox.receipt.first_lsn IS
    'Lowest commit LSN of the numbers; NULL when the WAL never showed them.';
COMMENT ON COLUMN outbox.receipt.last_lsn IS
    'Highest commit LSN of the numbers: the WAL read again from above it brings none of them.';
COMMENT ON COLUMN outbox.receipt.stream_seq IS
    'Stream sequence of the last message of the flush, and beside it that message''s id.';
COMMENT ON COLUMN outbox.receipt.floor_seq IS
    'Nothing of ours in the stream at or below this sequence has an unknown outcome; in a merged receipt: had, before its first part.';
COMMENT ON COLUMN outbox.receipt.handed_seqs IS
    'Only `handed`: the numbers in commit order, and beside them their runs'' hashes.';

COMMENT ON COLUMN outbox.receipt.late_seqs IS
    'Numbers decided behind a higher one of their run, in that order; beside them that number.';

-- Events that could not be published. Holds all that is needed to decide about one and to send it
-- again after its row is gone. Only the payload needs bytea: the other columns were text before.
CREATE TABLE outbox.dead_letter (
    id                bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    relay             text        NOT NULL,
    destination       text        NOT NULL,
    seq               bigint      NOT NULL,
    generation        int         NOT NULL,
    event_id          text        NOT NULL,
    run_id            text,
    run_hash          bigint      NOT NULL,
    kind              text        NOT NULL,
    tenant            text,
    version           int,
    payload           bytea,
    headers           text,
    event_created_at  timestamptz,
    committed_at      timestamptz,
    commit_lsn        pg_lsn,
    commit_index      bigint,
    reason            text        NOT NULL,
    detail            text        NOT NULL,
    server_code       bigint,
    attempts          bigint      NOT NULL,
    blocks_run        boolean     NOT NULL DEFAULT false,
    buried_at         timestamptz NOT NULL DEFAULT now(),
    state             text        NOT NULL DEFAULT 'buried'
        CHECK (state IN ('buried', 'redriving', 'redriven', 'discarded')),
    state_changed_at  timestamptz,
    state_changed_by  text,
    state_reason      text,
    history           jsonb       NOT NULL DEFAULT '[]',
    UNIQUE (relay, destination, seq, event_id)
);
CREATE INDEX dead_letter_open_idx ON outbox.dead_letter (relay, destination, id)
    WHERE state IN ('buried', 'redriving');
-- The relay asks every few seconds whether there is something to send again.
CREATE INDEX dead_letter_redriving_idx ON outbox.dead_letter (relay, id)
    WHERE state = 'redriving';

COMMENT ON TABLE outbox.dead_letter IS
    'Events that can''t be published, with reason and the server''s error code.';
COMMENT ON COLUMN outbox.dead_letter.run_hash IS
    'Hash of the ordering key, as in outbox.receipt.handed_runs.';
COMMENT ON COLUMN outbox.dead_letter.blocks_run IS
    'The run waits behind this letter until it is redriven or discarded.';
COMMENT ON COLUMN outbox.dead_letter.state IS
    'redriving: to be sent again by the relay; then redriven, or buried once more.';
COMMENT ON COLUMN outbox.dead_letter.history IS
    'Every state that the letter was in, oldest first: at, state, by, why.';

-- Replays: what is asked for, and how far it is. A row is written when the replay begins and with
-- each step of it, so that one that was killed goes on where it was.
CREATE TABLE outbox.replay (
    relay            text           NOT NULL,
    job              text           NOT NULL,
    destination      text           NOT NULL,
    selection        jsonb          NOT NULL,
    seqs             int8multirange NOT NULL,
    done             int8multirange NOT NULL DEFAULT '{}',
    planned          bigint         NOT NULL,
    stored           bigint         NOT NULL DEFAULT 0,
    duplicates       bigint         NOT NULL DEFAULT 0,
    refused          bigint         NOT NULL DEFAULT 0,
    gone             bigint         NOT NULL DEFAULT 0,
    stream_created   text           NOT NULL DEFAULT '',
    stream_seq       bigint         NOT NULL DEFAULT 0,
    floor_seq        bigint         NOT NULL DEFAULT 0,
    created_at       timestamptz    NOT NULL DEFAULT now(),
    updated_at       timestamptz    NOT NULL DEFAULT now(),
    finished_at      timestamptz,
    PRIMARY KEY (relay, job)
);
COMMENT ON TABLE outbox.replay IS
    'Events that are published once more on demand, one row for each job of outboxd replay.';
COMMENT ON COLUMN outbox.replay.seqs IS
    'Numbers that the receipts gave when the job began; the selection narrows them down. Empty when done.';
COMMENT ON COLUMN outbox.replay.done IS
    'Numbers that need not be looked at any more: sent, refused, gone, or not selected.';
COMMENT ON COLUMN outbox.replay.duplicates IS
    'Acknowledged as duplicates of messages that the stream does not have.';
COMMENT ON COLUMN outbox.replay.floor_seq IS
    'No message of this job in the stream at or below this sequence has an unknown outcome.';

INSERT INTO outbox.schema_version (version) VALUES (1);
