"""Install engine releases. On each release, record the status of every change, and run the compatibility tests. Then
rewrite the generated parts of README and docs.

    python test/tools/compatibility.py                 # all releases in turn: half an hour, 10 GB of disk at a time
    python test/tools/compatibility.py 0.5.23 0.5.24   # only these releases; other records are kept
    python test/tools/compatibility.py --doctor        # only doctor; the recorded test results are kept
    python test/tools/compatibility.py --record build  # record the results of `make test-all` from the logs in build/

`make env` installs the environments. An environment that did not exist before is removed again. The records are in
docs/compatibility.json. For each release, the differences from the release before it are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pages
import releases

ROOT = releases.ROOT


def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")}
    return subprocess.run(command, cwd=ROOT, env={**environment, **more}, capture_output=True, text=True, check=False)


@contextmanager
def install_release(release: str) -> Iterator[Path]:
    """Within the block, install a release with this package into ``.venvs``. If its environment did not exist before,
    remove it at the end of the block.

    :raises SystemExit: the installation failed. The message contains the installer's errors.
    """
    place = ROOT / ".venvs" / release
    was_there = (place / ".installed").exists()
    print(f"SGLang {release}: installing", flush=True)
    try:
        installation = run(["make", "env", f"ENGINE={release}", f"PYTHON={sys.executable}"])
        if installation.returncode:
            sys.exit(f"installing SGLang {release} failed:\n{installation.stderr}")
        yield place
    finally:
        if not was_there:
            shutil.rmtree(place, ignore_errors=True)


def run_doctor(release: str, place: Path) -> dict[str, Any]:
    """Run doctor on the release that is installed in ``place``.

    :returns: the release's torch version, model families and changes.
    :raises SystemExit: doctor printed nothing.
    """
    doctor = run([str(place / "bin/sglang-moe-patches"), "doctor", "--json"])
    if not doctor.stdout.strip():
        sys.exit(f"doctor failed on SGLang {release}:\n{doctor.stderr}")
    report = json.loads(doctor.stdout)
    return {
        "torch": report["torch"].split("+")[0],
        **scan_families(release, place),
        "changes": {change["name"]: list(change["engine"].values()) for change in report["changes"]},
    }


def scan_families(release: str, place: Path) -> dict[str, Any]:
    """Scan the model families of the release that is installed in ``place``.

    :returns: output of ``family_scan.py``: for each model family, the reason why its layers cannot offer their dead
        input; "": they can.
    :raises SystemExit: the scan failed.
    """
    scanned = run([str(place / "bin/python"), "test/tools/family_scan.py"])
    if scanned.returncode:
        sys.exit(f"scanning the models of SGLang {release} failed:\n{scanned.stderr}")
    return json.loads(scanned.stdout)


def shorten_summary(summary: str) -> str:
    """Shorten pytest's summary to the form ``11 passed · 1 skipped``, without the time, deselected tests and warnings.

    :param summary: last line of pytest's output. If the process was killed, this line is no summary.
    """
    if not re.search(r" in [\d.]+s", summary):
        return "failed without a summary"
    counts = summary.strip("= \n").split(" in ")[0].split(", ")
    return " · ".join(count for count in counts if not re.search("deselected|warning", count))


def run_tests(release: str, place: Path) -> str:
    """Run the tests with the mark ``compatibility`` on the release that is installed in ``place``.

    :returns: the shortened summary of pytest.
    """
    tested = run(
        [
            *(str(place / "bin/sglang-moe-reference"), "exec", "--"),
            *(str(place / "bin/python"), "-m", "pytest", "-q", "test/engine", "-m", "compatibility"),
        ],
        ENGINE=release,
    )
    if tested.returncode:
        print(tested.stdout[-6000:], tested.stderr[-6000:], f"exit code {tested.returncode}", file=sys.stderr)
    return shorten_summary(tested.stdout.strip().rpartition("\n")[2])


def describe_differences(release: str, found: dict[str, Any]) -> list[str]:
    """Compare a release with the release before it.

    :param found: the records of all releases, oldest first.
    :returns: a heading, one line for each of this package's changes, and one line for the tests. A "!" marks each line
        that differs from the earlier release.
    """
    names = list(found)
    earlier = names[names.index(release) - 1] if release != names[0] else ""

    def answers(name: str) -> dict[str, str]:
        facts = found.get(name, {"changes": {}, "tests": ""})
        changes = {change: ", because ".join(filter(None, answer)) for change, answer in facts["changes"].items()}
        return {**changes, "tests": facts["tests"]}

    lines = [f"SGLang {release}, compared with {earlier or 'nothing: it is the oldest'}:"]
    before = answers(earlier)
    for name, now in answers(release).items():
        was = before.get(name)
        note = "as before" if was == now else f"was {was}" if was else "new"
        lines.append(f"  {' ' if was == now else '!'} {name}: {now} ({note})")
    return lines


def read_test_all(logs: Path, earlier: dict[str, Any]) -> dict[str, Any]:
    """Read the results of `make test-all` from its logs.

    :param earlier: earlier results, by release and part (:data:`pages.PARTS`). A part without a finished log keeps its
        earlier result.
    :raises SystemExit: no log has a summary.
    """
    runs, ended = {}, False
    for release in releases.EVERY_TIME:
        runs[release] = dict(earlier.get(release, {}))
        for part in pages.PARTS:
            log = logs / f"test-{release}-{part}.log"
            text = log.read_text() if log.exists() else ""
            if summaries := re.findall(r"^=+ .* in [\d.]+s.*=+$", text, re.MULTILINE):
                ended, day = True, date.fromtimestamp(log.stat().st_mtime)
                runs[release][part] = {"date": day.isoformat(), "outcome": shorten_summary(summaries[-1])}
    if not ended:
        sys.exit(f"no log in {logs} has a summary of pytest's; run `make test-all` first")
    return {release: runs[release] for release in sorted(runs, key=releases.ALL.index)}


def save(file: Path, facts: dict[str, Any]) -> None:
    file.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "releases", nargs="*", metavar="RELEASE", help="releases to test (default: all of releases.toml)"
    )
    parser.add_argument("--doctor", action="store_true", help="only run doctor; keep the recorded test results")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="only record the results of `make test-all`")
    options = parser.parse_args()
    records: dict[str, Any] = json.loads(pages.FOUND.read_text())
    wanted = [] if options.record else options.releases or releases.ALL
    if unknown := [release for release in wanted if release not in releases.ALL]:
        parser.error(f"unknown release {', '.join(unknown)}; add it to releases.toml")
    if options.doctor and (untested := [release for release in wanted if release not in records]):
        parser.error(f"--doctor: {', '.join(untested)} was never tested; run it without --doctor")
    if options.record:
        save(pages.WHOLE, read_test_all(options.record, json.loads(pages.WHOLE.read_text())))
    for release in wanted:
        with install_release(release) as place:
            print(f"SGLang {release}: running doctor{'' if options.doctor else ' and tests'}", flush=True)
            tests = records[release]["tests"] if options.doctor else run_tests(release, place)
            records[release] = {**run_doctor(release, place), "tests": tests}
        records = {name: records[name] for name in releases.ALL if name in records}
        save(pages.FOUND, records)
    for release in wanted:
        print("\n".join(describe_differences(release, records)))
    print("Pages written: " + (", ".join(pages.write()) or "none, all were up to date") + ". Check git diff.")
    if failed := [release for release in wanted if not has_passed(records[release]["tests"])]:
        sys.exit(f"tests failed on SGLang {', '.join(failed)}; their last lines are above")


def has_passed(tests: str) -> bool:
    """Return whether some tests passed and no test failed.

    :param tests: result of :func:`shorten_summary`.
    """
    return "passed" in tests and not re.search("failed|error", tests)


if __name__ == "__main__":
    main()
