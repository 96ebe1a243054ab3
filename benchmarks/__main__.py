"""All benchmarks by one command.

    python -m benchmarks                     # lists them
    python -m benchmarks NAME [ARGUMENTS]    # runs one; --help says what it takes

Tables that people read are committed in ``benchmarks/results``; the workflow keeps the others.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent


def first_lines() -> dict[str, str]:
    """Return what each benchmark says of itself; none is imported."""
    found = {}
    for file in sorted(HERE.glob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        if file != Path(__file__) and any(getattr(n, "name", "") == "main" for n in tree.body):
            found[file.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def main() -> None:
    names = first_lines()
    name, *arguments = sys.argv[1:] or [""]
    if name not in names:
        listed = "".join(f"  {known:16} {line}\n" for known, line in names.items())
        wrong = f"there is no benchmark {name!r}\n" if name else ""
        raise SystemExit(f"{wrong}python -m benchmarks NAME [ARGUMENTS]\n\n{listed}")
    sys.argv = [f"python -m benchmarks {name}", *arguments]
    importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
