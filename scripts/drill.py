#!/usr/bin/env python3
"""Runs the live tests with many events, kills and long pauses; prints what the oracle says of each
crash point in one table.

    scripts/drill.py                          all live tests
    scripts/drill.py live_points live_pairs   some

OUTBOXD_TEST_EVENTS is the number of events of a load, 100,000 unless it is set. As many tests run at once
as there are cores; RUST_TEST_THREADS says otherwise. Exits with 1 when a
test failed or a crash point was not tried. The output of the tests is in target/drill.log.

What counts as right is said by the tests themselves: a copy that was made where copies are allowed, or
a message of an event that a restore took away, is in the table and no failure.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "target" / "drill.log"
# A test's first line can begin behind the harness's own words.
ORACLE = re.compile(r"oracle \| (.+)$")
RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed;")
HEADER = ["crash point", "events", "missing", "phantoms", "copies", "order violations", "note"]
# Where a crash matters, from commit to consumer; `make drill` fails when one was not tried.
POINTS = [
    "before the commit",
    "after the commit, before the relay sees it",
    "after the broker stored it, before the receipt",
    "the consumer before its commit, and before its ack",
    "during prune",
    "during recover",
    "consumers off for an hour's worth",
    "the active relay of two is killed",
    "the active relay of two is stopped, and wakes up",
]


def main():
    if any(argument.startswith("-") for argument in sys.argv[1:]):
        sys.exit(__doc__)
    tests = sys.argv[1:] or ["live_*"]
    os.environ.setdefault("OUTBOXD_TEST_EVENTS", "100000")
    command = ["cargo", "test", "--locked", "--no-fail-fast"]
    command += [word for test in tests for word in ("--test", test)]
    # One for each core: a test loads the servers, and waits for clocks as well.
    threads = os.environ.get("RUST_TEST_THREADS", str(os.cpu_count() or 1))
    command += ["--", "--test-threads", threads, "--nocapture"]
    LOG.parent.mkdir(exist_ok=True)
    rows, counts, interrupted = [], [0, 0], False
    start = time.monotonic()
    # In a group of its own, so that Ctrl-C is passed on once, and the servers end with their tests.
    cargo = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True, errors="replace", start_new_session=True)
    try:
        with LOG.open("w") as log:
            for line in cargo.stdout:
                log.write(line)
                log.flush()
                read(line.rstrip("\n"), rows, counts)
        code = cargo.wait()
    except KeyboardInterrupt:
        interrupted = True
        os.killpg(cargo.pid, signal.SIGINT)
        code = cargo.wait()
    table(rows)
    missed = [point for point in POINTS if not any(row[0].startswith(point) for row in rows)]
    if sys.argv[1:]:
        missed = []
    for point in missed:
        print(f"drill: not tried: {point}")
    good = code == 0 and counts[0] > 0 and counts[1] == 0 and not missed and not interrupted
    words = "interrupted" if interrupted else "ok" if good else "failed"
    took = time.monotonic() - start
    print(f"drill: {words}; {counts[0]} tests passed, {counts[1]} failed, in {took:.0f} s; "
          f"see {LOG.relative_to(ROOT)}")
    sys.exit(0 if good else 130 if interrupted else 1)


def read(line, rows, counts):
    """Takes what the table and the verdict need from one line, and shows how far it is."""
    if found := ORACLE.search(line):
        rows.append([cell.strip() for cell in found.group(1).split("|")])
        print(f"drill: {rows[-1][0]}: {', '.join(rows[-1][1:])}", flush=True)
    elif found := RESULT.match(line):
        counts[0] += int(found.group(1))
        counts[1] += int(found.group(2))
    elif line.endswith("... FAILED") or line.lstrip().startswith("Running "):
        print(f"drill: {line.strip()}", flush=True)


def table(rows):
    if not rows:
        return
    print()
    print("| " + " | ".join(HEADER) + " |")
    print("|---" * len(HEADER) + "|")
    for row in rows:
        print("| " + " | ".join(row + [""] * (len(HEADER) - len(row))) + " |")
    print()


if __name__ == "__main__":
    main()
