"""Is every file and function small enough to read? Prints what is not, and exits with 1.

    python tools/check_sizes.py [--longest N]

Lines of a function are those that are neither blank, comment nor docstring. Complexity is 1 plus the branches.
"""
from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("warp_embed", "include", "tests", "tools", "examples", "benchmarks")
FILE_LINES = {".py": 400, ".pyi": 400, ".pyx": 500, ".pxd": 500, ".c": 500, ".h": 150}
CODE_IN_HEADERS = "warp_embed/csrc/"     # what several C files include there is code, and counts as such
FUNCTION_LINES = 100
COMPLEXITY = 30
EXCEPTIONS = {"include/warp_embed/kernels.h": 250}      # the table of kernels: every formula on one page

PYTHON_DEF = re.compile(r"(\s*)(?:async\s+)?(?:def|cdef|cpdef)\b[^=#]*?(\w+)\s*\(")
STRING = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
PYTHON_BRANCH = re.compile(r"\b(if|elif|for|while|except|and|or|case)\b")
C_DEF = re.compile(r"^(?!typedef|struct|enum|union|#|extern \")[A-Za-z_].*?(\w+)\s*\(")
C_BRANCH = re.compile(r"\b(?:if|for|while|case)\b|&&|\|\||\?")


def sources() -> list[Path]:
    """The files that people write: no generated C, nothing that a build copied."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in FILE_LINES)
    return sorted(path for path in paths if path.name != "_version.py" and "build" not in path.parts
                  and not (path.suffix == ".c" and path.with_suffix(".pyx").exists()))


def blank(match: re.Match[str]) -> str:
    """What takes as many lines as the match and says nothing."""
    return "\n" * match[0].count("\n")


def without_comments(text: str) -> list[str]:
    """The lines of Python or Cython code, docstrings, comments and what strings say taken out."""
    text = re.sub(r'(?s)""".*?"""', blank, text)
    return [re.sub(r"#.*", "", re.sub(STRING, '""', line)).rstrip() for line in text.splitlines()]


def python_functions(text: str) -> Iterator[tuple[str, list[str]]]:
    """(name, lines) of each function of Python or Cython code: all lines that are indented deeper than its `def`."""
    lines = without_comments(text)
    for start, line in enumerate(lines):
        match = PYTHON_DEF.match(line)
        if not match:
            continue
        indent, body, depth = len(match[1]), [line], line.count("(") - line.count(")")
        for following in lines[start + 1:]:
            if following and depth <= 0 and len(following) - len(following.lstrip()) <= indent:
                break
            depth += following.count("(") - following.count(")")
            body.append(following)
        if len(body) > 1 or line.endswith(":"):
            yield match[2], [line for line in body if line]


def c_functions(text: str) -> Iterator[tuple[str, list[str]]]:
    """(name, lines) of each function of C code: from a line at the margin to the closing brace at the margin."""
    text = re.sub(r"(?s)/\*.*?\*/", blank, text)
    name, body = "", []
    for line in (re.sub(r"//.*", "", line).rstrip() for line in text.splitlines()):
        if not body:
            match = C_DEF.match(line)
            if match:
                name, body = match[1], [line]
        elif line:
            body.append(line)
        if body and (line == "}" or (line.endswith(";") and not any("{" in each for each in body))):
            if line == "}":
                yield name, body
            body = []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longest", type=int, default=0, metavar="N", help="also print the N longest functions")
    arguments = parser.parse_args()
    complaints, functions = [], []
    for path in sources():
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        kind = ".c" if name.startswith(CODE_IN_HEADERS) else path.suffix
        limit = EXCEPTIONS.get(name, FILE_LINES[kind])
        if text.count("\n") > limit:
            complaints.append(f"{name}: {text.count(chr(10))} lines, the limit is {limit}")
        in_c = path.suffix in {".c", ".h"}
        for function, lines in (c_functions if in_c else python_functions)(text):
            branches = 1 + len((C_BRANCH if in_c else PYTHON_BRANCH).findall("\n".join(lines)))
            functions.append((len(lines), branches, f"{name}: {function}"))
    for length, branches, name in functions:
        if length > FUNCTION_LINES:
            complaints.append(f"{name}: {length} lines, the limit is {FUNCTION_LINES}")
        if branches > COMPLEXITY:
            complaints.append(f"{name}: complexity {branches}, the limit is {COMPLEXITY}")
    for length, branches, name in sorted(functions, reverse=True)[:arguments.longest]:
        print(f"{length:4} lines, complexity {branches:3}  {name}")
    print("\n".join(complaints) or f"{len(functions)} functions in {len(sources())} files, all within their limits")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
