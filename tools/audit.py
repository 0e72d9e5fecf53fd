"""Asks a public database for known vulnerabilities of what requirements.lock pins (pip-audit).

    python tools/audit.py requirements.lock

Exits with 0: none are known; 1: some are, listed; 3: the database could not be asked, at least not about all.
A mirror of PyPI is often no such database: then pip-audit itself says that it found nothing, and ends with 0.
"""

from __future__ import annotations

import json
import subprocess
import sys

SECONDS = 300
UNKNOWN = 3


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", "--requirement", sys.argv[1], "--no-deps", "--disable-pip"]
    try:
        done = subprocess.run(
            [*command, "--format", "json", "--progress-spinner", "off"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return _unknown(f"no answer within {SECONDS} s")
    try:
        audited = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        lines = done.stderr.strip().splitlines()
        return _unknown(lines[-1] if lines else f"pip-audit ended with {done.returncode}")
    found = [(each, one) for each in audited for one in each.get("vulns", ())]
    for package, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}")
    skipped = [each for each in audited if "skip_reason" in each]
    print(f"{len(audited) - len(skipped)} packages audited, {len(found)} known vulnerabilities")
    if skipped and not found:
        return _unknown(f"{len(skipped)} packages, the first: {skipped[0]['skip_reason']}")
    return 1 if found else 0


def _unknown(why: str) -> int:
    print(f"not audited, the vulnerability database could not be asked: {why}", file=sys.stderr)
    return UNKNOWN


if __name__ == "__main__":
    sys.exit(main())
