"""Layers: kernels <- store <- engine <- runtime <- cli, integrations, convert. An import may point left, never right.

Read from the text of the sources (import, cimport, #include), so nothing has to be built.
"""
import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "warp_embed"

# layer: the layers it may use besides itself. "base" is what imports nothing of ours; "public" is what users import.
MAY_USE = {
    "base": set(),
    "kernels": {"base"},
    "store": {"kernels", "base"},
    "engine": {"kernels", "store", "base"},
    "runtime": {"kernels", "store", "engine", "base"},
    "public": {"kernels", "store", "engine", "runtime", "base", "convert"},
    "convert": {"kernels", "store", "runtime", "base"},             # never engine
    "cli": {"public", "runtime", "convert", "base"},                # a client like any other
    "integrations": {"public", "base"},
}
# First match wins; paths are relative to the repository, without suffix.
LAYER_OF = [
    (r"include/warp_embed/(status|target|cpu|kernels|pool)", "kernels"),
    (r"include/warp_embed/(record|platform|load|cache|watch|governor)", "store"),
    (r"include/warp_embed/latents", "engine"),
    (r"warp_embed/csrc/(kernels/.*|cpu|pool|os_\w+)", "kernels"),
    (r"warp_embed/csrc/(record|load|cache|platform|governor)\w*", "store"),
    (r"warp_embed/_kernels", "kernels"),
    (r"warp_embed/_(store|experts|governor)", "store"),
    (r"warp_embed/(errors|units|_version)", "base"),
    (r"warp_embed/(engine|runtime|convert|cli|integrations)(/.*)?", r"\1"),
    (r"warp_embed/__main__", "cli"),
    (r"warp_embed/_pyinstaller(/.*)?", "integrations"),
    (r"warp_embed(/__init__|/testing)?", "public"),
]
# A library used in one place only, so that replacing it stays a small change: module -> files that may import it.
HOMES = {
    "psutil": {"warp_embed/runtime/machine"},
    "platformdirs": {"warp_embed/runtime/paths"},
    "tiktoken": {"warp_embed/runtime/tokenizer"},
    "llguidance": {"warp_embed/runtime/structured"},
    "asyncio": {"warp_embed/runtime/aio"},
}
# Operating system headers stay behind platform.h and pool.h.
SYSTEM_HEADER = re.compile(r"(windows|unistd|pthread|fcntl|sched|io|process|sys/\w+|mach/.*)\.h$")
SYSTEM_FILES = re.compile(r"warp_embed/csrc/(platform|pool|cpu|os_)\w*$")

SOURCES = sorted(path for folder in (PACKAGE, ROOT / "include") for path in folder.rglob("*")
                 if path.suffix in {".py", ".pyx", ".pxd", ".c", ".h"}      # a stub imports for types only
                 and not (path.suffix == ".c" and path.with_suffix(".pyx").exists())
                 and PACKAGE / "include" not in path.parents)


def place(path):
    return path.relative_to(ROOT).with_suffix("").as_posix()


def layer(name):
    for pattern, value in LAYER_OF:
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(value)
    raise AssertionError(f"{name} belongs to no layer: move it, or add it to LAYER_OF with a reason")


