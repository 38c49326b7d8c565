"""The built-in text: the documentation that every installation has."""

import ast
import subprocess
import sys

import pytest

from tide_lm.data import builtin


@pytest.fixture(scope="module")
def documents() -> dict[str, str]:
    return dict(builtin.documents())


def test_it_is_large_and_covers_python_and_the_packages(documents):
    assert sum(map(len, documents.values())) > 10_000_000
    assert {name.partition("/")[0] for name in documents} == {*builtin.PACKAGES, "python", "pydoc_data"}
    assert "The *with* statement is used to wrap the execution of a block" in " ".join(
        documents["pydoc_data/with"].replace('"', "*").split()
    )
    assert "Return an object to identify dataclass fields" in documents["python/dataclasses.py"]


def test_its_order_is_fixed_and_no_docstring_comes_twice(documents):
    names = [name for name in documents if not name.startswith("pydoc_data/")]
    assert names == sorted(names)
    seen: set[str] = set()
    for name, path in builtin.source_files()[:400]:
        fresh = set(builtin.docstrings(path)) - seen
        assert (name in documents) == bool(fresh)
        assert all(text in documents[name] for text in fresh)
        seen |= fresh


def test_nothing_is_imported_but_the_reference():
    code = """
import sys
from tide_lm.data import builtin
assert len(list(builtin.documents())) > 1000
print([name for name in builtin.PACKAGES if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_docstrings_are_those_a_parser_finds():
    found: set[str] = set()
    parsed: set[str] = set()
    for _, path in builtin.source_files()[::40]:
        found.update(builtin.docstrings(path))
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                parsed.add((ast.get_docstring(node) or "").strip())
    parsed = {text for text in parsed if len(text) >= builtin.SHORTEST}
    assert len(parsed) > 300
    assert len(found & parsed) > 0.98 * max(len(found), len(parsed))


LONG = "A sentence that is long enough to be kept as the documentation of something, escaped: "


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        (f'"""{LONG}"""\n', [LONG.strip()]),
        (f"# a comment\n\nr'''{LONG}\\d'''\n", [LONG + "\\d"]),
        (f'def f(\n    x,\n):  # why\n    """{LONG}\\x41.\n\n    More.\n    """\n', [LONG + "A.\n\nMore."]),
        (f'class C:\n\n    u"""{LONG}"quoted" \\"""\\" end"""\n', [LONG + '"quoted" """" end']),
        (f'class C:\n    """{LONG}\\N{{no such name}}"""\n', []),
        (f'x = """{LONG}"""\n', []),
        ('def f():\n    """Short."""\n', []),
        (f'def f():\n    """{LONG} that never ends\n' + '"" ' * 2000, []),
    ],
)
def test_docstrings_of_every_form(tmp_path, source, kept):
    path = tmp_path / "module.py"
    path.write_text(source, encoding="utf-8")
    assert list(builtin.docstrings(path)) == kept


def test_a_file_in_another_encoding_is_left_out(tmp_path):
    path = tmp_path / "module.py"
    path.write_bytes(f'# coding: latin-1\n"""{LONG}ä"""\n'.encode("latin-1"))
    assert list(builtin.docstrings(path)) == []
