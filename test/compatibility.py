"""Install every supported engine release in turn, ask it what each change says, run the tests that show it, and write
docs/compatibility.md.

    python test/compatibility.py                    # all releases: about half an hour, and 10 GB of disk at a time
    python test/compatibility.py 0.5.23 0.5.24      # some; the others keep what was found before
    python test/compatibility.py --doctor           # only doctor; what the tests showed before is kept
    python test/compatibility.py --render           # only the page, from docs/compatibility.json

Needs uv. Environments are made below .venvs/compatibility and removed again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOUND = ROOT / "docs" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
RELEASES = (
    *("0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1", "0.5.16"),
    *("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
)
# What the engine's own pins leave open and breaks it, or what no public package index has.
ALSO = {"0.5.11": ["kernels==0.12.3"], "0.5.12": ["kernels==0.12.3"], "0.5.12.post1": ["kernels==0.12.3"]}
LEFT_OUT = ("cuda-tile",)

# One test or two for each line of the table, on the release's own model and functions.
TESTS = (
    "bit_identical_and_one or overwrites_a_residual or withdrawn_in or run_last or loaded_and_an_updated or "
    "small_limit_loses or in_place_as_on"
)

HEAD = """# Compatibility

Made by `python test/compatibility.py` from an installation of every release: what `sglang-moe-patches doctor` says, and
how many of the tests that show it passed there (`pytest test/engine -k "..."`, on the CPU, with the reference
kernels). A test compares this page with the release that it runs on; `make test` runs all tests on the releases in
**bold**.

*applied*: this package does it. *native*: the engine does. *hardened*: the engine does, and this package closes a hole
in it. *unsupported*: left alone, with the reason.
"""

NOTES = """
## What the table rests on

- **output-buffer.** Every release with an output buffer of its own offers the input of a layer that starts without a
  residual, which then *is* the residual: run with `first_k_dense_replace: 0` and the norm in place as on a GPU, each of
  them answers differently with its buffer than without, and patched as without
  (`test_the_engines_own_buffer_overwrites_a_residual_and_ours_keeps_it`).
- **deferred-shared-experts.** On every release the routed experts are seen to run before the shared ones, with the
  same answers (`test_shared_experts_run_last_with_the_same_result`): by this package on 0.5.11, by the engine since.
- **nvfp4-weights.** The engine's function has the same parameters and the same place on every release; loading and
  updating weights give the engine's own bytes. From 0.5.13 on the engine allocates no swizzled placeholders itself.
- **mori-input-truncation.** Where the engine cuts: `MoriEPMoE.run_moe_core` (0.5.11 to 0.5.12.post1), AITER's runner,
  which reads the limit from the environment (0.5.13 to 0.5.21; from 0.5.19 on also a bound for decoding), the
  dispatcher (from 0.5.22 on). A limit that is too small loses rows on all of them, and none with this package.
- **cutedsl-sizing.** The engine keeps one set of buffers per layer up to 0.5.15.post1; FlashInfer 0.6.14, which 0.5.16
  and later bring, keeps none and refuses no forward ([cutedsl-sizing.md](cutedsl-sizing.md)). The tests counted above
  are not about it; its own run on the releases in bold.
- Releases 0.5.18 to 0.5.22 name a package that its vendor's own index alone has (`cuda-tile`); it was left out, and
  nothing here imports it.
