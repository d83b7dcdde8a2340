"""The measured tables of README.md, docs/results.md and docs/parallel.md, made from the code and
the result files.

  python benchmarks/tables.py           write them
  python benchmarks/tables.py --check   exit 1 if a file is not up to date

`support` comes from the registry; `results` and docs/results.md from benchmarks/results/<gpu>/
<op>.jsonl, where the newest row of a cell counts and a peer counts only from the same run as ours.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from parallel_page import parallel_tables
from readme_tables import results_tables
from result_rows import load, markdown
from results_page import page

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    """Update the files, or check them."""
    parser = argparse.ArgumentParser(description="The tables of README.md and the documents.")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    check = parser.parse_args(argv).check
    stale = 0
    for path, text in documents(ROOT).items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale = 1
        if check:
            name = path.relative_to(ROOT)
            print(f"{name} is stale; run python benchmarks/tables.py", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return stale if check else 0


def documents(root: Path) -> dict[Path, str]:
    """Each generated file and what it should hold."""
    rows = load(root / "benchmarks" / "results")
    readme = (root / "README.md").read_text(encoding="utf-8")
    readme = replace_block(readme, "support", support_table())
    readme = replace_block(readme, "results", results_tables(rows))
    parallel = root / "docs" / "parallel.md"
    text = replace_block(parallel.read_text(encoding="utf-8"), "measured", parallel_tables(rows))
    return {root / "README.md": readme, root / "docs" / "results.md": page(rows), parallel: text}


def replace_block(text: str, name: str, body: str) -> str:
    """`text` with what stands between `<!-- name:begin -->` and `<!-- name:end -->` replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"tables: the text must hold {begin} ... {end}, got neither or one")
    return f"{head}{begin}\n{body.strip()}\n{end}{tail}"


def support_table() -> str:
    """op x implementation x architecture x dtype, from the registry."""
    from ridgeline.cli import problems  # noqa: F401  (registers every op)
    from ridgeline.core import registry

    rows = [
        (op, f"`{impl.name}`", ", ".join(map(arch_text, impl.archs)), ", ".join(impl.dtypes),
         impl.summary)
        for op in registry.ops()
        for impl in registry.impls(op)
    ]  # fmt: skip
    return markdown(("op", "impl", "runs on", "dtypes", "what it is"), rows)


def arch_text(family: str) -> str:
    """ "sm80" -> "sm80 and later"; "=sm90" -> "sm90"."""
    if family.startswith("="):
        return family[1:]
    return f"{family} and later" if family.startswith("sm") else family


if __name__ == "__main__":
    sys.exit(main())
