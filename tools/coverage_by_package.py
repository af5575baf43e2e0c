"""Statement coverage of every package, from the report of a test run.

    pytest --cov=vivavoce --cov-report=json -m "full or not full"
    python tools/coverage_by_package.py [coverage.json]

Subprocesses (servers, replicas, commands) and TorchScript are not traced, and GPU code counts as missed without a GPU.
"""

import json
import sys
from collections import Counter
from pathlib import Path


def packages(report: Path) -> dict[str, tuple[int, int]]:
    """Covered statements and all statements of each package; top-level modules count as `vivavoce`."""
    covered, total = Counter[str](), Counter[str]()
    for name, file in json.loads(report.read_text(encoding="utf8"))["files"].items():
        parts = Path(name).parts[1:]
        package = parts[0] if len(parts) > 1 else "vivavoce"
        covered[package] += file["summary"]["covered_lines"]
        total[package] += file["summary"]["num_statements"]
    return {name: (covered[name], total[name]) for name in sorted(total)}


def main() -> None:
    rows = packages(Path(sys.argv[1] if len(sys.argv) > 1 else "coverage.json"))
    print("| package | statements | covered |\n|---|---|---|")
    for name, (covered, total) in [*rows.items(), ("all", tuple(map(sum, zip(*rows.values(), strict=True))))]:
        print(f"| {name} | {total:,} | {covered / max(1, total):.0%} |")


if __name__ == "__main__":
    main()