"""


def environment_of(release: str) -> Path:
    return ROOT / ".venvs" / "compatibility" / release


def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")}
    return subprocess.run(command, cwd=ROOT, env={**environment, **more}, capture_output=True, text=True, check=False)


def install(release: str) -> Path:
    """A new environment with this release and this package.

    :raises SystemExit: it could not be installed; with the installer's own words.
    """
    place = environment_of(release)
    override = place.parent / "left-out.txt"
    override.parent.mkdir(parents=True, exist_ok=True)
    override.write_text("".join(f'{name}; sys_platform == "never"\n' for name in LEFT_OUT))
    made = run(["uv", "venv", "-q", "--clear", "--python", sys.executable, str(place)])
    target = ["uv", "pip", "install", "-q", "--python", str(place / "bin/python"), "--override", str(override)]
    if made.returncode == 0:
        made = run([*target, f"sglang=={release}", *ALSO.get(release, []), "-e", ".", "--group", "dev"])
    if made.returncode:
        sys.exit(f"installing SGLang {release} failed:\n{made.stderr}")
    return place


def doctor(release: str, place: Path) -> dict[str, Any]:
    """What doctor says of the release installed in ``place``."""
    binaries = place / "bin"
    asked = run([str(binaries / "sglang-moe-patches"), "doctor", "--json"])
    if not asked.stdout.strip():
        sys.exit(f"doctor failed on SGLang {release}:\n{asked.stderr}")
    found = json.loads(asked.stdout)
    return {
        "torch": found["torch"].split("+")[0],
        "changes": {change["name"]: [change["status"], change["reason"]] for change in found["changes"]},
    }


def test(release: str, place: Path) -> str:
    """The outcome of the tests on the release installed in ``place``."""
    binaries = place / "bin"
    tested = run(
        [
            *(str(binaries / "sglang-moe-patches"), "exec", "--reference-kernels", "--"),
            *(str(binaries / "python"), "-m", "pytest", "-q", "test/engine", "-k", TESTS, "--deselect"),
            "test/engine/test_servers.py",
        ],
        ENGINE=release,
    )
    summary = tested.stdout.strip().splitlines()[-1] if tested.stdout.strip() else tested.stderr.strip()[-200:]
    if tested.returncode:
        print(tested.stdout[-6000:], file=sys.stderr)
    return summary.split(" in ")[0].replace(", ", " · ")


def render(found: dict[str, Any], in_ci: list[str]) -> str:
    """The page. ``in_ci``: the releases on which `make test` runs everything."""
    names = list(next(iter(found.values()))["changes"])
    lines = [HEAD, "| SGLang | torch | " + " | ".join(names) + " | tests |", "| --- " * (len(names) + 3) + "|"]
    reasons = []
    for release in sorted(found, key=RELEASES.index):
        facts = found[release]
        shown = f"**{release}**" if release in in_ci else release
        lines.append(
            f"| {shown} | {facts['torch']} | "
            + " | ".join(facts["changes"][name][0] for name in names)
            + f" | {facts['tests'].split(' · ')[0] if 'failed' not in facts['tests'] else facts['tests']} |"
        )
        reasons += [f"- {release}, {n}: {reason}" for n, (_, reason) in facts["changes"].items() if reason]
    if reasons:
        lines += ["", *reasons]
    return "\n".join(lines) + "\n" + NOTES


def releases_in_ci() -> list[str]:
    """``ENGINES`` of the Makefile."""
    for line in (ROOT / "Makefile").read_text().splitlines():
        name, _, value = line.partition("?=")
        if name.strip() == "ENGINES":
            return value.split()
    raise ValueError("the Makefile has no ENGINES")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="default: all of " + ", ".join(RELEASES))
    parser.add_argument("--doctor", action="store_true", help="only ask doctor; keep what the tests showed before")
    parser.add_argument("--render", action="store_true", help="only write the page from what was found before")
    options = parser.parse_args()
    if options.doctor and (untested := set(options.releases or RELEASES) - set(json.loads(FOUND.read_text()))):
        parser.error(f"--doctor: {', '.join(sorted(untested))} was never tested; run it without --doctor")
    if unknown := set(options.releases) - set(RELEASES):
        parser.error(f"unknown release {', '.join(sorted(unknown))}; add it to RELEASES in {Path(__file__).name}")
    found: dict[str, Any] = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    for release in [] if options.render else options.releases or RELEASES:
        print(f"SGLang {release}: installing", flush=True)
        try:
            place = install(release)
            print(f"SGLang {release}: looking and testing", flush=True)
            outcome = found[release]["tests"] if options.doctor else test(release, place)
            found[release] = {**doctor(release, place), "tests": outcome}
        finally:
            shutil.rmtree(environment_of(release), ignore_errors=True)
        print(f"SGLang {release}: {found[release]}", flush=True)
        found = {name: found[name] for name in sorted(found, key=RELEASES.index)}
        FOUND.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(render(found, releases_in_ci()))


if __name__ == "__main__":
    main()
