#!/usr/bin/env python3
"""Runs the live tests on pairs of supported servers; prints a table.

    scripts/matrix.py               every pair of the oldest and newest, and each version between once
    scripts/matrix.py 18 2.10       one pair, any

Exits with 1 when a pair failed. A pair whose servers could not be fetched is left out, and the
table says so. Each pair's output is in target/matrix/.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEV = ROOT / ".dev"
OUT = ROOT / "target" / "matrix"
POSTGRES = ["14", "15", "16", "17", "18"]
NATS = ["2.10", "2.12", "2.14", "2.15"]
PAIRS = [
    ("14", "2.10"), ("14", "2.15"),
    ("15", "2.12"), ("16", "2.14"), ("17", "2.15"),
    ("18", "2.10"), ("18", "2.15"),
]
# The sandbox's own tests say whether the servers run at all.
TESTS = ["sandbox", "wal", "publish", "live_*"]
TESTS = [word for test in TESTS for word in ("--test", test)]
LEFT_OUT = "left out: not fetched"
RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed;", re.MULTILINE)
# cargo's own headings come on the other stream, so a test's binary can't be told from here.
FAILED = re.compile(r"^test (\S+) \.\.\. FAILED$", re.MULTILINE)
# Tests say so themselves when a server is too old for what they test. Their line can begin behind
# the harness's own words.
SKIPPED = re.compile(r"skipped: (.+)$", re.MULTILINE)


def main():
    pairs = [tuple(sys.argv[1:])] if len(sys.argv) > 1 else PAIRS
    if any(len(pair) != 2 or pair[0] not in POSTGRES or pair[1] not in NATS for pair in pairs):
        sys.exit(__doc__)
    OUT.mkdir(parents=True, exist_ok=True)
    # Compile once, outside the figures.
    built = subprocess.run(["cargo", "test", "--locked", "--no-run", *TESTS], cwd=ROOT)
    if built.returncode != 0:
        sys.exit("matrix: the tests don't compile")
    rows = [run(*pair) for pair in pairs]
    print()
    print("| PostgreSQL | nats-server | passed | failed | skipped | seconds | verdict |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print("| {} | {} | {} | {} | {} | {:.0f} | {} |".format(*row))
    verdicts = [row[-1] for row in rows]
    left_out = verdicts.count(LEFT_OUT)
    good = "FAILED" not in verdicts and left_out < len(rows)
    note = f", {left_out} of {len(rows)} pairs left out" if left_out else ""
    print(f"\nmatrix: {'ok' if good else 'failed'}{note}")
    sys.exit(0 if good else 1)


def run(postgres, nats):
    pg_bin = DEV / f"postgres-{postgres}" / "bin"
    program = DEV / f"nats-{nats}" / "nats-server"
    missing = [path.parent.name if path == program else path.parent.parent.name
               for path in (pg_bin / "postgres", program) if not path.exists()]
    if missing:
        print(f"matrix: PostgreSQL {postgres}, nats-server {nats}: left out, {' and '.join(missing)} "
              "not fetched (`make matrix` fetches, and says why it can't)", flush=True)
        return (postgres, nats, 0, 0, 0, 0.0, LEFT_OUT)
    environment = dict(os.environ, OUTBOXD_PG_BIN=str(pg_bin), OUTBOXD_NATS_SERVER=str(program))
    versions = version(pg_bin / "postgres", "-V"), version(program, "--version")
    print(f"matrix: PostgreSQL {versions[0]}, nats-server {versions[1]}", flush=True)
    start = time.monotonic()
    done = subprocess.run(
        ["cargo", "test", "--locked", "--no-fail-fast", *TESTS],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    took = time.monotonic() - start
    log = OUT / f"postgres-{postgres}-nats-{nats}.log"
    log.write_text(done.stdout)
    results = [(int(passed), int(failed)) for passed, failed in RESULT.findall(done.stdout)]
    passed, failed = sum(r[0] for r in results), sum(r[1] for r in results)
    skipped = SKIPPED.findall(done.stdout)
    for words in skipped:
        print(f"matrix:   skipped: {words}", flush=True)
    # A test that skips itself counts as passed in cargo's own sum.
    passed -= len(skipped)
    good = done.returncode == 0 and passed > 0 and failed == 0
    if not good:
        names = ", ".join(FAILED.findall(done.stdout)) or "cargo itself"
        print(f"matrix:   failed: {names}; see {log.relative_to(ROOT)}", flush=True)
    return (*versions, passed, failed, len(skipped), took, "ok" if good else "FAILED")


def version(program, argument):
    words = subprocess.run([program, argument], capture_output=True, text=True, check=True).stdout
    return re.search(r"\d+\.\d+(\.\d+)?", words).group()


if __name__ == "__main__":
    main()
