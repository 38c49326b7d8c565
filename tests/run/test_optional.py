"""Errors name an install command that works for how this package was installed."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from tide_lm.run import optional

ROOT = Path(optional.__file__).parents[3]


class Installed:
    def __init__(self, record):
        self.record = record

    def read_text(self, name):
        assert name == "direct_url.json"
        return self.record and json.dumps(self.record)


@pytest.mark.parametrize(
    ("record", "command"),
    [
        (
            {"url": "file:///my%20code/tide", "dir_info": {"editable": True}},
            "pip install -e '/my code/tide[serve]'",
        ),
        ({"url": "file:///code/tide", "dir_info": {}}, "pip install '/code/tide[serve]'"),
        (
            {"url": "file:///a/tide_lm-1-py3-none-any.whl", "archive_info": {}},
            "pip install 'tide-lm[serve] @ file:///a/tide_lm-1-py3-none-any.whl'",
        ),
        (
            {"url": "https://host/tide", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'tide-lm[serve] @ git+https://host/tide@abc'",
        ),
        (None, "pip install 'tide-lm[serve]'"),  # from an index
    ],
    ids=["editable", "folder", "file", "git", "index"],
)
def test_an_extra_is_installed_from_where_the_package_is_from(monkeypatch, record, command):
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(record))
    assert optional.install("serve") == command


def test_a_source_tree_that_was_never_installed_is_installed_itself(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert optional.install("serve") == f"pip install -e '{ROOT}[serve]'"
    assert (ROOT / "pyproject.toml").exists()
