#!/usr/bin/env python3
"""Counts instructions per event of the micro benches and compares them with benches/micro/baseline.txt.

    scripts/bench_check.py              exits with 1 when one is more than 5 % above its baseline
    scripts/bench_check.py --update     writes the baseline instead

Instructions are counted by callgrind, so that a busy machine changes nothing. Each case is run with
two numbers of turns, and the difference is what counts: starting up and preparing fall out of it.
Another compiler counts differently: the baseline names the one that it was made with.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "benches" / "micro" / "baseline.txt"
LIMIT_PERCENT = 5.0
# Events of the shorter and of the longer run. Both are far beyond what grows only at first.
SHORT, LONG = 10_000, 30_000
COLLECTED = re.compile(r"Collected : (\d+)")


def main():
    update = sys.argv[1:] == ["--update"]
    if sys.argv[1:] and not update:
        sys.exit(__doc__)
    if shutil.which("valgrind") is None:
        sys.exit("bench-check: valgrind is missing; install it (Debian and Ubuntu: "
                 "apt-get install valgrind; Fedora: dnf install valgrind) and run this again")
    program = build()
    compiler = command("rustc", "--version").split(" (")[0]
    lines = command(program, "--names").split("\n")
    cases = [(name, int(events)) for name, events in map(str.split, filter(None, lines))]
    counted = {name: count(program, name, events) for name, events in cases}
    if update:
        rows = "".join(f"{name} {counted[name]:.1f}\n" for name, _ in cases)
        BASELINE.write_text(f"# instructions per event, {compiler}; make bench-check ARGS=--update\n{rows}")
        print(f"bench-check: wrote {BASELINE.relative_to(ROOT)}")
        return
    heading, *rows = BASELINE.read_text().splitlines()
    baseline = {name: float(instructions) for name, instructions in map(str.split, rows)}
    worse = []
    print("| case | baseline | now | change |\n|---|---|---|---|")
    for name, now in counted.items():
        then = baseline.get(name)
        change = None if then is None else (now / then - 1) * 100
        print(f"| {name} | {then or '-'} | {now:.1f} | {'new' if change is None else f'{change:+.1f} %'} |")
        if change is None or change > LIMIT_PERCENT:
            worse.append(name)
    print("\ninstructions per event")
    gone = [name for name in baseline if name not in counted]
    if not worse and not gone:
        print(f"bench-check: ok, none is more than {LIMIT_PERCENT:.0f} % above its baseline")
        return
    print(f"bench-check: FAILED: {', '.join(worse + gone)}")
    if compiler not in heading:
        print(f"the baseline was made with another compiler than {compiler}: {heading}")
    sys.exit("if that is meant: make bench-check ARGS=--update, and say in the commit what it buys")


def build():
    """The benches' program, built as the relay is."""
    done = subprocess.run(
        ["cargo", "build", "--locked", "--release", "--example", "micro", "--message-format", "json"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit("bench-check: the benches don't compile")
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    programs = [message["executable"] for message in messages
                if message.get("target", {}).get("name") == "micro" and message.get("executable")]
    return programs[-1]


def count(program, name, events):
    """Instructions per event."""
    short, long = (max(1, total // events) for total in (SHORT, LONG))
    return (instructions(program, name, long) - instructions(program, name, short)) / (
        (long - short) * events)


def instructions(program, name, turns):
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            ["valgrind", "--tool=callgrind", f"--callgrind-out-file={place}/out",
             program, "--count", name, str(turns)],
            cwd=ROOT, env=dict(os.environ, LC_ALL="C"), capture_output=True, text=True)
    found = COLLECTED.search(done.stderr)
    if done.returncode != 0 or found is None:
        sys.exit(f"bench-check: {name} failed under valgrind:\n{done.stderr[-2000:]}")
    return int(found.group(1))


def command(*words):
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


if __name__ == "__main__":
    main()
