"""Fill README's results from the files under bench/.

    python tools/update_readme.py            rewrite what stands between the markers
    python tools/update_readme.py --check    exit 1 where it differs from the files

A results file is what `m3compile bench --json` and the tools beside this one write. Read are
`rows`, `batching_rows` and `traffic_rows`, lists of flat objects whose keys are the columns, in
order; `circumstances`, a flat object that says on what, when and from which commit; and `title`.
Other keys are for other readers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"
NO_RESULTS = "No results are committed yet."


def render(folder: Path) -> str:
    """Markdown of every results file of a folder, by name; a sentence where there is none.

    Raises:
        ValueError: a file is not such an object; names it.
    """
    parts = [_render_file(path) for path in sorted(folder.glob("*.json"))]
    return "\n\n".join(parts) if parts else NO_RESULTS


def _render_file(path: Path) -> str:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict) or not document.get("rows"):
        raise ValueError(f"{path}: found no rows, expected a list of objects")
    tables = []
    for key in ("rows", "batching_rows", "traffic_rows"):
        rows = document.get(key) or []
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path}: {key} is not a list of objects")
        if rows:
            tables.append(_table(rows))
    facts = document.get("circumstances") or {}
    known = (f"{key} {_cell(value)}" for key, value in facts.items() if value is not None)
    where = "; ".join(known)
    heading = f"**{document.get('title', path.stem)}**" + (f" ({where})" if where else "")
    return "\n\n".join([heading, *tables])


def _table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [
        _row(columns),
        _row(["---"] + ["---:"] * (len(columns) - 1)),
        *(_row([_cell(row.get(column)) for column in columns]) for row in rows),
    ]
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def updated(readme: str, results: str) -> str:
    """The README with `results` between its markers.

    Raises:
        ValueError: the markers are missing, given twice or in the wrong order.
    """
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in head + tail:
        raise ValueError(f"README.md: expected {BEGIN} and then {END}, once each")
    return f"{head}{BEGIN}\n{results}\n{END}{tail}"


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if words not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    try:
        wanted = updated(readme, render(ROOT / "bench"))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if wanted == readme:
        return 0
    if words:
        print("error: README.md differs from bench/; run tools/update_readme.py", file=sys.stderr)
        return 1
    path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