def python_imports(path):
    """Modules that a .py imports when it runs, wherever the statement stands, as dotted absolute names."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for_types = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.If) and
                 ast.unparse(node.test) == "TYPE_CHECKING" for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[:-node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def cython_imports(path):
    """The same for a .pyx or .pxd, which `ast` cannot read."""
    text = re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(encoding="utf-8"), flags=re.S)
    text = re.sub(r"\(([^()]*)\)", lambda match: match[1].replace("\n", " "), text)      # names in brackets: one line
    for module, names in re.findall(r"^\s*from\s+(\S+)\s+c?import\s+(.*)", text, flags=re.M):
        assert not module.startswith("."), f"{path.name}: relative import of {module}"
        yield module
        yield from (f"{module}.{name.split(' as ')[0].strip()}" for name in names.split(","))
    for names in re.findall(r"^\s*c?import\s+([\w., ]+)", text, flags=re.M):
        yield from (name.split(" as ")[0].strip() for name in names.split(","))


def includes(path):
    """Headers that a C or Cython file includes."""
    pattern = r'^\s*#\s*include\s*[<"]([^">]+)' if path.suffix in {".c", ".h"} else r'cdef extern from\s*[<"]([^">]+)'
    return re.findall(pattern, path.read_text(encoding="utf-8"), flags=re.M)


def owner(module):
    """The file of ours that a dotted name means, as a place; None if it is not ours or only a name inside a module."""
    path = ROOT.joinpath(*module.split("."))
    if module.split(".")[0] != "warp_embed":
        return None
    if path.is_dir():
        return place(path / "__init__.py") if (path / "__init__.py").exists() else None
    return place(path) if any(path.with_suffix(end).exists() for end in (".py", ".pyx", ".pxd")) else None


def imports(path):
    if path.suffix == ".py":
        return set(python_imports(path))
    return set(cython_imports(path)) if path.suffix in {".pyx", ".pxd"} else set()


def used(path):
    """Places of ours that a file uses."""
    names = {owner(module) for module in imports(path)} - {None}
    for header in includes(path) if path.suffix in {".c", ".h", ".pyx", ".pxd"} else ():
        if header.startswith("warp_embed/"):
            names.add("include/" + header.removesuffix(".h"))
        elif (path.parent / header).exists():
            names.add(place((path.parent / header).resolve()))
    # `from warp_embed import _kernels` names the package only to reach a module of it.
    if len(names) > 1 and place(path) != "warp_embed/__init__" and layer(place(path)) not in {"cli", "integrations"}:
        names.discard("warp_embed/__init__")
    return names


@pytest.mark.parametrize("path", SOURCES, ids=[path.relative_to(ROOT).as_posix() for path in SOURCES])
def test_arrows_point_inward(path):
    own = layer(place(path))
    allowed = MAY_USE[own] | {own}
    wrong = {name: layer(name) for name in used(path) if layer(name) not in allowed}
    assert not wrong, f"{place(path)} is of layer '{own}' and may use {sorted(allowed)}"


@pytest.mark.parametrize("module", HOMES)
def test_a_library_has_one_home(module):
    users = {place(path) for path in SOURCES if any(name.split(".")[0] == module for name in imports(path))}
    assert users <= HOMES[module]


def test_the_c_core_knows_neither_python_nor_the_system():
    for path in SOURCES:
        if path.suffix in {".c", ".h"}:
            names = includes(path)
            assert "Python.h" not in names, path
            system = [name for name in names if SYSTEM_HEADER.match(name)]
            assert not system or SYSTEM_FILES.match(place(path)), f"{place(path)} includes {system}"


def test_extensions_do_not_share_c_sources():
    """A .c linked twice would be two pools or two forced kernel levels. Stateless platform code may be."""
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    names = re.findall(r'"warp_embed/csrc/(\w+\.c)"', text)
    assert len(names) == len(set(names))


def test_the_reader_sees_each_kind_of_import(tmp_path):
    """The test of the test: a wrong arrow in each kind of file is found."""
    assert layer("warp_embed/csrc/kernels/x86_avx2") == "kernels" and layer("warp_embed/convert/vq") == "convert"
    with pytest.raises(AssertionError, match="no layer"):
        layer("warp_embed/utils")
    pyx = tmp_path / "a.pyx"
    pyx.write_text("from warp_embed._store cimport (Trunk as T,\n    File)\nimport numpy as np\n"
                   "cimport warp_embed.engine.structs\n"
                   'cdef extern from "warp_embed/pool.h" nogil:\n    pass\n')
    assert {"warp_embed._store", "warp_embed._store.File", "numpy", "warp_embed.engine.structs"} <= imports(pyx)
    assert includes(pyx) == ["warp_embed/pool.h"]
